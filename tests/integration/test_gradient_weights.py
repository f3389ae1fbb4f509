"""What a step leaves undone: the head's gradient while scoring."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import CohereConfig, CohereForCausalLM, PhiConfig, PhiForCausalLM
from trl.trainer.utils import add_fused_lm_head

from alphatoken.config import ScorerConfig
from alphatoken.model import forward as own_forward
from alphatoken.model.head import head_losses, watched_head
from alphatoken.model.protocol import find_adapter
from alphatoken.oracle import gradients
from alphatoken.scorer import Scorer
from alphatoken.train import log_prob_proxy
from alphatoken.train.log_prob_proxy import (
    LogProbProxy,
    errors_only,
    head_entropy,
    shared_log_probs,
    top_entropy,
)
from tests.integration.snapshot import bits
from tests.property.architectures import BY_NAME, VOCABULARY
from tests.property.strategies import make_batch

BATCH = make_batch(("pprrprr.", "prprrrrr"), vocabulary=VOCABULARY, seed=1)
INPUTS = {name: tensor for name, tensor in BATCH.items() if name != "labels"}
VALIDATION = make_batch(("ppprrr..",), vocabulary=VOCABULARY, seed=2)
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


def _forward(model: Any) -> tuple[LogProbProxy, Tensor]:
    """A forward through the proxy, and the hidden states that its head read."""
    hidden: list[Tensor] = []
    handle = model.base_model.register_forward_hook(
        lambda *result: hidden.append(result[2].last_hidden_state)
    )
    proxy = LogProbProxy(model)
    proxy(**BATCH, fused_lm_head=True, use_cache=False)
    handle.remove()
    return proxy, hidden[0]


class _Accumulated(TorchDispatchMode):
    """Shapes of the gradients that the head's backward adds up, one matrix product each."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm_.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def _errors(proxy: LogProbProxy, hidden: Tensor, weights: Tensor) -> Tensor:
    loss = (proxy.log_probs * weights).sum()
    return torch.autograd.grad(loss, hidden, retain_graph=True)[0]


