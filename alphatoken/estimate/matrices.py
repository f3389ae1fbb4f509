"""Mappings from parameter names to matrices: held in memory, or formed when they are accessed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from torch import Tensor

__all__ = ["Formed", "Matrices"]

_Entry = TypeVar("_Entry")


class Formed(Mapping[str, _Entry], Generic[_Entry]):
    """A mapping that holds no entry: each is formed anew whenever it is accessed.

    Something as large as all scored weights (V, a Fisher on disk) then exists one matrix at a time,
    for as long as whoever accessed it holds it. Iterating over names, ``len()`` and ``in`` compute
    nothing.

    Args:
        names: the keys, in their order.
        form: makes the entry of a name; the same bits at each call.
    """

    def __init__(self, names: Iterable[str], form: Callable[[str], _Entry]) -> None:
        self._names, self._form = dict.fromkeys(names), form

    def __getitem__(self, name: str) -> _Entry:
        if name not in self._names:
            raise KeyError(name)
        return self._form(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own would form the entry

    def __repr__(self) -> str:
        return f"Formed({len(self)} entries)"


if TYPE_CHECKING:
    Matrices: TypeAlias = Mapping[str, Tensor]
else:
    Matrices = Mapping  # a check at run time would form an entry to look at it
"""Parameter name -> matrix, in memory or ``Formed``."""
