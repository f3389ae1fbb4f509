"""Contraction of errors with each side of M over all uses: values by position of use.

What comes out are column sums of Psi (docs/notation.md): a number for every position at which the
scored weights were used. Parameters are looked up by the names of their places, never by identity:
where weights are sharded, a module holds another object inside a forward than outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from alphatoken.estimate import contraction
from alphatoken.estimate.estimators import TokenErrors
from alphatoken.model.capture import Recorder
from alphatoken.support.precision import full_precision, wide

__all__ = [
    "ColumnSums",
    "Columns",
    "Gather",
    "contract_columns",
    "uses_by_weight",
]


@dataclass(frozen=True)
class Columns:
    """Values by position of use (b, t): the direct and the causal columns for one direction."""

    direct: Tensor
    causal: Tensor


Gather = Callable[[str, Tensor], Tensor]
"""(parameter name, this process's part) -> the whole matrix."""


class ColumnSums:
    """Contracts errors one by one with each side of M, in whatever order they come.

    ``stream_errors`` hands them over in the order of the backward, the other way in that of the
    scope, and floating-point sums depend on the order. So the result of each use, (b, t) numbers,
    is kept, and all are summed in the scope's order at the end: the bits are those of
    ``contract_columns``.

    Args:
        recorder: the recorded forward.
        sides: of M, each by parameter name.
        names: place of a parameter (``weight_name`` of a linear) -> its name among the parameters
            in scope; tied places have one name.

    Attributes:
        by_use: of each side, the values (b, t) of each use by ("direct" or "causal", its index).
    """

    def __init__(
        self,
        recorder: Recorder,
        sides: Sequence[Mapping[str, Tensor]],
        names: Mapping[str, str],
    ) -> None:
        self._recorder, self._sides, self._names = recorder, sides, names
        self.by_use: list[dict[tuple[str, int], Tensor]] = [{} for _ in sides]

    @full_precision
    def add(self, part: str, index: int, error: Tensor) -> None:
        """Contract the ("direct" or "causal") error of one use.

        Hooks call this inside the backward, with each error as it comes by. ``full_precision``
        matters there: the user may have asked for values inside ``torch.autocast``.
        """
        for side, by_use in zip(self._sides, self.by_use, strict=True):
            name = self._names[self._recorder.linears[index].linear.weight_name]
            by_use[part, index] = self.contract(index, error, side[name])

    def contract(self, index: int, error: Tensor, whole: Tensor) -> Tensor:
        """The values (b, t) of one use; ``whole`` is its matrix of one side."""
        use = self._recorder.linears[index]
        linear = use.linear
        # M has the stored layout, while the contraction wants (d_out, d_in).
        m = whole.mT if linear.transposed else whole
        if use.experts is not None:
            return contraction.contract_experts(error, use.x, use.experts, m)
        return contraction.contract(error, use.x, m)

    def columns(self) -> list[Columns]:
        """The sums over all uses, for each side."""
        order = [i for _, uses in uses_by_weight(self._recorder, self._names) for i in uses]
        like, sums = self._recorder.linears[0].x, []
        for by_use in self.by_use:
            dtype = wide(*(value.dtype for value in by_use.values()))
            zero = torch.zeros(like.shape[:2], dtype=dtype, device=like.device)
            parts = {}
            for part in ("direct", "causal"):  # one that was not computed is zero
                values = [by_use[part, i] for i in order if (part, i) in by_use]
                parts[part] = reduce(torch.add, values).to(dtype) if values else zero
            sums.append(Columns(**parts))
        return sums


@full_precision
def contract_columns(
    recorder: Recorder,
    errors: TokenErrors,
    sides: Sequence[Mapping[str, Tensor]],
    names: Mapping[str, str],
    gather: Gather | None = None,
) -> list[Columns]:
    """Contract both parts with each side of M, summed over all uses of all scored linears.

    This is the way for errors that were kept; ``ColumnSums`` alone serves those that come one by
    one. It takes one parameter after the other, so that each matrix is gathered once, and none is
    whole for longer than it is used. The order is that of the scope, the same on every process,
    because gathering is collective.

    Args:
        recorder: the recorded forward.
        errors: direct and causal errors at its linear uses.
        sides: as in ``ColumnSums``.
        names: as in ``ColumnSums``.
        gather: how a part becomes whole; None where every process has the whole direction.

    Returns:
        The columns for each side.
    """
    parts = {"direct": errors.direct, "causal": errors.causal}
    sums = ColumnSums(recorder, sides, names)
    for name, uses in uses_by_weight(recorder, names):
        for side, by_use in zip(sides, sums.by_use, strict=True):
            whole = side[name]
            # Once for all uses of the weight and both parts; let go of with the next weight.
            if gather is not None:
                whole = gather(name, whole)
            for part, index in ((p, i) for i in uses for p in parts):
                error = parts[part][index]
                if error is not None:
                    by_use[part, index] = sums.contract(index, error, whole)
    return sums.columns()


def uses_by_weight(recorder: Recorder, names: Mapping[str, str]) -> list[tuple[str, list[int]]]:
    """Name and recorded uses of each weight in scope."""
    # From the scope and not from the recorded uses: a process that sent no token to an expert has
    # no use of its weights, and must still go through the same names as the others.
    uses: dict[str, list[int]] = {names[one.weight_name]: [] for one in recorder.scope.linears}
    for index, use in enumerate(recorder.linears):
        uses[names[use.linear.weight_name]].append(index)
    return list(uses.items())
