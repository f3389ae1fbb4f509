"""Models with gated delta nets: direct part, Value-Propagation, certificate, dispatch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM

from alphatoken import Scorer, ScorerConfig
from alphatoken.errors import UnsupportedError
from alphatoken.model import delta_dispatch
from alphatoken.model.capture import record
from alphatoken.model.protocol import find_adapter
from alphatoken.model.scope import find_scope
from alphatoken.oracle import influence
from alphatoken.oracle.influence import Influence
from tests.property.architectures import BY_NAME, VOCABULARY, Architecture
from tests.property.profiles import budget
from tests.property.setups import at_tokens, refusal
from tests.property.strategies import Rows, make_batch
from tests.property.test_transformers import Oracle
from tests.property.tolerance import allowed, close

_NAMES = inspect.signature(Qwen3_5ForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _NAMES else "past_key_values"

LINEAR, FULL = "linear_attention", "full_attention"
_QWEN = BY_NAME["qwen3_5"]

FAMILIES: Mapping[str, Architecture] = {
    "qwen3_5": _QWEN,
    "qwen3_next": Architecture(
        "qwen3_next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**_QWEN.options, "mlp_only_layers": [0, 1, 2]},
    ),
    "olmo_hybrid": Architecture(
        "olmo_hybrid", "OlmoHybridConfig", "OlmoHybridForCausalLM", _QWEN.options
    ),
}  # fmt: skip
"""Families whose delta nets the dispatch knows; qwen3_5_moe has those of qwen3_5."""

PATTERNS = (
    (LINEAR, LINEAR, FULL),
    (FULL, LINEAR, LINEAR),
    (LINEAR, FULL, LINEAR),
    (FULL, LINEAR, FULL),
)


@dataclass(frozen=True)
class HybridCase:
    """One model, one training batch; ``ratio`` value heads a key head, ``taps`` of the convolution.

    ``slow`` decays hardly forget, which makes the state matter.
    """

    family: str = "qwen3_5"
    pattern: tuple[str, ...] = PATTERNS[0]
    layers: tuple[int, ...] = (0, 1, 2)
    ratio: int = 2
    taps: int = 3
    train: Rows = ("..pprrpr", "prprrr..")
    slow: bool = True
    seed: int = 0

    @property
    def architecture(self) -> Architecture:
        return FAMILIES[self.family]

    def build(self) -> nn.Module:
        model = self.architecture.build(
            self.seed,
            layer_types=list(self.pattern),
            linear_num_value_heads=2 * self.ratio,
            linear_conv_kernel_dim=self.taps,
        )
        if self.slow:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("A_log"):
                        parameter.sub_(3.0)
        return model

    @cached_property
    def batch(self) -> dict[str, Tensor]:
        return make_batch(self.train, vocabulary=VOCABULARY, seed=self.seed + 1)

    @cached_property
    def validations(self) -> list[dict[str, Tensor]]:
        lines = (("ppprr", "..prr"), ("prrr",))
        return [
            make_batch(x, vocabulary=VOCABULARY, seed=self.seed + 2 + i)
            for i, x in enumerate(lines)
        ]

    def scorer(self, model: nn.Module, estimator: str, **config: Any) -> Scorer:
        options = {"layers": self.layers, "uncovered": "skip", "window": None, **config}
        return Scorer(model, self.validations, config=ScorerConfig(estimator, **options))


def hybrid_cases(**pins: Any) -> st.SearchStrategy[HybridCase]:
    """Any family, order of layers, scope, heads, taps and rows."""
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "family": st.sampled_from(["qwen3_5", "qwen3_5", "qwen3_next", "olmo_hybrid"]),
        "pattern": st.sampled_from(PATTERNS),
        "layers": st.sampled_from([(0, 1, 2), (1, 2), (2,), (0,), (0, 2)]),
        "ratio": st.sampled_from([1, 2, 3]),
        "taps": st.sampled_from([2, 3, 4, 1]),
        "train": st.sampled_from(
            [
                ("..pprrpr", "prprrr.."),
                ("pr",),
                ("prrrrrrr",),
                ("....prrr",),
                ("pprpr...", "prrrrrrr"),
            ]
        ),
        "slow": st.booleans(),
        "seed": st.integers(1, 2**16),
    }
    return st.builds(HybridCase, **drawn | pins)


class Truth(Oracle):
    """Per-token autograd on a plain model of its own."""

    def influence(self, direction: Mapping[str, Tensor] | None = None) -> Influence:
        return super().influence(direction or self.slopes)

    @cached_property
    def slopes(self) -> dict[str, Tensor]:
        """G."""
        return self.gradient()

    def at_tokens(self, by_position: Tensor) -> Tensor:
        return at_tokens(by_position, self.batch["labels"])

    def scale(self, exact: Influence) -> Tensor:
        absolute = exact.absolute_scale
        return self.at_tokens(influence.column_sums(absolute) + influence.row_sums(absolute))


TOLERANCE = allowed("library", torch.float64)


def value_rows(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """1 on the rows of a delta net's projection that make its values, 0 on the others."""
    net: Any = model.get_submodule(name.rpartition(".")[0])
    rows = torch.zeros(weight.shape[0], dtype=weight.dtype)
    if name.endswith("in_proj_qkv"):
        rows[2 * net.key_dim :] = 1
    elif name.endswith("in_proj_qkvz"):  # grouped by key heads: query, key, values, gates
        each = rows.view(net.num_k_heads, -1)
        wide = net.value_dim // net.num_k_heads
        each[:, 2 * net.head_k_dim : 2 * net.head_k_dim + wide] = 1
    elif name.endswith("v_proj"):
        rows[:] = 1
    return rows.unsqueeze(-1)


