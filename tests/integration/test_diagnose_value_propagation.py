"""``value-propagation`` on the real tiny model and real rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alphatoken import ScorerConfig
from alphatoken.errors import InputError
from alphatoken.fidelity import value_propagation as diagnostic
from alphatoken.fidelity.diagnosis import Diagnosis
from tests.integration.subjects import subject

pytestmark = [pytest.mark.slow, pytest.mark.pictures]

SMALL = diagnostic.Options(pairs=600, draws=20)


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    given = subject("near", train_rows=10, validation_rows=4, length=40, tokens=400, batch_size=5)
    return diagnostic.diagnose(given, SMALL)


def test_shares_add_up_and_end_with_the_last_layer(found: Diagnosis) -> None:
    records = found.table("shares").records()
    for layer in ("2", "3", "4", "all"):
        assert sum(r["signed"] for r in records if r["layer"] == layer) == pytest.approx(
            1, abs=1e-5
        )
    (last,) = [r for r in records if (r["layer"], r["part"]) == ("4", "longer hops")]
    assert abs(last["norm"]) < 1e-4
    (lower,) = [r for r in records if (r["layer"], r["part"]) == ("2", "longer hops")]
    assert lower["norm"] > 0.1
    near, wide, hop = (
        r["relative_error"] for r in found.table("agreement").records() if r["layer"] == "all"
    )
    assert near > hop
    assert 0.3 < near < 1.0
    assert wide > 0


def test_what_was_sampled_is_said(found: Diagnosis) -> None:
    said = " ".join(found.notes)
    assert "of the token positions that have one, in layers 2, 3, 4" in said
    assert "float32" in said


def test_a_window_of_zero_and_too_few_tokens_are_refused() -> None:
    given = {"train_rows": 3, "validation_rows": 2, "length": 30}
    with pytest.raises(InputError, match="no causal-window pair"):
        diagnostic.diagnose(subject("near", config=ScorerConfig(window=0), **given), SMALL)
    few = subject("near", **given)
    row = few.train[0]
    cut = replace(row, labels=[*row.labels[:5], *[-100] * (len(row.labels) - 5)])
    with pytest.raises(InputError, match="at least 8 response tokens"):
        diagnostic.diagnose(replace(few, train=[cut]), SMALL)
