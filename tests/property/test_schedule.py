"""Schedules: the line, exact, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import example, given

from alphatoken import InputError
from alphatoken.select.schedule import scheduled
from tests.property import properties_weights as claims
from tests.property.properties_weights import ScheduleCase, schedule_cases


@given(schedule_cases())
@example(ScheduleCase(100, 20, 5, 10, 100))  # 0.6, where floating point has 0.6000000000000001
@example(ScheduleCase(0, 0, 0, 1, 1))
def test_a_schedule(case: ScheduleCase) -> None:
    claims.check_schedule(case)


@given(schedule_cases())
def test_a_scheduled_ratio_keeps_the_exact_count(case: ScheduleCase) -> None:
    claims.check_scheduled_ratio_keeps_the_exact_count(case)


def test_half_way() -> None:
    assert scheduled(1.0, 0.2, 5, 20, share=0.5) == 0.6


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"step": -1}, "step"),
        ({"total": 0}, "total"),
        ({"share": 0.0}, "share"),
        ({"share": 1.5}, "share"),
        ({"share": float("nan")}, "share"),
        ({"start": float("nan")}, "finite"),
        ({"end": float("inf")}, "finite"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, object], what: str) -> None:
    good = {"start": 1.0, "end": 0.5, "step": 0, "total": 10, "share": 0.5}
    with pytest.raises(InputError, match=what):
        scheduled(**{**good, **arguments})  # type: ignore[arg-type]
