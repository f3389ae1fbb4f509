"""What the transformers adapter tells the core, on every architecture."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from alphatoken import Scorer, ScorerConfig
from alphatoken.config import SELF_ONLY
from alphatoken.errors import InputError, UnsupportedError
from alphatoken.model.protocol import AttentionCall, NativeAttention, find_adapter
from alphatoken.model.scope import mixers_without_rule
from alphatoken.model.transformers import TransformersAdapter
from tests.property.architectures import ARCHITECTURES, BY_NAME, MIXER, SOFTMAX, VOCABULARY
from tests.property.decoder import explicit_attention
from tests.property.profiles import budget
from tests.property.setups import refusal
from tests.property.tolerance import close

CAST = 1e-6
"""transformers computes softmax and norms in float32 inside, whatever the model's dtype."""


def model_of(name: str, implementation: str = "", seed: int = 0, **options: object) -> nn.Module:
    return BY_NAME[name].build(seed, implementation=implementation or None, **options)


def blocks(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """(name, decoder block), first to last, by the name that the architecture gives them."""
    prefix = "transformer.h" if name == "gpt2" else "model.layers"
    found = dict(model.named_modules())
    return [(f"{prefix}.{i}", found[f"{prefix}.{i}"]) for i in range(BY_NAME[name].depth)]


def batch_of(side: str, seed: int, length: int = 7) -> dict[str, Tensor]:
    """Two rows, the second one padded on this side ("none": neither)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    if side == "left":
        mask[1, :2] = 0
    if side == "right":
        mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


CALLS: list[tuple[str, str, str, float, dict[str, float]]] = [
    ("llama", "sdpa", "none", 0.5, {}),
    ("gemma3", "sdpa", "left", 0.0, {"query_pre_attn_scalar": 9}),
    *(
        (a.name, implementation, side, 0.0, {})
        for a in ARCHITECTURES
        if a.name in SOFTMAX
        for implementation in a.implementations
        for side in ("none", "right", "left")
        # transformers' eager masks overflow in float64 on rows that see nothing
        if not (side == "left" and implementation == "eager")
    ),
]


@pytest.mark.parametrize(("name", "layers"), [(a.name, (0, a.depth - 1)) for a in ARCHITECTURES])
def test_scored_linears_are_the_linears_of_these_layers(name: str, layers: Sequence[int]) -> None:
    """The trainable linears of these blocks and no others, each once, and s = x W^T (W if stored
    so) + b is what each one gives.

    Proves: scored linears are the linears of these layers (exact), against the modules' own
    outputs.
    """
    model = model_of(name)
    every = blocks(model, name)
    last = every[layers[-1]]
    frozen = next(m for m in last[1].modules() if isinstance(m, (nn.Linear, Conv1D)))
    frozen.requires_grad_(False)
    expected = {
        f"{every[i][0]}.{inside}": (module, i)
        for i in layers
        for inside, module in every[i][1].named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module.weight.requires_grad
    }
    adapter = find_adapter(model)
    found = adapter.scored_linears(layers)
    assert [one.name for one in found] == list(expected)
    assert list(adapter.layers()) == [block for _, block in every]
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        one.module.register_forward_hook(
            lambda _, args, out, n=one.name: seen.update({n: (args[0], out)})
        )
        for one in found
    ]
    with torch.no_grad():
        model(**batch_of("none", 1))
    for handle in handles:
        handle.remove()
    for one in found:
        assert (one.module, one.layer) == expected[one.name]
        if one.name in seen:  # an expert may be chosen by no token
            x, s = seen[one.name]
            weight = one.weight if one.transposed else one.weight.mT
            bias = getattr(one.module, "bias", None)
            bias = 0.0 if bias is None else bias
            assert x.shape[-1] == weight.shape[0], f"{one.name}: stored the other way"
            close(x @ weight + bias, s, s.abs().max(), 1e-12, name=f"{one.name}, as stored")


@pytest.mark.parametrize("name", SOFTMAX)
def test_what_is_not_scored_is_named(name: str) -> None:
    """Every trainable matrix of a block is a scored linear's weight or is in the report.

    Proves: what is not scored is named (exact), against the blocks' parameters.
    """
    model = model_of(name)
    adapter = find_adapter(model)
    every = blocks(model, name)
    layers = range(len(every))
    scored = {one.weight_name for one in adapter.scored_linears(layers)}
    matrices = {
        f"{prefix}.{inside}"
        for prefix, block in every
        for inside, parameter in block.named_parameters()
        if parameter.dim() >= 2
    }
    missing = adapter.uncovered(layers)
    assert set(missing) == matrices - scored, sorted(set(missing) ^ (matrices - scored))
    for weight, reason in missing.items():
        deep = dict(model.named_parameters())[weight].dim() >= 3
        assert ("3-D" in reason) == deep, f"{weight}: {reason}"


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize(("name", "implementation", "side", "dropout", "options"), CALLS)
def test_a_call_is_what_the_model_computes(
    name: str, implementation: str, side: str, seed: int, dropout: float, options: dict[str, float]
) -> None:
    """Attention written out from the call alone (mask, scale, soft-cap, sinks, groups) is the
    model's own output, at every position that is not padding; dropout is said.

    Proves: a call is what the model computes (exact), against attention written out.
    """
    model = model_of(name, implementation, seed, **options)
    if dropout:
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = dropout
        model.train()
    adapter = find_adapter(model)
    batch = batch_of(side, seed)
    real = batch["attention_mask"].bool()[:, None, :, None]
    wanted = [adapter.attention_modules(layer) for layer in range(len(adapter.layers()))]
    calls: list[tuple[AttentionCall, Tensor]] = []

    def see(call: AttentionCall, native: NativeAttention) -> Tensor:
        output = native(call.query, call.key, call.value)
        calls.append((call, output))
        return output

    modules = [module for layer in wanted for module in layer]
    with torch.no_grad(), adapter.override_attention(modules, see):
        watched = model(**batch).logits
    assert len(calls) == len(wanted), f"{len(calls)} calls of {len(wanted)} layers"
    with torch.no_grad():
        same = dropout or torch.equal(model(**batch).logits, watched)
    assert same, "watching a forward changes it"
    for layer, (call, output) in enumerate(calls):
        assert call.module in wanted[layer]
        assert call.dropout == dropout
        if not dropout:
            written = explicit_attention(call, call.query, call.key, call.value).double()
            size = call.value.abs().max().double()
            off = torch.where(real, written - output.double(), 0.0)
            close(off, torch.zeros_like(off), size, CAST, name=f"{name}, {implementation}, {side}")


@cache
def adapter(index: int) -> TransformersAdapter:
    """Models 0 and 1 share an implementation, model 2 has the other one."""
    name, implementation = (("llama", "sdpa"), ("gemma3", "sdpa"), ("llama", "eager"))[index]
    return TransformersAdapter(model_of(name, implementation, index))


class Doubled:
    """Overrides that double what they are asked for, and write down who was called, in order."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def enter(self, index: int, label: int) -> AbstractContextManager[None]:
        def override(call: AttentionCall, native: NativeAttention) -> Tensor:
            self.calls.append(label)
            return 2 * native(call.query, call.key, call.value)

        layers = range(len(adapter(index).layers()))
        modules = [m for layer in layers for m in adapter(index).attention_modules(layer)]
        context = adapter(index).override_attention(modules, override)
        context.__enter__()
        return context

    def forward(self, index: int) -> Tensor:
        """Logits of one forward, which alone is written down."""
        self.calls.clear()
        with torch.no_grad():
            return adapter(index).forward({"input_ids": torch.tensor([[1, 2, 3]])})


@budget(0.4)
@given(
    models=st.lists(st.integers(0, 2), min_size=2, max_size=4),
    order=st.randoms(use_true_random=False),
    users=st.sets(st.sampled_from(["sdpa", "eager"])),
    failing=st.booleans(),
)
# First in, first out: the first one's override came back for good.
@example(models=[0, 1], order=None, users=set(), failing=False)
@example(models=[0, 0], order=None, users={"sdpa"}, failing=True)
def test_overrides_in_any_order(
    models: list[int], order: Any, users: set[str], failing: bool
) -> None:
    """Each forward is seen by the overrides active on its model, the last one entered first.

    Other models run as they are, and the registry is as before, also where users have functions
    there, past an exception, and where contexts are left in the order in which they were entered.

    Proves: overrides in any order (exact), against the models without overrides.
    """
    overrides, used = Doubled(), []
    registry = ALL_ATTENTION_FUNCTIONS._local_mapping

    def mine(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        used.append(1)
        return ALL_ATTENTION_FUNCTIONS._global_mapping["sdpa"](module, *args, **kwargs)

    waiting = list(enumerate(models))
    active: list[tuple[int, int, AbstractContextManager[None]]] = []
    # Whatever happens, the next test has the registry that it knows.
    with mock.patch.dict(registry, dict.fromkeys(users, mine), clear=True):
        before = dict(registry)
        plain = [overrides.forward(index) for index in range(3)]
        while waiting or active:
            if waiting and (order is None or not active or order.random() < 0.5):
                label, index = waiting.pop(0)
                active.append((label, index, overrides.enter(index, label)))
            else:
                leaves = active.pop(0 if order is None else order.randrange(len(active)))[2]
                error = KeyError("planned") if failing else None
                assert not leaves.__exit__(error and KeyError, error, None)
            for index in range(3):
                labels = [label for label, model, _ in reversed(active) if model == index]
                depth = len(adapter(index).layers())
                used.clear()
                assert torch.equal(overrides.forward(index), plain[index]) == (not labels)
                assert overrides.calls == labels * depth
                assert len(used) == depth * (("eager" if index == 2 else "sdpa") in users)
        assert dict(registry) == before, "the registry has changed"


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "phi3", "mixtral"])
def test_decoding_is_the_forward(name: str, seed: int) -> None:
    """Logits after each column, with the cache, are those of one forward over all columns.

    Proves: decoding is the forward (exact), against one forward.
    """
    model = model_of(name, seed=seed)
    adapter = find_adapter(model)
    batch = batch_of("left", seed)
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = adapter.forward({**batch, "position_ids": positions})
        state, columns = None, []
        for end in range(4, 8):
            logits, state = adapter.next_token_logits(
                batch["input_ids"][:, :end], batch["attention_mask"][:, :end], state
            )
            columns.append(logits)
    found = torch.stack(columns, 1)
    close(found, whole[:, 3:], whole.abs().max(), 1e-5, name=f"{name}, decoded")
    given = {**batch, "labels": batch["input_ids"], "logits_to_keep": 1, "use_cache": True}
    arguments = adapter.arguments(given)
    assert arguments["use_cache"] is False
    assert set(arguments) == {*batch, "use_cache"}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rows_beyond_the_limit_are_refused(name: str) -> None:
    """A row longer than the model's positions has no value; one of exactly that length has.

    Proves: rows beyond the limit are refused (exact), against the configuration.
    """
    model = model_of(name)
    limit = model.config.max_position_embeddings
    adapter = find_adapter(model)
    assert adapter.max_positions() == limit
    short = {**batch_of("none", 0, limit), "labels": batch_of("none", 0, limit)["input_ids"]}
    config = ScorerConfig("path", layers=1, uncovered="skip")
    scorer = Scorer(model, [short], config=config)
    assert bool(torch.isfinite(scorer.score(short).total).all())
    long = batch_of("none", 0, limit + 1)
    error = refusal(lambda: scorer.score({**long, "labels": long["input_ids"]}))
    assert isinstance(error, InputError), "a row beyond the model's positions was valued"
    assert str(limit) in str(error), str(error)


