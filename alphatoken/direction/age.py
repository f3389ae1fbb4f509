"""Check that G and V still belong to the current model, data and optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from alphatoken.direction.drift import FisherDrift
from alphatoken.direction.inputs import DirectionInputs
from alphatoken.errors import ModelError
from alphatoken.model.batch import PreferenceBatch
from alphatoken.model.fingerprint import numbers_of

__all__ = ["age_of", "require_gradients", "weights_age"]


def weights_age(model: nn.Module) -> object:
    """Numbers of all weights: equal at two times only if none was written to in between."""
    return numbers_of(model.parameters())


def age_of(inputs: DirectionInputs) -> tuple[object, ...]:
    """A value that is equal at two times only if G and V need not be rebuilt in between.

    The first entry is ``weights_age``.
    """
    if inputs.scored.sharding is not None:  # each process sees its own parts: always stale
        return (object(),)
    # Every parameter of the model counts and not only those in scope: G is a gradient through
    # all of them, and moves with frozen ones too if somebody writes to them.
    model, p = inputs.adapter.model, inputs.config.preconditioner
    return (
        weights_age(model),
        numbers_of(model.buffers()),
        # Autocast rounds the products that G is made of.
        [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        numbers_of(_tensors_in((inputs.validation, inputs.arguments.retention))),
        _identity(inputs.arguments.retention),
        numbers_of(_tensors_in(p)) if isinstance(p, Mapping) else _optimizer_age(inputs),
        _versions(vars(inputs.arguments.influence).values() if inputs.arguments.influence else ()),
    )


def _optimizer_age(inputs: DirectionInputs) -> object:
    """State of P, if it is the optimizer's and the same for every batch."""
    optimizer = inputs.arguments.optimizer
    if inputs.config.preconditioner != "frozen" or optimizer is None:
        return None
    inputs.check_preconditioner()  # a hook may have been put beside the step
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = [optimizer.state.get(p, {}) for p in inputs.scored.parameters.values()]
    return numbers_of(_tensors_in((state, groups))), repr(groups)


def _identity(retention: object) -> object:
    """Tensors that a drift holds in memory: they are constants, so none of them is read."""
    if not isinstance(retention, FisherDrift):
        return None
    return _versions(m for m in (retention.fisher, retention.reference) if isinstance(m, dict))


def _versions(tensors: Iterable[object]) -> list[tuple[int, int]]:
    return [(id(tensor), tensor._version) for m in tensors for tensor in _tensors_in(m)]


def _tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in mappings, lists and pairs; others may read their batches from a disk."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, PreferenceBatch):
        yield from _tensors_in(list(vars(value).values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


def require_gradients(model: nn.Module) -> None:
    """Raise where no graph can be built.

    Raises:
        ModelError: inference mode is on, or a parameter was made in it.
    """
    outside = next((n for n, p in model.named_parameters() if p.is_inference()), None)
    if outside is not None or torch.is_inference_mode_enabled():
        raise ModelError(
            "values need gradients, which inference mode rules out for good",
            got="torch.inference_mode() is on" if outside is None else f"{outside}, made in it",
            remedy="load the model and call outside torch.inference_mode(); torch.no_grad() is "
            "fine",
        )
