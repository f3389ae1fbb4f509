"""What a run reports: its statistics by hand, across processes and checkpoints, on a terminal."""

from __future__ import annotations

import json
import os
import pty
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ProgressCallback, TrainerCallback

from alphatoken.support.progress import Progress
from alphatoken.train.monitor import CURVES, TrainMonitor, console_line, weight_drift
from alphatoken.train.statistics import _RECORDS, ValueSums, summary
from alphatoken.values import TokenValues
from tests.integration import tiny_training as tiny
from tests.integration.killed_run import Run, finish

_COMPONENTS = ("alpha/adaptation", "alpha/stability")
NAMES = ("adaptation_direct", "adaptation_causal", "stability_direct", "stability_causal")


def drawn(seed: int, rows: int = 3, length: int = 7, *, split: bool = True) -> Any:
    """Weights, mask and values of one micro-batch; lambda = 1.5."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, length, generator=draw) > 0.4
    mask[:, 0] = False
    parts = [torch.randn(rows, length, generator=draw) * mask for _ in NAMES]
    adaptation, stability = parts[0] + parts[1], parts[2] + parts[3]
    values = TokenValues(
        adaptation + 1.5 * stability, mask, adaptation, stability,
        *(parts if split else [None] * 4), torch.zeros(rows), "alphatoken", 1.5,
    )  # fmt: skip
    return torch.rand(rows, length, generator=draw).round(), mask, values


def add(sums: ValueSums, batches: Sequence[Any]) -> ValueSums:
    for weights, mask, values in batches:
        sums.add(weights, mask, values, tokens=mask.numel())
    return sums


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [True, False])
def test_statistics_by_hand(split: bool) -> None:
    batches = [drawn(seed, split=split) for seed in range(5)]
    found = summary([add(ValueSums(), batches).state()])
    total = torch.cat([v.total[m] for _, m, v in batches]).double().numpy()
    kept = sum(float((w * m).sum()) for w, m, _ in batches)
    assert found["tokens"] == 5 * 21
    assert found["response_tokens"] == len(total)
    assert found["kept_share"] == found["weight_share"] == kept / len(total)
    assert found["total_mean"] == pytest.approx(total.mean(), rel=1e-12)
    assert found["total_std"] == pytest.approx(total.std(), rel=1e-12)
    levels = [found["total_q05"], found["total_median"], found["total_q95"]]
    assert levels == pytest.approx(np.quantile(total, [0.05, 0.5, 0.95]), rel=1e-12)
    names = NAMES if split else ("adaptation", "stability")
    columns = {
        name: torch.cat([v.components()[name][m] for _, m, v in batches]).double().numpy()
        for name in names
    }
    whole = sum(np.abs(column).sum() for column in columns.values())
    for name, column in columns.items():
        assert found[f"{name}_mean"] == pytest.approx(column.mean(), rel=1e-12)
        assert found[f"{name}_std"] == pytest.approx(column.std(), rel=1e-12)
        assert found[f"{name}_share"] == pytest.approx(np.abs(column).sum() / whole, rel=1e-12)
    assert sum(found[f"{name}_share"] for name in names) == pytest.approx(1)
    one = summary([add(ValueSums(), batches[:1]).state()])
    assert {n: one[f"{n}_share"] for n in names} == pytest.approx(batches[0][2].shares(), rel=1e-6)


def test_soft_weights_and_micro_batches_without_values() -> None:
    weights, mask, _ = drawn(0)
    found = summary([add(ValueSums(), [(0.25 * mask, mask, None)]).state()])
    assert found["kept_share"] == 1
    assert found["weight_share"] == 0.25
    assert "total_mean" not in found
    mixed = add(ValueSums(), [drawn(1)])
    add(mixed, [(weights, mask, None)])
    found = summary([mixed.state()])
    total = drawn(1)[2]
    assert found["total_mean"] == pytest.approx(float(total.total[total.mask].mean()), rel=1e-6)


def test_components_count_their_own_tokens() -> None:
    """Totals of every micro-batch, components of those that came with them."""
    batches = [drawn(seed) for seed in range(4)]
    mixed = [
        (w, m, values if i % 2 else values.total_alone())
        for i, (w, m, values) in enumerate(batches)
    ]
    sums = add(ValueSums(), mixed[:3])
    again = ValueSums()
    again.load(json.loads(json.dumps(sums.state())))
    found = summary([add(again, mixed[3:]).state()])
    whole = summary([add(ValueSums(), batches).state()])
    half = summary([add(ValueSums(), batches[1::2]).state()])
    assert found.keys() == whole.keys()
    for name, value in found.items():
        part = name.startswith(("adaptation", "stability"))
        assert value == pytest.approx((half if part else whole)[name], rel=1e-12), name
    alone = summary([add(ValueSums(), mixed[:1]).state()])
    assert not [name for name in alone if name.startswith(("adaptation", "stability"))]
    assert "total_median" in alone


def test_nothing_recorded_and_nothing_to_learn() -> None:
    assert summary([ValueSums().state()]) == {"tokens": 0, "response_tokens": 0}
    weights, mask, values = drawn(0)
    empty = torch.zeros_like(mask)
    zero = replace(values, total=values.total * 0, mask=empty)
    found = summary([add(ValueSums(), [(weights, empty, zero)]).state()])
    assert found == {"tokens": 21, "response_tokens": 0}


def test_processes_together_are_as_one() -> None:
    batches = [drawn(seed) for seed in range(6)]
    parts = [add(ValueSums(), batches[:2]).state(), add(ValueSums(), batches[2:]).state()]
    assert summary(parts) == pytest.approx(summary([add(ValueSums(), batches).state()]), rel=1e-12)
    idle = ValueSums().state()
    assert summary([*parts, idle]) == summary(parts)


@pytest.mark.parametrize("cut", [0, 1, 130, 300])
def test_state_goes_on_to_the_same_bits(cut: int) -> None:
    """Also where the sample has been thinned already."""
    batches = [drawn(seed, 2, 5) for seed in range(301)]
    whole = add(ValueSums(), batches)
    first = add(ValueSums(), batches[:cut])
    second = ValueSums()
    second.load(json.loads(json.dumps(first.state())))
    add(second, batches[cut:])
    assert second.state() == whole.state()
    assert len(whole.state()["sample"]) <= _RECORDS
    whole.clear()
    assert whole.state()["records"] == 301
    assert summary([whole.state()])["response_tokens"] == 0


def test_quantiles_of_many_values_are_close() -> None:
    sums, every = ValueSums(), []
    for seed in range(200):
        weights, mask, values = drawn(seed, 8, 200)
        add(sums, [(weights, mask, values)])
        every.append(values.total[mask])
    found = summary([sums.state()])
    for name, level in (("q05", 0.05), ("median", 0.5), ("q95", 0.95)):
        wanted = float(np.quantile(torch.cat(every).numpy(), level))
        # 25,000 drawn values or more: six standard errors of a normal's quantile.
        assert found[f"total_{name}"] == pytest.approx(wanted, abs=6 * 2.6 * 2.1 / 25_000**0.5)


def test_recording_reads_nothing_from_the_device() -> None:
    """Tensors without content: whatever looked at one would fail."""
    _, mask, values = drawn(0, 4, 1000)
    mask = mask.to("meta")
    moved = {
        name: value.to("meta")
        for name, value in vars(values).items()
        if isinstance(value, torch.Tensor)
    }
    hollow = replace(values, **moved)
    sums = ValueSums()
    for _ in range(3):
        sums.add(mask.float(), mask, hollow, tokens=mask.sum())
    with pytest.raises((NotImplementedError, RuntimeError)):
        sums.state()


def test_recording_leaves_the_random_state() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()  # noqa: NPY002
    add(ValueSums(), [drawn(0, 8, 500)])
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[2] == np.random.get_state()[1].tobytes()  # noqa: NPY002


def test_weight_drift_by_hand() -> None:
    draw = torch.Generator().manual_seed(0)
    start = {n: torch.randn(4, 5, generator=draw) for n in "ab"}
    now = {n: start[n] + 0.1 * torch.randn(4, 5, generator=draw) for n in "ab"}
    moved = torch.cat([(now[n] - start[n]).flatten() for n in "ab"]).double().norm()
    whole = torch.cat([start[n].flatten() for n in "ab"]).double().norm()
    found = weight_drift(now, {**start, "c": torch.zeros(1)})
    assert found["drift"] == pytest.approx(float(moved), rel=1e-6)
    assert found["relative_drift"] == pytest.approx(float(moved / whole), rel=1e-6)
    zeros = {n: torch.zeros(2, 2) for n in "ab"}
    assert weight_drift(zeros, zeros) == {"drift": 0, "relative_drift": 0}
    assert weight_drift({}, {}) == {"drift": 0, "relative_drift": 0}
    half = weight_drift({"a": now["a"].bfloat16()}, {"a": now["a"]})
    assert half["drift"] > 0, "compared in float32"


class _Args:
    disable_tqdm = True


class _State:
    global_step, max_steps, is_world_process_zero = 4, 10, True


class _Trainer:
    args, state = _Args(), _State()


def test_alarm_when_the_held_out_part_turns() -> None:
    monitor = TrainMonitor(_Trainer())
    assert monitor.looked_at is None
    for step, (pool, held, alarm) in enumerate(
        [
            (2.0, 2.1, False),
            (1.5, 1.7, False),
            (1.2, 1.72, False),
            (1.0, 1.8, True),
            (2.0, 2.2, False),
        ]
    ):
        monitor.gap(step, {"pool": pool, "held_out": held, "gap": held - pool})
        assert monitor.alarm is alarm, step
        logs = monitor.logs()
        assert logs["alpha/validation_gap"] == pytest.approx(held - pool)
        assert logs["alpha/validation_alarm"] == alarm
    monitor.gap(9, {})
    assert monitor.looked_at == 4


def test_monitor_state_holds_the_looks_and_the_balance() -> None:
    first, second = TrainMonitor(_Trainer()), TrainMonitor(_Trainer())
    weights, mask, values = drawn(0)
    first.record(weights, mask, replace(values, balance={"a": 0.5, "b": 3.0, "c": 2.0}), seconds=2)
    first.direction(0.25)
    first.direction(0.5)
    first.gap(3, {"pool": 1.0, "held_out": 2.0, "gap": 1.0})
    second.load_values(json.loads(json.dumps(first.state_values())))
    clock = ("alpha/tokens_per_second", "alpha/seconds_left")
    logs = [{k: v for k, v in m.logs().items() if k not in clock} for m in (first, second)]
    assert logs[0] == logs[1]
    assert logs[0]["alpha/balance"] == 2.0
    assert logs[0]["alpha/scoring_seconds"] == 2.0
    assert logs[0]["alpha/direction_seconds"] == 0.75
    assert second.logs()["alpha/direction_seconds"] == 0.0
    assert second.looked_at == 3


def test_console_line_for_a_reader() -> None:
    logs = {
        "loss": 1.23456, "alpha/kept_share": 0.5, "alpha/total_mean": 1e-4, "alpha/total_std": 2e-3,
        "alpha/balance": 0.25, "alpha/validation_gap": -0.01, "alpha/validation_alarm": 1.0,
        "alpha/drift": 0.1, "alpha/tokens_per_second": 12345.6,
    }  # fmt: skip
    line = console_line(7, logs)
    assert line.startswith("step 7, loss 1.235, kept 50.0%, value 0.0001 ± 0.002, balance 0.25")
    assert "gap -0.01, drift 0.1, 12,346 tokens/s" in line
    assert "the run fits the validation rows" in line
    assert console_line(7, {"loss": 1.0}) == "step 7, loss 1"


# --- in a run -------------------------------------------------------------------------------------


class _Sink(TrainerCallback):
    """What a reporting integration gets."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def test_trackers_get_ten_curves_and_the_page_of_the_run_all(tmp_path: Path) -> None:
    more = {"save_strategy": "no", "max_steps": 4, "held_out_steps": 1}
    trainer, sink = Run("sft", tmp_path, options=more).trainer(), _Sink()
    trainer.add_callback(sink)
    trainer.train()
    kept = [{n for n in e if n.startswith("alpha/")} for e in trainer.state.log_history]
    sent = [{n for n in logs if n.startswith("alpha/")} for logs in sink.logs]
    assert len(CURVES) == 10
    assert len(kept[1]) > 25, "the trainer's state keeps all, for the page of the run"
    assert sent[1] == set(CURVES)


