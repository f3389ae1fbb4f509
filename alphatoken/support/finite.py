"""One way to refuse a number that is none: the first bad one of a batch, by row and token."""

from __future__ import annotations

from jaxtyping import Bool, Shaped
from torch import Tensor

from alphatoken.errors import NumericalError

__all__ = ["refuse_first"]


def refuse_first(
    bad: Bool[Tensor, "b t"], values: Shaped[Tensor, "b t"], what: str, *, why: str, remedy: str
) -> None:
    """Raise if a number of a batch is bad; the message names the first one.

    Args:
        bad: True where a number is refused.
        values: the numbers.
        what: is wrong; why it matters; what helps: as in :class:`AlphaTokenError`.
        why: see there.
        remedy: see there.

    Raises:
        NumericalError: with the number, its row and its token.
    """
    if bool(bad.any()):
        row, index = bad.nonzero()[0].tolist()
        got = f"{float(values.detach()[row, index])} at row {row}, token {index}"
        raise NumericalError(what, got=got, why=why, remedy=remedy)
