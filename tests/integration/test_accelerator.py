"""Training as on an accelerator: nothing waited for, and the same steps as on the host."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from alphatoken.errors import NumericalError
from benchmarks.counting import as_accelerator
from tests.integration import tiny_training as tiny
from tests.integration.tiny_training import sft_rows, weights

LABEL = {"estimator": "label", "layers": "all", "parameters": "all"}
WALK = {"estimator": "walk", "walk_steps": 2, "layers": "3", "retention": "none"}


def sft(folder: Path, **more: Any) -> Any:
    rows = {"train_dataset": sft_rows(24), "validation_dataset": sft_rows(12, seed=5)}
    return tiny.sft(folder, **{**rows, "max_steps": 3, **more})


def dpo(folder: Path, **more: Any) -> Any:
    pairs = {"ref_model": tiny.model(), "train_dataset": tiny.preference_rows(24)}
    return tiny.dpo(folder, **{**pairs, "max_steps": 2, **more})


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (sft, {}),
        (sft, {"gradient_accumulation_steps": 2, "kept_normalization": "kept"}),
        (sft, LABEL),
        (sft, WALK),
        (sft, {"keep_scope": "global"}),
        (dpo, {}),
    ],
    ids=["top", "accumulated", "label", "walk", "whole step", "dpo"],
)
def test_steps_are_those_of_the_host(tmp_path: Path, make: Any, options: dict[str, Any]) -> None:
    """Weights and ledger, bitwise: one block of logits, and the same sums in the same order."""
    runs = []
    for name, device in (("host", nullcontext()), ("accelerator", as_accelerator())):
        with device:
            runs.append(make(tmp_path / name, **options))
            runs[-1].train()
    ours, theirs = (weights(run.model) for run in runs)
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        assert torch.equal(weight, theirs[key]), key
    states = [run.ledger.state_tensors() for run in runs]
    assert len(states[0]["sums"])
    for key, column in states[0].items():
        assert torch.equal(column, states[1][key]), key


class Spoil(TrainerCallback):
    """Makes one weight NaN before the second step, and keeps the weights as they are then."""

    def __init__(self, part: str) -> None:
        self.part, self.before = part, dict[str, Any]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 1:
            with torch.no_grad():
                others["model"].get_parameter(self.part).view(-1)[0] = float("nan")
            self.before = {n: p.detach().clone() for n, p in others["model"].named_parameters()}


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}])
def test_numbers_are_refused_before_the_weights_move(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """In the words of the host."""
    words = []
    for name, device in (("host", nullcontext()), ("accelerator", as_accelerator())):
        spoil = Spoil("model.layers.1.mlp.down_proj.weight")
        with device:
            run = sft(tmp_path / name, callbacks=[spoil], **options)
            with pytest.raises(NumericalError) as refused:
                run.train()
        words.append((refused.value.what, refused.value.got))
        assert run.state.global_step == 1
        for key, p in run.model.named_parameters():
            assert torch.equal(p.detach().nan_to_num(7), spoil.before[key].nan_to_num(7)), key
    assert words[0] == words[1]
