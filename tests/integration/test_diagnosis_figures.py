"""Figures told as data, and the files of a diagnosis: whole, and readable again."""

from __future__ import annotations

import csv
import io
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes

from alphatoken.diagnose import figures
from alphatoken.diagnose.diagnosis import Diagnosis, Table
from alphatoken.diagnose.figures import Figure, Guide, draw
from alphatoken.diagnose.statistics import Estimate
from alphatoken.errors import ConfigError, DataError
from tests.integration.test_diagnose_page import diagnosis, drawn

pytestmark = pytest.mark.pictures

UNKNOWN = Estimate.undefined(3, "3 tokens, 8 needed")


def about(value: float) -> Estimate:
    return Estimate(value, value - 0.1, value + 0.2, 90)


def figure(kind: str, records: list[dict[str, Any]], **more: Any) -> Figure:
    return Figure(kind, "key", Table.of("t", "T", records), "Title", "Caption.", **more)


def axes_of(one: Figure, monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """Its axes, as matplotlib has them when the picture is kept."""
    seen: list[Axes] = []

    def kept(picture: Any) -> str:
        seen.extend(picture.axes)
        return ""

    monkeypatch.setattr(figures, "svg_text", kept)
    draw(one)
    return seen


def marks(axes: Axes) -> list[tuple[Any, Any, Any]]:
    """(x, y, ends of the bars) of each series."""
    found = []
    for container in axes.containers:
        line, _, bars = vars(container)["lines"]
        found.append((*line.get_data(), [bar.get_segments() for bar in bars]))
    return found


def test_rows_stand_from_above_with_their_intervals_and_without_what_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = [{"name": "first", "kept": UNKNOWN}, {"name": "second", "kept": about(0.5)}]
    (axes,) = axes_of(figure("bars", records, x="kept", y="name"), monkeypatch)
    ((x, y, [bars]),) = marks(axes)
    assert y.tolist() == [0.0, 1.0]
    assert math.isnan(x[0])
    assert np.allclose(bars[1], [[0.4, 1.0], [0.7, 1.0]])
    assert [one.get_text() for one in axes.get_yticklabels()] == ["first", "second"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]


def test_marks_of_one_name_stand_apart_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"by": by, "name": name, "y": about(0.5)} for by in "ab" for name in ("m", "n")]
    (axes,) = axes_of(figure("bars", records, x="name", y="y", series="by"), monkeypatch)
    assert [x.tolist() for x, *_ in marks(axes)] == [[-0.15, 0.85], [0.15, 1.15]]
    alone = [{**record, "name": f"{record['by']}{place}"} for place, record in enumerate(records)]
    (axes,) = axes_of(figure("bars", alone, x="name", y="y", series="by"), monkeypatch)
    assert [x.tolist() for x, *_ in marks(axes)] == [[0.0, 1.0], [2.0, 3.0]]


def test_a_series_keeps_its_colour_in_every_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    own = (("a", "p"), ("b", "p"), ("b", "q"))
    records: list[dict[str, Any]] = [{"by": by, "panel": p, "x": 1, "y": 1.0} for by, p in own]
    records.append({"by": "a", "panel": "without numbers", "x": 1, "y": None})
    more = {"x": "x", "y": "y", "series": "by", "facets": "panel"}
    first, second = axes_of(figure("lines", records, **more), monkeypatch)
    assert (first.get_title(), second.get_title()) == ("p", "q")
    colours = [vars(c)["lines"][0].get_color() for c in (second.containers[0], first.containers[1])]
    assert colours[0] == colours[1]


