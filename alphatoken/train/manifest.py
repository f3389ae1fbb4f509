"""Choice of the checkpoint folder to resume from, among those that are complete.

A folder ``checkpoint-N`` counts only with a valid ``alphatoken.json``: the step, the run, what the
run depends on, and every file with its size and SHA-256. Whatever a crash, a full disk or an
interrupted copy left behind is recognised and never resumed from. Nothing here knows the trainer;
one process calls it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from alphatoken.errors import ConfigError, DataError, warn_caller
from alphatoken.support.resume import describe_changes, file_digest, refuse_changes
from alphatoken.support.storage import flush, read_json, write_json
from alphatoken.train.identity import split_changes

__all__ = [
    "MANIFEST",
    "RESULTS",
    "RUN",
    "Manifest",
    "checkpoints",
    "chosen_checkpoint",
    "latest_complete",
    "note_run",
    "read_manifest",
    "require_same_run",
    "rotate",
    "verify",
    "write_manifest",
]

MANIFEST = "alphatoken.json"
RUN = "alphatoken-run.json"
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
        facts: that the run's result depends on; see :mod:`alphatoken.train.identity`.
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
    own = (p for p in sorted(folder.rglob("*")) if p.is_file() and p != folder / MANIFEST)
    files = {path.relative_to(folder).as_posix(): _entry(path) for path in own}
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
    named = [(_NAME.fullmatch(path.name), path) for path in output_dir.iterdir()]
    return sorted((int(match[1]), path) for match, path in named if match and path.is_dir())


def latest_complete(output_dir: Path, run: str | None = None) -> tuple[Path, Manifest] | None:
    """The last complete checkpoint that can be resumed from, fully verified, or None.

    Args:
        output_dir: of the run.
        run: take checkpoints of this run only; None takes any.
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

    ``newest`` and ``best`` always stay. A folder is moved to ``bin`` first, so that one with its
    usual name is never half deleted.
    """
    if limit is None or limit <= 0:
        return
    protected = {newest.resolve()} | ({Path(best).resolve()} if best else set())
    by_age = sorted(checkpoints(output_dir), key=lambda item: (item[1].stat().st_mtime, item[0]))
    surplus = len(by_age) - max(limit, len(protected))
    removable = [path for _, path in by_age if path.resolve() not in protected]
    for path in removable[: max(surplus, 0)]:
        bin.mkdir(parents=True, exist_ok=True)
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
    folders = ", ".join(path.name for _, path in checkpoints(output_dir)) or "none at all"
    return DataError(
        f"there is no complete checkpoint of this run in '{output_dir}'",
        got=f"checkpoints there: {folders}",
        why="the run was stopped before its first save, or those there are of an earlier run or of "
        "another trainer",
        remedy="resume_from_checkpoint='auto' to start in this case, the path of an earlier run's "
        "to go on with that one, or another trainer's as the model of a new run",
    )


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
        manifest: its manifest.
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


def _entry(path: Path) -> dict[str, Any]:
    flush(path)
    size = path.stat().st_size
    return {"size": size, "sha256": file_digest(path, blocks=_BLOCKS)}
