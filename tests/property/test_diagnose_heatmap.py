"""Heatmaps: planted values get their colours, hostile text stays text, layout loses no letter."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from alphatoken.config import ScorerConfig
from alphatoken.diagnose import heatmap
from alphatoken.diagnose.diagnosis import Table
from alphatoken.diagnose.heatmap import (
    heatmap_figure,
    laid_out,
    normalised,
    ranged,
)
from alphatoken.diagnose.statistics import Estimate
from alphatoken.diagnose.subject import Subject
from alphatoken.errors import ConfigError
from alphatoken.score.page import MINUS, PLUS, colour_of
from alphatoken.support.token_texts import visible
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.rows import drawn_rows as rows_of
from tests.rows import renumbered

pytestmark = pytest.mark.usefixtures("few_draws")

HOSTILE = (
    "</span></div>",
    "<script>document.title='owned'</script>",
    '" onmouseover="document.title=1',
    "'&amp;",
    " costs $5 and $x_1^{2}$",
    "\\frac{1}{0}",
    "<<48/2=24>>",
    " \U0001f600",
    "\u202eevil",
    "\u05e9\u05dc\u05d5\u05dd",
    "\u4f60\u597d",
    "e\u0301",
    "\x00\n",
    "\u2028",
    "",
    "%(s)s {{ 7 * 7 }}",
)


def drawn(tokens: tuple[str, ...], prompt: str, *values: list[float]) -> str:
    """Every third token is kept."""
    shown = [visible(token) for token in tokens]
    panels = {f"Panel <{number}>": np.array(one) for number, one in enumerate(values)}
    kept, table = np.arange(len(tokens)) % 3 == 0, Table("key", "title", ("a",), ((1,),))
    return heatmap_figure("rows <x>, line 4", visible(prompt), shown, panels, kept, table).svg


# --- normalisation and colour --------------------------------------------------------------------


def test_normalisation_is_exact_and_keeps_signs_and_zeros():
    values = np.array([0.0, -3.0, 1.5, 6.0, -6.0])
    assert normalised(values).tolist() == [0.0, -0.5, 0.25, 1.0, -1.0]
    assert normalised(np.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    assert normalised(np.array([])).tolist() == []
    assert normalised(np.array([1e-300, -2e-300])).tolist() == [0.5, -1.0]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20))
def test_relative_colours_are_darker_the_higher_the_value(values: list[float]):
    """From white, the lowest of the response, to full colour, its highest; whatever the signs."""
    colours = ranged(np.array(values))
    light = [sum(colour_of(colour)) for colour in colours]
    for a, one in zip(values, light, strict=True):
        for b, other in zip(values, light, strict=True):
            assert (a >= b) <= (one <= other + 1e-12)
    if max(values) > min(values):
        assert colours.min() == 0.0
        assert colours.max() == 1.0
        assert light[int(np.argmin(values))] == 3.0  # white
    assert ranged(np.array([])).tolist() == []


@pytest.mark.parametrize(
    ("panels", "keys"),
    [
        ("total", ["Total, alphatoken"]),
        ("components", ["Adaptation, direct", "Adaptation, causal"]),
        ("all", ["Total, alphatoken", "Adaptation, direct", "Adaptation, causal"]),
    ],
)
def test_the_papers_two_figures_are_the_total_and_the_components(panels: str, keys: list[str]):
    options = heatmap.Options(rows=(0,), panels=panels, colours="relative")
    found = heatmap.diagnose(tiny_subject(), options)
    (figure,) = [f for f in found.figures if f.key.startswith("heatmap-row")]
    assert figure.alt.endswith(f"in panels: {', '.join(keys)}.")
    assert "darker is higher" in figure.caption
    assert found.settings["colours"] == "relative"


# --- layout --------------------------------------------------------------------------------------


def test_layout_loses_no_letter_and_fits_the_columns():
    tokens = ["ab", " cdefg", "\u21b5\n", "", "hijklmnopqrstuv", "\n\nw"]
    pieces, shown = laid_out(tokens, 7, 20)
    assert shown == len(tokens)
    assert all(column >= 0 and column + len(text) <= 7 for _, _, column, text in pieces)
    for number, token in enumerate(tokens):
        own = "".join(text for place, *_, text in pieces if place == number)
        assert own == token.replace("\n", "")
    places = [(line, column) for _, line, column, _ in pieces]
    assert places == sorted(places)
    letters = {(line, at + i) for _, line, at, text in pieces for i in range(len(text))}
    assert len(letters) == sum(len(text) for *_, text in pieces)
    # It stops at the last line, with whole tokens.
    pieces, shown = laid_out(["abc", "def", "ghi", "j"], 3, 2)
    assert shown == 2
    assert {token for token, *_ in pieces} == {0, 1}
    assert laid_out(["abcdefgh"], 3, 2) == ([], 0)


def test_a_figure_of_hostile_text_shows_each_token_by_its_own_colour():
    def fills(svg: str, colour: tuple[int, int, int]) -> int:
        return svg.count("#{:02x}{:02x}{:02x}".format(*colour))

    values = [(-1.0) ** i * (i + 1) for i in range(len(HOSTILE))]  # in sign by turns, growing
    svg = drawn(HOSTILE, "a <b> $\n", values, [-v for v in values], [0.0] * len(HOSTILE))
    assert fills(svg, PLUS) > 0
    assert fills(svg, MINUS) > 0
    assert "<script" not in svg
    assert "http://" not in svg.replace("http://www.w3.org", "")
    ElementTree.fromstring(svg)
    for value, colour, other in ((2.0, PLUS, MINUS), (-2.0, MINUS, PLUS)):
        svg = drawn(("    ", " b"), "", [value, 1e-9])
        assert (fills(svg, colour), fills(svg, other)) == (1, 0)


# --- numbers -------------------------------------------------------------------------------------


def test_parts_shares_and_kinds_by_hand():
    """Parts add up to the total with lambda; shares are of summed magnitudes, kinds of tokens."""
    one = np.ones(1)
    parts = heatmap.parts_of({"total": 4 * one, "adaptation": one, "stability": 2 * one}, 1.5)
    assert list(parts) == ["total", "adaptation", "stability"]
    assert parts["adaptation"] + parts["stability"] == parts["total"]
    columns = {
        "row": np.repeat([0, 1], 20),
        "kept": np.arange(40) >= 20,
        "adaptation_direct": np.full(40, 3.0),
        "stability_direct": np.full(40, -1.0),
    }
    shares = heatmap.shares_of(columns)
    assert shares["adaptation_direct"].value == pytest.approx(0.75)
    assert shares["stability_direct"].value == pytest.approx(0.25)
    kinds = {r["kind"]: r for r in heatmap.kinds_of(columns, ["a"] * 20 + ["7"] * 20)}
    assert (kinds["number"]["kept"].value, kinds["number"]["tokens"]) == (1.0, 20)
    assert kinds["inside a word"]["kept"].value == 0.0


# --- the whole -----------------------------------------------------------------------------------


def moved(model: nn.Module, by: float) -> nn.Module:
    generator = torch.Generator().manual_seed(9)
    other = ReferenceDecoder(model.config, seed=6).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator).double())
    return other


def tiny_subject(**changes) -> Subject:
    given = {
        "model": ReferenceDecoder(DecoderConfig(layers=3), seed=6).eval(),
        "train": rows_of([(2, 5)] * 14, 11, seed=1),
        "validation": rows_of([(2, 4)] * 4, 11, seed=2),
        "batch_size": 4,
        "fisher_samples": 4,
        "tuning_steps": 3,
        "tokens": 60,
    }
    return Subject(**{**given, **changes})


def test_rows_that_are_asked_for_are_shown_and_their_parts_add_up():
    """By their numbers in the training file, of which rows may have been drawn or left out."""
    rows = renumbered(rows_of([(2, 5)] * 14, 11, seed=1))
    found = heatmap.diagnose(tiny_subject(train=rows), heatmap.Options(rows=(39, 0)))
    records = found.table("heatmap-tokens").records()
    assert [r["row"] for r in records] == [39] * 5 + [0] * 5
    with pytest.raises(ConfigError, match="was not drawn.*--rows 13.*such as 0, 3, 6"):
        heatmap.diagnose(tiny_subject(train=rows), heatmap.Options(rows=(13,)))
    for r in records:
        parts = sum(r[key] for key in r if key.startswith(("adaptation_", "stability_")))
        assert parts == pytest.approx(r["total"], rel=1e-9, abs=1e-12)
    for row in (39, 0):
        own = [r for r in records if r["row"] == row]
        largest = max(abs(r["total"]) for r in own)
        assert [r["normalised"] for r in own] == [r["total"] / largest for r in own]
        assert found.figure(f"heatmap-row-{row}").data.records() == own
    assert any("Stability is zero" in note for note in found.notes)
    assert any("no tokenizer" in note for note in found.notes)


def test_stability_is_there_away_from_the_reference():
    subject = tiny_subject()
    found = heatmap.diagnose(tiny_subject(reference=moved(subject.model, 0.05)))
    shares = {r["component"]: r["share"] for r in found.table("heatmap-shares").records()}
    assert shares["stability_direct"] > 0
    assert math.isclose(sum(shares.values()), 1.0)
    assert not any("Stability is zero" in note for note in found.notes)


def test_an_estimator_without_split_shows_its_sides():
    config = ScorerConfig(estimator="path")
    found = heatmap.diagnose(tiny_subject(config=config))
    columns = found.table("heatmap-tokens").columns
    assert "adaptation" in columns
    assert any("one value" in note for note in found.notes)


def test_kinds_that_cannot_be_told_from_all_are_not_named():
    def about(value: float) -> Estimate:
        return Estimate(value, value - 0.05, value + 0.05, 40)

    kinds = [{"kind": "words", "kept": about(0.5)}]
    assert heatmap._conclusion(Table.of("kinds", "", kinds), 0.5).startswith("No kind")
    kinds += [{"kind": "numbers", "kept": about(0.9)}, {"kind": "spaces", "kept": about(0.2)}]
    said = heatmap._conclusion(Table.of("kinds", "", kinds), 0.5)
    assert said.startswith(f"What is valued most: numbers, of which {about(0.9)} are kept")
