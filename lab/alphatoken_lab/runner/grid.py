"""Cells of a grid: methods, modes and seeds of every task, and the models they need first.

A value ``@NAME`` in the options of a cell stands for the model that the reference NAME leaves; the
cell waits for it. So do merges for the cell whose model they merge.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from alphatoken.errors import ConfigError, require_choice
from alphatoken.train.policies import (
    OF_VALUES,
    UNTOUCHED,
    read_policy_options,
    unread_by_estimator,
    unread_options,
)
from alphatoken_lab.measure.measures import Measures
from alphatoken_lab.runner.methods import PLAIN, Method, lacking_model

REFERENCES = "references"
"""The task of models that cells need first, which nobody measures."""

_FAMILY = {"sft": "sft", "dpo": "preference"}
_SECOND = {"sft": "curated", "dpo": "oracle"}
"""The reference that methods score with which need a second model and name none."""

_LOADING = (
    "model_revision", "dtype", "attn_implementation", "trust_remote_code", "model_init_kwargs",
    "chat_template_path", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type",
    "use_bnb_nested_quant", "use_cpu", "bf16", "fp16", "beta",
)  # fmt: skip
"""Options of the trainer that matter to a model that is not trained: how it is loaded, and read."""

_SHARED: dict[str, Any] = {
    "report_to": "none",
    "save_strategy": "no",
    "export_values": False,
    "disable_tqdm": True,
}
"""Options of cells unless the grid says otherwise."""


@dataclass(frozen=True)
class Task:
    """One data set: how it is trained on, and what is measured.

    Attributes:
        name: of the task; of a reference, its own.
        command: "sft" or "dpo".
        options: of the trainer.
        measures: of a trained model; None for a reference.
        tuned_on: task whose tries decide a tuned option here; None for its own.
        policies: of the grid's methods those that take part here; None for all.
    """

    name: str
    command: str
    options: Mapping[str, Any]
    measures: Measures | None = None
    tuned_on: str | None = None
    policies: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        require_choice(f"the command of the task {self.name}", self.command, _FAMILY)
        if self.measures is not None and not self.measures.target:
            raise ConfigError(
                "no measure of the target is configured",
                got="no target_file, target_tasks or questions",
                remedy="--target_file FILE with held-out rows, or target_tasks of lm-eval",
            )


@dataclass(frozen=True)
class Grid:
    """Tasks, methods and seeds of a comparison.

    Attributes:
        tasks: each with all methods that its kind of data allows.
        methods: by name, in the order of the tables.
        seeds: of training; rows, their order and the start are shared by all methods of a seed.
        modes: "native" and "budget", or one of them.
        keep_ratio: of budget cells.
        references: models that are trained first, with seed 0 unless they name another.
        about: one line for the page.
        tune: one option of the trainer and the values that every method tries at the first seed;
            the one with the lowest loss on ``choosing_file`` is chosen, there and at other seeds. A
            method that sets the option itself is not tuned.
        keep: names of methods whose models of the first seed stay.
    """

    tasks: tuple[Task, ...]
    methods: tuple[Method, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    modes: tuple[str, ...] = ("native", "budget")
    keep_ratio: float = 0.5
    references: tuple[Task, ...] = ()
    about: str = ""
    tune: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tune:
            _check_tune(self)
        for what, some in (("task", self.tasks), ("method", self.methods), ("seed", self.seeds)):
            if not some:
                raise ConfigError(f"the grid has no {what}")
        if len(set(self.seeds)) != len(self.seeds):
            raise ConfigError("a seed is named twice", got=str(list(self.seeds)))
        for mode in self.modes:
            require_choice("modes", mode, ("native", "budget"))


def _check_tune(grid: Grid) -> None:
    """Refuse a tuned option without two numbers to try, or without rows by which one is chosen."""
    values = list(grid.tune.values())
    first = values[0] if isinstance(values[0], (list, tuple)) else ()
    numbers = {v for v in first if isinstance(v, (int, float)) and not isinstance(v, bool)}
    if len(values) > 1 or len(numbers) < 2 or len(numbers) < len(first):
        raise ConfigError(
            "tune is one option with at least two different numbers",
            got=str(dict(grid.tune)),
            remedy="tune: {learning_rate: [1.0e-5, 3.0e-5]}; YAML reads 1e-5 as text",
        )
    own = {task.name: task for task in grid.tasks if task.tuned_on is None}
    tuned = {method.name for method in grid.methods if _is_tuned(grid, method)}
    for task in grid.tasks:
        if task.tuned_on is None:
            if task.measures is None or task.measures.choosing_file is None:
                raise ConfigError(
                    "a tuned option needs rows by whose loss it is chosen",
                    got=f"no choosing_file in {task.name}",
                    why="chosen by the target rows themselves, every method would look better than "
                    "it is",
                )
            continue
        other = own.get(task.tuned_on)
        if other is None or other.command != task.command:
            raise ConfigError(
                "tuned_on must name a task of the same command",
                got=f"{task.name}: tuned_on: {task.tuned_on}",
                remedy=f"one of {', '.join(own) or 'none'} with the same command",
            )
        untried = set(task.policies or tuned) & tuned - set(other.policies or tuned)
        if untried:
            raise ConfigError(
                "tuned_on names a task on which some methods do not run",
                got=f"{task.name}: {', '.join(sorted(untried))} not in {other.name}",
                remedy=f"add them to the policies of {other.name}, or leave them out here",
            )


@dataclass(frozen=True)
class Cell:
    """One process: one model made and measured.

    Attributes:
        task: name of the task; "references" for a model that others need.
        policy: name of the method, or of the reference.
        mode: "native" or "budget".
        seed: of training.
        kind: "train", "start" or "merge".
        command: "sft" or "dpo".
        options: of the trainer, or of the merge.
        needs: names of cells that must be there before.
        keep_model: whether the model is saved; others need it.
        measures: None for references.
        tried: the tuned option and the value that this cell tries; empty outside tuning.
        tries: cells of the first seed, and what each of them tries; the best decides here.
    """

    task: str
    policy: str
    mode: str
    seed: int
    kind: str
    command: str
    options: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    keep_model: bool = False
    measures: Mapping[str, Any] | None = None
    tried: Mapping[str, Any] = field(default_factory=dict)
    tries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def models(self) -> tuple[str, ...]:
        """Cells of ``needs`` whose models are loaded; of the others only results are read."""
        return tuple(n for n in self.needs if self.kind == "merge" or n not in self.tries)

    def ready(self, finished: Set[str], lost: Set[str]) -> bool:
        """True if all that it needs is there; of the tries some may be lost."""
        return all(n in finished or (n in self.tries and n in lost) for n in self.needs)

    def hopeless(self, lost: Set[str]) -> tuple[str, ...]:
        """Needs that are lost for good; tries count only if all of them are lost."""
        gone = tuple(name for name in self.needs if name in lost)
        others = tuple(name for name in gone if name not in self.tries)
        return gone if len(gone) - len(others) == len(self.tries) else others

    @property
    def name(self) -> str:
        """Unique, and a path below the output folder."""
        if self.task == REFERENCES:
            return f"{REFERENCES}/{self.policy}"
        tried = "".join(f"-{value}" for value in self.tried.values())
        return f"{self.task}/{self.policy}-{self.mode}-seed{self.seed}{tried}"

    def spec(self) -> dict[str, Any]:
        """All that the result depends on, as JSON holds it."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        # Left out where empty, as in results of before there was tuning.
        return {k: v for k, v in content.items() if v or k not in ("tried", "tries")}


