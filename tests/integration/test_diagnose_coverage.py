"""Coverage on the real tiny model and real rows."""

from __future__ import annotations

import pytest

from alphatoken.fidelity import coverage
from alphatoken.fidelity.diagnosis import Diagnosis
from tests.integration.subjects import subject

pytestmark = [pytest.mark.slow, pytest.mark.pictures]  # a long diagnostic

OPTIONS = coverage.Options(draws=40, clusters=6, points=200)
POLICIES = ("random", "low-perplexity", "direct", "alphatoken", "label")


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return coverage.diagnose(subject("far", tokens=400), OPTIONS)


def test_every_policy_keeps_as_many_of_the_same_tokens(found: Diagnosis):
    drawn = found.figure("coverage-map").data.records()
    assert len(drawn) == 200
    assert all(isinstance(record[name], bool) for record in drawn for name in POLICIES)
    sizes = {record["value_n"] for record in found.table("coverage-numbers").records()}
    assert len(sizes) == 1
    assert any("some policy keeps" in note and "shows 200" in note for note in found.notes)


def test_numbers_stand_in_intervals_beside_chance(found: Diagnosis):
    records = found.table("coverage-numbers").records()
    assert {(r["policy"], r["statistic"]) for r in records} == {
        (policy, key) for policy in POLICIES for key in coverage.STATISTICS
    }
    for record in records:
        assert record["value_low"] <= record["value"] <= record["value_high"]
        assert record["random_low"] < record["random_high"]
    verdicts = {(r["policy"], r["statistic"]): r["than_random"] for r in records}
    assert verdicts["low-perplexity", "loss"] == "below"
    assert [r["number"] for r in found.table("numbers").records()] == [
        "cluster entropy of alphatoken minus that of direct"
    ]


def test_overlaps_are_of_pairs_and_chance_is_the_ratio(found: Diagnosis):
    overlaps = {(r["policy"], r["other"]): r for r in found.table("coverage-overlap").records()}
    assert len(overlaps) == 10
    assert overlaps["direct", "alphatoken"]["in_common_low"] > 0.5
    chance = overlaps["random", "label"]
    assert chance["in_common_low"] - 0.1 < 0.5 < chance["in_common_high"] + 0.1


def test_all_the_tokens_kept_are_the_candidates():
    options = coverage.Options(policies=("direct",), draws=20, clusters=4)
    given = subject("near", tokens=200, ratio=1.0, train_rows=4, validation_rows=2)
    records = coverage.diagnose(given, options).table("coverage-numbers").records()
    for record in records:
        assert record["value"] == pytest.approx(record["all_candidates"])
