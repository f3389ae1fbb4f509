"""``Captured``: values by contraction of errors at the scored linears with M.

    v_k  =  sum over uses at positions assigned to k of  delta^T M x

The errors delta come from one backward of the recorded forward, as the estimator defines them
(``estimate.estimators``); inputs x and errors are captured, and no gradient of a token is formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from alphatoken.direction.age import require_gradients
from alphatoken.direction.algebra import Direction
from alphatoken.errors import InputError, NumericalError
from alphatoken.estimate.columns import ColumnSums, contract_columns
from alphatoken.estimate.estimators import Consume, TokenErrors, token_errors
from alphatoken.estimate.token_values import DirectCausal, assign_columns, finite
from alphatoken.model.batch import LabelledBatch
from alphatoken.scoring.estimator import Estimator, Side
from alphatoken.scoring.recording import Recording, foreign_scores
from alphatoken.values import TokenValues

__all__ = ["Captured"]


class Captured(Estimator[Direction]):
    """Values of all estimators that contract captured errors: one backward for both sides of M.

    Exactness: see ``alphatoken.estimate.estimators``. Oracle: ``alphatoken.oracle.influence``.
    """

    needs_forward = True

    def prepare(self, batch: LabelledBatch | None = None) -> Direction:
        """M at the current weights; a model that is not covered is refused before it is built."""
        require_gradients(self.adapter.model)
        self._prove_pending(batch)
        direction = super().prepare(batch)
        self.proofs.see_version(self.cache.version)
        self._prove_pending(batch)
        return direction

    def prove(self, batch: LabelledBatch, sides: Sequence[Side] = ()) -> None:
        """Prove coverage and isolation on a forward of this batch; see ``Estimator.prove``."""
        # Whatever is wrong with the tokens of a slice is reported when their whole batch runs, by
        # their place in it; until then nothing is proved. Sharded weights are gathered by all
        # processes at once, and one that left its proof out would keep the others waiting: there
        # the whole batch is run, and its error is raised.
        with ExitStack() as stack:
            try:
                self.proofs.see_arguments(batch)
                recording = stack.enter_context(self.forward(batch))
            except (InputError, NumericalError):
                if self.scored.sharding is not None:
                    raise
                return
            self.proofs.see(*recording.recorded, batch.mask)

    @finite
    def values(
        self, recording: Recording, direction: Direction, *, components: bool
    ) -> TokenValues:
        """Values of a recorded forward; see ``Estimator.values``."""
        errors = self._all_errors(recording)
        direction = self.at_step(recording, direction)
        contracted = partial(self._contracted, recording, errors)
        return self.combined(recording, direction, contracted, components=components)

    def errors(self, recording: Recording, consume: Consume | None = None) -> TokenErrors:
        """Errors at the scored linears of the weighted losses, as the estimator defines them.

        Args:
            recording: of a forward.
            consume: gets each error inside the backward that makes it; none is kept then.
        """
        recorder, _ = recording.recorded
        self.proofs.require_rule(recorder)
        errors = token_errors(
            recorder,
            recording.summed_loss(),
            self.config.estimator,
            window=self.config.window,
            part=self.config.part,
            consume=consume,
        )
        # Every error would be None, and every value 0 without a warning.
        if not errors.reached:
            raise foreign_scores("the graph of another forward")
        return errors

    def _all_errors(self, recording: Recording) -> TokenErrors | None:
        """The errors at all scored linears under sharded weights; None elsewhere.

        The processes must gather M's matrices in one order, and a backward promises none. Elsewhere
        each error is contracted inside the backward that makes it, and let go.
        """
        if self.scored.sharding is None:
            return None
        errors = self.errors(recording)
        self.proofs.see(*recording.recorded, recording.batch.mask)
        return errors

    def _contracted(
        self, recording: Recording, errors: TokenErrors | None, sides: Sequence[Side]
    ) -> list[DirectCausal]:
        """Values along each side."""
        scored, (recorder, losses) = self.scored, recording.recorded
        mask = recording.batch.mask
        if errors is None or scored.sharding is None:
            sums = ColumnSums(recorder, sides, scored.names)
            self.errors(recording, sums.add)
            # After the errors, which also refuse a foreign graph; before any value is returned.
            self.proofs.see(recorder, losses, mask)
            columns = sums.columns()
        else:
            columns = contract_columns(
                recorder, errors, sides, scored.names, scored.sharding.gather
            )
        return [assign_columns(one, mask) for one in columns]
