"""lm-eval's tasks on a model in memory: of a local folder, offline, or of the hub.

A thin adapter: tasks, prompts and metrics are lm-eval's (``pip install 'alphatoken[eval]'``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from torch import nn

from alphatoken.errors import ConfigError, DataError
from alphatoken.model.capture import evaluation_mode

__all__ = ["task_scores"]

_METRICS = (
    "acc", "exact_match", "pass@1", "acc_norm", "f1", "bleu",
)  # fmt: skip
"""Of a task that names none: the first that it reports. ``acc`` is what the paper's tables hold."""


def task_scores(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    include_path: str | None = None,
    limit: int | None = None,
    batch_size: int = 16,
) -> dict[str, float]:
    """Score of each task, in percent.

    Args:
        model: a causal model of transformers.
        tokenizer: of the model.
        tasks: names of lm-eval, or ``name:metric``. One that executes code is refused by lm-eval.
        include_path: folder with YAML files of local tasks.
        limit: documents of each task; None for all.
        batch_size: of a forward.

    Raises:
        ConfigError: lm-eval is not installed, no such task, a metric that it does not report.
        DataError: a task's data cannot be read, as hub tasks without a network.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "tasks need lm-eval, which is not installed", remedy="pip install 'alphatoken[eval]'"
        )
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    parts = (task.partition(":") for task in tasks)
    wanted = {name: metric or None for name, _, metric in parts}
    manager = _manager(TaskManager, include_path, list(wanted))
    try:
        with evaluation_mode(model):
            found = simple_evaluate(
                model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
                tasks=list(wanted),
                limit=limit,
                task_manager=manager,
                bootstrap_iters=0,
                log_samples=False,
            )
    except (OSError, ConnectionError, ValueError) as error:
        text = " ".join(str(error).split())
        raise DataError(
            "lm-eval could not run the tasks",
            got=f"{', '.join(wanted)}: {type(error).__name__}: {text[:300]}",
            remedy="tasks of the hub need the network or its cache; local ones task_path",
        ) from error
    return {name: _score(name, metric, found["results"]) for name, metric in wanted.items()}


def _manager(kind: Any, include_path: str | None, names: Sequence[str]) -> Any:
    """Knows the tasks. lm-eval's own, of which there are thousands, are read only if needed."""
    if include_path is not None:
        local = kind(include_path=include_path, include_defaults=False)
        if set(names) <= set(local.all_tasks):
            return local
    manager = kind(include_path=include_path)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise ConfigError(
            "lm-eval knows no such task",
            got=", ".join(unknown),
            remedy="task_path: FOLDER with its YAML file",
        )
    return manager


def _score(name: str, metric: str | None, results: Mapping[str, Mapping[str, Any]]) -> float:
    """The metric, or the first known one; lm-eval writes ``metric,filter``."""
    reported = {
        key: value
        for key, value in results.get(name, {}).items()
        if isinstance(value, (int, float)) and "stderr" not in key and "," in key
    }
    for wanted in (metric,) if metric else _METRICS:
        for key, value in reported.items():
            if key == wanted or key.split(",")[0] == wanted:
                return 100.0 * float(value)
    known = ", ".join(sorted(reported)) or "those that it reports"
    raise ConfigError(
        "the task does not report such a metric",
        got=f"{name}: {metric or 'none of the usual ones'}",
        remedy=f"{name}:METRIC with one of {known}",
    )
