"""The page about diagnoses: its pictures, tables and links as text; test_report.py opens a page."""

from __future__ import annotations

import base64
import math
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from alphatoken.diagnose.diagnosis import LEAD, MOST_ROWS, Diagnosis, Drawing, Table, section_of
from alphatoken.diagnose.statistics import Estimate
from alphatoken.errors import DataError
from alphatoken.score.page import Section, canvas, render_page, svg_text

pytestmark = [pytest.mark.slow, pytest.mark.pictures]

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    '<img src="http://example.invalid/x.png" onerror="document.title=1">',
    "'\"><b>",
    "שלום \u202eevil 😀",
    "{{ 7 * 7 }}",
    'a,b\n"c"',
    "<!-- --!> -->",
    "]]>",
    "\x00\x1b",
    "&amp;",
)


@cache  # drawing takes longer than all else here
def drawn(key: str, title: str = "A curve", *, width: float = 6.4) -> Drawing:
    """A figure with clip paths, markers, a colour bar and a rasterised part."""
    records = [{"x": x, "y": math.sin(x)} for x in range(5)]
    with canvas(width) as figure:
        axes = figure.add_subplot()
        axes.plot([r["x"] for r in records], [r["y"] for r in records], marker="o")
        mesh = axes.pcolormesh(np.arange(12.0).reshape(3, 4), rasterized=True)
        figure.colorbar(mesh)
        axes.set_title("a -- b > c")
        data = Table.of(f"{key}_data", title, records)
        svg = svg_text(figure)
        return Drawing(key, title, "Look for the bend.", data, svg, f"{title}: it bends.")


def diagnosis(name: str = "estimators", **changes: Any) -> Diagnosis:
    records = [
        {"estimator": "label", "spearman": Estimate(0.914, 0.871, 0.95, 48), "seconds": 0.0123},
        {"estimator": "path", "spearman": Estimate(-0.2, -0.31, 0.05, 48), "seconds": 1234.0},
    ]
    given: dict[str, Any] = {
        "question": f"What is {name}?",
        "conclusion": "The first, by 0.91 [0.87, 0.95].",
        "tables": (Table.of("fidelity", "Fidelity", records, note="All of them."),),
        "figures": (drawn("curve"), drawn("wide", "A wide curve", width=11.0)),
        "notes": ("48 of 900 tokens.",),
        "settings": {"model": "stories", "draws": 7},
    }
    return Diagnosis(name, **given | changes)


def page_of(*shown: Diagnosis | Section, **more: Any) -> str:
    """The page about these."""
    shared = more.get("settings", {})
    sections = [
        section_of(one.name, one.question, one, shared=shared)
        if isinstance(one, Diagnosis)
        else one
        for one in shown
    ]
    return render_page("How far to trust the values", LEAD, sections, contents=True, **more)


def missing(name: str, question: str, failure: str = "") -> Section:
    return section_of(name, question, None, failure=failure)


