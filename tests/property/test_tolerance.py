"""The comparison in itself: it must be able to fail."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.property.tolerance import close

NAN, INF = float("nan"), float("inf")
ONES = torch.ones(2, 2, dtype=torch.float64)
SMALL = torch.full((2,), 1e-13, dtype=torch.float64)
EDGE = torch.tensor([1.0, 1e-3], dtype=torch.float64)


def numbers(bad: float) -> torch.Tensor:
    return ONES.index_fill(0, torch.tensor([1]), bad)


@pytest.mark.parametrize(
    ("actual", "expected", "scale", "tol", "said"),
    [
        (ONES, ONES, ONES, 1e-12, ""),
        (ONES * (1 + 1e-9), ONES, ONES, 1e-10, "off by"),
        (ONES * (1 + 1e-9), ONES, ONES, 1e-12, "off by"),
        *((numbers(bad), ONES, ONES, 1e-10, "actual holds NaN or Inf") for bad in (NAN, INF, -INF)),
        *((ONES, numbers(bad), ONES, 1e-10, "expected holds NaN or") for bad in (NAN, INF, -INF)),
        *((ONES, ONES, numbers(bad), 1e-10, "scale holds NaN or Inf") for bad in (NAN, INF, -INF)),
        (1.0 + 1e-12, 1.0, 1.0, 1e-13, "off by"),  # numbers are compared in float64
        (SMALL, 0 * SMALL, 1.0, 1e-12, ""),
        (SMALL, 0 * SMALL, EDGE, 1e-12, "element 1 "),
        (0.0, 0.0, 0.0, 1e-12, ""),
        (1e-300, 0.0, 0.0, 1e-12, "ratio inf"),  # a scale of zero asks for equality
        (torch.zeros(2), torch.zeros(1), 1.0, 1e-12, "shape"),
        (torch.zeros(2), torch.zeros(2), -1.0, 1e-12, "absolute terms"),
    ],
)
def test_teeth(actual: Any, expected: Any, scale: Any, tol: float, said: str) -> None:
    with pytest.raises(AssertionError, match=said) if said else nullcontext():
        close(actual, expected, scale, tol)
