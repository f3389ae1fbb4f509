"""Standard errors of values, and what is dropped by them."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alphatoken import ConfigError, InputError, NumericalError, Scorer, ScorerConfig
from alphatoken import values as values_module
from alphatoken.oracle import gradients
from alphatoken.select import confidence as confidence_module
from alphatoken.select.confidence import select_harmless
from tests.property.profiles import budget
from tests.property.setups import (
    LAMBDA,
    MODEL,
    Setup,
    forward_of,
    make_scorer,
    parameters_of,
    quiet_score,
    setups,
    stepped,
)
from tests.property.strategies import make_case
from tests.property.tolerance import close


@dataclass(frozen=True)
class RuleCase:
    """Values and errors on a grid that holds ties and zeros."""

    values: tuple[tuple[int, ...], ...]
    errors: tuple[tuple[int, ...], ...]
    response: tuple[tuple[bool, ...], ...]


@st.composite
def rule_cases(draw: st.DrawFn) -> RuleCase:
    """Two rows of six tokens."""
    shape = {"min_size": 6, "max_size": 6}
    rows = [
        (
            tuple(draw(st.lists(st.integers(-9, 9), **shape))),
            tuple(draw(st.lists(st.integers(0, 5), **shape))),
            tuple(draw(st.lists(st.booleans(), **shape))),
        )
        for _ in range(2)
    ]
    values, errors, response = zip(*rows, strict=True)
    return RuleCase(values, errors, response)


def student(confidence: float, degrees: int) -> float:
    """Of Student's t: where the integral of its density from 0 reaches ``confidence - 1/2``."""
    if confidence == 0.5:
        return 0.0
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    scale /= math.sqrt(degrees * math.pi)

    def below(x: float) -> float:
        # Simpson's rule in u = atan(t / sqrt(degrees)), on a bounded interval.
        end, steps = math.atan(x / math.sqrt(degrees)), 2000
        step = end / steps
        ordinates = [
            (1 if i in (0, steps) else 4 if i % 2 else 2) * math.cos(i * step) ** (degrees - 1)
            for i in range(steps + 1)
        ]
        return scale * math.sqrt(degrees) * sum(ordinates) * step / 3

    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < confidence - 0.5 else (low, middle)
    return low


SEVERAL = ((("pprrr",), ("prr", "p..")), (("pprr", "prrr"), ("ppr",), ("prrr",)))
CASE = make_case(("pprrr",), (("pprr",), ("prr",)), layers=2)


@given(
    setups(validations=st.sampled_from(SEVERAL)),
    st.sampled_from(["alphatoken", "direct", "path", "label"]),
    st.booleans(),
)
@budget(0.15)
def test_standard_errors(setup: Setup, estimator: str, scaled: bool) -> None:
    """Values with errors are the values without; the error is the delete-one jackknife's.

    Under label it is the oracle's, under others spelt out of the values against all validation
    batches but one. ``scaled``: with a preconditioner, a random number for each entry.

    Proves: standard errors (exact), against ``standard_errors``, values against all batches but
    one.
    """
    model = setup.case.model()
    plain = make_scorer(setup, estimator, model=model)
    p = None
    if scaled:
        generator = torch.Generator().manual_seed(1)
        p = {
            name: torch.rand(x.shape, generator=generator, dtype=x.dtype)
            for name, x in plain.parameters.items()
        }
        plain = make_scorer(setup, estimator, model=model, preconditioner=p)
    scorer = make_scorer(setup, estimator, model=model, preconditioner=p, standard_errors=True)
    expected = quiet_score(plain, setup.case.batch)
    found = quiet_score(scorer, setup.case.batch)
    alone = scorer.score(setup.case.batch, components=False)
    assert expected.adaptation is not None
    assert expected.stability is not None
    left_out = []
    for place in range(len(setup.case.validation)):
        rest = [b for i, b in enumerate(setup.case.validation) if i != place]
        plain.set_validation(rest)
        one = quiet_score(plain, setup.case.batch)
        assert one.adaptation is not None
        left_out.append(one.adaptation)
    size = sum(x.abs() for x in left_out) + LAMBDA * expected.stability.abs() + 1e-30
    size = size.max() + size  # parts cancel within a token as well
    for values in (found, alone):
        assert values.parts is not None
        close(values.total, expected.total, size, MODEL, name=f"{estimator} with errors")
        close(values.parts.sum(-1), expected.adaptation, size, MODEL, name=f"{estimator}, parts")
    assert alone.adaptation is None
    count = len(left_out)
    squares = sum((x - expected.adaptation) ** 2 for x in left_out)
    errors = torch.sqrt(squares * (count - 1) / count)
    close(found.standard_error(), errors, size, MODEL, name=f"{estimator}, standard error")
    if estimator == "label" and not scaled:
        parameters = parameters_of(setup, scorer.adapter)  # type: ignore[arg-type]
        oracle = gradients.standard_errors(
            model, forward_of(model), setup.case.batch, setup.case.validation, parameters
        )
        close(found.standard_error(), oracle, size, MODEL, name="standard error, oracle")


@given(
    setups(validations=st.sampled_from(SEVERAL)),
    st.sampled_from(["alphatoken", "direct", "path", "label"]),
)
@budget(0.1)
def test_values_by_batch(setup: Setup, estimator: str) -> None:
    """Values by batch are those of scorers of one batch; adaptation is their mean by tokens.

    Proves: values by batch (exact), against scorers of each batch alone.
    """
    model, batches = setup.case.model(), setup.case.validation
    scorer = make_scorer(setup, estimator, model=model, standard_errors=True)
    found = quiet_score(scorer, setup.case.batch)
    by_batch, alone = found.by_batch(), []
    plain = make_scorer(setup, estimator, model=model)
    for batch in batches:
        plain.set_validation(batch)
        one = quiet_score(plain, setup.case.batch).adaptation
        assert one is not None
        alone.append(one)
    size = sum(x.abs() for x in alone) + 1e-30
    size = size.max() + size  # parts cancel within a token as well
    for place, one in enumerate(alone):
        close(by_batch[..., place], one, size, MODEL, name=f"{estimator}, batch {place}")
    tokens = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    mean = sum(n * x for n, x in zip(tokens, alone, strict=True)) / sum(tokens)
    assert found.adaptation is not None
    close(found.adaptation, mean, size, MODEL, name=f"{estimator}, mean")


