"""The derivative of token losses along M, in the form that is asked for or that works."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

from jaxtyping import Float
from torch import Tensor

from alphatoken.direction.scored import ScoredParameters
from alphatoken.errors import AlphaTokenWarning, UnsupportedError, warn_caller
from alphatoken.estimate.derivatives import Derivative
from alphatoken.estimate.differences import CURVATURE, FORMS, Differences, drowned
from alphatoken.estimate.forward_mode import label_values
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.modes import draws
from alphatoken.model.partial_forward import Start
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.scoring.passes import Pass
from alphatoken.support.precision import wide

__all__ = ["LabelDerivative", "Taken"]

_R = TypeVar("_R")


@dataclass(frozen=True)
class Taken:
    """Derivatives (b, t) of token losses along one side of M.

    Attributes:
        values: 0 off the response.
        way: "forward_mode", "central" or "one_sided".
        error: estimated, relative to the norm of ``values``; 0 where it is rounding alone.
    """

    values: Float[Tensor, "b t"]
    way: str
    error: float = 0.0


class LabelDerivative:
    """Takes ``<grad l_k, M>`` of passes of one model.

    Args:
        adapter: of the model.
        asked: "auto", "forward_mode", "central" or "one_sided".
        scored: everything in scope; under sharded weights there is no forward mode.
    """

    def __init__(self, adapter: DecoderAdapter, asked: str, scored: ScoredParameters) -> None:
        self._adapter, self._asked, self._parameters = adapter, asked, scored.parameters
        self._first, self._sharding = scored.first, scored.sharding
        self._differences = Differences(adapter, scored.sharding)
        # Ways that "auto" has found not to work on this model, by the proof and by a batch; none of
        # them is tried again.
        self._disproved: set[str] = set()
        self._refused: set[str] = set()
        # Whether a dual forward may start at the hidden states of the observed one, and whether the
        # losses of the observed one may be a side of a difference. Each is switched off for good by
        # the first pass that shows otherwise: it would be paid for at each step.
        self._starts = True
        self._bases = True

    # --- which way -------------------------------------------------------------------------------

    def _ways(self) -> list[str]:
        """Ways that may be taken now, "forward_mode" and "differences", the preferred one first.

        Raises:
            UnsupportedError: differences are asked for where a shift would drown.
        """
        lost = None
        if self._asked != "forward_mode":
            lost = drowned(self._adapter.model, self._parameters)
        if self._sharding is not None:
            lost = lost or self._sharding.narrow()
        if self._asked in FORMS or self._sharding is not None:
            if lost is not None:
                raise _lost(self._asked, lost, sharded=self._sharding is not None)
            return ["differences"]
        if self._asked == "forward_mode" or lost is not None:
            return ["forward_mode"]
        # Forward mode starts at the input of the first scored layer, where differences would run
        # the model below it again; over all parameters it costs more than they do. A mixture of
        # experts sends some tokens elsewhere at moved weights, where losses jump.
        ways = ["differences", "forward_mode"]
        ways = ways if self._first is None and not self._routes else ways[::-1]
        lost_ways = self._disproved | self._refused
        return [way for way in ways if way not in lost_ways] or ways

    @cached_property
    def _routes(self) -> bool:
        """True if a mixture of experts that train lies in the model."""
        find = getattr(self._adapter, "scored_experts", None)
        return find is not None and bool(find(range(len(self._adapter.layers()))))

    def _taken(self, take: Callable[[str], _R], refused_ways: set[str]) -> _R:
        """Result of the first form that works; "auto" warns if that was not the preferred one."""
        way, *rest = self._ways()
        if not rest:
            return take(way)
        try:
            return take(way)
        except UnsupportedError as error:
            refused = error
        try:
            found = take(rest[0])
        except UnsupportedError:
            raise refused from None
        refused_ways.add(way)
        warn_caller(f"label values are taken by {_NAMES[rest[0]]}: {refused}", AlphaTokenWarning)
        return found

    # --- the proof -------------------------------------------------------------------------------

    def prove(self, batch: LabelledBatch, prove: Callable[[Derivative], None]) -> None:
        """Show the proof the derivative that will be taken, on a slice of a batch.

        Raises:
            UnsupportedError: neither that is allowed agrees with autograd.
        """

        def take(way: str) -> None:
            # Steps of its own: the proof's direction is not M.
            differences, form = Differences(self._adapter), self._form(None)

            def derivative(direction: Mapping[str, Tensor]) -> tuple[Tensor, float]:
                if way == "differences":
                    return differences.values(batch, direction, form)
                return label_values(self._adapter, batch, direction, first=self._first or 0), 0.0

            prove(derivative)

        self._taken(take, self._disproved)

    # --- values ----------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop what was found on batches, as a scorer that is built anew knows nothing of it."""
        self._refused = set()
        self._differences = Differences(self._adapter, self._sharding)
        self._starts = self._bases = True

    def of(
        self,
        seen: Pass,
        direction: Mapping[str, Tensor],
        side: int = 0,
        shown: Callable[[], LabelledBatch | None] | None = None,
    ) -> Taken:
        """Derivatives of a pass along one side of M.

        Args:
            seen: the pass; where its losses are known, those of the own forward must equal them.
            direction: parameter name -> M in the parameter's shape.
            side: its place among the sides that are taken in turn.
            shown: gives the batch that a step of differences is found on; None for the pass's.
        """
        take = {
            "forward_mode": partial(self._by_forward_mode, seen, direction),
            "differences": partial(self._by_differences, seen, direction, side, shown),
        }
        return self._taken(lambda way: take[way](), self._refused)

    def curvature(
        self,
        seen: Pass,
        direction: Mapping[str, Tensor],
        shown: Callable[[], LabelledBatch | None] | None = None,
    ) -> Taken:
        """``<M, H_k M>`` by three forwards, whose step is larger than that of a derivative."""
        values, error = self._differences.values(seen.batch, direction, CURVATURE, shown=shown)
        return Taken(values, CURVATURE, error)

    def _by_forward_mode(self, seen: Pass, direction: Mapping[str, Tensor]) -> Taken:
        start = self._start(seen)
        values = label_values(
            self._adapter,
            seen.batch,
            direction,
            first=self._first or 0,
            start=start,
            head=seen.head,
            see=seen.require_losses if self._comparable(seen) else None,
        )
        if start is not None and start.refused:
            self._starts = False
        return Taken(values, "forward_mode")

    def _start(self, seen: Pass) -> Start | None:
        """Start of a dual forward, the recorded input of the first scored layer; or None."""
        if seen.losses is None or seen.recorder is None:
            return None
        forward = seen.recorder.latest
        if forward is None or forward.hidden is None or not forward.plain:
            return None
        usable = self._starts and self._first is not None
        return Start(forward.hidden, seen.losses.detach()) if usable else None

    def _by_differences(
        self,
        seen: Pass,
        direction: Mapping[str, Tensor],
        side: int,
        shown: Callable[[], LabelledBatch | None] | None,
    ) -> Taken:
        form = self._form(seen)
        base = seen.losses if form == "one_sided" and self._based(seen) else None
        see = partial(seen.require_losses, tolerance=5e-2) if self._comparable(seen) else None
        try:
            values, error = self._differences.values(
                seen.batch, direction, form, base=base, side=side, shown=shown, see=see
            )
        except UnsupportedError:
            # The observed forward may have gone through other kernels than ours, whose rounding
            # is multiplied by 1 / h: a forward of our own takes its place from here on.
            if base is None:
                raise
            self._bases = False
            return self._by_differences(seen, direction, side, shown)
        return Taken(values, form, error)

    def _form(self, seen: Pass | None) -> str:
        """Form of the differences: the one asked for, or the one that saves a forward."""
        if self._asked in FORMS:
            return self._asked
        return "one_sided" if seen is not None and self._based(seen) else "central"

    def _comparable(self, seen: Pass) -> bool:
        """True if the pass has losses that a forward of our own should give again."""
        return seen.losses is not None and not draws(self._adapter.model)

    def _based(self, seen: Pass) -> bool:
        """True if the losses of the pass may be a side of a difference."""
        # It may have run under an autocast that is over by now.
        exact = all(wide(dtype) == dtype for dtype in seen.products)
        return self._bases and exact and self._comparable(seen)


_NAMES = {"differences": "finite differences", "forward_mode": "forward mode"}


def _lost(form: str, why: str, *, sharded: bool) -> UnsupportedError:
    wide = "the model in float32, without autocast, mixed precision and TF32"
    other = "derivative='forward_mode' or 'auto'"
    if sharded:
        other = "a layout in which each process has the weights (DDP, ZeRO-1 or 2)"
    return UnsupportedError(
        "label values on sharded weights need weights and products in float32 or wider"
        if sharded
        else f"derivative={form!r} needs weights and products in float32 or wider",
        got=why,
        why="a shift that is small enough for a derivative would drown in their rounding",
        remedy=f"{wide}; or {other}",
    )
