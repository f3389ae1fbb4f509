"""The Fisher drift as an object: V, names, layouts, files, refusals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.property import properties_drift as claims
from tests.property.profiles import budget
from tests.property.strategies import SEEDS

STRUCTURES = st.sampled_from(["diagonal", "kronecker"])


@given(SEEDS, STRUCTURES)
@budget(0.5)
def test_v(seed: int, structure: str) -> None:
    claims.check_v_is_the_definition(seed, structure)


@given(SEEDS, STRUCTURES, st.booleans())
@budget(0.5)
def test_v_follows_the_weights(seed: int, structure: str, quietly: bool) -> None:
    claims.check_v_is_of_the_weights_as_they_are(seed, structure, quietly)


@given(SEEDS, STRUCTURES)
@budget(0.2)
def test_files(seed: int, structure: str) -> None:
    claims.check_files_give_the_same_drift(seed, structure)


@given(SEEDS, st.floats(0.0, 1.0))
@budget(0.5)
def test_distance(seed: int, most: float) -> None:
    claims.check_drift_is_the_relative_distance(seed, most)


@given(SEEDS, STRUCTURES)
@budget(0.2)
def test_refusals(seed: int, structure: str) -> None:
    claims.check_a_fisher_of_something_else_is_refused(seed, structure)
