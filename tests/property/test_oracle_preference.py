"""The independent DPO against -log sigmoid by hand, finite differences and closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken.errors import ConfigError
from alphatoken.oracle.gradients import flatten
from alphatoken.oracle.preference import (
    PreferencePairs,
    branch_log_probabilities,
    dpo_gradient,
    dpo_loss,
    dpo_margin,
    dpo_omega,
    dpo_token_errors,
    masked_dpo_gradient,
    preference_objective,
)
from tests.property.tiny import close, draw_rows, flat_gradient, labelled, state_of, tiny

VOCABULARY = 4
LENGTHS = (
    ([(2, 3), (1, 2)], [(2, 1), (1, 4)]),  # branches of different lengths
    ([(1, 1)], [(1, 1)]),
    ([(3, 2), (1, 1), (2, 2)], [(3, 2), (1, 3), (2, 1)]),
)


def setting(seed: int, shape: int = 0, pad_left: bool = False):
    """Policy, forward, parameters and pairs whose reference is another model."""
    model, forward, parameters = tiny(seed, VOCABULARY)
    reference, _, _ = tiny(seed + 1, VOCABULARY)
    model.eval(), reference.eval()
    rows = [draw_rows(seed + i, lengths, VOCABULARY) for i, lengths in enumerate(LENGTHS[shape])]
    batches = [labelled(branch, pad_left) for branch in rows]
    with torch.no_grad():
        log_p = [
            branch_log_probabilities(
                reference(batch["input_ids"], batch["attention_mask"]), batch["labels"]
            )
            for batch in batches
        ]
    pairs = PreferencePairs(*batches, *log_p)
    return model, forward, parameters, pairs, (reference, rows)


def logits_of(forward, pairs) -> list[Tensor]:
    return [
        forward({name: value for name, value in batch.items() if name != "labels"})
        for batch in (pairs.chosen, pairs.rejected)
    ]


def keep_all(pairs) -> list[Tensor]:
    return [torch.ones_like(b["labels"], dtype=torch.bool) for b in (pairs.chosen, pairs.rejected)]


def by_hand(model, reference, rows, beta) -> Tensor:
    """-log sigmoid(s), pair by pair and token by token, without batches or padding."""

    def log_p(network, prompt, response):
        total = torch.zeros((), dtype=torch.float64)
        for i, token in enumerate(response):
            context = torch.tensor([prompt + response[:i]])
            total = total + torch.log_softmax(network(context)[0, -1], dim=-1)[token]
        return total

    losses = []
    for chosen, rejected in zip(*rows, strict=True):
        s = beta * (
            log_p(model, *chosen)
            - log_p(reference, *chosen).detach()
            - log_p(model, *rejected)
            + log_p(reference, *rejected).detach()
        )
        losses.append(torch.log1p(torch.exp(-s)))
    return torch.stack(losses).mean()


cases = given(
    seed=st.integers(0, 2**20),
    shape=st.integers(0, len(LENGTHS) - 1),
    pad_left=st.booleans(),
    beta=st.sampled_from([0.1, 1.0]),
)


@cases
@example(seed=0, shape=0, pad_left=True, beta=1.0)
def test_loss_and_gradient_are_those_of_minus_log_sigmoid(seed, shape, pad_left, beta):
    model, forward, parameters, pairs, (reference, rows) = setting(seed, shape, pad_left)
    wanted = by_hand(model, reference, rows, beta)
    actual = dpo_loss(*logits_of(forward, pairs), pairs, beta)
    assert float((actual - wanted).detach().abs()) <= 1e-12 * (1 + float(wanted.detach()))
    gradient = dpo_gradient(model, forward, pairs, parameters, beta)
    close(flatten(gradient), flat_gradient(wanted, parameters), 1e-11, beta)


@cases
@example(seed=5, shape=0, pad_left=False, beta=1.0)
def test_surrogate_with_all_masks_one_has_the_gradient_of_dpo(seed, shape, pad_left, beta):
    """Proves: surrogate with all masks one has the gradient of dpo (exact), against
    ``masked_dpo_gradient``, ``dpo_gradient``.
    """
    model, forward, parameters, pairs, _ = setting(seed, shape, pad_left)
    full = dpo_gradient(model, forward, pairs, parameters, beta)
    surrogate = masked_dpo_gradient(model, forward, pairs, parameters, *keep_all(pairs), beta)
    close(flatten(surrogate), flatten(full), 1e-12, beta)


@given(seed=st.integers(0, 2**20), shape=st.integers(0, 2), drop=st.integers(0, 20))
def test_masks_drop_single_tokens_and_leave_omega_alone(seed, shape, drop):
    model, forward, parameters, pairs, _ = setting(seed, shape)
    beta = 0.7
    keep = keep_all(pairs)
    full = flatten(masked_dpo_gradient(model, forward, pairs, parameters, *keep, beta))
    places = [
        (branch, row, token)
        for branch, batch in enumerate((pairs.chosen, pairs.rejected))
        for row, token in (batch["labels"] != -100).nonzero().tolist()
    ]
    branch, row, token = places[drop % len(places)]
    keep[branch][row, token] = False
    masked = flatten(masked_dpo_gradient(model, forward, pairs, parameters, *keep, beta))

    logits = logits_of(forward, pairs)
    omega = dpo_omega(dpo_margin(*logits, pairs, beta), beta)
    assert not omega.requires_grad
    batch = (pairs.chosen, pairs.rejected)[branch]
    log_p = torch.log_softmax(logits[branch][row, token - 1], dim=-1)
    own = flat_gradient(-log_p[batch["labels"][row, token]], parameters)
    sign = 1.0 if branch == 0 else -1.0
    close(full - masked, sign * omega[row] * own / len(omega), 1e-11, full.abs().max() + beta)


@cases
def test_omega_and_token_errors_are_derivatives(seed, shape, pad_left, beta):
    _, forward, _, pairs, _ = setting(seed, shape, pad_left)
    logits = [x.detach().requires_grad_() for x in logits_of(forward, pairs)]
    margin = dpo_margin(*logits, pairs, beta)
    total = dpo_loss(*logits, pairs, beta) * len(margin)
    wanted = torch.autograd.grad(total, logits)
    for actual, expected in zip(dpo_token_errors(*logits, pairs, beta), wanted, strict=True):
        close(actual, expected, 1e-12, beta)
    s = margin.detach().requires_grad_()
    (slope,) = torch.autograd.grad(-torch.nn.functional.logsigmoid(s).sum(), s)
    close(dpo_omega(s, beta), -beta * slope, 1e-13, beta)


def test_preference_objective_divides_by_tokens_or_pairs():
    model, forward, parameters, pairs, (reference, rows) = setting(3)
    sums = float(by_hand(model, reference, rows, 0.5).detach()) * 2
    per_pair = preference_objective(forward, pairs, 0.5, "pairs")
    per_token = preference_objective(forward, pairs, 0.5)
    assert float(per_pair.detach()) == pytest.approx(sums / 2, rel=1e-12)
    assert float(per_token.detach()) == pytest.approx(sums / (3 + 2 + 1 + 4), rel=1e-12)
    gradient = flatten(dpo_gradient(model, forward, pairs, parameters, 0.5))
    close(flat_gradient(per_pair, parameters), gradient, 1e-12)


def test_saturated_margins_stay_finite():
    model, forward, parameters, pairs, _ = setting(4)
    far, near = (
        replace(pairs, reference_chosen=pairs.reference_chosen + shift) for shift in (-1e6, 1e6)
    )
    logits = logits_of(forward, pairs)
    assert float(dpo_loss(*logits, far, 1.0).detach()) == 0
    assert float(dpo_loss(*logits, near, 1.0).detach()) == pytest.approx(1e6, rel=1e-3)
    gradient = dpo_gradient(model, forward, near, parameters, 1.0)
    assert all(torch.isfinite(part).all() for part in gradient.values())
    assert flatten(gradient).any()


def test_model_is_left_as_found():
    model, forward, parameters, pairs, _ = setting(6)
    model.train()
    before = state_of(model)
    dpo_gradient(model, forward, pairs, parameters)
    masked_dpo_gradient(model, forward, pairs, parameters, *keep_all(pairs))
    assert state_of(model) == before


def test_refusal():
    _, forward, _, pairs, _ = setting(6)
    with pytest.raises(ConfigError, match="words"):
        preference_objective(forward, pairs, 0.1, "words")
