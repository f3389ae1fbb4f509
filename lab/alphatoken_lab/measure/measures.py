"""Measures of a model: files of rows, tasks with their shots, and questions to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from alphatoken.cli.recipes import close_to
from alphatoken.errors import ConfigError
from alphatoken.support.options import option

_LATER = ("shots", "task_chat", "questions")
"""Fields that came later: left out of a cell's description where they are empty."""


@dataclass(frozen=True)
class Measures:
    """Measures of a trained model.

    Attributes:
        target_file: held-out rows (pairs) of what is learnt.
        choosing_file: rows (pairs) by whose loss a tuned option is chosen.
        retention_file: rows of what must not be forgotten.
        target_tasks: lm-eval tasks, ``name`` or ``name:metric``, or the path of a task's YAML file;
            where there are some, the target is their mean score, not a loss.
        retention_tasks: likewise.
        task_path: folder with YAML files of local tasks.
        task_limit: documents of each task, and questions of each set; None for all.
        shots: number of examples before each question, by name of the task; what it leaves out is
            the task's own number, or else the paper's; see ``alphatoken_lab.measure.tasks``.
        task_chat: whether lm-eval's prompts go through the chat template.
        questions: name -> file of questions, which the model answers; their win rate, of
            alpaca_eval, is part of the target.
        max_new_tokens: of generated answers.
        max_length: rows are cut there; None for what the model allows.
        batch_size: of a forward.
        chat: whether rows and questions go through the chat template where there is one.
    """

    target_file: str | None = None
    choosing_file: str | None = None
    retention_file: str | None = None
    target_tasks: Sequence[str] = ()
    retention_tasks: Sequence[str] = ()
    task_path: str | None = None
    task_limit: int | None = None
    shots: Mapping[str, Any] = field(default_factory=dict)
    task_chat: bool = False
    questions: Mapping[str, str] = field(default_factory=dict)
    max_new_tokens: int = 256
    max_length: int | None = None
    batch_size: int = 16
    chat: bool = True

    def __post_init__(self) -> None:
        for name in ("target_tasks", "retention_tasks"):
            tasks = getattr(self, name)
            if isinstance(tasks, str):
                raise ConfigError(f"{name} is a list", got=tasks, remedy=f"{name}: [{tasks}]")
            object.__setattr__(self, name, tuple(tasks))
        for name in ("shots", "questions"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"{name} is a mapping by name", got=repr(getattr(self, name)))
        for name, number in self.shots.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ConfigError(
                    "shots must be whole numbers of at least 0", got=f"{name}: {number!r}"
                )
        if self.shots and not self.tasks:
            raise ConfigError("shots are given, but no lm-eval task", got=str(self.shots))

    @property
    def tasks(self) -> dict[str, tuple[str, ...]]:
        """lm-eval tasks by group ("target", "retention"), of groups that have some."""
        groups = {"target": self.target_tasks, "retention": self.retention_tasks}
        return {group: tuple(names) for group, names in groups.items() if names}

    @property
    def files(self) -> dict[str, str]:
        """Files of rows by what they are for, in the order of measuring."""
        named = {
            name: getattr(self, f"{name}_file") for name in ("retention", "choosing", "target")
        }
        return {name: path for name, path in named.items() if path is not None}

    @property
    def target(self) -> bool:
        """True if anything says how well a model learnt."""
        return bool(self.target_file or self.target_tasks or self.questions)

    def spec(self) -> dict[str, Any]:
        """All that results depend on, as JSON holds it; ``Measures(**spec)`` is the same."""
        empty = {one.name: getattr(Measures(), one.name) for one in fields(self)}
        content = asdict(self)
        return {k: v for k, v in content.items() if k not in _LATER or v != empty[k]}


def require_files(measures: Measures, place: str = "") -> None:
    """Refuse files that are not there.

    Args:
        measures: which name them.
        place: where the names come from, for the message.

    Raises:
        ConfigError: one does not exist.
    """
    named = {f"{name}_file": path for name, path in measures.files.items()}
    named |= {f"the file of questions {name}": path for name, path in measures.questions.items()}
    for name, path in named.items():
        if not Path(path).is_file():
            got = f"{path} ({place})" if place else path
            raise ConfigError(f"{name} does not exist", got=got, remedy="check the path")


# --- options of commands --------------------------------------------------------------------------


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
        None, "measure only the first N questions of each task or set", at_least=1
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
