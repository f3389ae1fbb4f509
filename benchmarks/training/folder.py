"""The work folder: one file a measured cell, written whole; claims keep two processes apart."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.training.grid import Cell

Measured = dict[str, Any]


class WorkFolder:
    """Cells done, claimed and failed.

    ``cells/NAME.json`` is a measured cell, ``cells/NAME.claim`` one that a living process works
    on, ``cells/NAME.failed`` the traceback of one that raised. A run that is started again goes
    on with what is missing, failed cells included.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells = path / "cells"
        self.cells.mkdir(parents=True, exist_ok=True)

    def measured(self) -> list[Measured]:
        """All measured cells, by name."""
        files = sorted(self.cells.glob("*.json"))
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]

    def missing(self, cells: Iterable[Cell]) -> Iterator[Cell]:
        """Cells without a file, in order; looked up when asked for."""
        return (cell for cell in cells if not self._file(cell, "json").exists())

    def work(self, cells: Iterable[Cell], measure: Callable[[Cell], Measured]) -> None:
        """Measure what is missing and nobody else works on."""
        for cell in self.missing(cells):
            if not self._claim(cell):
                continue
            try:
                if not self._file(cell, "json").exists():
                    self._write(self._file(cell, "json"), json.dumps(measure(cell), indent=1))
                    self._file(cell, "failed").unlink(missing_ok=True)
            except Exception:
                self._write(self._file(cell, "failed"), traceback.format_exc())
                print(f"FAILED {cell.name}: see {self._file(cell, 'failed')}", flush=True)
            finally:
                self._file(cell, "claim").unlink(missing_ok=True)

    def drop_dead_claims(self) -> None:
        """Free the cells of processes that are gone."""
        for claim in self.cells.glob("*.claim"):
            if not _alive(claim.read_text()):
                claim.unlink(missing_ok=True)

    def _claim(self, cell: Cell) -> bool:
        try:
            handle = os.open(self._file(cell, "claim"), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False  # of a living process, or dropped at the next start
        with os.fdopen(handle, "w") as file:
            file.write(str(os.getpid()))
        return True

    def _file(self, cell: Cell, kind: str) -> Path:
        return self.cells / f"{cell.name}.{kind}"

    @staticmethod
    def _write(path: Path, text: str) -> None:
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)


def _alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
