"""``Label``: values by the derivative of token losses along M, in whichever way works.

    v_k  =  <grad l_k, M>  =  d/dh l_k(theta + h M)  at h = 0

by forward mode (one dual forward a side) or by finite differences (forwards at moved weights). No
error is captured, so that any parameter and any kernel can be valued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.config import FORMS
from alphatoken.direction.algebra import Direction
from alphatoken.direction.cache import DirectionCache
from alphatoken.direction.objective import forward_losses, scoring_forward
from alphatoken.errors import (
    AlphaTokenWarning,
    InputError,
    NumericalError,
    UnsupportedError,
    warn_caller,
)
from alphatoken.estimate.derivatives import Derivative, DerivativeProof
from alphatoken.estimate.differences import (
    ChoiceWatch,
    Differences,
    DirectionalDerivative,
    precision_obstacle,
)
from alphatoken.estimate.estimator import Estimator, Recording, Side
from alphatoken.estimate.forward_mode import label_values
from alphatoken.estimate.token_values import DirectCausal, undivided
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.batch_slice import around_responses
from alphatoken.model.forward import Start, draws
from alphatoken.model.protocol import adapter_named
from alphatoken.model.scope import mixtures_of
from alphatoken.support.precision import float16_named
from alphatoken.values import TokenValues


class Label(Estimator[Direction]):
    """``<grad l_k, M>`` for every response token k, by forward mode or by differences.

    Exactness: exact up to rounding by forward mode; by differences up to the error that comes with
    the values. Oracle: ``alphatoken.oracle.gradients.label_values``.
    """

    def __init__(self, cache: DirectionCache[Direction]) -> None:
        super().__init__(cache)
        adapter = self.adapter
        self._differences = Differences(adapter, self.scored.sharding)
        # Ways that "auto" has seen fail on this model, by the proof and by a batch; none of them is
        # tried again.
        self._disproved: set[str] = set()
        self._refused: set[str] = set()
        self._fallbacks: set[str] = set()  # ways that one was warned of on single batches
        # Whether losses may jump where weights move, as a router sends a token elsewhere.
        self._chooses = bool(mixtures_of(adapter, range(len(adapter.layers()))))
        # Whether a dual forward may start at the hidden states of the observed one, and whether the
        # losses of the observed one may be a side of a difference. Each is switched off for good by
        # the first recording that shows otherwise: it would be paid for at each step.
        self._starts = True
        self._bases = True

    @property
    def shares_head(self) -> bool:
        """True by forward mode; differences read losses alone."""
        return self.needs_forward or self._ways()[0] == "forward_mode"

    def prepare(self, batch: LabelledBatch | None = None) -> Direction:
        """M at the current weights, along which derivatives are proved."""
        direction = super().prepare(batch)
        self.proofs.see_version(self.cache.version)
        self._prove_pending(batch, _both(direction))
        return direction

    def prove(self, batch: LabelledBatch, sides: Sequence[Side] = ()) -> None:
        """Prove that the derivative is that of the trained loss; see ``Estimator.prove``."""
        # Whatever is wrong with the tokens of a slice is reported when their whole batch runs, by
        # their place in it; until then nothing is proved.
        try:
            self.proofs.see_arguments(batch)
            # V is 0 before the first step.
            m = next((side for side in sides if any(bool(x.any()) for x in side.values())), {})
            with scoring_forward(self.adapter, self.scored.first), ChoiceWatch() as watch:
                losses = forward_losses(self.adapter, batch, "batch")
            with float16_named(self.adapter.model, (UnsupportedError, NumericalError)):
                relative = self._prove_derivative(batch, losses, m, chooses=watch.made)
        except (InputError, NumericalError):
            if self.scored.sharding is not None:
                raise
            return
        # Differences are proved along M: where it is 0 yet, the next forward is looked at too.
        self.proofs.derivatives_agree(relative, pending=not m)

    def _values(
        self, recording: Recording, direction: Direction, *, components: bool
    ) -> TokenValues:
        direction = self.at_step(recording, direction)
        if self.proofs.pending:  # M is built from no batch then, and none came before this one
            recorder = recording.recorder
            with nullcontext() if recorder is None else recorder.isolated():
                self.prove(around_responses(recording.batch), _both(direction))
        derivatives: list[DirectionalDerivative] = []

        def along(sides: Sequence[Side]) -> list[DirectCausal]:
            for number, side in enumerate(sides):
                along_side = self.derivative(recording, dict(side), number)
                derivatives.append(_weighted(along_side, recording))
            return [undivided(one.values) for one in derivatives]

        values = self.combined(recording, direction, along, components=components)
        worst = max(derivatives, key=lambda one: one.error)
        losses = (one.losses for one in derivatives if one.losses is not None)
        return replace(
            values,
            derivative=derivatives[0].way,
            error=worst.error,
            error_age=worst.age,
            losses=next(losses, None) if recording.losses is None else None,
        )

    def derivative(
        self, recording: Recording, side: Side, number: int = 0
    ) -> DirectionalDerivative:
        """Derivatives (b, t) of a recording's token losses along one side of M.

        Each ``number`` of a side has a step of its own. Where the recording has losses, those of
        our own forward must equal them.
        """
        return self._by_first_way(
            {
                "forward_mode": partial(self._by_forward_mode, recording, side),
                "differences": partial(self._by_differences, recording, side, number),
            }
        )

    def _ways(self) -> list[str]:
        """Ways that are possible now, "forward_mode" and "differences", the preferred one first.

        Raises:
            UnsupportedError: differences are the option, and rounding would hide a small shift.
        """
        lost = None
        if self.config.derivative != "forward_mode":
            lost = precision_obstacle(self.adapter.model, self.scored.parameters)
        if self.scored.sharding is not None:
            lost = lost or self.scored.sharding.low_precision_reason()
        if self.config.derivative in FORMS or self.scored.sharding is not None:
            if lost is not None:
                raise _lost(self.config.derivative, lost, sharded=self.scored.sharding is not None)
            return ["differences"]
        if self.config.derivative == "forward_mode" or lost is not None:
            return ["forward_mode"]
        # Forward mode starts at the input of the first scored layer, where differences would run
        # the model below it again; over all parameters it costs more than they do, which whoever
        # computes in float64 pays for exactness. A router sends some tokens elsewhere at moved
        # weights, where losses jump.
        ways = ["differences", "forward_mode"]
        cheaper = self.scored.first is None and not self._chooses
        ways = ways if cheaper and not _in_float64(self.adapter.model) else ways[::-1]
        lost_ways = self._disproved | self._refused
        return [way for way in ways if way not in lost_ways] or ways

    def _by_first_way(
        self, by_way: Mapping[str, Callable[[], DirectionalDerivative]]
    ) -> DirectionalDerivative:
        """Derivatives by the first way that works, with a warning if it is not the preferred."""
        way, *rest = self._ways()
        doubtful: DirectionalDerivative | None = None
        try:
            derivative = by_way[way]()
        except UnsupportedError as error:
            refused = error
        else:
            if derivative.doubt is None:
                return derivative
            refused, doubtful = derivative.doubt, derivative
        for other in rest:
            try:
                derivative = by_way[other]()
            except UnsupportedError:
                break
            if derivative.doubt is not None:
                break
            if doubtful is None:
                self._refused.add(way)
            if doubtful is None or other not in self._fallbacks:
                self._warn(other, refused)
            self._fallbacks.add(other)
            return derivative
        if doubtful is not None and doubtful.negligible:
            return doubtful
        raise refused

    def _warn(self, way: str, refused: UnsupportedError) -> None:
        warn_caller(f"label values are taken by {_NAMES[way]}: {refused}", AlphaTokenWarning)

    def _prove_derivative(
        self, batch: LabelledBatch, losses: Tensor, m: Mapping[str, Tensor], *, chooses: bool
    ) -> float:
        """The largest relative difference of the way in use from autograd, on a slice of a batch.

        Args:
            batch: the slice.
            losses: of its tokens, with a graph that is let go.
            m: parameter name -> M in the parameter's shape; empty where there is none.
            chooses: the model chose among its parts by its numbers in that forward.

        Raises:
            UnsupportedError: no possible way agrees with autograd.
        """
        # Forward mode comes first, where it is possible and every kernel has it: what it disproves
        # is refused, and differences never replace it. Where differences are preferred, they must
        # agree along M too, or forward mode replaces them.
        self._chooses = self._chooses or chooses
        proof, ways = DerivativeProof(losses, self.scored.parameters, m), self._ways()
        agreed: float | None = None
        refused: UnsupportedError | None = None
        if "forward_mode" in ways:
            try:
                agreed, refusal = proof.compare(self._forward_mode_of(batch))
            except UnsupportedError as error:  # a kernel without it
                if ways == ["forward_mode"]:
                    raise
                refused = error
            else:
                if refusal is not None:
                    # Forward mode computes attention from what the adapter says of each call.
                    with adapter_named(self.adapter):
                        raise refusal
        if agreed is not None and ways[0] == "forward_mode":
            return agreed
        # Where M is 0, as V is before the first step, nothing can be compared along it.
        along = "M" if agreed is not None and any(bool(x.any()) for x in m.values()) else ""
        try:
            moved, refusal = proof.compare(self._differences_of(batch), only=along)
        except UnsupportedError as error:  # no step is exact enough
            moved, refusal = 0.0, error
        if refusal is not None:
            if agreed is None:
                raise refused or refusal
            self._disproved.add("differences")
            self._warn("forward_mode", refusal)
            return agreed
        if refused is not None and ways[0] == "forward_mode":
            self._disproved.add("forward_mode")
            self._warn("differences", refused)
        return max(moved, agreed or 0.0)

    def _forward_mode_of(self, batch: LabelledBatch) -> Derivative:
        def derivative(direction: Mapping[str, Tensor]) -> tuple[Tensor, float]:
            return label_values(self.adapter, batch, direction, first=self.scored.first or 0), 0.0

        return derivative

    def _differences_of(self, batch: LabelledBatch) -> Derivative:
        def derivative(direction: Mapping[str, Tensor]) -> tuple[Tensor, float]:
            # Steps of its own: the direction need not be M.
            differences = Differences(self.adapter)
            one = differences.values(batch, direction, self._form(None))
            if one.doubt is not None:
                raise one.doubt
            return one.values, one.error

        return derivative

    def forget(self) -> None:
        """Drop steps, and which ways batches have refused; see ``Estimator.forget``."""
        self._refused, self._fallbacks = set(), set()
        self._differences = Differences(self.adapter, self.scored.sharding)
        self._starts = self._bases = True

    def batch_state(self) -> dict[str, Any]:
        """Steps of differences, and the ways that batches have refused."""
        return {
            "differences": self._differences.state(),
            "refused": sorted(self._refused),
            "fallbacks": sorted(self._fallbacks),
            "starts": self._starts,
            "bases": self._bases,
        }

    def load_batch_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``batch_state`` returned."""
        self._differences.load_state(state["differences"])
        self._refused, self._fallbacks = set(state["refused"]), set(state["fallbacks"])
        self._starts, self._bases = state["starts"], state["bases"]

    def _by_forward_mode(self, recording: Recording, side: Side) -> DirectionalDerivative:
        start, losses = self._start(recording), list[Tensor]()

        def see(own: Tensor) -> None:
            losses.append(own)
            if self._comparable(recording):
                recording.require_losses(own)

        values = label_values(
            self.adapter,
            recording.batch,
            side,
            first=self.scored.first or 0,
            start=start,
            head=recording.head,
            see=see,
        )
        if start is not None and start.refused:
            self._starts = False
        return DirectionalDerivative(values, "forward_mode", losses=next(iter(losses), None))

    def _start(self, recording: Recording) -> Start | None:
        """The recorded input of the first scored layer, where a dual forward may start; or None."""
        if recording.losses is None or recording.recorder is None:
            return None
        forward = recording.recorder.latest
        if forward is None or forward.hidden is None or not forward.plain:
            return None
        usable = self._starts and self.scored.first is not None
        return Start(forward.hidden, recording.losses.detach()) if usable else None

    def _by_differences(
        self, recording: Recording, side: Side, number: int
    ) -> DirectionalDerivative:
        form = self._form(recording)
        based = form == "one_sided" and self._based(recording)
        see = recording.require_losses if self._comparable(recording) else None
        difference = partial(
            self._differences.values,
            recording.batch, side, form, side=number, shown=self.inputs.first_batch, see=see,
            keep_memory=recording.recorder is None,
        )  # fmt: skip
        derivative = difference(base=recording.losses if based else None)
        if based and derivative.doubt is not None:
            # The observed forward may have gone through other kernels than ours, whose rounding
            # is multiplied by 1 / h: a forward of our own takes its place from here on.
            derivative = difference()
            self._bases = derivative.doubt is not None
        return derivative

    def _form(self, recording: Recording | None) -> str:
        if self.config.derivative in FORMS:
            return self.config.derivative
        return "one_sided" if recording is not None and self._based(recording) else "central"

    def _comparable(self, recording: Recording) -> bool:
        """Whether a forward of our own should give the recording's losses again."""
        return recording.losses is not None and not draws(self.adapter.model)

    def _based(self, recording: Recording) -> bool:
        """Whether the recording's losses may be a side of a difference."""
        # It may have run under an autocast that is over by now, and its scores may have been cast.
        weights = () if recording.recorder is None else recording.recorder.weights
        fine = _coarsest(recording.products) <= _coarsest(weights)
        return self._bases and fine and self._comparable(recording)


def _coarsest(dtypes: Iterable[torch.dtype]) -> float:
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


_NAMES = {"differences": "finite differences", "forward_mode": "forward mode"}


def _both(direction: Direction) -> Sequence[Side]:
    return direction.adaptation, direction.stability or {}


def _weighted(derivative: DirectionalDerivative, recording: Recording) -> DirectionalDerivative:
    """``<grad(w l), M> = w <grad l, M>``: rows of Psi scale with their own token's weight."""
    weights = recording.token_weights
    if weights is None:
        return derivative
    return replace(derivative, values=derivative.values * weights.to(derivative.values))


def _in_float64(model: nn.Module) -> bool:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return dtypes == {torch.float64}


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
