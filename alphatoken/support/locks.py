"""A file lock for one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["try_lock"]


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
