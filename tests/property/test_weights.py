"""Masks as weights of token losses, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alphatoken import InputError, NumericalError
from alphatoken.select import weights
from tests.property import properties_weights as claims
from tests.property.properties_weights import WeightCase, weight_cases

SCOPES = st.sampled_from(["batch", "sequence"])
KEPT = st.sampled_from(["top", "bottom", "random"])


@given(weight_cases(), SCOPES, KEPT)
def test_mask_weights_are_the_selection(case: WeightCase, scope: str, policy: str) -> None:
    claims.check_mask_weights_are_the_selection(case, scope, policy)


@given(weight_cases(), KEPT)
def test_the_sequence_scope_is_row_by_row(case: WeightCase, policy: str) -> None:
    claims.check_scope_is_row_by_row(case, policy)


@given(weight_cases())
def test_scale_and_padding_change_nothing(case: WeightCase) -> None:
    claims.check_only_ranks_of_values_count(case)


@given(weight_cases())
def test_all_gives_ones(case: WeightCase) -> None:
    claims.check_all_gives_ones(case)


@pytest.mark.parametrize(("option", "value"), [("policy", "best"), ("scope", "rank")])
@pytest.mark.parametrize("policy", ["top", "random", "all"])
def test_an_unknown_option_is_refused(policy: str, option: str, value: object) -> None:
    options = {"policy": policy, option: value}
    with pytest.raises(InputError, match=option):
        weights.token_weights(torch.zeros(2, 3), torch.ones(2, 3).bool(), 0.5, **options)


@pytest.mark.parametrize("policy", weights.POLICIES)
def test_bad_input_is_refused(policy: str) -> None:
    values, mask = torch.zeros(2, 4), torch.ones(2, 4).bool()
    for ratio in (0.0, 1.5, float("nan")):
        for scope in ("batch", "sequence"):
            with pytest.raises(InputError, match="ratio"):
                weights.token_weights(values, mask, ratio, policy=policy, scope=scope)
    values[1, 2] = float("nan")
    if policy != "random":  # which reads no value
        with pytest.raises(NumericalError, match="row 1, token 2"):
            weights.token_weights(values, mask, 0.5, policy=policy)


@pytest.mark.parametrize("policy", weights.POLICIES)
def test_an_empty_mask_weighs_nothing(policy: str) -> None:
    for scope in ("batch", "sequence"):
        found = weights.token_weights(
            torch.zeros(2, 4), torch.zeros(2, 4).bool(), 0.5, policy=policy, scope=scope
        )
        assert torch.equal(found, torch.zeros(2, 4))
