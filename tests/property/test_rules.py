"""What trainers promise beside their steps: one rule for all objectives, refusals, what is said."""

from __future__ import annotations

import pytest

from tests.property import properties_rules as claims

TRAINERS = ("trl", "peft")


def need(*packages: str) -> None:
    for name in packages:
        pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.mark.parametrize("name", list(claims.PAIR_RULES))
def test_pools_begin_at_log_two(name: str) -> None:
    need(*TRAINERS)
    claims.check_the_pool_begins_at_log_two(name)


def test_moving_references() -> None:
    need(*TRAINERS)
    claims.check_a_moving_reference_is_looked_at_anew()


@pytest.mark.parametrize("family", ["sft", "lm"])
def test_collators(family: str) -> None:
    need(*TRAINERS)
    claims.check_a_collator_labels_every_batch(family)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_routers(share: float) -> None:
    need(*TRAINERS)
    claims.check_the_routers_loss_is_trained(share)


@pytest.mark.parametrize("name", list(claims.RESUMED))
def test_resumed_options(name: str) -> None:
    need(*TRAINERS)
    claims.check_rounding_is_told_from_results(name)


@pytest.mark.parametrize("name", list(claims.REFERENCES))
def test_references(name: str) -> None:
    need(*TRAINERS)
    claims.check_a_reference_reads_the_policys_tokens(name)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("what", ["rows", "validation", "prompts"])
def test_tokens_without_a_row(what: str, adapted: bool) -> None:
    need(*TRAINERS)
    claims.check_tokens_without_a_row_are_refused(what, adapted)


@pytest.mark.parametrize(("parameters", "tied"), [("all", False), ("head.weight", True)])
def test_counted_tokens(parameters: str, tied: bool) -> None:
    claims.check_a_fisher_refuses_gradients_that_count_tokens(parameters, tied)
