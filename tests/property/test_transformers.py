"""Values on real architectures equal per-token autograd on the plain, unmodified model.

The models are float64 with transformers' own float32 casts inside, so the tolerance is 5e-6 of the
sum of absolute terms. In eager attention a float64 mask overflows to NaN on rows that see nothing,
in transformers itself; such rows (left padding) are drawn in float32 there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from alphatoken import FisherDrift, Scorer, ScorerConfig
from alphatoken.config import READ_BY
from alphatoken.errors import CoverageError, ModelError
from alphatoken.model.capture import record
from alphatoken.model.protocol import find_adapter
from alphatoken.model.scope import find_scope
from alphatoken.oracle import gradients, influence, propagation
from alphatoken.oracle.influence import Influence, Use
from tests.places import tiered
from tests.property.architectures import (
    ARCHITECTURES,
    BY_NAME,
    MIXTURES,
    VOCABULARY,
    Architecture,
    plain_forward,
)
from tests.property.profiles import budget
from tests.property.setups import at_tokens, random_drift
from tests.property.strategies import DEVICES, MODES, SEEDS, Rows, make_batch, rows
from tests.property.tolerance import allowed, close

# torch's forward mode compiles some rules with torch.jit at first use, which torch deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:label values replace flash attention"),
    # A drawn model may have next to no drift: nothing is wrong with its values.
    pytest.mark.filterwarnings("ignore:The (adaptation|stability) side alone decides"),
]

# Split, fused and transposed projections; soft-cap and windows by layer; sinks, experts and no mask
# by positions; layers without softmax.
DIFFERENT = ("llama", "gpt2", "gemma2", "gpt_oss", "qwen3_5")
FAMILIES = tiered(BY_NAME, DIFFERENT)
"""All, those that differ most in structure at every change."""
LAMBDA = 0.7
LENGTH = 8
LEAKING = ("gpt_oss", "qwen3_5")
"""Packed documents see each other there: no mask by positions, a recurrent state that runs on. A
flash kernel keeps gpt_oss's apart, by their bounds."""


@dataclass(frozen=True)
class Setup:
    """One model of one architecture, training batches and validation rows, a scope: and a seed."""

    name: str
    train: Rows = ("pprprr",)
    validation: Rows = ("pprr",)
    layers: tuple[int, ...] = (1,)
    implementation: str = "sdpa"
    seed: int = 0
    explicit_mask: bool = False
    explicit_positions: bool = False
    window: int | None = 2
    more: tuple[Rows, ...] = ()
    double: bool = True
    options: tuple[tuple[str, Any], ...] = ()
    device: str = "cpu"

    @property
    def architecture(self) -> Architecture:
        return BY_NAME[self.name].changed(dict(self.options))

    @property
    def dtype(self) -> torch.dtype:
        """As asked, but float32 where eager attention itself gives NaN in float64."""
        beyond = "." * int(self.architecture.options.get("sliding_window") or LENGTH)
        blind = any(
            line.startswith(".") or line.endswith(beyond)
            for line in itertools.chain(self.train, self.validation, *self.more)
        )
        overflows = self.implementation == "eager" and self.name not in ("gpt2", "gpt_oss")
        # In float32 transformers' flash wrapper looks for an nn.Linear, and GPT-2 has none.
        narrow = not self.double and (self.name, self.implementation) != ("gpt2", "flash")
        single = narrow or (blind and overflows)
        return torch.float32 if single else torch.float64

    @property
    def tolerance(self) -> float:
        return allowed("library", self.dtype)

    def build(self, **options: Any) -> nn.Module:
        own = {"implementation": self.implementation, "dtype": self.dtype, "device": self.device}
        options = {**own, **options}
        return self.architecture.build(self.seed, **options)

    def _batch(self, lines: Rows, salt: int) -> dict[str, Tensor]:
        batch = make_batch(
            lines,
            vocabulary=VOCABULARY,
            seed=self.seed + salt,
            explicit_mask=self.explicit_mask and not any("|" in line for line in lines),
            explicit_positions=self.explicit_positions,
        )
        packed = any("|" in line for line in lines)
        if self.implementation == "flash" and packed and self.name != "qwen3_5":  # it refuses them
            batch |= bounds_of(lines)
        moved = {k: v.to(self.device) for k, v in batch.items() if isinstance(v, Tensor)}
        return {**batch, **moved}

    @property
    def batch(self) -> dict[str, Tensor]:
        return self._batch(self.train, 2**16)

    @property
    def each(self) -> list[Setup]:
        """One setup for every training batch."""
        return [replace(self, train=lines, more=()) for lines in (self.train, *self.more)]

    @property
    def validations(self) -> list[dict[str, Tensor]]:
        """Two batches, so that a mean of means would show."""
        return [self._batch(self.validation, 2**17), self._batch(("prrr",), 2**18)]