@pytest.mark.parametrize("name", HEADS)
def test_errors_below_the_head_keep_their_bits_and_its_gradient_is_not_formed(name: str) -> None:
    model = _of(name)
    proxy, hidden = _forward(model)
    draw = torch.Generator().manual_seed(2)
    weights = torch.randn(2, BATCH["labels"].shape[1] - 1, generator=draw)
    with _Accumulated() as full:
        expected = _errors(proxy, hidden, weights)
    with errors_only(proxy.log_probs) as actual, _Accumulated() as less:
        errors = _errors(proxy, hidden, weights)
    assert actual
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
    torch.testing.assert_close(
        proxy.log_probs.double(), chosen.masked_fill(labels == -100, 0), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", HEADS)
def test_the_training_backward_afterwards_is_whole(name: str) -> None:
    actual, expected = _of(name), _of(name)
    for model, scored in ((actual, True), (expected, False)):
        proxy, hidden = _forward(model)
        if scored:
            with errors_only(proxy.log_probs):
                _errors(proxy, hidden, torch.ones_like(proxy.log_probs))
            with pytest.raises(ZeroDivisionError), errors_only(proxy.log_probs):
                _ = 1 / 0
        proxy.log_probs.sum().backward()
    head = actual.get_output_embeddings()
    assert head.weight.grad.abs().max() > 0
    for (place, p), q in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert bits(p.grad) == bits(q.grad), place


def test_logits_of_another_head_are_left_alone() -> None:
    proxy = LogProbProxy(BY_NAME["llama"].build(1).train())
    with errors_only(proxy.log_probs) as result:
        assert not result, "no forward yet"
    proxy.logits({k: v for k, v in BATCH.items() if k != "labels"}, BATCH["labels"])
    with errors_only(proxy.log_probs) as result:
        assert not result
    proxy.log_probs.sum().backward()


# --- one error of the head for values and update ------------------------------------------------


def _drawn_weights(proxy: LogProbProxy, seed: int) -> Tensor:
    """(b, t), half of them 0, as of a hard mask that is scaled."""
    rows, length = proxy.log_probs.shape
    drawn = torch.randn(rows, length + 1, generator=torch.Generator().manual_seed(seed))
    return drawn.masked_fill(drawn < 0, 0.0)


@pytest.mark.parametrize("name", ["plain", "biased"])
def test_the_update_after_a_shared_error_is_the_ordinary_one(name: str) -> None:
    shared, plain = _of(name), _of(name)
    for model in (shared, plain):
        proxy, hidden = _forward(model)
        loss = -proxy._leaf.square().sum()  # of coefficients that differ by token
        if model is shared:
            proxy.share_head(BATCH["labels"])
            assert proxy.scores is not proxy.log_probs
            torch.testing.assert_close(
                proxy.scores, proxy.log_probs, rtol=1e-5, atol=1e-5, check_dtype=False
            )
        errors = torch.autograd.grad(
            (proxy.scores * _drawn_weights(proxy, 2)[:, 1:]).sum(), hidden, retain_graph=True
        )[0]
        proxy.surrogate(loss, proxy.coefficients(loss), _drawn_weights(proxy, 3)).backward()
        model.errors = errors
    assert plain.errors.abs().max() > 0
    torch.testing.assert_close(shared.errors, plain.errors, rtol=1e-4, atol=1e-6)
    for (place, p), q in zip(shared.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None, place
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=place)


def test_values_and_a_selected_update_share_their_products() -> None:
    """Of n labelled positions, m of them kept: 2 n for values and errors, 2 m for the weight.

    TRL's own backward takes two or three for each of *all* positions, once for each of the two.
    """
    proxy, hidden = _forward(_of("plain"))
    loss = -proxy._leaf.sum()
    keep = BATCH["labels"].ne(-100).float()
    keep[:, ::2] = 0
    with FlopCounterMode(display=False) as counter:
        proxy.share_head(BATCH["labels"])
        torch.autograd.grad(proxy.scores.sum(), hidden, retain_graph=True)
        update = proxy.surrogate(loss, proxy.coefficients(loss), keep)
        head = proxy._model.lm_head.weight
        torch.autograd.grad(update, (hidden, head))
    n, kept = (int(x[:, 1:].sum()) for x in (BATCH["labels"] != -100, keep))
    assert counter.get_total_flops() / (2 * head.numel()) == 2 * n + 2 * kept


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("plain", "linears"), ("biased", "all"), ("soft-capped", "all"), ("of logits", "linears")],
)
def test_label_values_share_the_error_with_the_update(name: str, parameters: str) -> None:
    """They are the oracle's, and their dual forward forms no product with the vocabulary."""
    model = _of("plain" if name == "of logits" else name)
    layers = "all" if parameters == "all" else 1
    config = ScorerConfig("label", layers=layers, parameters=parameters, derivative="forward_mode")
    scorer = Scorer(model, VALIDATION, None, config)
    direction = scorer.direction.total()
    formed = mock.Mock(side_effect=head_losses)
    with scorer.observe() as observed:
        if name == "of logits":
            proxy = LogProbProxy(model)
            proxy.logits(INPUTS, BATCH["labels"])
        else:
            proxy, _ = _forward(model)
        proxy.share_head(BATCH["labels"])
        with mock.patch.object(own_forward, "head_losses", formed):
            values = observed.values(proxy.scores, BATCH["labels"]).total
    forward = find_adapter(model).forward
    expected = gradients.label_values(model, forward, BATCH, direction)
    torch.testing.assert_close(values, expected.to(values), rtol=1e-4, atol=1e-6)
    plain = name not in ("soft-capped", "scaled")
    assert (watched_head(proxy.scores) is not None) == plain
    assert not (plain and formed.called)


@pytest.mark.parametrize(
    ("name", "rows_at_once"),
    [*((name, 3 * VOCABULARY) for name in HEADS), ("plain", 2**24), ("of logits", 2**24)],
)
def test_entropy_of_the_training_forward(
    name: str, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the logits that the model's own head gives, whatever it does to them."""
    monkeypatch.setattr(log_prob_proxy, "_WORKSPACE", rows_at_once)
    model = _of("plain" if name == "of logits" else name)
    if name == "of logits":
        proxy = LogProbProxy(model)
        proxy.logits(INPUTS, BATCH["labels"])
    else:
        proxy, _ = _forward(model)
    labels = BATCH["labels"]
    logits = model(**INPUTS, use_cache=False).logits.detach()
    for k in (2, 5, VOCABULARY):
        actual = proxy.entropy(labels, k)
        assert actual.shape == labels.shape
        assert not actual.requires_grad
        for row, t in (labels != -100).nonzero().tolist():
            p = logits[row, t - 1].double().softmax(-1).sort(descending=True).values[:k]
            p = p / p.sum()
            expected = -float((p * p.log()).sum())
            assert float(actual[row, t]) == pytest.approx(expected, abs=2e-6)
        assert not bool(actual[labels == -100].any())
    nothing = torch.full_like(labels, -100)
    if name != "of logits":
        assert head_entropy(proxy.log_probs, nothing, 5) is not None
    assert head_entropy(torch.zeros(2, 3, requires_grad=True).exp(), nothing[:, :4], 5) is None
    assert top_entropy(logits.detach().bfloat16(), 5).dtype == torch.float32


@pytest.mark.parametrize("name", ["soft-capped", "scaled"])
def test_heads_that_change_their_logits_share_nothing(name: str) -> None:
    proxy, _ = _forward(_of(name))
    assert proxy.log_probs is not None
    assert shared_log_probs(proxy.log_probs, BATCH["labels"]) is None
    proxy.share_head(BATCH["labels"])
    assert proxy.scores is proxy.log_probs