def all_cells(grid: Grid) -> list[Cell]:
    """Every cell once, those that others need before them; first all methods of the first seed.

    Raises:
        ConfigError: a reference that does not exist, a cycle of references, a merge of a method
            outside the grid, or a task without any method.
    """
    cells = [
        cell for seed in grid.seeds for task in grid.tasks for cell in _of_task(grid, task, seed)
    ]
    for task in grid.tasks:
        if not any(cell.task == task.name for cell in cells):
            raise ConfigError("no method of the grid is made for a task", got=task.name)
    references = {f"{REFERENCES}/{one.name}": _reference_cell(one) for one in grid.references}
    first: list[Cell] = []
    for cell in cells:
        for name in cell.needs:
            if name.startswith(f"{REFERENCES}/"):
                _add_with_needs(name, references, first, ())
    needed = {name for cell in cells for name in cell.models}
    needed |= {
        cell.name
        for cell in cells
        if cell.kind == "train" and cell.policy in grid.keep and cell.seed == grid.seeds[0]
    }
    return [*first, *(replace(cell, keep_model=cell.name in needed) for cell in cells)]


def _of_task(grid: Grid, task: Task, seed: int) -> Iterator[Cell]:
    for method in grid.methods:
        takes_part = task.policies is None or method.name in task.policies
        if takes_part and method.family in (_FAMILY[task.command], "both"):
            modes = [mode for mode in method.modes if mode in grid.modes] or method.modes[:1]
            for mode in modes:
                yield from _of_method(grid, task, method, mode, seed)


def _of_method(grid: Grid, task: Task, method: Method, mode: str, seed: int) -> list[Cell]:
    """The cell of a method; at the first seed one for each value that it tries."""
    cell = _cell(grid, task, method, mode, seed)
    if not _is_tuned(grid, method):
        return [cell]
    ((name, values),) = grid.tune.items()
    if seed == grid.seeds[0] and task.tuned_on is None:
        return [
            replace(cell, tried={name: value}, options={**cell.options, name: value})
            for value in values
        ]
    decides = next(one for one in grid.tasks if one.name == (task.tuned_on or task.name))
    tries = {c.name: c.tried for c in _of_method(grid, decides, method, mode, grid.seeds[0])}
    return [replace(cell, tries=tries, needs=(*cell.needs, *tries))]


