"""Weights of token losses: exact totals, caps, unbiased draws, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, find, given
from hypothesis import strategies as st

from alphatoken import InputError, NumericalError
from alphatoken.select import weights
from tests.property import properties_weights as claims
from tests.property.profiles import budget
from tests.property.properties_weights import WeightCase, weight_cases

SCOPES = st.sampled_from(["batch", "sequence"])
RANKED = st.sampled_from(["top", "bottom"])
SOFT = st.sampled_from(["proportional", "unbiased"])


@given(weight_cases(), SCOPES, st.sampled_from(["top", "bottom", "random"]))
def test_mask_weights_are_the_selection(case: WeightCase, scope: str, policy: str) -> None:
    claims.check_mask_weights_are_the_selection(case, scope, policy)


@given(weight_cases(), SCOPES, RANKED)
@example(WeightCase(2, 9, "negative", 0), "batch", "top")  # all share equally
@example(WeightCase(1, 9, "one", 0, 90), "batch", "top")  # one token, far above the cap
@example(WeightCase(1, 9, "ties", 0, 55), "batch", "top")
@example(WeightCase(1, 9, "normal", 0, 100, 1.0), "batch", "top")  # every token at the cap
def test_proportional_weights(case: WeightCase, scope: str, policy: str) -> None:
    claims.check_proportional_weights(case, scope, policy)


@given(weight_cases())
@example(WeightCase(2, 9, "negative", 0))
@example(WeightCase(1, 9, "one", 0, 90, 30.0))
@example(WeightCase(2, 9, "heavy", 0, 50, 1.0))  # cap 1: equal chances
def test_inclusion_probabilities(case: WeightCase) -> None:
    claims.check_probabilities(case)


@given(weight_cases())
@budget(0.4)
def test_unbiased_weights_by_enumeration(case: WeightCase) -> None:
    claims.check_unbiased_by_enumeration(case)


@given(weight_cases(), SCOPES, RANKED)
def test_an_unbiased_draw(case: WeightCase, scope: str, policy: str) -> None:
    claims.check_unbiased_draw(case, scope, policy)


@pytest.mark.parametrize(
    ("seed", "ratio", "policy"), [(0, 0.5, "top"), (1, 0.25, "top"), (2, 0.75, "bottom")]
)
def test_unbiased_weights_average_to_one(seed: int, ratio: float, policy: str) -> None:
    claims.check_unbiased_mean(seed, ratio, policy)


def test_random_unbiased_weights_average_to_one() -> None:
    claims.check_random_is_unbiased(3)


def test_equal_chances_are_a_simple_random_sample() -> None:
    claims.check_equal_chances_are_a_simple_random_sample(4)


@given(weight_cases(), SCOPES)
def test_random_weights_lose_only_their_assignment(case: WeightCase, scope: str) -> None:
    claims.check_random_weights_lose_only_their_assignment(case, scope)


@given(weight_cases(), SOFT)
def test_the_sequence_scope_is_row_by_row(case: WeightCase, weighting: str) -> None:
    claims.check_scope_is_row_by_row(case, weighting)


@given(weight_cases(), SOFT)
def test_scale_and_padding_change_nothing(case: WeightCase, weighting: str) -> None:
    claims.check_only_ranks_and_ratios_of_values_count(case, weighting)


@given(weight_cases(), st.sampled_from(weights.WEIGHTINGS))
def test_all_gives_ones(case: WeightCase, weighting: str) -> None:
    claims.check_all_gives_ones(case, weighting)


def test_ratio_one_unbiased_is_no_draw_at_all() -> None:
    values, mask = torch.randn(3, 7, generator=claims.seeded(0)), torch.ones(3, 7).bool()
    for scope in ("batch", "sequence"):
        found = weights.token_weights(values, mask, 1.0, weighting="unbiased", scope=scope)
        assert torch.equal(found, torch.ones(3, 7))


def test_a_hard_case_of_each_kind_is_drawn() -> None:
    """A weight at the cap beside one below it, and positive tokens that cannot take it all."""

    def proportional(case: WeightCase) -> torch.Tensor:
        values, mask = case.draw()
        return case.weights(values, mask, weighting="proportional")[mask]

    def capped(case: WeightCase) -> bool:
        found = proportional(case)
        return bool((found == case.cap).any()) and bool(((found > 0) & (found < case.cap)).any())

    def overflowing(case: WeightCase) -> bool:
        values, mask = case.draw()
        found = proportional(case)
        negative = values[mask] < 0
        return bool((found[negative] > 0).any()) and bool((found == case.cap).any())

    for hard in (capped, overflowing):
        find(weight_cases(), hard)


@pytest.mark.parametrize(
    ("option", "value"),
    [("policy", "best"), ("weighting", "soft"), ("scope", "rank"), ("cap", 0.5), ("cap", 1025.0),
     ("cap", float("nan"))],
)  # fmt: skip
@pytest.mark.parametrize("policy", ["top", "random", "all"])
def test_an_unknown_option_is_refused(policy: str, option: str, value: object) -> None:
    options = {"policy": policy, option: value}
    with pytest.raises(InputError, match=option):
        weights.token_weights(torch.zeros(2, 3), torch.ones(2, 3).bool(), 0.5, **options)


@pytest.mark.parametrize("weighting", weights.WEIGHTINGS)
@pytest.mark.parametrize("policy", weights.POLICIES)
def test_bad_input_is_refused(policy: str, weighting: str) -> None:
    values, mask = torch.zeros(2, 4), torch.ones(2, 4).bool()
    for ratio in (0.0, 1.5, float("nan")):
        for scope in ("batch", "sequence"):
            with pytest.raises(InputError, match="ratio"):
                weights.token_weights(
                    values, mask, ratio, policy=policy, weighting=weighting, scope=scope
                )
    values[1, 2] = float("nan")
    if (policy, weighting) != ("random", "mask"):  # which reads no value
        with pytest.raises(NumericalError, match="row 1, token 2"):
            weights.token_weights(values, mask, 0.5, policy=policy, weighting=weighting)


@pytest.mark.parametrize("weighting", weights.WEIGHTINGS)
def test_an_empty_mask_weighs_nothing(weighting: str) -> None:
    for scope in ("batch", "sequence"):
        found = weights.token_weights(
            torch.zeros(2, 4), torch.zeros(2, 4).bool(), 0.5, weighting=weighting, scope=scope
        )
        assert torch.equal(found, torch.zeros(2, 4))
