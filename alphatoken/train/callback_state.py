"""State of a run's callbacks: taken up by a resumed run where it is saved, else refused.

transformers saves what an ``ExportableState`` says of itself. Tensors of any other callback, such
as an average of the weights, are in no checkpoint: a run goes on only if they are what they were,
by 1,024 evenly spread numbers of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import ExportableState, TrainerCallback

from alphatoken.errors import AlphaTokenWarning, ConfigError, warn_caller
from alphatoken.train.identity import weights_fingerprint

__all__ = ["refuse_lost_tensors", "restore_states", "tensor_digests", "warn_of_tensors"]

Digests = Mapping[str, str | None]
"""By callback, of the tensors that it holds; None where it holds none."""


def restore_states(callbacks: Iterable[TrainerCallback], states: Mapping[str, Any]) -> None:
    """Give callbacks the state that a checkpoint has of them, such as the patience that is left.

    Args:
        callbacks: of the run.
        states: ``TrainerState.stateful_callbacks``; class name -> one state, or one a callback.
    """
    exporting = [c for c in callbacks if isinstance(c, ExportableState)]
    for name in {type(one).__name__ for one in exporting} & states.keys():
        saved = states[name] if isinstance(states[name], list) else [states[name]]
        of_name = (one for one in exporting if type(one).__name__ == name)
        for callback, state in zip(of_name, saved, strict=False):
            for attribute, value in state.get("attributes", {}).items():
                setattr(callback, attribute, value)


def tensor_digests(callbacks: Iterable[TrainerCallback], models: Iterable[nn.Module]) -> Digests:
    """Digests of the tensors that callbacks hold, the weights of these models left out."""
    own = {id(p) for model in models for p in model.parameters()}
    digests: dict[str, str | None] = {}
    numbers: Counter[str] = Counter()
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            continue
        kind = type(callback).__qualname__
        numbers[kind] += 1
        tensors = {
            name: tensor
            for name, tensor in _tensors("", vars(callback))
            if id(tensor) not in own and tensor.layout == torch.strided and not tensor.is_meta
        }
        digests[f"{kind} ({numbers[kind]})"] = weights_fingerprint(tensors)
    return digests


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from _tensors(name, dict(value.named_parameters()) | dict(value.named_buffers()))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        yield from _tensors(name, dict(enumerate(value)))


def warn_of_tensors(begun: Digests, saved: Digests) -> bool:
    """Say which callbacks have changed their tensors since the run began; True if one has."""
    changed = [name for name in saved if saved[name] != begun.get(name)]
    if changed:
        warn_caller(
            f"checkpoints do not hold the tensors of {', '.join(changed)}, which change as the run "
            "goes on: unless that callback takes them up by itself, no run can resume with it",
            AlphaTokenWarning,
        )
    return bool(changed)


def refuse_lost_tensors(saved: Digests, now: Digests) -> None:
    """Refuse to go on with a callback whose tensors are not what they were at the checkpoint.

    Args:
        saved: ``tensor_digests`` when the checkpoint was written, of those that held some.
        now: of the run that is to go on.

    Raises:
        ConfigError: names the callbacks.
    """
    lost = [name for name in saved.keys() & now.keys() if saved[name] != now[name]]
    if lost:
        raise ConfigError(
            "a callback holds other tensors than at the checkpoint, which has none of them",
            got=", ".join(sorted(lost)),
            why="what it gathered before would be missing, and the run would be another one",
            remedy="train from the start, or resume without it; a callback may restore its tensors "
            "in on_train_begin, and transformers saves what an ExportableState says of itself",
        )
