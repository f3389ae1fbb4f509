"""Adapters on weights of four and eight bits (QLoRA): ratio 1 is TRL's step, values are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTTrainer

from alphatoken import Scorer, ScorerConfig
from alphatoken.errors import ModelError, UnsupportedError
from tests.integration import tiny_training as tiny

pytest.importorskip("bitsandbytes", reason="quantised models need bitsandbytes")
pytestmark = pytest.mark.filterwarnings("default")  # bitsandbytes has its own

BITS = {
    4: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    8: BitsAndBytesConfig(load_in_8bit=True),
}


def load(folder: Path, bits: int) -> Any:
    if not (folder / "model").exists():
        tiny.model(layers=2).save_pretrained(folder / "model")
    given = {"quantization_config": BITS[bits], "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(folder / "model", **given)


def sft(folder: Path, bits: int, **more: Any) -> Any:
    torch.manual_seed(7)  # of the adapters
    return tiny.sft(folder / "ours", model=load(folder, bits), peft=True, **more)


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_ratio_one_equals_trl(tmp_path: Path, bits: int) -> None:
    """A Fisher's forwards without gradients come first: bitsandbytes packs 4-bit weights there."""
    few = {"max_steps": 3}
    ours = sft(tmp_path, bits, keep_ratio=1.0, **few)
    torch.manual_seed(7)
    given = {"model": load(tmp_path, bits), **few}
    theirs = tiny.made(SFTTrainer, tmp_path / "trl", peft=True, **given)
    ours.train()
    theirs.train()
    trained = {n: p for n, p in theirs.model.named_parameters() if p.requires_grad}
    own = dict(ours.model.named_parameters())
    assert all(torch.equal(own[name], weight) for name, weight in trained.items())


def test_tangents_of_eight_bits_are_refused(tmp_path: Path) -> None:
    """bitsandbytes' product of eight bits has none."""
    trainer = sft(tmp_path, 8, retention="none", estimator="label")
    with pytest.raises(UnsupportedError, match="without forward mode"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_a_preconditioner_trains(tmp_path: Path, bits: int) -> None:
    trainer = sft(tmp_path, bits, retention="none", preconditioner="full", max_steps=2)
    trainer.train()
    assert 0.4 < trainer.state.log_history[0]["alpha/kept_share"] < 0.6


@pytest.mark.slow
def test_pairs_train(tmp_path: Path) -> None:
    given = {"model": load(tmp_path, 4), "peft": True, "max_steps": 2}
    trainer = tiny.dpo(tmp_path, retention="none", **given)
    trainer.train()
    assert "alpha/kept_share" in trainer.state.log_history[0]


def test_values_are_those_of_one_backward_a_token(tmp_path: Path) -> None:
    from peft import get_peft_model

    made = get_peft_model(load(tmp_path, 4), tiny.lora())
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_B" in name:  # at zero, half of the gradient would be
                weight.normal_(std=0.1)
    ids = torch.randint(4, 30, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone()}
    validation = {name: tensor.flip(-1) for name, tensor in batch.items()}
    found = Scorer(made, validation, None, ScorerConfig(estimator="label", layers=2)).score(batch)

    weights = [p for p in made.parameters() if p.requires_grad]

    def losses(given: Any) -> torch.Tensor:
        logits = made(input_ids=given["input_ids"]).logits[:, :-1].float()
        own = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), given["labels"][:, 1:].flatten(), reduction="none"
        )
        return own.view(len(ids), -1)

    wanted = torch.autograd.grad(losses(validation).mean(), weights)
    for row in range(2):
        for token in range(1, 9):
            own = torch.autograd.grad(losses(batch)[row, token - 1], weights)
            value = sum(float((a * b).sum()) for a, b in zip(wanted, own, strict=True))
            assert float(found.total[row, token]) == pytest.approx(value, rel=1e-3, abs=1e-6)


def test_weights_that_were_packed_before_are_refused(tmp_path: Path) -> None:
    made = load(tmp_path, 4).eval()
    states = [
        getattr(m.weight, "quant_state", None) for m in made.modules() if hasattr(m, "weight")
    ]
    for state in filter(None, states):
        state.packing_format_for_cpu = True
    with pytest.raises(ModelError, match="load the model anew"):
        Scorer(made, {"input_ids": torch.ones(1, 4, dtype=torch.long)}, None, ScorerConfig())
