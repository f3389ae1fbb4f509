"""What a run reports, by hand; that a run logs it is a property of ``test_trainer_oracle.py``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from alphatoken.train.monitor import TrainMonitor, ValueSums, summary
from alphatoken.values import TokenValues

NAMES = ("adaptation_direct", "adaptation_causal", "stability_direct", "stability_causal")


def drawn(seed: int, rows: int = 3, length: int = 7) -> Any:
    """Weights, mask and values of one micro-batch; lambda = 1.5."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, length, generator=draw) > 0.4
    mask[:, 0] = False
    parts = [torch.randn(rows, length, generator=draw) * mask for _ in NAMES]
    adaptation, stability = parts[0] + parts[1], parts[2] + parts[3]
    values = TokenValues(
        adaptation + 1.5 * stability, mask, adaptation, stability,
        *parts, torch.zeros(rows), "alphatoken", 1.5,
    )  # fmt: skip
    return torch.rand(rows, length, generator=draw).round(), mask, values


def add(sums: ValueSums, batches: Sequence[Any]) -> ValueSums:
    for weights, mask, values in batches:
        sums.add(weights, mask, values)
    return sums


# --- numbers --------------------------------------------------------------------------------------


def test_statistics_by_hand() -> None:
    batches = [drawn(seed) for seed in range(5)]
    found = summary([add(ValueSums(), batches).state()])
    total = torch.cat([v.total[m] for _, m, v in batches]).double().numpy()
    kept = sum(float((w * m).sum()) for w, m, _ in batches)
    assert found["response_tokens"] == len(total)
    assert found["kept_share"] == found["weight_share"] == kept / len(total)
    assert found["total_mean"] == pytest.approx(total.mean(), rel=1e-12)
    assert found["total_std"] == pytest.approx(total.std(), rel=1e-12)


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


def test_nothing_recorded_and_nothing_to_learn() -> None:
    assert summary([ValueSums().state()]) == {"response_tokens": 0}
    weights, mask, values = drawn(0)
    empty = torch.zeros_like(mask)
    zero = replace(values, total=values.total * 0, mask=empty)
    found = summary([add(ValueSums(), [(weights, empty, zero)]).state()])
    assert found == {"response_tokens": 0}


def test_processes_together_are_as_one() -> None:
    batches = [drawn(seed) for seed in range(6)]
    parts = [add(ValueSums(), batches[:2]).state(), add(ValueSums(), batches[2:]).state()]
    assert summary(parts) == pytest.approx(summary([add(ValueSums(), batches).state()]), rel=1e-12)
    idle = ValueSums().state()
    assert summary([*parts, idle]) == summary(parts)


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_state_goes_on_to_the_same_bits(cut: int) -> None:
    batches = [drawn(seed, 2, 5) for seed in range(4)]
    whole = add(ValueSums(), batches)
    first = add(ValueSums(), batches[:cut])
    second = ValueSums()
    second.load(json.loads(json.dumps(first.state())))
    add(second, batches[cut:])
    assert second.state() == whole.state()
    whole.clear()
    assert summary([whole.state()])["response_tokens"] == 0


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
        sums.add(mask.float(), mask, hollow)
    with pytest.raises((NotImplementedError, RuntimeError)):
        sums.state()


def test_alarm_when_the_held_out_part_turns() -> None:
    monitor = TrainMonitor()
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
    first, second = TrainMonitor(), TrainMonitor()
    weights, mask, values = drawn(0)
    first.record(weights, mask, replace(values, balance={"a": 0.5, "b": 3.0, "c": 2.0}), seconds=2)
    first.direction(0.25)
    first.direction(0.5)
    first.gap(3, {"pool": 1.0, "held_out": 2.0, "gap": 1.0})
    second.load_values(json.loads(json.dumps(first.state_values())))
    logs = [m.logs() for m in (first, second)]
    assert logs[0] == logs[1]
    assert logs[0]["alpha/balance"] == 2.0
    assert logs[0]["alpha/scoring_seconds"] == 2.0
    assert logs[0]["alpha/direction_seconds"] == 0.75
    assert second.logs()["alpha/direction_seconds"] == 0.0
    assert second.looked_at == 3
