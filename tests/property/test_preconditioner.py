"""What an optimizer does to a token's gradient, against the exact derivative of its real step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken import FisherDrift, TokenValues
from alphatoken.direction import optimizers, preconditioner
from alphatoken.oracle import gradients, influence, utility
from alphatoken.support import precision
from tests.property import optimizer_steps as steps
from tests.property.decoder import ReferenceAdapter
from tests.property.optimizer_steps import Case, Kind
from tests.property.profiles import budget
from tests.property.setups import (
    CONTRACTION,
    LAMBDA,
    MODEL,
    Setup,
    compare_path,
    drift_of,
    forward_of,
    make_scorer,
    oracle_influence,
    parameters_of,
    quiet_score,
    setups,
    stepped,
    truth,
)
from tests.property.strategies import SEEDS
from tests.property.tolerance import close


@dataclass(frozen=True)
class AdamCase:
    """An Adam state before a step, the step's gradient, and one token's."""

    step: int
    beta1: float
    beta2: float
    eps: float
    seed: int
    zeros: bool = False

    def tensor(self, salt: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2**16 * salt)
        found = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        if self.zeros:
            found[0] = 0.0  # a row that no gradient has reached yet
        return found

    @property
    def m(self) -> Tensor:
        return self.tensor(0) * float(self.step > 0)

    @property
    def v(self) -> Tensor:
        return self.tensor(1).square() * float(self.step > 0)

    def state(self) -> utility.AdamState:
        return utility.AdamState(
            self.step, {"w": self.m}, {"w": self.v}, (self.beta1, self.beta2), self.eps
        )

    def moments(self) -> preconditioner.Update:
        return preconditioner.adam_update(
            self.step, self.m, self.v, self.beta1, self.beta2, self.eps
        )


def adam_cases(least: int = 0) -> st.SearchStrategy[AdamCase]:
    return st.builds(
        AdamCase,
        step=st.integers(least, 40),
        beta1=st.sampled_from([0.9, 0.5, 0.0]),
        beta2=st.sampled_from([0.999, 0.9]),
        eps=st.sampled_from([1e-8, 1e-3]),
        seed=SEEDS,
        zeros=st.booleans(),
    )


DOUBLE = tuple(kind for kind in steps.INSTALLED if not kind.single)
ADAMS = tuple(k for k in steps.TORCH if k.name.startswith("Adam") and "amsgrad" not in k.name)


def cases(kinds: tuple[Kind, ...] = DOUBLE, least: int = 1) -> st.SearchStrategy[Case]:
    return st.builds(
        Case, kind=st.sampled_from(kinds), steps=st.integers(least, 12), seed=st.integers(0, 2**20)
    )


def full(case: Case) -> Tensor:
    """``P o g_k`` in the full form."""
    parameter, optimizer = case.run()
    p = optimizers.full_preconditioners(optimizer, {"w": parameter}, {"w": case.gradient})
    assert p is not None
    return (p["w"] * case.token).double()


def frozen(case: Case) -> Tensor:
    parameter, optimizer = case.run()
    p = optimizers.frozen_preconditioners(optimizer, {"w": parameter})
    assert p is not None
    return (p["w"] * case.token).double()


@given(adam_cases())
@example(AdamCase(0, 0.9, 0.999, 1e-8, 0))  # step 1: the update is sign(g)
@example(AdamCase(3, 0.9, 0.999, 1e-8, 0, zeros=True))
def test_full_preconditioner(case: AdamCase) -> None:
    """P o g_k is the exact derivative of Adam's step by the token's weight.

    Proves: full preconditioner (exact), against ``adam_step_derivative``.
    """
    gradient, token = case.tensor(2), case.tensor(3)
    expected = utility.adam_step_derivative({"w": gradient}, {"w": token}, case.state())["w"]
    found = preconditioner.full_preconditioner(case.moments(), gradient, floor=0.0) * token
    # Both terms may be large and nearly equal (at step 1 the update is sign(g)).
    first = (1 - case.beta1) / (1 - case.beta1 ** (case.step + 1))
    v = case.beta2 * case.v + (1 - case.beta2) * gradient.square()
    root = (v / (1 - case.beta2 ** (case.step + 1))).sqrt()
    scale = 10 * first * token.abs() / (root + case.eps)
    close(found, expected, scale + expected.abs(), CONTRACTION, name="full preconditioner")


@given(adam_cases(least=1))
@budget(0.5)
def test_frozen_preconditioner(case: AdamCase) -> None:
    """P is the derivative of a step whose denominator is the state's own.

    Proves: frozen preconditioner (approximate), against ``adam_preconditioner``.
    """
    gradient = case.tensor(2)
    closed = utility.adam_preconditioner({"w": gradient}, case.state(), "frozen")["w"]
    found = preconditioner.frozen_preconditioner(case.moments(), floor=0.0)
    close(found, closed, closed, CONTRACTION, name="frozen preconditioner")
    root = (case.v / (1 - case.beta2**case.step)).sqrt() + case.eps

    def update(weight: Tensor) -> Tensor:
        m = case.beta1 * case.m + (1 - case.beta1) * (gradient + weight * case.tensor(3))
        return m / (1 - case.beta1 ** (case.step + 1)) / root

    _, expected = torch.func.jvp(update, (torch.zeros(()).double(),), (torch.ones(()).double(),))
    close(found * case.tensor(3), expected, expected.abs(), CONTRACTION, name="frozen denominator")


@given(adam_cases(least=1), st.sampled_from([1e-16, 1e-6]))
def test_floor_bounds_the_preconditioners(case: AdamCase, floor: float) -> None:
    """v^ = 0 does not explode: P stays below c / (sqrt(floor) + eps), and is finite.

    Proves: floor bounds the preconditioners (exact), against the bound itself.
    """
    silent = AdamCase(case.step, case.beta1, case.beta2, case.eps, case.seed, zeros=True)
    c = (1 - case.beta1) / (1 - case.beta1 ** (case.step + 1))
    limit = c / (math.sqrt(floor) + case.eps)
    frozen = preconditioner.frozen_preconditioner(silent.moments(), floor=floor)
    full = preconditioner.full_preconditioner(silent.moments(), silent.tensor(2), floor=floor)
    assert bool(torch.isfinite(frozen).all())
    assert bool(torch.isfinite(full).all())
    assert bool((frozen <= limit * (1 + CONTRACTION)).all())
    close(frozen[0], torch.full_like(frozen[0], limit), limit, CONTRACTION, name="floor, frozen")
    close(full[0], torch.full_like(full[0], limit), limit, CONTRACTION, name="floor, full")


@given(setups(), st.sampled_from([1, 3]))
@budget(0.1)
def test_adam_preconditioner(setup: Setup, steps: int) -> None:
    """frozen: M = P o (G + lambda V) with P from the optimizer, on the direction's side, once.

    Proves: adam preconditioner (approximate), against ``adam_preconditioner``, ``exact_influence``.
    """
    model, optimizer = stepped(setup, steps, "AdamW", eps=1e-6)
    adapter = ReferenceAdapter(model)
    parameters = parameters_of(setup, adapter)
    drift = FisherDrift(*drift_of(setup, setup.case.model()))
    p = {}
    for name, parameter in parameters.items():
        moments = optimizer.state[parameter]
        state = utility.AdamState(
            steps, {name: moments["exp_avg"]}, {name: moments["exp_avg_sq"]}, (0.8, 0.97), 1e-6
        )
        # v^ is floored at 1e-16: entries that no gradient has reached have P = c / (1e-8 + eps).
        state.v[name].clamp_(min=1e-16 * (1 - 0.97**steps))  # type: ignore[attr-defined]
        p |= utility.adam_preconditioner({name: parameter}, state, "frozen")
    plain = gradients.validation_gradient(
        model, forward_of(model), setup.case.validation, parameters
    )
    v = {n: drift.fisher[n] * (w.detach() - drift.reference[n]) for n, w in parameters.items()}

    def score(after: int) -> TokenValues:
        options = {"preconditioner": "frozen", "precondition_after": after, "optimizer": optimizer}
        scorer = make_scorer(setup, "path", model=model, retention=drift, **options)
        return quiet_score(scorer, setup.case.batch)

    values = score(steps)
    compare_path(setup, model, values, {n: p[n] * g for n, g in plain.items()}, "adaptation, P")
    compare_path(setup, model, values, {n: p[n] * g for n, g in v.items()}, "stability, P")
    values = score(steps + 1)  # P = 1 before that many steps
    compare_path(setup, model, values, plain, "adaptation, not yet P")


@given(setups())
@budget(0.1)
def test_given_preconditioner(setup: Setup) -> None:
    """A mapping P (some parameters left at 1) scales M, for label and captured estimators alike.

    Proves: given preconditioner (exact), against ``exact_influence``.
    """
    model = setup.case.model()
    parameters = parameters_of(setup, ReferenceAdapter(model))
    given = {n: x.square() for n, x in list(setup.case.directions(parameters, salt=5).items())[::2]}
    t = truth(setup)
    adaptation, stability = ({n: given.get(n, 1.0) * m for n, m in d.items()} for d in t.directions)
    scorer = make_scorer(setup, "path", model=model, preconditioner=given)
    values = quiet_score(scorer, setup.case.batch)
    compare_path(setup, model, values, adaptation, "adaptation, given P")
    compare_path(setup, model, values, stability, "stability, given P")
    label = quiet_score(
        make_scorer(setup, "label", model=model, preconditioner=given), setup.case.batch
    )
    whole = {n: m + LAMBDA * stability[n] for n, m in adaptation.items()}
    psi = oracle_influence(setup, model, whole)
    expected = influence.to_token_index(influence.row_sums(psi.matrix))
    parts = [oracle_influence(setup, model, m).absolute_scale for m in (adaptation, stability)]
    scale = influence.to_token_index(influence.row_sums(parts[0] + LAMBDA * parts[1]))
    close(label.total, expected, scale, MODEL, name="label, given P")


def pinned(test: Any) -> Any:
    """Steps 5 and 6 lie on both sides of the rectification."""
    for kind, taken in product([*steps.TORCH, *steps.OTHERS], [1, 2, 5, 6, 29]):
        test = example(Case(kind, taken, 7))(test)
    return test


@pinned
@given(cases())
def test_full_is_the_derivative_of_a_real_step(case: Case) -> None:
    """Full P o g_k = -(dtheta'/dw_k) / lr, measured on the optimizer's own step.

    Proves: full is the derivative of a real step (exact), against the optimizer's own step.
    """
    exact = case.derivative()
    # Both terms of P may nearly cancel (step 1 of Adam is a sign): the frozen form has one.
    scale = exact.abs().max() + frozen(case).abs().max().clamp(max=1e3)
    tolerance = case.kind.tolerance
    close(full(case), exact, scale, tolerance, name=f"derivative of a step, {case.kind.dtype}")


@given(cases(ADAMS))
@budget(0.5)
def test_adam_of_torch_is_the_oracles(case: Case) -> None:
    """The oracle's derivative from the optimizer's state, decay included: the third way.

    Proves: adam of torch is the oracles (exact), against ``adam_step_derivative``.
    """
    parameter, optimizer = case.run()
    group, state = optimizer.param_groups[0], optimizer.state[parameter]
    before = utility.AdamState(
        int(state["step"]),
        {"w": state["exp_avg"]},
        {"w": state["exp_avg_sq"]},
        group["betas"],
        float(group["eps"]),
        float(group["weight_decay"]),
        decoupled=group["decoupled_weight_decay"],
    )
    values = {"w": parameter.detach()}
    g, token = {"w": case.gradient}, {"w": case.token}
    expected = utility.adam_step_derivative(g, token, before, values)["w"]
    scale = utility.adam_preconditioner(g, before, "frozen", values)["w"] * case.token
    close(full(case), expected, scale.abs() + expected.abs() + 1, 1e-11, name="Adam's oracle")


@pytest.mark.parametrize("kind", [*steps.TORCH, *steps.OTHERS], ids=str)
def test_full_is_the_same_in_blocks(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of more numbers than a block holds, the last block not full: the same bits."""
    case = Case(kind, 6, 7, (4, 7))
    whole = full(case)
    monkeypatch.setattr(precision, "_BLOCK", 5)
    assert torch.equal(full(case), whole)
