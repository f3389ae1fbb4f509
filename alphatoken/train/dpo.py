"""Alpha-DPO: TRL's DPOTrainer with a gradient weighted by token value, branch by branch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from alphatoken.data.weights import PAIR_WEIGHTS
from alphatoken.errors import (
    AlphaTokenWarning,
    ConfigError,
    InputError,
    UnsupportedError,
    warn_caller,
)
from alphatoken.model.batch import IGNORE, PreferenceBatch
from alphatoken.model.loading import text_tokenizer
from alphatoken.select.losses import masked_dpo_coefficient
from alphatoken.support.options import check_options
from alphatoken.train.distributed import Ranks, sharding_of
from alphatoken.train.fields import PairFields
from alphatoken.train.log_prob_proxy import LogProbProxy, by_token
from alphatoken.train.mixin import AlphaTrainerMixin, choose_bf16
from alphatoken.train.options import AlphaOptions
from alphatoken.train.policy import TokenPolicy
from alphatoken.train.python_rows import bars_of_many, cut_pair, read_pairs, warn_of_left
from alphatoken.train.row_weights import PairWeightsCollator, weighed_pair
from alphatoken.train.shards import Fsdp2Sharding, Zero3Sharding
from alphatoken.train.trainer_loss import TrainerLoss

REFERENCE_SUMS = ("ref_chosen_logps", "ref_rejected_logps")
"""Columns of a batch that hold the reference's log-probability of each response, if it has any."""

_MOVED = "reference/"
"""Before the names of the weights of a reference that has moved, in a checkpoint."""

_OWN_LOSS: Mapping[str, Any] = {
    "loss_type": ["sigmoid"],
    "loss_weights": None,
    "f_divergence_type": "reverse_kl",
    "label_smoothing": 0.0,
    "ld_alpha": None,
    "use_weighting": False,
}
"""Options of TRL's losses, and what they are in plain DPO: the loss that validation pairs are
measured by, and that a policy with a loss of its own replaces."""


@dataclass
class AlphaDPOConfig(AlphaOptions, PairFields, DPOConfig):
    """TRL's ``DPOConfig``, the fields of ``AlphaFields``, and limits of prompt and response."""

    FAMILY: ClassVar[str] = "preference"

    def __post_init__(self) -> None:
        """TRL's checks, then ours."""
        choose_bf16(self)
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.check_alpha()

    def check_alpha(self) -> None:
        """Check options as all trainers do, and refuse those without a meaning for pairs."""
        super().check_alpha()
        check_options(self, PairFields)
        if self.kept_normalization == "sum":
            raise ConfigError(
                "kept_normalization='sum' is not defined for DPO",
                why="its loss is a mean over pairs",
                remedy="'response' or 'kept'",
            )
        if self.masked_logit:
            self._check_masked_logit()

    @property
    def cuts_prompts(self) -> bool:
        """True if a prompt that is cut to its own limit leaves room for a response."""
        own, both = self.max_prompt_length, self.max_length
        return own is not None and (both is None or own < both)

    @property
    def changed_loss(self) -> dict[str, Any]:
        """Options whose value makes another loss than plain DPO."""
        return {n: getattr(self, n) for n, plain in _OWN_LOSS.items() if getattr(self, n) != plain}

    def _check_masked_logit(self) -> None:
        for name, value in self.changed_loss.items():
            raise ConfigError(
                "masked_logit is defined for one loss only",
                got=f"{name}={value!r}",
                remedy=f"{name}={_OWN_LOSS[name]!r}",
            )
        if self.precompute_ref_log_probs:
            raise ConfigError(
                "masked_logit masks the reference's log-probability of each token",
                got="precompute_ref_log_probs=True",
                why="what is computed ahead is their sum over a response, which no mask can enter",
                remedy="precompute_ref_log_probs=False",
            )

    def check_policy(self, policy: TokenPolicy) -> None:
        """Refuse options that a policy's own loss would ignore, and sums where it needs tokens.

        Raises:
            ConfigError: names the option.
        """
        if policy.needs.values and list(self.loss_type) == ["sft"]:
            raise ConfigError(
                "tokens of a likelihood loss cannot be valued by a preference objective",
                got="loss_type=['sft']",
                why="validation pairs are measured by their preference loss, which this training "
                "does not descend",
                remedy="AlphaSFTTrainer on the chosen responses, or policy='standard'",
            )
        if policy.replaces_loss:
            for name, value in self.changed_loss.items():
                raise ConfigError(
                    f"policy '{policy.name}' has a loss of its own, which {name} does not change",
                    got=f"{name}={value!r}",
                    remedy="leave it out; the policy's base loss is in policy_options",
                )
            own = getattr(policy, "beta", self.beta)
            if self.beta not in (own, type(self).beta):
                raise ConfigError(
                    f"policy '{policy.name}' has a beta of its own",
                    got=f"beta={self.beta}, the policy's is {own}",
                    why="the trainer's beta would scale the logged rewards only",
                    remedy=f"policy_options={{'beta': {self.beta}}}",
                )
        if self.precompute_ref_log_probs and policy.needs.reference:
            raise ConfigError(
                f"policy '{policy.name}' asks for the reference's log-probability of a token",
                got="precompute_ref_log_probs=True",
                why="what is computed ahead is their sum over a response",
                remedy="precompute_ref_log_probs=False",
            )


