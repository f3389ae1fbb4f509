"""The loss of a trainer as token weights act on it, and the micro-batches that it is made of.

A trainer hands ``TrainerLoss`` to its weigher and to its valuation, and not itself. A kind of
trainer whose loss, labels or coefficients are others has a subclass: ``PairLoss`` for DPO, and
``LogitsLoss`` for transformers' own trainer.

The trainer's hooks cannot hand anything to each other but the batch itself. So what the plan of a
step decides (``get_batch_samples``) travels inside the batch, under the key ``PLAN_KEY``, to where
it is trained on. ``training_step`` takes it out again before anything else reads the batch. Labels
do not travel: they are read in ``compute_loss``, from the inputs of the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alphatoken.model.batch import label_mask, predicted_labels, response_places
from alphatoken.support.devices import remember_places
from alphatoken.support.seeds import seed_of
from alphatoken.train.distributed import Ranks
from alphatoken.train.interface import TrainerInterface
from alphatoken.train.log_prob_proxy import LogProbProxy, by_token
from alphatoken.train.policy import TokenPolicy
from alphatoken.values import TokenValues

PLAN_KEY = "alphatoken_carried"
"""Key of a batch under which its ``MicroBatchPlan`` travels from one hook to the next."""

ROW_WEIGHTS_KEY = "alphatoken_row_weights"
"""Key of a batch under which the weights that its rows bring stand; see ``row_weights``."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """Decisions of the optimizer step's plan for one micro-batch.

    Attributes:
        index: number of this micro-batch within its optimizer step.
        kept_share: kept tokens over those of the loss, of the whole step, where they divide it.
        counted: kept tokens of this micro-batch by a static policy, where they were counted.
        weights: (b, t), where a threshold over the whole step decided them; None otherwise.
        values: that the weights came from; None where this process has no response in it.
        extra: inputs that valuing added, such as the reference's log-probabilities.
        columns: of a policy's static pass, where counting needed them already.
    """

    index: int
    kept_share: float | None = None
    counted: Tensor | None = None
    weights: Tensor | None = None
    values: TokenValues | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Tensor] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class MicroBatch:
    """Inputs, labels and masks of one micro-batch, each read once.

    Attributes:
        inputs: the trainer's batch.
        labels: (b, t) unshifted labels, -100 off the response.
        mask: (b, t) response tokens, those that have a value.
        loss_mask: (b, t) tokens that the trainer's own loss counts: beside ``mask`` those that
            padding predicts, as it does the first one of a row padded on the left.
        rank_groups: rows that are ranked together; chosen, then rejected, in a preference trainer.
        unit_of: (loss_mask, num_items, micro-batches of the step) -> ``unit``; called only where
            it is needed, because it waits for the device.
        plan: what the plan of its step decided for it.
        num_items: transformers' count of the tokens of the step's loss, or None.
        steps: micro-batches of its optimizer step.
        processes: over which the step's gradient is averaged beside ``unit``.
        row_weights: (b, t) that the rows bring, where they are read.
    """

    inputs: Mapping[str, Any] = field(repr=False)
    labels: Tensor
    mask: Tensor
    loss_mask: Tensor
    rank_groups: Sequence[slice]
    unit_of: Callable[[Tensor, Any, int], float] = field(repr=False)
    plan: MicroBatchPlan
    num_items: Any = None
    steps: int = 1
    processes: int = 1
    row_weights: Tensor | None = field(default=None, repr=False)

    @property
    def unit(self) -> float:
        """Weight of one token's loss in the trainer's own loss, beside ``value_weights``."""
        return self.unit_of(self.loss_mask, self.num_items, self.steps)

    @property
    def step_unit(self) -> float:
        """The same in the gradient that the optimizer gets."""
        return self.unit / self.processes


def undivided(batch: MicroBatch, kind: str) -> float:
    """Factor that undoes the divisor and the processes' mean if the loss is to be a sum; else 1."""
    return 1.0 / batch.step_unit if kind == "sum" else 1.0


