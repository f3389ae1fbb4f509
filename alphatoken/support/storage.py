"""Files that are written whole or not at all, and tensors whose files are checked when read.

A crash, a full disk or an interrupt while writing leaves the old file as it was. Tensor files are
plain safetensors files with one addition: their metadata holds the SHA-256 of everything else that
is read from them, so that a truncated or altered file is refused instead of read as numbers.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from alphatoken.errors import AlphaTokenError, DataError
from alphatoken.support.progress import is_first_process
from alphatoken.support.resume import tensor_digest

LFS = b"version https://git-lfs"
"""First bytes of a pointer of Git LFS, which stands in place of a file."""


@contextmanager
def no_empty_folder(path: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, a folder may be made; left empty, it goes again, and those made above it as well.

    Of several processes the first one's does so.
    """
    folder = Path(path).absolute()
    new = [*takewhile(lambda one: not one.exists(), (folder, *folder.parents))]
    try:
        yield
    finally:
        for made in new if is_first_process() else ():
            with suppress(OSError):  # of one that holds something, or was never made
                made.rmdir()


@contextmanager
def replacing(
    path: str | os.PathLike[str], *, error: type[AlphaTokenError] = DataError
) -> Iterator[Path]:
    """Give a temporary path in the same folder; on leaving, it becomes ``path`` in one step.

    The content is on disk (fsync) before the name changes. On any exception, an interrupt
    included, the temporary file is removed and what was at ``path`` stays untouched. (A process
    that is killed outright cannot clean up: it may leave ``.<name>.<random>.tmp`` behind.)

    Raises:
        error: the operating system or safetensors could not write; the cause is chained.
    """
    # Through links, so that the file that a link points to is replaced and not the link. In the
    # same folder, because a rename is one step only within a file system.
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, target)
        flush(target.parent)  # the new name is an entry of the folder, which is written by itself
    except (OSError, SafetensorError) as problem:
        # safetensors reports a full disk by an error of its own.
        cause = problem if isinstance(problem, OSError) else OSError(str(problem))
        raise error(
            f"the file '{target}' could not be written",
            got=str(problem),
            why="a half-written file would be mistaken for a whole one; the old one, if any, is "
            "still in place and the partial one was removed",
            remedy="free some space or give another folder",
        ) from cause
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder beside ``folder``; on leaving, it takes its place.

    After an exception or a kill, what was at ``folder`` is untouched, and the next try empties the
    folder beside it.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def write_json(
    path: str | os.PathLike[str],
    content: object,
    *,
    default: Callable[[Any], object] | None = None,
) -> None:
    """Write ``content`` as indented JSON, whole or not at all.

    ``default``, such as ``str``, makes something of what JSON does not know; without it that is a
    TypeError, and nothing is written.
    """
    with replacing(path) as temporary:
        text = json.dumps(content, indent=2, default=default)
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any] | None:
    """Content of a file; None if there is none, or none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_jsonl(path: str | os.PathLike[str], records: Iterable[object]) -> None:
    """Write one line of JSON a record, whole or not at all."""
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def flush(path: Path) -> None:
    """Put a file's content, or a folder's list of names, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    error: type[AlphaTokenError] = DataError,
) -> None:
    """Write ``tensors`` and ``metadata`` to one safetensors file, whole or not at all.

    Exact: values, dtypes and shapes come back bit for bit from :func:`read_tensors`. Tensors may
    share memory, live on any device and have any strides.

    Raises:
        error: the file could not be written (disk full, no permission, no such folder).
    """
    owned = _separate(tensors)
    digest = tensor_digest(sorted(owned.items()), metadata=metadata)
    with replacing(path, error=error) as temporary:
        temporary.touch()  # takes the permissions that a new file gets here; save_file's are 0600
        mode = temporary.stat().st_mode
        save_file(owned, str(temporary), metadata={**metadata, "sha256": digest})
        temporary.chmod(mode)


def read_tensors(
    path: str | os.PathLike[str], *, error: type[AlphaTokenError] = DataError
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what :func:`write_tensors` wrote, as CPU tensors, after checking the file's digest.

    Raises:
        error: no such file, truncated, altered, or not written by :func:`write_tensors`; the
            message names the file.
    """
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        stored = metadata.pop("sha256", None)
        if stored is None:
            raise ValueError("it holds no sha256 of itself")
        if stored != tensor_digest(sorted(tensors.items()), metadata=metadata):
            raise ValueError("its content does not match the sha256 it holds of itself")
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as problem:
        raise error(
            f"the file '{os.fspath(path)}' cannot be read",
            got=str(problem),
            why="it is missing, truncated or altered, or was not written by this library",
            remedy="give the right path, or write the file again",
        ) from problem
    return tensors, metadata


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors, no two of which share memory (safetensors refuses sharing)."""
    separate: dict[str, Tensor] = {}
    pointers: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().to("cpu").contiguous()
        # Tied weights share memory; the second of them becomes a copy.
        if own.numel() and own.untyped_storage().data_ptr() in pointers:
            own = own.clone()
        pointers.add(own.untyped_storage().data_ptr())
        separate[name] = own
    return separate


def try_lock(path: Path) -> int | None:
    """The file, locked by this process until it ends; None where another one holds it.

    Not inherited by processes that are started from here.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def open_line(page: Path) -> str:
    """The command by which this machine opens a page in a browser."""
    for program in ("xdg-open", "open"):
        if shutil.which(program):
            return f"open: {program} {shlex.quote(str(page))}"
    # By its address, which most terminals follow too.
    command = [sys.executable, "-m", "webbrowser", page.resolve().as_uri()]
    return f"open: {shlex.join(command)}"
