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

Over the 3-D tensors of mixtures of experts, ``Psi[b, k, t] = < d l_k / d W^(t), M >`` with W^(t)
the copy of the tensor that position t alone uses: the mixture's own forward is run one position at
a time, each with its copy, and autograd does the rest. Nothing is said of routing, of which expert
saw what, of inputs or of errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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


# --- mixtures of experts --------------------------------------------------------------------------

Copies = dict[str, list[Tensor]]
"""Parameter name -> the copies, in the order in which positions ran."""


@contextmanager
def _copied_per_position(mixtures: Mapping[str, nn.Module]) -> Iterator[Copies]:
    """Inside, each position of these mixtures runs with copies of the parameters of its own.

    Args:
        mixtures: name -> module whose forward takes tensors with one row a position, and gives one
            back. Its name must be the prefix of its parameters' names.
    """
    copies: Copies = {}
    with ExitStack() as stack:
        for name, module in mixtures.items():
            own = module.forward
            module.forward = partial(_row_by_row, name, module, own, copies)
            stack.callback(delattr, module, "forward")
        yield copies


def _row_by_row(
    name: str, module: nn.Module, own: Callable[..., Tensor], copies: Copies, *args: Any, **kw: Any
) -> Tensor:
    outputs = []
    for n in range(len(args[0] if args else next(iter(kw.values())))):
        # W^(t): leaves of the graph that only position t uses
        fresh = {
            parameter: value.detach().clone().requires_grad_()
            for parameter, value in module.named_parameters(recurse=False)
        }
        with _holding(module, fresh):
            row = {key: value[n : n + 1] for key, value in kw.items()}
            outputs.append(own(*(value[n : n + 1] for value in args), **row))
        for parameter, copy in fresh.items():
            copies.setdefault(f"{name}.{parameter}", []).append(copy)
    return torch.cat(outputs)


@contextmanager
def _holding(module: nn.Module, fresh: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the module holds these tensors in place of its parameters."""
    kept = dict(module._parameters)
    try:
        for parameter in fresh:  # what is None stays
            del module._parameters[parameter]
        module.__dict__.update(fresh)
        yield
    finally:
        for parameter in fresh:
            del module.__dict__[parameter]
        module._parameters.clear()  # so that they come back in their order
        module._parameters.update(kept)


def expert_influence(
    forward: Forward,
    batch: Batch,
    mixtures: Mapping[str, nn.Module],
    direction: Mapping[str, Tensor],
) -> Influence:
    """The influence matrix of each parameter of the mixtures that the direction names.

    Formula: ``Psi[b, k, t] = sum (d l_k / d W^(t)) * M``, all entries of the parameter.

    Args:
        forward: batch without labels -> logits; no gradient checkpointing, dropout off.
        batch: with ``labels``.
        mixtures: the modules that hold the parameters, by name.
        direction: parameter name -> M in the parameter's own shape. Others are left out.

    Exactness: exact up to the model's own arithmetic; contraction in float64. Costs a copy of every
    parameter for each position, and one backward for each label.

    Raises:
        InputError: a mixture did not run once on every position, or none holds a named parameter.

    Source: mathematics of section 2; the paper has no mixtures.
    """
    with _copied_per_position(mixtures) as copies:
        losses = run_losses(forward, batch)
    rows, length = batch["labels"].shape
    lacking = set(direction) - copies.keys()
    # a copy for each of the b t positions, row by row
    odd = [name for name in copies if len(copies[name]) != rows * length]
    if lacking or odd:
        raise InputError(
            "the copies of a mixture's parameters do not fit the batch",
            got=f"without copies: {sorted(lacking)}; in another number than positions: {odd}",
            why="each position of the batch must have a copy of its own",
            remedy="name mixtures that run once on the flattened batch, and their parameters",
        )
    terms = {n: torch.zeros(rows, length, length, dtype=torch.float64) for n in direction}
    absolute = {name: torch.zeros_like(term) for name, term in terms.items()}
    for (b, i), loss in losses.items():
        for name, m in direction.items():
            # the copies of row b alone: rows do not interact
            by_position = _entries(loss, copies[name][b * length : (b + 1) * length], m)
            for t, entries in by_position.items():
                # Psi[b, k, t] = <d l_k / d W^(t), M>, k = i - 1
                terms[name][b, i - 1, t] = entries.sum()
                absolute[name][b, i - 1, t] = entries.abs().sum()
    return Influence(terms, absolute)


def _entries(loss: Tensor, copies: Sequence[Tensor], m: Tensor) -> dict[int, Tensor]:
    """Gradient of each position's copy times M, entry by entry; empty without a path."""
    gradients = torch.autograd.grad(loss, list(copies), retain_graph=True, allow_unused=True)
    return {
        t: gradient.double() * m.double()
        for t, gradient in enumerate(gradients)
        if gradient is not None
    }
