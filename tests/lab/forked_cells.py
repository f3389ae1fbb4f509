"""Cells of a grid as forks of one process that has the libraries, for tests of many small cells.

The command line starts an interpreter for each cell, which computes for six seconds to import
torch, transformers and trl, and then, on the tests' models, for one or two on the cell. Here a
server imports them once, and each cell is a fork of it: still a process of its own, with its log
and its exit status, that runs the same command. Kills, crashes, queues and launchers are tested
with the processes that users get.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from alphatoken_lab.runner.launchers import PARENT, CellOptions
from tests.forked import SERVER

_COMMAND = [sys.executable, "-m", "alphatoken_lab.commands"]


class ForkedLauncher:
    """``Launcher`` that forks.

    Args:
        most: cells at a time.
    """

    def __init__(self, most: int = 1) -> None:
        self.most = most

    def start(self, cells: Sequence[tuple[list[str], Path]]) -> list[Any]:
        """One fork each."""
        return [_Fork(words, log) for words, log in cells]


class _Fork:
    def __init__(self, words: Sequence[str], log: Path) -> None:
        assert list(words[:3]) == _COMMAND, "a launcher's processes cannot be forked"
        environment = {key: value for key, value in os.environ.items() if key != PARENT}
        self._process = SERVER.Process(
            target=_run, args=(list(words[3:]), str(log), environment), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)
        self.kill()

    def kill(self) -> None:
        self._process.kill()


def _run(words: list[str], log: str, environment: dict[str, str]) -> None:
    """In the fork: what ``python -m alphatoken_lab.commands`` does with these words."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    from alphatoken_lab.commands import main

    torch.set_num_threads(1)
    sys.exit(main(words))


def _forking(options: CellOptions, folder: Path) -> ForkedLauncher:
    return ForkedLauncher(options.processes)


@contextmanager
def forked_cells() -> Iterator[None]:
    """Inside, grids that are started in this process fork their cells."""
    from alphatoken_lab.runner import running

    with pytest.MonkeyPatch.context() as within:
        within.setattr(running, "make_launcher", _forking)
        yield
