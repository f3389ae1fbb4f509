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
from alphatoken.oracle.evaluate import batch_mask, check_finite, undisturbed
from alphatoken.oracle.gradients import IGNORED, Batch, Forward, gradient, known_labels

__all__ = [
    "PreferencePairs",
    "branch_log_probabilities",
    "dpo_gradient",
    "dpo_loss",
    "dpo_margin",
    "dpo_omega",
    "dpo_token_errors",
    "masked_dpo_gradient",
    "masked_dpo_omega",
    "preference_objective",
]


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
    rows = []
    for row_logits, row_labels in zip(logits, labels, strict=True):
        (tokens,) = (row_labels[1:] != IGNORED).nonzero(as_tuple=True)
        # Token i + 1 of the row is predicted by the logits at i.
        table = torch.log_softmax(row_logits[tokens], dim=-1)
        rows.append(table[torch.arange(len(tokens)), row_labels[tokens + 1]].sum())
    return torch.stack(rows)


def dpo_margin(
    chosen_logits: Tensor, rejected_logits: Tensor, pairs: PreferencePairs, beta: float
) -> Float[Tensor, " pairs"]:
    """``s``, the preference logit of each pair, from the policy's logits of both branches."""
    chosen = branch_log_probabilities(chosen_logits, known_labels(pairs.chosen))
    rejected = branch_log_probabilities(rejected_logits, known_labels(pairs.rejected))
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

    Exact. The model is left as it was. Raises InputError for foreign parameters, NumericalError
    for a loss that is not finite.
    """
    with undisturbed(model, parameters):
        loss = dpo_loss(*_both(forward, pairs), pairs, beta)
        check_finite(loss.detach(), "the DPO loss")
        return gradient(loss, parameters)


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
    :func:`masked_dpo_omega`), and is constant. Added up token by token: exact.
    """
    total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    with undisturbed(model, parameters):
        chosen, rejected = _both(forward, pairs)
        if omega is None:
            omega = dpo_omega(dpo_margin(chosen, rejected, pairs, beta), beta)
        branches = (
            (chosen, known_labels(pairs.chosen), keep_chosen, omega),
            (rejected, known_labels(pairs.rejected), keep_rejected, -omega),
        )
        for branch_logits, labels, keep, weight in branches:
            for row, token in keep.nonzero().tolist():
                if token == 0 or labels[row, token] == IGNORED:
                    continue
                predicted = torch.log_softmax(branch_logits[row, token - 1], dim=-1)
                loss = -weight[row] * predicted[labels[row, token]] / len(weight)
                for name, part in gradient(loss, parameters).items():
                    total[name] = total[name] + part
    return total


def masked_dpo_omega(
    logits: tuple[Tensor, Tensor],
    reference_logits: tuple[Tensor, Tensor],
    pairs: PreferencePairs,
    keep: tuple[Tensor, Tensor],
    beta: float,
) -> Float[Tensor, " pairs"]:
    """``omega`` of the masked-logit ablation, pair by pair and token by token, detached.

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
    found = []
    for n in range(len(pairs.reference_chosen)):
        total = torch.zeros((), dtype=torch.float64)
        for sign, branch, policy, reference, kept in (
            (1.0, pairs.chosen, logits[0], reference_logits[0], keep[0]),
            (-1.0, pairs.rejected, logits[1], reference_logits[1], keep[1]),
        ):
            labels = known_labels(branch)[n].tolist()
            for i in range(1, len(labels)):
                if labels[i] == IGNORED:
                    continue
                ratio = torch.log_softmax(policy[n, i - 1].double(), dim=-1)[labels[i]]
                ratio = ratio - torch.log_softmax(reference[n, i - 1].double(), dim=-1)[labels[i]]
                total = total + sign * float(kept[n, i]) * ratio.detach()
        found.append(beta / (1.0 + torch.exp(beta * total)))
    return torch.stack(found)


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
    return mean * count / tokens


def _both(forward: Forward, pairs: PreferencePairs) -> tuple[Tensor, Tensor]:
    """Logits of the chosen and of the rejected branch, two forwards."""

    def logits(batch: Batch) -> Tensor:
        return forward({name: value for name, value in batch.items() if name != "labels"})

    return logits(pairs.chosen), logits(pairs.rejected)


def _errors(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    errors = torch.zeros_like(logits)
    for row, token in (labels != IGNORED).nonzero().tolist():
        if token == 0:
            continue
        error = torch.softmax(logits[row, token - 1].detach(), dim=-1)
        error[labels[row, token]] -= 1.0
        errors[row, token - 1] = weight[row] * error
    return errors
