"""``stability`` on the real tiny model: which decisions are noise, and what is not changed."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from alphatoken import Scorer
from alphatoken.fidelity import stability
from alphatoken.fidelity.diagnosis import Diagnosis
from alphatoken.fidelity.per_row import row_columns
from alphatoken.fidelity.subject import Subject
from alphatoken.support.storage import weights_digest
from tests.integration import subjects

pytestmark = [pytest.mark.slow, pytest.mark.pictures]

OPTIONS = stability.Options(resamples=200)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subjects.subject("near", validation_rows=16, length=128)


@pytest.fixture(scope="module")
def before(subject: Subject) -> str:
    return weights_digest(subject.model)


@pytest.fixture(scope="module")
def diagnosis(subject: Subject, before: str) -> Diagnosis:
    return stability.diagnose(subject, OPTIONS)


def test_every_token_has_a_decision(diagnosis: Diagnosis, subject: Subject) -> None:
    decisions = diagnosis.table("decisions").records()
    tokens = diagnosis.figure("keep_probability").data.records()
    count = sum(row.response_tokens for row in subject.sample())
    assert sum(int(record["tokens"] or 0) for record in decisions) == count == len(tokens)
    assert sum(float(record["share"] or 0) for record in decisions) == pytest.approx(1)
    values = [float(record["value"] or 0) for record in tokens]
    assert values == sorted(values, reverse=True)
    shares = np.array([float(record["keep share"] or 0) for record in tokens])
    assert shares.sum() == pytest.approx(np.ceil(count / 2))  # every resample keeps half
    assert shares[: count // 4].mean() > 0.85 > 0.15 > shares[-count // 4 :].mean()


def test_the_answer_says_how_much_is_noise(diagnosis: Diagnosis) -> None:
    noise = diagnosis.table("decisions").records()[1]
    assert 0.02 < float(noise["share"] or 0) < 0.9
    assert diagnosis.answer.number.startswith(f"{100 * float(noise['share'] or 0):.0f} % [")
    assert "16 validation rows" in diagnosis.answer.verdict


def test_rounding_is_all_that_batches_and_padding_do(diagnosis: Diagnosis) -> None:
    sources = diagnosis.table("sources").records()
    unchanged = [r for r in sources if r["source"] in ("batch", "padding")]
    assert len(unchanged) == 5
    assert all(r["rounding only"] is True for r in unchanged)
    assert not any("WARNING" in note for note in diagnosis.notes)


def test_nothing_of_the_model_is_changed(
    diagnosis: Diagnosis, subject: Subject, before: str
) -> None:
    assert weights_digest(subject.model) == before
    assert all(p.grad is None for p in subject.model.parameters())
    assert next(subject.model.parameters()).dtype == torch.float32


def test_a_resample_is_a_scoring_on_the_real_model(subject: Subject) -> None:
    """Float64 copy: through transformers' float32 casts, so to 1e-6."""
    model = copy.deepcopy(subject.model).double()
    rows = subject.sample(most=200)
    scorer = Scorer(model, subject.batches(subject.validation), None, subject.config)
    columns = row_columns(subject, scorer, rows, subject.validation[:4])
    weights = np.array([2, 0, 1, 1])
    drawn = [row for row, w in zip(subject.validation, weights, strict=False) for _ in range(w)]
    again = Scorer(model, subject.batches(drawn), None, subject.config)
    wanted = subject.score(again, rows)["total"]
    found = columns.at(weights)
    assert np.abs(found - wanted).max() < 1e-6 * np.abs(wanted).max()
    assert np.abs(columns.whole - wanted).max() > 1e-2 * np.abs(wanted).max()


def test_with_a_reference_the_retention_term_is_in_the_values() -> None:
    reference = subjects.model()
    moved = copy.deepcopy(reference)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in moved.parameters():
            weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=generator)
    given = subjects.subject(
        "near", validation_rows=8, length=96, model=moved, reference=reference, tokens=200
    )
    options = stability.Options(resamples=60)
    found = stability.diagnose(given, options)
    assert not any("is its own reference" in note for note in found.notes)


def test_few_validation_rows_are_said() -> None:
    options = stability.Options(resamples=50)
    small = subjects.subject("near", validation_rows=4, length=64, tokens=100)
    found = stability.diagnose(small, options)
    assert any("Only 4 validation rows" in note for note in found.notes)
