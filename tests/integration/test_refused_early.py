"""What needs no model is refused before one is loaded, and what a step refuses before a Fisher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl import SFTTrainer

from alphatoken.errors import AlphaTokenError
from alphatoken.train import AlphaSFTConfig
from tests.integration.tiny_training import ALPHA, furthest, made, model, options, sft, sft_rows


def config(folder: Path, **more: Any) -> AlphaSFTConfig:
    return AlphaSFTConfig(**{**options(folder), **ALPHA, **more})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "compile": ({"torch_compile": True}, "compile"),
    "Liger": ({"use_liger_kernel": True}, "Liger kernels"),
    "offloading": ({"activation_offloading": True}, "offloaded activations"),
    "smoothing": ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
    "fp16": ({"fp16": True}, "fp16 does not work"),
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
    assert not config(tmp_path, policy="standard", **REFUSED[name][0]).weighs


@pytest.mark.filterwarnings("ignore:.label_smoothing_factor. is deprecated:FutureWarning")
def test_standard_is_trls_trainer_with_what_weights_would_refuse(tmp_path: Path) -> None:
    more = {"label_smoothing_factor": 0.1}
    ours = sft(tmp_path / "ours", validation_dataset=None, policy="standard", **more)
    theirs = made(SFTTrainer, tmp_path / "theirs", **more)
    ours.train()
    theirs.train()
    assert furthest(ours, theirs) == 0


# --- documents one after the other ----------------------------------------------------------------


def test_packed_rows_may_be_longer_than_the_model(tmp_path: Path) -> None:
    """That values at ratio 1 leave such a run as TRL has it is tested in ``test_trainers.py``."""
    more = {"packing": True, "max_length": 256, "retention": "none"}
    assert model().config.max_position_embeddings < 256
    trainer = sft(tmp_path / "ours", train_dataset=sft_rows(96), **more)
    assert max(len(row["input_ids"]) for row in trainer.train_dataset) > 128
    with pytest.raises(AlphaTokenError, match="longer than the model allows"):
        sft(tmp_path / "wrapped", packing_strategy="wrapped", **more)
