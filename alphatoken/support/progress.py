"""Progress of a long computation: tqdm's line on a terminal, lines in a log, or a callable."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, repeat
from threading import Event, RLock, Thread
from types import TracebackType
from weakref import ref

from tqdm import tqdm

_LINE = (
    "{desc}: {n_fmt}/{total_fmt} ({percentage:.0f}%), {rate_noinv_fmt}, {elapsed} gone, "
    "{remaining} left"
)

_FIRST, _EVERY = 1.0, 10.0
"""Seconds before the first line in a log, and between two of them."""


def is_first_process() -> bool:
    """Whether this is the one that speaks and writes, of those that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


ProgressSink = Callable[["Tracker"], object]

_INNER: list[int] = []
"""Identities of trackers at work as context managers; in a log the others wait for them."""

_SHOWN: ContextVar[bool | None] = ContextVar("progress", default=None)


@contextmanager
def shown_progress(shown: bool | None) -> Iterator[None]:
    """Inside, ``progress=None`` prints or is silent as ``shown`` says; None is as outside of it."""
    token = _SHOWN.set(shown)
    try:
        yield
    finally:
        _SHOWN.reset(token)


class Tracker:
    """Counts the items of a long computation and reports each on the console or to a callable.

    ``progress`` None prints when stderr is a terminal or :func:`shown_progress` says so, on the
    first process of a machine; True always prints, False is silent, and a callable gets the tracker
    itself. An exception raised by it passes through. On a terminal one line is written over and
    over; elsewhere there is a line now and then, each once. As a context manager it shows what is
    at work before the first item is finished, too.

    Attributes:
        label: what is being computed.
        total: items in all.
        done: items finished, those of an earlier, interrupted run included.
        noted: something the user should know, or "".
    """

    def __init__(
        self, label: str, total: int, progress: bool | ProgressSink | None, delay: float = 0.0
    ) -> None:
        """``delay``: seconds; nothing is printed of what ends within them."""
        self.label, self.total, self.done, self.noted = label, total, 0, ""
        self._progress, self._first, self._printed, self._delay = progress, 0, "", delay
        self._begun, self._next = time.monotonic(), max(delay, _FIRST)
        self._bar: tqdm[None] | None = None
        self._over, self._watched, self._lock = Event(), False, RLock()

    def __enter__(self) -> Tracker:
        """Show it from ``delay`` on, in place of what it is a part of."""
        _INNER.append(id(self))
        if not callable(self._progress):
            self._show(self._progress)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """It is over, finished or not."""
        _INNER.remove(id(self))
        self._end()

    def resume(self, done: int) -> None:
        """``done`` items were finished by an earlier run; they do not count for the rate."""
        self._first = self.done = done

    def note(self, text: str) -> None:
        """Set the note that goes with all further reports."""
        self.noted = text

    def report(self, done: int) -> None:
        """Report that ``done`` items are finished."""
        self.done = done
        if callable(self._progress):
            self._progress(self)
        else:
            self._show(self._progress)

    def _show(self, progress: bool | None) -> None:
        if progress is None:
            shown = _SHOWN.get()
            shown = sys.stderr.isatty() if shown is None else shown
            progress = shown and os.environ.get("LOCAL_RANK", "0") == "0"
        if progress and not self._over.is_set():
            self._watch()
            self._print()

    def _watch(self) -> None:
        """Begin to show it now and then, also where a single item takes long."""
        if not self._watched:
            self._watched = True
            waits = chain([self._delay or _FIRST], repeat(_EVERY))
            arguments = (ref(self), self._over, waits)
            Thread(target=_shown_now_and_then, args=arguments, daemon=True).start()

    def _print(self) -> None:
        with self._lock:
            seconds, finished = time.monotonic() - self._begun, self.done >= self.total
            if seconds < self._delay or self._over.is_set():
                if finished:
                    self._end()
                return
            if self.noted and self.noted != self._printed:
                self._printed = self.noted
                tqdm.write(f"{self.label}: {self.noted}", file=sys.stderr)
            if sys.stderr.isatty():
                self._draw(seconds)
            elif finished or (seconds >= self._next and id(self) in (_INNER or [id(self)])):
                self._next = seconds + _EVERY
                print(self._line(seconds), file=sys.stderr, flush=True)
            if finished:
                self._end()

    def _line(self, seconds: float) -> str:
        text = tqdm.format_meter(
            self.done, self.total, seconds, prefix=self.label, unit="", bar_format=_LINE,
            initial=self._first,
        )  # fmt: skip
        return " ".join(str(text).split())

    def _draw(self, seconds: float) -> None:
        if self._bar is None:
            self._bar = tqdm(
                desc=self.label, total=self.total, initial=self._first, unit="",
                bar_format=_LINE, file=sys.stderr, leave=self._delay == 0.0,
            )  # fmt: skip
            self._bar.start_t -= seconds  # what has passed counts for the rate
        self._bar.update(self.done - self._bar.n)
        if self.done >= self.total:
            self._bar.refresh()

    def _end(self) -> None:
        with self._lock:
            self._over.set()
            if self._bar is not None:
                self._bar.close()
                self._bar = None


def _shown_now_and_then(tracker: ref[Tracker], over: Event, waits: Iterator[float]) -> None:
    """Print of a tracker for as long as there is somebody who holds it."""
    for seconds in waits:
        if over.wait(seconds):
            return
        if (one := tracker()) is None:
            return
        one._print()
        del one
