"""Lines by room. A number is raised only in a commit that says why, and lowered when lines go."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, LAB = ROOT / "alphatoken", ROOT / "lab" / "alphatoken_lab"

ROOMS = {
    ".": 1_186,
    "certificate": 1_094,
    "cli": 3_104,
    "corpus": 2_173,
    "data": 2_196,
    "demo": 342,
    "direction": 3_843,
    "estimate": 2_364,
    "fidelity": 5_913,
    "model": 5_561,
    "oracle": 4_756,
    "report": 1_446,
    "scoring": 938,
    "select": 452,
    "support": 437,
    "train": 8_636,
}


LAB_ROOMS = {
    ".": 11,
    "commands": 2_366,
    "compare": 4_052,
    "methods": 4_750,
    "paper": 814,
}


def _lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def _room(package: Path, name: str) -> list[Path]:
    """Modules of a folder, or of the package's own top."""
    return list(package.glob("*.py")) if name == "." else list((package / name).rglob("*.py"))


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_is_no_larger_than_agreed(name: str) -> None:
    assert _lines(_room(PACKAGE, name)) <= ROOMS[name]


@pytest.mark.parametrize("name", LAB_ROOMS)
def test_a_room_of_the_lab_is_no_larger_than_agreed(name: str) -> None:
    assert _lines(_room(LAB, name)) <= LAB_ROOMS[name]


@pytest.mark.parametrize(("package", "agreed"), [(PACKAGE, ROOMS), (LAB, LAB_ROOMS)])
def test_every_room_has_its_number(package: Path, agreed: dict[str, int]) -> None:
    rooms = {path.parent.relative_to(package).parts for path in package.rglob("*.py")}
    assert {parts[0] if parts else "." for parts in rooms} == set(agreed)


@pytest.mark.parametrize(("folder", "most"), [("benchmarks", 8_167), ("tests", 53_640)])
def test_what_stands_beside_the_package_is_no_larger_than_agreed(folder: str, most: int) -> None:
    assert _lines((ROOT / folder).rglob("*.py")) <= most
