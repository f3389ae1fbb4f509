"""The retention oracles against second routes: definitions, Taylor's theorem, linear programming.

The decoder is small enough for dense Hessians and for listing every response.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor

from alphatoken.errors import InputError
from alphatoken.oracle import retention
from alphatoken.oracle.enumeration import (
    enumerate_responses,
    enumerated_log_probabilities,
    exact_fisher,
    exact_token_fisher,
    expected_retention_loss,
    lipschitz_constant,
    monte_carlo_fisher,
    prompt_fishers,
    transfer_bound,
    wasserstein,
)
from alphatoken.oracle.gradients import displaced, flatten, undisturbed, unflatten
from alphatoken.oracle.retention import (
    hessian,
    kl_hessian,
    retention_gradient,
    retention_loss,
    third_derivative_along,
)
from tests.property import tolerance
from tests.property.profiles import budget
from tests.property.tiny import SCORED, close, flat_gradient, labelled, tiny


def some_prompts(seed: int, count: int, vocabulary: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    lengths = torch.randint(1, 4, (count,), generator=generator).tolist()
    return [torch.randint(vocabulary, (n,), generator=generator) for n in lengths]


def pick(parameters):
    return {name: parameters[name] for name in SCORED}


# --- Gradient and Hessian --------------------------------------------------------------------


@budget(0.5)
@given(seed=st.integers(0, 2**20), pad_left=st.booleans(), rows=st.integers(1, 3))
@example(seed=0, pad_left=True, rows=3)
def test_retention_gradient_is_the_mean_of_single_sequences(seed, pad_left, rows):
    model, forward, parameters = tiny(seed)
    generator = torch.Generator().manual_seed(seed)
    texts = [
        (
            torch.randint(3, (1 + i,), generator=generator).tolist(),
            torch.randint(3, (3 - i,), generator=generator).tolist(),
        )
        for i in range(rows)
    ]
    texts.append(([1, 2], []))  # a row without response tokens does not count
    actual = retention_gradient(model, forward, labelled(texts, pad_left), parameters)
    split = [labelled([text], pad_left) for text in texts]
    from_list = retention_gradient(model, forward, split, parameters)

    model.eval()
    wanted = torch.zeros(())
    scale = torch.zeros(())
    for prompt, response in texts:
        for i in range(len(response)):  # one token at a time, no batch, no padding, no shift
            context = torch.tensor([prompt + response[:i]])
            loss = -torch.log_softmax(model(context)[0, -1], dim=-1)[response[i]]
            g = flat_gradient(loss, parameters)
            wanted, scale = wanted + g, scale + g.abs().max()
    close(flatten(actual), wanted / rows, 1e-12, scale / rows)
    close(flatten(from_list), wanted / rows, 1e-12, scale / rows)


@budget(0.3)
@given(seed=st.integers(0, 2**20))
def test_hessian_and_third_derivative_agree_with_differences(seed):
    """Proves: hessian and third derivative agree with differences (exact), against ``hessian``,
    ``retention_loss``, ``retention_gradient``.
    """
    model, forward, parameters = tiny(seed)
    scored = pick(parameters)
    batch = labelled([([0, 2], [1, 1]), ([1], [0, 2])], pad_left=False)
    loss = lambda: retention_loss(forward, batch)  # noqa: E731
    generator = torch.Generator().manual_seed(seed)
    size = sum(p.numel() for p in scored.values())
    unit = torch.randn(size, generator=generator, dtype=torch.float64)
    unit = unit / unit.norm()
    start = flatten(scored).detach()

    def moved(by, function):
        with displaced(scored, unflatten(start + by * unit, scored)):
            return function()

    with undisturbed(model, scored):
        h = hessian(loss, scored)
        t = third_derivative_along(loss, scored, unflatten(unit, scored))
        assert float((h - h.T).abs().max()) <= 1e-12 * float(h.abs().max())
        step = 1e-5
        g = lambda: flatten(retention_gradient(model, forward, batch, scored))  # noqa: E731
        difference = (moved(step, g) - moved(-step, g)) / (2 * step)
        # Central differences err by step^2 times higher derivatives, which reach 1e3 here.
        close(h @ unit, difference, 1e-6, h.abs().max() + 1)
        difference = (moved(step, lambda: hessian(loss, scored)) - h) / step
        close(t, difference, 1e-3, h.abs().max() + 1)


# --- Fisher ----------------------------------------------------------------------------------


@budget(0.5)
@given(
    seed=st.integers(0, 2**20),
    length=st.integers(1, 2),
    eos=st.sampled_from([None, 0, 2]),
    prompts=st.integers(1, 2),
    everything=st.booleans(),
)
@example(seed=3, length=2, eos=0, prompts=2, everything=True)
def test_full_fisher_is_the_hessian_of_the_divergence(seed, length, eos, prompts, everything):
    """Proves: full fisher is the hessian of the divergence (exact), against ``exact_fisher``,
    ``kl_hessian``.
    """
    model, forward, parameters = tiny(seed)
    parameters = parameters if everything else pick(parameters)
    xs = some_prompts(seed, prompts)
    fisher = exact_fisher(model, forward, xs, length, parameters, 3, eos)
    curvature = kl_hessian(model, forward, xs, length, parameters, 3, eos)
    # Scale: the Hessian adds p * (score outer product + second derivatives), some of which cancel.
    close(curvature, fisher, 1e-10, fisher.abs().max())
    assert float(torch.linalg.eigvalsh(fisher).min()) >= -1e-12 * float(fisher.abs().max())
    assert float(fisher.abs().max()) > 0


def test_token_fisher_is_the_hessian_on_given_prefixes():
    """Proves: token fisher is the hessian on given prefixes (exact), against
    ``exact_token_fisher``, ``hessian``.
    """
    model, forward, parameters = tiny(5)
    batch = labelled([([0, 2], [1, 1]), ([1], [0, 2, 1]), ([2, 2], [])], pad_left=True)
    fisher = exact_token_fisher(model, forward, batch, parameters)
    inputs = {name: value for name, value in batch.items() if name != "labels"}

    def divergence():
        mask = batch["labels"][:, 1:] != -100
        log_p = torch.log_softmax(forward(inputs)[:, :-1][mask], dim=-1)
        return -(log_p.detach().exp() * log_p).sum() / 2  # two rows have a response

    with undisturbed(model, parameters):
        close(hessian(divergence, parameters), fisher, 1e-10)
    # One response token on its own prompt: given and sampled prefixes are the same.
    single = labelled([([0, 2], [1])], pad_left=False)
    one = exact_token_fisher(model, forward, single, parameters)
    close(one, exact_fisher(model, forward, [torch.tensor([0, 2])], 1, parameters, 3), 1e-12)


def test_monte_carlo_fisher_is_unbiased():
    """Proves: eq. mc_fisher (unbiased), against ``monte_carlo_fisher``, ``exact_fisher``."""
    model, forward, parameters = tiny(8, width=1)
    xs, eos = [torch.tensor([0, 2]), torch.tensor([1])], 0
    wanted = exact_fisher(model, forward, xs, 2, parameters, 3, eos).diagonal()
    mean, error = monte_carlo_fisher(
        model, forward, xs, 2, parameters, samples=1500, seed=11, eos=eos
    )
    z = (mean - wanted) / error
    # 10 dependent normals: |z| > 4 has probability below 1e-3 in all.
    assert float(z.abs().max()) < 4
    # The same test refuses the square of a batch's mean gradient, which expects F / batch size.
    halved = (mean - wanted / 2) / error
    assert float(halved.abs().max()) > 10

    # Scores of successive tokens are uncorrelated, so squares summed token by token expect F too.
    per_token = torch.zeros_like(wanted)
    with undisturbed(model, parameters):
        for x in xs:
            for response in enumerate_responses(2, 3, eos):
                ids = torch.cat([x, torch.tensor(response)])[None]
                table = torch.log_softmax(forward({"input_ids": ids})[0], dim=-1)
                terms = [table[len(x) - 1 + i, c] for i, c in enumerate(response)]
                p = float(torch.stack(terms).detach().sum().exp())
                for term in terms:
                    per_token += p * flat_gradient(term, parameters) ** 2 / len(xs)
    close(per_token, wanted, 1e-12)


# --- Proxy bound -----------------------------------------------------------------------------


def bound_setting(seed: int, others: bool, own_data: bool, scale: float):
    """A reference model, retention loss, both Fishers and a drift; arguments of proxy_bound."""
    model, forward, parameters = tiny(seed)
    moving = parameters if others else pick(parameters)
    xs, ys = some_prompts(seed, 2), some_prompts(seed + 7, 2)
    generator = torch.Generator().manual_seed(seed + 3)
    reference = {name: p.detach().clone() for name, p in moving.items()}
    drift = {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale
        for name, p in moving.items()
    }
    model.eval()
    with torch.no_grad():
        q = [enumerated_log_probabilities(forward, x, 2, 3).exp() for x in xs]
    if own_data:
        loss = lambda: expected_retention_loss(forward, xs, 2, 3, q)  # noqa: E731
    else:
        text = [(x.tolist(), torch.randint(3, (2,), generator=generator).tolist()) for x in xs]
        batch = labelled(text, pad_left=False)
        loss = lambda: retention_loss(forward, batch)  # noqa: E731
    scored = pick(parameters)
    fishers = [exact_fisher(model, forward, data, 2, scored, 3).diagonal() for data in (ys, xs)]
    arguments = {
        "reference": reference,
        "current": {name: reference[name] + drift[name] for name in moving},
        "fisher": unflatten(fishers[0], scored),
        "retention_fisher": unflatten(fishers[1], scored),
    }
    return model, loss, moving, drift, arguments


def spectral(matrix: Tensor) -> float:
    return float(torch.linalg.svdvals(matrix)[0]) if matrix.numel() else 0.0


def terms_by_hand(loss, moving, arguments) -> dict[str, float]:
    """Each term of the bound by another route than the oracle's, in the order S, others."""
    names = list(SCORED)
    ordered = {name: moving[name] for name in names + [n for n in moving if n not in names]}
    size = sum(moving[name].numel() for name in names)
    start = flatten({name: arguments["reference"][name] for name in ordered})
    step = flatten({name: arguments["current"][name] for name in ordered}) - start

    def at(u: float, function):
        with displaced(ordered, unflatten(start + u * step, ordered)):
            return function()

    g = lambda: flat_gradient(loss(), ordered)  # noqa: E731
    h = lambda: hessian(loss, ordered)  # noqa: E731
    r_0, ideal, curvature = at(0, g), at(1, g), at(0, h)
    own, cross = curvature[:size, :size], curvature[:size, size:]
    dagger = torch.diag(flatten({name: arguments["retention_fisher"][name] for name in names}))
    f_ref = torch.diag(flatten({name: arguments["fisher"][name] for name in names}))
    diagonal = torch.diag(torch.diag(own))
    # M_3: the largest slope of H at five points of the segment, by central differences.
    near, length = 1e-4, float(step.norm())
    slopes = [
        spectral((at(u + near, h) - at(u - near, h))[:size]) / (2 * near * length)
        for u in torch.linspace(0, 1, 5).tolist()
        if length
    ]
    return {
        "left": float((ideal[:size] - f_ref @ step[:size]).norm()),
        "residual": float(r_0[:size].norm()),
        "off_diagonal": spectral(own - diagonal),
        "calibration": spectral(diagonal - dagger),
        "transfer": spectral(dagger - f_ref),
        "drift": float(step[:size].norm()),
        "cross_curvature": spectral(cross),
        "other_drift": float(step[size:].norm()),
        # Taylor's theorem: from gradients, where the oracle integrates Hessians.
        "remainder": float((ideal - r_0 - curvature @ step)[:size].norm()),
        "third_derivative": max(slopes, default=0.0),
    }


