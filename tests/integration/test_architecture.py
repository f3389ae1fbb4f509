"""docs/architecture.md shows the house as it is: its rooms and their order."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
CONTRACTS = LINTER["contracts"]
BLOCKS = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)


def test_every_room_is_drawn() -> None:
    places = [*(ROOT / "alphatoken").iterdir(), *(ROOT / "lab/alphatoken_lab").iterdir()]
    rooms = {path.name for path in places if (path / "__init__.py").is_file()}
    assert rooms <= set(re.findall(r"^  (\w+)/ ", PAGE, re.MULTILINE))


def test_the_arrows_are_those_of_the_contract() -> None:
    layers = [layer.strip("()") for layer in CONTRACTS[0]["layers"]]
    assert [*layers] in [block.splitlines() for block in BLOCKS]
    assert not any(":" in layer for contract in CONTRACTS for layer in contract.get("layers", ()))


def test_the_contracts_hold_every_room_and_know_of_circles() -> None:
    assert CONTRACTS[0]["exhaustive"]
    (circles,) = [c for c in CONTRACTS if c["type"] == "acyclic_siblings"]
    assert circles["ancestors"] == ["alphatoken", "alphatoken_lab", "benchmarks"]
    assert not LINTER["exclude_type_checking_imports"]
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
    "alphatoken/scorer.py": "the certificate, loaded when a scorer is verified",
    "alphatoken/train/policies/__init__.py": "a policy of any package",
    "alphatoken/__init__.py": "public names, loaded at first use",
    "alphatoken/score/__init__.py": "public names, loaded at first use",
    "alphatoken/train/__init__.py": "public names, loaded at first use",
    "alphatoken/diagnose/__init__.py": "a diagnostic, loaded at first use",
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
