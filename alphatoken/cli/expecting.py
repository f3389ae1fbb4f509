"""What a command will take, said before it starts; what cannot fit into memory is refused.

Memory is counted on shapes (:mod:`alphatoken.train.cost`, :mod:`alphatoken.train.scoring_cost`),
with what the process holds beside its weights. Time is counted FLOPs over the speed of a few short
forwards of the loaded model here and now: an estimate, which progress corrects as rows are done.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.cli.arguments import Arguments
from alphatoken.config import ScorerConfig
from alphatoken.data import Example
from alphatoken.direction.drift import FisherDrift
from alphatoken.model.capture import evaluation_mode
from alphatoken.model.parameter_choice import ParameterChoice
from alphatoken.model.protocol import DecoderAdapter, find_adapter
from alphatoken.support.machine import require_memory, resident_memory, timed
from alphatoken.train.cost import Layout, Memory, step_flops, work_of
from alphatoken.train.plan import Plan
from alphatoken.train.scoring_cost import (
    Batches,
    fisher_flops,
    fisher_memory,
    scoring_flops,
    scoring_memory,
)

__all__ = ["expect_fisher", "expect_scoring", "expect_training", "expect_training_memory"]

_SHORT = 128
"""Tokens of the forward whose speed is measured."""

_PATIENCE = 2.0
"""Seconds after which no further forward is timed."""

_SAMPLE = 1024
"""Training rows whose lengths stand for all."""


def expect_scoring(
    model: nn.Module,
    config: ScorerConfig,
    train: Sequence[Example],
    validation: Sequence[Example],
    fisher: FisherDrift | None,
    *,
    batch_size: int,
    held_size: int | None = None,
    rows: int | None = None,
    check: bool,
    quiet: bool,
) -> None:
    """Say what valuing the rows will take.

    Args:
        model: loaded.
        config: what is computed.
        train: rows that are still to be valued.
        validation: rows of the objective.
        fisher: of the stability term.
        batch_size: rows of one forward.
        held_size: rows of one validation forward; None for as many.
        rows: how many there are, where ``train`` is a sample of them.
        check: refuse what cannot fit into memory.
        quiet: say nothing.

    Raises:
        ConfigError: it cannot fit into memory.
    """
    adapter = find_adapter(model)
    scope = ParameterChoice.read(config.parameters).scope(adapter, config.layers)
    some, held = (
        Batches.of([len(example.input_ids) for example in examples], size)
        for examples, size in ((train, batch_size), (validation, held_size or batch_size))
    )
    times = (rows or len(train)) / len(train)
    valued = replace(some, count=round(some.count * times), tokens=round(some.tokens * times))
    speed = _speed(adapter, some.length)
    memory = scoring_memory(adapter, scope, config, valued, held, fisher)
    work = work_of(adapter, some.length)
    seconds = scoring_flops(work, scope, config, valued, held) / speed
    _expect(model, memory, seconds, check=check, quiet=quiet)


def expect_fisher(
    model: nn.Module,
    prompts: Sequence[Tensor] | Mapping[str, Tensor],
    *,
    layers: int | str | Sequence[int],
    parameters: str,
    structure: str,
    samples: int,
    max_new_tokens: int,
    batch_size: int,
    check: bool,
    quiet: bool,
) -> None:
    """Say what fitting a Fisher will take; ``prompts`` and options as in ``fit_fisher``.

    A batch of whole sequences gets its labels resampled; after prompts responses are drawn, which
    are taken to be as long as they may be.

    Raises:
        ConfigError: it cannot fit into memory.
    """
    adapter = find_adapter(model)
    scope = ParameterChoice.read(parameters).scope(adapter, layers)
    drawn = not isinstance(prompts, Mapping)
    if isinstance(prompts, Mapping):
        given, response = prompts["attention_mask"].sum(-1).tolist(), 0
    else:
        given, response = [len(prompt) for prompt in prompts], max_new_tokens
    limit = adapter.max_positions() or math.inf
    lengths = [int(min(length + response, limit)) for length in given]
    rounds, rest = divmod(samples, len(lengths))
    tokens = rounds * sum(lengths) + sum(lengths[:rest])
    longest = max(lengths)
    memory = fisher_memory(adapter, scope, longest, response if drawn else longest, structure)
    work = work_of(adapter, longest)
    seconds = fisher_flops(work, scope, tokens) / _speed(adapter, longest)
    if drawn:  # each new token is a forward of one position of every row
        each = _forward_seconds(adapter, min(batch_size, samples), 1)
        seconds += each * response * math.ceil(samples / batch_size)
    _expect(model, memory, seconds, check=check, quiet=quiet)


def expect_training_memory(plan: Plan, arguments: Arguments) -> None:
    """Say before the model is loaded how much memory training will take.

    Raises:
        ConfigError: it cannot fit into memory.
    """
    device = torch.device("cpu" if arguments.training.use_cpu else arguments.training.device)
    needed = plan.memory.total + (resident_memory() if device.type == "cpu" else 0.0)
    if arguments.training.process_index == 0:
        _say(f"at most {_gib(needed)} of memory a process, when {plan.memory.peak}")
    if arguments.run.memory_check:
        remedy = "a smaller per_device_train_batch_size, max_length or model, or LoRA"
        require_memory(needed, device, peak=plan.memory.peak, remedy=remedy)


def expect_training(trainer: Any, plan: Plan, layout: Layout) -> None:
    """Say how long training will take; of one process only, whose weights are all here."""
    args = trainer.args
    lengths = _lengths(trainer.train_dataset, args.max_length)
    if layout.processes > 1 or not lengths:
        return
    adapter = find_adapter(trainer.model)
    rows = args.per_device_train_batch_size
    batches = Batches.of(lengths, rows)
    steps = plan.steps["steps"] or math.ceil(
        args.num_train_epochs * len(trainer.train_dataset) / plan.batch["rows"]
    )
    a_step = plan.batch["rows"] * batches.tokens / len(lengths)
    work = work_of(adapter, max(1, batches.tokens // len(lengths)))
    reference = plan.command == "dpo" and not args.precompute_ref_log_probs
    flops = plan.overhead.expected * step_flops(work, args, reference_forward=reference)
    speed = _speed(adapter, batches.length, trainer.compute_loss_context_manager())
    _say(f"about {_clock(steps * a_step * flops / speed)} for {steps} steps (an estimate)")


def _lengths(rows: Any, limit: int | None) -> list[int]:
    """Tokens of the first training rows; both sides of a pair together."""
    first = rows[:_SAMPLE] if hasattr(rows, "column_names") else {}
    if "input_ids" in first:
        found = [len(ids) for ids in first["input_ids"]]
    elif "chosen_ids" in first and "rejected_ids" in first:
        prompts = first.get("prompt_ids") or [[]] * len(first["chosen_ids"])
        parts = zip(prompts, first["chosen_ids"], first["rejected_ids"], strict=True)
        return [
            sum(min(len(p) + len(side), limit or math.inf) for side in (c, r))  # type: ignore[misc]
            for p, c, r in parts
        ]
    else:
        return []
    return [min(length, limit or length) for length in found]


# --- speed ----------------------------------------------------------------------------------------


def _speed(
    adapter: DecoderAdapter, longest: int, context: AbstractContextManager[Any] | None = None
) -> float:
    """FLOPs a second of the quickest of a few short forwards of the loaded model."""
    tokens = min(longest, _SHORT)
    with context or nullcontext():
        seconds = _forward_seconds(adapter, 1, tokens)
    return work_of(adapter, tokens).forward * tokens / max(seconds, 1e-9)


@torch.no_grad()
def _forward_seconds(adapter: DecoderAdapter, rows: int, tokens: int) -> float:
    device = next(adapter.model.parameters()).device
    ids = torch.ones(rows, tokens, dtype=torch.int64, device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    taken: list[float] = []  # the first warms up; on a busy machine any of them may be held up
    with evaluation_mode(adapter.model):
        while len(taken) < 2 or (len(taken) < 4 and sum(taken) < _PATIENCE):
            taken.append(timed(lambda: adapter.forward(inputs)))
    return min(taken)


# --- what is said ---------------------------------------------------------------------------------


def _expect(model: nn.Module, memory: Memory, seconds: float, *, check: bool, quiet: bool) -> None:
    device = next(model.parameters()).device
    needed = memory.total
    if device.type == "cpu":  # the libraries, tokenizer and rows; the weights are in both
        needed += max(resident_memory() - memory.weights, 0.0)
    if not quiet:
        _say(
            f"about {_clock(seconds)} (an estimate) and at most {_gib(needed)} of memory, when "
            f"{memory.peak}"
        )
    if check:
        remedy = (
            "a smaller --per_device_train_batch_size or --max_length, fewer --score_layers, or a "
            "narrower --dtype"
        )
        require_memory(needed, device, peak=memory.peak, remedy=remedy)


def _say(text: str) -> None:
    print(f"expected: {text}", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=max(round(seconds), 1)))


def _gib(size: float) -> str:
    return f"{size / 2.0**30:.3g} GiB"
