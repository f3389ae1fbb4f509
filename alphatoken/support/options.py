"""Fields of dataclasses that hold options: each has its help beside its default."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any

__all__ = ["option"]


def option(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """A dataclass field that carries its help text, and whatever else its readers need.

    Args:
        default: the field's default; without one the field must be given.
        help: shown on the command line, which adds the default to it.
        **more: further entries of the field's ``metadata``: limits and choices, which
            ``alphatoken.diagnose.options`` reads, and how the option is written, which
            ``alphatoken.cli.options`` reads.
    """
    metadata = {"help": help, **more}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
