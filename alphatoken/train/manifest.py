"""What a checkpoint holds, and whether it is this run's: the folder to resume from.

A folder ``checkpoint-N`` counts only with a valid ``alphatoken.json``: the step, the run, the facts
on which its result depends, and every file with its size and SHA-256. Whatever a crash, a full disk
or an interrupted copy left behind is recognised and never resumed from. The facts are processes,
trainer, options, adapters, data, frozen weights and versions of libraries. What differs is refused
by name, or noted where the result changes by no more than rounding. Nothing here knows the trainer;
one process calls it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from alphatoken.errors import ConfigError, DataError, warn_caller
from alphatoken.support.resume import (
    SAMPLED_NUMBERS,
    TRAINING_RUN,
    Changes,
    changed_settings,
    content_digest,
    describe_changes,
    file_digest,
    plain_values,
    refuse_changes,
    tensor_digest,
)
from alphatoken.support.storage import flush, read_json, write_json
from alphatoken.train.policy import TokenPolicy

MANIFEST = "alphatoken.json"
RUN = TRAINING_RUN
"""In the run's own folder: the run that its newest checkpoints belong to, with its options."""
RESULTS = "_alphatoken"
"""In the run's own folder: token values and the page about the run. They hold the text of training
rows; the underscore keeps them out of what the trainers upload to the hub."""

_NAME = re.compile(r"checkpoint-(\d+)")
_BLOCKS = 64
"""Files up to 64 MiB are hashed whole; of larger ones so many blocks of 1 MiB."""


