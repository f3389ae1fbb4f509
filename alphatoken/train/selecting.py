"""Marks of code that scores tokens and makes masks, for measuring its cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

__all__ = ["AROUND", "selecting"]

AROUND: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar(
    "around_selection", default=nullcontext
)
"""What is entered around each such part, for somebody who measures; nothing otherwise."""


@contextmanager
def selecting() -> Iterator[None]:
    """Around whatever scores tokens or makes masks."""
    with AROUND.get()():
        yield
