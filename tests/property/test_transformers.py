"""Values on real architectures equal per-token autograd on the plain, unmodified model.

The models are float64 with transformers' own float32 casts inside, so the tolerance is 1e-6 of the
sum of absolute terms. In eager attention a float64 mask overflows to NaN on rows that see nothing,
in transformers itself; such rows (left padding) are drawn in float32 there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from alphatoken import FisherDrift, Scorer, ScorerConfig
from alphatoken.adapter import find_adapter
from alphatoken.capture import find_scope, record
from alphatoken.errors import CoverageError, ModelError, UnsupportedError
from alphatoken.oracle import gradients, influence, propagation
from tests.property.architectures import (
    ARCHITECTURES,
    BY_NAME,
    MIXTURES,
    SOFTMAX,
    VOCABULARY,
    Architecture,
    plain_forward,
)
from tests.property.profiles import budget
from tests.property.strategies import SEEDS, Rows, make_batch, rows
from tests.property.tolerance import close

# torch's forward mode compiles some rules with torch.jit at first use, which torch deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)

LAMBDA = 0.7
LENGTH = 8
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5}


@dataclass(frozen=True)
class Setup:
    """One architecture, a training and a validation batch, a scope: structure and a seed."""

    name: str
    train: Rows = ("pprprr",)
    validation: Rows = ("pprr",)
    layers: tuple[int, ...] = (1,)
    implementation: str = "sdpa"
    seed: int = 0
    score_bias: bool = False
    explicit_mask: bool = False
    explicit_positions: bool = False
    window: int | None = 2
    head_reduction: str = "per_head"
    causal_position: str = "label"

    @property
    def architecture(self) -> Architecture:
        return BY_NAME[self.name]

    @property
    def dtype(self) -> torch.dtype:
        """float64, except where eager attention itself gives NaN in float64."""
        beyond = "." * int(self.architecture.options.get("sliding_window", LENGTH))
        blind = any(
            line.startswith(".") or line.endswith(beyond)
            for line in (*self.train, *self.validation)
        )
        overflows = self.implementation == "eager" and self.name not in ("gpt2", "gpt_oss")
        return torch.float32 if blind and overflows else torch.float64

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def build(self, **options: Any) -> nn.Module:
        options = {"implementation": self.implementation, "dtype": self.dtype, **options}
        return self.architecture.build(self.seed, **options)

    def _batch(self, lines: Rows, salt: int) -> dict[str, Tensor]:
        return make_batch(
            lines,
            vocabulary=VOCABULARY,
            seed=self.seed + salt,
            explicit_mask=self.explicit_mask and not any("|" in line for line in lines),
            explicit_positions=self.explicit_positions,
        )

    @property
    def batch(self) -> dict[str, Tensor]:
        return self._batch(self.train, 2**16)

    @property
    def validations(self) -> list[dict[str, Tensor]]:
        """Two batches, so that a mean of means would show."""
        return [self._batch(self.validation, 2**17), self._batch(("prrr",), 2**18)]


@st.composite
def setups(draw: st.DrawFn, name: str) -> Setup:
    """Structures for one architecture: at most two rows of eight tokens."""
    architecture = BY_NAME[name]
    kinds = st.sampled_from(["right", "left", "plain", "ragged"])
    pool = [draw(st.booleans()) for _ in range(architecture.depth)]
    layers = tuple(i for i in range(architecture.depth) if pool[i]) or (architecture.depth - 1,)
    return Setup(
        name,
        draw(rows(draw(kinds), LENGTH, 2)),
        draw(rows(draw(kinds), 5, 2)),
        layers,
        draw(st.sampled_from(architecture.implementations)),
        draw(SEEDS),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([2, None, 1, 32])),
        draw(st.sampled_from(["per_head", "mean"])),
        draw(st.sampled_from(["label", "context"])),
    )


# --- what the oracle is handed ------------------------------------------------------------------


def block_name(architecture: Architecture, layer: int) -> str:
    return f"transformer.h.{layer}" if architecture.name == "gpt2" else f"model.layers.{layer}"


def linears(model: nn.Module, architecture: Architecture, layers: Sequence[int]) -> dict[str, Any]:
    """The linears of these blocks by name, found by type and name alone."""
    prefixes = tuple(f"{block_name(architecture, layer)}." for layer in layers)
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith(prefixes) and isinstance(module, (nn.Linear, Conv1D))
    }


def in_scope(modules: Mapping[str, Any], score_bias: bool) -> dict[str, Tensor]:
    """Parameter name -> parameter of the scored linears."""
    found: dict[str, Tensor] = {}
    for name, module in modules.items():
        found[f"{name}.weight"] = module.weight
        if score_bias and getattr(module, "bias", None) is not None:
            found[f"{name}.bias"] = module.bias
    return found


def fisher_for(parameters: Mapping[str, Tensor], seed: int) -> FisherDrift:
    """A random Fisher and a reference a little away from the weights."""
    generator = torch.Generator().manual_seed(seed)
    fisher, reference = {}, {}
    for name, parameter in parameters.items():
        noise = torch.rand(2, *parameter.shape, generator=generator, dtype=torch.float64)
        fisher[name] = noise[0]
        reference[name] = parameter.detach().double() + 0.3 * (noise[1] - 0.5)
    return FisherDrift(fisher, reference, exact_names=True)


def retention_of(drift: FisherDrift, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: drift.fisher[name] * (parameter.detach().double() - drift.reference[name])
        for name, parameter in parameters.items()
    }


@contextmanager
def tapped_heads(
    model: nn.Module, architecture: Architecture, layers: Sequence[int]
) -> Iterator[list[Tensor]]:
    """Head outputs (b, h, t, v) of these layers, put into the graph before what reads them."""
    heads: list[Tensor] = []

    def split(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        (joined,) = args
        head = joined.unflatten(-1, (-1, architecture.head_dim)).transpose(1, 2)
        heads.append(head)
        return (head.transpose(1, 2).flatten(2),)

    linear = linears(model, architecture, layers)
    chosen = [m for name, m in linear.items() if name.endswith(architecture.output)]
    handles = [module.register_forward_pre_hook(split) for module in chosen]
    try:
        yield heads
    finally:
        for handle in handles:
            handle.remove()


def explicit_mask(batch: Mapping[str, Tensor], window: int | None) -> Tensor:
    """(b, 1, t, t) additive mask, written out; a padded row sees itself and stays finite."""
    count, length = batch["input_ids"].shape
    k, t = torch.arange(length).view(-1, 1), torch.arange(length)
    allowed = (t <= k).expand(count, length, length)
    if window is not None:
        allowed = allowed & (t > k - window)
    if "attention_mask" in batch:
        allowed = allowed & (batch["attention_mask"] != 0)[:, None, :]
    elif "position_ids" in batch:
        documents = (batch["position_ids"] == 0).cumsum(-1)
        allowed = allowed & (documents[:, :, None] == documents[:, None, :])
    allowed = allowed | torch.eye(length, dtype=torch.bool)
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -1e30)[:, None]


def exact_weights(setup: Setup) -> tuple[Tensor, list[Tensor]]:
    """Logits and attention weights per layer from transformers' eager code under our own mask."""
    architecture = setup.architecture
    model = setup.build(implementation="eager", dtype=torch.float64)
    batch, window = setup.batch, architecture.options.get("sliding_window")
    masks: Any = explicit_mask(batch, window)
    if "layer_types" in architecture.options:
        masks = {"sliding_attention": masks, "full_attention": explicit_mask(batch, None)}
    inputs = {k: v for k, v in batch.items() if k not in ("labels", "attention_mask")}
    with torch.no_grad():
        output = model(**inputs, attention_mask=masks, use_cache=False, output_attentions=True)
    return output.logits, list(output.attentions)


