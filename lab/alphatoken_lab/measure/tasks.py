"""lm-eval's tasks on a model in memory: of a local folder, offline, or of the hub.

A thin adapter: tasks, prompts and metrics are lm-eval's (``pip install 'alphatoken-lab[eval]'``).
How many examples stand before each question is, in this order: what ``shots`` says of the task,
what its own YAML file says, what the paper says of a task of this name (``PUBLISHED``), none. Tasks
that execute what a model writes, humaneval and mbpp, are answered here and scored elsewhere: the
answers are lm-eval's own cache of responses, which ``lm_eval --use_cache`` reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from alphatoken.errors import ConfigError, DataError
from alphatoken.model.forward import evaluation_mode
from alphatoken_lab.measure.measures import Measures

PUBLISHED = {"arc_challenge": 0, "hellaswag": 0, "mmlu": 5, "gsm8k": 5}
"""Shots of the paper's table of benchmarks, by lm-eval's names."""

CODE_ANSWERS = "code-answers"
"""Name, before ``_rank0.db``, of the cache that holds the answers to tasks that execute code."""

_METRICS = ("acc", "exact_match", "pass@1", "pass_at_1", "acc_norm", "f1", "bleu")
"""Of a task that names none: the first that it reports. ``acc`` is what the paper's tables hold."""


Tasks = Mapping[str, tuple[Any, Mapping[str, Any]]]
"""By name lm-eval's task, its data loaded and shots settled, and what a table says of its score:
``shots``, ``chat_template``, ``metric`` (None: the first that it reports), ``questions``, and
``scored_by`` where it executes what a model writes."""


def load_tasks(names: Sequence[str], measures: Measures) -> Tasks:
    """Find tasks, read their data and settle their shots, before any model is loaded.

    Args:
        names: of lm-eval, or ``name:metric``; instead of a name, the path of a YAML file.
        measures: with shots, limit, chat template and the folder of local tasks.

    Raises:
        ConfigError: lm-eval is not installed, no such task, or shots that it cannot have.
        DataError: a task's data cannot be read, as hub tasks without a network.
    """
    pairs = [(name, metric or None) for name, _, metric in (one.partition(":") for one in names)]
    wanted = measures.task_path, tuple(name for name, _ in pairs)
    _refuse(_unknown(*wanted))
    manager = _reader(*wanted)
    tasks: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    # The metric of such tasks runs an example of its own when it is read, and no model's code.
    os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    for word, metric in pairs:
        name, top, parts = _load(manager, word)
        if name in tasks:
            raise ConfigError("a task is named twice", got=name)
        shots = {_settle_shots(part, name, measures.shots.get(name)) for part in parts}
        counts = [len(list(part.eval_docs)) for part in parts]
        coded = any(getattr(part, "UNSAFE_CODE", False) for part in parts)
        how = {
            "shots": "/".join(map(str, sorted(shots))),
            "chat_template": measures.task_chat and not coded,
            "metric": metric,
            "questions": sum(min(n, measures.task_limit or n) for n in counts),
        }
        tasks[name] = top, {**how, "scored_by": "lm-eval"} if coded else how
    return tasks


def run_tasks(
    model: nn.Module, tokenizer: Any, tasks: Tasks, measures: Measures, folder: Path | None
) -> dict[str, Mapping[str, Any]]:
    """Score of each task in percent, under ``value``, with what it was measured with.

    A task that executes code has no value: its answers are exported.

    Args:
        model: a causal model of transformers.
        tokenizer: of the model.
        tasks: as ``load_tasks`` gives them.
        measures: with limit, batch size and chat template.
        folder: where answers to tasks that execute code are written; None: they are left out.

    Raises:
        ConfigError: a metric that a task does not report.
        DataError: lm-eval could not run them.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    def evaluate(coded: bool, **options: Any) -> Mapping[str, Any]:
        chosen = [task for task, how in tasks.values() if ("scored_by" in how) == coded]
        if not chosen:
            return {}
        results: Mapping[str, Any] = simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=measures.batch_size),
            tasks=chosen,
            limit=measures.task_limit,
            task_manager=_reader(measures.task_path, ()),  # all tasks are loaded
            bootstrap_iters=0,
            log_samples=False,
            **options,
        )["results"]
        return results

    chat = measures.task_chat
    try:
        with evaluation_mode(model):
            results = evaluate(False, apply_chat_template=chat, fewshot_as_multiturn=chat)
            if folder is not None:
                answers = str(folder / CODE_ANSWERS)
                evaluate(True, predict_only=True, confirm_run_unsafe_code=True, use_cache=answers)
    except (OSError, ConnectionError, ValueError) as error:
        raise _unusable("could not run the tasks", ", ".join(tasks), error) from error
    return {
        name: how if "scored_by" in how else {**how, **metric_of(name, how["metric"], results)}
        for name, (_, how) in tasks.items()
    }


def metric_of(
    name: str, metric: str | None, results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """``metric``, or the first known one, and its ``value`` in percent, of lm-eval's results.

    Raises:
        ConfigError: the task does not report it.
    """
    reported = {
        key: value
        for key, value in results.get(name, {}).items()
        if isinstance(value, (int, float)) and "stderr" not in key and "," in key
    }
    for wanted in (metric,) if metric else _METRICS:
        for key, value in reported.items():  # lm-eval writes "metric,filter"
            if wanted in (key, key.split(",")[0]):
                return {"metric": key.removesuffix(",none"), "value": 100.0 * float(value)}
    metrics = ", ".join(sorted(reported)) or "those that it reports"
    raise ConfigError(
        "the task does not report such a metric",
        got=f"{name}: {metric or 'none of the usual ones'}",
        remedy=f"{name}:METRIC with one of {metrics}",
    )


# --- finding them -------------------------------------------------------------------------------


def check_tasks(every: Iterable[Measures], *, required: bool = True) -> list[str]:
    """Look up every task in lm-eval's index, as a grid does before it trains: no data are read.

    Args:
        every: what models are measured by.
        required: refuse also where lm-eval is missing.

    Returns:
        Names that could not be looked up, since lm-eval is not installed.

    Raises:
        ConfigError: there are no such tasks; all of them are named.
    """
    named: dict[str | None, list[str]] = {}
    for measures in every:
        for tasks in measures.tasks.values():
            named.setdefault(measures.task_path, []).extend(t.partition(":")[0] for t in tasks)
    names = list(dict.fromkeys(name for some in named.values() for name in some))
    if names and not required and find_spec("lm_eval") is None:
        return names
    unknown = [name for folder, some in named.items() for name in _unknown(folder, tuple(some))]
    _refuse(unknown)
    return []


def _unknown(folder: str | None, names: tuple[str, ...]) -> list[str]:
    """Those that are no file, not in the folder of local ones and none of lm-eval's."""
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "tasks need lm-eval, which is not installed",
            remedy="pip install 'alphatoken-lab[eval]'",
        )
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError("task_path is no folder", got=folder)
    index = _reader(folder, names).all_tasks
    return [n for n in names if not (Path(n).is_file() if _is_file(n) else n in index)]


