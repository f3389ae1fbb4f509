"""The cross-position Jacobian: closed form, autograd and finite differences; and its bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, find, given, settings
from hypothesis import strategies as st
from torch import Tensor

from alphatoken.oracle import jacobian
from alphatoken.oracle.jacobian import AttentionSpec
from tests.property.tolerance import close

WIDTH, HEAD, VALUE, LENGTH = 5, 4, 3, 4
EXACT = 1e-12


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def tables(length: int, rotated: int, factor: float) -> tuple[Tensor, Tensor]:
    speed = torch.tensor([1.0, 0.3], dtype=torch.float64)[: rotated // 2]
    angle = torch.arange(length, dtype=torch.float64)[:, None] * torch.cat([speed, speed])
    return factor * angle.cos(), factor * angle.sin()


def make(
    *,
    seed: int = 0,
    length: int = LENGTH,
    heads: int = 4,
    groups: int = 2,
    bias: bool = False,
    norm: str = "none",
    rotated: int = 4,
    factor: float = 1.0,
    softcap: float | None = None,
    sinks: bool = False,
    window: int | None = None,
    blind: int | None = None,
) -> tuple[AttentionSpec, Tensor]:
    """A layer and an input; ``blind`` is a query row that may attend to nothing."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(length)
    gap = place[:, None] - place[None, :]
    mask = (gap >= 0) & (gap < (window or length))
    if blind is not None and blind < length:
        mask[blind] = False
    cos, sin = tables(length, rotated, factor) if rotated else (None, None)
    widths = {"none": None, "head": (HEAD, HEAD), "projection": (heads * HEAD, groups * HEAD)}
    q_width, k_width = widths[norm] or (0, 0)
    spec = AttentionSpec(
        w_q=random(generator, heads * HEAD, WIDTH),
        w_k=random(generator, groups * HEAD, WIDTH),
        w_v=random(generator, groups * VALUE, WIDTH),
        heads=heads,
        groups=groups,
        scale=HEAD**-0.5,
        b_q=random(generator, heads * HEAD) if bias else None,
        b_k=random(generator, groups * HEAD) if bias else None,
        b_v=random(generator, groups * VALUE) if bias else None,
        q_norm=random(generator, q_width) if q_width else None,
        k_norm=random(generator, k_width) if k_width else None,
        cos=cos,
        sin=sin,
        softcap=softcap,
        sinks=random(generator, heads) if sinks else None,
        mask=None if window is None and blind is None else mask,
    )
    return spec, random(generator, length, WIDTH)


layers = st.builds(
    make,
    seed=st.integers(0, 2**16),
    length=st.integers(1, 4),
    heads=st.sampled_from([2, 4]),
    groups=st.sampled_from([1, 2]),
    bias=st.booleans(),
    norm=st.sampled_from(["none", "head", "projection"]),
    rotated=st.sampled_from([0, 2, 4]),
    factor=st.sampled_from([1.0, 1.3]),
    softcap=st.sampled_from([None, 0.8]),
    sinks=st.booleans(),
    window=st.sampled_from([None, 1, 2]),
    blind=st.sampled_from([None, 0, 2]),
)


def path_scale(paths: tuple[Tensor, Tensor]) -> Tensor:
    """Sum of absolute terms, over the whole head: the softmax mixes all pairs of a row."""
    return sum(path.abs() for path in paths).amax() + 1e-3


@settings(deadline=None)
@given(layer=layers)
@example(layer=make(norm="projection", factor=1.3, softcap=0.8, sinks=True, window=2, bias=True))
@example(layer=make(blind=2, sinks=False))
@example(layer=make(length=1))
def test_closed_form_is_the_autograd_jacobian(layer: tuple[AttentionSpec, Tensor]) -> None:
    """Proves: eqs. app_two_paths, app_score_path, app_exact_jacobian (exact), against
    ``cross_position_jacobian``, ``jacobian_by_autograd``.
    """
    spec, x = layer
    paths = jacobian.cross_position_jacobian(spec, x)
    total = sum(paths)
    close(total, jacobian.jacobian_by_autograd(spec, x), path_scale(paths), EXACT)
    allowed = spec.allowed(len(x)).clone().fill_diagonal_(False)
    assert bool((total[:, ~allowed] == 0).all())


