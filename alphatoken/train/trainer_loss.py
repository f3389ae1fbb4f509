"""The loss of a trainer as token weights act on it, and what there is to know of its run.

A trainer hands this object to its weigher and to its valuation, and not itself. A kind of trainer
whose loss, labels or coefficients are others has a subclass: ``pair_loss`` for DPO, and
``LogitsLoss`` for transformers' own trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from alphatoken.model.batch import label_mask, predicted_labels
from alphatoken.support.seeds import seed_of
from alphatoken.train.distributed import Ranks
from alphatoken.train.interface import TrainerInterface
from alphatoken.train.log_prob_proxy import LogProbProxy, by_token
from alphatoken.train.micro_batch import MicroBatch, MicroBatchPlan
from alphatoken.train.policy import TokenPolicy

__all__ = ["TrainerLoss"]


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

    def prepare_pool(self, rows: list[dict[str, Any]]) -> None:
        """Whatever validation and retention rows need that only the prepared model can give."""
        self._trainer.prepare_pool(rows)

    def micro_batch(
        self, inputs: Mapping[str, Any], plan: MicroBatchPlan, num_items: Any
    ) -> MicroBatch:
        """Labels, masks and groups of a batch, each read once."""
        labels = self.response_labels(inputs)
        mask = label_mask(labels)
        return MicroBatch(
            inputs=inputs,
            labels=labels,
            mask=mask,
            loss_mask=label_mask(self.loss_labels(inputs)),
            rank_groups=self.rank_groups(len(mask)),
            unit_of=self.unit,
            plan=plan,
            num_items=num_items,
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
        count = float(mask.sum() if num_items is None else num_items)
        if num_items is not None and self.args.average_tokens_across_devices:
            count /= self.accelerator.num_processes  # TRL multiplies the loss by it
        return -by_token(coefficients) * count

    def unit(self, mask: Tensor, num_items: Any) -> float:
        """Weight of one token's loss in the trainer's own loss, beside ``value_weights``."""
        count = mask.sum() if num_items is None else num_items
        share = 1 if num_items is not None else self._trainer.current_gradient_accumulation_steps
        return 1.0 / (max(float(count), 1.0) * share)

    def step_scale(self, num_items: Any) -> float:
        """Factor from a micro-batch's gradient to an estimate of the whole step's."""
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
