"""Planted facts: which of the rows that were trained on does a value bring up for a question?

Forty people who do not exist have five facts each, a sentence a fact. A model is trained on all
200; then the values of all rows are taken against one question with its answer. The right row is
one of five that name the person.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.standings.runs import Setting, encoded
from benchmarks.standings.values import VALUES

PEOPLE, LENGTH = 40, 96

_SYLLABLES = ("ba", "do", "fe", "gi", "ku", "la", "mo", "ne", "pi", "ra", "so", "ta", "vi", "zu")
_KINDS = {
    "lives in": ("Where does {} live?", "the hills,the harbour,a tower,an old mill,a boat"),
    "keeps": ("What does {} keep?", "bees,goats,a parrot,two horses,rabbits,a snake"),
    "sells": ("What does {} sell?", "bread,hats,old maps,lamps,flowers,clocks"),
    "plays": ("What does {} play?", "the drum,the flute,chess,the violin,cards"),
    "fears": ("What does {} fear?", "thunder,the dark,deep water,spiders,heights"),
}


@dataclass(frozen=True)
class Fact:
    """A sentence, and the question that asks for it."""

    person: str
    sentence: str
    question: str
    answer: str


def facts(seed: int = 0) -> list[Fact]:
    """All of them; a person's stand beside each other."""
    draw = random.Random(f"facts {seed}")
    names: dict[str, None] = {}
    while len(names) < PEOPLE:
        names["".join(draw.choices(_SYLLABLES, k=3)).capitalize()] = None
    sentences = []
    for name in names:
        for verb, (question, answers) in _KINDS.items():
            answer = draw.choice(answers.split(","))
            sentences.append(Fact(name, f"{name} {verb} {answer}.", question.format(name), answer))
    return sentences


def taught(model: Any, tokenizer: Any, people: Sequence[Fact], rate: float, steps: int) -> Setting:
    """The setting of the 200 rows, and of a model that was trained on them."""
    pairs = [(f"Who is {f.person}?", f.sentence) for f in people]
    rows = encoded(pairs, tokenizer, max_length=LENGTH)
    own = Setting(copy.deepcopy(model), rows, rows[:1], rows[:1], steps, 8, rate)
    own.stepped(own.model.train(), own.order(0), own.rates())
    return own


def with_question(own: Setting, tokenizer: Any, fact: Fact) -> Setting:
    """J is the loss of the answer to this question."""
    pair = fact.question, fact.answer
    return replace(own, validation=encoded([pair], tokenizer, max_length=LENGTH))


def places(own: Setting, number: int, names: Sequence[str]) -> dict[str, int]:
    """Place, from 1, to which each value brings up this row by the sum of its tokens' values."""
    return {name: _place(np.bincount(own.row_of, VALUES[name](own)), number) for name in names}


def shared_words(people: Sequence[Fact], number: int) -> int:
    """The place by words in common with question and answer, the rarer the more they count."""
    texts = [set(f.sentence.strip(".").split()) for f in people]
    wanted = set(f"{people[number].question[:-1]} {people[number].answer}".split())
    weight = {w: np.log(len(texts) / sum(w in text for text in texts)) for w in set().union(*texts)}
    return _place(np.array([sum(weight[w] for w in text & wanted) for text in texts]), number)


def _place(scores: NDArray[Any], number: int) -> int:
    """Ties count against it."""
    return int((scores >= scores[number]).sum())
