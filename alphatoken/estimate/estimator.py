"""``Estimator``: what turns a recorded forward and a direction into values.

``Scorer`` uses each of the three the same way: ``prepare`` the direction, record a forward
(``forward``, or the training loop's own), and compute ``values`` of the ``Recording``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from alphatoken.config import SPLIT
from alphatoken.direction.algebra import Direction
from alphatoken.direction.cache import DirectionCache, require_gradients
from alphatoken.direction.inputs import DirectionInputs
from alphatoken.direction.objective import forward_losses, scoring_forward
from alphatoken.errors import AlphaTokenWarning, InputError, warn_caller
from alphatoken.estimate.proofs import CaptureCheck
from alphatoken.estimate.token_values import DirectCausal, combine, require_finite_values
from alphatoken.model.batch import LabelledBatch, labels_are_shifted, read_batch
from alphatoken.model.batch_slice import around_responses
from alphatoken.model.capture import Recorder
from alphatoken.model.head import HeadUse, rounding_tolerance
from alphatoken.support.devices import on_host
from alphatoken.support.precision import wide
from alphatoken.values import TokenValues

D = TypeVar("D")

Side = Mapping[str, Tensor]
"""One side of M: parameter name -> matrix, or this process's part of it."""


def read_weights(kind: str, weights: Tensor | None, mask: Tensor) -> Tensor | None:
    """Check weights (b, t) on token losses, and detach them: values take them as constants.

    Elsewhere than at response tokens (b, t) they become 0. ``kind`` is "token" or "step".

    Raises:
        InputError: another shape than the labels', or a NaN or Inf at a response token.
    """
    if weights is None:
        return None
    if weights.shape != mask.shape:
        raise InputError(
            f"{kind}_weights must have one entry a token",
            got=f"{tuple(weights.shape)} for labels of {tuple(mask.shape)}",
            remedy="expand weights of rows, and pad (b, t - 1) at index 0",
        )
    # What stands where nothing is valued must not come in by 0 * NaN.
    weights = weights.detach().masked_fill(~mask.to(weights.device), 0)
    if not bool(torch.isfinite(weights).all()):
        raise InputError(
            f"{kind}_weights are not finite",
            got="NaN or Inf at a response token",
            why="one NaN spreads to every value through the sums",
            remedy="give each response token a finite weight; others are not read",
        )
    return weights


@dataclass(frozen=True)
class Recording:
    """One forward whose response tokens are valued, whoever ran it.

    Attributes:
        batch: its labels and arguments, checked.
        token_weights: (b, t) constant factors on the token losses that values are of; None for 1.
        step_weights: (b, t) derivative of the optimizer's loss by each token loss; None for that of
            the mean over the response tokens.
        losses: its token losses (b, t), attached to its graph where errors are computed from them;
            None if no forward was needed, since label values along a fixed M run their own.
        recorder: uses of the scored linears and of attention; None if no forward was needed.
        head: the head's call that its losses were computed from; None where they came otherwise.
        products: dtypes that rounded its losses: the recorder's as the forward ran, since forwards
            of our own begin another one there, and that of the scores that the caller passed.
    """

    batch: LabelledBatch
    token_weights: Tensor | None = None
    step_weights: Tensor | None = None
    losses: Tensor | None = None
    recorder: Recorder | None = None
    head: HeadUse | None = None
    products: frozenset[torch.dtype] = frozenset()

    @property
    def recorded(self) -> tuple[Recorder, Tensor]:
        """Recorder and losses, of a forward that was recorded."""
        assert self.recorder is not None
        assert self.losses is not None
        return self.recorder, self.losses

    def require_losses(self, again: Tensor, tolerance: float | None = None) -> None:
        """Refuse losses (b, t) of another forward on these tokens that are not those of this one.

        Raises:
            InputError: they differ by more than ``tolerance``, by default that of rounding.
        """
        _, losses = self.recorded
        mask = self.batch.mask
        own, other = losses.detach()[mask].double(), again.detach()[mask].double()
        # Products of a forward may be narrow, whatever its losses are.
        dtypes = {again.dtype, *self.products}
        tolerance = tolerance or max(rounding_tolerance(dtype) for dtype in dtypes)
        if not float((own - other).norm()) <= tolerance * (float(other.norm()) + len(own) ** 0.5):
            raise foreign_scores(
                f"mean loss {float(own.mean()):.4g}, where the model on the observed arguments "
                f"has {float(other.mean()):.4g}"
            )

    def summed_loss(self) -> Tensor:
        """``sum_i w_i l_i`` with ``token_weights``: the loss whose errors are contracted.

        Raises:
            InputError: no graph leads from it to a scored linear.
        """
        _, losses = self.recorded
        weights = self.token_weights
        # Values may be computed under ``torch.no_grad``; the losses have their graph all the same.
        with torch.enable_grad():
            loss = (losses if weights is None else losses * weights.to(losses)).sum()
        return _attached(loss)

    def step_loss(self) -> Tensor:
        """``sum_i s_i l_i`` with ``step_weights``: the loss that the optimizer will see.

        Raises:
            InputError: as ``summed_loss``; or ``token_weights`` without ``step_weights``.
        """
        _, losses = self.recorded
        weights, mask = self.step_weights, self.batch.mask
        if weights is None and self.token_weights is not None:
            raise InputError(
                "preconditioner='full' needs step_weights where token_weights are given",
                why="the gradient that the optimizer will see is part of M, and its scale is not "
                "known from the values' weights",
                remedy="step_weights = d(training loss) / d(token loss), all tokens kept, (b, t)",
            )
        if weights is None:
            # Float64, because 1 / n is then exact enough for whatever dtype the losses have.
            weights = mask.double() / mask.sum()
        with torch.enable_grad():
            loss = (losses * weights.to(losses)).sum()
        return _attached(loss)


