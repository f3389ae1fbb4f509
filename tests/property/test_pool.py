"""The validation pool: what each step draws, and what no step ever draws."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import chain, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken.errors import ConfigError
from alphatoken.race.rows import set_aside
from alphatoken.race.runner import _check_validation_rows
from alphatoken.train.options import AlphaOptions
from alphatoken.train.pool import ValidationPool
from alphatoken.train.records import TrainMonitor
from alphatoken.train.refusals import check_pool
from alphatoken.train.run_rows import RunRows
from alphatoken.train.trainer_loss import MicroBatch, MicroBatchPlan, TrainerLoss, divisor_factor
from alphatoken.train.valuation import Valuation

SIZES = st.integers(1, 40)
SHARES = st.sampled_from((0.0, 0.1, 0.2, 0.5))
SEEDS = st.integers(0, 1000)
Settings = dict[str, Any]


@st.composite
def settings(draw: st.DrawFn, mode: str = "pool") -> dict[str, Any]:
    """At least one batch left to draw, and so few rows that batches cross epochs often."""
    size, share = draw(SIZES), draw(SHARES)
    held_count = 0 if share == 0 else max(1, round(share * size))
    if held_count >= size:
        size, held_count = size + 1, max(1, round(share * (size + 1)))
    batch = draw(st.integers(1, size - held_count))
    return {
        "size": size,
        "batch_size": batch,
        "mode": mode,
        "held_out_share": share,
        "seed": draw(SEEDS),
    }


@given(settings())
@example({"size": 6, "batch_size": 5, "mode": "pool", "held_out_share": 0.0, "seed": 1})
@example({"size": 7, "batch_size": 4, "mode": "pool", "held_out_share": 0.2, "seed": 0})
def test_every_epoch_holds_each_row_once_and_no_batch_holds_one_twice(chosen: Settings) -> None:
    pool = ValidationPool(**chosen)
    count = len(pool.drawn)
    batches = [pool.rows(step) for step in range(3 * count)]
    assert all(len(set(rows)) == len(rows) == pool.batch_size for rows in batches)
    stream = list(chain.from_iterable(batches))
    for epoch in range(len(stream) // count):
        part = stream[epoch * count : (epoch + 1) * count]
        assert sorted(part) == list(pool.drawn)


@given(settings(), st.lists(st.integers(0, 500), min_size=1, max_size=10))
def test_rows_depend_on_the_step_alone(chosen: Settings, steps: list[int]) -> None:
    """Whatever was asked before, in whatever order, a fresh pool gives the same: resume."""
    pool = ValidationPool(**chosen)
    for step in steps:
        fresh = ValidationPool(**chosen)
        assert fresh == pool
        assert pool.rows(step) == fresh.rows(step)


@given(st.one_of(settings("pool"), settings("fixed")))
def test_held_out_rows_are_never_drawn(chosen: Settings) -> None:
    pool = ValidationPool(**chosen)
    drawn = set(chain.from_iterable(pool.rows(step) for step in range(2 * pool.size)))
    assert drawn == set(pool.drawn)
    assert drawn.isdisjoint(pool.held_out)
    assert drawn | set(pool.held_out) <= set(range(pool.size))
    share = pool.held_out_share
    want = 0 if share == 0 else max(1, round(share * pool.size))
    assert len(pool.held_out) == len(set(pool.held_out)) == want
    if pool.mode == "pool":
        assert len(pool.held_out) + len(pool.drawn) == pool.size
    else:
        assert all(pool.rows(step) == pool.rows(0) for step in (1, pool.size, 10**9))
        assert len(set(pool.rows(0))) == pool.batch_size


@given(st.one_of(settings("pool"), settings("fixed")), st.integers(0, 60))
def test_a_walk_takes_every_drawn_row_once(chosen: Settings, step: int) -> None:
    """From the place where the step's own batch begins, up to the end of the epoch.

    Proves: the rows of a walk in a run (exact), against the batches of the pool.
    """
    pool = ValidationPool(**chosen)
    rows = pool.rows_from(step)
    assert sorted(rows) == list(pool.drawn)
    if pool.mode == "pool":
        left = len(rows) - step * pool.batch_size % len(rows)  # of the epoch
        assert rows[: min(left, pool.batch_size)] == pool.rows(step)[:left]


def test_fixed_takes_all_rows_where_there_are_fewer() -> None:
    pool = ValidationPool(10, 32, held_out_share=0.2)
    assert len(pool.rows(3)) == 8
    assert ValidationPool(8, 8, held_out_share=0.0).rows(0) == tuple(range(8))


def test_the_order_is_pinned() -> None:
    """A run that was started with one release is resumed by the next."""
    pool = ValidationPool(10, 3, mode="pool", held_out_share=0.2, seed=7)
    assert pool.held_out == (0, 6)
    assert [pool.rows(step) for step in range(4)] == [
        (3, 1, 7), (9, 2, 4), (8, 5, 9), (8, 5, 4),
    ]  # fmt: skip


def test_a_late_step_of_a_large_pool_is_reached_directly() -> None:
    """The chain of epochs ends at the last one that began with a batch."""
    pool = ValidationPool(1001, 1000, mode="pool", held_out_share=0.0)
    late = 1001 * 10**6 + 5
    assert len(set(pool.rows(late))) == 1000


@given(
    rows=st.lists(st.integers(0, 99), min_size=1, max_size=20, unique=True), world=st.integers(1, 8)
)
def test_shares_of_the_ranks_are_a_partition(rows: list[int], world: int) -> None:
    if len(rows) < world:
        with pytest.raises(ConfigError, match="fewer validation rows than processes"):
            ValidationPool.share_of(rows, 0, world)
        return
    shares = [ValidationPool.share_of(rows, rank, world) for rank in range(world)]
    assert sorted(chain.from_iterable(shares)) == sorted(rows)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(
    settings(), st.integers(0, 60), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3),
    st.booleans(),
)  # fmt: skip
def test_a_walk_of_a_run_takes_no_row_again_before_all_are_taken(
    chosen: Settings, step: int, steps: int, size: int, world: int, walks: bool
) -> None:
    """``size`` rows a step on each process. Other estimators have the batch of the run's step.

    Proves: the number of rows of a walk in a run (exact), against its steps.
    """
    pool = ValidationPool(**chosen)
    options = {"estimator": "walk" if walks else "label", "walk_steps": steps}
    valuation: Any = SimpleNamespace(
        pool=pool,
        _options=SimpleNamespace(**options),
        _ranks=SimpleNamespace(world=world),
        _rows_at_once=lambda rows: size,
    )
    rows = Valuation._chosen(valuation, pool, [], step)
    assert len(set(rows)) == len(rows)
    if walks:
        assert len(rows) == min(len(pool.drawn), steps * size * world)
    else:
        assert rows == pool.rows(step)


# --- draws of a run ------------------------------------------------------------------------------


def test_draws_are_of_seed_step_micro_batch_and_process() -> None:
    """Where any of the four differs, random masks are drawn anew; where none does, they are the
    same.

    Proves: draws are of seed step micro batch and process (exact), against seeds of all keys.
    """
    keys = list(product(range(3), repeat=4))
    seeds = [_draw_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert seeds == [_draw_seed(*key) for key in keys]


def _draw_seed(seed: int, step: int, micro_batch: int, process: int) -> int:
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(value_seed=seed),
        state=SimpleNamespace(global_step=step),
        accelerator=SimpleNamespace(process_index=process),
    )
    batch: Any = SimpleNamespace(plan=MicroBatchPlan(micro_batch))
    return TrainerLoss(trainer, trainer).draw_seed(batch)


def test_retention_rows_are_drawn_apart_from_validation_rows() -> None:
    """Two pools of as many rows do not run side by side through one order.

    Proves: retention rows are drawn apart from validation rows (exact), against the other pool.
    """
    options = {
        "validation_mode": "pool", "validation_batch_size": 2, "retention_batch_size": 2,
        "held_out_steps": 0, "value_seed": 3,
    }  # fmt: skip
    rows = [{"input_ids": [i]} for i in range(8)]
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(**vars(replace(AlphaOptions(), **options)), disable_tqdm=True),
        accelerator=None,
    )
    loss, run_rows = TrainerLoss(trainer, trainer), RunRows(validation=rows, retention=rows)
    valuation = Valuation(loss, run_rows, TrainMonitor(), needed=True)
    pools = valuation.pool, valuation._retention_pool
    first, second = ([pool.rows(step) for step in range(8)] for pool in pools if pool)
    assert sum(one == two for one, two in zip(first, second, strict=True)) <= 2


@pytest.mark.parametrize("arguments", [{"mode": "pool", "batch_size": 9}, {"size": 1}])
def test_too_few_rows_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="too small"):
        ValidationPool(**{"size": 10, "batch_size": 4, "held_out_share": 0.2, **arguments})


# --- weights of a step ---------------------------------------------------------------------------

COUNTED = ("no count", "counts of each process", "a count of all")


@st.composite
def token_counts(draw: st.DrawFn) -> list[list[int]]:
    """Of each process's micro-batches, of which all have as many."""
    micro_batches = draw(st.integers(1, 3))
    own = st.lists(st.integers(1, 5), min_size=micro_batches, max_size=micro_batches)
    return draw(st.lists(own, min_size=1, max_size=3))


