"""Problems of HumanEval's form: a model completes a function, its tests run in a sandbox.

    pass@1 = share of problems whose greedy completion passes all tests

Off unless it is asked for in so many words; refused where programs cannot be isolated.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from alphatoken.data import read_records
from alphatoken.errors import ConfigError, DataError
from alphatoken.support.storage import write_json
from alphatoken_lab.compare.generation import answers
from alphatoken_lab.compare.sandbox import Limits, require_isolation
from alphatoken_lab.compare.verdict import judge_function

__all__ = ["complete_function", "pass_at_1", "read_problems"]

_STOP = re.compile(r"\n(?=\S)")
"""Where a completion leaves the function: something at the left edge."""

_FIELDS = ("prompt", "entry_point", "test")


def pass_at_1(
    model: nn.Module,
    tokenizer: Any,
    path: str | Path,
    *,
    allow: bool,
    max_new_tokens: int = 256,
    limit: int | None = None,
    limits: Limits | None = None,
    folder: Path | None = None,
) -> float:
    """Percentage of problems solved by greedy completions.

    Args:
        model: that completes.
        tokenizer: of the model.
        path: rows with ``prompt``, ``entry_point`` and ``test``. White space at a prompt's end is
            left to the model.
        allow: the user's consent to executing what the model writes.
        max_new_tokens: of each completion.
        limit: the first problems only.
        limits: of each program, the completion's and that of the tests.
        folder: ``code.json`` is written there, completions and outcomes.

    Raises:
        ConfigError: no consent. UnsupportedError: no isolation. DataError: no such problems.
    """
    problems = read_problems(path, allow=allow)[:limit]
    # Tokenizers take a line's end and the next line's indentation as one token: a model that is
    # shown the end alone has hardly ever seen what comes after it.
    problems = [{**problem, "prompt": problem["prompt"].rstrip()} for problem in problems]
    prompts = [problem["prompt"] for problem in problems]
    written = answers(model, tokenizer, prompts, max_new_tokens=max_new_tokens, chat=False)
    found: list[dict[str, Any]] = []
    for problem, text in zip(problems, written, strict=True):
        completion = complete_function(text)
        outcome = judge_function(
            problem["prompt"], completion, problem["entry_point"], problem["test"], limits
        )
        solved = outcome.state == "passed"
        found.append({"completion": completion, "solved": solved, **asdict(outcome)})
    if folder is not None:
        write_json(folder / "code.json", found)
    return 100.0 * sum(bool(one["solved"]) for one in found) / len(found)


def read_problems(path: str | Path, *, allow: bool) -> list[dict[str, str]]:
    """The problems of a file that may be executed.

    Raises:
        ConfigError: no consent. UnsupportedError: no isolation. DataError: no such problems.
    """
    if not allow:
        raise ConfigError(
            "code_file executes what the model writes",
            got="without --allow_code_execution",
            why="generated code can do anything that its process may do",
            remedy="--allow_code_execution; it then runs in a sandbox without network",
        )
    require_isolation()
    problems = [_problem(place, record) for place, record in read_records(path)]
    if not problems:
        raise DataError("there are no problems", got=str(path))
    return problems


def _problem(place: str, record: Any) -> dict[str, str]:
    missing = [name for name in _FIELDS if not isinstance(record.get(name), str)]
    if missing:
        raise DataError(
            "this is no problem of HumanEval's form",
            got=f"{place}: no {', '.join(missing)}",
            remedy="rows with prompt, entry_point and test",
        )
    return {name: record[name] for name in _FIELDS}


def complete_function(text: str) -> str:
    """What of a completion belongs to the function: up to the next line at the left edge."""
    found = _STOP.search(text)
    return text if found is None else text[: found.start()]
