"""What a diagnosis leaves on disk: whole, readable again, and drawn without outside help."""

from __future__ import annotations

import csv
import io
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib as mpl
import pytest

from alphatoken.diagnose.diagnosis import Diagnosis, Table
from alphatoken.diagnose.statistics import Estimate
from alphatoken.errors import DataError
from tests.integration.test_diagnose_page import diagnosis, drawn

pytestmark = pytest.mark.pictures

HOSTILE = 'a,"b"\n</script>\u2028é'


def example() -> Diagnosis:
    records = [
        {"name": HOSTILE, "rank": Estimate(0.5, 0.25, 0.75, 40), "n": 3},
        {"name": "b", "rank": Estimate.undefined(2, "2 tokens, 8 needed"), "n": 4},
    ]
    return diagnosis(tables=(Table.of("numbers", "Numbers", records),), figures=(drawn("line"),))


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    saved = example()
    saved.save(tmp_path)
    again = Diagnosis.load(tmp_path)
    for name in ("name", "conclusion", "notes", "settings"):
        assert getattr(again, name) == getattr(saved, name)
    assert again.figure("line") == saved.figure("line")
    assert again.table("numbers").csv() == saved.table("numbers").csv()

    def refuse(name: str) -> None:
        raise AssertionError(f"JSON has no such number: {name}")

    json.loads((tmp_path / "diagnosis.json").read_text("utf-8"), parse_constant=refuse)


def test_csv_is_what_a_spreadsheet_reads(tmp_path: Path) -> None:
    example().save(tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "numbers.csv").read_text("utf-8"))))
    assert rows[0]["name"] == HOSTILE
    found = [rows[0][key] for key in ("rank", "rank_low", "rank_high", "rank_n")]
    assert found == ["0.5", "0.25", "0.75", "40"]
    assert rows[1]["rank"] == ""
    assert rows[1]["rank_n"] == "2"


def test_pictures_need_nothing_from_outside_and_leave_no_state() -> None:
    kept = drawn("line").svg
    before = dict(mpl.rcParams)
    svg = drawn.__wrapped__("line").svg  # drawn once more
    assert dict(mpl.rcParams) == before
    ET.fromstring(svg)
    assert "<text" not in svg  # letters are outlines: no font is looked for
    assert svg.startswith("<svg")
    assert svg == kept  # and the same picture is the same file


def test_missing_and_damaged_files_are_noticed(tmp_path: Path) -> None:
    """Without its last file a folder is not finished; damaged records say what to do."""
    example().save(tmp_path)
    for damage in ("{", "[]", '{"name": "x"}', "{}"):
        (tmp_path / "diagnosis.json").write_text(damage)
        with pytest.raises(DataError, match="remove the folder"):
            Diagnosis.load(tmp_path)
    example().save(tmp_path)
    for name, said in (("line.svg", r"line\.svg"), ("diagnosis.json", "cannot be read")):
        (tmp_path / name).unlink()
        with pytest.raises(DataError, match=said):
            Diagnosis.load(tmp_path)


def test_records_may_lack_columns() -> None:
    table = Table.of("t", "T", [{"a": 1}, {"b": 2.0}, {"a": math.nan, "b": None}])
    assert table.columns == ("a", "b")
    assert table.csv() == "a,b\n1,\n,2\n,\n"
    assert table.records()[1] == {"a": None, "b": 2.0}
