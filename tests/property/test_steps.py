"""Steps of a run, counted before there is a loader: against accelerate's shares and a trainer."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from alphatoken.race.runner import whole_run
from alphatoken.train import AlphaSFTTrainer
from alphatoken.train.steps import Schedule
from tests.integration import tiny_training as tiny


def arguments(schedule: Schedule, processes: int, *, split: bool) -> tuple[SimpleNamespace, int]:
    """A configuration that says the same, and the rows."""
    args = SimpleNamespace(
        train_batch_size=schedule.batch,
        gradient_accumulation_steps=schedule.accumulated,
        num_train_epochs=schedule.epochs,
        dataloader_drop_last=schedule.drop_last,
        max_steps=schedule.max_steps or -1,
        accelerator_config=SimpleNamespace(split_batches=split),
    )
    return args, schedule.rows


schedules = st.builds(
    Schedule,
    rows=st.integers(1, 90),
    batch=st.sampled_from((1, 2, 4, 8)),
    accumulated=st.integers(1, 5),
    epochs=st.sampled_from((0.5, 1.0, 2.5, 3.0)),
    drop_last=st.booleans(),
)


@given(schedules, st.sampled_from((1, 2, 4)), st.booleans())
@example(Schedule(45, 4, 4), 1, False)
@example(Schedule(45, 4, 2), 4, False)
@example(Schedule(45, 4, 2, drop_last=True), 4, False)
@example(Schedule(45, 4, 2), 2, True)
def test_steps_are_those_of_accelerates_shares(
    schedule: Schedule, processes: int, split: bool
) -> None:
    """Proves: steps of a run by its rows (exact), against the batches that accelerate deals out."""
    if split and schedule.batch % processes:
        return  # accelerate refuses it
    args, rows = arguments(schedule, processes, split=split)
    made = Schedule.of(args, rows, processes)
    batches: Any = BatchSampler(range(rows), schedule.batch, drop_last=schedule.drop_last)
    dealt = [
        len(BatchSamplerShard(batches, processes, rank, split_batches=split))
        for rank in range(processes)
    ]
    in_epoch = max(math.ceil(dealt[0] / schedule.accumulated), 1)
    assert made.steps == math.ceil(schedule.epochs * in_epoch)
    own = next(iter(BatchSamplerShard(batches, processes, 0, split_batches=split)), [])
    whole = len(own) * processes * schedule.accumulated
    if rows >= whole > 0 and len(own) * (processes if split else 1) == schedule.batch:
        assert made.rows_of_step == whole


@pytest.mark.parametrize(
    "options",
    [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 3},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8},
        {"per_device_train_batch_size": 4, "dataloader_drop_last": True},
        {"max_steps": 2},
    ],
    ids=str,
)
def test_steps_are_those_of_the_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    """Proves: steps of a run by its rows (exact), against the steps that transformers takes."""
    data = {"model": tiny.model(layers=1), "train_dataset": tiny.sft_rows(11)}
    more = {"num_train_epochs": 1, "policy": "standard", "max_steps": -1, **options}
    trainer = tiny.made(AlphaSFTTrainer, tmp_path, **data, **more)
    counted = Schedule.of(trainer.args, len(trainer.train_dataset), 1).steps
    assert counted == whole_run(trainer)
    trainer.train()
    assert counted == trainer.state.global_step


@given(schedules, st.integers(1, 60))
@example(Schedule(45, 4, 4), 20)
@example(Schedule(3, 4, 4), 20)
@example(Schedule(45, 4, 4, max_steps=3), 20)
def test_options_for_a_longer_run_make_it_as_long(schedule: Schedule, wanted: int) -> None:
    """Proves: options for a longer run (exact), against its steps with them."""
    if schedule.steps >= wanted:
        return
    offered = list(schedule.longer(wanted))
    assert offered
    for words, steps in offered:
        args, rows = arguments(schedule, 1, split=False)
        own = words.split()
        for flag, number in zip(own[::2], own[1::2], strict=True):
            name = flag.removeprefix("--").removeprefix("per_device_")
            assert hasattr(args, name)
            setattr(args, name, int(number))
        assert Schedule.of(args, rows, 1).steps == steps >= wanted
