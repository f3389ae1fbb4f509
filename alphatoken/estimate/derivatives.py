"""Proof that label values belong to the trained loss: their derivative agrees with autograd.

A module's backward need not be the derivative of its forward: straight-through estimators,
gradient hooks that clip, scale or mask, branches run under ``torch.no_grad``. Training moves the
weights by the backward; label values differentiate the forward, by forward mode or by differences.
Where the two differ, they would be of a gradient that nobody takes a step along.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from zlib import crc32

import torch
from torch import Tensor

from alphatoken.direction.gradients import gradient_of
from alphatoken.errors import UnsupportedError
from alphatoken.model.capture import graph_nodes
from alphatoken.support.precision import wide

Derivative = Callable[[Mapping[str, Tensor]], tuple[Tensor, float]]
"""From a direction to the derivatives (b, t) of token losses along it, and their stated error."""

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}
"""Forward mode runs a forward of its own, rounded otherwise: on Gemma 3 270M in float32, whose
activations are large, that moves the sum by 6.3e-4, and by less on the other models measured."""
_TOLERANCE_HALF = 0.2

SIGNS = 3
"""Sums of the token losses, each with signs of its own, that are sent back."""

_ROUNDINGS = {"M": 64.0, "random": 256.0}
"""Last digits that a probability near 1 is off by, which a token's own derivative is made of. Along
a random direction logits move far more than their differences do."""


class DerivativeProof:
    """Compares derivatives of token losses with autograd, along M and along a random direction.

    With signs r_j of the tokens, j = 1 .. ``SIGNS``, and directions u (M, and one that is random),

        sum_k r_jk <grad l_k, u>   =   < grad sum_k r_jk l_k , u >

    the left side by the derivative that is to be proved, the right side by one backward for each j.
    Were the derivatives of single tokens off by d_k, the left side would be by ``sum_k r_jk d_k``,
    whose mean square over the signs is ``sum_k d_k^2``: no error of one sign hides another's.

    Along M a difference is measured by the norm of the values themselves (or of the parameters'
    parts of them, if these cancel). Along the random direction every parameter's part is as long as
    its gradients are short, so that each weighs alike, and the measure is what these parts sum to.

    Args:
        losses: (b, t) of the tokens of a slice, 0 off the response, with a graph that is let go.
        parameters: name -> parameter, everything in scope.
        m: parameter name -> M in the parameter's shape; empty where there is none.
    """

    def __init__(
        self, losses: Tensor, parameters: Mapping[str, Tensor], m: Mapping[str, Tensor]
    ) -> None:
        self._parameters, self._m = parameters, m
        self._losses = losses.detach().double()
        # A trainer casts within the forward, which is over: the graph has its products' dtypes.
        with torch.enable_grad():
            whole = losses.sum()
        inputs = (one.dtype for node in graph_nodes(whole) for one in node._input_metadata)
        dtypes = {p.dtype for p in parameters.values()}
        dtypes.update(dtype for dtype in inputs if dtype.is_floating_point)
        self._tolerance = _tolerance(losses.device.type, dtypes)
        self._digit = max(torch.finfo(dtype).eps for dtype in dtypes)
        generator = torch.Generator().manual_seed(20_260_601)
        self._signs = [_signs(losses, generator) for _ in range(SIGNS)]
        # (direction, number of the signs) -> parameter name -> its part of the backward's side
        self._backward: dict[tuple[str, int], dict[str, float]] = {}
        self._scale: dict[tuple[str, int], float] = {}
        sizes = [self._send_back(losses, m, number) for number in range(SIGNS)]
        self._lengths = self._measure(sizes)

    def _send_back(self, losses: Tensor, m: Mapping[str, Tensor], number: int) -> dict[str, float]:
        """Norms of the gradients of one sum; keeps their products with both directions."""
        with torch.enable_grad():
            loss = (losses * self._signs[number].to(losses)).sum()
        parameters, last = self._parameters, number == SIGNS - 1
        gradients = gradient_of(loss, list(parameters.values()), retain_graph=not last)
        named = dict(zip(parameters, gradients, strict=True))
        self._backward["M", number] = {name: _inner(named[name], m[name]) for name in m}
        self._backward["random", number] = {
            name: _inner(g, _drawn(name, parameters[name])) for name, g in named.items()
        }
        return {name: 0.0 if g is None else float(g.norm()) for name, g in named.items()}

    def _measure(self, sizes: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Lengths of the parameters' gradients; sets what differences are measured by."""
        # Of all sums together, since one may cancel.
        norms = {name: math.hypot(*(of[name] for of in sizes)) for name in self._parameters}
        largest = max(norms.values(), default=0.0)
        if not 0.0 < largest < math.inf:  # nothing to compare with, or NaN, which values will name
            return {}
        # The shortest count as a thousandth of the longest: one of rounding alone is none.
        lengths = {name: max(norm, 1e-3 * largest) for name, norm in norms.items()}
        for number, of in enumerate(sizes):
            drawn = self._backward["random", number]
            for name, length in lengths.items():
                drawn[name] /= length
            shares = (of[name] / length for name, length in lengths.items())
            self._scale["random", number] = math.hypot(*shares)
            self._scale["M", number] = math.hypot(*self._backward["M", number].values())
        # Those that weigh the most are what a sum that cancels is measured by, too.
        most = max(self._scale["random", number] for number in range(SIGNS))
        self._scale |= {("random", number): most for number in range(SIGNS)}
        return lengths

    def _direction(self, key: str, names: Sequence[str] = ()) -> dict[str, Tensor]:
        """M or the random direction, or its part of these parameters."""
        if key == "M":
            return {name: self._m[name] for name in names or self._m}
        # Made anew at each use: the same numbers, and no copy of the weights in between.
        return {
            name: _drawn(name, self._parameters[name]) / self._lengths[name]
            for name in names or self._parameters
        }

    def compare(
        self, derivative: Derivative, only: str = ""
    ) -> tuple[float, UnsupportedError | None]:
        """The worst relative difference from autograd, and the refusal where it is too large.

        Three times the error that a derivative states is allowed. ``only``: "M" or "random" alone.
        """
        worst = (0.0, self._tolerance)
        for key in ("M", "random"):
            if only not in ("", key) or not self._lengths or (key == "M" and not self._m):
                continue
            moved, stated = derivative(self._direction(key))
            for number in range(SIGNS):
                worst = max(worst, self._compared(key, number, moved, stated), key=_excess)
                if _excess(worst) > 1.0:
                    return worst[0], _refusal(self._part(key, number, derivative), worst[0])
        return worst[0], None

    def _compared(self, key: str, number: int, moved: Tensor, stated: float) -> tuple[float, float]:
        """A relative difference, and what rounding and the stated error explain of it."""
        norm, scale = float(moved.norm()), self._scale[key, number]
        scale = max(scale, norm) if key == "M" else scale
        away = abs(self._away(key, number, moved))
        if not scale > 0.0:
            return 0.0 if away == 0.0 else math.inf, self._tolerance
        # dl = -(1 - p) dz where p is near 1: what p rounds is divided by 1 - p = 1 - exp(-l).
        sure = _ROUNDINGS[key] * self._digit / -torch.expm1(-self._losses.clamp(min=1e-30))
        rounded = float((moved.double() * sure.clamp(max=1.0)).norm())
        # The stated error is one of the norm; one that all tokens share adds up as they do.
        reach = max(norm, abs(float((moved.double() * self._signs[number]).sum())))
        allowed = self._tolerance + (3 * stated * reach + rounded) / scale
        # What states so large an error that nothing would be refused proves nothing.
        return away / scale, min(allowed, _TOLERANCE_HALF)

    def _away(self, key: str, number: int, moved: Tensor, names: Sequence[str] = ()) -> float:
        parts = self._backward[key, number]
        forward = (moved.double() * self._signs[number]).sum()
        return float(forward) - math.fsum(parts[name] for name in names or parts)

    def _part(self, key: str, number: int, derivative: Derivative) -> str:
        """A parameter along which both differ, by halving: the difference is linear in u."""
        names = list(self._m if key == "M" else self._parameters)
        while len(names) > 1:
            halves = names[: len(names) // 2], names[len(names) // 2 :]
            away = []
            for half in halves:
                moved, _ = derivative(self._direction(key, half))
                away.append(abs(self._away(key, number, moved, half)))
            names = halves[away[1] > away[0]]
        return names[0]


def _drawn(name: str, parameter: Tensor) -> Tensor:
    generator = torch.Generator(parameter.device).manual_seed(crc32(name.encode()))
    dtype = wide(parameter.dtype)
    return torch.randn(parameter.shape, generator=generator, dtype=dtype, device=parameter.device)


def _signs(losses: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(0, 2, losses.shape, generator=generator) * 2 - 1
    return drawn.to(losses.device, torch.float64)


def _inner(gradient: Tensor | None, direction: Tensor) -> float:
    if gradient is None:
        return 0.0
    return float((gradient.detach() * direction).sum(dtype=torch.float64))


def _excess(difference: tuple[float, float]) -> float:
    """The difference in parts of what is allowed; a NaN is more than anything."""
    excess = difference[0] / difference[1]
    return math.inf if math.isnan(excess) else excess


def _tolerance(device: str, dtypes: Iterable[torch.dtype]) -> float:
    """Error that rounding explains, in the coarsest arithmetic of the forward."""
    coarse = torch.is_autocast_enabled(device) or torch.get_float32_matmul_precision() != "highest"
    return _TOLERANCE_HALF if coarse else max(_TOLERANCE.get(d, _TOLERANCE_HALF) for d in dtypes)


def _refusal(name: str, relative: float) -> UnsupportedError:
    return UnsupportedError(
        "'label' meets a module whose backward is not the derivative of its forward",
        got=f"{name}: the losses' derivative and autograd differ by {relative:.1e} of the gradient",
        why="training moves weights by what the backward gives (a gradient hook that clips or "
        "masks, a straight-through estimator, a branch under torch.no_grad), and label values "
        "would be of another gradient",
        remedy="estimator='path' or another that runs the backward, parameters= without that one, "
        "or a model without the hook",
    )
