"""Refusals before any work, from the options, the model's shape and the layout alone.

Options that contradict each other are refused where the configuration is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from alphatoken.errors import ConfigError, InputError, UnsupportedError
from alphatoken.estimate.names import SELF_ONLY
from alphatoken.estimate.proofs import require_covered
from alphatoken.model.layer_choice import read_layers
from alphatoken.model.parameter_choice import ParameterChoice
from alphatoken.model.protocol import DecoderAdapter, find_adapter
from alphatoken.model.token_ids import embedding_rows, require_rows
from alphatoken.train.datasets import plain_rows
from alphatoken.train.layouts import SHARDED, check_layout, layout
from alphatoken.train.policy import TokenPolicy
from alphatoken.train.pool import ValidationPool
from alphatoken.train.refused_settings import scaled

__all__ = [
    "check_given",
    "check_lengths",
    "check_pool",
    "check_run",
    "check_tokens",
    "chooses_rows",
    "has_pass",
    "refuse_packed",
]

_IDS = {"input_ids", "prompt_ids", "chosen_ids", "rejected_ids"}
"""Columns of tokens."""


def check_run(model: nn.Module, accelerator: Any, args: Any, policy: TokenPolicy) -> None:
    """Refuse what this run cannot do.

    Args:
        model: of the right shape; its weights are not looked at.
        accelerator: of the trainer.
        args: the trainer's configuration.
        policy: of the run.

    Raises:
        ConfigError, UnsupportedError, CoverageError: the first thing that does not work.
    """
    check_layout(accelerator, args, model)
    _check_policy(model, accelerator, args, policy)
    if not policy.needs.values:
        return
    if accelerator.mixed_precision == "fp16":
        raise scaled()
    adapter = find_adapter(model)
    choice = ParameterChoice.read(args.parameters, "parameters")
    scope = choice.scope(adapter, read_layers(args.layers))
    for name, mixer in scope.mixers.items() if args.estimator in SELF_ONLY else ():
        raise UnsupportedError(
            f"estimator={args.estimator!r} is defined on attention and gated delta nets only",
            got=f"{name} ({mixer})",
            why="its self-only backward has no rule here, and an approximation would be silent",
            remedy="estimator='label' (exact on every layer type) or 'path', or other layers",
        )
    require_covered(scope, args.estimator, args.uncovered)


def check_given(args: Any, policy: TokenPolicy, *, validation: bool, retention: bool) -> None:
    """Refuse a run that lacks rows; known before any model is loaded.

    Args:
        args: the trainer's configuration.
        policy: of the run.
        validation: whether it has validation rows.
        retention: whether it has retention rows.

    Raises:
        ConfigError: names what is missing.
    """
    if has_pass(policy) and policy.needs.validation and not validation:
        raise ConfigError(
            f"policy '{policy.name}' needs a validation dataset",
            got="validation_dataset=None",
            why="it chooses what serves those rows",
            remedy="pass validation_dataset=..., or validation_file on the command line",
        )
    if not policy.needs.values:
        return
    if args.objective != "stability" and not validation:
        raise ConfigError(
            "values need a validation dataset",
            got=f"policy={policy.name!r}, validation_dataset=None",
            why="adaptation is measured against the loss on it",
            remedy="pass validation_dataset=..., or value nothing: policy='standard' (all "
            "tokens) or 'random'",
        )
    if args.retention == "data" and args.objective != "adaptation" and not retention:
        raise ConfigError(
            "retention='data' needs a retention dataset",
            remedy="pass retention_dataset=..., or retention='none'",
        )


# --- rows ---------------------------------------------------------------------------------------


def check_pool(args: Any, rows: int, processes: int) -> ValidationPool:
    """The validation pool of so many rows, of which every process has a share at every step.

    Raises:
        ConfigError: too few rows for the batch, or for the processes.
    """
    pool = ValidationPool(
        rows,
        args.validation_batch_size,
        mode=args.validation_mode,
        held_out_share=args.held_out_share if args.held_out_steps else 0.0,
        seed=args.value_seed,
    )
    ValidationPool.share_of(pool.rows(0), 0, processes)
    if pool.held_out:
        ValidationPool.share_of(pool.held_out, 0, processes)
    return pool


def check_lengths(
    adapter: DecoderAdapter, rows: Iterable[Mapping[str, Any]], name: str, length: Any
) -> None:
    """Refuse rows that are longer than the model allows, before anything is fitted.

    Args:
        adapter: of the model.
        rows: tokenised.
        name: of the data set.
        length: row -> its number of tokens in a batch.

    Raises:
        InputError: names the longest.
    """
    limit = adapter.max_positions()
    if limit is None:
        return
    longest, index = max(((length(row), i) for i, row in enumerate(rows)), default=(0, 0))
    if longest > limit:
        raise InputError(
            f"a row of the {name} dataset is longer than the model allows",
            got=f"{longest} tokens in row {index}, limit {limit}",
            why="positions past the limit have no meaning to the model",
            remedy=f"max_length={limit} or less",
        )


def check_tokens(rows: Any, model: Any, name: str) -> None:
    """Refuse tokenised rows with a token that the model's embedding has no row for.

    Args:
        rows: of any trainer.
        model: that looks the ids up.
        name: of the data set.

    Raises:
        InputError: names the row.
    """
    size = embedding_rows(model)
    if size is None or _ids_within(rows, size):
        return
    for number, row in enumerate(plain_rows(rows)):
        for column in _IDS & row.keys():
            require_rows(torch.as_tensor(row[column]), model, f"{name} row {number}")


def _ids_within(rows: Any, size: int) -> bool:
    """True if all ids are seen to lie in ``[0, size)``: of rows in Arrow, by columns.

    False says nothing: rows of another kind, or with a column of another type, are not looked at.
    """
    if plain_rows(rows) is not rows or not hasattr(rows, "with_format"):
        return False
    import pyarrow as pa
    import pyarrow.compute as pc

    for table in rows.with_format("arrow").iter(batch_size=1000):
        for column in _IDS & set(table.column_names):
            kind = table.schema.field(column).type
            if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
                return False
            if not pa.types.is_integer(kind.value_type):
                return False
            ends = pc.min_max(pc.list_flatten(table.column(column))).as_py()
            if ends["min"] is not None and not 0 <= ends["min"] <= ends["max"] < size:
                return False
    return True


# --- policies -----------------------------------------------------------------------------------


def chooses_rows(policy: TokenPolicy) -> bool:
    """True if it trains on some of the rows only."""
    return type(policy).choose_rows is not TokenPolicy.choose_rows


def has_pass(policy: TokenPolicy) -> bool:
    """True if it looks at all rows before training."""
    return chooses_rows(policy) or type(policy).prepare is not TokenPolicy.prepare


def _check_policy(model: nn.Module, accelerator: Any, args: Any, policy: TokenPolicy) -> None:
    kind = layout(accelerator)
    # At every batch, not only in a pass before training.
    if policy.needs.model and not has_pass(policy) and kind in SHARDED:
        raise UnsupportedError(
            f"policy '{policy.name}' runs the model itself, and the weights are sharded",
            why="no process has whole weights outside the trainer's own forward",
            remedy="a layout in which each process has the weights (DDP, ZeRO-1 or 2)",
        )
    if policy.needs.attention:
        adapter = find_adapter(model)
        for name, mixer in adapter.other_mixers([len(adapter.layers()) - 1]).items():
            raise UnsupportedError(
                f"policy '{policy.name}' reads the attention of the last layer, which has none",
                got=f"{name} ({mixer})",
                remedy="a model with softmax attention there",
            )
    if policy.needs.entropy and kind in SHARDED:
        raise UnsupportedError(
            f"policy '{policy.name}' reads the output head, which is spread over processes",
            got=f"layout {kind}",
            remedy="a layout in which each process has the weights (DDP, ZeRO-1 or 2)",
        )
    if has_pass(policy):
        # Whole weights that were handed over are cut up after the pass; those that a run loads by
        # name (on the meta device where it is only planned) are cut up as they are loaded.
        sharded = any(weight.is_meta or weight.numel() == 0 for weight in model.parameters())
        if kind == "zero3" and sharded:
            raise UnsupportedError(
                f"policy '{policy.name}' cannot run its pass over the rows on sharded weights",
                got=f"layout {kind}",
                remedy="run it once in one process; the files in policy_cache are then found here",
            )
    if getattr(args, "packing", False):
        refuse_packed(policy)


def refuse_packed(policy: TokenPolicy) -> None:
    """Raise if a policy chooses rows, where a row is no sample."""
    if chooses_rows(policy):
        raise ConfigError(
            "samples cannot be chosen from packed rows",
            got=f"policy '{policy.name}'",
            why="a packed row holds several samples",
            remedy="packing=False",
        )
