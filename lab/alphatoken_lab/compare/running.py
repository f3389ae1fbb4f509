"""Running a grid: each cell a process of its own, those that are done left alone.

A cell that crashes, however hard, is a line in the table; the others go on. The processes end with
the one that started them, also when that is killed outright, so a second start finds no cell at
work twice.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from alphatoken.errors import ConfigError
from alphatoken.support.locks import try_lock
from alphatoken.support.progress import ProgressSink, Tracker
from alphatoken.support.storage import write_json
from alphatoken_lab.compare.folder import GridFolder, Status
from alphatoken_lab.compare.grid import Cell
from alphatoken_lab.compare.launchers import PARENT, Job, Launcher, LocalLauncher

__all__ = ["ATTACHED", "end_with_parent", "run_grid"]

_POLL = 0.1
_PATIENCE = 20.0
"""Seconds that an interrupted cell gets to end by itself."""

_PR_SET_PDEATHSIG = 1

AGENT = "torch/distributed/elastic"
"""Stands in the first line that torchrun's agent writes when a process has failed."""

ATTACHED = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, 9); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""A program that becomes another one, and is killed when the process that started it ends."""


@dataclass
class _Running:
    cell: Cell
    job: Job


def run_grid(
    cells: Sequence[Cell],
    folder: GridFolder,
    command: Callable[[Path], list[str]],
    *,
    processes: int = 1,
    launcher: Launcher | None = None,
    progress: bool | ProgressSink | None = None,
) -> dict[str, Status]:
    """Run what is missing, and say of every cell what became of it.

    Args:
        cells: those that others need before them.
        folder: where they stand; one run at a time.
        command: of the process that runs the cell in a folder.
        processes: cells at a time, as processes of this machine.
        launcher: starts them instead.
        progress: as for ``alphatoken.support.progress``.

    Raises:
        ConfigError: another run is at work in the folder, or a finished cell had other settings.
        KeyboardInterrupt: interrupted; says how far it came. Finished cells stay.
    """
    lock = try_lock(folder.path / "lock")
    if lock is None:
        raise ConfigError(
            "another run is at work in this folder",
            got=str(folder.path),
            remedy="wait for it, or give another --output_dir",
        )
    try:
        return _Run(cells, folder, command, launcher or LocalLauncher(processes), progress).go()
    finally:
        os.close(lock)


class _Run:
    def __init__(
        self,
        cells: Sequence[Cell],
        folder: GridFolder,
        command: Callable[[Path], list[str]],
        launcher: Launcher,
        progress: bool | ProgressSink | None,
    ) -> None:
        self.folder, self.command, self.launcher = folder, command, launcher
        self.cells = list(cells)
        self.finished = {cell.name for cell in cells if folder.done(cell)}
        self.lost: set[str] = set()
        self.waiting = [cell for cell in cells if cell.name not in self.finished]
        self.running: list[_Running] = []
        self.elsewhere = False
        self.tracker = Tracker("cells", len(self.cells), progress)
        self.tracker.resume(len(self.finished))

    def go(self) -> dict[str, Status]:
        """Run until nothing is left to start."""
        self.tracker.report(len(self.finished))
        try:
            while self.waiting or self.running:
                self.elsewhere = False
                self._start_ready()
                if not self.running and not self.elsewhere:
                    break
                time.sleep(_POLL)
                self._collect()
        except KeyboardInterrupt:
            self._stop()
            raise KeyboardInterrupt(
                f"{len(self.finished)} of {len(self.cells)} cells are done; the same command goes "
                f"on in {self.folder.path}"
            ) from None
        except BaseException:
            self._stop()
            raise
        return self.folder.status(self.cells)

    def _start_ready(self) -> None:
        """Start cells whose models exist, up to the limit; drop those whose model is lost."""
        ready: list[Cell] = []
        room = self.launcher.room()
        for cell in list(self.waiting):
            gone = cell.hopeless(self.lost)
            if gone:
                self.waiting.remove(cell)
                self.lost.add(cell.name)
                self._report(f"{cell.name} is left out: it needs {', '.join(gone)}")
            elif len(ready) < room and cell.ready(self.finished, self.lost):
                if self._elsewhere(cell):
                    continue
                self.waiting.remove(cell)
                ready.append(cell)
        if not ready:
            return
        commands = []
        for cell in ready:
            place = self.folder.of(cell)
            place.prepare(cell, self.folder.resolved(cell))
            commands.append((self.command(place.path), place.path / "log.txt"))
        jobs = self.launcher.start(commands)
        self.running += [_Running(cell, job) for cell, job in zip(ready, jobs, strict=True)]

    def _elsewhere(self, cell: Cell) -> bool:
        """True if a job of an earlier start is still at work on it, or has just finished it."""
        handle = try_lock(self.folder.of(cell).path / "lock")
        if handle is not None:
            os.close(handle)
        if self.folder.done(cell):
            self.waiting.remove(cell)
            self.finished.add(cell.name)
            self._report("")
            return True
        self.elsewhere |= handle is None
        return handle is None

    def _collect(self) -> None:
        for one in list(self.running):
            code = one.job.poll()
            if code is None:
                continue
            self.running.remove(one)
            place = self.folder.of(one.cell)
            if code == 0 and place.result() is not None:
                self.finished.add(one.cell.name)
                self._report("")
            else:
                error = _last_words(place.path / "log.txt", code)
                write_json(place.path / "failed.json", {"error": error, "exit_code": code})
                self.lost.add(one.cell.name)
                self._report(f"{one.cell.name} failed: {error}")

    def _report(self, note: str) -> None:
        if note:
            self.tracker.note(note)
        self.tracker.report(len(self.finished) + len(self.lost))

    def _stop(self) -> None:
        for one in self.running:
            one.job.stop()
        end = time.monotonic() + _PATIENCE
        for one in self.running:
            one.job.finish(max(0.0, end - time.monotonic()))


def _last_words(log: Path, code: int) -> str:
    """One line about why a process ended."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    text = log.read_text(errors="replace") if log.exists() else ""
    # What a launcher's agent says about its processes comes after what they said themselves.
    own = takewhile(lambda line: AGENT not in line, text.splitlines())
    lines = [line.strip() for line in own]
    said = [line for line in lines if line]
    return f"exit code {code}" if not said else said[-1][:400]


def end_with_parent() -> None:
    """Called by a cell's process: it is killed when the process that started it ends (Linux).

    Without this, cells of a grid that was killed outright would train on, and the next start would
    run them a second time beside themselves.
    """
    parent: Any = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if "RANK" in os.environ:  # between them stands the launcher's agent, which does the same
        return
    if os.getppid() != int(parent):  # it ended before the request
        os.kill(os.getpid(), signal.SIGKILL)