def _refuse(unknown: Sequence[str]) -> None:
    if unknown:
        raise ConfigError(
            "lm-eval knows no such task",
            got=", ".join(dict.fromkeys(unknown)),
            remedy="task_path: FOLDER with its YAML file, or the path of that file",
        )


@cache
def _reader(folder: str | None, names: tuple[str, ...]) -> Any:
    # To read lm-eval's own tasks takes long: they are left out where the folder has all of these.
    from lm_eval.tasks import TaskManager

    local = TaskManager(include_path=folder, include_defaults=False)
    if all(_is_file(name) or name in local.all_tasks for name in names):
        return local
    return TaskManager(include_path=folder)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _load(manager: Any, word: str) -> tuple[str, Any, list[Any]]:
    """A task or group: its name, lm-eval's object, and the tasks that it consists of."""
    try:
        loaded = manager.load([word])
    except Exception as error:  # data sets raise whatever their files and servers raise
        raise _unusable("could not read a task", word, error) from error
    tasks, groups = loaded["tasks"], loaded.get("groups", {})
    below = {child for names in loaded.get("group_map", {}).values() for child in names}
    tops = [name for name in (*groups, *tasks) if name not in below]
    if len(tops) != 1 or (not _is_file(word) and tops[0] != word):
        raise ConfigError("this names several tasks", got=word, remedy=f"some of {', '.join(tops)}")
    (name,) = tops
    return name, groups.get(name, tasks.get(name)), list(tasks.values())


def _unusable(what: str, names: str, error: BaseException) -> DataError:
    while error.__cause__ is not None:  # data sets say last that "an error occurred"
        error = error.__cause__
    text = " ".join(str(error).split())
    return DataError(
        f"lm-eval {what}",
        got=f"{names}: {type(error).__name__}: {text[:300]}",
        remedy="tasks of the hub need the network or its cache; local ones task_path",
    )


def _settle_shots(task: Any, name: str, wanted: int | None) -> int:
    """Give one task of lm-eval its number of shots (see the module), and return it."""
    own = task.config.num_fewshot
    if wanted and own == 0:
        raise ConfigError(
            "a task fixes its shots at 0",
            got=f"{name}: num_fewshot: 0 in its file, {wanted} asked for",
            why="lm-eval reads a 0 as: not to be changed, such as where shots are in the prompt",
            remedy=f"shots: {{{name}: 0}}, or a file without num_fewshot",
        )
    number = next((n for n in (wanted, own, PUBLISHED.get(name)) if n is not None), 0)
    config = task.config
    parts = [config.fewshot_split, *(getattr(config.fewshot_config, part, None)
                                     for part in ("samples", "split"))]  # fmt: skip
    # lm-eval leaves the question itself out where shots come from the rows that it asks.
    apart = task.has_validation_docs() and task.has_test_docs()
    if number and not (any(parts) or task.has_training_docs() or apart):
        raise ConfigError(
            "a task has no examples to show",
            got=f"{name}: {number} shots, and the questions themselves as the only rows",
            why="a question could be shown with its answer before it is asked",
            remedy=f"fewshot_split in its file, or shots: {{{name}: 0}}",
        )
    if own != number:
        task.set_config(key="num_fewshot", value=number)
    return int(number)
