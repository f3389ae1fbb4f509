"""Text in the colours of its values, and the table of them: each value stands at its own token."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from decimal import Decimal
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken.errors import ConfigError, InputError
from alphatoken.estimate.token_values import combine, undivided
from alphatoken.support.coloured import MINUS, PLUS
from alphatoken.support.terminal import painted
from alphatoken.values import TokenValues
from tests.property.test_shown_tokens import byte_tokenizer

LETTERS = ["a", " ", "<", "&", "'", "\n", "\x1b", "\u00e9", "\U0001f99c"]
SHOWN = {"\n": "\u21b5\n", "\x1b": "\u27e8U+001B\u27e9"}
ROWS = st.lists(
    st.tuples(
        st.text(st.sampled_from(LETTERS), max_size=6),  # prompt
        st.text(st.sampled_from(LETTERS), max_size=6),  # response
        st.integers(0, 2),  # padding on the left
    ),
    min_size=1,
    max_size=3,
)
"""Prompt, response and padding on the left of each row."""


def batch_of(rows: list[tuple[str, str, int]]) -> dict[str, Tensor]:
    """Rows of one token a byte, padded on the left as said, and on the right to one length."""
    encoded = [
        [byte_tokenizer()(text)["input_ids"] for text in (prompt, response)]
        for prompt, response, _ in rows
    ]
    length = max(left + len(a) + len(b) for (a, b), (*_, left) in zip(encoded, rows, strict=True))
    shape = len(rows), max(length, 1)
    ids, attention = torch.full(shape, 7), torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, -100)
    for row, ((prompt, response), (*_, left)) in enumerate(zip(encoded, rows, strict=True)):
        start, stop = left + len(prompt), left + len(prompt) + len(response)
        ids[row, left:stop] = torch.tensor([*prompt, *response], dtype=torch.long)
        attention[row, left:stop] = 1
        labels[row, start:stop] = ids[row, start:stop]
        labels[row, left : left + 1] = -100  # nothing predicts the first token
    return {"input_ids": ids, "attention_mask": attention, "labels": labels}


def values_of(batch: dict[str, Tensor], seed: int) -> TokenValues:
    """Values of a drawn size, and losses, as a walk has them."""
    mask = batch["labels"] != -100
    numbers = torch.Generator().manual_seed(seed)
    total, losses = (torch.randn(mask.shape, generator=numbers) for _ in range(2))
    total = (total * 10.0).masked_fill(~mask, 0.0)
    values = combine(undivided(total), None, mask=mask, estimator="walk")
    return replace(values, losses=losses * mask, input_ids=batch["input_ids"])


Expected = list[list[tuple[int, str, bool]]]


def expected(rows: list[tuple[str, str, int]]) -> Expected:
    """Index and text of each token of each row, and whether it has a value, byte by byte."""
    result = []
    for prompt, response, left in rows:
        own, at = list[tuple[int, str, bool]](), left
        for number, letter in enumerate(prompt + response):
            before = ["\u27e8\u2026\u27e9"] * (len(letter.encode()) - 1)
            for text in [*before, SHOWN.get(letter, letter)]:
                own.append((at, text, number >= len(prompt) and at > left))
                at += 1
        result.append(own)
    return result


class Spans(HTMLParser):
    """Tokens of a page: row, text, colour and value."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.row, self.tokens, self.texts = 0, list[tuple[int, str, str, float]](), list[str]()
        self._open = False
        self.tags: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        own = dict(attrs)
        self.row += "pre-wrap" in str(own.get("style"))
        self._open = "title" in own
        if self._open:
            value = float(str(own["title"]).split(",")[0])
            self.tokens.append((self.row - 1, "", str(own["style"]), value))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._open:
            row, text, style, value = self.tokens.pop()
            self.tokens.append((row, text + data, style, value))

    def handle_endtag(self, tag: str) -> None:
        self._open = False


