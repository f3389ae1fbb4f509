"""M = P o (G + lambda V): the algebra, and each ingredient through the scorer."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken import AlphaTokenWarning, FisherDrift, Scorer, ScorerConfig, TokenValues
from alphatoken.direction.objective import mean_gradient, objective_sums
from alphatoken.model.batch import read_batch, token_losses
from alphatoken.model.protocol import find_adapter
from tests.property import properties_algebra as algebra
from tests.property import properties_scorer as claims
from tests.property.profiles import budget
from tests.property.properties import Setup, drift_of, setups
from tests.property.properties_algebra import DirectionCase, direction_cases
from tests.property.strategies import make_case
from tests.property.tolerance import close

SEVERAL = Setup(
    make_case(("pprrr", "..prr"), (("pprr",), ("prrrr.", "..prrr"), ("pppppr",)), layers=2), "all"
)
ROWS = st.sampled_from(["pprr..", "prrrr.", "..pprr", ".prprr", "pprrrr"])
PAIRS = st.integers(1, 2).flatmap(
    lambda n: st.sampled_from([2, 4]).flatmap(
        lambda count: st.tuples(*[st.tuples(*[ROWS] * n)] * count)
    )
)


@given(direction_cases())
def test_diagonal_drift(case: DirectionCase) -> None:
    algebra.check_diagonal_drift(case)


@given(direction_cases())
def test_kronecker_drift(case: DirectionCase) -> None:
    algebra.check_kronecker_drift(case)


@given(direction_cases())
def test_preconditioned_sum_and_balance(case: DirectionCase) -> None:
    algebra.check_direction_algebra(case)


@given(setups())
@example(SEVERAL)
@budget(0.15)
def test_the_validation_gradient_and_the_drift(setup: Setup) -> None:
    claims.check_validation_gradient(setup)


@given(setups())
@budget(0.1)
def test_kronecker_retention(setup: Setup) -> None:
    claims.check_kronecker_retention(setup)


@given(setups())
@budget(0.1)
def test_retention_by_data(setup: Setup) -> None:
    claims.check_retention_by_data(setup)


@given(setups(), st.sampled_from([0.0, -2.0, 7.0]))
@budget(0.1)
def test_stability_is_reported_before_lambda(setup: Setup, weight: float) -> None:
    claims.check_lambda(setup, weight)


@given(setups(validations=PAIRS), st.sampled_from([0.1, 1.0]), st.sampled_from(["tokens", "pairs"]))
@budget(0.15)
def test_validation_by_preference_pairs(setup: Setup, beta: float, normalization: str) -> None:
    claims.check_preference_validation(setup, beta, normalization)


@given(setups(), st.sampled_from(claims.EVERY))
@budget(0.1)
def test_the_direction_is_never_stale(setup: Setup, estimator: str) -> None:
    claims.check_direction_is_never_stale(setup, estimator)


def test_retention_is_zero_before_any_drift() -> None:
    case = SEVERAL.case
    model = case.model()
    fisher, _ = drift_of(SEVERAL, model)
    named = dict(model.named_parameters())
    drift = FisherDrift(fisher, {n: named[n].detach().clone() for n in fisher})
    for estimator in claims.EVERY:
        scorer = Scorer(model, case.validation, drift, ScorerConfig(estimator, layers=2))
        values = scorer.score(case.batch)
        assert not bool(values.stability.any())
        assert torch.equal(values.total, values.adaptation)
        assert set(values.balance.values()) <= {0.0}


def test_one_side_that_decides_alone_is_warned_of_once() -> None:
    case = SEVERAL.case
    model = case.model()
    drift = FisherDrift(*drift_of(SEVERAL, model))
    config = ScorerConfig("direct", layers=2, stability_weight=1e9, max_relative_drift=None)
    scorer = Scorer(model, case.validation, drift, config)
    with pytest.warns(AlphaTokenWarning, match="stability side alone"):
        values = scorer.score(case.batch)
    assert values.shares()["stability_direct"] > 0.999
    scorer.score(case.batch)  # warnings are errors here


@pytest.mark.parametrize(
    ("share", "side"),
    [(9e-4, "adaptation"), (1.1e-3, None), (0.9989, None), (0.9991, "stability")],
)
def test_a_side_is_said_to_decide_alone_from_a_share_of_0_999_on(
    share: float, side: str | None
) -> None:
    case = SEVERAL.case
    model = case.model()
    drift = FisherDrift(*drift_of(SEVERAL, model))

    def score(weight: float) -> TokenValues:
        config = ScorerConfig("direct", layers=2, stability_weight=weight, max_relative_drift=None)
        return Scorer(model, case.validation, drift, config).score(case.batch)

    at_one = score(1.0).shares()["stability_direct"]
    odds = share / (1 - share) / (at_one / (1 - at_one))
    said = pytest.warns(AlphaTokenWarning, match=f"{side} side alone") if side else nullcontext()
    with said:
        found = score(odds)
    assert found.shares()["stability_direct"] == pytest.approx(share, rel=1e-6)


def test_gradients_are_summed_one_by_one_and_none_is_held() -> None:
    """Several batches' sums are autograd's, and of one batch two gradients at most are alive."""
    model = SEVERAL.case.model()
    adapter, parameters = find_adapter(model), dict(model.named_parameters())
    unused = torch.zeros(3, requires_grad=True)
    given = {"unused": unused, **dict(reversed(parameters.items()))}
    alive: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def look(gradient: torch.Tensor) -> None:
        made.append(weakref.ref(gradient))
        alive.append(sum(one() is not None for one in made))

    hooks = [p.register_hook(look) for p in parameters.values()]
    sums, count = objective_sums(adapter, given, SEVERAL.case.validation, first=None)
    for hook in hooks:
        hook.remove()
    assert list(sums) == list(given)
    assert not sums["unused"].any()
    assert len(alive) == len(parameters) * len(SEVERAL.case.validation)
    assert max(alive) <= 2
    assert not any(p._backward_hooks for p in given.values())
    assert all(p.grad is None for p in given.values())
    expected = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for batch in SEVERAL.case.validation:
        loss = token_losses(adapter.forward(read_batch(batch).inputs), batch["labels"]).sum()
        for name, g in zip(
            parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True
        ):
            expected[name] += g
    for name, known in expected.items():
        scale = 1.0 + known.abs().sum()
        close(sums[name], known.detach(), scale, 1e-12, name=name)
    assert count == sum(read_batch(b).response_tokens for b in SEVERAL.case.validation)
    means = mean_gradient("validation", dict(sums), count)
    assert all(torch.equal(means[name], sums[name] / count) for name in given)
