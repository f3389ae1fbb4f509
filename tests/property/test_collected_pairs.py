"""Pairs collected during training: counts in fixed cells against counting by hand, and the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alphatoken.errors import ConfigError, DataError
from alphatoken.fidelity import value_propagation as diagnostic
from alphatoken.fidelity.collected_pairs import CollectedPairs, PairCounts
from alphatoken.support.storage import write_tensors
from tests.property import properties_watch as claims
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.property.properties_watch import drawn
from tests.property.test_fidelity_value_propagation import TINY, rows_of, structures, subject_of


@given(st.integers(0, 999), st.integers(0, 40))
@example(0, 0)
def test_every_pair_is_in_its_cell_and_masked_ones_in_none(seed: int, count: int) -> None:
    claims.check_counts_of_pairs(seed, count)


@given(st.integers(0, 999), st.sampled_from([0.001, 0.01, 0.1, 1.0]))
def test_shares_above_powers_of_ten_are_exact(seed: int, level: float) -> None:
    claims.check_shares_above_powers_of_ten(seed, level)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_counts_of_looks_add_up(seeds: list[int]) -> None:
    parts = [drawn(seed, 20) for seed in seeds]
    found = CollectedPairs({}, {n: {3: PairCounts.of(*part)} for n, part in enumerate(parts)})
    whole = PairCounts.of(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    np.testing.assert_array_equal(found.total().joint, whole.joint)
    np.testing.assert_array_equal(found.total().risk, whole.risk)
    assert found.total([0]).pairs == PairCounts.of(*parts[0]).pairs


def collected() -> CollectedPairs:
    about = {"rows": 2, "response_tokens": 9, "window": 3}
    steps = {
        step: {layer: PairCounts.of(*drawn(10 * step + layer, 30)) for layer in (1, 2)}
        for step in (0, 50, 100)
    }
    return CollectedPairs(about, steps)


def test_a_file_comes_back_and_a_resumed_run_drops_what_comes_again(tmp_path: Path) -> None:
    whole, path = collected(), tmp_path / "pairs.safetensors"
    whole.save(path)
    again = CollectedPairs.load(path)
    assert again.about == whole.about
    assert sorted(again.steps) == [0, 50, 100]
    for step, found in whole.steps.items():
        for layer, counts in found.items():
            np.testing.assert_array_equal(again.steps[step][layer].joint, counts.joint)
            np.testing.assert_array_equal(again.steps[step][layer].risk, counts.risk)
    assert sorted(again.after_resuming(99).steps) == [0, 50]
    assert sorted(again.after_resuming(50).steps) == [0, 50]
    again.require_same(whole.about)
    with pytest.raises(ConfigError, match=r"window: 3 then, 4 now"):
        again.require_same({**whole.about, "window": 4})


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
    options = diagnostic.Options(pairs=500, draws=10, collected=str(path))
    found = diagnostic.diagnose(subject, options)
    assert {"density", "density_training", "risk_training"} <= {f.key for f in found.figures}
    trained = [r for r in found.table("risk").records() if r["pairs_of"] == "training"]
    assert {r["pairs"] for r in trained} == {collected().total().pairs}
    assert any("a probe of 2 rows with 9 response tokens" in note for note in found.notes)
    plain = diagnostic.diagnose(subject, TINY)
    assert not {"density_training", "risk_training"} & {f.key for f in plain.figures}


@settings(deadline=None, max_examples=15)
@given(structures, st.integers(0, 99), st.sampled_from([1, 3, None]))
@example(DecoderConfig(fused_qkv=True, transposed=True, bias=True, sinks=True), 1, None)
def test_what_is_collected_are_the_oracles_weights_and_deviations(
    config: DecoderConfig, seed: int, window: int | None
) -> None:
    claims.check_weights_and_deviations_of_pairs(config, seed, window)
