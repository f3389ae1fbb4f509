"""Facts on which a run's result depends, as one table, compared when the run resumes.

Processes, trainer, options, data, frozen weights and versions of libraries. What differs is refused
by name, or noted where the result changes by no more than rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor, nn

from alphatoken.support.resume import (
    SAMPLED_NUMBERS,
    Changes,
    changed_settings,
    content_digest,
    tensor_digest,
)

__all__ = [
    "dataset_digest",
    "frozen_fingerprint",
    "library_versions",
    "run_options",
    "split_changes",
    "weights_fingerprint",
]

_WATCHING = (
    "debug", "disable_tqdm", "do_", "eval_", "export_values", "fisher_cache",
    "greater_is_better", "hub_", "include_", "load_best_model", "log_", "logging_",
    "metric_for_best", "on_empty", "output_dir",
    "policy_cache", "project", "push_to_hub", "report_to", "restore_callback", "resume_from",
    "run_name", "save_",
    "skip_memory_metrics", "trackio_", "batch_eval_metrics", "per_device_eval", "prediction_loss",
    "jit_mode", "enable_jit_checkpoint", "ignore_data_skip",
)  # fmt: skip
_MACHINE = (
    "dataloader_multiprocessing", "dataloader_num_workers", "dataloader_in_order",
    "dataloader_persistent", "dataloader_pin_memory", "dataloader_prefetch", "dataset_num_proc",
    "ddp_", "deepspeed", "fsdp", "local_rank", "torch_compile",
    "torch_empty_cache", "use_cpu", "activation_offloading", "parallelism_config",
    "trust_remote_code",
)  # fmt: skip
"""Beginnings of options that say what is watched and written, or where it runs, not what."""

_ROUNDING = (
    "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "fisher_batch_size",
    "precompute_ref_batch_size", "remove_unused_columns", "tf32",
)  # fmt: skip
"""Options that say how the same numbers are computed. (A Fisher is compared by itself.)"""
_LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "alphatoken")
"""Libraries that a run's bits depend on."""

_ARROW_ROWS = 1000


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that a run's bits depend on."""
    versions = {}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def run_options(args: Any) -> dict[str, Any]:
    """The options of a run that its result depends on, as plain JSON values.

    Every dataclass field of ``args`` counts unless it is known to be about logging, saving,
    evaluation or the machine: a field added by a later library version takes part by itself.
    """
    names = (field.name for field in dataclasses.fields(args))
    kept = (name for name in names if not name.startswith(_WATCHING + _MACHINE))
    return {name: _plain(getattr(args, name, None)) for name in sorted(kept)}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        unordered = isinstance(value, (set, frozenset))
        return [_plain(item) for item in (sorted(value, key=str) if unordered else value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return getattr(value, "__qualname__", type(value).__qualname__)


def split_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str] = ()
) -> tuple[Changes, Changes]:
    """Changes that alter the result of a run, and changes that alter its rounding only.

    "No more than rounding" leaves draws of dropout out.

    Args:
        before: facts of the one run.
        now: of the other.
        allowed: names that may differ; the number of processes may not.
    """
    changes = {
        name: values
        for name, values in changed_settings(before, now).items()
        if name not in allowed or name == "processes"
    }
    rounding = {name: changes.pop(name) for name in (*_ROUNDING, *_LIBRARIES) if name in changes}
    return changes, rounding


def frozen_fingerprint(model: nn.Module) -> str | None:
    """Digest of the frozen weights (an adapter's base model), or None if there are none.

    A checkpoint of adapters does not hold them, and adapters on another base are silently wrong.
    """
    named = model.named_parameters()
    return weights_fingerprint({n: p for n, p in named if not p.requires_grad and p.numel()})


def weights_fingerprint(weights: Mapping[str, Tensor]) -> str | None:
    """Digest of weights by name, from 1,024 numbers of each; None where there are none."""
    return tensor_digest(weights.items(), numbers=SAMPLED_NUMBERS) if weights else None


def dataset_digest(content: Any) -> str | None:
    """:func:`~alphatoken.support.resume.content_digest` of a data set, or of other content.

    A ``datasets.Dataset``: every row, through its columns. Mappings and other sequences: every
    part. The same for the same content, however it is stored or cached. None of None, and of a
    stream, whose content is not known before it is read.
    """
    if content is None or not hasattr(content, "__len__"):
        return None
    return content_digest(_parts(content))


def _parts(content: Any) -> Iterator[Any]:
    """Parts of the content one after the other: no data set is held as one text."""
    if hasattr(content, "with_format") and hasattr(content, "column_names"):
        names = sorted(content.column_names)
        yield len(content), names
        for table in content.with_format("arrow").iter(batch_size=_ARROW_ROWS):
            yield from (table.column(name).to_pylist() for name in names)
    elif isinstance(content, Mapping):
        yield from ((name, content[name]) for name in sorted(content))
    else:
        yield from (content[index] for index in range(len(content)))
