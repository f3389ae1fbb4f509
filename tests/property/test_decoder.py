"""The reference decoder in itself: what the identities are proved on has to be right first."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import example, given
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from alphatoken.model.protocol import AttentionCall, DecoderAdapter, NativeAttention, find_adapter
from tests.property.decoder import DecoderConfig, ReferenceAdapter, ReferenceDecoder
from tests.property.profiles import budget
from tests.property.strategies import Case, cases, make_case
from tests.property.tolerance import close


def inputs(case: Case) -> dict[str, Tensor]:
    return {name: x for name, x in case.batch.items() if name != "labels"}


EVERYTHING = make_case(
    ("pprrr", ".prr.", "pr..."),
    layers=3,
    heads=6,
    kv_heads=2,
    value_dim=3,
    qk_norm=True,
    rotary_factor=1.3,
    bias=True,
    softcap=2.0,
    sinks=True,
    windows=(2, None, 3),
    norm_place="sandwich",
    fused_qkv=True,
    transposed=True,
    repeated_block=True,
    repeated_linear=True,
    final_softcap=4.0,
    loose_parameter=True,
    hidden_use=True,
    conv_mixer=True,
    explicit_positions=True,
)


# --- invariances ---------------------------------------------------------------------------------


@budget(0.3)
@given(case=cases(mode="ragged", explicit_positions=True))
@example(case=EVERYTHING)
@example(case=make_case(("pprr", "..pr", "...."), positions="learned", explicit_positions=True))
def test_padding_on_either_side_leaves_real_tokens_alone(case: Case) -> None:
    model, batch = case.model(), inputs(case)
    with torch.no_grad():
        logits = model(**batch)
        assert bool(torch.isfinite(logits).all())
        for n, line in enumerate(case.train):
            real = torch.tensor([char != "." for char in line])
            if bool(real.any()):
                names = ("input_ids", "position_ids")
                alone = model(**{name: batch[name][n, real].unsqueeze(0) for name in names})[0]
                close(logits[n, real], alone, 1.0 + alone.abs(), 1e-12, name="real tokens")


@budget(0.3)
@given(case=cases(mode="packed"))
@example(case=make_case(("pr|prr", "p|p|prr"), positions="learned", windows=(2,)))
@example(case=make_case(("pr|prr", "p|p|prr"), conv_mixer=True))
def test_packed_documents_equal_separate_ones(case: Case) -> None:
    model, batch = case.model(), inputs(case)
    with torch.no_grad():
        logits = model(**batch)
        for n, line in enumerate(case.train):
            start = 0
            for document in line.split("|"):
                span = slice(start, start + len(document))
                alone = model(batch["input_ids"][n : n + 1, span])
                close(logits[n, span], alone[0], 1.0 + alone[0].abs(), 1e-12, name="document")
                start = span.stop


@budget(0.3)
@given(case=cases(mode="plain"))
@example(case=make_case(("pprrr",), conv_mixer=True))
def test_no_position_sees_a_later_one(case: Case) -> None:
    model, batch = case.model(), inputs(case)
    ids = batch["input_ids"]
    with torch.no_grad():
        before = model(**batch)
        for j in range(ids.shape[1]):
            changed = ids.clone()
            changed[:, j] = (changed[:, j] + 1) % case.config.vocabulary
            after = model(**{**batch, "input_ids": changed})
            assert torch.equal(after[:, :j], before[:, :j])
            assert not torch.equal(after[:, j], before[:, j])


@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_window_of_w_reaches_w_positions_back_and_no_further(window: int) -> None:
    case = make_case(("p" * 6 + "r",), windows=(window,), layers=1)
    model, ids = case.model(), case.batch["input_ids"]
    with torch.no_grad():
        before = model(ids)[0, -1]
        for distance in range(7):
            changed = ids.clone()
            changed[0, 6 - distance] = (changed[0, 6 - distance] + 1) % 11
            same = torch.equal(model(changed)[0, -1], before)
            assert same == (distance >= window), distance


# --- the adapter ---------------------------------------------------------------------------------


class Count:
    """An override that counts calls by module and passes them on."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()

    def __call__(self, call: AttentionCall, native: NativeAttention) -> Tensor:
        self.calls[id(call.module)] += 1
        return native(call.query, call.key, call.value)


