"""Gradients of whole parameters: by autograd, summed from captured uses, and proved equal.

A linear map ``W`` that a forward used with inputs ``x_t`` and errors ``delta_t`` has the gradient
``sum_t delta_t x_t^T``. *Coverage* is the proof, on the user's own model, that the captured uses of
each scored weight are all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from alphatoken.config import CAPTURED
from alphatoken.direction import contraction
from alphatoken.errors import CoverageError
from alphatoken.model.capture import LinearUse, Recorder, accumulate_errors
from alphatoken.model.protocol import ScoredExperts
from alphatoken.model.scope import Scope
from alphatoken.support.precision import full_precision


def gradient_of(
    loss: Tensor, parameters: Sequence[Tensor], *, retain_graph: bool = False
) -> list[Tensor | None]:
    """d(loss)/d(parameter), by autograd, touching no .grad; None where there is no path."""
    if not loss.requires_grad:  # all of them lie where the forward does not pass, as when merged
        return [None] * len(parameters)
    return list(
        torch.autograd.grad(loss, list(parameters), allow_unused=True, retain_graph=retain_graph)
    )


def captured_gradients(
    recorder: Recorder, errors: Sequence[Tensor | None], names: Mapping[str, str]
) -> Iterator[tuple[str, Tensor | None, Tensor | float]]:
    """Weight gradients from captured uses, one parameter at a time: sums of delta (x) x.

    Args:
        recorder: one recorded forward.
        errors: ordinary errors at its linear uses.
        names: place of a parameter (``weight_name`` of a linear) -> its name; tied places have one.

    Yields:
        (name, gradient as stored or None without a use, sum of the norms of its terms) of every
        scored weight, in one order on every process.
    """
    for name, uses in uses_by_weight(recorder, names):
        total: Tensor | None = None
        size: Tensor | float = 0.0
        for index in uses:
            error = errors[index]
            if error is not None:
                part, norms = _term(recorder.linears[index], error)
                total, size = part if total is None else total + part, size + norms
        # Every name is handed over, used or not: under sharded weights what follows is collective.
        yield name, total, size


@full_precision
def _term(use: LinearUse, error: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of a use's weight, and the sum of the norms of its terms."""
    linear, experts = use.linear, use.experts
    if not isinstance(linear, ScoredExperts) or experts is None:
        gradient = contraction.outer_sum(error, use.x)
    else:
        gradient = contraction.expert_outer_sums(error, use.x, experts, linear.count)
    # A term delta (x) x has rank 1, so its Frobenius norm is ||delta|| ||x||.
    size = (error.to(gradient).norm(dim=-1) * use.x.to(gradient).norm(dim=-1)).sum()
    return gradient.mT if linear.transposed else gradient, size


def uses_by_weight(recorder: Recorder, names: Mapping[str, str]) -> list[tuple[str, list[int]]]:
    """Name and recorded uses of each weight in scope."""
    # From the scope and not from the recorded uses: a process that sent no token to an expert has
    # no use of its weights, and must still go through the same names as the others.
    uses: dict[str, list[int]] = {
        names[linear.weight_name]: [] for linear in recorder.scope.linears
    }
    for index, use in enumerate(recorder.linears):
        uses[names[use.linear.weight_name]].append(index)
    return list(uses.items())


# What rounding explains in each dtype; a use that was missed is of the size of the gradient itself.
_COVERAGE_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
_COVERAGE_TOLERANCE_HALF = 2e-2
_FOLLOWED = "estimator='label', which follows the weight through every use"


