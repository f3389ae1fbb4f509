"""``race``: a race of trainers in Python."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import set_seed

from alphatoken.data.named_rows import read_numbers, refuse_missing
from alphatoken.errors import ConfigError, DataError, counted
from alphatoken.race.arms import Arm, read_arms
from alphatoken.race.options import RaceConfig
from alphatoken.race.page import PAGE, verdict, write_race_page
from alphatoken.race.rows import choosing_numbers, rows_of_arm, set_aside, take
from alphatoken.race.runner import (
    Race,
    RaceResult,
    check_arms,
    datasets_of,
    options_in,
    reads_weights,
    refused_races,
)
from alphatoken.support.progress import is_first_process
from alphatoken.train.dpo import AlphaDPOTrainer
from alphatoken.train.leaks import leaking_rows, warn_of_leaks
from alphatoken.train.policies import OF_VALUES, unread_options
from alphatoken.train.python_rows import as_dataset, plain_rows, without_weights
from alphatoken.train.refusals import raise_first
from alphatoken.train.sft import AlphaSFTTrainer
from alphatoken.train.trainer import AlphaTrainer

_DATASETS = {"retention_dataset", "fisher_dataset", "fisher"}
"""Arguments of a trainer that an arm gets where it reads them."""


def race(
    model: str | Callable[[], Any],
    args: Any,
    config: RaceConfig | None = None,
    *,
    train_dataset: Any,
    validation_dataset: Any = None,
    choosing_dataset: Any = None,
    retention_rows: Any = None,
    resume: bool = False,
    **arguments: Any,
) -> RaceResult:
    """Train short runs from one start, choose by trusted rows, and train the winner to its end.

    Each arm is a trainer of its own, made anew, with the whole run's schedule; see
    :mod:`alphatoken.race.decision` for the rule and what it promises.

    Args:
        model: name or folder, or a function that makes the model; each arm begins at its weights.
        args: an ``AlphaSFTConfig``, ``AlphaDPOConfig`` or ``AlphaConfig`` of the run. Its policy is
            that of no arm, unless one says so.
        config: arms, looks, level; None for the defaults.
        train_dataset: rows of all arms; the weights that they bring reach the arms that train by
            them, and no other.
        validation_dataset: trusted rows of the target: those that the arms value against, and,
            without ``choosing_dataset``, the choosing rows, which are set aside by ``value_seed``.
            May be left out beside ``choosing_dataset`` where no arm reads values.
        choosing_dataset: rows on which the arms are compared, none of which any arm sees.
        retention_rows: rows of what the model knew before: a second column at each look.
        resume: go on with the race of ``output_dir``, if there is one.
        **arguments: further arguments of the trainer, such as ``processing_class`` and
            ``peft_config``. An arm is handed ``fisher`` or ``fisher_dataset`` if it reads a Fisher.

    Returns:
        Winner, differences by look, losses by row; its ``trainer`` has ended the run, unless
        ``stop_after_looks``. ``output_dir`` holds the run, ``race.json`` and ``race.html``.

    Raises:
        ConfigError, InputError, UnsupportedError: what cannot be honoured, before any work.

    Exactness: the winner has the bits of its run without a race. Oracle: that run, in
    ``tests/integration/test_race.py``.
    """
    config = config or RaceConfig()
    kind = _trainer_of(args)
    _check_arguments(model, arguments)
    raise_first(refused_races(args))
    arms = read_arms(config.arms)
    options = {arm.name: _options_of(args, arm) for arm in arms}
    configurations = {name: replace(args, **own) for name, own in options.items()}
    train_dataset = as_dataset(train_dataset, "training")
    if validation_dataset is not None:
        validation_dataset = as_dataset(validation_dataset, "validation")
    elif choosing_dataset is None:
        raise ConfigError(
            "a race needs rows to choose by",
            got="neither validation_dataset nor choosing_dataset",
            why="its arms are compared on trusted rows that none of them has seen",
            remedy="validation_dataset=..., of which a part is set aside, or choosing_dataset=...",
        )
    if choosing_dataset is not None and config.choosing_rows is not None:
        raise ConfigError(
            "choosing_rows has no effect beside choosing_dataset",
            got=f"choosing_rows={config.choosing_rows}, and a choosing_dataset",
            why="nothing is set aside of the validation rows, and all rows of the data set choose",
            remedy="one of the two",
        )
    weighed = reads_weights(configurations)
    train = {arm.name: _train_rows(train_dataset, arm) for arm in arms}
    for name in train.keys() - weighed if weighed else ():
        train[name] = without_weights(train[name])
    text_field = getattr(args, "dataset_text_field", "text")
    split = None
    if choosing_dataset is None:
        split = partial(set_aside, wanted=config.choosing_rows)
        validation_dataset, choosing_dataset = _split(
            validation_dataset, config.choosing_rows, args.value_seed
        )
    rows = {"choosing": as_dataset(choosing_dataset, "choosing")}
    if retention_rows is not None:
        rows["retention"] = as_dataset(retention_rows, "retention")
    for name, own in rows.items() if validation_dataset is not None else ():
        validation_dataset = _without_leaks(validation_dataset, own, name, text_field)
    own = {name: arguments.pop(name) for name in _DATASETS & arguments.keys()}
    datasets = {"validation_dataset": validation_dataset, **own}
    check_arms(configurations, {**datasets, "choosing_dataset": rows["choosing"]}, split)
    others = {f"a {name} row": plain_rows(of_name) for name, of_name in rows.items()}
    warn_of_leaks(plain_rows(train_dataset), others, text_field=text_field)
    folder = Path(str(args.output_dir))
    run = Race(
        partial(_make, kind, model, args, options, train, datasets, arguments),
        config,
        rows,
        folder,
        say=partial(print, file=sys.stderr, flush=True),
        shown=lambda result: write_race_page(folder / PAGE, result),
    )
    for arm in arms:
        # Options of values stand for the arms that have values.
        for name in options[arm.name].keys() - arm.options.keys() - OF_VALUES.keys():
            run.say(f"{arm.name}: {name} of the run gives way to this arm, which does not read it")
    result = run.run(resume=resume)
    run.say(verdict(result))
    if config.stop_after_looks:
        return result
    trainer = run.winner(result)
    trainer.train(resume_from_checkpoint="auto")
    if is_first_process():
        write_race_page(folder / PAGE, result, trained=True)
    return replace(result, trainer=trainer)


def _trainer_of(args: Any) -> type[Any]:
    kinds = (AlphaSFTTrainer, AlphaDPOTrainer, AlphaTrainer)
    for kind in kinds:
        if isinstance(args, kind.CONFIG):
            return kind
    raise ConfigError(
        "args are no configuration of a trainer of ours",
        got=type(args).__name__,
        remedy=", ".join(kind.CONFIG.__name__ for kind in kinds),
    )


def _check_arguments(model: Any, arguments: dict[str, Any]) -> None:
    if not isinstance(model, (str, Path)) and (hasattr(model, "parameters") or not callable(model)):
        raise ConfigError(
            "a race needs a model that can be made anew",
            got=type(model).__name__,
            why="each arm begins at the same weights, and an arm that trains moves them",
            remedy="its name or folder, or a function that makes it",
        )
    for name in ("policy", "optimizers"):
        if arguments.get(name) is not None:
            raise ConfigError(
                f"a race takes no {name} among the arguments of its trainers",
                got=type(arguments[name]).__name__,
                why="each arm has its own",
                remedy="RaceConfig(arms={NAME: {'policy': 'module:Class'}})"
                if name == "policy"
                else "leave it out",
            )


def _options_of(args: Any, arm: Arm) -> dict[str, Any]:
    """The arm's options; what its policy does not read of the run's gives way, as in the command.

    Args:
        args: configuration of the run.
        arm: whose options its trainer has in their place.
    """
    unread = unread_options({**vars(args), **arm.options}, args.FAMILY)
    own = {name: value for name, value in unread.items() if getattr(args, name, value) != value}
    return {**own, **arm.options}


def _make(
    kind: type[Any],
    model: str | Callable[[], Any],
    args: Any,
    options: dict[str, dict[str, Any]],
    train: dict[str, Any],
    datasets: dict[str, Any],
    arguments: dict[str, Any],
    arm: Arm,
    folder: Path,
) -> Any:
    """A new trainer of one arm."""
    own = {**options[arm.name], **options_in(folder, args)}
    # What has state, or moves in training: nothing of one arm enters another.
    apart = {"peft_config", "callbacks"} & arguments.keys()
    apart |= {"ref_model"} & arguments.keys() if getattr(args, "sync_ref_model", False) else set()
    more = arguments | {name: copy.deepcopy(arguments[name]) for name in apart}
    configuration = replace(args, **own)
    set_seed(args.seed)  # adapters are drawn where the model is handed over
    return kind(
        model=model() if callable(model) else str(model),
        args=configuration,
        train_dataset=train[arm.name],
        **datasets_of(configuration, datasets),
        **more,
    )


# --- rows -----------------------------------------------------------------------------------------


def _split(dataset: Any, wanted: int | None, seed: int) -> tuple[Any, Any]:
    if not hasattr(dataset, "__len__"):
        raise ConfigError(
            "choosing rows cannot be set aside of a stream",
            got=type(dataset).__name__,
            remedy="a list or a datasets.Dataset, or choosing_dataset=...",
        )
    chosen, rest = choosing_numbers(len(dataset), wanted, seed)
    return take(dataset, rest), take(dataset, chosen)


def _without_leaks(validation: Any, held_out: Any, name: str, text_field: str) -> Any:
    """Validation rows, without those that are rows ``held_out`` or have the prompt of one."""
    plain = plain_rows(validation), plain_rows(held_out)
    leaks = set(leaking_rows(*plain, text_field=text_field))
    if not leaks:
        return validation
    kept = [number for number in range(len(validation)) if number not in leaks]
    told = counted(len(leaks), f"validation rows repeat a {name} row and were left out")
    print(told, file=sys.stderr)
    if not kept:
        raise DataError(
            f"every validation row is a {name} row",
            got=f"{len(leaks)} rows",
            why="an arm would be judged on the rows that it values against",
            remedy="other rows for one of the two",
        )
    return take(validation, kept)


def _train_rows(dataset: Any, arm: Arm) -> Any:
    """The training rows of an arm."""
    if not arm.leaves_rows_out:
        return dataset
    if not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"the arm '{arm.name}' leaves rows out, and how many is not known of a stream",
            got=type(dataset).__name__,
            remedy="a list or a datasets.Dataset",
        )
    rows = plain_rows(dataset)
    numbers, column = range(len(rows)), arm.without and arm.without[0]
    if arm.without_rows is not None:
        there = f"rows are 0 to {len(rows) - 1}"
        refuse_missing(read_numbers(arm.without_rows), numbers, f"the arm '{arm.name}'", there)
    entries = [str(rows[number].get(column)) for number in numbers] if column else []
    return take(dataset, rows_of_arm(arm, entries, numbers))
