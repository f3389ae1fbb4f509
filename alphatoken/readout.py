"""From errors to values: contraction over all uses, and columns by position to values by token.

Parameters are found by the names of their places, never by identity: where weights are sharded, a
module holds another object inside a forward than outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from alphatoken import contraction
from alphatoken.adapter import ScoredLinear
from alphatoken.batch import to_token_index
from alphatoken.capture import LinearUse, Recorder
from alphatoken.direction import Matrices
from alphatoken.estimators import TokenErrors
from alphatoken.precision import full_precision, wide
from alphatoken.values import TokenValues

__all__ = [
    "ColumnSums",
    "Columns",
    "Gather",
    "Side",
    "assign_columns",
    "captured_gradients",
    "combine",
    "contract_columns",
    "total_side",
]


@dataclass(frozen=True)
class Columns:
    """Values by position of use (b, t): the direct and the causal columns for one direction."""

    direct: Tensor
    causal: Tensor


def assign_columns(
    columns: Columns, mask: Tensor, causal_position: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns by position to values by token: (direct, causal, unassigned).

    The direct column of token i is position i - 1, where it is predicted. The causal one is the
    same position ("label") or position i, where the token is read ("context"). What belongs to no
    response token is summed per row into ``unassigned``.
    """
    shifted = columns.causal if causal_position == "context" else to_token_index(columns.causal)
    direct = to_token_index(columns.direct).masked_fill(~mask, 0.0)
    causal = shifted.masked_fill(~mask, 0.0)
    everything = columns.direct.sum(-1) + columns.causal.sum(-1)
    unassigned = everything - direct.sum(-1) - causal.sum(-1)
    return direct, causal, unassigned


def combine(
    adaptation: tuple[Tensor, Tensor, Tensor] | None,
    stability: tuple[Tensor, Tensor, Tensor] | None,
    *,
    mask: Tensor,
    split: bool,
    estimator: str,
    stability_weight: float,
    balance: dict[str, float],
) -> TokenValues:
    """TokenValues from (direct, causal, unassigned) of both sides; a side that is None is zero."""
    given = adaptation or stability
    assert given is not None
    zeros = tuple(torch.zeros_like(part) for part in given)
    gain_direct, gain_causal, gain_rest = adaptation or zeros
    keep_direct, keep_causal, keep_rest = stability or zeros
    gain, keep = gain_direct + gain_causal, keep_direct + keep_causal
    return TokenValues(
        total=gain + stability_weight * keep,
        mask=mask,
        adaptation=gain,
        stability=keep,
        adaptation_direct=gain_direct if split else None,
        adaptation_causal=gain_causal if split else None,
        stability_direct=keep_direct if split else None,
        stability_causal=keep_causal if split else None,
        unassigned=gain_rest + stability_weight * keep_rest,
        estimator=estimator,
        stability_weight=stability_weight,
        balance=balance,
    )


