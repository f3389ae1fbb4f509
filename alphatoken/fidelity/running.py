"""``python -m alphatoken.fidelity.NAME`` is ``alphatoken diagnose NAME``."""

from __future__ import annotations

import sys
from importlib import import_module

__all__ = ["run_as_module"]


def run_as_module(name: str) -> int:
    """Run the diagnostic ``name`` with the arguments of this process; its exit status.

    The command line is loaded by name: it imports diagnostics, they must not import it.
    """
    status: int = import_module("alphatoken.cli").main(["diagnose", name, *sys.argv[1:]])
    return status
