"""The direction M = P o (G + lambda V): algebra on per-parameter matrices, no autograd.

G is the validation gradient, V the retention term, lambda the stability weight, P a preconditioner.
Dictionaries map parameter names to tensors in the parameter's own shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from alphatoken.support.precision import full_precision, wide


def diagonal_drift(fisher: Tensor, weight: Tensor, reference: Tensor) -> Tensor:
    """Retention term of a diagonal Fisher: ``V = F o (theta - theta_ref)``.

    Exactly zero while theta = theta_ref. Source: eq. V_layer.
    Oracle: ``alphatoken.oracle.retention``.
    """
    # Widened before the difference is taken: after a few steps theta and theta_ref agree in most
    # bits, and their difference in 16 bits would be rounding.
    dtype = wide(weight.dtype, fisher.dtype)
    return fisher.to(dtype) * (weight.to(dtype) - reference.to(dtype))


@full_precision
def kronecker_drift(errors: Tensor, inputs: Tensor, weight: Tensor, reference: Tensor) -> Tensor:
    """Retention term of a Kronecker-factored Fisher: ``V = S_F (theta - theta_ref) A_F``.

    Args:
        errors: S_F (d_out, d_out).
        inputs: A_F (d_in, d_in).
        weight: theta (d_out, d_in).
        reference: theta_ref, the same shape.
    """
    dtype = wide(weight.dtype, errors.dtype, inputs.dtype)
    drift = weight.to(dtype) - reference.to(dtype)
    return errors.to(dtype) @ drift @ inputs.to(dtype)


def precondition(
    direction: Mapping[str, Tensor], preconditioner: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """``P o M`` per parameter; P = 1 where it is not given."""
    p = preconditioner or {}
    return {name: m * p[name].to(m) if name in p else m for name, m in direction.items()}


def norms(direction: Mapping[str, Tensor]) -> dict[str, float]:
    """Frobenius norm of each parameter's matrix."""
    return _read_norms(direction, 2.0)


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor with a NaN or Inf."""
    largest = _read_norms(tensors, math.inf)
    return next((name for name, size in largest.items() if not math.isfinite(size)), None)


def not_finite(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Whether a tensor has a NaN or Inf: one Boolean for each device and dtype among them."""
    return [~torch.isfinite(sizes).all() for _, sizes in norms_by_kind(tensors, math.inf)]


def _read_norms(tensors: Mapping[str, Tensor], order: float) -> dict[str, float]:
    norms_by_name = dict.fromkeys(tensors, 0.0)
    for names, sizes in norms_by_kind(tensors, order):
        norms_by_name |= zip(names, sizes.double().tolist(), strict=True)
    return norms_by_name


def norms_by_kind(
    tensors: Mapping[str, Tensor], order: float = 2.0
) -> Iterator[tuple[list[str], Tensor]]:
    """(names, their norms (n,), wide) of the tensors of each device and dtype, in few kernels."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():  # a process may have no part of a sharded one
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(name)
    for (_, dtype), names in by_kind.items():
        own = [tensors[name].detach() for name in names]
        yield names, torch.stack(torch._foreach_norm(own, order, dtype=wide(dtype)))


class SummedDirection(Mapping[str, Tensor]):
    """``P o (G + lambda V)`` by parameter name.

    Each sum is made when it is read and let go after its use, so that the whole M never lies in
    memory beside its two sides.
    """

    def __init__(
        self,
        adaptation: Mapping[str, Tensor],
        stability: Mapping[str, Tensor],
        stability_weight: float,
    ) -> None:
        self._sides, self._weight = (adaptation, stability), stability_weight

    def __getitem__(self, name: str) -> Tensor:
        """M of one parameter, in its shape."""
        adaptation, stability = self._sides
        return adaptation[name] + self._weight * stability[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sides[0])

    def __len__(self) -> int:
        return len(self._sides[0])


@dataclass(frozen=True)
class Direction:
    """Both sides of M, preconditioned, and not yet summed so that each component can be reported.

    Attributes:
        adaptation: ``P o G`` by parameter name; empty under ``objective="stability"``.
        stability: ``P o V`` (before lambda), or None without a retention term.
        stability_weight: what V is multiplied by, lambda in its units.
        parts: what each validation batch gives to ``adaptation``, which is their sum; empty unless
            ``standard_errors`` are asked for.
        shares: of the validation tokens that each batch has; they sum to 1.
        norms_of: norms of the matrices of a side; under sharded weights of the whole ones, taken
            by all processes together.
    """

    adaptation: dict[str, Tensor]
    stability: dict[str, Tensor] | None
    stability_weight: float
    parts: tuple[dict[str, Tensor], ...] = ()
    shares: tuple[float, ...] = ()
    norms_of: Callable[[Mapping[str, Tensor]], dict[str, float]] = field(
        default_factory=lambda: norms, repr=False
    )

    def total(self) -> dict[str, Tensor]:
        """``M = P o (G + lambda V)``."""
        whole = dict(self.adaptation)
        for name, v in (self.stability or {}).items():
            weighted = self.stability_weight * v
            whole[name] = whole[name] + weighted if name in whole else weighted
        return whole

    def sides(
        self, *, components: bool
    ) -> tuple[Mapping[str, Tensor] | None, Mapping[str, Tensor] | None]:
        """(adaptation, stability) to take products with, None for no such side.

        Without ``components`` both are summed to M as one side, the first, which saves a
        contraction.
        """
        # With ``parts`` they are not: these are contracted in place of the adaptation side.
        adaptation, stability = self.adaptation or None, self.stability
        if components or self.parts or adaptation is None or stability is None:
            return adaptation, stability
        return SummedDirection(adaptation, stability, self.stability_weight), None

    @cached_property
    def balance(self) -> dict[str, float]:
        """``||lambda V|| / ||G||`` per parameter, both preconditioned, to choose lambda by.

        It is 0 without a retention term or before any drift, inf where G vanishes and V does not.
        """
        if not self.stability:  # no norm need be waited for
            return dict.fromkeys(self.adaptation, 0.0)
        stability, ratios = self.norms_of(self.stability), dict[str, float]()
        for name, g in self.norms_of(self.adaptation).items():
            v = abs(self.stability_weight) * stability.get(name, 0.0)
            ratios[name] = v / g if g > 0 else (float("inf") if v > 0 else 0.0)
        return ratios
