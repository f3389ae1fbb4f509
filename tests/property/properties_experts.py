"""Claims about mixtures of experts under captured estimators, on the real architectures.

The oracle runs each mixture one position at a time, with a copy of its tensors for each; the
linears beside it have the oracle of all models. What transformers computes itself is float64 with
its own casts to float32 inside, but for the mixtures alone, which are compared as such.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from alphatoken import FisherDrift, Scorer, ScorerConfig
from alphatoken.estimate import contraction
from alphatoken.estimate.gradients import captured_gradients
from alphatoken.model.backward import accumulate_errors
from alphatoken.model.capture import record
from alphatoken.model.experts import routed_experts
from alphatoken.model.protocol import find_adapter
from alphatoken.oracle import gradients, influence
from alphatoken.oracle.experts import copied_per_position, expert_influence
from alphatoken.select.interaction import token_gram
from tests.property.architectures import BY_NAME, MIXTURES, SHARED, VOCABULARY, plain_forward
from tests.property.strategies import MODES, SEEDS, Rows, make_batch, rows
from tests.property.tolerance import allowed, close

ESTIMATORS = ("direct", "path", "label")
"""Those that are exact; what the others add is no error at an expert."""
LAMBDA = 0.7
LIBRARY = allowed("library", torch.float64)
EXACT = allowed("contraction", torch.float64)
CHOSEN = "linears,experts"


@dataclass(frozen=True)
class MixtureCase:
    """A model with so many experts, of which each token is sent to some, its rows, and a scope."""

    name: str = "gpt_oss"
    train: Rows = ("pprprr", "prrr..")
    validation: Rows = ("pprr",)
    layers: tuple[int, ...] = (0, 1)
    experts: int = 3
    chosen: int = 2
    score_bias: bool = True
    seed: int = 1

    def model(self) -> nn.Module:
        family = {**BY_NAME, **SHARED}[self.name]
        number = "num_experts" if self.name.startswith("qwen") else "num_local_experts"
        options = {number: self.experts, "num_experts_per_tok": self.chosen}
        return family.build(self.seed, implementation=family.implementations[0], **options)

    def batch(self, lines: Rows, salt: int = 0) -> dict[str, Tensor]:
        return make_batch(lines, vocabulary=VOCABULARY, seed=self.seed + salt)

    def scorer(self, model: nn.Module, estimator: str, **options: Any) -> Scorer:
        retention = options.pop("retention", None)
        config = {
            "parameters": CHOSEN,
            "layers": self.layers,
            "uncovered": "skip",
            "score_bias": self.score_bias,
            "stability_weight": LAMBDA,
            "max_relative_drift": None,
            **options,
        }
        validation = [self.batch(self.validation, 1), self.batch(("prrr",), 2)]
        scorer = Scorer(model, validation, retention, ScorerConfig(estimator, **config))
        scorer.valuer.warn = False
        return scorer


def mixture_cases(**pins: Any) -> st.SearchStrategy[MixtureCase]:
    """Cases of all mixtures; the packed documents of gpt-oss see each other, so none is packed."""

    @st.composite
    def draw_case(draw: st.DrawFn) -> MixtureCase:
        layouts = st.sampled_from([mode for mode in MODES if mode != "packed"])
        experts = draw(st.integers(1, 5))
        drawn = {
            "name": draw(st.sampled_from(MIXTURES)),
            "train": draw(rows(draw(layouts), 6, 2)),
            "validation": draw(rows(draw(layouts), 4, 2)),
            "layers": draw(st.sampled_from([(1,), (0, 1), (0,)])),
            "experts": experts,
            "chosen": draw(st.integers(1, experts)),
            "score_bias": draw(st.booleans()),
            "seed": draw(SEEDS),
        }
        return MixtureCase(**{**drawn, **pins})

    return draw_case()


# --- what the oracle is handed -------------------------------------------------------------------


class Truth:
    """Per-token autograd on a plain model of its own, over linears and experts."""

    def __init__(self, case: MixtureCase) -> None:
        self.case, self.model = case, case.model()
        self.forward = plain_forward(self.model)
        self.batch = case.batch(case.train)
        prefixes = tuple(f"model.layers.{layer}." for layer in case.layers)
        named = {n: m for n, m in self.model.named_modules() if n.startswith(prefixes)}
        every = {n: m for n, m in named.items() if isinstance(m, nn.Linear)}
        self.linears = {n: m for n, m in every.items() if ".shared_expert" not in n}
        self.shared = {n: m for n, m in every.items() if n not in self.linears}
        self.mixtures = {n: m for n, m in named.items() if n.endswith(".experts")}
        self.routers = [f"{n}.weight" for n in named if n.endswith((".mlp.gate", ".mlp.router"))]
        kinds = ("weight", "bias") if case.score_bias else ("weight",)
        self.of_linears = {
            f"{n}.{kind}": p
            for n, m in self.linears.items()
            for kind in kinds
            if (p := getattr(m, kind)) is not None
        }
        self.of_experts = {
            f"{n}.{kind}": p
            for n, m in {**self.mixtures, **self.shared}.items()
            for kind, p in m.named_parameters()
            if case.score_bias or not kind.endswith("_bias")
        }

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {**self.of_linears, **self.of_experts}

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        case = self.case
        validation = [case.batch(case.validation, 1), case.batch(("prrr",), 2)]
        return gradients.validation_gradient(self.model, self.forward, validation, self.parameters)

    def drift(self) -> FisherDrift:
        generator = torch.Generator().manual_seed(self.case.seed + 7)
        fisher, reference = {}, {}
        for name, parameter in self.parameters.items():
            noise = torch.rand(2, *parameter.shape, generator=generator, dtype=torch.float64)
            fisher[name] = noise[0]
            reference[name] = parameter.detach() + 0.3 * (noise[1] - 0.5)
        return FisherDrift(fisher, reference, exact_names=True)

    def influence(self, direction: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Psi over all, the sum of absolute terms, and Psi over the experts alone.

        Shared experts are run row by row, with copies of their own, as the others are.
        """
        copied = {**self.mixtures, **self.shared}
        experts = expert_influence(
            self.forward, self.batch, copied, {n: direction[n] for n in self.of_experts}
        )
        whole, scale = experts.matrix, experts.absolute_scale
        if self.linears:
            linears = influence.exact_influence(
                self.model,
                self.forward,
                self.batch,
                self.linears,
                {n: direction[n] for n in self.of_linears},
                score_bias=self.case.score_bias,
            )
            whole, scale = whole + linears.matrix, scale + linears.absolute_scale
        return whole, scale, experts.matrix


