"""Mixtures of experts under captured estimators, and the oracle that they are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from alphatoken import FisherDrift, Scorer, ScorerConfig, fit_fisher
from alphatoken.direction import contraction
from alphatoken.direction.gradients import captured_gradients
from alphatoken.errors import CoverageError, ModelError, UnsupportedError
from alphatoken.model.capture import accumulate_errors, record
from alphatoken.model.experts import routed_experts
from alphatoken.model.protocol import find_adapter
from alphatoken.oracle import gradients, influence
from alphatoken.oracle.influence import expert_influence
from tests.places import tiered
from tests.property.architectures import BY_NAME, MIXTURES, SHARED, VOCABULARY, plain_forward
from tests.property.profiles import budget
from tests.property.setups import at_tokens, random_drift
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
            "stability_weight": LAMBDA,
            "max_relative_drift": None,
            **options,
        }
        validation = [self.batch(self.validation, 1), self.batch(("prrr",), 2)]
        scorer = Scorer(model, validation, retention, ScorerConfig(estimator, **config))
        scorer.warn = False
        return scorer


@st.composite
def mixture_cases(draw: st.DrawFn) -> MixtureCase:
    """Cases of all mixtures; the packed documents of gpt-oss see each other, so none is packed."""
    layouts = st.sampled_from([mode for mode in MODES if mode != "packed"])
    experts = draw(st.integers(1, 5))
    return MixtureCase(
        draw(st.sampled_from(MIXTURES)),
        draw(rows(draw(layouts), 6, 2)),
        draw(rows(draw(layouts), 4, 2)),
        draw(st.sampled_from([(1,), (0, 1), (0,)])),
        experts,
        draw(st.integers(1, experts)),
        draw(SEEDS),
    )


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
        self.of_linears = {f"{n}.weight": m.weight for n, m in self.linears.items()}
        self.of_experts = {
            f"{n}.{kind}": p
            for n, m in {**self.mixtures, **self.shared}.items()
            for kind, p in m.named_parameters()
            if not kind.endswith("_bias")
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
        return random_drift(self.parameters, self.case.seed + 7)

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
            )
            whole, scale = whole + linears.matrix, scale + linears.absolute_scale
        return whole, scale, experts.matrix


@lru_cache(maxsize=32)
def exact_sides(case: MixtureCase) -> dict[str, tuple[Tensor, Tensor]]:
    """Psi and the sum of absolute terms on both sides of M, once for all estimators."""
    truth, drift = Truth(case), Truth(case).drift()
    retained = {
        name: drift.fisher[name] * (p.detach() - drift.reference[name])
        for name, p in truth.parameters.items()
    }
    sides = {"adaptation": truth.gradient, "stability": retained}
    return {side: truth.influence(direction)[:2] for side, direction in sides.items()}


def readout(psi: Tensor, estimator: str, labels: Tensor) -> Tensor:
    """By token index, zero off the response."""
    read = {
        "direct": influence.diagonal,
        "path": influence.column_sums,
        "label": influence.row_sums,
    }[estimator]
    return at_tokens(read(psi), labels)


@contextmanager
def mixture_calls(model: nn.Module) -> Iterator[list[tuple[Any, Tensor, Tensor, Tensor, Tensor]]]:
    """(module, hidden, experts, weights, output) of each call of a mixture."""
    calls: list[tuple[Any, Tensor, Tensor, Tensor, Tensor]] = []
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                keep = lambda m, args, out: calls.append((m, *args, out))  # noqa: E731
                hooks.enter_context(module.register_forward_hook(keep))
        yield calls


def compare_products(module: Any, parameter: str, x: Tensor, s: Tensor, experts: Tensor) -> None:
    """Row by row: s is x times the matrix of the row's own expert, plus its bias."""
    weight, bias = getattr(module, parameter), getattr(module, f"{parameter}_bias", None)
    for n, c in torch.cartesian_prod(*map(torch.arange, experts.shape)).reshape(-1, 2).tolist():
        matrix = weight[experts[n, c]]
        wanted = x[n, c] @ (matrix if module.is_transposed else matrix.T)
        wanted = wanted if bias is None else wanted + bias[experts[n, c]]
        close(s[n, c], wanted, wanted.abs().amax(), 1e-10, name="rows of experts")