@budget(0.1, least=1)
@given(
    seed=st.integers(0, 2**20),
    others=st.booleans(),
    own_data=st.booleans(),
    scale=st.sampled_from([1e-3, 1e-2, 0.5]),
)
@example(seed=1, others=True, own_data=False, scale=0.5)
@example(seed=808972, others=True, own_data=False, scale=0.5)  # a norm layer's pole is near
def test_the_bound_holds_and_each_term_is_what_its_name_says(
    seed: int, others: bool, own_data: bool, scale: float
) -> None:
    """The terms one by one, then the inequality that they make.

    Proves: eqs. app_taylor, app_proxy_bound, app_F_ret_dagger, app_gap_decomp (exact), against
    ``proxy_bound``, ``expected_retention_loss``.
    """
    model, loss, moving, _, arguments = bound_setting(seed, others, own_data, scale)
    bound = retention.proxy_bound(model, loss, moving, **arguments, points=5)
    with undisturbed(model, moving):
        wanted = terms_by_hand(loss, moving, arguments)
    third, remainder = wanted.pop("third_derivative"), wanted.pop("remainder")
    size = 1 + sum(wanted.values())
    for name, value in wanted.items():
        tolerance.close(getattr(bound, name), value, size, 1e-12, name=name)
    # The difference of gradients loses digits to r_0 and H dtheta, the integral 1e-9 of itself.
    taylor = 1e-13 * (bound.left + bound.residual + size * (bound.drift + bound.other_drift))
    tolerance.close(bound.remainder, remainder, remainder + taylor / 1e-7, 1e-7, name="remainder")
    tolerance.close(bound.third_derivative, third, third, 1e-3, name="third_derivative")
    assert bound.left <= bound.right_integral * (1 + 1e-12)
    if scale <= 1e-2:  # on so short a segment five points miss the supremum by little
        assert bound.remainder <= bound.cubic * 1.02
        assert bound.holds
    assert bound.left > 0
    assert bound.off_diagonal > 0
    assert (bound.cross > 0) == others
    assert (bound.residual < 1e-12) == own_data
    assert (bound.calibration < 1e-10) == own_data