@pytest.mark.parametrize("estimator", SELF_ONLY)
def test_layers_without_softmax_are_named(estimator: str) -> None:
    """LFM2's convolution layer is named, and ends every estimator that has no rule for it.

    Qwen-3.5's linear attention is named as well, and is a gated delta net, which has one.

    Proves: layers without softmax are named (exact), against LFM2's layers, Qwen-3.5's.
    """
    hybrid = find_adapter(model_of("qwen3_5"))
    assert hybrid.other_mixers([0, 1, 2]) == {"model.layers.1": "linear_attention"}
    assert mixers_without_rule(hybrid, range(3)) == {}
    model = MIXER.build(0)
    adapter = find_adapter(model)
    assert adapter.other_mixers([0, 1, 2]) == {"model.layers.1": "conv"}
    assert adapter.other_mixers([0, 2]) == {}
    batch = {**batch_of("none", 0), "labels": batch_of("none", 0)["input_ids"]}
    for layers, refused in (((1, 2), True), ((2,), False)):
        config = ScorerConfig(estimator, layers=layers, uncovered="skip")
        scorer = Scorer(model, [batch], config=config)
        error = refusal(lambda scorer=scorer: scorer.score(batch))
        assert isinstance(error, UnsupportedError) == refused, f"{estimator}, {layers}: {error}"
        assert not refused or "model.layers.1 (conv)" in str(error), str(error)
