"""The retention oracles against second routes: definitions, Taylor's theorem, linear programming.

The decoder is small enough for dense Hessians and for listing every response.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor

from alphatoken.errors import AlphaTokenError, ConfigError, InputError, NumericalError
from alphatoken.oracle.enumeration import (
    enumerate_responses,
    enumerated_log_probabilities,
    exact_fisher,
    exact_token_fisher,
    expected_retention_loss,
    monte_carlo_fisher,
)
from alphatoken.oracle.evaluate import displaced, flatten, undisturbed, unflatten
from alphatoken.oracle.retention import (
    hessian,
    kl_hessian,
    proxy_bound,
    retention_gradient,
    retention_loss,
    third_derivative_along,
    third_derivative_norm,
)
from alphatoken.oracle.transfer import transfer_bound, wasserstein
from tests.property.profiles import budget
from tests.property.tiny import SCORED, close, labelled, tiny

torch.set_num_threads(1)


def some_prompts(seed: int, count: int, vocabulary: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    lengths = torch.randint(1, 4, (count,), generator=generator).tolist()
    return [torch.randint(vocabulary, (n,), generator=generator) for n in lengths]


def pick(parameters, names=SCORED):
    return {name: parameters[name] for name in names}


# --- Layout and state ------------------------------------------------------------------------


def test_flat_layout_is_the_mappings_order_row_by_row():
    parts = {"b": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "a": torch.tensor([5.0])}
    flat = flatten(parts)
    assert flat.tolist() == [1, 2, 3, 4, 5]
    back = unflatten(flat, parts)
    assert list(back) == ["b", "a"]
    assert torch.equal(back["b"], parts["b"])
    with pytest.raises(InputError, match="5 entries for 4"):
        unflatten(flat, {"b": parts["b"]})


def test_model_is_left_as_found_also_after_an_exception():
    model, forward, parameters = tiny(0)
    model.train()
    model.mlp.eval()
    model.embed.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    pointers = [(p.data_ptr(), p._version, p.requires_grad) for p in model.parameters()]
    copies = [p.detach().clone() for p in model.parameters()]
    generator_state = torch.get_rng_state()

    def unchanged():
        assert [module.training for module in model.modules()] == modes
        now = [(p.data_ptr(), p._version, p.requires_grad) for p in model.parameters()]
        assert now == pointers
        pairs = zip(copies, model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert all(p.grad is None for p in model.parameters())
        assert torch.equal(torch.get_rng_state(), generator_state)

    monte_carlo_fisher(model, forward, some_prompts(0, 1), 2, parameters, samples=3, seed=1)
    unchanged()
    values = {name: p.detach() + 1.0 for name, p in parameters.items()}

    def interrupted():
        with undisturbed(model, parameters), displaced(parameters, values):
            assert torch.equal(model.head.weight, values["head.weight"])
            assert not model.dropout.training
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    unchanged()
    with (
        pytest.raises(InputError, match="another shape"),
        displaced(parameters, {"head.weight": torch.zeros(3, 2), "mlp.weight": torch.zeros(1)}),
    ):
        pass
    unchanged()


def test_foreign_and_doubly_named_parameters_are_refused():
    model, forward, _ = tiny(0)
    foreign = {"head.weight": torch.zeros(3, 2, requires_grad=True)}
    batch = labelled([([0], [1])], pad_left=False)
    with pytest.raises(InputError, match=r"not the model's own.*head\.weight"):
        retention_gradient(model, forward, batch, foreign)
    with pytest.raises(InputError, match="no parameters"):
        retention_gradient(model, forward, batch, {})
    model.head.weight = model.embed.weight
    tied = {name: model.get_parameter(name) for name in ("head.weight", "embed.weight")}
    with pytest.raises(InputError, match="tied"):
        retention_gradient(model, forward, batch, tied)


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
    found = retention_gradient(model, forward, labelled(texts, pad_left), parameters)
    per_token = retention_gradient(model, forward, labelled(texts, pad_left), parameters, "token")
    split = [labelled([text], pad_left) for text in texts]
    from_list = retention_gradient(model, forward, split, parameters)

    model.eval()
    wanted = torch.zeros(())
    scale = torch.zeros(())
    for prompt, response in texts:
        for i in range(len(response)):  # one token at a time, no batch, no padding, no shift
            context = torch.tensor([prompt + response[:i]])
            loss = -torch.log_softmax(model(context)[0, -1], dim=-1)[response[i]]
            g = torch.cat(
                [x.reshape(-1) for x in torch.autograd.grad(loss, list(parameters.values()))]
            )
            wanted, scale = wanted + g, scale + g.abs().max()
    close(flatten(found), wanted / rows, 1e-12, scale / rows)
    close(flatten(from_list), wanted / rows, 1e-12, scale / rows)
    tokens = sum(len(response) for _, response in texts)
    close(flatten(per_token), wanted / tokens, 1e-12, scale / tokens)


def test_a_label_on_the_first_token_counts_nowhere():
    model, forward, parameters = tiny(1)
    batch = labelled([([0, 2], [1, 1]), ([1, 1, 1], [])], pad_left=False)
    first = {**batch, "labels": batch["labels"].clone()}
    first["labels"][:, 0] = first["input_ids"][:, 0]
    for normalisation in ("sequence", "token"):
        with_label = retention_gradient(model, forward, first, parameters, normalisation)
        without = retention_gradient(model, forward, batch, parameters, normalisation)
        assert torch.equal(flatten(with_label), flatten(without))


def test_hessian_of_a_quadratic_and_a_cubic_is_exact():
    x = {"u": torch.tensor([1.0, 2.0], requires_grad=True), "w": torch.tensor(3.0).requires_grad_()}
    quadratic = lambda: (x["u"][0] * x["w"] + 5 * x["u"][1] ** 2) * torch.ones(())  # noqa: E731
    assert hessian(quadratic, x).tolist() == [[0, 0, 1], [0, 10, 0], [1, 0, 0]]
    along = {"u": torch.tensor([1.0, 0.0]), "w": torch.tensor(0.0)}
    assert not third_derivative_along(quadratic, x, along).any()
    assert not hessian(lambda: 2 * x["w"], x).any()
    cubic = lambda: x["u"][0] ** 3 + x["u"][0] * x["u"][1] * x["w"]  # noqa: E731
    assert third_derivative_along(cubic, x, along).tolist() == [[6, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert float(third_derivative_norm(lambda: x["w"] ** 3, x)) == pytest.approx(6.0)


@budget(0.3)
@given(seed=st.integers(0, 2**20))
def test_hessian_and_third_derivative_agree_with_differences(seed):
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


@given(vocabulary=st.integers(1, 4), length=st.integers(1, 3), eos=st.sampled_from([None, 0, 1]))
def test_enumeration_lists_each_response_once(vocabulary, length, eos):
    responses = enumerate_responses(length, vocabulary, eos)
    assert len(set(responses)) == len(responses)
    assert all(eos not in response[:-1] for response in responses)
    assert all(len(r) == length or r[-1] == eos for r in responses)
    if eos is None or eos >= vocabulary:
        assert len(responses) == vocabulary**length
    else:
        keep = vocabulary - 1
        assert len(responses) == sum(keep**i for i in range(length)) + keep**length


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
    model, forward, parameters = tiny(seed)
    parameters = parameters if everything else pick(parameters)
    xs = some_prompts(seed, prompts)
    fisher = exact_fisher(model, forward, xs, length, parameters, 3, eos)
    curvature = kl_hessian(model, forward, xs, length, parameters, 3, eos)
    # Scale: the Hessian adds p * (score outer product + second derivatives), some of which cancel.
    close(curvature, fisher, 1e-10, fisher.abs().max())
    diagonal = exact_fisher(model, forward, xs, length, parameters, 3, eos, diagonal=True)
    assert [diagonal[name].shape for name in parameters] == [p.shape for p in parameters.values()]
    close(flatten(diagonal), fisher.diagonal(), 1e-13)
    assert float(torch.linalg.eigvalsh(fisher).min()) >= -1e-12 * float(fisher.abs().max())
    assert float(fisher.abs().max()) > 0


def test_token_fisher_is_the_hessian_on_given_prefixes():
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
    model, forward, parameters = tiny(8, width=1)
    xs, eos = [torch.tensor([0, 2]), torch.tensor([1])], 0
    wanted = flatten(exact_fisher(model, forward, xs, 2, parameters, 3, eos, diagonal=True))
    drawn = monte_carlo_fisher(model, forward, xs, 2, parameters, samples=1500, seed=11, eos=eos)
    z = (flatten(drawn.mean) - wanted) / flatten(drawn.standard_error)
    # 10 dependent normals: |z| > 4 has probability below 1e-3 in all.
    assert float(z.abs().max()) < 4
    # The same test refuses the square of a batch's mean gradient, which expects F / batch size.
    halved = (flatten(drawn.mean) - wanted / 2) / flatten(drawn.standard_error)
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
                    g = torch.autograd.grad(term, list(parameters.values()), retain_graph=True)
                    per_token += p * torch.cat([part.reshape(-1) for part in g]) ** 2 / len(xs)
    close(per_token, wanted, 1e-12)


def test_sampled_responses_follow_the_models_distribution_and_stop_at_eos():
    from alphatoken.oracle.enumeration import _sample

    model, forward, _ = tiny(8)
    prompt, n = torch.tensor([0, 2]), 1200
    model.eval()
    log_p = enumerated_log_probabilities(forward, prompt, 2, 3, eos=1)
    responses = sorted(enumerate_responses(2, 3, eos=1), key=len)
    generator = torch.Generator().manual_seed(5)
    drawn = [_sample(forward, prompt, 2, 1, generator) for _ in range(n)]
    assert set(drawn) <= set(responses)
    for response, p in zip(responses, log_p.exp().tolist(), strict=True):
        deviation = (drawn.count(response) - n * p) / math.sqrt(n * p * (1 - p))
        assert abs(deviation) < 4


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
    arguments = {
        "reference": reference,
        "current": {name: reference[name] + drift[name] for name in moving},
        "fisher": exact_fisher(model, forward, ys, 2, scored, 3, diagonal=True),
        "retention_fisher": exact_fisher(model, forward, xs, 2, scored, 3, diagonal=True),
    }
    return model, loss, moving, drift, arguments


@budget(0.2)
@given(
    seed=st.integers(0, 2**20),
    others=st.booleans(),
    own_data=st.booleans(),
    scale=st.sampled_from([1e-3, 1e-2, 0.5]),
)
@example(seed=1, others=True, own_data=False, scale=0.5)
def test_bound_holds_with_every_term(seed, others, own_data, scale):
    model, loss, moving, drift, arguments = bound_setting(seed, others, own_data, scale)
    bound = proxy_bound(model, loss, moving, **arguments, points=3)
    rounding = 1 + 1e-12
    assert bound.left <= bound.right_integral * rounding  # nothing sampled: holds at any distance
    # By the same triangle inequality the left side is never far from ||r_0||: no vacuous check.
    assert bound.left >= (2 * bound.residual - bound.right_integral) / rounding
    assert bound.left > 0
    assert bound.off_diagonal > 0
    scored = flatten({name: drift[name] for name in SCORED})
    assert bound.drift == pytest.approx(float(scored.norm()), rel=1e-12)
    assert (bound.cross > 0) == others
    if scale <= 1e-2:
        # On so short a segment three points miss the supremum by little.
        assert bound.remainder <= bound.cubic * 1.05
        assert bound.holds
    if own_data:
        assert bound.residual < 1e-12
        assert bound.calibration < 1e-10
    else:
        assert bound.residual > 1e-3
        assert bound.calibration > 1e-6


def test_each_term_is_what_its_name_says():
    model, loss, moving, _, arguments = bound_setting(4, True, False, 0.1)
    bound = proxy_bound(model, loss, moving, **arguments)
    names = list(SCORED)
    rest = [name for name in moving if name not in names]
    ordered = {name: moving[name] for name in names + rest}
    size = sum(moving[name].numel() for name in names)
    with undisturbed(model, moving):
        r_0 = torch.autograd.grad(loss(), [moving[name] for name in names])
        full = hessian(loss, ordered)
    h, cross = full[:size, :size], full[:size, size:]
    dagger = flatten({name: arguments["retention_fisher"][name] for name in names})
    f_ref = flatten({name: arguments["fisher"][name] for name in names})
    spectral = lambda matrix: float(torch.linalg.svdvals(matrix)[0])  # noqa: E731
    assert bound.residual == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in r_0)))
    assert bound.off_diagonal == pytest.approx(spectral(h - torch.diag(torch.diag(h))))
    assert bound.calibration == pytest.approx(spectral(torch.diag(torch.diag(h) - dagger)))
    assert bound.transfer == pytest.approx(spectral(torch.diag(dagger - f_ref)))
    assert bound.cross_curvature == pytest.approx(spectral(cross))
    step = {name: arguments["current"][name] - arguments["reference"][name] for name in moving}
    others = math.sqrt(sum(float((step[name] ** 2).sum()) for name in rest))
    assert bound.cross == pytest.approx(spectral(cross) * others)
    with undisturbed(model, moving), displaced(moving, arguments["current"]):
        ideal = torch.autograd.grad(loss(), [moving[name] for name in names])
    gaps = [
        g - arguments["fisher"][name] * step[name] for name, g in zip(names, ideal, strict=True)
    ]
    assert bound.left == pytest.approx(math.sqrt(sum(float((gap**2).sum()) for gap in gaps)))
    everything = float(flatten(step).norm())
    assert bound.cubic == pytest.approx(bound.third_derivative / 2 * everything**2)
    first = bound.residual + bound.drift * (bound.off_diagonal + bound.calibration + bound.transfer)
    assert bound.right_without_cross == pytest.approx(first + bound.cubic)
    assert bound.right == pytest.approx(first + bound.cross + bound.cubic)
    assert bound.right_integral == pytest.approx(first + bound.cross + bound.remainder)
    unfolded = proxy_bound(model, loss, pick(moving), **_only_scored(arguments), points=2)
    above = proxy_bound(
        model, loss, pick(moving), **_only_scored(arguments), points=2, third="unfolding"
    )
    assert unfolded.third_derivative <= above.third_derivative
    assert above.holds


def _only_scored(arguments):
    return {
        name: {k: v for k, v in mapping.items() if k in SCORED}
        for name, mapping in arguments.items()
    }


def test_remainder_is_the_integral_and_shrinks_quadratically():
    model, loss, moving, drift, arguments = bound_setting(6, True, False, 0.2)
    start = arguments["reference"]

    def at(factor):
        current = {name: start[name] + factor * drift[name] for name in moving}
        return proxy_bound(model, loss, moving, **{**arguments, "current": current}, points=3)

    bounds = [at(factor) for factor in (1.0, 1e-2, 5e-3)]
    assert bounds[1].remainder / bounds[2].remainder == pytest.approx(4, rel=0.02)
    assert bounds[1].cubic / bounds[2].cubic == pytest.approx(4, rel=0.02)

    # int_0^1 (1 - u) T(start + u drift)[drift, drift] du by Gauss-Legendre, rows in S.
    nodes, weights = np.polynomial.legendre.leggauss(24)
    ordered = {name: moving[name] for name in [*SCORED, *(set(moving) - set(SCORED))]}
    size = sum(moving[name].numel() for name in SCORED)
    step = flatten({name: drift[name] for name in ordered})
    total = torch.zeros(size, dtype=torch.float64)
    with undisturbed(model, moving):
        for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
            here = {name: start[name] + float(node) * drift[name] for name in moving}
            with displaced(moving, here):
                t = third_derivative_along(loss, ordered, drift)[:size]
            total += float(weight) * (1 - float(node)) * (t @ step)
    # Gauss-Legendre with 24 nodes leaves about 1e-9 on this segment.
    assert bounds[0].remainder == pytest.approx(float(total.norm()), rel=1e-7)


def test_without_drift_only_the_residual_is_left():
    model, loss, moving, _, arguments = bound_setting(2, True, False, 0.0)
    bound = proxy_bound(model, loss, moving, **arguments)
    assert bound.left == bound.residual == bound.right
    assert bound.holds


def test_model_own_data_have_no_calibration_gap_but_a_sample_of_them_has():
    model, loss, moving, _, arguments = bound_setting(9, False, True, 0.1)
    expected = proxy_bound(model, loss, moving, **arguments)
    assert expected.calibration <= 1e-12 * expected.off_diagonal + 1e-14
    xs = some_prompts(9, 2)
    rows = [(x.tolist(), list(enumerate_responses(2, 3, None)[i])) for i, x in enumerate(xs)]
    batch = labelled(rows, pad_left=False)
    model_forward = lambda b: model(b["input_ids"], b["attention_mask"])  # noqa: E731
    sample = proxy_bound(model, lambda: retention_loss(model_forward, batch), moving, **arguments)
    assert sample.calibration > 1e-3
    assert sample.holds


def test_paper_bound_fails_when_weights_outside_the_proxy_move():
    """Own data (r_0 = 0, D_cal = 0), F_ref = F_dagger, only embedding and head move: pinned."""
    model, loss, moving, drift, arguments = bound_setting(12, True, True, 1e-3)
    arguments["fisher"] = arguments["retention_fisher"]
    arguments["current"] = {
        name: value + (0 if name in SCORED else drift[name])
        for name, value in arguments["reference"].items()
    }
    bound = proxy_bound(model, loss, moving, **arguments, points=3)
    assert bound.drift == 0
    assert bound.left > 10 * bound.right_without_cross
    assert not bound.holds_without_cross
    assert bound.holds
    # With S drifting as well the paper's form still fails for this model and drift.
    arguments["current"] = {
        name: value + drift[name] * (1e-3 if name in SCORED else 1)
        for name, value in arguments["reference"].items()
    }
    both = proxy_bound(model, loss, moving, **arguments, points=3)
    assert both.drift > 0
    assert not both.holds_without_cross
    assert both.holds


# --- Transfer --------------------------------------------------------------------------------


def edit_like(a: Tensor, b: Tensor) -> float:
    """Differing places from the end plus a fraction of the length gap; separates prompts."""
    n = min(len(a), len(b))
    return float((a[-n:] != b[-n:]).sum()) + 0.75 * abs(len(a) - len(b))


@given(
    seed=st.integers(0, 2**20), left=st.integers(1, 4), right=st.integers(1, 3),
    power=st.sampled_from([1, 2]),
)  # fmt: skip
def test_wasserstein_equals_the_linear_programme(seed, left, right, power):
    a, b = some_prompts(seed, left), some_prompts(seed + 5, right)
    cost = np.array([[edit_like(x, y) ** power for y in b] for x in a])
    rows = [np.kron(np.eye(left), np.ones(right)), np.kron(np.ones(left), np.eye(right))]
    marginals = np.concatenate([np.full(left, 1 / left), np.full(right, 1 / right)])
    solved = linprog(cost.ravel(), A_eq=np.vstack(rows), b_eq=marginals, method="highs")
    # The linear programme is solved to its own feasibility tolerance of 1e-7.
    found = wasserstein(a, b, edit_like, power)
    assert found**power == pytest.approx(solved.fun, abs=1e-6)
    assert wasserstein(a, [*a, *a], edit_like, power) == 0


@budget(0.5)
@given(seed=st.integers(0, 2**20), left=st.integers(1, 3), right=st.integers(1, 2))
def test_transfer_is_below_lipschitz_times_wasserstein(seed, left, right):
    model, forward, parameters = tiny(seed)
    a, b = some_prompts(seed, left), some_prompts(seed + 5, right)
    scored = pick(parameters)
    bound = transfer_bound(model, forward, a, b, 1, scored, 3, edit_like)
    assert bound.holds
    assert bound.wasserstein_1 <= bound.wasserstein_2 * (1 + 1e-12)
    gap = flatten(exact_fisher(model, forward, a, 1, scored, 3, diagonal=True)) - flatten(
        exact_fisher(model, forward, b, 1, scored, 3, diagonal=True)
    )
    assert bound.transfer == pytest.approx(float(gap.abs().max()), rel=1e-10, abs=1e-14)
    if left == right == 1:  # one prompt against one: the bound is attained
        assert bound.transfer == pytest.approx(bound.right, rel=1e-12)


def test_a_metric_that_does_not_separate_prompts_is_refused():
    model, forward, parameters = tiny(0)
    a, b = [torch.tensor([0])], [torch.tensor([1])]
    with pytest.raises(InputError, match="does not separate"):
        transfer_bound(model, forward, a, b, 1, parameters, 3, lambda x, y: 0.0)


# --- Refusals --------------------------------------------------------------------------------


def _call(name: str):
    model, forward, parameters = tiny(0)
    prompt = [torch.tensor([0, 1])]
    batch = labelled([([0], [1])], pad_left=False)
    empty = labelled([([0, 1], [])], pad_left=False)
    if name == "no response":
        retention_gradient(model, forward, empty, parameters)
    elif name == "token fisher without response":
        exact_token_fisher(model, forward, empty, parameters)
    elif name == "normalisation":
        retention_gradient(model, forward, batch, parameters, "mean")
    elif name == "nan":
        with torch.no_grad():
            model.head.weight[0, 0] = math.nan
        retention_gradient(model, forward, batch, parameters)
    elif name == "vocabulary too small":
        exact_fisher(model, forward, prompt, 1, parameters, 2)
    elif name == "too many":
        exact_fisher(model, forward, prompt, 40, parameters, 3)
    elif name == "empty prompt":
        exact_fisher(model, forward, [torch.tensor([], dtype=torch.long)], 1, parameters, 3)
    elif name == "no prompts":
        exact_fisher(model, forward, [], 1, parameters, 3)
    elif name == "one sample":
        monte_carlo_fisher(model, forward, prompt, 1, parameters, samples=1, seed=0)
    elif name == "too large":
        hessian(lambda: torch.zeros(()), {"w": torch.zeros(6000, requires_grad=True)})
    elif name == "fisher names":
        ones = {"head.weight": torch.ones(3, 2)}
        proxy_bound(
            model, lambda: retention_loss(forward, batch), pick(parameters),
            reference={}, current={}, fisher=ones, retention_fisher=ones,
        )  # fmt: skip
    else:
        ones = {"head.weight": torch.ones(3, 2)}
        proxy_bound(
            model, lambda: retention_loss(forward, batch), parameters,
            reference={}, current={}, fisher=ones, retention_fisher=ones, third="exact",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("no response", InputError, "no response token"),
        ("token fisher without response", InputError, "no response token"),
        ("normalisation", ConfigError, "mean"),
        ("nan", NumericalError, "retention loss"),
        ("vocabulary too small", InputError, "vocabulary 2"),
        ("too many", InputError, "length 40"),
        ("empty prompt", InputError, "prompt 0"),
        ("no prompts", InputError, "no prompts"),
        ("one sample", InputError, "samples=1"),
        ("too large", InputError, "6000"),
        ("fisher names", InputError, r"head\.weight"),
        ("third", ConfigError, "exact"),
    ],
)
def test_refusals(name: str, error: type[AlphaTokenError], words: str):
    with pytest.raises(error, match=words):
        _call(name)
