"""What an accelerator asks for and a processor does not: large pieces of work, and no waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


def on_host(tensor: Tensor) -> bool:
    """Whether the program reads numbers of this tensor without waiting for a device.

    Where it does, work is cut into blocks that fit the processor's caches, and what turns out to be
    zero is left out. An accelerator is given whole products instead, because it idles between small
    pieces, and while the program waits to learn which of them are zero.
    """
    return tensor.device.type == "cpu"


_PLACES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Masks to (the version that they had, the places of True in them)."""


def true_places(mask: Tensor) -> Tensor:
    """Indices (n,) of True in a flattened mask, in order; waited for once a mask."""
    if not mask.is_inference():  # which has no version
        version, places = _PLACES.get(mask, (None, None))
        if places is not None and version == mask._version:
            assert isinstance(places, Tensor)
            return places
    return mask.flatten().nonzero().squeeze(-1)


def remember_places(mask: Tensor, places: Tensor) -> None:
    """Let ``true_places`` of this mask be these, which are known of it, until it is written to."""
    if not mask.is_inference():
        _PLACES[mask] = mask._version, places


Refusals = list[tuple[Tensor, Callable[[], None]]]
"""Flags on a device, each with the function that raises for it."""

_PENDING: ContextVar[Refusals | None] = ContextVar("pending_refusals", default=None)


def is_deferred(bad: Tensor) -> bool:
    """Whether ``refuse`` would put this flag aside."""
    return _PENDING.get() is not None and not on_host(bad)


def refuse(bad: Tensor, raise_error: Callable[[], None]) -> None:
    """Call ``raise_error`` if ``bad``, one Boolean, is true.

    At once on the host. Inside ``deferred_refusals`` a flag on a device is read later, together
    with others: each that is read alone waits for all work that was given to the device before.
    """
    pending = _PENDING.get()
    if pending is not None and is_deferred(bad):  # the first says to the type checker what it is
        pending.append((bad, raise_error))
    elif bool(bad):
        raise_error()


def holds(broken: Tensor, raise_error: Callable[[], None], *, before: bool) -> bool:
    """Whether ``broken``, one Boolean, is false; waits for the device.

    Not where it held ``before`` and refusals are deferred: it is then taken to hold, and
    ``raise_error`` is called later if it does not.
    """
    if before and is_deferred(broken):
        refuse(broken, raise_error)
        return True
    return not bool(broken)


@contextmanager
def deferred_refusals(pending: Refusals | None = None) -> Iterator[None]:
    """Inside, flags on a device gather in ``pending``, for ``settle``.

    By default they are read when the outermost such context ends. After an exception they are read
    in any case: what was to be refused before is its cause.
    """
    if pending is None and _PENDING.get() is not None:
        yield
        return
    own = Refusals() if pending is None else pending
    token, failed = _PENDING.set(own), True
    try:
        yield
        failed = False
    finally:
        _PENDING.reset(token)
        if failed or pending is None:
            settle(own)


def settle(pending: Refusals) -> None:
    """Read the flags in one transfer, and raise for the first that is true; empties the list."""
    refusals = list(pending)
    pending.clear()
    by_device: dict[torch.device, list[int]] = {}
    for index, (bad, _) in enumerate(refusals):
        by_device.setdefault(bad.device, []).append(index)
    raised = [
        index
        for indices in by_device.values()
        for index, bad in zip(
            indices, torch.stack([refusals[i][0] for i in indices]).tolist(), strict=True
        )
        if bad
    ]
    if raised:
        refusals[min(raised)][1]()