def gradients_of_step(sizes: list[list[int]], counted: str) -> list[tuple[list[float], MicroBatch]]:
    """Of each micro-batch its tokens' part of the mean gradient, and what the library makes of it.

    Gradients are averaged over processes, whose micro-batches are of any sizes.
    """
    step, world, every = torch.zeros(()), len(sizes), sum(map(sum, sizes))
    found = []
    for rank, own in enumerate(sizes):
        count = {"no count": None, "counts of each process": sum(own)}.get(counted, every)
        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(average_tokens_across_devices=counted != "counts of each process"),
            accelerator=SimpleNamespace(process_index=rank, num_processes=world, device=None),
            current_gradient_accumulation_steps=len(own),
        )
        for number, size in enumerate(own):
            losses = torch.ones(size, requires_grad=True)
            # As TRL and transformers divide it, and DistributedDataParallel adds it up.
            loss = losses.mean() / len(own) if count is None else losses.sum() / count
            step = step + (loss * world if counted == "a count of all" else loss) / world
            labels = torch.ones(1, size + 1, dtype=torch.long)
            inputs = {"input_ids": labels, "labels": labels}
            plan = MicroBatchPlan(number)
            found.append((losses, TrainerLoss(trainer, trainer).micro_batch(inputs, plan, count)))
    step.backward()
    return [(losses.grad.tolist(), batch) for losses, batch in found if losses.grad is not None]


