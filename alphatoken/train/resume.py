"""Which checkpoint a run goes on from, and whether it is the same run.

One process calls these functions before training. They read and write files of the run's folder,
and know nothing of the trainer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from alphatoken.errors import ConfigError, DataError, warn_caller
from alphatoken.support.storage import read_json, write_json
from alphatoken.train.identity import apart
from alphatoken.train.manifest import (
    MANIFEST,
    RESULTS,
    RUN,
    Manifest,
    checkpoints,
    latest_complete,
    verify,
)

__all__ = ["chosen_checkpoint", "note_run", "require_same_run"]


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
    after = latest[1].step if latest else -1
    passed = [path.name for step, path in checkpoints(output_dir) if step > after]
    if passed:
        warn_caller(
            f"passed over, as incomplete or of another run: {', '.join(passed)}; a checkpoint of "
            "the same step takes its place"
        )
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
    return (read_json(output_dir / RUN) or {}).get("run")


def note_run(output_dir: Path, run: str, facts: Mapping[str, Any]) -> None:
    """Leave in the folder which run it belongs to, its options and the libraries' versions."""
    output_dir.mkdir(parents=True, exist_ok=True)
    told = {name: facts[name] for name in ("options", "versions")}
    write_json(output_dir / RUN, {"run": run, **told, "results": RESULTS})


def require_same_run(
    path: Path, manifest: Manifest, facts: Mapping[str, Any], allowed: Collection[str]
) -> None:
    """Refuse to go on from a checkpoint as another run; warn of what changes it by rounding only.

    Args:
        path: the checkpoint.
        manifest: its seal.
        facts: what this run's result depends on.
        allowed: names that may differ.

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
    changed, noted = (
        {name: f"{name}: {old!r} then, {new!r} now" for name, (old, new) in found.items()}
        for found in apart(manifest.facts, facts, allowed)
    )
    if changed:
        names = sorted(changed)
        on_purpose = (
            f"; or, to go on with new ones on purpose, train(..., allow_changed={names!r}), which "
            f"is --allow_changed {' '.join(names)} on the command line"
        )
        raise ConfigError(
            f"this is not the run that '{path}' belongs to",
            got="; ".join(changed.values()),
            why="its result would be neither run's; and each process has its own part of data "
            "order, random state and statistics",
            remedy="give the values of the interrupted run"
            + ("" if "processes" in changed else on_purpose),
        )
    if noted:
        warn_caller(
            f"not as before ({'; '.join(noted.values())}): the run goes on, and may differ by "
            "rounding (and by draws of dropout) from the one that it would have been"
        )
