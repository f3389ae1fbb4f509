"""Fields of dataclasses that hold options: each has its help beside its default."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any

__all__ = ["option"]


def option(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """A field with its help, and what else is to be known of it; without default it must be given.

    Args:
        default: where nothing is said.
        help: on the command line; the default is added there.
        **more: what whoever reads the field looks for in its ``metadata``: limits and choices
            (``alphatoken.fidelity.options``), how it is written (``alphatoken.cli.options``).
    """
    metadata = {"help": help, **more}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
