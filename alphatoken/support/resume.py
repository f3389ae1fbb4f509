"""Is this the same run? Digests of what a run depends on, and the comparison of two runs' settings.

A run writes its settings, digests of its inputs among them, beside its results. A run that resumes
makes the same table anew, and :func:`refuse_changes` names each setting that differs. Results are
written by :func:`alphatoken.support.storage.replacing`, so that what a resumed run finds is whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from alphatoken.errors import AlphaTokenError, ConfigError, DataError

SAMPLED_NUMBERS = 1024
"""Numbers of a tensor by which a resumed training run recognises it; reading all of them would take
longer than many a step."""

TRAINING_RUN = "alphatoken-run.json"
"""What a training run writes about itself in its output folder."""

_BLOCK = 1 << 20

_NO_FUNCTION = (
    "auto_mapping", "base_model_name_or_path", "corda_config", "inference_mode", "peft_version",
    "revision", "runtime_config", "task_type", "tokenizer_name_or_path",
)  # fmt: skip
"""Settings of adapters that say where they are from and what they are for, not what they compute;
of CorDA's, which name files, all is in the weights that a model begins at."""

Changes = dict[str, tuple[Any, Any]]
"""Name of a setting that differs -> its value in the earlier run, and now."""


# --- digests --------------------------------------------------------------------------------------


def file_digest(path: str | os.PathLike[str], *, blocks: int | None = None) -> str:
    """SHA-256 of a file's bytes.

    Args:
        path: of the file.
        blocks: of a file of more than so many MiB, only so many blocks of 1 MiB count: evenly
            spread, the first and the last included. That shows truncation and lost blocks, not
            every flipped bit.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if blocks is None or size <= blocks * _BLOCK:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        for index in range(blocks):
            file.seek(index * (size - _BLOCK) // (blocks - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def tensor_digest(
    tensors: Iterable[tuple[str, Tensor]],
    *,
    numbers: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> str:
    """SHA-256 over names, dtypes, shapes and bytes; the same on any device.

    Args:
        tensors: names and tensors; the order counts.
        numbers: so many evenly spread numbers of each tensor, as float32, in place of its bytes.
        metadata: counts as well, in any order of its names.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor if numbers is None else _sampled(tensor, numbers)))
    if metadata is not None:
        digest.update(json.dumps(metadata, sort_keys=True).encode())
    return digest.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """:func:`tensor_digest` of all parameters and buffers, and of how adapters enter."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return tensor_digest(tensors, metadata=adapter_settings(model) or None)


def content_digest(parts: Iterable[Any]) -> str:
    """SHA-256 over parts of plain content, each as a line of JSON; only one is in memory at a time.

    Whole numbers count the same as a tensor, an array or a list. A tensor of floating point counts
    by dtype, shape and 1,024 evenly spread numbers; what JSON has no form for by its ``repr``.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(part, sort_keys=True, default=_as_json).encode() + b"\n")
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    # A tensor of one number may have any stride and still count as contiguous, and torch then
    # refuses to view it as bytes.
    flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _sampled(tensor: Tensor, count: int) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // count)].float()


def _as_json(item: Any) -> Any:
    if isinstance(item, Tensor) and item.is_floating_point():
        numbers = _bytes(_sampled(item, SAMPLED_NUMBERS)).hex()
        return [str(item.dtype), list(item.shape), numbers]
    if isinstance(item, (Tensor, np.ndarray)):
        return item.tolist()
    return dict(item) if isinstance(item, Mapping) else repr(item)


# --- settings -------------------------------------------------------------------------------------


