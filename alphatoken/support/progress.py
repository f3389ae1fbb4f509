"""How far a long computation is: done, rate, remaining, on the console or to a callable."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from alphatoken.errors import ConfigError

__all__ = ["Progress", "ProgressSink", "Tracker", "heartbeat"]


@dataclass(frozen=True)
class Progress:
    """State of a long computation.

    Attributes:
        label: what is being computed.
        done: items finished, those of an earlier, interrupted run included.
        total: items in all.
        seconds: time spent in this run.
        rate: items per second in this run (0 before the first).
        note: something the user should know, or "".
    """

    label: str
    done: int
    total: int
    seconds: float
    rate: float
    note: str = ""

    @property
    def remaining(self) -> float | None:
        """Seconds left at the present rate, or None while there is no rate yet."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None

    def __str__(self) -> str:
        """One console line.

        >>> str(Progress("Fisher", 30, 100, 15.0, 2.0))
        'Fisher: 30/100 (30%), 2.0/s, 0:35 left'
        """
        line = f"{self.label}: {self.done}/{self.total} ({self.done * 100 // max(self.total, 1)}%)"
        if self.rate > 0:
            line += f", {self.rate:.3g}/s" if self.rate < 1 else f", {self.rate:.1f}/s"
        left = self.remaining
        return line if left is None else f"{line}, {_clock(left)} left"


ProgressSink = Callable[[Progress], None]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass
class _Spoken:
    """What this process last said of its progress, and when; one for all consoles."""

    line: str = ""
    when: float = 0.0

    def say(self, line: str) -> None:
        """Note a line that is being printed."""
        self.line, self.when = line, time.monotonic()


_SPOKEN = _Spoken()


@contextmanager
def heartbeat(every: float = 10.0) -> Iterator[None]:
    """Inside, stderr gets a line whenever nothing was said of the progress for ``every`` seconds.

    It repeats what was said last, with the time since then: a single item may take longer than any
    report could, and some work has no items. A thread of its own prints it, which ends with the
    context; on a terminal the line is rewritten.
    """
    stop, start = threading.Event(), time.monotonic()
    _SPOKEN.say("")

    def beat() -> None:
        told = start
        while not stop.wait(min(every, 1.0)):
            now = time.monotonic()
            if now - max(told, _SPOKEN.when) < every:
                continue
            told = now
            terminal = sys.stderr.isatty()
            since = f"still at work, {_clock(now - _SPOKEN.when)} since the last report"
            text = f"{_SPOKEN.line}; {since}" if _SPOKEN.line else since
            sys.stderr.write(f"\r\x1b[K{text}" if terminal else f"{text}\n")
            sys.stderr.flush()

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Console:
    """Prints to stderr: one line rewritten on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._rewrite = sys.stderr.isatty()
        self._last = -float("inf")
        self._noted = ""

    def __call__(self, progress: Progress) -> None:
        """Print, at most ten times a second (every ten seconds when not on a terminal)."""
        stream, now = sys.stderr, time.monotonic()
        start = "\r\x1b[K" if self._rewrite else ""
        if progress.note and progress.note != self._noted:
            self._noted = progress.note
            stream.write(f"{start}{progress.label}: {progress.note}\n")
            self._last = -float("inf") if self._rewrite else self._last
        finished = progress.done >= progress.total
        # Every report would cost more than a fast item, and fill a log that is no terminal.
        if now - self._last >= (0.1 if self._rewrite else 10.0) or finished:
            self._last = now
            _SPOKEN.say(str(progress))
            end = "\n" if finished or not self._rewrite else ""
            stream.write(f"{start}{progress}{end}")
        stream.flush()


class Tracker:
    """Counts the items of a long computation and reports each to a sink, the console or a callable.

    ``progress`` None prints when stderr is a terminal, True always prints, False is silent, and a
    callable gets each :class:`Progress`. An exception raised by it passes through.
    """

    def __init__(self, label: str, total: int, progress: bool | ProgressSink | None) -> None:
        self._label, self._total, self._first, self._note = label, total, 0, ""
        self._start = time.monotonic()
        _SPOKEN.line = label  # what goes on from here, for the heartbeat
        self._sink: ProgressSink | None
        if progress is None:
            progress = sys.stderr.isatty()
        if isinstance(progress, bool):
            self._sink = Console() if progress else None
        elif callable(progress):
            self._sink = progress
        else:
            raise ConfigError(
                "progress is neither a bool, None nor a callable",
                got=repr(progress),
                remedy="pass True, False, None or a function of one Progress",
            )

    def resume(self, done: int) -> None:
        """``done`` items were finished by an earlier run; they do not count for the rate."""
        self._first = done

    def note(self, text: str) -> None:
        """Set the note that goes with all further reports."""
        self._note = text

    def report(self, done: int) -> None:
        """Tell the sink that ``done`` items are finished."""
        if self._sink is None:
            return
        seconds = time.monotonic() - self._start
        rate = (done - self._first) / seconds if seconds > 0 else 0.0
        self._sink(Progress(self._label, done, self._total, seconds, rate, self._note))
