"""Corpora of any size: rows from any place, the exact share of all values."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken import (
    ConfigError,
    DataError,
    InputError,
    NumericalError,
    ScorerConfig,
    select_top,
)
from alphatoken.config import ESTIMATORS, WALK
from alphatoken.data import Example, Fields, Row, encode_row, read_rows, row_of, split_pools
from alphatoken.data import source as sources
from alphatoken.data.named_rows import rows_but_named
from alphatoken.data.split import leak_keys
from alphatoken.data.survey import Survey
from alphatoken.score.job import Corpus, _options_in_force, draw_rows
from alphatoken.score.results import best_rows
from alphatoken.select.masks import keep_count, top_mask

NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, 5e-324, -5e-324, 1e-45, 2.0**-16, 3e38, -3e38]),
    st.integers(-3, 3).map(float),
    st.floats(-1e3, 1e3),
)


def lines(least: int = 1) -> st.SearchStrategy[list[Any]]:
    """Lines of a file: rows by prompt and response, blank ones, and bad ones."""
    row = st.tuples(st.integers(0, 6), st.integers(0, 2))
    twice = '{"prompt": "a", "prompt": "b", "response": "c"}'
    other = st.sampled_from(["", "  ", "\t", "{oops", "1", "é", b"\xfb\xfe", twice])
    return st.lists(st.one_of(row, other), min_size=least, max_size=40)


def _line(line: Any, *, good: bool) -> bytes:
    if isinstance(line, tuple):
        return json.dumps({"prompt": f"Number {line[0]}", "response": f"r{line[1]} é"}).encode()
    if good and line not in ("", "  ", "\t"):
        return b""
    return line if isinstance(line, bytes) else line.encode()


def _check_places(path: Path, lines: Sequence[Any], start: int, more: int) -> None:
    rows = [(n, line) for n, line in enumerate(lines, start=1) if _line(line, good=False).strip()]
    if not rows:
        return
    source = sources.source_of(json.loads(json.dumps(asdict(sources.find_source(path)))))
    assert source.rows == len(rows)
    rows_read = list(source.read(start, start + more))
    due = rows[start : start + more]
    assert [one.index for one in rows_read] == list(range(len(rows)))[start : start + more]
    assert [one.place for one in rows_read] == [f"rows.jsonl, line {n}" for n, _ in due]
    for one, (_, line) in zip(rows_read, due, strict=True):
        if isinstance(line, tuple):
            assert one.record == json.loads(_line(line, good=True))
        else:
            assert isinstance(one.record, DataError)


Said = tuple[str, str, int | None]
"""Of a turn of the assistant: its text, the mark that it carries, and the mark's value."""


class _Letters:
    """A tokenizer of one token a byte; a full stop ends a turn."""

    chat_template, eos_token, eos_token_id = None, ".", ord(".")

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return bytes(ids).decode()


_REMOVED = ("removed_same_as_validation", "removed_same_as_fisher")


def _rows_of(lines: Sequence[tuple[int, int]]) -> list[Row]:
    records = [json.loads(_line(line, good=True)) for line in lines]
    return [row_of(record, index, "held", Fields()) for index, record in enumerate(records)]


def _outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (ConfigError, DataError) as error:
        return type(error)


@given(
    st.lists(NUMBERS, min_size=1, max_size=60),
    st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.55, 0.9, 1.0]),
)
@example([1.0, 1.0, 1.0, 1.0], 0.5)
@example([-0.0, 0.0, -0.0, 0.0], 0.25)
def test_top_mask(values: Sequence[float], ratio: float) -> None:
    """The best share is that of ``select_top``, ties included.

    Proves: top mask (exact), against select_top.
    """
    whole = np.array(values)
    mask = torch.ones(1, len(whole), dtype=torch.bool)
    due = select_top(torch.from_numpy(whole)[None], mask, ratio)[0].numpy()
    assert np.array_equal(top_mask(whole, ratio), due), (values, ratio)