def divisor_factor(
    weights: Tensor, batch: MicroBatch, kind: str, kept_share: float | None = None
) -> float | Tensor:
    """Factor on the weights by which another divisor than the trainer's own divides the loss.

    Args:
        weights: (b, t) of the tokens.
        batch: whose they are.
        kind: "response" (the trainer's own divisor), "kept" (the kept tokens) or "sum" (none).
        kept_share: kept tokens over those of the loss, of the whole step; None takes the
            micro-batch's own.
    """
    if kind != "kept":
        return undivided(batch, kind)
    if kept_share is not None:
        return 1 / kept_share
    kept = weights.sum()
    # Where nothing is kept the step does not move along the micro-batch.
    return batch.loss_mask.sum() / torch.where(kept > 0, kept, torch.inf)


AROUND: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar(
    "around_selection", default=nullcontext
)
"""Entered around whatever scores tokens or makes masks; a benchmark measures its cost by it."""


@contextmanager
def selecting() -> Iterator[None]:
    """Mark code that scores tokens or makes masks; see ``AROUND``."""
    with AROUND.get()():
        yield


class TrainerLoss:
    """Loss, labels and coefficients of one trainer; by default those of TRL's ``SFTTrainer``.

    Args:
        trainer: whose loss it is. Its model, optimizer and step are read when they are needed,
            because training wraps and moves them.
        compute_loss: of the trainer below it in the bases, which makes the loss.
    """

    def __init__(self, trainer: TrainerInterface, compute_loss: Callable[..., Any]) -> None:
        self._trainer: Any = trainer  # subclasses read of it what their kind of trainer has
        self._compute_loss = compute_loss

    # --- the run ----------------------------------------------------------------------------------

    @property
    def args(self) -> Any:
        """Configuration of the run, one of ours."""
        return self._trainer.args

    @property
    def accelerator(self) -> Any:
        """accelerate's ``Accelerator`` of the run."""
        return self._trainer.accelerator

    @property
    def ranks(self) -> Ranks:
        """This process among those of the run."""
        return Ranks(self._trainer.accelerator)

    @property
    def model(self) -> Any:
        """The trained model, not wrapped for its layout."""
        return self._trainer.model

    @property
    def optimizer(self) -> Any:
        """The run's optimizer; None before training."""
        return self._trainer.optimizer

    @property
    def step(self) -> int:
        """Number of the current optimizer step, from 0."""
        return int(self._trainer.state.global_step)

    def draw_seed(self, batch: MicroBatch) -> int:
        """A seed that is a function of (run seed, step, micro-batch, rank)."""
        return seed_of(
            "micro-batch",
            self.args.value_seed,
            self.step,
            batch.plan.index,
            self.accelerator.process_index,
        )

    # --- batches ----------------------------------------------------------------------------------

    def prepared(self, sample: Any) -> Any:
        """A batch of the collator on the device, as the trainer hands it to its model."""
        return self._trainer._prepare_inputs(sample)

    def row_batch(self, rows: Sequence[dict[str, Any]]) -> Any:
        """Validation or retention rows as one batch on the model's device."""
        return self._trainer.row_batch(rows)

    def row_length(self, row: Mapping[str, Any]) -> int:
        """Tokens of a validation or retention row in a batch."""
        return int(self._trainer.row_length(row))

    def prepare_pool(self, rows: list[dict[str, Any]]) -> None:
        """Add to validation and retention rows what only the prepared model can give."""
        self._trainer.prepare_pool(rows)

    def micro_batch(
        self, inputs: Mapping[str, Any], plan: MicroBatchPlan, num_items: Any
    ) -> MicroBatch:
        """Labels, masks and groups of a batch, each read once."""
        row_weights = None
        if ROW_WEIGHTS_KEY in inputs:  # which no model takes
            rest: Any = copy.copy(inputs)
            row_weights, inputs = rest.pop(ROW_WEIGHTS_KEY), rest
        labels = self.response_labels(inputs)
        mask = label_mask(labels)
        remember_places(mask, response_places(labels))
        return MicroBatch(
            inputs=inputs,
            labels=labels,
            mask=mask,
            loss_mask=label_mask(self.loss_labels(inputs)),
            rank_groups=self.rank_groups(len(mask)),
            unit_of=self.unit,
            plan=plan,
            num_items=num_items,
            steps=int(self._trainer.current_gradient_accumulation_steps),
            processes=self.processes(num_items),
            row_weights=row_weights,
        )

    def loss_labels(self, inputs: Mapping[str, Any]) -> Tensor:
        """Labels (b, t) of a training batch, unshifted, as the trainer's own loss counts them."""
        labels: Tensor = inputs["labels"]
        return labels

    def response_labels(self, inputs: Mapping[str, Any]) -> Tensor:
        """Those of them that have a value; -100 where padding would predict the token."""
        mask = inputs.get("attention_mask")
        return predicted_labels(self.loss_labels(inputs), mask, "training batch")

    def rank_groups(self, rows: int) -> list[slice]:
        """Rows of a batch that are ranked together: all of them, or branch by branch."""
        return [slice(0, rows)]

    # --- the loss ---------------------------------------------------------------------------------

    def of(self, proxy: LogProbProxy, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """The trainer's own loss, with the proxy in the model's place."""
        loss = self._compute_loss(proxy, inputs, num_items_in_batch=num_items)
        assert isinstance(loss, Tensor)
        return loss

    def note_rewards(self, rewards: Tensor) -> None:
        """Note rewards of pairs for the log; a trainer of none has no place for them."""

    def own_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs of a forward that nothing is trained on."""
        return dict(inputs)

    @contextmanager
    def beside_training(self) -> Iterator[None]:
        """Inside, a loss leaves TRL's running metrics alone, which are of training forwards."""
        trainer, names = self._trainer, ("_metrics", "_total_train_tokens")
        before = {n: copy.deepcopy(getattr(trainer, n)) for n in names if hasattr(trainer, n)}
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(trainer, name, value)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision in which the trainer computes its losses."""
        context: AbstractContextManager[Any] = self._trainer.compute_loss_context_manager()
        return context

    # --- coefficients -----------------------------------------------------------------------------

    def value_weights(self, coefficients: Tensor, mask: Tensor, num_items: Any) -> Tensor | None:
        """Factor on each token's loss in its value (b, t); None for 1.

        It is 1 for cross-entropy; other losses weigh each token by what they make of it.

        Args:
            coefficients: (b, t - 1) of the loss.
            mask: (b, t) response tokens.
            num_items: transformers' count of the tokens of the step's loss, or None.
        """
        if getattr(self.args, "loss_type", "nll") == "nll":
            return None
        # The loss divides by the count; what is left of a coefficient is the token's factor.
        count = float(mask.sum() if num_items is None else num_items)
        if num_items is not None and self.args.average_tokens_across_devices:
            count /= self.accelerator.num_processes  # TRL multiplies the loss by it
        return -by_token(coefficients) * count

    def unit(self, mask: Tensor, num_items: Any, steps: int) -> float:
        """Weight of one token's loss in the trainer's own loss, beside ``value_weights``."""
        count = mask.sum() if num_items is None else num_items
        # Without a count of the step each micro-batch is a mean, and the step a mean of them.
        share = 1 if num_items is not None else steps
        return 1.0 / (max(float(count), 1.0) * share)

    def processes(self, num_items: Any) -> int:
        """Processes whose mean the step's gradient is; 1 where the count is of all of them."""
        # By such a count the trainers multiply their loss by the processes.
        of_all = num_items is not None and self.args.average_tokens_across_devices
        return 1 if of_all else self.ranks.world

    def step_scale(self, num_items: Any) -> float:
        """Factor from a micro-batch's gradient to an estimate of the whole step's."""
        # By a count of the step a micro-batch's gradient is a share of the step's, else a mean.
        steps = float(self._trainer.current_gradient_accumulation_steps)
        return steps if num_items is not None else 1.0

    def final_coefficients(
        self,
        proxy: LogProbProxy,
        coefficients: Tensor,
        weights: Tensor,
        inputs: Mapping[str, Any],
    ) -> Tensor:
        """Coefficients of the update once the weights are decided, before they are normalised."""
        return coefficients

    # --- a reference model ------------------------------------------------------------------------

    def reference_log_probs(
        self, inputs: Mapping[str, Any], policy: TokenPolicy
    ) -> tuple[dict[str, Any], Tensor | None]:
        """Inputs, and (b, t) log-probabilities of the reference model if the policy needs them."""
        return dict(inputs), None

    def reference_logits(self, policy: TokenPolicy) -> Callable[[Mapping[str, Any]], Tensor] | None:
        """Inputs of a forward to logits of the reference model; None where there is none."""
        return None
