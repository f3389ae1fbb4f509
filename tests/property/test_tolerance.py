"""The comparison in itself: it must be able to fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.property import tolerance
from tests.property.tolerance import TABLE, allowed, close, summary, unrecorded

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _outside_the_table() -> Iterator[None]:
    """What is provoked here is no error of the library."""
    with unrecorded():
        yield


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


def test_two_nans_are_not_equal() -> None:
    with pytest.raises(AssertionError, match="NaN"):
        close(NAN, NAN, 1.0, 1.0)


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


def test_the_worst_comparison_of_each_name_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tolerance, "_keep", True)
    monkeypatch.setattr(tolerance, "_current", {})
    close(1.0 + 1e-12, 1.0, 1.0, 1e-10, name="a")
    close(1.0, 1.0, 1.0, 1e-10, name="a")
    close(1.0 + 1e-11, 1.0, 1.0, 1e-10, name="b")
    with unrecorded():
        close(1.0 + 9e-11, 1.0, 1.0, 1e-10, name="b")
    found = {name: ratio for name, ratio, _, _ in tolerance.finish()}
    monkeypatch.undo()
    assert sorted(found) == ["a", "b"]
    assert found["a"] == pytest.approx(0.01, rel=1e-3)
    assert found["b"] == pytest.approx(0.1, rel=1e-3)


def test_the_table_shows_the_worst_first() -> None:
    records = [(f"t{i}", "n", i / 100, 1e-12, 1e-10) for i in range(30)]
    lines = summary(records, top=3)
    assert [line.split()[-2] for line in lines[1:4]] == ["t29", "t28", "t27"]
    assert lines[-1] == "... and 27 closer comparisons"


WIDTHS = (torch.float64, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("kind", TABLE)
def test_narrower_arithmetic_is_allowed_more(kind: str) -> None:
    row = [allowed(kind, dtype) for dtype in WIDTHS if dtype in TABLE[kind]]
    assert row == sorted(row)
    assert all(0 < tolerance <= 0.06 for tolerance in row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_within_the_table_and_a_wrong_scale_is_not(dtype: torch.dtype) -> None:
    values = torch.randn(60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    size, tolerance = values.norm(), allowed("norm", dtype)
    close((values.to(dtype).double() - values).norm(), 0.0, size, tolerance)
    with pytest.raises(AssertionError, match="off by"):  # one token in sixty forgotten
        close(values[int(values.abs().argmax())].abs(), 0.0, size, tolerance)
    with pytest.raises(AssertionError, match="off by"):  # attention without its scale, at d = 4
        close((values * 0.5 - values).norm(), 0.0, size, tolerance)
