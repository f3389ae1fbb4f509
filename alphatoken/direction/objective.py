"""Gradients of validation objectives with respect to the scored parameters.

    J_tgt  = mean loss over the response tokens of all validation batches
    DPO:     gradient = sum_pairs omega (grad sum l+ - grad sum l-) / normaliser,
             omega = beta sigma(-s), detached, from the unmasked preference logit

All positions of the validation sequences take part, the prompt's too, because the gradient runs
through them. Batches are streamed: one forward and backward each, sums kept, divided at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from alphatoken.direction.algebra import first_not_finite, not_finite
from alphatoken.direction.gradients import captured_gradients, gradient_of
from alphatoken.errors import InputError, ModelError, NumericalError
from alphatoken.model.batch import (
    AnyBatch,
    LabelledBatch,
    PreferenceBatch,
    read_batch,
    require_finite,
)
from alphatoken.model.capture import Recorder, accumulate_errors
from alphatoken.model.forward import (
    Start,
    checkpointed,
    evaluation_mode,
    graph_from_layer,
    losses_from,
    remember_start,
    response_losses,
)
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.sharding import Sharding, objects_in_use
from alphatoken.select.losses import dpo_coefficient
from alphatoken.support.devices import refuse
from alphatoken.support.precision import wide

# A forward runs in this nesting: the recorder's hooks (if anything is recorded), then
# ``scoring_forward``, then ``forward_losses``. ``stream_losses`` below does so for every batch.


@contextmanager
def scoring_forward(adapter: DecoderAdapter, first: int | None) -> Iterator[None]:
    """Set evaluation mode, and record the graph from layer ``first`` on (None: from the start)."""
    with evaluation_mode(adapter.model):
        if first is None:
            with torch.enable_grad():
                yield
        else:
            with graph_from_layer(adapter, first):
                yield


def forward_losses(adapter: DecoderAdapter, batch: LabelledBatch, role: str) -> Tensor:
    """Token losses (b, t) of one forward in the surrounding context; finite or an error."""
    losses = response_losses(adapter, batch.inputs, batch.labels, role=role)
    require_finite(losses, batch.mask, role)
    return losses


def weighted_losses(
    adapter: DecoderAdapter,
    item: AnyBatch,
    first: int | None,
    role: str = "validation batch",
) -> Iterator[tuple[LabelledBatch, Callable[[], Tensor], Tensor, float]]:
    """The pieces of an objective: (batch, loss function, token weights, count for the mean).

    The gradient of the objective is the sum over pieces of the gradient of
    ``(weights * losses).sum()``, divided by the sum of counts. Each loss function runs its own
    forward and must be called inside ``scoring_forward``. A labelled batch is one piece, a batch of
    preference pairs two.
    """
    limit, model = adapter.max_positions(), adapter.model
    if not isinstance(item, PreferenceBatch):
        batch = read_batch(item, max_length=limit, role=role, model=model)
        ones = batch.mask.to(torch.float32)
        yield batch, lambda: forward_losses(adapter, batch, role), ones, batch.response_tokens
        return
    branches = [
        read_batch(b, max_length=limit, role=role, model=model) for b, _, _ in item.branches()
    ]
    # omega depends on both branches, so their losses must be known before the first gradient.
    losses, starts = _branch_losses(adapter, branches, first, role)
    chosen, rejected = losses
    reference = item.reference_chosen.to(chosen), item.reference_rejected.to(rejected)
    omega = dpo_coefficient(-chosen.sum(-1), -rejected.sum(-1), *reference, item.beta)
    # One branch after the other, so that only one branch's graph exists at a time.
    for batch, start, sign in zip(branches, starts, (1, -1), strict=True):
        # Half of the pairs for each branch: the counts of both pieces are added up.
        count = batch.response_tokens if item.normalization == "tokens" else len(omega) / 2
        weights = (sign * omega).unsqueeze(-1) * batch.mask.to(omega.dtype)

        # Defaults bind this turn's batch and start; the function is called when the loop is
        # further.
        def again(batch: LabelledBatch = batch, start: Start | None = start) -> Tensor:
            run = partial(forward_losses, adapter, batch, role)
            return losses_from(adapter, first, start, batch.mask, run)

        yield batch, again, weights, count


@torch.no_grad()
def _branch_losses(
    adapter: DecoderAdapter, branches: Sequence[LabelledBatch], first: int | None, role: str
) -> tuple[list[Tensor], list[Start | None]]:
    """Token losses of both branches without a graph, and where a second forward of each can start.

    Where it can, the second one starts at the first scored layer, with the hidden states of this.
    """
    losses = []
    with remember_start(adapter, first or 0) as starts:
        for branch in branches:
            with evaluation_mode(adapter.model):  # each from the model's own state
                losses.append(forward_losses(adapter, branch, role))
    if len(starts) != len(branches):  # none to begin at, or a block that is used twice
        return losses, [None] * len(branches)
    return losses, [Start(h, x) for h, x in zip(starts, losses, strict=True)]


@torch.no_grad()
def objective_value(
    adapter: DecoderAdapter,
    item: AnyBatch,
    role: str = "validation batch",
) -> tuple[float, float]:
    """(sum, count) of the objective on one batch: token losses, or ``-log sigma(s)`` of pairs."""
    pieces = list(weighted_losses(adapter, item, None, role))
    losses = []
    for piece in pieces:
        with evaluation_mode(adapter.model):
            losses.append(forward_losses(adapter, piece[0], role))
    if not isinstance(item, PreferenceBatch):
        return float(losses[0].sum()), float(pieces[0][0].response_tokens)
    margin = (losses[1].sum(-1) - losses[0].sum(-1)) - (
        item.reference_chosen.to(losses[0]) - item.reference_rejected.to(losses[0])
    )
    return float(-logsigmoid(item.beta * margin).sum()), float(len(margin))


@runtime_checkable
class GradientReducer(Protocol):
    """Makes a mean of summed gradients: called once a build, with the sums of this process."""

    def __call__(self, role: str, sums: dict[str, Tensor], count: float) -> dict[str, Tensor]:
        """Mean gradient by parameter name.

        Args:
            role: "validation" or "retention"; or "step", the gradient that the optimizer will see
                (``preconditioner="full"``), with count 1: its mean over processes is what
                DistributedDataParallel hands to the optimizer.
            sums: summed gradients. Where weights are sharded, this process's parts of sums that
                are over all processes already.
            count: what the mean divides by, this process's share (also where sharded).
        """
        ...


def mean_gradient(role: str, sums: dict[str, Tensor], count: float) -> dict[str, Tensor]:
    """The reducer of one process: ``sums / count``; ``sums`` is empty afterwards.

    Raises:
        InputError: nothing was summed.
    """
    if count == 0:
        raise InputError(
            f"no {role} tokens",
            got=f"an empty {role} set",
            why="the values are measured against its gradient",
            remedy="pass at least one batch with response tokens",
        )
    # In place, so that sums and means of all parameters never lie in memory side by side.
    if sums and count != 1:
        torch._foreach_div_(list(sums.values()), count)
    means = dict(sums)
    sums.clear()
    return means


def require_finite_gradient(role: str, gradient: Mapping[str, Tensor]) -> None:
    """Raise NumericalError naming the first parameter whose gradient has a NaN or Inf."""

    def raise_first() -> None:
        raise NumericalError(
            f"the {role} gradient is not finite",
            got=str(first_not_finite(gradient)),
            remedy="check the weights for NaN or Inf, and the precision",
        )

    for bad in not_finite(gradient):
        refuse(bad, raise_first)


def stream_losses(
    adapter: DecoderAdapter,
    items: Iterable[AnyBatch],
    consume: Callable[[Tensor, Recorder | None], None],
    *,
    first: int | None,
    role: str = "validation",
    recording: Callable[[], AbstractContextManager[Recorder]] | None = None,
) -> float:
    """Run one forward for each piece of an objective, and hand its weighted loss to ``consume``.

    Args:
        adapter: of the model.
        items: batches or preference pairs; streamed.
        consume: gets the scalar and the recorder (None without ``recording``).
        first: first scored layer; None if parameters below the layers take part.
        role: "validation" or "retention", for messages.
        recording: what each forward is recorded in.

    Returns:
        The count that the mean divides by.
    """
    count = 0.0
    for item in items:
        for _, losses, weights, tokens in weighted_losses(adapter, item, first, f"{role} batch"):
            # Of uses that are recorded errors are asked for, which a block that a backward runs
            # anew would not have.
            shortened = checkpointed(adapter, first or 0) if recording is None else nullcontext()
            with nullcontext() if recording is None else recording() as recorder:
                with scoring_forward(adapter, first), shortened:
                    loss = losses()
                    with torch.enable_grad():
                        weighted = (loss * weights.to(loss)).sum()
                consume(weighted, recorder)
            count += tokens
    return count


def objective_sums(
    adapter: DecoderAdapter,
    parameters: Mapping[str, Tensor],
    items: Iterable[AnyBatch],
    *,
    first: int | None,
    role: str = "validation",
    sharding: Sharding | None = None,
) -> tuple[dict[str, Tensor], float]:
    """Summed gradient of an objective, one tensor a parameter, and the count for the mean.

    Shapes, dtypes and errors: ``objective_gradient``. Under ``sharding`` they are parts of sums
    over all processes, with the count of this one: a whole gradient exists while the backward makes
    it. The processes need equally many items, and must meet the parameters in one order, as they do
    where all run the same modules.

    Args:
        adapter: of the model.
        parameters: parameter name -> parameter, those in scope.
        items: batches (mean token loss) or preference pairs; streamed.
        first: first scored layer; None if parameters below the layers take part.
        role: "validation" or "retention", for messages.
        sharding: of the weights.
    """
    total: dict[str, Tensor] = {}
    nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def zeros(name: str) -> Tensor:
        # Sums over many batches in float32 at least: in bfloat16 small gradients would be lost in
        # large sums.
        p = parameters[name]
        return torch.zeros_like(p, dtype=wide(p.dtype), requires_grad=False)

    def add_up(name: str, gradient: Tensor) -> None:
        if sharding is not None:
            gradient = sharding.reduce(name, gradient.to(wide(gradient.dtype)))
        if name in total:
            total[name] += gradient.to(total[name].dtype)
        elif gradient.is_sparse:
            total[name] = zeros(name) + gradient
        else:  # a copy, since autograd may hand the same memory to another
            total[name] = gradient.to(
                wide(gradient.dtype), copy=True, memory_format=torch.contiguous_format
            )

    def add(weighted: Tensor, _: Recorder | None) -> None:
        summed: set[str] = set()

        def take(name: str, gradient: Tensor) -> Tensor | None:
            summed.add(name)
            add_up(name, gradient)
            if gradient.is_sparse:
                return None
            # What autograd holds until its backward ends, in the gradient's place: one number.
            kind = gradient.dtype, gradient.device
            if kind not in nothing:
                nothing[kind] = gradient.new_zeros(())
            return nothing[kind].expand_as(gradient)

        # Each gradient is added as the backward makes it and let go, so that sums and gradients of
        # all parameters never lie in memory side by side.
        watched = list(parameters.items())
        if sharding is not None:
            watched = [(name, one) for name, one in in_use.values() if one.requires_grad]
        hooks = [one.register_hook(partial(take, name)) for name, one in watched]
        try:
            with nullcontext() if sharding is None else sharding.repeatable():
                gradient_of(weighted, [one for _, one in watched])
        finally:
            for hook in hooks:
                hook.remove()
        for name in parameters:  # ``reduce`` is collective, also where no loss leads to a parameter
            if sharding is not None and name not in summed:
                add_up(name, weighted.new_zeros(sharding.shape(name)))

    using: AbstractContextManager[dict[int, tuple[str, Tensor]]] = nullcontext({})
    if sharding is not None:
        using = objects_in_use(adapter.model, parameters)
    with using as in_use:
        count = stream_losses(adapter, items, add, first=first, role=role)
    if sharding is None:
        if count and not total:
            raise ModelError(
                "the loss depends on no parameter in scope",
                got=f"{len(parameters)} parameters, such as {next(iter(parameters))}",
                why="every value would be zero",
                remedy="unmerge the adapter that they belong to, or score parameters that the "
                "forward uses",
            )
        total |= {name: zeros(name) for name in parameters if name not in total}
    # In one order, whichever the backward took.
    return {name: total[name] for name in parameters if name in total}, count


def captured_parts(
    recorder: Recorder, loss: Tensor, names: Mapping[str, str], sharding: Sharding
) -> dict[str, Tensor]:
    """This process's part of each matrix of a recorded loss's gradient, summed over the processes.

    Collective; the graph stays.
    """
    recorder.require_graph()
    errors = accumulate_errors(recorder, loss, recorder.outputs, "ordinary")
    like = next((e for e in errors if e is not None), loss)
    parts: dict[str, Tensor] = {}
    for name, gradient, _ in captured_gradients(recorder, errors, names):
        # A weight that this process did not use may have been used by others, and ``reduce`` waits
        # for all of them: it must be called with zeros.
        if gradient is None:
            gradient = like.new_zeros(sharding.shape(name), dtype=wide(like.dtype))
        parts[name] = sharding.reduce(name, gradient)
    return parts


def objective_gradient(
    adapter: DecoderAdapter,
    parameters: Mapping[str, Tensor],
    validation: Iterable[AnyBatch],
    *,
    first: int | None,
) -> dict[str, Tensor]:
    """Gradient G of the mean validation objective; arguments as of ``objective_sums``.

    Returns:
        Parameter name -> gradient in the parameter's shape, float32 or wider. Unit: loss a weight.

    Exactness: exact up to rounding. Source: eq. composite_val.
    Oracle: ``alphatoken.oracle.gradients.validation_gradient``,
    ``alphatoken.oracle.preference``.

    Raises:
        InputError: no validation batch, or one without response tokens.
        NumericalError: a NaN or Inf loss or gradient, naming token or parameter.
        ModelError: the losses depend on none of the parameters.
    """
    sums, count = objective_sums(adapter, parameters, validation, first=first)
    mean = mean_gradient("validation", sums, count)
    require_finite_gradient("validation", mean)
    return mean