def readout(psi: Tensor, estimator: str, labels: Tensor) -> Tensor:
    """By token index, zero off the response."""
    read = {
        "direct": influence.diagonal,
        "path": influence.column_sums,
        "label": influence.row_sums,
    }[estimator]
    response = labels != -100
    response[:, 0] = False
    return influence.to_token_index(read(psi)).masked_fill(~response, 0.0)


# --- values --------------------------------------------------------------------------------------


def check_values_over_experts(case: MixtureCase, estimator: str) -> None:
    """Diagonal, columns and rows of Psi over linears and experts, of both sides of M."""
    truth, drift = Truth(case), Truth(case).drift()
    model, labels = case.model(), gradients.known_labels(truth.batch)
    scorer = case.scorer(model, estimator, retention=drift)
    values = scorer.score(case.batch(case.train))
    retained = {
        name: drift.fisher[name] * (p.detach() - drift.reference[name])
        for name, p in truth.parameters.items()
    }
    for side, direction in (("adaptation", truth.gradient), ("stability", retained)):
        psi, absolute, _ = truth.influence(direction)
        expected = readout(psi, estimator, labels)
        scale = readout(absolute, "path", labels) + readout(absolute, "label", labels)
        close(getattr(values, side), expected, scale, LIBRARY, name=f"{estimator} {side}, experts")
    assert set(scorer.coverage.parameters) == set(truth.parameters)
    assert set(truth.routers) <= set(scorer.coverage.skipped)


def check_experts_have_no_causal_part_of_their_own(case: MixtureCase) -> None:
    """Value-Propagation stops at the value projection: its part is that of the linears alone."""
    batch, model = case.batch(case.train), case.model()
    with_experts = case.scorer(model, "alphatoken").score(batch)
    without = case.scorer(model, "alphatoken", parameters="linears").score(batch)
    direct = case.scorer(model, "direct").score(batch)
    assert with_experts.adaptation_causal is not None
    assert without.adaptation_causal is not None
    size = without.adaptation_causal.abs().sum()
    close(with_experts.adaptation_causal, without.adaptation_causal, size, EXACT, name="causal")
    total = direct.total.abs().sum()
    close(with_experts.adaptation_direct, direct.total, total, EXACT, name="direct, experts")


def check_a_preconditioner_scales_the_tensors(case: MixtureCase) -> None:
    """P o G with a P for each 3-D tensor: values are those along the scaled direction."""
    truth = Truth(case)
    generator = torch.Generator().manual_seed(case.seed + 3)
    p = {
        n: torch.rand(t.shape, generator=generator, dtype=torch.float64) + 0.5
        for n, t in truth.of_experts.items()
    }
    scaled = {n: m * p[n] if n in p else m for n, m in truth.gradient.items()}
    psi, absolute, _ = truth.influence(scaled)
    labels = gradients.known_labels(truth.batch)
    values = case.scorer(case.model(), "direct", preconditioner=p).score(truth.batch)
    scale = readout(absolute, "path", labels)
    close(values.total, readout(psi, "direct", labels), scale, LIBRARY, name="P on experts")