@given(token_counts(), st.sampled_from(COUNTED))
def test_a_tokens_weight_in_a_step_is_its_part_of_the_mean_gradient(
    sizes: list[list[int]], counted: str
) -> None:
    """Proves: the weight of a token in a step of several processes (exact), against autograd."""
    for gradients, batch in gradients_of_step(sizes, counted):
        assert gradients == pytest.approx([batch.step_unit] * len(gradients), rel=1e-5)


@given(token_counts(), st.sampled_from(COUNTED))
def test_a_sum_is_over_the_tokens_of_all_processes(sizes: list[list[int]], counted: str) -> None:
    """Each token's gradient counts once, however the trainer divides and averages them.

    Proves: a loss without a divisor in several processes (exact), against autograd.
    """
    for gradients, batch in gradients_of_step(sizes, counted):
        factor = float(divisor_factor(torch.ones(len(gradients)), batch, "sum"))
        assert [factor * one for one in gradients] == pytest.approx(
            [1.0] * len(gradients), rel=1e-5
        )


POOLS: dict[str, tuple[int, dict[str, Any], int]] = {
    "one row": (1, {"validation_mode": "pool", "validation_batch_size": 4}, 1),
    "the same, all drawn": (
        1, {"validation_mode": "pool", "validation_batch_size": 4, "held_out_share": 0.0}, 1
    ),
    "one row of a fixed batch": (1, {}, 1),
    "one too few": (4, {"validation_mode": "pool", "validation_batch_size": 4}, 1),
    "all held out": (4, {"held_out_share": 0.9}, 1),
    "fewer than processes": (3, {"validation_batch_size": 2}, 4),
    "a batch below the processes": (30, {"validation_batch_size": 2, "held_out_share": 0.0}, 4),
    "few held out": (12, {"validation_batch_size": 8, "held_out_share": 0.1}, 4),
    "none": (0, {}, 1),
    "one row of a walk": (1, {"estimator": "walk", "validation_mode": "pool"}, 1),
    "a walk in more processes than rows": (3, {"estimator": "walk"}, 4),
}  # fmt: skip
"""Validation rows that are too few, options, and processes."""


