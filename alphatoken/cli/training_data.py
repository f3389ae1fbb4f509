"""Data sets of a run from the data arguments: read, held apart, checked, counted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alphatoken import FisherDrift
from alphatoken.cli.arguments import Arguments
from alphatoken.cli.training_rows import Item, RowReader, check_source, evaluates
from alphatoken.data import leak_keys, split_pools
from alphatoken.errors import ConfigError
from alphatoken.score.notes import about_pools
from alphatoken.train.policies import chosen_policy

__all__ = ["RunData", "check_rows", "load_run_data"]


@dataclass(frozen=True)
class RunData:
    """The data sets of one run, in TRL's forms; None where a run has none.

    Attributes:
        train: a ``datasets.Dataset``; validation, retention, fisher and evaluation likewise.
        fitted: a Fisher of earlier.
        notes: what was held out and removed, in sentences.
    """

    train: Any
    validation: Any = None
    retention: Any = None
    fisher: Any = None
    evaluation: Any = None
    fitted: FisherDrift | None = None
    notes: list[str] = field(default_factory=list)


def load_run_data(arguments: Arguments, tokenizer: Any, vocabulary: int | None = None) -> RunData:
    """Read all rows that the run needs.

    Tokens are looked for in the ``vocabulary`` rows of the model's embedding, if they are known.
    Training rows that repeat a validation, retention or Fisher row are removed, rows that cannot
    be trained on are left out (or refused, if so asked): the notes count the former, the line that
    says what was read of a file the latter.

    Raises:
        ConfigError: no training rows named, or two sources of them.
        DataError, InputError: rows that cannot be read or used; the message names them.
    """
    check_rows(arguments)
    reader = RowReader(arguments, tokenizer, vocabulary)
    (validation, fisher), data = _drawn(arguments), arguments.data
    train = reader.training_rows()
    sources = {
        "validation": data.validation_file if validation is not None else None,
        "fisher": data.fisher_data if fisher is not None else None,
        "retention": data.retention_data,
    }
    own = {name: reader.file_rows(file, name) for name, file in sources.items() if file is not None}
    fitted = None if data.fisher_file is None else FisherDrift.load(data.fisher_file)
    pools, notes = _separate(arguments, validation, fisher, train, own, fitted)
    datasets = {name: reader.dataset(rows) for name, rows in pools.items() if rows}
    evaluation = None
    if evaluates(arguments):
        evaluation = reader.dataset(reader.file_rows(data.eval_data or "", "evaluation"))
    return RunData(**datasets, evaluation=evaluation, fitted=fitted, notes=notes)


# --- how many rows are held out -----------------------------------------------------------------


def _drawn(arguments: Arguments) -> tuple[int | None, int | None]:
    """Validation rows and Fisher prompts to draw from the training rows; None: none are read.

    The policy has no say: the controls (random, all) train on the same rows.
    """
    data, args = arguments.data, arguments.training
    validation: int | None = None
    if args.objective != "stability":
        validation = 0 if data.validation_file else data.validation_rows
        if validation is None:
            share = args.held_out_share if args.held_out_steps else 0.0
            validation = math.ceil(args.validation_batch_size / (1 - share))
            validation *= 8 if args.validation_mode == "pool" else 1
    fisher: int | None = None
    if args.reads_fisher and data.fisher_file is None:
        fisher = 0 if data.fisher_data else data.fisher_prompts
        fisher = args.fisher_samples if fisher is None else fisher
    return validation, fisher


def check_rows(arguments: Arguments) -> None:
    """Refuse what can be said of the rows without reading them.

    Raises:
        ConfigError: two sources of the training rows, values or a policy without validation rows, a
            Fisher that nothing would read.
    """
    check_source(arguments)
    _check_clean_rows(arguments)
    _check_fisher(arguments)


def _check_clean_rows(arguments: Arguments) -> None:
    """Check that values have validation rows, and that "validation-first" can train on its own."""
    args, data = arguments.training, arguments.data
    nothing = data.validation_file is None and data.validation_rows == 0
    if nothing and args.needs_values and args.objective != "stability":
        raise ConfigError(
            "values need a validation dataset",
            got="no --validation_file, and --validation_rows 0 draws none",
            remedy="--validation_file FILE, of a few clean rows of the target",
        )
    if args.policy != "validation-first":
        return
    if data.validation_file is None:
        raise ConfigError(
            "policy 'validation-first' trains on a few clean rows of the target first",
            got="no --validation_file",
            why="rows drawn from the training rows are no cleaner than those",
            remedy="--validation_file FILE",
        )
    if (processes := args.world_size) > 1:
        raise ConfigError(
            "policy 'validation-first' trains in one process",
            got=f"{processes} processes",
            remedy="two runs: --policy standard --train_file CLEAN, then --policy standard with "
            "--model_name_or_path of the first one's folder",
        )


def _check_fisher(arguments: Arguments) -> None:
    """Check that a Fisher, or rows for one, is read by the run."""
    args, data = arguments.training, arguments.data
    for name, instead in data.unread_of_fisher(reads_fisher=args.reads_fisher):
        got = f"--{name} {getattr(data, name)}, "
        got += instead or f"retention {args.retention}, objective {args.objective}"
        wanted = "--objective both --retention diagonal, or "
        raise ConfigError(
            f"{name} is given, and no Fisher is {'fitted on it' if instead else 'wanted'}",
            got=got,
            why="nothing would read it",
            remedy=f"{'' if instead else wanted}leave --{name} out",
        )


# --- pools that share nothing -------------------------------------------------------------------


def _separate(
    arguments: Arguments,
    validation: int | None,
    fisher: int | None,
    train: Sequence[Item],
    own: Mapping[str, Sequence[Item]],
    fitted: FisherDrift | None,
) -> tuple[dict[str, list[Item]], list[str]]:
    """Pools that share nothing, by name, and what was done to make them so."""
    items = {"train": train, **own}
    rows = {name: [item.row for item in some] for name, some in items.items()}
    item_of = {  # a pair makes its row anew each time
        id(row): item for name in rows for row, item in zip(rows[name], items[name], strict=True)
    }
    retention = rows.get("retention", [])
    keys = {key for row in retention for key in leak_keys(row)}
    keys |= set(() if fitted is None else fitted.metadata.get("row_keys", ()))
    pools = split_pools(
        rows["train"],
        validation=rows.get("validation"),
        validation_rows=validation or 0,
        fisher=rows.get("fisher"),
        fisher_rows=fisher or 0,
        fisher_keys=keys,
        leak_key=arguments.data.leak_key,
    )
    separate = {name: getattr(pools, name) for name in ("train", "validation", "fisher")}
    separate["retention"] = retention
    items_of = {name: [item_of[id(row)] for row in some] for name, some in separate.items()}
    return items_of, _pool_notes(pools.counts, arguments)


def _pool_notes(counts: Mapping[str, int], arguments: Arguments) -> list[str]:
    args = arguments.training
    policy = chosen_policy(args, None, args.FAMILY)
    judged = args.needs_values or (policy is not None and policy.needs.validation)
    drawn = {
        "drawn_validation": ("rows drawn for validation", judged, "--validation_rows 0"),
        "drawn_fisher": ("prompts drawn for the Fisher", args.needs_values, "--fisher_prompts 0"),
    }
    notes = []
    for name, (what, read, option) in drawn.items():
        if counts.get(name):
            unread = f", though this run reads none of them: {option} trains on them"
            notes.append(f"{counts[name]} {what} and not trained on{'' if read else unread}.")
    return notes + about_pools(counts, "Fisher prompts")
