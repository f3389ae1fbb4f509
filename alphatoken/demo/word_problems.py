"""Chats of our own about small sums, and the same spoilt on purpose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas")
THINGS = ("apples", "pens", "stamps", "marbles", "books", "coins", "shells", "cards")
_KINDS = (
    (
        "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
        "{name} starts with {a} {things}. After buying {b} more there are {a} + {b} = {sum} "
        "{things}. The answer is {sum}.",
    ),
    (
        "{name} puts {a} {things} into each of {b} boxes. How many {things} are in the boxes?",
        "Each box holds {a} {things}, and there are {b} boxes. Together that is {a} x {b} = "
        "{product} {things}. The answer is {product}.",
    ),
    (
        "{name} had {sum} {things} and gave {b} of them to {other}. How many are left?",
        "{name} gave away {b} of the {sum} {things}. What is left is {sum} - {b} = {a} {things}. "
        "The answer is {a}.",
    ),
)

Chat = dict[str, Any]


def chats(count: int, seed: int = 0) -> list[Chat]:
    """``count`` chats of question and answer, no two with one question."""
    draw, by_question = random.Random(seed), dict[str, Chat]()
    while len(by_question) < count:
        question, answer = draw.choice(_KINDS)
        a, b = draw.randint(3, 30), draw.randint(2, 12)
        name, other = draw.sample(NAMES, 2)
        words = {"name": name, "other": other, "things": draw.choice(THINGS), "a": a, "b": b}
        words |= {"sum": a + b, "product": a * b}
        turns = (("user", question), ("assistant", answer))
        messages = [{"role": role, "content": text.format(**words)} for role, text in turns]
        by_question.setdefault(messages[0]["content"], {"messages": messages})
    return list(by_question.values())


def with_wrong_words(rows: Sequence[Chat], share: float = 0.3, seed: int = 0) -> list[Chat]:
    """The same rows with a share of the words of each answer replaced by words of any answer."""
    draw = random.Random(seed)
    every = [word for row in rows for word in answer_of(row).split()]
    spoilt = []
    for row in rows:
        words = answer_of(row).split()
        for place in draw.sample(range(len(words)), round(share * len(words))):
            words[place] = draw.choice([word for word in every if word != words[place]])
        spoilt.append(_answered(row, " ".join(words)))
    return spoilt


def with_foreign_answers(rows: Sequence[Chat]) -> list[Chat]:
    """Each row with the answer of the next one."""
    return [
        _answered(row, answer_of(other))
        for row, other in zip(rows, [*rows[1:], *rows[:1]], strict=True)
    ]


def answer_of(row: Chat) -> str:
    """The text of its answer."""
    text: str = row["messages"][-1]["content"]
    return text


def _answered(row: Chat, text: str) -> Chat:
    return {"messages": [*row["messages"][:-1], {"role": "assistant", "content": text}]}
