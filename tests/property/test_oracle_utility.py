"""The utility oracles against first-order theory, torch.optim, and the axioms of Shapley values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken.errors import ConfigError, InputError
from alphatoken.oracle.utility import (
    AdamState,
    adam_preconditioner,
    adam_step,
    adam_step_derivative,
    exact_shapley,
    leave_one_out_utility,
    one_step_utility,
)
from tests.property.profiles import budget
from tests.property.tiny import close, draw_rows, labelled, state_of, tiny

VOCABULARY = 4


def setting(seed: int, lengths=((2, 3), (1, 2)), pad_left: bool = False):
    """Model, training batch with a label hole, validation objective and the label values."""
    model, forward, parameters = tiny(seed, VOCABULARY)
    batch = labelled(draw_rows(seed + 1, list(lengths), VOCABULARY), pad_left)
    if lengths[0][1] > 2:  # a hole in the middle of the first response
        place = int((batch["labels"][0] != -100).nonzero()[1])
        batch["labels"][0, place] = -100
    held_out = draw_rows(seed + 2, [(1, 3), (2, 2)], VOCABULARY)

    def objective() -> Tensor:
        losses = []
        for prompt, response in held_out:
            ids = torch.tensor([prompt + response])
            table = torch.log_softmax(model(ids)[0], dim=-1)
            losses += [-table[len(prompt) + i - 1, c] for i, c in enumerate(response)]
        return torch.stack(losses).mean()

    return model, forward, parameters, batch, objective


def label_values(model, parameters, batch, objective) -> tuple[Tensor, Tensor]:
    """``<grad l_k, grad J>`` and the sum of its absolute terms, (batch, token), by definition."""
    model.eval()
    tensors = list(parameters.values())
    towards = torch.autograd.grad(objective(), tensors)
    values = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    scale = torch.zeros_like(values)
    for row, token in (batch["labels"] != -100).nonzero().tolist():
        logits = model(batch["input_ids"], batch["attention_mask"])
        loss = -torch.log_softmax(logits[row, token - 1], -1)[batch["labels"][row, token]]
        parts = torch.autograd.grad(loss, tensors)
        for part, direction in zip(parts, towards, strict=True):
            values[row, token] += (part * direction).sum()
            scale[row, token] += (part * direction).abs().sum()
    return values, scale


def first_order(values: Tensor, mask: Tensor, normalisation: str) -> Tensor:
    n = int(mask.sum())
    mean = values[mask].mean()
    per_label = {
        "sum": values,
        "response": values / n,
        "kept": (values - mean) / (n - 1),
    }[normalisation]
    return torch.where(mask, per_label, 0.0)


@budget(0.5)
@given(
    seed=st.integers(0, 2**20),
    normalisation=st.sampled_from(["sum", "response", "kept"]),
    pad_left=st.booleans(),
)
@example(seed=0, normalisation="kept", pad_left=True)
def test_utility_is_first_order_the_label_value(seed, normalisation, pad_left):
    """Proves: eqs. local_utility_def, first_order_delta (approximate), against
    ``leave_one_out_utility``, ``sgd_step``.
    """
    model, forward, parameters, batch, objective = setting(seed, pad_left=pad_left)
    mask = batch["labels"] != -100
    values, scale = label_values(model, parameters, batch, objective)
    wanted = first_order(values, mask, normalisation)
    errors = []
    for lr in (2e-5, 1e-5):
        actual = leave_one_out_utility(
            model, forward, batch, objective, "sgd", lr, normalisation, parameters=parameters
        )
        assert not actual[~mask].any()
        errors.append((actual - lr * wanted).norm())
        # The constant of the second order is unbounded in principle; here it stays below 1e3.
        assert float(errors[-1]) <= 1e3 * lr * lr * (1 + float(scale.max()))
    # Second order: halving the step quarters the error, up to the rounding of J.
    assert float(errors[1]) <= 0.255 * float(errors[0]) + 6e-15


# --- Adam ------------------------------------------------------------------------------------


def random_like(parameters, seed, positive=False):
    generator = torch.Generator().manual_seed(seed)
    draws = {n: torch.empty_like(p.detach()).normal_(generator=generator) for n, p in parameters}
    return {n: d.abs() + 0.01 for n, d in draws.items()} if positive else draws


@budget(0.5)
@given(
    seed=st.integers(0, 2**20),
    decoupled=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    betas=st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.95)]),
    eps=st.sampled_from([1e-8, 1e-2]),
)
def test_adam_is_torchs_adam(seed, decoupled, weight_decay, betas, eps):
    _, _, parameters = tiny(seed)
    names = list(parameters.items())
    values = {name: p.detach().clone() for name, p in names}
    zeros = {name: torch.zeros_like(p) for name, p in values.items()}
    state = AdamState(0, zeros, zeros, betas, eps, weight_decay, decoupled)
    copies = [p.clone().requires_grad_() for p in values.values()]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind(copies, lr=0.05, betas=betas, eps=eps, weight_decay=weight_decay)
    for i in range(4):
        gradients = random_like(names, seed + i)
        for copied, g in zip(copies, gradients.values(), strict=True):
            copied.grad = g.clone()
        optimizer.step()
        values, state = adam_step(values, gradients, 0.05, state)
        assert state.step == i + 1
        for copied, value, name in zip(copies, values.values(), values, strict=True):
            close(value, copied.detach(), 1e-14)
            close(state.m[name], optimizer.state[copied]["exp_avg"], 1e-14)
            close(state.v[name], optimizer.state[copied]["exp_avg_sq"], 1e-14)


@budget(0.5)
@given(
    seed=st.integers(0, 2**20),
    step=st.sampled_from([0, 1, 30]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.9)]),
    decoupled=st.booleans(),
)
@example(seed=1, step=0, betas=(0.9, 0.999), decoupled=False)
def test_full_preconditioner_is_the_derivative_of_the_update(seed, step, betas, decoupled):
    """Proves: full preconditioner is the derivative of the update (exact), against
    ``adam_step``, ``adam_step_derivative``.
    """
    _, _, parameters = tiny(seed)
    names = list(parameters.items())
    values = {name: p.detach() for name, p in names}
    zeros = {name: torch.zeros_like(p) for name, p in values.items()}
    m = random_like(names, seed + 1) if step else zeros
    v = random_like(names, seed + 2, positive=True) if step else zeros
    state = AdamState(step, m, v, betas, 1e-6, 0.1, decoupled)
    g, token = random_like(names, seed + 3), random_like(names, seed + 4)
    by_autograd = adam_step_derivative(g, token, state, values)
    p = adam_preconditioner(g, state, "full", values)

    h = 1e-6

    def moved(by):
        shifted = {name: g[name] + by * token[name] for name in g}
        return adam_step(values, shifted, 1.0, state)[0]

    up, down = moved(h), moved(-h)
    for name in g:
        closed = p[name] * token[name]
        # Where both terms of P are large they cancel: measure against the first, 1/(root + eps).
        b1, b2 = betas
        total = g[name] if decoupled else g[name] + 0.1 * values[name]
        root = torch.sqrt((b2 * v[name] + (1 - b2) * total**2) / (1 - b2 ** (step + 1)))
        scale = token[name].abs() * ((1 - b1) / (1 - b1 ** (step + 1)) + 1) / root
        assert bool(((by_autograd[name] - closed).abs() <= 1e-12 * scale * 10).all())
        difference = -(up[name] - down[name]) / (2 * h)
        smooth = root > 1e-2  # elsewhere the step h is not small against the root
        assert bool(((difference - closed).abs()[smooth] <= 1e-5 * (1 + scale[smooth]) * 10).all())


# --- Shapley ---------------------------------------------------------------------------------


def random_game(seed: int, players: int):
    generator = torch.Generator().manual_seed(seed)
    worths = torch.randn(2**players, generator=generator, dtype=torch.float64).tolist()
    return lambda coalition: worths[sum(1 << player for player in coalition)]


@budget(0.5)
@given(seed=st.integers(0, 2**20), players=st.integers(1, 6))
def test_shapley_axioms(seed, players):
    game = random_game(seed, players)
    everyone = range(players)
    values = exact_shapley(game, everyone)
    total = game(frozenset(everyone)) - game(frozenset())
    assert sum(values.values()) == pytest.approx(total, abs=1e-12 * 2**players)
    other = random_game(seed + 1, players)
    both = exact_shapley(lambda s: game(s) + 2 * other(s), everyone)  # linearity
    doubled = exact_shapley(other, everyone)
    for player in everyone:
        assert both[player] == pytest.approx(values[player] + 2 * doubled[player], abs=1e-11)
    # A dummy adds its own worth, and changes nobody else's value.
    dummy = exact_shapley(lambda s: game(s - {"d"}) + 3.0 * ("d" in s), [*everyone, "d"])
    assert dummy["d"] == pytest.approx(3.0, abs=1e-11)
    for player in everyone:
        assert dummy[player] == pytest.approx(values[player], abs=1e-11)
    # Symmetry: a game of sizes only pays all alike.
    sizes = exact_shapley(lambda s: float(len(s) ** 2), everyone)
    assert all(value == pytest.approx(float(players), abs=1e-11) for value in sizes.values())


@budget(0.3)
@given(seed=st.integers(0, 2**20))
def test_shapley_of_a_step_tends_to_the_label_values(seed):
    """Proves: eq. shapley_closed_form_step (approximate), against ``exact_shapley``,
    ``one_step_utility``.
    """
    model, forward, parameters, batch, objective = setting(seed, lengths=((2, 2), (1, 1)))
    players = [tuple(pair) for pair in (batch["labels"] != -100).nonzero().tolist()]
    values, _ = label_values(model, parameters, batch, objective)
    assume(float(values.abs().max()) > 1e-6)
    errors = []
    for lr in (2e-5, 1e-5):
        game = one_step_utility(model, forward, batch, objective, "sgd", lr, parameters=parameters)
        actual = exact_shapley(game, players)
        total = game(frozenset(players))
        assert game(frozenset()) == 0
        assert sum(actual.values()) == pytest.approx(total, abs=1e-14)  # efficiency
        errors.append(sum((actual[u] - lr * float(values[u])) ** 2 for u in players) ** 0.5)
    assert errors[1] <= 0.255 * errors[0] + 6e-15


def test_leave_one_out_is_the_last_marginal_of_the_game():
    """Proves: eqs. masked_update, local_utility_def (exact), against ``leave_one_out_utility``,
    ``one_step_utility``.
    """
    model, forward, parameters, batch, objective = setting(17)
    arguments = (model, forward, batch, objective, "sgd", 0.2, "response")
    actual = leave_one_out_utility(*arguments, parameters=parameters)
    game = one_step_utility(*arguments, parameters=parameters)
    players = frozenset(tuple(pair) for pair in (batch["labels"] != -100).nonzero().tolist())
    for player in players:
        wanted = game(players) - game(players - {player})
        assert float(actual[player]) == pytest.approx(wanted, abs=1e-14)


# --- State and refusals ----------------------------------------------------------------------


def test_model_is_left_as_found():
    model, forward, parameters, batch, objective = setting(19)
    model.train()
    parameters["layers.0.mlp.down_proj.weight"].requires_grad_(False)
    before = state_of(model)
    utilities = leave_one_out_utility(model, forward, batch, objective, parameters=parameters)
    assert utilities.any()
    one_step_utility(model, forward, batch, objective, parameters=parameters)(frozenset())
    assert state_of(model) == before

    def bad_step(values, gradients):
        raise ArithmeticError("inside")

    with pytest.raises(ArithmeticError, match="inside"):
        leave_one_out_utility(model, forward, batch, objective, bad_step, parameters=parameters)
    assert state_of(model) == before


def test_refusals():
    model, forward, parameters, batch, objective = setting(29)
    call = (model, forward, batch, objective)
    with pytest.raises(ConfigError, match="state missing"):
        leave_one_out_utility(*call, "adam", parameters=parameters)
    with pytest.raises(ConfigError, match="lion"):
        leave_one_out_utility(*call, "lion", parameters=parameters)
    with pytest.raises(ConfigError, match="median"):
        leave_one_out_utility(*call, "sgd", 0.1, "median", parameters=parameters)
    with pytest.raises(InputError, match="not a response token"):
        one_step_utility(*call, parameters=parameters)(frozenset({(0, 0)}))
    zeros = {"w": torch.zeros(1)}
    with pytest.raises(ConfigError, match="half"):
        adam_preconditioner(zeros, AdamState(1, zeros, zeros), "half")
