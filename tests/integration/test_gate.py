"""What a step leaves undone: the head's gradient while scoring, components that nobody reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereConfig, CohereForCausalLM, PhiConfig, PhiForCausalLM
from trl.trainer.utils import add_fused_lm_head

from alphatoken.scorer import Observed
from alphatoken.train.gate import TokenGate
from tests.integration import tiny_training as tiny
from tests.integration.snapshot import bits
from tests.integration.test_trainers import dpo, sft
from tests.property.architectures import BY_NAME, VOCABULARY
from tests.property.strategies import make_batch

BATCH = make_batch(("pprrprr.", "prprrrrr"), vocabulary=VOCABULARY, seed=1)
WIDTHS = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def _of(name: str) -> Any:
    """A model with TRL's fused head: plain, soft-capped and tied, scaled, with a bias."""
    torch.manual_seed(4)
    if name == "scaled":
        built: Any = CohereForCausalLM(CohereConfig(**WIDTHS, logit_scale=0.3))
    elif name == "biased":
        built = PhiForCausalLM(PhiConfig(**WIDTHS))
        nn.init.normal_(built.lm_head.bias)
    else:
        built = BY_NAME[{"plain": "llama", "soft-capped": "gemma2"}[name]].build(1)
    add_fused_lm_head(built)
    return built.train()


HEADS = ("plain", "soft-capped", "scaled", "biased")


def _forward(model: Any) -> tuple[TokenGate, Tensor]:
    """A gated forward, and the hidden states that its head read."""
    seen: list[Tensor] = []
    handle = model.base_model.register_forward_hook(
        lambda *found: seen.append(found[2].last_hidden_state)
    )
    gate = TokenGate(model)
    gate(**BATCH, fused_lm_head=True, use_cache=False)
    handle.remove()
    return gate, seen[0]