def test_logs_of_a_run(tmp_path: Path) -> None:
    """They reach the history and every reporting callback, and are right."""
    run = Run("sft", tmp_path, options={"save_strategy": "no", "logging_steps": 2, "max_steps": 4})
    trainer, sink = run.trainer(), _Sink()
    trainer.add_callback(sink)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4]
    sent = [logs for logs in sink.logs if "loss" in logs]
    assert [s["alpha/kept_share"] for s in sent] == [e["alpha/kept_share"] for e in logged]
    wanted = {
        "kept_share", "total_mean", "total_std", "total_q05", "total_median", "total_q95",
        "balance", "validation_pool", "validation_held_out", "validation_gap", "drift",
        "relative_drift", "tokens_per_second", "seconds_left", "scoring_seconds",
        "direction_seconds",
        *(f"{name}_{kind}" for name in NAMES for kind in ("mean", "std", "share")),
    }  # fmt: skip
    for entry in logged:
        assert wanted <= {name.removeprefix("alpha/") for name in entry}
        assert all(np.isfinite(value) for value in entry.values())
        assert 0.5 <= entry["alpha/kept_share"] <= 0.55
        assert entry["alpha/scoring_seconds"] > 0
        assert entry["alpha/direction_seconds"] > 0
        assert entry["alpha/validation_gap"] == pytest.approx(
            entry["alpha/validation_held_out"] - entry["alpha/validation_pool"]
        )
    assert not any(name.startswith("alpha/") for name in trainer.state.log_history[-1])
    reference = tiny.model().state_dict()
    layers = ("model.layers.1.", "model.layers.2.")
    apart = [
        (weight - reference[name]).double().norm()
        for name, weight in trainer.model.state_dict().items()
        if name.startswith(layers) and "norm" not in name
    ]
    assert logged[-1]["alpha/drift"] == pytest.approx(float(torch.stack(apart).norm()), rel=1e-5)


