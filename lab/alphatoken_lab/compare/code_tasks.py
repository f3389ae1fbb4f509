"""lm-eval's tasks that execute what a model writes: answered here, scored in a container.

The model answers in this process, where nothing that it wrote is run. lm-eval in a container that
the user names, without a network, asks its task again, is given these answers, and scores them.
What such a program may do is the container's matter; see docs/evaluate.md.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alphatoken.errors import ConfigError, DataError
from alphatoken.support.storage import write_json

__all__ = ["given_answers", "require_container", "score_in_container"]

_ENGINES = ("docker", "podman")

_SCORING = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

asked, left = json.load(sys.stdin), {}
for context, texts in asked["answers"]:
    left.setdefault(context, []).extend(texts)

class Answered(LM):
    def generate_until(self, requests, disable_tqdm=False):
        return [left[one.args[0]].pop(0) for one in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood

folder = asked["task_path"]
tasks = TaskManager(include_path=folder, include_defaults=False)
if asked["task"] not in tasks.all_tasks:  # lm-eval's own thousands take long to read
    tasks = TaskManager(include_path=folder)
found = simple_evaluate(
    model=Answered(), tasks=[asked["task"]], num_fewshot=asked["shots"], limit=asked["limit"],
    task_manager=tasks, bootstrap_iters=0,
    log_samples=False, confirm_run_unsafe_code=True,
)
print("\\n" + json.dumps(found["results"], default=float))
"""
"""Program in the container: a question that this process did not answer ends it."""


def require_container(names: Sequence[str], container: str | None) -> str:
    """The engine that runs the container for these tasks.

    Raises:
        ConfigError: no container is named, or there is nothing here to run one.
    """
    if container is None:
        raise ConfigError(
            "a task executes what the model writes",
            got=f"{', '.join(names)}, without --code_container",
            why="generated code can do anything that its process may do",
            remedy="--code_container IMAGE, an image with lm-eval in it (docs/evaluate.md)",
        )
    engine = next((found for found in map(shutil.which, _ENGINES) if found), None)
    if engine is None:
        raise ConfigError(
            "there is nothing to run a container with",
            got=f"{container}, and neither {' nor '.join(_ENGINES)}",
            remedy=f"install {' or '.join(_ENGINES)}, or leave {', '.join(names)} out",
        )
    return engine


def given_answers(samples: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Text before each answer of lm-eval's samples, and the answers."""
    return [
        (str(arguments[0]), list(answers))
        for sample in samples
        for arguments, answers in zip(sample["arguments"], sample["resps"], strict=True)
    ]


def score_in_container(
    task: str,
    answers: Sequence[tuple[str, Sequence[str]]],
    container: str,
    *,
    shots: int,
    limit: int | None,
    task_path: str | None,
    folder: Path | None,
) -> Mapping[str, Mapping[str, Any]]:
    """lm-eval's results of one task, scored in the container.

    Args:
        task: lm-eval's name of it.
        answers: as ``given_answers`` has them.
        container: the image.
        shots: examples before each question.
        limit: documents of the task; None for all.
        task_path: folder with YAML files of local tasks; the container may read it.
        folder: ``code-TASK.json`` is written there: what the container is given.

    Raises:
        ConfigError: nothing here runs containers.
        DataError: it could not score them.
    """
    engine = require_container([task], container)
    path = None if task_path is None else str(Path(task_path).resolve())
    asked = {"task": task, "shots": shots, "limit": limit, "task_path": path, "answers": answers}
    if folder is not None:  # scoring may fail, and answers take long
        write_json(folder / f"code-{task}.json", asked)
    command = [
        engine, "run", "--rm", "--interactive", "--network=none", "--cap-drop=ALL",
        "--security-opt=no-new-privileges", "--pids-limit=512",
        *([] if path is None else [f"--volume={path}:{path}:ro"]),
        "--env=HF_ALLOW_CODE_EVAL=1", "--env=HF_HUB_OFFLINE=1",
        container, "python", "-c", _SCORING,
    ]  # fmt: skip
    said = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    try:
        if said.returncode:
            raise ValueError
        found: Mapping[str, Mapping[str, Any]] = json.loads(said.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise DataError(
            "the container did not score the answers",
            got=f"{container}, {task}: exit code {said.returncode}; "
            + (said.stderr.strip() or said.stdout.strip())[-300:],
            remedy="an image with the same lm-eval, the task's data and its metric, which have to "
            "be there without a network (docs/evaluate.md)",
        ) from None
    return found