class Pair(torch.nn.Module):
    """Two parameters of two entries each: ``scored`` is S, ``rest`` moves beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.scored = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.rest = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))


ATTAINED = {
    "residual": (lambda s, r: 3 * s[0] + 4 * s[1], (0, 0), (0.5, 0), (0, 0)),
    "off_diagonal": (lambda s, r: 3 * s[0] * s[1], (0, 0), (0.5, 0), (0, 0)),
    "calibration": (lambda s, r: 3 * s[0] ** 2, (0, 0), (0.5, 0), (0, 0)),
    "transfer": (lambda s, r: 0 * s[0], (2.0, 0), (0.5, 0), (0, 0)),
    "cross_curvature": (lambda s, r: 3 * s[0] * r[0], (0, 0), (0, 0), (0.5, 0)),
    "third_derivative": (lambda s, r: 3 * s[0] ** 3, (0, 0), (0.5, 0), (0, 0)),
    "remainder": (lambda s, r: 3 * s[0] ** 3, (0, 0), (0.5, 0), (0, 0)),
}
"""Loss, F_ref, steps of S and of the rest: that term alone is the left side."""


def attained(name: str) -> retention.ProxyBound:
    loss, f_ref, *steps = ATTAINED[name]
    model = Pair()
    numbers = lambda values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
    return retention.proxy_bound(
        model,
        lambda: loss(model.scored, model.rest),
        dict(model.named_parameters()),
        reference={},
        current=dict(zip(("scored", "rest"), map(numbers, steps), strict=True)),
        fisher={"scored": numbers(f_ref)},
        retention_fisher={"scored": torch.zeros(2, dtype=torch.float64)},
    )


@pytest.mark.parametrize("name", ATTAINED)
def test_no_term_of_the_bound_can_be_smaller(name: str) -> None:
    """Equality with this term alone: the bound holds, and with half of the term it fails."""
    bound = attained(name)
    right = "right_integral" if name == "remainder" else "right"
    assert bound.left > 0.5
    tolerance.close(bound.left, getattr(bound, right), bound.left, 1e-12, name=f"only {name}")
    assert bound.holds
    half = replace(bound, **{name: getattr(bound, name) / 2})
    assert bound.left > 1.3 * getattr(half, right)
    assert not half.holds
    if name == "cross_curvature":
        assert not bound.holds_without_cross


def test_paper_bound_fails_when_weights_outside_the_proxy_move():
    """Own data (r_0 = 0, D_cal = 0), F_ref = F_dagger, only embedding and head move: pinned."""
    model, loss, moving, drift, arguments = bound_setting(12, True, True, 1e-3)
    arguments["fisher"] = arguments["retention_fisher"]
    arguments["current"] = {
        name: value + (0 if name in SCORED else drift[name])
        for name, value in arguments["reference"].items()
    }
    bound = retention.proxy_bound(model, loss, moving, **arguments, points=2)
    assert bound.drift == 0
    assert bound.left > 10 * bound.right_without_cross
    assert not bound.holds_without_cross
    assert bound.holds
    # With S drifting as well the paper's form still fails for this model and drift.
    arguments["current"] = {
        name: value + drift[name] * (1e-3 if name in SCORED else 1)
        for name, value in arguments["reference"].items()
    }
    both = retention.proxy_bound(model, loss, moving, **arguments, points=2)
    assert both.drift > 0
    assert not both.holds_without_cross
    assert both.holds


# --- Transfer --------------------------------------------------------------------------------


def edit_like(a: Tensor, b: Tensor) -> float:
    """Differing places from the end plus a fraction of the length gap; separates prompts."""
    n = min(len(a), len(b))
    return float((a[-n:] != b[-n:]).sum()) + 0.75 * abs(len(a) - len(b))


def wasserstein_by_programme(a: list[Tensor], b: list[Tensor], power: int) -> float:
    cost = np.array([[edit_like(x, y) ** power for y in b] for x in a])
    rows = [np.kron(np.eye(len(a)), np.ones(len(b))), np.kron(np.ones(len(a)), np.eye(len(b)))]
    marginals = np.concatenate([np.full(len(a), 1 / len(a)), np.full(len(b), 1 / len(b))])
    solved = linprog(cost.ravel(), A_eq=np.vstack(rows), b_eq=marginals, method="highs")
    return float(max(solved.fun, 0.0) ** (1 / power))


@given(
    seed=st.integers(0, 2**20), left=st.integers(1, 4), right=st.integers(1, 3),
    power=st.sampled_from([1, 2]),
)  # fmt: skip
def test_wasserstein_equals_the_linear_programme(seed, left, right, power):
    """Proves: wasserstein equals the linear programme (exact), against ``wasserstein``, linear
    programme.
    """
    a, b = some_prompts(seed, left), some_prompts(seed + 5, right)
    # The linear programme is solved to its own feasibility tolerance of 1e-7.
    actual = wasserstein(a, b, edit_like, power)
    assert actual**power == pytest.approx(wasserstein_by_programme(a, b, power) ** power, abs=1e-6)
    assert wasserstein(a, [*a, *a], edit_like, power) == 0


SPACE = [torch.tensor(x) for n in (1, 2) for x in itertools.product(range(3), repeat=n)]
"""Every prompt of one or two tokens: what the distributions below live on."""


@cache
def fisher_map(seed: int) -> tuple[Any, dict[tuple[int, ...], Tensor]]:
    """A decoder and its diagonal Fisher at every prompt of ``SPACE``, from scores by hand."""
    model, forward, parameters = tiny(seed)
    scored, model = pick(parameters), model.eval()
    images = {}
    for x in SPACE:
        log_p = torch.log_softmax(model(x[None])[0, -1], dim=-1)
        image = torch.zeros(sum(p.numel() for p in scored.values()), dtype=torch.float64)
        for one in log_p:
            image += one.detach().exp() * flat_gradient(one, scored) ** 2
        images[tuple(x.tolist())] = image
    return (model, forward, scored), images


def slope(images: Mapping[tuple[int, ...], Tensor], x: Tensor, y: Tensor) -> float:
    gap = images[tuple(x.tolist())] - images[tuple(y.tolist())]
    return float(gap.abs().max()) / edit_like(x, y)


@budget(0.5)
@given(
    seed=st.integers(0, 9),
    left=st.lists(st.integers(0, len(SPACE) - 1), min_size=1, max_size=4),
    right=st.lists(st.integers(0, len(SPACE) - 1), min_size=1, max_size=3),
)
def test_transfer_is_below_lipschitz_times_wasserstein(
    seed: int, left: list[int], right: list[int]
) -> None:
    """Both sides and the constant by other routes; then the inequality, and that L is needed.

    Proves: eq. app_wasser (exact), against ``transfer_bound``, ``lipschitz_constant``,
    ``prompt_fishers``.
    """
    (model, forward, scored), images = fisher_map(seed)
    steepest = max(itertools.combinations(SPACE, 2), key=lambda pair: slope(images, *pair))
    L = slope(images, *steepest)
    slope_bound = lipschitz_constant(
        SPACE, prompt_fishers(model, forward, SPACE, 1, scored, 3), edit_like
    )
    tolerance.close(slope_bound, L, L, 1e-12, name="L_g")
    for a, b in (([SPACE[i] for i in left], [SPACE[i] for i in right]), ([x] for x in steepest)):
        bound = transfer_bound(model, forward, a, b, 1, scored, 3, edit_like, lipschitz=slope_bound)
        mean = lambda xs: torch.stack([images[tuple(x.tolist())] for x in xs]).mean(0)  # noqa: E731
        gap = float((mean(a) - mean(b)).abs().max())
        tolerance.close(bound.transfer, gap, L, 1e-12, name="D_transfer")
        for power in (1, 2):
            # The programme is solved to its own feasibility tolerance of 1e-7; a root of it is
            # taken for W_2, so that both are compared before the root.
            mine = getattr(bound, f"wasserstein_{power}") ** power
            assert mine == pytest.approx(wasserstein_by_programme(a, b, power) ** power, abs=1e-6)
        assert bound.wasserstein_1 <= bound.wasserstein_2 * (1 + 1e-12)
        assert bound.holds
    # The last pair attains it: no smaller constant is one of this map.
    tolerance.close(bound.transfer, bound.right, L, 1e-12, name="the steepest pair")
    assert not replace(bound, lipschitz=L / 2).holds


# --- Refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "no response token", "the batch has no response token", "vocabulary 2",
        r"not the model's own.*head\.weight", "tied", "does not separate",
    ],
)  # fmt: skip
def test_refusals(words: str) -> None:
    """Nothing to learn from, a part of the vocabulary, foreign and tied parameters, no metric."""
    model, forward, parameters = tiny(0)
    empty, batch = (labelled([([0], labels)], pad_left=False) for labels in ([], [1]))
    prompts, images = [torch.tensor([0]), torch.tensor([1])], [torch.zeros(2), torch.ones(2)]
    if words == "tied":
        model.head.weight = model.embedding.weight
    tied = {name: model.get_parameter(name) for name in ("head.weight", "embedding.weight")}
    foreign = {"head.weight": torch.zeros(3, 2, requires_grad=True)}
    calls = {
        "no response token": lambda: retention_gradient(model, forward, empty, parameters),
        "the batch has no response token": lambda: exact_token_fisher(
            model, forward, empty, parameters
        ),
        "vocabulary 2": lambda: exact_fisher(model, forward, prompts, 1, parameters, 2),
        "tied": lambda: retention_gradient(model, forward, batch, tied),
        "does not separate": lambda: lipschitz_constant(prompts, images, lambda x, y: 0.0),
    }
    call = calls.get(words, lambda: retention_gradient(model, forward, batch, foreign))
    with pytest.raises(InputError, match=words):
        call()
