"""Figures told as data: what is declared is what is drawn. Options that know their limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from alphatoken.diagnose import figures
from alphatoken.diagnose.diagnosis import Table
from alphatoken.diagnose.figures import Figure, Guide, draw
from alphatoken.diagnose.statistics import Estimate
from alphatoken.errors import ConfigError

pytestmark = pytest.mark.pictures

UNKNOWN = Estimate.undefined(3, "3 tokens, 8 needed")


def about(value: float) -> Estimate:
    return Estimate(value, value - 0.1, value + 0.2, 90)


def figure(kind: str, records: list[dict[str, Any]], **more: Any) -> Figure:
    return Figure(kind, "key", Table.of("t", "T", records), "Title", "Caption.", **more)


def drawn(one: Figure, monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
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
    (axes,) = drawn(figure("bars", records, x="kept", y="name"), monkeypatch)
    ((x, y, [bars]),) = marks(axes)
    assert y.tolist() == [0.0, 1.0]
    assert math.isnan(x[0])
    assert np.allclose(bars[1], [[0.4, 1.0], [0.7, 1.0]])
    assert [one.get_text() for one in axes.get_yticklabels()] == ["first", "second"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]


def test_marks_of_one_name_stand_apart_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"by": by, "name": name, "y": about(0.5)} for by in "ab" for name in ("m", "n")]
    (axes,) = drawn(figure("bars", records, x="name", y="y", series="by"), monkeypatch)
    assert [x.tolist() for x, *_ in marks(axes)] == [[-0.15, 0.85], [0.15, 1.15]]
    alone = [{**record, "name": f"{record['by']}{place}"} for place, record in enumerate(records)]
    (axes,) = drawn(figure("bars", alone, x="name", y="y", series="by"), monkeypatch)
    assert [x.tolist() for x, *_ in marks(axes)] == [[0.0, 1.0], [2.0, 3.0]]


def test_a_series_keeps_its_colour_in_every_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"by": "a", "panel": "p", "x": 1, "y": 1.0}] + [
        {"by": "b", "panel": panel, "x": 1, "y": 1.0} for panel in "pq"
    ]
    more = {"x": "x", "y": "y", "series": "by", "facets": "panel"}
    first, second = drawn(figure("lines", records, **more), monkeypatch)
    assert (first.get_title(), second.get_title()) == ("p", "q")
    colours = [vars(c)["lines"][0].get_color() for c in (second.containers[0], first.containers[1])]
    assert colours[0] == colours[1]


def test_panels_without_numbers_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = [{"p": "a", "x": "m", "y": 1.0}, {"p": "b", "x": "m", "y": None}]
    assert len(drawn(figure("bars", records, x="x", y="y", facets="p"), monkeypatch)) == 1


def test_what_is_compared_with_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"x": x, "y": about(0.5), "chance": about(0.3)} for x in (1, 2)]
    one = figure(
        "lines", records, x="x", y="y", band="chance",
        guides=(Guide(0.5, "y", "half"), Guide(of="equal", label="right")),
    )  # fmt: skip
    (axes,) = drawn(one, monkeypatch)
    assert set(axes.get_legend_handles_labels()[1]) == {"chance", "half", "right"}


def test_cells_of_a_grid_fill_their_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = {"a_from": 0.1, "a_to": 1.0, "b_from": 1.0, "b_to": 10.0, "pairs": 7}
    scales = ("log", "log")
    grid = figure("grid", [cell], x="a", y="b", colour="pairs", scales=scales)
    axes, *others = drawn(grid, monkeypatch)
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
    (axes,) = drawn(figure("cloud", records, x="x", y="y", series="model"), monkeypatch)
    assert len(axes.lines) == 4  # points and an ellipse each
    (kept,) = drawn(figure("cloud", records, x="x", y="y", facets=("kept",)), monkeypatch)
    assert kept.get_title() == "kept"
    assert [len(line.get_xdata()) for line in kept.lines] == [15, 5]


def test_a_picture_says_what_it_shows_to_those_who_do_not_see_it() -> None:
    records = [{"K": k, "spearman": 0.1 * k, "estimator": "direct"} for k in (1, 2)]
    found = draw(figure("lines", records, x="K", y="spearman", series="estimator"))
    assert found.alt == "Title: spearman against K (direct)"
    assert found.svg.startswith("<svg")
    with pytest.raises(ConfigError, match="kind of a figure"):
        draw(figure("pie", records))
