"""``Estimator``: what turns a recorded forward and a direction into values.

There are three: ``Captured`` contracts captured errors with M, ``Label`` differentiates token
losses along M, ``Walk`` subtracts the losses at the end of a walk. ``Scorer`` uses each of them the
same way: ``prepare`` the direction, record a forward (``forward``, or the training loop's own), and
compute ``values`` of the recording.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from alphatoken.direction.age import require_gradients
from alphatoken.direction.algebra import Direction
from alphatoken.direction.cache import DirectionCache
from alphatoken.direction.inputs import DirectionInputs
from alphatoken.direction.objective import forward_losses, scoring_forward
from alphatoken.errors import AlphaTokenWarning, warn_caller
from alphatoken.estimate.names import SPLIT
from alphatoken.estimate.proofs import CaptureCheck
from alphatoken.estimate.token_values import DirectCausal, combine
from alphatoken.model.batch import LabelledBatch, read_batch
from alphatoken.model.batch_slice import around_responses
from alphatoken.scoring.recording import Recording, read_weights
from alphatoken.values import TokenValues

__all__ = ["Estimator", "Side"]

D = TypeVar("D")

Side = Mapping[str, Tensor]
"""One side of M: parameter name -> matrix, or this process's part of it."""


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
        scope = self.scored.scope
        self.proofs = CaptureCheck(
            self.adapter,
            scope,
            self.scored.parameters,
            self.scored.names,
            self.config.estimator,
            skipped=scope.uncovered if self.config.uncovered == "skip" else {},
            sharding=self.scored.sharding,
        )

    @property
    def inputs(self) -> DirectionInputs:
        """What the direction is built from now; ``set_validation`` and the like replace it."""
        return self.cache.inputs

    @property
    def needs_forward(self) -> bool:
        """Whether values need a recorded forward; without one they run forwards of their own."""
        return self.config.preconditioner == "full"

    # --- before the values -----------------------------------------------------------------------

    def read(
        self,
        batch: Mapping[str, Any],
        token_weights: Tensor | None = None,
        step_weights: Tensor | None = None,
    ) -> tuple[LabelledBatch, Tensor | None, Tensor | None]:
        """The batch and the weights on its token losses, checked: the first step of a valuation.

        Raises:
            InputError: see ``read_batch`` and ``read_weights``.
        """
        adapter = self.adapter
        checked = read_batch(batch, max_length=adapter.max_positions(), model=adapter.model)
        return (
            checked,
            read_weights("token", token_weights, checked.mask),
            read_weights("step", step_weights, checked.mask),
        )

    def prepare(self, batch: LabelledBatch | None = None) -> D:
        """The direction at the current weights, built where it is stale, with the proofs due.

        Args:
            batch: the one that will be valued, if it is at hand; the proofs look at a slice of it
                where M is built from no batch.

        Raises:
            ModelError, UnsupportedError, CoverageError: see ``estimate.proofs``.
        """
        require_gradients(self.adapter.model)
        return self.cache.current()

    @abstractmethod
    def prove(self, batch: LabelledBatch, sides: Sequence[Side] = ()) -> None:
        """Run the proofs that are due on a forward of this batch, a slice.

        Args:
            batch: checked.
            sides: of M; derivatives are proved along the first that is not zero.

        Raises:
            ModelError, UnsupportedError, CoverageError: see ``estimate.proofs``.
        """

    def carry_over(self, former: Estimator[D], *, same_parameters: bool) -> None:
        """Go on as another estimator of the same scorer, whose model has changed, would have.

        Args:
            former: the one that this one replaces.
            same_parameters: only settings have changed, and no parameter was replaced or frozen.
        """
        self.warn, self._warned = former.warn, former._warned
        self.cache.pin(former.cache.pinned)

    def forget(self) -> None:
        """Keep nothing that depends on batches that were valued."""

    def _prove_pending(self, batch: LabelledBatch | None, sides: Sequence[Side] = ()) -> None:
        """Prove what is due on the first batch that M is built from, or else on this one.

        A slice of it is shown; under sharded weights all processes run whole batches.
        """
        if not self.proofs.pending:
            return
        shown = self.inputs.first_batch() or batch
        if shown is not None:
            whole = self.scored.sharding is not None
            self.prove(shown if whole else around_responses(shown), sides)

    # --- values ----------------------------------------------------------------------------------

    @contextmanager
    def forward(
        self,
        batch: LabelledBatch,
        token_weights: Tensor | None = None,
        step_weights: Tensor | None = None,
    ) -> Iterator[Recording]:
        """A recorded forward of the scorer's own, in evaluation mode."""
        # The recorder outlives the forward: errors are computed inside the ``with`` of the caller.
        with self.proofs.recording() as recorder:
            with scoring_forward(self.adapter, self.scored.first):
                losses = forward_losses(self.adapter, batch, "batch")
            yield Recording(
                batch, token_weights, step_weights, losses, recorder, products=recorder.products
            )

    @abstractmethod
    def values(self, recording: Recording, direction: D, *, components: bool) -> TokenValues:
        """Values of a recording; without ``components`` the total alone, by one contraction.

        Args:
            recording: of the batch; without a forward where ``needs_forward`` is False.
            direction: as ``prepare`` gave it.
            components: whether both sides of M are to be told apart.

        Raises:
            NumericalError: a value is NaN or infinite.
        """

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
        """Values from those along the sides of M, or along the parts of its adaptation side.

        Args:
            recording: of the batch.
            direction: M.
            along: values along each of several sides.
            components: as for ``values``.
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
    """The sum of the values along several parts of a side; None of none."""
    if not parts:
        return None
    return DirectCausal(*(reduce(torch.add, pieces) for pieces in zip(*parts, strict=True)))