def test_the_layer_is_the_textbook_one() -> None:
    """Against torch's own attention, with grouped heads in its order, causal.

    Proves: the layer is the textbook one (exact), against ``attend``.
    """
    spec, x = make(heads=4, groups=2, rotated=0)
    state = jacobian.attend(spec, x)
    q, k, v = (
        (x @ w.T).unflatten(-1, (n, -1)).transpose(0, 1)
        for w, n in ((spec.w_q, 4), (spec.w_k, 2), (spec.w_v, 2))
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, enable_gqa=True
    )[0]
    close(state.output, expected, 1.0, EXACT)


# --- the bound ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(layer=layers)
def test_residual_norm_is_exact_and_bounded(layer: tuple[AttentionSpec, Tensor]) -> None:
    """Proves: eqs. app_score_residual, app_value_path_bound (exact), against
    ``score_residual_norm``, ``value_path_bound``.
    """
    spec, x = layer
    paths = jacobian.cross_position_jacobian(spec, x)
    residual = jacobian.jacobian_by_autograd(spec, x) - paths[0]
    by_svd = torch.linalg.matrix_norm(residual, ord=2)
    scale = path_scale(paths)
    exact = jacobian.score_residual_norm(spec, x)
    bound = jacobian.value_path_bound(spec, x)
    close(exact, by_svd, 10 * scale, EXACT)
    assert bool((exact <= bound * (1 + EXACT)).all())


def orthonormal_keys(factor: float = 1.0) -> tuple[AttentionSpec, Tensor]:
    """W_K of each key head has orthonormal rows, times 0.7: no direction of q loses norm."""
    spec, x = make(groups=2, factor=factor, softcap=0.9, sinks=True)
    blocks = [torch.linalg.qr(w.T)[0].T for w in spec.w_k.unflatten(0, (2, -1))]
    return replace(spec, w_k=0.7 * torch.cat(blocks)), x


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_the_bound_is_attained(factor: float) -> None:
    spec, x = orthonormal_keys(factor)
    exact, bound = jacobian.score_residual_norm(spec, x), jacobian.value_path_bound(spec, x)
    assert float(exact.max()) > 1e-3
    close(bound, exact, exact.clamp_min(1e-300), 1e-11)


def without_carried_norms(spec: AttentionSpec, x: Tensor) -> Tensor:
    """The paper's bound: c alpha ||v - o|| ||q|| ||W_K||, nothing carried for norm or scaling."""
    state = jacobian.attend(spec, x)
    keys = spec.w_k.unflatten(0, (spec.groups, -1))
    bound = torch.zeros_like(state.alpha)
    for h in range(spec.heads):
        g = spec.group_of(h)
        deviation = (state.value[g][None] - state.output[h][:, None]).norm(dim=-1)
        query = state.query[h].norm(dim=-1, keepdim=True)
        strength = torch.linalg.matrix_norm(keys[g], ord=2)
        bound[h] = spec.scale * state.alpha[h] * deviation * query * strength
    return bound


@settings(deadline=None)
@given(layer=layers)
def test_the_papers_bound_holds_for_plain_attention(layer: tuple[AttentionSpec, Tensor]) -> None:
    spec, x = layer
    if spec.cos is not None and spec.sin is not None:
        length = spec.cos.square() + spec.sin.square()
        spec = replace(spec, cos=spec.cos / length.sqrt(), sin=spec.sin / length.sqrt())
    spec = replace(spec, k_norm=None)
    paper = without_carried_norms(spec, x)
    assert bool((jacobian.score_residual_norm(spec, x) <= paper * (1 + EXACT)).all())
    assert bool((jacobian.value_path_bound(spec, x) <= paper * (1 + EXACT)).all())


