"""Values of one micro-batch: of the training forward as it runs, or of a forward of their own."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alphatoken.direction.objective import scoring_forward
from alphatoken.model.batch import label_mask, predicted_labels
from alphatoken.scorer import Observed
from alphatoken.train.distributed import Ranks
from alphatoken.train.fused_head import errors_only
from alphatoken.train.gradient_weights import GradientWeightedModel, by_token, gated_loss
from alphatoken.train.micro_batch import MicroBatch, Scored, undivided
from alphatoken.train.records import RunRecords
from alphatoken.train.selecting import selecting
from alphatoken.train.valuation import Valuation

if TYPE_CHECKING:
    from alphatoken.train.mixin import AlphaTrainerMixin

__all__ = ["MicroBatchValues", "walk_and_rest"]

_WALK = "walk/"
"""Before the names of the weights at its end, in a checkpoint."""


class MicroBatchValues:
    """One value a response token, against the direction of the step.

    Args:
        trainer: whose run it is.
        records: says whether the ledger wants components.
        build: makes the valuation, at the first step that needs one.

    In checkpoints are the norm of the step's gradient, which the next step's values need under a
    full preconditioner, and the end of the walk that values are taken to.
    """

    def __init__(
        self, trainer: AlphaTrainerMixin, records: RunRecords, build: Callable[[], Valuation]
    ) -> None:
        self._trainer, self._records, self.build = trainer, records, build
        self._options = trainer.args
        self._valuation: Valuation | None = None
        # Norm of the last step's gradient before it was cut; None where it was not taken.
        self._norm: Any = None
        self._walk: tuple[int, dict[str, Tensor]] | None = None

    @property
    def valuation(self) -> Valuation:
        """Built at the first training step, when model and optimizer are wrapped."""
        if self._valuation is None:
            self._valuation = self.build()
            if self._walk is not None:
                self._valuation.resume(*self._walk)
                self._walk = None
        return self._valuation

    @selecting()
    def begin(self) -> None:
        """Enter the current optimizer step: a new direction where one is due.

        Called for every micro-batch; only the first of a step does anything.
        """
        if not self._options.needs_values:
            return
        options, monitor = self._options, self._records.monitor
        step, started = self._trainer.state.global_step, time.perf_counter()
        self.valuation.begin(step)
        monitor.direction(time.perf_counter() - started)
        due = options.held_out_steps and step % options.held_out_steps == 0
        if due and monitor.looked_at != step:
            monitor.gap(step, self.valuation.objective_gap(step))

    def wanted(self, batch: MicroBatch) -> bool:
        """True if this micro-batch is valued. Where one process must, all do: it is collective."""
        if not self._options.needs_values:
            return False
        return Ranks(self._trainer.accelerator).any(bool(batch.mask.any()))

    @contextmanager
    def observing(self) -> Iterator[Observed]:
        """The scorer's ``observe``, the time on entering it logged as the direction's.

        On entering, the scorer builds the direction that this step's values are taken against,
        where it is new.
        """
        started = time.perf_counter()
        with ExitStack() as observing:
            with selecting():
                observed = observing.enter_context(self.valuation.scorer.observe())
            self._records.monitor.direction(time.perf_counter() - started)
            yield observed

    @selecting()
    def read(
        self,
        observed: Observed,
        gate: GradientWeightedModel,
        coefficients: Tensor,
        batch: MicroBatch,
    ) -> Scored:
        """Values of the micro-batch whose forward ``observed`` saw."""
        started = time.perf_counter()
        labels, mask = batch.labels, batch.mask
        empty = not bool(mask.any())
        if empty:  # on another process there is a response; this one takes part, and counts nothing
            labels = _with_one_label(labels, batch.inputs)
            mask = label_mask(labels)
        assert gate.log_probs is not None
        # Nothing above the first scored layer is a parameter of the values: its gradient is waste.
        below = self.valuation.scorer.scored.first is not None
        with errors_only(gate.log_probs) if below else nullcontext():
            values = observed.values(
                gate.scores,
                labels,
                token_weights=self._trainer.value_weights(coefficients, mask, batch.num_items),
                step_weights=self._step_weights(coefficients, batch),
                components=self._records.keeps_values,
            )
        if empty:
            return Scored(torch.zeros_like(values.total))
        return Scored(values.total, values, time.perf_counter() - started)

    @selecting()
    def of_own_forward(self, batch: MicroBatch) -> Scored:
        """Values of a forward that nothing is trained on (dropout off)."""
        first = self.valuation.scorer.scored.first
        gate = GradientWeightedModel(self._trainer.model)
        with _untouched_metrics(self._trainer), self.observing() as observed:
            with scoring_forward(self.valuation.adapter, first):
                loss = gated_loss(self._trainer, gate, batch)
            return self.read(observed, gate, gate.coefficients(loss), batch)

    # --- the step's gradient, for values of a full step -------------------------------------------

    def _step_weights(self, coefficients: Tensor, batch: MicroBatch) -> Tensor | None:
        """Weight (b, t) of each token's gradient in the step's, as the optimizer gets it.

        It is that of a step in which all tokens are kept. The step's gradient is estimated from
        this micro-batch, and its clipping is taken to be the last step's.
        """
        if self._options.preconditioner != "full":
            return None
        scale = self._trainer.step_scale(batch.num_items)
        whole = scale * undivided(batch, self._options.kept_normalization) * self.clip_factor
        return -by_token(coefficients) * whole

    def gradient_cut(self, norm: Any) -> None:
        """Take the norm that the step's gradient had before it was cut.

        It is stored where values of the next step are of a full step, and not read here, because
        reading it waits for the device.
        """
        if self._options.preconditioner == "full":
            self._norm = norm

    @property
    def clip_factor(self) -> float:
        """Factor by which the last step's gradient was cut; reading it waits for the device."""
        if self._norm is None:
            return 1.0
        self._norm = float(self._norm)
        return float(min(1.0, self._options.max_grad_norm / (self._norm + 1e-6)))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """State for a checkpoint: norm of the last gradient, and the walk that is in use."""
        # A resumed run builds its direction at its first step; so must the one that goes on.
        walk = None if self._valuation is None else self._valuation.checkpointed()
        norm = None if self._norm is None else float(self._norm)
        step, end = (None, {}) if walk is None else walk
        return {f"{_WALK}{n}": end[n] for n in end}, {"norm": norm, "walk": step}

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take back what ``state`` gave.

        A valuation that an earlier call or attempt of ``train`` built goes: its direction is of
        another step.
        """
        self._valuation, self._norm, self._walk = None, values["norm"], None
        if values["walk"] is not None:
            self._walk = values["walk"], {n.removeprefix(_WALK): t for n, t in tensors.items()}


def walk_and_rest(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of a checkpoint: those of ``MicroBatchValues.state``, and the others."""
    walk = {name: t for name, t in tensors.items() if name.startswith(_WALK)}
    return walk, {name: t for name, t in tensors.items() if name not in walk}


@contextmanager
def _untouched_metrics(trainer: Any) -> Iterator[None]:
    """TRL's running metrics see the training forward only."""
    names = ("_metrics", "_total_train_tokens")
    before = {n: copy.deepcopy(getattr(trainer, n)) for n in names if hasattr(trainer, n)}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(trainer, name, value)


def _with_one_label(labels: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Some token that the model predicts, labelled: values are taken of at least one."""
    ids = inputs["input_ids"]
    every = label_mask(predicted_labels(ids, inputs.get("attention_mask")))
    row, index = every.nonzero()[0].tolist()
    labels = labels.clone()
    labels[row, index] = ids[row, index]
    return labels
