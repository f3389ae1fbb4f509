"""``Walk``: values by losses as they are, less losses at the end of a walk or of a second model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alphatoken.direction.age import require_gradients
from alphatoken.direction.algebra import Direction
from alphatoken.direction.cache import DirectionCache
from alphatoken.direction.objective import forward_losses
from alphatoken.direction.walk import losses_at, losses_of_reference, way_of
from alphatoken.errors import UnsupportedError
from alphatoken.estimate.differences import CHECKED_EVERY
from alphatoken.estimate.names import WALK
from alphatoken.estimate.token_values import combine, finite, undivided
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.modes import draws, evaluation_mode
from alphatoken.model.protocol import find_adapter
from alphatoken.scoring.estimator import Estimator, Side
from alphatoken.scoring.recording import Recording
from alphatoken.support.precision import wide
from alphatoken.values import TokenValues

__all__ = ["Walk"]

End = dict[str, Tensor]
"""Parameter name -> weight at the end of the walk; empty of a second model."""


class Walk(Estimator[End]):
    """``e_k = l_k(theta) - l_k(end)`` for every response token k, in nats, times its weight.

    One forward at the end, and one of the model as it is where the recording has no losses, or has
    drawn random numbers.

    Exactness: exact, up to the rounding of two forwards. Source: Rho-1 (excess loss);
    CoLoR-Filter. Oracle: ``alphatoken.oracle.walk.walk_values``.
    """

    def __init__(self, cache: DirectionCache[End]) -> None:
        super().__init__(cache)
        reference = self.inputs.arguments.reference
        self._reference = None if reference is None else find_adapter(reference)
        self._compared = 0  # recordings whose losses came with them
        self._prepared = 0  # uses of a second model
        # Whether the loss is known to depend on what walks: another setting may have switched it
        # off, and each value would be 0.
        self._depends = True

    def prepare(self, batch: LabelledBatch | None = None) -> End:
        """The end of the walk; a walk is taken where one is due. Empty of a second model."""
        if self._reference is not None:
            require_gradients(self.adapter.model)
            self._prepared += 1
            self.proofs.see_version(self._prepared)
            return {}
        builds = self.cache.builds  # and not the former end, which would stay in memory
        end = super().prepare(batch)
        if self.cache.builds == builds and not self._depends:
            self.inputs.gradient_of_step(0)
        self._depends = True
        self.proofs.see_version(self.cache.version)
        return end

    def prove(self, batch: LabelledBatch, sides: Sequence[Side] = ()) -> None:
        """Nothing but how the model reads the batch: losses are subtracted as they are."""
        self.proofs.see_arguments(batch)

    def carry_over(self, former: Estimator[End], *, same_parameters: bool) -> None:
        """Go on with the walk of the former estimator, where the same weights walk."""
        super().carry_over(former, same_parameters=same_parameters)
        if same_parameters:
            self.cache.follow(former.cache)
            self._depends = self.cache.kept is None

    def forget(self) -> None:
        """Compare losses of the next recording again."""
        self._compared = 0

    @finite
    def values(self, recording: Recording, direction: End, *, components: bool) -> TokenValues:
        """Values of a recording; ``direction`` is the end of the walk."""
        if self._reference is None:
            there = losses_at(self.inputs, direction, recording.batch)
        else:
            there = losses_of_reference(self._reference, recording.batch)
        here = self._losses(recording).to(there.device)
        self._compared += recording.losses is not None
        dtype = wide(here.dtype)
        values = (here.to(dtype) - there.to(dtype)).masked_fill(~recording.batch.mask, 0.0)
        if recording.token_weights is not None:
            values = values * recording.token_weights.to(values)
        whole = combine(undivided(values), None, mask=recording.batch.mask, estimator=WALK)
        return whole if components else whole.total_alone()

    def _losses(self, recording: Recording) -> Tensor:
        """Losses (b, t) of the model as it is, without dropout.

        Those of the recording where it has them; now and then, since it takes a forward, they are
        compared with a forward of the scorer's own.
        """
        draws_numbers = draws(self.adapter.model)
        own = None if draws_numbers or recording.losses is None else recording.losses.detach()
        if own is not None and self._compared % CHECKED_EVERY != 0:
            return own
        with torch.no_grad(), evaluation_mode(self.adapter.model):
            again = forward_losses(self.adapter, recording.batch, "batch")
        if own is None:
            return again
        recording.require_losses(again)
        return own

    def way(self) -> Direction:
        """M = -D, along which values are averages over the way; from the weights as they are.

        Raises:
            UnsupportedError: values are relative to a second model.
        """
        if self._reference is not None:
            raise UnsupportedError(
                "a second model gives no direction",
                got="Scorer(reference=...)",
                why="its parameters need not be those of the model",
                remedy="take score(); or walk there: leave reference out, with walk_steps",
            )
        return way_of(self.inputs, self.prepare())
