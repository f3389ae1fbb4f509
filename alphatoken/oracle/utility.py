"""True worth of a label: the validation objective after a step with it and without it.

Notation: label k is the pair (row b, index i); theta' = step(theta, gradient) is one optimizer step
on the kept labels' loss; J is the validation objective.

    u_k = J(step without k) - J(step with all)        > 0: training on label k lowers J

First order in the step size eta, for SGD, with the label value a_k = <grad l_k, grad J>, n labels:

    sum         u_k = eta a_k
    response    u_k = eta a_k / n                     mean over all response labels
    kept        u_k = eta (a_k - mean a) / (n - 1)    mean over the labels kept
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, fsum
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from alphatoken.errors import ConfigError, InputError
from alphatoken.oracle.gradients import (
    Batch,
    Forward,
    batch_losses,
    batch_mask,
    displaced,
    gradient,
    undisturbed,
)

Step = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]]
"""An optimizer step: (parameter values, gradients) -> new values. It must not keep state."""

Player = TypeVar("Player", bound=Hashable)

Objective = Callable[[], Tensor]
"""The validation objective at the model's current parameters, a scalar."""


@dataclass(frozen=True)
class AdamState:
    """Adam before a step: ``step`` steps taken, first and second moments by parameter name.

    ``decoupled`` chooses AdamW's weight decay over Adam's, which is added to the gradient.
    """

    step: int
    m: Mapping[str, Tensor]
    v: Mapping[str, Tensor]
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True


def sgd_step(
    values: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float
) -> dict[str, Tensor]:
    """``theta' = theta - lr g``."""
    return {name: value - lr * gradients[name] for name, value in values.items()}


def adam_direction(
    gradient: Tensor, m: Tensor, v: Tensor, state: AdamState
) -> tuple[Tensor, Tensor, Tensor]:
    """Adam's direction ``u`` (theta' = theta - lr u) and the new moments, for one parameter.

    With s = state.step + 1:  m_s = b1 m + (1 - b1) g,  v_s = b2 v + (1 - b2) g^2,
    ``u = m^ / (sqrt(v^) + eps)``, m^ = m_s / (1 - b1^s), v^ = v_s / (1 - b2^s). Differentiable in
    the gradient; where v_s is 0 the root counts as constant, which is exact there when m is 0.
    """
    b1, b2 = state.betas
    s = state.step + 1
    # moments after step s, which is counted from 1
    m_s = b1 * m + (1 - b1) * gradient
    v_s = b2 * v + (1 - b2) * gradient**2
    # bias corrections m^ and v^
    m_hat = m_s / (1 - b1**s)
    v_hat = v_s / (1 - b2**s)
    # u = m^ / (sqrt(v^) + eps)
    return m_hat / (_root(v_hat) + state.eps), m_s, v_s


def adam_step(
    values: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float, state: AdamState
) -> tuple[dict[str, Tensor], AdamState]:
    """One step of Adam (or AdamW, if ``state.decoupled``): new values and the state after it.

    Plain formulas, no amsgrad; checked against torch.optim.Adam and AdamW.
    """
    new, m, v = {}, {}, {}
    for name, value in values.items():
        g = _decayed(gradients[name], state, value)
        u, m[name], v[name] = adam_direction(g, state.m[name], state.v[name], state)
        # AdamW: theta' = (1 - lr weight_decay) theta - lr u
        shrink = 1 - lr * state.weight_decay if state.decoupled else 1.0
        new[name] = shrink * value - lr * u
    after = AdamState(
        state.step + 1, m, v, state.betas, state.eps, state.weight_decay, state.decoupled
    )
    return new, after


