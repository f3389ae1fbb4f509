"""Tests of the lab are slow: ``make test`` is of the library alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.property.profiles  # noqa: F401

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Handed all tests that were collected, not only those of this folder."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)
