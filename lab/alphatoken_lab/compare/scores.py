"""Percentages of a model: lm-eval's tasks, answers that are judged.

What can be wrong without a model is found by ``prepare``, before one is loaded or trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from alphatoken.errors import ConfigError
from alphatoken.support.storage import write_json
from alphatoken_lab.compare.generation import answers
from alphatoken_lab.compare.judge import Judge, make_judge, preferences
from alphatoken_lab.compare.measures import OPPONENT, JudgeSet, Measures, Score
from alphatoken_lab.compare.opponents import Question, read_questions, stored_answers

__all__ = ["JudgedSet", "Prepared", "prepare", "read_sets", "scores"]

Scores = dict[str, dict[str, Score]]
"""Scores by group ("target", "retention") and name."""


@dataclass(frozen=True)
class JudgedSet:
    """A judge set whose files are read.

    Attributes:
        questions: in the file's order.
        stored: the opponent's answers; None where the start model is to give them.
        judge: who decides.
        how: what a table says of it.
    """

    questions: tuple[Question, ...]
    stored: tuple[str, ...] | None
    judge: Judge
    how: Mapping[str, Any]


@dataclass(frozen=True)
class Prepared:
    """Questions for a model, read and checked.

    Attributes:
        tasks: lm-eval's, by group.
        sets: whose answers are judged, by name.
    """

    tasks: Mapping[str, Any]
    sets: Mapping[str, JudgedSet]


def prepare(measures: Measures, *, code_container: str | None = None) -> Prepared:
    """Read all that is measured but the rows of losses.

    Raises:
        ConfigError, DataError: whatever cannot be measured, with what and why.
    """
    sets = read_sets(measures)
    named = {"target": measures.target_tasks, "retention": measures.retention_tasks}
    asked = {group: names for group, names in named.items() if names}
    if not asked and measures.shots:
        raise ConfigError("shots are given, but no lm-eval task", got=str(measures.shots))
    return Prepared(_tasks(measures, asked, code_container) if asked else {}, sets)


def _tasks(
    measures: Measures, asked: Mapping[str, Any], code_container: str | None
) -> dict[str, Any]:
    """lm-eval's tasks of each group."""
    from alphatoken_lab.compare.harness import load_tasks

    found = {
        group: load_tasks(
            names,
            include_path=measures.task_path,
            shots=measures.shots,
            code_container=code_container,
        )
        for group, names in asked.items()
    }
    known = [name for tasks in found.values() for name in tasks.wanted]
    unknown = [name for name in measures.shots if name not in known]
    if unknown:
        raise ConfigError(
            "shots are given for tasks that are not measured",
            got=", ".join(unknown),
            remedy=f"one of {', '.join(known)}",
        )
    return found


def read_sets(measures: Measures) -> dict[str, JudgedSet]:
    """Questions, stored answers and judges of all sets.

    Raises:
        ConfigError: a judge that cannot be. DataError: files that do not belong together.
    """
    return {name: _read(one, measures) for name, one in measures.sets.items()}


def _read(one: JudgeSet, measures: Measures) -> JudgedSet:
    questions = read_questions(one.questions, measures.task_limit)
    own = one.opponent == OPPONENT
    stored = None if own else tuple(stored_answers(one.opponent, questions))
    settings = dict(one.judge or {})
    how = {
        "opponent": OPPONENT if own else Path(one.opponent).name,
        "judge": f"{settings.get('kind')} of {Path(str(settings.get('model', ''))).name}",
        "judge_prompt": Path(str(settings.get("prompt"))).name if settings.get("prompt") else None,
        "questions": len(questions),
    }
    return JudgedSet(tuple(questions), stored, make_judge(settings), how)


def scores(
    model: nn.Module,
    tokenizer: Any,
    measures: Measures,
    prepared: Prepared,
    start: Callable[[], nn.Module],
    *,
    folder: Path | None = None,
    done: Callable[[], None] = lambda: None,
) -> Scores:
    """All percentages of a model.

    Args:
        model: to be measured.
        tokenizer: of the model.
        measures: what is asked for.
        prepared: the same, read.
        start: the model before training.
        folder: where answers that were generated are written.
        done: called after each part.
    """
    found: Scores = {"target": {}, "retention": {}}
    for group, tasks in prepared.tasks.items():
        from alphatoken_lab.compare.harness import task_scores

        found[group] |= task_scores(
            model, tokenizer, tasks,
            limit=measures.task_limit,
            batch_size=measures.batch_size,
            chat=measures.task_chat,
            folder=folder,
        )  # fmt: skip
        done()
    for name, one in prepared.sets.items():
        found["target"][name] = _judged(name, one, model, tokenizer, measures, start, folder)
        done()
    return found


def _judged(
    name: str,
    one: JudgedSet,
    model: nn.Module,
    tokenizer: Any,
    measures: Measures,
    start: Callable[[], nn.Module],
    folder: Path | None,
) -> Score:
    """Win rate of greedy answers, which are written down as alpaca_eval annotates them."""
    prompts = [question.text for question in one.questions]
    writing: dict[str, Any] = {"max_new_tokens": measures.max_new_tokens, "chat": measures.chat}
    ours = answers(model, tokenizer, prompts, **writing)
    theirs = one.stored or answers(start(), tokenizer, prompts, **writing)
    rows: list[dict[str, Any]] = [
        {"index": i, "instruction": prompt, "output_1": other, "output_2": own,
         "generator_1": one.how["opponent"], "generator_2": "this model",
         "annotator": one.how["judge"]}
        for i, (prompt, own, other) in enumerate(zip(prompts, ours, theirs, strict=True))
    ]  # fmt: skip
    place = None if folder is None else folder / f"answers-{name}.json"
    if place is not None:
        write_json(place, rows)  # a judge may fail, and answers take long
    won = preferences(one.judge, prompts, ours, theirs)
    if place is not None:
        # There 1 is a win of the first answer, the opponent's, and 2 one of the second.
        write_json(place, [{**row, "preference": 1 + won[i]} for i, row in enumerate(rows)])
    chat = measures.chat and getattr(tokenizer, "chat_template", None) is not None
    return Score(100.0 * fmean(won), {**one.how, "chat_template": chat, "metric": "win rate"})
