"""Options of a diagnostic."""

from __future__ import annotations

from dataclasses import dataclass

from alphatoken.support.options import check_options

__all__ = ["CheckedOptions"]


@dataclass(frozen=True)
class CheckedOptions:
    """Base of the options of all diagnostics.

    Raises:
        ConfigError: a value, or an entry of a tuple, that its field does not allow.
    """

    def __post_init__(self) -> None:
        """Check choices and ranges."""
        check_options(self)
