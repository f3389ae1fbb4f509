"""Static passes on real rows and real processes: killed, resumed, shared, refused."""

from __future__ import annotations

import random
import signal
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from alphatoken.errors import ConfigError, ModelError
from alphatoken.support.progress import Tracker
from alphatoken.train import AlphaSFTTrainer
from alphatoken.train.policies.builtin import Standard
from alphatoken.train.policy import PolicyStage
from alphatoken_lab.methods.static import measure_losses, model_losses, static_pass
from alphatoken_lab.methods.static_mask import second_model
from alphatoken_lab.methods.token_table import TokenTable
from tests.forked import SERVER
from tests.integration import subjects
from tests.integration import tiny_training as tiny
from tests.lab.small import stage
from tests.property.tolerance import allowed, close

PATIENCE = 240.0
Row = dict[str, Any]


def real_rows(name: str, count: int, first: int = 0, length: int = 128) -> list[Row]:
    found = subjects.examples(name, first, count, length)
    return [{"input_ids": list(e.input_ids), "labels": list(e.labels)} for e in found]


# --- reference models -----------------------------------------------------------------------------


def test_a_reference_in_bfloat16(tmp_path: Path) -> None:
    folder, tokenizer = subjects.model_folder(), subjects.tokenizer()
    beside = stage(tmp_path, [], tiny.model(), tokenizer=tokenizer)
    exact = second_model(beside, folder, "rho_1")
    narrow = second_model(beside, folder, "rho_1", "bfloat16")
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    for model in (exact, narrow):
        assert not model.training
        assert not any(p.requires_grad for p in model.parameters())
    at = stage(tmp_path, real_rows("topics", 6), exact)
    full = model_losses(at, exact, "loss").columns["loss"]
    found = model_losses(at, narrow, "loss").columns["loss"]
    assert found.dtype == np.float32
    assert len(list(tmp_path.iterdir())) == 2  # precision is part of the model
    error = float(np.linalg.norm(found - full))
    close(error, 0.0, np.linalg.norm(full), allowed("norm", torch.bfloat16), name="bf16 losses")
    assert error > 1e-4 * np.linalg.norm(full)  # it was not float32 after all


def test_reference_models_that_do_not_fit(tmp_path: Path) -> None:
    folder, other = subjects.model_folder(), tiny.tokenizer()
    bare = stage(tmp_path, [], tiny.model())
    beside = stage(tmp_path, [], tiny.model(), tokenizer=other)
    with pytest.raises(ConfigError, match="no row for some tokens|are not the trained model's"):
        second_model(beside, folder, "rho_1")
    with pytest.raises(ModelError, match="no such model folder"):
        second_model(bare, str(tmp_path / "absent"), "rho_1")
    tiny.model().save_pretrained(tmp_path / "bare")
    with pytest.raises(ModelError, match="the folder has no tokenizer"):
        second_model(beside, str(tmp_path / "bare"), "rho_1")
    other.save_pretrained(tmp_path / "bare")
    assert second_model(beside, str(tmp_path / "bare"), "rho_1") is not None


# --- killed and resumed ---------------------------------------------------------------------------


def slowly(model: Any, inputs: Mapping[str, Tensor], labels: Tensor) -> dict[str, Tensor]:
    time.sleep(0.1)
    return measure_losses(model, inputs, labels)


def run_pass(folder: Path, measure: Any, progress: Any = False) -> TokenTable:
    rows, own = list(tiny.tokenised(40)), tiny.model(layers=1)
    at = stage(folder, rows, own, batch_size=4, progress=progress)
    return static_pass(at, at.model, ("loss",), measure, "losses", rows_per_shard=4)


def _child(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run_pass(folder, slowly)


def kill_after(folder: Path, pattern: str) -> None:
    """Run in a process of its own, SIGKILL it when so many files are there."""
    process = SERVER.Process(target=_child, args=(folder,))
    process.start()
    end = time.monotonic() + PATIENCE
    while not list(folder.glob(pattern)) and process.is_alive() and time.monotonic() < end:
        time.sleep(0.002)
    alive = process.is_alive()
    process.kill()
    process.join(PATIENCE)
    assert alive, "it ended before it was killed"
    assert process.exitcode == -signal.SIGKILL


class Seen:
    """A progress sink."""

    def __init__(self) -> None:
        self.done: list[int] = []

    def __call__(self, progress: Tracker) -> None:
        self.done.append(progress.done)


def test_a_killed_pass_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = run_pass(whole, measure_losses)
    kill_after(cut, "*.parts/000003.safetensors")
    assert not list(cut.glob("*.safetensors"))
    seen = Seen()
    found = run_pass(cut, measure_losses, seen)
    assert seen.done[0] >= 20  # four shards of four rows were there
    assert seen.done[-1] == 40
    for name in ("keys", "sizes", "positions"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    assert np.array_equal(found.columns["loss"], expected.columns["loss"])
    assert [p.suffix for p in cut.iterdir()] == [".safetensors"]


# --- random numbers -------------------------------------------------------------------------------


class Drawing(Standard):
    """All tokens; its pass draws so many numbers from every generator."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def prepare(self, stage: PolicyStage) -> None:
        for _ in range(self.count):
            torch.rand(3), random.random(), np.random.rand(3)  # noqa: NPY002


def test_a_pass_that_draws_leaves_the_random_state(tmp_path: Path) -> None:
    """Dropout and order of rows are those of a run without it, so that methods are comparable."""
    states = []
    # Libraries draw when they are first used (names of temporary files): the first run warms up.
    for count in (0, 0, 5):
        torch.manual_seed(1)
        random.seed(1)
        given = {"train_dataset": tiny.sft_rows(8), "policy": Drawing(count)}
        tiny.made(AlphaSFTTrainer, tmp_path, **given)
        numpys = str(np.random.get_state())  # noqa: NPY002
        states.append((torch.get_rng_state().tolist(), random.getstate(), numpys))
    assert states[1] == states[2]
