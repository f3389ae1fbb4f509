"""The heatmap on the real tiny model: real text with dollars and brackets, in a real browser."""

from __future__ import annotations

import pytest

from alphatoken.config import ScorerConfig
from alphatoken.fidelity import heatmap
from alphatoken.fidelity.diagnosis import Diagnosis
from tests.integration.subjects import subject

pytestmark = pytest.mark.pictures


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    given = subject("far", tokens=400)
    return heatmap.diagnose(given, heatmap.Options(examples=2))


def test_it_says_what_is_valued_with_intervals(found: Diagnosis):
    assert found.name == "heatmap"
    assert any("Stability is zero" in note for note in found.notes)
    kinds = {record["kind"]: record for record in found.table("heatmap-kinds").records()}
    assert len(kinds) > 3
    several = [record for record in kinds.values() if record["tokens"] > 30]
    assert len(several) > 2
    for record in several:
        assert 0 <= record["kept_low"] <= record["kept"] <= record["kept_high"] <= 1
    agreement = found.table("heatmap-agreement").records()[0]
    assert 0.4 < agreement["spearman_low"] <= agreement["spearman"] <= 1


def test_every_token_of_the_rows_is_in_table_and_page(found: Diagnosis):
    records = found.table("heatmap-tokens").records()
    shown: dict[int, str] = {}
    for record in records:
        shown[record["row"]] = shown.get(record["row"], "") + str(record["token"])
    assert len(shown) == 2
    for number, text in shown.items():
        response = subject("far").train[number].row.response
        assert response.startswith(text.removesuffix("</s>"))
    for record in records:
        parts = record["adaptation_direct"] + record["adaptation_causal"]
        scale = abs(record["adaptation_direct"]) + abs(record["adaptation_causal"])
        assert record["total"] == pytest.approx(parts, abs=1e-5 * scale + 1e-12)


def test_the_same_run_is_the_same_diagnosis(found: Diagnosis):
    given = subject("far", tokens=400)
    again = heatmap.diagnose(given, heatmap.Options(examples=2))
    assert [f.alt for f in again.figures] == [f.alt for f in found.figures]
    assert again.answer == found.answer
    assert again.tables == found.tables


@pytest.mark.slow
def test_two_checkpoints_side_by_side():
    config = ScorerConfig(layers=1)
    given = subject("near", tokens=150, train_rows=6, validation_rows=3, config=config)
    options = heatmap.Options(examples=1, tuned=True, against="before", lines=6)
    found = heatmap.diagnose(given, options)
    shares = {r["component"]: r["share"] for r in found.table("heatmap-shares").records()}
    assert shares["stability_direct"] > 0
    assert "alphatoken before" in found.figures[0].alt
