"""Refusals by numbers of a device: read together, in the order in which they were made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alphatoken.support import devices
from benchmarks.counting import Launches, as_accelerator, counting


class PlannedError(Exception):
    """Raised by the tests."""


def raising(number: int) -> Callable[[], None]:
    def raise_it() -> None:
        raise PlannedError(number)

    return raise_it


def make(flags: list[bool]) -> None:
    for number, bad in enumerate(flags):
        devices.refuse(torch.tensor(bad), raising(number))


@given(st.lists(st.booleans(), max_size=6), st.booleans(), st.booleans())
def test_the_first_refusal_is_raised(flags: list[bool], nested: bool, fails: bool) -> None:
    """At the end of the outermost context, whatever else is raised inside; else nothing is.

    Proves: refusals on a device (exact), against the order in which they were made.
    """
    reached = []

    def work() -> None:
        with devices.deferred_refusals():
            with devices.deferred_refusals() if nested else nullcontext():
                make(flags)
            reached.append(True)
            if fails:
                raise OSError

    raised: list[tuple[Any, ...]] = []
    with as_accelerator():
        try:
            work()
        except (PlannedError, OSError) as error:
            raised.append((type(error), *error.args))
    first = [(PlannedError, flags.index(True))] if any(flags) else []
    assert raised == (first or [(OSError,)] * fails)
    assert reached, "something was raised before the end"


@given(st.lists(st.booleans(), max_size=6))
def test_a_list_of_refusals_is_settled_once(flags: list[bool]) -> None:
    pending = devices.Refusals()
    with as_accelerator():
        for _ in range(2):
            with devices.deferred_refusals(pending):
                make(flags)
    assert len(pending) == 2 * len(flags)
    counts = Launches()
    with counting(counts):
        if any(flags):
            with pytest.raises(PlannedError, match=str(flags.index(True))):
                devices.settle(pending)
        else:
            devices.settle(pending)
        devices.settle(pending)
    assert counts.waits.total() == bool(flags)


def test_the_host_refuses_at_once() -> None:
    """There, and outside of any context on a device."""
    with devices.deferred_refusals(), pytest.raises(PlannedError):
        make([True])
    with as_accelerator(), pytest.raises(PlannedError):
        make([True])


def test_known_places_are_those_of_the_mask_as_it_is() -> None:
    mask = torch.tensor([[False, True], [True, True]])
    devices.remember_places(mask, torch.tensor([1, 2, 3]))
    counts = Launches()
    with counting(counts):
        assert devices.true_places(mask).tolist() == [1, 2, 3]
        mask[1, 0] = False
        assert devices.true_places(mask).tolist() == [1, 3]
    assert counts.waits.total() == 3, "two tolist, and one nonzero"
    assert devices.true_places(mask[1:]).tolist() == [1]
