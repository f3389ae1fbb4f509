"""Direct preference optimisation, written again from its definition, for the checks.

Notation: pair n has a chosen response y+ and a rejected one y-; row n of both batches.

    s      =  beta [ (log pi - log pi_ref)(y+)  -  (log pi - log pi_ref)(y-) ]
    loss   =  mean over pairs of  -log sigmoid(s)
    omega  =  beta sigmoid(-s)              from the unmasked s, held constant
    grad   =  mean over pairs of  omega ( sum_t grad l_t+  -  sum_t grad l_t- )
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from alphatoken.errors import ConfigError
from alphatoken.oracle.gradients import (
    IGNORED,
    Batch,
    Forward,
    batch_mask,
    gradient,
    known_labels,
    logits_of,
    token_losses,
    undisturbed,
)


@dataclass(frozen=True)
class PreferencePairs:
    """Chosen and rejected batches (row n of both is pair n) and the reference's log-probabilities.

    ``reference_chosen`` and ``reference_rejected`` are ``log pi_ref(y | x)`` summed over each
    response, shape (pairs,); take them from the reference's logits with
    :func:`branch_log_probabilities`.
    """

    chosen: Batch
    rejected: Batch
    reference_chosen: Tensor
    reference_rejected: Tensor


def branch_log_probabilities(logits: Tensor, labels: Tensor) -> Float[Tensor, " pairs"]:
    """``log pi(y | x)``, summed over each row's response tokens; (pairs,), differentiable."""
    return -token_losses(logits, labels).sum(dim=1)


def dpo_margin(
    chosen_logits: Tensor, rejected_logits: Tensor, pairs: PreferencePairs, beta: float
) -> Float[Tensor, " pairs"]:
    """``s``, the preference logit of each pair, from the policy's logits of both branches."""
    chosen = branch_log_probabilities(chosen_logits, known_labels(pairs.chosen))
    rejected = branch_log_probabilities(rejected_logits, known_labels(pairs.rejected))
    # s = beta [ (log pi - log pi_ref)(y+) - (log pi - log pi_ref)(y-) ]
    return beta * ((chosen - pairs.reference_chosen) - (rejected - pairs.reference_rejected))


def dpo_loss(
    chosen_logits: Tensor, rejected_logits: Tensor, pairs: PreferencePairs, beta: float
) -> Float[Tensor, ""]:
    """``mean over pairs of -log sigmoid(s)``. Exact, differentiable."""
    margin = dpo_margin(chosen_logits, rejected_logits, pairs, beta)
    return -torch.nn.functional.logsigmoid(margin).mean()


def dpo_omega(margin: Float[Tensor, " pairs"], beta: float) -> Float[Tensor, " pairs"]:
    """``omega = beta sigmoid(-s) = -beta d(-log sigmoid(s)) / ds``, detached."""
    return (beta * torch.sigmoid(-margin)).detach()


def dpo_token_errors(
    chosen_logits: Tensor, rejected_logits: Tensor, pairs: PreferencePairs, beta: float
) -> tuple[Tensor, Tensor]:
    """Derivatives of ``sum over pairs of -log sigmoid(s)`` by both branches' logits, closed form.

    ``+omega (softmax - onehot)`` at each chosen label position and ``-omega (softmax - onehot)`` at
    each rejected one, 0 elsewhere; shapes of the logits. The *position* axis counts logits: the
    error of token i sits at i - 1.
    """
    omega = dpo_omega(dpo_margin(chosen_logits, rejected_logits, pairs, beta), beta)
    return (
        # delta = +omega delta~ on y+, -omega delta~ on y-
        _errors(chosen_logits, known_labels(pairs.chosen), omega),
        _errors(rejected_logits, known_labels(pairs.rejected), -omega),
    )


def dpo_gradient(
    model: nn.Module,
    forward: Forward,
    pairs: PreferencePairs,
    parameters: Mapping[str, Tensor],
    beta: float = 0.1,
) -> dict[str, Tensor]:
    """Gradient of :func:`dpo_loss` by name, by autograd through -log sigmoid itself.

    Exact. The model is left as it was. Raises InputError for foreign parameters.
    """
    with undisturbed(model, parameters):
        return gradient(dpo_loss(*_both(forward, pairs), pairs, beta), parameters)


