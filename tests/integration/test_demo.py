"""What ``make demo`` does, on fewer rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from alphatoken.demo.__main__ import run_demo
from alphatoken.report import read_values

pytestmark = pytest.mark.slow


def test_the_demo_prints_the_highest_and_lowest_tokens_and_writes_the_page(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # an earlier demo is replaced
        run_demo(tmp_path, rows=3, held_out=2)
    printed = capsys.readouterr().out
    totals = [
        one.values["total"][at]
        for one in read_values(tmp_path / "values/values")
        for at in np.flatnonzero(one.response)
    ]
    lines = printed.splitlines()
    for title, ranked in (("highest", sorted(totals, reverse=True)), ("lowest", sorted(totals))):
        at = len(lines) - 1 - lines[::-1].index(f"{title} values:")
        told = lines[at + 1 : at + 6]
        assert [float(line.split()[0]) for line in told] == pytest.approx(ranked[:5], rel=1e-3)
        assert all("train.jsonl, line " in line for line in told)
    assert (tmp_path / "values/report.html").is_file()
    assert f"page: {tmp_path / 'values/report.html'}" in printed
