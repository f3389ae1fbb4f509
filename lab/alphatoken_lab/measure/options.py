"""Options for the measures of a model, under one name in a grid's file and in every command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from alphatoken.cli.recipes import close_to
from alphatoken.errors import ConfigError
from alphatoken.support.options import option

if TYPE_CHECKING:
    from alphatoken_lab.measure.measures import Measures

__all__ = ["MeasureOptions", "read_measures", "require_allowed"]


@dataclass(kw_only=True)
class MeasureOptions:
    """Options for the measures."""

    target_file: str | None = option(None, "held-out rows, or preference pairs: the target loss")
    retention_file: str | None = option(None, "rows that must not be forgotten")
    target_tasks: list[str] | None = option(
        None, "lm-eval tasks of the target: NAME, NAME:METRIC or a YAML file"
    )
    retention_tasks: list[str] | None = option(None, "lm-eval tasks of general capability")
    shots: list[str] | None = option(None, "examples before each question: NAME=N ...")
    task_path: str | None = option(None, "YAML files of local lm-eval tasks")
    task_limit: int | None = option(
        None, "measure only the first N questions of each task or set", least=1
    )
    task_chat: bool = option(False, "put lm-eval's prompts into the chat template")
    questions: list[str] | None = option(None, "sets of questions to answer: NAME=FILE ...")

    def set_measures(self) -> dict[str, Any]:
        """Those that the command line sets, as a grid's ``measures`` has them.

        Raises:
            ConfigError: shots or questions that are no NAME=VALUE.
        """
        own = {one.name: getattr(self, one.name) for one in fields(MeasureOptions)}
        own["shots"] = _named("--shots", self.shots, "mmlu=5", int)
        own["questions"] = _named("--questions", self.questions, "alpaca=questions.jsonl", str)
        own["task_chat"] = self.task_chat or None
        return {name: value for name, value in own.items() if value is not None}


def _named(flag: str, words: Sequence[str] | None, example: str, kind: Any) -> Any:
    """``a=1 b=2`` as {a: 1, b: 2}."""
    if words is None:
        return None
    values = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            values[name] = kind(value)
        except ValueError:
            value = ""
        if not (name and value):
            raise ConfigError(f"{flag} is NAME=VALUE", got=word, remedy=f"{flag} {example}")
    return values


def read_measures(content: Mapping[str, Any], place: str) -> Measures:
    """Measures of a mapping.

    Raises:
        ConfigError: keys that are none of them, or values that cannot be.
    """
    from alphatoken_lab.measure.measures import Measures

    require_allowed(content, {one.name for one in fields(Measures)}, place)
    return Measures(**content)


def require_allowed(entries: Mapping[str, Any], allowed: set[str], place: str) -> None:
    """Refuse keys that mean nothing.

    Raises:
        ConfigError: the first of them, and what was meant.
    """
    for name in entries:
        if name not in allowed:
            remedy = close_to(str(name), sorted(allowed)) or f"one of {', '.join(sorted(allowed))}"
            raise ConfigError(f"{place} has an unknown key", got=str(name), remedy=remedy)
