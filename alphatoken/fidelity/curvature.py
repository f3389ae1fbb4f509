"""The terms of the retention proxy's bound on a real model, by Hessian-vector products.

    ||g_ideal - F dtheta|| <= ||r_0|| + (D_off + D_cal + D_transfer) ||dtheta_S||
                              + ||H_{S,S^c}|| ||dtheta_{S^c}|| + M_3 / 2 ||dtheta||^2

S are the scored weights, S^c all others that moved, H the Hessian at the reference of the mean over
sequences of their summed token losses. Norms of vectors are exact. An operator norm that needs more
than a matrix-vector product can give is a *lower* limit and is called so; what would be too large
is not computed at all. ``alphatoken.oracle.retention.proxy_bound`` has every term from dense
matrices, for tiny models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from alphatoken.direction.algebra import kronecker_drift
from alphatoken.direction.drift import FisherDrift
from alphatoken.oracle.evaluate import displaced, flatten, gradient, undisturbed, unflatten

__all__ = [
    "BoundTerms",
    "Curvature",
    "Limit",
    "bound_terms",
    "fisher_product",
    "largest_eigenvalue",
    "moved_parameters",
    "twice_differentiable",
]

Operator = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Limit:
    """A number and what it is worth.

    Attributes:
        value: NaN where it is not computed.
        exact: up to rounding; otherwise the true number is this or larger.
        how: how it was found, or why not.
    """

    value: float
    exact: bool
    how: str

    @classmethod
    def missing(cls, why: str) -> Limit:
        """Not computed, and why."""
        return cls(math.nan, False, why)

    @property
    def known(self) -> bool:
        """True if there is a number."""
        return not math.isnan(self.value)


@contextmanager
def twice_differentiable(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Evaluation mode, gradients on, and attention kernels that can be differentiated again."""
    with undisturbed(model, parameters), sdpa_kernel(SDPBackend.MATH):
        yield


def moved_parameters(
    before: nn.Module, after: nn.Module, scored: Sequence[str]
) -> dict[str, Tensor]:
    """``after - before`` of every parameter that moved, the scored ones first; tied ones once.

    The scored parameters are listed even where they stayed.
    """
    old = dict(before.named_parameters(remove_duplicate=False))
    new = dict(after.named_parameters(remove_duplicate=False))
    found = {name: (new[name] - old[name]).detach() for name in scored}
    seen = {id(new[name]) for name in scored}
    for name, parameter in new.items():
        if id(parameter) not in seen and name in old:
            seen.add(id(parameter))
            if not torch.equal(parameter, old[name]):
                found[name] = (parameter - old[name]).detach()
    return found


