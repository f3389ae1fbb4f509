"""Data that a policy finds before training: the rows, and a way to train a reference."""

from __future__ import annotations

import dataclasses
import inspect
import random
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PrinterCallback

from alphatoken.errors import ConfigError, InputError, UnsupportedError
from alphatoken.model.loading import text_tokenizer
from alphatoken.support.resume import plain_values
from alphatoken.support.storage import write_json
from alphatoken.train.distributed import Ranks, cache_folder, layout, on_accelerator
from alphatoken.train.fields import AlphaFields
from alphatoken.train.interface import TrainerInterface
from alphatoken.train.manifest import policy_record, run_options
from alphatoken.train.policies import OF_VALUES
from alphatoken.train.policies.builtin import RATIO_POLICIES
from alphatoken.train.policies.trained_weights import copied
from alphatoken.train.policy import Columns, PolicyStage, TokenPolicy, has_pass
from alphatoken.train.python_rows import plain_rows
from alphatoken.train.refusals import check_tokens
from alphatoken.train.steps import Schedule
from alphatoken.train.trainer_loss import selecting

_PAIR = ("prompt_ids", "chosen_ids", "rejected_ids")
_ROW = ("input_ids", "labels", "seq_lengths")


class TrainingRows(Sequence[Mapping[str, Any]]):
    """The prepared training rows of a trainer, one mapping each, with what a policy reads.

    ``input_ids`` and ``labels`` (``seq_lengths`` of packed rows, and what the trainer's collator
    hands to the model beside them), or ``prompt_ids``, ``chosen_ids`` and ``rejected_ids`` cut to
    ``max_length`` as TRL's collator cuts them.

    Raises:
        ConfigError: a stream. UnsupportedError, when read: a pair that is cut at its start.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        dataset, cut = trainer.train_dataset, trainer.export_arguments()
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                "all training rows are looked at before training",
                got=f"a streamed data set, {type(dataset).__name__}",
                why="a stream has no rows to go back to",
                remedy="give a data set that is held on disk or in memory",
            )
        self._dataset = plain_rows(dataset)
        self._length, self._mode = cut.get("max_length"), cut.get("truncation_mode")
        # A collator of the user's own may read any column.
        self._whole = trainer.own_collator is not None
        self._names = (*_ROW, *trainer.BESIDE)

    def __len__(self) -> int:
        return len(self._dataset)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self._dataset[index]
        if _PAIR[0] in row:
            return self._pair(row, index)
        names = row if self._whole else self._names
        present = {name: row[name] for name in names if row.get(name) is not None}
        return {"labels": row["input_ids"], **present}

    def _pair(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        prompt, *responses = (list(row[name]) for name in _PAIR)
        left = None if self._length is None else self._length - len(prompt)
        if left is not None and any(len(response) > left for response in responses):
            if self._mode != "keep_start":
                raise UnsupportedError(
                    "a pair is cut at its start, so that its two prompts differ",
                    got=f"row {index}, truncation_mode={self._mode!r}",
                    remedy="truncation_mode='keep_start', or a larger max_length",
                )
            prompt = prompt[: self._length]
            responses = [response[: max(left, 0)] for response in responses]
        return dict(zip(_PAIR, (prompt, *responses), strict=True))


@contextmanager
def _isolated_random_state() -> Iterator[None]:
    """Restores Python's, numpy's and torch's generators afterwards."""
    python, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)  # noqa: NPY002


@selecting()
def prepare_policy(
    trainer: TrainerInterface, policy: TokenPolicy, validation: Any
) -> Columns | None:
    """Let a policy choose the rows of a run and pass over them; then write ``policy.json``.

    Rows that it does not choose leave the trainer.

    Args:
        trainer: built and not yet wrapped.
        policy: of the run.
        validation: validation data set as it was handed over, or None.

    Returns:
        Numbers of each response token that the pass left, if there was one.

    Raises:
        ConfigError: a column that the policy needs is missing; a streamed data set.
        InputError: an empty selection.
    """
    columns: Columns | None = None
    if has_pass(policy):
        with _isolated_random_state(), on_accelerator(trainer.model, trainer.accelerator.device):
            stage = _stage(trainer, policy, validation)
            # Processes that chose differently would train on different data sets.
            rows = Ranks(trainer.accelerator).broadcast_object(policy.choose_rows(stage))
            if rows is not None:
                trainer.train_dataset = _select(trainer.train_dataset, rows, policy.name)
                # The pass is over the rows that are left.
                stage = _stage(trainer, policy, validation)
            columns = policy.prepare(stage)
    missing = set(policy.needs.columns) - set(columns.columns if columns else ())
    if missing:
        raise ConfigError(
            f"prepare() of policy '{policy.name}' left columns out",
            got=", ".join(sorted(missing)),
        )
    _write_policy(trainer.args, policy)
    return columns


