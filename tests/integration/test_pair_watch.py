"""Value-Propagation's pairs collected while real trainers run, which are not disturbed by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from alphatoken.errors import ConfigError, UnsupportedError
from alphatoken.fidelity.collected_pairs import CollectedPairs, PairCounts
from alphatoken.train.checks import check_watch
from alphatoken.train.manifest import RESULTS
from alphatoken.train.pair_watch import FILE, PROBE, PairWatch
from alphatoken.train.plan import Layout
from alphatoken.train.sft import AlphaSFTConfig, AlphaSFTTrainer
from tests.integration import tiny_training as tiny

NOTHING = {"policy": "all", "export_values": False}
"""TRL's own training: no token is valued."""


def sft(folder: Path, **more: Any) -> AlphaSFTTrainer:
    """A run of four steps with dropout, under which values are by path."""
    torch.manual_seed(11)
    made = tiny.sft(folder, model=tiny.model(dropout=0.1), **{"estimator": "path", **more})
    return cast("AlphaSFTTrainer", made)


def collected(folder: Path) -> CollectedPairs:
    return CollectedPairs.load(folder / RESULTS / FILE)


def same(one: CollectedPairs, other: CollectedPairs) -> bool:
    return (
        one.about == other.about
        and one.steps.keys() == other.steps.keys()
        and all(
            np.array_equal(counts.joint, other.steps[step][layer].joint)
            and np.array_equal(counts.risk, other.steps[step][layer].risk)
            for step, found in one.steps.items()
            for layer, counts in found.items()
        )
    )