def _is_tuned(grid: Grid, method: Method) -> bool:
    return method.kind == "train" and bool(grid.tune) and not set(grid.tune) & set(method.options)


def _cell(grid: Grid, task: Task, method: Method, mode: str, seed: int) -> Cell:
    needs: list[str] = []
    tries: Mapping[str, Mapping[str, Any]] = {}
    if method.kind == "train":
        options = _training_options(grid, task, method, mode, seed)
    else:
        names = (*_LOADING, "model_name_or_path")
        options = {name: task.options[name] for name in names if name in task.options}
        options |= method.options
    if method.kind == "merge":
        wanted = method.merges or PLAIN[task.command]
        merged = next((one for one in grid.methods if one.name == wanted), None)
        if merged is None:
            raise ConfigError(
                "a merge needs the method whose model it merges",
                got=f"{method.name} merges {wanted}",
                remedy=f"add {wanted} to --policies",
            )
        merging = _of_method(grid, task, merged, merged.modes[0], seed)
        needs += [one.name for one in merging]
        tries = {one.name: one.tried for one in merging if one.tried}
    needs += [f"{REFERENCES}/{name}" for name in _mentioned(options)]
    assert task.measures is not None, "a task is measured"
    return Cell(
        task.name, method.name, mode, seed, method.kind, task.command, options,
        tuple(dict.fromkeys(needs)), measures=task.measures.spec(), tries=tries,
    )  # fmt: skip


def _training_options(
    grid: Grid, task: Task, method: Method, mode: str, seed: int
) -> dict[str, Any]:
    own = {name: _named_after(task, value) for name, value in method.options.items()}
    options: dict[str, Any] = {**_SHARED, **task.options, **own, "seed": seed, "value_seed": seed}
    options["keep_ratio"] = method.options.get("keep_ratio", grid.keep_ratio)
    if len(method.modes) > 1:
        options["policy_mode"] = mode
    # What the task's recipe says of its own policy and estimator gives way to a method's, and so
    # does the grid's share to one that does not read it.
    neutral = unread_by_estimator(options)
    unread = unread_options(options, _FAMILY[task.command])
    neutral |= {name: unread[name] for name in unread.keys() - _of_every_policy(options)}
    said = {*task.options, "keep_ratio"}
    options |= {k: v for k, v in neutral.items() if k in said and k not in own}
    if lacks := lacking_model(method):
        second = _SECOND[task.command]
        if not any(one.name == second for one in grid.references):
            raise ConfigError(
                "a method needs a second model, and the grid trains none",
                got=method.name,
                remedy=f"a reference named {second} in the grid's file, or one in the "
                "method's policy_options, or --policies without it",
            )
        own_options = read_policy_options(options.get("policy_options"))
        options["policy_options"] = {**own_options, lacks: f"@{second}"}
    return options


def left_out(options: Mapping[str, Any], command: str) -> set[str]:
    """Options that stay in a cell for all policies alike, and that its own would refuse."""
    return _of_every_policy(options) & unread_options(options, _FAMILY[command]).keys()


def _of_every_policy(options: Mapping[str, Any]) -> set[str]:
    """Options of values, and of a divisor where the trainer below is left as it is."""
    return {*OF_VALUES, *(["kept_normalization"] if options.get("policy") in UNTOUCHED else ())}


def _named_after(task: Task, value: Any) -> Any:
    # ``{task}`` in a method's option is the task's name: each task has its own file or reference.
    if isinstance(value, Mapping):
        return {key: _named_after(task, part) for key, part in value.items()}
    return value.replace("{task}", task.name) if isinstance(value, str) else value


def _reference_cell(reference: Task) -> Cell:
    options = {**_SHARED, **reference.options}
    needs = tuple(f"{REFERENCES}/{name}" for name in _mentioned(options))
    seed = int(options.setdefault("seed", 0))
    return Cell(
        REFERENCES, reference.name, "native", seed, "train", reference.command, options, needs,
        keep_model=True,
    )  # fmt: skip


def _add_with_needs(
    name: str, references: Mapping[str, Cell], cells: list[Cell], above: Sequence[str]
) -> None:
    """Add a reference behind those that it needs, if it is not there yet."""
    path = " -> ".join([*above, name])
    if name not in references:
        raise ConfigError(
            "there is no such reference",
            got=path,
            remedy="define it under references in the grid's file",
        )
    if name in above:
        raise ConfigError(
            "the references form a cycle", got=path, remedy="remove one of these needs"
        )
    if references[name] not in cells:
        for need in references[name].needs:
            _add_with_needs(need, references, cells, (*above, name))
        cells.append(references[name])


def _mentioned(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.startswith("@"):
        yield value[1:]
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _mentioned(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _mentioned(part)


def resolve_models(value: Any, models: Mapping[str, str]) -> Any:
    """The same with ``@NAME`` replaced by the folder of its model."""
    if isinstance(value, str) and value.startswith("@"):
        return models[value[1:]]
    if isinstance(value, Mapping):
        return {key: resolve_models(part, models) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [resolve_models(part, models) for part in value]
    return value