@pytest.mark.parametrize("retained", [False, True])
@given(setup=setups(validations=st.sampled_from(SEVERAL)))
@budget(0.05, least=2)
def test_standard_errors_of_a_full_step(setup: Setup, retained: bool) -> None:
    """P of the step scales the part of each validation batch as it scales their sum.

    Proves: standard errors of a full step (exact), against values without errors, scorers of each
    batch alone.
    """
    model, optimizer = stepped(setup, 2, "AdamW")
    options = {"model": model, "optimizer": optimizer, "retention": retained}
    options |= {"preconditioner": "full", "precondition_after": 1}
    plain = make_scorer(setup, "path", **options)
    scorer = make_scorer(setup, "path", standard_errors=True, **options)
    expected = quiet_score(plain, setup.case.batch)
    found = quiet_score(scorer, setup.case.batch)
    assert expected.adaptation is not None
    alone = []
    for batch in setup.case.validation:
        plain.set_validation(batch)
        one = quiet_score(plain, setup.case.batch).adaptation
        assert one is not None
        alone.append(one)
    size = sum(x.abs() for x in alone) + expected.total.abs() + 1e-30
    size = size.max() + size  # parts cancel within a token as well
    close(found.total, expected.total, size, MODEL, name="a full step with errors")
    for place, one in enumerate(alone):
        close(found.by_batch()[..., place], one, size, MODEL, name=f"a full step, batch {place}")


@pytest.mark.parametrize("seed", [0])
def test_errors_are_unbiased(seed: int) -> None:
    """Over many draws of clusters, the mean squared error is the variance of the ratio (-2 to 8 %).

    Numbers of tokens depend on the clusters' values, and the jackknife errs on the safe side.

    Proves: errors are unbiased (approximate), against variance over draws.
    """
    generator = torch.Generator().manual_seed(seed)
    draws, count = 40000, 8
    tokens = torch.randint(5, 40, (draws, count), generator=generator).double()
    sums = tokens * (0.3 + torch.randn(draws, count, generator=generator).double())
    sums += 0.02 * tokens**2
    whole = tokens.sum(-1, keepdim=True)
    ratio = sums.sum(-1) / whole.squeeze(-1)
    squares = [
        float(values_module.standard_error(part, share)) ** 2
        for part, share in zip((sums / whole)[:10000], (tokens / whole)[:10000], strict=True)
    ]
    assert 0.98 < statistics.fmean(squares) / float(ratio.var()) < 1.08


@given(rule_cases(), st.integers(2, 30), st.sampled_from([0.5, 0.8, 0.95, 0.999]))
@budget(0.2)
def test_harmless(case: RuleCase, parts: int, confidence: float) -> None:
    """A response token stays unless v + t se < 0, t by bisection of Student's distribution.

    Proves: harmless (exact), against loops, quantile by bisection.
    """
    values, errors = (torch.tensor(x).float() for x in (case.values, case.errors))
    mask = torch.tensor(case.response)
    found = confidence_module.select_harmless(
        values, errors, mask, parts=parts, confidence=confidence
    )
    quantile = student(confidence, parts - 1)
    for row, tokens in enumerate(found.tolist()):
        for token, kept in enumerate(tokens):
            bound = case.values[row][token] + quantile * case.errors[row][token]
            if abs(bound) < 1e-6 and case.errors[row][token]:
                continue  # on the edge, within what the bisection knows
            assert kept == (case.response[row][token] and bound >= 0), (row, token)


def test_one_validation_batch_has_no_errors() -> None:
    model = CASE.model()
    config = ScorerConfig(layers=1, standard_errors=True)
    with pytest.raises(InputError, match="at least two validation batches"):
        Scorer(model, CASE.validation[:1], config=config)
    scorer = Scorer(model, CASE.validation, config=config)
    with pytest.raises(InputError, match="at least two validation batches"):
        scorer.set_validation(CASE.validation[0])
    values = Scorer(model, CASE.validation, config=ScorerConfig(layers=1)).score(CASE.batch)
    with pytest.raises(ConfigError, match="ScorerConfig\\(standard_errors=True\\)"):
        values.standard_error()
    with pytest.raises(ConfigError, match="not split by validation batch"):
        values.by_batch()


def test_bad_input_of_the_rule() -> None:
    values, mask = torch.tensor([[0.0, -1.0, 1.0]]), torch.tensor([[False, True, True]])
    errors = torch.ones_like(values)
    for confidence in (0.4, 1.0, float("nan")):
        with pytest.raises(InputError, match="confidence must lie in"):
            select_harmless(values, errors, mask, parts=3, confidence=confidence)
    with pytest.raises(InputError, match="at least two validation batches"):
        select_harmless(values, errors, mask, parts=1)
    with pytest.raises(InputError, match="a standard error is negative"):
        select_harmless(values, -errors, mask, parts=3)
    with pytest.raises(NumericalError, match="row 0, token 1"):
        select_harmless(values, errors * float("inf"), mask, parts=3)
    # Outside the response nothing is looked at.
    unknown = errors.masked_fill(~mask, float("nan"))
    assert select_harmless(values, unknown, mask, parts=3).tolist() == [[False, True, True]]
