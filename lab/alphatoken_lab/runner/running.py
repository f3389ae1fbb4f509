"""Running a grid: each cell a process of its own, those that are done left alone.

A cell that crashes, however hard, is a line in the table; the others go on. The processes end with
the one that started them, also when that is killed outright, so a second start meets no cell that
is still at work.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from alphatoken.errors import ConfigError
from alphatoken.support.locks import try_lock
from alphatoken.support.progress import ProgressSink, Tracker
from alphatoken.support.storage import write_json
from alphatoken_lab.runner.folder import GridFolder, Status
from alphatoken_lab.runner.grid import Cell
from alphatoken_lab.runner.launchers import PARENT, LocalLauncher, QueuedJob, SubmititLauncher

Launcher = LocalLauncher | SubmititLauncher
Job = subprocess.Popen[bytes] | QueuedJob

__all__ = ["ATTACHED", "end_with_parent", "run_grid", "run_here"]

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


def run_here(cells: Mapping[Path, Callable[[Path], None]], tracker: Tracker) -> None:
    """Run cells that share what this process has loaded; the file of each is kept.

    Args:
        cells: file of each cell, and what writes it whole; those that are there are left alone.
        tracker: counts them, and notes their names.
    """
    missing = {path: write for path, write in cells.items() if not path.is_file()}
    done = len(cells) - len(missing)
    tracker.resume(done)
    tracker.report(done)
    for path, write in missing.items():
        tracker.note(path.stem)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
        done += 1
        tracker.report(done)


def run_grid(
    cells: Sequence[Cell],
    folder: GridFolder,
    command: Callable[[Path], list[str]],
    launcher: Launcher,
    *,
    progress: bool | ProgressSink | None = None,
) -> dict[str, Status]:
    """Run what is missing, and say of every cell what became of it.

    Args:
        cells: those that others need before them.
        folder: where they stand; one run at a time.
        command: of the process that runs the cell in a folder.
        launcher: starts the processes.
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
        _Run(cells, folder, command, launcher, progress).go()
        return folder.status(cells)
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
        self.count = len(cells)
        self.finished = {cell.name for cell in cells if folder.done(cell)}
        self.lost: set[str] = set()
        self.waiting = [cell for cell in cells if cell.name not in self.finished]
        self.running: list[tuple[Cell, Job]] = []
        self.elsewhere = False
        self.tracker = Tracker("cells", self.count, progress)
        self.tracker.resume(len(self.finished))

    def go(self) -> None:
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
                f"{len(self.finished)} of {self.count} cells are done; the same command goes "
                f"on in {self.folder.path}"
            ) from None
        except BaseException:
            self._stop()
            raise

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
            elif len(ready) == room or not cell.ready(self.finished, self.lost):
                continue
            elif not self._is_elsewhere(cell):
                self.waiting.remove(cell)
                ready.append(cell)
        if ready:
            places = [self.folder.prepare(cell) for cell in ready]
            commands = [(self.command(place), place / "log.txt") for place in places]
            self.running += zip(ready, self.launcher.start(commands), strict=True)

    def _is_elsewhere(self, cell: Cell) -> bool:
        """True if a job of an earlier start is still at work on it, or has just finished it."""
        handle = try_lock(self.folder.place(cell) / "lock")
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
        for cell, job in list(self.running):
            code = job.poll()
            if code is None:
                continue
            self.running.remove((cell, job))
            if code == 0 and self.folder.result(cell) is not None:
                self.finished.add(cell.name)
                self._report("")
            else:
                place = self.folder.place(cell)
                error = _last_words(place / "log.txt", code)
                write_json(place / "failed.json", {"error": error, "exit_code": code})
                self.lost.add(cell.name)
                self._report(f"{cell.name} failed: {error}")

    def _report(self, note: str) -> None:
        if note:
            self.tracker.note(note)
        self.tracker.report(len(self.finished) + len(self.lost))

    def _stop(self) -> None:
        for _, job in self.running:
            job.terminate()
        end = time.monotonic() + _PATIENCE
        for _, job in self.running:
            try:
                job.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                job.kill()


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
    lines = [line.strip() for line in own if line.strip()]
    return lines[-1][:400] if lines else f"exit code {code}"


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
