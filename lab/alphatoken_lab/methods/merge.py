"""WiSE-FT: interpolate two state dicts, of a model before training and after it.

    theta = (1 - alpha) theta_before + alpha theta_after

weight by weight, after training and at no cost to it. Arithmetic is float32 (float64 for float64
weights), whatever the weights are stored in; alpha 0 and 1 give the two models bitwise. With LoRA
it is the base plus alpha times the merged delta.

Source: Wortsman et al., arXiv 2109.01903; code mlfoundations/wise-ft@58b7a4b.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.errors import ConfigError, InputError
from alphatoken.support.precision import wide

_REMEDY = "merge a LoRA adapter with --adapter; otherwise give the model that training started from"


def check_alpha(alpha: float) -> float:
    """``alpha``, if it lies in [0, 1].

    Raises:
        ConfigError: it does not.
    """
    if not 0 <= alpha <= 1:  # NaN too
        raise ConfigError(
            "alpha must lie in [0, 1]",
            got=str(alpha),
            why="outside, the model is not between the two",
            remedy="0 is the model before training, 1 the trained one",
        )
    return alpha


def interpolate(before: Tensor, after: Tensor, alpha: float) -> Tensor:
    """One weight between two; the module's text has the formula.

    Args:
        before: of the model that training started from.
        after: of the same shape; the result has its dtype and device.
        alpha: in [0, 1]; 0 and 1 give either weight bitwise.

    Returns:
        A tensor of its own; a copy of ``after`` where it holds no floating-point numbers.
    """
    if not after.is_floating_point() or alpha == 1:
        return after.detach().clone()
    if alpha == 0:  # 1 x + 0 y differs from x in its bits where x is -0, or y infinite
        return before.detach().to(after.device, after.dtype, copy=True)
    kind = wide(before.dtype, after.dtype)
    left, right = before.detach().to(after.device, kind), after.detach().to(kind)
    return ((1 - alpha) * left + alpha * right).to(after.dtype)


def merge_states(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], alpha: float
) -> dict[str, Tensor]:
    """All weights of two state dicts, name by name.

    Names that share memory in ``after`` (tied weights) are one weight: it is interpolated once, and
    every name gets the same tensor. Integer buffers are those of ``after``.

    Raises:
        ConfigError: alpha outside [0, 1]. InputError: names, shapes or ties differ.
    """
    check_alpha(alpha)
    _require_same_weights(before, after)
    merged: dict[str, Tensor] = {}
    for names in _tied(after):
        for name in names[1:]:
            if not torch.equal(before[name], before[names[0]]):
                raise InputError(
                    "weights are tied after training and were not before",
                    got=f"{names[0]} and {name}",
                    why="one weight cannot lie between two",
                    remedy="load both models with the same tie_word_embeddings",
                )
        weight = interpolate(before[names[0]], after[names[0]], alpha)
        merged |= dict.fromkeys(names, weight)
    return {name: merged[name] for name in after}


@torch.no_grad()
def merge_models(before: nn.Module, after: nn.Module, alpha: float) -> nn.Module:
    """Write the merged weights into ``after``, in place, and return it.

    Raises:
        ConfigError, InputError: as ``merge_states``; ``after`` is then as it was.
    """
    own = after.state_dict()
    for name, weight in merge_states(before.state_dict(), own, alpha).items():
        own[name].copy_(weight)
    return after


def _tied(state: Mapping[str, Tensor]) -> list[list[str]]:
    """Names, grouped by the memory that they stand for."""
    groups: dict[Any, list[str]] = {}
    for name, weight in state.items():
        place: Any = (weight.data_ptr(), weight.shape, weight.stride(), weight.device)
        groups.setdefault(place if weight.numel() else name, []).append(name)
    return list(groups.values())


def _require_same_weights(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Refuse two models whose weights differ in name or shape.

    Raises:
        InputError: names the first difference; of vocabularies both sizes.
    """
    only = {
        "before training": sorted(set(before) - set(after)),
        "after it": sorted(set(after) - set(before)),
    }
    counts = [f"{len(names)} only {where} ({names[0]})" for where, names in only.items() if names]
    if counts:
        raise InputError(
            "the two models do not have the same weights",
            got=", ".join(counts),
            why="a weight that only one of them has cannot be interpolated",
            remedy=_REMEDY,
        )
    differing = [name for name in after if before[name].shape != after[name].shape]
    for name in sorted(differing, key=lambda name: "embed" not in name and "wte" not in name):
        first, second = before[name].shape, after[name].shape
        if first[1:] == second[1:] and any(word in name for word in ("embed", "wte", "head")):
            rows = max(first[0], second[0])
            smaller = "before training" if first[0] < second[0] else "after it"
            raise InputError(
                "the two models have vocabularies of different sizes",
                got=f"{name}: {first[0]} rows before training, {second[0]} after it",
                why="a token that only one of them has cannot be interpolated",
                remedy=f"give both {rows} rows: model.resize_token_embeddings({rows}) of the model "
                f"{smaller}, and save_pretrained to another folder",
            )
        raise InputError(
            "weights of one name have different shapes",
            got=f"{name}: {tuple(first)} before training, {tuple(second)} after it",
            why="a number that only one of them has cannot be interpolated",
            remedy="the model that training started from",
        )