def full_size(sizes: list[float]) -> float:
    """Between the two sizes about place 0.98 (n - 1) of the sorted ones, to two digits upwards."""
    ordered = sorted(sizes)
    place = 0.98 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    size = ordered[below] + (place - below) * (ordered[above] - ordered[below])
    least = Decimal(f"{size:.1e}")
    return float(
        least if least >= Decimal(size) else least + Decimal(1).scaleb(least.adjusted() - 1)
    )


SEEDS = st.integers(0, 2**16)
TWO_ROWS = [("a<", "<b>&'\n\U0001f99c", 2), ("", "a\u00e9a", 0)]


@given(ROWS, SEEDS)
@example(TWO_ROWS, 3)
def test_a_notebook_shows_each_value_at_its_token(
    rows: list[tuple[str, str, int]], seed: int
) -> None:
    """Text, row, sign and strength of the colour of every token with a value.

    Proves: TokenValues.show as HTML (exact), against a loop over rows, characters and bytes.
    """
    batch = batch_of(rows)
    values = values_of(batch, seed)
    shown = values.show(byte_tokenizer(), batch)
    html = shown._repr_html_()
    assert not re.search(r"<(?!/?(div|span)\b)|&(?!\w+;|#)", html)
    page = Spans(html)
    assert page.tags <= {"div", "span"}
    wanted = [(row, *one[:2]) for row, own in enumerate(expected(rows)) for one in own if one[2]]
    assert [one[:2] for one in page.tokens] == [(row, text) for row, _, text in wanted]
    totals = [float(values.total[row, index]) for row, index, _ in wanted]
    full = full_size([abs(one) for one in totals]) if totals else 0.0
    for total, (_, _, style, told) in zip(totals, page.tokens, strict=True):
        assert told == pytest.approx(total, rel=6e-3)
        *colour, opacity = (float(x) for x in re.findall(r"[\d.]+", style))
        assert tuple(colour) == (PLUS if total > 0 else MINUS)
        assert opacity == pytest.approx(0.65 * min(1.0, abs(total) / full) ** 0.5, abs=1e-3)
    if totals:
        assert f"{full:+.2g}" in page.texts
        assert f"{-full:+.2g}" in page.texts


@given(ROWS, SEEDS)
@example(TWO_ROWS, 3)
def test_a_terminal_shows_each_value_at_its_token(
    rows: list[tuple[str, str, int]], seed: int
) -> None:
    """Colours by sign, in two strengths; plain text has brackets and the value itself.

    Proves: TokenValues.show as text (exact), against a loop over rows, characters and bytes.
    """
    batch = batch_of(rows)
    values = values_of(batch, seed)
    shown = values.show(byte_tokenizer(), batch)
    sizes = values.total[values.mask].abs().tolist()
    full = full_size(sizes) if sizes else 0.0
    codes = {(2, True): "97;44", (2, False): "30;43", (1, True): "94", (1, False): "33"}
    for colour in (False, True):
        parts = [shown.text(colour=colour).split("\n")[0]]
        for row, own in enumerate(expected(rows)):
            body, prompt = "", ""
            for index, text, valued in own:
                total = float(values.total[row, index])
                level = (abs(total) >= full / 4) + (abs(total) >= full * 9 / 16)
                if not valued:
                    prompt += text.replace("\n", "")
                elif level and colour:
                    body += painted(text, codes[level, total > 0])
                else:
                    body += f"\u27e6{text}|{total:+.2g}\u27e7" if level else text
            dim = f"\x1b[2m{prompt}\x1b[0m" if colour and prompt else prompt
            numbers = values.total[row][values.mask[row]].tolist()
            heading = f"row {row + 1}: no values"
            if numbers:
                sums = f"mean {sum(numbers) / len(numbers):+.3g}, sum {sum(numbers):+.3g}"
                heading = f"row {row + 1}: {len(numbers)} values, {sums}"
            parts += ["", heading, (dim + body).rstrip("\n")]
        assert shown.text(colour=colour) == "\n".join(parts)