@dataclass(frozen=True)
class Side:
    """One side of M as it is contracted, or ``matrices + weight * others``, both sides in one.

    Attributes:
        matrices: parameter name -> M, or this process's part of it; of the biases only under the
            gram route. May be ``Formed``: each is then made when it is contracted, and let go.
        factors: the gram route's validation side of the weights.
        others: matrices to be added, not with ``factors``; None for none.
        weight: of ``others``.
    """

    matrices: Matrices
    factors: Mapping[str, list[tuple[Tensor, Tensor]]] | None = None
    others: Matrices | None = None
    weight: float = 0.0

    def of(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Matrices of these parameters, added now: M is never whole beside its two sides."""
        found = {n: self.matrices[n] for n in names if n in self.matrices}
        if self.others is not None:
            found = {n: m + self.weight * self.others[n] for n, m in found.items()}
        return found


def total_side(gain: Side | None, keep: Side | None, stability_weight: float) -> Side | None:
    """``M = P o (G + lambda V)`` as one side: one contraction instead of two.

    None where it saves nothing: there is one side only, or G has the gram route's factors, to which
    no matrix can be added.
    """
    if gain is None or keep is None or gain.factors is not None:
        return None
    return Side(gain.matrices, None, keep.matrices, stability_weight)


Gather = Callable[[str, Tensor], Tensor]
"""(parameter name, this process's part) -> the whole matrix."""


class ColumnSums:
    """Contracts errors one by one with each side of M, in whatever order they come.

    The result of each use is kept, (b, t) numbers, and summed in the scope's order at the end:
    the same bits as ``contract_columns``, whichever way the errors came.

    Args:
        recorder: the recorded forward.
        sides: the directions.
        names: place of a parameter (``weight_name``, ``bias_name`` of a linear) -> its name among
            the parameters in scope; tied places have one name.
    """

    def __init__(self, recorder: Recorder, sides: Sequence[Side], names: Mapping[str, str]) -> None:
        self._recorder, self._sides, self._names = recorder, sides, names
        self.found: list[dict[tuple[str, int], Tensor]] = [{} for _ in sides]

    @full_precision
    def add(self, part: str, index: int, error: Tensor) -> None:
        """Contract the ("direct" or "causal") error of one use."""
        for side, found in zip(self._sides, self.found, strict=True):
            whole = side.of(_owned(self._recorder.linears[index].linear, self._names))
            found[part, index] = self.contract(index, error, whole, side)

    def contract(
        self, index: int, error: Tensor, whole: Mapping[str, Tensor], side: Side
    ) -> Tensor:
        """The values (b, t) of one use; ``whole`` are its matrices of this side."""
        use = self._recorder.linears[index]
        return _contract_use(use.linear, error, use.x, whole, self._names, side.factors)

    def columns(self) -> list[Columns]:
        """The sums over all uses, for each side."""
        order = [i for _, uses in _by_weight(self._recorder, self._names) for i in uses]
        sums = []
        for found in self.found:
            parts = [_sum([found.get((part, i)) for i in order]) for part in ("direct", "causal")]
            sums.append(_columns(parts, self._recorder.linears[0].x))
        return sums


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return reduce(torch.add, present) if present else None


@full_precision
def contract_columns(
    recorder: Recorder,
    errors: TokenErrors,
    sides: Sequence[Side],
    names: Mapping[str, str],
    gather: Gather | None = None,
) -> list[Columns]:
    """Contract both parts with each side of M, summed over all uses of all scored linears.

    One parameter after the other, so that each matrix is gathered once, and none is whole for
    longer than it is used. The order is that of the scope, on every process.

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
    for owned, uses in _by_weight(recorder, names):
        for side, found in zip(sides, sums.found, strict=True):
            whole = side.of(owned)
            if gather is not None:
                whole = {n: gather(n, m) for n, m in whole.items()}
            for part, index in ((p, i) for i in uses for p in parts):
                error = parts[part][index]
                if error is not None:
                    found[part, index] = sums.contract(index, error, whole, side)
    return sums.columns()


def _columns(parts: Sequence[Tensor | None], like: Tensor) -> Columns:
    """A part that was not computed is zero."""
    dtype = wide(*(part.dtype for part in parts if part is not None))
    zero = torch.zeros(like.shape[:2], dtype=dtype, device=like.device)
    direct, causal = (zero if part is None else part.to(dtype) for part in parts)
    return Columns(direct, causal)


def _by_weight(
    recorder: Recorder, names: Mapping[str, str]
) -> list[tuple[tuple[str, ...], list[int]]]:
    """Per weight in scope: its name and those of the biases beside it, and its recorded uses."""
    owned: dict[str, dict[str, None]] = {}
    uses: dict[str, list[int]] = {}
    for linear in recorder.scope.linears:
        parts = _owned(linear, names)
        owned.setdefault(parts[0], {}).update(dict.fromkeys(parts))
    for index, use in enumerate(recorder.linears):
        uses.setdefault(names[use.linear.weight_name], []).append(index)
    return [(tuple(parts), uses.get(weight, [])) for weight, parts in owned.items()]


def _owned(linear: ScoredLinear, names: Mapping[str, str]) -> tuple[str, ...]:
    """Names of a linear's weight, and of its bias where that is in scope."""
    beside = (names[linear.bias_name],) if linear.bias_name in names else ()
    return names[linear.weight_name], *beside


def _contract_use(
    linear: ScoredLinear,
    error: Tensor,
    x: Tensor,
    matrices: Mapping[str, Tensor],
    names: Mapping[str, str],
    factors: Mapping[str, list[tuple[Tensor, Tensor]]] | None,
) -> Tensor:
    weight, bias = names[linear.weight_name], names.get(linear.bias_name)
    if factors is None:
        m = matrices[weight]
        m_bias = None if bias is None else matrices[bias]
        return contraction.contract(error, x, m.mT if linear.transposed else m, m_bias)
    total = torch.zeros(error.shape[:2], dtype=torch.float32, device=error.device)
    for e, v in factors.get(weight, []):
        total = total + contraction.contract_gram(error, x, e, v)
    if bias is not None and bias in matrices:
        m_bias = matrices[bias]
        total = total + torch.einsum("bto,o->bt", error.to(m_bias.dtype), m_bias)
    return total


@full_precision
def captured_gradients(
    recorder: Recorder,
    errors: Sequence[Tensor | None],
    names: Mapping[str, str],
    consume: Callable[[str, Tensor | None, Tensor | float], None],
) -> None:
    """Weight and bias gradients from captured uses, one parameter at a time: sums of delta (x) x.

    Args:
        recorder: one recorded forward.
        errors: ordinary errors at its linear uses.
        names: as in ``contract_columns``; tied parameters gather in one entry.
        consume: gets (name, gradient as stored, sum of the norms of its terms) of every scored
            weight and bias in scope, in one order on every process; None where no use was seen.
            A bias tied between different weights comes once for each.
    """
    for owned, uses in _by_weight(recorder, names):
        found: dict[str, tuple[Tensor, Tensor | float]] = {}
        for index in uses:
            error, use = errors[index], recorder.linears[index]
            if error is not None:
                for name, part, size in _terms(use, error, names):
                    before, known = found.get(name, (torch.zeros_like(part), 0.0))
                    found[name] = (before + part, known + size)
        for name in owned:
            consume(name, *found.get(name, (None, 0.0)))


def _terms(
    use: LinearUse, error: Tensor, names: Mapping[str, str]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, gradient, sum of its terms' norms) of the weight and the bias of one use."""
    linear, gradient = use.linear, contraction.outer_sum(error, use.x)
    sizes = error.to(gradient).norm(dim=-1)
    size = (sizes * use.x.to(gradient).norm(dim=-1)).sum()
    yield names[linear.weight_name], gradient.mT if linear.transposed else gradient, size
    if linear.bias_name in names:
        yield names[linear.bias_name], error.flatten(0, -2).to(gradient).sum(0), sizes.sum()
