"""Running a grid: each cell a process of its own, those that are done left alone.

A cell that crashes, however hard, is a line in the table; the others go on. The processes end with
the one that started them, also when that is killed outright, so a second start finds no cell at
work twice.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from alphatoken.compare.folder import GridFolder, Status, try_lock
from alphatoken.compare.grid import Cell
from alphatoken.errors import ConfigError
from alphatoken.support.progress import ProgressSink, Tracker
from alphatoken.support.storage import write_json

__all__ = ["end_with_parent", "run_grid"]

_POLL = 0.1
_PATIENCE = 20.0
"""Seconds that an interrupted cell gets to end by itself."""

_PARENT = "ALPHATOKEN_COMPARE_PARENT"
_PR_SET_PDEATHSIG = 1


@dataclass
class _Running:
    cell: Cell
    process: subprocess.Popen[bytes]
    log: IO[bytes]


def run_grid(
    cells: Sequence[Cell],
    folder: GridFolder,
    command: Callable[[Path], list[str]],
    *,
    processes: int = 1,
    progress: bool | ProgressSink | None = None,
) -> dict[str, Status]:
    """Run what is missing, and say of every cell what became of it.

    Args:
        cells: those that others need before them.
        folder: where they stand; one run at a time.
        command: of the process that runs the cell in a folder.
        processes: cells at a time.
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
        return _Run(cells, folder, command, processes, progress).go()
    finally:
        os.close(lock)


class _Run:
    def __init__(
        self,
        cells: Sequence[Cell],
        folder: GridFolder,
        command: Callable[[Path], list[str]],
        processes: int,
        progress: bool | ProgressSink | None,
    ) -> None:
        self.folder, self.command, self.processes = folder, command, processes
        self.cells = list(cells)
        self.finished = {cell.name for cell in cells if folder.done(cell)}
        self.lost: set[str] = set()
        self.waiting = [cell for cell in cells if cell.name not in self.finished]
        self.running: list[_Running] = []
        self.tracker = Tracker("cells", len(self.cells), progress)
        self.tracker.resume(len(self.finished))

    def go(self) -> dict[str, Status]:
        """Until nothing is left to start."""
        self.tracker.report(len(self.finished))
        try:
            while self.waiting or self.running:
                self._start_ready()
                if not self.running:
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
        """Cells whose models are there, as many as may run; drop those that wait in vain."""
        for cell in list(self.waiting):
            gone = cell.hopeless(self.lost)
            if gone:
                self.waiting.remove(cell)
                self.lost.add(cell.name)
                self._report(f"{cell.name} is left out: it needs {', '.join(gone)}")
            elif len(self.running) < self.processes and cell.ready(self.finished, self.lost):
                self.waiting.remove(cell)
                self._start(cell)

    def _start(self, cell: Cell) -> None:
        place = self.folder.of(cell)
        place.prepare(cell, self.folder.resolved(cell))
        log = (place.path / "log.txt").open("wb")
        process = subprocess.Popen(
            self.command(place.path),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=self._environment(),
            start_new_session=True,  # an interrupt on the terminal is this process's to pass on
        )
        self.running.append(_Running(cell, process, log))

    def _environment(self) -> dict[str, str]:
        """Several cells share the cores, unless the user has said how."""
        threads = str(max(1, (os.cpu_count() or 1) // self.processes))
        shared = {"OMP_NUM_THREADS": threads} if self.processes > 1 else {}
        return {**shared, **os.environ, _PARENT: str(os.getpid())}

    def _collect(self) -> None:
        for one in list(self.running):
            code = one.process.poll()
            if code is None:
                continue
            self.running.remove(one)
            one.log.close()
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
            one.process.terminate()
        end = time.monotonic() + _PATIENCE
        for one in self.running:
            try:
                one.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            one.log.close()


def _last_words(log: Path, code: int) -> str:
    """One line about why a process ended."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line]
    return f"exit code {code}" if not said else said[-1][:400]


def end_with_parent() -> None:
    """Called by a cell's process: it is killed when the process that started it ends (Linux).

    Without this, cells of a grid that was killed outright would train on, and the next start would
    run them a second time beside themselves.
    """
    parent: Any = os.environ.get(_PARENT)
    if parent is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before the request
        os.kill(os.getpid(), signal.SIGKILL)
