"""What needs no model is refused before one is loaded, and what a step refuses before a Fisher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from alphatoken.errors import AlphaTokenError
from alphatoken.train import AlphaSFTConfig, AlphaSFTTrainer
from tests.integration.tiny_training import (
    ALPHA,
    furthest,
    model,
    options,
    sft,
    sft_rows,
    tokenizer,
)


def config(folder: Path, **more: Any) -> AlphaSFTConfig:
    return AlphaSFTConfig(**{**options(folder), **ALPHA, **more})


def plain(folder: Path, rows: int = 48, **more: Any) -> SFTTrainer:
    """TRL's own trainer."""
    return SFTTrainer(
        model=model(), args=SFTConfig(**options(folder, **more)),
        train_dataset=sft_rows(rows), processing_class=tokenizer(),
    )  # fmt: skip


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Liger": ({"use_liger_kernel": True}, "Liger kernels"),
    "offloading": ({"activation_offloading": True}, "offloaded activations"),
    "smoothing": ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
    "full and fp16": ({"preconditioner": "full", "fp16": True}, "does not work with fp16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_are_refused_where_the_configuration_is_made(tmp_path: Path, name: str) -> None:
    more, said = REFUSED[name]
    with pytest.raises(AlphaTokenError, match=said):
        config(tmp_path, **more)


@pytest.mark.parametrize("name", ["Liger", "offloading", "smoothing"])
def test_a_run_that_weighs_nothing_refuses_nothing_of_the_trainers_below(
    tmp_path: Path, name: str
) -> None:
    made = config(tmp_path, policy="standard", **REFUSED[name][0])
    assert not made.weighs


@pytest.mark.filterwarnings("ignore:.label_smoothing_factor. is deprecated:FutureWarning")
def test_standard_is_trls_trainer_with_what_weights_would_refuse(tmp_path: Path) -> None:
    more = {"label_smoothing_factor": 0.1}
    ours = sft(tmp_path / "ours", validation_dataset=None, policy="standard", **more)
    theirs = plain(tmp_path / "theirs", **more)
    ours.train()
    theirs.train()
    assert furthest(ours, theirs) == 0


# --- documents one after the other ----------------------------------------------------------------


def test_packed_rows_may_be_longer_than_the_model(tmp_path: Path) -> None:
    """TRL trains on them: positions begin anew in each document. So do values."""
    more = {"packing": True, "max_length": 256, "retention": "none"}
    assert model().config.max_position_embeddings < 256
    trainer = sft(tmp_path / "ours", train_dataset=sft_rows(96), keep_ratio=1.0, **more)
    assert max(len(row["input_ids"]) for row in trainer.train_dataset) > 128
    theirs = plain(tmp_path / "trl", 96, packing=True, max_length=256)
    trainer.train()
    theirs.train()
    assert furthest(trainer, theirs) == 0
    with pytest.raises(AlphaTokenError, match="more than the model allows"):
        sft(tmp_path / "wrapped", packing_strategy="wrapped", **more)


# --- 16 bits with a scaled loss -------------------------------------------------------------------


def in_fp16(trainer: Any, scale: float) -> Any:
    """As Accelerate sets a trainer up for fp16 on a GPU: autocast, and a scaler of the loss."""
    accelerator = trainer.accelerator
    accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return trainer


@pytest.fixture
def full_precision_afterwards() -> Any:
    """Accelerate's state is one for the whole process."""
    yield
    from accelerate.state import AcceleratorState

    if AcceleratorState._shared_state:
        AcceleratorState._shared_state["_mixed_precision"] = "no"


def first_values(trainer: Any) -> Tensor:
    seen: list[Tensor] = []
    record = trainer.monitor.record

    def listen(**given: Any) -> None:
        seen.append(given["values"].total[given["mask"]])
        record(**given)

    trainer.monitor.record = listen
    trainer.train()
    return seen[0]


@pytest.mark.usefixtures("full_precision_afterwards")
def test_fp16_with_a_scaled_loss(tmp_path: Path) -> None:
    """Values are of the unscaled loss: those of float32 but for rounding to eleven bits.

    The first scale overflows, so that a step is skipped, as it is in TRL; ratio 1 is TRL's run.
    """
    common = {"estimator": "alphatoken", "retention": "none"}

    def made(name: str, **more: Any) -> AlphaSFTTrainer:
        return sft(tmp_path / name, train_dataset=sft_rows(96), **common, **more)

    exact = first_values(made("float32"))
    rough = first_values(in_fp16(made("fp16"), 2.0**16))
    assert not torch.equal(rough, exact)
    assert float((rough - exact).norm() / exact.norm()) < 2e-3

    ours = in_fp16(made("ours", keep_ratio=1.0), 2.0**40)
    theirs = in_fp16(plain(tmp_path / "theirs", 96), 2.0**40)
    ours.train()
    theirs.train()
    norms = [entry["grad_norm"] for entry in ours.state.log_history if "grad_norm" in entry]
    assert norms[0] != norms[0], "the first gradient overflows"
    assert ours.accelerator.scaler.get_scale() < 2.0**40, "and its step is skipped"
    assert furthest(ours, theirs) == 0


class Moved(TrainerCallback):
    """Whether each optimizer step moved a weight."""

    def __init__(self) -> None:
        self.steps, self._before = list[bool](), Tensor()

    def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self._before = model.lm_head.weight.detach().clone()

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.steps.append(not torch.equal(self._before, model.lm_head.weight))


@pytest.mark.usefixtures("full_precision_afterwards")
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
def test_a_step_that_the_scaler_skips_is_in_no_ledger(tmp_path: Path, optim: str) -> None:
    """Its gradient overflowed and nothing moved: the values of its tokens are of no step."""
    more = {"retention": "none", "max_steps": 3, "optim": optim}
    trainer = in_fp16(sft(tmp_path, train_dataset=sft_rows(96), **more), 2.0**40)
    trainer.accelerator.scaler.set_backoff_factor(2.0**-24)
    moved = Moved()
    trainer.add_callback(moved)
    trainer.train()
    assert moved.steps == [False, True, True]
    visits = trainer.ledger.state_tensors()["visits"]
    assert visits.tolist() == [1] * 8, "two steps of four rows"
