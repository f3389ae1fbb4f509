"""The ``estimators`` diagnostic on the real tiny model and real rows."""

from __future__ import annotations

from functools import cache

import pytest

from alphatoken.estimate.estimators import ESTIMATORS
from alphatoken.fidelity.diagnosis import Diagnosis
from alphatoken.fidelity.estimators import Options, diagnose
from tests.integration.subjects import subject

pytestmark = [pytest.mark.slow, pytest.mark.pictures]  # a long diagnostic

OPTIONS = Options(layers=(1, 3), windows=(0, 32), draws=30, repeats=1)


@cache
def found(kind: str) -> Diagnosis:
    return diagnose(subject(kind, oracle_tokens=12), OPTIONS)


def spearman(diagnosis: Diagnosis, estimator: str, k: int) -> float:
    (record,) = [
        r for r in diagnosis.table("layers").records() if (r["estimator"], r["K"]) == (estimator, k)
    ]
    return float(record["spearman"] or 0)


@pytest.mark.parametrize("kind", ["near", "far"])
def test_the_label_pass_is_exact_on_the_real_model(kind: str) -> None:
    assert 0 < float(found(kind).table("numbers").records()[0]["value"] or 0) < 1e-4


def test_more_layers_bring_label_closer_to_the_whole() -> None:
    assert spearman(found("near"), "label", 1) < spearman(found("near"), "label", 3)


def test_own_text_is_where_the_estimators_part() -> None:
    """As on the decoder of stories (docs/estimators.md): further away all agree better."""
    near, far = (spearman(found(kind), "alphatoken", 3) for kind in ("near", "far"))
    assert 0 < near < far
    assert spearman(found("near"), "label", 3) > near
    assert spearman(found("far"), "label", 3) > far


def test_loss_finds_noise_in_the_models_own_text() -> None:
    records = {str(r["score"]): r for r in found("near").table("noise").records()}
    assert float(records["loss, high"]["auc"] or 0) > 0.8
    assert len(records) == 2 + len(ESTIMATORS)


def test_the_verdict_is_of_the_users_own_setting() -> None:
    diagnosis = found("near")
    assert diagnosis.answer.verdict.startswith("Use ")
    assert "alphatoken, K=3, W=32" in diagnosis.answer.label
    assert all(figure.png for figure in diagnosis.figures)
