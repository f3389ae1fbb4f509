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
    "Side",
    "contract_columns",
    "uses_by_weight",
]


@dataclass(frozen=True)
class Columns:
    """Values by position of use (b, t): the direct and the causal columns for one direction."""

    direct: Tensor
    causal: Tensor


@dataclass(frozen=True)
class Side:
    """One side of M as it is contracted; or both sides in one, ``matrices + weight * others``.

    Attributes:
        matrices: parameter name -> M, or this process's part of it.
        others: matrices to be added; None for none.
        weight: of ``others``.
    """

    matrices: Mapping[str, Tensor]
    others: Mapping[str, Tensor] | None = None
    weight: float = 0.0

    def of(self, name: str) -> Tensor:
        """The matrix of this parameter, with ``weight * others`` added where there are others.

        The sum is made for the parameter that is contracted next and let go after it, so that
        the whole M never lies in memory beside the two sides that it is the sum of.
        """
        matrix = self.matrices[name]
        return matrix if self.others is None else matrix + self.weight * self.others[name]

    def whole(self) -> dict[str, Tensor]:
        """All matrices of this side, by the parameters' names."""
        return {name: self.of(name) for name in self.matrices}


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
        sides: the directions.
        names: place of a parameter (``weight_name`` of a linear) -> its name among the parameters
            in scope; tied places have one name.
    """

    def __init__(self, recorder: Recorder, sides: Sequence[Side], names: Mapping[str, str]) -> None:
        self._recorder, self._sides, self._names = recorder, sides, names
        self.found: list[dict[tuple[str, int], Tensor]] = [{} for _ in sides]

    @full_precision
    def add(self, part: str, index: int, error: Tensor) -> None:
        """Contract the ("direct" or "causal") error of one use.

        Hooks call this inside the backward, with each error as it comes by. ``full_precision``
        matters there: the user may have asked for values inside ``torch.autocast``.
        """
        for side, results in zip(self._sides, self.found, strict=True):
            name = self._names[self._recorder.linears[index].linear.weight_name]
            results[part, index] = self.contract(index, error, side.of(name))

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
        for results in self.found:
            dtype = wide(*(value.dtype for value in results.values()))
            zero = torch.zeros(like.shape[:2], dtype=dtype, device=like.device)
            parts = {}
            for part in ("direct", "causal"):  # one that was not computed is zero
                found = [results[part, i] for i in order if (part, i) in results]
                parts[part] = reduce(torch.add, found).to(dtype) if found else zero
            sums.append(Columns(**parts))
        return sums


@full_precision
def contract_columns(
    recorder: Recorder,
    errors: TokenErrors,
    sides: Sequence[Side],
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
        sides: the directions.
        names: as in ``ColumnSums``.
        gather: how a part becomes whole; None where every process has the whole direction.

    Returns:
        The columns for each side.
    """
    parts = {"direct": errors.direct, "causal": errors.causal}
    sums = ColumnSums(recorder, sides, names)
    for name, uses in uses_by_weight(recorder, names):
        for side, results in zip(sides, sums.found, strict=True):
            whole = side.of(name)
            # Once for all uses of the weight and both parts; let go of with the next weight.
            if gather is not None:
                whole = gather(name, whole)
            for part, index in ((p, i) for i in uses for p in parts):
                error = parts[part][index]
                if error is not None:
                    results[part, index] = sums.contract(index, error, whole)
    return sums.columns()


def uses_by_weight(recorder: Recorder, names: Mapping[str, str]) -> list[tuple[str, list[int]]]:
    """Name and recorded uses of each weight in scope."""
    # From the scope and not from the recorded uses: a process that sent no token to an expert has
    # no use of its weights, and must still go through the same names as the others.
    uses: dict[str, list[int]] = {names[one.weight_name]: [] for one in recorder.scope.linears}
    for index, use in enumerate(recorder.linears):
        uses[names[use.linear.weight_name]].append(index)
    return list(uses.items())
