"""Progress of a long computation: tqdm's line on the console, or reports to a callable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from tqdm import tqdm

__all__ = ["Console", "Progress", "ProgressSink", "Tracker"]

_LINE = "{desc}: {n_fmt}/{total_fmt} ({percentage:.0f}%), {rate_noinv_fmt}, {remaining} left"


@dataclass(frozen=True)
class Progress:
    """State of a long computation.

    Attributes:
        label: what is being computed.
        done: items finished, those of an earlier, interrupted run included.
        total: items in all.
        first: items that an earlier run finished.
        note: something the user should know, or "".
    """

    label: str
    done: int
    total: int
    first: int = 0
    note: str = ""


ProgressSink = Callable[[Progress], None]


class Console:
    """Prints to stderr: one line rewritten on a terminal, one now and then elsewhere."""

    def __init__(self) -> None:
        self._noted = ""
        self._bar: tqdm[None] | None = None

    def __call__(self, progress: Progress) -> None:
        """Print, at most ten times a second (every ten seconds when not on a terminal)."""
        if progress.note and progress.note != self._noted:
            self._noted = progress.note
            tqdm.write(f"{progress.label}: {progress.note}", file=sys.stderr)
        bar = self._bar
        if bar is None or (bar.desc, bar.total) != (progress.label, progress.total):
            often = 0.1 if sys.stderr.isatty() else 10.0
            bar = self._bar = tqdm(
                desc=progress.label, total=progress.total, initial=progress.first, unit="",
                bar_format=_LINE, file=sys.stderr, mininterval=often, maxinterval=often,
            )  # fmt: skip
        bar.update(progress.done - bar.n)
        if progress.done >= progress.total:
            bar.close()
            self._bar = None


class Tracker:
    """Counts the items of a long computation and reports each to a sink, the console or a callable.

    ``progress`` None prints when stderr is a terminal, True always prints, False is silent, and a
    callable gets each :class:`Progress`. An exception raised by it passes through.
    """

    def __init__(self, label: str, total: int, progress: bool | ProgressSink | None) -> None:
        self._label, self._total, self._first, self._note = label, total, 0, ""
        if progress is None:
            progress = sys.stderr.isatty()
        self._sink = progress if callable(progress) else Console() if progress else None

    def resume(self, done: int) -> None:
        """``done`` items were finished by an earlier run; they do not count for the rate."""
        self._first = done

    def note(self, text: str) -> None:
        """Set the note that goes with all further reports."""
        self._note = text

    def report(self, done: int) -> None:
        """Tell the sink that ``done`` items are finished."""
        if self._sink is not None:
            self._sink(Progress(self._label, done, self._total, self._first, self._note))