@dataclass(frozen=True)
class Truth:
    """What autograd says about one direction, by position."""

    psi: Tensor
    scale: Tensor
    value_propagation: Tensor
    literal: Tensor


class Oracle:
    """Per-token autograd on a plain model of its own."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.architecture = setup, setup.architecture
        self.model = setup.build()
        self.forward = plain_forward(self.model)
        self.modules = linears(self.model, self.architecture, setup.layers)
        self.parameters = in_scope(self.modules, setup.score_bias)
        self.transposed = [n for n, m in self.modules.items() if isinstance(m, Conv1D)]
        self.batch = setup.batch

    def gradient(self) -> dict[str, Tensor]:
        return gradients.validation_gradient(
            self.model, self.forward, self.setup.validations, self.parameters
        )

    def influence(self, direction: Mapping[str, Tensor]) -> influence.Influence:
        return influence.exact_influence(
            self.model,
            self.forward,
            self.batch,
            self.modules,
            direction,
            score_bias=self.setup.score_bias,
            transposed=self.transposed,
        )

    @cached_property
    def alphas(self) -> list[Tensor]:
        """Attention weights by layer; the logits of that run show that the masks are right."""
        logits, alphas = exact_weights(self.setup)
        with torch.no_grad():
            own = self.forward({k: v for k, v in self.batch.items() if k != "labels"})
        real = self.batch.get("attention_mask", torch.ones_like(self.batch["input_ids"])) != 0
        assert torch.allclose(own[real].double(), logits[real], atol=3e-5)
        return alphas

    @cached_property
    def head_errors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Errors at the heads' outputs: self-only ones, and those of the summed loss."""
        with tapped_heads(self.model, self.architecture, self.setup.layers) as heads:
            alone = propagation.head_output_errors(self.forward, self.batch, lambda: heads)
            heads.clear()
            losses = gradients.run_losses(self.forward, self.batch)
            return alone, list(torch.autograd.grad(sum(losses.values()), heads))

    @cached_property
    def value_uses(self) -> list[influence.Use]:
        """One use of the linear that makes the value states, by scored layer."""
        suffix = self.architecture.value
        chosen = {n: m for n, m in self.modules.items() if n.endswith(suffix)}
        with influence.recorded_uses(chosen) as uses, torch.no_grad():
            self.forward({k: v for k, v in self.batch.items() if k != "labels"})
            return list(uses)

    def propagated(
        self, direction: Mapping[str, Tensor], *, aggregated: bool, head_reduction: str
    ) -> Tensor:
        """Value-Propagation by label position, of self-only or of aggregated errors."""
        setup = self.setup
        kept = slice(*(self.architecture.value_rows or (None,)))
        layers = []
        for layer, error, use in zip(
            setup.layers, self.head_errors[aggregated], self.value_uses, strict=True
        ):
            m, bias = direction[f"{use.name}.weight"], direction.get(f"{use.name}.bias")
            m = (m.T if use.name in self.transposed else m)[kept]
            layers.append(
                propagation.PropagationLayer(
                    self.alphas[layer], error, use.x, m, None if bias is None else bias[kept]
                )
            )
        return propagation.value_propagation(
            layers,
            window=setup.window,
            causal_position=setup.causal_position,
            head_reduction=head_reduction,
        )


