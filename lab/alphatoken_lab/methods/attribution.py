"""Effect of each token on the model's last prediction: gradients at the embeddings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from alphatoken.errors import UnsupportedError
from alphatoken.model.modes import evaluation_mode
from alphatoken.model.protocol import find_adapter
from alphatoken.support.finite import refuse_first
from alphatoken.support.precision import wide

__all__ = ["forward_inputs", "gradient_attribution", "last_positions"]

_FORWARD = ("input_ids", "attention_mask", "position_ids", "token_type_ids")


def forward_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of a plain forward from a trainer's batch, without masks of the loss."""
    return {name: inputs[name] for name in _FORWARD if name in inputs}


def last_positions(inputs: Mapping[str, Any]) -> Int[Tensor, " b"]:
    """Index of the last real token of each row, padded on whichever side."""
    ids = inputs["input_ids"]
    real = inputs.get("attention_mask")
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return (index if real is None else index * (real != 0)).amax(-1)


def gradient_attribution(model: Any, inputs: Mapping[str, Any]) -> Float[Tensor, "b t"]:
    """``I_i = || d (max logit at the last real position) / d e_i ||_1`` of every token.

    ``e_i`` is what the input embedding gives for token i. One forward and one backward in
    evaluation mode; no parameter receives a gradient, and the model is left as it was. 0 on
    padding.

    Args:
        model: a decoder that an adapter knows, or one that a trainer wrapped.
        inputs: of its forward; more than that is left out.

    Returns:
        (b, t) in float32 or wider.

    Raises:
        UnsupportedError: the embedding runs more than once, or not at all.
        NumericalError: a gradient that is not finite, naming row and token.

    Source: TI-DPO, eq. of the importance I_i. Oracle: finite differences, in the tests.
    """
    adapter = find_adapter(model)
    bare: Any = adapter.model
    arguments = adapter.arguments(forward_inputs(inputs))
    last = last_positions(arguments)
    # The head is the wide part of a forward: only the positions that are asked for.
    positions, place = last.unique(return_inverse=True)
    if _selects_logits(bare):
        arguments["logits_to_keep"] = positions
    else:
        place = last
    leaves: list[Tensor] = []

    def enter(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    handle = bare.get_input_embeddings().register_forward_hook(enter)
    try:
        with evaluation_mode(bare), torch.enable_grad():
            logits = adapter.logits_of(bare(**arguments))
            if len(leaves) != 1:
                raise UnsupportedError(
                    "attribution needs one pass through the input embedding",
                    got=f"{len(leaves)} passes",
                    remedy="another policy; this model embeds its tokens more than once",
                )
            target = logits[torch.arange(len(place), device=place.device), place].amax(-1).sum()
            (gradient,) = torch.autograd.grad(target, leaves)
    finally:
        handle.remove()
    return _finite(gradient.to(wide(gradient.dtype)).abs().sum(-1), arguments)


def _selects_logits(model: Any) -> bool:
    base = getattr(model, "get_base_model", lambda: model)()
    return "logits_to_keep" in inspect.signature(base.forward).parameters


def _finite(importance: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    real = arguments.get("attention_mask")
    if real is not None:
        importance = importance.masked_fill(real == 0, 0.0)
    refuse_first(
        ~torch.isfinite(importance),
        importance,
        "the gradient at an embedding is not finite",
        why="its importance would be arbitrary",
        remedy="check the weights, or a wider precision",
    )
    return importance
