"""Stability and sensitivity: values recombined, planted noise, dependence and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken.config import ESTIMATORS, READ_BY, ScorerConfig
from alphatoken.data import Example
from alphatoken.diagnose import sensitivity, stability, valuing
from alphatoken.diagnose.sensitivity import Options
from alphatoken.diagnose.stability import classify
from alphatoken.diagnose.statistics import Estimate, percent
from alphatoken.diagnose.subject import Subject
from alphatoken.diagnose.valuing import (
    Columns,
    OwnValues,
    keep_shares,
    recombined,
    row_columns,
)
from alphatoken.direction.drift import FisherDrift
from alphatoken.errors import ConfigError, InputError
from alphatoken.scorer import Scorer
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.property.profiles import budget
from tests.property.tolerance import close
from tests.rows import drawn_rows

pytestmark = pytest.mark.usefixtures("few_draws")

PLAIN = DecoderConfig(layers=3, heads=4, kv_heads=2, hidden=8, bias=True)
TRANSPOSED = DecoderConfig(layers=2, transposed=True, bias=True, fused_qkv=True, qk_norm=True)
LEARNED = DecoderConfig(positions="learned", norm="layernorm", mlp="plain", max_positions=20)


def rows_of(lengths: list[tuple[int, int]], seed: int, vocabulary: int = 11) -> list[Example]:
    return drawn_rows(lengths, vocabulary, seed, least=0)


def small(
    structure: DecoderConfig = PLAIN, seed: int = 0, rows: int = 5, **changes: Any
) -> Subject:
    """A decoder with rows of different lengths on both sides."""
    lengths = np.random.default_rng(seed + 100).integers(2, 7, (rows, 2)).tolist()
    given: dict[str, Any] = {
        "model": ReferenceDecoder(structure, seed).eval(),
        "train": rows_of(lengths, seed),
        "validation": rows_of([(2, 3), (4, 6), (3, 2), (2, 5), (5, 3)], seed + 1),
        "batch_size": 2,
        "fisher_samples": 24,
        "tuning_steps": 2,
        "config": ScorerConfig(layers=2, window=3),
        "seed": seed,
    }
    return Subject(**given | changes)


def drifted(subject: Subject, seed: int = 9) -> FisherDrift:
    """A Fisher whose reference is a little away from the model."""
    generator = torch.Generator().manual_seed(seed)
    config = replace(subject.config, objective="adaptation")
    scorer = Scorer(subject.model, subject.batches(subject.validation), None, config)
    moved = {n: p.detach().clone() for n, p in scorer.parameters.items()}
    for weight in moved.values():
        weight += 0.05 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    fisher = {n: torch.rand(p.shape, generator=generator, dtype=p.dtype) for n, p in moved.items()}
    return FisherDrift(fisher, moved)


def scorer_of(subject: Subject, validation: Any = None, retention: Any = None) -> Scorer:
    rows = subject.validation if validation is None else validation
    scorer = Scorer(subject.model, subject.batches(rows), retention, subject.config)
    scorer.warn = False
    return scorer


# --- linearity -----------------------------------------------------------------------------------


@given(
    estimator=st.sampled_from(ESTIMATORS),
    config=st.sampled_from([PLAIN, TRANSPOSED, LEARNED]),
    weights=st.lists(st.integers(0, 3), min_size=5, max_size=5).filter(any),
    seed=st.integers(0, 5),
)
@example("alphatoken", PLAIN, [1, 1, 1, 1, 1], 0)
@example("label", TRANSPOSED, [0, 2, 0, 0, 1], 1)
@budget(0.2)
def test_a_weighted_sum_of_columns_is_a_scoring_against_the_resample(
    estimator: str, config: DecoderConfig, weights: list[int], seed: int
) -> None:
    """Rows of different lengths, some left out, some several times: exact in float64."""
    window = 3 if estimator in READ_BY["window"] else None
    subject = small(config, seed, config=ScorerConfig(estimator, layers=2, window=window))
    columns = row_columns(subject, scorer_of(subject), subject.train, subject.validation)
    drawn = [row for row, w in zip(subject.validation, weights, strict=True) for _ in range(w)]
    again = scorer_of(subject, drawn)
    direct = subject.score(again, subject.train)["total"]
    found = recombined(columns, np.array(weights))
    scale = float(np.abs(columns[0]).max())
    close(torch.from_numpy(found), torch.from_numpy(direct), scale, 1e-11)


def test_the_scorer_gets_its_validation_rows_back_and_chunks_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = small()
    scorer = scorer_of(subject)
    before = subject.score(scorer, subject.train)["total"]
    whole, _ = row_columns(subject, scorer, subject.train, subject.validation)
    monkeypatch.setattr(valuing, "_HELD", 1)
    parts, _ = row_columns(subject, scorer, subject.train, subject.validation)
    np.testing.assert_allclose(parts, whole, rtol=1e-12)
    assert np.array_equal(subject.score(scorer, subject.train)["total"], before)


def columns_of(subject: Subject) -> Columns:
    scorer = scorer_of(subject, retention=drifted(subject))
    return row_columns(subject, scorer, subject.train, subject.validation)


@pytest.mark.parametrize(
    ("call", "error", "cause"),
    [
        (
            lambda: recombined((np.ones((3, 2)), np.array([4, 0])), np.array([0, 1])),
            InputError, "no response token",
        ),
        (
            lambda: columns_of(small(config=ScorerConfig(layers=2, objective="stability"))),
            ConfigError, "linear in their gradients",
        ),
        (
            lambda: columns_of(small(config=ScorerConfig("walk", walk_steps=2))),
            ConfigError, "a walk has no stability side",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_recombined_is_refused(
    call: Callable[[], object], error: type[Exception], cause: str
) -> None:
    with pytest.raises(error, match=cause):
        call()


# --- what is noise -------------------------------------------------------------------------------


def planted(seed: int = 0, near: int = 20, far: int = 40, rows: int = 32) -> Columns:
    """Tokens far above, near, and far below the threshold, with the same noise a row."""
    generator = np.random.default_rng(seed)
    centre = np.concatenate([np.full(far, 9.0), 0.02 * np.arange(near), np.full(far, -9.0)])
    tokens = generator.integers(1, 9, rows)
    noise = generator.standard_normal((len(centre), rows))
    noise -= (noise @ tokens / tokens.sum())[:, None]  # so that the values are the centres
    return (centre[:, None] + noise) * tokens, tokens


def test_identical_validation_rows_make_no_noise() -> None:
    """In arithmetic, and through a whole diagnosis."""
    columns = np.tile(np.random.default_rng(0).normal(size=(50, 1)), (1, 16)), np.ones(16, int)
    keep_share = keep_shares(columns, np.zeros(50), 0.5, 200, seed=0)
    assert set(np.unique(keep_share)) == {0.0, 1.0}
    subject = small(rows=8)
    one = Subject(
        subject.model, subject.train, [subject.validation[1]] * 16, batch_size=2,
        config=ScorerConfig(layers=2, objective="adaptation"),
    )  # fmt: skip
    diagnosis = stability.diagnose(one, stability.Options(resamples=50))
    decisions = {r["decision"]: r for r in diagnosis.table("decisions").records()}
    assert decisions["noise"]["tokens"] == 0
    assert "With 16 validation rows 0 % [0, 0] of the decisions" in diagnosis.conclusion


@pytest.mark.parametrize("seed", range(10))
def test_far_tokens_are_sure_and_near_ones_are_noise(seed: int) -> None:
    columns = planted(seed)
    keep_share = keep_shares(columns, np.zeros(100), 0.5, 300, seed=seed)
    state = classify(keep_share)
    assert (state[:40] == 0).all()
    assert (state[60:] == 2).all()
    assert (state[40:60] == 1).mean() >= 0.9  # within 1.1 standard errors of the threshold
    middle = keep_share[49:51]
    assert ((middle > 0.2) & (middle < 0.8)).all()


# --- decisions -----------------------------------------------------------------------------------


def test_classes_and_words() -> None:
    shares = np.array([1.0, 0.96, 0.95, 0.94, 0.06, 0.05, 0.0])
    assert classify(shares).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert percent(Estimate(0.234, 0.18, 0.291, 90)) == "23 % [18, 29]"
    assert percent(Estimate.undefined(2, "2 tokens, 8 needed")) == (
        "not defined (2 tokens, 8 needed)"
    )


# --- batches and padding ---------------------------------------------------------------------


def dependence(subject: Subject) -> list[str]:
    return stability._dependence(OwnValues.of(subject))


@pytest.mark.parametrize("config", [PLAIN, TRANSPOSED, LEARNED], ids=["plain", "fused", "learned"])
def test_batches_and_padding_change_rounding_only(config: DecoderConfig) -> None:
    assert dependence(small(config)) == []


def test_values_that_depend_on_padding_are_flagged() -> None:
    """A model that sees the width of its batch: rows of their own must show it."""
    subject = small(rows=6)
    subject.model.embedding.register_forward_hook(  # type: ignore[union-attr, operator]
        lambda module, inputs, out: out * (1 + 0.01 * out.shape[1])
    )
    (said,) = dependence(subject)
    assert said.startswith("WARNING: values depend on padding or on neighbours")


# --- sensitivity to other settings ---------------------------------------------------------------

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
