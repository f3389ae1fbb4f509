"""What a run refuses before any work: lists of conditions, by what they are known from.

The configuration alone (:func:`contradictions`, :func:`refused_settings`), the data sets that were
handed over (:func:`refused_datasets`), the model and the layout of its processes
(:func:`refused_runs`; what a layout rules out stands in ``distributed``), and the rows themselves.
Each entry says what is wanted, why it cannot be, and the option that mends it; the first is raised.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from alphatoken.config import SELF_ONLY, WALK
from alphatoken.direction.gradients import require_covered
from alphatoken.errors import AlphaTokenError, ConfigError, InputError, UnsupportedError
from alphatoken.model.batch import embedding_rows, require_rows
from alphatoken.model.choice import ParameterChoice, read_layers
from alphatoken.model.protocol import DecoderAdapter, find_adapter
from alphatoken.model.scope import find_scope
from alphatoken.train.distributed import refused_layouts
from alphatoken.train.hooks import checkpointing_option
from alphatoken.train.policy import TokenPolicy, chooses_rows, has_pass
from alphatoken.train.pool import ValidationPool, held_out_count
from alphatoken.train.python_rows import plain_rows

_IDS = {"input_ids", "prompt_ids", "chosen_ids", "rejected_ids"}
"""Columns of tokens."""


def raise_first(refusals: Iterable[AlphaTokenError]) -> None:
    """Raise the first of these errors, if there is one."""
    for refusal in refusals:
        raise refusal


# --- the configuration ----------------------------------------------------------------------------


def contradictions(args: Any) -> Iterator[ConfigError]:
    """Reasons for refusing options that contradict each other, whatever is trained."""
    if args.objective == "stability" and args.retention == "none":
        yield ConfigError(
            "objective='stability' needs a retention term",
            got="retention='none'",
            remedy="retention='diagonal', 'kronecker' or 'data'",
        )
    if args.estimator == WALK and args.retention != "none" and args.objective != "adaptation":
        yield ConfigError(
            "a walk has no stability side",
            got=f"estimator='walk', retention={args.retention!r}",
            why="it is steps on the validation rows, and V would take no part",
            remedy="retention='none', objective='adaptation', or estimator='label'",
        )
    conflicts = {
        f"policy={args.policy!r}": args.policy not in ("top", "bottom"),
        **{name: getattr(args, name, False) for name in ("packing", "padding_free")},
    }
    obstacles = [name for name, present in conflicts.items() if present]
    if args.value_unit == "response" and obstacles:
        yield ConfigError(
            "value_unit='response' ranks whole responses, one a row, of a batch or a step",
            got=", ".join(obstacles),
            remedy="policy='top' without packing or padding_free, or value_unit='token'",
        )


def refused_settings(args: Any) -> Iterator[ConfigError]:
    """Reasons for refusing a configuration under which no token can be weighed."""
    if args.torch_compile:
        yield _compiled()
    if getattr(args, "use_liger_kernel", False):
        yield ConfigError(
            "Liger kernels do not work with token values",
            got="use_liger_kernel=True",
            why="the backward of its gated MLP overwrites the activations that it saved, and "
            "values take a backward of their own through the graph that the step uses",
            remedy="use_liger_kernel=False; flash attention is supported",
        )
    smoothing = getattr(args, "label_smoothing_factor", 0)
    if smoothing > 0 and args.FAMILY == "sft":  # DPO does not read it
        yield ConfigError(
            "smoothed labels do not work with token values",
            got=f"label_smoothing_factor={smoothing}",
            why="transformers builds their loss of the logits, and token weights act on the "
            "log-probability of each token",
            remedy="label_smoothing_factor=0, or policy='standard'",
        )
    if getattr(args, "activation_offloading", False):
        yield ConfigError(
            "offloaded activations do not work with token values",
            got="activation_offloading=True",
            why="TRL forgets an activation when the first backward has fetched it, and values take "
            "a backward of their own through the graph that the step uses",
            remedy=f"activation_offloading=False; {checkpointing_option(args)}=True saves more "
            "memory",
        )
    if args.fp16 and args.needs_values:
        yield _scaled()
    if args.push_to_hub and args.hub_strategy in ("checkpoint", "all_checkpoints"):
        yield ConfigError(
            "checkpoints are not pushed to the hub",
            got=f"hub_strategy={args.hub_strategy.value!r}",
            why="they name tokens of the training rows, and without those no run goes on from one",
            remedy="hub_strategy='every_save' or 'end', which push the model",
        )


def _compiled() -> ConfigError:
    return ConfigError(
        "a compiled model does not work with token values",
        got="torch.compile",
        why="inputs and outputs of the scored linears are not part of the compiled graph",
        remedy="torch_compile=False; compiling single layers below the scored ones is fine",
    )


def _scaled() -> ConfigError:
    return ConfigError(
        "fp16 does not work with token values",
        got="fp16=True",
        why="a step whose gradient overflows is skipped, and its values would count all the same",
        remedy="bf16=True, or neither",
    )


def refused_losses(args: Any, policy: TokenPolicy) -> Iterator[ConfigError]:
    """Reasons for refusing a policy beside a loss of TRL that weighs tokens as well."""
    published = policy.settings.mode == "native" and policy.by_confidence
    if published and getattr(args, "loss_type", None) == "dft":
        yield ConfigError(
            f"policy '{policy.name}' weighs each token by the model's confidence, and "
            "loss_type='dft' does so too: it would count twice",
            got=f"loss_type='dft', policy={policy.name!r}",
            why="the published rule is of cross-entropy",
            remedy="loss_type='nll', or policy='standard'",
        )


# --- the data sets --------------------------------------------------------------------------------


def refused_datasets(
    args: Any, policy: TokenPolicy | None, datasets: Mapping[str, Any], fisher: Any
) -> Iterator[ConfigError]:
    """Reasons for refusing data sets that a run lacks, or that it would not read.

    Args:
        args: the trainer's configuration.
        policy: of the run; None where none weighs tokens.
        datasets: "validation", "retention" and "fisher", each as handed over, or None.
        fisher: one that was fitted earlier, or None.
    """
    rows = datasets["fisher"]
    if rows is not None and fisher is not None:
        yield ConfigError(
            "the Fisher is given twice",
            got="fisher=... and fisher_dataset=...",
            why="one is fitted already, and nothing would be fitted on the rows",
            remedy="leave one of them out",
        )
    # Of a Fisher the policy has no say: a control (random, all) may be given the same as the run
    # that it is compared with.
    if (rows is not None or fisher is not None) and not args.reads_fisher:
        yield ConfigError(
            f"{'fisher' if rows is None else 'fisher_dataset'} is given, and no Fisher is wanted",
            got=f"objective={args.objective!r}, retention={args.retention!r}",
            why="nothing would read it",
            remedy="leave it out, or objective='both' with retention='diagonal' or 'kronecker'",
        )
    if datasets["retention"] is not None and not args.reads_retention:
        yield ConfigError(
            "retention_dataset is given, and no retention rows are wanted",
            got=f"objective={args.objective!r}, retention={args.retention!r}",
            why="nothing would read it",
            remedy="leave it out, or objective='both' with retention='data'; a race measures "
            "retention_rows",
        )
    if policy is None:
        return
    no_validation = datasets["validation"] is None
    if has_pass(policy) and policy.needs.validation and no_validation:
        yield ConfigError(
            f"policy '{policy.name}' needs a validation dataset",
            got="validation_dataset=None",
            why="it chooses what serves those rows",
            remedy="pass validation_dataset=..., or validation_file on the command line",
        )
    if policy.needs.values and args.objective != "stability" and no_validation:
        yield ConfigError(
            "values need a validation dataset",
            got=f"policy={policy.name!r}, validation_dataset=None",
            why="adaptation is measured against the loss on it",
            remedy="pass validation_dataset=..., or value nothing: policy='standard' (all "
            "tokens) or 'random'",
        )
    if policy.needs.values and args.reads_retention and datasets["retention"] is None:
        yield ConfigError(
            "retention='data' needs a retention dataset",
            remedy="pass retention_dataset=..., or retention='none'",
        )


# --- the model and its processes ------------------------------------------------------------------


def refused_runs(
    accelerator: Any, args: Any, model: nn.Module, policy: TokenPolicy
) -> Iterator[AlphaTokenError]:
    """Reasons for refusing a run, from layout and shape of the model; its weights are not read.

    Raises:
        CoverageError: a matrix of the scored layers that would have no values.
    """
    yield from refused_layouts(accelerator, args, model, policy)
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    backend = getattr(getattr(plugin, "backend", None), "value", "NO")
    whole = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    if whole or str(backend) != "NO":
        yield _compiled()
    # The launcher's precision, of which the configuration says nothing.
    if accelerator.mixed_precision == "fp16" and (args.needs_values or policy.needs.values):
        yield _scaled()
    if getattr(args, "packing", False) and chooses_rows(policy):
        yield ConfigError(
            "samples cannot be chosen from packed rows",
            got=f"policy '{policy.name}'",
            why="a packed row holds several samples",
            remedy="packing=False",
        )
    joined = [name for name in ("packing", "padding_free") if getattr(args, name, False)]
    if joined and policy.by_response:
        yield ConfigError(
            f"policy '{policy.name}' ranks responses, one a row",
            got=", ".join(joined),
            why="the responses that are joined in a row would count as one",
            remedy=", ".join(f"{name}=False" for name in joined),
        )
    if policy.needs.attention:
        adapter = find_adapter(model)
        for name, mixer in adapter.other_mixers([len(adapter.layers()) - 1]).items():
            yield UnsupportedError(
                f"policy '{policy.name}' reads the attention of the last layer, which has none",
                got=f"{name} ({mixer})",
                remedy="a model with softmax attention there",
            )
    if not policy.needs.values:
        return
    choice = ParameterChoice.read(args.parameters)
    scope = find_scope(find_adapter(model), read_layers(args.layers), choice)
    for name, mixer in scope.mixers.items() if args.estimator in SELF_ONLY else ():
        yield UnsupportedError(
            f"estimator={args.estimator!r} is defined on attention and gated delta nets only",
            got=f"{name} ({mixer})",
            why="its self-only backward has no rule here, and an approximation would be silent",
            remedy="estimator='label' (exact on every layer type) or 'path', or other layers",
        )
    require_covered(scope, args.estimator, args.uncovered)


# --- rows -----------------------------------------------------------------------------------------


def check_pool(args: Any, rows: int, processes: int) -> ValidationPool:
    """The validation pool of so many rows, of which every process has a share at every step.

    Raises:
        ConfigError: too few rows for the batch, or for the processes; its remedies are such that
            help.
    """
    try:
        return pool_of(args, rows, processes)
    except ConfigError as error:
        remedies = list(pool_remedies(args, rows, processes))
        if (enough := enough_rows(args, rows, processes)) is not None:
            remedies.insert(0, f"more validation rows ({enough} are enough)")
        elif not remedies:  # a batch below the processes, whatever the rows
            larger = {"validation_batch_size": processes}
            enough = enough_rows(args, rows, processes, **larger)
            remedies = [f"more validation rows ({enough} are enough) with {_in_words(larger)}"]
        remedy = ", or ".join(remedies)
        raise ConfigError(error.what, got=error.got, why=error.why, remedy=remedy) from None


def pool_of(args: Any, rows: int, processes: int, **changed: Any) -> ValidationPool:
    """The same by the options ``changed``.

    Steps of a walk take micro-batches of the drawn rows, so as many as there are make a batch.

    Raises:
        ConfigError: that of the pool itself. No remedy is looked for.
    """
    names = (
        "validation_batch_size", "validation_mode", "held_out_share", "held_out_steps", "value_seed"
    )  # fmt: skip
    own = {**{name: getattr(args, name) for name in names}, **changed}
    share = own["held_out_share"] if own["held_out_steps"] else 0.0
    size = own["validation_batch_size"]
    if args.estimator == WALK:
        size = max(min(size, rows - held_out_count(rows, share)), processes)
    pool = ValidationPool(
        rows, size, mode=own["validation_mode"], held_out_share=share, seed=own["value_seed"]
    )
    ValidationPool.share_of(pool.rows(0), 0, processes)
    if pool.held_out:
        ValidationPool.share_of(pool.held_out, 0, processes)
    return pool


def _has_pool(args: Any, rows: int, processes: int, **changed: Any) -> bool:
    try:
        pool_of(args, rows, processes, **changed)
    except ConfigError:
        return False
    return True


def enough_rows(args: Any, rows: int, processes: int, **changed: Any) -> int | None:
    """The smallest number of validation rows above ``rows`` that the pool of a run can be of.

    Where some are enough more are, since both what is drawn and what is held out grow with them.
    """
    more = range(rows + 1, 10_000)
    place = bisect_left(more, True, key=lambda n: _has_pool(args, n, processes, **changed))
    return more[place] if place < len(more) else None


def pool_remedies(args: Any, rows: int, processes: int) -> Iterator[str]:
    """Options by which so few validation rows are enough, as in Python and for a shell.

    One option where one will do, else both that are needed; none where nothing but rows helps.
    """
    size, all_drawn = args.validation_batch_size, {"held_out_share": 0}
    sizes = [
        {"validation_batch_size": n} for n in (*range(size - 1, 0, -1), *range(size + 1, rows + 1))
    ]
    single = [next((own for own in sizes if _has_pool(args, rows, processes, **own)), None)]
    single += [all_drawn if _has_pool(args, rows, processes, **all_drawn) else None]
    remedies = [own for own in single if own is not None]
    if not remedies:
        both = ({**all_drawn, **own} for own in sizes)
        remedies = [own for own in both if _has_pool(args, rows, processes, **own)][:1]
    yield from map(_in_words, remedies)


def _in_words(options: Mapping[str, Any]) -> str:
    """Options as in Python and, in brackets, as for a shell."""
    python = " and ".join(f"{name}={value}" for name, value in options.items())
    return f"{python} ({' '.join(f'--{name} {value}' for name, value in options.items())})"


def check_lengths(
    adapter: DecoderAdapter, rows: Iterable[Mapping[str, Any]], name: str, length: Any
) -> None:
    """Refuse rows that are longer than the model allows, before anything is fitted.

    ``length`` counts the tokens of a row as it stands in a batch.

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
