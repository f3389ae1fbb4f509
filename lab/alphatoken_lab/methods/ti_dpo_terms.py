"""TI-DPO's two further terms: the triplet loss, and TDPO's difference of sequence divergences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from alphatoken.direction.sampling import sample_generator, sample_responses
from alphatoken.errors import InputError
from alphatoken.model.batch import IGNORE
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.support.precision import wide

__all__ = ["packed", "prompts_of", "sample_anchors", "sequence_kl", "triplet_losses"]


def sequence_kl(
    logits: Float[Tensor, "b t vocabulary"],
    reference: Float[Tensor, "b t vocabulary"],
    mask: Bool[Tensor, "b t"],
) -> Float[Tensor, " b"]:
    """``sum_t KL(pi_ref(. | x, y_<t) || pi(. | x, y_<t))`` over the response tokens of each row.

    Over the whole vocabulary, in float32 or wider; differentiable in ``logits``.

    Args:
        logits: of the trained model; position i - 1 predicts token i.
        reference: of the reference model, a constant.
        mask: response tokens, never index 0.
    """
    rows, tokens = mask.nonzero(as_tuple=True)
    dtype = wide(logits.dtype, reference.dtype)
    ours = logits[rows, tokens - 1].to(dtype).log_softmax(-1)
    theirs = reference[rows, tokens - 1].detach().to(dtype).log_softmax(-1)
    p = theirs.exp()
    each = (p * torch.where(p > 0, theirs - ours, 0.0)).sum(-1)
    return each.new_zeros(len(mask)).index_add(0, rows, each)


def packed(
    values: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> tuple[Float[Tensor, "b length"], Bool[Tensor, "b length"]]:
    """The response tokens of each row, moved to its front; 0 after the last. Differentiable."""
    length = int(mask.sum(-1).max()) if mask.numel() else 0
    order = torch.sort((~mask).long(), dim=-1, stable=True).indices[:, :length]
    there = mask.gather(-1, order)
    return values.gather(-1, order).masked_fill(~there, 0.0), there


def triplet_losses(
    anchor: tuple[Tensor, Tensor],
    chosen: tuple[Tensor, Tensor],
    rejected: tuple[Tensor, Tensor],
    *,
    margin: float,
) -> Float[Tensor, " n"]:
    """``relu(||d_a - d_w||^2 - ||d_a - d_l||^2 + margin)`` of each pair.

    ``d`` are log-ratios by index in the response. Each distance is over the indices that both
    responses have, as in the published code; the paper does not say.

    Args:
        anchor: (log-ratios (n, length), mask), from ``packed``.
        chosen: the same.
        rejected: the same.
        margin: of the hinge.
    """
    near, far = _distance(anchor, chosen), _distance(anchor, rejected)
    return F.relu(near - far + margin)


def _distance(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    length = min(one[0].shape[1], other[0].shape[1])
    (a, in_a), (b, in_b) = ((d[:, :length], m[:, :length]) for d, m in (one, other))
    return (a - b).square().masked_fill(~(in_a & in_b), 0.0).sum(-1)


def prompts_of(inputs: Mapping[str, Any], mask: Bool[Tensor, "b t"]) -> list[Tensor]:
    """The real tokens before the first response token of each row, on the CPU.

    Raises:
        InputError: a row without a prompt or without a response.
    """
    ids = inputs["input_ids"]
    real = inputs.get("attention_mask")
    real = torch.ones_like(ids) if real is None else real
    before = (real != 0) & (mask.cumsum(-1) == 0)
    prompts = [row[here].cpu() for row, here in zip(ids, before, strict=True)]
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0 or not bool(mask[row].any()):
            raise InputError(
                "a pair has no prompt or no chosen response to sample an anchor beside",
                got=f"row {row}",
                remedy="triplet_gamma=0, or drop the pair",
            )
    return prompts


def sample_anchors(
    adapter: DecoderAdapter, prompts: Sequence[Tensor], *, most: int, seed: int
) -> dict[str, Tensor]:
    """One response to each prompt, drawn from the model, as a padded batch with labels.

    From the full distribution at temperature 1, with a generator for each row; the caller sets
    evaluation mode.

    Args:
        adapter: of the model.
        prompts: token ids, on the CPU.
        most: tokens of a response at most.
        seed: of the draws.
    """
    limit = adapter.max_positions()
    room = [most if limit is None else max(1, min(most, limit - len(p))) for p in prompts]
    generators = [sample_generator(seed, i) for i in range(len(prompts))]
    names = [f"the anchor of pair {i}" for i in range(len(prompts))]
    responses = sample_responses(adapter, prompts, generators, room, names)
    rows = [torch.cat(parts) for parts in zip(prompts, responses, strict=True)]
    width = max(len(row) for row in rows)
    ids = torch.stack([F.pad(row, (0, width - len(row))) for row in rows])
    real = torch.stack([F.pad(torch.ones_like(row), (0, width - len(row))) for row in rows])
    labels = ids.masked_fill(real == 0, IGNORE)
    for row, prompt in enumerate(prompts):
        labels[row, : len(prompt)] = IGNORE
    device = next(adapter.model.parameters()).device
    batch = {"input_ids": ids, "attention_mask": real, "labels": labels}
    return {name: tensor.to(device) for name, tensor in batch.items()}
