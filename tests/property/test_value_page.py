"""What the page of values says of rows and kinds of tokens, against loops over all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import fsum

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken.diagnose.diagnosis import BAD, GOOD, MARKS, graded
from alphatoken.diagnose.statistics import Estimate
from alphatoken.score import ScoredExample, summarise
from alphatoken.score.summary import end_places
from alphatoken.score.value_page import row_facts, row_histogram
from alphatoken.score.values import LOSS
from tests.property.profiles import budget

WORDS = {" a": "word", "b": "word", "7": "number", ",": "punctuation", "\n": "line break",
         " ": "space", "<|end|>": "other"}  # fmt: skip

VALUES = st.integers(-8, 8).map(lambda x: x / 4)  # sums of quarters are exact
ROWS = st.lists(
    st.lists(st.tuples(st.sampled_from([*WORDS]), VALUES, VALUES), min_size=1, max_size=6),
    min_size=1,
    max_size=12,
)

Tokens = Sequence[tuple[str, float, float]]


def scored(row: int, tokens: Tokens) -> ScoredExample:
    """A row of a prompt of one token and these response tokens: (text, value, loss)."""
    words, values, losses = zip(("ask", 9.0, 9.0), *tokens, strict=True)
    return ScoredExample(
        row=row,
        place=f"line {row}",
        tokens=words,
        ids=range(len(words)),
        labels=[-100, *range(1, len(words))],
        kept=np.zeros(len(words), bool),
        values={"total": np.array(values), LOSS: np.array(losses)},
    )


@given(ROWS)
@budget(4)
@example([[("b", 1.0, 0.0)] * 4, [("b", 2.0, 0.0)], [("b", -1.0, 0.0)] * 2])
@example([[("b", 1.0, 0.0)]] * 7)
@example([[("b", 0.0, 0.0)], [("b", -0.25, 0.0)]])  # once: 0 in a bar of negative rows
def test_the_rows_at_either_end(rows: Sequence[Tokens]) -> None:
    """Three rows of lowest and highest mean value and of highest loss, of equal ones the first.

    No row is at both ends of the value; one may be of highest loss as well.

    Proves: rows at the ends of a page (exact), against sorting all rows.
    """
    examples = [scored(n, tokens) for n, tokens in enumerate(rows)]
    means = [fsum(value for _, value, _ in tokens) / len(tokens) for tokens in rows]
    most = min(3, len(rows) // 2)
    summary = summarise(examples)
    for sign, ends in ((1, summary.lowest_rows), (-1, summary.highest_rows)):
        order = sorted(range(len(rows)), key=lambda n, sign=sign: (sign * means[n], n))
        assert [mean for mean, _ in ends] == pytest.approx([means[n] for n in order[:most]])
        assert [one.row for _, one in ends] == order[:most], "of equal rows the first"
    losses = [fsum(loss for *_, loss in tokens) / len(tokens) for tokens in rows]
    order = sorted(range(len(rows)), key=lambda n: (-losses[n], n))
    assert [one.row for _, one in summary.highest_losses] == order[:most]
    assert list(summary.row_losses) == pytest.approx(losses)
    at = end_places(np.array(means), np.array(losses), most)
    summed = (summary.lowest_rows, summary.highest_losses, summary.highest_rows)
    assert [*at] == ["lowest mean value", "highest mean loss", "highest mean value"]
    assert [*at.values()] == [[one.row for _, one in ends] for ends in summed]
    for one, tokens, mean in zip(examples, rows, means, strict=True):
        facts = row_facts(one)
        assert facts["mean"] == pytest.approx(mean)
        assert facts["negative"] == sum(value < 0 for _, value, _ in tokens) / len(tokens)
        assert facts["mean_loss"] == pytest.approx(fsum(x for *_, x in tokens) / len(tokens))
    drawn = row_histogram(means)
    assert drawn is not None
    below = sum(mean < 0 for mean in means)
    bars = {
        side: sum(n for n, _, own in drawn["bars"] if own == side) for side in ("minus", "plus")
    }
    assert bars == {"minus": below, "plus": len(rows) - below}


@given(ROWS)
@budget(4)
@example([[(" a", 1.0, 0.0), ("7", -1.0, 0.0), ("<|end|>", 0.5, 0.0)]])
@example([[("<|end|>", 1.0, 0.0)], [("7", 1.0, 0.0)], [("7", 1.0, 0.0), ("<|end|>", 2.0, 0.0)]])
def test_values_by_kind_of_token(rows: Sequence[Tokens]) -> None:
    """Each response token is of one kind: the first of an answer, its end, or what its text says.

    Proves: values by kind of token (exact), against a loop over the tokens.
    """
    due: dict[str, list[float]] = defaultdict(list)
    for tokens in rows:
        for place, (word, value, _) in enumerate(tokens):
            kind = WORDS[word]
            if place == len(tokens) - 1 and word == "<|end|>":
                kind = "end"
            elif place == 0:
                kind = "first token"
            due[kind].append(value)
    kinds = summarise(scored(n, tokens) for n, tokens in enumerate(rows)).kinds
    assert kinds == {
        kind: {
            "count": len(values),
            "sum": fsum(values),
            "negative": sum(value < 0 for value in values),
        }
        for kind, values in due.items()
    }


@given(st.lists(st.integers(-20, 20), min_size=3, max_size=3))
@budget(4)
@example([16, 16, 16])
@example([10, 10, 10])
@example([9, 9, 10])
def test_marks_are_of_whole_intervals(twentieths: Sequence[int]) -> None:
    """Good from 0.8 on, bad below 0.5, by the end of the interval that speaks against it.

    Proves: marks of diagnoses (exact), against the ends of the interval.
    """
    low, value, high = (number / 20 for number in sorted(twentieths))
    mark = graded(Estimate(value, low, high, 48))
    assert mark in MARKS
    assert (mark == GOOD) == (low >= 0.8)
    assert (mark == BAD) == (high < 0.5)
