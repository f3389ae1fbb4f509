"""The ``estimators`` diagnostic: readings against the scorer, planted cases, bad input."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from alphatoken import Scorer, ScorerConfig
from alphatoken.config import ESTIMATORS
from alphatoken.diagnose import estimators as diagnostic
from alphatoken.diagnose.diagnosis import Diagnosis
from alphatoken.diagnose.estimators import direction_flops, flops, step_flops, values_flops
from alphatoken.diagnose.subject import Subject
from alphatoken.diagnose.valuing import (
    WINDOWED,
    Setting,
    depths_of,
    full_gradient,
    read,
    supported,
    windows_of,
)
from alphatoken.model.batch import read_batch
from alphatoken.oracle import gradients as oracle
from tests.places import nightly, tiered
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.property.test_diagnose_stability import PLAIN, small
from tests.property.tolerance import close
from tests.rows import random_rows as rows_of

pytestmark = pytest.mark.usefixtures("few_draws")

QUICK = diagnostic.Options(layers=(1, 3))


def subject_of(model: nn.Module, **changes: object) -> Subject:
    given: dict[str, object] = {
        "train": rows_of([9, 7, 8, 9, 6, 9, 8, 9, 9, 8]),
        "validation": rows_of([6, 8, 7, 5], seed=8),
        "config": ScorerConfig(layers=2, window=3),
        "batch_size": 3,
        "tokens": 10_000,
        "oracle_tokens": 16,
    }
    return Subject(model, **given | changes)  # type: ignore[arg-type]


def decoder_of(**config: object) -> ReferenceDecoder:
    return ReferenceDecoder(DecoderConfig(**{"layers": 3} | config), 1)  # type: ignore[arg-type]


# --- readings ------------------------------------------------------------------------------------

STRUCTURES = {
    "plain": {},
    "grouped heads, window, bias": {
        "heads": 4, "kv_heads": 2, "windows": (None, 3), "bias": True, "qk_norm": True,
    },
    "fused, transposed, sinks": {"fused_qkv": True, "transposed": True, "sinks": True},
    "a block at two depths": {"repeated_block": True, "tied_embeddings": True},
    "tied linears": {"tied_linears": True},
}  # fmt: skip
# All estimators on attention with options, and those that shared weights leave.
DIFFER = ("grouped heads, window, bias", "a block at two depths")


@pytest.mark.slow
@pytest.mark.parametrize("name", tiered(STRUCTURES, DIFFER, nightly))
def test_a_reading_is_what_the_scorer_computes(name: str) -> None:
    """Every estimator, number of layers and window, to rounding."""
    subject = subject_of(
        decoder_of(**STRUCTURES[name]),
        config=ScorerConfig(layers=2),
        train=rows_of([9, 7, 8]),
    )
    settings = [
        Setting(estimator, scope, window)
        for scope in ((2,), (0, 1, 2))
        # Shared weights rule some out: what the scorer itself takes.
        for estimator in supported(subject, scope, subject.train)[0]
        for window in ((2, None) if estimator in WINDOWED else (None,))
    ]
    settings += [Setting("direct", (0, 2)), Setting("label", (0, 1, 2), None, everything=True)]
    assert {s.estimator for s in settings} == set(ESTIMATORS)
    readings = read(subject, subject.train, full_gradient(subject), settings)
    validation = subject.batches(subject.validation)
    for setting in settings:
        config = setting.config(subject.config)
        if setting.estimator == "label":
            config = replace(config, derivative="forward_mode")
        scorer = Scorer(subject.model, validation, None, config)
        wanted = subject.score(scorer, subject.train)
        # One scale for all tokens: a value is a sum of terms that may cancel.
        size = float(np.abs(wanted["total"]).max())
        close(
            torch.from_numpy(readings[setting]),
            torch.from_numpy(wanted["total"]),
            size,
            1e-11,
            name=str(setting),
        )


# --- planted cases -------------------------------------------------------------------------------


def test_the_mean_label_value_on_the_validation_batch_is_the_squared_norm_of_g() -> None:
    """G is the mean token gradient there, so mean <g_k, G> = <mean g_k, G> = ||G||^2."""
    model = decoder_of(heads=4, kv_heads=2)
    rows = rows_of([9, 5, 8, 7])
    subject = subject_of(model, train=rows, validation=rows)
    direction = full_gradient(subject)
    every = Setting("label", (0, 1, 2), None, everything=True)
    some = Setting("label", (1, 2))
    values = read(subject, rows, direction, [every, some])
    whole = sum(float(g.square().sum()) for g in direction.values())
    assert float(values[every].mean()) == pytest.approx(whole, rel=1e-12)
    linears = Scorer(model, subject.batches(rows), None, some.config(subject.config)).parameters
    part = sum(float(direction[name].square().sum()) for name in linears)
    assert float(values[some].mean()) == pytest.approx(part, rel=1e-12)
    assert 0 < part < whole


@cache
def diagnosed() -> Diagnosis:
    subject = subject_of(decoder_of(), tokens=60, batch_size=4)
    return diagnostic.diagnose(subject, QUICK)


def test_label_values_are_per_token_autograd() -> None:
    """Of some layers, by the oracle's own function on the whole batch."""
    subject = subject_of(decoder_of(), tokens=60, batch_size=100)
    rows = subject.sample()
    (batch,) = subject.batches(rows)
    direction = full_gradient(subject)
    scope = (1, 2)
    config = Setting("path", scope).config(subject.config)
    names = Scorer(subject.model, batch, None, config).parameters
    exact = oracle.label_values(
        subject.model, subject.adapter.forward, batch, {n: direction[n] for n in names}
    )
    mask = read_batch(batch).mask
    label = Setting("label", scope)
    found = read(subject, rows, direction, [label])[label]
    close(torch.from_numpy(found), exact[mask], float(exact.abs().max()), 1e-11)