def hooks(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    return {
        name: (len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("own", [{}, NOTHING], ids=["values", "standard"])
def test_a_run_that_is_watched_ends_with_the_bits_of_one_that_is_not(
    tmp_path: Path, own: dict[str, Any]
) -> None:
    """With dropout, whose draws any other draw in between would change; and nothing is left."""
    plain = sft(tmp_path / "a", **own)
    plain.train()
    watched = sft(tmp_path / "b", collect_value_propagation=1, **own)
    before = {module: module.training for module in watched.model.modules()}
    watched.train()
    one, other = tiny.weights(plain.model), tiny.weights(watched.model)
    assert all(torch.equal(one[name], other[name]) for name in one)
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (plain, watched)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    assert hooks(watched.model) == hooks(plain.model)
    assert {module: module.training for module in watched.model.modules()} == before
    assert sorted(collected(tmp_path / "b").steps) == [0, 1, 2, 3, 4]


def test_the_probe_is_the_same_at_every_step(tmp_path: Path) -> None:
    """Of a model that does not move, every look is the same."""
    trainer = sft(tmp_path, collect_value_propagation=2, learning_rate=0.0, **NOTHING)
    trainer.train()
    found = collected(tmp_path)
    assert sorted(found.steps) == [0, 2, 4]
    looks = list(found.steps.values())
    for layer in (1, 2):
        assert all(np.array_equal(look[layer].joint, looks[0][layer].joint) for look in looks)
    assert found.about["rows"] == PROBE
    moved = sft(tmp_path / "moved", collect_value_propagation=2, **NOTHING)
    moved.train()
    looks = list(collected(tmp_path / "moved").steps.values())
    assert not np.array_equal(looks[0][2].joint, looks[-1][2].joint)


def test_counts_are_those_of_attention_as_the_model_computes_it(tmp_path: Path) -> None:
    """Against transformers' own attention weights, values and outputs, pair by pair."""
    trainer = sft(tmp_path, collect_value_propagation=4, window=3, **NOTHING)
    trainer.train()
    model = trainer.model.eval()
    rows = [trainer.train_dataset[i] for i in range(PROBE)]
    risk: list[float] = []
    weights: list[float] = []
    away: list[float] = []
    layer = model.model.layers[2].self_attn
    values: list[torch.Tensor] = []
    handle = layer.v_proj.register_forward_hook(lambda m, a, out: values.append(out))
    model.set_attn_implementation("eager")
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            alpha = model(ids, output_attentions=True).attentions[2][0]  # (h, k, t)
        value = values.pop()[0].unflatten(-1, (2, -1)).repeat_interleave(2, 1)  # (t, h, d)
        output = torch.einsum("hkt,thd->khd", alpha, value)
        predicting = [i - 1 for i, label in enumerate(row["labels"]) if label != -100]
        for t in predicting:
            for k in predicting:
                if t < k <= t + 3:
                    distance = (value[t] - output[k]).square().mean(-1).sqrt()  # over sqrt(d_h)
                    weights += alpha[:, k, t].tolist()
                    away += distance.tolist()
                    risk += (alpha[:, k, t] * distance).tolist()
    handle.remove()
    wanted = PairCounts.of(np.array(weights), np.array(away))
    found = collected(tmp_path).steps[4][2]
    assert found.pairs == len(risk) == wanted.pairs > 500
    # Two kernels differ by rounding, which moves a pair that lies on an edge into the next cell.
    assert np.abs(found.joint - wanted.joint).sum() <= 4
    assert found.share_above(0.1) == pytest.approx(np.mean(np.array(risk) >= 0.1), abs=2e-3)


class Stop(TrainerCallback):
    """Ends a run after a step, as a user does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_a_run_that_was_stopped_and_resumed_has_every_step_once(tmp_path: Path) -> None:
    """Stopped after step 5, of which the file has a look, and resumed at the checkpoint of 4."""
    more = {"save_strategy": "steps", "save_steps": 4, "max_steps": 6, **NOTHING}
    sft(tmp_path / "whole", collect_value_propagation=1, **more).train()
    stopped = sft(tmp_path / "cut", collect_value_propagation=1, **more)
    stopped.add_callback(Stop(5))
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert sorted(collected(tmp_path / "cut").steps) == [0, 1, 2, 3, 4, 5]
    resumed = sft(tmp_path / "cut", collect_value_propagation=1, **more)
    resumed.train(resume_from_checkpoint="auto")
    assert same(collected(tmp_path / "cut"), collected(tmp_path / "whole"))
    rarely = sft(tmp_path / "cut", collect_value_propagation=3, **more)  # is no other run
    rarely.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    assert sorted(collected(tmp_path / "cut").steps) == [0, 1, 2, 3, 4, 6]


def test_another_probe_is_refused_where_a_run_goes_on(tmp_path: Path) -> None:
    more = {"save_strategy": "steps", "save_steps": 2, **NOTHING}
    sft(tmp_path, collect_value_propagation=2, **more).train()
    again = sft(tmp_path, **more)
    rows = [again.train_dataset[i] for i in (20, 21)]
    batch = dict(again.data_collator(rows))
    again.add_callback(PairWatch(batch, tmp_path / RESULTS / FILE, every=2, layers=2))
    with pytest.raises(ConfigError, match="another probe or other settings"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_any_transformers_trainer_takes_the_callback(tmp_path: Path) -> None:
    torch.manual_seed(11)
    trainer = SFTTrainer(
        model=tiny.model(),
        args=SFTConfig(**tiny.options(tmp_path)),
        train_dataset=tiny.sft_rows(),
        processing_class=tiny.tokenizer(),
    )
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    trainer.add_callback(PairWatch(batch, tmp_path / "own.safetensors", every=3, layers="all"))
    trainer.train()
    found = CollectedPairs.load(tmp_path / "own.safetensors")
    assert sorted(found.steps) == [0, 3, 4]
    assert found.layers == [0, 1, 2]


def test_pairs_of_both_branches_are_collected_under_preferences(tmp_path: Path) -> None:
    torch.manual_seed(11)
    more = {"max_steps": 1, "collect_value_propagation": 1, "ref_model": tiny.model(), **NOTHING}
    trainer = tiny.dpo(tmp_path, retention="none", **more)
    trainer.train()
    found = collected(tmp_path)
    assert found.about["rows"] == 2 * PROBE
    assert sorted(found.steps) == [0, 1]
    assert found.total().pairs > 0


def test_a_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no first training rows"):
        sft(tmp_path, train_dataset=tiny.sft_rows().to_iterable_dataset(),
            validation_dataset=None, collect_value_propagation=1, **NOTHING)  # fmt: skip


def test_sharded_weights_are_refused(tmp_path: Path) -> None:
    args = AlphaSFTConfig(**tiny.options(tmp_path, collect_value_propagation=1, **NOTHING))
    model = tiny.model()
    for kind in ("fsdp2", "zero3"):
        with pytest.raises(UnsupportedError, match="cannot be collected on sharded weights"):
            check_watch(model, Layout(kind, processes=2).accelerator(), args)
    check_watch(model, Layout("ddp", processes=2).accelerator(), args)
    with pytest.raises(ConfigError, match="collect_value_propagation must be at least 0"):
        AlphaSFTConfig(**tiny.options(tmp_path, collect_value_propagation=-1))