def test_a_long_prompt_loses_its_middle() -> None:
    """Both ends stay, on one line; what has a value is shown whole."""
    batch = batch_of([("b" * 50 + "\n" + "c" * 90, "a" * 100, 0)])
    text = values_of(batch, 0).show(byte_tokenizer(), batch).text(colour=True)
    assert f"\x1b[2m{'b' * 16} \u2026 {'c' * 80}\x1b[0m" in text
    assert text.count("a") == 100 + text.split("\n")[0].count("a") + text.split("\n")[2].count("a")


def test_colours_follow_the_terminal_and_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    batch = batch_of(TWO_ROWS)
    shown = values_of(batch, 0).show(byte_tokenizer(), batch)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert str(shown) == repr(shown) == shown.text(colour=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert str(shown) == shown.text(colour=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b" not in str(shown)


def test_values_of_zero_have_no_colour() -> None:
    batch = batch_of([("a", "aa", 0)])
    values = values_of(batch, 0)
    shown = replace(values, total=values.total * 0).show(byte_tokenizer(), batch)
    assert shown.full == 0.0
    assert "\u27e6a" not in shown.text(colour=False)
    assert {style.split(",")[-1] for *_, style, _ in Spans(shown._repr_html_()).tokens} == {
        "0.000)"
    }


@given(ROWS, SEEDS, st.booleans())
@example(TWO_ROWS, 3, True)
def test_a_table_has_one_line_a_response_token(
    rows: list[tuple[str, str, int]], seed: int, components: bool
) -> None:
    """Row, position, token, text and numbers of each, in the order of the batch.

    Proves: TokenValues.to_pandas (exact), against a loop over rows, characters and bytes.
    """
    pytest.importorskip("pandas", reason="pandas is not installed")
    batch = batch_of(rows)
    values = values_of(batch, seed)
    if not components:
        values = values.total_alone()
    table = values.to_pandas(byte_tokenizer())
    lines = table.to_dict("records")
    wanted = [(row, *one[:2]) for row, own in enumerate(expected(rows)) for one in own if one[2]]
    assert len(lines) == len(wanted)
    for line, (row, position, text) in zip(lines, wanted, strict=True):
        shown = {"\n": "\u21b5\n", "\x1b": "\u27e8U+001B\u27e9"}.get(line.pop("token"), text)
        assert shown == text
        numbers = {"value": values.total[row, position], "loss": values.losses[row, position]}
        if components:
            numbers |= {"adaptation": values.total[row, position], "stability": torch.zeros(())}
        ids = {"token_id": int(batch["input_ids"][row, position])}
        assert line == {"row": row, "position": position, **ids} | {
            name: float(number) for name, number in numbers.items()
        }
    assert "token" not in values.to_pandas()


def test_a_batch_of_other_tokens_is_refused() -> None:
    """Each would show a value at a token that it is not of."""
    batch = batch_of(TWO_ROWS)
    values = values_of(batch, 0)
    tokenizer, ids = byte_tokenizer(), batch["input_ids"]
    other = ids.clone()
    other[0, 4] += 1
    unlabelled = batch["labels"].clone()
    unlabelled[1, 1] = -100
    for wrong, message in (
        ({"input_ids": ids[:, 1:]}, r"another form.*input_ids \(2, \d+\), values \(2, \d+\)"),
        ({"input_ids": ids[:1]}, "another form"),
        ({"input_ids": None}, "input_ids NoneType"),
        ({"input_ids": other}, "row 0, token 4"),
        ({"labels": unlabelled}, "row 1, token 1"),
    ):
        with pytest.raises(InputError, match=f"(?s){message}"):
            values.show(tokenizer, {**batch, **wrong})
    unknown = replace(values, input_ids=None)
    assert str(unknown.show(tokenizer, batch)) == str(values.show(tokenizer, batch))
    pytest.importorskip("pandas", reason="pandas is not installed")
    assert "token_id" not in unknown.to_pandas()
    with pytest.raises(ConfigError, match="do not hold the tokens"):
        unknown.to_pandas(tokenizer)


def test_a_table_without_pandas_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="needs pandas.*pip install pandas"):
        values_of(batch_of(TWO_ROWS), 0).to_pandas()
