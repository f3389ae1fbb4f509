"""Each diagnosis comes to a verdict, a number, what that number is, and an advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alphatoken.fidelity import coverage, estimators, fisher, heatmap, value_propagation
from alphatoken.fidelity.advice import Advice
from alphatoken.fidelity.diagnosis import Answer, Diagnosis, Table
from alphatoken.fidelity.intervals import Estimate
from alphatoken.fidelity.page import Section, render_page
from alphatoken.fidelity.readings import Setting

UNKNOWN = Estimate.undefined(0, "no draw")


def about(value: float, width: float = 0.05) -> Estimate:
    return Estimate(value, value - width, value + width, 40)


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (about(0.9), "as real retention rows do"),
        (about(-0.8), "the wrong way round"),
        (about(0.01), "not clearly as"),
    ],
)
def test_the_fisher_is_judged_by_its_interval(score: Estimate, said: str) -> None:
    record = {"retention": fisher.POOLED, "proxy": "diagonal", "spearman": score}
    found = fisher._answer(Table.of("agreement", "", [record]))
    assert said in found.verdict
    assert found.number == str(score)
    assert "with real retention rows" in found.label


def test_estimators_say_what_to_use_and_what_yours_has() -> None:
    """The number is of the user's own setting, and the advice the cheapest that ranks at 0.9."""
    own, cheap, exact = (Setting(name, layers) for name, layers in
                         (("alphatoken", (1, 2)), ("path", (2,)), ("label", (1, 2))))  # fmt: skip
    advice = [Advice(cheap, 0.5, about(0.82), UNKNOWN), Advice(exact, 1.3, about(0.96), UNKNOWN)]
    found = estimators._answer(
        estimators._Plan(own, exact, [], []),
        {own: {"spearman": about(0.86)}},
        {own: 1.6},
        advice,
    )
    assert found.number == str(about(0.86))
    assert str(own) in found.label
    assert found.verdict.startswith(f"Use {exact}: it ranks at {about(0.96)} and costs 1.3")
    assert f"Yours, {own}, ranks at {about(0.86)} and costs 1.6." in found.verdict


def test_kinds_that_cannot_be_told_from_all_give_no_number() -> None:
    kinds: list[dict[str, Any]] = [{"kind": "words", "kept": about(0.5)}]
    assert heatmap._answer(Table.of("kinds", "", kinds), 0.5).number == ""
    kinds += [{"kind": "numbers", "kept": about(0.9)}, {"kind": "spaces", "kept": about(0.2)}]
    found = heatmap._answer(Table.of("kinds", "", kinds), 0.5)
    assert found.verdict == "What is valued most: numbers."
    assert found.number == str(about(0.9))
    assert found.label == "share kept of numbers, where 0.5 of all are kept"


def test_propagation_and_coverage_name_what_they_measure() -> None:
    shares = [{"layer": "all", "signed": about(0.25)}]
    seen = value_propagation._answer(Table.of("shares", "", shares))
    assert seen.number == str(about(0.25))
    assert value_propagation._answer(Table.of("shares", "", [])).number == ""
    even = coverage._answer({"alphatoken": {"entropy": about(0.9)}}, {"entropy": (0.1, 0.3)})
    assert "alphatoken keeps is more even than" in even.verdict
    assert "0.100 to 0.300 at random" in even.label


def test_the_page_shows_the_fields_and_reads_no_prose(tmp_path: Path) -> None:
    answer = Answer("It does.", "0.7 [0.6, 0.8]", "agreement of one with two", "trust it.")
    one = Diagnosis("fisher", "Does it?", answer)
    page = render_page([Section.of(one)])
    for part in (answer.verdict, f"<b>{answer.number}</b>", answer.label, answer.advice):
        assert part in page
    one.save(tmp_path)
    assert Diagnosis.load(tmp_path).answer == answer
    assert answer.lines()[1] == "0.7 [0.6, 0.8]: agreement of one with two"