@pytest.mark.parametrize("steps", [(1,), (20,), (2, 4)])
def test_an_axis_of_steps_has_whole_numbers(
    steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a race of one look; the axis of the differences goes on as it is."""
    records = [{"step": step, "difference": about(0.1)} for step in steps]
    (axes,) = axes_of(figure("lines", records, x="step", y="difference"), monkeypatch)
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert any(tick != int(tick) for tick in axes.get_yticks())


def test_what_is_compared_with_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"x": x, "y": about(0.5), "chance": about(0.3)} for x in (1, 2)]
    one = figure(
        "lines", records, x="x", y="y", band="chance",
        guides=(Guide(0.5, "y", "half"), Guide(of="equal", label="right")),
    )  # fmt: skip
    (axes,) = axes_of(one, monkeypatch)
    assert set(axes.get_legend_handles_labels()[1]) == {"chance", "half", "right"}


def test_a_histogram_has_one_set_of_bins_and_shares_that_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = [{"by": "a", "x": x} for x in (0.0, 1.0, 1.0, 4.0)] + [{"by": "b", "x": 9.0}]
    records.append({"by": "b", "x": None})
    (axes,) = axes_of(figure("histogram", records, x="x", series="by"), monkeypatch)
    edges = figures.edges_of(np.array([0.0, 1.0, 1.0, 4.0, 9.0]))
    assert (edges[0], edges[-1], len(edges)) == (0.0, 9.0, 9)
    outlines = [patch.get_path().vertices for patch in axes.patches]  # type: ignore[attr-defined]
    assert [float(points[:, 1].max()) for points in outlines] == [0.75, 1.0]
    assert all({*points[:, 0]} <= {*edges} for points in outlines)
    assert axes.get_legend_handles_labels()[1] == ["a", "b"]


def test_cells_of_a_grid_fill_their_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = {"a_from": 0.1, "a_to": 1.0, "b_from": 1.0, "b_to": 10.0, "pairs": 7}
    scales = ("log", "log")
    grid = figure("grid", [cell], x="a", y="b", colour="pairs", scales=scales)
    axes, *others = axes_of(grid, monkeypatch)
    mesh: Any = axes.collections[0]
    assert mesh.get_coordinates()[[0, -1], [0, -1]].tolist() == [[0.1, 1.0], [1.0, 10.0]]
    assert mesh.get_array().tolist() == [[7.0]]
    assert len(others) == 1  # the scale of colours; margins are axes within the grid's own
    assert len(axes.child_axes) == 2


def test_clouds_are_by_series_with_ellipses_or_by_who_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = np.random.default_rng(0).normal(size=(20, 2))
    records = [
        {"x": float(x), "y": float(y), "model": "ab"[i % 2], "kept": i < 5}
        for i, (x, y) in enumerate(points)
    ]
    (axes,) = axes_of(figure("cloud", records, x="x", y="y", series="model"), monkeypatch)
    assert len(axes.lines) == 4  # points and an ellipse each
    (kept,) = axes_of(figure("cloud", records, x="x", y="y", facets=("kept",)), monkeypatch)
    assert kept.get_title() == "kept"
    assert [len(line.get_xdata()) for line in kept.lines] == [15, 5]


def test_a_picture_says_what_it_shows_to_those_who_do_not_see_it() -> None:
    records = [{"K": k, "spearman": 0.1 * k, "estimator": "direct"} for k in (1, 2)]
    found = draw(figure("lines", records, x="K", y="spearman", series="estimator"))
    assert found.alt == "Title: spearman against K (direct)"
    assert found.svg.startswith("<svg")
    with pytest.raises(ConfigError, match="kind of a figure"):
        draw(figure("pie", records))


# --- files --------------------------------------------------------------------------------------

HOSTILE = 'a,"b"\n</script>\u2028é'


def example() -> Diagnosis:
    records = [
        {"name": HOSTILE, "rank": Estimate(0.5, 0.25, 0.75, 40), "n": 3},
        {"name": "b", "rank": Estimate.undefined(2, "2 tokens, 8 needed"), "n": 4},
    ]
    return diagnosis(tables=(Table.of("numbers", "Numbers", records),), figures=(drawn("line"),))


def test_comes_back_as_it_was_and_csv_is_what_a_spreadsheet_reads(tmp_path: Path) -> None:
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
