"""Value-Propagation's pairs collected while real trainers run, which are not disturbed by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from alphatoken.diagnose.pairs import CollectedPairs
from alphatoken.errors import ConfigError, UnsupportedError
from alphatoken.train.sft import AlphaSFTTrainer
from alphatoken_lab.measure.pair_watch import PROBE, taken_up, watch_pairs
from tests.integration import tiny_training as tiny

PLAIN = {"policy": "all", "export_values": False}
"""TRL's own training: no token is valued."""


def sft(folder: Path, every: int = 0, **more: Any) -> AlphaSFTTrainer:
    """A run of four steps with dropout, under which values are by path."""
    torch.manual_seed(11)
    made = tiny.sft(folder, model=tiny.model(dropout=0.1), **{"estimator": "path", **more})
    if every:
        made.add_callback(watch_pairs(made, folder / "pairs.safetensors", every))
    return cast("AlphaSFTTrainer", made)


def collected(folder: Path) -> CollectedPairs:
    return CollectedPairs.load(folder / "pairs.safetensors")


@pytest.mark.parametrize("own", [{}, PLAIN], ids=["values", "standard"])
def test_a_run_that_is_watched_ends_with_the_bits_of_one_that_is_not(
    tmp_path: Path, own: dict[str, Any]
) -> None:
    """With dropout, whose draws any other draw in between would change; and nothing is left."""
    plain = sft(tmp_path / "a", **own)
    plain.train()
    watched = sft(tmp_path / "b", every=1, **own)
    before = {module: module.training for module in watched.model.modules()}
    watched.train()
    one, other = tiny.weights(plain.model), tiny.weights(watched.model)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {module: module.training for module in watched.model.modules()} == before
    assert sorted(collected(tmp_path / "b").steps) == [0, 1, 2, 3, 4]


def test_the_probe_is_the_same_at_every_step(tmp_path: Path) -> None:
    """Of a model that does not move, every look is the same."""
    trainer = sft(tmp_path, every=2, learning_rate=0.0, **PLAIN)
    trainer.train()
    found = collected(tmp_path)
    assert sorted(found.steps) == [0, 2, 4]
    looks = list(found.steps.values())
    for layer in (1, 2):
        assert all(np.array_equal(look[layer].joint, looks[0][layer].joint) for look in looks)
    assert found.about["rows"] == PROBE


class Stop(TrainerCallback):
    """Ends a run after a step, as a user does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_a_run_that_was_stopped_and_resumed_has_every_step_once(tmp_path: Path) -> None:
    """Stopped after step 5, of which the file has a look, and resumed at the checkpoint of 4."""
    more = {"save_strategy": "steps", "save_steps": 4, "max_steps": 6, **PLAIN}
    stopped = sft(tmp_path, every=1, **more)
    stopped.add_callback(Stop())
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert sorted(collected(tmp_path).steps) == [0, 1, 2, 3, 4, 5]
    resumed = sft(tmp_path, every=3, **more)  # is no other run
    resumed.train(resume_from_checkpoint="auto")
    assert sorted(collected(tmp_path).steps) == [0, 1, 2, 3, 4, 6]


def test_records_after_a_checkpoint_are_dropped_and_those_of_another_probe_refused() -> None:
    about = {"rows": 2, "window": 3}
    earlier = CollectedPairs(about, {step: {} for step in (0, 50, 100)})
    for step in (99, 50):
        assert sorted(taken_up(earlier, about, step).steps) == [0, 50]
    with pytest.raises(ConfigError, match=r"window: 3 then, 4 now"):
        taken_up(earlier, {**about, "window": 4}, 50)


def test_sharded_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = sft(tmp_path, **PLAIN)
    monkeypatch.setattr("alphatoken_lab.measure.pair_watch.layout", lambda _: "zero3")
    with pytest.raises(UnsupportedError, match="cannot be collected on sharded weights"):
        watch_pairs(trainer, tmp_path / "pairs.safetensors", 1)