class Curvature:
    """Products with the Hessian of ``loss()`` over ``parameters``, at their current values.

    The gradient's graph is built once; enter ``twice_differentiable`` around its whole life.
    Exact up to rounding in the model's dtype. Oracle: ``alphatoken.oracle.retention.hessian``.
    """

    def __init__(self, loss: Callable[[], Tensor], parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._gradient = gradient(loss(), parameters, keep_graph=True)

    def gradient(self) -> Tensor:
        """The gradient, flat."""
        return flatten(self._gradient).detach()

    def product(self, vector: Tensor) -> Tensor:
        """``H v``, flat."""
        return flatten(gradient(self._along(vector), self._parameters)).detach()

    def third(self, along: Tensor) -> Operator:
        """``v -> T[along] v``, T the third derivative: the Hessian's derivative along a vector."""
        moved = gradient(self._along(along), self._parameters, keep_graph=True)

        def apply(vector: Tensor) -> Tensor:
            parts = unflatten(vector, self._parameters)
            total = torch.stack([(moved[n] * parts[n].detach()).sum() for n in parts]).sum()
            if not total.requires_grad:  # a quadratic loss
                return torch.zeros_like(vector)
            return flatten(gradient(total, self._parameters)).detach()

        return apply

    def _along(self, vector: Tensor) -> Tensor:
        parts = unflatten(vector.detach(), self._parameters)
        terms = [(self._gradient[name] * part).sum() for name, part in parts.items()]
        return torch.stack(terms).sum()


def largest_eigenvalue(operator: Operator, size: int, *, like: Tensor, steps: int) -> Limit:
    """A lower limit of the operator norm of a symmetric operator, by Lanczos from a fixed start.

    Every Ritz value lies within the spectrum, so the largest one in size never exceeds the norm; it
    is the norm itself once the steps exhaust the space.
    """
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(size, generator=generator, dtype=torch.float64)
    basis: list[Tensor] = []
    diagonal: list[float] = []
    beside: list[float] = []
    found, before = 0.0, 0.0
    ended = False
    for _ in range(min(steps, size)):
        vector = vector / vector.norm()
        basis.append(vector)
        image = operator(vector.to(like)).double().cpu()
        diagonal.append(float(image @ vector))
        for _ in range(2):  # twice is enough against rounding
            for one in basis:
                image = image - (image @ one) * one
        before, found = found, _largest_ritz(diagonal, beside)
        rest = float(image.norm())
        if rest <= 1e-12 * max(found, 1e-300):
            ended = True
            break
        beside.append(rest)
        vector = image
    if ended or len(basis) == size:
        return Limit(found, True, f"Lanczos, ended after {len(basis)} steps")
    change = abs(found - before) / found if found else 0.0
    return Limit(found, False, f"at least; {len(basis)} Lanczos steps, the last added {change:.1%}")


def _largest_ritz(diagonal: Sequence[float], beside: Sequence[float]) -> float:
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for i, entry in enumerate(beside[: len(diagonal) - 1]):
        matrix[i, i + 1] = matrix[i + 1, i] = entry
    return float(torch.linalg.eigvalsh(matrix).abs().max())


def _largest_singular(
    forward: Operator, backward: Operator, size: int, *, like: Tensor, steps: int
) -> Limit:
    """The same for any operator, through ``A^T A``."""
    square = largest_eigenvalue(lambda v: backward(forward(v)), size, like=like, steps=steps)
    return Limit(math.sqrt(square.value), square.exact, square.how)


def fisher_product(drift: FisherDrift, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``F v`` by name, for either structure."""
    found = {}
    for name, part in vector.items():
        if drift.fisher:
            found[name] = drift.fisher[name].to(part) * part
            continue
        left, right = (factor.to(part) for factor in drift.factors[name])
        column = part.reshape(len(part), -1)
        found[name] = kronecker_drift(left, right, column, torch.zeros_like(column)).view_as(part)
    return found


@dataclass(frozen=True)
class BoundTerms:
    """Every term of the bound for one Fisher; see the module.

    Attributes:
        ideal: ``||g_ideal||`` on S, at the model after.
        proxy: ``||F dtheta||``.
        left: ``||g_ideal - F dtheta||``, what is bounded.
        cosine: of the two; no scale takes part in it.
        residual: ``||r_0||``.
        drift: ``||dtheta_S||``.
        other_drift: ``||dtheta_{S^c}||``.
        mismatch: ``||H - F||``, in one piece.
        mismatch_along: ``||(H - F) dtheta_S||``, what the mismatch does on this very drift.
        off_diagonal: D_off. calibration: D_cal. transfer: D_transfer; of a diagonal Fisher only.
        cross: ``||H_{S,S^c}||``. cross_along: ``||H_{S,S^c} dtheta_{S^c}||``.
        third: M_3 along the drift, largest over the points of the segment.
        remainder: ``||g_ideal - r_0 - H dtheta||``, in integral form exact.
    """

    ideal: float
    proxy: float
    left: float
    cosine: float
    residual: float
    drift: float
    other_drift: float
    mismatch: Limit
    mismatch_along: Limit
    off_diagonal: Limit
    calibration: Limit
    transfer: Limit
    cross: Limit
    cross_along: Limit
    third: Limit
    remainder: Limit

    @property
    def parts(self) -> dict[str, Limit]:
        """The summands of the right side, the cross term included."""
        whole = self.drift**2 + self.other_drift**2
        return {
            "residual": Limit(self.residual, True, "exact"),
            "off_diagonal": _times(self.off_diagonal, self.drift),
            "calibration": _times(self.calibration, self.drift),
            "transfer": _times(self.transfer, self.drift),
            "cross": _times(self.cross, self.other_drift),
            "cubic": _times(self.third, 0.5 * whole),
        }

    @property
    def right(self) -> Limit:
        """The right side: its known summands, a lower limit unless all are exact."""
        parts = self.parts.values()
        exact = all(part.exact for part in parts)
        return Limit(sum(p.value for p in parts if p.known), exact, "sum" if exact else "at least")

    @property
    def right_along(self) -> Limit:
        """``||r_0|| + ||(H-F) dtheta_S|| + ||H_c dtheta_c|| + ||remainder||``: always above left.

        The same inequality with every operator applied to this drift, instead of its norm.
        """
        parts = (self.mismatch_along, self.cross_along, self.remainder)
        if not all(part.known for part in parts):
            return Limit.missing(next(part.how for part in parts if not part.known))
        return Limit(self.residual + sum(part.value for part in parts), True, "exact")

    @property
    def vacuous(self) -> bool:
        """True if the right side is no less than ``||g_ideal||``: a proxy of zero would pass too.

        A lower limit of the right side suffices to say so.
        """
        return self.right.value >= self.ideal


def _times(limit: Limit, factor: float) -> Limit:
    if factor == 0.0:
        return Limit(0.0, True, "nothing moved")
    return Limit(limit.value * factor, limit.exact, limit.how)


@dataclass(frozen=True)
class Curved:
    """What all Fishers of one comparison share.

    Attributes:
        before: the reference model; its parameters are displaced for the segment.
        loss: L_ret over ``before``, a closure.
        scored: names of S.
        drift: dtheta by name, the scored ones first.
        ideal: g_ideal on S by name, at the model after.
        steps: of each Lanczos run.
        block: Hessian columns that are formed whole.
        points: of the segment, for M_3.
        limit: most parameters that may move for Hessian-vector products to be taken.
    """

    before: nn.Module
    loss: Callable[[], Tensor]
    scored: tuple[str, ...]
    drift: Mapping[str, Tensor]
    ideal: Mapping[str, Tensor]
    steps: int
    block: int
    points: int
    limit: int
    parameters: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        named = dict(self.before.named_parameters(remove_duplicate=False))
        object.__setattr__(self, "parameters", {name: named[name] for name in self.drift})

    @property
    def size(self) -> int:
        """Parameters in S."""
        return sum(self.drift[name].numel() for name in self.scored)

    @property
    def too_large(self) -> str:
        """Why no product with the Hessian is taken, or ""."""
        moving = sum(part.numel() for part in self.drift.values())
        if moving <= self.limit:
            return ""
        return f"not computed: too large ({moving:,} parameters moved, at most {self.limit:,})"


def bound_terms(
    curved: Curved,
    fishers: Mapping[str, FisherDrift],
    retention_fisher: Mapping[str, Tensor] | None,
) -> dict[str, BoundTerms]:
    """Every term of the bound, for each Fisher.

    Args:
        curved: model, loss, drift.
        fishers: at the reference, covering S.
        retention_fisher: F_dagger, the diagonal Fisher on the retention prompts, by name; None
            where it is not known.

    Returns:
        By the Fishers' names. Oracle: ``alphatoken.oracle.retention.proxy_bound``.
    """
    scored = {name: curved.parameters[name] for name in curved.scored}
    ideal = flatten({name: curved.ideal[name] for name in curved.scored}).detach()
    with twice_differentiable(curved.before, curved.parameters):
        if curved.too_large:
            residual = flatten(gradient(curved.loss(), scored)).detach()
            return _without_curvature(curved, fishers, retention_fisher, ideal, residual)
        at_reference = Curvature(curved.loss, curved.parameters)
        shared = _shared(curved, at_reference, ideal)
        blocks = _Block.form(curved, at_reference, fishers, retention_fisher)
        return {
            name: _of_fisher(curved, at_reference, drift, retention_fisher, shared, blocks)
            for name, drift in fishers.items()
        }


@dataclass(frozen=True)
class _Shared:
    """Flat vectors on S, and terms that no Fisher takes part in."""

    ideal: Tensor
    residual: Tensor
    step: Tensor
    own: Tensor  # H_S dtheta_S
    cross: Limit
    cross_along: Limit
    third: Limit
    remainder: Limit


def _shared(curved: Curved, curvature: Curvature, ideal: Tensor) -> _Shared:
    size, whole = curved.size, flatten(curved.drift)
    inside, outside = whole.clone(), whole.clone()
    inside[size:], outside[:size] = 0.0, 0.0
    own = curvature.product(inside)[:size]
    through = torch.zeros_like(own) if not outside.any() else curvature.product(outside)[:size]
    residual = curvature.gradient()[:size]
    rest = _norm(ideal - residual - own - through)
    third = _third(curved)
    return _Shared(
        ideal,
        residual,
        whole[:size],
        own,
        _cross(curved, curvature, whole),
        Limit(_norm(through), True, "exact"),
        third,
        Limit(rest, True, "exact"),
    )


def _cross(curved: Curved, curvature: Curvature, like: Tensor) -> Limit:
    size, others = curved.size, len(like) - curved.size
    if not others:
        return Limit(0.0, True, "nothing else moved")

    def forward(v: Tensor) -> Tensor:
        return curvature.product(torch.cat([v.new_zeros(size), v]))[:size]

    def backward(v: Tensor) -> Tensor:
        return curvature.product(torch.cat([v, v.new_zeros(others)]))[size:]

    return _largest_singular(forward, backward, others, like=like, steps=-(-curved.steps // 2))


def _third(curved: Curved) -> Limit:
    """``||T(xi)[d, .]||``, rows in S, at the worst of the points of the segment."""
    whole = flatten(curved.drift)
    length, size = _norm(whole), curved.size
    if length == 0.0:
        return Limit(0.0, True, "nothing moved")
    start = {name: p.detach().clone() for name, p in curved.parameters.items()}
    found: list[Limit] = []
    for u in torch.linspace(0, 1, curved.points).tolist():
        place = {name: start[name] + u * curved.drift[name].to(start[name]) for name in start}
        with displaced(curved.parameters, place):
            along = Curvature(curved.loss, curved.parameters).third(whole / length)

            def backward(v: Tensor, along: Operator = along) -> Tensor:
                return along(torch.cat([v, v.new_zeros(len(whole) - size)]))

            def forward(v: Tensor, along: Operator = along) -> Tensor:
                return along(v)[:size]

            steps = max(2, curved.steps // 4)  # one step costs as much as four of the Hessian's
            found.append(_largest_singular(forward, backward, len(whole), like=whole, steps=steps))
    worst = max(found, key=lambda one: one.value)
    return Limit(worst.value, False, f"{worst.how}; {curved.points} points of the segment")


@dataclass(frozen=True)
class _Block:
    """Some columns of the Hessian on S.

    Attributes:
        which: their numbers.
        columns: (size, b).
        whole: all of them are there.
    """

    which: Tensor
    columns: Tensor
    whole: bool

    @classmethod
    def form(
        cls,
        curved: Curved,
        curvature: Curvature,
        fishers: Mapping[str, FisherDrift],
        retention_fisher: Mapping[str, Tensor] | None,
    ) -> _Block:
        """Half of the block where a Fisher is largest, the other half at random; or all."""
        size, like = curved.size, flatten(curved.drift)
        which = torch.arange(size)
        if curved.block < size:
            known = [_diagonal(curved, drift) for drift in fishers.values() if drift.fisher]
            if retention_fisher is not None:
                known.append(flatten({n: retention_fisher[n] for n in curved.scored}).cpu())
            order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
            if known:
                top = torch.stack([one.double() for one in known]).amax(0)
                largest = top.argsort(descending=True, stable=True)[: curved.block // 2]
                order = torch.cat([largest, order[~torch.isin(order, largest)]])
            which = order[: curved.block].sort().values
        columns = []
        for i in which.tolist():
            unit = torch.zeros_like(like)
            unit[i] = 1.0
            columns.append(curvature.product(unit)[:size].double().cpu())
        return cls(which, torch.stack(columns, 1), len(which) == size)

    @property
    def diagonal(self) -> Tensor:
        """H_ii of the block."""
        return self.columns[self.which, torch.arange(len(self.which))]

    def limit(self, value: float, size: int) -> Limit:
        """A number found on the block."""
        if self.whole:
            return Limit(value, True, "exact")
        return Limit(value, False, f"at least; {len(self.which)} of {size:,} Hessian columns")

    def off_diagonal(self, size: int) -> Limit:
        """``||(H - Diag H)|| `` on these columns, which that of the whole is not below."""
        rest = self.columns.clone()
        rest[self.which, torch.arange(len(self.which))] = 0.0
        return self.limit(float(torch.linalg.matrix_norm(rest, ord=2)), size)


def _diagonal(curved: Curved, drift: FisherDrift) -> Tensor:
    return flatten({name: drift.fisher[name] for name in curved.scored}).cpu()


def _of_fisher(
    curved: Curved,
    curvature: Curvature,
    drift: FisherDrift,
    retention_fisher: Mapping[str, Tensor] | None,
    shared: _Shared,
    block: _Block,
) -> BoundTerms:
    scored = {name: curved.drift[name] for name in curved.scored}
    rest = len(flatten(curved.drift)) - curved.size

    def mismatch(v: Tensor) -> Tensor:
        bent = curvature.product(torch.cat([v, v.new_zeros(rest)]))[: curved.size]
        return bent - flatten(fisher_product(drift, unflatten(v, scored)))

    proxy = flatten(fisher_product(drift, scored))
    norm = largest_eigenvalue(mismatch, curved.size, like=shared.step, steps=curved.steps)
    calibration, transfer = _diagonal_gaps(curved, drift, retention_fisher, block)
    return BoundTerms(
        **_measured(curved, shared.ideal, shared.residual, proxy),
        mismatch=norm,
        mismatch_along=Limit(_norm(shared.own - proxy), True, "exact"),
        off_diagonal=block.off_diagonal(curved.size),
        calibration=calibration,
        transfer=transfer,
        cross=shared.cross,
        cross_along=shared.cross_along,
        third=shared.third,
        remainder=shared.remainder,
    )


def _measured(curved: Curved, ideal: Tensor, residual: Tensor, proxy: Tensor) -> dict[str, Any]:
    """The terms that need no Hessian."""
    whole = flatten(curved.drift)
    left = ideal - proxy.to(ideal)
    sizes = _norm(ideal) * _norm(proxy)
    dot = float(ideal.double() @ proxy.double().to(ideal.device))
    return {
        "ideal": _norm(ideal),
        "proxy": _norm(proxy),
        "left": _norm(left),
        "cosine": dot / sizes if sizes else math.nan,
        "residual": _norm(residual),
        "drift": _norm(whole[: curved.size]),
        "other_drift": _norm(whole[curved.size :]),
    }


def _diagonal_gaps(
    curved: Curved,
    drift: FisherDrift,
    retention_fisher: Mapping[str, Tensor] | None,
    block: _Block | None,
) -> tuple[Limit, Limit]:
    """D_cal and D_transfer."""
    if retention_fisher is None:
        missing = Limit.missing("not computed: no Fisher on the retention prompts")
        return missing, missing
    dagger = flatten({name: retention_fisher[name] for name in curved.scored}).double().cpu()
    calibration = Limit.missing(curved.too_large)
    if block is not None:
        gap = (block.diagonal - dagger[block.which]).abs().max()
        calibration = block.limit(float(gap), curved.size)
    if not drift.fisher:
        return calibration, Limit.missing("not computed: the bound is of a diagonal Fisher")
    gap = (dagger - _diagonal(curved, drift).double()).abs().max()
    return calibration, Limit(float(gap), True, "exact for the two fitted Fishers")


def _without_curvature(
    curved: Curved,
    fishers: Mapping[str, FisherDrift],
    retention_fisher: Mapping[str, Tensor] | None,
    ideal: Tensor,
    residual: Tensor,
) -> dict[str, BoundTerms]:
    """Gradients alone: what is left where no Hessian-vector product can be had."""
    unknown = ("mismatch", "mismatch_along", "off_diagonal", "cross", "cross_along", "third",
               "remainder")  # fmt: skip
    missing: dict[str, Any] = dict.fromkeys(unknown, Limit.missing(curved.too_large))
    scored = {name: curved.drift[name] for name in curved.scored}
    found = {}
    for name, drift in fishers.items():
        proxy = flatten(fisher_product(drift, scored))
        calibration, transfer = _diagonal_gaps(curved, drift, retention_fisher, None)
        found[name] = BoundTerms(
            **_measured(curved, ideal, residual, proxy),
            **missing,
            calibration=calibration,
            transfer=transfer,
        )
    return found


def _norm(vector: Tensor) -> float:
    return float(vector.double().norm())