def check_weights_are_explained(case: MixtureCase) -> None:
    """Sums of delta (x) x by expert are autograd's gradients of the tensors and their biases."""
    model, batch = case.model(), case.batch(case.train)
    scorer = case.scorer(model, "path")
    found: dict[str, Tensor] = {}
    with record(scorer.adapter, scorer.scope, attention=False) as recorder:
        losses = gradients.run_losses(plain_forward(model), batch)
        loss = torch.stack(list(losses.values())).sum()
        errors = accumulate_errors(recorder, loss, recorder.outputs, "ordinary")

        def take(name: str, gradient: Tensor | None, _: Tensor | float) -> None:
            if gradient is not None:
                found[name] = gradient

        captured_gradients(recorder, errors, scorer.scored.names, take)
        expected = torch.autograd.grad(loss, list(scorer.parameters.values()))
    for (name, parameter), gradient in zip(scorer.parameters.items(), expected, strict=True):
        assert name in found, f"{name} has no gradient"
        assert found[name].shape == parameter.shape
        size = gradient.abs().amax().clamp(min=1e-12)
        close(found[name], gradient, size, 1e-10, name="gradients of experts")


# --- the rows, and the model's own function ------------------------------------------------------


@contextmanager
def mixture_calls(model: nn.Module) -> Iterator[list[tuple[Any, Tensor, Tensor, Tensor, Tensor]]]:
    """(module, hidden, experts, weights, output) of each call of a mixture."""
    calls: list[tuple[Any, Tensor, Tensor, Tensor, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda m, args, out: calls.append((m, *args, out)))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def check_rows_make_the_models_own_output(case: MixtureCase) -> None:
    """Output and every derivative of a mixture are those of transformers' code, in float64."""
    model = case.model()
    with mixture_calls(model) as calls, torch.no_grad():
        model(input_ids=case.batch(case.train)["input_ids"])
    for module, hidden, experts, weights, _ in calls:
        given = [t.double().requires_grad_() for t in (hidden, weights)]
        seen: list[tuple[str, Tensor, Tensor]] = []

        def keep(_: nn.Module, parameter: str, x: Tensor, s: Tensor, rows: Tensor) -> Tensor:
            seen.append((parameter, x, s))  # noqa: B023
            assert rows.shape == s.shape[:2] == x.shape[:2]
            return s

        own = module.forward(given[0], experts, given[1])
        ours = routed_experts(module, given[0], experts, given[1], [keep])
        close(ours, own, own.abs().amax(), EXACT, name="output of a mixture")
        inputs = [*given, *module.parameters()]
        probe = torch.randn(own.shape, generator=torch.Generator().manual_seed(1)).to(own)
        wanted, found = (
            torch.autograd.grad(out, inputs, probe, materialize_grads=True) for out in (own, ours)
        )
        for one, other in zip(found, wanted, strict=True):
            close(one, other, other.abs().amax().clamp(min=1e-9), 1e-10, name="its derivatives")
        for parameter, x, s in seen:
            compare_products(module, parameter, x, s, experts)


def compare_products(module: Any, parameter: str, x: Tensor, s: Tensor, experts: Tensor) -> None:
    """Row by row: s is x times the matrix of the row's own expert, plus its bias."""
    weight, bias = getattr(module, parameter), getattr(module, f"{parameter}_bias", None)
    for n, c in torch.cartesian_prod(*map(torch.arange, experts.shape)).reshape(-1, 2).tolist():
        matrix = weight[experts[n, c]]
        wanted = x[n, c] @ (matrix if module.is_transposed else matrix.T)
        wanted = wanted if bias is None else wanted + bias[experts[n, c]]
        close(s[n, c], wanted, wanted.abs().amax(), 1e-10, name="rows of experts")


@dataclass(frozen=True)
class RowsCase:
    """Errors, inputs and experts of one use, and a direction."""

    b: int
    t: int
    c: int
    e: int
    o: int
    i: int
    bias: bool
    seed: int


def rows_cases() -> st.SearchStrategy[RowsCase]:
    small = st.integers(1, 4)
    return st.builds(RowsCase, small, small, small, small, small, small, st.booleans(), SEEDS)


def check_contraction_is_the_loop(case: RowsCase) -> None:
    """delta^T (M_e x + m_e) and delta (x) x of each row, written out, added where they belong."""
    draw = torch.Generator().manual_seed(case.seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    b, t, c, e, o, i = case.b, case.t, case.c, case.e, case.o, case.i
    delta, x, m = numbers(b, t, c, o), numbers(b, t, c, i), numbers(e, o, i)
    m_bias = numbers(e, o) if case.bias else None
    experts = torch.randint(e, (b, t, c), generator=draw)
    values, sizes = torch.zeros(2, b, t, dtype=torch.float64)
    sums, biases = torch.zeros_like(m), torch.zeros(e, o, dtype=torch.float64)
    for place in torch.cartesian_prod(*map(torch.arange, (b, t, c))).reshape(-1, 3).tolist():
        at, which = tuple(place), int(experts[tuple(place)])
        moved = m[which] @ x[at] + (0.0 if m_bias is None else m_bias[which])
        values[at[:2]] += delta[at] @ moved
        sizes[at[:2]] += delta[at].abs() @ moved.abs()
        sums[which] += torch.outer(delta[at], x[at])
        biases[which] += delta[at]
    found = contraction.contract_experts(delta, x, experts, m, m_bias)
    close(found, values, sizes, EXACT, name="contraction by experts")
    gathered = contraction.expert_outer_sums(delta, x, experts, e)
    close(gathered, sums, delta.abs().sum() * x.abs().sum(), EXACT, name="gradients by experts")
    summed = contraction.expert_sums(delta, experts, e)
    close(summed, biases, delta.abs().sum(), EXACT, name="biases by experts")


# --- inner products of tokens --------------------------------------------------------------------


def check_gram_over_experts(case: MixtureCase) -> None:
    """Gram matrix of direct gradients: each token's, by the copies of its own position."""
    truth, model = Truth(case), case.model()
    batch, labels = truth.batch, gradients.known_labels(truth.batch)
    scorer = case.scorer(model, "direct")
    with record(scorer.adapter, scorer.scope) as recorder:
        losses = gradients.run_losses(plain_forward(model), batch)
        loss = torch.stack(list(losses.values())).sum()
        errors = accumulate_errors(recorder, loss, recorder.outputs, "self")
        chosen = [n for n, use in enumerate(recorder.linears) if use.experts is not None]
        uses, own = ([each[n] for n in chosen] for each in (recorder.linears, errors))
        mask = torch.zeros_like(labels, dtype=torch.bool)
        for place in losses:
            mask[place] = True
        gram = token_gram(uses, own, mask, score_bias=case.score_bias)
    j = direct_expert_gradients(truth, list(losses))
    close(gram, j @ j.T, j.abs() @ j.abs().T, LIBRARY, name="Gram over experts")


def direct_expert_gradients(truth: Truth, places: list[tuple[int, int]]) -> Tensor:
    """(n, .): of each token, the gradients of the copies at the position that predicts it."""
    with copied_per_position(truth.mixtures) as copies:
        losses = gradients.run_losses(truth.forward, truth.batch)
    length, found = truth.batch["labels"].shape[1], []
    for row, token in sorted(places):
        own = [copies[name][row * length + token - 1] for name in truth.of_experts]
        parts = torch.autograd.grad(
            losses[row, token], own, retain_graph=True, materialize_grads=True
        )
        found.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(found)


# --- the user's model, before and after ----------------------------------------------------------


def check_one_forward_serves_both(case: MixtureCase) -> None:
    """Values touch no ``.grad``; the backward of the same forward gives the untouched model's
    gradients, the router's among them; a model that nobody observes runs its own code."""
    model, batch = case.model(), case.batch(case.train)
    labels = batch["labels"]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    scorer = case.scorer(model, "alphatoken")
    with scorer.observe() as observed:
        logits = find_adapter(model).forward(inputs)
        observed.values(logits, labels)
        assert all(p.grad is None for p in model.parameters())
        other = case.model()
        with mixture_calls(other) as calls:
            other(**inputs)
        assert not any(_routed(call[4]) for call in calls), "another model runs through the rows"
    losses(logits, labels).backward()
    plain = case.model()
    losses(find_adapter(plain).forward(inputs), labels).backward()
    for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
        if two.grad is None:
            assert one.grad is None, name
            continue
        assert one.grad is not None, name
        size = two.grad.abs().amax().clamp(min=1e-9)
        close(one.grad, two.grad, size, LIBRARY, name="gradients of the shared forward")


def _routed(output: Tensor) -> bool:
    """Whether a mixture's output is a sum over rows, as ours is; eager code adds into zeros."""
    names, node = [], output.grad_fn
    while node is not None and len(names) < 3:
        names.append(type(node).__name__)
        node = node.next_functions[0][0] if node.next_functions else None
    return any(name.startswith("Sum") for name in names)


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
