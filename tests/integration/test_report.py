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
from typing import Any

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
from alphatoken.score.meaning import Meaning, meaning_of
from alphatoken.score.page import script_safe
from alphatoken.score.token_kinds import page_kinds
from alphatoken.score.value_page import MOST_TOKENS, row_histogram, shown_examples
from alphatoken.score.values import LOSS
from alphatoken.support.coloured import ColouredRows, ShownToken, full_scale
from alphatoken.support.token_texts import visible
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


def chat(
    row: int, prompt: tuple[str, ...], answer: tuple[str, ...], *totals: float
) -> ScoredExample:
    """A row whose answer has these values along a walk, and a loss of 1 before it."""
    size, zeros = len(prompt) + len(answer), [0.0] * len(prompt)
    values = np.array([*zeros, *totals])
    return ScoredExample(
        row=row,
        place=f"chats.jsonl, line {row + 1}",
        tokens=[*prompt, *answer],
        ids=list(range(size)),
        labels=[-100] * len(prompt) + list(range(len(answer))),
        kept=values > 0,
        values={"total": values, LOSS: np.array([*zeros, *(1.0 for _ in answer)])},
    )


PROMPT = ("<|im_start|>", "user", "\n", "Say", " it", "<|im_end|>", "<|im_start|>", "assistant\n")


def chats() -> list[ScoredExample]:
    """Nine rows of mean value -4, -3, ..., 4."""
    return [
        chat(row, PROMPT, ("It", " 5", ",", "\n", "<|im_end|>"), *(row - 4.0,) * 5)
        for row in range(9)
    ]


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
    rows = [one["row"] for one in several]
    assert rows == sorted(rows), "in the order of the file"
    assert rows[-1] > 590, "its end too"


def test_rows_of_either_end_and_the_kinds_of_all_tokens() -> None:
    """Each kind counts what its words and its place say; none of few rows is at both ends."""
    summary = summarise(chats())
    assert sorted(summary.row_means) == list(range(-4, 5))
    assert [mean for mean, _ in summary.lowest_rows] == [-4, -3, -2]
    assert [one.row for _, one in summary.highest_rows] == [8, 7, 6]
    due = {"number", "punctuation", "line break", "first token", "end"}
    assert summary.kinds == {kind: {"count": 9, "sum": 0.0, "negative": 4} for kind in due}
    few = summarise(chats()[:4])
    assert [mean for mean, _ in few.lowest_rows] == [-4, -3]
    assert [mean for mean, _ in few.highest_rows] == [-1, -2]
    one = chat(0, (), ("a", " cat", "<|im_end|>"), 1.0, 1.0, 1.0)
    assert page_kinds(one, lambda place: one.tokens[place]) == ["first token", "end"]
    ids = [[token] for token in one.ids]
    bare = replace(one, tokens=[])
    asked: list[list[int]] = []

    def texts(tokens: Any) -> list[str]:
        asked.append(list(tokens))
        return [one.tokens[token] for token in tokens]

    kinds = summarise([bare, bare, bare], texts=texts).kinds
    assert kinds["end"]["count"] == 3
    assert [own for own in asked if len(own) == 1] == ids[1:], "each token is written once"


def test_a_histogram_parts_the_signs_and_marks_the_trusted_rows() -> None:
    drawn = row_histogram([-3.0, -0.01, 0.02, 1.0, 1.0], [0.0, 2.0])
    assert drawn is not None
    assert (drawn["rows"], drawn["negative"]) == (5, 2)
    assert sum(count for count, _, side in drawn["bars"] if side == "minus") == 2
    assert sum(count for count, _, side in drawn["bars"] if side == "plus") == 3
    assert drawn["marks"][0] == drawn["zero"]
    assert drawn["low"] <= -3 < 2 <= drawn["high"]
    assert max(height for _, height, _ in drawn["bars"]) == 100
    assert drawn["beyond"] == 0
    far = row_histogram([-1.0, 0.0, 1.0], [9.0, 0.5])
    assert far is not None
    assert far["beyond"] == 1
    assert far["marks"][0] > far["marks"][1]
    assert 1 <= far["high"] < 1.6, "one far row does not press the others together"
    spread = [*np.linspace(-1, 1, 40).tolist(), 30.0]
    one = row_histogram(spread, [0.2, 40.0, 50.0])
    assert one is not None
    assert one["high"] < 5, "nor does one of the rows themselves"
    assert (one["outside"], one["beyond"]) == (1, 2)
    assert sum(count for count, *_ in one["bars"]) == 41
    assert [count for count, *_ in one["bars"] if count][-1] == 1
    assert row_histogram([]) is None
    flat = row_histogram([2.0, 2.0])
    assert flat is not None
    assert sum(count for count, _, _ in flat["bars"]) == 2