def value_of(
    setup: Setup, model: nn.Module, drift: FisherDrift | None, estimator: str, **config: Any
) -> Any:
    options = {
        "estimator": estimator,
        "layers": setup.layers,
        "stability_weight": LAMBDA,
        "window": setup.window,
        "head_reduction": setup.head_reduction,
        "causal_position": setup.causal_position,
        "score_bias": setup.score_bias,
        "uncovered": "skip",
        "max_relative_drift": None,
        **config,
    }
    return Scorer(model, setup.validations, drift, ScorerConfig(**options)).score(setup.batch)


def at_tokens(by_position: Tensor, labels: Tensor) -> Tensor:
    """By token index, zero off the response."""
    response = labels != -100
    response[:, 0] = False
    return influence.to_token_index(by_position).masked_fill(~response, 0.0)


def compare_captured(setup: Setup) -> None:
    """All estimators on one setup, against one run of the oracle for each side of M."""
    oracle = Oracle(setup)
    model = setup.build().train()
    drift = fisher_for(oracle.parameters, setup.seed + 7)
    sides = {"adaptation": oracle.gradient(), "stability": retention_of(drift, oracle.parameters)}
    labels, tolerance = setup.batch["labels"], setup.tolerance
    found = {
        e: value_of(setup, model, drift, e)
        for e in ("label", "path", "direct", "alphatoken", "paper_literal")
    }
    totals = {name: torch.zeros(labels.shape, dtype=torch.float64) for name in found}
    scale_of_total = torch.zeros(labels.shape, dtype=torch.float64)
    whole = scale_of_whole = 0.0
    for side, direction in sides.items():
        exact = oracle.influence(direction)
        psi, absolute = exact.matrix, exact.absolute_scale
        causal = oracle.propagated(direction, aggregated=False, head_reduction=setup.head_reduction)
        literal = oracle.propagated(direction, aggregated=True, head_reduction="mean")
        columns = influence.column_sums(psi)
        expected = {
            "label": at_tokens(influence.row_sums(psi), labels),
            "path": at_tokens(columns, labels),
            "direct": at_tokens(influence.diagonal(psi), labels),
        }
        expected["alphatoken"] = expected["direct"] + at_tokens(causal, labels)
        expected["paper_literal"] = expected["path"] + at_tokens(literal, labels)
        scale = at_tokens(influence.column_sums(absolute) + influence.row_sums(absolute), labels)
        for name, values in found.items():
            close(getattr(values, side), expected[name], scale, tolerance, name=f"{name} {side}")
        split = found["alphatoken"]
        close(getattr(split, f"{side}_direct"), expected["direct"], scale, tolerance, name="split")
        close(
            getattr(split, f"{side}_causal"), at_tokens(causal, labels), scale, tolerance,
            name="Value-Propagation",
        )  # fmt: skip
        weight = 1.0 if side == "adaptation" else LAMBDA
        for name in found:
            totals[name] += weight * expected[name]
        scale_of_total += weight * scale
        whole += weight * float(psi.sum())
        scale_of_whole += weight * float(absolute.sum())
    for name, values in found.items():
        close(values.total, totals[name], scale_of_total, tolerance, name=f"{name} total")
    for name in ("label", "path"):  # both add up to the whole gradient's inner product
        summed = found[name].total.sum() + found[name].unassigned.sum()
        close(summed, whole, scale_of_whole, tolerance, name=f"{name} sum")


