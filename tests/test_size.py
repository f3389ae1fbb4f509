"""Lines by room. A number is raised only in a commit that says why, and lowered when lines go."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "alphatoken"

ROOMS = {
    ".": 1_101,
    "cli": 9_372,
    "compare": 4_647,
    "data": 2_819,
    "demo": 865,
    "direction": 3_891,
    "estimate": 1_926,
    "fidelity": 15_507,
    "model": 5_743,
    "oracle": 4_960,
    "paper": 832,
    "policies": 5_328,
    "report": 1_648,
    "scoring": 720,
    "select": 1_243,
    "support": 735,
    "train": 14_623,
}


def _lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def _room(name: str) -> list[Path]:
    """Modules of a folder, or of the package's own top."""
    return list(PACKAGE.glob("*.py")) if name == "." else list((PACKAGE / name).rglob("*.py"))


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_is_no_larger_than_agreed(name: str) -> None:
    assert _lines(_room(name)) <= ROOMS[name]


def test_every_room_has_its_number() -> None:
    rooms = {path.parent.relative_to(PACKAGE).parts for path in PACKAGE.rglob("*.py")}
    assert {parts[0] if parts else "." for parts in rooms} == set(ROOMS)


@pytest.mark.parametrize(("folder", "most"), [("benchmarks", 12_563), ("tests", 76_917)])
def test_what_stands_beside_the_package_is_no_larger_than_agreed(folder: str, most: int) -> None:
    assert _lines((ROOT / folder).rglob("*.py")) <= most
