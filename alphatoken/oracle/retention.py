"""The retention side: gradient, Hessian, and the bound of the Fisher-drift proxy term by term.

    || g_ideal - F_ref dtheta ||  <=  ||r_0|| + (D_off + D_cal + D_transfer) ||dtheta||
                                      + ||H_{S,S^c}|| ||dtheta_{S^c}|| + remainder

S are the parameters of the proxy, S^c all others that move. The cross term is not in the paper,
whose bound (eq. app_proxy_bound) holds only if nothing outside S moves. L_ret is a per-sequence
*sum* of token losses; matrices use operator norms and the flat layout of
:mod:`alphatoken.oracle.gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.integrate import quad_vec
from torch import Tensor, nn

from alphatoken.errors import InputError, NumericalError
from alphatoken.oracle.enumeration import enumerated_log_probabilities, expected_retention_loss
from alphatoken.oracle.gradients import (
    Batch,
    Forward,
    batch_losses,
    batch_mask,
    displaced,
    flatten,
    gradient,
    listed,
    undisturbed,
    unflatten,
)


def retention_loss(forward: Forward, batches: Batch | Sequence[Batch]) -> Tensor:
    """Mean over sequences of their *summed* token losses: the paper's, and the Fisher's scale.

    ``L_ret = (1 / N) sum_n sum_{i in response} l[n, i]``; N counts rows that have a response token.
    A scalar, differentiable, exact.

    Raises:
        InputError: no response token at all.
    """
    several = listed(batches)
    count = sum(int(batch_mask(batch).any(dim=1).sum()) for batch in several)
    if count == 0:
        raise InputError("the retention data have no response token", got="all labels are -100")
    # (1 / N) sum_n sum_i l[n, i]
    return torch.stack([batch_losses(forward, batch).sum() for batch in several]).sum() / count


def retention_gradient(
    model: nn.Module,
    forward: Forward,
    batches: Batch | Sequence[Batch],
    parameters: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """``g_ideal``: the gradient of :func:`retention_loss` at the current parameters, by name.

    Exact. It is what the Fisher-drift proxy V = F o (theta - theta_ref) stands in for. The
    model is left as it was. Raises as :func:`retention_loss`; InputError for foreign parameters.
    """
    with undisturbed(model, parameters):
        return gradient(retention_loss(forward, batches), parameters)


def hessian(
    loss: Callable[[], Tensor], parameters: Mapping[str, Tensor]
) -> Float[Tensor, " flat flat"]:
    """Second derivatives of ``loss()`` over ``parameters``, (n, n) in the flat layout.

    Two nested autograd passes, all rows in one batch; exact, nothing is symmetrised. The parameters
    must require gradients and be those ``loss`` is computed from.
    """
    # grad L, then H = d grad L / d theta
    first = flatten(gradient(loss(), parameters, keep_graph=True))
    return _jacobian(first, parameters)


def third_derivative_along(
    loss: Callable[[], Tensor], parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor]
) -> Float[Tensor, " flat flat"]:
    """``T[d]``: the third derivative of ``loss()`` contracted once with ``direction``, (n, n).

    The derivative of the Hessian along the direction, by three nested autograd passes. Exact.
    """
    first = flatten(gradient(loss(), parameters, keep_graph=True))
    along = flatten({name: direction[name] for name in parameters}).detach()
    # d <grad L, d> / d theta = H d, then T[d] = d (H d) / d theta
    second = flatten(gradient(first @ along, parameters, keep_graph=True))
    return _jacobian(second, parameters)


def taylor_remainder(
    loss: Callable[[], Tensor],
    parameters: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    step: Float[Tensor, " flat"],
) -> Float[Tensor, " flat"]:
    """``int_0^1 (H(start + u step) - H(start)) step du``: what a linear gradient misses.

    Gauss-Kronrod on intervals that are halved until the estimated error is 1e-9 of the integral
    (or of rounding's 1e-13 of ``||H(start) step||``, where that is more): no fixed number of nodes
    serves every segment, because a norm layer's pole may lie close to one. Flat layout of
    ``parameters``, which must require gradients. It equals
    ``grad(start + step) - grad(start) - H(start) step``, and never takes that difference.

    Raises:
        NumericalError: 200 intervals do not suffice; the loss has a kink or a pole on the segment.
    """
    whole = unflatten(step, parameters)

    def curved(u: float) -> Tensor:
        # theta(u) = theta_ref + u dtheta
        here = {name: start[name] + u * whole[name] for name in parameters}
        with displaced(parameters, here):
            first = flatten(gradient(loss(), parameters, keep_graph=True))
            if not first.requires_grad:  # a linear loss
                return torch.zeros_like(step)
            # H(theta(u)) dtheta, a product that never forms H
            return flatten(gradient(first @ step, parameters))

    # H(theta_ref) dtheta, the part that the linear gradient has
    at_start = curved(0.0)
    # int_0^1 (H(theta(u)) - H(theta_ref)) dtheta du
    total, error, info = quad_vec(
        lambda u: (curved(u) - at_start).cpu().numpy(),
        0.0,
        1.0,
        epsrel=1e-9,
        epsabs=max(1e-13 * _norm(at_start), 1e-300),  # a linear loss has neither
        limit=200,
        full_output=True,
    )
    if not info.success:
        raise NumericalError(
            "the remainder of Taylor's theorem could not be integrated along the segment",
            got=f"an estimated error of {error:.1e} on 200 intervals",
            why="the loss has a kink or a pole between the reference and the current parameters",
            remedy="take a smooth loss, or a shorter drift",
        )
    return torch.as_tensor(total, dtype=step.dtype, device=step.device)


def kl_hessian(
    model: nn.Module,
    forward: Forward,
    prompts: Sequence[Tensor],
    response_length: int,
    parameters: Mapping[str, Tensor],
    vocabulary: int,
    eos: int | None = None,
) -> Tensor:
    """Hessian of ``KL(p_ref || p_theta)`` at theta = theta_ref, the current parameters.

    Mean over prompts, all responses enumerated; exact; equal to the full :func:`exact_fisher`,
    which it checks from second derivatives where that one uses first ones. (n, n), flat layout.
    """
    with undisturbed(model, parameters):
        # p_ref(y | x) of every response, a constant
        reference = [
            enumerated_log_probabilities(forward, prompt, response_length, vocabulary, eos)
            .detach()
            .exp()
            for prompt in prompts
        ]

        def divergence() -> Tensor:
            # The entropy of p_ref is constant and has no derivatives.
            return expected_retention_loss(
                forward, prompts, response_length, vocabulary, reference, eos
            )

        return hessian(divergence, parameters)


@dataclass(frozen=True)
class ProxyBound:
    """Every term of the proxy bound, as a number. Norms: Euclidean, operator for matrices.

    Attributes:
        left: ``||g_ideal - g_prx||`` on S, what is bounded.
        residual: ``||r_0||``, the retention gradient at theta_ref on S.
        off_diagonal: ``D_off = ||H - Diag H||``, H the Hessian on S at theta_ref.
        calibration: ``D_cal = ||Diag H - F_dagger||``.
        transfer: ``D_transfer = ||F_dagger - F_ref||``.
        drift: ``||dtheta_S||``.
        cross_curvature: ``||H_{S,S^c}||``; 0 if nothing else moves.
        other_drift: ``||dtheta_{S^c}||``.
        remainder: ``||int_0^1 (H(theta_ref + u dtheta) - H(theta_ref)) dtheta du||`` on S, by
            quadrature (:func:`taylor_remainder`): from Hessians alone, not from ``g_ideal``.
        third_derivative: M_3, see :func:`proxy_bound`.
    """

    left: float
    residual: float
    off_diagonal: float
    calibration: float
    transfer: float
    drift: float
    cross_curvature: float
    other_drift: float
    remainder: float
    third_derivative: float

    @property
    def cross(self) -> float:
        """``||H_{S,S^c}|| ||dtheta_{S^c}||``: what other moving weights add."""
        return self.cross_curvature * self.other_drift

    @property
    def cubic(self) -> float:
        """``M_3 / 2 ||dtheta||^2`` over all that moves: the paper's form of the remainder."""
        # eq. app_proxy_bound: M_3 / 2 ||dtheta||^2, the squares of S and S^c add
        return 0.5 * self.third_derivative * (self.drift**2 + self.other_drift**2)

    @property
    def first_order(self) -> float:
        """``||r_0|| + (D_off + D_cal + D_transfer) ||dtheta_S||``: right side less the rest."""
        # eq. app_gap_decomp: ||H - F_ref|| <= D_off + D_cal + D_transfer
        mismatch = self.off_diagonal + self.calibration + self.transfer
        # eq. app_proxy_bound: ||r_0|| + ||H - F_ref|| ||dtheta_S||
        return self.residual + mismatch * self.drift

    @property
    def right(self) -> float:
        """The bound with the cross term and the remainder in the M_3 form."""
        return self.first_order + self.cross + self.cubic

    @property
    def right_integral(self) -> float:
        """The bound with the cross term and the remainder in integral form."""
        return self.first_order + self.cross + self.remainder

    @property
    def right_without_cross(self) -> float:
        """The paper's right side as printed (eq. app_final_bound), D_transfer for L_g W_2."""
        # eq. app_final_bound: no term for weights outside S
        return self.first_order + self.cubic

    @property
    def holds(self) -> bool:
        """True if both forms hold (rounding of 1e-12 of the right side allowed)."""
        return self._below(self.right_integral) and self._below(self.right)

    @property
    def holds_without_cross(self) -> bool:
        """True if the paper's form holds; it may fail when weights outside S move."""
        return self._below(self.right_without_cross)

    def _below(self, right: float) -> bool:
        return self.left <= right * (1 + 1e-12)


def proxy_bound(
    model: nn.Module,
    loss: Callable[[], Tensor],
    parameters: Mapping[str, Tensor],
    *,
    reference: Mapping[str, Tensor],
    current: Mapping[str, Tensor],
    fisher: Mapping[str, Tensor],
    retention_fisher: Mapping[str, Tensor],
    points: int = 9,
) -> ProxyBound:
    """Compute every term of the retention proxy bound (eq. app_proxy_bound, app_gap_decomp).

    M_3 is the largest ``||T(xi)[d, .]||`` along the drift's unit vector d, over ``points`` equally
    spaced points of the segment from theta_ref to theta, its ends included (dense sampling, not a
    certified supremum); it is all the inequality needs and never exceeds the operator norm of T. No
    term is defined as what the others leave over, so that the inequality can fail where one of them
    is wrong.

    Args:
        model: behind ``loss``; left as it was.
        loss: L_ret as a closure over the model, e.g. of :func:`retention_loss`.
        parameters: *everything that moves*, by name; the names of ``fisher`` are S.
        reference: values at theta_ref, by name (names left out: the current value of the model).
        current: values at theta, in the same way.
        fisher: diagonal F_ref of S, by name.
        retention_fisher: diagonal F_dagger of S, by name (:func:`exact_fisher` on the
            retention prompts).
        points: at how many points of the segment.

    Raises:
        InputError: foreign parameters.
    """
    # S comes first in the flat layout, so that [:size] is S and [size:] is S^c
    scored = {name: parameters[name] for name in fisher}
    ordered = {**scored, **{n: p for n, p in parameters.items() if n not in fisher}}
    live = {name: parameter.detach() for name, parameter in ordered.items()}
    start, end = {**live, **reference}, {**live, **current}
    # dtheta = theta - theta_ref, over S and S^c
    step = flatten({name: end[name] - start[name] for name in ordered})
    size = sum(parameter.numel() for parameter in scored.values())
    with undisturbed(model, ordered):
        with displaced(ordered, start):
            # eq. app_taylor: r_0 = grad_S L_ret(theta_ref)
            r_0 = flatten(gradient(loss(), scored))
            # eq. app_taylor: H = grad^2 L_ret(theta_ref), rows of S, columns of S and S^c
            curvature = hessian(loss, ordered)[:size]
        with displaced(ordered, end):
            # g_ideal = grad_S L_ret(theta)
            ideal = flatten(gradient(loss(), scored))
        m_3 = _third_along_segment(loss, ordered, start, step, size, points)
        remainder = taylor_remainder(loss, ordered, start, step)[:size]
    # eq. mc_fisher, over the prompts of the proxy
    f_ref = flatten({name: fisher[name] for name in scored})
    # eq. app_F_ret_dagger, over the retention prompts
    f_dagger = flatten({name: retention_fisher[name] for name in scored})
    # H_{S,S} and H_{S,S^c}
    own, cross = curvature[:, :size], curvature[:, size:]
    return ProxyBound(
        # eq. gproxy: g_prx = F_ref dtheta_S, F_ref diagonal
        left=_norm(ideal - f_ref * step[:size]),
        residual=_norm(r_0),
        # D_off = ||H - Diag H||
        off_diagonal=_norm(own - torch.diag(own.diagonal())),
        # D_cal = ||Diag H - F_dagger||; a diagonal's operator norm is its largest entry
        calibration=float((own.diagonal() - f_dagger).abs().max()),
        # D_transfer = ||F_dagger - F_ref||
        transfer=float((f_dagger - f_ref).abs().max()),
        drift=_norm(step[:size]),
        # ||H_{S,S^c}||
        cross_curvature=_norm(cross) if cross.numel() else 0.0,
        other_drift=_norm(step[size:]),
        remainder=_norm(remainder),
        third_derivative=m_3,
    )


def _third_along_segment(
    loss: Callable[[], Tensor],
    parameters: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    step: Tensor,
    size: int,
    points: int,
) -> float:
    length = _norm(step)
    if length == 0.0:
        return 0.0  # no drift: the remainder is zero whatever M_3
    # dtheta, and d = dtheta / ||dtheta||, by name
    whole, unit = unflatten(step, parameters), unflatten(step / length, parameters)
    largest = 0.0
    # M_3 = max_u ||T(theta_ref + u dtheta)[d]||, d = dtheta / ||dtheta||, rows of S
    for u in torch.linspace(0, 1, points).tolist():
        with displaced(parameters, {name: start[name] + u * whole[name] for name in parameters}):
            here = _norm(third_derivative_along(loss, parameters, unit)[:size])
        largest = max(largest, here)
    return largest


def _jacobian(vector: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    size = vector.numel()
    if not vector.requires_grad:  # a loss of lower degree: all further derivatives are zero
        return vector.new_zeros((size, size))
    # row i: d vector_i / d theta, by the unit vector e_i
    rows = torch.autograd.grad(
        vector,
        list(parameters.values()),
        torch.eye(size, dtype=vector.dtype, device=vector.device),
        is_grads_batched=True,
        retain_graph=True,
        allow_unused=True,
    )
    parts = [
        vector.new_zeros((size, parameter.numel())) if row is None else row.reshape(size, -1)
        for row, parameter in zip(rows, parameters.values(), strict=True)
    ]
    return torch.cat(parts, dim=1)


def _norm(tensor: Tensor) -> float:
    """Euclidean norm of a vector, operator norm of a matrix."""
    if tensor.ndim == 2:
        return float(torch.linalg.matrix_norm(tensor, ord=2))
    return float(torch.linalg.vector_norm(tensor))
