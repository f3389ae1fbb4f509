"""Real language models of 135 and 268 million parameters: scored, observed, trained, diagnosed.

SmolLM2-135M-Instruct, and in the nightly profile Gemma 3 270M (sliding window, norms of queries and
keys, no chat template), their four-bit weights dequantised to float32. What is exact elsewhere must
hold here to the rounding of float32. Rows are few and short: a token costs 0.3 GFLOP a pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alphatoken import Scorer, ScorerConfig, masked_sft_loss
from alphatoken.data import EncodeOptions, Example, Row, Turn, collate, encode_rows
from tests.places import nightly

pytestmark = [
    # PyTorch's own forward-mode rules are scripted when the first of them is used.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:The adaptation side alone decides"),
]


SAID = [
    ("Name three birds.", "A wren, a robin and a common blackbird, all of which live in gardens."),
    ("What is 2 + 3, doubled?", "Two and three are five, and twice five is ten."),
    ("What is rain?", "Water that falls in drops from the clouds."),
    ("Where is Oslo?", "In the south of Norway, at the end of a long fjord."),
    ("Who wrote Hamlet?", "William Shakespeare, in about the year 1600."),
    ("How does one count to five?", "One, two, three, four, five."),
]
"""Question and answer; the answer to the next question is a wrong one."""
MODELS = [
    pytest.param("smollm2", marks=pytest.mark.smollm2),
    pytest.param("gemma3", marks=[pytest.mark.gemma3, pytest.mark.slow, nightly]),
]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest) -> Path:
    """Of a real model that `make models` has put there."""
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Any]:
    """Shared by the tests that change nothing in it, which the last line sees."""
    found = load(folder)
    before = found.lm_head.weight[:64].clone()
    yield found
    assert torch.equal(found.lm_head.weight[:64], before)
    assert all(p.grad is None for p in found.parameters())


@pytest.fixture(scope="module")
def examples(tokenizer: Any) -> list[Example]:
    """Without the model's chat template, which adds as many tokens again."""
    rows = [
        Row(i, f"row {i}", (Turn("user", asked), Turn("assistant", said)))
        for i, (asked, said) in enumerate(SAID)
    ]
    return encode_rows(rows, tokenizer, EncodeOptions(chat_template=False))[0]