@given(
    st.lists(st.tuples(NUMBERS, st.integers(1, 9)), min_size=1, max_size=30),
    st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.9, 1.0]),
)
@example([(1.0, 3), (1.0, 3), (0.5, 1)], 0.5)
@example([(2.0, 1), (1.0, 9), (0.5, 1)], 0.25)
@example([(1.0, 9), (0.0, 1)], 0.1)
def test_best_rows(rows: Sequence[tuple[float, int]], ratio: float) -> None:
    """Rows are taken from the best down, of equals the first, up to the first that does not fit.

    Proves: best rows (exact), against a loop over the rows.
    """
    values, tokens = (np.array(column) for column in zip(*rows, strict=True))
    budget, due = keep_count(ratio, int(tokens.sum())), np.zeros(len(rows), bool)
    for place in sorted(range(len(rows)), key=lambda i: (-rows[i][0], i)):
        if rows[place][1] > budget and due.any():
            break
        budget -= rows[place][1]
        due[place] = True
    assert np.array_equal(best_rows(values, tokens, ratio), due), (rows, ratio)


def test_what_has_no_rank_is_refused() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(NumericalError, match="not finite"):
            top_mask(np.array([1.0, value]), 0.5)
    with pytest.raises(InputError, match="ratio"):
        top_mask(np.ones(3), 1.5)
    assert top_mask(np.ones(0), 0.5).shape == (0,)


