"""Questions of a judge set, and answers to them that were written before, by any model.

Stored answers come in three layouts, told apart by their fields:

    {"instruction": ..., "output": ...}                       AlpacaEval's model outputs
    {"uid": ..., "messages": [..., {"role": "assistant",      Arena-Hard's model answers
        "content": {"answer": ...}}]}
    {"question_id": ..., "choices": [{"turns": [{"content": ...}]}]}      the same, as v0.1 had them

An answer belongs to the question with the same ``uid`` (``question_id``), or else the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphatoken.data import read_records
from alphatoken.errors import DataError

__all__ = ["Question", "read_questions", "stored_answers"]

_ASKED = ("prompt", "instruction", "question", "turns")
_ANSWERED = ("output", "answer", "response")
_NUMBERED = ("uid", "question_id")


@dataclass(frozen=True)
class Question:
    """One question: its text, and the number by which its file knows it."""

    text: str
    uid: str | None = None


def read_questions(path: str | Path, limit: int | None = None) -> list[Question]:
    """Questions of a file; of several turns the first.

    Raises:
        DataError: the file cannot be read, has no rows, or a row asks nothing.
    """
    found: list[Question] = []
    for place, record in read_records(path):
        if limit is not None and len(found) >= limit:
            break
        text = _asked(record)
        if not text:
            raise DataError(
                "the row has no question",
                got=f"{place}: {', '.join(record)}",
                remedy=f"one of {', '.join(_ASKED)}",
            )
        found.append(Question(text, _uid(record)))
    if not found:
        raise DataError("there are no questions", got=str(path))
    return found


def stored_answers(path: str | Path, questions: Sequence[Question]) -> list[str]:
    """One stored answer to each question, in the questions' order; others are not needed.

    Raises:
        DataError: the file cannot be read, a row holds no answer, a question has none, or two that
            differ.
    """
    by_uid: dict[str, set[str]] = {}
    by_text: dict[str, set[str]] = {}
    for place, record in read_records(path):
        answer = _answered(record)
        text, uid = _asked(record), _uid(record)
        if answer is None or not (text or uid):
            raise DataError(
                "the row holds no stored answer",
                got=f"{place}: {', '.join(record)}",
                remedy="instruction and output (AlpacaEval), or uid and messages (Arena-Hard)",
            )
        for known, key in ((by_uid, uid), (by_text, text and text.strip())):
            if key is not None:
                known.setdefault(key, set()).add(answer)
    found = [_of(question, by_uid, by_text) for question in questions]
    missing = [one for one, answer in zip(questions, found, strict=True) if answer is None]
    if missing:
        raise DataError(
            "stored answers are to other questions",
            got=f"{path}: none to {len(missing)} of {len(questions)}, such as "
            f"{missing[0].text[:100]!r}",
            why="a win rate compares answers to the same questions",
            remedy="the answers that belong to the questions' file, or task_limit for fewer",
        )
    return [str(answer) for answer in found]


def _of(
    question: Question, by_uid: Mapping[str, set[str]], by_text: Mapping[str, set[str]]
) -> str | None:
    found = by_uid.get(question.uid or "") or by_text.get(question.text.strip(), set())
    if len(found) > 1:
        raise DataError("a question is answered twice", got=f"{question.text[:100]!r}")
    return next(iter(found), None)


def _uid(record: Mapping[str, Any]) -> str | None:
    found = next((record[name] for name in _NUMBERED if record.get(name) is not None), None)
    return None if found is None else str(found)


def _asked(record: Mapping[str, Any]) -> str | None:
    """The question's text; of a chat what its user says first."""
    value = next((record[name] for name in _ASKED if name in record), None)
    if value is None and isinstance(record.get("messages"), list):
        value = [m.get("content") for m in record["messages"] if m.get("role") == "user"]
    value = value[0] if isinstance(value, list) and value else value
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) and value.strip() else None


def _answered(record: Mapping[str, Any]) -> str | None:
    """The answer's text, in any of the layouts."""
    value: Any = next((record[name] for name in _ANSWERED if name in record), None)
    if value is None and isinstance(record.get("messages"), list):
        said = [m.get("content") for m in record["messages"] if m.get("role") == "assistant"]
        value = said[0] if said else None
    if value is None and record.get("choices"):
        try:
            value = record["choices"][0]["turns"][0]
        except (LookupError, TypeError):
            return None
    if isinstance(value, Mapping):
        value = value.get("answer", value.get("content"))
    return value if isinstance(value, str) else None
