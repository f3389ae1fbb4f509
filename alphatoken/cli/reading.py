"""What the commands make of options that they share: a model, rows, and how rows become tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from alphatoken.cli.common import (
    ModelOptions,
    TrainingRowOptions,
    ValuationOptions,
)
from alphatoken.config import ScorerConfig
from alphatoken.data import (
    EncodeOptions,
    EncodeReport,
    Example,
    Fields,
    Pools,
    Reading,
    Row,
    encode_rows,
    row_of,
    split_pools,
)
from alphatoken.data.corpus import BadRow
from alphatoken.data.source import find_source
from alphatoken.direction.drift import FisherDrift
from alphatoken.errors import ColumnsError, DataError
from alphatoken.model.layer_choice import layers_within, read_layers
from alphatoken.train.loading import find_limits, find_parts, load_causal_model, load_tokenizer

__all__ = [
    "encode_some",
    "encoded_row",
    "encoding",
    "fields_of",
    "on_device",
    "read_file",
    "read_held_out",
    "read_model",
    "read_pools",
    "read_tokenizer",
    "scorer_config",
    "unread_columns",
]


def read_model(options: ModelOptions) -> nn.Module:
    """The model in evaluation mode on its device, with its LoRA adapter if one is named.

    Raises:
        ModelError: it is missing or unreadable. ConfigError: no such device.
    """
    parts = find_parts(options.model_name_or_path, options.adapter)
    return load_causal_model(
        parts.model,
        adapter=parts.adapter,
        device=options.device,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    )


def read_tokenizer(options: ModelOptions) -> Any:
    """The tokenizer that belongs to the model: the adapter's own where it has one.

    Raises:
        ModelError: it is missing or unreadable.
    """
    parts = find_parts(options.model_name_or_path, options.adapter)
    return load_tokenizer(parts.tokenizer, trust_remote_code=options.trust_remote_code)


def read_file(path: str, options: Any, *, limit: int | None, **more: Any) -> list[Row]:
    """Rows of ``path`` with the columns that the command line names; ``more`` is of ``Fields``.

    Rows that cannot be read are counted on stderr under ``on_bad_rows="skip"``.

    Raises:
        DataError: a row that cannot be read, under "error"; or no row can.
    """
    fields, reading = fields_of(options, **more), Reading(Path(path).name)
    source = find_source(path).limited(limit)
    rows, first, bad = list[Row](), None, 0
    for found in source.read():
        try:
            if isinstance(found.record, DataError):
                raise found.record
            rows.append(row_of(found.record, found.index, found.place, fields, reading))
        except ColumnsError:
            raise
        except DataError as error:
            first, bad = first or error, bad + 1
            if options.on_bad_rows == "error":
                break
    reading.say()
    if first is not None and (options.on_bad_rows == "error" or not rows):
        raise first
    if first is not None and not options.quiet:
        text = f"note: {bad} rows of {path} cannot be read and are left out; the first: {first}"
        print(text, file=sys.stderr)
    return rows


def read_held_out(path: str, options: Any) -> list[Row]:
    """Validation rows: by the named columns where a row has them, else by those that are known."""
    return read_file(path, options, limit=None, optional=True)


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


def encoding(options: Any) -> EncodeOptions:
    """How rows become tokens: as long as the model allows, or shorter where that is asked for.

    The model itself need not be loaded. ``options`` are of a model, its layers, and reading.

    Raises:
        ConfigError: sequences longer than the model allows, or scored layers that it lacks.
        ModelError: no configuration.
    """
    parts = find_parts(options.model_name_or_path, options.adapter)
    limits = find_limits(parts, trust_remote_code=options.trust_remote_code)
    length = limits.length(options.max_length)
    if limits.layers is not None:
        layers_within(read_layers(options.layers, "--score_layers"), limits.layers)
    rows = options if isinstance(options, TrainingRowOptions) else TrainingRowOptions()
    return EncodeOptions(
        max_length=length,
        on_long=rows.on_long,
        on_empty=rows.on_empty,
        turns=rows.turns,
        chat_template=options.chat_template,
        end_token=rows.end_token,
        vocabulary=limits.tokens,
        on_bad_rows=options.on_bad_rows,
    )


def read_pools(rows: Sequence[Row], fisher: FisherDrift | None, options: Any) -> Pools:
    """Training and validation rows that share nothing with each other or with the Fisher.

    Raises:
        DataError: as of :func:`alphatoken.data.split_pools`, or a file that cannot be read.
    """
    held = None
    if options.validation_file is not None:
        held = read_held_out(options.validation_file, options)
    return split_pools(
        rows,
        validation=held,
        validation_rows=options.validation_rows or 0,
        fisher_keys=[] if fisher is None else list(fisher.metadata.get("row_keys", [])),
        on_leak=options.on_leak,
        leak_key=options.leak_key,
        seed=options.seed,
    )


def on_device(batch: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The batch where the model is."""
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in batch.items()}


def scorer_config(options: ValuationOptions, **more: Any) -> ScorerConfig:
    """What to compute; ``more`` are options of the scorer that one command only has.

    Raises:
        ConfigError: options without a meaning.
    """
    return ScorerConfig(
        estimator=options.estimator,
        layers=read_layers(options.layers, "--score_layers"),
        window=options.window,
        stability_weight=options.stability_weight,
        **more,
    )


def encoded_row(
    row: Row, tokenizer: Any, how: EncodeOptions
) -> tuple[Example | BadRow | None, EncodeReport]:
    """The row as tokens, or what is wrong with it; None where it is too long or has no response.

    Raises:
        DataError: what the options say is to stop the run.
    """
    examples, report = encode_rows([row], tokenizer, how)
    if report.skipped_bad:
        reason = report.first_skipped[0].removeprefix(f"{row.place}: ")
        return BadRow(row.index, row.place, reason), report
    return (examples[0] if examples else None), report


def encode_some(
    rows: Sequence[Row], tokenizer: Any, how: EncodeOptions, what: str
) -> tuple[list[Example], EncodeReport]:
    """Rows to examples, of which there must be some.

    Raises:
        DataError: none is left; the message says of what.
    """
    examples, report = encode_rows(rows, tokenizer, how)
    if not examples:
        raise DataError(
            f"no {what} row is left",
            got=f"{len(rows)} rows, {report.skipped_long} too long, "
            f"{report.skipped_empty} without response within the length, "
            f"{report.skipped_bad} that cannot be written as tokens",
            remedy="look at --response_column, --max_length, --on_long, --on_empty and "
            "--on_bad_rows, or give other rows",
        )
    return examples, report
