"""Values of a whole run: the derivative of the last validation loss by a token's weight in a step.

    w_(s,t)     weight of token t in step s, 1 in plain training
    theta_S(w)  the weights after S optimizer steps;  J  the mean token loss of the validation rows
    run value of (s, t)  =  - dJ(theta_S(w)) / dw_(s,t)   at w = 1

What later steps repair, cover or amplify is in it. Reverse mode goes through every step: with
x = (theta, m, v) the weights and the optimizer's moments, and step s the map x' = F_s(x, w_s),

    a_S = (dJ/dtheta, 0, 0),   a_s = (dF_s/dx)' a_(s+1),   values of step s = - (dF_s/dw_s)' a_(s+1)

so a value along the run is the label value of its step with a_(s+1), through the optimizer's step,
in place of the gradient G of J there. A ledger sums one-step values: it takes G(theta_s), which
knows nothing of later steps.

Formulas are written out, so that autograd can go through them; nothing here is an optimizer's own
code. Slow: each step is run three times, and once by a double backward, which the attention must
have (``attn_implementation="eager"`` of transformers).

Walks are short runs on a copy of the model, by torch's own optimizers: nothing is moved in place,
and a token's value is one loss less another.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from alphatoken.errors import InputError
from alphatoken.oracle.gradients import (
    Batch,
    Forward,
    batch_losses,
    batch_mask,
    directed_parameters,
    displaced,
    gradient,
    label_values,
    listed,
    run_losses,
    trainable,
    undisturbed,
)
from alphatoken.oracle.utility import AdamState, adam_direction

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Run:
    """The steps of a run, as formulas.

    A step trains on ``sum w l / N`` over all its batches, N the number of their response tokens.

    Attributes:
        steps: the batches of each step, or its only one; several are one step with accumulated
            gradients.
        rates: learning rate of each step; warm-up and decay are in it.
        optimizer: "adamw", or "sgd" (``theta' = theta - rate (g + weight_decay theta)``).
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: AdamW's is decoupled: ``theta' = (1 - rate weight_decay) theta - rate u``.
        undecayed: names of parameters without weight decay.
        clip: largest norm of a step's gradient; None to clip nothing.
    """

    steps: Sequence[Batch | Sequence[Batch]]
    rates: Sequence[float]
    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    undecayed: frozenset[str] = frozenset()
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in ("adamw", "sgd"):
            raise InputError(
                "the optimizer of a run must be AdamW or SGD", got=f"optimizer={self.optimizer!r}"
            )
        if len(self.rates) != len(self.steps):
            raise InputError(
                "every step needs a learning rate",
                got=f"{len(self.steps)} steps, {len(self.rates)} rates",
            )
        empty = [s for s in range(len(self.steps)) if not self.count(s)]
        if empty:
            raise InputError("a step has no response token", got=f"step {empty[0]}")

    def count(self, number: int) -> int:
        """N, the response tokens of a step."""
        return sum(int(batch_mask(batch).sum()) for batch in self.batches(number))

    def batches(self, number: int) -> list[Batch]:
        """The batches of a step."""
        return listed(self.steps[number])

    def after(self, number: int, state: _State, gradients: Tensors) -> _State:
        """Weights and moments after step ``number``; differentiable in all of them."""
        rate, clipped = self.rates[number], self._clipped(gradients)
        theta, m, v = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        for name, value in state.theta.items():
            g, decay = clipped[name], 0.0 if name in self.undecayed else self.weight_decay
            if self.optimizer == "sgd":
                # theta' = theta - rate (g + weight_decay theta)
                theta[name] = value - rate * (g + decay * value)
                m[name], v[name] = state.m[name], state.v[name]
                continue
            adam = AdamState(number, state.m, state.v, self.betas, self.eps)
            # u = m^ / (sqrt(v^) + eps); ``number`` steps were taken before this one
            u, m[name], v[name] = adam_direction(g, state.m[name], state.v[name], adam)
            # theta' = (1 - rate weight_decay) theta - rate u
            theta[name] = (1 - rate * decay) * value - rate * u
        return _State(theta, m, v)

    def _clipped(self, gradients: Tensors) -> Tensors:
        """``g min(1, clip / (|g| + 1e-6))``, as torch's clip_grad_norm_."""
        if self.clip is None:
            return gradients
        # |g| over all parameters together
        norm = sum((g.square().sum() for g in gradients.values()), torch.zeros(())).sqrt()
        scale = self.clip / (norm + 1e-6)
        # the scale is no constant: it depends on w through |g|
        return {name: g * scale for name, g in gradients.items()} if scale < 1 else gradients


@dataclass(frozen=True)
class _State:
    """Weights and moments by parameter name; or their adjoints."""

    theta: Tensors
    m: Tensors
    v: Tensors

    def flat(self) -> list[Tensor]:
        return [tensor for part in (self.theta, self.m, self.v) for tensor in part.values()]

    def detached(self) -> _State:
        parts = ({n: t.detach() for n, t in p.items()} for p in (self.theta, self.m, self.v))
        return _State(*parts)


@dataclass(frozen=True)
class _Subject:
    forward: Forward
    run: Run
    parameters: Tensors

    def start(self) -> _State:
        theta = {name: p.detach().clone() for name, p in self.parameters.items()}
        # x_0 = (theta_0, 0, 0): a run starts without moments
        zero = {name: torch.zeros_like(p) for name, p in theta.items()}
        return _State(theta, zero, dict(zero))

    def gradients(self, number: int, weights: Sequence[Tensor], *, keep_graph: bool) -> Tensors:
        """Gradients of the step's loss at the model's weights."""
        pairs = zip(weights, self.run.batches(number), strict=True)
        # L_s(w) = sum w l / N
        loss: Any = sum((w * batch_losses(self.forward, batch)).sum() for w, batch in pairs)
        return gradient(loss / self.run.count(number), self.parameters, keep_graph=keep_graph)

    def ones(self, number: int) -> list[Tensor]:
        like = next(iter(self.parameters.values()))
        # w_s = 1, plain training
        return [torch.ones(b["labels"].shape, dtype=like.dtype) for b in self.run.batches(number)]

    def states(
        self, state: _State, first: int, last: int, weights: Sequence[Sequence[Tensor]] | None
    ) -> Iterator[_State]:
        """The states before the steps ``first`` to ``last - 1``, and the one after them."""
        yield state
        for number in range(first, last):
            of_step = self.ones(number) if weights is None else weights[number]
            with displaced(self.parameters, state.theta):
                gradients = self.gradients(number, of_step, keep_graph=False)
            # x_(s+1) = F_s(x_s, w_s), without a graph: only ``back`` needs one
            state = self.run.after(number, state, gradients).detached()
            yield state

    def back(self, number: int, state: _State, adjoint: _State) -> tuple[_State, list[Tensor]]:
        """``a_s`` and the values of step s, from the state before the step and ``a_(s+1)``."""
        # the variables of F_s: theta (the live parameters), m, v and w_s
        weights = [w.requires_grad_() for w in self.ones(number)]
        m, v = ({n: t.clone().requires_grad_() for n, t in p.items()} for p in (state.m, state.v))
        with displaced(self.parameters, state.theta):
            gradients = self.gradients(number, weights, keep_graph=True)
            # x_(s+1) = F_s(x_s, w_s), in a graph of all four
            after = self.run.after(number, _State(self.parameters, m, v), gradients)
            # <x_(s+1), a_(s+1)> with a_(s+1) constant: its gradient is (dF_s)^T a_(s+1)
            inner: Any = sum(
                (x * a).sum() for x, a in zip(after.flat(), adjoint.flat(), strict=True)
            )
            inputs = [*self.parameters.values(), *m.values(), *v.values(), *weights]
            # (dF_s/dx)^T a_(s+1), then (dF_s/dw_s)^T a_(s+1)
            parts = torch.autograd.grad(inner, inputs, allow_unused=True, materialize_grads=True)
        size = len(self.parameters)
        before = _State(
            *(
                dict(zip(self.parameters, parts[i : i + size], strict=True))
                for i in range(0, 3 * size, size)
            )
        )
        # values of step s: -(dF_s/dw_s)^T a_(s+1)
        return before, [-part for part in parts[3 * size :]]

    def adjoint(self, batches: Sequence[Batch], state: _State) -> _State:
        """``(dJ/dtheta, 0, 0)`` at the weights of a state."""
        # a_S = (dJ/dtheta, 0, 0): J does not see the moments
        _, theta = _objective(self.forward, self.parameters, batches, state.theta)
        m, v = ({n: torch.zeros_like(t) for n, t in p.items()} for p in (state.m, state.v))
        return _State(theta, m, v)


def _objective(
    forward: Forward, parameters: Tensors, batches: Sequence[Batch], theta: Tensors
) -> tuple[float, Tensors]:
    """J and its gradient."""
    count = sum(int(batch_mask(batch).sum()) for batch in batches)
    if not count:
        raise InputError("the validation data have no response token")
    with displaced(parameters, theta):
        loss: Any = sum(batch_losses(forward, batch).sum() for batch in batches)
        gradients = gradient(loss / count, parameters)
    # J = (1 / n) sum of the token losses of all validation rows
    return float(loss.detach() / count), gradients


def run_end(
    model: nn.Module,
    forward: Forward,
    run: Run,
    weights: Sequence[Sequence[Tensor]] | None = None,
) -> dict[str, Tensor]:
    """``theta_S(w)`` by name; the model stays where it is.

    Args:
        model: where the run starts. Dropout is off.
        forward: batch without labels -> logits, by the model's live parameters.
        run: its steps.
        weights: w, per step and batch in the batch's shape (b, t); None for 1 throughout.

    Exactness: exact. Oracle: torch's own optimizers.
    """
    subject = _Subject(forward, run, trainable(model))
    with undisturbed(model, subject.parameters):
        # theta_S(w), from F_(S-1) after .. after F_0
        *_, end = subject.states(subject.start(), 0, len(run.steps), weights)
    return dict(end.theta)


def run_loss(
    model: nn.Module, forward: Forward, end: Tensors, validation: Batch | Iterable[Batch]
) -> float:
    """J at the end of a run: the mean token loss of the validation rows there.

    Exactness: exact. Source: section J_tgt of the paper.
    """
    parameters = trainable(model)
    with undisturbed(model, parameters):
        return _objective(forward, parameters, listed(validation), end)[0]


def run_values(
    model: nn.Module,
    forward: Forward,
    run: Run,
    validation: Batch | Iterable[Batch],
    *,
    spacing: int | None = None,
) -> list[list[Float[Tensor, "b t"]]]:
    """``- dJ(theta_S(w)) / dw_(s,t)`` at w = 1 for every token of every step.

    Positive where more weight on the token in that step lowers the last validation loss. A token
    that comes again has a value in each step; their sum is that of one weight for all of them.

    Args:
        model: where the run starts; it stays as it is. Dropout is off.
        forward: batch without labels -> logits, by the model's live parameters; differentiable
            twice.
        run: its steps.
        validation: the rows of J, in one batch or several.
        spacing: steps between the states that are kept, from which those between are found again;
            None for the root of the number of steps. Memory: ``3 (S / spacing + spacing)`` models.

    Returns:
        values by step and batch, (b, t), index i for token i, 0 off the response; nats of J for one
        unit of weight (a step divides its loss by N, so values are small where steps are large).

    Raises:
        InputError: a step or the validation rows without a response token.

    Exactness: exact up to rounding. Source: ours, of the definition; MAGIC's metagradients are its
    large form. Oracle: central differences of ``run_loss`` in the weights.
    """
    subject, count = _Subject(forward, run, trainable(model)), len(run.steps)
    validation = listed(validation)
    spacing = spacing or max(1, math.isqrt(count))
    values: list[list[Tensor]] = [[] for _ in run.steps]
    with undisturbed(model, subject.parameters):
        kept = [subject.start()]
        # only every ``spacing``-th state is kept; ``back`` needs all, stretch by stretch
        for first in range(0, count, spacing):
            *_, state = subject.states(kept[-1], first, min(first + spacing, count), None)
            kept.append(state)
        # x_S
        end = kept.pop()
        adjoint = subject.adjoint(validation, end)
        for first, state in reversed(list(zip(range(0, count, spacing), kept, strict=True))):
            last = min(first + spacing, count)
            # the states of this stretch again, from the one kept at its beginning
            states = list(subject.states(state, first, last, None))
            for number in reversed(range(first, last)):
                # a_s = (dF_s/dx)^T a_(s+1), and the values of step s
                adjoint, values[number] = subject.back(number, states[number - first], adjoint)
    return values


def ledger_values(
    model: nn.Module, forward: Forward, run: Run, validation: Batch | Iterable[Batch]
) -> list[list[Float[Tensor, "b t"]]]:
    """``- <G(theta_s), dtheta_(s+1) / dw_(s,t)>``: what the step alone does, where it begins.

    Arguments, shapes and errors are those of ``run_values``, whose value this is with G(theta_s)
    in place of the adjoint: later steps repair, cover and amplify nothing.

    Exactness: exact up to rounding. Source: in-run data values; the derivative of the step is the
    optimizer's own ("full"). Oracle: the same, by ``label_values``.
    """
    subject, values = _Subject(forward, run, trainable(model)), list[list[Tensor]]()
    validation = listed(validation)
    with undisturbed(model, subject.parameters):
        states = subject.states(subject.start(), 0, len(run.steps), None)
        for number, state in zip(range(len(run.steps)), states, strict=False):
            # (G(theta_s), 0, 0) in place of a_(s+1)
            values.append(subject.back(number, state, subject.adjoint(validation, state))[1])
    return values


# --- walks ----------------------------------------------------------------------------------------

ForwardOf = Callable[[nn.Module], Forward]
"""Makes the forward of a model: batch without labels -> logits."""


def walked(
    model: nn.Module,
    forward_of: ForwardOf,
    batches: Sequence[Batch],
    steps: int,
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
) -> nn.Module:
    """Train a copy for some steps, each on the mean token loss of the next batch in turn.

    Args:
        model: where the walk starts; it stays as it is.
        forward_of: of a model.
        batches: validation batches.
        steps: n.
        optimizer: from parameters to what steps them.

    Returns:
        The copy, in evaluation mode.

    Exactness: that of the optimizer. Source: ours. Oracle of ``alphatoken.estimate.walk``.
    """
    twin = copy.deepcopy(model).eval()
    stepper = optimizer([p for p in twin.parameters() if p.requires_grad])
    for step in range(steps):
        batch = batches[step % len(batches)]
        losses = run_losses(forward_of(twin), batch)
        stepper.zero_grad()
        # J of this batch: the mean token loss
        torch.stack(list(losses.values())).mean().backward()
        stepper.step()
    return twin


@torch.no_grad()
def walk_values(
    model: nn.Module, end: nn.Module, forward_of: ForwardOf, batch: Batch
) -> Float[Tensor, "b t"]:
    """``e_k = l_k(model) - l_k(end)``, index i for token i, 0 off the response.

    Both models are in the mode that the caller put them in. Exactness: exact.
    Source: Rho-1's excess loss. Oracle of ``Scorer.score`` with ``estimator="walk"``.
    """
    return batch_losses(forward_of(model), batch) - batch_losses(forward_of(end), batch)


@torch.no_grad()
def central_walk_values(
    model: nn.Module, end: nn.Module, forward_of: ForwardOf, batch: Batch
) -> Float[Tensor, "b t"]:
    """``(l_k(theta - D) - l_k(theta + D)) / 2``, index i for token i, 0 off the response.

    ``D`` leads from the weights of ``model`` to those of ``end``. To ``-<grad l_k, D>`` they are
    equal up to ``O(|D|^3)``, where ``walk_values`` are up to ``O(|D|^2)``.

    Exactness: exact. Source: central differences. Oracle of ``Scorer.score`` with
    ``walk_form="central"``.
    """
    # theta - D is as far behind the start as the end is ahead of it
    behind = moved_along(model, end, -1.0)
    return walk_values(behind, end, forward_of, batch) / 2


def moved_along(model: nn.Module, end: nn.Module, share: float) -> nn.Module:
    """A copy whose weights lie a share of the way from the one model to the other."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        triples = zip(twin.parameters(), model.parameters(), end.parameters(), strict=True)
        for here, first, last in triples:
            # theta + s D, D = theta_end - theta
            here.copy_(first + share * (last - first))
    return twin


def _along(model: nn.Module, end: nn.Module) -> dict[str, Tensor]:
    """-D by parameter: from the end back to the start."""
    last = dict(end.named_parameters())
    return {name: (p - last[name]).detach() for name, p in model.named_parameters()}


def label_values_along(
    model: nn.Module, end: nn.Module, forward_of: ForwardOf, batch: Batch, nodes: int = 12
) -> Float[Tensor, "b t"]:
    """``integral_0^1 <grad l_k(theta + s D), -D> ds`` by Gauss and Legendre's rule.

    One backward a token and node. Exactness: of polynomials of degree ``2 nodes - 1`` in s.
    """
    back, values = _along(model, end), torch.zeros(batch["labels"].shape, dtype=torch.float64)
    for position, weight in zip(*np.polynomial.legendre.leggauss(nodes), strict=True):
        twin = moved_along(model, end, float(position + 1) / 2)
        # nodes and weights of [-1, 1] brought to [0, 1]: s = (z + 1) / 2, ds = dz / 2
        values += float(weight) / 2 * label_values(twin, forward_of(twin), batch, back)
    return values


def curvature_along(
    model: nn.Module, end: nn.Module, forward_of: ForwardOf, batch: Batch, share: float
) -> Float[Tensor, "b t"]:
    """``D' H_k(theta + share D) D`` of each token's loss: the derivative along D of <grad l_k, D>.

    The forward goes through operators that autograd differentiates twice. Exactness: exact up to
    the model's own arithmetic; the contraction is in float64.
    """
    twin, direction = moved_along(model, end, share), _along(model, end)
    parameters = directed_parameters(twin, direction)
    along = [direction[name].to(parameter) for name, parameter in parameters.items()]
    curvatures = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    for (b, i), loss in run_losses(forward_of(twin), batch).items():
        first = torch.autograd.grad(
            loss, list(parameters.values()), create_graph=True, materialize_grads=True
        )
        # <grad l_k, -D>
        slope = torch.stack([(g * m).sum() for g, m in zip(first, along, strict=True)]).sum()
        # d <grad l_k, -D> / d theta = -H_k D
        second = torch.autograd.grad(
            slope, list(parameters.values()), retain_graph=True, materialize_grads=True
        )
        for m, hm in zip(along, second, strict=True):
            # (-D) . (-H_k D) = D^T H_k D: the two signs cancel
            curvatures[b, i] += (m.double() * hm.double()).sum().cpu()
    return curvatures