def adam_step_derivative(
    gradients: Mapping[str, Tensor],
    token_gradient: Mapping[str, Tensor],
    state: AdamState,
    values: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Exact derivative of Adam's direction u with respect to one token's weight, at weight 1.

    The token enters as ``g(w) = g + (w - 1) g_k``; autograd through the update gives ``du / dw``
    by name (the step moves by -lr times it). ``<grad J, du/dw>`` times lr is the token's
    first-order utility under Adam. ``values`` are needed for coupled weight decay only. Checks
    :func:`adam_preconditioner`.
    """
    derivatives = {}
    for name, g in gradients.items():
        # u is elementwise: one weight an entry gives du_i / dw_i, all at the same w = 1.
        weight = torch.ones_like(g, requires_grad=True)
        # g(w) = g + (w - 1) g_k, at w = 1
        moving = g.detach() + (weight - 1) * token_gradient[name].detach()
        total = _decayed(moving, state, None if values is None else values[name])
        u, _, _ = adam_direction(total, state.m[name], state.v[name], state)
        (derivatives[name],) = torch.autograd.grad(u.sum(), weight)
    return derivatives


def adam_preconditioner(
    gradients: Mapping[str, Tensor],
    state: AdamState,
    kind: str = "full",
    values: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """``P`` with ``du / dw = P o g_k``, in closed form, by name.

    ``full``, exact (equal to :func:`adam_step_derivative`), v^ and m^ after the step::

        P = c / (sqrt(v^) + eps) - m^ (1 - b2) g / ((1 - b2^s) sqrt(v^) (sqrt(v^) + eps)^2)

    with c = (1 - b1) / (1 - b1^s). ``frozen``: the first term with the v^ of the state before the
    step, exact for a step whose denominator does not move; the error falls with the step count.

    Raises:
        ConfigError: unknown kind.
    """
    if kind not in ("full", "frozen"):
        raise ConfigError("unknown preconditioner", got=repr(kind), remedy="use full or frozen")
    return {
        name: _precondition(
            _decayed(g, state, None if values is None else values[name]),
            state.m[name],
            state.v[name],
            state,
            frozen=kind == "frozen",
        )
        for name, g in gradients.items()
    }


def leave_one_out_utility(
    model: nn.Module,
    forward: Forward,
    train_batch: Batch,
    validation_objective: Objective,
    optimizer: str | Step = "sgd",
    lr: float = 1e-3,
    normalisation: str = "sum",
    *,
    parameters: Mapping[str, Tensor],
    state: AdamState | None = None,
    token_weights: Float[Tensor, " batch token"] | None = None,
) -> Float[Tensor, " batch token"]:
    """``u_k = J(step without label k) - J(step with all)``, for every label, exact.

    One backward, one step and one evaluation of J for each label; the model ends as it was.
    Source: eq. local_utility_def; u_k = Delta(all) - Delta(all without k).

    Args:
        model: behind ``forward`` and ``validation_objective``.
        forward: batch -> logits.
        train_batch: the labels valued.
        validation_objective: J at the model's current parameters.
        optimizer: ``"sgd"``, ``"adam"`` (with ``state``), or a step function of its own, to which
            ``lr`` means nothing.
        lr: step size.
        normalisation: of the training loss over the labels kept; see the head of this file.
        parameters: what the step moves, by name.
        state: Adam's state before the step; every step starts from it.
        token_weights: factors on the token losses (+-omega under DPO), constants.

    Returns:
        (batch, token): index i holds the utility of the label predicting token i, 0 elsewhere.

    Raises:
        ConfigError: unknown optimizer or normalisation, or Adam without its state.
        InputError: foreign parameters.
    """
    keep = batch_mask(train_batch)
    step = _resolve(optimizer, lr, state)
    with undisturbed(model, parameters):

        def after(kept: Tensor) -> Tensor:
            return _objective_after_step(
                forward, train_batch, validation_objective, parameters, step, normalisation,
                kept, token_weights,
            )  # fmt: skip

        # J(step with all)
        with_all = after(keep)
        utilities = torch.zeros(keep.shape, dtype=with_all.dtype, device=with_all.device)
        for row, token in keep.nonzero().tolist():
            without = keep.clone()
            without[row, token] = False
            # u_k = J(step without k) - J(step with all)
            utilities[row, token] = after(without) - with_all
    return utilities


def one_step_utility(
    model: nn.Module,
    forward: Forward,
    train_batch: Batch,
    validation_objective: Objective,
    optimizer: str | Step = "sgd",
    lr: float = 1e-3,
    normalisation: str = "sum",
    *,
    parameters: Mapping[str, Tensor],
    state: AdamState | None = None,
) -> Callable[[frozenset[tuple[int, int]]], float]:
    """The game of one training step: ``Delta(S) = J(theta) - J(step on the labels in S)``.

    Players are the labels (row, index). Exact; eq. local_utility_def. Feed it to
    :func:`exact_shapley`. Arguments and errors as :func:`leave_one_out_utility`; a player that is
    no label raises InputError.
    """
    step = _resolve(optimizer, lr, state)
    labels = batch_mask(train_batch)

    def utility(players: frozenset[tuple[int, int]]) -> float:
        kept = torch.zeros_like(labels)
        for row, token in players:
            kept[row, token] = True
        if bool((kept & ~labels).any()):
            raise InputError("a player is not a response token", got=str(sorted(players)))
        with undisturbed(model, parameters):
            before = validation_objective().detach()
            after = _objective_after_step(
                forward, train_batch, validation_objective, parameters, step, normalisation,
                kept, None,
            )  # fmt: skip
        # eq. local_utility_def: Delta(S) = J(theta) - J(theta'(S))
        return float(before - after)

    return utility


def exact_shapley(
    utility: Callable[[frozenset[Player]], float], players: Sequence[Player]
) -> dict[Player, float]:
    """Shapley value of each player of the game ``utility``, exact.

    ``phi_u = sum over S without u of |S|! (n - |S| - 1)! / n! (U(S + u) - U(S))``, the factor
    being 1 / (n C(n - 1, |S|)). ``utility`` is evaluated once on each of the 2^n coalitions. The
    values add to ``U(all) - U(none)``. Source: App. A of the paper; with the utility of one SGD
    step (:func:`one_step_utility`) they tend to the first-order values of
    eq. shapley_closed_form_step as the step size goes to 0.
    """
    count = len(players)
    # U(S) of all 2^n coalitions, each once
    worth = {
        coalition: utility(coalition)
        for size in range(count + 1)
        for coalition in map(frozenset, combinations(players, size))
    }
    return {
        player: fsum(
            # (U(S + u) - U(S)) / (n C(n - 1, |S|)), summed without rounding by fsum
            (worth[others | {player}] - worth[others]) / (count * comb(count - 1, len(others)))
            for others in worth
            if player not in others
        )
        for player in players
    }


def _objective_after_step(
    forward: Forward,
    batch: Batch,
    objective: Objective,
    parameters: Mapping[str, Tensor],
    step: Step,
    normalisation: str,
    kept: Bool[Tensor, " batch token"],
    token_weights: Tensor | None,
) -> Tensor:
    losses = batch_losses(forward, batch)
    if token_weights is not None:
        # under DPO +-omega l_t, omega constant
        losses = losses * token_weights.detach()
    divisor = _divisor(normalisation, kept, batch_mask(batch))
    # eq. masked_update: the gradient of the labels in S alone
    gradients = gradient(losses[kept].sum() / divisor, parameters)
    values = {name: parameter.detach() for name, parameter in parameters.items()}
    # J(theta'(S)), theta'(S) = step(theta, g)
    with displaced(parameters, step(values, gradients)):
        return objective().detach()


def _divisor(normalisation: str, kept: Tensor, labels: Tensor) -> int:
    if normalisation == "sum":
        return 1
    if normalisation == "response":
        # the mean over all response labels: dropping one leaves the divisor as it is
        return int(labels.sum())
    if normalisation == "kept":
        return max(int(kept.sum()), 1)  # nothing kept: the gradient is 0 anyway
    raise ConfigError(
        "unknown normalisation", got=repr(normalisation), remedy="use sum, response or kept"
    )


def _resolve(optimizer: str | Step, lr: float, state: AdamState | None) -> Step:
    if callable(optimizer):
        return optimizer
    if optimizer == "sgd":
        return lambda values, gradients: sgd_step(values, gradients, lr)
    if optimizer == "adam" and state is not None:
        return lambda values, gradients: adam_step(values, gradients, lr, state)[0]
    raise ConfigError(
        "no such optimizer step",
        got=f"optimizer={optimizer!r}, state {'given' if state else 'missing'}",
        remedy="use 'sgd', 'adam' with its state, or a function of values and gradients",
    )


def _precondition(g: Tensor, m: Tensor, v: Tensor, state: AdamState, *, frozen: bool) -> Tensor:
    b1, b2 = state.betas
    s = state.step + 1
    # c = d m^ / dg
    c = (1 - b1) / (1 - b1**s)
    if frozen:
        # c / (sqrt(v^) + eps) with v^ before the step, corrected by its own step number
        return c / (torch.sqrt(v / (1 - b2**state.step)) + state.eps)
    # m^ and sqrt(v^) after the step
    m_hat = (b1 * m + (1 - b1) * g) / (1 - b1**s)
    root = torch.sqrt((b2 * v + (1 - b2) * g**2) / (1 - b2**s))
    # Where the root is 0, g is 0 too: the moving-denominator term drops out.
    safe = torch.where(root > 0, root, torch.ones_like(root))
    # from d sqrt(v^) / dg = (1 - b2) g / ((1 - b2^s) sqrt(v^)) in the denominator of u
    moving = m_hat * (1 - b2) * g / ((1 - b2**s) * safe * (root + state.eps) ** 2)
    return c / (root + state.eps) - moving


def _decayed(g: Tensor, state: AdamState, value: Tensor | None) -> Tensor:
    if state.decoupled or state.weight_decay == 0.0:
        return g
    assert value is not None
    # coupled decay is part of the gradient, and goes through the moments
    return g + state.weight_decay * value


def _root(x: Tensor) -> Tensor:
    """``sqrt(x)`` whose derivative at 0 is 0, not infinite."""
    positive = x > 0
    # the inner where keeps the infinite derivative at 0 out of the backward, as inf * 0 is NaN
    return torch.where(positive, torch.sqrt(torch.where(positive, x, torch.ones_like(x))), x)