@pytest.mark.parametrize("case", POOLS)
def test_each_remedy_of_too_few_rows_is_one(case: str) -> None:
    """As Python and a shell have it; and it names no option that is as it advises.

    Proves: remedies of too few validation rows (exact), against the pool of a run with them.
    """
    rows, options, processes = POOLS[case]
    defaults = {"validation_batch_size": 8, "validation_mode": "fixed", "held_out_steps": 10}
    defaults |= {"estimator": "label", "held_out_share": 0.2, "value_seed": 0}
    own = {**defaults, **options}
    with pytest.raises(ConfigError) as caught:
        check_pool(SimpleNamespace(**own), rows, processes)
    remedies = caught.value.remedy.split(", or ")
    assert all(remedies)
    for remedy in remedies:
        more = re.fullmatch(r"more validation rows \((\d+) are enough\)(?: with (.*))?", remedy)
        found = re.fullmatch(r"(\S+=.*) \((--.*)\)", remedy if more is None else more[2] or "")
        python, shell = (
            {name: float(value) for name, value in re.findall(r"(\w+)[= ]([\d.]+)", part)}
            for part in (found.groups() if found else ("", ""))
        )
        assert python == shell
        assert all(own[name] != value for name, value in python.items())
        changed = {n: int(v) if n == "validation_batch_size" else v for n, v in python.items()}
        enough = rows if more is None else int(more[1])
        check_pool(SimpleNamespace(**{**own, **changed}), enough, processes)


@pytest.mark.parametrize(
    ("trusted", "wanted", "batch"),
    [(10, None, 4), (24, None, 16), (12, 9, 4), (9, 8, 1), (3, 2, 1)],
)
def test_each_remedy_of_an_arm_without_enough_rows_is_one(
    trusted: int, wanted: int | None, batch: int
) -> None:
    """Of rows of which some are set aside to choose by.

    Proves: remedies of an arm's few validation rows (exact), against the pool of a run with them.
    """
    args: Any = SimpleNamespace(
        needs_values=True, estimator="label", objective="adaptation", world_size=1,
        validation_batch_size=batch, validation_mode="pool", held_out_steps=10,
        held_out_share=0.2, value_seed=0,
    )  # fmt: skip
    aside = partial(set_aside, wanted=wanted)
    rows = trusted - aside(trusted)
    with pytest.raises(ConfigError, match="too few validation rows") as caught:
        _check_validation_rows("label", args, rows, aside(trusted), aside)
    remedy = caught.value.remedy
    (in_all,) = map(int, re.findall(r"\((\d+) in all are enough\)", remedy))
    assert in_all > trusted
    check_pool(args, in_all - aside(in_all), 1)
    for fewer in map(int, re.findall(r"--choosing_rows (\d+)", remedy)):
        assert 2 <= fewer < aside(trusted)
        check_pool(args, trusted - fewer, 1)
    if wanted == 2:
        assert "choosing_rows" not in remedy
    with pytest.raises(ConfigError) as own:
        check_pool(args, rows, 1)
    assert own.value.remedy.partition(", or ")[2] in remedy
