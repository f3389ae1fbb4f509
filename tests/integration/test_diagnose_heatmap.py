"""The heatmap on the real tiny model: real text with dollars and brackets, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphatoken.config import ScorerConfig
from alphatoken.fidelity import heatmap
from alphatoken.fidelity.diagnosis import Diagnosis
from tests.integration.browser import Browser
from tests.integration.subjects import subject

pytestmark = pytest.mark.pictures


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    given = subject("far", tokens=400)
    return heatmap.diagnose(given, heatmap.Options(examples=2))


def test_it_says_what_is_valued_with_intervals(found: Diagnosis):
    assert found.name == "heatmap"
    assert any("Stability is zero" in note for note in found.notes)
    kinds = {record["kind"]: record for record in found.table("heatmap-kinds").records()}
    assert len(kinds) > 3
    several = [record for record in kinds.values() if record["tokens"] > 30]
    assert len(several) > 2
    for record in several:
        assert 0 <= record["kept_low"] <= record["kept"] <= record["kept_high"] <= 1
    agreement = found.table("heatmap-agreement").records()[0]
    assert 0.4 < agreement["spearman_low"] <= agreement["spearman"] <= 1


def test_every_token_of_the_rows_is_in_table_and_page(found: Diagnosis):
    records = found.table("heatmap-tokens").records()
    shown: dict[int, str] = {}
    for record in records:
        shown[record["row"]] = shown.get(record["row"], "") + str(record["token"])
    assert len(shown) == 2
    for number, text in shown.items():
        response = subject("far").train[number].row.response
        assert response.startswith(text.removesuffix("</s>"))
    assert found.html.count('class="tok') >= 4 * len(records)
    for record in records:
        parts = record["adaptation_direct"] + record["adaptation_causal"]
        scale = abs(record["adaptation_direct"]) + abs(record["adaptation_causal"])
        assert record["total"] == pytest.approx(parts, abs=1e-5 * scale + 1e-12)


def test_the_same_run_is_the_same_diagnosis(found: Diagnosis):
    given = subject("far", tokens=400)
    again = heatmap.diagnose(given, heatmap.Options(examples=2))
    assert again.html == found.html
    assert again.answer == found.answer
    assert again.tables == found.tables


@pytest.mark.slow
def test_the_page_shows_signs_in_their_colours_light_and_dark(found: Diagnosis, tmp_path: Path):
    page = tmp_path / "page.html"
    start = "<!DOCTYPE html><meta charset='utf-8'><style>:root{color-scheme:light dark}</style>"
    page.write_text(start + found.html, encoding="utf-8")
    script = """(() => {
      const read = (text) => { const c = document.createElement("canvas").getContext("2d");
        c.fillStyle = text; c.fillRect(0, 0, 1, 1); return [...c.getImageData(0, 0, 1, 1).data]; };
      const strong = (sign) => [...document.querySelectorAll(".tok")]
        .filter((one) => one.title.startsWith(sign) && !/[(][+-]0[.]0[0-5]/.test(one.title))
        .map((one) => read(getComputedStyle(one).backgroundColor));
      const box = document.querySelector(".example");
      return {plus: strong("+"), minus: strong("\u2212"),
        paper: read(getComputedStyle(box).backgroundColor),
        ink: read(getComputedStyle(box).color)};
    })()"""
    with Browser(tmp_path / "profile") as browser:
        for scheme in ("light", "dark"):
            browser.send(
                "Emulation.setEmulatedMedia",
                features=[{"name": "prefers-color-scheme", "value": scheme}],
            )
            browser.open(page)
            seen = browser.evaluate(script)
            assert seen["plus"], scheme
            assert seen["minus"], scheme
            assert all(blue > red for red, _, blue, _ in seen["plus"])
            assert all(red > blue for red, _, blue, _ in seen["minus"])
            paper, ink = sum(seen["paper"][:3]), sum(seen["ink"][:3])
            assert paper - ink > 600, "on paper in either light"
        browser.resize(360, 700)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 360
        assert browser.errors == []
        assert [r for r in browser.requests if not r.startswith("file:")] == []


@pytest.mark.slow
def test_two_checkpoints_side_by_side():
    config = ScorerConfig(layers=1)
    given = subject("near", tokens=150, train_rows=6, validation_rows=3, config=config)
    options = heatmap.Options(examples=1, tuned=True, against="before", lines=6)
    found = heatmap.diagnose(given, options)
    shares = {r["component"]: r["share"] for r in found.table("heatmap-shares").records()}
    assert shares["stability_direct"] > 0
    assert "alphatoken before" in found.html
