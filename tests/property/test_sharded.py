"""Sharded weights, in the layouts of one process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphatoken import FisherDrift, Scorer, ScorerConfig
from alphatoken.errors import FisherError, UnsupportedError
from alphatoken.estimate.estimators import CAPTURED
from tests.property import properties_sharded as claims
from tests.property.profiles import budget
from tests.property.properties import Setup, drift_of, setups
from tests.property.strategies import make_case

CASE = make_case(("pprrr",), (("pprr",),), layers=2)
SETUP = Setup(CASE, "all")


@given(setups(), st.sampled_from(CAPTURED), st.sampled_from(["diagonal", "kronecker", "data"]))
@budget(0.6)
def test_sharded_values_equal_whole_ones(setup: Setup, estimator: str, retention: str) -> None:
    claims.check_sharded_values_equal_whole_ones(setup, estimator, retention)


@given(setups(), st.sampled_from(["diagonal", "data"]))
@budget(0.2, least=4)
def test_a_sharded_direction_is_never_stale(setup: Setup, retention: str) -> None:
    claims.check_a_sharded_direction_is_never_stale(setup, retention)


@given(setups(tied_linears=False), st.sampled_from(["frozen", "full", "given"]))
@budget(0.3)
def test_sharded_preconditioners(setup: Setup, kind: str) -> None:
    claims.check_sharded_preconditioners(setup, kind, 3)


def test_label_is_refused_by_name() -> None:
    model = CASE.model()
    for parameters in ("linears", "all"):
        config = ScorerConfig("label", layers=1, parameters=parameters)
        with pytest.raises(UnsupportedError, match=r"'label' cannot run on sharded weights.*DDP"):
            Scorer(model, CASE.validation, None, config, sharding=claims.FlatSharding(model))


def test_a_weight_shared_with_a_module_outside_is_refused() -> None:
    case = make_case(("pprrr",), (("pprr",),), layers=3, tied_linears=True, mlp="gated")
    model = case.model()
    model.head.weight = model.layers[-1].mlp.down_proj.weight  # type: ignore[union-attr,assignment]
    with pytest.raises(UnsupportedError, match="tied to a module outside the scored layers"):
        Scorer(
            model, case.validation, None, ScorerConfig(layers=1),
            sharding=claims.FlatSharding(model),
        )  # fmt: skip


def test_a_fisher_of_another_model_is_refused_from_parts_too() -> None:
    model = CASE.model()
    sharding = claims.FlatSharding(model)
    fisher, reference = drift_of(SETUP, model)
    far = FisherDrift(fisher, {n: w / 10 for n, w in reference.items()})
    few = FisherDrift(dict(list(fisher.items())[:1]), dict(list(reference.items())[:1]))
    odd = FisherDrift(
        {n: f[:1] for n, f in fisher.items()}, {n: w[:1] for n, w in reference.items()}
    )
    config = ScorerConfig(layers="all")
    for drift, message in ((far, "too far"), (few, "does not cover"), (odd, "another shape")):
        with pytest.raises(FisherError, match=message):
            Scorer(model, CASE.validation, drift, config, sharding=sharding)
