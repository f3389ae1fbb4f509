"""The comparison in itself: it must be able to fail."""

from __future__ import annotations

import pytest
import torch

from tests.property.tolerance import close

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("tol", [1e-10, 1e-12])
def test_teeth(tol: float) -> None:
    values = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    close(values, values, values.abs(), tol)
    with pytest.raises(AssertionError, match="off by"):
        close(values * (1 + 1e-9), values, values.abs(), tol)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("side", range(3))
def test_nan_and_inf_are_rejected_on_every_side(bad: float, side: int) -> None:
    arguments = [torch.ones(2, 2, dtype=torch.float64) for _ in range(3)]
    arguments[side][1, 0] = bad
    with pytest.raises(AssertionError, match="NaN or Inf"):
        close(*arguments, 1e-10)


def test_numbers_are_compared_in_float64() -> None:
    with pytest.raises(AssertionError, match="off by"):
        close(1.0 + 1e-12, 1.0, 1.0, 1e-13)


def test_the_scale_is_taken_element_by_element() -> None:
    expected = torch.tensor([0.0, 0.0], dtype=torch.float64)
    actual = torch.tensor([1e-13, 1e-13], dtype=torch.float64)
    close(actual, expected, 1.0, 1e-12)
    with pytest.raises(AssertionError, match="element 1 "):
        close(actual, expected, torch.tensor([1.0, 1e-3], dtype=torch.float64), 1e-12)


def test_a_scale_of_zero_asks_for_equality() -> None:
    close(0.0, 0.0, 0.0, 1e-12)
    with pytest.raises(AssertionError, match="ratio inf"):
        close(1e-300, 0.0, 0.0, 1e-12)


def test_shapes_must_agree_and_scales_be_positive() -> None:
    with pytest.raises(AssertionError, match="shape"):
        close(torch.zeros(2), torch.zeros(1), 1.0, 1e-12)
    with pytest.raises(AssertionError, match="absolute terms"):
        close(torch.zeros(2), torch.zeros(2), -1.0, 1e-12)