@pytest.mark.slow
def test_logs_are_over_all_processes(tmp_path: Path) -> None:
    options = {"score_layers": "1", "max_steps": 1, "logging_steps": 1, "save_steps": 1}
    one = Run("sft", tmp_path / "one", options={**options, "per_device_train_batch_size": 4})
    finish(one)
    two = Run(
        "sft", tmp_path / "two", processes=2, options={**options, "per_device_train_batch_size": 2}
    )
    finish(two)
    logs = [
        json.loads((run.out / "checkpoint-1" / "trainer_state.json").read_text())["log_history"][0]
        for run in (one, two)
    ]
    assert logs[0]["alpha/response_tokens"] == logs[1]["alpha/response_tokens"]
    names = [name for name in logs[0] if name.startswith(("alpha/total", *_COMPONENTS))]
    assert len(names) == 5 + 3 * len(NAMES)
    for name in [*names, "alpha/validation_pool", "alpha/validation_held_out"]:
        assert logs[0][name] == pytest.approx(logs[1][name], rel=1e-3, abs=1e-6), name


@contextmanager
def terminal() -> Iterator[int]:
    """Standard error becomes a real terminal; its other end."""
    master, slave = pty.openpty()
    before = sys.stderr
    try:
        with os.fdopen(slave, "w") as sys.stderr:
            yield master
    finally:
        sys.stderr = before
        os.close(master)


