"""Cost of choosing tokens apart from training on them: peak memory, and seconds.

Measured are the parts of a run that are in ``alphatoken.train.trainer_loss``, inside
:func:`measured_selection`. A section's peak is all that is in use while it runs, weights and
activations of the step included: what a device must have to choose tokens at all, as in the paper's
runtime tables ("Peak Sel. Mem.", there the maximum GPU memory during scoring and mask
construction).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from alphatoken.train.trainer_loss import AROUND


class SelectionCost:
    """Most bytes in use since it was made: of the GPU if there is one, else resident memory.

    Resident memory is the process's, libraries included (some 0.5 GB). On Linux the kernel's
    record is reset first, so that loading does not count; elsewhere it does, and the peak of a
    section cannot be told from the whole's.

    Attributes:
        kind: "cuda", "resident" or "resident, loading included".
        seconds: spent in sections.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._whole = self._sections = 0
        self._inside = False
        self.kind = "cuda" if torch.cuda.is_available() else "resident"
        if not self._reset():
            self.kind = "resident, loading included"

    def restart(self) -> None:
        """Forget the whole's peak; that of the sections stays."""
        self._whole = 0
        self._reset()

    def whole(self) -> int:
        """Bytes, of everything since the start."""
        self._whole = max(self._whole, self._read())
        return self._whole

    def selection(self) -> int | None:
        """Bytes, of the sections; None where there was none, or the system cannot tell."""
        told = self._sections and self.kind != "resident, loading included"
        return self._sections if told else None

    @contextmanager
    def section(self) -> Iterator[None]:
        """Count the enclosed code as choosing; a section within a section is part of it."""
        if self._inside:
            yield
            return
        self.whole()
        self._reset()
        self._inside, started = True, time.perf_counter()
        try:
            yield
        finally:
            self._inside = False
            self.seconds += time.perf_counter() - started
            self._sections = max(self._sections, self._read())
            self.whole()

    def _reset(self) -> bool:
        """Let the system's record begin anew; False where it cannot."""
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return True
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def _read(self) -> int:
        """Bytes, most since the record was reset."""
        if self.kind == "cuda":
            return int(torch.cuda.max_memory_allocated())
        status = Path("/proc/self/status")
        if status.exists():
            line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@contextmanager
def measured_selection() -> Iterator[SelectionCost]:
    """Sections that run inside are measured; gives where."""
    cost = SelectionCost()
    token = AROUND.set(cost.section)
    try:
        yield cost
    finally:
        AROUND.reset(token)