@given(lines(), st.sampled_from([1, 2, 5, 256]), st.integers(0, 40), st.integers(0, 40))
def test_rows_from_any_place(lines: Sequence[Any], stride: int, start: int, more: int) -> None:
    """Rows of a JSONL file from any one on are those of the whole, bad ones in their places.

    Proves: rows from any place (exact), against the lines themselves.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(b"\n".join(_line(line, good=False) for line in lines))
        with mock.patch.object(sources, "STRIDE", stride):
            _check_places(path, lines, start, more)


def _left(path: Path, said: str | None, limit: int | None) -> tuple[list[int], int] | None:
    """Numbers of the rows that are not left out, and how many are; None if that is refused."""
    survey = Survey(path.name)
    try:
        rows = list(rows_but_named(sources.find_source(path), said, limit, survey))
    except InputError:
        return None
    return [row.number for row in rows], survey.left.total()


@given(
    lines(),
    st.lists(st.integers(0, 40), max_size=6),
    st.lists(st.integers(0, 45), max_size=1),
    st.one_of(st.none(), st.integers(1, 40)),
)
def test_rows_left_out_by_number(
    lines: Sequence[Any], picks: Sequence[int], others: Sequence[int], limit: int | None
) -> None:
    """Rows of a JSONL file but those of these lines; a line without a row, or all, is refused.

    Proves: rows left out by number (exact), against the lines themselves.
    """
    numbered = enumerate(lines, start=1)
    rows = [n for n, line in numbered if _line(line, good=False).strip()][:limit]
    if not rows:
        return
    first = [rows[pick % len(rows)] for pick in picks]
    named = {*first, *others}
    words = [f"{n}-{n + 1}" if n + 1 in named else str(n) for n in [*first, *others]]
    due = [n for n in rows if n not in named]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(b"\n".join(_line(line, good=False) for line in lines))
        found = _left(path, ",".join(words) or None, limit)
    refused = not due or not named <= {*rows}
    assert found == (None if refused else (due, len(named)))


def _tokens(example: Example) -> tuple[int, str, list[int], list[int]]:
    return example.row.index, example.row.place, example.input_ids, example.labels


@given(
    lines(),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=3),
    st.integers(0, 4),
    st.integers(0, 5),
    st.integers(1, 7),
)
def test_corpus(
    lines: Sequence[Any], fisher: Sequence[tuple[int, int]], drawn: int, seed: int, cut: int
) -> None:
    """Block by block a corpus keeps what splitting the whole list keeps, and draws the same.

    What the survey keeps of a row is what encoding it anew gives.

    Proves: corpus (exact), against split_pools on the whole list.
    """
    keys = frozenset(key for row in _rows_of(fisher) for key in leak_keys(row))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(b"\n".join(_line(line, good=True) for line in lines))

        def split() -> tuple[list[Row], list[Row], dict[str, int]]:
            rows = read_rows(path)
            pools = split_pools(rows, validation_rows=drawn, fisher_keys=keys, seed=seed)
            return pools.train, pools.validation, pools.counts

        def stream() -> tuple[list[Row], list[Row], dict[str, int]]:
            corpus = Corpus(sources.find_source(path), Fields(), _Letters(), fisher=keys)
            validation = draw_rows(corpus, drawn, seed)
            out = frozenset(row.index for row in validation)
            held_keys = frozenset(key for row in validation for key in leak_keys(row))
            corpus = replace(corpus, drawn=out, validation=held_keys)
            survey = corpus.survey()
            examples = []
            for first in range(0, corpus.source.rows, cut):
                block = list(corpus.examples(first, first + cut))
                kept = survey.examples(range(first, first + cut))
                assert list(map(_tokens, kept)) == list(map(_tokens, block))
                examples += block
            return [example.row for example in examples], validation, survey.counts

        due, streamed = _outcome(split), _outcome(stream)
    if isinstance(due, type):
        assert streamed is due
        return
    assert streamed[:2] == due[:2]
    for name in ("rows", "train", "drawn_validation", *_REMOVED):
        assert streamed[2][name] == due[2][name], name


@given(
    st.lists(
        st.tuples(
            st.text("abc", min_size=1, max_size=3),
            st.sampled_from(["weight", "train", "loss", "trainable"]),
            st.sampled_from([None, 0, 1]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.sampled_from(["prompt", "text", "conversations", "system", "tools"]), max_size=3),
)
def test_marked_turns(said: Sequence[Said], empty: Sequence[str]) -> None:
    """Labels are the turns that no mark forbids, whatever other columns are null.

    Proves: marked turns (exact), against the marks themselves.
    """
    messages = []
    for i, (text, mark, value) in enumerate(said):
        messages += [{"role": "user", "content": f"{i}?"},
                     {"role": "assistant", "content": text, mark: value}]  # fmt: skip
    row = _outcome(lambda: row_of({**dict.fromkeys(empty), "messages": messages}, 0, "here"))
    assert isinstance(row, Row), row
    ids, labels = encode_row(row, _Letters())
    assert len(ids) == len(labels)
    learned = bytes(label for label in labels if label != -100).decode()
    assert learned == "".join(f"{text}." for text, _, value in said if value in (None, 1))


# --- the settings of a run that is resumed --------------------------------------------------------

OTHERS: dict[str, Any] = {
    "objective": "adaptation", "part": "direct", "layers": "all", "window": 7,
    "stability_weight": 0.5, "parameters": "linears,experts", "uncovered": "skip",
    "derivative": "central", "walk_steps": 3, "walk_learning_rate": 1e-3, "walk_refresh": 2,
    "walk_form": "central",
}  # fmt: skip
"""Option of the values -> another value than its default."""


@pytest.mark.parametrize("estimator", [*ESTIMATORS, WALK])
def test_settings_have_every_option_that_values_depend_on(estimator: str) -> None:
    """One that the estimator takes at another value is another setting: no file mixes both.

    Proves: settings of a resumed run (exact), against the options that each estimator takes.
    """
    before, taken = _options_in_force(ScorerConfig(estimator)), set[str]()
    for name, value in OTHERS.items():
        try:
            config = ScorerConfig(estimator, **{name: value})
        except ConfigError:
            continue
        taken.add(name)
        if estimator != WALK or name != "layers":  # all that trains walks, whatever they are
            assert _options_in_force(config) == {**before, name: value} != before
    assert taken >= {"layers", "walk_form" if estimator == WALK else "parameters"}
