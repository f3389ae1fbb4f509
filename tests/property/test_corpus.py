"""Corpora of any size: rows from any place, the exact share of all values, G from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken import InputError, NumericalError, Scorer, ScorerConfig, UnsupportedError
from alphatoken.estimate.estimators import ESTIMATORS
from alphatoken.select.threshold import top_threshold
from tests.property import properties_corpus as claims
from tests.property.decoder import ReferenceAdapter
from tests.property.profiles import budget
from tests.property.properties import Setup, setups
from tests.property.strategies import make_case

CASE = make_case(("pprrr",), (("pprr",), ("prr",)), layers=2)


@given(
    st.lists(claims.NUMBERS, min_size=1, max_size=60),
    st.lists(st.integers(0, 60), max_size=4),
    st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.55, 0.9, 1.0]),
)
@example([1.0, 1.0, 1.0, 1.0], [1, 2, 3], 0.5)
@example([-0.0, 0.0, -0.0, 0.0], [2], 0.25)
def test_the_best_share_of_parts(values: list[float], cuts: list[int], ratio: float) -> None:
    claims.check_top_threshold(values, cuts, ratio)


def test_what_has_no_rank_is_refused() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(NumericalError, match="not finite"):
            top_threshold(lambda value=value: [np.array([1.0, value])], 0.5)
    with pytest.raises(InputError, match="ratio"):
        top_threshold(lambda: [np.ones(3)], 1.5)


@given(setups(), st.sampled_from(ESTIMATORS))
@budget(0.15)
def test_a_gradient_from_a_file(setup: Setup, estimator: str) -> None:
    claims.check_kept_gradient(setup, estimator)


def test_a_gradient_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gradient.safetensors"

    def scorer(model, validation=CASE.validation, **options) -> Scorer:
        config = ScorerConfig(**{"layers": 1, **options})
        return Scorer(model, validation, config=config, adapter=ReferenceAdapter(model))

    scorer(CASE.model()).save_gradient(path)
    moved = CASE.model()
    with torch.no_grad():
        next(moved.parameters()).mul_(1.25)
    for other, what in (
        (scorer(moved), "weights"),
        (scorer(CASE.model(), CASE.validation[:1]), "validation rows"),
        (scorer(CASE.model(), layers=2), "parameters"),
    ):
        with pytest.raises(InputError, match=f"of other {what}"):
            other.load_gradient(path)
    for options in ({"standard_errors": True},):
        with pytest.raises(UnsupportedError, match="standard errors"):
            scorer(CASE.model(), **options).save_gradient(path)


@given(claims.lines(), st.sampled_from([1, 2, 5, 256]), st.integers(0, 40), st.integers(0, 40))
def test_rows_from_any_place(lines: list[object], stride: int, start: int, more: int) -> None:
    claims.check_rows_from_any_place(lines, stride, start, more)


@given(
    claims.lines(),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=3),
    st.integers(0, 4),
    st.integers(0, 5),
    st.integers(1, 7),
)
def test_a_corpus_is_the_split_of_the_whole_list(
    lines: list[object], fisher: list[tuple[int, int]], drawn: int, seed: int, cut: int
) -> None:
    claims.check_corpus(lines, fisher, drawn, seed, cut)


@given(
    st.lists(
        st.tuples(
            st.text("abc", min_size=1, max_size=3),
            st.sampled_from(["weight", "train", "loss", "trainable"]),
            st.sampled_from([None, 0, 1]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.sampled_from(["prompt", "text", "conversations", "system", "tools"]), max_size=3),
)
def test_marked_turns_have_no_labels(
    said: list[tuple[str, str, int | None]], empty: list[str]
) -> None:
    claims.check_marked_turns(said, empty)
