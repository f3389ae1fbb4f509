"""Drift on the real tiny model: fine-tuning on one text moves it on others."""

from __future__ import annotations

import pytest

from alphatoken.fidelity import drift
from alphatoken.fidelity.diagnosis import Diagnosis
from tests.integration.subjects import RETENTION, model, subject

pytestmark = [pytest.mark.slow, pytest.mark.pictures]  # a long diagnostic

OPTIONS = drift.Options(probes=8)


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return drift.diagnose(subject("far", tuning_steps=10, length=128), OPTIONS)


def test_every_set_has_moved_and_says_how_far(found: Diagnosis):
    records = {record["set"]: record for record in found.table("drift-sets").records()}
    assert set(records) == set(RETENTION)
    for record in records.values():
        assert record["probes"] == 8
        assert 0 < record["relative_shift_low"] <= record["relative_shift"] < 2
        assert record["cka_debiased"] <= 1
    assert "[" in found.answer.number


def test_its_own_text_is_forgotten(found: Diagnosis):
    losses = {record["set"]: record for record in found.table("drift-losses").records()}
    assert losses["topics"]["loss_before"] < 4  # read in training; a uniform guess has 6.2
    assert losses["functions"]["loss_change_high"] < 0  # what it is tuned on
    assert losses["topics"]["loss_change_low"] > 0


def test_all_layers_are_there_and_one_picture_holds_all(found: Diagnosis):
    places = [r["place"] for r in found.table("drift-layers").records() if r["set"] == "summaries"]
    assert places == ["layer 1", "layer 2", "layer 3", "layer 4", "layer 5", "head"]
    drawn = found.figure("drift-map").data.records()
    assert len(drawn) == 2 * 8 * len(RETENTION)


def test_the_model_beside_itself_has_not_moved():
    given = subject("near", reference=model(), train_rows=4, validation_rows=2)
    found = drift.diagnose(given, OPTIONS)
    for record in found.table("drift-sets").records():
        assert record["relative_shift"] == 0.0
        assert record["cka_debiased"] == pytest.approx(1.0, abs=1e-9)
    assert any("reference given" in note for note in found.notes)
