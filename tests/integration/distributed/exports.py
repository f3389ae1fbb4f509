"""Exported values of short runs of plain SGD, and the fall of the loss that they add up to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.distributed.trainers import dpo, exported, plain, sft
from tests.integration.distributed.worker import device_options
from tests.integration.tiny_training import model, preference_rows, sft_rows, tokenised

DESCENT: dict[str, Any] = {
    "policy": "all",
    "estimator": "label",
    "layers": "all",
    "parameters": "all",
    "retention": "none",
    "validation_batch_size": 8,
    "held_out_steps": 1,
    "held_out_share": 0.5,
    "max_grad_norm": 0.0,
    "optim": "sgd",
    "learning_rate": 1e-3,
}
"""To first order the loss of the validation rows falls by the sum of the values of such a run."""

UNEVEN = 7
"""Rows, in batches of two: the last of each step's four has one row, on the second process."""


def uncounted() -> Any:
    """A model to whose loss transformers gives no count of the step's tokens."""
    made = model()
    made.accepts_loss_kwargs = False
    return made


def _sft(layout: str, folder: Path, rows: int = 32, **more: Any) -> Any:
    given = {"train_dataset": sft_rows(rows), "validation_dataset": sft_rows(16, seed=5)}
    return sft(layout, folder, **DESCENT | given | more)


def _pairs(layout: str, folder: Path, **more: Any) -> Any:
    held = preference_rows(16, seed=5)
    given = {"train_dataset": preference_rows(32), "validation_dataset": held}
    return dpo(layout, folder, **DESCENT | given | more)


def _plain(layout: str, folder: Path, **more: Any) -> Any:
    given = {"train_dataset": tokenised(32), "validation_dataset": tokenised(16, seed=5)}
    return plain(layout, folder, **DESCENT | given | more)


def _uneven(layout: str) -> dict[str, Any]:
    """Options under which no row is repeated to fill the last batches."""
    config = device_options(layout).get("accelerator_config", {})
    return {"rows": UNEVEN, "accelerator_config": {**config, "even_batches": False}}


OWN_COUNTS = {"average_tokens_across_devices": False}
A_SUM = {"kept_normalization": "sum", "learning_rate": 1e-5}
KINDS: dict[str, Callable[[str, Path], Any]] = {
    "SFT": _sft,
    "SFT, counts of each process": lambda lay, at: _sft(lay, at, **OWN_COUNTS),
    "SFT, a sum": lambda lay, at: _sft(lay, at, **OWN_COUNTS, **A_SUM),
    "SFT, no count": lambda lay, at: _sft(lay, at, model=uncounted(), **_uneven(lay)),
    "pairs": _pairs,
    "plain": _plain,
    "plain, counts of each process": lambda lay, at: _plain(lay, at, **OWN_COUNTS),
    "plain, no count": lambda lay, at: _plain(lay, at, model=uncounted()),
}


def exports(layout: str, folder: Path) -> dict[str, Any]:
    """Kind of run -> its exported values, and the fall of the loss of its validation rows."""
    found = {}
    for kind, make in KINDS.items():
        trainer = make(layout, folder / kind)
        trainer.train()
        pool = [e["alpha/validation_pool"] for e in trainer.state.log_history if "loss" in e]
        end = trainer.valuation.objective_gap(len(pool))["pool"]
        found[kind] = {"exported": exported(trainer), "fall": pool[0] - end}
    return found
