"""The ``value-propagation`` diagnostic: numbers against the oracles, and planted pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from alphatoken import Scorer, ScorerConfig
from alphatoken.data import Example
from alphatoken.diagnose import value_propagation as diagnostic
from alphatoken.diagnose.figures import draw
from alphatoken.diagnose.pairs import (
    PairCounts,
    attention_calls,
    choose_positions,
    pair_counts,
    weigh_pairs,
)
from alphatoken.diagnose.subject import Subject, places_of
from alphatoken.errors import InputError, UnsupportedError
from alphatoken.model.batch import LabelledBatch, read_batch, to_label_position, to_token_index
from alphatoken.oracle import influence
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.property.tolerance import close
from tests.rows import random_rows

pytestmark = pytest.mark.usefixtures("few_draws")

MODEL = 1e-11
TINY = diagnostic.Options(pairs=100_000)


def rows_of(config: DecoderConfig, lengths: Sequence[int], prompt: int = 1) -> list[Example]:
    """Rows of random ids; all but the first ``prompt`` tokens are response."""
    return random_rows(lengths, vocabulary=config.vocabulary, prompt=prompt)


def subject_of(model: nn.Module, rows: Sequence[Example], **changes: object) -> Subject:
    given: dict[str, object] = {
        "config": ScorerConfig(layers="all", window=3),
        "batch_size": 2,
        "tokens": 10_000,
    }
    validation = rows_of(DecoderConfig(), [6, 5])
    return Subject(model, rows, validation, **given | changes)  # type: ignore[arg-type]


def batch_of(subject: Subject, rows: Sequence[Example]) -> LabelledBatch:
    (batch,) = subject.batches(rows, len(rows))
    return read_batch(batch)


structures = st.builds(
    DecoderConfig,
    layers=st.just(2),
    hidden=st.sampled_from([6, 8]),
    heads=st.just(4),
    kv_heads=st.sampled_from([1, 2, 4]),
    value_dim=st.sampled_from([None, 3]),
    norm=st.sampled_from(["rms", "none"]),
    qk_norm=st.booleans(),
    positions=st.sampled_from(["rotary", "learned"]),
    rotary_factor=st.sampled_from([1.0, 1.3]),
    bias=st.booleans(),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
    windows=st.sampled_from([(None,), (3, None)]),
    fused_qkv=st.booleans(),
    transposed=st.booleans(),
    additive_mask=st.booleans(),
)


@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=3),
    prompt=st.integers(1, 3),
    window=st.sampled_from([0, 1, 2, 5, None]),
)
@example(lengths=[2], prompt=1, window=None)
def test_counts_of_pairs_are_exact(lengths: list[int], prompt: int, window: int | None) -> None:
    """n response tokens in a row have sum_i min(W, n - 1 - i) pairs, in each layer and head."""
    lengths = [length + prompt for length in lengths]
    model = ReferenceDecoder(DecoderConfig(heads=4, kv_heads=2), 0)
    subject = subject_of(model, rows_of(model.config, lengths, prompt))
    batch = batch_of(subject, subject.train)
    used = to_label_position(batch.mask)
    wanted = [
        sum(min(n - 1 - i, n if window is None else window) for i in range(n))
        for n in (length - prompt for length in lengths)
    ]
    assert pair_counts(used, window).sum(1).tolist() == wanted
    (chosen,) = choose_positions([used], window, 10**9, 0)
    for _, call, output in attention_calls(subject.adapter, [0, 1], batch):
        alpha, deviation = weigh_pairs(call, output, used, chosen, window)
        assert alpha.shape == deviation.shape == (sum(wanted), 4)


def test_positions_are_drawn_until_the_budget_is_reached() -> None:
    used = torch.ones(4, 20, dtype=torch.bool)
    counts = pair_counts(used, 5)
    (some,) = choose_positions([used], 5, 40, 0)
    assert 30 <= int(counts[some].sum()) <= 40
    assert torch.equal(some, choose_positions([used], 5, 40, 0)[0])
    assert not torch.equal(some, choose_positions([used], 5, 40, 1)[0])
    (one,) = choose_positions([used], 5, 1, 0)
    assert int(one.sum()) >= 1
    (every,) = choose_positions([used], 5, 10**6, 0)
    assert int(every.sum()) == 4 * 19  # the last position has no later one


def parts_of(
    model: ReferenceDecoder, window: int | None = 3, lengths: Sequence[int] = (7, 5)
) -> tuple[Subject, dict[str, dict[str, np.ndarray]], Scorer]:
    subject = subject_of(
        model, rows_of(model.config, lengths), config=ScorerConfig(layers="all", window=window)
    )
    layers = range(len(model.layers))
    scorer = diagnostic.causal_scorer(subject, list(layers))
    return subject, diagnostic.causal_parts(subject, scorer, subject.train), scorer


@pytest.mark.parametrize(
    "config",
    [
        DecoderConfig(layers=3, heads=4, kv_heads=2),
        DecoderConfig(layers=2, qk_norm=True, bias=True, softcap=1.5, sinks=True, windows=(3,)),
    ],
    ids=["plain", "options"],
)
def test_the_parts_add_up_to_the_exact_causal_value(config: DecoderConfig) -> None:
    """Against the influence matrix of the untouched model, layer by layer."""
    model = ReferenceDecoder(config, 3)
    subject, parts, scorer = parts_of(model)
    batch = batch_of(subject, subject.train)
    terms = influence.exact_influence(
        model,
        lambda inputs: model(**inputs),
        {**batch.inputs, "labels": batch.labels},
        {linear.name: linear.module for linear in scorer.scope.linears},
        scorer.direction.adaptation,
    )
    last = config.layers - 1
    for layer in range(config.layers):
        found = parts[str(layer)]
        names = [linear.name for linear in scorer.scope.linears if linear.layer == layer]
        wanted = influence.causal(sum(terms.terms[name] for name in names))
        scale = sum(terms.absolute[name] for name in names).sum(1).max()
        exact = to_token_index(wanted)[batch.mask]
        close(torch.as_tensor(found["exact"]), exact, scale, MODEL, name="exact causal")
        together = sum(found[name] for name in diagnostic.PARTS)
        close(torch.as_tensor(together), exact, scale, MODEL, name="sum of the parts")
        if layer == last:  # nothing comes after it
            close(torch.as_tensor(found["longer"]), torch.zeros_like(exact), scale, MODEL)
        else:
            assert float(np.abs(found["longer"]).max()) > 1e-3 * float(scale)
    value = subject.score(
        Scorer(model, subject.batches(subject.validation), None, subject.config), subject.train
    )["adaptation_causal"]
    close(torch.as_tensor(parts["all"]["window"]), torch.as_tensor(value),
          float(np.abs(value).max()), MODEL, name="what the estimator computes")  # fmt: skip


def silenced(*projections: str, frozen: bool = False) -> ReferenceDecoder:
    """A decoder whose named projections are zero in every layer."""
    model = ReferenceDecoder(DecoderConfig(layers=2, heads=4, kv_heads=2), 5)
    for block in model.layers:
        for name in projections:
            weight = getattr(block.attention, name).weight
            weight.data.zero_()
            weight.requires_grad_(not frozen)
    return model


@pytest.mark.parametrize(
    ("projection", "frozen"), [("q_proj", False), ("k_proj", True)], ids=["W_Q", "frozen W_K"]
)
def test_without_a_score_path_the_same_layer_hop_is_value_propagation(
    projection: str, frozen: bool
) -> None:
    _, parts, _ = parts_of(silenced(projection, frozen=frozen), window=None)
    for found in parts.values():
        scale = float(np.abs(found["window"]).max())
        assert scale > 0
        assert float(np.abs(found["score"]).max()) <= 1e-10 * scale
        assert float(np.abs(found["beyond"]).max()) == 0.0


def test_a_zero_key_projection_that_is_trained_still_has_a_score_part() -> None:
    """The Jacobian's score path is zero, the gradient of W_K is not: it can leave zero."""
    _, parts, _ = parts_of(silenced("k_proj"), window=None)
    last = parts["1"]
    assert float(np.abs(last["score"]).max()) > 1e-3 * float(np.abs(last["window"]).max())


