"""The folder of a run: its settings, and the check that a resumed run has the same."""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alphatoken.data import Example
from alphatoken.errors import ConfigError, DataError
from alphatoken.scorer import AlphaTokenWarning

__all__ = [
    "check_output_file",
    "collected_warnings",
    "examples_digest",
    "holds_diagnoses",
    "read_manifest",
    "refuse_foreign",
    "require_writable",
    "same_settings",
]


def require_writable(folder: str | Path, option: str = "--output_dir") -> None:
    """Check that a folder, there or still to be made, can be written; nothing is left behind.

    Raises:
        DataError: it cannot.
    """
    path = Path(folder).absolute()
    there = next(one for one in (path, *path.parents) if one.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise DataError(
            "the output folder cannot be written",
            got=f"{option} {folder}: {error.strerror or error}",
            why="the results would be lost when they are there",
            remedy=f"give another {option}",
        ) from error


def check_output_file(path: str | Path, inputs: Iterable[str | None], *, replace: bool) -> None:
    """Check that a file can be written, and that nothing is lost by it, before anything is read.

    Args:
        path: to be written.
        inputs: what is read; None is passed over.
        replace: an earlier file may go.

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
    for given in inputs:
        if given is not None and out.resolve() == Path(given).resolve():
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


def examples_digest(examples: Sequence[Example]) -> str:
    """Digest of rows, ids and labels: of the data, the tokenizer and how it was used, in one."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps([example.row.index, example.input_ids, example.labels]).encode())
    return digest.hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest that a run wrote.

    Raises:
        DataError: it cannot be read, or has no settings.
    """
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        dict(manifest["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("the earlier run cannot be read", got=f"{path}: {error}") from None
    return manifest


def holds_diagnoses(manifest: Path) -> bool | None:
    """True if the manifest is that of ``diagnose``, False of ``score``; None if it is neither's."""
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_manifest = isinstance(content, dict) and "settings" in content
    return "diagnostics" in content if is_manifest else None


def refuse_foreign(
    manifest: Path,
    made: Iterable[Path],
    *,
    resume: bool,
    overwrite: bool,
    diagnoses: bool = False,
) -> None:
    """Check that an output folder holds nothing that a new run would be mixed up with.

    Args:
        manifest: of an earlier run, if there was one.
        made: what a run makes in the folder.
        resume: continue an earlier run.
        overwrite: replace it.
        diagnoses: whether the run is one of ``diagnose``.

    Raises:
        ConfigError: an earlier run and no word on it, or files of something else.
    """
    remedy = "another --output_dir"
    if holds_diagnoses(manifest) not in (None, diagnoses):
        raise ConfigError(
            "the output folder holds results of another command",
            got=f"{manifest} of `alphatoken {'score' if diagnoses else 'diagnose'}`",
            remedy=f"give {remedy}",
        )
    if not manifest.exists():
        foreign = [path for path in made if path.exists()]
        if foreign:
            what = "the output folder holds something else"
            raise ConfigError(what, got=str(foreign[0]), remedy=f"give {remedy}")
    elif not (resume or overwrite):
        raise ConfigError(
            "the output folder holds an earlier run",
            got=str(manifest.parent),
            remedy=f"--resume to continue it, --overwrite_output to replace it, or {remedy}",
        )


def same_settings(earlier: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Check that a resumed run has the settings that it began with.

    Raises:
        ConfigError: it has others; the first one is shown.
    """
    now = json.loads(json.dumps(settings))
    differing = [key for key in sorted({*earlier, *now}) if earlier.get(key) != now.get(key)]
    if differing:
        key = differing[0]
        raise ConfigError(
            "this is not the run to resume: it differs in " + ", ".join(differing),
            got=f"{key}: {earlier.get(key)!r} then, {now.get(key)!r} now",
            why="values of two different runs would be mixed in one folder",
            remedy="repeat the earlier arguments, or --overwrite_output, or another --output_dir",
        )


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """The library's own warnings as sentences, each once and as it comes; others pass on."""
    messages: list[str] = []
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Any, category: Any, *more: Any, **named: Any) -> None:
            if not issubclass(category, AlphaTokenWarning):
                shown(message, category, *more, **named)
            elif str(message) not in messages:
                messages.append(str(message))

        warnings.simplefilter("always", AlphaTokenWarning)
        warnings.showwarning = show
        yield messages
