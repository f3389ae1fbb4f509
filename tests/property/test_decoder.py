"""The reference decoder in itself: what the identities are proved on has to be right first."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
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

Vector = np.ndarray[Any, np.dtype[np.float64]]


def inputs(case: Case) -> dict[str, Tensor]:
    return {name: x for name, x in case.batch.items() if name != "labels"}


def logits_close(actual: Tensor, expected: Tensor, tol: float, name: str) -> None:
    close(actual, expected, 1.0 + expected.abs(), tol, name=name)


# --- an implementation of its own ----------------------------------------------------------------


class LoopDecoder:
    """The same decoder, one position, one head and one key at a time, without autograd or batch."""

    def __init__(self, model: ReferenceDecoder) -> None:
        self.config = model.config
        self.w: dict[str, Vector] = {
            name: p.detach().numpy() for name, p in model.named_parameters(remove_duplicate=False)
        }

    def linear(self, name: str, x: Vector) -> Vector:
        weight = self.w[f"{name}.weight"]
        out = x @ weight if self.config.transposed and name != "head" else weight @ x
        return out + self.w.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: Vector, kind: str) -> Vector:
        if f"{name}.weight" not in self.w:
            return x
        if kind == "rms":
            return x / math.sqrt(float(np.mean(x * x)) + 1e-6) * self.w[f"{name}.weight"]
        y = (x - x.mean()) / math.sqrt(float(x.var()) + 1e-5)
        return y * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def rotate(self, x: Vector, position: int) -> Vector:
        if self.config.positions != "rotary":
            return x
        half, out = len(x) // 2, x.copy()
        for j in range(half):
            angle = position / 100.0 ** (j / half)
            cos, sin = math.cos(angle), math.sin(angle)
            out[j] = x[j] * cos - x[j + half] * sin
            out[j + half] = x[j] * sin + x[j + half] * cos
        return out * self.config.rotary_factor

    def project(self, name: str, x: Vector, position: int) -> tuple[list[Vector], ...]:
        c = self.config
        if c.fused_qkv:
            q, k = c.heads * c.head_dim, c.kv_heads * c.head_dim
            rows = self.linear(f"{name}.qkv_proj", x)
            parts = [rows[:q], rows[q : q + k], rows[q + k :]]
        else:
            parts = [self.linear(f"{name}.{s}_proj", x) for s in "qkv"]
        q_heads = np.split(parts[0], c.heads)
        k_heads, v_heads = np.split(parts[1], c.kv_heads), np.split(parts[2], c.kv_heads)
        q_heads = [self.norm(f"{name}.q_norm", q, "rms") for q in q_heads]
        k_heads = [self.norm(f"{name}.k_norm", k, "rms") for k in k_heads]
        turned = ([self.rotate(u, position) for u in heads] for heads in (q_heads, k_heads))
        return (*turned, v_heads)

    def head_output(
        self, name: str, h: int, q: Vector, keys: list[Vector], values: list[Vector]
    ) -> Vector:
        c = self.config
        scale = 1 / math.sqrt(c.head_dim) if c.attention_scale is None else c.attention_scale
        logits = [scale * float(q @ k) for k in keys]
        if c.softcap is not None:
            logits = [c.softcap * math.tanh(s / c.softcap) for s in logits]
        total = sum(math.exp(s) for s in logits)
        if c.sinks:
            total += math.exp(self.w[f"{name}.sinks"][h])
        out = np.zeros(c.head_dim if c.value_dim is None else c.value_dim)
        for s, v in zip(logits, values, strict=True):
            out = out + math.exp(s) / total * v
        return out

    def mlp(self, name: str, x: Vector) -> Vector:
        c = self.config
        up = self.linear(f"{name}.up_proj", x)
        if c.hidden_use:
            weight = self.w[f"{name}.up_proj.weight"]
            up = up + (np.tanh(x) @ weight if c.transposed else weight @ np.tanh(x))
        if c.mlp == "gated":
            gate = self.linear(f"{name}.gate_proj", x)
            inner = gate / (1 + np.exp(-gate)) * up
        else:
            inner = np.array([u * 0.5 * (1 + math.erf(u / math.sqrt(2))) for u in up])
        if c.repeated_linear:
            once = self.linear(f"{name}.inner_proj", inner)
            inner = inner + np.tanh(self.linear(f"{name}.inner_proj", np.tanh(once)))
        out = self.linear(f"{name}.down_proj", inner)
        if c.loose_parameter:
            out = out + np.tanh(x) @ self.w[f"{name}.loose"]
        return out

    def row(
        self, ids: list[int], positions: list[int], real: list[bool], document: list[int]
    ) -> Tensor:
        """Logits (t, vocabulary) of one row."""
        c, every = self.config, range(len(ids))
        x = [self.w["embedding.weight"][i] for i in ids]
        if c.positions == "learned":
            x = [
                u + self.w["position_embedding.weight"][p]
                for u, p in zip(x, positions, strict=True)
            ]
        for layer in range(c.layers):
            name = f"layers.{layer}"
            window = c.windows[layer % len(c.windows)]
            normed = [self.norm(f"{name}.attention_norm", u, c.norm) for u in x]
            qkv = [self.project(f"{name}.attention", normed[t], positions[t]) for t in every]
            attended = []
            for k in every:
                seen = [t for t in range(k + 1) if real[t] and document[t] == document[k]]
                seen = [t for t in seen if window is None or t > k - window]
                if not seen and not c.blind_rows:
                    seen = [k]
                heads = []
                for h in range(c.heads):
                    g = h * c.kv_heads // c.heads
                    keys, values = [qkv[t][1][g] for t in seen], [qkv[t][2][g] for t in seen]
                    heads.append(
                        self.head_output(f"{name}.attention", h, qkv[k][0][h], keys, values)
                    )
                attended.append(self.linear(f"{name}.attention.o_proj", np.concatenate(heads)))
            post = [self.norm(f"{name}.attention_post_norm", u, c.norm) for u in attended]
            x = [u + a for u, a in zip(x, post, strict=True)]
            if f"{name}.mixer.taps" in self.w:
                x = self.mix(self.w[f"{name}.mixer.taps"], x, real, document)
            branch = [self.mlp(f"{name}.mlp", self.norm(f"{name}.mlp_norm", u, c.norm)) for u in x]
            post = [self.norm(f"{name}.mlp_post_norm", u, c.norm) for u in branch]
            x = [u + m for u, m in zip(x, post, strict=True)]
        out = np.stack([self.linear("head", self.norm("final_norm", u, c.norm)) for u in x])
        if c.final_softcap is not None:
            out = c.final_softcap * np.tanh(out / c.final_softcap)
        return torch.from_numpy(out)

    def mix(
        self, taps: Vector, x: list[Vector], real: list[bool], document: list[int]
    ) -> list[Vector]:
        out = []
        for t, u in enumerate(x):
            linked = t > 0 and real[t] and real[t - 1] and document[t] == document[t - 1]
            out.append(u + taps[0] * u + (taps[1] * x[t - 1] if linked else 0.0))
        return out


def _documents_of(line: str) -> list[int]:
    document, found = 0, []
    for char in line:
        if char == "|":
            document += 1
        else:
            found.append(document)
    return found


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


@budget(0.3)
@given(case=cases())
@example(case=EVERYTHING)
@example(case=make_case(("ppr|prr", "p|p|prrr"), conv_mixer=True, tied_linears=True, layers=1))
@example(case=make_case(("pr", "..", ".p"), blind_rows=True, sinks=True, windows=(1,)))
@example(case=make_case(("pr", "..", ".p"), additive_mask=True, tied_linears=True, mlp="plain"))
def test_logits_equal_a_loop_over_positions_heads_and_keys(case: Case) -> None:
    model = case.model()
    batch = inputs(case)
    with torch.no_grad():
        logits = model(**batch)
    loop = LoopDecoder(model)
    b, t = batch["input_ids"].shape
    real = batch.get("attention_mask", torch.ones(b, t, dtype=torch.long))
    positions = batch.get("position_ids", torch.arange(t).expand(b, t))
    expected = torch.stack(
        [
            loop.row(
                batch["input_ids"][n].tolist(),
                positions[n].tolist(),
                [bool(r) for r in real[n]],
                _documents_of(case.train[n]),
            )
            for n in range(b)
        ]
    )
    logits_close(logits, expected, 1e-12, "logits")


# --- invariances ---------------------------------------------------------------------------------


def _compare_with_bare_rows(case: Case, *, positions: bool) -> None:
    model, batch = case.model(), inputs(case)
    with torch.no_grad():
        logits = model(**batch)
        assert bool(torch.isfinite(logits).all())
        for n, line in enumerate(case.train):
            real = torch.tensor([char != "." for char in line])
            if not bool(real.any()):
                continue
            alone = {"input_ids": batch["input_ids"][n, real].unsqueeze(0)}
            if positions:
                alone["position_ids"] = batch["position_ids"][n, real].unsqueeze(0)
            logits_close(logits[n, real], model(**alone)[0], 1e-12, "real tokens")


@budget(0.3)
@given(case=cases(mode="ragged", explicit_positions=True))
@example(case=EVERYTHING)
@example(case=make_case(("pprr", "..pr", "...."), positions="learned", explicit_positions=True))
def test_padding_on_either_side_leaves_real_tokens_alone(case: Case) -> None:
    _compare_with_bare_rows(case, positions=True)


@budget(0.3)
@given(case=cases(mode="ragged", explicit_positions=False, positions="rotary"))
def test_rotary_positions_see_only_distances(case: Case) -> None:
    _compare_with_bare_rows(case, positions=False)


@budget(0.3)
@given(case=cases(mode="ragged"))
def test_ids_under_padding_do_not_matter(case: Case) -> None:
    model, batch = case.model(), inputs(case)
    if "attention_mask" not in batch:
        return
    real = batch["attention_mask"] != 0
    other = torch.where(real, batch["input_ids"], (batch["input_ids"] + 1) % case.config.vocabulary)
    with torch.no_grad():
        assert torch.equal(model(**batch)[real], model(**{**batch, "input_ids": other})[real])


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
                logits_close(logits[n, span], alone[0], 1e-12, "document")
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


def test_frozen_weights_are_not_scored() -> None:
    adapter = make_case(layers=3).adapter()
    frozen = adapter.scored_linears([1])[0]
    frozen.weight.requires_grad_(False)
    assert frozen.name not in [s.name for s in adapter.scored_linears([1])]
    assert {s.layer for s in adapter.scored_linears([1, 2])} == {1, 2}


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
