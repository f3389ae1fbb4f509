"""All measures of one model: what can be wrong is read first, then the model is measured.

Losses are in nats, scores in percent. A model has either losses or scores as its target, and one of
them for retention; the overall figure is the mean of the two where they are of one kind.

A score that another program computes from exported answers is read from the folder of the answers:
``scores/NAME/**/leaderboard.csv`` of alpaca_eval, ``scores/**/results*.json`` of lm-eval. Answers
are exported to ``answers-NAME.json`` as ``alpaca_eval --model_outputs`` reads them.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from alphatoken.data import Fields, read_records
from alphatoken.errors import ConfigError, DataError, ModelError
from alphatoken.model.forward import evaluation_mode
from alphatoken.model.loading import Limits, limits_of
from alphatoken.support.progress import ProgressSink, Tracker
from alphatoken.support.storage import read_json, write_json
from alphatoken_lab.measure.losses import (
    Encoded,
    Rows,
    encode_files,
    read_files,
    row_losses,
    summary,
)
from alphatoken_lab.measure.measures import Measures

SCORES = "scores"
"""Folder, beside the answers, of what other programs say of them."""

_QUESTION = ("instruction", "prompt", "question", "turns")
"""Fields of AlpacaEval's, Arena-Hard's and MT-Bench's questions that hold the text."""


@dataclass(frozen=True)
class Prepared:
    """Everything that a model is measured on, read and checked.

    Attributes:
        rows: of files, whose losses are measured.
        tasks: lm-eval's by group, as :func:`alphatoken_lab.measure.tasks.load_tasks` gives them.
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
    measured = [name for one in tasks.values() for name in one]
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
    # Losses and scores have no mean, and neither has a part of which a score is still awaited.
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


# --- questions and answers ------------------------------------------------------------------------


def read_questions(path: str | Path, limit: int | None = None) -> list[str]:
    """Questions of a file; of several turns the first.

    Raises:
        DataError: the file cannot be read, has no rows, or a row has no question.
    """
    questions: list[str] = []
    for place, record in read_records(path):
        if limit is not None and len(questions) >= limit:
            break
        text = _question(record)
        if not text:
            raise DataError(
                "the row has no question",
                got=f"{place}: {', '.join(record)}",
                remedy=f"one of {', '.join(_QUESTION)}",
            )
        questions.append(text)
    if not questions:
        raise DataError("there are no questions", got=str(path))
    return questions


def _question(record: Mapping[str, Any]) -> str | None:
    value = next((record[name] for name in _QUESTION if name in record), None)
    value = value[0] if isinstance(value, list) and value else value
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) and value.strip() else None


def prompt_ids(tokenizer: Any, prompt: str, *, chat: bool = True) -> list[int]:
    """A prompt as the model reads it: in the chat template, or as plain text."""
    if chat and getattr(tokenizer, "chat_template", None) is not None:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(prompt)["input_ids"])


@torch.no_grad()
def answers(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 256,
    chat: bool = True,
) -> list[str]:
    """Greedy answers of the model to each prompt, up to its end token.

    A prompt that leaves no room is cut at its beginning.

    Raises:
        ModelError: the model cannot generate.
    """
    generate: Any = getattr(model, "generate", None)
    if generate is None:
        raise ModelError("the model cannot generate", got=type(model).__name__)
    device = next(model.parameters()).device
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    texts = []
    with evaluation_mode(model):
        for prompt in prompts:  # padding on the left would move the numbers of some models
            ids = prompt_ids(tokenizer, prompt, chat=chat)
            new = max_new_tokens if limit is None else min(max_new_tokens, limit - 1)
            ids = ids if limit is None else ids[-(limit - new) :]
            inputs = torch.tensor([ids], device=device)
            generated = generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id or 0,  # asked for, though nothing is padded
            )
            texts.append(tokenizer.decode(generated[0, len(ids) :], skip_special_tokens=True))
    return texts


def export_answers(
    path: Path, questions: Sequence[str], outputs: Sequence[str], generator: str
) -> None:
    """Write answers as alpaca_eval's ``--model_outputs`` and ``--reference_outputs`` hold them."""
    rows = [
        {"instruction": question, "output": output, "generator": generator}
        for question, output in zip(questions, outputs, strict=True)
    ]
    write_json(path, rows)


def win_rate(path: Path, generator: str) -> float:
    """Win rate in percent of a model's answers, of the leaderboard that alpaca_eval wrote.

    Raises:
        DataError: the file has no such model, or no win rate.
    """
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if generator in (next(iter(row.values())), row.get("name"), row.get("generator")):
                try:
                    return float(row["win_rate"])
                except (KeyError, ValueError):
                    break
    raise DataError(
        "the leaderboard has no win rate of these answers",
        got=f"{path}: {generator}",
        remedy="alpaca_eval --model_outputs with the answers-NAME.json of this folder",
    )
