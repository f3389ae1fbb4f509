"""The proofs that run on a user's model refuse every trap, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.property import properties_proofs as claims
from tests.property.profiles import budget
from tests.property.strategies import SEEDS, rows


@pytest.mark.parametrize("name", list(claims.TRAPS))
def test_traps(name: str) -> None:
    claims.check_a_trap_is_refused(name)


@pytest.mark.parametrize("name", list(claims.OWN_BACKWARDS))
def test_backwards_of_their_own(name: str) -> None:
    claims.check_a_backward_of_its_own_is_refused(name)


@pytest.mark.parametrize("name", ["padding row", "straight through"])
def test_backwards_that_are_followed(name: str) -> None:
    claims.check_a_backward_that_is_followed(name)


@pytest.mark.parametrize("estimator", ["direct", "path", "label"])
def test_models_that_look_ahead(estimator: str) -> None:
    claims.check_a_model_that_looks_ahead_is_refused(estimator)


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


@given(seed=SEEDS)
@budget(0.05, least=2)
def test_what_holds_at_the_second_time(seed: int) -> None:
    claims.check_what_was_refused_is_refused_again(seed)
    claims.check_a_pass_leaves_nothing_to_the_next(seed)
    claims.check_masks_of_flags_hide_labels(seed)


def test_autocast_outlives_an_error() -> None:
    claims.check_autocast_outlives_an_error("cpu")


def test_a_gradient_file_is_of_its_pairs() -> None:
    claims.check_a_gradient_file_is_of_its_pairs(0.1)


@pytest.mark.parametrize("layout", list(claims.LONG))
@pytest.mark.parametrize("name", claims.HIDDEN)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_slice_finds_every_planted_fault(name: str, layout: str, seed: int) -> None:
    claims.check_a_slice_shows_what_its_batch_shows(name, layout, seed)


@given(seed=SEEDS)
@budget(0.2, least=4)
def test_a_slice_finds_documents_that_see_each_other(seed: int) -> None:
    claims.check_a_slice_shows_which_documents_see_each_other(seed)


@given(
    lines=st.sampled_from(["plain", "right", "left", "ragged", "packed"]).flatmap(
        lambda mode: rows(mode, max_length=12, max_rows=5)
    ),
    size=st.tuples(st.integers(1, 3), st.integers(1, 6)),
    form=st.sampled_from(claims.FORMS),
)
@example(("..pprr", "pprr..", "pr...."), (1, 3), "plain")
@example(("pr|pprr", "pppp|pr"), (1, 3), "pairs")
@example(("pprrr", "prrrr"), (1, 2), "unknown")
@example(("pr", "pp"), (2, 2), "shared")
@example(("pp|pr",), (1, 2), "plain")
@example(("ppprr|ppr",), (1, 5), "plain")
def test_a_slice_is_cut_alike(lines: tuple[str, ...], size: tuple[int, int], form: str) -> None:
    claims.check_a_slice_is_a_part_of_its_batch(lines, *size, form)
