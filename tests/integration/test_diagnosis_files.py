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

from alphatoken.errors import DataError
from alphatoken.fidelity.diagnosis import Diagnosis, Drawing, Table
from alphatoken.fidelity.intervals import Estimate
from alphatoken.report.drawing import COLOURS, DASHES, MARKERS, canvas, svg_text

pytestmark = pytest.mark.pictures

HOSTILE = 'a,"b"\n</script>\u2028é'


def example() -> Diagnosis:
    table = Table.of(
        "numbers",
        "Numbers",
        [
            {"name": HOSTILE, "rank": Estimate(0.5, 0.25, 0.75, 40), "n": 3},
            {"name": "b", "rank": Estimate.undefined(2, "2 tokens, 8 needed"), "n": 4},
        ],
    )
    with canvas(3.0, 2.0) as figure:
        axes = figure.subplots()
        axes.plot([0, 1], [1, 2], color=COLOURS[0], linestyle=DASHES[1], marker=MARKERS[2])
        data = Table.of("line", "Line", [{"x": 0.0, "y": 1.0}, {"x": 1.0, "y": 2.0}])
        svg = svg_text(figure)
        drawn = Drawing("line", "Line", "Look for its slope.", data, svg, "a rising line")
    return Diagnosis(
        "estimators",
        "Which?",
        "This one, at 0.5 [0.2, 0.7].",
        (table,),
        (drawn,),
        ("12 of 99 tokens",),
        {"seed": 1, "layers": "3"},
    )


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    saved = example()
    saved.save(tmp_path)
    again = Diagnosis.load(tmp_path)
    assert (again.name, again.conclusion, again.notes) == (
        saved.name,
        saved.conclusion,
        saved.notes,
    )
    assert again.settings == saved.settings
    assert again.figure("line") == saved.figure("line")
    assert again.table("numbers").csv() == saved.table("numbers").csv()


def test_csv_is_what_a_spreadsheet_reads(tmp_path: Path) -> None:
    example().save(tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "numbers.csv").read_text("utf-8"))))
    assert rows[0]["name"] == HOSTILE
    assert [rows[0][key] for key in ("rank", "rank_low", "rank_high", "rank_n")] == [
        "0.5",
        "0.25",
        "0.75",
        "40",
    ]
    assert rows[1]["rank"] == ""
    assert rows[1]["rank_n"] == "2"


def test_json_has_no_numbers_that_json_lacks(tmp_path: Path) -> None:
    example().save(tmp_path)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads((tmp_path / "diagnosis.json").read_text("utf-8"), parse_constant=refuse)


def test_pictures_need_nothing_from_outside_and_leave_no_state(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    drawn = example().figure("line")
    assert dict(mpl.rcParams) == before
    ET.fromstring(drawn.svg)
    assert "<text" not in drawn.svg  # letters are outlines: no font is looked for
    assert drawn.svg.startswith("<svg")
    assert drawn.svg == example().figure("line").svg  # and the same picture is the same file


@pytest.mark.parametrize(
    ("name", "said"), [("diagnosis.json", "cannot be read"), ("line.svg", r"line\.svg")]
)
def test_a_missing_file_is_noticed(tmp_path: Path, name: str, said: str) -> None:
    """Without its last file a folder is not finished."""
    example().save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=said):
        Diagnosis.load(tmp_path)


@pytest.mark.parametrize("damage", ["{", "[]", '{"name": "x"}', "{}"])
def test_damaged_records_say_what_to_do(tmp_path: Path, damage: str) -> None:
    example().save(tmp_path)
    (tmp_path / "diagnosis.json").write_text(damage)
    with pytest.raises(DataError, match="remove the folder"):
        Diagnosis.load(tmp_path)


def test_records_may_lack_columns() -> None:
    table = Table.of("t", "T", [{"a": 1}, {"b": 2.0}, {"a": math.nan, "b": None}])
    assert table.columns == ("a", "b")
    assert table.csv() == "a,b\n1,\n,2\n,\n"
    assert table.records()[1] == {"a": None, "b": 2.0}