def plain_values(value: Any) -> Any:
    """As JSON values: sets in the order of their texts, tables for dataclasses, names of others."""
    if isinstance(value, Enum):
        return plain_values(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        unordered = isinstance(value, (set, frozenset))
        return [plain_values(item) for item in (sorted(value, key=str) if unordered else value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_values(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return getattr(value, "__qualname__", type(value).__qualname__)


def adapter_settings(model: nn.Module) -> dict[str, Any]:
    """Settings of a model's PEFT adapters on which its function depends; empty where it has none.

    Weights do not show them: a LoRA's factors are the same under any ``lora_alpha``. A setting has
    its own name, and that of its adapter before it where there is another one.
    """
    # Of a model inside another module, too.
    tables = (getattr(module, "peft_config", None) for module in model.modules())
    adapters: Mapping[str, Any] = next((one for one in tables if isinstance(one, Mapping)), {})
    settings = {}
    for adapter in sorted(adapters):
        before = "" if adapter == "default" or len(adapters) == 1 else f"{adapter}."
        for name, value in plain_values(adapters[adapter]).items():
            if name not in _NO_FUNCTION:
                settings[f"{before}{name}"] = value
    return settings


def changed_settings(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Settings in which two runs differ, by name.

    Both are compared as JSON would give them back. Settings of a nested table are compared one by
    one; a name that differs in two tables comes with its table the second time.

    >>> changed_settings({"options": {"seed": 1, "beta": 2}}, {"options": {"seed": 1, "beta": 3}})
    {'beta': (2, 3)}
    >>> changed_settings({"a": {"n": 1}, "b": {"n": 2}}, {"a": {"n": 3}, "b": {"n": 4}})
    {'n': (1, 3), 'b.n': (2, 4)}
    """
    earlier, now = (json.loads(json.dumps(each, default=str)) for each in (earlier, now))
    changes: Changes = {}
    for part in sorted({*earlier, *now}):
        old, new = earlier.get(part), now.get(part)
        if not isinstance(old, Mapping) or not isinstance(new, Mapping):
            old, new = {part: old}, {part: new}
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                key = f"{part}.{name}" if name in changes else name
                changes[key] = (old.get(name), new.get(name))
    return changes


def refuse_changes(
    changes: Changes,
    *,
    what: str,
    why: str,
    remedy: str,
    error: type[AlphaTokenError] = ConfigError,
) -> None:
    """Raise unless ``changes`` is empty; the message names each setting and both its values."""
    if changes:
        raise error(
            f"{what}: it differs in {', '.join(changes)}",
            got=describe_changes(changes),
            why=why,
            remedy=remedy,
        )


def refuse_other_run(
    earlier: Mapping[str, Any], now: Mapping[str, Any], *, remedy: str = ""
) -> None:
    """Check that a command which resumes has the settings that it began with.

    Args:
        earlier: settings of the run that is to be resumed.
        now: of the command.
        remedy: what goes before the usual one.

    Raises:
        ConfigError: it has others; names each.
    """
    refuse_changes(
        changed_settings(earlier, now),
        what="this is not the run to resume",
        why="values of two different runs would be mixed in one folder",
        remedy=f"{remedy}repeat the earlier arguments, and what is finished is kept; or another "
        "--output_dir, and all of it is kept; or --overwrite_output, which removes the results in "
        "the folder and begins anew",
    )


def describe_changes(changes: Changes) -> str:
    """Each change in words, with both values."""
    return "; ".join(
        f"{name}: {_both_ends(old)} then, {_both_ends(new)} now"
        for name, (old, new) in changes.items()
    )


def _both_ends(value: Any) -> str:
    # Two long lists may differ in their last entries alone.
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-60:]}"


def read_run(path: Path) -> dict[str, Any]:
    """The JSON that a run wrote about itself: "command", "settings", and what else it needs.

    Raises:
        DataError: it cannot be read, or has no settings.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        dict(document["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("the earlier run cannot be read", got=f"{path}: {error}") from None
    return document


# --- places of results ----------------------------------------------------------------------------


def require_writable(folder: str | Path, option: str = "--output_dir") -> None:
    """Check that a folder, there or still to be made, can be written; nothing is left behind.

    Raises:
        DataError: it cannot.
    """
    path = Path(folder).absolute()
    existing = next(one for one in (path, *path.parents) if one.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise DataError(
            "the output folder cannot be written",
            got=f"{option} {folder}: {error.strerror or error}",
            why="the results would be lost when they are there",
            remedy=f"give another {option}",
        ) from error


def check_output_file(path: str | Path, inputs: Iterable[str | None], *, replace: bool) -> None:
    """Check that a file can be written, and that nothing is lost by it, before anything is read.

    Raises:
        ConfigError: a folder, an input, or a file that is there. DataError: it cannot be written.
    """
    out = Path(path)
    if not out.parent.is_dir():
        raise ConfigError(
            "the folder of --output_file does not exist",
            got=str(out.parent),
            remedy="make it first",
        )
    for source in inputs:
        if source is not None and out.resolve() == Path(source).resolve():
            raise ConfigError(
                "--output_file is the input",
                got=str(out),
                why="what is read would be gone",
                remedy="another file",
            )
    if out.is_dir():
        raise ConfigError("--output_file is a folder", got=str(out), remedy="name a file in it")
    if out.exists() and not replace:
        raise ConfigError(
            "the output file is there already",
            got=str(out),
            remedy="--overwrite_output to replace it, or another --output_file",
        )
    require_writable(out.parent, "--output_file")


def check_output_folder(
    run_file: Path, results: Iterable[Path], command: str, *, resume: bool, overwrite: bool
) -> None:
    """Check that an output folder holds nothing that a new run would be mixed up with.

    Args:
        run_file: what an earlier run wrote about itself, if there was one.
        results: what a run writes in the folder.
        command: that is about to run.
        resume: continue an earlier run.
        overwrite: replace it.

    Raises:
        ConfigError: a training run, another command's, an earlier run and neither ``resume`` nor
            ``overwrite``, or files of something else.
    """
    remedy = "another --output_dir"
    training = run_file.parent / TRAINING_RUN
    if training.exists():
        raise ConfigError(
            "the output folder holds a training run",
            got=str(training),
            why="results quote rows, and push_to_hub uploads all of that folder whose name does "
            "not begin with an underscore",
            remedy=f"give {remedy}",
        )
    earlier = command_of(run_file)
    if earlier not in (None, command):
        raise ConfigError(
            "the output folder holds results of another command",
            got=f"{run_file} of `alphatoken {earlier}`",
            remedy=f"give {remedy}",
        )
    if not run_file.exists():
        foreign = [path for path in results if path.exists()]
        if foreign:
            what = "the output folder holds something else"
            raise ConfigError(what, got=str(foreign[0]), remedy=f"give {remedy}")
    elif not (resume or overwrite):
        raise ConfigError(
            "the output folder holds an earlier run",
            got=str(run_file.parent),
            remedy="--resume to continue it and keep what is finished, --overwrite_output to "
            f"remove its results and begin anew, or {remedy}",
        )


def command_of(run_file: Path) -> str | None:
    """The command whose run wrote this file; None where there is none, or it says nothing of it."""
    try:
        document = json.loads(run_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document.get("command") if isinstance(document, dict) else None
