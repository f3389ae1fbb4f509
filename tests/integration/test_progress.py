"""Progress: one line on a terminal, lines in a log, each once, and none of what is over at once."""

from __future__ import annotations

import gc
import io
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from alphatoken.support import progress
from alphatoken.support.progress import Tracker, shown_progress
from tests.integration.tiny_training import sft


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_FIRST", 0.05)
    monkeypatch.setattr(progress, "_EVERY", 0.05)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


class Log:
    """Stderr of a test, which is no terminal."""

    def __init__(self, captured: pytest.CaptureFixture[str]) -> None:
        self._captured, self._text = captured, ""

    def all_text(self) -> str:
        """Whatever was written so far, by others too."""
        self._text += self._captured.readouterr().err
        return self._text

    def lines(self) -> list[str]:
        """All lines so far; whole ones alone, with nothing written over."""
        self.all_text()
        assert self._text == "" or self._text.endswith("\n")
        assert "\r" not in self._text
        return self._text.splitlines()

    def counts(self) -> list[str]:
        """What each line counts."""
        return [line.split(" (")[0] for line in self.lines()]

    def has(self, count: str, times: int = 1) -> bool:
        """Waits for so many such lines."""
        end = time.monotonic() + 20
        while self.counts().count(count) < times and time.monotonic() < end:
            time.sleep(0.02)
        return self.counts().count(count) >= times


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Log:
    return Log(capsys)


def test_what_is_over_at_once_is_one_line(log: Log) -> None:
    """Also where the end is told twice, as by a batch and by the block that it ends."""
    tracker = Tracker("Rows", 24, True)
    for done in (8, 16, 24, 24):
        tracker.report(done)
    assert log.counts() == ["Rows: 24/24"]
    assert re.search(r"\(100%\), [\d.]+/s, 00:00 gone, 00:00 left$", log.lines()[0])


def test_each_line_is_new_and_an_item_that_takes_long_is_seen(log: Log) -> None:
    tracker = Tracker("Rows", 3, True)
    tracker.report(1)
    assert log.has("Rows: 1/3", times=2)
    tracker.report(2)
    tracker.report(3)
    time.sleep(0.15)  # nobody writes after the end
    found = log.counts()
    assert found[0] == "Rows: 1/3"
    assert found.count("Rows: 3/3") == 1
    assert found[-1] == "Rows: 3/3"


def test_items_of_an_earlier_run_do_not_count_for_the_rate(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tracker = Tracker("Rows", 100, True)
    tracker.resume(80)
    now[0] = 10.0
    tracker.report(100)
    assert log.lines()[-1].startswith("Rows: 100/100 (100%), 2.00/s, 00:10 gone")


def test_it_is_seen_before_the_first_item_is_done(log: Log) -> None:
    with Tracker("Walk", 2, True, delay=0.05) as tracker:
        assert log.has("Walk: 0/2")
        tracker.report(2)
    assert log.counts()[-1] == "Walk: 2/2"


def test_what_is_inside_speaks_for_what_it_is_a_part_of(log: Log) -> None:
    outer = Tracker("Scoring", 2, True)
    outer.report(0)
    with Tracker("Walk", 2, True) as walk:
        before = log.counts().count("Scoring: 0/2")  # perhaps one, before the walk began
        assert log.has("Walk: 0/2", times=3)
        assert log.counts().count("Scoring: 0/2") == before
        walk.report(2)
    assert log.has("Scoring: 0/2", times=before + 1)
    outer.report(2)
    assert log.counts()[-1] == "Scoring: 2/2"


@pytest.mark.slow
def test_what_ends_within_the_delay_or_with_an_error_says_no_more(log: Log) -> None:
    with Tracker("Walk", 2, True, delay=1.0) as tracker:
        tracker.report(1)
        tracker.report(2)
    with pytest.raises(ValueError, match="it"), Tracker("Walk", 2, True, delay=1.0):
        raise ValueError("it")
    Tracker("Lost", 2, True, delay=1.0).report(1)
    gc.collect()
    time.sleep(1.2)
    assert log.counts() == []


def test_a_command_decides_for_those_that_nobody_asked(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(shown: bool | None, asked: bool | None = None) -> bool:
        before = len(log.lines())
        with shown_progress(shown):
            Tracker("Rows", 1, asked).report(1)
        return len(log.lines()) > before

    assert [told(shown) for shown in (None, False, True)] == [False, False, True]
    assert told(False, asked=True)
    assert not told(True, asked=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not told(True)


def test_on_a_terminal_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    tracker = Tracker("Rows", 24, None)
    for done in (0, 8, 24, 24):
        tracker.report(done)
    text = terminal.getvalue()
    assert text.count("\n") == 1
    assert text.count("24/24 (100%)") >= 1
    assert text.rindex("24/24") < text.index("\n")


@pytest.mark.parametrize("shown", [True, False])
def test_the_first_direction_of_a_run_is_seen_in_its_log(
    shown: bool, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later ones are not: each step has a line of the trainer's own."""
    monkeypatch.setattr(progress, "_FIRST", 600.0)  # the last line alone, however slow it is
    now = lambda *given, delay: Tracker(*given, delay=0.0 * delay)  # noqa: E731
    monkeypatch.setattr("alphatoken.direction.inputs.Tracker", now)
    trainer = sft(tmp_path, policy="top", retention="none", max_steps=2, disable_tqdm=not shown)
    trainer.train()
    lines = [line for line in log.all_text().splitlines() if "Gradient of the validation" in line]
    assert len(lines) == shown
    assert all("(100%)" in line for line in lines)
