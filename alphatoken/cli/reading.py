"""What the commands make of options that they share: a model, rows, and how rows become tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from alphatoken.cli.common import (
    ModelOptions,
    ReadingOptions,
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
    Row,
    encode_rows,
    read_rows,
    split_pools,
)
from alphatoken.direction.drift import FisherDrift
from alphatoken.errors import ConfigError, DataError
from alphatoken.model.layer_choice import read_layers
from alphatoken.model.protocol import find_adapter
from alphatoken.train.loading import find_parts, load_causal_model, load_tokenizer

__all__ = [
    "encode_some",
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


def read_file(
    path: str, options: ReadingOptions, *, limit: int | None, prompt_only: bool = False
) -> list[Row]:
    """Rows of ``path`` with the columns that the command line names."""
    return read_rows(path, fields=fields_of(options, prompt_only=prompt_only), limit=limit)


def read_held_out(path: str, options: Any) -> list[Row]:
    """Validation rows: by the named columns where a row has them, else by those that are known."""
    return read_rows(path, fields=fields_of(options, optional=True))


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


def encoding(options: ReadingOptions, model: nn.Module) -> EncodeOptions:
    """How rows become tokens: as long as the model allows, or shorter where that is asked for.

    Raises:
        ConfigError: sequences longer than the model allows.
    """
    limit, asked = find_adapter(model).max_positions(), options.max_length
    if asked is not None and limit is not None and asked > limit:
        raise ConfigError(
            "--max_length is more than the model allows",
            got=f"{asked}, limit {limit}",
            why="positions past the limit have no meaning to the model",
            remedy=f"at most --max_length {limit}",
        )
    rows = options if isinstance(options, TrainingRowOptions) else TrainingRowOptions()
    return EncodeOptions(
        max_length=limit if asked is None else asked,
        on_long=rows.on_long,
        on_empty=rows.on_empty,
        turns=rows.turns,
        chat_template=options.chat_template,
        end_token=rows.end_token,
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
            f"{report.skipped_empty} without response within the length",
            remedy="look at --max_length, --on_long and --on_empty, or give other rows",
        )
    return examples, report
