"""Arithmetic: values as the scorer has them in each, numbers by hand, planted rounding."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from alphatoken.config import ScorerConfig
from alphatoken.diagnose import arithmetic
from alphatoken.diagnose.arithmetic import Options, redrawn_changes
from alphatoken.diagnose.diagnosis import Diagnosis
from alphatoken.diagnose.subject import Subject
from alphatoken.diagnose.valuing import keep_shares, recombined
from alphatoken.direction.drift import FisherDrift
from alphatoken.errors import AlphaTokenWarning
from alphatoken.scorer import Scorer
from tests.property.test_diagnose_stability import planted, rows_of
from tests.property.test_differences import llama

pytestmark = pytest.mark.usefixtures("few_draws")
FEW = Options(resamples=50)
AUTOCAST, WEIGHTS = "bfloat16 autocast", "bfloat16 weights"


def subject(model: nn.Module, estimator: str = "direct", **changes: Any) -> Subject:
    """Nine rows of random tokens, valued against eight."""
    lengths = np.random.default_rng(5).integers(2, 7, (9, 2)).tolist()
    given: dict[str, Any] = {
        "model": model,
        "train": rows_of(lengths, 0, 64),
        "validation": rows_of([(2, 4), (3, 2)] * 4, 1, 64),
        "batch_size": 5,
        "config": ScorerConfig(estimator, layers=1, objective="adaptation"),
    }
    return Subject(**given | changes)


def records_of(found: Diagnosis) -> dict[Any, dict[str, Any]]:
    return {record["arithmetic"]: record for record in found.table("arithmetics").records()}


def redrawn_of(found: Diagnosis) -> Any:
    (record,) = found.table("other-rows").records()
    return record["decisions_changed"]


def columns_of(found: Diagnosis, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Values in float32, and in the arithmetic of this name."""
    tokens = found.figure("arithmetic-ranks").data.records()
    own = [record for record in tokens if record["arithmetic"] == name]
    wide, narrow = (np.array([r[key] for r in own]) for key in ("value in float32", "value"))
    return wide, narrow


def loaded(folder: str, dtype: torch.dtype) -> nn.Module:
    """The saved model as transformers loads it: its tables of angles are never rounded."""
    from transformers import AutoModelForCausalLM

    found: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return found.eval()


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["alphatoken", pytest.param("label", marks=pytest.mark.slow)])
def test_each_arithmetic_has_the_scorers_values(estimator: str) -> None:
    """Values beside float32 are those of a scorer under autocast, and of one of the model in it.

    Proves: each arithmetic has the scorers values (exact), against a scorer under autocast, a model
    loaded in 16 bits.
    """
    one = subject(llama(), estimator)
    found = arithmetic.diagnose(one, FEW)
    with tempfile.TemporaryDirectory() as folder:
        one.model.save_pretrained(folder)  # type: ignore[operator]
        wide, narrow = loaded(folder, torch.float32), loaded(folder, torch.bfloat16)

    def plain(model: nn.Module, *, autocast: bool = False) -> np.ndarray:
        scorer = Scorer(model, one.batches(one.validation), None, one.config)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return one.score(scorer, one.train)["total"]

    for name, values in ((AUTOCAST, plain(wide, autocast=True)), (WEIGHTS, plain(narrow))):
        own, other = columns_of(found, name)
        scale = np.abs(values).max()
        assert np.abs(own - plain(wide)).max() <= 1e-6 * scale
        assert np.abs(other - values).max() <= 1e-6 * scale
        assert np.abs(other - own).max() > 1e-4 * scale


def test_a_model_that_has_not_moved_drifts_in_no_arithmetic() -> None:
    """Reference weights are rounded as the model's are, so that rounding is taken for no drift.

    Proves: a model that has not moved drifts in no arithmetic (exact), against values without
    retention.
    """
    plain = subject(llama())
    names = Scorer(plain.model, plain.batches(plain.validation), None, plain.config).parameters
    weights = {name: weight.detach().clone() for name, weight in names.items()}
    fisher = FisherDrift({name: torch.ones_like(w) for name, w in weights.items()}, weights)
    config = replace(plain.config, objective="both", stability_weight=1e3)
    both = replace(plain, fisher=fisher, config=config)
    with warnings.catch_warnings():  # a drift that is rounding is warned of, and would be one here
        warnings.simplefilter("ignore", AlphaTokenWarning)
        found = [columns_of(arithmetic.diagnose(x, FEW), WEIGHTS)[1] for x in (plain, both)]
    assert np.array_equal(*found)


# --- numbers -------------------------------------------------------------------------------------


