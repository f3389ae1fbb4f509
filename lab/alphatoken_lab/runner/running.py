"""Running a grid: each cell a process of its own, those that are done left alone.

A cell that crashes, however hard, is a line in the table; the others go on. The processes end with
the one that started them, also when that is killed outright, so a second start meets no cell that
is still at work.

    FOLDER/lock                            held by the one process that runs the grid
    FOLDER/setup.lock                      held by a cell while it fills the cache that cells share
    FOLDER/TASK/CELL/cell.json             what the cell is
    FOLDER/TASK/CELL/recipe.yaml           its training options, fit for ``alphatoken sft --config``
    FOLDER/TASK/CELL/result.json           what was measured; written whole, last, and never again
    FOLDER/TASK/CELL/failed.json           why there is no result
    FOLDER/TASK/CELL/log.txt               what the process said
    FOLDER/TASK/CELL/model                 the model, where another cell needs it
    FOLDER/TASK/CELL/answers-NAME.json     exported answers; FOLDER/TASK/CELL/scores: what is said
                                           of them

A lock goes with its process, however that ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from alphatoken.errors import ConfigError
from alphatoken.support.progress import ProgressSink, Tracker
from alphatoken.support.storage import read_json, try_lock, write_json
from alphatoken_lab.runner.grid import REFERENCES, Cell, resolve_models
from alphatoken_lab.runner.launchers import (
    CellOptions,
    LocalLauncher,
    QueuedJob,
    SubmititLauncher,
    cell_command,
    for_processes,
    make_launcher,
)

Launcher = LocalLauncher | SubmititLauncher
Job = subprocess.Popen[bytes] | QueuedJob

COLLECTED = "value-propagation.safetensors"
"""File of a cell with collect_value_propagation."""

_RERUN = ("failed.json", "log.txt", "recipe.yaml", "cell.json", "building")
_POLL = 0.1
_PATIENCE = 20.0
"""Seconds that an interrupted cell gets to end by itself."""

_AGENT = "torch/distributed/elastic"
"""Stands in the first line that torchrun's agent writes when a process has failed."""


@dataclass(frozen=True)
class Status:
    """Status of one cell: "done", "failed", "blocked" (a need of it failed) or "missing"."""

    state: str
    error: str = ""


@dataclass(frozen=True)
class GridFolder:
    """All cells of a grid in one folder; a cell is asked for by itself or by its name."""

    path: Path

    def place(self, cell: Cell | str) -> Path:
        """The folder of a cell."""
        return self.path / (cell if isinstance(cell, str) else cell.name)

    def result(self, cell: Cell | str) -> dict[str, Any] | None:
        """Measurements of a cell, if it is finished."""
        return read_json(self.place(cell) / "result.json")

    def error(self, cell: Cell | str) -> str | None:
        """Reason for a missing result, if a process wrote one."""
        content = read_json(self.place(cell) / "failed.json")
        return None if content is None else str(content["error"])

    def prepare(self, cell: Cell) -> Path:
        """Ready a cell's folder for a process: an earlier try goes, its checkpoints stay."""
        place = self.place(cell)
        place.mkdir(parents=True, exist_ok=True)
        for path in (*(place / name for name in _RERUN), *place.glob(".*.tmp")):
            path.unlink(missing_ok=True)
        shutil.rmtree(place / "model", ignore_errors=True)
        write_json(place / "cell.json", {**cell.spec(), "resolved": self.resolved_options(cell)})
        return place

    def resolved_options(self, cell: Cell) -> dict[str, Any]:
        """The cell's options with the folders of the models that it needs, and what was tuned."""
        models = {name: str((self.place(name) / "model").resolve()) for name in cell.models}
        named = {name.removeprefix(f"{REFERENCES}/"): folder for name, folder in models.items()}
        options: dict[str, Any] = resolve_models(dict(cell.options), named)
        best = self.best(cell.tries) if cell.tries else None
        if cell.kind == "merge":
            options["merged"] = models[best or cell.needs[0]]
        elif best is not None:
            options |= cell.tries[best]
        return options

    def best(self, tries: Iterable[str]) -> str:
        """Name of the finished cell with the lowest loss on the rows for choosing."""
        results = {name: self.result(name) for name in tries}
        losses = {n: float(r["details"]["choosing_loss"]) for n, r in results.items() if r}
        return min(losses, key=lambda name: losses[name])

    def done(self, cell: Cell) -> bool:
        """True if its result is there, and its model where others need that.

        Raises:
            ConfigError: the result is of a cell with other options.
        """
        result = self.result(cell)
        if result is None:
            return False
        before, now = _settings(result["spec"]), _settings(cell.spec())
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                raise ConfigError(
                    "a finished cell of this folder had other settings",
                    got=f"{cell.name}: {name} was {before.get(name)!r}, is {now.get(name)!r}",
                    why="cells of two different grids would stand in one table",
                    remedy="another --output_dir, or remove the cell's folder to run it again",
                )
        needs_model = cell.keep_model and cell.kind == "train"
        return not needs_model or (self.place(cell) / "model").is_dir()

    def status(self, cells: Iterable[Cell]) -> dict[str, Status]:
        """Status of every cell by name; cells come after those that they need."""
        status: dict[str, Status] = {}
        for cell in cells:
            error = self.error(cell)
            lost = cell.hopeless({n for n, s in status.items() if s.state in ("failed", "blocked")})
            if self.done(cell):
                status[cell.name] = Status("done")
            elif lost:
                status[cell.name] = Status("blocked", f"needs {lost[0]}")
            elif error is not None:
                status[cell.name] = Status("failed", error)
            else:
                status[cell.name] = Status("missing")
        return status


def _settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    # By name, so that a refusal says which one differs.
    apart = ("keep_model", "options", "measures")
    settings = {name: value for name, value in spec.items() if name not in apart}
    for part in ("options", "measures"):
        settings |= {f"{part}.{name}": value for name, value in (spec[part] or {}).items()}
    return settings


# --- the run ------------------------------------------------------------------------------------


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


def run_cells(options: CellOptions, cells: Sequence[Cell], folder: GridFolder) -> dict[str, Status]:
    """Run the missing cells, as the options say, and return the status of each.

    Raises:
        ConfigError: options that cannot be met, or another run is at work in the folder.
    """
    for cell in cells:
        if cell.kind == "train":  # refused now, not when it is the cell's turn
            for_processes(cell.options, options.devices_per_cell)
    return run_grid(
        cells,
        folder,
        partial(cell_command, processes=options.devices_per_cell),
        make_launcher(options, folder.path),
        progress=False if options.quiet else None,
    )


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
        room = self.launcher.most - len(self.running)
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
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    text = log.read_text(errors="replace") if log.exists() else ""
    # What a launcher's agent says about its processes comes after what they said themselves.
    own = takewhile(lambda line: _AGENT not in line, text.splitlines())
    lines = [line.strip() for line in own if line.strip()]
    return lines[-1][:400] if lines else f"exit code {code}"
