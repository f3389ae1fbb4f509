"""lm-eval's tasks on a model in memory: of a local folder, offline, or of the hub.

A thin adapter: tasks, prompts and metrics are lm-eval's (``pip install 'alphatoken-lab[eval]'``).
How many examples stand before each question is, in this order: what ``shots`` says of the task,
what its own YAML file says, what the paper says of a task of this name (``PUBLISHED``), none. Tasks
that execute what a model writes, humaneval and mbpp, are scored in a container (``code_tasks``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from alphatoken.errors import ConfigError, DataError
from alphatoken.model.modes import evaluation_mode
from alphatoken_lab.compare.code_tasks import given_answers, require_container, score_in_container
from alphatoken_lab.compare.measures import Measures, Score

__all__ = ["PUBLISHED", "Tasks", "check_tasks", "load_tasks", "settle_shots", "task_scores"]

PUBLISHED = {"arc_challenge": 0, "hellaswag": 0, "mmlu": 5, "gsm8k": 5}
"""Shots of the paper's table of benchmarks, by lm-eval's names."""

_METRICS = (
    "acc", "exact_match", "pass@1", "pass_at_1", "acc_norm", "f1", "bleu",
)  # fmt: skip
"""Of a task that names none: the first that it reports. ``acc`` is what the paper's tables hold."""


@dataclass(frozen=True)
class Tasks:
    """Tasks of lm-eval that exist and whose data were loaded.

    Attributes:
        wanted: metric of each task that was asked for; None for the first that it reports.
        objects: lm-eval's own, with their number of shots.
        shots: of each task; of a group's parts, which may differ, all of them.
        questions: how many each task asks.
        manager: of lm-eval.
        coded: names of those that execute what a model writes.
        container: image in which they do.
        path: folder of local tasks.
    """

    wanted: Mapping[str, str | None]
    objects: Sequence[Any]
    shots: Mapping[str, tuple[int, ...]]
    questions: Mapping[str, tuple[int, ...]]
    manager: Any
    coded: tuple[str, ...] = ()
    container: str | None = None
    path: str | None = None


def load_tasks(
    tasks: Sequence[str],
    *,
    include_path: str | None = None,
    shots: Mapping[str, int] | None = None,
    code_container: str | None = None,
) -> Tasks:
    """Find tasks, read their data and settle their shots, before any model is loaded.

    Args:
        tasks: names of lm-eval, or ``name:metric``; instead of a name, the path of a YAML file.
        include_path: folder with YAML files of local tasks.
        shots: by name of the task; of others nothing is done.
        code_container: image in which generated code is executed.

    Raises:
        ConfigError: lm-eval is not installed, no such task, shots that it cannot have, or one that
            executes code and no container.
        DataError: a task's data cannot be read, as hub tasks without a network.
    """
    _require_installed()
    pairs = [(name, metric or None) for name, _, metric in (one.partition(":") for one in tasks)]
    names = [name for name, _ in pairs]
    _refuse(_unknown(names, include_path))
    manager = _manager(include_path, names)
    wanted: dict[str, str | None] = {}
    objects, said, asked, coded = [], {}, {}, []
    # The metric of such tasks runs an example of its own when it is read, and no model's code.
    os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    for given, metric in pairs:
        name, top, parts = _load(manager, given)
        if name in wanted:
            raise ConfigError("a task is named twice", got=name)
        wanted[name] = metric
        objects.append(top)
        said[name] = tuple(settle_shots(part, name, (shots or {}).get(name)) for part in parts)
        asked[name] = tuple(len(list(part.eval_docs)) for part in parts)
        if any(getattr(part, "UNSAFE_CODE", False) for part in parts):
            coded.append(name)
    if coded:
        require_container(coded, code_container)
    return Tasks(wanted, objects, said, asked, manager, tuple(coded), code_container, include_path)


