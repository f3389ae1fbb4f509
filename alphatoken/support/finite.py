"""Refusal of numbers that are not finite: the first one of a batch, by row and token."""

from __future__ import annotations

from jaxtyping import Bool, Shaped
from torch import Tensor

from alphatoken.errors import NumericalError

__all__ = ["refuse_first"]


def refuse_first(
    bad: Bool[Tensor, "b t"], values: Shaped[Tensor, "b t"], what: str, *, why: str, remedy: str
) -> None:
    """Raise NumericalError for the first number of a batch that is ``bad``, by row and token.

    ``what`` is wrong, ``why`` and ``remedy`` are as in :class:`AlphaTokenError`.
    """
    if bool(bad.any()):
        row, index = bad.nonzero()[0].tolist()
        got = f"{float(values.detach()[row, index])} at row {row}, token {index}"
        raise NumericalError(what, got=got, why=why, remedy=remedy)
