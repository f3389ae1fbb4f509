"""docs/architectures.md is made from its data, and rows of it hold when they are tried again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from tests import architectures_page as table
from tests.places import nightly

SAMPLE = [
    *("afmoe", "bart", "deepseek_v3", "doge"),
    *(pytest.param(kind, marks=nightly) for kind in ("cpmant", "ctrl", "modernbert-decoder")),
]
"""An output that is viewed, an unshifted loss, projections on other positions, a kernel called by
the model; nightly positions of its own, blocks found without checkpointing, a head named decoder.
"""
TRIED: dict[str, Any] = json.loads(table.DATA.read_text(encoding="utf-8"))


def test_the_page_is_its_data_and_no_value_is_wrong() -> None:
    """Each is exact, returned after the proofs, or refused by an error of ours."""
    assert table.PAGE.read_text(encoding="utf-8") == table.page(TRIED)
    assert len(TRIED["kinds"]) >= 40
    cells = [cell for row in TRIED["kinds"].values() for cell in row.values()]
    assert not [cell for cell in cells if cell.startswith("WRONG")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    TRIED["transformers"] != transformers.__version__,
    reason="the table is of another release of transformers",
)
@pytest.mark.parametrize("kind", SAMPLE)
def test_a_row_holds(kind: str) -> None:
    assert table.tried(kind) == TRIED["kinds"][kind]