def task_scores(
    model: nn.Module,
    tokenizer: Any,
    tasks: Tasks,
    *,
    limit: int | None = None,
    batch_size: int = 16,
    chat: bool = False,
    folder: Path | None = None,
) -> dict[str, Score]:
    """Score of each task, in percent.

    Args:
        model: a causal model of transformers.
        tokenizer: of the model.
        tasks: as ``load_tasks`` gives them.
        limit: documents of each task; None for all.
        batch_size: of a forward.
        chat: put prompts into the chat template, shots as turns of their own; not those of tasks
            that execute code.
        folder: where answers to those are written.

    Raises:
        ConfigError: a metric that a task does not report.
        DataError: lm-eval could not run them.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    results: dict[str, Mapping[str, Any]] = {}
    answered: dict[str, list[tuple[str, list[str]]]] = {}
    try:
        with evaluation_mode(model):
            evaluate = partial(
                simple_evaluate,
                model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
                limit=limit,
                task_manager=tasks.manager,
                bootstrap_iters=0,
            )
            named = list(zip(tasks.wanted, tasks.objects, strict=True))
            plain = [one for name, one in named if name not in tasks.coded]
            if plain:
                found = evaluate(
                    tasks=plain,
                    log_samples=False,
                    apply_chat_template=chat,
                    fewshot_as_multiturn=chat,
                )
                results |= found["results"]
            for name, one in named:
                if name in tasks.coded:
                    answered[name] = _answers(evaluate, one)
    except (OSError, ConnectionError, ValueError) as error:
        raise _unusable("could not run the tasks", ", ".join(tasks.wanted), error) from error
    for name, answers in answered.items():
        results |= score_in_container(
            name,
            answers,
            str(tasks.container),
            shots=tasks.shots[name][0],
            limit=limit,
            task_path=tasks.path,
            folder=folder,
        )
    scores = {}
    for name, metric in tasks.wanted.items():
        key, value = _score(name, metric, results)
        counts = [n if limit is None else min(n, limit) for n in tasks.questions[name]]
        scores[name] = Score(
            value,
            {
                "shots": "/".join(map(str, sorted(set(tasks.shots[name])))),
                "chat_template": chat and name not in tasks.coded,
                "metric": key.removesuffix(",none"),
                "questions": sum(counts),
            },
        )
    return scores


def _answers(evaluate: Callable[..., Any], task: Any) -> list[tuple[str, list[str]]]:
    """Answers to a task that executes code, whose metric is switched off."""
    found = evaluate(
        tasks=[task], predict_only=True, log_samples=True, confirm_run_unsafe_code=True
    )
    return given_answers([sample for of in found["samples"].values() for sample in of])


# --- finding them -------------------------------------------------------------------------------


def check_tasks(
    asked: Iterable[Measures], *, required: bool = True, code_container: str | None = None
) -> list[str]:
    """Look up every task in lm-eval's index, as a grid does before it trains: no data are read.

    Args:
        asked: what models are measured by.
        required: refuse also where lm-eval, or a container for generated code, is missing.
        code_container: image in which generated code is executed.

    Returns:
        Names that could not be looked up, since lm-eval is not installed.

    Raises:
        ConfigError: there are no such tasks; all of them are named. Or some execute code, and
            there is no container for it.
    """
    named: dict[str | None, list[str]] = {}
    for measures in asked:
        tasks = [*measures.target_tasks, *measures.retention_tasks]
        named.setdefault(measures.task_path, []).extend(one.partition(":")[0] for one in tasks)
    every = list(dict.fromkeys(name for names in named.values() for name in names))
    if every and not required and find_spec("lm_eval") is None:
        return every
    if every:
        _require_installed()
        _refuse([name for place, names in named.items() for name in _unknown(names, place)])
    if every and required:
        coded = [name for place, names in named.items() for name in _executing(names, place)]
        if coded:
            require_container(list(dict.fromkeys(coded)), code_container)
    return []


def _executing(names: Sequence[str], include_path: str | None) -> list[str]:
    """Tasks whose own file says that they execute code; those of a group show when it is loaded."""
    local = {} if include_path is None else _local(include_path).task_index

    def executes(name: str) -> bool:
        if _is_file(name):
            return bool(_UNSAFE.search(Path(name).read_text("utf-8")))
        # lm-eval's own are read only where a task is none of the folder's: they take long.
        found = local.get(name) or _all_tasks().task_index.get(name)
        return bool(found is not None and (found.cfg or {}).get("unsafe_code"))

    return [name for name in names if executes(name)]


_UNSAFE = re.compile(r"^unsafe_code:\s*true\s*$", re.MULTILINE | re.IGNORECASE)


def _require_installed() -> None:
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "tasks need lm-eval, which is not installed",
            remedy="pip install 'alphatoken-lab[eval]'",
        )


def _unknown(names: Sequence[str], include_path: str | None) -> list[str]:
    """Those that are no file, no task of the folder and none of lm-eval's own."""
    if include_path is not None and not Path(include_path).is_dir():
        raise ConfigError("task_path is no folder", got=include_path)
    local = {name for name in names if _is_file(name) and Path(name).is_file()}
    if include_path is not None:
        local |= _index(include_path)
    left = [name for name in names if name not in local]
    return [name for name in left if _is_file(name) or name not in _index(None)]