# --- softmax attention ---------------------------------------------------------------------------

RAGGED = ("..pprrpr", "prprr...")


@pytest.mark.parametrize("name", SOFTMAX)
def test_values_equal_per_token_autograd(name: str) -> None:
    """label, path, direct, Value-Propagation and paper_literal, for both sides of M."""
    architecture = BY_NAME[name]
    layers = tuple(range(architecture.depth))
    implementation = architecture.implementations[0]

    @given(setup=setups(name))
    @example(setup=Setup(name, RAGGED, ("ppprr", "..prr"), layers, implementation, 1, True))
    @budget(0.015, least=3)
    def holds(setup: Setup) -> None:
        compare_captured(setup)

    holds()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [n for n in SOFTMAX if "sdpa" in BY_NAME[n].implementations])
def test_both_implementations_of_attention(name: str, implementation: str) -> None:
    compare_captured(Setup(name, ("prprrr..", "pprrrprr"), ("pprr.",), (1,), implementation, 2))


@pytest.mark.parametrize("name", SOFTMAX)
def test_the_same_layer_hop_of_the_last_layer_is_exact(name: str) -> None:
    """K = 1: every hop is a same-layer hop, so same_layer_hop = path."""
    architecture = BY_NAME[name]

    @given(setup=setups(name))
    @example(setup=Setup(name, RAGGED, implementation=architecture.implementations[0], seed=3))
    @budget(0.01, least=2)
    def holds(setup: Setup) -> None:
        setup = replace(setup, layers=(architecture.depth - 1,), causal_position="label")
        model = setup.build()
        hop, path = (value_of(setup, model, None, e) for e in ("same_layer_hop", "path"))
        exact = Oracle(setup).influence(Oracle(setup).gradient())
        scale = at_tokens(influence.column_sums(exact.absolute_scale), setup.batch["labels"])
        close(hop.total, path.total, scale, setup.tolerance, name="same layer = path")
        assert float(path.total.abs().max()) > 0

    holds()


@pytest.mark.parametrize("name", [a.name for a in ARCHITECTURES])
def test_recording_changes_no_bit_of_the_forward(name: str) -> None:
    """Logits inside the recording context are the plain model's own, bit for bit."""
    architecture = BY_NAME[name]
    for implementation in architecture.implementations:
        for lines in (("pprrprrr", "prprprrr"), ("prrrr...", "pprprrrr")):
            setup = Setup(name, lines, implementation=implementation, seed=4)
            model = setup.build()
            inputs = {k: v for k, v in setup.batch.items() if k != "labels"}
            plain = model(**inputs, use_cache=False).logits
            adapter = find_adapter(model)
            scope = find_scope(adapter, "all")
            with record(adapter, scope, attention=True) as recorder:
                recorded = model(**inputs, use_cache=False).logits
                assert len(recorder.linears) == len(scope.linears)
            assert torch.equal(plain, recorded)
            assert torch.equal(plain, model(**inputs, use_cache=False).logits)


