"""Loads the Hypothesis profile; where lm-eval is."""

from __future__ import annotations

import pytest

import tests.property.profiles  # noqa: F401


@pytest.fixture(scope="session")
def lm_eval() -> None:
    """For tests that run its tasks: elsewhere they skip."""
    pytest.importorskip(
        "lm_eval", reason="lm-eval is not installed: pip install alphatoken-lab[eval]"
    )
