"""Pairs collected during training: counts in fixed cells against counting by hand, and the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alphatoken.diagnose import pairs
from alphatoken.diagnose import value_propagation as diagnostic
from alphatoken.diagnose.pairs import CollectedPairs, PairCounts
from alphatoken.errors import ConfigError, DataError
from alphatoken.model.batch import to_label_position
from alphatoken.model.forward import hidden_of
from alphatoken.model.protocol import find_adapter
from alphatoken.oracle import jacobian
from alphatoken.support.storage import write_tensors
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.property.setups import attention_spec
from tests.property.test_diagnose_value_propagation import (
    MODEL,
    TINY,
    batch_of,
    rows_of,
    structures,
    subject_of,
)
from tests.property.tolerance import close


def drawn(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights in (1e-10, 1], some of them 0, and deviations over twelve powers of ten."""
    generator = np.random.default_rng(seed)
    alpha = 10.0 ** generator.uniform(-10, 0, (count, 2))
    alpha[generator.random((count, 2)) < 0.1] = 0.0
    return alpha, 10.0 ** generator.uniform(-6, 6, (count, 2))


def cell(value: float, edges: np.ndarray) -> int:
    """The cell of one number, by looking through all of them."""
    power = np.log10(value)
    inside = [i for i in range(len(edges) - 1) if edges[i] <= power < edges[i + 1]]
    return inside[0] if inside else (0 if power < edges[0] else len(edges) - 2)


@given(st.integers(0, 999), st.integers(0, 40))
@example(0, 0)
def test_counts_of_pairs(seed: int, count: int) -> None:
    """Every pair is counted in the one cell of its weight and deviation, and of their product.

    Those that a mask hides are counted in none; beyond the ends, in the cell at the end.

    Proves: counts of pairs (exact), against counting one by one.
    """
    alpha, deviation = drawn(seed, count)
    result = pairs.PairCounts.of(alpha, deviation)
    joint, risk = np.zeros_like(result.joint), np.zeros_like(result.risk)
    for a, d in zip(alpha.ravel(), deviation.ravel(), strict=True):
        if a > 0:
            joint[cell(a, pairs.ALPHA), cell(d, pairs.DEVIATION)] += 1
            risk[cell(a * d, pairs.RISK)] += 1
    np.testing.assert_array_equal(result.joint, joint)
    np.testing.assert_array_equal(result.risk, risk)
    assert result.pairs == int((alpha > 0).sum())


