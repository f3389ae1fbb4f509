"""Proof that label values belong to the trained loss: their derivative agrees with autograd.

A module's backward need not be the derivative of its forward: straight-through estimators,
gradient hooks that clip, scale or mask, branches run under ``torch.no_grad``. Training moves the
weights by the backward; label values differentiate the forward, by forward mode or by differences.
Where the two differ, they would be of a gradient that nobody takes a step along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from zlib import crc32

import torch
from torch import Tensor

from alphatoken.errors import UnsupportedError
from alphatoken.estimate.gradients import gradient_of
from alphatoken.model.backward import graph_nodes
from alphatoken.support.precision import wide

__all__ = ["Derivative", "prove_derivatives"]

Derivative = Callable[[Mapping[str, Tensor]], tuple[Tensor, float]]
"""From a direction to the derivatives (b, t) of token losses along it, and their stated error."""

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}
"""Forward mode runs a forward of its own, rounded otherwise: on Gemma 3 270M in float32, whose
activations are large, that moves the sum by 6.3e-4, and by less on the other models measured."""
_TOLERANCE_HALF = 0.2


def prove_derivatives(
    losses: Tensor, parameters: Mapping[str, Tensor], derivative: Derivative
) -> float:
    """Compare a derivative and autograd along one random u: ``sum_k <grad l_k, u>`` by each.

    Every parameter's part of u is as long as its gradient is short, so that each weighs alike.

    Args:
        losses: of the tokens of a slice, with a graph that is let go.
        parameters: name -> parameter, everything in scope.
        derivative: of these losses; three times the error that it states is allowed.

    Returns:
        The difference, relative to what the parts of the parameters sum to at random.

    Raises:
        UnsupportedError: they differ by more than rounding; the message names a parameter.
    """
    with torch.enable_grad():
        loss = losses.sum()
    # A trainer casts within the forward, which is over: the graph has the dtypes of its products.
    inputs = (one.dtype for node in graph_nodes(loss) for one in node._input_metadata)
    dtypes = {p.dtype for p in parameters.values()}.union(d for d in inputs if d.is_floating_point)
    gradients = dict(zip(parameters, gradient_of(loss, list(parameters.values())), strict=True))
    sizes = {name: 0.0 if g is None else float(g.norm()) for name, g in gradients.items()}
    largest = max(sizes.values(), default=0.0)
    if not largest > 0.0:  # nothing to compare with, or NaN, which the values will name
        return 0.0
    direction, backward, shares = {}, {}, {}
    for name, parameter in parameters.items():
        # The shortest count as a thousandth of the longest: a gradient of rounding alone is none.
        length = max(sizes[name], 1e-3 * largest)
        u = _drawn(name, parameter) / length
        direction[name], shares[name] = u, sizes[name] / length
        g = gradients[name]
        backward[name] = 0.0 if g is None else float((g.detach() * u).sum(dtype=torch.float64))
    del gradients

    def compared(names: Sequence[str]) -> tuple[float, float]:
        moved, error = derivative({name: direction[name] for name in names})
        total = float(moved.sum(dtype=torch.float64)) - sum(backward[name] for name in names)
        return total, error * float(moved.norm()) * moved.count_nonzero().item() ** 0.5

    scale = sum(share**2 for share in shares.values()) ** 0.5
    away, stated = compared(list(parameters))
    found: float = abs(away) / scale
    allowed = _tolerance(losses.device.type, dtypes) + 3 * stated / scale
    # What states so large an error that nothing would be refused proves nothing.
    if not found <= min(allowed, _TOLERANCE_HALF):
        raise _refusal(_parted(list(parameters), lambda names: compared(names)[0]), found)
    return found


def _drawn(name: str, parameter: Tensor) -> Tensor:
    """Normal numbers in the parameter's shape, the same ones at each call."""
    generator = torch.Generator(parameter.device).manual_seed(crc32(name.encode()))
    dtype = wide(parameter.dtype)
    return torch.randn(parameter.shape, generator=generator, dtype=dtype, device=parameter.device)


def _tolerance(device: str, dtypes: Iterable[torch.dtype]) -> float:
    """Error that rounding explains, in the coarsest arithmetic that the forward may have used."""
    coarse = torch.is_autocast_enabled(device) or torch.get_float32_matmul_precision() != "highest"
    return _TOLERANCE_HALF if coarse else max(_TOLERANCE.get(d, _TOLERANCE_HALF) for d in dtypes)


def _parted(names: Sequence[str], difference: Callable[[Sequence[str]], float]) -> str:
    """A parameter along which both modes differ, by halving: the difference is linear in u."""
    while len(names) > 1:
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        names = max(halves, key=lambda half: abs(difference(half)))
    return names[0]


def _refusal(name: str, found: float) -> UnsupportedError:
    return UnsupportedError(
        "'label' meets a module whose backward is not the derivative of its forward",
        got=f"{name}: the losses' derivative and autograd differ by {found:.1e} of the gradient",
        why="training moves weights by what the backward gives (a gradient hook that clips or "
        "masks, a straight-through estimator, a branch under torch.no_grad), and label values "
        "would be of another gradient",
        remedy="estimator='path' or another that runs the backward, parameters= without that one, "
        "or a model without the hook",
    )
