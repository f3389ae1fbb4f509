"""Sensitivity: planted settings, counted cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from alphatoken.config import ScorerConfig
from alphatoken.diagnose import sensitivity
from alphatoken.diagnose.cost import direction_flops, flops, step_flops, values_flops
from alphatoken.diagnose.sensitivity import Options
from alphatoken.scorer import Scorer
from tests.property.test_diagnose_stability import PLAIN, drifted, small

pytestmark = pytest.mark.usefixtures("few_draws")

# --- other settings ------------------------------------------------------------------------------


OPTIONS = Options(windows=(0, 1), weights=(0.0, 1.0))


@pytest.mark.slow
def test_a_diagnosis_of_planted_settings() -> None:
    """W beyond the rows changes nothing; all is in the tables."""
    subject = small(rows=9, config=ScorerConfig(layers=2, window=30))
    before = {name: weight.clone() for name, weight in subject.model.state_dict().items()}
    diagnosis = sensitivity.diagnose(subject, OPTIONS)
    records = diagnosis.table("settings").records()
    by = {(r["setting"], r["value"]): r for r in records}
    longest = max(len(row.input_ids) for row in subject.train)
    assert by["W", f"all ({longest})"]["overlap"] == 1
    assert by["W", "0"]["overlap"] == by["estimator", "direct"]["overlap"]
    assert by["K", "2"]["default"] is True
    assert {t.key for t in diagnosis.tables} == {"settings"}
    weights = {value: r for (setting, value), r in by.items() if setting == "lambda"}
    assert list(weights) == ["0", "1", "1.5"]
    assert weights["1.5"]["default"] is True
    assert weights["1.5"]["overlap"] == 1
    assert all(torch.equal(before[n], w) for n, w in subject.model.state_dict().items())
    assert all(p.grad is None for p in subject.model.parameters())


def test_adaptation_alone_has_no_lambda() -> None:
    subject = small(rows=9, batch_size=9, config=ScorerConfig(layers=2, objective="adaptation"))
    options = replace(OPTIONS, estimators=("alphatoken",), layers=(1,), windows=())
    diagnosis = sensitivity.diagnose(subject, options)
    assert not any(r["setting"] == "lambda" for r in diagnosis.table("settings").records())
    assert not any("fine-tun" in note for note in diagnosis.notes)


def test_a_fisher_that_does_not_cover_a_layer_leaves_it_out() -> None:
    """The Fisher given has the two scored layers; K = 3 is left out, not guessed."""
    subject = small(rows=9, batch_size=9)
    given = replace(subject, fisher=drifted(subject))
    options = replace(OPTIONS, estimators=("alphatoken",), windows=())
    diagnosis = sensitivity.diagnose(given, options)
    tried = [r["value"] for r in diagnosis.table("settings").records() if r["setting"] == "K"]
    assert tried == ["1", "2"]
    assert any("K = 3 was left out" in note for note in diagnosis.notes)


# --- cost ----------------------------------------------------------------------------------------


def test_flops_are_counted_on_matrix_products_and_on_the_cpus_attention() -> None:
    a, b = torch.ones(7, 11), torch.ones(11, 13)
    assert flops(lambda: a @ b) == 2 * 7 * 11 * 13
    q = torch.ones(2, 3, 16, 8, requires_grad=True)

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    forward = 2 * 2 * (2 * 3 * 16 * 16 * 8)
    assert flops(attend) == forward
    both = flops(lambda: attend().sum().backward())
    assert both == pytest.approx(3.5 * forward)  # the backward has five products, the forward two


def test_the_counted_parts_of_a_step() -> None:
    """Known by hand for a decoder without attention worth counting: one token a row pair."""
    subject = small(PLAIN, rows=6, batch_size=6)
    (batch,) = subject.batches(subject.train)
    scorer = Scorer(subject.model, subject.batches(subject.validation), None, subject.config)
    scorer.score(batch)
    values = values_flops(scorer, batch)
    step = step_flops(scorer.adapter, batch)
    b, t = batch["input_ids"].shape
    weights = sum(p.numel() for n, p in subject.model.named_parameters() if p.dim() == 2) - 11 * 8
    pairs = subject.model.config.heads * subject.model.config.head_dim * t  # type: ignore[union-attr]
    linear, attention = 2 * b * t * weights, 4 * b * t * pairs * subject.model.config.layers  # type: ignore[union-attr, operator]
    # Everything forward, and twice back, but for the input's own gradient of the first linears.
    assert 2.5 * (linear + attention) < step <= 3 * (linear + attention)
    assert 0 < values < step
    once = direction_flops(scorer)
    scorer.set_validation(subject.batches([*subject.validation, *subject.validation]))
    assert direction_flops(scorer) > 1.8 * once
