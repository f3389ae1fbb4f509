"""Hooks that turn a transformers trainer into one that weighs tokens, and their parts.

``AlphaTrainerMixin`` goes before a trainer in the bases. It overrides these of its hooks::

    __init__            the configuration as one of ours, then the parts of the run
    train               goes on from a checkpoint; afterwards, values and their page are written
    get_train_dataloader   hands rows on uncollated where a policy adds some to each step
    get_batch_samples   lets the weigher plan the step, and puts the plan into each micro-batch
    training_step       takes the plan out of the micro-batch
    compute_loss        hands both to the weigher, whose loss the trainer descends
    _clip_grad_norm     tells the weigher by how much the step was cut
    log                 adds the run's statistics to the trainer's own
    _save_checkpoint    saves completely or not at all

The parts have state of their own. ``TrainerLoss`` says what the trainer's loss, labels and
coefficients are; ``Weigher`` is handed that and the policy, and makes the loss of a step of them.
``RunRecords`` writes down what was trained with which weight, ``RunCheckpoints`` saves and resumes.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_torch_bf16_gpu_available, is_torch_xla_available

from alphatoken.direction.drift import FisherDrift
from alphatoken.errors import ConfigError, UnsupportedError, unsaid
from alphatoken.model.loading import model_name
from alphatoken.support.resume import adapter_settings
from alphatoken.support.storage import write_text
from alphatoken.train.checkpoint import STAGING, RunCheckpoints
from alphatoken.train.distributed import (
    check_same_weights,
    layout,
    name_wrapped_layers,
)
from alphatoken.train.hooks import require_hooks
from alphatoken.train.interface import TrainerInterface
from alphatoken.train.leaks import warn_of_leaks
from alphatoken.train.ledger import ValueLedger
from alphatoken.train.log_prob_proxy import require_fused_head
from alphatoken.train.manifest import (
    dataset_digest,
    frozen_fingerprint,
    library_versions,
    run_options,
    weights_fingerprint,
)
from alphatoken.train.policies import TRAINER_POLICIES, chosen_policy
from alphatoken.train.policy import TokenPolicy, adds_rows, row_weights
from alphatoken.train.policy_stage import handed_over, prepare_policy
from alphatoken.train.python_rows import (
    WEIGHTS,
    as_dataset,
    check_left,
    plain_rows,
    require_rows,
)
from alphatoken.train.records import RunRecords, TrainMonitor
from alphatoken.train.reference import check_reference
from alphatoken.train.refusals import (
    check_tokens,
    raise_first,
    refused_datasets,
    refused_runs,
)
from alphatoken.train.row_weights import require_a_weight, weights_in_batches
from alphatoken.train.run_rows import RunRows, prepare_run_rows
from alphatoken.train.step_rows import StepRows
from alphatoken.train.trainer_arguments import bind_arguments, load_model_and_tokenizer
from alphatoken.train.trainer_loss import PLAN_KEY, MicroBatchPlan, TrainerLoss
from alphatoken.train.valuation import Valuation
from alphatoken.train.weigher import StepGuard, Weigher

_ALONG = "along/"
"""Before the names of what later steps are valued along, in a checkpoint."""

_NAMES = {"train": "training", "fisher": "Fisher"}
"""Name of a data set in messages, where it differs from its argument's."""


def choose_bf16(args: Any) -> None:
    """Leave bfloat16 out where the machine has none and nothing was said of it.

    TRL's default is bfloat16 everywhere, which transformers then refuses on a machine without a
    GPU. Where there is one that can, TRL's default stands.
    """
    if args.bf16 is None and not (is_torch_bf16_gpu_available() or is_torch_xla_available()):
        args.bf16 = False


def _own_config(args: Any, ours: type[Any]) -> Any:
    if args is None:
        return ours()
    if not isinstance(args, ours):
        raise ConfigError(
            f"args must be an {ours.__name__}",
            got=type(args).__name__,
            why="it has all fields of the configuration below it, and those of token weights",
            remedy=f"{ours.__name__}(...) with the same fields",
        )
    return args


def _evaluation_rows(rows: Any) -> dict[str, Any]:
    """Sets of evaluation rows by what one of their rows is called; transformers takes several."""
    if isinstance(rows, Mapping):
        return {f"a row of the evaluation set '{name}'": own for name, own in rows.items()}
    return {} if rows is None else {"an evaluation row": rows}


