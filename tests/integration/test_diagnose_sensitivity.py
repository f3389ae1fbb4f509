"""``sensitivity`` on the real tiny model: masks by setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alphatoken.fidelity import sensitivity
from alphatoken.fidelity.diagnosis import Diagnosis
from tests.integration import subjects

pytestmark = [pytest.mark.slow, pytest.mark.pictures]  # a long diagnostic

OPTIONS = sensitivity.Options(
    estimators=("alphatoken", "path", "label"), layers=(1, 3, 5), windows=(0, 32),
    weights=(0.0, 1.5, 15.0), ratios=(0.3, 0.7), draws=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return sensitivity.diagnose(subjects.subject("near", validation_rows=8, length=128), OPTIONS)


def by_setting(diagnosis: Diagnosis) -> dict[tuple[Any, Any], dict[str, Any]]:
    return {(r["setting"], r["value"]): r for r in diagnosis.table("settings").records()}


def test_the_run_agrees_with_itself_and_others_less(diagnosis: Diagnosis) -> None:
    found = by_setting(diagnosis)
    own = [key for key, record in found.items() if record["default"]]
    assert own == [
        ("estimator", "alphatoken"), ("K", "3"), ("W", "32"), ("lambda", "1.5"),
        ("validation rows", "8"),
    ]  # fmt: skip
    for key, record in found.items():
        if key in own:
            assert record["overlap"] == 1
            assert record["flips"] == 0
        elif key[0] != "validation rows":
            assert record["overlap_low"] <= record["overlap"] <= record["overlap_high"]
            # At a ratio of one half every token that comes in sends one out.
            assert record["flips"] == pytest.approx(1 - record["overlap"], abs=0.01)
    assert found["estimator", "label"]["overlap"] < 0.97


def test_the_tables_that_are_not_about_masks(diagnosis: Diagnosis) -> None:
    ratios = {r["value"]: r for r in diagnosis.table("ratios").records()}
    assert list(ratios) == [0.3, 0.5, 0.7]
    assert 0 < ratios[0.3]["captured"] <= 1  # type: ignore[operator]
    weights = {r["lambda"]: r for r in diagnosis.table("weights").records()}
    assert weights[0.0]["flips from adaptation alone"] == 0
    assert weights[15.0]["||lambda V|| / ||G||"] == pytest.approx(  # type: ignore[operator]
        10 * weights[1.5]["||lambda V|| / ||G||"]  # type: ignore[operator]
    )


def test_words_notes_and_figures(diagnosis: Diagnosis, tmp_path: Path) -> None:
    assert diagnosis.answer.verdict.startswith("The kept tokens depend most on")
    numbers = {r["number"]: r["value"] for r in diagnosis.table("numbers").records()}
    assert 0 < numbers["share of tokens with a positive value"] < 1  # type: ignore[operator]
    assert "lambda that reverses 10 % of the decisions" in numbers
    assert any("training rows were valued" in note for note in diagnosis.notes)
    assert any("copy fine-tuned" in note for note in diagnosis.notes)
    diagnosis.save(tmp_path)
    again = Diagnosis.load(tmp_path)
    assert {figure.key for figure in again.figures} == {
        "settings",
        "ratios",
    }
    assert all(figure.png.startswith(b"\x89PNG") for figure in again.figures)
