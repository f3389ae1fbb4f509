"""Tables of the pages are those of their figures, and none can be edited by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alphatoken.diagnose.diagnosis import Diagnosis, Table
from alphatoken.diagnose.statistics import Estimate
from benchmarks import prices
from benchmarks.__main__ import WRITERS, pages
from benchmarks.diagnoses.facts import FACTS, cell
from benchmarks.diagnoses.subjects import SUBJECTS
from benchmarks.pages import DOCS, filled, load
from benchmarks.selection import report as selection


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.stem)
def test_a_page_says_what_its_figures_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert filled(text, WRITERS) == text, "python -m benchmarks"


def test_a_table_that_was_edited_is_written_anew() -> None:
    right = (DOCS / "estimators.md").read_text(encoding="utf-8")
    line = next(x for x in right.splitlines() if x.startswith("| `label`, all linears"))
    assert filled(right.replace(line, line.replace("0.", "1.")), WRITERS) == right


def test_prices_are_those_of_their_measurements() -> None:
    assert json.loads(prices.FILE.read_text(encoding="utf-8")) == prices.prices()


# --- single cells --------------------------------------------------------------------------------


def test_a_difference_is_bold_by_three_seeds_only() -> None:
    sure = {"mean": -0.5, "low": -0.6, "high": -0.4, "seeds": 3}
    assert selection._gap(sure) == "**-0.500 [-0.600, -0.400]**"
    assert selection._gap({**sure, "seeds": 2}) == "-0.500 [-0.600, -0.400]"
    assert selection._gap(sure, "retention") == "**-0.500**"
    assert selection._gap({**sure, "high": 0.1}) == "-0.500 [-0.600, +0.100]"
    assert selection._gap(None) == "–"
    entry = {"against": {"target": {"random": None, "dpo": sure}}}
    assert selection.to_plain(entry) == sure


# --- diagnoses -----------------------------------------------------------------------------------


def test_every_subject_is_published_with_every_fact() -> None:
    """A fact whose row a diagnosis does not have would leave an empty cell."""
    figures = load(DOCS / "fidelity.json")
    assert set(figures) == set(SUBJECTS)
    for one in figures.values():
        for table, facts in FACTS.items():
            for fact in facts:
                assert one["facts"][table][fact.label] is not None, (one["name"], fact.label)


def test_a_fact_is_the_cell_of_its_row() -> None:
    fact = FACTS["causal"][0]
    records = [
        {"layer": layer, "part": fact.where["part"], "signed": Estimate(value, 0.1, 0.9, 7)}
        for layer, value in (("3", 0.2), ("all", 0.5))
    ]
    diagnosis = Diagnosis("value-propagation", "", "", (Table.of("shares", "", records),))
    assert cell(fact, diagnosis) == [0.5, 0.1, 0.9]
    assert cell(FACTS["causal"][1], diagnosis) is None