def rows_cases() -> st.SearchStrategy[tuple[int, ...]]:
    """Sizes b, t, c, e, o and i of one use of experts, and a seed."""
    return st.tuples(*[st.integers(1, 4)] * 6, SEEDS)


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


# torch's forward mode compiles some rules with torch.jit at first use, which torch deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)

ALL = MixtureCase("mixtral", experts=3, chosen=3, seed=3)
ONE = MixtureCase("qwen3_moe", ("..pprr", "prrrr."), experts=4, chosen=1, layers=(1,), seed=4)
BIASED = MixtureCase("gpt_oss", ("..pprr",), experts=5, chosen=2, seed=5)
# A shared expert is called on (b t, i), the rows of the batch one after the other.
AT_ALL = MixtureCase("qwen3_next", ("..ppr", "prrr."), ("pprr",), (0, 1), seed=31)
IDLE = MixtureCase("mixtral", ("pprr",), ("prr",), experts=8, chosen=1, seed=6)


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", tiered(ESTIMATORS, ("direct", "label")))
@given(case=mixture_cases())
@example(case=ALL)
@example(case=ONE)
@example(case=BIASED)
@example(case=IDLE)
@example(case=AT_ALL)
@budget(0.1, least=3)
def test_values_over_linears_and_experts(case: MixtureCase, estimator: str) -> None:
    """Diagonal, columns and rows of Psi over linears and experts, of both sides of M.

    Proves: values over linears and experts (exact), against ``expert_influence``,
    ``exact_influence``.
    """
    truth, drift = Truth(case), Truth(case).drift()
    model, labels = case.model(), gradients.known_labels(truth.batch)
    scorer = case.scorer(model, estimator, retention=drift)
    values = scorer.score(case.batch(case.train))
    for side, (psi, absolute) in exact_sides(case).items():
        expected = readout(psi, estimator, labels)
        scale = readout(absolute, "path", labels) + readout(absolute, "label", labels)
        close(getattr(values, side), expected, scale, LIBRARY, name=f"{estimator} {side}, experts")
    assert set(scorer.coverage.parameters) == set(truth.parameters)
    assert set(truth.routers) <= set(scorer.coverage.skipped)


@pytest.mark.parametrize(
    ("name", "part"), [("qwen3_next", "shared_expert"), ("mixtral", "experts")]
)
def test_rows_that_are_not_all_positions_are_refused(name: str, part: str) -> None:
    """A part of a layer that is not given the last token: its rows have no positions."""
    case = MixtureCase(name, seed=32)
    model: Any = case.model()
    module = getattr(model.model.layers[1].mlp, part)
    own = module.forward

    def without_the_last(*rows: Tensor) -> Tensor:
        output: Tensor = own(*(each[:-1] for each in rows))
        return torch.cat([output, torch.zeros_like(output[:1])])

    module.forward = without_the_last
    with pytest.raises(ModelError, match="not called once on every position") as caught:
        case.scorer(model, "path").score(case.batch(case.train))
    assert part in str(caught.value)
    assert "estimator='label'" in str(caught.value)
    case.scorer(model, "label").score(case.batch(case.train))


@given(mixture_cases())
@example(ALL)
@example(BIASED)
@example(IDLE)
@budget(0.4)
def test_weights_are_explained(case: MixtureCase) -> None:
    """Sums of delta (x) x by expert are autograd's gradients of the tensors.

    Proves: weights are explained (exact), against autograd.
    """
    model, batch = case.model(), case.batch(case.train)
    scorer = case.scorer(model, "path")
    found: dict[str, Tensor] = {}
    with record(scorer.adapter, scorer.scope, attention=False) as recorder:
        losses = gradients.run_losses(plain_forward(model), batch)
        loss = torch.stack(list(losses.values())).sum()
        errors = accumulate_errors(recorder, loss, recorder.outputs, "ordinary")
        for name, captured, _ in captured_gradients(recorder, errors, scorer.scored.names):
            if captured is not None:
                found[name] = captured
        expected = torch.autograd.grad(loss, list(scorer.parameters.values()))
    for (name, parameter), gradient in zip(scorer.parameters.items(), expected, strict=True):
        assert name in found, f"{name} has no gradient"
        assert found[name].shape == parameter.shape
        size = gradient.abs().amax().clamp(min=1e-12)
        close(found[name], gradient, size, 1e-10, name="gradients of experts")


