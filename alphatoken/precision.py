"""The one rule on arithmetic: never accumulate in less than float32."""

from __future__ import annotations

import torch

__all__ = ["wide"]


def wide(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype to accumulate in: float64 if any input is, else float32.

    bfloat16 and float16 inputs are widened; a float64 model stays exact to rounding.
    """
    return torch.float64 if torch.float64 in dtypes else torch.float32
