"""The direction M = P o (G + lambda V), built anew from what the user gave.

Labels are shifted here, validation tokens pooled here, omega taken here; V and P are their
formulas. Gradients are autograd's, in the model's own arithmetic, summed in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import safe_open
from torch import Tensor

from alphatoken.errors import InputError, UnsupportedError
from alphatoken.oracle.gradients import (
    Forward,
    batch_mask,
    gradient,
    logits_of,
)

EPSILON_FLOOR = 1e-16
"""v^ is no smaller than this: a LoRA factor A has none after the first step."""


@runtime_checkable
class Pairs(Protocol):
    """Preference pairs as the library takes them; see its ``PreferenceBatch``."""

    chosen: Mapping[str, Any]
    rejected: Mapping[str, Any]
    reference_chosen: Tensor
    reference_rejected: Tensor
    beta: float
    normalization: str


@runtime_checkable
class Drift(Protocol):
    """A Fisher and its reference weights by parameter name; see the library's ``FisherDrift``."""

    @property
    def fisher(self) -> Mapping[str, Tensor]:
        """Diagonal Fisher; empty if there are factors."""
        ...

    @property
    def reference(self) -> Mapping[str, Tensor]:
        """Reference weights of the drift."""
        ...

    @property
    def factors(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """(left, right) of ``V = left (theta - theta_ref) right``."""
        ...


def read_drift(path: str | os.PathLike[str]) -> Drift:
    """Fisher and reference from a file that ``FisherDrift.save`` wrote, by safetensors alone."""
    drift = SimpleNamespace(fisher={}, reference={}, factors={})
    with safe_open(os.fspath(path), framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - the handle is no mapping
            kind, _, name = key.partition("/")
            if kind == "left":
                drift.factors[name] = (file.get_tensor(key), file.get_tensor(f"right/{name}"))
            elif kind in ("fisher", "reference"):
                getattr(drift, kind)[name] = file.get_tensor(key)
    return drift


def losses_of(forward: Forward, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """One forward: (losses (n,), places (n, 2)) of the counted tokens, row by row.

    ``l = -log pi(z_i | z_<i)`` from the logits at position i - 1, in float64.
    """
    places = batch_mask(batch).nonzero()
    with torch.enable_grad():
        logits = logits_of(forward, batch)
        rows, tokens = places.unbind(1)
        # the logits at i - 1 predict token i
        predicted = logits[rows, tokens - 1]
        # In float32 log-softmax over a real vocabulary loses a digit and more in p - 1.
        every = -torch.log_softmax(predicted.double(), dim=-1)
        labels = batch["labels"][rows, tokens].to(every.device)
        return every.gather(1, labels.unsqueeze(1)).squeeze(1), places


def objective_gradient(
    forward: Forward, items: Iterable[Any], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Gradient of the mean token loss of labelled batches, or of the preference objective.

        labelled:     sum of grad l over all counted tokens of all batches, / their number
        preference:   sum over pairs of omega (grad sum l+ - grad sum l-), / response tokens of
                      both branches ("tokens") or pairs ("pairs"), omega = beta sigmoid(-s)

    Args:
        forward: batch without labels -> logits.
        items: labelled batches or :class:`Pairs`.
        parameters: by name.

    Returns:
        parameter name -> gradient, float64.

    Source: eqs. grad_alignment, composite_val.
    """
    total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in parameters.items()}
    count = 0.0

    def add(loss: Tensor) -> None:
        for name, g in gradient(loss, parameters).items():
            total[name] += g.double()

    for item in items:
        if isinstance(item, Mapping):
            losses, _ = losses_of(forward, item)
            # eq. grad_alignment: sum_v grad l_v, and n in ``count``
            add(losses.sum())
            count += len(losses)
        else:
            count += _add_pairs(forward, item, add)
    if count == 0:
        raise InputError("the objective has no token", why="the mean over nothing has no gradient")
    return {name: g.detach() / count for name, g in total.items()}


def _add_pairs(forward: Forward, pairs: Pairs, add: Callable[[Tensor], None]) -> float:
    branches = [losses_of(forward, branch) for branch in (pairs.chosen, pairs.rejected)]
    size = pairs.chosen["input_ids"].shape[0]
    sums = [
        losses.new_zeros(size).index_add(0, places[:, 0], losses) for losses, places in branches
    ]
    # log pi(y | x) - log pi_ref(y | x) of both branches, the first being minus the summed loss
    ratios = [
        -one.detach() - reference.to(one)
        for one, reference in zip(
            sums, (pairs.reference_chosen, pairs.reference_rejected), strict=True
        )
    ]
    # omega = beta sigmoid(-s), s = beta (ratio of y+ - ratio of y-), no gradient through it
    omega = pairs.beta * torch.sigmoid(-pairs.beta * (ratios[0] - ratios[1]))
    # omega (grad sum_t l_t+ - grad sum_t l_t-)
    add((omega * sums[0]).sum())
    add(-(omega * sums[1]).sum())
    if pairs.normalization == "pairs":
        return float(size)
    # the paper's normalisation: response tokens of both branches
    return float(sum(len(losses) for losses, _ in branches))


def fisher_drift(drift: Drift, parameters: Mapping[str, Tensor], names: Any) -> dict[str, Tensor]:
    """``V = F o (theta - theta_ref)``, or ``left (theta - theta_ref) right``, by parameter name.

    In float64.

    Args:
        drift: Fisher and reference.
        parameters: by name.
        names: parameter name -> all names of that parameter; the drift may use any.

    Source: eq. V_layer.
    """
    drifts = {}
    for name, parameter in parameters.items():
        stored = next(n for n in names(name) if n in drift.reference)
        weight = parameter.detach()
        wide = torch.promote_types(weight.dtype, torch.float32)
        # theta - theta_ref, subtracted in float64 since the drift is small next to theta
        away = weight.to(wide).double() - drift.reference[stored].to(weight.device).double()
        if drift.fisher:
            # eq. V_layer: V = F o (theta - theta_ref)
            drifts[name] = drift.fisher[stored].to(weight.device).double() * away
        else:
            left, right = (f.to(weight.device).double() for f in drift.factors[stored])
            columns = away if away.dim() == 2 else away.unsqueeze(1)
            # Kronecker: V = S_F (theta - theta_ref) A_F
            drifts[name] = (left @ columns @ right).reshape(away.shape)
    return drifts


def corrected_fisher(
    left: Tensor, right: Tensor, gradients: Sequence[Tensor], tokens: int
) -> Tensor:
    """H of one linear, dense over its flattened weight, from the gradients of single sequences.

        H = sum_ij Lambda_ij u_ij u_ij^T,    Lambda_ij = sum over sequences of <g, u_ij>^2 / tokens

    with ``u_ij`` the flattened ``l_i r_j^T``, all of them the columns of one matrix.

    Args:
        left: (rows, rows) eigenvectors l_i in columns.
        right: (columns, columns) eigenvectors r_j likewise.
        gradients: (rows, columns) of each sequence's summed log-likelihood.
        tokens: response tokens of all sequences.
    """
    # column ij of the Kronecker product is the flattened l_i r_j^T
    u = torch.kron(left, right)
    # Lambda_ij = sum over sequences of <g, u_ij>^2 / tokens
    eigenvalues = sum(((g.flatten() @ u).square() for g in gradients), u.new_zeros(len(u))) / tokens
    # H = U Lambda U^T
    return u @ eigenvalues.diag() @ u.T


def damped_solve(H: Tensor, matrix: Tensor, damping: float) -> Tensor:
    """``(H + mu)^-1 m`` of a dense H, mu being ``damping`` times its mean eigenvalue.

    That mean is trace / size, and takes no eigenvalues.
    """
    # mu = damping tr(H) / size
    mu = damping * H.trace() / len(H)
    solved: Tensor = torch.linalg.solve(H + mu * torch.eye(len(H), dtype=H.dtype), matrix.flatten())
    return solved.reshape(matrix.shape)


def damped_directions(
    factors: Any, side: Mapping[str, Tensor], damping: float, names: Any
) -> dict[str, Tensor]:
    """``left ((left^T m right) / (Lambda + mu)) right^T`` by parameter name, float64.

    Args:
        factors: the library's ``InfluenceFactors``.
        side: G or V by parameter name.
        damping: mu as a share of the mean of Lambda.
        names: parameter name -> all names of that parameter; the factors may use any.
    """
    directions = {}
    for name, m in side.items():
        stored = next(n for n in names(name) if n in factors.eigenvalues)
        parts = (factors.left[stored], factors.right[stored], factors.eigenvalues[stored])
        left, right, values = (part.to(m.device).double() for part in parts)
        # left^T m right: m in the eigenbasis
        shrunk = torch.einsum("oa,oi,ib->ab", left, m.double(), right)
        # over Lambda + mu
        shrunk /= values + damping * values.mean()
        # back: left (..) right^T
        directions[name] = torch.einsum("oa,ab,ib->oi", left, shrunk, right)
    return directions


def adam_scale(
    optimizer: Any,
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor] | None,
    *,
    after: int,
) -> dict[str, Tensor] | None:
    """P of Adam and AdamW from their state, float64; None (P = 1) before ``after`` steps.

        frozen:  c / (sqrt(v^) + eps), v^ of the state before the step
        full:    c / (sqrt(v^) + eps) - m^ (1 - b2) g / ((1 - b2^s) sqrt(v^) (sqrt(v^) + eps)^2),
                 m^ and v^ after a step with gradient g

    with s the number of the step and c = (1 - b1) / (1 - b1^s). Where amsgrad's maximum (or the
    floor of v^) holds the denominator, it does not move with g.

    Args:
        optimizer: torch's Adam or AdamW, or accelerate's wrapper of one.
        parameters: by name.
        gradients: what the step will see, for "full"; None for "frozen".
        after: P is used from this many steps on.

    Raises:
        UnsupportedError: another optimizer, whose step this oracle does not know.
    """
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise UnsupportedError(
            "the certificate knows the steps of Adam and AdamW only",
            got=type(optimizer).__qualname__,
            why="P is computed anew from the optimizer's state, and for others there is no second "
            "formula to compare with",
            remedy="verify with preconditioner=None, or hand P over as a mapping",
        )
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    scale = {}
    for name, parameter in parameters.items():
        group, state = groups[id(parameter)], optimizer.state.get(parameter, {})
        if not state or int(state["step"]) < after:
            return None
        g = None if gradients is None else gradients[name].double()
        if g is not None and not group.get("decoupled_weight_decay"):
            # Adam's coupled decay is part of the gradient; AdamW's never meets v
            g = g + group["weight_decay"] * parameter.detach().double()
        scale[name] = _adam(group, state, g)
    return scale


def _adam(group: Mapping[str, Any], state: Mapping[str, Any], g: Tensor | None) -> Tensor:
    (b1, b2), eps, steps = group["betas"], group["eps"], int(state["step"])
    m, v = state["exp_avg"].double(), state["exp_avg_sq"].double()
    largest = state["max_exp_avg_sq"].double() if group.get("amsgrad") else torch.zeros_like(v)
    # ``steps`` were taken: the step to come is s = steps + 1
    c = (1 - b1) / (1 - b1 ** (steps + 1))
    if g is None:
        # v^ before the step, corrected by the steps that were taken
        second_moment = (largest if group.get("amsgrad") else v) / (1 - b2**steps)
        scale: Tensor = c / (second_moment.clamp(min=EPSILON_FLOOR).sqrt() + eps)
        return scale
    # m^ and v^ after the step with g
    m = (b1 * m + (1 - b1) * g) / (1 - b1 ** (steps + 1))
    v = (b2 * v + (1 - b2) * g.square()) / (1 - b2 ** (steps + 1))
    # amsgrad's maximum of v, with the bias correction of this step
    largest = largest / (1 - b2 ** (steps + 1))
    # the denominator moves with g only where v^ itself is the largest
    moves = (v > EPSILON_FLOOR) & (v > largest)
    # sqrt(v^), of amsgrad's maximum where that is larger, no smaller than the floor
    root = torch.maximum(v, largest).clamp(min=EPSILON_FLOOR).sqrt()
    # m^ (1 - b2) g / ((1 - b2^s) sqrt(v^) (sqrt(v^) + eps)^2)
    second = m * (1 - b2) * g / ((1 - b2 ** (steps + 1)) * root * (root + eps).square())
    return torch.as_tensor(c / (root + eps) - torch.where(moves, second, 0.0))