@given(mixture_cases())
@example(ALL)
@example(BIASED)
@example(IDLE)
@budget(0.4)
def test_rows_make_the_models_own_output(case: MixtureCase) -> None:
    """Output and every derivative of a mixture are those of transformers' code, in float64.

    Proves: rows make the models own output (exact), against transformers' own code.
    """
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


@given(rows_cases())
def test_contraction_is_the_loop(case: tuple[int, ...]) -> None:
    """delta^T M_e x and delta (x) x of each row, written out, added where they belong.

    Proves: contraction is the loop (exact), against loops over rows.
    """
    b, t, c, e, o, i, seed = case
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    delta, x, m = numbers(b, t, c, o), numbers(b, t, c, i), numbers(e, o, i)
    experts = torch.randint(e, (b, t, c), generator=draw)
    values, sizes = torch.zeros(2, b, t, dtype=torch.float64)
    sums = torch.zeros_like(m)
    for place in torch.cartesian_prod(*map(torch.arange, (b, t, c))).reshape(-1, 3).tolist():
        at, which = tuple(place), int(experts[tuple(place)])
        moved = m[which] @ x[at]
        values[at[:2]] += delta[at] @ moved
        sizes[at[:2]] += delta[at].abs() @ moved.abs()
        sums[which] += torch.outer(delta[at], x[at])
    found = contraction.contract_experts(delta, x, experts, m)
    close(found, values, sizes, EXACT, name="contraction by experts")
    gathered = contraction.expert_outer_sums(delta, x, experts, e)
    close(gathered, sums, delta.abs().sum() * x.abs().sum(), EXACT, name="gradients by experts")


@given(mixture_cases())
@example(ALL)
@example(ONE)
@example(BIASED)
@budget(0.1, least=4)
def test_one_forward_serves_both(case: MixtureCase) -> None:
    """Values touch no ``.grad``; the backward of the same forward gives the untouched model's
    gradients, the router's among them; a model that nobody observes runs its own code.

    Proves: one forward serves both (exact), against an untouched model.
    """
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


@pytest.mark.parametrize(
    ("name", "estimator"),
    [("gpt_oss", "alphatoken"), ("mixtral", "label"), ("qwen3_moe", "alphatoken")],
)
def test_the_certificate_covers_experts(name: str, estimator: str) -> None:
    """``verify`` has every expert run on every position; an expert's error is seen, by name."""
    case = MixtureCase(name, seed=7)
    scorer = case.scorer(case.model(), estimator)
    certificate = scorer.verify(case.batch(case.train), tokens=3, progress=False)
    assert certificate.passed, certificate.failures
    if estimator == "label":
        return
    contract = "alphatoken.direction.contraction.contract_experts"
    with patch(contract, lambda delta, *_: delta.new_zeros(delta.shape[:2])):
        certificate = scorer.verify(case.batch(case.train), tokens=3, progress=False)
    assert any("experts." in (check.parameter or "") for check in certificate.failures)


