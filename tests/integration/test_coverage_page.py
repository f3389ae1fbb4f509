"""The page of coverage: sums by room, and no gap without its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.coverage_page import group_of, page


def entry(lines: int, covered: int, branches: int = 0, taken: int = 0) -> dict[str, Any]:
    return {
        "summary": {
            "num_statements": lines,
            "covered_lines": covered,
            "num_branches": branches,
            "covered_branches": taken,
            "percent_covered": 0.0,
        }
    }


FILES = {
    "alphatoken/scorer.py": entry(100, 90, 20, 18),
    "alphatoken/oracle/jacobian.py": entry(60, 60, 20, 20),
    "alphatoken/train/mixin.py": entry(100, 96),
    "alphatoken/report/svg.py": entry(10, 1),
}


def test_rooms() -> None:
    assert group_of("alphatoken/scorer.py") == group_of("alphatoken/oracle/jacobian.py") == "core"
    for room in ("model", "estimate", "direction", "scoring", "select", "support"):
        assert group_of(f"alphatoken/{room}/file.py") == "core"
        assert (Path(__file__).parents[2] / "alphatoken" / room).is_dir()
    assert group_of("alphatoken/train/mixin.py") == "train"


def test_sums_and_a_gap_of_the_core() -> None:
    text, wrong = page(FILES, {})
    assert "| core | 160 | 150 | 40 | 38 | 94.0 % |" in text
    assert "| all | 270 | 247 | 40 | 38 | 91.9 % |" in text
    assert "| `alphatoken/scorer.py` | 90.0 % | not explained |" in text
    assert "svg.py" not in text  # neither core nor train
    assert wrong == ["alphatoken/scorer.py has no reason"]


def test_a_reason_stands_on_the_page_and_must_be_needed() -> None:
    reasons = {"alphatoken/scorer.py": "CUDA only", "alphatoken/train/mixin.py": "old"}
    text, wrong = page(FILES, reasons)
    assert "| `alphatoken/scorer.py` | 90.0 % | CUDA only |" in text
    assert wrong == ["alphatoken/train/mixin.py needs no reason any more"]
