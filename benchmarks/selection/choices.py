"""Multiple choice by likelihood: which choice a model finds likeliest, from the losses of all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.selection.paired import Each

__all__ = ["answered", "read_questions"]

Question = Mapping[str, Any]
"""``benchmark``, ``gold`` (place of the right choice) and ``letters`` of each choice."""


def read_questions(rows: Path) -> list[Question]:
    """As ``rows.write_rows`` has left them."""
    text = (rows / "choices-questions.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def answered(losses: Each, questions: Sequence[Question]) -> dict[str, Each]:
    """By benchmark, of each question: 100 where it is answered rightly, 0 where not.

    Taken is the choice whose log-probability for each letter is the highest, as lm-eval's
    ``acc_norm`` does with bytes:

        argmax_c  - n_c l_c / letters_c

    Args:
        losses: of all choices, question by question: mean losses l and tokens n.
        questions: in the same order.

    Raises:
        ValueError: there are not as many losses as choices.
    """
    sizes = [len(question["letters"]) for question in questions]
    if sum(sizes) != len(losses["loss"]):
        raise ValueError(f"{len(losses['loss'])} losses for {sum(sizes)} choices")
    found: dict[str, dict[str, list[float]]] = {}
    at = 0
    for question, size in zip(questions, sizes, strict=True):
        own = slice(at, at + size)
        parts = zip(losses["loss"][own], losses["tokens"][own], question["letters"], strict=True)
        costs = [loss * tokens / letters for loss, tokens, letters in parts]
        right = costs.index(min(costs)) == question["gold"]
        into = found.setdefault(question["benchmark"], {"loss": [], "tokens": []})
        into["loss"].append(100.0 * right)
        into["tokens"].append(1.0)
        at += size
    return dict(found)