def _raise_inside(model: Any, adapter: Any, batch: dict[str, Tensor], nets: Any) -> None:
    """An error in the middle of a delta net leaves no thread inside of it."""

    reached = []

    def fail(call: Any, native: Any) -> Tensor:
        reached.append(call)
        raise KeyError

    plain = model(**batch, use_cache=False).logits
    overridden = adapter.override_delta_nets(nets, lambda call, native: native(call.x), fail)
    with suppress(KeyError), overridden:
        model(**batch, use_cache=False)
    assert len(reached) == 1
    assert not getattr(delta_dispatch._RUNNING, "modules", ()), "the thread is still in a layer"
    assert torch.equal(model(**batch, use_cache=False).logits, plain)


def _enter_and_leave(models: Any, adapters: Any, batch: dict[str, Tensor], nets: Any) -> None:
    """Three overrides of two models, left in the order in which they came."""
    plain = [model(**batch, use_cache=False).logits for model in models]

    def entered(which: int) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(
            adapters[which].override_delta_nets(
                nets[which],
                lambda call, native: native(call.x),
                lambda call, native: (
                    2 * native(call.query, call.key, call.value, call.decay, call.beta)
                ),
            )
        )
        return stack

    first, second, again = entered(0), entered(1), entered(0)
    doubled = models[0](**batch, use_cache=False).logits
    assert not torch.equal(doubled, plain[0]), "the override was not called"
    first.close()
    assert not torch.equal(models[0](**batch, use_cache=False).logits, plain[0])
    again.close()
    assert torch.equal(models[0](**batch, use_cache=False).logits, plain[0])
    assert not torch.equal(models[1](**batch, use_cache=False).logits, plain[1])
    with suppress(KeyError), second:
        raise KeyError
    assert torch.equal(models[1](**batch, use_cache=False).logits, plain[1])


pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The (adaptation|stability) side alone decides"),
]
LAST = (LINEAR, FULL, LINEAR)
SHARES = {"pattern": st.sampled_from([LAST, (FULL, LINEAR, LINEAR)]), "layers": st.just((2,))}


@given(hybrid_cases())
@example(HybridCase())
@example(HybridCase("qwen3_next", layers=(0, 2), ratio=1, taps=4))
@example(HybridCase("olmo_hybrid", LAST, (2,), train=("prrrrrr",)))
@budget(0.2, least=2)
def test_direct_is_the_diagonal_of_a_hybrid(case: HybridCase) -> None:
    """direct = diag(Psi), and path = its column sums, through every scored linear of a hybrid.

    Proves: direct is the diagonal of a hybrid (exact), against ``exact_influence``, ``diagonal``,
    ``column_sums``.
    """
    truth, model = Truth(case), case.build().train()
    exact = truth.influence()
    scale = truth.scale(exact)
    found = case.scorer(model, "direct").score(case.batch).total
    expected = truth.at_tokens(influence.diagonal(exact.matrix))
    close(found, expected, scale, TOLERANCE, name="direct on a hybrid")
    paths = case.scorer(model, "path").score(case.batch).total
    expected = truth.at_tokens(influence.column_sums(exact.matrix))
    close(paths, expected, scale, TOLERANCE, name="path on a hybrid")