def test_one_response_token_has_no_pairs_and_no_causal_value() -> None:
    model = ReferenceDecoder(DecoderConfig(), 0)
    subject, parts, _ = parts_of(model, lengths=[2] * 9)
    total = parts["all"]
    assert all(float(np.abs(total[name]).max()) == 0.0 for name in (*diagnostic.PARTS, "exact"))
    pairs, share = diagnostic.collect_pairs(subject, subject.train, [0, 1], 100)
    assert (pairs.pairs, share) == (0, 0.0)
    records = diagnostic.share_records(total, places_of(subject.train)[:, 0], "all")
    assert not any(record["signed"].defined for record in records)
    with pytest.raises(InputError, match="no causal-window pair"):
        diagnostic.diagnose(subject, TINY)


def test_shares_add_up_and_keep_their_signs() -> None:
    generator = np.random.default_rng(0)
    parts = {name: generator.normal(size=50) for name in diagnostic.PARTS}
    parts["score"] = -0.5 * parts["window"]  # works against the rest
    parts["exact"] = sum(parts.values())
    rows = np.arange(50) // 5
    records = diagnostic.share_records(parts, rows, "0")
    assert sum(record["signed"].value for record in records) == pytest.approx(1.0)
    by_part = {record["part"]: record for record in records}
    assert by_part["score path"]["signed"].value < 0
    for record in records:
        assert record["signed"].low <= record["signed"].value <= record["signed"].high


def test_layers_that_mix_in_another_way_are_named_and_left_out() -> None:
    config = DecoderConfig(layers=3, conv_mixer=True)
    subject = subject_of(ReferenceDecoder(config, 0), rows_of(config, [9, 8]))
    found = diagnostic.diagnose(subject, TINY)
    assert any("in layers 0, 1" in note for note in found.notes)
    assert any("causal convolution" in note for note in found.notes)
    assert any("No shares for layers 0, 1" in note for note in found.notes)
    assert "shares" not in {table.key for table in found.tables}
    alone = replace(subject, config=ScorerConfig(layers=1))
    with pytest.raises(UnsupportedError, match="no attention weights"):
        diagnostic.diagnose(alone, TINY)


def test_the_density_counts_every_pair_and_leaves_the_model_as_it_was() -> None:
    model = ReferenceDecoder(DecoderConfig(layers=2, heads=2), 0).train()
    subject = subject_of(model, rows_of(model.config, [9, 8]))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    counted, share = diagnostic.collect_pairs(subject, subject.train, [0, 1], 10**6)
    assert share == 1.0
    found = diagnostic.diagnose(subject, TINY)
    drawn = found.figure("density").data.records()
    assert sum(record["pairs"] for record in drawn) == counted.pairs
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.pictures
def test_the_margins_of_the_density_repeat_no_label_of_the_map() -> None:
    """Axes of less than a power of ten have labels between; a margin's would lie over the map."""
    near = np.linspace(0.2, 0.9, 40)
    drawn = draw(diagnostic.density_figure("density", PairCounts.of(near, 50 * near), "The pairs"))
    labels = re.findall(r"<!-- (\$.*?\$) -->", drawn.svg)
    between = [label for label in labels if r"\times" in label]
    assert len(set(between)) > 2
    assert len(set(between)) == len(between)
