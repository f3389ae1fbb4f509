"""Models that choose among their parts by their numbers, as a router of experts does.

Where moved weights send a token elsewhere its loss jumps, and a jump divided by a short step is no
derivative. A choice shows as a call of ``topk`` and its like on numbers that the model computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Choices", "watching_choices"]

_CHOOSING = frozenset(
    getattr(place, name)
    for place in (torch, Tensor)
    for name in ("topk", "argmax", "argmin", "sort", "argsort", "kthvalue")
)


@dataclass
class Choices:
    """Record of a forward: True in ``made`` if it chose."""

    made: bool = False


class _Watch(TorchFunctionMode):
    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self.choices = choices

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CHOOSING:
            numbers = args[0] if args else kwargs.get("input")
            if isinstance(numbers, Tensor) and numbers.is_floating_point():
                self.choices.made = True
        return func(*args, **kwargs)


@contextmanager
def watching_choices() -> Iterator[Choices]:
    """Inside, note whether a model that runs chooses by its numbers."""
    choices = Choices()
    with _Watch(choices):
        yield choices
