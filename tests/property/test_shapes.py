"""The checks of annotated shapes and types are there, and see what is wrong."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from alphatoken.config import ScorerConfig
from alphatoken.estimate import contraction
from alphatoken.model import batch
from tests import shapes

pytest.importorskip("beartype", reason="beartype is not installed")


def test_a_wrong_shape_or_type_into_the_library_is_refused() -> None:
    with pytest.raises(TypeCheckError):
        batch.to_token_index(torch.zeros(3))
    x = torch.zeros(1, 2, 3)
    with pytest.raises(TypeCheckError):  # one letter, two sizes
        contraction.outer_sum(x, torch.zeros(1, 5, 3))
    with pytest.raises(TypeCheckError):
        ScorerConfig(window="32")  # type: ignore[arg-type]


def test_the_first_calls_of_a_test_are_checked_and_then_a_sample() -> None:
    @shapes.checked
    def twice(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return torch.cat([x, x]) if len(x) > 1 else x

    def refused() -> list[int]:
        seen = []
        for call in range(1, 129):
            try:
                twice(torch.zeros(2))
            except TypeCheckError:
                seen.append(call)
        return seen

    assert refused() == [1, 2, 64, 128]
    shapes.begin()
    assert refused() == [1, 2, 64, 128]
