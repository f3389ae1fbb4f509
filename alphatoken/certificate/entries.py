"""One component of the oracle's values, with the error that rounding may cause."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from alphatoken.oracle.readouts import Parts

__all__ = ["Entry", "loosened"]


@dataclass(frozen=True)
class Entry:
    """One component: values and sums of absolute terms, whole and by parameter or linear map."""

    value: Tensor
    scale: Tensor
    by: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def zero(cls, shape: torch.Size, names: Collection[str]) -> Entry:
        """Nothing, for each of the names."""
        value, scale, *by = (torch.zeros(shape, dtype=torch.float64) for _ in (0, 1, *names))
        return cls(value, scale, dict(zip(names, by, strict=True)))

    @classmethod
    def of(cls, parts: Parts, shape: torch.Size) -> Entry:
        """The sum of what the linear maps contribute."""
        whole = cls.zero(shape, ())
        value, scale = whole.value, whole.scale
        for name in parts.value:
            value = value + parts.value[name].cpu()
            scale = scale + parts.scale[name].cpu()
        return cls(value, scale, {n: v.detach().cpu() for n, v in parts.value.items()})

    def __add__(self, other: Entry) -> Entry:
        names = {*self.by, *other.by}
        zero = torch.zeros_like(self.value)
        by = {n: self.by.get(n, zero) + other.by.get(n, zero) for n in sorted(names)}
        return Entry(self.value + other.value, self.scale + other.scale, by)

    def times(self, factor: float) -> Entry:
        """The entry, scaled by a factor."""
        by = {n: factor * v for n, v in self.by.items()}
        return Entry(factor * self.value, abs(factor) * self.scale, by)

    def map(self, move: Callable[[Tensor], Tensor]) -> Entry:
        """The same function of all three."""
        return Entry(move(self.value), move(self.scale), {n: move(v) for n, v in self.by.items()})


def loosened(entries: Mapping[str, Entry], more: Mapping[str, Entry]) -> dict[str, Entry]:
    """The same values, with the absolute terms of ``more`` beside their own."""
    return {n: Entry(e.value, e.scale + more[n].scale, e.by) for n, e in entries.items()}
