"""Masked losses: supervised fine-tuning and the DPO surrogate, with their normalisations."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from alphatoken.batch import label_mask, token_losses
from alphatoken.errors import InputError

__all__ = ["dpo_coefficient", "masked_dpo_loss", "masked_sft_loss"]


def masked_sft_loss(
    scores: Float[Tensor, "b t vocabulary"] | Float[Tensor, "b s"],
    labels: Int[Tensor, "b t"],
    keep: Tensor,
    *,
    normalization: str = "response",
    num_tokens: int | Tensor | None = None,
) -> Float[Tensor, ""]:
    """Cross-entropy over the kept response tokens: ``sum_t keep_t l_t / normaliser``.

    Args:
        scores: logits (b, t, vocabulary), or token log-probabilities (b, t) or (b, t - 1).
        labels: unshifted labels, -100 ignored.
        keep: (b, t) mask at token indices (from ``select_top``), or float weights; taken as a
            constant.
        normalization: "response" divides by all response tokens, so that the learning rate keeps
            its meaning and ``keep == mask`` gives transformers' own loss; "kept" by the sum of
            ``keep``; "sum" not at all (the paper, eq. sft_masked_loss).
        num_tokens: normaliser over a whole accumulation step or over ranks, instead of this
            batch's own count.

    Raises:
        InputError: shapes that differ or an unknown normalization.
    """
    if keep.shape != labels.shape:
        raise InputError(
            "keep must have the shape of labels", got=f"{tuple(keep.shape)}, {tuple(labels.shape)}"
        )
    losses = token_losses(scores, labels)
    weights = keep.detach().to(losses.dtype)
    total = (losses * weights).sum()
    if normalization == "sum":
        return total
    mask = label_mask(labels)
    if normalization == "response":
        count = mask.sum() if num_tokens is None else torch.as_tensor(num_tokens)
    elif normalization == "kept":
        count = (weights * mask).sum() if num_tokens is None else torch.as_tensor(num_tokens)
    else:
        raise InputError(
            "normalization must be 'response', 'kept' or 'sum'", got=repr(normalization)
        )
    return total / count.to(device=total.device, dtype=total.dtype).clamp(min=1)


def dpo_coefficient(
    chosen: Float[Tensor, " b"],
    rejected: Float[Tensor, " b"],
    reference_chosen: Float[Tensor, " b"],
    reference_rejected: Float[Tensor, " b"],
    beta: float,
) -> Float[Tensor, " b"]:
    """``omega = beta sigma(-s)``, ``s = beta [(log pi - log pi_ref)(y+) - (...)(y-)]``, detached.

    Arguments are log-probabilities of whole responses. The gradient of ``-log sigma(s)`` is
    ``omega (grad sum l+ - grad sum l-)``.
    """
    logit = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return (beta * torch.sigmoid(-logit)).detach()


def masked_dpo_loss(
    chosen_losses: Float[Tensor, "b t"],
    rejected_losses: Float[Tensor, "b s"],
    reference_chosen: Float[Tensor, " b"],
    reference_rejected: Float[Tensor, " b"],
    keep_chosen: Tensor,
    keep_rejected: Tensor,
    *,
    beta: float = 0.1,
    masked_logit: bool = False,
) -> Float[Tensor, ""]:
    """Alpha-DPO surrogate: mean over pairs of ``omega sum_t (m+ l+ - m- l-)``.

    ``omega`` comes from the **unmasked** preference logit and is detached, so the mask acts on the
    update only. With all masks 1 the gradient is exactly that of ``-log sigma(s)``; the value of
    the surrogate is not the DPO loss.

    Args:
        chosen_losses: token losses of the chosen branch (``token_losses``), 0 off the response.
        rejected_losses: the same for the rejected branch.
        reference_chosen: reference log-probability of each chosen response.
        reference_rejected: the same for the rejected ones.
        keep_chosen: mask or weights on the chosen tokens, taken as constant.
        keep_rejected: mask or weights on the rejected tokens.
        beta: DPO's temperature.
        masked_logit: ablation: take omega from the masked log-probabilities.

    Source: eq. dpo_masked_loss. Oracle: ``alphatoken.oracle.preference``.
    """
    m_chosen = keep_chosen.detach().to(chosen_losses.dtype)
    m_rejected = keep_rejected.detach().to(rejected_losses.dtype)
    kept_chosen = (m_chosen * chosen_losses).sum(-1)
    kept_rejected = (m_rejected * rejected_losses).sum(-1)
    logit_chosen = kept_chosen if masked_logit else chosen_losses.sum(-1)
    logit_rejected = kept_rejected if masked_logit else rejected_losses.sum(-1)
    omega = dpo_coefficient(
        -logit_chosen, -logit_rejected, reference_chosen, reference_rejected, beta
    )
    return (omega * (kept_chosen - kept_rejected)).mean()
