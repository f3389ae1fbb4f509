"""What a run reports, by hand; that a run logs it is a property of ``test_trainer_oracle.py``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from alphatoken.errors import AlphaTokenWarning
from alphatoken.train.records import TrainMonitor
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


def monitor(batches: Sequence[Any]) -> TrainMonitor:
    made = TrainMonitor()
    for weights, mask, values in batches:
        made.record(weights, mask, values)
    return made


def reloaded(first: TrainMonitor) -> TrainMonitor:
    second = TrainMonitor()
    second.load_values(json.loads(json.dumps(first.state_values())))
    return second


# --- numbers --------------------------------------------------------------------------------------


def test_statistics_by_hand() -> None:
    """Masks, soft weights, and micro-batches without values."""
    batches = [drawn(seed) for seed in range(5)]
    logs = monitor(batches).logs()
    response = sum(int(m.sum()) for _, m, _ in batches)
    kept = sum(float((w * m).sum()) for w, m, _ in batches)
    assert logs["alpha/response_tokens"] == response
    assert logs["alpha/kept_share"] == logs["alpha/weight_share"] == kept / response
    mask = torch.tensor([[0, 1, 1]]).bool()
    soft = (torch.tensor([[0.0, 1.0, 0.5]]), torch.tensor([[0.0, 0.25, 0.0]]))
    logs = monitor([(weights, mask, None) for weights in soft]).logs()
    assert (logs["alpha/kept_share"], logs["alpha/weight_share"]) == (3 / 4, 1.75 / 4)
    effective = 1.75**2 / (1 + 0.25 + 0.0625)  # (sum w)^2 / sum w^2
    assert logs["alpha/effective_share"] == pytest.approx(effective / 4)


def test_the_largest_error_of_differences_is_kept_over_logs_and_checkpoints() -> None:
    weights, mask, values = drawn(0)
    label = [replace(values, derivative="one_sided", error=e) for e in (2e-3, 7e-3, 4e-3)]
    made = monitor([(weights, mask, one) for one in (values, *label)])
    made.logs()
    assert reloaded(made).derivatives() == {"one_sided": 7e-3}
    assert monitor([drawn(0)]).derivatives() == {}


def test_nothing_recorded_and_nothing_to_learn() -> None:
    weights, mask, values = drawn(0)
    empty = torch.zeros_like(mask)
    zero = replace(values, total=values.total * 0, mask=empty)
    for batches in ([], [(weights, empty, zero)]):
        result = monitor(batches).logs()
        assert {name for name in result if "seconds" not in name} == {"alpha/response_tokens"}
        assert result["alpha/response_tokens"] == 0


def test_processes_together_are_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [drawn(seed) for seed in range(6)]
    whole = monitor(batches).logs()
    others = [monitor(batches[2:]).state_values(), TrainMonitor().state_values()]
    monkeypatch.setattr("alphatoken.train.records.gather_object", lambda own: [*own, *others])
    assert monitor(batches[:2]).logs() == pytest.approx(whole, rel=1e-12)


def test_a_step_that_learns_nothing_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is all its micro-batches on all processes, and a checkpoint may lie between them."""
    mask = torch.tensor([[False, True, True]])
    none, one = torch.zeros(1, 3), torch.tensor([[0.0, 0.0, -0.5]])

    def recorded(*batches: tuple[int | None, torch.Tensor]) -> TrainMonitor:
        made = TrainMonitor()
        for step, weights in batches:
            made.record(weights, mask, None, step)
        return made

    first = recorded((0, none), (0, one), (1, none), (1, none), (2, one), (3, none))
    with pytest.warns(AlphaTokenWarning, match="step 1 learned nothing: each of its 4 .* 2 of the"):
        reloaded(first).logs()
    with pytest.warns(AlphaTokenWarning, match="step 1 learned nothing"):
        first.end()
    first.record(none, mask, None, 4)
    first.logs()  # once is enough
    recorded((None, none)).logs()  # the policy's loss may learn of it
    empty = TrainMonitor()
    empty.record(none, mask & False, None, 0)
    empty.logs()  # there was nothing to learn
    others = [recorded((0, one), (1, one)).state_values()]
    monkeypatch.setattr("alphatoken.train.records.gather_object", lambda own: [*own, *others])
    recorded((0, none), (1, none)).logs()


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_state_goes_on_to_the_same_bits(cut: int) -> None:
    batches = [drawn(seed, 2, 5) for seed in range(4)]
    whole, second = monitor(batches), reloaded(monitor(batches[:cut]))
    for weights, mask, values in batches[cut:]:
        second.record(weights, mask, values)
    assert second.state_values() == whole.state_values()
    whole.logs()
    assert whole.logs()["alpha/response_tokens"] == 0


def test_recording_reads_nothing_from_the_device() -> None:
    """Tensors without content: whatever looked at one would fail."""
    _, mask, values = drawn(0, 4, 1000)
    mask = mask.to("meta")
    moved = {
        name: value.to("meta")
        for name, value in vars(values).items()
        if isinstance(value, torch.Tensor)
    }
    hollow = monitor([(mask.float(), mask, replace(values, **moved))] * 3)
    with pytest.raises((NotImplementedError, RuntimeError)):
        hollow.state_values()


def test_state_holds_the_look_the_balance_and_the_seconds() -> None:
    first = TrainMonitor()
    assert first.looked_at is None
    weights, mask, values = drawn(0)
    first.record(weights, mask, replace(values, balance={"a": 0.5, "b": 3.0, "c": 2.0}))
    first.scoring(2.0)
    first.direction(0.25)
    first.direction(0.5)
    first.gap(1, {"pool": 5.0, "held_out": 9.0, "gap": 4.0})
    first.gap(3, {"pool": 1.0, "held_out": 2.0, "gap": 1.0})
    first.gap(9, {})  # nothing was looked at
    second = reloaded(first)
    logs = [m.logs() for m in (first, second)]
    assert logs[0] == logs[1]
    assert logs[0]["alpha/balance"] == 2.0
    assert logs[0]["alpha/validation_gap"] == 1.0
    assert logs[0]["alpha/scoring_seconds"] == 2.0
    assert logs[0]["alpha/direction_seconds"] == 0.75
    assert second.logs()["alpha/direction_seconds"] == 0.0
    assert second.looked_at == 3
