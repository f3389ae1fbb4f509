"""Importing the package is light: no model library, no warning, nothing from the outer rim."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded_after(statement: str) -> set[str]:
    """Top-level packages in a fresh interpreter after ``statement``; warnings are errors."""
    code = f"{statement}\nimport sys; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("heavy", ["transformers", "peft", "trl", "pyarrow", "matplotlib"])
def test_import_loads_no_model_library(heavy: str) -> None:
    assert heavy not in loaded_after("import alphatoken")


def test_import_loads_neither_oracle_nor_fidelity() -> None:
    code = (
        "import alphatoken, sys; "
        "print([m for m in sys.modules if m.startswith(('alphatoken.oracle', "
        "'alphatoken.fidelity', 'alphatoken.cli', 'alphatoken.adapters'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_everything_in_the_facade_exists() -> None:
    import alphatoken

    assert all(hasattr(alphatoken, name) for name in alphatoken.__all__)
