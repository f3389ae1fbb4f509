"""Label values: row sums of the influence matrix, by forward mode."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis.strategies import sampled_from

from alphatoken import Scorer, ScorerConfig
from tests.property import properties_estimators as claims
from tests.property.profiles import budget
from tests.property.properties import Setup, setups
from tests.property.strategies import make_case

SHARED = make_case(("pprrr",), (("pprr",),), layers=3, repeated_block=True, tied_embeddings=True)
# Every token is the embedding's padding token somewhere in the row, as an end of turn often is.
PADDED = make_case(("pprrr",), (("pprr",),), tied_embeddings=True, padding_token=1, vocabulary=3)
RARE = make_case(("pprrr", "prrrr"), (("pprr",),), rare_tokens=True, vocabulary=3)


@given(setups())
@example(Setup(SHARED, 1))
@budget(0.25)
def test_label_is_the_row_sums(setup: Setup) -> None:
    claims.check_label_is_the_row_sums(setup)


@given(setups(), sampled_from([2.0**80, 2.0**-80]))
@budget(0.05)
def test_label_is_linear_in_m_however_long_it_is(setup: Setup, factor: float) -> None:
    claims.check_label_is_linear_in_m(setup, factor)


@given(setups())
@example(Setup(SHARED))
@example(Setup(PADDED))
@example(Setup(RARE))
@budget(0.15)
def test_label_over_all_parameters(setup: Setup) -> None:
    claims.check_label_over_all_parameters(setup)


@given(setups(), sampled_from(claims.NAMED))
@example(Setup(SHARED), "head.weight")
@example(Setup(SHARED), "layers.[12].mlp_norm.*")
@budget(0.15)
def test_label_over_named_parameters(setup: Setup, parameters: str) -> None:
    claims.check_label_over_named_parameters(setup, parameters)


@given(setups(tied_linears=True, mlp="gated"))
@budget(0.05)
def test_label_follows_a_weight_through_two_modules(setup: Setup) -> None:
    claims.check_label_is_the_row_sums(setup)


@given(setups(conv_mixer=True))
@budget(0.05)
def test_label_and_path_are_exact_through_another_mixer(setup: Setup) -> None:
    claims.check_label_is_the_row_sums(setup)
    claims.check_path_is_the_column_sums(setup)


def test_the_model_keeps_its_parameters_when_a_block_is_used_twice() -> None:
    """torch's tie_weights swaps a place twice here, and would leave the dual tensors behind."""
    model = SHARED.model()
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    Scorer(model, SHARED.validation, config=ScorerConfig(estimator="label")).score(SHARED.batch)
    after = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    assert after == before
    assert all(isinstance(p, torch.nn.Parameter) for p in model.parameters())


def test_a_zero_direction_gives_zero_values() -> None:
    case = make_case(("pprrr",), (("pprr",),), layers=1)
    model = case.model()
    with torch.no_grad():
        for p in model.head.parameters():
            p.zero_()  # the loss no longer depends on anything below
    values = Scorer(model, case.validation, config=ScorerConfig(estimator="label", layers=1)).score(
        case.batch
    )
    assert not bool(values.total.any())
