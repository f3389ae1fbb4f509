"""Rows of the demo: short chats of our own, some of them spoiled on purpose, and trusted ones."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from alphatoken.demo.word_problems import Chat, chats, with_foreign_answers, with_wrong_words

WRONG_WORDS, FOREIGN = "wrong words", "another row's answer"
"""What is wrong with a row that was spoiled."""


@dataclass(frozen=True)
class DemoRows:
    """Rows as they are written, and which of them were spoiled.

    Attributes:
        train: rows to judge.
        trusted: rows that they are measured against; none of them is spoiled.
        spoiled: index of a row in ``train`` -> what was done to it.
    """

    train: list[Chat]
    trusted: list[Chat]
    spoiled: dict[int, str]

    def write(self, folder: Path) -> None:
        """``train.jsonl`` and ``validation.jsonl`` of the folder."""
        from alphatoken.support.storage import write_jsonl  # loads torch

        folder.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / "train.jsonl", self.train)
        write_jsonl(folder / "validation.jsonl", self.trusted)


def demo_rows(train: int, trusted: int, wrong_words: int, foreign: int, seed: int = 0) -> DemoRows:
    """Rows of which ``wrong_words`` and ``foreign`` are spoiled, at places drawn by the seed."""
    every = chats(train + trusted, seed)
    own = every[trusted:]
    places = random.Random(seed).sample(range(train), wrong_words + foreign)
    spoiled = {
        place: WRONG_WORDS if number < wrong_words else FOREIGN
        for number, place in enumerate(places)
    }
    for kind, spoil in ((WRONG_WORDS, with_wrong_words), (FOREIGN, with_foreign_answers)):
        of_kind = [place for place, what in spoiled.items() if what == kind]
        for place, row in zip(of_kind, spoil([own[place] for place in of_kind]), strict=True):
            own[place] = row
    return DemoRows(own, every[:trusted], spoiled)
