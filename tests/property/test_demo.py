"""The demo says of each row what was done to it, and where it stands."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from alphatoken.demo.__main__ import standings
from alphatoken.demo.rows import FOREIGN, WRONG_WORDS, demo_rows
from alphatoken.demo.word_problems import answer_of, chats
from alphatoken.score.values import LOSS, ScoredExample

SIZES = st.tuples(st.integers(6, 14), st.integers(0, 6), st.integers(1, 4), st.integers(2, 3))
"""Rows to judge, trusted ones, rows with wrong words, and rows with another row's answer."""
SEEDS = st.integers(0, 2**16)
NATS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 9)), min_size=1, max_size=4),
        st.integers(0, 2),
    ),
    min_size=2,
    max_size=8,
)
"""Value and loss of each response token of a row, and the tokens of its prompt."""


@given(SIZES, SEEDS)
def test_what_the_demo_calls_spoiled_is_spoiled_and_nothing_else(
    sizes: tuple[int, int, int, int], seed: int
) -> None:
    """Proves: demo_rows (exact), against the chats as they were written."""
    train, trusted, wrong, foreign = sizes
    rows, written = demo_rows(train, trusted, wrong, foreign, seed), chats(train + trusted, seed)
    assert rows.trusted == written[:trusted]
    assert len(rows.train) == train
    answers = [answer_of(row) for row in written[trusted:]]
    for place, (row, before) in enumerate(zip(rows.train, written[trusted:], strict=True)):
        assert row["messages"][:-1] == before["messages"][:-1]
        own, kind = answer_of(row), rows.spoiled.get(place)
        assert (own != answers[place]) == (kind is not None)
        if kind == FOREIGN:
            assert own in answers
        if kind == WRONG_WORDS:
            words, right = own.split(), answers[place].split()
            assert len(words) == len(right)
            assert 0 < sum(a != b for a, b in zip(words, right, strict=True)) < len(right)
    kinds = [*rows.spoiled.values()]
    assert (kinds.count(WRONG_WORDS), kinds.count(FOREIGN)) == (wrong, foreign)


@given(NATS, SEEDS)
def test_where_a_row_stands(nats: list[tuple[list[tuple[int, int]], int]], seed: int) -> None:
    """Means over response tokens, and the places by each: lowest values, highest losses first.

    Proves: standings (exact), against counts of rows that lie before.
    """
    scored, means = list[ScoredExample](), dict[int, tuple[float, float]]()
    order = np.random.default_rng(seed).permutation(len(nats)).tolist()
    for row, (tokens, prompt) in zip(order, nats, strict=True):
        labels, noise = [-100] * prompt + [1] * len(tokens), [7.0] * prompt
        # Nothing predicts the first token of a row.
        labels, noise = [-100, *labels], [7.0, *noise]
        columns = {
            key: np.array([*noise, *(float(one[side]) for one in tokens)])
            for side, key in enumerate(("total", LOSS))
        }
        kept = np.zeros(len(labels), bool)
        scored.append(ScoredExample(row, "", [], [3] * len(labels), labels, kept, columns))
        means[row] = (
            sum(value for value, _ in tokens) / len(tokens),
            sum(loss for _, loss in tokens) / len(tokens),
        )
    stands = standings(scored)
    assert {one.row for one in stands} == set(means)
    for place, one in enumerate(stands, start=1):
        value, loss = means[one.row]
        assert abs(one.value - value) + abs(one.loss - loss) < 1e-12
        assert one.by_value == place
        lower = sum(other < value for other, _ in means.values())
        higher = sum(other > loss for _, other in means.values())
        assert lower < one.by_value <= lower + sum(v == value for v, _ in means.values())
        assert higher < one.by_loss <= higher + sum(x == loss for _, x in means.values())
