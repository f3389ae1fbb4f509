"""Options of a diagnostic: each field says what it does and which values it takes.

In the metadata of a field, beside its help: any of ``least``, ``above``, ``most``, ``below``
(numbers; a NaN keeps to none) and ``choices`` (names), which its value keeps to, or each of its
entries; and ``first``: the number, or how many of the entries, that the first round of a budget
has at least (``rounds``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from alphatoken.errors import ConfigError, require_choice
from alphatoken.support.options import option

__all__ = ["CheckedOptions", "grown", "option", "thinned"]

_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}


@dataclass(frozen=True)
class CheckedOptions:
    """Base of the options of all diagnostics.

    Raises:
        ConfigError: a value, or an entry of one, beyond the limits of its field.
    """

    def __post_init__(self) -> None:
        """Check every field."""
        for one in fields(self):
            given = getattr(self, one.name)
            entries: Sequence[Any] = given if isinstance(given, tuple) else (given,)
            for entry in entries if "choices" in one.metadata else ():
                require_choice(one.name, entry, one.metadata["choices"])
            limits = {name: one.metadata[name] for name in _LIMITS if name in one.metadata}
            if not all(_LIMITS[n][1](entry, end) for n, end in limits.items() for entry in entries):
                said = " and ".join(f"{_LIMITS[name][0]} {end:g}" for name, end in limits.items())
                raise ConfigError(f"{one.name} must be {said}", got=repr(given))


def grown(asked: int, first: int, share: float) -> int:
    """A size on its way from the first one (share 0) to the one asked for (1), by equal factors.

    >>> [grown(1600, 100, share) for share in (0.0, 0.25, 0.5, 1.0)]
    [100, 200, 400, 1600]
    """
    first = max(1, min(first, asked))
    factor = float(asked / first) ** share
    return min(asked, math.ceil(round(float(first * factor), 6)))


def thinned(values: Sequence[Any], least: int, share: float) -> tuple[Any, ...]:
    """So many of the values as ``grown`` says, evenly spread, both ends among them.

    >>> thinned((0, 1, 2, 4, 8), 2, 0.5), thinned((0, 1, 2, 4, 8), 2, 1.0)
    ((0, 1, 4, 8), (0, 1, 2, 4, 8))
    """
    if not values:
        return ()
    places = np.linspace(0, len(values) - 1, grown(len(values), least, share)).round()
    return tuple(values[place] for place in dict.fromkeys(places.astype(int).tolist()))