def masked_dpo_gradient(
    model: nn.Module,
    forward: Forward,
    pairs: PreferencePairs,
    parameters: Mapping[str, Tensor],
    keep_chosen: Bool[Tensor, " pairs token_chosen"],
    keep_rejected: Bool[Tensor, " pairs token_rejected"],
    beta: float = 0.1,
    omega: Float[Tensor, " pairs"] | None = None,
) -> dict[str, Tensor]:
    """Gradient of ``mean over pairs of omega sum_t (m+ l+ - m- l-)`` (eq. dpo_masked_loss).

    ``keep_*[n, i]`` keeps the token at index i of the branch (False where it is no response has no
    effect). omega comes from the unmasked margin, unless another one is given (see
    :func:`masked_dpo_omega`), and is constant. Exact.
    """
    with undisturbed(model, parameters):
        chosen, rejected = _both(forward, pairs)
        if omega is None:
            # eq. dpo_masked_loss: omega_sg from all tokens, masked ones too
            omega = dpo_omega(dpo_margin(chosen, rejected, pairs, beta), beta)
        # sum_t m_t+ l_t+ and sum_t m_t- l_t-
        kept = (keep_chosen * token_losses(chosen, known_labels(pairs.chosen))).sum(1)
        dropped = (keep_rejected * token_losses(rejected, known_labels(pairs.rejected))).sum(1)
        # grad of E[ omega_sg sum_t (m+ l+ - m- l-) ]
        return gradient((omega * (kept - dropped)).mean(), parameters)


def masked_dpo_omega(
    logits: tuple[Tensor, Tensor],
    reference_logits: tuple[Tensor, Tensor],
    pairs: PreferencePairs,
    keep: tuple[Tensor, Tensor],
    beta: float,
) -> Float[Tensor, " pairs"]:
    """``omega`` of the masked-logit ablation, detached.

        omega_n  =  beta / (1 + exp(s_n))
        s_n      =  beta sum over branches (+1 chosen, -1 rejected), over response tokens i, of
                    +-keep[n, i] log( pi(z_i | z_<i) / pi_ref(z_i | z_<i) )

    Args:
        logits: of the policy, chosen and rejected, (pairs, t, vocabulary) and (pairs, s, ...).
        reference_logits: of the reference, the same shapes.
        pairs: for the labels; the reference's sums in it are not looked at.
        keep: masks or weights at token indices, chosen and rejected.
        beta: DPO's temperature.

    Exact. Where both models give the same logits it is ``beta / 2`` under any mask.
    """
    sums = []
    for batch, policy, reference, kept in zip(
        (pairs.chosen, pairs.rejected), logits, reference_logits, keep, strict=True
    ):
        labels = known_labels(batch)
        # log (pi / pi_ref) = l_ref - l
        ratios = token_losses(reference.double(), labels) - token_losses(policy.double(), labels)
        sums.append((kept * ratios.detach()).sum(1))
    # beta sigmoid(-s) = beta / (1 + exp(s)), s of the kept tokens alone
    return beta / (1.0 + torch.exp(beta * (sums[0] - sums[1])))


def preference_objective(
    forward: Forward,
    pairs: PreferencePairs,
    beta: float = 0.1,
    normalisation: str = "tokens",
) -> Float[Tensor, ""]:
    """J_tgt on preference pairs: ``sum over pairs of -log sigmoid(s)`` divided by N.

    N counts the response tokens of both branches (``"tokens"``, the paper) or the pairs. Its
    gradient is the sum of +-omega delta~ (x) x over both branches, divided by N. Exact.

    Raises:
        ConfigError: unknown normalisation.
    """
    if normalisation not in ("tokens", "pairs"):
        raise ConfigError(
            "unknown normalisation", got=repr(normalisation), remedy="use tokens or pairs"
        )
    count = len(pairs.reference_chosen)
    mean = dpo_loss(*_both(forward, pairs), pairs, beta)
    if normalisation == "pairs":
        return mean
    tokens = sum(int(batch_mask(batch).sum()) for batch in (pairs.chosen, pairs.rejected))
    # sum over pairs of -log sigmoid(s), / response tokens of both branches
    return mean * count / tokens


def _both(forward: Forward, pairs: PreferencePairs) -> tuple[Tensor, Tensor]:
    """Logits of the chosen and of the rejected branch, two forwards."""
    return logits_of(forward, pairs.chosen), logits_of(forward, pairs.rejected)


def _errors(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    errors = torch.zeros_like(logits)
    for row, token in (labels != IGNORED).nonzero().tolist():
        if token == 0:
            continue
        # delta~ = d l / d logits = softmax - one-hot of the label
        error = torch.softmax(logits[row, token - 1].detach(), dim=-1)
        error[labels[row, token]] -= 1.0
        errors[row, token - 1] = weight[row] * error
    return errors
