"""Objects that commands build from shared options: a model, rows, and their encoding."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from alphatoken.cli.options import LeftOutOptions, ValuationOptions
from alphatoken.config import ScorerConfig
from alphatoken.corpus.spec import JobSpec
from alphatoken.data import EncodeOptions, Fields, Row, read_rows
from alphatoken.model.layer_choice import read_layers

__all__ = [
    "encoding",
    "fields_of",
    "job_spec",
    "read_file",
    "scorer_config",
    "unread_columns",
]


def read_file(path: str, options: Any, *, limit: int | None, **more: Any) -> list[Row]:
    """Rows of ``path`` with the columns that the command line names; ``more`` is of ``Fields``.

    Raises:
        DataError: as of :func:`alphatoken.data.read_rows`.
    """
    named = fields_of(options, **more)
    return read_rows(path, fields=named, limit=limit, on_bad_rows=options.on_bad_rows)


def fields_of(options: Any, **more: Any) -> Fields:
    """The columns that the command line names; ``more`` are further fields of ``Fields``."""
    return Fields(
        options.prompt_column,
        options.response_column,
        options.messages_column,
        unread=unread_columns(options),
        **more,
    )


def unread_columns(options: Any) -> tuple[str, ...]:
    """Columns that the command line leaves aside."""
    return tuple(filter(None, (options.unread_columns or "").split(",")))


def _how(options: Any) -> EncodeOptions:
    """Encoding of rows by the command line alone."""
    rows = options if isinstance(options, LeftOutOptions) else LeftOutOptions()
    return EncodeOptions(
        max_length=options.max_length,
        on_empty=rows.on_empty,
        turns=rows.turns,
        chat_template=options.chat_template,
        on_bad_rows=options.on_bad_rows,
    )


def encoding(options: Any) -> EncodeOptions:
    """Options of the encoding of rows for the model; ``options`` are of a model, layers, reading.

    Raises:
        ConfigError, ModelError: as of :meth:`ModelOptions.within`.
    """
    layers = read_layers(options.layers, "--score_layers")
    within: EncodeOptions = options.within(_how(options), layers)
    return within


def scorer_config(options: ValuationOptions, **more: Any) -> ScorerConfig:
    """Configuration of the scorer; ``more`` are options that only one command has.

    Raises:
        ConfigError: options without a meaning.
    """
    return ScorerConfig(
        estimator=options.estimator,
        layers=read_layers(options.layers, "--score_layers"),
        window=options.window,
        stability_weight=options.stability_weight,
        walk_steps=options.walk_steps,
        walk_learning_rate=options.walk_learning_rate,
        **more,
    )


def job_spec(options: Any, output_dir: str, **more: Any) -> JobSpec:
    """The job of ``score`` or ``filter``, whose options have the names of its fields.

    Args:
        options: of the command; one that is None leaves the field at its default.
        output_dir: folder of the results.
        **more: options of the scorer that one command only has.

    Raises:
        ConfigError: options without a meaning.
    """
    said = {one.name: getattr(options, one.name, None) for one in fields(JobSpec)}
    made = {
        "model": options,  # which are of a model, as of everything else
        "output_dir": output_dir,
        "config": scorer_config(options, **more),
        "fields": fields_of(options),
        "how": _how(options),
    }
    return JobSpec(**{name: value for name, value in said.items() if value is not None} | made)