def _listed_as_datasets(rows: Any, name: str = "evaluation") -> Any:
    """Evaluation rows, of which a list is made a data set, in a mapping of sets as well.

    Raises:
        InputError: a list that is none of records or of texts.
    """
    if isinstance(rows, dict):
        return {key: _listed_as_datasets(own, f"evaluation ({key})") for key, own in rows.items()}
    return as_dataset(rows, name) if isinstance(rows, (list, tuple)) else rows


class AlphaTrainerMixin(TrainerInterface):
    """Token valuation and selection for a trainer; see the module's text.

    Args:
        *args: as for the trainer below in the bases. Its ``args`` are a configuration of ours.
        validation_dataset: rows that training should serve.
        retention_dataset: rows for ``retention="data"``.
        fisher: of the reference model; None fits one and caches it.
        fisher_dataset: rows on whose prompts it is fitted; they should be trained on nowhere. None
            takes the training rows.
        policy: a ``TokenPolicy``, or its class, in place of the one that the options name.
        **kwargs: as for the trainer below in the bases.

    Raises:
        ConfigError, UnsupportedError: an option that cannot be honoured, by name, before any work.
    """

    BASE: ClassVar[type[Any]]
    """The trainer below in the bases: TRL's or transformers'."""
    CONFIG: ClassVar[type[Any]]
    """Our configuration of that trainer."""
    LOSS: ClassVar[type[TrainerLoss]] = TrainerLoss
    """What there is to know of its loss."""

    goes_on_later: bool = False
    """Whether the run was stopped to go on later; it then writes its results at its own end."""
    _checkpoints: RunCheckpoints | None = None
    """Of the current call of ``train``, or of the last one; None before the first."""
    _step_rows: StepRows | None = None
    """Of a policy that adds rows to its steps."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check, where a trainer is below in the bases, that it has what it is hooked into."""
        super().__init_subclass__(**kwargs)
        require_hooks(cls)

    def __init__(
        self,
        *args: Any,
        validation_dataset: Any = None,
        retention_dataset: Any = None,
        fisher: FisherDrift | None = None,
        fisher_dataset: Any = None,
        policy: TokenPolicy | type[TokenPolicy] | None = None,
        **kwargs: Any,
    ) -> None:
        own = inspect.signature(AlphaTrainerMixin.__init__).parameters
        # Between ``self, *args`` and ``**kwargs`` stand the arguments that are ours.
        arguments = bind_arguments(type(self), list(own)[2:-1], args, kwargs)
        options = arguments["args"] = _own_config(arguments.get("args"), self.CONFIG)
        self._policy = chosen_policy(options, policy, options.FAMILY)
        self.policy_handed_over = policy is not None
        # Whatever is missing is said here, before a model is loaded and rows are read.
        datasets = {
            "validation": validation_dataset,
            "retention": retention_dataset,
            "fisher": fisher_dataset,
        }
        if self._policy is not None:
            options.check_settings()
        raise_first(refused_datasets(options, self._policy, datasets, fisher))
        if arguments.get("formatting_func") is None:  # else only that knows what a row is
            datasets = self._read_rows(arguments, datasets)
        elif self.row_weights != "refused":
            raise ConfigError(
                "the policy reads weights of rows, and formatting_func makes the rows",
                got="formatting_func=...",
                why="which token a weight is of is known of rows only that the trainer writes",
                remedy="dataset.map with that function, and rows with their weights",
            )
        check_reference(arguments)
        self.own_collator = arguments.get("data_collator")
        load_model_and_tokenizer(self.BASE, arguments)
        with unsaid(self.BASE.__module__, "your model is already instantiated"):
            super().__init__(**arguments)
        check_left(arguments.get("train_dataset"), self.train_dataset, self.args)
        if self.row_weights != "refused":
            require_a_weight(self.train_dataset)
        if datasets["fisher"] is None and getattr(options, "packing", False):
            # Of a packed row only what precedes its first label would be a prompt.
            datasets = {**datasets, "fisher": arguments.get("train_dataset")}
        self._make_parts(fisher, datasets)

    def _make_parts(self, fisher: FisherDrift | None, datasets: Mapping[str, Any]) -> None:
        """Make the parts of the run, once what does not work is refused."""
        self.trainer_loss = self.LOSS(self, super().compute_loss)
        # As it was handed over: training may move it.
        self._reference_digest = weights_fingerprint(self.reference_weights())
        self._handed_over = handed_over(self)
        if hasattr(self.train_dataset, "__len__"):  # of a stream no row is known yet
            check_tokens(self.train_dataset, self.model, "training")
        # accelerate ends at a class that the model's family names and this model does not have.
        name_wrapped_layers(self.accelerator, self.model, self.args.fsdp_config)
        self.records = RunRecords(self)
        self.weigher: Weigher | None = None
        # A Fisher that was handed over is part of what the run is, also where nothing reads it.
        self.rows = RunRows(fisher=fisher)
        # What the micro-batch that is in ``training_step`` just now came with; None outside it.
        self._plan: MicroBatchPlan | None = None
        self.step_guard = StepGuard(self)
        if self._policy is None:
            return
        self._refuse_virtual_tokens()
        # Under ZeRO-3 TRL gathers every head's weight, and values read none that is spread.
        if self.BASE.__module__.startswith("trl.") and layout(self.accelerator) != "zero3":
            require_fused_head()
        self.refuse_base()
        raise_first(refused_runs(self.accelerator, self.args, self.model, self._policy))
        # Fisher and passes are taken before FSDP hands the first process's weights to the others.
        check_same_weights(self.accelerator, self.model)
        self.add_callback(self.step_guard)
        self.args.check_policy(self._policy)
        columns = prepare_policy(self, self._policy, datasets["validation"])
        self._step_rows = StepRows(self, self._policy) if adds_rows(self._policy) else None
        if self._policy.needs.values:
            self.say_objective()
            self.rows = prepare_run_rows(
                self, datasets["validation"], datasets["retention"], fisher, datasets["fisher"]
            )
        valuation = Valuation(
            self.trainer_loss, self.rows, self.monitor, needed=self._policy.needs.values
        )
        self.weigher = Weigher(self.trainer_loss, self._policy, valuation, self.records, columns)

    def _read_rows(self, arguments: dict[str, Any], datasets: dict[str, Any]) -> dict[str, Any]:
        """Read, check and compare all rows; training rows go into ``arguments``, others back."""
        args = arguments["args"]
        if self.BASE.__module__.startswith("trl."):  # transformers takes a list as it is
            arguments["eval_dataset"] = _listed_as_datasets(arguments.get("eval_dataset"))
        # The first process fills the caches of ``datasets``, and the others read them.
        with args.main_process_first(desc="reading rows"):
            by_name = {name: rows for name, rows in datasets.items() if rows is not None}
            if arguments.get("train_dataset") is not None:
                by_name["train"] = arguments["train_dataset"]
            for name, rows in by_name.items():
                require_rows(rows, _NAMES.get(name, name))
                weights = self.row_weights if name == "train" else "refused"
                how = arguments if weights == "refused" else {**arguments, WEIGHTS: weights}
                by_name[name] = self.read(rows, _NAMES.get(name, name), how)
        train = by_name.pop("train", None)
        if train is not None:
            arguments["train_dataset"] = train
            if args.process_index == 0:
                others = {f"a {_NAMES.get(name, name)} row": rows for name, rows in by_name.items()}
                others |= _evaluation_rows(arguments.get("eval_dataset"))
                others = {one: plain_rows(rows) for one, rows in others.items()}
                text_field = getattr(args, "dataset_text_field", "text")
                warn_of_leaks(plain_rows(train), others, text_field=text_field)
        return {name: by_name.get(name) for name in datasets}

    def _refuse_virtual_tokens(self) -> None:
        if getattr(getattr(self.model, "active_peft_config", None), "is_prompt_learning", False):
            raise UnsupportedError(
                "prompt learning does not work with token values",
                got=type(self.model.active_peft_config).__name__,
                why="its virtual tokens shift every position, and it trains no linear of a layer",
                remedy="LoRA, or full fine-tuning",
            )

    # --- what a user may look at ------------------------------------------------------------------

    def response_labels(self, inputs: Mapping[str, Any]) -> Tensor:
        """Labels (b, t) of the tokens of a training batch that have a value; -100 elsewhere."""
        return self.trainer_loss.response_labels(inputs)

    @property
    def reference_moved(self) -> bool:
        """Whether this process's part of the reference is not what the trainer was handed.

        By 1,024 evenly spread numbers of each weight, which a moving average changes all.
        """
        return weights_fingerprint(self.reference_weights()) != self._reference_digest

    @property
    def token_policy(self) -> TokenPolicy | None:
        """The policy whose weights are trained with; None where every token is, unweighed."""
        return self._policy

    @property
    def row_weights(self) -> str:
        """How weights of the training rows are read: "refused", "read" or "signed"."""
        return row_weights(self._policy)

    @property
    def monitor(self) -> TrainMonitor:
        """Statistics between two logs."""
        monitor: TrainMonitor = self.records.monitor
        return monitor

    @property
    def ledger(self) -> ValueLedger:
        """Values of every training token, summed over its visits."""
        ledger: ValueLedger = self.records.ledger
        return ledger

    @property
    def valuation(self) -> Valuation:
        """Values of the run's tokens, and their scorer."""
        assert self.weigher is not None
        return self.weigher.valuation

    # --- the trainer's hooks ----------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        *,
        allow_changed: Collection[str] = (),
    ) -> Any:
        """Train, from the start or from a checkpoint; at the end, write values and their page.

        ``output_dir/_alphatoken`` holds them: ``values`` one record a training sequence,
        ``alphatoken-report.html`` the most and least valuable tokens. Both quote training rows;
        ``push_to_hub`` uploads neither.

        Args:
            resume_from_checkpoint: True goes on from the last complete checkpoint of this folder's
                run, "auto" does so if there is one and starts otherwise, a path goes on from that
                one after checking it, None and False start.
            trial: as in transformers.
            ignore_keys_for_eval: as in transformers.
            allow_changed: names of options (or ``train_dataset`` and the like) that may differ
                from those of the interrupted run; the result then is neither run's.

        Raises:
            DataError: no complete checkpoint, or the one named is damaged.
            ConfigError: another number of processes, or options, adapters, data or frozen weights
                that differ; names each.
        """
        self.remove_callback(RunCheckpoints)  # of an earlier call
        run = RunCheckpoints(self, self.run_facts() if self.args.should_save else None)
        run.begin(resume_from_checkpoint, allow_changed)
        self._checkpoints = run
        self.add_callback(run)
        path = None if run.resuming is None else str(run.resuming)
        result = super().train(path, trial, ignore_keys_for_eval)
        if self.weigher is not None and not self.goes_on_later:
            self.records.write_results()
        return result

    def get_train_dataloader(self) -> Any:
        """The trainer's own; with weights of rows, or not collated yet, for policies that ask."""
        with ExitStack() as stack:
            if self.row_weights != "refused":
                stack.enter_context(weights_in_batches(self, *self.weights_collator()))
            if self._step_rows is not None:
                stack.enter_context(self._step_rows.uncollated())
            return super().get_train_dataloader()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Micro-batches of one step, each with what the weigher's plan decided of it."""
        if self._step_rows is not None:
            epoch_iterator = self._step_rows.joined(epoch_iterator, num_batches)
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        # transformers loads a resumed run's random state after this call, and a plan draws.
        if self._checkpoints is not None and self._checkpoints.resuming is not None:
            self._load_rng_state(str(self._checkpoints.resuming))
        if self.weigher is None or not samples:
            return samples, num_items
        # transformers sets it only after this call, and scoring ahead asks for it.
        self.current_gradient_accumulation_steps = len(samples)
        copies = [copy.copy(sample) for sample in samples]  # of the collator's own type
        for sample, plan in zip(copies, self.weigher.plan(samples, num_items), strict=True):
            sample[PLAN_KEY] = plan
        return copies, num_items

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Train as transformers does; take the plan out of the batch, for ``compute_loss``."""
        if self.weigher is None or PLAN_KEY not in inputs:
            return super().training_step(model, inputs, *args, **kwargs)
        # Overrides of _prepare_inputs and compute_loss get the batch as the collator made it.
        inputs = copy.copy(inputs)
        self._plan = inputs.pop(PLAN_KEY)
        try:
            return super().training_step(model, inputs, *args, **kwargs)
        finally:
            self._plan = None

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
            UnsupportedError: the batch is of a training loop of the caller's own, or outputs are
                asked for beside the loss.
        """
        # Evaluation is of all tokens, whatever is trained on.
        weigher = self.weigher
        if weigher is not None and not self.model.training and weigher.policy.evaluates:
            outputs = None
            if return_outputs:  # logits that metrics are computed of, by a forward of their own
                with self.trainer_loss.beside_training():
                    outputs = super().compute_loss(model, inputs, return_outputs=True)[1]
            loss = weigher.evaluation_loss(model, inputs)
            return (loss, outputs) if return_outputs else loss
        if weigher is None or not self.model.training:
            return super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        if self._plan is None:
            raise UnsupportedError(
                "a batch without its step cannot be weighed",
                got="a batch that get_batch_samples did not make",
                why="its place in the step, and what was decided of it ahead, are not known",
                remedy="an override of get_batch_samples and training_step that calls super() and "
                "keeps the entry 'alphatoken_carried' of each batch",
            )
        if return_outputs:
            raise UnsupportedError(
                "a weighted loss has no outputs beside it",
                got="compute_loss(..., return_outputs=True) in training",
                why="the loss is made of token log-probabilities, and logits are not kept",
                remedy="super().compute_loss(...) without return_outputs",
            )
        with self.step_guard.deferring():
            batch = self.trainer_loss.micro_batch(inputs, self._plan, num_items_in_batch)
            loss = weigher.loss(model, batch)
        self.step_guard.expect_gradient(loss)
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip as in transformers; the run's valuation gets the norm before the cut."""
        # accelerate's own method is passed by where gradients lie on several device meshes.
        norm = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        if self.weigher is not None:
            self.valuation.gradient_cut(norm)
        return norm

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the card as TRL does; one that began from a folder names it, where TRL has None."""
        super().create_model_card(*args, **kwargs)
        folder = str(self.args.output_dir)
        card, base = Path(folder) / "README.md", Path(model_name(self.model)).name
        if base and card.exists() and self.is_world_process_zero():
            text = card.read_text("utf-8").replace('model="None"', f'model="{folder}"')
            write_text(card, text.replace("[None](https://huggingface.co/None)", f"`{base}`"))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The trainer's log, with the run's value statistics beside the loss."""
        if "loss" in logs and self.weigher is not None:
            logs = {**logs, **self.monitor.logs()}
        super().log(logs, start_time)

    # --- the checkpoint's part --------------------------------------------------------------------

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # Once a resumed run: get_batch_samples has loaded it already.
        assert self._checkpoints is not None
        if checkpoint is not None and not self._checkpoints.random_state_loaded:
            super()._load_rng_state(checkpoint)
            self._checkpoints.random_state_loaded = True

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # A complete run that is resumed takes no step more.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _get_output_dir(self, trial: Any) -> str:
        run_dir = str(super()._get_output_dir(trial))
        staging = self._checkpoints is not None and self._checkpoints.staging
        return os.path.join(run_dir, STAGING) if staging else run_dir

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save as in transformers, but completely or not at all: a partial one is removed.

        Raises:
            DataError: it could not be written (disk full, no permission).
        """
        assert self._checkpoints is not None
        write = super()._save_checkpoint
        run_dir = Path(self._get_output_dir(trial))
        final = self._checkpoints.save(run_dir, lambda: write(model, trial))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def alpha_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Ledger, statistics since the last log, norm of the last gradient, direction or walk."""
        along: dict[str, Tensor] = {}
        values: dict[str, Any] | None = None
        if self.weigher is not None:
            along, values = self.valuation.state()
        ledger = self.ledger.state_tensors()
        tensors = {**ledger, **{f"{_ALONG}{name}": tensor for name, tensor in along.items()}}
        return tensors, {"monitor": self.monitor.state_values(), "values": values}

    def load_alpha_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore what ``alpha_state`` returned.

        Called once a resumed run, after all other callbacks' ``on_train_begin`` and before the
        first batch is read; model, optimizer and scheduler are loaded by then.
        """
        along = {n.removeprefix(_ALONG): t for n, t in tensors.items() if n.startswith(_ALONG)}
        self.ledger.load_tensors({n: t for n, t in tensors.items() if not n.startswith(_ALONG)})
        self.monitor.load_values(values["monitor"])
        if self.weigher is not None:
            self.valuation.load(along, values["values"])

    def alpha_data(self) -> dict[str, Any]:
        """Rows of all kinds and the Fisher: a resumed run must have the same."""
        fisher = self.rows.fisher
        parts = ("reference", "fisher", "factors")
        # Settings of a ratio that is named are options of the run, compared under their own names.
        ratio = self.args.policy in TRAINER_POLICIES and not self.policy_handed_over
        return {
            "train_dataset": self.train_dataset,
            "validation_dataset": self.rows.validation,
            "retention_dataset": self.rows.retention,
            "fisher": None if fisher is None else {n: getattr(fisher, n) for n in parts},
            "policy_arguments": None if self._policy is None or ratio else self._policy.arguments(),
        }

    def run_facts(self) -> dict[str, Any]:
        """All that the run's result depends on, as JSON values; adapters where there are any."""
        adapters = adapter_settings(self.model)
        return {
            "processes": self.args.world_size,
            "trainer": type(self).__name__,
            "options": run_options(self.args),
            **({"adapters": adapters} if adapters else {}),
            **({"handed_over": self._handed_over} if self._handed_over else {}),
            "data": {name: dataset_digest(data) for name, data in self.alpha_data().items()},
            "frozen_weights": frozen_fingerprint(self.model),
            "reference_weights": self._reference_digest,
            "versions": library_versions(),
        }