# --- the direction -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_a_fisher_and_its_drift_have_the_tensors(name: str) -> None:
    """F of a 3-D tensor is the mean of squared sequence gradients, V = F o (W - W_ref)."""
    case = MixtureCase(name, layers=(1,), seed=8)
    model, batch = case.model(), case.batch(("pprrr", "prrrr"))
    rows = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    fisher = fit_fisher(
        model, rows, layers=(1,), parameters="linears,experts", labels="token", samples=4, seed=1,
        progress=False,
    )  # fmt: skip
    tensors = Truth(case).of_experts
    assert tensors
    assert all(fisher.fisher[n].shape == p.shape for n, p in tensors.items())
    assert all(float(fisher.fisher[n].sum()) > 0 for n in tensors)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    scorer = case.scorer(model, "direct", retention=fisher, objective="stability")
    found = scorer.direction.stability
    assert found is not None
    for n, p in dict(model.named_parameters()).items():
        if n in tensors:
            expected = fisher.fisher[n] * (p.detach() - fisher.reference[n])
            close(found[n], expected, expected.abs().amax(), 1e-6, name="V of experts")


def test_responses_are_drawn_where_a_trainer_asked_for_the_routers_loss() -> None:
    """TRL sets the config so; the loss needs no part in drawing, and fails with a cache."""
    found = []
    for asked in (False, True):
        model = MixtureCase("mixtral", layers=(1,)).model()
        model.config.output_router_logits = asked
        prompts = [torch.tensor([1, 4, 5]), torch.tensor([1, 6])]
        options = {"layers": (1,), "samples": 2, "max_new_tokens": 3, "progress": False}
        found.append(fit_fisher(model, prompts, parameters=CHOSEN, **options).fisher)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


# --- what is in scope, and what is refused -------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_the_router_is_named_and_nothing_else_is_left_out(name: str) -> None:
    """Refused by its name unless it may be left out; a router that does not train is no reason."""
    case = MixtureCase(name, seed=9)
    truth, model, batch = Truth(case), case.model(), case.batch(case.train)
    with pytest.raises(CoverageError, match="router"):
        case.scorer(model, "direct", uncovered="error")
    scorer = case.scorer(model, "direct")
    scorer.score(batch)
    assert sorted(scorer.coverage.skipped) == sorted(truth.routers)
    assert all("router" in reason for reason in scorer.coverage.skipped.values())
    assert set(truth.of_experts) <= set(scorer.coverage.parameters)
    assert {n for n in truth.of_experts if not n.endswith("_bias")} <= set(scorer.coverage.linears)
    assert scorer.coverage.isolated is True
    assert scorer.coverage.relative_error is not None
    for router in truth.routers:
        dict(model.named_parameters())[router].requires_grad_(False)
    assert case.scorer(model, "direct", uncovered="error").score(batch).total.abs().sum() > 0


def test_experts_spread_over_processes_are_refused() -> None:
    case = MixtureCase("mixtral")
    model = case.model()
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel"):
            module._is_expert_parallel = True
    with pytest.raises(UnsupportedError, match="spread over processes"):
        case.scorer(model, "direct").score(case.batch(case.train))
    assert not ALL_EXPERTS_FUNCTIONS._local_mapping


