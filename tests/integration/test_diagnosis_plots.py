"""Pictures told as data: what is told is what is drawn. Options that know their limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from alphatoken.errors import ConfigError
from alphatoken.fidelity.diagnosis import Table
from alphatoken.fidelity.drawing import canvas
from alphatoken.fidelity.intervals import Estimate
from alphatoken.fidelity.options import CheckedOptions, option
from alphatoken.fidelity.plots import Guide, Panel, Series, grouped, pairwise, picture

pytestmark = pytest.mark.pictures

UNKNOWN = Estimate.undefined(3, "3 tokens, 8 needed")


def drawn(panel: Panel) -> list[tuple[Any, Any, Any]]:
    """(x, y, ends of the bars) of each series, as matplotlib has them."""
    with canvas() as figure:
        axes = figure.subplots()
        panel.draw(axes)
        found = []
        for container in axes.containers:
            line, _, bars = vars(container)["lines"]
            ends = [bar.get_segments() for bar in bars]
            found.append((*line.get_data(), ends))
        return found


def test_rows_stand_from_above_with_their_intervals_and_without_what_is_unknown() -> None:
    share = Estimate(0.5, 0.4, 0.7, 90)
    panel = Panel([Series("kept", [share, UNKNOWN], ["second", "first"])], rows=("first", "second"))
    ((x, y, [bars]),) = drawn(panel)
    assert y.tolist() == [1.0, 0.0]
    assert x[0] == 0.5
    assert math.isnan(x[1])
    assert np.allclose(bars[0], [[0.4, 1.0], [0.7, 1.0]])


def test_an_interval_may_lie_beside_its_number() -> None:
    """A mean over draws need not lie between their quantiles: the bar ends at the number."""
    ((_, _, [bars]),) = drawn(Panel([Series("", [1], [Estimate(0.5, 0.6, 0.7, 90)])]))
    assert np.allclose(bars[0], [[1.0, 0.5], [1.0, 0.7]])


def test_series_stand_apart_where_they_have_no_intervals() -> None:
    one = Estimate(0.5, 0.4, 0.7, 90)
    several = [Series(str(place), [4.0], [one]) for place in range(3)]
    x = [float(series[0][0]) for series in drawn(Panel(several, apart=0.1))]
    assert x == pytest.approx([3.9, 4.0, 4.1])
    logarithmic = drawn(Panel(several, apart=0.1, xscale="log"))
    assert [float(series[0][0]) for series in logarithmic] == pytest.approx([3.6, 4.0, 4.4])


def test_groups_keep_their_order_and_their_colour() -> None:
    records = [{"how": how, "x": place, "y": place} for place, how in enumerate("caca")]
    found = grouped(records, "how", "x", "y", labels={"a": "A", "b": "B", "c": "C"})
    assert [(one.label, one.look, one.x) for one in found] == [("A", 0, [1, 3]), ("C", 2, [0, 2])]
    assert [one.label for one in grouped(records, "how", "x", "y")] == ["c", "a"]


def test_a_pair_is_joined_to_itself_only() -> None:
    ends = pairwise([0.0, 1.0], [2.0, 3.0])
    assert ends[:2] == [0.0, 2.0]
    assert ends[3:5] == [1.0, 3.0]
    assert math.isnan(ends[2])


def test_a_picture_says_what_it_shows_to_those_who_do_not_see_it() -> None:
    series = [Series("direct", [1, 2], [0.1, 0.2], joined=True)]
    panels = [Panel(series, [Guide(0.0)], xlabel="K", ylabel=f"rank\n{side}") for side in "ab"]
    figure = picture("k", "Title", "Caption.", Table("k", "t", ("a",), ()), *panels)
    assert figure.alt == "Title. rank a against K: direct; rank b against K: direct."
    assert figure.svg.startswith("<svg")
    assert figure.png.startswith(b"\x89PNG")


@dataclass(frozen=True)
class Made(CheckedOptions):
    share: float = option(0.5, "a share", above=0, most=1)
    sizes: tuple[int, ...] = option((1, 2), "sizes", least=1, below=10)
    names: tuple[str, ...] = option(("a",), "names", choices=("a", "b"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"share": 0.0}, "share must be above 0 and at most 1"),
        ({"share": 1.1}, "share must be above 0 and at most 1"),
        ({"share": math.nan}, "share must be above 0 and at most 1"),
        ({"sizes": (3, 0)}, "sizes must be at least 1 and below 10"),
        ({"sizes": (10,)}, "sizes must be at least 1 and below 10"),
        ({"names": ("a", "c")}, "names must be one of a, b"),
    ],
)
def test_options_beyond_their_limits_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Made(**wrong)


def test_options_within_their_limits_are_kept() -> None:
    assert Made(share=1.0, sizes=(), names=("b",)).sizes == ()
