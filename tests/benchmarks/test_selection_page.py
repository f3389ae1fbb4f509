"""The page of docs/selection.md line by line: tables, bold, the picture; nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.selection import report
from benchmarks.selection.hypotheses import Effect, Hypothesis
from benchmarks.selection.paired import Difference
from tests.benchmarks.test_selection_benchmark import each

SURE, DOUBT = Difference(-0.5, -0.6, -0.4, 3), Difference(0.25, -0.1, 0.6, 3)


def entry(method: str, seconds: float, target: Any = None, retention: Any = None) -> report.Entry:
    against = {"target": {"standard": target}, "retention": {"standard": retention}}
    against = {k: {n: d for n, d in v.items() if d is not None} for k, v in against.items()}
    return report.Entry(method, 0.5, 40, seconds, 0.25, 1e-5, 2.0, 3.0, 0.0, against)


def test_a_line_of_the_table_by_hand() -> None:
    page = report._table([entry("standard", 10.0), entry("label", 25.0, SURE, DOUBT)])
    (line,) = [one for one in page.splitlines() if "`label`" in one]
    assert line == (
        "| `label` | 3 | 1e-05 | 40 | 2.5 | 25% | 2.000 | **-0.500 [-0.600, -0.400]** "
        "| 3.000 | +0.250 [-0.100, +0.600] |"
    )


def test_a_line_of_options_by_hand() -> None:
    tried = Hypothesis("helps", "task", "option", "plain")
    page = report._options([Effect(tried, SURE, DOUBT)], {("task", "option"): 0.1})
    assert page.splitlines()[-1] == (
        "| helps | task | `option` | `plain` | 3 | **-0.500 [-0.600, -0.400]** "
        "| +0.250 [-0.100, +0.600] | 10% |"
    )


def test_choices_are_set_beside_the_start_and_plain_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four questions of two choices, the first right: 2, 3 and 4 of them are answered rightly."""
    monkeypatch.setenv("SELECTION_ROWS", str(tmp_path))
    monkeypatch.setattr(report, "BENCHMARKS", {"A": "a.jsonl"})
    question = {"benchmark": "A", "gold": 0, "letters": [1, 1]}
    (tmp_path / "choices-questions.jsonl").write_text(f"{json.dumps(question)}\n" * 4)

    def found(right: int, *seeds: int) -> Any:
        losses = [x for i in range(4) for x in ([1, 2] if i < right else [2, 1])]
        return {"retention": {seed: each(losses, [1] * 8) for seed in seeds}}

    page = report._choices(
        {"start": found(2, 0), "standard": found(3, 0, 1), "label": found(4, 0, 1)}
    )
    (line,) = [one for one in page.splitlines() if "`label`" in one]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["`label`", "2", "100.0"]
    assert cells[3].startswith("+50.0 [")  # the start
    assert cells[4].startswith("+25.0 [")
    assert "**" not in line  # two seeds say nothing


def test_points_are_bold_by_three_seeds_only() -> None:
    assert report._points(Difference(5.0, 2.0, 8.0, 2)) == "+5.0 [+2.0, +8.0]"
    assert report._points(Difference(5.0, 2.0, 8.0, 3)) == "**+5.0 [+2.0, +8.0]**"


def test_planted_words_stand_first() -> None:
    page = report._kept({"label": [{"planted": 0.25, "real": 0.75}]})
    assert "| `label` | 25% / 75% |" in page


def test_a_point_of_the_picture_has_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(report, "save", lambda figure, _: seen.append(figure.axes[0]))
    entries = [entry("random", 1.0, DOUBT), entry("after-validation", 1.0, SURE)]
    report.draw({"task": entries}, tmp_path / "picture.svg")
    names = dict(zip(seen[0].get_yticks(), seen[0].get_yticklabels(), strict=True))
    points = {
        names[line.get_ydata()[0]].get_text(): line.get_xdata()[0]
        for line in seen[0].lines if line.get_marker() == "o"
    }  # fmt: skip
    assert points == {"random": 0.25, "clean rows first": -0.5}


def test_of_several_baselines_the_first_that_is_there() -> None:
    own = {"target": {s: each([1], [1]) for s in range(3)}}
    losses = dict.fromkeys(("standard", "after-validation", "validation-first", "label"), own)
    line = SimpleNamespace(policy="label", records=[], mean=lambda _: None)
    found = report._entry(line, losses, prepared=False).against["target"]
    assert set(found) == {"standard", "after-validation"}
    del losses["after-validation"]
    found = report._entry(line, losses, prepared=False).against["target"]
    assert set(found) == {"standard", "validation-first"}
