"""Which checkpoint a run goes on from, and whether it is the same run.

One process calls these functions before training. They read and write files of the run's folder,
and know nothing of the trainer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from alphatoken.errors import ConfigError, DataError, warn_caller
from alphatoken.support.storage import write_json
from alphatoken.train.identity import differences, rounding_only
from alphatoken.train.manifest import (
    MANIFEST,
    RESULTS,
    RUN,
    Manifest,
    checkpoints,
    latest_complete,
    set_aside,
    verify,
)

__all__ = [
    "chosen_checkpoint",
    "finished_step",
    "library_versions",
    "note_finished",
    "note_run",
    "require_same_run",
]

_LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "alphatoken")


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that a run's bits depend on."""
    versions = {}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def chosen_checkpoint(output_dir: Path, wanted: str | bool | None) -> tuple[Path, Manifest] | None:
    """The checkpoint that ``resume_from_checkpoint`` means, checked; None to start a run.

    Raises:
        DataError: there is none, or the one named is damaged.
    """
    if wanted is None or wanted is False:
        return None
    if wanted is not True and wanted != "auto":
        return Path(wanted), verify(Path(wanted))
    latest = latest_complete(output_dir, _current_run(output_dir))
    if latest is None and wanted is True:
        raise _nothing_to_resume(output_dir)
    for moved in set_aside(output_dir, latest[1].step if latest else -1):
        warn_caller(f"an incomplete checkpoint is set aside as '{moved}'")
    return latest


def _nothing_to_resume(output_dir: Path) -> DataError:
    other = latest_complete(output_dir)
    foreign = [path for _, path in checkpoints(output_dir) if not (path / MANIFEST).is_file()]
    if foreign and len(foreign) == len(checkpoints(output_dir)) and other is None:
        return DataError(
            f"no checkpoint in '{output_dir}' was written by this library",
            got=f"{foreign[-1].name} without {MANIFEST}",
            why="it is of another trainer, or was cut off while it was written: data order, random "
            "state and values of such a run are not known",
            remedy=f"a new run in another output_dir, with model='{foreign[-1]}' to go on from its "
            "weights",
        )
    folders = ", ".join(path.name for _, path in checkpoints(output_dir)) or "none at all"
    return DataError(
        f"there is no complete checkpoint of this run in '{output_dir}'",
        got=f"'{other[0]}' is of an earlier run" if other else f"checkpoints there: {folders}",
        why="the run was stopped before its first save, or it is another folder",
        remedy="resume_from_checkpoint='auto' to start in this case"
        + (f", or give '{other[0]}' to go on with the earlier run" if other else ""),
    )


def _current_run(output_dir: Path) -> str | None:
    try:
        run = json.loads((output_dir / RUN).read_text(encoding="utf-8"))["run"]
        return str(run)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def note_run(
    output_dir: Path, run: str, identity: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> None:
    """Leave in the folder which run it belongs to, what that run is, and its options as given."""
    output_dir.mkdir(parents=True, exist_ok=True)
    content = {
        "run": run,
        "identity": identity,
        "options": options,
        "versions": library_versions(),
        "results": RESULTS,
    }
    write_json(output_dir / RUN, content)


def note_finished(output_dir: Path, step: int) -> None:
    """Leave in the folder that its run ended with this step, and that its model is written."""
    told = json.loads((output_dir / RUN).read_text(encoding="utf-8"))
    write_json(output_dir / RUN, {**told, "finished": step})


def finished_step(
    output_dir: Path, identity: Callable[[], Mapping[str, Any]], world_size: int
) -> int | None:
    """The step that this run ended with, if nothing of it is left to do; else None.

    Args:
        output_dir: where :func:`note_finished` may have said so.
        identity: gives what this run's result depends on; asked only where the run has ended,
            since it reads data and weights.
        world_size: number of processes.
    """
    latest = latest_complete(output_dir, _current_run(output_dir))
    if latest is None or not any(output_dir.glob("*.safetensors")):
        return None
    manifest = latest[1]
    told = json.loads((output_dir / RUN).read_text(encoding="utf-8"))
    if told.get("finished") != manifest.step or manifest.world_size != world_size:
        return None
    return None if _apart(manifest.identity, identity(), world_size)[1] else manifest.step


def _apart(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    world_size: int,
    allowed: Collection[str] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What differs by rounding only, and what by more: name -> (then, now)."""
    options = [one.get("options", {}) for one in (then, now)]
    harmless = rounding_only(options[0], options[1], world_size)
    rounded = differences({"options": options[0]}, {"options": options[1]}, allowed)
    rounded = {name: pair for name, pair in rounded.items() if name in harmless}
    return rounded, differences(then, now, {*allowed, *rounded})


def require_same_run(
    path: Path,
    manifest: Manifest,
    identity: Mapping[str, Any],
    world_size: int,
    allowed: Collection[str],
) -> None:
    """Refuse to go on from a checkpoint as another run.

    Warn of what changes it by rounding only: some options, and other library versions.

    Args:
        path: the checkpoint.
        manifest: its seal.
        identity: what this run's result depends on.
        world_size: number of processes.
        allowed: names that may differ.

    Raises:
        DataError: the checkpoint holds the model only.
        ConfigError: another number of processes, or something that differs; names each.
    """
    if not manifest.resumable:
        raise DataError(
            f"'{path}' holds no optimizer and random state",
            got="it was saved with save_only_model=True",
            remedy="give it as the model of a new run",
        )
    if manifest.world_size != world_size:
        raise ConfigError(
            "a run can only be resumed with the number of processes that it had",
            got=f"{world_size} now, {manifest.world_size} in '{path}'",
            why="each process has its own part of data order, random state and statistics",
            remedy=f"launch {manifest.world_size} processes, or start a new run from this model",
        )
    rounded, changed = _apart(manifest.identity, identity, world_size, allowed)
    if changed:
        listed = [f"{name}: {old!r} then, {new!r} now" for name, (old, new) in changed.items()]
        raise ConfigError(
            f"this is not the run that '{path}' belongs to",
            got="; ".join(listed),
            why="its result would be neither run's",
            remedy="give the values of the interrupted run; or, to go on with new ones on "
            f"purpose, train(..., allow_changed={sorted(changed)!r}), which is --allow_changed "
            f"{' '.join(sorted(changed))} on the command line",
        )
    if rounded:
        listed = [f"{name}: {old!r} then, {new!r} now" for name, (old, new) in rounded.items()]
        warn_caller(
            f"other options ({'; '.join(listed)}): the run goes on, and differs by rounding (and "
            "by draws of dropout) from the one that it would have been",
        )
    other = differences({"versions": manifest.versions}, {"versions": library_versions()})
    if other:
        listed = [f"{name}: {old} then, {new} now" for name, (old, new) in other.items()]
        warn_caller(
            f"other library versions ({'; '.join(listed)}): the run goes on, but perhaps not "
            "to the bits that it would have had",
        )
