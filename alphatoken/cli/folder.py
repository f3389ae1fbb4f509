"""The folder of a run: what its results depend on, and whether it is the run to resume."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alphatoken.data import Example
from alphatoken.errors import ConfigError, DataError
from alphatoken.scorer import AlphaTokenWarning

__all__ = [
    "collected_warnings",
    "examples_digest",
    "file_digest",
    "read_manifest",
    "same_settings",
]


def examples_digest(examples: Sequence[Example]) -> str:
    """Digest of rows, ids and labels: of the data, the tokenizer and how it was used, in one."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps([example.row.index, example.input_ids, example.labels]).encode())
    return digest.hexdigest()


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """What a run wrote of itself.

    Raises:
        DataError: it cannot be read, or has no settings.
    """
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        dict(manifest["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("the earlier run cannot be read", got=f"{path}: {error}") from None
    return manifest


def same_settings(earlier: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """See that a resumed run has the settings that it began with.

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
            remedy="repeat the earlier arguments, or --overwrite, or another --out",
        )


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """The library's own warnings as sentences for the report, each once; others pass on."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AlphaTokenWarning)
        yield messages
    for warning in caught:
        if not issubclass(warning.category, AlphaTokenWarning):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        elif str(warning.message) not in messages:
            messages.append(str(warning.message))