@given(hybrid_cases(**SHARES))
@example(HybridCase(pattern=LAST, layers=(2,)))
@example(HybridCase("qwen3_next", LAST, (2,), taps=4))
@example(HybridCase("olmo_hybrid", LAST, (2,)))
@budget(0.2, least=2)
def test_propagation_is_exact_for_the_value_rows(case: HybridCase) -> None:
    """In the last decoder layer Value-Propagation is the off-diagonal Psi of the value projection.

    Its window spans the row. Queries, keys and gates have rows of their own, whose off-diagonal
    Psi it leaves out; what the gate of the output and the output projection pass to other
    positions is zero.

    Proves: propagation is exact for the value rows (exact), against ``exact_influence``,
    ``causal``.
    """
    truth, model = Truth(case), case.build()
    assert case.layers == (2,)
    assert case.pattern[-1] == LINEAR
    kept = {
        name: m * value_rows(truth.model, name.removesuffix(".weight"), m)
        for name, m in truth.slopes.items()
    }
    exact = truth.influence(kept)
    found = case.scorer(model, "alphatoken").score(case.batch)
    close(
        found.adaptation_causal,
        truth.at_tokens(influence.causal(exact.matrix)),
        truth.scale(truth.influence()),
        TOLERANCE,
        name="propagation in the last delta net",
    )
    whole = truth.influence()
    for name, terms in whole.terms.items():
        if name.endswith(("in_proj_z", "g_proj", "out_proj", "o_proj")):
            assert not bool(influence.causal(terms).any()), name


@pytest.mark.parametrize(
    ("family", "estimator"),
    [
        ("qwen3_5", "label"),
        ("olmo_hybrid", "alphatoken"),
        pytest.param("qwen3_5", "alphatoken", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "alphatoken", marks=pytest.mark.slow),
    ],
)
def test_the_certificate_of_a_hybrid(family: str, estimator: str) -> None:
    """``Scorer.verify`` rebuilds every value of a hybrid from autograd alone, and agrees.

    Proves: the certificate of a hybrid (exact), against every value from autograd alone.
    """
    case = HybridCase(family, LAST, (1, 2), ratio=3, seed=4)
    model = case.build()
    scorer = case.scorer(model, estimator)
    certificate = scorer.verify(case.batch)
    assert certificate.passed, str(certificate)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_one_forward_of_a_hybrid_serves_both(family: str) -> None:
    """Logits and training gradients under observation are the plain model's, bit for bit.

    Proves: one forward of a hybrid serves both (exact), against the plain model, bit by bit.
    """
    case = HybridCase(family, layers=(1, 2), seed=2)
    inputs = {k: v for k, v in case.batch.items() if k != "labels"}
    plain = case.build()
    logits = plain(**inputs, use_cache=False).logits
    logits.square().sum().backward()
    model = case.build()
    scorer = case.scorer(model, "alphatoken")
    with scorer.observe() as observed:
        again = model(**inputs, use_cache=False).logits
        values = observed.values(again, case.batch["labels"])
        assert torch.equal(again, logits)
        assert all(p.grad is None for p in model.parameters())
        again.square().sum().backward()
    assert bool(torch.isfinite(values.total).all())
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name
    fresh = case.scorer(model, "alphatoken").score(case.batch)
    close(values.total, fresh.total, fresh.total.abs().max(), 1e-10, name="observed on a hybrid")


