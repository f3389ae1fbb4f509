"""Which cells are measured: the main grid, and variants that change one thing each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

TASKS = ("sft_code", "sft_math", "dpo")
NOISES = (0.0, 0.3)
SEEDS = (0, 1, 2)
POLICIES = (
    ("all", "none"),
    ("random", "none"),
    ("bottom", "alphatoken"),
    ("top", "alphatoken"),
    ("top", "label"),
)
"""(policy, estimator); "all" is the standard loss, the others keep the same number of tokens."""

Overrides = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One training run.

    Attributes:
        task: sft_code, sft_math or dpo.
        noise: share of the training rows' response tokens that is replaced.
        policy: all, random, bottom or top.
        estimator: what values the tokens; "none" where nothing is valued.
        seed: of row order, noise, validation draws and random choices; cells of one seed see the
            same rows in the same order.
        variant: name of what is changed; "main" for the grid.
        options: fields of the trainer's configuration that are changed.
        start: the model that training starts from (see ``starts.py``); "" for the task's own.
    """

    task: str
    noise: float
    policy: str
    estimator: str
    seed: int
    variant: str = "main"
    options: Overrides = field(default_factory=dict)
    start: str = ""

    @property
    def name(self) -> str:
        """Unique, and fit for a file's name."""
        noise = f"noise{self.noise:g}"
        parts = (self.task, noise, self.policy, self.estimator, self.variant, f"seed{self.seed}")
        return "-".join(parts).replace(", ", "_").replace(" ", "_")

    def record(self) -> dict[str, Any]:
        """The cell as JSON holds it."""
        return asdict(self)


def main_grid() -> Iterator[Cell]:
    """3 tasks x clean and noisy x 5 policies x 3 seeds."""
    for seed in SEEDS:
        for task in TASKS:
            for noise in NOISES:
                for policy, estimator in POLICIES:
                    yield Cell(task, noise, policy, estimator, seed)


# Each cause that might keep a hard top half from beating random on clean data, alone, with the
# exact values of a mask ("label"), which leave the estimator's own error out of the question.
# Interaction: weights are relative; 1 is the best step along the gradient of the top tokens (see
# select_diverse).
CAUSES: dict[str, Overrides] = {
    "interaction": {"interaction_weight": 1.0},
    "preconditioner frozen": {"preconditioner": "frozen", "precondition_after": 10},
    "preconditioner full": {"preconditioner": "full", "precondition_after": 10},
    "all parameters": {"score_layers": "all", "value_parameters": "all"},
}
NOISY_CAUSES = ("interaction", "preconditioner full")

# What the results depend on: one setting at a time, with the paper's estimator, and with others
# where a table says so.
PAPER = ("alphatoken",)
SENSITIVITY: dict[str, tuple[tuple[str, ...], Overrides]] = {
    "fixed batch of 32": (PAPER, {"validation_mode": "fixed", "validation_batch_size": 32}),
    "validation 2": (PAPER, {"validation_batch_size": 2}),
    "validation 32": (PAPER, {"validation_batch_size": 32}),
    "lambda 0": (PAPER, {"stability_weight": 0.0}),
    "lambda 30": (PAPER, {"stability_weight": 30.0}),
    "retention data": (PAPER, {"retention": "data"}),
    "K 1": (PAPER, {"score_layers": "1"}),
    "K 5": (PAPER, {"score_layers": "all"}),
    "W 0": (PAPER, {"window": 0}),
    "path": (("path",), {}),
}
NOISY_SENSITIVITY = ("fixed batch of 32", "retention data")


def variants() -> Iterator[Cell]:
    """The causes, ratios, a start near convergence, sensitivities; all on the mathematics rows."""
    for seed in SEEDS:
        yield from _causes(seed)
        yield from _converged(seed)
    for seed in SEEDS:
        yield from _ratios(seed)
        yield from _sensitivity(seed)
        yield from _beta(seed)


def _causes(seed: int) -> Iterator[Cell]:
    for noise in NOISES:
        for name in CAUSES if noise == 0 else NOISY_CAUSES:
            yield Cell("sft_math", noise, "top", "label", seed, name, CAUSES[name])


def _converged(seed: int) -> Iterator[Cell]:
    for noise in NOISES:
        for policy, estimator in POLICIES:
            if policy != "bottom":
                start = "math_converged"
                yield Cell("sft_math", noise, policy, estimator, seed, "converged", start=start)


def _ratios(seed: int) -> Iterator[Cell]:
    for noise in NOISES:
        for ratio in (0.7, 0.9):
            for policy, estimator in (("random", "none"), ("top", "label")):
                options = {"keep_ratio": ratio}
                yield Cell("sft_math", noise, policy, estimator, seed, f"ratio {ratio}", options)


def _sensitivity(seed: int) -> Iterator[Cell]:
    for noise in NOISES:
        for name in SENSITIVITY if noise == 0 else NOISY_SENSITIVITY:
            estimators, options = SENSITIVITY[name]
            for estimator in estimators:
                yield Cell("sft_math", noise, "top", estimator, seed, name, options)


def _beta(seed: int) -> Iterator[Cell]:
    for beta in (0.05, 0.3):
        for policy, estimator in POLICIES:
            if policy in ("all", "random") or (policy, estimator) == ("top", "alphatoken"):
                options = {"beta": beta}
                yield Cell("dpo", 0.0, policy, estimator, seed, f"beta {beta}", options)


def every_cell() -> list[Cell]:
    """In the order of measuring: what matters most comes first."""
    cells = [*main_grid(), *variants()]
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names)
    return cells