class Page(HTMLParser):
    """Tables, identifiers, links and what would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, dict[str, str]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._cell:
            self.tables[-1][-1][-1] += data

    def of(self, name: str, tag: str = "") -> list[str]:
        """Every value of an attribute, of one kind of element or of all."""
        return [own[name] for kind, own in self.attributes if name in own and tag in ("", kind)]

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.attributes]

    @property
    def fetched(self) -> list[str]:
        """What a browser would load from elsewhere."""
        names = ("src", "href", "action", "data", "xlink:href")
        values = [value for name in names for value in self.of(name)]
        return [value for value in values if not value.startswith(("#", "data:"))]

    def check_inert(self) -> None:
        """Nothing runs, and nothing is loaded from elsewhere."""
        assert "script" not in self.tags
        assert not [name for _, own in self.attributes for name in own if name.startswith("on")]
        assert self.fetched == []


# --- pictures -------------------------------------------------------------------------------------


def test_a_picture_is_an_image_of_its_own_and_says_what_it_shows() -> None:
    figure = drawn("curve", 'it "bends" <here>')
    page = Page(page_of(diagnosis(figures=(figure,))))
    (source,) = page.of("src", "img")
    head, _, coded = source.partition("base64,")
    assert head == "data:image/svg+xml;"
    assert base64.b64decode(coded).decode() == figure.svg
    assert page.of("alt", "img") == ['it "bends" <here>: it bends.']
    for svg in ("<svg", "<p>x</p>", '<svg width="x" height="1"/>'):
        with pytest.raises(DataError, match=r"no SVG.*estimators-curve"):
            page_of(diagnosis(figures=(replace(drawn("curve"), svg=svg),)))


# --- tables ---------------------------------------------------------------------------------------


def test_an_estimate_is_one_cell_with_its_interval() -> None:
    records = [
        {"who": "a", "rho_s": Estimate(0.914, 0.871, 0.95, 48), "other": 1},
        {"who": "b", "rho_s": Estimate(-0.2, -0.31, 0.05, 48), "other": None},
        {"who": "c", "rho_s": Estimate.undefined(48, "flat"), "other": math.nan},
    ]
    table = Table.of("t", "T", records)
    page = Page(page_of(diagnosis(figures=(), settings={}, tables=(table,))))
    assert page.tables[0] == [
        ["who", "rho s", "other"],
        ["a", "0.914 [0.871, 0.950]", "1"],
        ["b", "−0.20 [−0.31, 0.05]", "–"],
        ["c", "not defined", "–"],
    ]


def test_a_long_table_is_cut_on_the_page_and_whole_in_its_file() -> None:
    records = [{"row": row} for row in range(MOST_ROWS + 7)]
    text = page_of(diagnosis(figures=(), tables=(Table.of("t", "T", records),)))
    page = Page(text)
    assert len(page.tables[0]) == 1 + MOST_ROWS
    assert "7 more rows are in the file" in page.text
    empty = Page(page_of(diagnosis(figures=(), tables=(Table.of("t", "T", []),))))
    assert "No rows." in empty.text


# --- the page as text -----------------------------------------------------------------------------


def hostile() -> Diagnosis:
    """Everything that a text may be, wherever a text stands."""
    evil = HOSTILE[0]
    records = [{evil: text, "n": i} for i, text in enumerate(HOSTILE)]
    table = Table.of('k"><script>', HOSTILE[1], records, note=HOSTILE[2])
    plain = drawn("curve")
    figure = Drawing('f"<', HOSTILE[1], HOSTILE[0], table, plain.svg, alt=" ".join(HOSTILE[:8]))
    return diagnosis(
        'na"me <x>',
        question=HOSTILE[0],
        conclusion=" ".join(HOSTILE[:4]),
        notes=HOSTILE,
        tables=(table,),
        figures=(figure,),
        settings={HOSTILE[0]: HOSTILE[1]},
    )


def test_hostile_text_stays_text() -> None:
    text = page_of(
        hostile(),
        missing("b", HOSTILE[1], HOSTILE[0]),
        missing("c", "?"),
        settings={HOSTILE[1]: HOSTILE[0]},
        rows=HOSTILE,
        command=HOSTILE[1],
    )
    page = Page(text)
    page.check_inert()
    assert [source[:19] for source in page.of("src", "img")] == ["data:image/svg+xml;"]
    for part in HOSTILE[:5]:
        assert part in page.text
    assert "49" not in page_of(diagnosis(conclusion="{{ 7 * 7 }}", figures=(), tables=()))


def test_page_is_self_contained_and_names_are_unique() -> None:
    text = page_of(diagnosis(), diagnosis("fisher"), settings={"model": "stories"})
    page = Page(text)
    page.check_inert()
    ids, within = page.of("id"), {link[1:] for link in page.of("href", "a")}
    assert len(set(ids)) == len(ids) > 10
    assert not re.search(r"@import|url\(", text)
    assert {"estimators", "fisher", "contents", "main", "settings"} <= within <= set(ids)


def test_contents_say_each_question_and_its_answer() -> None:
    sections = [
        diagnosis(),
        missing("fisher", "Is it so?", "there are no rows. Remedy: --retention_set FILE."),
        missing("drift", "How far?"),
    ]
    text = page_of(*sections, command="alphatoken diagnose all --out x")
    contents = Page(text[text.index("<nav") : text.index("</nav>")]).text
    for part in (
        "What is estimators?", "The first, by 0.91 [0.87, 0.95].", "Is it so?",
        "Could not run: there are no rows. Remedy: --retention_set FILE.", "How far?",
        "Not run yet.",
    ):  # fmt: skip
        assert part in contents
    assert "alphatoken diagnose all --out x" in text
    # What all depend on is said once; what one depends on stands with it.
    page = page_of(diagnosis(), settings={"model": "stories"})
    assert page.count('<th scope="row">model</th>') == 1
    assert page.count('<th scope="row">draws</th>') == 1
