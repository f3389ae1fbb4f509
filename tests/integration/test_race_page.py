"""What a race says of itself: its verdict in words, and its page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from alphatoken.diagnose.figures import Figure, draw
from alphatoken.race import page
from alphatoken.race.page import verdict, write_race_page
from alphatoken.race.runner import RaceResult, RaceState
from tests.integration.browser import opened

ROWS = 12
CLEAR, UNCLEAR = 0.001, 0.05
"""By how much rows of an arm differ from one another, so that a shift of 0.02 is seen, or not."""

Shifts = Mapping[str, tuple[float, float]]
"""Arm -> its mean difference from 'all', and how much its rows differ."""


def losses_of(shift: float, apart: float) -> dict[str, list[float]]:
    return {"choosing": [2.0 + shift + apart * (-1) ** row for row in range(ROWS)]}


def raced(*looks: Shifts, failures: Mapping[str, str] | None = None, of: int = 0) -> RaceResult:
    """A race of 24 steps with a look every ten of them, ``of`` looks in all."""
    arms = {"all": {}, **{name: {} for shifts in looks for name in shifts}}
    steps = [10 * (place + 1) for place in range(max(of, len(looks)))]
    settings = {
        "steps": 24, "looks": steps, "arms": {**arms, **{name: {} for name in failures or {}}},
        "level": 0.05, "keep_retention": False,
        "rows": {"choosing": {"rows": ROWS, "prompts": ROWS, "digest": ""}},
    }  # fmt: skip
    losses = {
        str(step): {name: losses_of(*own) for name, own in {"all": (0.0, 0.0), **shifts}.items()}
        for step, shifts in zip(steps, looks, strict=False)
    }
    state = RaceState(
        settings, tokens={"choosing": [5.0] * ROWS}, losses=losses, failures=dict(failures or {})
    )
    outcome = state.outcome(len(looks))
    return RaceResult(outcome.winner or "", outcome, state)


# --- the time that is left ------------------------------------------------------------------------


def test_the_time_that_is_left_is_that_of_the_steps_to_come() -> None:
    """By hand: 24 steps, looks at 10 and 20; an arm that has not begun counts as the slowest.

    Proves: the time that a race says is left (exact), against its steps counted one by one.
    """
    first = raced({"mix": (0.0, CLEAR)}, of=2).state
    first.seconds = {"all": 20.0, "mix": 30.0}
    assert first.steps_taken == {"all": 10, "mix": 10}
    assert first.seconds_left(["all", "mix"], to_end=False) == 10 * 2 + 10 * 3
    assert first.seconds_left(["all", "mix"], to_end=True) == 10 * 2 + 10 * 3 + 4 * 3
    assert first.seconds_left(["all"], to_end=True) == 10 * 2 + 4 * 2
    first.settings["arms"]["walk"] = {}
    assert first.seconds_left(["all", "mix", "walk"], to_end=True) == 10 * 2 + 10 * 3 + 20 * 3 + 12
    last = raced({"mix": (0.0, CLEAR)}, {"mix": (0.0, CLEAR)}).state
    last.seconds = {"all": 40.0, "mix": 60.0}
    assert last.seconds_left(["all", "mix"], to_end=True) == 4 * 3
    assert last.seconds_left(["all", "mix"], to_end=False) == 0


# --- the verdict ----------------------------------------------------------------------------------


def test_the_verdict_tells_of_every_arm() -> None:
    """Of the winner, of those that were measured at the last look, and of those that had left."""
    said = verdict(
        raced(
            {"early": (0.02, CLEAR), "mix": (-0.02, CLEAR), "walk-80": (0.0, UNCLEAR),
             "second": (0.0, UNCLEAR)},
            {"mix": (-0.02, CLEAR), "walk-80": (0.017, UNCLEAR), "second": (-0.01, CLEAR)},
            failures={"broken": "no number"},
        )
    )  # fmt: skip
    assert said.startswith(
        "'mix' wins: at step 20 of 24 its loss on 12 choosing rows differs from that of 'all' by "
        "−0.0200 ["
    )
    others = said.partition("Of the others: ")[2].split("; ")
    kinds = [re.sub(r"[−0-9.]+ \[[^]]+\]", "D", one) for one in others]
    assert kinds == [
        "'walk-80' D (no difference seen)",
        "'second' D (better)",
        "'early' D (worse, left at step 10)",
        "'broken' failed.",
    ]


def test_no_difference_is_no_victory_of_all() -> None:
    """Where an interval holds 0, it says how much better or worse the arm could be."""
    result = raced({"walk-80": (0.01, UNCLEAR), "half": (0.02, CLEAR), "same": (0.0, 0.0)})
    one = result.outcome.differences[-1]["walk-80"]
    said = verdict(result)
    assert "wins" not in said
    assert said.startswith(
        "Undecided: at step 10 of 24 no arm is better than 'all' on 12 choosing rows beyond its "
        "interval, so 'all' goes on."
    )
    assert f"'walk-80' could be {-one.low:.2g} better or {one.high:.2g} worse" in said
    assert "'same' does as 'all' does" in said
    assert re.search(r"'half' 0.0200 \[[^]]+\] \(worse\)", said)
    assert said.endswith("A longer race or more choosing rows would see smaller differences.")


@pytest.mark.parametrize("failures", [{}, {"broken": "no number"}])
def test_all_wins_where_every_other_arm_has_left(failures: dict[str, str]) -> None:
    """At an early look, at the last one, or since it broke."""
    for looks in (1, 2):
        said = verdict(raced({"half": (0.02, CLEAR)}, failures=failures, of=looks))
        assert said.startswith("'all' wins: by step 10 of 24 every other arm has left the race")
        assert re.search(r"'half' 0.0200 \[[^]]+\] \(worse\)", said)
        assert ("'broken' failed" in said) == bool(failures)
        assert "would see" not in said


@pytest.mark.parametrize("others", [{}, {"second": (-0.01, CLEAR)}])
def test_an_arm_that_forgets_is_said_to(others: Shifts) -> None:
    """It is the best on the choosing rows, and still another one goes on."""
    result = raced({"half": (-0.02, CLEAR), **others})
    state = result.state
    state.settings["keep_retention"] = True
    state.settings["rows"]["retention"] = state.settings["rows"]["choosing"]
    state.tokens["retention"] = state.tokens["choosing"]
    for name, own in state.losses["10"].items():
        own["retention"] = losses_of(0.02 * (name == "half"), CLEAR)["choosing"]
    outcome = state.outcome(1)
    said = verdict(RaceResult(outcome.winner or "", outcome, state))
    assert said.startswith("'second' wins: " if others else "'all' goes on: ")
    assert re.search(r"'half' −0.0200 \[[^]]+\] \(better, but worse on the retention rows\)", said)


def test_a_race_that_is_not_over_says_where_it_is() -> None:
    said = verdict(raced({"half": (0.0, UNCLEAR)}, of=2))
    assert said.startswith("After the look at step 10 of 24: 'half' ")
    assert verdict(raced(of=2, failures={"half": ""})) == "No look is complete yet."


# --- the page -------------------------------------------------------------------------------------


def page_of(result: RaceResult, folder: Path, **more: object) -> Path:
    path = folder / "race.html"
    write_race_page(path, result, **more)  # type: ignore[arg-type]
    return path


def test_each_arm_ends_with_what_was_seen_of_it(tmp_path: Path) -> None:
    """An arm that is better than 'all' and not the best is not said to be no better."""
    result = raced({"mix": (-0.03, CLEAR), "second": (-0.01, CLEAR), "walk-80": (0.0, UNCLEAR)})
    text = page_of(result, tmp_path).read_text("utf-8")
    arms = text.partition('id="arms"')[2]
    cells = re.findall(r'<tr><td class="words">[^<]*</td><td class="words">([^<]*)</td>', arms)
    assert cells == ["does not go on", "goes on", "better", "no difference seen"]


def test_the_loss_before_training_stands_first(tmp_path: Path) -> None:
    """Beside it one sees whether an arm learned anything; a race that began without has none."""
    result = raced({"half": (-0.02, CLEAR)})
    for before in ({"choosing": [3.0] * (ROWS - 1) + [3.5]}, {}):
        result.state.before = before
        text = page_of(result, tmp_path).read_text("utf-8")
        table = text.partition("Differences on the choosing rows")[2].partition("</table>")[0]
        rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in table.split("<tr>")[2:]]
        assert [row[1] for row in rows] == [*(["before training"] if before else []), "half"]
        assert not before or rows[0] == ["0", "before training", "–", "3.042", "–", "–"]
    assert verdict(result) == verdict(raced({"half": (-0.02, CLEAR)}))


def test_the_rows_of_a_race_are_one_sentence(tmp_path: Path) -> None:
    text = page_of(raced({"half": (0.0, UNCLEAR)}), tmp_path).read_text("utf-8")
    assert "12 choosing rows, which no arm trains on or values against." in text


def test_the_axis_of_steps_begins_at_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around a single look it would end a step before and behind it."""
    pytest.importorskip("matplotlib")
    drawn: list[Figure] = []
    monkeypatch.setattr(page, "draw", lambda figure: drawn.append(figure) or draw(figure))
    page_of(raced({"half": (0.0, UNCLEAR)}), tmp_path)
    assert [one.limits[0] for one in drawn] == [(0, None)]


@pytest.mark.pictures
def test_the_difference_is_in_view_on_a_narrow_screen(tmp_path: Path) -> None:
    """A table is moved sideways there; what decides stands before what it is made of."""
    pytest.importorskip("matplotlib")
    result = raced({"validation-mix": (-0.0061, 0.011), "walk-80": (0.017, UNCLEAR)})
    with opened(page_of(result, tmp_path), tmp_path / "profile", 420) as browser:
        browser.needs_no_sideways_scroll(420)
        browser.resize(420, 900)
        heads = "[...document.querySelectorAll('#choosing th')]"
        place = f"{heads}.find(h => h.textContent == 'difference').getBoundingClientRect().right"
        assert browser.evaluate(place) <= 400
