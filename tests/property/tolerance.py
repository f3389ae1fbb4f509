"""Comparison relative to the sum of absolute terms.

A result may cancel, so an error is measured against the size of what was added up, never against
the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

TABLE: dict[str, dict[torch.dtype, float]] = {
    # A sum of products, relative to the sum of absolute terms. Worst seen 4e-3 of it.
    "contraction": {torch.float64: 1e-12},
    # Through a whole float64 decoder of our own, likewise. Worst seen 1e-2 of it.
    "model": {torch.float64: 1e-10},
    # Through a model of transformers, likewise; float64 ones cast norms, softmax and rotary tables
    # to float32 inside. Worst seen: 1.1e-6 (float64) and 5e-6 (float32) over 400 drawn models.
    "library": {torch.float64: 5e-6, torch.float32: 5e-5},
    # All values of a batch in narrow arithmetic: norm of the error by the norm of the exact ones.
    "norm": {torch.float32: 1e-4, torch.bfloat16: 6e-2},  # seen: 5.1e-2
    # 1 - Spearman's correlation with the exact order.
    "rank": {torch.float32: 1e-4, torch.bfloat16: 5e-2},
}
"""Kind of comparison -> dtype of the arithmetic -> tolerance; narrow dtypes have no others.

The certificate has a table of its own (``alphatoken.certificate.expected``): what is promised to
users is not what the tests believe.
"""


def allowed(kind: str, dtype: torch.dtype) -> float:
    """The tolerance of ``TABLE``."""
    return TABLE[kind][dtype]


def close(
    actual: Tensor | float,
    expected: Tensor | float,
    scale: Tensor | float,
    tol: float,
    *,
    name: str = "",
) -> None:
    """Assert ``|actual - expected| <= tol * scale`` for every element.

    Args:
        actual: what the library computed.
        expected: what the oracle says; the same shape.
        scale: sum of absolute terms, one number or broadcastable to the shape. Where it is 0
            the two must be equal.
        tol: relative tolerance, 1e-12 for contractions, 1e-10 through whole models.
        name: what is compared, for the message.

    Raises:
        AssertionError: an element is farther off, or NaN or Inf on any of the three sides, or
            the shapes differ.
    """
    # as_tensor alone would read a Python number as float32.
    a, e, s = (
        torch.as_tensor(x, dtype=torch.float64, device="cpu").detach()
        for x in (actual, expected, scale)
    )
    label = name or "comparison"
    assert a.shape == e.shape, f"{label}: shape {tuple(a.shape)} against {tuple(e.shape)}"
    for side, tensor in (("actual", a), ("expected", e), ("scale", s)):
        assert bool(torch.isfinite(tensor).all()), f"{label}: {side} holds NaN or Inf: {tensor}"
    assert bool((s >= 0).all()), f"{label}: a scale is a sum of absolute terms, got {s}"
    if a.numel() == 0:
        return
    error, allowed = (a - e).abs(), (tol * s).expand(a.shape)
    ratio = torch.where(error == 0, 0.0, error / allowed).flatten()
    worst = int(ratio.argmax())
    assert float(ratio[worst]) <= 1, (
        f"{label}: off by {float(error.flatten()[worst]):.3e}, allowed "
        f"{float(allowed.flatten()[worst]):.3e} (tolerance {tol:g} of scale), ratio "
        f"{float(ratio[worst]):.3g}, element {worst} of "
        f"{tuple(a.shape)}: actual {float(a.flatten()[worst])!r}, "
        f"expected {float(e.flatten()[worst])!r}"
    )
