"""docs/architecture.md shows the house as it is: its rooms, their order, every file."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "importlinter"
]["contracts"]
BLOCKS = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
ROOMS = (
    "model", "estimate", "direction", "scoring", "select", "support", "report", "train", "policies",
    "compare",
)  # fmt: skip


def drawn(folder: str) -> set[str]:
    """Files named under a folder's heading."""
    block = re.search(rf"^alphatoken/{folder}/\n((?:  .*\n)+)", PAGE, re.MULTILINE)
    assert block, f"alphatoken/{folder}/ is not drawn"
    return set(re.findall(r"\b(\w+)\.py\b", block[1]))


@pytest.mark.parametrize("room", [*ROOMS, "fidelity"])
def test_every_file_of_a_room_is_drawn(room: str) -> None:
    there = {f.stem for f in (ROOT / "alphatoken" / room).glob("*.py")} - {"__init__", "__main__"}
    figures = {name for name in there if name.endswith(("_figures", "_statistics"))}
    assert there - drawn(room) - figures == set()
    assert drawn(room) - there == set()


def test_the_arrows_are_those_of_the_contract() -> None:
    layers = [layer.strip("()") for layer in CONTRACTS[0]["layers"]]
    assert [*layers] in [block.splitlines() for block in BLOCKS]
    assert not any(":" in layer for contract in CONTRACTS for layer in contract.get("layers", ()))


def test_every_room_with_files_has_an_order_of_its_own() -> None:
    ordered = {c.get("containers", [""])[0] for c in CONTRACTS if c.get("exhaustive")}
    for folder in (ROOT / "alphatoken").iterdir():
        files = [f for f in folder.glob("*.py") if f.stem != "__init__"]
        if len(files) > 1 and folder.name != "support":  # whose three files know nothing of another
            assert f"alphatoken.{folder.name}" in ordered, folder.name
