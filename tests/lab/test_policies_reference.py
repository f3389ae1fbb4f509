"""Rho-1 that trains its reference on the validation rows, against TRL's trainer on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from alphatoken.errors import ConfigError
from alphatoken.train import AlphaSFTTrainer, AlphaTrainer
from alphatoken_lab.methods.rho_1 import Rho1
from tests.integration import tiny_training as tiny
from tests.property import test_policies_validation_first as validation_first
from tests.property.test_policies_validation_first import (
    EPOCHS,
    RATE,
    reference_by_hand,
)


def run(folder: Path, policy: Rho1, **more: Any) -> AlphaSFTTrainer:
    """Trained on 16 rows, 8 others for validation."""
    given = {} if policy.needs.validation else {"validation_dataset": None}
    return validation_first.run(folder, policy, **given, **more)


POLICY = {"reference_epochs": EPOCHS, "reference_learning_rate": RATE}


def test_rho_1_trains_its_reference(tmp_path: Path) -> None:
    """The run is that with a reference which TRL trained on the same validation rows.

    Proves: Rho-1 (exact), against TRL on the same rows.
    """
    own = run(tmp_path / "own" / "run", Rho1(**POLICY))
    reference = reference_by_hand(tmp_path)
    given = run(tmp_path / "given" / "run", Rho1(reference=reference))
    untrained = run(tmp_path / "other" / "run", Rho1(reference=tiny.model(layers=2)))
    assert tiny.furthest(own, given) < 1e-6
    assert tiny.furthest(own, untrained) > 1e-3, "the reference matters"


def test_a_reference_is_trained_once(tmp_path: Path) -> None:
    """Its weights are kept by all that they depend on, and read by a second run.

    Proves: Rho-1 (exact), against TRL on the same rows.
    """
    folder = tmp_path / "run"

    def kept() -> dict[str, int]:
        """Files of weights, and when each was written."""
        found = (tmp_path / "policies").glob("*/trained.safetensors")
        return {path.parent.name: path.stat().st_mtime_ns for path in found}

    first = tiny.weights(run(folder, Rho1(**POLICY)).model)
    once = kept()
    again = tiny.weights(run(folder, Rho1(**POLICY)).model)
    assert all(torch.equal(first[name], again[name]) for name in first)
    run(folder, Rho1(**POLICY), learning_rate=0.2)  # the run's rate is not the reference's
    assert len(once) == 1
    assert kept() == once
    run(folder, Rho1(reference_epochs=1.0))
    run(folder, Rho1(reference_epochs=1.0), learning_rate=0.2)  # without a rate it takes the run's
    assert len(kept()) == 3
    assert once.items() < kept().items()


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (lambda: Rho1(reference_epochs=1.0, reference_learning_rate=-1.0), "above 0"),
        (lambda: Rho1(reference_learning_rate=1.0), "no reference model is trained"),
        (lambda: Rho1(reference_epochs=1.0, reference="x"), "leave one of the two out"),
    ],
)
def test_bad_input(tmp_path: Path, policy: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        run(tmp_path / "run", policy())


# --- rows that come padded ------------------------------------------------------------------------


@pytest.mark.parametrize("left", [True, False])
def test_a_reference_reads_no_padding_of_the_rows(tmp_path: Path, left: bool) -> None:
    """Rows with masks of their own have the losses, and the run, of the same rows without padding.

    The pad token is one that the model is trained on, and embeds as any other.
    """
    plain = [dict(row) for row in tiny.tokenised(12)]
    width = max(len(row["input_ids"]) for row in plain)

    def padded(values: list[int], fill: int) -> list[int]:
        more = [fill] * (width - len(values))
        return more + values if left else values + more

    masked = [
        {
            "input_ids": padded(row["input_ids"], 7),
            "labels": padded(row["labels"], -100),
            "attention_mask": padded([1] * len(row["input_ids"]), 0),
        }
        for row in plain
    ]
    ends = []
    for name, rows in (("plain", plain), ("masked", masked)):
        trainer = tiny.made(
            AlphaTrainer, tmp_path / name, train_dataset=Dataset.from_list(rows), optim="sgd",
            policy=Rho1(reference=tiny.model(seed=5)), per_device_train_batch_size=1,
            remove_unused_columns=False,
        )  # fmt: skip
        trainer.train()
        ends.append((trainer, trainer.state.log_history[0]["alpha/kept_share"]))
    assert ends[0][1] == ends[1][1]
    assert tiny.furthest(ends[0][0], ends[1][0]) < 1e-6
