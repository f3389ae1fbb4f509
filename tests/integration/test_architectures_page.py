"""The table of architectures: written from its data, and a sample of its rows holds."""

from __future__ import annotations

import json

import pytest
import transformers

from tests import architectures_page as table

SAMPLE = ("afmoe", "bart", "cpmant", "ctrl", "deepseek_v3", "doge", "modernbert-decoder")
"""An output that is viewed, an unshifted loss, positions of its own, blocks found without
checkpointing, projections on other positions, a kernel called by the model, a head named decoder.
"""
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def data() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(table.DATA.read_text(encoding="utf-8"))["kinds"]
    return found


def test_the_page_is_its_data() -> None:
    data = json.loads(table.DATA.read_text(encoding="utf-8"))
    assert table.PAGE.read_text(encoding="utf-8") == table.page(data)


def test_no_value_is_wrong(data: dict[str, dict[str, str]]) -> None:
    """Each is exact, returned after the proofs, or refused by an error of ours."""
    assert len(data) >= 40
    cells = [said for found in data.values() for name, said in found.items()]
    assert not [said for said in cells if said.startswith("WRONG")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLE)
def test_a_row_holds(kind: str, data: dict[str, dict[str, str]]) -> None:
    if (
        json.loads(table.DATA.read_text(encoding="utf-8"))["transformers"]
        != transformers.__version__
    ):
        pytest.skip("the table is of another release of transformers")
    assert table.tried(kind) == data[kind]
