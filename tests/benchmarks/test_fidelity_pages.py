"""The pages about fidelity are those of their figures, and a table cannot be edited by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from alphatoken.errors import ConfigError
from alphatoken.fidelity.diagnosis import Answer, Diagnosis, Table
from alphatoken.fidelity.intervals import Estimate
from benchmarks.diagnoses.__main__ import write_pages
from benchmarks.diagnoses.facts import FACTS, cell
from benchmarks.diagnoses.page import with_tables
from benchmarks.diagnoses.subjects import SUBJECTS
from benchmarks.frontier.figures import load

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/fidelity.md", "docs/estimators.md", "README.md")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The pages and their figures, somewhere else."""
    (tmp_path / "docs").mkdir()
    for name in (*PAGES, "docs/fidelity.json", "docs/frontier.json"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_pages_say_what_the_figures_say(copied: Path) -> None:
    write_pages(copied / "docs")
    for name in PAGES:
        assert (copied / name).read_text() == (ROOT / name).read_text(), name


def test_a_figure_that_was_edited_is_written_anew(copied: Path) -> None:
    page = copied / "docs/estimators.md"
    right = page.read_text()
    line = next(x for x in right.splitlines() if x.startswith("| `label`, all linears"))
    page.write_text(right.replace(line, line.replace("0.", "1.")))
    write_pages(copied / "docs")
    assert page.read_text() == right


def test_a_table_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no table"):
        with_tables("<!-- table: rankin -->\n<!-- end of table -->", {}, {})


def test_every_subject_is_published_with_every_fact() -> None:
    """A fact whose row a diagnosis does not have would leave an empty cell."""
    figures = load(ROOT / "docs/fidelity.json")
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
    diagnosis = Diagnosis(
        "value-propagation", "", Answer("", "", "", ""), (Table.of("shares", "", records),)
    )
    assert cell(fact, diagnosis) == [0.5, 0.1, 0.9]
    assert cell(FACTS["causal"][1], diagnosis) is None