@given(st.integers(0, 999), st.sampled_from([0.001, 0.01, 0.1, 1.0]))
def test_shares_above_powers_of_ten(seed: int, level: float) -> None:
    """The share of pairs with weight times deviation at or above a power of ten is exact.

    Proves: shares above powers of ten (exact), against counting one by one.
    """
    alpha, deviation = drawn(seed, 50)
    alpha[0], deviation[0] = 0.5, 2.0 * level * 1.001  # in the first cell that counts
    risk = (alpha * deviation)[alpha > 0]
    result = pairs.PairCounts.of(alpha, deviation).share_above(level)
    assert result == (risk >= level).mean()


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_counts_of_looks_add_up(seeds: list[int]) -> None:
    parts = [drawn(seed, 20) for seed in seeds]
    result = CollectedPairs({}, {n: {3: PairCounts.of(*part)} for n, part in enumerate(parts)})
    whole = PairCounts.of(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    np.testing.assert_array_equal(result.total().joint, whole.joint)
    np.testing.assert_array_equal(result.total().risk, whole.risk)
    assert result.total([0]).pairs == PairCounts.of(*parts[0]).pairs


def collected() -> CollectedPairs:
    about = {"rows": 2, "response_tokens": 9, "window": 3}
    steps = {
        step: {layer: PairCounts.of(*drawn(10 * step + layer, 30)) for layer in (1, 2)}
        for step in (0, 50, 100)
    }
    return CollectedPairs(about, steps)


def test_a_file_comes_back(tmp_path: Path) -> None:
    whole, path = collected(), tmp_path / "pairs.safetensors"
    whole.save(path)
    again = CollectedPairs.load(path)
    assert again.about == whole.about
    assert sorted(again.steps) == [0, 50, 100]
    for step, result in whole.steps.items():
        for layer, counts in result.items():
            np.testing.assert_array_equal(again.steps[step][layer].joint, counts.joint)
            np.testing.assert_array_equal(again.steps[step][layer].risk, counts.risk)


def test_a_file_of_another_kind_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pairs.safetensors"
    write_tensors(path, {"x": torch.zeros(2)}, {"kind": "another"})
    with pytest.raises(DataError, match="holds no collected pairs"):
        CollectedPairs.load(path)
    collected().save(path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError):
        CollectedPairs.load(path)
    with pytest.raises(ConfigError, match="no file of collected pairs"):
        diagnostic.Options(collected=str(tmp_path / "nowhere"))


def test_the_picture_shows_every_pair_and_the_shares_of_each_step() -> None:
    whole = collected()
    records = diagnostic.training_records(whole)
    assert [(r["step"], r["level"]) for r in records] == [
        (step, level) for step in (0, 50, 100) for level in diagnostic.LEVELS
    ]
    for record in records:
        assert record["share"] == whole.total([record["step"]]).share_above(record["level"])
    density, steps = (one.table for one in diagnostic.training_figures(whole))
    cells = density.records()
    assert sum(c["pairs"] for c in cells) == whole.total().pairs
    heavy = sum(c["pairs"] for c in cells if c["alpha_from"] * c["deviation_from"] >= 0.1)
    assert heavy / whole.total().pairs <= whole.total().share_above(0.1)
    assert steps.records() == records


def test_the_diagnostic_draws_a_file_beside_the_models_own_pairs(tmp_path: Path) -> None:
    path = tmp_path / "pairs.safetensors"
    collected().save(path)
    model = ReferenceDecoder(DecoderConfig(layers=2, heads=4, kv_heads=2), 5)
    subject = subject_of(model, rows_of(model.config, [7, 6]))
    options = diagnostic.Options(pairs=500, collected=str(path))
    result = diagnostic.diagnose(subject, options)
    assert {"density", "density_training", "risk_training"} <= {f.key for f in result.figures}
    assert any("a probe of 2 rows with 9 response tokens" in note for note in result.notes)
    plain = diagnostic.diagnose(subject, TINY)
    assert not {"density_training", "risk_training"} & {f.key for f in plain.figures}


@settings(deadline=None, max_examples=15)
@given(structures, st.integers(0, 99), st.sampled_from([1, 3, None]))
@example(DecoderConfig(fused_qkv=True, transposed=True, bias=True, sinks=True), 1, None)
def test_weights_and_deviations_of_pairs(
    config: DecoderConfig, seed: int, window: int | None
) -> None:
    """What a callback collects are alpha_{t->k} and ||v_t - o_k||_2 / sqrt(d_v) of each pair.

    Of the pairs t < k <= t + W of response tokens, each once, in a forward without a graph.

    Proves: weights and deviations of pairs (exact), against ``attend``.
    """
    model = ReferenceDecoder(config, seed)
    subject = subject_of(model, rows_of(config, [6, 4]))
    batch = batch_of(subject, subject.train)
    used = to_label_position(batch.mask)
    read: list[torch.Tensor] = []
    hooks = [
        block.attention.register_forward_pre_hook(
            lambda module, args, kwargs: read.append(hidden_of(args, kwargs)), with_kwargs=True
        )
        for block in model.layers
    ]
    calls = pairs.attention_calls(find_adapter(model), [0, 1], batch)
    for hook in hooks:
        hook.remove()
    assert [layer for layer, _, _ in calls] == [0, 1]
    for (layer, call, output), hidden in zip(calls, read, strict=True):
        assert not output.requires_grad
        alpha, deviation = pairs.weigh_pairs(call, output, used, used, window)
        wanted = []
        for row, length in enumerate((6, 4)):
            state = jacobian.attend(attention_spec(model, layer, length), hidden[row, :length])
            last = length - 2  # predicts the last token
            value = state.value.repeat_interleave(len(state.alpha) // len(state.value), 0)
            for k in range(last + 1):
                for t in range(k):
                    near = window is None or k <= t + window
                    if near and float(state.alpha[:, k, t].sum()) > 0:
                        away = (value[:, t] - state.output[:, k]).norm(dim=-1)
                        wanted.append((state.alpha[:, k, t], away / value.shape[-1] ** 0.5))
        assert len(alpha) == len(wanted)
        for name, actual, column in (("alpha", alpha, 0), ("deviation", deviation, 1)):
            expected = torch.stack([one[column] for one in wanted]) if wanted else None
            if expected is not None:
                # Rows by (batch row, k, t) there, by block of queries here: both sorted alike.
                order = (np.lexsort(one.T[::-1]) for one in (actual, expected.numpy()))
                mine, theirs = (
                    torch.as_tensor(x)[torch.as_tensor(i)]
                    for x, i in zip((actual, expected), order, strict=True)
                )
                close(mine, theirs, theirs.max() + 1.0, MODEL, name=name)
