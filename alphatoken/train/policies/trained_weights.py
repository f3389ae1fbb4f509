"""Weights of models that a policy trains on the way, in folders named by all they depend on."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alphatoken.errors import ConfigError, DataError
from alphatoken.support.resume import content_digest, weights_digest
from alphatoken.support.storage import read_tensors, write_tensors
from alphatoken.train.ledger import rows_fingerprint
from alphatoken.train.policy import PolicyStage

_FILE = "trained.safetensors"
_LEAST_STEPS = 24
_ROW = ("input_ids", "labels", "seq_lengths")


def weights_folder(stage: PolicyStage, kind: str, model: str, data: str, *settings: Any) -> Path:
    """Folder of the weights of a training; its name holds a digest of all it depends on.

    Args:
        stage: its folder, and the trainer's options.
        kind: of training, the readable part of the name.
        model: digest of the weights that it starts from, and of how adapters enter.
        data: digest of its rows.
        *settings: what else it depends on, as JSON values.
    """
    digest = content_digest([model, data, settings, dict(stage.run)])[:16]
    return Path(stage.folder) / f"{kind}-{digest}"


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters by name, sorted: one order for gradients, moments and files."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(sorted(parameters.items()))


@torch.no_grad()
def copy_weights(
    weights: Mapping[str, Tensor], parameters: Mapping[str, Tensor], remedy: str = ""
) -> None:
    """Set each parameter to the weight of its name.

    Raises:
        DataError: other names: weights would go to the wrong parameter.
    """
    if weights.keys() != parameters.keys():
        raise DataError(
            "the weights that were kept have other parameters than the model",
            got=", ".join(sorted(weights.keys() ^ parameters.keys())[:3]),
            remedy=remedy,
        )
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write the trainable parameters, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / _FILE, {n: p.detach() for n, p in trainable(model).items()}, {})


def load_weights(model: nn.Module, folder: Path) -> None:
    """Set the trainable parameters to those of a folder.

    Raises:
        DataError: a file that cannot be read, or is of another model.
    """
    weights, _ = read_tensors(folder / _FILE)
    copy_weights(weights, trainable(model), f"remove the folder '{folder.parent}'")


def validation_schedule(
    stage: PolicyStage, epochs: float, learning_rate: float | None
) -> dict[str, Any]:
    """Arguments of a training on the validation rows: few rows, so a schedule of their own.

    A constant rate without warm-up, one micro-batch a step, and micro-batches so small that there
    are at least 24 steps where there are as many rows.

    Args:
        stage: of the run.
        epochs: of the validation rows.
        learning_rate: None for the run's.
    """
    # The run's own warm-up and accumulation would leave hardly a step of a few dozen rows.
    most = int(len(stage.validation) * epochs) // _LEAST_STEPS
    arguments: dict[str, Any] = {
        "max_steps": -1,
        "num_train_epochs": epochs,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": max(
            1, min(int(stage.run.get("per_device_train_batch_size", 8)), most)
        ),
        "lr_scheduler_type": "constant",  # which has no warm-up either
        "lr_scheduler_kwargs": None,
    }
    return arguments if learning_rate is None else {**arguments, "learning_rate": learning_rate}


def trained_copy(
    stage: PolicyStage,
    rows: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    kind: str,
    option: str,
) -> nn.Module:
    """A copy of the model, trained on some rows by the run's own trainer; trained once, then read.

    Args:
        stage: of the run.
        rows: tokenised, {input_ids, labels}.
        options: arguments of the run that differ in this training.
        kind: of training, for the folder's name.
        option: the one that asks for this training, for the message.

    Raises:
        ConfigError: this trainer cannot train a copy.
    """
    if stage.train is None:
        raise ConfigError(
            "this trainer cannot train a reference model first",
            got=option,
            why="only supervised fine-tuning in one process can",
            remedy="train one with 'alphatoken sft --policy all' and name its folder",
        )
    rows = [{name: row[name] for name in _ROW if row.get(name) is not None} for row in rows]
    # What an option is in the run itself does not matter where this training sets it.
    run = replace(stage, run={**stage.run, **options})
    folder = weights_folder(run, kind, weights_digest(stage.model), rows_fingerprint(rows))
    if (folder / _FILE).exists():
        say_of_pass(f"{option}: trained on {len(rows)} rows by an earlier run, found in '{folder}'")
    else:
        say_of_pass(f"{option}: training on {len(rows)} rows first, {_schedule(run.run)}")
        save_weights(stage.train(rows, options), folder)
    return load_copy(stage, folder)


def _schedule(options: Mapping[str, Any]) -> str:
    named = {
        "num_train_epochs": "{:g} epochs",
        "per_device_train_batch_size": "batches of {}",
        "learning_rate": "rate {:g}",
        "lr_scheduler_type": "{}",
    }
    return ", ".join(how.format(options[n]) for n, how in named.items() if n in options)


def say_of_pass(text: str) -> None:
    """Print a line about a pass before training, in the first process of a group."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        print(text, file=sys.stderr, flush=True)


def load_copy(stage: PolicyStage, folder: Path) -> nn.Module:
    """A copy of the stage's model with the weights of a folder."""
    model = copied(stage.model)
    load_weights(model, folder)
    return model


def copied(model: nn.Module) -> nn.Module:
    """A deep copy that can be trained by itself."""
    twin = copy.deepcopy(model)
    # TRL puts its fused head on an instance as ``forward``. The copy's would still be bound to the
    # model that it was copied from, so the copy goes back to the forward of its class.
    for module in twin.modules():
        forward = module.__dict__.get("forward")
        if getattr(getattr(forward, "__func__", forward), "__wrapped__", None) is not None:
            del module.__dict__["forward"]
    return twin