def _refuse(unknown: Sequence[str]) -> None:
    if unknown:
        raise ConfigError(
            "lm-eval knows no such task",
            got=", ".join(dict.fromkeys(unknown)),
            remedy="task_path: FOLDER with its YAML file, or the path of that file",
        )


def _manager(include_path: str | None, names: Sequence[str]) -> Any:
    """Reads the tasks. lm-eval's own, of which there are thousands, it knows only if needed."""
    local = _local(include_path)
    if all(_is_file(name) or name in local.all_tasks for name in names):
        return local
    return _all_tasks() if include_path is None else _kind()(include_path=include_path)


def _index(include_path: str | None) -> frozenset[str]:
    """Names of the tasks of a folder, or of lm-eval's own."""
    return frozenset((_all_tasks() if include_path is None else _local(include_path)).all_tasks)


def _local(include_path: str | None) -> Any:
    return _kind()(include_path=include_path, include_defaults=False)


@cache
def _all_tasks() -> Any:
    """lm-eval's own, read once: each group of tasks asks for them, and they take ten seconds."""
    return _kind()()


def _kind() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _load(manager: Any, given: str) -> tuple[str, Any, list[Any]]:
    """A task or group: its name, lm-eval's object, and the tasks that it consists of."""
    try:
        found = manager.load([given])
    except Exception as error:  # data sets raise whatever their files and servers raise
        raise _unusable("could not read a task", given, error) from error
    tasks, groups = found["tasks"], found.get("groups", {})
    below = {child for names in found.get("group_map", {}).values() for child in names}
    tops = [name for name in (*groups, *tasks) if name not in below]
    if len(tops) != 1 or (not _is_file(given) and tops[0] != given):
        raise ConfigError(
            "this names several tasks", got=given, remedy=f"some of {', '.join(tops)}"
        )
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


def settle_shots(task: Any, name: str, asked: int | None) -> int:
    """Give one task of lm-eval its number of shots (see above), and return it."""
    own = task.config.num_fewshot
    if asked and own == 0:
        raise ConfigError(
            "a task fixes its shots at 0",
            got=f"{name}: num_fewshot: 0 in its file, {asked} asked for",
            why="lm-eval reads a 0 as: not to be changed, such as where shots are in the prompt",
            remedy=f"shots: {{{name}: 0}}, or a file without num_fewshot",
        )
    number = next((n for n in (asked, own, PUBLISHED.get(name)) if n is not None), 0)
    if number and not _has_examples(task):
        raise ConfigError(
            "a task has no examples to show",
            got=f"{name}: {number} shots, and the questions themselves as the only rows",
            why="a question could be shown with its answer before it is asked",
            remedy=f"fewshot_split in its file, or shots: {{{name}: 0}}",
        )
    if own != number:
        task.set_config(key="num_fewshot", value=number)
    return int(number)


def _has_examples(task: Any) -> bool:
    """True if shots come from other rows, or lm-eval leaves the question itself out."""
    config = task.config
    named = config.fewshot_split
    for part in ("samples", "split"):
        named = named or getattr(config.fewshot_config, part, None)
    held = task.has_validation_docs() and task.has_test_docs()
    return bool(named or task.has_training_docs() or held)


def _score(
    name: str, metric: str | None, results: Mapping[str, Mapping[str, Any]]
) -> tuple[str, float]:
    """The metric, or the first known one, and its value; lm-eval writes ``metric,filter``."""
    reported = {
        key: value
        for key, value in results.get(name, {}).items()
        if isinstance(value, (int, float)) and "stderr" not in key and "," in key
    }
    for wanted in (metric,) if metric else _METRICS:
        for key, value in reported.items():
            if key == wanted or key.split(",")[0] == wanted:
                return key, 100.0 * float(value)
    known = ", ".join(sorted(reported)) or "those that it reports"
    raise ConfigError(
        "the task does not report such a metric",
        got=f"{name}: {metric or 'none of the usual ones'}",
        remedy=f"{name}:METRIC with one of {known}",
    )