def test_the_four_numbers_by_hand() -> None:
    """The numbers of each arithmetic, by loops over the values side by side.

    Proves: the four numbers by hand (exact), against loops.
    """
    found = arithmetic.diagnose(subject(llama(), ratio=0.3), FEW)
    for name in (AUTOCAST, WEIGHTS):
        record = records_of(found)[name]
        v, w = columns_of(found, name)
        count = len(v)
        order, other = (sorted(range(count), key=lambda k, x=x: -x[k]) for x in (v, w))
        gaps = sum((order.index(k) - other.index(k)) ** 2 for k in range(count))
        keeps = -(-3 * count // 10)
        changed = {*order[:keeps]} ^ {*other[:keeps]}
        signs = sum((v[k] > 0) != (w[k] > 0) for k in range(count))
        error = sum((v - w) ** 2) ** 0.5 / sum(v**2) ** 0.5
        wanted = {
            "spearman": 1 - 6 * gaps / (count * (count**2 - 1)),
            "relative_error": error,
            "decisions_changed": len(changed) / count,
            "signs_changed": signs / count,
        }
        assert {key: record[key] for key in wanted} == pytest.approx(wanted, rel=1e-12)


def test_what_other_rows_change_is_counted_draw_by_draw() -> None:
    """The yardstick is the mean share of decisions that a draw of the validation rows reverses.

    Proves: what other rows change is counted draw by draw (exact), against loops over draws.
    """
    columns, ratio, seed = planted(near=30), 0.4, 3
    (sums, tokens), rest = columns, np.linspace(0, 3, 110)
    rows = len(tokens)
    share = keep_shares(columns, rest, ratio, 60, seed=seed)

    def keeps(weights: np.ndarray) -> set[int]:
        values = sums @ weights / (weights @ tokens) + rest
        return {*sorted(range(110), key=lambda k: -values[k])[:44]}

    own, generator = keeps(np.ones(rows)), np.random.default_rng(seed)
    draws = generator.multinomial(rows, np.full(rows, 1 / rows), size=60)
    wanted = np.mean([len(keeps(weights) ^ own) / 110 for weights in draws])
    assert wanted > 0.01
    truth = recombined(columns, np.ones(rows)) + rest
    assert redrawn_changes(truth, share, ratio).mean() == pytest.approx(wanted)


# --- the verdict ---------------------------------------------------------------------------------


def crude(changed: Callable[[Tensor], Tensor]) -> nn.Module:
    """A model whose embeddings become others where they are in 16 bits."""
    model = llama()
    model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, out: changed(out) if out.dtype == torch.bfloat16 else out
    )
    return model


def test_planted_rounding_turns_the_verdict() -> None:
    """An arithmetic is good enough exactly where it changes fewer decisions than other rows do.

    Proves: planted rounding turns the verdict (exact), against planted rounding.
    """
    fine = arithmetic.diagnose(subject(llama()))
    assert f"good enough with {AUTOCAST} and {WEIGHTS}: " in fine.conclusion
    found = arithmetic.diagnose(subject(crude(lambda out: torch.sin(999 * out.float()).to(out))))
    assert f"good enough with {AUTOCAST}, but not with {WEIGHTS}: " in found.conclusion
    records = records_of(found)
    redrawn = redrawn_of(found)
    assert records[AUTOCAST]["decisions_changed"] < redrawn < records[WEIGHTS]["decisions_changed"]
    assert [r["good_enough"] for r in records.values()] == [None, True, False]
    assert f"{100 * redrawn:.0f} % [" in found.conclusion.rpartition("and ")[2]


def test_beside_equal_validation_rows_only_what_changes_nothing_is_good_enough() -> None:
    row = rows_of([(2, 4)], 1, 64)
    one = subject(crude(lambda out: torch.sin(999 * out.float()).to(out)), validation=row * 16)
    found = arithmetic.diagnose(one, FEW)
    assert redrawn_of(found) == 0
    for record in records_of(found).values():
        assert record["good_enough"] in (None, record["decisions_changed"] == 0)


def test_an_arithmetic_without_values_is_left_out() -> None:
    found = arithmetic.diagnose(subject(crude(lambda out: out * torch.inf)), FEW)
    assert list(records_of(found)) == ["float32", AUTOCAST]
    assert any(note.startswith(f"There are no values with {WEIGHTS}: ") for note in found.notes)


# --- what is tried -------------------------------------------------------------------------------


def test_weights_loaded_in_16_bits_are_cast_up_and_stay() -> None:
    model = llama().bfloat16()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found = arithmetic.diagnose(subject(model), FEW)
    assert [n for n, r in records_of(found).items() if r["yours"]] == [WEIGHTS]
    assert any("loaded in bfloat16 and cast to float32" in note for note in found.notes)
    assert all(
        weight.dtype == torch.bfloat16 and torch.equal(before[name], weight)
        for name, weight in model.state_dict().items()
    )
    own, _ = columns_of(found, WEIGHTS)
    wide = columns_of(arithmetic.diagnose(subject(model.float()), FEW), WEIGHTS)[0]
    assert np.allclose(own, wide, rtol=1e-5)


def test_a_cpu_has_no_tf32_and_the_process_stays_as_it_was() -> None:
    names = set(arithmetic._tried("cuda", {torch.float32}))
    assert names - set(arithmetic._tried("cpu", {torch.float32})) == {"TF32", "float16 weights"}
    assert "float16 weights" in arithmetic._tried("cpu", {torch.float16})
    before = torch.get_float32_matmul_precision()
    with arithmetic.rounded("cpu", autocast=True, tf32=True):
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.is_autocast_enabled("cpu")
    assert torch.get_float32_matmul_precision() == before
    assert not torch.is_autocast_enabled("cpu")
