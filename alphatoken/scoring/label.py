"""The derivative of token losses along M, in the form that is asked for or that works."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from alphatoken.direction.scored import ScoredParameters
from alphatoken.errors import AlphaTokenWarning, UnsupportedError, warn_caller
from alphatoken.estimate.derivatives import Derivative, DerivativeProof, Disagreement
from alphatoken.estimate.differences import FORMS, Differences, drowned
from alphatoken.estimate.forward_mode import label_values
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.modes import draws
from alphatoken.model.partial_forward import Start
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.scope import mixtures_of
from alphatoken.scoring.passes import Pass

__all__ = ["LabelDerivative", "Taken"]


@dataclass(frozen=True)
class Taken:
    """Derivatives (b, t) of token losses along one side of M.

    Attributes:
        values: 0 off the response.
        way: "forward_mode", "central" or "one_sided".
        error: estimated, relative to the norm of ``values``; 0 where it is rounding alone.
        age: batches since the truncation in ``error`` was measured; 0: on this one.
        doubt: why they are not exact enough; None if they are.
        negligible: as of ``Quotient``.
    """

    values: Float[Tensor, "b t"]
    way: str
    error: float = 0.0
    age: int = 0
    doubt: UnsupportedError | None = None
    negligible: bool = False


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
        self._warned: set[str] = set()  # ways that one was warned of on single batches
        # Whether losses may jump where weights move, as a router sends a token elsewhere.
        self._chooses = bool(mixtures_of(adapter, range(len(adapter.layers()))))
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
        # the model below it again; over all parameters it costs more than they do. A router sends
        # some tokens elsewhere at moved weights, where losses jump.
        ways = ["differences", "forward_mode"]
        ways = ways if self._first is None and not self._chooses else ways[::-1]
        lost_ways = self._disproved | self._refused
        return [way for way in ways if way not in lost_ways] or ways

    def _take(self, take: Mapping[str, Callable[[], Taken]]) -> Taken:
        """Values by the first way that works; "auto" warns if that was not the preferred one."""
        way, *rest = self._ways()
        doubtful: Taken | None = None
        try:
            taken = take[way]()
        except UnsupportedError as error:
            refused = error
        else:
            if taken.doubt is None:
                return taken
            refused, doubtful = taken.doubt, taken
        for other in rest:
            try:
                taken = take[other]()
            except UnsupportedError:
                break
            if taken.doubt is not None:
                break
            if doubtful is None:
                self._refused.add(way)
            if doubtful is None or other not in self._warned:
                self._warn(other, refused)
            self._warned.add(other)
            return taken
        if doubtful is not None and doubtful.negligible:
            return doubtful
        raise refused

    def _warn(self, way: str, refused: UnsupportedError) -> None:
        warn_caller(f"label values are taken by {_NAMES[way]}: {refused}", AlphaTokenWarning)

    # --- the proof -------------------------------------------------------------------------------

    def prove(
        self, batch: LabelledBatch, losses: Tensor, m: Mapping[str, Tensor], *, chooses: bool
    ) -> float:
        """Show that the way that will be taken agrees with autograd, on a slice of a batch.

        Forward mode comes first, where it may be taken and every kernel has it: what it disproves
        is refused, and differences never take its place. Where differences are preferred, they must
        agree along M too, or forward mode takes theirs.

        Args:
            batch: the slice.
            losses: of its tokens, with a graph that is let go.
            m: parameter name -> M in the parameter's shape; empty where there is none.
            chooses: the model chose among its parts by its numbers in that forward.

        Returns:
            The largest relative difference.

        Raises:
            UnsupportedError: no way that is allowed agrees with autograd.
        """
        self._chooses = self._chooses or chooses
        proof, ways = DerivativeProof(losses, self._parameters, m), self._ways()
        agreed: Disagreement | None = None
        refused: UnsupportedError | None = None
        if "forward_mode" in ways:
            try:
                agreed = proof.compare(self._forward_mode_of(batch))
            except UnsupportedError as error:  # a kernel without it
                if ways == ["forward_mode"]:
                    raise
                refused = error
            else:
                agreed.require_none()
        if agreed is not None and ways[0] == "forward_mode":
            return agreed.relative
        try:
            # Where M is 0, as V is before the first step, nothing can be compared along it.
            along = "M" if agreed and any(bool(x.any()) for x in m.values()) else ""
            moved = proof.compare(self._differences_of(batch), only=along)
            moved.require_none()
        except UnsupportedError as error:
            if agreed is None:
                raise refused or error from None
            self._disproved.add("differences")
            self._warn("forward_mode", error)
            return agreed.relative
        if refused is not None and ways[0] == "forward_mode":
            self._disproved.add("forward_mode")
            self._warn("differences", refused)
        return max(moved.relative, agreed.relative if agreed else 0.0)

    def _forward_mode_of(self, batch: LabelledBatch) -> Derivative:
        def derivative(direction: Mapping[str, Tensor]) -> tuple[Tensor, float]:
            return label_values(self._adapter, batch, direction, first=self._first or 0), 0.0

        return derivative

    def _differences_of(self, batch: LabelledBatch) -> Derivative:
        def derivative(direction: Mapping[str, Tensor]) -> tuple[Tensor, float]:
            # Steps of its own: the direction need not be M.
            differences = Differences(self._adapter)
            taken = differences.values(batch, direction, self._form(None)).require_exact()
            return taken.values, taken.error

        return derivative

    # --- values ----------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop what was found on batches, as a scorer that is built anew knows nothing of it."""
        self._refused, self._warned = set(), set()
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
        return self._take(take)

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
        based = form == "one_sided" and self._based(seen)
        see = seen.require_losses if self._comparable(seen) else None
        take = partial(
            self._differences.values,
            seen.batch, direction, form, side=side, shown=shown, see=see,
        )  # fmt: skip
        taken = take(base=seen.losses if based else None)
        if based and taken.doubt is not None:
            # The observed forward may have gone through other kernels than ours, whose rounding
            # is multiplied by 1 / h: a forward of our own takes its place from here on.
            again = take()
            self._bases = again.doubt is not None
            taken = again
        return Taken(taken.values, form, taken.error, taken.age, taken.doubt, taken.negligible)

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
        # It may have run under an autocast that is over by now, and its scores may have been cast.
        weights = () if seen.recorder is None else seen.recorder.weights
        fine = _digit(seen.products) <= _digit(weights)
        return self._bases and fine and self._comparable(seen)


def _digit(dtypes: Iterable[torch.dtype]) -> float:
    """The last digit of the coarsest of them."""
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


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
