"""All measures of one model: what can be wrong is read first, then the model is measured.

Losses are in nats, scores in percent. A model has either losses or scores as its target, and one of
them for retention; the overall figure is the mean of the two where they are of one kind.

A score that another program computes from exported answers is read from the folder of the answers:
``scores/NAME/**/leaderboard.csv`` of alpaca_eval, ``scores/**/results*.json`` of lm-eval.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from alphatoken.data import Fields
from alphatoken.errors import ConfigError
from alphatoken.model.loading import Limits, limits_of
from alphatoken.support.progress import ProgressSink, Tracker
from alphatoken.support.storage import read_json
from alphatoken_lab.measure.answers import answers, export_answers, read_questions, win_rate
from alphatoken_lab.measure.losses import (
    Encoded,
    Rows,
    encode_files,
    read_files,
    row_losses,
    summary,
)
from alphatoken_lab.measure.measures import Measures

__all__ = ["Prepared", "awaited_scores", "measure", "prepare", "require_template", "with_scores"]

SCORES = "scores"
"""Folder, beside the answers, of what other programs say of them."""


@dataclass(frozen=True)
class Prepared:
    """Everything that a model is measured on, read and checked.

    Attributes:
        rows: of files, whose losses are measured.
        tasks: lm-eval's by group, as :class:`alphatoken_lab.measure.tasks.Tasks`.
        questions: texts by the name of their set.
    """

    rows: Rows
    tasks: Mapping[str, Any]
    questions: Mapping[str, list[str]]


def prepare(measures: Measures, command: str, fields: Fields | None = None) -> Prepared:
    """Read rows, tasks and questions, without a model.

    Args:
        measures: what is asked for.
        command: "sft" or "dpo": what target rows are.
        fields: names of columns, where they are not among the known ones.

    Raises:
        ConfigError, DataError: whatever cannot be measured, with what and why.
    """
    rows = read_files(measures, command, fields)
    questions = {n: read_questions(p, measures.task_limit) for n, p in measures.questions.items()}
    tasks: dict[str, Any] = {}
    if measures.tasks:
        from alphatoken_lab.measure.tasks import load_tasks

        tasks = {group: load_tasks(names, measures) for group, names in measures.tasks.items()}
    measured = [name for one in tasks.values() for name in one.objects]
    unknown = [name for name in measures.shots if name not in measured]
    if unknown:
        raise ConfigError(
            "shots are given for tasks that are not measured",
            got=", ".join(unknown),
            remedy=f"one of {', '.join(measured)}",
        )
    return Prepared(rows, tasks, questions)


def require_template(tokenizer: Any, measures: Measures) -> None:
    """Refuse ``task_chat`` where there is no template.

    Raises:
        ConfigError: likewise.
    """
    if measures.task_chat and getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "task_chat asks for a chat template, and the tokenizer has none",
            got=str(getattr(tokenizer, "name_or_path", "")),
            remedy="leave task_chat out, or chat_template.jinja in the model's folder",
        )


def measure(
    model: nn.Module,
    tokenizer: Any,
    measures: Measures,
    prepared: Prepared,
    *,
    start: Callable[[], nn.Module],
    folder: Path,
    name: str,
    beta: float = 0.1,
    encoded: Encoded | None = None,
    progress: bool | ProgressSink | None = False,
) -> dict[str, Any]:
    """All figures of one model.

    Args:
        model: to be measured.
        tokenizer: of the model.
        measures: what is asked for.
        prepared: the same, read.
        start: loads the model before training, which pairs are compared with.
        folder: where answers are written; those of an earlier model go, and their scores.
        name: of the model, in the answers.
        beta: of DPO.
        encoded: the rows as tokens, where they were encoded before.
        progress: as of :class:`alphatoken.support.progress.Tracker`; counts parts.

    Returns:
        ``target``, ``retention``, ``overall``, ``unit`` ("loss": lower is better, or "score":
        percent), each figure under ``details``, under ``settings`` what each score was measured
        with (shots, chat template, ...), and under ``rows`` the loss of each row (pair), in the
        file's order, with its tokens: what paired intervals are made of.
    """
    require_template(tokenizer, measures)
    if encoded is None:
        limits = limits_of(model) if prepared.rows else Limits(None, None)
        encoded = encode_files(prepared.rows, measures, tokenizer, limits)
    before: Callable[[], nn.Module] = cache(start)
    done, parts = count(1), len(encoded) + len(prepared.tasks) + len(prepared.questions)
    tracker = Tracker("measured", parts, progress)
    # Answers of an earlier model, which lm-eval would read, and what was made of them.
    for earlier in folder.glob("code-answers_rank*.db"):
        earlier.unlink()
    shutil.rmtree(folder / SCORES, ignore_errors=True)
    result: dict[str, Any] = {"details": {}, "settings": {}, "rows": {}}
    for kind, rows in encoded.items():
        result["rows"][kind] = row_losses(model, rows, measures.batch_size, before, beta)
        for figure, value in summary(result["rows"][kind]).items():
            result["details"][f"{kind}_{figure}"] = value
        tracker.report(next(done))
    for group, tasks in prepared.tasks.items():
        from alphatoken_lab.measure.tasks import run_tasks

        for task, score in run_tasks(model, tokenizer, tasks, measures, folder).items():
            _add(result, f"{group}/{task}", score)
        tracker.report(next(done))
    for kind, questions in prepared.questions.items():
        texts = answers(
            model, tokenizer, questions, max_new_tokens=measures.max_new_tokens, chat=measures.chat
        )
        export_answers(folder / f"answers-{kind}.json", questions, texts, name)
        chat = measures.chat and getattr(tokenizer, "chat_template", None) is not None
        how = {"metric": "win rate", "chat_template": chat, "questions": len(questions)}
        _add(result, f"target/{kind}", {**how, "scored_by": "alpaca_eval", "generator": name})
        tracker.report(next(done))
    return with_scores(result, folder)


def _add(result: dict[str, Any], name: str, score: Mapping[str, Any]) -> None:
    """Put a score where it belongs: its value, if it has one, and what it was measured with."""
    how = dict(score)
    if "value" in how:
        result["details"][name] = how.pop("value")
    result["settings"][name] = how


def awaited_scores(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Scores by name that another program has still to compute."""
    return {n: how for n, how in result.get("settings", {}).items() if n not in result["details"]}


