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
    "alphatoken/model", "alphatoken/estimate", "alphatoken/direction", "alphatoken/scoring",
    "alphatoken/select", "alphatoken/support", "alphatoken/report", "alphatoken/train",
    "alphatoken/train/policies", "alphatoken/fidelity", "alphatoken/certificate",
    "lab/alphatoken_lab/methods",
    "lab/alphatoken_lab/compare",
)  # fmt: skip


def drawn(folder: str) -> set[str]:
    """Files named under a folder's heading."""
    block = re.search(rf"^{folder}/\n((?:  .*\n)+)", PAGE, re.MULTILINE)
    assert block, f"{folder}/ is not drawn"
    return set(re.findall(r"\b(\w+)\.py\b", block[1]))


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_of_a_room_is_drawn(room: str) -> None:
    there = {f.stem for f in (ROOT / room).glob("*.py")} - {"__init__", "__main__"}
    figures = {name for name in there if name.endswith(("_figures", "_statistics"))}
    assert there - drawn(room) - figures == set()
    assert drawn(room) - there == set()


def test_the_arrows_are_those_of_the_contract() -> None:
    layers = [layer.strip("()") for layer in CONTRACTS[0]["layers"]]
    assert [*layers] in [block.splitlines() for block in BLOCKS]
    assert not any(":" in layer for contract in CONTRACTS for layer in contract.get("layers", ()))


def test_the_contracts_hold_every_room_and_know_of_circles() -> None:
    assert CONTRACTS[0]["exhaustive"]
    (circles,) = [c for c in CONTRACTS if c["type"] == "acyclic_siblings"]
    assert circles["ancestors"] == ["alphatoken", "alphatoken_lab", "benchmarks"]
    (apart,) = [c for c in CONTRACTS if c.get("forbidden_modules") == ["alphatoken_lab"]]
    assert apart["source_modules"] == ["alphatoken"]


def test_no_module_of_the_library_names_one_of_the_lab() -> None:
    """Not even as text: import-linter does not see ``import_module``."""
    named = [
        path.name
        for path in (ROOT / "alphatoken").rglob("*.py")
        if "alphatoken_lab" in path.read_text("utf-8")
    ]
    assert named == []


REGISTRIES = {
    "alphatoken/model/protocol.py": "the adapter of a model",
    "alphatoken/train/policies/__init__.py": "a policy of any package",
    "alphatoken/__init__.py": "public names, loaded at first use",
    "alphatoken/train/__init__.py": "public names, loaded at first use",
    "alphatoken/fidelity/registry.py": "a diagnostic, loaded at first use",
    "alphatoken/cli/program.py": "a command, loaded when it is called",
}


def test_modules_are_imported_by_name_in_registries_only() -> None:
    """Elsewhere an import is a statement, which the contracts see."""
    named = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "alphatoken").rglob("*.py")
        if re.search(r"import_module|__import__", path.read_text("utf-8"))
    }
    assert named == set(REGISTRIES)