def _write_policy(args: Any, policy: TokenPolicy) -> None:
    # A ratio of the values has neither a pass nor settings that are not options of the run.
    if not args.should_save or type(policy) in RATIO_POLICIES.values():
        return
    folder = Path(str(args.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "policy": policy.variant,
        **policy_record(policy),
        "summary": dict(policy.summary),
    }
    write_json(folder / "policy.json", record)


def _stage(trainer: TrainerInterface, policy: TokenPolicy, validation: Any) -> PolicyStage:
    options = trainer.args
    validation_rows: Sequence[Mapping[str, Any]] = ()
    if policy.needs.validation:
        validation_rows = trainer.prepare_rows(validation, "validation")
        check_tokens(validation_rows, trainer.model, "validation")
    from_caller = handed_over(trainer)
    rows = TrainingRows(trainer)
    schedule = Schedule.of(options, len(rows), Ranks(trainer.accelerator).world)
    can_train_copies = layout(trainer.accelerator) == "single" and policy.family != "preference"
    return PolicyStage(
        model=trainer.model,
        rows=rows,
        validation=validation_rows,
        row_batch=trainer.row_batch,
        folder=cache_folder(options.policy_cache, options.output_dir, "policies"),
        batch_size=options.per_device_eval_batch_size,
        progress=False if options.disable_tqdm else None,
        train=partial(_train_copy, trainer) if can_train_copies else None,
        run={**run_options(options), **({"handed over": from_caller} if from_caller else {})},
        tokenizer=text_tokenizer(trainer.processing_class),
        autocast=trainer.accelerator.autocast,
        rows_of_step=None if getattr(options, "packing", False) else schedule.rows_of_step,
        steps=schedule.steps,
    )


def handed_over(trainer: TrainerInterface) -> dict[str, Any]:
    """Optimizer and collator that no option names, as JSON values; empty where there is none.

    Args:
        trainer: that has not trained yet; the optimizer is then its caller's.
    """
    parts: dict[str, Any] = {}
    if (optimizer := _optimizer_of(trainer, {})) is not None:
        parts["optimizer"] = optimizer
    if (collator := trainer.own_collator) is not None:
        parts["data_collator"] = (collator, getattr(collator, "__dict__", {}))
    return {name: plain_values(part) for name, part in parts.items()}


def _select(dataset: Any, chosen: Sequence[int], name: str) -> Any:
    rows = [int(i) for i in chosen]
    if not rows or len(set(rows)) != len(rows) or not 0 <= min(rows) <= max(rows) < len(dataset):
        raise InputError(
            f"policy '{name}' chose rows that cannot be trained on",
            got=f"{len(rows)} rows of {len(dataset)}" if not rows else f"{rows[:5]}...",
            why="an empty selection trains nothing; a row twice, or absent, is a mistake",
            remedy="a larger budget, or mend choose_rows",
        )
    if not hasattr(dataset, "select"):
        raise ConfigError(
            "rows can be chosen from a datasets.Dataset only", got=type(dataset).__name__
        )
    return dataset.select(rows)


def _train_copy(
    trainer: TrainerInterface,
    rows: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    model: nn.Module | None = None,
    policy: TokenPolicy | None = None,
    record: Callable[[Tensor, Tensor], None] | None = None,
) -> nn.Module:
    """A copy of the model, trained on tokenised rows by the library's own trainer of this kind.

    It inherits the run's arguments but those of ``plain``, the tokenizer, the collator that was
    handed over, and class and settings of the optimizer; neither callbacks, trackers, evaluation
    nor a schedule that was handed over.

    Args:
        trainer: whose model, tokenizer and arguments are copied; none of them changes.
        rows: {input_ids, labels}.
        options: arguments of the run that differ, such as num_train_epochs or max_steps.
        model: trained in place of a copy of the trainer's.
        policy: of this training, which may need columns only; None for all tokens.
        record: is called with mask and weights of each micro-batch of a policy.
    """
    from datasets import Dataset

    # What a subclass overrides or adds may not be there yet: the run's trainer is still being made.
    kind = next(k for k in type(trainer).__mro__ if k.__module__.startswith("alphatoken."))
    if kind is not type(trainer):
        print(f"by {kind.__name__}: {type(trainer).__name__} has no part in it", file=sys.stderr)
    kept = cache_folder(trainer.args.policy_cache, trainer.args.output_dir, "policies")
    own_folder = kept / f"run-{secrets.token_hex(4)}"
    plain: dict[str, Any] = {
        "policy": "all", "policy_options": None, "policy_mode": "native",
        "keep_ratio": AlphaFields.keep_ratio, **OF_VALUES,
        "export_values": False, "report_to": [],
        "save_strategy": "no", "eval_strategy": "no", "push_to_hub": False,
        "eval_on_start": False, "load_best_model_at_end": False, "resume_from_checkpoint": None,
        "logging_strategy": "no",
        "output_dir": str(own_folder),
    }  # fmt: skip
    if getattr(trainer.args, "packing", False):
        plain |= {"packing": False}
    args = dataclasses.replace(trainer.args, **{**plain, **options})
    inner = kind(
        model=copied(trainer.model) if model is None else model,
        args=args,
        data_collator=trainer.own_collator,
        train_dataset=Dataset.from_list([dict(row) for row in rows]),
        processing_class=trainer.processing_class,
        optimizer_cls_and_kwargs=_optimizer_of(trainer, options),
        policy=policy,
    )
    inner.remove_callback(PrinterCallback)
    inner.records.listener = record
    # What the run draws afterwards must not depend on whether this was trained now or found.
    with _isolated_random_state():
        inner.train()
    shutil.rmtree(own_folder, ignore_errors=True)  # records and page of that training, no model
    trained = trainer.accelerator.unwrap_model(inner.model)
    assert isinstance(trained, nn.Module)
    return trained


def _optimizer_of(
    trainer: TrainerInterface, options: Mapping[str, Any]
) -> tuple[type[Any], dict[str, Any]] | None:
    """Class and settings of the optimizer that was handed over; None where the options name it."""
    optimizer = trainer.optimizer
    if trainer.optimizer_cls_and_kwargs is not None:
        kind, settings = trainer.optimizer_cls_and_kwargs
    elif optimizer is not None:
        # It holds the run's own weights, so another of its class is made with the settings of its
        # constructor; those of single parameter groups are not carried over.
        kind, parameters = type(optimizer), inspect.signature(type(optimizer).__init__).parameters
        settings = {name: value for name, value in optimizer.defaults.items() if name in parameters}
    else:
        return None
    rate = {"lr": options["learning_rate"]} if "learning_rate" in options else {}
    return kind, {**settings, **rate}
