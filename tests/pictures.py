"""Pictures are composed and not drawn, except in tests that look at what is drawn.

A page about a run of three steps has a dozen pictures, whose drawing takes longer than the run.
What is plotted is computed all the same, and the page is written with a blank in its place.
"""

from __future__ import annotations

import base64
import importlib.util
from typing import Any

import pytest

_SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="1pt" height="1pt" viewBox="0 0 1 1"></svg>\n'
_PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mP4DwABAQEAHLCMmQAAAABJRU5ErkJggg=="
)


def blank(_: Any, target: Any, *, format: str, **__: Any) -> None:
    """What stands in for ``savefig``: one white point."""
    target.write(_SVG if format == "svg" else _PNG)


def leave_blank(patch: pytest.MonkeyPatch) -> None:
    """matplotlib's figures are blank until the patch is undone."""
    if importlib.util.find_spec("matplotlib") is not None:
        from matplotlib.figure import Figure

        patch.setattr(Figure, "savefig", blank)
