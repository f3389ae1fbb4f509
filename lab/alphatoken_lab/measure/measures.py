"""Measures of a model: files of rows, tasks with their shots, and questions to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from alphatoken.errors import ConfigError

__all__ = ["Measures", "require_files"]

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
