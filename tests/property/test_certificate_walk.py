"""The certificate of values along a walk: right code passes, and every fault of a walk is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis.strategies import booleans, integers, sampled_from
from torch import nn

from alphatoken import PreferenceBatch, Scorer, ScorerConfig
from alphatoken.direction.inputs import DirectionInputs
from alphatoken.estimate import walk as walks
from alphatoken.estimate.walk import Walk
from alphatoken.model.protocol import find_adapter
from alphatoken.values import Certificate, TokenValues
from tests.property.profiles import budget
from tests.property.setups import Setup, bits, quiet, setups, unchanged
from tests.property.strategies import CASE, ONE, PADDED, SHARED, TIED
from tests.property.test_differences import llama
from tests.property.test_differences import rows_of as token_rows

RATE = 1e-2


def certified(scorer: Scorer, batch: Any, **more: Any) -> Certificate:
    with quiet():
        return scorer.verify(batch, progress=False, **more)


def config(**options: Any) -> ScorerConfig:
    return ScorerConfig("walk", **{"walk_steps": 3, "walk_learning_rate": RATE, **options})


@given(setups(), integers(1, 4), sampled_from(["one_sided", "central"]), booleans())
@example(Setup(CASE), 3, "one_sided", True)
@example(Setup(PADDED), 2, "central", False)
@example(Setup(SHARED), 2, "one_sided", False)
@example(Setup(TIED), 2, "central", True)
@budget(0.2, least=6)
def test_right_walks_agree(setup: Setup, steps: int, form: str, weighted: bool) -> None:
    """Every response token, of any weights; the model is as it was.

    Proves: the certificate of a walk (exact), against values of right code.
    """
    model, batch = setup.case.model(), setup.case.batch
    before, more = bits(model), {}
    if weighted:
        count = batch["labels"].numel()
        weights = torch.linspace(-1.0, 2.0, count, dtype=torch.float64)
        more = {"token_weights": weights.view(batch["labels"].shape)}
    options = config(walk_steps=steps, walk_form=form)
    certificate = certified(Scorer(model, setup.case.validation, config=options), batch, **more)
    assert certificate.passed, certificate
    assert certificate.error < 1e-2 * certificate.tolerance
    assert certificate.compared == certificate.batch_tokens > 0
    assert unchanged(model, before)


def pairs() -> PreferenceBatch:
    chosen, rejected = ONE.batch, {**ONE.batch, "input_ids": ONE.batch["input_ids"].flip(0)}
    labels = ONE.batch["labels"]
    rejected["labels"] = torch.where(labels == -100, labels, rejected["input_ids"])
    zeros = torch.zeros(len(labels), dtype=torch.float64)
    return PreferenceBatch(chosen, rejected, zeros, zeros, beta=0.3)


def test_a_walk_on_pairs_agrees() -> None:
    assert certified(Scorer(ONE.model(), pairs(), config=config()), ONE.batch).passed


def test_values_to_a_second_model_agree() -> None:
    other = ONE.model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01)
    scorer = Scorer(ONE.model(), None, config=ScorerConfig("walk"), reference=other)
    assert certified(scorer, ONE.batch).passed


def test_a_walk_by_an_adapter_of_the_users_own_agrees() -> None:
    """The copy is read by that adapter, on the copy's own modules."""
    model = ONE.model()
    adapter = find_adapter(model)
    scorer = Scorer(model, ONE.validation, config=config(), adapter=adapter)
    certificate = certified(scorer, ONE.batch)
    assert certificate.passed, certificate
    assert adapter.model is model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_walks_of_narrow_weights_agree(dtype: torch.dtype) -> None:
    """Weights in 16 bits step in float32 on both sides."""
    scorer = Scorer(llama().to(dtype), token_rows(1, rows=3), config=config(walk_steps=8))
    certificate = certified(scorer, token_rows(2, rows=3))
    assert certificate.passed, certificate
    assert certificate.arithmetic == str(dtype).removeprefix("torch.")


def test_a_walk_of_factors_agrees() -> None:
    peft = pytest.importorskip("peft")
    chosen = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), chosen)
    scorer = Scorer(model, token_rows(1, rows=3), config=config())
    assert certified(scorer, token_rows(2, rows=3)).passed


# --- faults ---------------------------------------------------------------------------------------


def other_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    adamw = torch.optim.AdamW
    monkeypatch.setattr(walks, "partial", lambda _, lr, **more: partial(adamw, lr=1.001 * lr))


def one_step_less(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = walks.walk

    def shorter(model: nn.Module, names: Any, gradient: Any, steps: int, *rest: Any) -> Any:
        return whole(model, names, gradient, steps - 1, *rest)

    monkeypatch.setattr(walks, "walk", shorter)


def always_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    step = DirectionInputs.gradient_of_step
    monkeypatch.setattr(DirectionInputs, "gradient_of_step", lambda self, number: step(self, 0))


def changed(change: Callable[[TokenValues], TokenValues], monkeypatch: pytest.MonkeyPatch) -> None:
    values = Walk._values
    monkeypatch.setattr(Walk, "_values", lambda self, *a, **k: change(values(self, *a, **k)))


def sign(values: TokenValues) -> TokenValues:
    return replace(values, total=-values.total)


def one_token(values: TokenValues) -> TokenValues:
    """Of the last response token, by a part in a million of a nat."""
    total = values.total.clone()
    total[tuple(values.mask.nonzero()[-1])] += 1e-6
    return replace(values, total=total)


FAULTS = {
    "another rate": other_rate,
    "one step less": one_step_less,
    "the first batch in every step": always_the_first_batch,
    "the other sign": partial(changed, sign),
    "one token": partial(changed, one_token),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_walk_does_not_agree(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves: the certificate of a walk (exact), against faults that it must name."""
    FAULTS[fault](monkeypatch)
    certificate = certified(Scorer(CASE.model(), CASE.validation, config=config()), CASE.batch)
    assert not certificate.passed
    assert "total" in {check.component for check in certificate.failures}
    assert "DOES NOT AGREE with a copy that plain PyTorch trained" in str(certificate)


@pytest.mark.parametrize("fault", ["another rate", "the other sign"])
def test_a_fault_in_float32_does_not_agree(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounding may add is measured, and is far below a thousandth of the rate.

    Proves: the certificate of a walk (exact), against faults that it must name.
    """
    FAULTS[fault](monkeypatch)
    scorer = Scorer(llama(), token_rows(1, rows=3), config=config(walk_steps=8))
    certificate = certified(scorer, token_rows(2, rows=3))
    assert not certificate.passed, certificate
