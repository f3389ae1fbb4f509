"""Values from a pass: the sides of M, the contraction with each, and their sum.

The order is always the same: ``read`` a batch, ``prepare`` the direction, have a forward run (by
``forward``, or by the user's training loop), and take ``values`` of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from alphatoken.direction.age import require_gradients
from alphatoken.direction.current import DirectionBuilder, Frame
from alphatoken.direction.objective import forward_losses, scoring_forward
from alphatoken.errors import (
    AlphaTokenWarning,
    InputError,
    NumericalError,
    UnsupportedError,
    warn_caller,
)
from alphatoken.estimate.choices import watching_choices
from alphatoken.estimate.columns import ColumnSums, Side, contract_columns
from alphatoken.estimate.differences import CHECKED_EVERY
from alphatoken.estimate.estimators import SPLIT, Consume, TokenErrors, token_errors
from alphatoken.estimate.proofs import CaptureCheck
from alphatoken.estimate.token_values import assign_columns, combine, finite, undivided
from alphatoken.model.batch import LabelledBatch, read_batch
from alphatoken.model.batch_slice import around_responses
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.scoring.along_walk import along_walk
from alphatoken.scoring.label import LabelDerivative, Taken
from alphatoken.scoring.passes import Pass, Weights, foreign_scores
from alphatoken.support.precision import float16_named
from alphatoken.values import TokenValues

__all__ = ["Valuer"]

Parts = tuple[Tensor, Tensor, Tensor]
"""(direct, causal, unassigned) of one side, by token; see ``assign_columns``."""


class Valuer:
    """Values passes of one model against one direction.

    Args:
        adapter: of the model.
        builder: M at the current parameters; asked once a valuation, by ``prepare``.
        capture_check: the proofs that run once, before the first values.

    Attributes:
        warn: say so once when one side of M decides the ranking alone.
    """

    def __init__(
        self, adapter: DecoderAdapter, builder: DirectionBuilder, capture_check: CaptureCheck
    ) -> None:
        self.adapter, self.builder, self.capture_check = adapter, builder, capture_check
        self.config, self.scored = builder.made_of.config, builder.made_of.scored
        self.warn = True
        self._warned = False
        self._observed = 0  # passes along a walk whose losses came with them
        self._derivative = LabelDerivative(adapter, self.config.derivative, self.scored)

    @property
    def needs_recording(self) -> bool:
        """True if values need a recorded forward: label values along a fixed M do not."""
        return self.config.captured or self.config.preconditioner == "full"

    def warned_as(self, former: Valuer) -> None:
        """Warn as another valuer of the same scorer would from here on."""
        self.warn, self._warned = former.warn, former._warned

    def forget(self) -> None:
        """Keep nothing that depends on the batches that were valued."""
        self._derivative.forget()
        self._observed = 0

    # --- before the values -----------------------------------------------------------------------

    def read(
        self, batch: Mapping[str, Any], token_weights: Tensor | None, step_weights: Tensor | None
    ) -> tuple[LabelledBatch, Weights]:
        """Check a batch and the weights on its token losses; the first step of every valuation."""
        adapter = self.adapter
        checked = read_batch(batch, max_length=adapter.max_positions(), model=adapter.model)
        return checked, Weights.read(checked.mask, token_weights, step_weights)

    def prepare(self, batch: LabelledBatch | None = None) -> Frame:
        """Build M for the current parameters, where it is not built; passes are valued with it.

        Args:
            batch: the one that will be valued, if it is known; the proofs look at a slice of it
                where M is built from no batch.
        """
        require_gradients(self.adapter.model)
        shown = self.builder.made_of.first_batch() or batch
        # Before M: a model that is not covered is refused before the work on all validation
        # batches. Derivatives are proved along M.
        if self.capture_check.pending and self.config.captured and shown is not None:
            self.prove(self._slice(shown))
        frame = self.builder.prepare()
        self.capture_check.see_direction(frame.direction)
        if self.capture_check.pending and shown is not None:
            self.prove(self._slice(shown), () if self.config.captured else _sides(frame))
        return frame

    def _slice(self, batch: LabelledBatch) -> LabelledBatch:
        return around_responses(batch) if self.scored.sharding is None else batch

    def prove(self, batch: LabelledBatch, sides: Sequence[Mapping[str, Tensor]] = ()) -> None:
        """Show the proofs a forward of this batch; what is given already is not given again.

        Args:
            batch: a slice.
            sides: of M by parameter name; derivatives of label values are proved along the first
                that is not zero.

        Raises:
            ModelError, UnsupportedError, CoverageError: see ``estimate.proofs``.
        """
        with ExitStack() as stack:
            # Whatever is wrong with the tokens of a slice is said when their whole batch runs, by
            # their place in it; until then nothing is proved. Sharded weights are gathered by all
            # processes at once, and one that left its proof out would keep the others waiting:
            # there the whole batch is shown, and its error is raised.
            try:
                self.capture_check.see_arguments(batch)
                if not self.config.captured:
                    self._prove_label(batch, sides)
                    return
                seen = stack.enter_context(self.forward(batch, Weights(None, None)))
            except (InputError, NumericalError):
                if self.scored.sharding is not None:
                    raise
                return
            self.capture_check.see(*seen.recorded, batch.mask)

    def _prove_label(self, batch: LabelledBatch, sides: Sequence[Mapping[str, Tensor]]) -> None:
        # V is 0 before the first step.
        m = next((side for side in sides if any(bool(x.any()) for x in side.values())), {})
        with scoring_forward(self.adapter, self.scored.first), watching_choices() as choices:
            losses = forward_losses(self.adapter, batch, "batch")
        with float16_named(self.adapter.model, (UnsupportedError, NumericalError)):
            relative = self._derivative.prove(batch, losses, m, chooses=choices.made)
        # Differences are proved along M: where it is 0 yet, the next forward is looked at too.
        self.capture_check.derivatives_agree(relative, pending=not m)

    @contextmanager
    def forward(self, batch: LabelledBatch, weights: Weights) -> Iterator[Pass]:
        """A recorded forward of the scorer's own, in evaluation mode."""
        # The recorder outlives the forward: errors are taken inside the ``with`` of whoever calls.
        with self.capture_check.recording() as recorder:
            with scoring_forward(self.adapter, self.scored.first):
                losses = forward_losses(self.adapter, batch, "batch")
            yield Pass(batch, weights, losses, recorder, products=recorder.products)

    # --- values ----------------------------------------------------------------------------------

    @finite
    def values(self, frame: Frame, seen: Pass, *, components: bool) -> TokenValues:
        """Values of a pass; without ``components`` the total alone, by one contraction."""
        if frame.end is not None:
            # Not each time, since it takes a forward.
            due = self._observed % CHECKED_EVERY == 0
            values = along_walk(self.adapter, frame.end, seen, compare=due)
            self._observed += seen.losses is not None
            return values if components else values.total_alone()
        frame = self.at(frame, seen)
        direction = frame.direction
        adaptation, stability, balance = frame.sides(components=components)
        parts = tuple(Side(part) for part in direction.parts)
        ahead = list(parts) if adaptation is None or parts else [adaptation]
        sides = ahead if stability is None else [*ahead, stability]
        taken = [] if self.config.captured else self._label(frame, seen, sides)
        found = [undivided(one.values) for one in taken] or self._contracted(seen, sides)
        values = combine(
            _summed(found[: len(ahead)]),
            None if stability is None else found[-1],
            mask=seen.batch.mask,
            split=self.config.estimator in SPLIT,
            estimator=self.config.estimator,
            stability_weight=direction.stability_weight,
            balance=balance,
        )
        if taken:
            worst = max(taken, key=lambda one: one.error)
            values = replace(
                values, derivative=taken[0].way, error=worst.error, error_age=worst.age
            )
        if parts:
            by_batch = torch.stack(
                [direct + causal for direct, causal, _ in found[: len(parts)]], -1
            )
            shares = by_batch.new_tensor(direction.shares)
            values = replace(values, parts=by_batch, part_shares=shares)
        if not components:
            return values.total_alone()
        if self.warn and adaptation is not None and stability is not None and not self._warned:
            self._warn_if_one_sided(values)
        return values

    def at(self, frame: Frame, seen: Pass) -> Frame:
        """The frame for the step that this pass makes, where ``preconditioner="full"``."""
        if self.config.preconditioner != "full":
            return frame
        recorder, _ = seen.recorded
        return frame.at_step(seen.step_loss(), recorder)

    def errors(self, seen: Pass, consume: Consume | None = None) -> TokenErrors:
        """Errors at the scored linears of the weighted losses, as the estimator defines them.

        Args:
            seen: a recorded pass.
            consume: gets each error inside the backward that makes it; none is kept then.
        """
        recorder, _ = seen.recorded
        self.capture_check.require_rule(recorder)
        errors = token_errors(
            recorder,
            seen.summed_loss(),
            self.config.estimator,
            window=self.config.window,
            part=self.config.part,
            consume=consume,
        )
        # Every error would be None, and every value 0 without a word.
        if not errors.reached:
            raise foreign_scores("the graph of another forward")
        return errors

    def with_kept_errors(self, seen: Pass) -> Pass:
        """The pass with the errors at all scored linears, where they are to be kept.

        They are kept under sharded weights alone: the processes must gather M's matrices in one
        order, and a backward promises none. Label values need no errors.
        """
        if not self.config.captured or self.scored.sharding is None:
            return seen
        errors = self.errors(seen)
        self.capture_check.see(*seen.recorded, seen.batch.mask)
        return replace(seen, kept_errors=errors)

    def _contracted(self, seen: Pass, sides: Sequence[Side]) -> list[Parts]:
        """Values for all estimators but label: errors at the linears, contracted with each side."""
        scored, (recorder, losses) = self.scored, seen.recorded
        # Nothing kept: all sides are contracted inside the backward, with each error as it comes.
        if seen.kept_errors is None:
            sums = ColumnSums(recorder, sides, scored.names)
            self.errors(seen, sums.add)
            # After the errors, which also refuse a foreign graph; before any value is returned.
            self.capture_check.see(recorder, losses, seen.batch.mask)
            columns = sums.columns()
        else:
            gather = None if scored.sharding is None else scored.sharding.gather
            columns = contract_columns(recorder, seen.kept_errors, sides, scored.names, gather)
        return [assign_columns(one, seen.batch.mask) for one in columns]

    def _label(self, frame: Frame, seen: Pass, sides: Sequence[Side]) -> list[Taken]:
        """Label values along each side."""
        # M is built from no batch then, and none was known before this one.
        if self.capture_check.pending:
            with nullcontext() if seen.recorder is None else seen.recorder.aside():
                self.prove(around_responses(seen.batch), _sides(frame))
        shown = self.builder.made_of.first_batch
        return [
            _weighted(self._derivative.of(seen, side.whole(), number, shown), seen)
            for number, side in enumerate(sides)
        ]

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


def _sides(frame: Frame) -> Sequence[Mapping[str, Tensor]]:
    return frame.direction.adaptation, frame.direction.stability or {}


def _weighted(taken: Taken, seen: Pass) -> Taken:
    """``<grad(w l), M> = w <grad l, M>``: rows of Psi scale with their own token's weight."""
    weights = seen.weights.token
    if weights is None:
        return taken
    return replace(taken, values=taken.values * weights.to(taken.values))


def _summed(parts: Sequence[Parts]) -> Parts | None:
    """The sum of several parts, piece by piece; None of none."""
    if not parts:
        return None
    direct, causal, unassigned = (reduce(torch.add, pieces) for pieces in zip(*parts, strict=True))
    return direct, causal, unassigned
