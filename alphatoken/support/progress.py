"""Progress of a long computation: tqdm's line on the console, or reports to a callable."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from tqdm import tqdm

__all__ = ["ProgressSink", "Tracker"]

_LINE = "{desc}: {n_fmt}/{total_fmt} ({percentage:.0f}%), {rate_noinv_fmt}, {remaining} left"

ProgressSink = Callable[["Tracker"], object]


class Tracker:
    """Counts the items of a long computation and reports each on the console or to a callable.

    ``progress`` None prints when stderr is a terminal, on the first process of a machine; True
    always prints, False is silent, and a callable gets the tracker itself. An exception raised by
    it passes through. Nothing is printed of what ends within ``delay`` seconds.

    Attributes:
        label: what is being computed.
        total: items in all.
        done: items finished, those of an earlier, interrupted run included.
        noted: something the user should know, or "".
    """

    def __init__(
        self, label: str, total: int, progress: bool | ProgressSink | None, delay: float = 0.0
    ) -> None:
        self.label, self.total, self.done, self.noted = label, total, 0, ""
        self._progress, self._first, self._printed, self._delay = progress, 0, "", delay
        self._bar: tqdm[None] | None = None

    def resume(self, done: int) -> None:
        """``done`` items were finished by an earlier run; they do not count for the rate."""
        self._first = done

    def note(self, text: str) -> None:
        """Set the note that goes with all further reports."""
        self.noted = text

    def report(self, done: int) -> None:
        """Report that ``done`` items are finished."""
        self.done = done
        self.tell(self._progress)

    def tell(self, progress: bool | ProgressSink | None) -> None:
        """Call, or print to stderr: a line rewritten on a terminal, one now and then elsewhere."""
        terminal, first = sys.stderr.isatty(), os.environ.get("LOCAL_RANK", "0") == "0"
        if callable(progress):
            progress(self)
        elif terminal and first if progress is None else progress:
            self._print(seconds=0.1 if terminal else 10.0)

    def _print(self, seconds: float) -> None:
        if self.noted and self.noted != self._printed:
            self._printed = self.noted
            tqdm.write(f"{self.label}: {self.noted}", file=sys.stderr)
        if self._bar is None:
            self._bar = tqdm(
                desc=self.label, total=self.total, initial=self._first, unit="",
                bar_format=_LINE, file=sys.stderr, mininterval=seconds, maxinterval=seconds,
                delay=self._delay,
            )  # fmt: skip
        self._bar.update(self.done - self._bar.n)
        if self.done >= self.total:
            self._bar.close()
            self._bar = None
