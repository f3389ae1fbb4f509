"""Masked losses: supervised fine-tuning and the DPO surrogate, with their normalisations."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from alphatoken.errors import InputError
from alphatoken.model.batch import label_mask, predicted_labels, token_losses


def masked_sft_loss(
    scores: Float[Tensor, "b t vocabulary"] | Float[Tensor, "b s"],
    labels: Int[Tensor, "b t"],
    keep: Tensor,
    *,
    normalization: str = "response",
    num_tokens: int | Tensor | None = None,
    attention_mask: Tensor | None = None,
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
        attention_mask: (b, t) of the batch, where rows are padded on the left: a label predicted
            from padding is then no response token, as in ``TokenValues.mask``, and one on padding
            is refused.

    Example:
        Every token of a uniform model costs log 4; one of two is kept, and both are counted.

        >>> labels = torch.tensor([[-100, 2, 3]])
        >>> keep = torch.tensor([[False, True, False]])
        >>> masked_sft_loss(torch.zeros(1, 3, 4), labels, keep)
        tensor(0.6931)
        >>> masked_sft_loss(torch.zeros(1, 3, 4), labels, keep, normalization="kept")
        tensor(1.3863)

    Raises:
        InputError: shapes that differ or an unknown normalization.
    """
    if keep.shape != labels.shape:
        raise InputError(
            "keep must have the shape of labels", got=f"{tuple(keep.shape)}, {tuple(labels.shape)}"
        )
    labels = predicted_labels(labels, attention_mask)
    losses = token_losses(scores, labels)
    # Detached, because values depend on the weights of the model: the mask must not be trained.
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
    count = count.to(device=total.device, dtype=total.dtype)
    # A batch in which nothing is kept has loss 0; divided by 0 it would make the weights NaN.
    return total / torch.where(count > 0, count, 1)


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
    # Detached: omega is the derivative of -log sigma(s), and with it the loss below has the right
    # gradient. Differentiated as well it would add a term that DPO does not have.
    logit = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return (beta * torch.sigmoid(-logit)).detach()


def masked_dpo_coefficient(
    chosen: Float[Tensor, "b t"],
    rejected: Float[Tensor, "b s"],
    reference_chosen: Float[Tensor, "b t"],
    reference_rejected: Float[Tensor, "b s"],
    keep_chosen: Tensor,
    keep_rejected: Tensor,
    beta: float,
) -> Float[Tensor, " b"]:
    """``omega`` of the masked logit (ablation), detached: masks act on each token's log-ratio.

        s  =  beta [ sum_t m+_t (log pi - log pi_ref)_t  -  sum_t m-_t (log pi - log pi_ref)_t ]

    Arguments are log-probabilities of tokens, 0 off the response, and masks or weights of the same
    shapes. Where policy and reference agree, omega is ``beta / 2`` under any mask.

    Oracle: ``alphatoken.oracle.preference.masked_dpo_omega``.
    """
    return dpo_coefficient(
        (keep_chosen * (chosen - reference_chosen)).sum(-1),
        (keep_rejected * (rejected - reference_rejected)).sum(-1),
        torch.zeros_like(chosen[:, 0]),
        torch.zeros_like(rejected[:, 0]),
        beta,
    )


def masked_dpo_loss(
    chosen_losses: Float[Tensor, "b t"],
    rejected_losses: Float[Tensor, "b s"],
    reference_chosen: Float[Tensor, " b"] | Float[Tensor, "b t"],
    reference_rejected: Float[Tensor, " b"] | Float[Tensor, "b s"],
    keep_chosen: Tensor,
    keep_rejected: Tensor,
    *,
    beta: float = 0.1,
) -> Float[Tensor, ""]:
    """Alpha-DPO surrogate: mean over pairs of ``omega sum_t (m+ l+ - m- l-)``.

    ``omega`` comes from the **unmasked** preference logit and is detached, so the mask acts on the
    update only. With all masks 1 the gradient is exactly that of ``-log sigma(s)``; the value of
    the surrogate is not the DPO loss.

    Args:
        chosen_losses: token losses of the chosen branch (``token_losses``), 0 off the response.
        rejected_losses: the same for the rejected branch.
        reference_chosen: reference log-probability of each chosen response (b,), or of each of its
            tokens (b, t), 0 off the response.
        reference_rejected: the same for the rejected ones.
        keep_chosen: mask or weights on the chosen tokens, taken as constant.
        keep_rejected: mask or weights on the rejected tokens.
        beta: DPO's temperature.

    Source: eq. dpo_masked_loss. Oracle: ``alphatoken.oracle.preference``.
    """
    m_chosen = keep_chosen.detach().to(chosen_losses.dtype)
    m_rejected = keep_rejected.detach().to(rejected_losses.dtype)
    kept_chosen = (m_chosen * chosen_losses).sum(-1)
    kept_rejected = (m_rejected * rejected_losses).sum(-1)
    omega = dpo_coefficient(
        -chosen_losses.sum(-1),
        -rejected_losses.sum(-1),
        _by_response(reference_chosen),
        _by_response(reference_rejected),
        beta,
    )
    # Chosen losses are to fall and rejected ones to rise, hence the signs.
    return (omega * (kept_chosen - kept_rejected)).mean()


def _by_response(log_probs: Tensor) -> Tensor:
    return log_probs if log_probs.dim() == 1 else log_probs.sum(-1)
