"""The report: its numbers by hand, and the page in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from alphatoken.errors import DataError
from alphatoken.score import (
    ScoredExample,
    read_values,
    summarise,
    value_files,
    write_report,
    write_values,
)
from alphatoken.score.page import script_safe
from alphatoken.score.value_page import MOST_TOKENS, setting_tiles, shown_examples
from alphatoken.score.values import visible
from tests.integration.browser import Browser, opened
from tests.integration.test_diagnose_page import HOSTILE as TEXTS
from tests.integration.test_diagnose_page import Page

pytestmark = pytest.mark.pictures

HOSTILE = ("Hi", "</script>", " 😀", "<!--", "\n", "مرحبا", "<0xF0>", "\u2028", *TEXTS)


def example(row: int, tokens: tuple[str, ...], *, seed: int, split: bool = True) -> ScoredExample:
    """First token is the prompt; values are drawn, total = adaptation + 1.5 stability."""
    generator = np.random.default_rng(seed)
    length = len(tokens)
    names = ("adaptation_direct", "adaptation_causal", "stability_direct", "stability_causal")
    parts = {name: generator.standard_normal(length) for name in names}
    for part in parts.values():
        part[0] = 0
    values = {
        "adaptation": parts["adaptation_direct"] + parts["adaptation_causal"],
        "stability": parts["stability_direct"] + parts["stability_causal"],
    }
    values["total"] = values["adaptation"] + 1.5 * values["stability"]
    if split:
        values |= parts
    return ScoredExample(
        row=row,
        place=f"train.jsonl, line {row + 1}",
        tokens=list(tokens),
        ids=list(range(length)),
        labels=[-100, *range(1, length)],
        kept=(values["total"] > 0) & (np.arange(length) > 0),
        values=values,
    )


def many(count: int, length: int = 30) -> list[ScoredExample]:
    words = tuple(f" word{i}" for i in range(length))
    return [example(row, words, seed=row) for row in range(count)]


# --- numbers --------------------------------------------------------------------------------------


def test_summary_counts_and_extremes() -> None:
    examples = many(25)
    summary = summarise(examples, sample=7, extremes=4)
    totals = np.concatenate([e.values["total"][1:] for e in examples])
    assert (summary.sequences, summary.tokens, summary.response_tokens) == (25, 750, 725)
    assert summary.kept_tokens == (totals > 0).sum()
    total = summary.components["total"]
    assert total["mean"] == pytest.approx(totals.mean(), rel=1e-12)
    assert total["maximum"] == totals.max()
    assert total["minimum"] == totals.min()
    assert total["positive"] == pytest.approx((totals > 0).mean())
    ranked = np.sort(totals)
    assert [value for value, _, _ in summary.highest] == pytest.approx(ranked[::-1][:4])
    assert [value for value, _, _ in summary.lowest] == pytest.approx(ranked[:4])
    top = summary.as_dict()["highest"][0]
    source = examples[top["row"]]
    assert source.values["total"][top["position"]] == totals.max() == top["values"]["total"]
    assert "".join(source.tokens).find(top["before"] + top["token"] + top["after"]) >= 0


def test_every_row_is_in_the_sample_with_the_same_chance() -> None:
    """2 of 6 rows in each of 600 draws: 200 times each, give or take 5 deviations."""
    examples, times = many(6, 2), np.zeros(6)
    for seed in range(600):
        rows = [e.row for e in summarise(examples, sample=2, extremes=1, seed=seed).sample]
        assert rows == sorted(rows)
        times[rows] += 1
    assert times.sum() == 2 * 600
    first, again, other = (
        [e.row for e in summarise(many(60, 3), sample=10, seed=seed).sample] for seed in (0, 0, 5)
    )
    assert first == again != other
    assert float(np.abs(times - 200).max()) < 5 * (200 * 2 / 3) ** 0.5


def test_a_value_of_zero_is_not_positive() -> None:
    """As every stability value is before the first step."""
    one = example(0, ("a", "b", "c", "d", "e"), seed=0)
    totals = {"total": np.array([5.0, 0.0, -1.0, 2.0, -0.0]), "stability": np.zeros(5)}
    components = summarise([replace(one, values=totals)]).components
    assert components["total"]["positive"] == 0.25
    assert components["stability"]["positive"] == 0.0


def test_long_sequences_and_many_are_capped() -> None:
    long = example(0, tuple(f"t{i}" for i in range(9000)), seed=0)
    shown, left_out = shown_examples([long], ["total"])
    assert left_out == 9000 - len(shown[0]["tokens"])
    assert shown[0]["tokens"][0] == "t0"
    late = example(1, tuple(f"t{i}" for i in range(5000)), seed=1)
    late.labels[:4000] = [-100] * 4000
    window = shown_examples([late], ["total"])[0][0]
    assert window["start"] == 3700
    assert window["response"].count("1") == len(window["values"]["total"]) > 900
    several, _ = shown_examples(many(600), ["total"])
    assert sum(len(one["tokens"]) for one in several) <= MOST_TOKENS
    assert 300 < len(several) < 600


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [True, False])
def test_value_files_come_back_bit_for_bit(tmp_path: Path, split: bool) -> None:
    written = [
        example(3, HOSTILE, seed=1, split=split),
        example(9, ("a", "b"), seed=2, split=split),
        replace(example(12, ("c", "d"), seed=4, split=split), derivative="central", error=1e-3),
    ]
    write_values(tmp_path / "part-00000.parquet", written)
    assert [p.name for p in value_files(tmp_path)] == ["part-00000.parquet"]
    for before, after in zip(written, read_values(tmp_path), strict=True):
        assert (before.row, before.place, []) == (after.row, after.place, after.tokens)
        assert (list(before.ids), list(before.labels)) == (list(after.ids), list(after.labels))
        assert before.values.keys() == after.values.keys()
        for key, values in before.values.items():
            assert np.array_equal(values, after.values[key])
        assert np.array_equal(before.kept, after.kept)
        assert np.array_equal(before.response, after.response)
        assert (before.derivative, before.error) == (after.derivative, after.error)


def test_files_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (7, 0, 11, 3, 10, 1, 9, 4, 2, 8, 6, 5):
        write_values(tmp_path / f"part-{number:05d}.parquet", [example(number, ("a", "b"), seed=1)])
    assert [one.row for one in read_values(tmp_path)] == list(range(12))


def test_a_folder_without_value_files_is_not_read_as_an_empty_one(tmp_path: Path) -> None:
    """As the output folder of a score is, whose value files are in a folder of it."""
    (tmp_path / "values").mkdir()
    write_values(tmp_path / "values" / "part-00000.parquet", [example(0, ("a", "b"), seed=1)])
    with pytest.raises(DataError, match="holds no value files.*the folder 'values' in"):
        list(read_values(tmp_path))
    assert len(list(read_values(tmp_path / "values"))) == 1


# --- the page as text -----------------------------------------------------------------------------


def test_page_is_self_contained_and_hostile_tokens_stay_text(tmp_path: Path) -> None:
    summary = summarise([example(0, HOSTILE, seed=3)])
    text = write_report(
        tmp_path / "r.html", summary, settings={"<b>": "</td><script>"}, notes=["<i>note</i>"]
    ).read_text(encoding="utf-8")
    page = Page(text)
    assert page.fetched == []
    assert page.tags.count("script") == 2
    assert not re.search(r"@import|url\((?!#)", text)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert policy[1].startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}'; " in policy[1], "our script and no other"
    assert "&lt;i&gt;note" in text
    assert "<script>document.title" not in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert data["examples"][0]["tokens"] == [visible(token) for token in HOSTILE]
    assert script_safe("</script>\u2028") == '"\\u003c/script\\u003e\\u2028"'


def test_page_of_hundreds_of_sequences_stays_small(tmp_path: Path) -> None:
    summary = summarise(many(500, 120), sample=400)
    path = write_report(tmp_path / "r.html", summary)
    assert path.stat().st_size < 1_500_000
    assert f"of {summary.sequences} sequences are shown" in path.read_text(encoding="utf-8")


def test_old_page_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(tmp_path / "r.html", summarise(many(3)))
    before = path.read_bytes()

    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(DataError, match="No space left on device"):
        write_report(path, summarise(many(4)))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


# --- the page in a browser ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    examples = [*many(12, 80), example(99, HOSTILE, seed=7)]
    summary = summarise(examples)
    return write_report(
        tmp_path_factory.mktemp("report") / "report.html",
        summary,
        title="Token values of <train>.jsonl",
        settings={"estimator": "alphatoken", "layers": 3, "model_name_or_path": "m" * 200},
        notes=["The retention term is exactly zero at step 0."],
    )


@pytest.fixture(scope="module")
def browser(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(report, tmp_path_factory.mktemp("profile")) as page:
        yield page


COLOURS = "[...document.querySelectorAll('.tok')].map(t => t.style.backgroundColor)"


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    return width, height


def test_browser_draws_every_response_token(browser: Browser, tmp_path: Path) -> None:
    assert (
        browser.evaluate("document.querySelectorAll('.tok').length") == 12 * 79 + len(HOSTILE) - 1
    )
    last = browser.evaluate(
        "[...[...document.querySelectorAll('.text')].at(-1).querySelectorAll('.tok')]"
        ".map(t => t.textContent)"
    )
    assert last == [visible(token) for token in HOSTILE[1:]]
    assert browser.evaluate("document.title") == "Token values of <train>.jsonl"
    rows = browser.evaluate("document.querySelectorAll('#distributions tbody tr').length")
    assert rows == 7, "one a component"
    assert browser.evaluate("document.querySelectorAll('.tok.kept').length") > 0
    assert png_size(browser.screenshot(tmp_path / "wide.png")) == (1200, 900)


def test_browser_colours_follow_sign_size_and_component(browser: Browser) -> None:
    data = json.loads(browser.evaluate("document.getElementById('data').textContent"))
    before = browser.evaluate(COLOURS)
    values = [v for one in data["examples"] for v in one["values"]["total"]]
    for colour, value in zip(before, values, strict=True):
        red, _, blue = map(int, re.findall(r"\d+", colour))
        # Equal (white) only where the value is too small for one step of colour.
        assert (blue >= red) if value > 0 else (red >= blue), (colour, value)
        assert blue != red or abs(value) < 0.05, (colour, value)
    first = np.array(data["examples"][0]["values"]["total"])
    strongest = int(np.abs(first).argmax())
    assert before[strongest] in ("rgb(76, 154, 222)", "rgb(240, 150, 55)")
    browser.evaluate("document.getElementById('c-adaptation_causal').click()")
    after = browser.evaluate(COLOURS)
    assert sum(a != b for a, b in zip(before, after, strict=True)) > len(before) / 2
    assert "later positions" in browser.evaluate("document.getElementById('meaning').textContent")
    browser.evaluate("document.getElementById('c-total').click()")
    assert browser.evaluate(COLOURS) == before


def test_browser_text_keeps_contrast_on_every_colour(browser: Browser) -> None:
    """WCAG contrast of token text on its background, at least 4.5 everywhere."""

    def luminance(rgb: list[float]) -> float:
        parts = [c / 255 for c in rgb]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    ink = luminance([0x11, 0x11, 0x11])
    for colour in set(browser.evaluate(COLOURS)):
        background = luminance([float(c) for c in re.findall(r"\d+", colour)])
        assert (background + 0.05) / (ink + 0.05) > 4.5, colour


def test_browser_tooltip_by_mouse_and_keyboard(browser: Browser) -> None:
    place = browser.evaluate(
        "(() => { document.querySelector('.example').scrollIntoView();"
        " const box = document.querySelectorAll('.tok')[3].getClientRects()[0];"
        " return [box.left + 3, box.top + 3]; })()"
    )
    browser.move_to(*place)
    assert not browser.evaluate("document.getElementById('tip').hidden")
    text = browser.evaluate("document.getElementById('tip').textContent")
    assert "word4" in text
    assert "Adaptation, causal" in text
    browser.evaluate("document.querySelector('.tok').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        browser.press(key)
    label = browser.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label.strip().startswith("word2: ")
    assert label.endswith(("kept", "dropped"))
    browser.press("End")
    assert "word79" in browser.evaluate("document.activeElement.textContent")
    assert browser.evaluate(
        "[...document.querySelectorAll('.example')].every("
        "e => e.querySelectorAll('.tok[tabindex=\"0\"]').length === 1)"
    )
    browser.press("Escape")
    assert browser.evaluate("document.getElementById('tip').hidden")


def test_browser_narrow_screen_has_no_sideways_scroll(browser: Browser, tmp_path: Path) -> None:
    try:
        browser.needs_no_sideways_scroll(320, 390, 768)
        browser.resize(390, 800)
        assert png_size(browser.screenshot(tmp_path / "narrow.png")) == (390, 800)
    finally:
        browser.resize(1200, 900)


def test_browser_strikes_dropped_tokens_through(browser: Browser) -> None:
    line = "getComputedStyle(document.querySelector('.tok.{}')).textDecorationLine"
    assert browser.evaluate(line.format("dropped")) == "line-through"
    assert browser.evaluate(line.format("kept")) == "none"
    assert browser.evaluate(line.format("blank")) == "none"  # a line break alone


def test_the_top_of_a_page_says_what_was_valued() -> None:
    """Layers play no part where all parameters are valued, and neither does along a walk."""

    def tiles(**settings: object) -> dict[str, str]:
        shown = setting_tiles({"layers": "3", "parameters": "linears", **settings})
        return {meaning: text for text, meaning in shown}

    assert tiles(estimator="alphatoken") == {"estimator": "alphatoken", "layers scored": "3"}
    assert tiles(parameters="all", policy="top") == {
        "policy": "top",
        "parameters valued": "all",
    }
    assert tiles(estimator="walk") == {"estimator": "walk"}
    assert tiles(model_name_or_path="models/small")["model"] == "small"


def test_a_page_without_stability_shows_one_of_total_and_adaptation(tmp_path: Path) -> None:
    own = example(0, (" a", " b", " c"), seed=0)
    still = {k: np.zeros_like(v) if "stability" in k else v for k, v in own.values.items()}
    alone = replace(own, values={**still, "total": own.values["adaptation"]})
    page = write_report(tmp_path / "page.html", summarise([alone])).read_text("utf-8")
    assert 'id="c-total"' in page
    assert 'id="c-adaptation"' not in page
    assert 'id="c-adaptation_causal"' in page
    assert "not shown: Stability; Stability, direct; Stability, causal." in page
    assert 'id="c-adaptation"' in write_report(tmp_path / "both.html", summarise([own])).read_text(
        "utf-8"
    )


def test_browser_colours_stand_on_dim_paper_in_the_dark(browser: Browser, report: Path) -> None:
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    back = "getComputedStyle(document.querySelector('.example')).backgroundColor"
    assert browser.evaluate(back) == "rgb(255, 255, 255)"
    browser.send("Emulation.setEmulatedMedia", features=[dark])
    browser.open(report)
    try:
        assert browser.evaluate(back) == "rgb(213, 218, 222)"
        assert "rgb(255, 255, 255)" not in browser.evaluate(COLOURS)
        test_browser_text_keeps_contrast_on_every_colour(browser)
    finally:
        browser.send("Emulation.setEmulatedMedia", features=[])
        browser.open(report)
