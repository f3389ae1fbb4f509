"""The influence matrix Psi and its exact readouts, by per-token autograd.

    Psi[b, k, t] = sum_l (d l_k / d s_t^l)^T M^l x_t^l

Rows k are *label positions* p (the loss of predicting token p + 1), columns t the positions at
which a scored weight is used. All readouts here are by position; ``to_token_index`` moves them to
the library's index i = p + 1.

| readout | of Psi | name |
|---|---|---|
| ``row_sums``    | sum_t Psi[k, t]    | label value of position k: <grad l_k, M> |
| ``column_sums`` | sum_k Psi[k, t]    | path value of position t: (dL/ds_t)^T M x_t |
| ``diagonal``    | Psi[t, t]          | direct value |
| ``causal``      | column - diagonal  | causal value, all hops |
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from alphatoken.errors import InputError
from alphatoken.oracle.gradients import (
    Batch,
    Forward,
    directed_parameters,
    run_losses,
)

__all__ = [
    "Influence",
    "Use",
    "causal",
    "column_sums",
    "diagonal",
    "exact_influence",
    "moved_outputs",
    "recorded_uses",
    "row_sums",
    "to_token_index",
    "unassigned",
]


@dataclass(frozen=True)
class Use:
    """One call of one scored linear: s = W x (+ b) at every position of the batch."""

    name: str
    x: Float[Tensor, "b t i"]
    s: Float[Tensor, "b t o"]


@contextmanager
def recorded_uses(modules: Mapping[str, nn.Module]) -> Iterator[list[Use]]:
    """Record (input, output) of every call of every module; the hooks go with the context.

    A module called twice is recorded twice. A module listed under two names is hooked once, under
    the first: its calls are the same calls.
    """
    uses: list[Use] = []
    handles = []
    hooked: set[int] = set()
    try:
        for name, module in modules.items():
            if id(module) not in hooked:
                hooked.add(id(module))
                hook = partial(_record_use, uses, name)
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
        yield uses
    finally:
        for handle in handles:
            handle.remove()


def _record_use(
    uses: list[Use], name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
) -> Tensor:
    x = args[0] if args else next(iter(kwargs.values()))
    if x.ndim != 3 or output.ndim != 3:
        raise InputError(
            "a scored linear is not called on (batch, position, feature)",
            got=f"{name}: input {tuple(x.shape)}, output {tuple(output.shape)}",
            why="its uses cannot be assigned to positions",
            remedy="leave it out of the modules",
        )
    if not output.requires_grad:
        output.requires_grad_()  # frozen trunk below the first scored linear
    uses.append(Use(name, x.detach(), output))
    passed_on: Tensor = output.clone()  # what follows may work in place, not on the record
    return passed_on


def _direction_of(module_name: str, parameter: Tensor, by_identity: Mapping[int, Tensor]) -> Tensor:
    matrix = by_identity.get(id(parameter))
    if matrix is None:
        raise InputError(
            "the direction does not cover a scored weight",
            got=f"{module_name}.weight",
            why="its uses would silently count as zero",
            remedy="add it to the direction, or leave the module out",
        )
    return matrix.double()


def moved_outputs(
    model: nn.Module,
    uses: list[Use],
    modules: Mapping[str, nn.Module],
    direction: Mapping[str, Tensor],
    *,
    transposed: Collection[str] = (),
) -> list[Float[Tensor, "b t o"]]:
    """M x of every use, in float64: how s moves when W moves by M.

    The direction of a tied weight is found by the identity of the parameter, under any name.
    """
    parameters = directed_parameters(model, direction)
    by_identity = {id(parameter): direction[name] for name, parameter in parameters.items()}
    moved = []
    for use in uses:
        module = modules[use.name]
        weight = module.weight
        assert isinstance(weight, Tensor)
        m = _direction_of(use.name, weight, by_identity)
        letters = "io" if use.name in transposed else "oi"
        # M x_t; the letters of M follow its layout, (o, i) or (i, o)
        moved.append(torch.einsum(f"bti,{letters}->bto", use.x.double(), m))
    return moved


@dataclass(frozen=True)
class Influence:
    """Psi per module, and the sum of the absolute values of its terms (for tolerances).

    ``terms[name]`` and ``absolute[name]`` are (b, k, t) in float64, by label position and use
    position.
    """

    terms: Mapping[str, Tensor]
    absolute: Mapping[str, Tensor]

    @property
    def matrix(self) -> Float[Tensor, "b t t"]:
        """Psi: the sum over modules."""
        return torch.stack(list(self.terms.values())).sum(0)

    @property
    def absolute_scale(self) -> Float[Tensor, "b t t"]:
        """sum_l sum_o |delta_o| |(M x)_o|: what a tolerance is relative to."""
        return torch.stack(list(self.absolute.values())).sum(0)


def exact_influence(
    model: nn.Module,
    forward: Forward,
    batch: Batch,
    modules: Mapping[str, nn.Module],
    direction: Mapping[str, Tensor],
    *,
    transposed: Collection[str] = (),
) -> Influence:
    """The influence matrix module by module, one ``autograd.grad`` per label position.

    Formula: ``Psi_l[b, k, t] = sum_o (d l_k / d s_t^l)_o (M^l x_t^l)_o``.

    Args:
        model: only to resolve the names in ``direction`` (tied parameters by identity).
        forward: batch without labels -> logits; no gradient checkpointing, dropout off.
        batch: with ``labels``.
        modules: the scored linears by name, weight (d_out, d_in), or (d_in, d_out) if the name is
            in ``transposed``.
        direction: parameter name -> M in the parameter's own shape.
        transposed: names of the modules whose weight is (d_in, d_out), GPT-2's Conv1D.

    Exactness: exact up to the model's own arithmetic; contraction in float64. Rows of the batch
    must not interact.

    Raises:
        InputError: uncovered weight, unknown name, a module on flattened positions.

    Source: mathematics of sections 2; the paper has only its parts (eq. app_ap_gdp, app_rank1).
    """
    with recorded_uses(modules) as uses:
        losses = run_losses(forward, batch)
    moved = moved_outputs(model, uses, modules, direction, transposed=transposed)
    rows, length = batch["labels"].shape
    terms = {n: torch.zeros(rows, length, length, dtype=torch.float64) for n in modules}
    absolute = {name: torch.zeros_like(term) for name, term in terms.items()}
    outputs = [use.s for use in uses]
    for (b, i), loss in losses.items():
        # row k is the label position that predicts token i
        k = i - 1
        # delta_t = d l_k / d s_t of every use, one backward for each k
        deltas = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
        for use, delta, mx in zip(uses, deltas, moved, strict=True):
            if delta is None:  # this loss does not see this use
                continue
            delta_row = delta[b].double()
            # Psi_l[k, t] = sum_o (d l_k / d s_t)_o (M x_t)_o
            terms[use.name][b, k] += torch.einsum("to,to->t", delta_row, mx[b]).cpu()
            # sum_o |delta_o| |(M x)_o|: rounding is relative to this, not to Psi
            absolute[use.name][b, k] += torch.einsum("to,to->t", delta_row.abs(), mx[b].abs()).cpu()
    return Influence(terms, absolute)


def row_sums(psi: Float[Tensor, "b t t"]) -> Float[Tensor, "b t"]:
    """Label value of label position k: ``sum_t Psi[k, t] = <grad_S l_k, M>``."""
    return psi.sum(dim=2)


def column_sums(psi: Float[Tensor, "b t t"]) -> Float[Tensor, "b t"]:
    """Path value of position t: ``sum_k Psi[k, t] = (dL/ds_t)^T M x_t``, prompt included."""
    return psi.sum(dim=1)


def diagonal(psi: Float[Tensor, "b t t"]) -> Float[Tensor, "b t"]:
    """Direct value of position t: ``Psi[t, t]``."""
    return psi.diagonal(dim1=1, dim2=2)


def causal(psi: Float[Tensor, "b t t"]) -> Float[Tensor, "b t"]:
    """Causal value of position t over all hops: ``sum_{k > t} Psi[k, t]``.

    Summed over the strict lower triangle, not as column - diagonal, which would cancel digits.
    """
    return psi.tril(diagonal=-1).sum(dim=1)


def to_token_index(values_by_position: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """Move values from label position p to the index of the token predicted there, i = p + 1.

    ``out[:, 0] = 0`` and ``out[:, i] = values[:, i - 1]``. The last position predicts nothing; its
    readouts are 0, so nothing is lost.
    """
    shifted = torch.zeros_like(values_by_position)
    shifted[:, 1:] = values_by_position[:, :-1]
    return shifted


def unassigned(
    values_by_position: Float[Tensor, "b t"], labels: Int[Tensor, "b t"]
) -> Float[Tensor, " b"]:
    """Sum of column readouts that falls on positions predicting no response token (the prompt's).

    With it the column readouts of the response add up to <grad L, M> again (gap 1).
    """
    predicts = torch.zeros_like(labels, dtype=torch.bool)
    # position p predicts token p + 1
    predicts[:, :-1] = labels[:, 1:] != -100
    return torch.where(predicts.to(values_by_position.device), 0.0, values_by_position).sum(dim=1)