def bounds_of(lines: Rows) -> dict[str, Any]:
    """The arguments with which a collator tells flash kernels where documents begin."""
    lengths = torch.tensor([len(document) for line in lines for document in line.split("|")])
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    found = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    return {**found, "max_length_q": longest, "max_length_k": longest}


@st.composite
def answers(draw: st.DrawFn, mode: str) -> Rows:
    """Two rows of at most eight tokens, each with three response tokens or more.

    One row in eight has a single response token, one of the second rows in eight none at all.
    """
    width = draw(st.integers(6, LENGTH))
    return tuple(_answer(draw, mode, width, row) for row in range(draw(st.integers(1, 2))))


def _answer(draw: st.DrawFn, mode: str, width: int, row: int) -> str:
    kind = draw(st.sampled_from(["answer"] * 6 + ["single", "masked" if row else "answer"]))
    if kind == "masked" and mode in ("left", "right", "ragged"):
        return "." * width
    spare = st.integers(0, width - 4)
    left = draw(spare) if mode in ("left", "ragged") else 0
    right = min(draw(spare), width - 4 - left) if mode in ("right", "ragged") else 0
    length = width - left - right
    starts = {0, *draw(st.sets(st.integers(2, width - 2), max_size=2))} if mode == "packed" else {0}
    free = [k for k in range(length) if k not in starts]
    labelled = {"single": 1, "masked": 0}.get(kind, max(3, draw(st.integers(0, len(free)))))
    order = draw(st.permutations(free)) if kind == "answer" else free[::-1]
    response = set(order[:labelled])
    line = "".join(
        ("|" if k and k in starts else "") + ("r" if k in response else "p") for k in range(length)
    )
    return "." * left + line + "." * right


@st.composite
def setups(draw: st.DrawFn, name: str) -> Setup:
    """One model of an architecture, options and all, and two training batches of two layouts."""
    family = BY_NAME[name]
    options = {option: draw(st.sampled_from(v)) for option, v in sorted(family.choices.items())}
    depth = family.changed(options).depth
    scope = draw(st.sampled_from([1, depth, 2, None]))  # the last K layers, or any
    pool = [draw(st.booleans()) for _ in range(depth)]
    some = tuple(i for i in range(depth) if pool[i]) or (depth - 1,)
    layouts = [m for m in MODES if name not in LEAKING or m != "packed"]
    first, other = draw(st.sampled_from(layouts)), draw(st.sampled_from(layouts))
    return Setup(
        name,
        draw(answers(first)),
        draw(rows(draw(st.sampled_from(layouts)), 5, 2)),
        some if scope is None else tuple(range(depth))[-scope:],
        draw(st.sampled_from(family.implementations)),
        draw(SEEDS.filter(bool)),  # the simplest of all is pinned, and takes no example here
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([2, None, 1, 32])),
        (draw(answers(other)),),
        draw(st.sampled_from([True, True, False])),
        tuple((k, v) for k, v in options.items() if v != family.choices[k][0]),
    )


# --- what the oracle is handed ------------------------------------------------------------------


def linears(model: nn.Module, architecture: Architecture, layers: Sequence[int]) -> dict[str, Any]:
    """The linears of these blocks by name, found by type and name alone."""
    inside = "transformer.h" if architecture.name == "gpt2" else "model.layers"
    prefixes = tuple(f"{inside}.{layer}." for layer in layers)
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith(prefixes) and isinstance(module, (nn.Linear, Conv1D))
    }


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
    with ExitStack() as hooks:
        for module in chosen:
            hooks.enter_context(module.register_forward_pre_hook(split))
        yield heads


