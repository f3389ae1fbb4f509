"""A module of the library as users run it: without the types that tests check at run time.

What it does with an argument of a wrong type can be seen only there.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def unhooked(name: str) -> ModuleType:
    """Load the source of ``name`` a second time, past the import hook of the tests."""
    original = importlib.util.find_spec(name)
    spec = importlib.util.spec_from_file_location(
        "unhooked_" + name.replace(".", "_"), original.origin
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[module.__name__]
    return module