@pytest.mark.parametrize("name", [a.name for a in ARCHITECTURES])
def test_label_values_over_all_parameters(name: str) -> None:
    """Embeddings, norms, biases, routers, experts, sinks, tied and untied heads take part."""
    architecture = BY_NAME[name]
    setup = Setup(name, ("..prrpr", "prprr.."), ("pprr",), seed=5)
    if "sdpa" not in architecture.implementations:
        setup = replace(setup, implementation="eager", train=("pprprpr", "prprr.."))
    model, plain = setup.build(), setup.build()
    forward, batch = plain_forward(plain), setup.batch
    parameters = dict(plain.named_parameters())
    direction = gradients.validation_gradient(plain, forward, setup.validations, parameters)
    expected = gradients.label_values(plain, forward, batch, direction)
    scale = torch.zeros_like(expected)
    tokens = gradients.response_tokens(gradients.known_labels(batch))
    each = gradients.per_token_gradients(plain, forward, batch, parameters, tokens)
    for (b, i), gradient in zip(tokens, each, strict=True):
        scale[b, i] = sum(
            float((g.double() * direction[n]).abs().sum()) for n, g in gradient.items()
        )
    config = ScorerConfig(estimator="label", parameters="all", layers=1)
    scorer = Scorer(model, setup.validations, config=config)
    values = scorer.score(batch)
    assert set(scorer.coverage.parameters) == set(parameters)
    close(values.total, expected, scale, setup.tolerance, name="label, all parameters")


# --- tied weights and packing -------------------------------------------------------------------


def test_the_tied_architectures_are_tied() -> None:
    """What the property above says about tied heads is about tied heads."""
    tied = {
        a.name
        for a in ARCHITECTURES
        if (m := a.build()).get_output_embeddings().weight is m.get_input_embeddings().weight
    }
    assert {"gemma3", "gemma2", "gpt2"} <= tied
    assert "llama" not in tied


@pytest.mark.parametrize("estimator", ["alphatoken", "direct", "path", "label", "same_layer_hop"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_packed_documents_have_the_values_of_separate_ones(name: str, estimator: str) -> None:
    architecture = BY_NAME[name]
    options = {"implementation": architecture.implementations[0], "seed": 6, "window": None}
    packed = Setup(name, ("pprr|prrpr|pr",), ("pprr",), (0, 1), **options)
    model = packed.build()
    whole = value_of(packed, model, None, estimator)
    start, largest = 0, float(whole.total.abs().max())
    for document in packed.train[0].split("|"):
        stop = start + len(document)
        piece = {k: packed.batch[k][:, start:stop] for k in ("input_ids", "labels")}
        config = ScorerConfig(estimator=estimator, layers=(0, 1), window=None, uncovered="skip")
        alone = Scorer(model, packed.validations, config=config).score(piece)
        close(whole.total[:, start:stop], alone.total, largest, 1e-6, name=f"packed {estimator}")
        start = stop


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "qwen3"])
def test_packed_documents_equal_the_oracle(name: str) -> None:
    compare_captured(Setup(name, ("pprr|prr|pr", "prr|prrprr"), ("pprr|prr",), (0, 1), seed=7))


@pytest.mark.parametrize("estimator", ["alphatoken", "path", "label"])
def test_packed_documents_that_see_each_other_are_refused(estimator: str) -> None:
    """With an attention mask of ones transformers drops the document boundaries."""
    setup = Setup("llama", ("pprr|prrpr",), seed=8)
    batch = {**setup.batch, "attention_mask": torch.ones_like(setup.batch["input_ids"])}
    scorer = Scorer(setup.build(), setup.validations, config=ScorerConfig(estimator, layers=1))
    with pytest.raises(ModelError, match="packed documents see each other"):
        scorer.score(batch)
    good = scorer.score(setup.batch)  # the same scorer works on a batch that does not leak
    assert bool(torch.isfinite(good.total).all())
    with pytest.raises(ModelError):  # and does not remember the good batch as proof for this one
        scorer.score(batch)


@pytest.mark.parametrize("estimator", ["direct", "label"])
def test_packing_is_refused_where_the_model_leaks_by_itself(estimator: str) -> None:
    """transformers' gpt-oss gives its mask functions no positions, so its documents leak."""
    setup = Setup("gpt_oss", ("pprr|prrpr",), implementation="eager", seed=8)
    with pytest.raises(ModelError, match="packed documents see each other"):
        value_of(setup, setup.build(), None, estimator)