class _Accumulated(TorchDispatchMode):
    """Shapes of the gradients that the head's backward adds up, one matrix product each."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm_.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def _errors(gate: TokenGate, hidden: Tensor, weights: Tensor) -> Tensor:
    assert gate.log_probs is not None
    loss = (gate.log_probs * weights).sum()
    return torch.autograd.grad(loss, hidden, retain_graph=True)[0]


@pytest.mark.parametrize("name", HEADS)
def test_errors_below_the_head_keep_their_bits_and_its_gradient_is_not_formed(name: str) -> None:
    model = _of(name)
    gate, hidden = _forward(model)
    draw = torch.Generator().manual_seed(2)
    weights = torch.randn(2, BATCH["labels"].shape[1] - 1, generator=draw)
    with _Accumulated() as full:
        expected = _errors(gate, hidden, weights)
    with gate.errors_only() as found, _Accumulated() as less:
        errors = _errors(gate, hidden, weights)
    assert found
    assert expected.abs().max() > 0
    assert bits(errors) == bits(expected)
    of_hidden, of_weight = (weights.numel(), 16), (VOCABULARY, 16)
    assert full.shapes == [of_hidden, of_weight]
    assert less.shapes == [of_hidden]
    # Against the logits of the model's own head, by autograd: another order of the same sums.
    inputs = {k: v for k, v in BATCH.items() if k != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1].double().log_softmax(-1)
    labels = BATCH["labels"][:, 1:]
    chosen = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert gate.log_probs is not None
    torch.testing.assert_close(
        gate.log_probs.double(), chosen.masked_fill(labels == -100, 0), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", HEADS)
def test_the_training_backward_afterwards_is_whole(name: str) -> None:
    found, expected = _of(name), _of(name)
    for model, scored in ((found, True), (expected, False)):
        gate, hidden = _forward(model)
        assert gate.log_probs is not None
        if scored:
            with gate.errors_only():
                _errors(gate, hidden, torch.ones_like(gate.log_probs))
            with pytest.raises(ZeroDivisionError), gate.errors_only():
                _ = 1 / 0
        gate.log_probs.sum().backward()
    head = found.get_output_embeddings()
    assert head.weight.grad.abs().max() > 0
    for (place, p), q in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert bits(p.grad) == bits(q.grad), place


def test_logits_of_another_head_are_left_alone() -> None:
    gate = TokenGate(BY_NAME["llama"].build(1).train())
    with gate.errors_only() as found:
        assert not found, "no forward yet"
    gate.logits({k: v for k, v in BATCH.items() if k != "labels"}, BATCH["labels"])
    with gate.errors_only() as found:
        assert not found
    assert gate.log_probs is not None
    gate.log_probs.sum().backward()


# --- components on logged steps only ------------------------------------------------------------


def _trained(make: Any, folder: Path, **more: Any) -> Any:
    trainer = make(folder, max_steps=6, export_values=False, **more)
    trainer.train()
    return trainer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry a call of ``Observed.components``, which still does its work."""
    calls: list[bool] = []
    real = Observed.components

    def counted(self: Observed) -> Any:
        found = real(self)
        calls.append(found.adaptation is not None)
        return found

    monkeypatch.setattr(Observed, "components", counted)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("sft", {}),
        ("sft", {"estimator": "label"}),
        ("sft", {"gradient_accumulation_steps": 2, "scoring_forward": "own"}),
        ("sft", {"preconditioner": "full", "precondition_after": 1}),
        ("dpo", {}),
    ],
    ids=["sft", "label", "own forward, accumulation", "full preconditioner", "dpo"],
)
def test_no_log_moves_a_weight(
    tmp_path: Path, asked: list[bool], kind: str, extra: dict[str, Any]
) -> None:
    """Bit for bit the same weights, whenever and whether the components are looked at."""
    make = {"sft": sft, "dpo": dpo}[kind]
    parts = 2 if "gradient_accumulation_steps" in extra else 1
    logging = {
        "never": ({"logging_strategy": "no"}, 0),
        "every": ({"logging_steps": 1}, 6 * parts),
        "third": ({"logging_steps": 3}, 2 * parts),
        "first too": ({"logging_steps": 4, "logging_first_step": True}, 2 * parts),
    }
    found = {}
    for name, (options, times) in logging.items():
        asked.clear()
        trainer = _trained(make, tmp_path / name, **options, **extra)
        assert len(asked) == times, name
        assert all(asked)
        found[name] = tiny.weights(trainer.model)
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert all("alpha/total_mean" in entry for entry in logs)
        shares = [
            [v for k, v in entry.items() if k.startswith(("alpha/adapt", "alpha/stab"))]
            for entry in logs
        ]
        assert all(shares), f"{name}: a log without components"
    start = tiny.weights(make(tmp_path / "start").model)
    assert any(not torch.equal(p, start[n]) for n, p in found["never"].items())
    for name, weights in found.items():
        for place, weight in weights.items():
            assert bits(weight) == bits(found["never"][place]), f"{name}: {place}"


def test_a_log_an_epoch_has_components_of_its_first_step(tmp_path: Path, asked: list[bool]) -> None:
    trainer = sft(
        tmp_path, train_dataset=tiny.sft_rows(8), max_steps=4, export_values=False,
        logging_strategy="epoch",
    )  # fmt: skip
    trainer.train()
    assert len(asked) == 2
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    assert all("alpha/stability_direct_share" in entry for entry in logs)
    assert logs[0]["alpha/stability_direct_share"] == 0, "nothing has moved at the first step"
    assert logs[1]["alpha/stability_direct_share"] > 0


def test_exported_runs_add_up_components_at_every_step(tmp_path: Path) -> None:
    trainer = sft(tmp_path, max_steps=3, logging_strategy="no")
    trainer.train()
    found = trainer.ledger.accumulated()
    parts = found.sums[:, 1] + found.sums[:, 2]
    assert abs(found.sums[:, 0]).max() > 0
    assert abs(found.sums[:, 2]).max() > 0
    assert abs(found.sums[:, 0] - parts).max() <= 1e-6 * abs(found.sums).max()