def test_a_use_beside_the_dispatch_is_refused_by_name() -> None:
    """A tensor that the model also uses elsewhere has a gradient that no row explains."""
    case = MixtureCase("mixtral", layers=(1,))
    model = case.model()
    (mixture,) = [m for n, m in model.named_modules() if n.endswith("1.mlp.experts")]

    def more(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + 0.1 * args[0] * module.down_proj[0].mean()

    mixture.register_forward_hook(more)
    with pytest.raises(CoverageError, match=r"layers\.1\.mlp\.experts\.down_proj"):
        case.scorer(model, "path").score(case.batch(case.train))


# --- nothing is left behind ----------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_every_implementation_is_seen_and_put_back(implementation: str) -> None:
    """transformers' own kernels give the values of its eager code; the registry is as before."""
    case = MixtureCase("mixtral", seed=12)
    model, batch = case.model().float(), case.batch(case.train)
    expected = case.scorer(model, "direct").score(batch).total
    model.set_experts_implementation(implementation)
    scorer = case.scorer(model, "direct")
    found = scorer.score(batch).total
    close(found, expected, expected.abs().sum(), 1e-5, name="implementations of experts")
    assert not ALL_EXPERTS_FUNCTIONS._local_mapping

    def fail() -> None:
        with scorer.observe():
            assert implementation in ALL_EXPERTS_FUNCTIONS._local_mapping
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not ALL_EXPERTS_FUNCTIONS._local_mapping


def test_several_listeners_are_all_shown_the_rows() -> None:
    """One inside the other: each sees both tensors, and what one hands on goes to the next."""
    case = MixtureCase("mixtral", seed=12)
    model, batch = case.model(), case.batch(case.train)
    adapter: Any = find_adapter(model)
    with torch.no_grad():
        expected = plain_forward(model)({k: v for k, v in batch.items() if k != "labels"})
    calls: dict[str, list[str]] = {"first": [], "second": []}

    def listener(name: str, factor: float) -> Any:
        def heard(module: Any, parameter: str, x: Tensor, s: Tensor, experts: Tensor) -> Tensor:
            calls[name].append(parameter)
            return factor * s

        return heard

    modules = adapter.mixtures(range(2))
    with (
        adapter.override_experts(modules, listener("first", 2.0)),
        adapter.override_experts(modules, listener("second", 0.5)),
    ):
        found = plain_forward(model)({k: v for k, v in batch.items() if k != "labels"}).detach()
    assert calls["first"] == calls["second"] == ["gate_up_proj", "down_proj"] * len(modules)
    close(found, expected, expected.abs() + 1.0, LIBRARY, name="two listeners")


# --- the oracle ----------------------------------------------------------------------------------


@given(mixture_cases())
@example(ALL)
@example(BIASED)
@budget(0.2, least=5)
def test_rows_of_the_oracle_are_label_values(case: MixtureCase) -> None:
    """Copies of all positions together are the tensor: rows of Psi sum to <grad l_k, M>.

    Proves: eq. grad_alignment (exact), against ``expert_influence``, ``label_values``.
    """
    truth = Truth(case)
    direction = {n: truth.gradient[n] for n in truth.of_experts}
    found = expert_influence(truth.forward, truth.batch, truth.mixtures, direction)
    wanted = gradients.label_values(truth.model, truth.forward, truth.batch, direction)
    rows = influence.to_token_index(influence.row_sums(found.matrix))
    scale = influence.to_token_index(influence.row_sums(found.absolute_scale))
    close(rows, wanted, scale, LIBRARY, name="rows of the experts' Psi")
    assert float(found.matrix.triu(1).abs().max()) == 0.0  # no use acts on an earlier loss


@pytest.mark.parametrize("name", MIXTURES)
def test_every_entry_is_the_effect_of_moving_one_copy(name: str) -> None:
    """Psi[k, t] by central differences: the tensors move along M at position t alone.

    Proves: every entry is the effect of moving one copy (exact), against ``expert_influence``,
    finite differences.
    """
    case = MixtureCase(name, ("pprr",), layers=(1,), seed=14)
    truth = Truth(case)
    direction = {n: truth.gradient[n] for n in truth.of_experts}
    psi = expert_influence(truth.forward, truth.batch, truth.mixtures, direction).matrix
    (mixture,) = truth.mixtures.values()
    own, step = mixture.forward, 4e-3

    def moved(t: int, size: float) -> dict[tuple[int, int], float]:
        def forward(*args: Tensor) -> Tensor:
            rows = []
            for n in range(len(args[0])):
                for name, m in direction.items():
                    truth.parameters[name].data.add_(m, alpha=size * (n == t))
                rows.append(own(*(a[n : n + 1] for a in args)))
                for name, m in direction.items():
                    truth.parameters[name].data.sub_(m, alpha=size * (n == t))
            return torch.cat(rows)

        with torch.no_grad(), patch.object(mixture, "forward", forward):
            losses = gradients.run_losses(truth.forward, truth.batch)
            return {k: float(v) for k, v in losses.items()}

    for t in range(4):
        up, down = moved(t, step), moved(t, -step)
        for (b, i), high in up.items():
            slope = (high - down[b, i]) / (2 * step)
            assert abs(slope - float(psi[b, i - 1, t])) < 2e-4 * float(psi.abs().max()) + 1e-7