@pytest.mark.slow
@pytest.mark.pictures
def test_tables_hold_every_setting_with_its_interval_and_cost() -> None:
    """Costs add up and rise with layers; some values are checked by the oracle on the way."""
    (said,) = (note for note in diagnosed().notes if note.startswith("The exact value was checked"))
    assert 0 < float(said.split("largest distance ")[1].split()[0]) < 1e-9
    layers = {(r["estimator"], r["K"]): r for r in diagnosed().table("layers").records()}
    assert layers.keys() == {(estimator, k) for estimator in ESTIMATORS for k in (1, 2, 3)}
    for record in layers.values():
        assert record["spearman_low"] <= record["spearman"] <= record["spearman_high"]
        parts = float(record["of_a_step"] or 0) + float(record["direction_of_a_step"] or 0)
        assert float(record["cost_in_training_steps"] or 0) == pytest.approx(parts)
    for estimator in ESTIMATORS:
        spent = [float(layers[estimator, k]["of_a_step"] or 0) for k in (1, 2, 3)]
        assert spent[0] > 0
        assert spent == sorted(spent)
    for name in ("depth", "pareto"):
        assert diagnosed().figure(name).data.rows
        assert diagnosed().figure(name).svg.startswith("<svg")


@pytest.mark.slow
def test_the_users_own_setting_is_the_exact_one_or_none_where_it_is() -> None:
    """Over all parameters it is what others are compared with; a walk is compared with nothing."""
    for config, said in (
        (ScorerConfig("label", parameters="all"), "is the exact first-order value, and costs"),
        (ScorerConfig("label"), "Your setting, label, K=3, ranks tokens at"),
        (ScorerConfig("walk"), "Your estimator, walk, is not compared here"),
    ):
        found = diagnostic.diagnose(subject_of(decoder_of(), tokens=60, config=config), QUICK)
        assert said in found.conclusion
        yours = [record for record in found.table("layers").records() if record["yours"]]
        assert len(yours) == (config.estimator == "label" and config.parameters == "linears")


# --- what is tried ----------------------------------------------------------------------------


def test_what_is_tried() -> None:
    """What is asked for, or a spread; the user's own setting always. More is in the doctests."""
    depths = depths_of((), 80, 5)
    assert (depths[0], depths[-1]) == (1, 80)
    assert 5 in depths
    assert len(depths) <= 9
    assert windows_of((), 1, None) == [0, None]
    assert windows_of((5,), 8, 3) == [3, 5, None]


# --- models and input that do not go all the way -------------------------------------------------


@pytest.mark.slow
def test_a_model_with_another_mixer_keeps_what_is_exact_there() -> None:
    subject = subject_of(decoder_of(conv_mixer=True), tokens=60, batch_size=4)
    found = diagnostic.diagnose(subject, QUICK)
    named = {r["estimator"] for r in found.table("layers").records()}
    assert named == {"label", "path"}
    assert sum("left out on this model" in note for note in found.notes) == 3
    assert any("not defined on this model" in note for note in found.notes)


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


@pytest.mark.slow
@nightly
def test_layers_by_index_are_the_users_own() -> None:
    subject = subject_of(
        decoder_of(), tokens=60, batch_size=4, config=ScorerConfig(layers=[0, 2], window=None)
    )
    found = diagnostic.diagnose(subject, replace(QUICK, layers=(1,)))
    assert {(r["K"], r["yours"]) for r in found.table("layers").records()} >= {(2, True)}
