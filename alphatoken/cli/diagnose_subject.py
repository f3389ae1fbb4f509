"""Building of the subject of a diagnosis from a command line."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from alphatoken import FisherDrift
from alphatoken.cli.diagnose_options import PROMPTS, DiagnoseOptions
from alphatoken.data import EncodeOptions, Example, Fields, Pools, Row, read_rows, split_pools
from alphatoken.diagnose.registry import SIZES
from alphatoken.diagnose.statistics import FEWEST
from alphatoken.diagnose.subject import Subject
from alphatoken.errors import ConfigError, DataError
from alphatoken.score.job import examples_digest
from alphatoken.score.notes import about_encoding, about_pools
from alphatoken.score.rows import encode_some
from alphatoken.select.masks import keep_count
from alphatoken.support.resume import file_digest, weights_digest

__all__ = ["Prepared", "beside_models", "check_files", "prepare", "retention_files"]

VALIDATION_ROWS = 32
"""Most rows of a validation file that are used where no number is given."""

_FIELDS = ("prompt", "response", "messages")

_SAME = (*SIZES, "tuning_rate", "seed")
"""Options that a subject has by the same name; left out, its own defaults hold."""


@dataclass(frozen=True)
class Prepared:
    """A subject, what its numbers depend on, and what a reader must know of the rows."""

    subject: Subject
    settings: dict[str, Any]
    notes: tuple[str, ...]


def retention_files(texts: Sequence[str]) -> dict[str, tuple[str, Fields]]:
    """``[NAME=]FILE[,prompt=FIELD][,response=FIELD][,messages=FIELD]``: name -> file, its fields.

    A set without a name is called as its file.

    Raises:
        ConfigError: an unknown part, or a name twice.
    """
    files: dict[str, tuple[str, Fields]] = {}
    for text in texts:
        whole = Path(text).is_file()  # whatever its name looks like
        path, *parts = [text] if whole else text.split(",")
        name, equals, rest = path.partition("=")
        if whole or not equals or "/" in name:
            name, rest = Path(path).stem, path
        columns = dict(part.partition("=")[::2] for part in parts)
        if not set(columns) <= set(_FIELDS) or not all(columns.values()) or name in files:
            raise ConfigError(
                "--retention_set cannot be read",
                got=f"{text!r}{' has the name of another' if name in files else ''}",
                remedy="[NAME=]FILE[,prompt=FIELD][,response=FIELD] or [NAME=]FILE,messages=FIELD",
            )
        prompt, response, messages = map(columns.get, _FIELDS)
        files[name] = rest, Fields(prompt, response, messages)
    return files


def beside_models(texts: Sequence[str]) -> dict[str, str]:
    """``NAME=MODEL`` texts as name -> model.

    Raises:
        ConfigError: one cannot be read, or a name twice.
    """
    models: dict[str, str] = {}
    for text in texts:
        name, equals, model = text.partition("=")
        if not (name and equals and model) or "/" in name or name in models:
            raise ConfigError(
                "--beside cannot be read",
                got=repr(text),
                why="tables and figures call each model by a name of its own",
                remedy="--beside NAME=MODEL, each with another name",
            )
        models[name] = model
    return models


def check_files(options: DiagnoseOptions) -> None:
    """Check that each named file exists and each number has a meaning, before loading anything.

    Raises:
        DataError: one is not. ConfigError: no validation rows at all, a bad number.
    """
    if options.validation_file is None and options.validation_rows is None:
        raise ConfigError(
            "there are no validation rows",
            why="values are measured against them",
            remedy="--validation_file FILE, or --validation_rows N to draw them from the training "
            "rows",
        )
    keep_count(options.keep_ratio, 1, name="--keep_ratio")  # its own error
    _ = options.scorer_config()  # its own error
    beside_models(options.beside)
    named = [("training", options.train_file), ("validation", options.validation_file)]
    sets = retention_files(options.retention_set)
    named += [(f"retention ({name})", path) for name, (path, _) in sets.items()]
    named.append(("Fisher", options.fisher_file))
    for what, path in named:
        if path is not None and not Path(path).exists():
            raise DataError(f"there is no {what} file", got=path, remedy="check the path")


def prepare(options: DiagnoseOptions) -> Prepared:
    """Read rows, load models, encode: everything that the diagnostics look at.

    Raises:
        AlphaTokenError: wrong input, with what and where.
    """
    config = options.scorer_config()
    tokenizer = options.tokenizer()
    fisher = None if options.fisher_file is None else FisherDrift.load(options.fisher_file)
    pools, retention, notes = _read(options, fisher)
    how = options.within(options.how, options.layers)

    def encode(rows: Sequence[Row], what: str, how: EncodeOptions) -> list[Example]:
        examples, report = encode_some(rows, tokenizer, how, what)
        notes.extend(about_encoding(what, report))
        return examples

    train = encode(pools.train, "training", how)
    validation = encode(pools.validation, "validation", how)
    how = replace(how, on_empty="skip")  # of the others such rows are counted, never an error
    held_out = encode(pools.fisher, "Fisher prompts", how) if pools.fisher else []
    retention_examples = {n: encode(rows, f"retention ({n})", how) for n, rows in retention.items()}
    model = options.model()
    before, beside = options.reference, beside_models(options.beside)
    reference = None if before is None else _other(model, options, before, "--reference")
    digests = {  # each is loaded once for this
        f"beside_sha256, {name}": weights_digest(_other(model, options, path, f"--beside {name}"))
        for name, path in beside.items()
    }
    names = {
        "model": options.model_name_or_path,
        "train": options.train_file,
        "validation": options.validation_file or "rows of the training file",
        "adapter": options.adapter,
        "reference": options.reference,
        "fisher": options.fisher_file,
    }
    subject = Subject(
        model=model,
        train=train,
        validation=validation,
        retention=retention_examples,
        prompts=held_out,
        tokenizer=tokenizer,
        reference=reference,
        beside={name: options.other(path).model for name, path in beside.items()},
        fisher=fisher,
        config=config,
        ratio=options.keep_ratio,
        batch_size=options.per_device_train_batch_size,
        **{name: said for name in _SAME if (said := getattr(options, name)) is not None},
        progress=not options.quiet,
        names={key: name for key, name in names.items() if name is not None},
    )
    return Prepared(subject, _settings(subject, options) | digests, tuple(notes))


# --- rows -----------------------------------------------------------------------------------------


def _read(
    options: DiagnoseOptions, fisher: FisherDrift | None
) -> tuple[Pools, dict[str, list[Row]], list[str]]:
    """Pools that share nothing; retention rows by set; sentences on what was drawn and removed."""
    notes: list[str] = []
    drawn = partial(_drawn, seed=options.seed, notes=notes)
    data = options.read_rows(options.train_file, limit=options.train_limit)
    validation = None
    if options.validation_file is not None:
        # By the named columns where a row has them, else by those that are known.
        validation = options.read_rows(options.validation_file, optional=True)
        most = options.validation_rows or VALIDATION_ROWS
        validation = drawn(validation, most, "validation rows", "--validation_rows")
    retention = {
        name: drawn(
            read_rows(path, fields=named),
            options.retention_rows,
            f"retention rows of {name}",
            "--retention_rows",
        )
        for name, (path, named) in retention_files(options.retention_set).items()
    }
    pools = split_pools(
        data,
        validation=validation,
        validation_rows=0 if validation is not None else options.validation_rows or 0,
        fisher=[row for rows in retention.values() for row in rows],
        fisher_keys=[] if fisher is None else list(fisher.metadata.get("row_keys", [])),
        leak_key=options.leak_key,
        seed=options.seed,
    )
    kept = {id(row) for row in pools.fisher}
    retention = {name: [row for row in rows if id(row) in kept] for name, rows in retention.items()}
    notes += about_pools(pools.counts)
    pools = _held_out(pools, options, notes)
    train = drawn(pools.train, options.train_rows, "training rows", "--train_rows")
    return replace(pools, train=train), retention, notes


def _held_out(pools: Pools, options: DiagnoseOptions, notes: list[str]) -> Pools:
    """The same pools with rows drawn from the training rows for a Fisher, in ``fisher``."""
    count = options.fisher_prompts
    if count is None:
        fifth = len(pools.train) // 5
        count = min(PROMPTS, fifth) if fifth >= FEWEST else 0
    drawn = split_pools(
        pools.train, fisher_rows=count, leak_key=options.leak_key, seed=options.seed
    )
    if count:
        notes.append(
            f"{count} training rows were held out for fitting Fishers (--fisher_prompts N for "
            "another number)."
        )
        notes += about_pools(drawn.counts)
    return replace(pools, train=drawn.train, fisher=drawn.fisher)


def _drawn(
    rows: list[Row], most: int, what: str, flag: str, *, seed: int, notes: list[str]
) -> list[Row]:
    """Draw at most so many rows at random, in their own order, with a note."""
    if len(rows) <= most:
        return rows
    chosen = sorted(random.Random(seed).sample(range(len(rows)), most))
    notes.append(f"{most} of {len(rows)} {what} were drawn ({flag} N for another number).")
    return [rows[index] for index in chosen]


# --- models ---------------------------------------------------------------------------------------


def _other(model: nn.Module, options: DiagnoseOptions, path: str, flag: str) -> nn.Module:
    """A model beside the first, which must have the same weights by name and shape."""
    other = options.other(path).model()
    ours, theirs = (
        {name: tuple(p.shape) for name, p in one.named_parameters()} for one in (model, other)
    )
    if options.adapter is None and ours != theirs:
        name = next(n for n in (*ours, *theirs) if ours.get(n) != theirs.get(n))
        raise ConfigError(
            f"{flag} is another kind of model",
            got=f"{name}: {ours.get(name)} in the model, {theirs.get(name)} in the other",
            why="models are compared state by state and weight by weight",
            remedy="give models that one fine-tuning began with or ended in",
        )
    return other


def _settings(subject: Subject, options: DiagnoseOptions) -> dict[str, Any]:
    """Settings on which the numbers depend, by name; a resumed run must have the same."""
    reference, fisher = subject.reference, options.fisher_file
    return {
        **subject.settings(),
        "batch_size": subject.batch_size,
        **{name: getattr(subject, name) for name in SIZES},
        "tuning_rate": subject.rate,
        "device": str(subject.device),
        "max_length": options.max_length,
        "model_sha256": weights_digest(subject.model),
        "reference_sha256": "none" if reference is None else weights_digest(reference),
        "fisher_sha256": "none" if fisher is None else file_digest(fisher),
        "train_sha256": examples_digest(subject.train),
        "validation_sha256": examples_digest(subject.validation),
        "prompts_sha256": examples_digest(subject.prompts),
        **{
            f"retention_sha256, {name}": examples_digest(rows)
            for name, rows in subject.retention.items()
        },
    }  # fmt: skip
