"""Measures of a model: files of rows, tasks with their shots, and judged answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from alphatoken.errors import ConfigError

__all__ = ["OPPONENT", "JudgeSet", "Measures", "Score"]

OPPONENT = "start"
"""The opponent where no stored answers are given: the model before training."""

_SHORT = "win_rate"
"""Name of the set that ``questions_file`` makes."""

_LATER = ("shots", "task_chat", "judge_sets")
"""Fields that came later: left out of a cell's description where they say nothing."""


@dataclass(frozen=True)
class JudgeSet:
    """Questions, whose answers the model's are compared with, and who decides.

    Attributes:
        questions: file of rows with ``prompt``, ``instruction``, ``question`` or ``turns``.
        opponent: file of stored answers, or "start" for the model before training.
        judge: settings of :func:`~alphatoken_lab.compare.judge.make_judge`; None: the shared ones.
    """

    questions: str
    opponent: str = OPPONENT
    judge: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, name: str, given: Any) -> JudgeSet:
        """Read the set from the content under its name in a file.

        Raises:
            ConfigError: no questions, or keys that are none of a set.
        """
        if isinstance(given, cls):
            return given
        known = [one.name for one in fields(cls)]
        if (
            not isinstance(given, Mapping)
            or not set(given) <= set(known)
            or "questions" not in given
        ):
            raise ConfigError(
                "a judge set must be a mapping with questions",
                got=f"{name}: {given!r}"[:200],
                remedy=f"{name}: {{questions: FILE, opponent: FILE}}; keys are {', '.join(known)}",
            )
        return cls(**given)


@dataclass(frozen=True)
class Measures:
    """Measures of a trained model.

    Attributes:
        target_file: held-out rows (pairs) of what is learnt.
        choosing_file: rows (pairs) by whose loss a tuned option is chosen; see ``Grid.tune``.
        retention_file: rows of what must not be forgotten.
        target_tasks: lm-eval tasks, ``name`` or ``name:metric``, or the path of a task's YAML file;
            where there are some, the target is their mean score, not a loss.
        retention_tasks: likewise.
        task_path: folder with YAML files of local tasks.
        task_limit: documents of each task, and questions of each set; None for all.
        shots: number of examples before each question, by name of the task; what is not said is
            the task's own number, or else the paper's; see ``alphatoken_lab.compare.harness``.
        task_chat: whether lm-eval's prompts go through the chat template.
        judge_sets: name -> :class:`JudgeSet`, or what a file says of one; part of the target.
        questions_file: in short, one set named "win_rate" against the start model.
        judge: of the sets that name none; see ``alphatoken_lab.compare.judge.make_judge``.
        max_new_tokens: of generated answers.
        max_length: rows are cut there; None for what the model allows.
        batch_size: of a forward.
        chat: whether rows and judged questions go through the chat template where there is one.
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
    judge_sets: Mapping[str, Any] = field(default_factory=dict)
    questions_file: str | None = None
    judge: Mapping[str, Any] | None = None
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
        for name in ("shots", "judge_sets"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"{name} is a mapping by name", got=repr(getattr(self, name)))
        for name, number in self.shots.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ConfigError(
                    "shots must be whole numbers of at least 0", got=f"{name}: {number!r}"
                )
        sets = {name: JudgeSet.read(name, one) for name, one in self.judge_sets.items()}
        object.__setattr__(self, "judge_sets", sets)
        self._check_judges()

    def _check_judges(self) -> None:
        if self.questions_file and _SHORT in self.judge_sets:
            raise ConfigError(
                f"two judge sets are named {_SHORT}",
                got=f"questions_file, and judge_sets: {_SHORT}",
                remedy="leave questions_file out",
            )
        bare = [name for name, one in self.sets.items() if one.judge is None]
        if bare:
            raise ConfigError(
                "a win rate needs a judge",
                got=f"none of {', '.join(bare)}",
                remedy="judge: {kind: likelihood, model: PATH}",
            )

    @property
    def sets(self) -> dict[str, JudgeSet]:
        """All judge sets by name, each with its judge where there is one."""
        short = {_SHORT: JudgeSet(self.questions_file)} if self.questions_file else {}
        return {
            name: JudgeSet(one.questions, one.opponent, one.judge or self.judge)
            for name, one in {**short, **self.judge_sets}.items()
        }

    @property
    def target(self) -> bool:
        """True if anything says how well a model learnt."""
        return bool(self.target_file or self.target_tasks or self.sets)

    @property
    def retention(self) -> bool:
        """True if anything says how much of its former knowledge a model kept."""
        return bool(self.retention_file or self.retention_tasks)

    def spec(self) -> dict[str, Any]:
        """All that results depend on, as JSON holds it; ``Measures(**spec)`` is the same."""
        later = {
            one.name: one.default if one.default is not MISSING else {}
            for one in fields(self)
            if one.name in _LATER
        }
        found = asdict(self)
        # Left out where empty, as in results of before there were such fields.
        return {k: v for k, v in found.items() if k not in later or v != later[k]}


@dataclass(frozen=True)
class Score:
    """A percentage and what it was measured with.

    Attributes:
        value: in percent.
        how: what a table says of it, such as ``shots``, ``chat_template`` or ``opponent``.
    """

    value: float
    how: Mapping[str, Any]
