"""Standard errors of values, and what is dropped by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alphatoken import ConfigError, InputError, NumericalError, Scorer, ScorerConfig
from alphatoken.select.confidence import select_harmless
from tests.property import properties_confidence as claims
from tests.property.profiles import budget
from tests.property.properties import Setup, setups
from tests.property.strategies import make_case

SEVERAL = ((("pprrr",), ("prr", "p..")), (("pprr", "prrr"), ("ppr",), ("prrr",)))
CASE = make_case(("pprrr",), (("pprr",), ("prr",)), layers=2)


@given(
    setups(validations=st.sampled_from(SEVERAL)),
    st.sampled_from(["alphatoken", "direct", "path", "label"]),
    st.booleans(),
)
@budget(0.15)
def test_standard_errors_of_values(setup: Setup, estimator: str, scaled: bool) -> None:
    claims.check_standard_errors(setup, estimator, scaled=scaled)


@pytest.mark.parametrize("seed", range(3))
def test_the_squared_error_has_no_bias(seed: int) -> None:
    claims.check_errors_are_unbiased(seed)


@given(claims.rule_cases(), st.integers(2, 30), st.sampled_from([0.5, 0.8, 0.95, 0.999]))
@budget(0.2)
def test_only_what_is_harmful_beyond_doubt_is_dropped(
    case: claims.RuleCase, parts: int, confidence: float
) -> None:
    claims.check_harmless(case, parts, confidence)


def test_one_validation_batch_has_no_errors() -> None:
    model = CASE.model()
    config = ScorerConfig(layers=1, standard_errors=True)
    with pytest.raises(InputError, match="at least two validation batches"):
        Scorer(model, CASE.validation[:1], config=config)
    scorer = Scorer(model, CASE.validation, config=config)
    with pytest.raises(InputError, match="at least two validation batches"):
        scorer.set_validation(CASE.validation[0])
    with pytest.raises(ConfigError, match="no validation row takes part"):
        replace(config, objective="stability")
    values = Scorer(model, CASE.validation, config=ScorerConfig(layers=1)).score(CASE.batch)
    with pytest.raises(ConfigError, match="ScorerConfig\\(standard_errors=True\\)"):
        values.standard_error()


def test_equal_batches_leave_no_doubt() -> None:
    """Validation batches that say the same: the error is 0, and the sign of the value decides."""
    model = CASE.model()
    config = ScorerConfig(estimator="label", layers=2, standard_errors=True)
    scorer = Scorer(model, [CASE.validation[0]] * 3, config=config)
    values = scorer.score(CASE.batch)
    size = values.total.abs().max()
    torch.testing.assert_close(
        values.standard_error() / size, torch.zeros_like(values.total), atol=1e-12, rtol=0
    )


def test_bad_input_of_the_rule() -> None:
    values, mask = torch.tensor([[0.0, -1.0, 1.0]]), torch.tensor([[False, True, True]])
    errors = torch.ones_like(values)
    for confidence in (0.4, 1.0, float("nan")):
        with pytest.raises(InputError, match="confidence must lie in"):
            select_harmless(values, errors, mask, parts=3, confidence=confidence)
    with pytest.raises(InputError, match="at least two parts"):
        select_harmless(values, errors, mask, parts=1)
    with pytest.raises(InputError, match="a standard error is negative"):
        select_harmless(values, -errors, mask, parts=3)
    with pytest.raises(NumericalError, match="row 0, token 1"):
        select_harmless(values, errors * float("inf"), mask, parts=3)
    # Outside the response nothing is looked at.
    unknown = errors.masked_fill(~mask, float("nan"))
    assert select_harmless(values, unknown, mask, parts=3).tolist() == [[False, True, True]]