class PairLoss(TrainerLoss):
    """Any of TRL's preference losses: (2n, t) batches, chosen rows first, then rejected ones."""

    @property
    def reference_model(self) -> Any:
        """The reference; the model itself where that is it with its adapter off or exchanged."""
        trainer = self._trainer
        return trainer.model if trainer.ref_model is None else trainer.ref_model

    def reference_sums(self, model: Any, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """TRL's log-probabilities of both responses under the reference, with ``model`` for it."""
        with torch.no_grad():
            sums = self._trainer.compute_ref_log_probs(model=model, inputs=dict(inputs))
        return dict(zip(REFERENCE_SUMS, sums, strict=True))

    def loss_labels(self, inputs: Mapping[str, Any]) -> Tensor:
        """The completions of both branches, chosen rows first."""
        labels: Tensor = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORE)
        return labels

    def rank_groups(self, rows: int) -> list[slice]:
        """Chosen and rejected by themselves, unless ``shared_threshold``."""
        if self.args.shared_threshold:
            return [slice(0, rows)]
        return [slice(0, rows // 2), slice(rows // 2, rows)]

    def of(self, proxy: LogProbProxy, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """TRL's loss; reference log-probabilities that are in the batch are not computed again."""
        # The flag by which TRL reads them from the batch.
        before = self._trainer.precompute_ref_logps
        self._trainer.precompute_ref_logps = before or all(n in inputs for n in REFERENCE_SUMS)
        try:
            return super().of(proxy, inputs, num_items)
        finally:
            self._trainer.precompute_ref_logps = before

    def note_rewards(self, rewards: Tensor) -> None:
        """Note rewards (2n,) in the place of those that TRL has just noted of the same batch."""
        trainer = self._trainer
        noted = trainer._metrics["train" if trainer.model.training else "eval"]
        chosen, rejected = rewards.detach().chunk(2)
        own = {"chosen": chosen, "rejected": rejected, "margins": chosen - rejected}
        own["accuracies"] = (chosen > rejected).float()
        for name, numbers in own.items():
            noted[f"rewards/{name}"][-1] = float(self.accelerator.gather(numbers).mean())

    def own_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs with the reference's log-probabilities, so that valuing runs one model only."""
        if REFERENCE_SUMS[0] in inputs:
            return dict(inputs)
        return {**inputs, **self.reference_sums(self.reference_model, inputs)}

    def reference_log_probs(
        self, inputs: Mapping[str, Any], policy: TokenPolicy
    ) -> tuple[dict[str, Any], Tensor | None]:
        """Inputs with the reference's log-probabilities: sums for TRL, each token's for the policy.

        A policy with a loss of its own that needs neither costs no forward of the reference.
        """
        sums, log_probs = dict[str, Tensor](), None
        if policy.needs.reference:
            proxy = LogProbProxy(self.reference_model)
            sums = self.reference_sums(proxy, inputs)
            assert proxy.log_probs is not None
            log_probs = by_token(proxy.log_probs)
        elif policy.replaces_loss and not policy.needs.values:
            # TRL's loss is computed for its metrics; the rewards logged are ``beta log p`` then,
            # unless the policy has rewards of its own.
            ids = inputs["input_ids"]
            zeros = torch.zeros(len(ids) // 2, device=ids.device)
            sums = dict.fromkeys(REFERENCE_SUMS, zeros)
        return {**inputs, **sums}, log_probs

    def reference_logits(self, policy: TokenPolicy) -> Callable[[Mapping[str, Any]], Tensor] | None:
        """A plain forward of the reference model, for policies that need all its logits."""
        if not (policy.needs.reference and policy.needs.model):
            return None

        def reference_logits(inputs: Mapping[str, Any]) -> Tensor:
            logits: list[Tensor] = []

            # TRL calls it as a model with its fused head, which forms no logits.
            def forward(*, labels: Tensor, fused_lm_head: bool, **kwargs: Any) -> Any:
                logits.append(self.reference_model(**kwargs).logits)
                log_probs = torch.zeros_like(labels[:, 1:], dtype=torch.float32)
                return SimpleNamespace(log_probs=log_probs)

            plain = {**inputs, "completion_mask": torch.ones_like(inputs["input_ids"])}
            plain.pop("labels", None)
            self.reference_sums(forward, plain)
            return logits[0]

        return reference_logits

    def value_weights(self, coefficients: Tensor, mask: Tensor, num_items: Any) -> Tensor | None:
        """``+omega`` on chosen and ``-omega`` on rejected tokens: the loss's own, per pair."""
        return -by_token(coefficients) * (coefficients.shape[0] // 2)

    def unit(self, mask: Tensor, num_items: Any, steps: int) -> float:
        """One over the pairs of the step on this rank."""
        return 1.0 / (mask.shape[0] // 2 * steps)

    def final_coefficients(
        self,
        proxy: LogProbProxy,
        coefficients: Tensor,
        weights: Tensor,
        inputs: Mapping[str, Any],
    ) -> Tensor:
        """Coefficients; under ``masked_logit``, omega comes from the kept tokens' log-ratios."""
        if not self.args.masked_logit:
            return coefficients
        assert proxy.log_probs is not None
        reference = LogProbProxy(self.reference_model)
        self.reference_sums(reference, inputs)
        assert reference.log_probs is not None
        # The mask acts on policy and reference alike, as it was chosen: whatever divides the loss
        # scales the update and not the preference.
        current, fixed = proxy.log_probs.detach().chunk(2), reference.log_probs.chunk(2)
        kept = weights[:, 1:].to(proxy.log_probs).chunk(2)
        omega = masked_dpo_coefficient(
            current[0], current[1], fixed[0], fixed[1], kept[0], kept[1], self._trainer.beta
        )
        return torch.cat([-omega, omega]).unsqueeze(-1) / len(omega)


def whole_pairs(
    prepare: Callable[..., Any], dataset: Any, args: AlphaDPOConfig, tokenizer: Any, weights: str
) -> Any:
    """Pairs as tokens, with their weights, before a part is cut to a limit of its own.

    Args:
        prepare: TRL's preparation: (dataset, args) -> dataset.
        dataset: pairs in TRL's form.
        args: configuration of the trainer.
        tokenizer: of the pairs.
        weights: "read" or "signed"; "refused" reads none.

    Raises:
        DataError: weights that cannot be laid on the tokens.
    """
    if args.cuts_prompts:
        # TRL would drop a prompt that fills max_length, before it is cut here.
        args = copy.copy(args)
        args.max_length = None
    prepared = prepare(dataset=dataset, args=args)
    if weights == "refused":
        return prepared
    weigh = partial(weighed_pair, tokenizer=tokenizer, weights=weights)
    return prepared.map(weigh, with_indices=True)


def cut_pairs(pairs: Any, args: AlphaDPOConfig, name: str) -> Any:
    """Tokenised pairs, each part cut to its own limit where there is one.

    Args:
        pairs: a data set, or a stream.
        args: configuration of the trainer.
        name: of the data set.
    """
    limits = (args.max_prompt_length, args.max_response_length)
    if limits == (None, None):
        return pairs
    cut = partial(cut_pair, max_prompt=limits[0], max_response=limits[1])
    # A stream takes no description.
    named = {"desc": f"Cutting {name} pairs"} if hasattr(pairs, "__len__") else {}
    return pairs.map(cut, **named)


class AlphaDPOTrainer(AlphaTrainerMixin, DPOTrainer):
    """TRL's ``DPOTrainer`` that updates on the valuable tokens of both branches.

        update  =  mean over pairs of  omega (sum m+ grad l+  -  sum m- grad l-)

    ``omega = beta sigma(-s)`` comes from the unmasked logit, as a constant; any other of TRL's
    preference losses gives its own coefficients in the same way. Chosen tokens are ranked among
    the chosen, rejected among the rejected, by values of their omega-scaled errors. The reported
    loss, margins and metrics are TRL's own, or of a policy's own loss, in evaluation too.

    Its arguments are those of TRL's ``DPOTrainer``, where ``args`` are an ``AlphaDPOConfig``, and
    those of :class:`~alphatoken.train.mixin.AlphaTrainerMixin`. Data sets are preference pairs: the
    validation objective is DPO's own gradient on them, and the Fisher is of the warm-started model.

    Source: eq. dpo_masked_loss. Oracle: ``alphatoken.oracle.preference``.
    """

    BASE, CONFIG, LOSS = DPOTrainer, AlphaDPOConfig, PairLoss
    trainer_loss: PairLoss
    _tag_names = [*DPOTrainer._tag_names, "alphatoken"]  # noqa: RUF012  (as TRL declares it)

    read = staticmethod(read_pairs)
    _moved_at = (-1, False)
    """Step at which the reference was last looked at, and whether it had moved."""

    def refuse_base(self) -> None:
        """Refuse rows with images."""
        if self._is_vision_dataset:
            raise UnsupportedError(
                "AlphaDPOTrainer does not work with a vision dataset", remedy="use text pairs"
            )

    def say_objective(self) -> None:
        """Say where training and validation pairs have different losses."""
        other = [f"{name}={value!r}" for name, value in self.args.changed_loss.items()]
        if other:
            warn_caller(
                "validation pairs are measured by plain DPO, -log sigmoid"
                f"({self.args.beta:g} s), and not by the training's loss ({', '.join(other)}): "
                "values and alpha/validation_* are of that objective",
                AlphaTokenWarning,
            )

    def reference_weights(self) -> dict[str, Tensor]:
        """Weights of the reference model, which ``sync_ref_model`` moves; none where it is none.

        Where adapters are switched off, or another one is on, they are the model's own.
        """
        if self.ref_model is None:
            return {}
        sharding = self._reference_sharding
        named = self.accelerator.unwrap_model(self.ref_model).named_parameters()
        return {n: p.data if sharding is None else sharding.local(n, p) for n, p in named}

    @property
    def _reference_sharding(self) -> Fsdp2Sharding | Zero3Sharding | None:
        return None if self.ref_model is None else sharding_of(self.accelerator, self.ref_model)

    @property
    def reference_moved(self) -> bool:
        """True if training moves the reference, or something else has moved it."""
        return bool(self.args.sync_ref_model) or super().reference_moved

    @property
    def _follows_reference(self) -> bool:
        """True if the reference of validation rows is to be asked anew; looked at once a step."""
        if self.args.sync_ref_model:
            return True
        # Parts of one may have moved on some processes alone, and all run its forwards or none.
        step = self.state.global_step
        if self._moved_at[0] != step:
            whole = self._reference_sharding is None
            self._moved_at = step, whole and self.reference_moved
        return self._moved_at[1]

    def alpha_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """State of all trainers, and the weights of a reference that has moved, each once."""
        tensors, values = super().alpha_state()
        # Of a reference that is spread each process writes its part.
        writes = self.args.should_save or self._reference_sharding is not None
        if writes and self.reference_moved:
            weights = self.reference_weights().items()
            tensors |= {f"{_MOVED}{name}": weight for name, weight in weights}
        return tensors, values

    def load_alpha_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore what ``alpha_state`` returned."""
        own = {n: t for n, t in tensors.items() if not n.startswith(_MOVED)}
        super().load_alpha_state(own, values)
        moved = {n.removeprefix(_MOVED): t for n, t in tensors.items() if n.startswith(_MOVED)}
        if (sharding := self._reference_sharding) is not None:
            sharding.overwrite(moved)
            return
        weights, ranks = self.reference_weights(), Ranks(self.accelerator)
        for name, weight in moved.items():
            weights[name].copy_(weight)
        # The first process has read them, and says whether there is anything to hand on.
        if ranks.broadcast_object(bool(moved)):
            ranks.broadcast(weights.values())

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, dataset_name: str
    ) -> Any:
        """TRL's preparation, and each part cut to its own limit where there is one."""
        prepare = partial(
            super()._prepare_dataset, processing_class=processing_class, dataset_name=dataset_name
        )
        weights = self.row_weights if dataset_name == "train" else "refused"
        tokenizer = text_tokenizer(processing_class)
        with bars_of_many(dataset):
            pairs = whole_pairs(prepare, dataset, args, tokenizer, weights)
            return cut_pairs(pairs, args, dataset_name)

    def weights_collator(self) -> tuple[Any, tuple[str, ...]]:
        """TRL's collator of pairs, and weights of both responses."""
        keep_end = self.args.truncation_mode == "keep_end"
        return PairWeightsCollator(self.data_collator, keep_end=keep_end), PAIR_WEIGHTS

    def tokenised(self, dataset: Any, name: str) -> Any:
        """Rows after TRL's own preparation."""
        return self._prepare_dataset(
            dataset=dataset,
            processing_class=self.processing_class,
            args=self.args,
            dataset_name=name,
        )

    def row_length(self, row: Mapping[str, Any]) -> int:
        """Length of the longer sequence, as TRL's collator cuts it."""
        longest = max(len(row["chosen_ids"]), len(row["rejected_ids"]))
        length = len(row["prompt_ids"]) + longest
        return length if self.args.max_length is None else min(length, self.args.max_length)

    def prepare_rows(self, dataset: Any, name: str) -> list[dict[str, Any]]:
        """Tokenised pairs; reference log-probabilities too where TRL computes them ahead."""
        prepared = self.tokenised(dataset, name)
        if self.precompute_ref_logps:
            size = self.args.precompute_ref_batch_size or self.args.per_device_eval_batch_size
            # TRL keeps them under the rows' fingerprint, which does not know ``ld_alpha``: these
            # rows get another one than the same rows have as evaluation rows.
            prepared = prepared.select(range(len(prepared)))
            with self._plain_sums():
                prepared = self._precompute_ref_logps(dataset=prepared, name=name, batch_size=size)
        rows = [row for row in prepared if row["chosen_ids"] and row["rejected_ids"]]
        if not rows:
            raise InputError(
                f"no pair of the {name} dataset has two responses",
                got=f"{len(prepared)} pairs",
                remedy="check the columns and max_length",
            )
        warn_of_left(dataset, rows, name, self.args)
        return rows

    def row_batch(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """One preference batch, padded as TRL pads it."""
        if self._follows_reference:  # it may have moved since these rows came last
            copies = [dict(row) for row in rows]
            self._add_reference(copies)
            rows = copies
        batch = self._prepare_inputs(self.data_collator([dict(row) for row in rows]))
        labels = self.response_labels(batch)
        half = len(rows)
        parts = [
            {
                "input_ids": batch["input_ids"][part],
                "attention_mask": batch["attention_mask"][part],
                "labels": labels[part],
            }
            for part in (slice(0, half), slice(half, None))
        ]
        reference = [  # a sum over a response, which float32 would round by more than a loss
            torch.tensor([float(row[name]) for row in rows], dtype=torch.float64)
            for name in REFERENCE_SUMS
        ]
        return PreferenceBatch(parts[0], parts[1], reference[0], reference[1], beta=self.beta)

    @contextmanager
    def _plain_sums(self) -> Iterator[None]:
        """Inside, the reference's log-probabilities are as the policy's: without ``ld_alpha``."""
        before, self.ld_alpha = self.ld_alpha, None
        try:
            yield
        finally:
            self.ld_alpha = before

    def prepare_pool(self, rows: list[dict[str, Any]]) -> None:
        """Reference log-probabilities of the pool, once where the reference does not move."""
        if self.args.sync_ref_model:  # ``row_batch`` asks anew, because the reference moves
            return
        size = self.args.per_device_train_batch_size
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            if REFERENCE_SUMS[0] not in part[0]:
                self._add_reference(part)

    def _add_reference(self, rows: Sequence[dict[str, Any]]) -> None:
        """Put each pair's reference log-probabilities into it."""
        batch = self._prepare_inputs(self.data_collator([dict(row) for row in rows]))
        loss = self.trainer_loss
        with self._plain_sums():
            sums = loss.reference_sums(loss.reference_model, batch)
        for name, log_probs in sums.items():
            for row, log_prob in zip(rows, log_probs.tolist(), strict=True):
                row[name] = log_prob

    def export_arguments(self) -> dict[str, Any]:
        """TRL's collator cuts pairs to ``max_length``."""
        return {"max_length": self.args.max_length, "truncation_mode": self.args.truncation_mode}

    def fisher_prompts(self, rows: Any, samples: int) -> list[list[int]]:
        """The prompts of the pairs."""
        return [list(row["prompt_ids"]) for row in islice(rows, samples)]