def with_scores(result: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The result with the scores that other programs left in its folder, and its means.

    Raises:
        ConfigError, DataError: a file there is not of these answers.
    """
    place = folder / SCORES
    full: dict[str, Any] = {
        **result, "details": dict(result["details"]), "settings": dict(result["settings"])
    }  # fmt: skip
    for name, how in awaited_scores(result).items():
        own = name.split("/", 1)[1]
        if how["scored_by"] == "alpaca_eval":
            boards = sorted(place.glob(f"{own}/**/leaderboard.csv"))
            if boards:
                _add(full, name, {**how, "value": win_rate(boards[-1], how["generator"])})
            continue
        from alphatoken_lab.measure.tasks import metric_of

        for path in sorted(place.rglob("results*.json")):
            scored = (read_json(path) or {}).get("results", {})
            if own in scored:
                _add(full, name, {**how, **metric_of(own, how["metric"], scored)})
    return {**full, **_means(full)}


def _means(result: Mapping[str, Any]) -> dict[str, Any]:
    """Target, retention and their mean; None where a part is still awaited."""
    means: dict[str, Any] = {}
    units = {}
    for group in ("target", "retention"):
        names = [name for name in result["settings"] if name.startswith(f"{group}/")]
        values = [result["details"].get(name) for name in names]
        loss = result["details"].get(f"{group}_loss")
        means[group] = loss if not names else None if None in values else fmean(values)
        units[group] = "score" if names else "loss"
    same = units["target"] == units["retention"] and None not in means.values()
    means["overall"] = fmean([means["target"], means["retention"]]) if same else None
    return {**means, "unit": units["target"], "retention_unit": units["retention"]}