def _attached(loss: Tensor) -> Tensor:
    if not loss.requires_grad:
        raise foreign_scores("a detached tensor")
    return loss


def foreign_scores(got: str) -> InputError:
    """The error for scores that do not belong to the observed forward."""
    return InputError(
        "the scores do not belong to the observed forward",
        got=got,
        why="values are of the tokens and the loss of that forward",
        remedy="pass the logits that the model returned inside the context, undetached and "
        "unchanged; a model that scales or caps them must do so in its own forward",
    )


class Estimator(ABC, Generic[D]):
    """Values of one model by one definition, and the proofs that the definition applies to it.

    Args:
        cache: gives what values are computed along.

    Attributes:
        adapter: of the model.
        config: the options.
        scored: the parameters in scope.
        cache: as above.
        proofs: what is proved of this model before its first values are returned.
        warn: whether to warn, once, when one side of M decides the ranking alone.
    """

    def __init__(self, cache: DirectionCache[D]) -> None:
        inputs = cache.inputs
        self.cache, self.adapter, self.config = cache, inputs.adapter, inputs.config
        self.scored, self.warn, self._warned = inputs.scored, True, False
        self._labels_checked = self._shift_said = False
        self.proofs = CaptureCheck(self.adapter, self.scored, self.config)

    @property
    def inputs(self) -> DirectionInputs:
        """What the direction is built from now."""
        return self.cache.inputs

    @property
    def needs_forward(self) -> bool:
        """Whether values need a recorded forward; without one they run forwards of their own."""
        return self.config.preconditioner == "full"

    @property
    def shares_head(self) -> bool:
        """Whether values use the errors of the head, which the training step then need not form."""
        return True

    def read(
        self,
        batch: Mapping[str, Any],
        token_weights: Tensor | None = None,
        step_weights: Tensor | None = None,
    ) -> tuple[LabelledBatch, Tensor | None, Tensor | None]:
        """The batch and the weights on its token losses; see ``read_batch``, ``read_weights``."""
        adapter = self.adapter
        checked = read_batch(batch, max_length=adapter.max_positions(), model=adapter.model)
        self.check_labels(checked)
        return (
            checked,
            read_weights("token", token_weights, checked.mask),
            read_weights("step", step_weights, checked.mask),
        )

    def check_labels(self, batch: LabelledBatch) -> None:
        """Warn, once, where labels of this batch or of the first validation batch are shifted.

        On a device the first batch is looked at, since a look waits.
        """
        if not self.warn or (self._labels_checked and not on_host(batch.labels)):
            return
        own = None if self._labels_checked else self.inputs.first_batch()
        batches, self._labels_checked = {"validation batch": own, "batch": batch}, True
        shifted = [role for role, one in batches.items() if one and labels_are_shifted(one)]
        if shifted and not self._shift_said:
            self._shift_said = True
            warn_caller(
                f"In the {' and the '.join(shifted)} a label is another token than the one at its "
                "place: each is the token after it (the loss itself shifts labels). Pass labels "
                "unshifted, input_ids with -100 where nothing is valued.",
                AlphaTokenWarning,
            )

    def prepare(self, batch: LabelledBatch | None = None) -> D:
        """The direction at the current weights, built where it is stale, with the proofs due.

        Args:
            batch: the one that will be valued, if it is at hand; the proofs look at a slice of it
                where M is built from no batch.

        Raises:
            ModelError, UnsupportedError, CoverageError: see ``proofs``.
        """
        require_gradients(self.adapter.model)
        return self.cache.current()

    @abstractmethod
    def prove(self, batch: LabelledBatch, sides: Sequence[Side] = ()) -> None:
        """Run the proofs that are due on a forward of this batch, a slice; raises as ``prepare``.

        Derivatives are proved along the first of M's sides that is not zero.
        """

    def carry_over(self, former: Estimator[D], *, same_parameters: bool) -> None:
        """Take over the state of the estimator that this one replaces, since the model has changed.

        With ``same_parameters`` only settings have, and no parameter was replaced or frozen.
        """
        self.warn, self._warned = former.warn, former._warned
        self._labels_checked, self._shift_said = former._labels_checked, former._shift_said
        self.cache.pin(former.cache.pinned)

    def forget(self) -> None:
        """Drop what depends on batches that were valued, as a new scorer knows nothing of them."""

    def batch_state(self) -> dict[str, Any]:
        """What depends on batches that were valued, as JSON holds it, for a checkpoint."""
        return {}

    def load_batch_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``batch_state`` returned."""

    def _prove_pending(self, batch: LabelledBatch | None, sides: Sequence[Side] = ()) -> None:
        """Prove what is due on a slice of the first batch that M is built from, or of this one."""
        if not self.proofs.pending:
            return
        shown = self.inputs.first_batch() or batch
        if shown is not None:
            whole = self.scored.sharding is not None  # all processes run whole batches
            self.prove(shown if whole else around_responses(shown), sides)

    @contextmanager
    def forward(
        self,
        batch: LabelledBatch,
        token_weights: Tensor | None = None,
        step_weights: Tensor | None = None,
    ) -> Iterator[Recording]:
        """Records a forward of the scorer's own, in evaluation mode."""
        # The recorder outlives the forward: errors are computed inside the ``with`` of the caller.
        with self.proofs.recording() as recorder:
            with scoring_forward(self.adapter, self.scored.first):
                losses = forward_losses(self.adapter, batch, "batch")
            yield Recording(
                batch, token_weights, step_weights, losses, recorder, products=recorder.products
            )

    def values(self, recording: Recording, direction: D, *, components: bool) -> TokenValues:
        """Values of a recording, which has no forward where ``needs_forward`` is False.

        Without ``components`` both sides of M are not told apart: the total alone, by one
        contraction.

        Raises:
            NumericalError: a value is NaN or infinite.
        """
        values = self._values(recording, direction, components=components)
        losses = recording.losses if values.losses is None else values.losses
        if losses is not None:
            losses = losses.detach().to(values.total.device, wide(losses.dtype))
            losses = losses.masked_fill(~values.mask, 0.0)
        ids = recording.batch.inputs.get("input_ids")
        ids = None if ids is None else ids.clone()  # the caller may fill his buffer again
        return require_finite_values(replace(values, losses=losses, input_ids=ids))

    @abstractmethod
    def _values(self, recording: Recording, direction: D, *, components: bool) -> TokenValues: ...

    def at_step(self, recording: Recording, direction: Direction) -> Direction:
        """M for the step that this recording makes, where ``preconditioner="full"``."""
        if self.config.preconditioner != "full":
            return direction
        recorder, _ = recording.recorded
        gradient = self.inputs.step_gradient(recording.step_loss(), recorder)
        return self.inputs.at_step(direction, gradient)

    def combined(
        self,
        recording: Recording,
        direction: Direction,
        along: Callable[[Sequence[Side]], Sequence[DirectCausal]],
        *,
        components: bool,
    ) -> TokenValues:
        """Values of a recording; ``along`` computes those along each of several sides of M.

        With ``standard_errors`` the parts of the adaptation side stand in its place.
        """
        adaptation, stability = direction.sides(components=components)
        parts: Sequence[Side] = direction.parts
        first = parts or ([] if adaptation is None else [adaptation])
        by_side = along([*first, *([] if stability is None else [stability])])
        values = combine(
            _summed(by_side[: len(first)]),
            None if stability is None else by_side[-1],
            mask=recording.batch.mask,
            split=self.config.estimator in SPLIT,
            estimator=self.config.estimator,
            stability_weight=direction.stability_weight,
            balance=direction.balance if components else {},
        )
        if parts:
            by_batch = [direct + causal for direct, causal, _ in by_side[: len(parts)]]
            stacked = torch.stack(by_batch, -1)
            shares = stacked.new_tensor(direction.shares)
            values = replace(values, parts=stacked, part_shares=shares)
        if not components:
            return values.total_alone()
        if self.warn and not self._warned and adaptation is not None and stability is not None:
            self._warn_if_one_sided(values)
        return values

    def _warn_if_one_sided(self, values: TokenValues) -> None:
        shares = values.shares()
        stability = sum(v for k, v in shares.items() if k.startswith("stability"))
        # A share of exactly 0 is no fault: V is 0 as long as the weights are the reference's.
        if 0 < stability < 0.001 or stability > 0.999:
            side = "stability" if stability > 0.5 else "adaptation"
            self._warned = True
            warn_caller(
                f"The {side} side alone decides the ranking (share of stability "
                f"{stability:.2e}): lambda has no natural unit. Look at values.balance and set "
                "stability_weight accordingly.",
                AlphaTokenWarning,
            )


def _summed(parts: Sequence[DirectCausal]) -> DirectCausal | None:
    if not parts:
        return None
    return DirectCausal(*(reduce(torch.add, pieces) for pieces in zip(*parts, strict=True)))
