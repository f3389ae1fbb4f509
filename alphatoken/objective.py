"""Gradients of validation objectives with respect to the scored parameters.

    J_tgt  = mean loss over the response tokens of all validation batches
    DPO:     gradient = sum_pairs omega (grad sum l+ - grad sum l-) / normaliser,
             omega = beta sigma(-s), detached, from the unmasked preference logit

All positions of the validation sequences take part, the prompt's too, because the gradient runs
through them. Batches are streamed: one forward and backward each, sums kept, divided at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from alphatoken.adapter import DecoderAdapter
from alphatoken.batch import (
    LabelledBatch,
    PreferenceBatch,
    read_batch,
    require_finite,
    token_losses,
)
from alphatoken.capture import evaluation_mode, graph_from_layer
from alphatoken.errors import InputError, NumericalError
from alphatoken.losses import dpo_coefficient
from alphatoken.precision import wide

__all__ = ["objective_gradient", "scoring_forward", "weighted_losses"]


@contextmanager
def scoring_forward(adapter: DecoderAdapter, first: int | None) -> Iterator[None]:
    """Evaluation mode, and a graph from layer ``first`` on (None: from the embeddings on)."""
    with evaluation_mode(adapter.model):
        if first is None:
            with torch.enable_grad():
                yield
        else:
            with graph_from_layer(adapter, first):
                yield


def forward_losses(adapter: DecoderAdapter, batch: LabelledBatch, role: str) -> Tensor:
    """Token losses (b, t) of one forward in the surrounding context; finite or an error."""
    losses = token_losses(adapter.forward(batch.inputs), batch.labels, role=role)
    require_finite(losses, batch.mask, role)
    return losses


def preference_weights(pairs: PreferenceBatch, chosen: Tensor, rejected: Tensor) -> Tensor:
    """omega (b,) from the token losses of both branches."""
    return dpo_coefficient(
        -chosen.sum(-1),
        -rejected.sum(-1),
        pairs.reference_chosen.to(chosen),
        pairs.reference_rejected.to(rejected),
        pairs.beta,
    )


def weighted_losses(
    adapter: DecoderAdapter, item: Mapping[str, Any] | PreferenceBatch, first: int | None
) -> Iterator[tuple[LabelledBatch, Callable[[], Tensor], Tensor, float]]:
    """The pieces of an objective: (batch, loss function, token weights, count for the mean).

    The gradient of the objective is the sum over pieces of the gradient of
    ``(weights * losses).sum()``, divided by the sum of counts. Each loss function runs its own
    forward and must be called inside ``scoring_forward``.
    """
    limit = adapter.max_positions()
    role = "validation batch"
    if not isinstance(item, PreferenceBatch):
        batch = read_batch(item, max_length=limit, role=role)
        ones = batch.mask.to(torch.float32)
        yield batch, lambda: forward_losses(adapter, batch, role), ones, batch.response_tokens
        return
    branches = [read_batch(b, max_length=limit, role=role) for b, _, _ in item.branches()]
    with evaluation_mode(adapter.model), torch.no_grad():
        omega = preference_weights(item, *(forward_losses(adapter, b, role) for b in branches))
    for batch, sign in zip(branches, (1, -1), strict=True):
        count = batch.response_tokens if item.normalization == "tokens" else len(omega) / 2
        weights = (sign * omega).unsqueeze(-1) * batch.mask.to(omega.dtype)
        yield batch, lambda b=batch: forward_losses(adapter, b, role), weights, count  # type: ignore[misc]


def gradient_of(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """d(loss)/d(parameter), by autograd, touching no .grad; None where there is no path."""
    return list(torch.autograd.grad(loss, list(parameters), allow_unused=True))


def objective_gradient(
    adapter: DecoderAdapter,
    parameters: Mapping[str, Tensor],
    validation: Iterable[Mapping[str, Any] | PreferenceBatch],
    *,
    first: int | None,
) -> dict[str, Tensor]:
    """Gradient G of the mean validation objective, one tensor a parameter.

    Args:
        adapter: of the model.
        parameters: parameter name -> parameter, those in scope.
        validation: batches (mean token loss) or preference pairs; streamed.
        first: first scored layer; None if parameters below the layers take part.

    Returns:
        Parameter name -> gradient in the parameter's shape, float32 or wider. Unit: loss a weight.

    Exactness: exact up to rounding. Source: eq. composite_val.
    Oracle: ``alphatoken.oracle.gradients.validation_gradient``,
    ``alphatoken.oracle.preference``.

    Raises:
        InputError: no validation batch, or one without response tokens.
        NumericalError: a NaN or Inf loss or gradient, naming token or parameter.
    """
    names = list(parameters)
    total = {
        n: torch.zeros_like(p, dtype=wide(p.dtype), requires_grad=False)
        for n, p in parameters.items()
    }
    count = 0.0
    for item in validation:
        for _, losses, weights, tokens in weighted_losses(adapter, item, first):
            with scoring_forward(adapter, first):
                loss = losses()
                with torch.enable_grad():
                    weighted = (loss * weights.to(loss)).sum()
            gradients = gradient_of(weighted, [parameters[n] for n in names])
            for name, gradient in zip(names, gradients, strict=True):
                if gradient is not None:
                    total[name] += gradient.to(total[name].dtype)
            count += tokens
    if count == 0:
        raise InputError(
            "no validation tokens",
            got="an empty validation set",
            why="the adaptation value is measured against the validation gradient",
            remedy="pass at least one batch with response tokens",
        )
    for name in names:
        total[name] /= count
        if not bool(torch.isfinite(total[name]).all()):
            raise NumericalError(
                "the validation gradient is not finite",
                got=name,
                remedy="check the weights for NaN or Inf, and the precision",
            )
    return total