@pytest.mark.parametrize("family", list(FAMILIES))
def test_overrides_of_delta_nets_leave_nothing_behind(family: str) -> None:
    """Names, hooks and outputs are what they were, whatever the order of leaving, or an error.

    Proves: overrides of delta nets leave nothing behind (exact), against the modeling file before.
    """
    models = [HybridCase(family, seed=seed).build() for seed in (1, 2)]
    adapters = [find_adapter(model) for model in models]
    batch = {"input_ids": torch.arange(1, 7).view(1, 6)}
    nets = [adapter.delta_nets(0) for adapter in adapters]  # type: ignore[attr-defined]
    assert all(len(found) == 1 for found in nets)
    names: Any = delta_dispatch._file_of(nets[0][0])
    before = {n: names[n] for n in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")}
    try:
        _enter_and_leave(models, adapters, batch, nets)
        assert all(names[n] is function for n, function in before.items()), "a name is replaced"
        assert not delta_dispatch._ACTIVE
        assert not any(net._forward_pre_hooks or net._forward_hooks for (net,) in nets)
        scope = find_scope(adapters[0], "all")
        with suppress(IndexError), record(adapters[0], scope):
            models[0](input_ids=torch.tensor([[10**6]]))
        _raise_inside(models[0], adapters[0], batch, nets[0])
        assert all(names[n] is function for n, function in before.items())
    finally:
        names.update(before)
        delta_dispatch._RUNNING.modules = ()


def test_a_cached_pass_is_refused() -> None:
    """A state to begin with, held by the model itself, belongs to positions that did not run.

    Proves: a cached pass is refused (exact), against traps.
    """
    case = HybridCase(pattern=(FULL, LINEAR, LINEAR), layers=(1, 2))
    model: Any = case.build()
    scorer = case.scorer(model, "alphatoken")
    batch = make_batch(("pprrpr",) * 3, vocabulary=VOCABULARY, seed=3)
    scorer.score(batch)
    with torch.no_grad():
        cache = model(input_ids=batch["input_ids"][:, :3], use_cache=True)[CACHE]
    inner = model.model.forward
    rest, labels = (batch[name][:, 3:] for name in ("input_ids", "labels"))
    with scorer.observe() as observed:  # whose forwards for M are run without the cache
        model.model.forward = lambda *args, **more: inner(*args, **more | {CACHE: cache})
        # Positions are a kind of arguments that no proof has met; a slice of two of the three rows
        # would not go with the cache.
        places = torch.arange(3, 6).expand(3, -1)
        logits = model(input_ids=rest, position_ids=places, use_cache=True).logits
        error = refusal(lambda: observed.values(logits, labels))
    assert isinstance(error, UnsupportedError), f"a pass from a cache was valued: {error}"
    assert "cache" in str(error)


@pytest.mark.parametrize("stop", [3, 5])
def test_a_state_to_begin_with_is_told(stop: int) -> None:
    """Every call of a rule says whether it goes on from the state of a cache.

    Proves: a state to begin with is told (exact), against a pass without a cache.
    """
    case = HybridCase(pattern=(FULL, LINEAR, LINEAR))
    model: Any = case.build()
    adapter: Any = find_adapter(model)
    ids, seen = case.batch["input_ids"][1:, :6], []

    def rule(call: Any, native: Any) -> Tensor:
        seen.append(call.cached)
        output: Tensor = native(call.query, call.key, call.value, call.decay, call.beta)
        return output

    nets = [net for layer in range(3) for net in adapter.delta_nets(layer)]
    with torch.no_grad(), adapter.override_delta_nets(nets, lambda c, native: native(c.x), rule):
        whole = model(input_ids=ids, use_cache=False).logits
        cache = model(input_ids=ids[:, :stop], use_cache=True)[CACHE]
        rest = model(input_ids=ids[:, stop:], **{CACHE: cache}).logits
    assert seen == [False, False, False, False, True, True]
    close(rest, whole[:, stop:], whole.abs().max(), 1e-5, name="a pass from a state")


@pytest.mark.parametrize("name", ["seq_idx", "cu_seqlens", "cu_seq_lens_q"])
def test_bounds_of_packed_documents_are_refused(name: str) -> None:
    """By convolution and rule, before the kernel: that of torch takes none, faster ones do."""
    case = HybridCase(pattern=LAST)
    (net,) = find_adapter(case.build()).delta_nets(0)  # type: ignore[attr-defined]
    x, gates, bounds = torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2), {name: torch.tensor([0, 3])}
    with pytest.raises(UnsupportedError, match=f"packed documents.*{name}"):
        delta_dispatch._step(net, pytest.fail, x, x, x, gates, gates, **bounds)
    with pytest.raises(UnsupportedError, match=f"packed documents.*{name}"):
        delta_dispatch._convolve(net, pytest.fail, x[0], x[0], **bounds)


@pytest.mark.parametrize("normalised", [True, False])
def test_a_rule_is_told_whether_its_kernel_normalises(normalised: bool) -> None:
    """All models of transformers ask for it; a kernel of one's own need not."""
    case = HybridCase(pattern=LAST)
    adapter: Any = find_adapter(case.build())
    (net,) = adapter.delta_nets(0)
    told, given = [], []

    def rule(call: Any, native: Any) -> Any:
        told.append(call.normalised)
        return native(call.query, call.key, call.value, call.decay, call.beta)

    def kernel(q: Any, k: Any, v: Any, **options: Any) -> Any:
        given.append(options["use_qk_l2norm_in_kernel"])
        return v, None

    x, gates = torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2)
    with adapter.override_delta_nets([net], lambda c, native: native(c.x), rule):
        delta_dispatch._step(net, kernel, x, x, x, gates, gates, use_qk_l2norm_in_kernel=normalised)
    assert told == given == [normalised]


@pytest.mark.parametrize("train", [("pr",), ("prrr", "prr.")])
def test_a_cache_that_begins_changes_no_value(train: Rows) -> None:
    """A forward that fills an empty cache pads short rows before the convolution.

    Proves: a cache that begins changes no value (exact), against a pass without a cache.
    """
    case = HybridCase(pattern=(FULL, LINEAR, LINEAR), layers=(1, 2), taps=4, train=train)
    model: Any = case.build()
    scorer = case.scorer(model, "alphatoken")
    expected = scorer.score(case.batch).total
    inputs = {k: v for k, v in case.batch.items() if k != "labels"}
    with scorer.observe() as observed:
        logits = model(**inputs, use_cache=True).logits
        found = observed.values(logits, case.batch["labels"]).total
    close(found, expected, expected.abs().max(), TOLERANCE, name="while a cache is filled")
