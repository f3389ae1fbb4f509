"""The proofs that run on a user's model refuse every trap, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.property import properties_proofs as claims
from tests.property.profiles import budget
from tests.property.strategies import SEEDS


@pytest.mark.parametrize("name", list(claims.TRAPS))
def test_traps(name: str) -> None:
    claims.check_a_trap_is_refused(name)


@pytest.mark.parametrize("long", [False, True])
def test_isolation(long: bool) -> None:
    claims.check_isolation_is_claimed_only_where_it_was_shown(long)


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e-2])
@pytest.mark.parametrize("wide", [False, True])
def test_gradients(size: float, wide: bool) -> None:
    claims.check_a_gradient_that_is_not_explained_is_named(size, wide)


@given(seed=SEEDS)
@budget(0.2, least=4)
def test_documents(seed: int) -> None:
    claims.check_documents_that_see_each_other_are_refused(seed)
