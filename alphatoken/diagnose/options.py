"""Options of a diagnostic: each field says what it does and which values it takes.

In the metadata of a field, beside its help: any of ``least``, ``above``, ``most``, ``below``
(numbers; a NaN keeps to none) and ``choices`` (names), which its value keeps to, or each of its
entries.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from alphatoken.errors import ConfigError, require_choice
from alphatoken.support.options import option

__all__ = ["CheckedOptions", "option"]

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
            value = getattr(self, one.name)
            entries: Sequence[Any] = value if isinstance(value, tuple) else (value,)
            for entry in entries if "choices" in one.metadata else ():
                require_choice(one.name, entry, one.metadata["choices"])
            limits = {name: one.metadata[name] for name in _LIMITS if name in one.metadata}
            if not all(_LIMITS[n][1](entry, end) for n, end in limits.items() for entry in entries):
                said = " and ".join(f"{_LIMITS[name][0]} {end:g}" for name, end in limits.items())
                raise ConfigError(f"{one.name} must be {said}", got=repr(value))