@dataclass(frozen=True)
class Manifest:
    """The content of ``alphatoken.json``.

    Attributes:
        step: optimizer steps taken.
        run: random name of the run; a run that is resumed keeps it.
        resumable: whether optimizer and random state are there (not so under ``save_only_model``).
        facts: that the run's result depends on.
        files: size and digest of every other file, by path inside the folder.
    """

    step: int
    run: str
    resumable: bool
    facts: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """List the files of ``folder``, put them on disk (fsync), then write the manifest.

    Raises:
        OSError: a file cannot be read or flushed.
        DataError: the manifest itself could not be written.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            flush(path)
            entry = {"size": path.stat().st_size, "sha256": file_digest(path, blocks=_BLOCKS)}
            files[path.relative_to(folder).as_posix()] = entry
    write_json(folder / MANIFEST, {**asdict(manifest), "files": files})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder; the files themselves are not looked at.

    Raises:
        DataError: none there, or not one of ours.
    """
    path = folder / MANIFEST
    try:
        return Manifest(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as problem:
        raise DataError(
            f"'{folder}' is no complete checkpoint",
            got=f"{MANIFEST}: {problem}",
            why="the file is written last: without it, some of the others may be half there",
            remedy="resume from another checkpoint (resume_from_checkpoint=True takes the last "
            "complete one); to start from another trainer's checkpoint, give it as the model",
        ) from problem


def verify(folder: Path) -> Manifest:
    """Read the manifest and check every file against it.

    Files of more than 64 MiB are compared by size and 64 blocks of 1 MiB, the first and the last
    included: that finds truncation and lost blocks at the end, not every single flipped bit.

    Raises:
        DataError: names the first file that is missing or differs.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        problem = ""
        try:
            size = (folder / name).stat().st_size
            if size != expected["size"]:
                problem = f"{size} bytes, {expected['size']} expected"
            elif file_digest(folder / name, blocks=_BLOCKS) != expected["sha256"]:
                problem = "its content has changed"
        except OSError as missing:
            problem = str(missing)
        if problem:
            raise DataError(
                f"the checkpoint '{folder}' is damaged",
                got=f"{name}: {problem}",
                why="training would go on from other weights or state than those saved",
                remedy="copy it again, or resume from another checkpoint",
            )
    return manifest


def checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Folders ``checkpoint-N`` by step, complete or not."""
    if not output_dir.is_dir():
        return []
    folders = [(_NAME.fullmatch(path.name), path) for path in output_dir.iterdir()]
    return sorted((int(match[1]), path) for match, path in folders if match and path.is_dir())


def latest_complete(output_dir: Path, run: str | None = None) -> tuple[Path, Manifest] | None:
    """The last complete checkpoint that can be resumed from, fully verified, or None.

    Of this ``run`` alone, if it is named.
    """
    for _, path in reversed(checkpoints(output_dir)):
        try:
            manifest = read_manifest(path)
            if manifest.resumable and run in (None, manifest.run):
                return path, verify(path)
        except DataError:
            continue
    return None


def rotate(output_dir: Path, limit: int | None, newest: Path, best: str | None, bin: Path) -> None:
    """Delete the oldest checkpoints until ``limit`` are left, as transformers does.

    ``newest`` and ``best`` always stay.
    """
    if limit is None or limit <= 0:
        return
    protected = {newest.resolve()} | ({Path(best).resolve()} if best else set())
    by_age = sorted(checkpoints(output_dir), key=lambda item: (item[1].stat().st_mtime, item[0]))
    surplus = len(by_age) - max(limit, len(protected))
    removable = [path for _, path in by_age if path.resolve() not in protected]
    for path in removable[: max(surplus, 0)]:
        bin.mkdir(parents=True, exist_ok=True)
        # Moved first, so that no folder of a checkpoint's name is ever half deleted.
        shutil.rmtree(path.rename(bin / path.name), ignore_errors=True)


def chosen_checkpoint(output_dir: Path, wanted: str | bool | None) -> tuple[Path, Manifest] | None:
    """The checkpoint that ``resume_from_checkpoint`` means, checked; None to start a run.

    Raises:
        DataError: there is none, or the one named is damaged.
    """
    if wanted is None or wanted is False:
        return None
    if wanted is not True and wanted != "auto":
        return Path(wanted), verify(Path(wanted))
    latest = latest_complete(output_dir, (read_json(output_dir / RUN) or {}).get("run"))
    folders = checkpoints(output_dir)
    if latest is None and wanted is True:
        names = ", ".join(path.name for _, path in folders)
        raise DataError(
            f"there is no complete checkpoint of this run in '{output_dir}'",
            got=f"checkpoints there: {names or 'none at all'}",
            why="the run was stopped before its first save, or those there are of an earlier run "
            "or of another trainer",
            remedy="resume_from_checkpoint='auto' to start in this case, the path of an earlier "
            "run's to go on with that one, or another trainer's as the model of a new run",
        )
    after = latest[1].step if latest else -1
    passed = [path.name for step, path in folders if step > after]
    if passed:
        warn_caller(
            f"passed over, as incomplete or of another run: {', '.join(passed)}; a checkpoint of "
            "the same step takes its place"
        )
    return latest


def note_run(
    output_dir: Path,
    run: str,
    facts: Mapping[str, Any],
    policy: TokenPolicy | None,
    *,
    handed_over: bool,
) -> None:
    """Leave in the folder which run it belongs to, its options, policy and libraries' versions.

    Args:
        output_dir: of the run.
        run: its name.
        facts: as of a manifest.
        policy: that it trains with; None where no token is weighed.
        handed_over: the policy came as an object or a class, so that the options do not name it.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    options, record = facts["options"], None
    if policy is not None:
        record = {"name": policy.variant, **policy_record(policy)}
        if handed_over:
            own = {"policy": record["class"], "policy_options": record["options"]}
            options = {**options, **own}
    parts = {"options": options, "policy": record, "versions": facts["versions"]}
    write_json(output_dir / RUN, {"run": run, **parts, "results": RESULTS})


def policy_record(policy: TokenPolicy) -> dict[str, Any]:
    """Class as ``module:Class``, plain attributes and settings of a policy, as JSON values."""
    kind = type(policy)
    return {
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "options": plain_values(policy.arguments().get("own", {})),
        "settings": asdict(policy.settings),
    }


def require_same_run(
    path: Path, manifest: Manifest, facts: Mapping[str, Any], allowed: Collection[str]
) -> None:
    """Refuse to go on from a checkpoint as another run; warn of what changes it by rounding only.

    Raises:
        DataError: the checkpoint holds the model only.
        ConfigError: something that differs; names each.
    """
    if not manifest.resumable:
        raise DataError(
            f"'{path}' holds no optimizer and random state",
            got="it was saved with save_only_model=True",
            remedy="give it as the model of a new run",
        )
    optim = str(facts["options"].get("optim"))
    if optim == "adalomo" or optim.endswith("layerwise"):
        raise ConfigError(
            "this optimizer's state is in no checkpoint",
            got=f"optim={optim!r}",
            why="it steps inside the backward, layer by layer, where transformers does not save it",
            remedy="train from the start, or with an optimizer of the whole model",
        )
    changes, rounding = split_changes(manifest.facts, facts, allowed)
    names = sorted(changes)
    on_purpose = (
        f"; or, to go on with new ones on purpose, train(..., allow_changed={names!r}), which "
        f"is --allow_changed {' '.join(names)} on the command line"
    )
    refuse_changes(
        changes,
        what=f"this is not the run that '{path}' belongs to",
        why="its result would be neither run's; and each process has its own part of data "
        "order, random state and statistics",
        remedy="give the values of the interrupted run"
        + ("" if "processes" in changes else on_purpose),
    )
    if rounding:
        warn_caller(
            f"not as before ({describe_changes(rounding)}): the run goes on, and may differ by "
            "rounding (and by draws of dropout) from the one that it would have been"
        )


# --- facts on which a run's result depends --------------------------------------------------------

_WATCHING = (
    "debug", "disable_tqdm", "do_", "eval_", "export_values", "fisher_cache",
    "greater_is_better", "hub_", "include_", "load_best_model", "log_", "logging_",
    "metric_for_best", "on_empty", "output_dir",
    "policy_cache", "project", "push_to_hub", "report_to", "restore_callback", "resume_from",
    "run_name", "save_",
    "skip_memory_metrics", "trackio_", "batch_eval_metrics", "per_device_eval", "prediction_loss",
    "jit_mode", "enable_jit_checkpoint",
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
_UNSKIPPED = "ignore_data_skip"
"""A run that resumes with it trains again on rows that it has trained on. Only where it is True is
it a fact: checkpoints without it go on."""
_LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "alphatoken")
"""Libraries that a run's bits depend on."""


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that a run's bits depend on."""
    versions = {}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def run_options(args: Any) -> dict[str, Any]:
    """The options of a run that its result depends on, as plain JSON values."""
    names = (field.name for field in dataclasses.fields(args))
    # Every dataclass field of args counts unless it is known to be about logging, saving,
    # evaluation or the machine: a field added by a later library version takes part by itself.
    names = (name for name in names if not name.startswith(_WATCHING + _MACHINE))
    options = {name: plain_values(getattr(args, name, None)) for name in sorted(names)}
    if not options.get(_UNSKIPPED):
        options.pop(_UNSKIPPED, None)
    return options


def split_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str] = ()
) -> tuple[Changes, Changes]:
    """Changes that alter the result of a run, and changes that alter its rounding only.

    "No more than rounding" leaves draws of dropout out.

    Names that are ``allowed`` may differ; the number of processes may not.
    """
    changes = {
        name: values
        for name, values in changed_settings(before, now).items()
        if name not in allowed or name == "processes"
    }
    rounding = {name: changes.pop(name) for name in (*_ROUNDING, *_LIBRARIES) if name in changes}
    return changes, rounding


def frozen_fingerprint(model: nn.Module) -> str | None:
    """Digest of the frozen weights (an adapter's base model), or None if there are none."""
    # A checkpoint of adapters does not hold them, and adapters on another base are silently wrong.
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
    # One after the other: no data set is held as one text.
    if hasattr(content, "with_format") and hasattr(content, "column_names"):
        names = sorted(content.column_names)
        yield len(content), names
        for table in content.with_format("arrow").iter(batch_size=1000):
            yield from (table.column(name).to_pylist() for name in names)
    elif isinstance(content, Mapping):
        yield from ((name, content[name]) for name in sorted(content))
    else:
        yield from (content[index] for index in range(len(content)))
