"""Tolerances of right code against an oracle: one table, by the narrowest arithmetic in use.

Every number is relative to the sum of the absolute terms of the entry that is compared (a token's
component, a parameter's matrix), never to a value that may cancel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["TOLERANCES", "Narrowest", "tolerance_of"]

TOLERANCES: dict[str, float] = {
    "float64": 1e-10,  # right code: 1e-13 on drawn decoders that are float64 throughout
    "float64 over float32": 1e-6,  # 1.6e-7
    "float32": 5e-5,  # 1.3e-6; 3.5e-6 on SmolLM2-135M
    "float16": 5e-3,  # 1.4e-3; 2.3e-3 under label through a mixture of experts
    "bfloat16": 2.2e-2,  # 2.0e-2, Phi-3's causal part; the oracle's own two direct parts 1.4e-2
}
"""By the dtype of the weights; "float64 over float32" where a float64 model rounds to float32
inside, as the norms and rotary tables of transformers do. Beside each the worst error of right code
that was measured, on some fourteen tiny architectures with three draws and six estimators each. A
router that flips between two forwards in bfloat16 is beyond all tolerance, and is meant to be."""

_WIDTH = {torch.float64: 3, torch.float32: 2, torch.float16: 1, torch.bfloat16: 0}


class Narrowest(TorchDispatchMode):
    """Sees every operation inside the context; ``dtype`` is the narrowest float that came out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at its results."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.dtype in _WIDTH and leaf.dim() > 0:
                self.dtype = min(self.dtype, leaf.dtype, key=lambda dtype: _WIDTH[dtype])
        return out


def tolerance_of(weights: torch.dtype, inside: torch.dtype) -> tuple[str, float]:
    """(row, tolerance) for a model of these weights whose forward rounds to ``inside``."""
    narrow = min(weights, inside, key=lambda dtype: _WIDTH.get(dtype, 0))
    row = str(narrow).removeprefix("torch.")
    if weights == torch.float64 and narrow == torch.float32:
        row = "float64 over float32"
    return row, TOLERANCES.get(row, TOLERANCES["bfloat16"])