def test_the_papers_bound_fails_under_scaled_rotary_and_key_norm() -> None:
    """So the operator norms of both must be carried."""
    scaled, x = orthonormal_keys(1.3)
    scaled = replace(scaled, softcap=None)
    exact = jacobian.score_residual_norm(scaled, x)
    assert bool((exact > 1.2 * without_carried_norms(scaled, x)).any())

    def violated(layer: tuple[AttentionSpec, Tensor]) -> bool:
        spec, inputs = layer
        inputs = 0.1 * inputs  # small keys: the norm magnifies them
        residual = jacobian.score_residual_norm(spec, inputs)
        return bool((residual > 1.01 * without_carried_norms(spec, inputs)).any())

    normed = st.builds(make, seed=st.integers(0, 50), norm=st.just("head"), rotated=st.just(0))
    find(normed, violated, settings=settings(deadline=None, database=None, derandomize=True))


@settings(deadline=None)
@given(layer=layers, seed=st.integers(0, 2**16))
def test_both_bounds_hold_after_the_output_projection(
    layer: tuple[AttentionSpec, Tensor], seed: int
) -> None:
    """Proves: eq. app_value_path_bound (exact), against ``residual_after_output``,
    ``output_bounds``.
    """
    spec, x = layer
    w_o = random(torch.Generator().manual_seed(seed), WIDTH, spec.heads * VALUE)
    paths = jacobian.cross_position_jacobian(spec, x)
    residual = torch.zeros(len(x), len(x), WIDTH, WIDTH, dtype=torch.float64)
    exact = jacobian.jacobian_by_autograd(spec, x) - paths[0]
    for h in range(spec.heads):
        residual += w_o[:, h * VALUE : (h + 1) * VALUE] @ exact[h]
    scale = path_scale(paths) * w_o.abs().sum()
    close(jacobian.residual_after_output(w_o, paths[1]), residual, scale, EXACT)
    norm = torch.linalg.matrix_norm(residual, ord=2)
    by_head, stacked = jacobian.output_bounds(w_o, jacobian.value_path_bound(spec, x))
    slack = EXACT * float(scale)
    assert bool((norm <= by_head + slack).all())
    assert bool((norm <= stacked + slack).all())


# --- the estimator's error, without a decoder ----------------------------------------------------


@settings(deadline=None)
@given(layer=layers, seed=st.integers(0, 2**16))
def test_estimator_error_is_the_score_path_of_the_key_projection(
    layer: tuple[AttentionSpec, Tensor], seed: int
) -> None:
    """e_k . d o_k / d (use of W_K at t) along M_K, by moving that one use."""
    spec, x = layer
    generator = torch.Generator().manual_seed(seed)
    errors = random(generator, spec.heads, len(x), VALUE)
    m_k = random(generator, *spec.w_k.shape)
    actual = jacobian.value_propagation_error(spec, x, errors, m_k)
    moved = x @ m_k.T
    base = torch.zeros(len(spec.w_k), dtype=torch.float64) if spec.b_k is None else spec.b_k
    scale = actual.abs().sum() + 1.0
    # one use at t moves by M x_t: give position t an input coordinate of its own
    unit = torch.eye(len(x), dtype=torch.float64)
    wide = torch.cat([x, unit], dim=1)

    def widened(weight: Tensor, extra: Tensor) -> Tensor:
        return torch.cat([weight, extra], dim=1)

    def outputs(shift: Tensor) -> Tensor:
        nothing = torch.zeros(len(x), dtype=torch.float64)
        per_position = (shift[:, None] * moved).T
        moving = replace(
            spec,
            w_q=widened(spec.w_q, nothing.expand(len(spec.w_q), -1)),
            w_k=widened(spec.w_k, per_position),
            w_v=widened(spec.w_v, nothing.expand(len(spec.w_v), -1)),
            b_k=base,
        )
        return (jacobian.attend(moving, wide).output * errors).sum(-1)

    zero = torch.zeros(len(x), dtype=torch.float64)
    exact = torch.autograd.functional.jacobian(outputs, zero)  # (h, k, t)
    exact[:, range(len(x)), range(len(x))] = 0
    close(actual, exact, scale, 1e-11)