def explicit_mask(batch: Mapping[str, Tensor], window: int | None) -> Tensor:
    """(b, 1, t, t) additive mask, written out; a padded row sees itself and stays finite."""
    count, length = batch["input_ids"].shape
    t = torch.arange(length, device=batch["input_ids"].device)
    k = t.view(-1, 1)
    allowed = (t <= k).expand(count, length, length)
    if window is not None:
        allowed = allowed & (t > k - window)
    if "attention_mask" in batch:
        allowed = allowed & (batch["attention_mask"] != 0)[:, None, :]
    elif "position_ids" in batch:
        documents = (batch["position_ids"] == 0).cumsum(-1)
        allowed = allowed & (documents[:, :, None] == documents[:, None, :])
    seen = allowed | (k == t)
    zeros = torch.zeros(seen.shape, dtype=torch.float64, device=t.device)
    return zeros.masked_fill(~seen, -1e30)[:, None]


def exact_weights(setup: Setup) -> tuple[Tensor, list[Tensor]]:
    """Logits and attention weights per layer from transformers' eager code under our own mask."""
    model = setup.build(implementation="eager", dtype=torch.float64)
    batch, window = setup.batch, getattr(model.config, "sliding_window", None)
    masks: Any = explicit_mask(batch, window)
    if setup.architecture.masks_by_type:
        masks = {"sliding_attention": masks, "full_attention": explicit_mask(batch, None)}
    inputs = {k: v for k, v in batch.items() if k not in ("labels", "attention_mask")}
    with torch.no_grad():
        output = model(**inputs, attention_mask=masks, use_cache=False, output_attentions=True)
    return output.logits, list(output.attentions)


