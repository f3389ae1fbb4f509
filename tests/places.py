"""Where the tests find what is no part of the repository."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
nightly = pytest.mark.skipif(not NIGHTLY, reason="minutes more of the same: the nightly profile")
"""For further cases of what the slow tests have shown on some."""


def tiered(
    names: Iterable[str], first: Collection[str], late: pytest.MarkDecorator = pytest.mark.slow
) -> list[Any]:
    """Cases of a table: those in ``first`` unmarked, the others with the mark ``late``."""
    return [pytest.param(name, marks=() if name in first else late) for name in names]


def models_folder() -> Path:
    """Where the library looks for models, too; absolute."""
    from alphatoken.demo import models

    return models.models_folder().absolute()


def data_folder() -> Path:
    """Larger sets of rows and a decoder trained on stories, for figures of the documents.

    Only slow tests need them. ALPHATOKEN_DATA unset: skip; set but absent: failure.
    """
    name = os.environ.get("ALPHATOKEN_DATA")
    if not name:
        pytest.skip("ALPHATOKEN_DATA is not set: the larger sets are not here")
    folder = Path(name)
    if not folder.is_dir():
        pytest.fail(f"ALPHATOKEN_DATA is set to {name!r}, and there is no such folder")
    return folder
