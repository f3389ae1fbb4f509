"""``fisher`` on the real tiny model, real training rows and four real retention sets."""

from __future__ import annotations

from typing import Any

import pytest

from alphatoken.fidelity import fisher as diagnostic
from alphatoken.fidelity.diagnosis import Diagnosis
from alphatoken.fidelity.subject import Subject
from tests.integration.subjects import RETENTION, examples, subject

pytestmark = [pytest.mark.slow, pytest.mark.pictures]  # a long diagnostic

SMALL = diagnostic.Options(rows=2, sizes=(4, 8), max_new_tokens=6, draws=10)


def quick(**changes: Any) -> Subject:
    """Short training rows; retention rows of ordinary length, as short ones have no response."""
    kept = {name: examples(name, 180, 2) for name in RETENTION}
    sizes = {"train_rows": 10, "validation_rows": 2, "retention_rows": 1, "length": 48}
    return subject("near", retention=kept, **sizes | changes)


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    given = quick(tokens=300, fisher_samples=10, tuning_steps=4)
    return diagnostic.diagnose(given, SMALL)


def test_every_proxy_meets_every_retention_set(found: Diagnosis) -> None:
    records = found.table("agreement").records()
    sets = {diagnostic.POOLED, diagnostic.CHANGE, *(f"oracle {name}" for name in RETENTION)}
    assert {r["retention"] for r in records} == sets
    proxies = {"diagonal", "kronecker", "diagonal, token labels", "none", "oracle at the reference"}
    assert {r["proxy"] for r in records} == proxies
    for record in records:
        assert record["spearman_low"] <= record["spearman"] <= record["spearman_high"]
    (start,) = [
        r
        for r in records
        if (r["retention"], r["proxy"]) == (diagnostic.POOLED, "oracle at the reference")
    ]
    assert start["spearman"] > 0.5  # four steps change little of it


def test_more_samples_agree_better(found: Diagnosis) -> None:
    records = found.table("convergence").records()
    assert [(r["labels"], r["samples"]) for r in records] == [
        ("sequence", 4), ("sequence", 8), ("token", 4), ("token", 8)
    ]  # fmt: skip
    token = [r["with_main_fit"] for r in records if r["labels"] == "token"]
    assert token[-1] > 0.5


def test_what_was_compared_is_said(found: Diagnosis) -> None:
    said = " ".join(found.notes)
    assert "fine-tuned on the training rows for 4 AdamW steps" in said
    assert "2 of topics, 2 of functions, 2 of summaries, 2 of names" in said