def relative(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest entry."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def gradient(model: Any, batch: dict[str, Tensor], *, mean: bool) -> list[Tensor]:
    """Of the response tokens' loss, by autograd, in the linears of the last layer."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    keep = batch["labels"] != -100
    loss = masked_sft_loss(logits, batch["labels"], keep, normalization="sum")
    weights = [p for p in model.model.layers[-1].parameters() if p.dim() == 2]
    return list(torch.autograd.grad(loss / keep[:, 1:].sum() if mean else loss, weights))


def test_score_splits_and_totals(model: Any, examples: list[Example]) -> None:
    """Components add up; label values add up to autograd's own inner product of two gradients."""
    batch, validation = collate(examples[:2]), collate(examples[2:4])
    scorer = Scorer(model, validation, config=ScorerConfig(layers=1))
    ours = scorer.score(batch)
    label = Scorer(model, validation, config=ScorerConfig("label", layers=1)).score(batch)
    parts = ours.adaptation_direct + ours.adaptation_causal
    assert relative(parts, ours.total) < 1e-5
    assert not ours.total[~ours.mask].any()
    assert torch.isfinite(ours.total).all()
    pairs = zip(
        gradient(model, batch, mean=False), gradient(model, validation, mean=True), strict=True
    )
    wanted = sum(float((a.double() * b.double()).sum()) for a, b in pairs)
    scale = float(label.total.abs().double().sum())
    assert float(label.total.double().sum()) == pytest.approx(wanted, abs=1e-5 * scale)
    alone = scorer.score(collate(examples[1:2]))
    width = alone.total.shape[1]
    assert relative(ours.total[1:, :width], alone.total) < 1e-3  # padding and company do nothing


@pytest.mark.slow
@nightly
def test_label_over_all_parameters_is_one_backward_a_token(model: Any, tokenizer: Any) -> None:
    """Chat rows hold the padding token, whose embedding the backward gives nothing."""
    texts = ("Name a bird.", "A wren."), ("3 + 3?", "6")
    given = [
        Row(i, f"r{i}", (Turn("system", "-"), Turn("user", asked), Turn("assistant", said)))
        for i, (asked, said) in enumerate(texts)
    ]
    (own, held), _ = encode_rows(given, tokenizer)
    config = ScorerConfig("label", parameters="all", derivative="forward_mode")
    values = Scorer(model, collate([held]), config=config).score(collate([own])).total[0]
    moved = Scorer(model, collate([held]), config=replace(config, derivative="auto"))
    differences = moved.score(collate([own]))
    assert differences.derivative == "central"
    away = float((differences.total[0] - values).norm() / values.norm())
    assert away <= min(3 * differences.error, 5e-3)
    weights = list(model.parameters())

    def gradients(batch: dict[str, Tensor], *places: int) -> list[Tensor]:
        """Of the mean loss of the labels at these places."""
        logits = model(batch["input_ids"]).logits[0, [i - 1 for i in places]]
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"][0, list(places)])
        return list(torch.autograd.grad(loss, weights))

    def labelled(batch: dict[str, Tensor]) -> list[int]:
        return batch["labels"][0].ne(-100).nonzero().flatten().tolist()

    # Gemma's activations are large: forward mode rounds to 1.8e-4 in float32. In float64 both agree
    # to 6e-9 there.
    allowed = 3e-4 if "gemma" in model.config.model_type else 1e-4
    batch, validation = collate([own]), collate([held])
    mean = gradients(validation, *labelled(validation))
    for i in labelled(batch)[:2]:
        terms = [(g * m).double() for g, m in zip(gradients(batch, i), mean, strict=True)]
        wanted = sum(float(t.sum()) for t in terms)
        absolute = sum(float(t.abs().sum()) for t in terms)
        assert float(values[i]) == pytest.approx(wanted, abs=allowed * absolute)


STEP = {
    "per_device_train_batch_size": 2, "max_steps": 1, "learning_rate": 1e-4, "layers": "1",
    "validation_batch_size": 2, "retention": "none", "held_out_share": 0.0,
    "gradient_checkpointing": False,
}  # fmt: skip


def logged(trainer: Any, key: str) -> float:
    (found,) = [entry[key] for entry in trainer.state.log_history if key in entry]
    return float(found)


@pytest.mark.slow
def test_one_step_of_sft(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    from datasets import Dataset

    from alphatoken.train import AlphaSFTTrainer
    from tests.integration.tiny_training import made

    data = Dataset.from_list([{"prompt": asked, "completion": said} for asked, said in SAID])
    model = load(folder)
    before = {n: p.detach().clone() for n, p in model.model.layers[-1].named_parameters()}
    given = {"train_dataset": data.select(range(2)), "validation_dataset": data.select(range(2, 4))}
    options = {"optim": "sgd", "max_length": 80, **STEP, **given}
    trainer = made(AlphaSFTTrainer, tmp_path, model=model, processing_class=tokenizer, **options)
    trainer.train()
    assert logged(trainer, "alpha/kept_share") == pytest.approx(0.5, abs=0.02)
    assert 0 < logged(trainer, "loss") < 6
    moved = {n for n, p in model.model.layers[-1].named_parameters() if not p.equal(before[n])}
    # A gain of a norm may be too large for one small step to show in float32.
    assert moved >= {name for name, p in before.items() if p.dim() == 2}


@pytest.mark.slow
def test_one_step_of_dpo_with_adapters(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Policy and reference are one model before the first step: the loss is log 2."""
    from datasets import Dataset
    from peft import LoraConfig

    from alphatoken.train import AlphaDPOTrainer
    from tests.integration.tiny_training import made

    data = Dataset.from_list(
        [
            {"prompt": asked, "chosen": said, "rejected": other}
            for (asked, said), (_, other) in pairwise(SAID)
        ]
    )
    model = load(folder)
    before = model.model.layers[-1].self_attn.q_proj.weight.detach().clone()
    given = {"train_dataset": data.select(range(2)), "validation_dataset": data.select(range(2, 4))}
    given["peft_config"] = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]
    )
    options = {"max_length": 160, **STEP, **given}
    trainer = made(AlphaDPOTrainer, tmp_path, model=model, processing_class=tokenizer, **options)
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx(math.log(2), abs=1e-4)
    assert logged(trainer, "alpha/kept_share") == pytest.approx(0.5, abs=0.02)
    last = trainer.model.base_model.model.model.layers[-1].self_attn.q_proj
    assert torch.equal(last.base_layer.weight, before)
    assert last.lora_B["default"].weight.abs().max() > 0