class Oracle:
    """Per-token autograd on a plain model of its own."""

    def __init__(self, setup: Setup, model: nn.Module | None = None) -> None:
        self.setup, self.architecture = setup, setup.architecture
        self.model = setup.build() if model is None else model
        self.forward = plain_forward(self.model)
        self.modules = linears(self.model, self.architecture, setup.layers)
        self.parameters = {f"{n}.weight": m.weight for n, m in self.modules.items()}
        self.transposed = [n for n, m in self.modules.items() if isinstance(m, Conv1D)]
        self.batch = setup.batch

    def gradient(self) -> dict[str, Tensor]:
        return gradients.validation_gradient(
            self.model, self.forward, self.setup.validations, self.parameters
        )

    def influence(self, direction: Mapping[str, Tensor]) -> Influence:
        return influence.exact_influence(
            self.model,
            self.forward,
            self.batch,
            self.modules,
            direction,
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
    def value_uses(self) -> list[Use]:
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
            m = direction[f"{use.name}.weight"]
            m = (m.T if use.name in self.transposed else m)[kept]
            layers.append(propagation.PropagationLayer(self.alphas[layer], error, use.x, m))
        return propagation.value_propagation(
            layers,
            window=setup.window,
            head_reduction=head_reduction,
        )


def scorer_of(
    setup: Setup, model: nn.Module, drift: FisherDrift | None, estimator: str, **config: Any
) -> Scorer:
    options = {
        "estimator": estimator,
        "layers": setup.layers,
        "stability_weight": LAMBDA,
        "window": setup.window if estimator in READ_BY["window"] else None,
        "uncovered": "skip",
        "max_relative_drift": None,
        **config,
    }
    return Scorer(model, setup.validations, drift, ScorerConfig(**options))


def value_of(setup: Setup, *args: Any, **config: Any) -> Any:
    return scorer_of(setup, *args, **config).score(setup.batch)


def estimators_for(setup: Setup) -> tuple[str, ...]:
    """What has an exact rule or a definition here."""
    names = ["label", "path", "direct"]
    # A gate lies between its heads and what reads them; ``test_hybrids`` has the rest.
    if setup.name != "qwen3_5":
        names += ["alphatoken", "paper_literal"]
    return tuple(names)


def compare_captured(setup: Setup) -> None:
    """All estimators on one model and every batch, against per-token autograd on both sides of M.

    One scorer an estimator, so that a later batch meets what an earlier one left behind.
    """
    oracle, model = Oracle(setup), setup.build().train()
    drift = random_drift(oracle.parameters, setup.seed + 7)
    sides = {"adaptation": oracle.gradient(), "stability": retention_of(drift, oracle.parameters)}
    scorers = {e: scorer_of(setup, model, drift, e) for e in estimators_for(setup)}
    for one in setup.each:
        found = {name: scorer.score(one.batch) for name, scorer in scorers.items()}
        compare_batch(one, found, Oracle(one, oracle.model), sides)


def compare_batch(
    setup: Setup, found: Mapping[str, Any], oracle: Oracle, sides: Mapping[str, dict[str, Tensor]]
) -> None:
    labels, tolerance = setup.batch["labels"], setup.tolerance
    totals = {name: torch.zeros(labels.shape, dtype=torch.float64) for name in found}
    scale_of_total = torch.zeros(labels.shape, dtype=torch.float64)
    whole = scale_of_whole = 0.0
    for side, direction in sides.items():
        exact = oracle.influence(direction)
        psi, absolute = exact.matrix, exact.absolute_scale
        expected = expectations(setup, oracle, direction, psi, tuple(found))
        scale = at_tokens(influence.column_sums(absolute) + influence.row_sums(absolute), labels)
        for name, values in found.items():
            close(getattr(values, side), expected[name], scale, tolerance, name=f"{name} {side}")
        if "alphatoken" in found:
            for part, wanted in (("direct", expected["direct"]), ("causal", expected["causal"])):
                value = getattr(found["alphatoken"], f"{side}_{part}")
                close(value, wanted, scale, tolerance, name=f"alphatoken's {part}")
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


def expectations(
    setup: Setup, oracle: Oracle, direction: dict[str, Tensor], psi: Tensor, names: Sequence[str]
) -> dict[str, Tensor]:
    """What each estimator should say of one side of M, by token."""
    labels = setup.batch["labels"]
    path = at_tokens(influence.column_sums(psi), labels)
    expected = {
        "label": at_tokens(influence.row_sums(psi), labels),
        "path": path,
        "direct": at_tokens(influence.diagonal(psi), labels),
    }
    if "alphatoken" in names:
        causal = oracle.propagated(direction, aggregated=False, head_reduction="per_head")
        literal = oracle.propagated(direction, aggregated=True, head_reduction="mean")
        expected["causal"] = at_tokens(causal, labels)
        expected["alphatoken"] = expected["direct"] + expected["causal"]
        expected["paper_literal"] = path + at_tokens(literal, labels)
    return expected


# --- drawn models --------------------------------------------------------------------------------

RAGGED = ("..pprrpr", "prprr...")


def pinned(name: str, **options: Any) -> Setup:
    """Ragged rows on a family's own implementation, all layers."""
    family = BY_NAME[name]
    layers = tuple(range(family.depth))
    default = {"implementation": family.implementations[0], "seed": 1}
    return Setup(name, RAGGED, ("ppprr", "..prr"), layers, **{**default, **options})


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@budget(0.1, least=1)
def test_values_equal_per_token_autograd(name: str, data: st.DataObject) -> None:
    """A drawn model (five in CI), two batches each, of any layout; both sides of M, all parts."""
    compare_captured(data.draw(setups(name)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FAMILIES)
def test_values_on_ragged_rows(name: str, device: str) -> None:
    """Every layer; in float64, where eager attention has it."""
    compare_captured(pinned(name, device=device))


@pytest.mark.parametrize("name", [a.name for a in ARCHITECTURES])
def test_recording_changes_no_bit_of_the_forward(name: str) -> None:
    """Logits inside the recording context are the plain model's own, bit for bit."""
    architecture = BY_NAME[name]
    for implementation in architecture.implementations:
        setup = Setup(name, ("prrrr...", "pprprrrr"), implementation=implementation, seed=4)
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


@pytest.mark.parametrize("name", FAMILIES)
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
    config = ScorerConfig.exact(derivative="forward_mode")
    scorer = Scorer(model, setup.validations, config=config)
    values = scorer.score(batch)
    assert set(scorer.coverage.parameters) == set(parameters)
    close(values.total, expected, scale, setup.tolerance, name="label, all parameters")


# --- tied weights and packing -------------------------------------------------------------------


@pytest.mark.parametrize(("name", "estimator"), [("llama", "alphatoken"), ("gemma3", "label")])
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
        close(
            whole.total[:, start:stop],
            alone.total,
            largest,
            packed.tolerance,
            name=f"packed {estimator}",
        )
        start = stop


@pytest.mark.parametrize("estimator", ["direct", "label"])
def test_packing_is_refused_where_the_model_leaks_by_itself(estimator: str) -> None:
    """transformers' gpt-oss gives its mask functions no positions, so its documents leak."""
    setup = Setup("gpt_oss", ("pprr|prrpr",), implementation="eager", seed=8)
    with pytest.raises(ModelError, match="packed documents see each other"):
        value_of(setup, setup.build(), None, estimator)


# --- mixtures of experts ------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_refused_or_skipped_by_name(name: str) -> None:
    estimator = "direct"
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