# --- hybrids ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(2,), (1,), (0, 1, 2)])
def test_label_and_path_are_exact_on_a_hybrid(layers: tuple[int, ...]) -> None:
    setup = Setup("qwen3_5", RAGGED, ("ppprr", "..prr"), layers, seed=9)
    oracle = Oracle(setup)
    direction = oracle.gradient()
    exact = oracle.influence(direction)
    labels, model = setup.batch["labels"], setup.build()
    scale = at_tokens(
        influence.row_sums(exact.absolute_scale) + influence.column_sums(exact.absolute_scale),
        labels,
    )
    expected = {
        "label": influence.row_sums(exact.matrix),
        "path": influence.column_sums(exact.matrix),
    }
    if layers == (2,):  # from the last layer on there is softmax attention only
        expected["direct"] = influence.diagonal(exact.matrix)
        expected["same_layer_hop"] = expected["path"]
    for name, by_position in expected.items():
        values = value_of(setup, model, None, name)
        wanted = at_tokens(by_position, labels)
        close(values.total, wanted, scale, 1e-6, name=f"hybrid {name}")


@pytest.mark.parametrize("estimator", ["direct", "alphatoken", "same_layer_hop", "paper_literal"])
def test_estimators_without_a_rule_for_linear_attention_are_refused(estimator: str) -> None:
    setup = Setup("qwen3_5", layers=(1, 2), seed=9)
    with pytest.raises(UnsupportedError) as caught:
        value_of(setup, setup.build(), None, estimator)
    message = str(caught.value)
    assert f"'{estimator}'" in message
    assert "model.layers.1 (linear_attention)" in message
    assert "estimator='label'" in message


@pytest.mark.parametrize("estimator", ["label", "path"])
def test_packing_on_a_hybrid_is_refused(estimator: str) -> None:
    """Its recurrent state runs on across documents."""
    setup = Setup("qwen3_5", ("pprr|prrpr",), layers=(1, 2), seed=9)
    with pytest.raises((ModelError, UnsupportedError)):
        value_of(setup, setup.build(), None, estimator)


# --- mixtures of experts ------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_label_values_of_a_mixture_include_its_experts(name: str) -> None:
    setup = Setup(name, ("pprprrr", "prrr..."), ("pprrr",), (0, 1), seed=10)
    setup = replace(setup, implementation=BY_NAME[name].implementations[0])
    plain = setup.build()
    forward = plain_forward(plain)
    matrices = {
        n: p for n, p in plain.named_parameters() if n.startswith("model.layers.") and p.dim() >= 2
    }
    assert any(p.dim() == 3 for p in matrices.values())
    direction = gradients.validation_gradient(plain, forward, setup.validations, matrices)
    expected = gradients.label_values(plain, forward, setup.batch, direction)
    without = {n: m for n, m in direction.items() if "self_attn" in n}
    partial = gradients.label_values(plain, forward, setup.batch, without)
    values = value_of(setup, setup.build(), None, "label", uncovered="error")
    scale = float(expected.abs().sum())
    close(values.total, expected, scale, 1e-6, name="label, experts")
    assert float((expected - partial).abs().max()) > 1e-3 * scale  # the experts do take part


@pytest.mark.parametrize("estimator", ["alphatoken", "direct", "path"])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_refused_or_skipped_by_name(name: str, estimator: str) -> None:
    setup = Setup(name, implementation=BY_NAME[name].implementations[0], seed=11)
    model = setup.build()
    with pytest.raises(CoverageError) as caught:
        value_of(setup, model, None, estimator, uncovered="error")
    message = str(caught.value)
    assert "model.layers.1.mlp." in message
    assert "estimator='label'" in message
    assert "uncovered='skip'" in message
    config = ScorerConfig(estimator, layers=(1,), uncovered="skip")
    scorer = Scorer(model, setup.validations, config=config)
    scorer.score(setup.batch)
    skipped = set(scorer.coverage.skipped)
    matrices = {n for n, p in model.named_parameters() if "layers.1.mlp." in n and p.dim() >= 2}
    assert matrices
    assert matrices <= skipped
    assert not skipped & set(scorer.coverage.parameters)
