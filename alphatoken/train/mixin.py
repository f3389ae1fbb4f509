"""What all trainers share: score, choose, gate; nothing else of the trainer is touched.

``AlphaTrainerMixin`` goes before a trainer in the bases. One micro-batch, with a shared forward:

    begin the step       validation rows, schedules, direction M (once per optimizer step)
    observe              the trainer's own forward, through the gate
    coefficients         c = d loss / d log-probabilities, of whatever loss the trainer computes
    values, weights      one value a response token; the policy makes weights of them
    surrogate            the trainer's loss in value, the sum of w c lp in gradient

A ``TokenPolicy`` in place of values is carried out by ``alphatoken.train.policy_mixin``.

The own forward (DeepSpeed, or ``keep_scope="global"``) runs the first four without a backward,
then the trainer's step with the weights at hand.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alphatoken.direction.drift import FisherDrift
from alphatoken.direction.objective import scoring_forward
from alphatoken.errors import ConfigError, NumericalError, UnsupportedError
from alphatoken.model.batch import label_mask, predicted_labels
from alphatoken.model.capture import find_scope
from alphatoken.model.layer_choice import read_layers
from alphatoken.model.protocol import find_adapter
from alphatoken.report.page import missing_libraries
from alphatoken.scorer import Observed
from alphatoken.select.interaction import select_diverse
from alphatoken.select.masks import keep_count, response_values
from alphatoken.select.weights import token_weights
from alphatoken.train.checkpoint import CheckpointMixin
from alphatoken.train.checks import Given, check_lengths, check_pool, check_run
from alphatoken.train.distributed import (
    Ranks,
    global_selection,
    needs_own_forward,
    sharded_drift,
    sharding_of,
)
from alphatoken.train.fisher_cache import (
    cache_folder,
    check_fisher_rows,
    fisher_tensors,
    fitted_fisher,
)
from alphatoken.train.gate import TokenGate, by_token
from alphatoken.train.ledger import ValueLedger
from alphatoken.train.manifest import RESULTS
from alphatoken.train.monitor import TrainMonitor, weight_drift
from alphatoken.train.policy import TokenPolicy
from alphatoken.train.policy_mixin import PolicyMixin
from alphatoken.train.policy_names import chosen_policy
from alphatoken.train.pool import ValidationPool
from alphatoken.train.report import write_run_report
from alphatoken.train.valuation import Valuation
from alphatoken.values import TokenValues

if TYPE_CHECKING:
    from transformers import Trainer

    _Base = Trainer
else:
    _Base = object

__all__ = ["AlphaTrainerMixin", "Scored"]


@dataclass(frozen=True)
class Scored:
    """One scored micro-batch: totals to rank by, and what the records need.

    Attributes:
        totals: (b, t) value of each response token.
        mask: (b, t) response tokens.
        values: as the scorer gave them; None where values of an earlier visit are reused.
        gram: inner products of the token gradients, where the policy asks for them.
        seconds: spent on scoring, the shared forward not included.
    """

    totals: Tensor
    mask: Tensor
    values: TokenValues | None = None
    gram: Tensor | None = None
    seconds: float = 0.0


class AlphaTrainerMixin(PolicyMixin, CheckpointMixin, _Base):
    """Token valuation and selection for a trainer; see the module's text."""

    # Of the trainers' own classes, which type each of these differently.
    args: Any
    model: Any
    processing_class: Any
    train_dataset: Any

    # --- what a trainer says of itself ----------------------------------------------------------

    def response_labels(self, inputs: Mapping[str, Any]) -> Tensor:
        """Labels (b, t) of a training batch, unshifted, -100 off the response."""
        return predicted_labels(inputs["labels"], inputs.get("attention_mask"))

    def pools(self, rows: int) -> list[slice]:
        """Rows of a batch that are ranked together: all of them, or branch by branch."""
        return [slice(0, rows)]

    def base_loss(self, model: Any, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """The trainer's own loss, with the gate in the model's place."""
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items)
        assert isinstance(loss, Tensor)
        return loss

    def own_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs of a pass that is not the training forward."""
        return dict(inputs)

    def value_weights(self, coefficients: Tensor, mask: Tensor, num_items: Any) -> Tensor | None:
        """Factor on each token's loss in its value (b, t); None for 1."""
        return None

    def loss_unit(self, mask: Tensor, num_items: Any) -> float:
        """Weight of one token's loss in the trainer's own loss, beside ``value_weights``."""
        count = mask.sum() if num_items is None else num_items
        share = 1 if num_items is not None else self.current_gradient_accumulation_steps
        return 1.0 / (max(float(count), 1.0) * share)

    def step_scale(self, num_items: Any) -> float:
        """From a micro-batch's gradient to an estimate of the whole step's."""
        return float(self.current_gradient_accumulation_steps) if num_items is not None else 1.0

    def final_coefficients(
        self, gate: TokenGate, coefficients: Tensor, weights: Tensor, inputs: Mapping[str, Any]
    ) -> Tensor:
        """Coefficients of the update once the weights are known, before they are normalised."""
        return coefficients

    def prepare_rows(self, dataset: Any, name: str) -> list[dict[str, Any]]:
        """Tokenised rows of a validation or retention dataset."""
        raise NotImplementedError

    def row_batch(self, rows: Sequence[dict[str, Any]]) -> Any:
        """Tokenised rows as one batch on the model's device."""
        raise NotImplementedError

    def tokenised(self, dataset: Any, name: str) -> Any:
        """Rows in the form of the training rows, tokenised like them; never packed."""
        raise NotImplementedError

    def fisher_prompts(self, rows: Any, samples: int) -> list[list[int]]:
        """Prompts of the first tokenised rows, for the Fisher's responses."""
        raise NotImplementedError

    def fisher_sequences(self, rows: Any, samples: int) -> Any:
        """The first tokenised rows, whole: on their prefixes labels are sampled anew."""
        raise NotImplementedError

    def _row_length(self, row: Mapping[str, Any]) -> int:
        """Tokens of a tokenised row in a batch; of a pair's longer sequence, as it is cut."""
        return len(row["input_ids"])

    def prepare_pool(self, rows: list[dict[str, Any]]) -> None:
        """Whatever validation and retention rows need that only the prepared model can give."""

    # --- the run --------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in the checkpointing trainer; at the end, values and a page about the run are written.

        ``output_dir/_alphatoken`` holds them: ``values`` one record a training token,
        ``alphatoken-report.html`` the curves and the most and least valuable tokens (needs
        ``alphatoken[report]``). Both quote training rows; ``push_to_hub`` uploads neither.
        """
        result = super().train(*args, **kwargs)
        if self._alpha_active:
            self._write_results()
        return result

    def _write_results(self) -> None:
        parts = Ranks(self.accelerator).gather_objects(self.ledger.state_tensors())
        if not self.args.should_save:
            return
        self.save_state()
        folder = Path(str(self.args.output_dir))
        if self.args.export_values and len(self.ledger):
            whole = ValueLedger()
            for part in parts:
                one = ValueLedger()
                one.load_tensors(part)
                whole.merge(one)
            rows = self.train_dataset if hasattr(self.train_dataset, "__len__") else None
            tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
            place = folder / RESULTS / "values"
            whole.export(place, rows, tokenizer=tokenizer, **self.export_arguments())
        if not missing_libraries():
            write_run_report(folder, history=self.state.log_history)

    def export_arguments(self) -> dict[str, Any]:
        """How the trainer cuts long rows, for finding them again."""
        return {}

    # --- setting up -----------------------------------------------------------------------------

    def alpha_setup(
        self,
        validation_dataset: Any,
        retention_dataset: Any,
        fisher: FisherDrift | None,
        fisher_dataset: Any = None,
        policy: TokenPolicy | type[TokenPolicy] | None = None,
        policy_reference: torch.nn.Module | None = None,
    ) -> None:
        """Check options, prepare rows; called at the end of the trainer's ``__init__``."""
        options = self.args
        self._policy = chosen_policy(
            options, policy, options.FAMILY, second_model=policy_reference is not None
        )
        check_fisher_rows(options, fisher, fisher_dataset)
        self._alpha_active = (
            self._policy is not None or options.policy != "all" or options.needs_values
        )
        self._valuation: Valuation | None = None
        self._planned: list[tuple[Scored | None, Tensor, dict[str, Any]]] = []
        self._micro = (-1, 0)
        self._norm: Any = None  # of the last step's gradient, before it was cut; None for none
        self._share: float | None = None  # of the step's tokens that are kept, where it divides
        self._resumed: dict[str, Tensor] = {}  # the running mean, until the valuation is built
        self._fisher = fisher
        self._reference: Mapping[str, Tensor] = {}
        self.monitor = TrainMonitor(self)
        self.monitor.drift = self._drift
        self.add_callback(self.monitor)
        self.ledger = ValueLedger()
        self._validation_rows: list[dict[str, Any]] = []
        self._retention_rows: list[dict[str, Any]] = []
        if not self._alpha_active:
            return
        given = Given(
            validation=validation_dataset is not None,
            retention=retention_dataset is not None,
            second_model=policy_reference is not None,
        )
        self._refuse_virtual_tokens()
        check_run(self.model, self.accelerator, options, self._policy, given)
        if self._policy is not None:
            self.policy_setup(validation_dataset, policy_reference)
        if not self.needs_values:
            return
        self._reference = self._scored_weights()
        adapter = find_adapter(self.model)
        if hasattr(self.train_dataset, "__len__"):  # of a stream no row is known yet
            check_lengths(adapter, self.train_dataset, "training", self._row_length)
        if options.objective != "stability":
            self._validation_rows = self.prepare_rows(validation_dataset, "validation")
            check_pool(options, len(self._validation_rows), self.accelerator.num_processes)
            check_lengths(adapter, self._validation_rows, "validation", self._row_length)
        if options.retention == "data" and options.objective != "adaptation":
            self._retention_rows = self.prepare_rows(retention_dataset, "retention")
        if options.retention in ("diagonal", "kronecker") and options.objective != "adaptation":
            self._fisher = self.fit_or_load_fisher(fisher, fisher_dataset)
            if self._reference:  # whole weights, as they are before training
                self._fisher.check(
                    adapter,
                    list(self._reference),
                    max_relative_drift=options.max_relative_drift,
                )
            self._reference = self._fisher.reference

    def _refuse_virtual_tokens(self) -> None:
        if getattr(getattr(self.model, "active_peft_config", None), "is_prompt_learning", False):
            raise UnsupportedError(
                "prompt learning does not work with token values",
                got=type(self.model.active_peft_config).__name__,
                why="its virtual tokens shift every position, and it trains no linear of a layer",
                remedy="LoRA, or full fine-tuning",
            )

    def _scored_weights(self) -> dict[str, Tensor]:
        """The scored layers' weights before training: the only copy that is kept.

        Raises:
            ConfigError: layers that the model does not have, nothing trainable in them.
        """
        scope = find_scope(find_adapter(self.model), read_layers(self.args.score_layers))
        weights = {linear.weight_name: linear.weight for linear in scope.linears}
        if any(weight.numel() == 0 for weight in weights.values()):  # cut up by ZeRO-3 already
            return {}
        return {name: weight.detach().clone() for name, weight in weights.items()}

    def _drift(self) -> dict[str, float]:
        """How far the scored weights have moved."""
        parameters = dict(self.model.named_parameters())
        here = {n: parameters[n] for n in self._reference if n in parameters}
        if not here:
            return {}
        sharding = sharding_of(self.accelerator, self.model)
        if sharding is None:
            return weight_drift(here, self._reference)
        return sharded_drift(sharding, here, self._reference)

    def fit_or_load_fisher(self, fisher: FisherDrift | None, dataset: Any = None) -> FisherDrift:
        """The Fisher handed over, or one fitted on these rows (training rows) and cached.

        With ``fisher_labels="sequence"`` on responses to their prompts, with "token" on labels
        resampled at their own response positions.

        Raises:
            ConfigError: the rows that were named for it leave no prompt.
        """
        if fisher is not None:
            return fisher
        rows = self.train_dataset if dataset is None else self.tokenised(dataset, "Fisher")
        token = self.args.fisher_labels == "token"
        given = self.fisher_sequences if token else self.fisher_prompts
        prompts = given(rows, self.args.fisher_samples)
        if not prompts:
            raise ConfigError(
                "no row is left to fit the Fisher on",
                why="its responses are sampled after the prompts of these rows",
                remedy="check the columns and max_length of fisher_dataset",
            )
        folder = cache_folder(self.args, str(self.args.output_dir))
        progress = None if not self.args.disable_tqdm else False
        return fitted_fisher(self.model, prompts, self.args, folder, progress=progress)

    def _build_valuation(self) -> Valuation:
        options = self.args
        ranks = Ranks(self.accelerator)
        pool = retention = None
        if self._validation_rows:
            pool = check_pool(options, len(self._validation_rows), ranks.world)
            self.prepare_pool(self._validation_rows)
        if self._retention_rows:
            self.prepare_pool(self._retention_rows)
            drawn = ValidationPool(
                len(self._retention_rows),
                min(options.retention_batch_size, len(self._retention_rows)),
                mode="pool",
                held_out_share=0.0,
                seed=options.value_seed + 1,
            )
            retention = (drawn, lambda rows: self._batch(self._retention_rows, rows))
        valuation = Valuation(
            self.model,
            options,
            pool,
            lambda rows: self._batch(self._validation_rows, rows),
            retention if retention is not None else self._fisher,
            optimizer=self.optimizer,
            ranks=ranks,
            sharding=sharding_of(self.accelerator, self.model),
        )
        if valuation.running is not None and self._resumed:
            valuation.running.load_tensors(self._resumed)
        self._resumed = {}
        return valuation

    def _batch(self, rows: Sequence[dict[str, Any]], chosen: Sequence[int]) -> Any:
        return self.row_batch([rows[i] for i in chosen])

    @property
    def valuation(self) -> Valuation:
        """Built at the first training step, when model and optimizer are wrapped."""
        if self._valuation is None:
            self._valuation = self._build_valuation()
        return self._valuation

    @property
    def needs_values(self) -> bool:
        """Whether tokens are valued; a ``TokenPolicy`` has weights of its own."""
        return self._policy is None and bool(self.args.needs_values)

    @property
    def own_forward(self) -> bool:
        """Whether scoring runs a forward of its own in this layout."""
        return needs_own_forward(self.accelerator, self.args)

    # --- one micro-batch ------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Micro-batches of one step; under a global threshold they are scored here."""
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.plan_policy_step(samples, num_items)
        if self._alpha_active and self.args.keep_scope == "global" and samples:
            self.current_gradient_accumulation_steps = len(samples)
            self._planned = self._plan(samples, num_items)
        self._share = self._kept_share(samples)
        return samples, num_items

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The trainer's loss, with a gradient weighted by token.

        Raises:
            NumericalError: the loss is not finite; the last checkpoint is as it was.
        """
        if not self._alpha_active or not self.model.training or return_outputs:
            return super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        if self._policy is not None:
            return self.policy_loss(model, inputs, num_items_in_batch)
        if self.needs_values:
            self._begin()
        mask = label_mask(self.response_labels(inputs))
        if self._planned:
            scored, weights, extra = self._planned.pop(0)
            return self._gated(model, {**inputs, **extra}, num_items_in_batch, scored, weights)
        scored = self._known(inputs, mask)
        if self._must_score(scored, mask):
            if not self.own_forward:
                return self._shared(model, inputs, num_items_in_batch, mask)
            inputs = self.own_inputs(inputs)
            scored = self._own_pass(inputs, num_items_in_batch)
        weights = self.choose(scored, mask)
        return self._gated(model, inputs, num_items_in_batch, scored, weights)

    def _begin(self) -> None:
        """Enter the current optimizer step."""
        step, options = self.state.global_step, self.args
        started = time.perf_counter()
        self.valuation.begin(step, self.state.max_steps)
        self.monitor.direction(time.perf_counter() - started)
        looked = self.monitor.looked_at
        if options.held_out_steps and step % options.held_out_steps == 0 and looked != step:
            self.monitor.gap(step, self.valuation.objective_gap(step))

    def _known(self, inputs: Mapping[str, Any], mask: Tensor) -> Scored | None:
        """Values of an earlier visit, if they may be reused."""
        if not self.args.reuse_values or not self.needs_values:
            return None
        totals = self.ledger.lookup(
            inputs, mask, self.state.global_step, max_age=self.args.reuse_values
        )
        return None if totals is None else Scored(totals.to(mask.device), mask)

    def _must_score(self, known: Scored | None, mask: Tensor) -> bool:
        """Whether this micro-batch is scored. Where one process must, all do: it is collective."""
        if not self.needs_values:
            return False
        return Ranks(self.accelerator).any(known is None and bool(mask.any()))

    def _shared(self, model: Any, inputs: dict[str, Any], num_items: Any, mask: Tensor) -> Tensor:
        """Score and train on one forward."""
        gate = TokenGate(model)
        with self._observing() as observed:
            loss = self.base_loss(gate, inputs, num_items)
            self._require_finite(loss)
            coefficients = gate.coefficients(loss)
            scored = self._score(observed, gate, coefficients, inputs, num_items)
        weights = self.choose(scored, mask)
        return self._finish(gate, loss, coefficients, inputs, num_items, scored, weights)

    @contextmanager
    def _observing(self) -> Iterator[Observed]:
        """The scorer's own, entered with the gradients that values are taken against."""
        started = time.perf_counter()
        with self.valuation.scorer.observe(interaction=self._interacts) as observed:
            self.monitor.direction(time.perf_counter() - started)
            yield observed

    def _gated(
        self,
        model: Any,
        inputs: dict[str, Any],
        num_items: Any,
        scored: Scored | None,
        weights: Tensor,
    ) -> Tensor:
        """Train with weights that are known already."""
        gate = TokenGate(model)
        loss = self.base_loss(gate, inputs, num_items)
        self._require_finite(loss)
        coefficients = gate.coefficients(loss)
        return self._finish(gate, loss, coefficients, inputs, num_items, scored, weights)

    def _finish(
        self,
        gate: TokenGate,
        loss: Tensor,
        coefficients: Tensor,
        inputs: Mapping[str, Any],
        num_items: Any,
        scored: Scored | None,
        weights: Tensor,
    ) -> Tensor:
        mask = label_mask(self.response_labels(inputs))
        self._record(inputs, mask, num_items, scored, weights)
        final = self.final_coefficients(gate, coefficients, weights, inputs)
        divided = self._normalised(weights.to(coefficients), mask, num_items)
        return gate.surrogate(loss, final, divided)

    def _score(
        self,
        observed: Observed,
        gate: TokenGate,
        coefficients: Tensor,
        inputs: Mapping[str, Any],
        num_items: Any,
    ) -> Scored:
        started = time.perf_counter()
        labels = self.response_labels(inputs)
        mask = label_mask(labels)
        empty = not bool(mask.any())
        if empty:  # on another process there is a response; this one takes part, and counts nothing
            labels = _with_one_label(labels, inputs)
        assert gate.log_probs is not None
        # Nothing above the first scored layer is a parameter of the values: its gradient is waste.
        below = self.valuation.scorer.target.first is not None
        with gate.errors_only() if below else nullcontext():
            values = observed.values(
                gate.log_probs,
                labels,
                token_weights=self.value_weights(coefficients, label_mask(labels), num_items),
                step_weights=self._step_weights(coefficients, mask, num_items),
                components=self._keeps_values,
                keep_errors=self.monitor.wants_components and not self._keeps_values,
            )
            if self.monitor.wants_components:  # the totals keep their bits: no log moves a mask
                values = observed.components()
        if empty:
            return Scored(torch.zeros_like(values.total), mask)
        gram = observed.interaction() if self._interacts else None
        return Scored(values.total, values.mask, values, gram, time.perf_counter() - started)

    def _step_weights(self, coefficients: Tensor, mask: Tensor, num_items: Any) -> Tensor | None:
        """Of each token's gradient in that of the step, all tokens kept, as the optimizer gets it.

        This micro-batch stands for the whole step, and the last step's clipping for this one's.
        """
        if self.args.preconditioner != "full":
            return None
        whole = self.step_scale(num_items) * self._undivided(mask, num_items) * self._clip
        return -by_token(coefficients) * whole

    def choose(self, scored: Scored | None, mask: Tensor) -> Tensor:
        """Weights (b, t) of one micro-batch by the run's policy; 0 off the response."""
        totals = self._ranked(scored, mask)
        generator = torch.Generator().manual_seed(self._draw_seed())
        pools = self.pools(mask.shape[0])
        if scored is None or scored.gram is None:
            return torch.cat([self._weigh(totals[r], mask[r], generator) for r in pools])
        parts: list[Tensor] = []
        used = 0
        for rows in pools:
            tokens = slice(used, used := used + int(mask[rows].sum()))
            gram = scored.gram[tokens, tokens]
            kept = select_diverse(
                totals[rows],
                mask[rows],
                self._ratio,
                gram,
                self.args.interaction_weight,
                scope=self.args.keep_scope,
                units="relative",
            )
            parts.append(kept.to(totals.dtype))
        return torch.cat(parts)

    def _ranked(self, scored: Scored | None, mask: Tensor) -> Tensor:
        """(b, t) by which tokens are ranked."""
        if scored is None:
            return torch.zeros(mask.shape, device=mask.device)
        by_response = self.args.value_unit == "response"
        return response_values(scored.totals, mask) if by_response else scored.totals

    @property
    def _interacts(self) -> bool:
        return bool(self.args.interaction_weight > 0)

    @property
    def _ratio(self) -> float:
        """rho of this step, for controls too."""
        options, state = self.args, self.state
        return float(options.scheduled("keep_ratio", state.global_step, state.max_steps))

    def _draw_seed(self) -> int:
        """A seed that is a function of (run seed, step, micro-batch, rank)."""
        step, count = self._micro
        count = count + 1 if step == self.state.global_step else 0
        self._micro = (self.state.global_step, count)
        parts = (
            self.args.value_seed,
            self.state.global_step,
            count,
            self.accelerator.process_index,
        )
        return hash(parts) & (2**63 - 1)

    def _normalised(
        self, weights: Tensor, mask: Tensor, num_items: Any, kind: str | None = None
    ) -> Tensor:
        """Weights under the run's normalisation of the loss, or under ``kind``."""
        kind = kind or self.args.kept_normalization
        if kind == "kept":
            share = self._share
            return weights * (
                mask.sum() / weights.sum().clamp(min=1e-12) if share is None else 1 / share
            )
        return weights * self._undivided(mask, num_items, kind)

    def _undivided(self, mask: Tensor, num_items: Any, kind: str | None = None) -> float:
        """What takes the trainer's divisor out of the loss, where nothing is to divide it."""
        kind = kind or self.args.kept_normalization
        return 1.0 / self.loss_unit(mask, num_items) if kind == "sum" else 1.0

    def _kept_share(self, samples: Sequence[Any]) -> float | None:
        """Kept tokens over response tokens of the whole step, where the kept ones divide the loss.

        The budget says how many are kept before any is scored; so this costs nothing.
        """
        mine = self._alpha_active and self._policy is None
        if not mine or self.args.kept_normalization != "kept":
            return None
        ranks = Ranks(self.accelerator)
        masks = [label_mask(self.response_labels(sample)) for sample in samples]
        count = sum(int(mask.sum()) for mask in masks)
        kept = float(sum(map(self._budget, masks)))
        if self.args.keep_scope == "global":
            kept = sum((float(weights.sum()) for _, weights, _ in self._planned), 0.0)
        totals = torch.tensor([kept, count], dtype=torch.float64, device=ranks.device)
        found = ranks.sum_gradients({"kept": totals}, 0.0)[0]["kept"]
        return float(found[0]) / float(found[1]) if float(found[0]) > 0 else None

    def _budget(self, mask: Tensor) -> int:
        """Summed weights of one micro-batch whose tokens are ranked by themselves."""
        if self.args.policy == "all":
            return int(mask.sum())
        rows = [slice(i, i + 1) for i in range(len(mask))]
        pools = rows if self.args.keep_scope == "sequence" else self.pools(len(mask))
        return sum(keep_count(self._ratio, int(mask[pool].sum())) for pool in pools)

    def _require_finite(self, loss: Tensor) -> None:
        if not bool(torch.isfinite(loss.detach())):
            raise NumericalError(
                f"the training loss is not finite at step {self.state.global_step}",
                got=str(float(loss.detach())),
                why="one more step would destroy the weights; the last checkpoint is as it was",
                remedy="resume from it with a lower learning rate, gradient clipping or more "
                "precision; look at the rows of this step",
            )

    # --- a forward of its own -------------------------------------------------------------------

    def _own_pass(self, inputs: Mapping[str, Any], num_items: Any) -> Scored:
        """Score one micro-batch without training on it (dropout off)."""
        valuation = self.valuation
        target = valuation.scorer.target
        gate = TokenGate(self.model)
        with self._untouched_metrics(), self._observing() as observed:
            with scoring_forward(valuation.adapter, target.first):
                loss = self.base_loss(gate, dict(inputs), num_items)
            self._require_finite(loss)
            coefficients = gate.coefficients(loss)
            return self._score(observed, gate, coefficients, inputs, num_items)

    @contextmanager
    def _untouched_metrics(self) -> Iterator[None]:
        """TRL's running metrics see the training forward only."""
        names = ("_metrics", "_total_train_tokens")
        before = {n: copy.deepcopy(getattr(self, n)) for n in names if hasattr(self, n)}
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def _plan(
        self, samples: Sequence[Any], num_items: Any
    ) -> list[tuple[Scored | None, Tensor, dict[str, Any]]]:
        """Weights of all micro-batches of this step, ranked over accumulation and ranks."""
        scores: list[Scored | None] = []
        masks: list[Tensor] = []
        extras: list[dict[str, Any]] = []
        if self.needs_values:
            self._begin()
        for sample in samples:
            inputs = self._prepare_inputs(sample)
            masks.append(label_mask(self.response_labels(inputs)))
            if not self._must_score(None, masks[-1]):
                scores.append(None)
                extras.append({})
                continue
            with self.compute_loss_context_manager():
                own = self.own_inputs(inputs)
                scores.append(self._own_pass(own, num_items))
            extras.append({k: v for k, v in own.items() if k not in inputs})
        weights = self._choose_globally(scores, masks)
        return list(zip(scores, weights, extras, strict=True))

    def _choose_globally(
        self, scores: Sequence[Scored | None], masks: Sequence[Tensor]
    ) -> list[Tensor]:
        totals = [self._ranked(one, mask) for one, mask in zip(scores, masks, strict=True)]
        weights = [torch.zeros_like(total) for total in totals]
        for pool in range(len(self.pools(masks[0].shape[0]))):
            rows = [self.pools(mask.shape[0])[pool] for mask in masks]
            seed = hash((self.args.value_seed, self.state.global_step, pool)) & (2**63 - 1)
            found = global_selection(
                Ranks(self.accelerator),
                [total[r] for total, r in zip(totals, rows, strict=True)],
                [mask[r] for mask, r in zip(masks, rows, strict=True)],
                partial(self._weigh, generator=torch.Generator().manual_seed(seed)),
            )
            for weight, part, r in zip(weights, found, rows, strict=True):
                weight[r] = part
        return weights

    def _weigh(self, totals: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
        """Weights of tokens that are ranked together."""
        options = self.args
        return token_weights(
            totals,
            mask,
            self._ratio,
            policy=options.policy,
            weighting=options.weighting,
            scope="sequence" if options.keep_scope == "sequence" else "batch",
            generator=generator,
        )

    def _clip_grad_norm(self, model: Any) -> Any:
        """As in transformers; the norm is kept where values of the next step are of a full step."""
        norm = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        if self.args.preconditioner == "full":
            self._norm = norm
        return norm

    @property
    def _clip(self) -> float:
        """By which the last step's gradient was cut; reading it waits for the device."""
        if self._norm is None:
            return 1.0
        self._norm = float(self._norm)
        return float(min(1.0, self.args.max_grad_norm / (self._norm + 1e-6)))

    # --- records --------------------------------------------------------------------------------

    def _record(
        self,
        inputs: Mapping[str, Any],
        mask: Tensor,
        num_items: Any,
        scored: Scored | None,
        weights: Tensor,
        seconds: float = 0.0,
    ) -> None:
        values = None if scored is None else scored.values
        self.monitor.record(
            weights=weights,
            mask=mask,
            values=values,
            reused=scored is not None and values is None,
            seconds=seconds if scored is None else scored.seconds,
            tokens=inputs["attention_mask"].sum() if "attention_mask" in inputs else None,
        )
        if scored is not None and self._keeps_values:
            self.ledger.add(
                {**inputs, "labels": self.response_labels(inputs)},
                mask,
                values,
                weights,
                scale=self._get_learning_rate()
                * self.loss_unit(mask, num_items)
                * self._undivided(mask, num_items),
                step=self.state.global_step,
            )

    @property
    def _keeps_values(self) -> bool:
        """Whether the ledger takes part, which adds up the components too."""
        return bool(self.args.export_values or self.args.reuse_values)

    def alpha_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Running mean, ledger and statistics since the last log."""
        tensors: dict[str, Tensor] = {}
        if self._valuation is not None:
            # A resumed run builds its direction at its first step; so must the one that goes on.
            self._valuation.checkpointed()
            if self._valuation.running is not None:
                state = self._valuation.running.state_tensors()
                tensors |= {f"running/{name}": tensor for name, tensor in state.items()}
        tensors |= {f"ledger/{n}": t for n, t in self.ledger.state_tensors().items()}
        norm = None if self._norm is None else float(self._norm)
        return tensors, {"monitor": self.monitor.state_values(), "norm": norm}

    def load_alpha_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take back what ``alpha_state`` gave."""
        parts: dict[str, dict[str, Tensor]] = {"running": {}, "ledger": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = tensor
        self._resumed = parts["running"]
        self.ledger.load_tensors(parts["ledger"])
        self.monitor.load_values(values["monitor"])
        self._norm = values.get("norm")

    def alpha_data(self) -> dict[str, Any]:
        """Rows of all kinds and the Fisher: a resumed run must have the same."""
        return {
            **super().alpha_data(),
            "validation_dataset": self._validation_rows,
            "retention_dataset": self._retention_rows,
            "fisher": None if self._fisher is None else fisher_tensors(self._fisher),
            "policy_arguments": self.policy_identity(),
        }

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The trainer's log, with the run's value statistics beside the loss."""
        if "loss" in logs and self._alpha_active:
            logs = {**logs, **self.monitor.logs()}
        super().log(logs, start_time)


def _with_one_label(labels: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Some token that the model predicts, labelled: values are taken of at least one."""
    ids = inputs["input_ids"]
    every = label_mask(predicted_labels(ids, inputs.get("attention_mask")))
    row, index = every.nonzero()[0].tolist()
    labels = labels.clone()
    labels[row, index] = ids[row, index]
    return labels
