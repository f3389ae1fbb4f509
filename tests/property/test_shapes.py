"""The checks of annotated shapes and types are there, and see what is wrong."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from alphatoken import Scorer, ScorerConfig, TokenValues
from alphatoken.direction import contraction
from alphatoken.model import batch
from tests import shapes
from tests.property.strategies import make_case

pytest.importorskip("beartype", reason="beartype is not installed")


def test_a_wrong_shape_or_type_into_the_library_is_refused() -> None:
    with pytest.raises(TypeCheckError):
        batch.to_token_index(torch.zeros(3))
    x = torch.zeros(1, 2, 3)
    with pytest.raises(TypeCheckError):  # one letter, two sizes
        contraction.outer_sum(x, torch.zeros(1, 5, 3))
    with pytest.raises(TypeCheckError):
        ScorerConfig(window="32")  # type: ignore[arg-type]


def test_public_results_have_the_shapes_that_they_state() -> None:
    """Each field of ``TokenValues``, of ``score`` and of ``Observed.values``, as annotated."""
    case = make_case(("pprrr", "..prr"), (("pprr",), ("prrr",)), layers=2)
    b, t = case.batch["labels"].shape
    sizes = {"b t": (b, t), "b": (b,), "b t h": (b, t, 2), "h": (2,)}
    stated = {
        one.name: sizes[words[0].strip()]
        for one in fields(TokenValues)
        if (words := re.findall(r"Tensor, ['\"]([^'\"]*)['\"]", str(one.type)))
    }
    assert {"total", "mask", "unassigned", "parts", "losses"} < set(stated)
    model = case.model()
    for estimator in ("alphatoken", "path", "label"):
        config = ScorerConfig(estimator, layers=2, standard_errors=True)
        scorer = Scorer(model, case.validation, case.validation, config)
        with scorer.observe() as observed:
            watched = observed.values(model(**case.inputs), case.batch["labels"])
        for values in (scorer.score(case.batch), watched):
            for name, shape in stated.items():
                number = getattr(values, name)
                split = name.endswith(("direct", "causal"))
                assert (number is None) == (split and estimator != "alphatoken"), name
                assert number is None or tuple(number.shape) == shape, name
    walked = Scorer(model, case.validation, config=ScorerConfig("walk", walk_steps=1))
    losses = walked.score(case.batch).losses
    assert losses is not None
    assert tuple(losses.shape) == (b, t)


def test_the_first_calls_of_a_test_are_checked_and_then_a_sample() -> None:
    @shapes.checked
    def twice(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return torch.cat([x, x]) if len(x) > 1 else x

    def refused() -> list[int]:
        calls = []
        for call in range(1, 129):
            try:
                twice(torch.zeros(2))
            except TypeCheckError:
                calls.append(call)
        return calls

    assert refused() == [1, 2, 64, 128]
    shapes.begin()
    assert refused() == [1, 2, 64, 128]
