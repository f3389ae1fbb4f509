"""What ``alphatoken show`` marks: characters by the weights of their tokens, and truncated rows."""

from __future__ import annotations

import re
from functools import cache
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken.cli.marked_text import marked_text
from alphatoken.cli.show_run import _of_rows
from alphatoken.data import Example, Row, Turn
from alphatoken.support.token_texts import text_groups, token_texts
from tests.property.profiles import budget


@cache
def byte_tokenizer() -> Any:
    """One token a byte, as byte-level BPE has them before it merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


SHOWN = {
    "\n": "\u21b5\n", "\t": "\u21e5\t", "\x1b": "\u27e8U+001B\u27e9", "\u27e6": "\\\u27e6",
    "\u202e": "\u27e8U+202E\u27e9",
}  # fmt: skip
"""Characters that are not printed as they are."""
TEXTS = st.text(st.sampled_from(["a", " ", "\u00e9", "\u4e2d", "\U0001f99c", *SHOWN]), max_size=8)
WEIGHTS = st.lists(st.sampled_from([None, 0.0, 0.5, 1.0, 2.0, -1.0]), min_size=32, max_size=32)


@given(TEXTS, WEIGHTS)
@example("\U0001f99c", [None, 0.5, *[1.0] * 30])
def test_a_character_is_marked_by_all_its_tokens(text: str, weights: list[float | None]) -> None:
    """Trained if one of its bytes is, with the weights of its bytes, each named once.

    Proves: marks around trained text (exact), against a loop over characters and their bytes.
    """
    tokenizer, states, at = byte_tokenizer(), list[tuple[tuple[float, ...], str]](), 0
    ids = tokenizer(text)["input_ids"]
    for character in text:
        stop = at + len(character.encode())
        own: list[float] = []
        for weight in weights[at:stop]:
            if weight not in (None, 0.0) and weight not in own:
                own.append(weight)  # type: ignore[arg-type]
        states.append((tuple(own), SHOWN.get(character, character)))
        at = stop
    expected, coloured = "", ""
    for own_weights, span in groupby(states, key=lambda state: state[0]):
        words = "".join(letter for _, letter in span)
        numbers = "|".join(f"{weight:g}" for weight in own_weights)
        factor = f"\u00d7{numbers}" if numbers not in ("", "1") else ""
        expected += f"\u27e6{words}\u27e7{factor}" if own_weights else words
        coloured += words.replace("\\\u27e6", "\u27e6") + factor
    assert marked_text(tokenizer, ids, weights[: len(ids)], colour=False) == expected
    painted = marked_text(tokenizer, ids, weights[: len(ids)], colour=True)
    assert re.sub("\x1b\\[[0-9;]*m", "", painted) == coloured
    assert "\x1b[31m" not in painted


@given(TEXTS, st.integers(0, 3))
def test_tokens_of_a_character_are_one_group(text: str, missing: int) -> None:
    """Groups cover the tokens, a whole character each, and only a cut one has no text.

    Proves: groups of tokens (exact), against the bytes of the characters.
    """
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    ids = ids[: len(ids) - missing]
    groups, at = list(text_groups(tokenizer, ids)), 0
    expected: list[tuple[int, int, str | None]] = []
    for character in text:
        stop = at + len(character.encode())
        if at < len(ids):
            whole = stop <= len(ids)
            expected.append((at, min(stop, len(ids)), character if whole else None))
        at = stop
    assert groups == expected
    assert len(token_texts(tokenizer, ids)) == len(ids)


PLACES = st.lists(
    st.tuples(st.booleans(), st.sampled_from([0.0, 0.5, 1.0, 2.0])), min_size=1, max_size=8
)


@given(PLACES, st.one_of(st.none(), st.integers(1, 9)), st.sampled_from(["start", "end"]))
@example([(True, 1.0)] * 4, 3, "end")
@budget(20)
def test_what_truncation_leaves_of_a_row(
    places: list[tuple[bool, float]], limit: int | None, end: str
) -> None:
    """Tokens on one side of the limit, with the weights of those that have labels.

    Proves: tokens and weights after truncation (exact), against a loop over the tokens.
    """
    pytest.importorskip("trl")
    ids, (learned, weights) = [*range(len(places))], zip(*places, strict=True)
    labels = [token if own else -100 for token, own in zip(ids, learned, strict=True)]
    row = Row(4, "here", (Turn("user", "a"), Turn("assistant", "b")))
    args = SimpleNamespace(max_length=limit, truncation_mode=f"keep_{end}")
    reader = SimpleNamespace(arguments=SimpleNamespace(training=args))
    (own,) = _of_rows([Example(row, ids, labels, weights=list(weights))], reader)
    kept = list[int]()
    for token in ids if end == "start" else reversed(ids):
        if limit is None or len(kept) < limit:
            kept.append(token)
    kept.sort()
    assert (own.index, own.ids, own.cut) == (4, kept, len(ids) - len(kept))
    expected = [weights[t] if learned[t] and t != kept[0] else None for t in kept]
    assert own.weights == expected
    assert own.trained == [weight for weight in expected if weight not in (None, 0.0)]


RESPONSE = st.lists(st.integers(5, 6), min_size=1, max_size=4)
LIMIT = st.one_of(st.none(), st.integers(1, 5))


@given(RESPONSE, RESPONSE, RESPONSE, LIMIT, LIMIT, LIMIT, st.sampled_from(["start", "end"]))
@example([5, 6], [5, 5, 6], [5, 5, 5], 4, None, None, "start")
@example([5, 6], [5, 5, 6], [5, 5, 5], None, None, 2, "start")
def test_a_pair_is_compared_as_it_is_cut(
    prompt: list[int],
    chosen: list[int],
    rejected: list[int],
    both: int | None,
    before: int | None,
    after: int | None,
    end: str,
) -> None:
    """A pair is refused where both sides reach a batch with the same tokens and a response.

    Proves: pairs that are equal as they are cut (exact), against a batch of TRL's collator.
    """
    pytest.importorskip("trl")
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    from alphatoken.train.python_rows import cut_problem, pair_left

    args = SimpleNamespace(
        max_length=both,
        max_prompt_length=before,
        max_response_length=after,
        truncation_mode=f"keep_{end}",
    )
    pair = {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
    cut = {
        "prompt_ids": prompt[-(before or 9) :],
        "chosen_ids": chosen[: after or 9],
        "rejected_ids": rejected[: after or 9],
    }
    batch = DataCollatorForPreference(0, max_length=both, truncation_mode=f"keep_{end}")([cut])
    ids, mask = batch["input_ids"], batch["completion_mask"]
    equal = bool((ids[0] == ids[1]).all() and (mask[0] == mask[1]).all() and mask.any())
    assert (cut_problem(pair, pair_left(pair, args), args) is not None) == equal