def compare_gradients(
    captured: Mapping[str, tuple[Tensor, float]],
    expected: Mapping[str, Tensor | None],
    *,
    narrow: bool = False,
    remedy: str = _FOLLOWED,
) -> float:
    """Compare what the captured uses explain with autograd's gradient of the same loss.

    Args:
        captured: parameter name -> (sum over captured uses of delta (x) x, as stored; the sum of
            the norms of its terms). The error is relative to the latter, so that a gradient that
            cancels is no false alarm.
        expected: parameter name -> autograd's gradient (None: no path); all parameters in scope.
        narrow: autograd multiplied in 16 bits whatever the gradient's dtype says (autocast).
        remedy: what the error tells the user to do.

    Returns:
        The largest relative error (Frobenius norm).

    Raises:
        CoverageError: a parameter is used outside the captured modules; the message names it.
    """
    worst = 0.0
    for name, target in expected.items():
        explained, scale = captured.get(name, (None, 0.0))
        parts = [t.double() for t in (target, explained) if t is not None]
        if not parts:
            continue
        difference = parts[0] - parts[1] if len(parts) == 2 else parts[0]
        scale = max(scale, 0.0 if target is None else float(target.double().norm()))
        relative = float(difference.norm()) / scale if scale > 0 else float(difference.norm())
        own = torch.float32 if target is None else target.dtype
        dtype = torch.bfloat16 if narrow else own
        # ``not <=`` instead of ``>``: a NaN is refused as well.
        if not relative <= _COVERAGE_TOLERANCE.get(dtype, _COVERAGE_TOLERANCE_HALF):
            raise CoverageError(
                "a weight in scope is used in a way that was not captured",
                got=f"{name}: captured uses explain its gradient to a relative error of "
                f"{relative:.1e}",
                why="the part that passes through the other use would be missing from the values",
                remedy=remedy,
            )
        worst = max(worst, relative)
    return worst


def prove_coverage(
    recorder: Recorder,
    losses: Tensor,
    parameters: Mapping[str, Tensor],
    names: Mapping[str, str],
    *,
    remedy: str = _FOLLOWED,
) -> float:
    """Prove that the captured uses are all uses: sum of delta (x) x equals autograd's gradient.

    Args:
        recorder: one recorded forward.
        losses: its token losses; the graph stays.
        parameters: name -> parameter, everything in scope.
        names: as in ``captured_gradients``.
        remedy: what the error tells the user to do.

    Returns:
        The largest relative error (Frobenius norm).

    Raises:
        CoverageError: as ``compare_gradients``.
    """
    with torch.enable_grad():
        loss = losses.sum()
    # Ordinary errors, whatever the estimator: only they sum to the gradient. What is proved holds
    # for the self-only ones too, since it is about where the weights are used.
    errors = accumulate_errors(recorder, loss, recorder.outputs, "ordinary")
    captured = {
        name: (gradient, float(torch.as_tensor(size).detach()))
        for name, gradient, size in captured_gradients(recorder, errors, names)
        if gradient is not None
    }
    gradients = gradient_of(loss, list(parameters.values()), retain_graph=True)
    narrow = any(use.s.dtype not in _COVERAGE_TOLERANCE for use in recorder.linears)
    expected = dict(zip(parameters, gradients, strict=True))
    return compare_gradients(captured, expected, narrow=narrow, remedy=remedy)


def require_covered(scope: Scope, estimator: str, uncovered: str) -> None:
    """Raise unless the estimator sees every matrix of the scored layers, or may leave some out.

    Raises:
        CoverageError: naming the first matrix that is not covered, and why.
    """
    # Label values need no captured errors and cover everything.
    if estimator not in CAPTURED or not scope.uncovered or uncovered == "skip":
        return
    name, reason = next(iter(scope.uncovered.items()))
    raise CoverageError(
        f"'{estimator}' cannot cover every matrix of the scored layers",
        got=f"{name}: {reason} ({len(scope.uncovered)} such)",
        why="their part of the gradient would be missing from the values",
        remedy=", or ".join(_covering(scope)),
    )


def _covering(scope: Scope) -> list[str]:
    """Remedies for uncovered matrices: only those that work here."""
    reasons = scope.uncovered.values()
    experts = [why for why in reasons if "linears,experts" in why]
    routed = any("router" in why for why in reasons)
    slow = " and model.set_experts_implementation('eager')" if experts or routed else ""
    remedies = [f"estimator='label'{slow}"]
    if experts:
        rest = ", uncovered='skip' for the others" if len(experts) < len(reasons) else ""
        remedies.append(f"parameters='linears,experts'{rest}")
    if scope.linears:
        remedies.append("uncovered='skip' to leave them out and say so")
    return remedies