def _read(master: int) -> str:
    os.set_blocking(master, False)
    parts = []
    while True:
        try:
            parts.append(os.read(master, 65536))
        except (BlockingIOError, OSError):
            return b"".join(parts).decode()


def test_console_on_a_terminal(tmp_path: Path) -> None:
    options = {"disable_tqdm": False, "max_steps": 3, "logging_steps": 2, "save_strategy": "no"}
    with terminal() as other_end:
        trainer = Run("sft", tmp_path, options=options).trainer()
        _read(other_end)
        trainer.train()
        text = _read(other_end)
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert ProgressCallback not in kinds
    lines = [part.replace("\x1b[K", "") for part in text.replace("\r\n", "\n").split("\r")]
    stays = [part for part in lines if "step 2, loss" in part]
    assert len(stays) == 1
    assert "kept 5" in stays[0]
    assert stays[0].endswith("\n")
    assert any(part.startswith("AlphaSFT: 3/3 (100%)") for part in lines), text


def test_console_elsewhere_is_as_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = {"disable_tqdm": False, "max_steps": 2, "logging_steps": 1, "save_strategy": "no"}
    trainer = Run("sft", tmp_path, options=options).trainer()
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert ProgressCallback in kinds
    trainer.train()
    found = capfd.readouterr()
    assert "alpha/kept_share" in found.out, "the trainer's own lines are there"
    assert "AlphaSFT: " not in found.out + found.err


def test_console_to_a_function() -> None:
    seen: list[Progress] = []
    monitor = TrainMonitor(_Trainer(), progress=seen.append)
    state = _State()
    monitor.on_train_begin(None, state, None)
    monitor.on_step_end(None, state, None)
    monitor.on_log(None, state, None, logs={"loss": 1.0})
    assert [(p.label, p.done, p.total) for p in seen] == [("_", 4, 10), ("_", 4, 10)]
    assert seen[-1].note == "step 4, loss 1"
    seen.clear()
    state.is_world_process_zero = False
    monitor.on_train_begin(None, state, None)
    monitor.on_step_end(None, state, None)
    assert seen == [], "one process speaks"