def test_a_colour_is_full_where_nearly_all_values_are_smaller() -> None:
    assert full_scale([*[0.001234] * 99, -50.0]) == 0.0013
    assert full_scale([*[0.0] * 99, 3.0]) == 3.0
    assert full_scale([0.0]) == 0.0


def test_a_terminal_and_a_page_of_the_same_rows_have_one_scale(tmp_path: Path) -> None:
    """Rows that stand at an end too count once; the size of full colour is the same number."""
    rows = [
        chat(n, PROMPT, ("It", " 5", "<|im_end|>"), *np.random.default_rng(n).normal(size=3))
        for n in range(7)
    ]
    page = write_report(tmp_path / "p.html", summarise(rows)).read_text("utf-8")
    data = json.loads(re.search(r'id="page-data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    tokens = [[ShownToken("a", float(v)) for v in one.values["total"][-3:]] for one in rows]
    assert data["scales"]["total"] == ColouredRows(tokens, "").full == full_scale(
        float(v) for one in rows for v in one.values["total"][-3:]
    )  # fmt: skip


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
    data = json.loads(re.search(r'id="page-data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert data["examples"][0]["tokens"] == [visible(token) for token in HOSTILE]
    assert script_safe("</script>\u2028") == '"\\u003c/script\\u003e\\u2028"'


def test_page_of_hundreds_of_sequences_stays_small(tmp_path: Path) -> None:
    summary = summarise(many(500, 120), sample=400)
    path = write_report(tmp_path / "r.html", summary)
    assert path.stat().st_size < 1_500_000
    assert f"of {summary.sequences} rows are shown" in path.read_text(encoding="utf-8")


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
    summary.lowest_rows, summary.highest_rows = [], []  # of which the other page is
    return write_report(
        tmp_path_factory.mktemp("report") / "report.html",
        summary,
        title="Token values of <train>.jsonl",
        selection=True,
        settings={"estimator": "alphatoken", "layers": 3, "model_name_or_path": "m" * 200},
        notes=["The retention term is exactly zero at step 0."],
    )


@pytest.fixture(scope="module")
def browser(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(report, tmp_path_factory.mktemp("profile")) as page:
        yield page


COLOURS = (
    "[...document.querySelectorAll('#examples .tok')].sort((a, b) => a.view - b.view)"
    ".map(t => getComputedStyle(t).backgroundColor)"
)


def channels(colour: str, paper: int = 255) -> tuple[float, ...]:
    """Red, green and blue of a computed colour on paper."""
    *rgb, alpha = [*map(float, re.findall(r"[0-9.]+", colour)), 1.0][:4]
    return tuple(alpha * own + (1 - alpha) * paper for own in rgb)


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
        "[...[...document.querySelectorAll('.example')].find(e => e.ariaLabel.endsWith('100'))"
        ".querySelectorAll('.tok')].map(t => t.textContent)"
    )
    assert last == [visible(token) for token in HOSTILE[1:]]
    assert browser.evaluate("document.title") == "Token values of <train>.jsonl"
    rows = browser.evaluate("document.querySelectorAll('#distributions tbody tr').length")
    assert rows == 7, "one a component"
    assert browser.evaluate("document.querySelectorAll('.tok.kept').length") > 0
    assert png_size(browser.screenshot(tmp_path / "wide.png")) == (1200, 900)


def test_browser_colours_follow_sign_size_and_component(browser: Browser) -> None:
    data = json.loads(browser.evaluate("document.getElementById('page-data').textContent"))
    before = browser.evaluate(COLOURS)
    values = [v for one in data["examples"] for v in one["values"]["total"]]
    for colour, value in zip(before, values, strict=True):
        red, _, blue = channels(colour)
        # Equal (white) only where the value is too small for one step of colour.
        assert (blue >= red) if value > 0 else (red >= blue), (colour, value)
        assert blue != red or abs(value) < 0.05, (colour, value)
    full = data["scales"]["total"]
    far = [colour for colour, value in zip(before, values, strict=True) if abs(value) >= full]
    assert 0 < len(far) < len(values) / 40, "one scale for all rows"
    assert {*far} == {"rgb(76, 154, 222)", "rgb(240, 150, 55)"}
    ends = browser.evaluate("document.querySelector('.bar .scale').textContent")
    assert f"\u2212{full:g} or less" in ends
    assert f"+{full:g} or more" in ends
    browser.evaluate("document.getElementById('by-row').click()")
    first = np.array(data["examples"][0]["values"]["total"])
    strongest = browser.evaluate(COLOURS)[int(np.abs(first).argmax())]
    assert strongest in ("rgb(76, 154, 222)", "rgb(240, 150, 55)")
    assert "highest" in browser.evaluate("document.querySelector('.bar .scale').textContent")
    browser.evaluate("document.getElementById('by-row').click()")
    assert browser.evaluate(COLOURS) == before
    browser.evaluate("document.getElementById('c-adaptation_causal').click()")
    after = browser.evaluate(COLOURS)
    assert sum(a != b for a, b in zip(before, after, strict=True)) > len(before) / 2
    assert "later positions" in browser.evaluate("document.getElementById('meaning').textContent")
    browser.evaluate("document.getElementById('c-total').click()")
    assert browser.evaluate(COLOURS) == before


def test_browser_text_keeps_contrast_on_every_colour(browser: Browser) -> None:
    """WCAG contrast of token text on its background, at least 4.5 everywhere."""
    for light, paper in (("light", (255, 255, 255)), ("dark", (20, 24, 29))):
        chosen = {"name": "prefers-color-scheme", "value": light}
        browser.send("Emulation.setEmulatedMedia", features=[chosen])
        try:
            back = browser.evaluate("getComputedStyle(document.body).backgroundColor")
            assert channels(back) == paper
            _require_contrast(browser, paper)
        finally:
            browser.send("Emulation.setEmulatedMedia", features=[])


def _require_contrast(browser: Browser, paper: tuple[int, ...]) -> None:
    def luminance(rgb: list[float]) -> float:
        parts = [c / 255 for c in rgb]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    letters = browser.evaluate("getComputedStyle(document.querySelector('.tok')).color")
    ink = luminance(list(channels(letters)))
    for colour in set(browser.evaluate(COLOURS)):
        mixed = [channels(colour, own)[n] for n, own in enumerate(paper)]
        darker, lighter = sorted((luminance(mixed), ink))
        assert (lighter + 0.05) / (darker + 0.05) > 4.5, colour


def test_browser_tooltip_by_mouse_and_keyboard(browser: Browser) -> None:
    place = browser.evaluate(
        "(() => { document.querySelector('.example').scrollIntoView();"
        " const box = [...document.querySelectorAll('.tok')].find(t => t.textContent === ' word4')"
        ".getClientRects()[0];"
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


def test_a_page_without_stability_shows_one_of_total_and_adaptation(tmp_path: Path) -> None:
    own = example(0, (" a", " b", " c"), seed=0)
    still = {k: np.zeros_like(v) if "stability" in k else v for k, v in own.values.items()}
    alone = replace(own, values={**still, "total": own.values["adaptation"]})
    page = write_report(tmp_path / "page.html", summarise([alone])).read_text("utf-8")
    assert "Rows of lowest and highest value</h2>" in page
    walked = write_report(tmp_path / "walk.html", summarise([alone]), meaning=WALK)
    assert "Which rows are odd</h2>" in walked.read_text("utf-8")
    assert 'id="c-total"' in page
    assert 'id="c-adaptation"' not in page
    assert 'id="c-adaptation_causal"' in page
    assert "not shown: Stability; Stability, direct; Stability, causal." in page
    assert 'id="c-adaptation"' in write_report(tmp_path / "both.html", summarise([own])).read_text(
        "utf-8"
    )


# --- the page of chats ----------------------------------------------------------------------------

WALK = Meaning("Blue: the loss falls.", "nats", after="after the walk")


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("walked")
    page = write_report(folder / "p.html", summarise(chats()), meaning=WALK, trusted=[2.0, 3.0])
    with opened(page, folder / "profile") as browser:
        yield browser


PLACES = (
    "[...document.querySelectorAll('#examples .example')].map(e => e.ariaLabel.split(' ').at(-1))"
)


def test_browser_shows_the_ends_first_and_sorts_the_rows(walked: Browser) -> None:
    ends = "[...document.querySelectorAll('#{} .example')].map(e => e.ariaLabel)"
    titles = walked.evaluate("[...document.querySelectorAll('.ends h3')].map(h => h.textContent)")
    assert titles == ["Lowest mean value", "Highest mean loss", "Highest mean value"]
    of_ends = {"lowest-mean-value": (1, 2, 3), "highest-mean-loss": (1, 2, 3)}
    for side, lines in (of_ends | {"highest-mean-value": (9, 8, 7)}).items():
        shown = walked.evaluate(ends.format(side))
        assert shown == [f"chats.jsonl, line {line}" for line in lines]
    assert walked.evaluate(PLACES) == [str(line) for line in range(1, 10)]
    walked.evaluate("document.getElementById('o-negative').click()")
    assert walked.evaluate(PLACES)[:4] == ["1", "2", "3", "4"], "all of their tokens are below 0"
    for column in ("row", "mean_loss"):  # equal losses stay in the order of the file
        walked.evaluate(f"document.getElementById('o-{column}').click()")
        assert walked.evaluate(PLACES) == [str(line) for line in range(1, 10)]
    said = walked.evaluate("document.querySelector('#lowest-mean-value h4').textContent")
    assert "mean \u22124.00 \u00b7 sum \u221220.0 \u00b7 loss 1.00 \u00b7 100% below zero" in said
    picture = walked.evaluate("document.querySelector('.bars').getAttribute('aria-label')")
    assert picture.startswith("From \u22124 to 4; rows from left to right: 1, 1, ")
    assert walked.evaluate("document.querySelectorAll('.axis i').length") == 2


def test_browser_begins_with_the_oddest_row_and_the_unit(walked: Browser) -> None:
    try:
        walked.begins_with("#lowest-mean-value .tok", ".scale")
        walked.begins_with("#highest-mean-loss .tok", widths=[1280])
        walked.resize(420, 900)
        box = "document.querySelector('#highest-mean-loss .tok').getBoundingClientRect()"
        assert walked.evaluate(f"{box}.bottom") < 1800, "within two screens"
    finally:
        walked.resize(1200, 900)


def test_browser_folds_prompts_to_a_line_without_its_template(walked: Browser) -> None:
    fold = "document.querySelector('#examples details.prompt')"
    assert walked.evaluate(f"{fold}.querySelector('summary').textContent") == "Say it"
    assert walked.evaluate(f"{fold}.open") is False
    whole = walked.evaluate(f"{fold}.querySelector('div').textContent")
    assert whole == "".join(map(visible, PROMPT))
    walked.evaluate(f"{fold}.querySelector('summary').click()")
    assert walked.evaluate(f"{fold}.open") is True


def test_browser_says_unit_rank_loss_and_probability(walked: Browser) -> None:
    walked.evaluate("document.querySelector('#highest-mean-value .tok').click()")
    told = walked.evaluate(
        "[...document.querySelectorAll('#tip tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert told == [
        ["value", "+4 nats"],
        ["rank", "above 89\u00a0% of the tokens"],
        ["before", "loss 1, probability 37\u00a0%"],
        ["after the walk", "loss \u22123, probability 100\u00a0%"],
    ]


def test_no_selection_is_shown_that_was_not_asked_for(walked: Browser, browser: Browser) -> None:
    marked = "document.querySelectorAll('.kept, .dropped, #selection').length"
    assert walked.evaluate(marked) == 0
    faded = "getComputedStyle(document.querySelector('.tok.dropped')).opacity"
    line = "getComputedStyle(document.querySelector('.tok.dropped')).textDecorationLine"
    assert browser.evaluate(faded) == "1"
    browser.evaluate("document.getElementById('selection').click()")
    assert browser.evaluate(faded) == "0.3"
    assert browser.evaluate(line) == "none"
    browser.evaluate("document.getElementById('selection').click()")


def test_browser_prints_on_white_from_the_dark(walked: Browser) -> None:
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    walked.send("Emulation.setEmulatedMedia", media="print", features=[dark])
    try:
        back = walked.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == "rgb(255, 255, 255)"
        assert "240, 150, 55" in walked.evaluate(COLOURS)[0]
    finally:
        walked.send("Emulation.setEmulatedMedia", media="", features=[])


def test_a_sentence_says_what_the_values_of_a_run_are() -> None:
    walk = {"estimator": "walk", "walk_steps": 24, "walk_learning_rate": None}
    said = meaning_of(walk, "the 8 trusted rows")
    assert "takes 24 AdamW steps of rate 5e-05 on the 8 trusted rows. Orange: it" in said.lead
    assert (said.unit, said.rate, said.after) == ("nats", None, "after the walk")
    assert meaning_of(walk | {"walk_form": "central"}, "").after == ""
    other = meaning_of(walk | {"reference": "there"}, "")
    assert "under the reference model" in other.lead
    exact = meaning_of({"estimator": "label", "parameters": "all"}, "the 8 trusted rows")
    assert "lowers the mean loss of the 8 trusted rows, by 5e-05 times the value" in exact.lead
    assert (exact.unit, exact.rate) == ("nats per unit of step", 5e-5)
    paper = {"estimator": "alphatoken", "layers": 3, "fisher_file": "f", "stability_weight": 1.5}
    both = meaning_of(paper, "the 8 trusted rows").lead
    assert "plus 1.5 times the penalty on drift" in both
    assert "The paper's estimator approximates this on the linears of the last 3 layers" in both
    alone = meaning_of(paper | {"objective": "stability"}, "").lead
    assert "lowers the penalty on drift from what the model was" in alone