def _attention_modules(adapter: ReferenceAdapter) -> list[torch.nn.Module]:
    depth = len(adapter.layers())
    return [module for layer in range(depth) for module in adapter.attention_modules(layer)]


@budget(0.3)
@given(case=cases())
def test_an_override_sees_every_attention_call_once_and_changes_nothing_itself(case: Case) -> None:
    adapter = case.adapter()
    modules, batch = _attention_modules(adapter), inputs(case)
    count = Count()
    with torch.no_grad():
        plain = adapter.forward(batch)
        with adapter.override_attention(modules, count):
            assert torch.equal(adapter.forward(batch), plain)
    assert count.calls == Counter(id(module) for module in modules)
    assert sum(count.calls.values()) == case.config.layers
    adapter.forward(batch)
    assert sum(count.calls.values()) == case.config.layers


def test_an_override_is_taken_back_after_an_exception_and_inside_another() -> None:
    adapter = make_case(repeated_block=True).adapter()
    modules = _attention_modules(adapter)
    outer, inner = Count(), Count()
    ids = {"input_ids": torch.tensor([[1, 2, 3]])}

    def fail_inside() -> None:
        with adapter.override_attention(modules, inner):
            adapter.forward(ids)
            raise KeyError

    with adapter.override_attention(modules, outer):
        with pytest.raises(KeyError):
            fail_inside()
        adapter.forward(ids)
    adapter.forward(ids)
    assert sum(inner.calls.values()) == sum(outer.calls.values()) == len(modules) == 2
    assert all(module.override is None for module in modules)


def test_only_the_named_modules_are_overridden() -> None:
    adapter = make_case(layers=3).adapter()
    count = Count()
    with adapter.override_attention(adapter.attention_modules(1), count):
        adapter.forward({"input_ids": torch.tensor([[1, 2, 3]])})
    assert list(count.calls) == [id(adapter.attention_modules(1)[0])]


@budget(0.3)
@given(case=cases())
@example(case=EVERYTHING)
def test_the_call_holds_what_the_kernel_computes_with(case: Case) -> None:
    c = case.config
    b, t = case.batch["input_ids"].shape
    dv = c.head_dim if c.value_dim is None else c.value_dim

    def check(call: AttentionCall, native: NativeAttention) -> Tensor:
        assert call.query.shape == (b, c.heads, t, c.head_dim)
        assert call.key.shape == (b, c.kv_heads, t, c.head_dim)
        assert call.value.shape == (b, c.kv_heads, t, dv)
        assert call.mask is None or call.mask.shape == (b, 1, t, t)
        assert (call.sinks is not None) == c.sinks
        assert call.softcap == c.softcap
        return native(call.query, call.key, call.value)

    adapter = case.adapter()
    with adapter.override_attention(_attention_modules(adapter), check):
        adapter.forward(inputs(case))


def test_the_registry_finds_the_adapter() -> None:
    model = make_case().model()
    adapter = find_adapter(model)
    assert isinstance(adapter, ReferenceAdapter)
    assert isinstance(adapter, DecoderAdapter)
    assert adapter.model is model


@budget(0.3)
@given(case=cases())
def test_scored_linears_are_named_in_forward_order_each_once(case: Case) -> None:
    adapter = case.adapter()
    every = range(case.config.layers)
    linears = adapter.scored_linears(every)
    called: list[torch.nn.Module] = []
    handles = [
        s.module.register_forward_hook(lambda module, *_: called.append(module)) for s in linears
    ]
    adapter.forward(inputs(case))
    for handle in handles:
        handle.remove()
    assert list(dict.fromkeys(called)) == [s.module for s in linears]
    modules, parameters = (
        dict(adapter.model.named_modules()),
        dict(adapter.model.named_parameters()),
    )
    for s in linears:
        assert modules[s.name] is s.module
        assert parameters[s.weight_name] is s.weight
        assert (s.bias is not None) == case.config.bias
    block = 1 if case.config.repeated_block else 0
    per_block = 2 if case.config.fused_qkv else 4
    per_block += 2 + (case.config.mlp == "gated") + case.config.repeated_linear
    assert len(linears) == (case.config.layers - block) * per_block


