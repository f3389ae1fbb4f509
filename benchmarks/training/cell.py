"""One cell: train with one policy, then measure on rows that training never saw."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alphatoken import FisherDrift, fit_fisher
from benchmarks.training.evaluate import mean_loss, preferences, response_scores
from benchmarks.training.grid import Cell
from benchmarks.training.starts import OWN, load_model, tokenizer
from benchmarks.training.tasks import Stories, Task, load_stories, load_task, with_noise
from benchmarks.training.trainers import alpha_trainer, wrong_places

STEPS = {"sft_code": 60, "sft_math": 60, "dpo": 60}
RATES = {"sft_code": 2e-3, "sft_math": 2e-3, "dpo": 3e-5}
BETA = 0.1

OPTIONS: dict[str, Any] = {
    "validation_mode": "pool",
    "validation_batch_size": 16,
    "held_out_steps": 0,
    "max_relative_drift": None,
    "export_values": False,
    "retention": "diagonal",
    "retention_batch_size": 8,
}
"""What the main grid sets beside the paper's defaults (K = 3, W = 32, lambda = 1.5, rho = 0.5)."""

FISHER_SAMPLES = 256
FISHER_LENGTH = 128


@functools.cache
def task_of(name: str) -> Task:
    return load_task(name, tokenizer())


@functools.cache
def stories() -> Stories:
    return load_stories(tokenizer())


def start_of(cell: Cell) -> str:
    """Name of the model that the cell starts from."""
    return cell.start or OWN[cell.task]


def fisher_of(task: str, start: str, work: Path) -> FisherDrift:
    """Fisher of the start model on the task's held-out prompts; fitted once."""
    path = work / "fishers" / f"{task}-{start}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fitted = fit_fisher(
            load_model(start, work),
            task_of(task).prompts,
            samples=FISHER_SAMPLES,
            layers="all",
            parameters="all",
            max_new_tokens=FISHER_LENGTH,
            batch_size=32,
            checkpoint=path.with_suffix(".sums"),
        )
        fitted.save(path)
    return FisherDrift.load(path)


def measure(cell: Cell, work: Path) -> dict[str, Any]:
    """Train the cell's model and measure it."""
    begun = time.perf_counter()
    task, start = task_of(cell.task), start_of(cell)
    model = load_model(start, work)
    noisy = with_noise(task.train, cell.noise, model.config.vocab_size, cell.seed)
    options = _options(cell)
    with tempfile.TemporaryDirectory() as folder:
        trainer = alpha_trainer(
            cell.task,
            model,
            tokenizer(),
            noisy,
            task.pool,
            stories().given if options["retention"] == "data" else None,
            fisher_of(cell.task, start, work)
            if options["policy"] in ("top", "bottom") and options["retention"] == "diagonal"
            else None,
            options,
            Path(folder),
        )
        trainer.count(wrong_places(task.train, noisy))
        before = time.perf_counter()
        trainer.train()
        trained = time.perf_counter() - before
    assert trainer.state.global_step == options["max_steps"]
    drawn = trainer.valuation.pool.drawn if trainer.args.needs_values else range(len(task.pool))
    found = _losses(cell, model, [task.pool[i] for i in drawn], work, options.get("beta", BETA))
    return {
        **cell.record(),
        "start": start,
        "steps": options["max_steps"],
        "learning_rate": options["learning_rate"],
        "kept_tokens": trainer.kept,
        "response_tokens": trainer.response,
        "kept_weight": trainer.weight,
        "kept_share": trainer.kept / trainer.response,
        "wrong_share_of_kept": trainer.wrong_weight / trainer.weight,
        **found,
        "train_seconds": trained,
        "seconds": time.perf_counter() - begun,
    }


def _options(cell: Cell) -> dict[str, Any]:
    options = {
        **OPTIONS,
        "policy": cell.policy,
        "estimator": "alphatoken" if cell.estimator == "none" else cell.estimator,
        "max_steps": STEPS[cell.task],
        "learning_rate": RATES[cell.task],
        "seed": cell.seed,
        "value_seed": cell.seed,
        **cell.options,
    }
    if cell.task == "dpo":
        options = {"beta": BETA, "precompute_ref_log_probs": True, **options}
    return options


def _losses(cell: Cell, model: Any, drawn: list[Any], work: Path, beta: float) -> dict[str, float]:
    """Target and retention loss, and the gap between the rows valued against and held-out ones."""
    task = task_of(cell.task)
    retention = mean_loss(model, stories().held_out)
    if cell.task != "dpo":
        target, seen = mean_loss(model, task.held_out), mean_loss(model, drawn)
        more = {"train_loss": mean_loss(model, task.train[:64])}
    else:
        judge = _judge(start_of(cell), work, beta)
        held = judge(model, task.held_out)
        target, seen = held["loss"], judge(model, drawn)["loss"]
        more = {"accuracy": held["accuracy"], "margin": held["margin"]}
    return {
        "target_loss": target,
        "retention_loss": retention,
        "validation_loss": seen,
        "validation_gap": target - seen,
        **more,
    }


def _judge(start: str, work: Path, beta: float) -> Callable[[Any, list[Any]], dict[str, float]]:
    reference = load_model(start, work)

    def judge(model: Any, pairs: list[Any]) -> dict[str, float]:
        return preferences(model, pairs, response_scores(reference, pairs), beta)

    return judge
