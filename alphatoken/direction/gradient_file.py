"""G in a file: built once, and used by every process that values with the same weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from alphatoken.config import ScorerConfig
from alphatoken.direction.build import Ingredients
from alphatoken.direction.current import DirectionBuilder
from alphatoken.errors import InputError, UnsupportedError
from alphatoken.estimate.estimators import WALK
from alphatoken.model.batch import PreferenceBatch
from alphatoken.support.storage import read_tensors, weights_digest, write_tensors

__all__ = ["load_gradient", "save_gradient"]

_FORMAT = "alphatoken validation gradient 1"


def save_gradient(builder: DirectionBuilder, path: str | os.PathLike[str]) -> None:
    """Write G at the current weights (of a walk its end), whole or not at all.

    Raises:
        UnsupportedError: the direction has no G that stands for all of it.
        DataError: the file could not be written.
    """
    _check(builder.made_of)
    write_tensors(path, builder.gradient(), _identity(builder.made_of))


def load_gradient(builder: DirectionBuilder, path: str | os.PathLike[str]) -> None:
    """Take G from a file instead of building it, for as long as the weights stay as they are.

    Raises:
        InputError: it was built with other weights, validation rows or parameters; the message
            says which.
        DataError: the file cannot be read, or was altered.
        UnsupportedError: as of :func:`save_gradient`.
    """
    _check(builder.made_of)
    tensors, found = read_tensors(path)
    due = _identity(builder.made_of)
    differing = [name for name in due if found.get(name) != due[name]]
    if differing:
        raise InputError(
            f"the validation gradient is one of other {differing[0]}",
            got=f"{os.fspath(path)}: {found.get(differing[0], 'nothing')[:80]}",
            why="values would be measured against another objective",
            remedy="build it anew: leave the file away",
        )
    places = {name: p.device for name, p in builder.made_of.scored.parameters.items()}
    builder.keep_gradient({name: tensor.to(places[name]) for name, tensor in tensors.items()})


def _check(made_of: Ingredients) -> None:
    spread = made_of.scored.sharding is not None or made_of.reduce is not None
    reasons = {
        "weights or gradients that are spread over processes": spread,
        "standard errors": made_of.config.standard_errors,
        "objective='stability'": not made_of.config.adapts,
        "a second model": made_of.to_reference,
    }
    for what, given in reasons.items():
        if given:
            raise UnsupportedError(
                "a validation gradient cannot be kept in a file here",
                got=what,
                why="there is no one G that stands for the whole direction",
                remedy="let each scorer build it",
            )


def _identity(made_of: Ingredients) -> dict[str, str]:
    """What G depends on, by the name that a message gives it."""
    parameters = made_of.scored.parameters
    shapes = {name: (tuple(p.shape), str(p.dtype)) for name, p in parameters.items()}
    return {
        "format": _FORMAT,
        "parameters": hashlib.sha256(repr(shapes).encode()).hexdigest(),
        "weights": weights_digest(made_of.adapter.model),
        "validation rows": _digest(made_of.validation),
        "estimator": _walk_of(made_of.config),
    }


def _walk_of(config: ScorerConfig) -> str:
    """What the end of a walk depends on further."""
    if config.estimator != WALK:
        return "first order"
    return f"walk, {config.walk_steps} steps, rate {config.walk_learning_rate}"


def _digest(batches: Any) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        _feed(digest, vars(batch) if isinstance(batch, PreferenceBatch) else batch)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    """All of a batch into the digest: names, shapes and bytes."""
    if isinstance(value, Mapping):
        for name in sorted(value):
            digest.update(f"{name} ".encode())
            _feed(digest, value[name])
    elif isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    else:
        digest.update(repr(value).encode())
