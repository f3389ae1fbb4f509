"""Weights of models that a policy trains on the way, in folders named by all they depend on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.errors import ConfigError, DataError
from alphatoken.support.storage import read_tensors, weights_digest, write_tensors
from alphatoken.train.policy import PolicyStage
from alphatoken.train.policy_stage import copied
from alphatoken.train.token_table import rows_fingerprint

__all__ = [
    "copy_weights",
    "has_weights",
    "load_copy",
    "load_weights",
    "save_weights",
    "trainable",
    "trained_copy",
    "weights_folder",
]

_FILE = "trained.safetensors"
_ROW = ("input_ids", "labels", "seq_lengths")


def weights_folder(stage: PolicyStage, kind: str, model: str, data: str, *settings: Any) -> Path:
    """Where the weights of a training are kept: the name holds a digest of all it depends on.

    Args:
        stage: its folder, and the trainer's options.
        kind: of training, the readable part of the name.
        model: digest of the weights that it starts from.
        data: digest of its rows.
        *settings: what else it depends on, as JSON values.
    """
    made_of = [model, data, settings, dict(stage.run)]
    digest = blake2b(json.dumps(made_of, sort_keys=True).encode(), digest_size=8).hexdigest()
    return Path(stage.folder) / f"{kind}-{digest}"


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters by name, sorted: one order for gradients, moments and files."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(sorted(found.items()))


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


def has_weights(folder: Path) -> bool:
    """Whether a training that leaves its weights here was finished."""
    return (folder / _FILE).exists()


def load_weights(model: nn.Module, folder: Path) -> None:
    """Set the trainable parameters to those of a folder.

    Raises:
        DataError: a file that cannot be read, or is of another model.
    """
    weights, _ = read_tensors(folder / _FILE)
    copy_weights(weights, trainable(model), f"remove the folder '{folder.parent}'")


def trained_copy(
    stage: PolicyStage,
    rows: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    kind: str,
    asked: str,
) -> nn.Module:
    """A copy of the model, trained on some rows by the run's own trainer; trained once, then read.

    Args:
        stage: of the run.
        rows: tokenised, {input_ids, labels}.
        options: arguments of the run that differ in this training.
        kind: of training, for the folder's name.
        asked: the option that asks for it, for the message.

    Raises:
        ConfigError: this trainer cannot train a copy.
    """
    if stage.train is None:
        raise ConfigError(
            "this trainer cannot train a reference model first",
            got=asked,
            why="only supervised fine-tuning in one process can",
            remedy="train one with 'alphatoken sft --policy all' and name it with policy_reference",
        )
    rows = [{name: row[name] for name in _ROW if row.get(name) is not None} for row in rows]
    # What an option is in the run itself does not matter where this training sets it.
    run = replace(stage, run={**stage.run, **options})
    folder = weights_folder(run, kind, weights_digest(stage.model), rows_fingerprint(rows))
    if not has_weights(folder):
        save_weights(stage.train(rows, options), folder)
    return load_copy(stage, folder)


def load_copy(stage: PolicyStage, folder: Path) -> nn.Module:
    """A copy of the stage's model with the weights of a folder."""
    model = copied(stage.model)
    load_weights(model, folder)
    return model
