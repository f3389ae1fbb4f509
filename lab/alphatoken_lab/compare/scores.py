"""Percentages of a model: lm-eval's tasks, executed code, answers that are judged.

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
from alphatoken_lab.compare.length_control import length_controlled_rate
from alphatoken_lab.compare.measures import OPPONENT, JudgeSet, Measures, Score
from alphatoken_lab.compare.opponents import Question, read_questions, stored_answers

__all__ = ["LENGTH_CONTROLLED", "JudgedSet", "Prepared", "prepare", "read_sets", "scores"]

LENGTH_CONTROLLED = "length-controlled"

Scores = dict[str, dict[str, Score]]
"""By group ("target", "retention") and name."""


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
    """What is asked of a model, read and checked.

    Attributes:
        tasks: lm-eval's, by group.
        problems: how many are executed.
        sets: whose answers are judged, by name.
    """

    tasks: Mapping[str, Any]
    problems: int
    sets: Mapping[str, JudgedSet]


def prepare(measures: Measures, *, allow_code: bool = False) -> Prepared:
    """Read all that is measured but the rows of losses.

    Raises:
        ConfigError, DataError: whatever cannot be measured, with what and why.
        UnsupportedError: code cannot be isolated on this machine.
    """
    problems = 0
    if measures.code_file is not None:
        from alphatoken_lab.compare.code_tasks import read_problems

        problems = len(read_problems(measures.code_file, allow=allow_code)[: measures.task_limit])
    sets = read_sets(measures)
    named = {"target": measures.target_tasks, "retention": measures.retention_tasks}
    asked = {group: names for group, names in named.items() if names}
    if not asked and measures.shots:
        raise ConfigError("shots are of lm-eval tasks, and there are none", got=str(measures.shots))
    return Prepared(_tasks(measures, asked) if asked else {}, problems, sets)


def _tasks(measures: Measures, asked: Mapping[str, Any]) -> dict[str, Any]:
    """lm-eval's tasks of each group."""
    from alphatoken_lab.compare.harness import load_tasks

    found = {
        group: load_tasks(names, include_path=measures.task_path, shots=measures.shots)
        for group, names in asked.items()
    }
    known = [name for tasks in found.values() for name in tasks.wanted]
    unknown = [name for name in measures.shots if name not in known]
    if unknown:
        raise ConfigError(
            "shots are of tasks that are not measured",
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
    allow_code: bool = False,
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
        allow_code: execute generated code, in a sandbox.
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
        )  # fmt: skip
        done()
    if measures.code_file is not None:
        from alphatoken_lab.compare.code_tasks import pass_at_1

        share = pass_at_1(
            model, tokenizer, measures.code_file,
            allow=allow_code,
            max_new_tokens=measures.max_new_tokens,
            limit=measures.task_limit,
            folder=folder,
        )  # fmt: skip
        how = {"shots": "0", "chat_template": False, "metric": "pass@1",
               "questions": prepared.problems}  # fmt: skip
        found[measures.code_of]["code"] = Score(share, how)
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
    """Win rate of greedy answers, and what it would be at equal length."""
    prompts = [question.text for question in one.questions]
    writing: dict[str, Any] = {"max_new_tokens": measures.max_new_tokens, "chat": measures.chat}
    ours = answers(model, tokenizer, prompts, **writing)
    theirs = one.stored or answers(start(), tokenizer, prompts, **writing)
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "answer": own, "other": other}
        for prompt, own, other in zip(prompts, ours, theirs, strict=True)
    ]
    place = None if folder is None else folder / f"answers-{name}.json"
    if place is not None:
        write_json(place, rows)  # a judge may fail, and answers take long
    won = preferences(one.judge, prompts, ours, theirs)
    if place is not None:
        write_json(place, [{**row, "won": won[i]} for i, row in enumerate(rows)])
    chat = measures.chat and getattr(tokenizer, "chat_template", None) is not None
    return Score(
        100.0 * fmean(won),
        {**one.how, "chat_template": chat, "metric": "win rate"},
        {LENGTH_CONTROLLED: length_controlled_rate(won, ours, theirs)},
    )
