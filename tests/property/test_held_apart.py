"""Rows of tokens beside rows that are measured: what repeats one goes, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken.cli.held_apart import apart_from
from alphatoken.data import Example, Row, Turn
from tests.property.profiles import budget

Parts = tuple[list[int], list[int]]
"""Tokens of a prompt and of a response."""

TOKENS = st.lists(st.integers(0, 1), max_size=3)
PARTS = st.lists(st.tuples(TOKENS, TOKENS.filter(bool)), min_size=1, max_size=4)
HELD = [([1, 0], [0]), ([0], [1])]
ROWS = [([1, 0], [1, 0]), ([1], [0, 1]), ([0], [0, 0]), ([0], [1]), ([1, 0, 1], [1]),
        ([1, 0], [1])]  # fmt: skip
"""Of a held prompt; with its tokens, some of them learned; of a start token alone; a whole row; of
a longer prompt; of a held prompt whose answer is learned whole."""
SKIPPED = [1, 0, 0, 0, 0, 0]
"""Response tokens of each row that have no label."""


def made(parts: Sequence[Parts], skipped: Sequence[int], name: str) -> list[Example]:
    """Rows whose texts are those of no other rows."""
    rows = []
    for number, (prompt, response) in enumerate(parts):
        ids = prompt + response
        first = len(prompt) + (skipped[number] if skipped else 0)
        labels = [-100 if place < first else token for place, token in enumerate(ids)]
        turns = (Turn("user", f"{name} {number}"), Turn("assistant", "yes"))
        row = Row(number, f"line {number}", turns)
        rows.append(Example(row, ids, labels, decoded=name == "tokens"))
    return rows


@given(PARTS, PARTS, st.lists(st.integers(0, 1), min_size=4, max_size=4), st.booleans())
@example(HELD, ROWS, SKIPPED, True)
@example(HELD, ROWS, SKIPPED, False)
@budget(20)
def test_rows_of_tokens_repeat_no_row_that_is_measured(
    held: list[Parts], parts: list[Parts], skipped: list[int], by_prompt: bool
) -> None:
    """By the tokens before the first label of a measured row, and by all.

    A row of texts begins with the prompts of others without being theirs: its own is compared.

    Proves: rows apart from those that are measured (exact), against loops over their tokens.
    """
    by = "prompt" if by_prompt else "conversation"
    measured, due = made(held, (), "held"), list[int]()
    rows = made(parts, skipped, "tokens")
    for number, row in enumerate(rows):
        unlearned = 0
        while unlearned < len(row.labels) and row.labels[unlearned] == -100:
            unlearned += 1
        same = any([*prompt, *response] == row.input_ids for prompt, response in held)
        for prompt, _ in held:
            if by_prompt and 2 <= len(prompt) <= unlearned:
                same |= all(a == b for a, b in zip(prompt, row.input_ids, strict=False))
        due += [] if same else [number]
    kept, left = apart_from(measured, rows, by)
    assert [one.row.index for one in kept] == due
    assert left == len(rows) - len(due)
    texts = made(parts, skipped, "texts")
    others = [row for row in texts if not _same_texts(held, row, by_prompt=by_prompt)]
    assert apart_from(measured, texts, by) == (others, len(texts) - len(others))
    both = [*others, *kept]
    assert apart_from(measured, [*texts, *rows], by) == (both, 2 * len(texts) - len(both))


def _same_texts(held: Sequence[Parts], row: Example, *, by_prompt: bool) -> bool:
    """True if a row of texts has the tokens of a held one, or just those of its prompt."""
    first = next((i for i, label in enumerate(row.labels) if label != -100), 0)
    own = row.input_ids[:first]
    return any(
        [*prompt, *response] == row.input_ids or (by_prompt and prompt == own and len(own) > 1)
        for prompt, response in held
    )