def test_traps_are_named_only_where_they_should_be() -> None:
    named = make_case(layers=3, loose_parameter=True, conv_mixer=True).adapter()
    assert list(named.uncovered([1, 2])) == ["layers.1.mlp.loose", "layers.2.mlp.loose"]
    assert named.uncovered([1]).keys() <= dict(named.model.named_parameters()).keys()
    assert list(named.other_mixers(range(3))) == ["layers.2.mixer"]
    assert named.other_mixers([0, 1]) == {}
    hidden = make_case(layers=3, hidden_use=True, hidden_mixer=True).adapter()
    assert hidden.uncovered(range(3)) == {}
    assert hidden.other_mixers(range(3)) == {}


@pytest.mark.parametrize("trap", ["hidden_use", "hidden_mixer", "loose_parameter"])
def test_traps_do_something(trap: str) -> None:
    case = make_case(("pprrr",), **{trap: True})
    model = case.model()
    with torch.no_grad():
        before = model(**inputs(case))
        disarm = {
            "hidden_mixer": lambda: model.layers[1].mixer.taps.zero_(),
            "loose_parameter": lambda: model.layers[1].mlp.loose.zero_(),
            "hidden_use": lambda: setattr(model.layers[1].mlp, "config", DecoderConfig()),
        }
        disarm[trap]()
        assert float((model(**inputs(case)) - before).abs().max()) > 1e-3


@budget(0.3)
@given(case=cases(mode="left", explicit_positions=True))
@example(case=make_case(("..pr", "pprr"), positions="learned", explicit_positions=True))
def test_next_token_logits_are_those_of_the_last_column(case: Case) -> None:
    adapter, batch = case.adapter(), inputs(case)
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    with torch.no_grad():
        logits, _ = adapter.next_token_logits(batch["input_ids"], mask, None)
        expected = adapter.forward({**batch, "attention_mask": mask})[:, -1]
    real = mask.bool().any(-1)  # a row of nothing but padding predicts nothing
    assert torch.equal(logits[real], expected[real])


# --- numbers -------------------------------------------------------------------------------------


class OnlyFloat64(TorchDispatchMode):
    """Fails on the first narrower floating-point tensor that any operation makes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                assert tensor.dtype == torch.float64, f"{func} gave {tensor.dtype}"
        return out


@budget(0.3)
@given(case=cases())
@example(case=EVERYTHING)
@example(case=make_case(("pr", ".."), sinks=True, blind_rows=True))
def test_everything_is_float64_and_finite_both_ways(case: Case) -> None:
    model = case.model()
    labels = F.pad(case.batch["labels"][:, 1:], (0, 1), value=-100)
    with OnlyFloat64():
        logits = model(**inputs(case))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
    assert bool(torch.isfinite(logits).all())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float64
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name


@budget(0.3)
@given(case=cases())
def test_a_case_builds_the_same_numbers_twice(case: Case) -> None:
    for (name, a), (_, b) in zip(
        case.model().named_parameters(), case.model().named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
    assert all(torch.equal(x, case.batch[name]) for name, x in case.batch.items())
    other = ReferenceDecoder(case.config, case.seed + 1)
    assert not torch.equal(case.model().head.weight, other.head.weight)


@budget(0.5)
@given(case=cases(norm="rms", layers=2, hidden=8, mode="plain", softcap=None, windows=(None,)))
def test_attention_is_far_from_uniform(case: Case) -> None:
    """Uniform attention would hide the score path from every test that follows."""
    case = Case(case.config, ("pprrrrrr",) * 8, case.validations, case.seed)
    spreads = []

    def measure(call: AttentionCall, native: NativeAttention) -> Tensor:
        key = call.key.repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)
        logits = torch.einsum("bhkd,bhtd->bhkt", call.query, key) * call.scale
        spreads.append(float(logits.std()))
        return native(call.query, call.key, call.value)

    adapter = case.adapter()
    with torch.no_grad(), adapter.override_attention(_attention_modules(adapter), measure):
        adapter.forward(inputs(case))
    assert min(spreads) > 0.1
