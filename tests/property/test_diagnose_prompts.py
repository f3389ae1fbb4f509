"""What a row's own prompt does for its response, against the oracle's losses of each row alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alphatoken.data import Example
from alphatoken.diagnose.prompts import exchanged, prompt_gains
from alphatoken.oracle.gradients import token_losses
from tests.property.test_diagnose_data import TRAIN, TRUSTED_ROWS, subject


def row(prompt: list[int], response: list[int]) -> Example:
    labels = [-100] * len(prompt) + response
    return Example(TRAIN[0].row, [*prompt, *response], labels)


TOKENS = st.lists(st.integers(1, 9), min_size=1, max_size=4)
ROWS = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6)


@given(ROWS, ROWS, st.integers(4, 8), st.integers(0, 9))
def test_each_row_gets_the_prompt_of_another(
    own: list[Any], others: list[Any], longest: int, seed: int
) -> None:
    """Its response stays, the prompt is one of the others' and not its own, and all of it fits.

    Proves: rows that are given other prompts (exact), against their tokens.
    """
    rows, trusted = [row(*one) for one in own], [row(*one) for one in others]
    made = exchanged(rows, trusted, longest, seed)
    assert made == exchanged(rows, trusted, longest, seed)
    # A start token alone is no prompt.
    prompts = [prompt for prompt, _ in others if len(prompt) > 1]
    for (prompt, response), one in zip(own, made, strict=True):
        fitting = [q for q in prompts if q != prompt and len(q) + len(response) <= longest]
        assert (one is None) == (len(prompt) < 2 or not fitting)
        if one is not None:
            count = len(one.input_ids) - len(response)
            assert one.input_ids[:count] in fitting
            assert one.input_ids[count:] == one.labels[count:] == response
            assert one.labels[:count] == [-100] * count


def test_prompts_are_drawn() -> None:
    """Each of the others' prompts comes about as often, whatever fits other rows.

    Proves: prompts that rows are given are drawn (exact), against counts.
    """
    others = [row([1, place], [5]) for place in (2, 3, 4)]
    rows = [row([1, 9], [5])] * 600
    made = [one.input_ids[1] for one in exchanged(rows, others, 3, 0) if one is not None]
    assert all(160 < made.count(place) < 240 for place in (2, 3, 4))
    first, _ = exchanged([row([7], [5]), row([1, 9], [6])], others, 3, 1)
    assert first is None


def test_the_gain_of_a_prompt_is_that_of_losses_row_by_row() -> None:
    """By forwards of each row alone, without padding; None where a row has no prompt.

    Proves: what a prompt does for its response (exact), against the oracle's token losses.
    """
    own = subject()
    plain = replace(TRAIN[1], labels=[*TRAIN[1].input_ids])
    rows = [*TRAIN[:5], plain]
    longest = max(len(one.input_ids) for one in [*rows, *TRUSTED_ROWS])

    def loss(one: Example) -> float:
        ids, labels = torch.tensor([one.input_ids]), torch.tensor([one.labels])
        losses = token_losses(own.adapter.forward({"input_ids": ids}), labels)
        return float(losses.sum() / (labels[:, 1:] != -100).sum())

    with torch.no_grad():
        losses = [loss(one) for one in rows]
        others = exchanged(rows, TRUSTED_ROWS, longest, own.seed)
        due = [
            None if one is None else loss(one) - o for one, o in zip(others, losses, strict=True)
        ]
    gains = prompt_gains(own, rows, losses, TRUSTED_ROWS, longest)
    assert gains == [None if one is None else pytest.approx(one, abs=1e-5) for one in due]
    assert gains[-1] is None
    assert None not in gains[:5]
    assert prompt_gains(own, [plain], [1.0], TRUSTED_ROWS, longest) == [None]
