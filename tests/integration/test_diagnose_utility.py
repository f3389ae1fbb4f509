"""The ``utility`` diagnostic on the real tiny model and real rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from alphatoken.fidelity.diagnosis import Diagnosis
from alphatoken.fidelity.utility import Options, diagnose
from tests.integration.subjects import subject

pytestmark = [pytest.mark.slow, pytest.mark.pictures]  # a long diagnostic

QUICK: dict[str, Any] = {
    "groups": 8,
    "sweep_tokens": 2,
    "validation_tokens": 300,
    "warmup": 6,
    "draws": 30,
}


@cache
def found(optimizer: str) -> Diagnosis:
    rate = 1e-2 if optimizer == "sgd" else 1e-4
    options = Options(
        optimizer=optimizer, learning_rate=rate, step_sizes=(rate / 10, rate * 100), **QUICK
    )
    return diagnose(subject("near", oracle_tokens=12, batch_size=3), options)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_best_prediction_ranks_what_really_happens(optimizer: str) -> None:
    record, *others = found(optimizer).table("one-token").records()
    assert str(record["prediction"]).startswith("exact, all parameters")
    assert float(record["spearman"] or 0) > 0.9
    assert float(record["slope"] or 0) == pytest.approx(1.0, abs=0.3)
    assert len(others) == (2 if optimizer == "sgd" else 7)


def test_long_steps_break_first_order() -> None:
    errors = [float(r["one token"] or 0) for r in found("sgd").table("step-size").records()]
    assert errors[-1] > 3 * errors[1]


def test_what_was_done_is_said() -> None:
    notes = " ".join(found("adamw").notes)
    assert "float64 copy" in notes
    assert "6 steps of size 0" in notes
    assert "Fewer than 8 rows" in notes
    assert len(found("adamw").table("numbers").rows) == 6


def test_the_models_own_dtype_where_a_copy_is_too_large() -> None:
    few = {**QUICK, "groups": 8, "validation_tokens": 60, "warmup": 2, "draws": 10}
    options = Options(
        optimizer="sgd", learning_rate=1e-1, float64_parameters=0, step_sizes=(1e-1,), **few
    )
    diagnosis = diagnose(subject("near", oracle_tokens=8, batch_size=2), options)
    assert "float32 copy" in " ".join(diagnosis.notes)
