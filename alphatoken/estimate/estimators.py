"""Estimators on captured errors: the errors of the direct part and of the causal part.

Each estimator turns one recorded forward and its token losses into errors at the scored linears,
split into a *direct* and a *causal* part; the contraction with a direction comes after and is the
same for all. With Psi[k, t] the influence of the use of weights at position t on the loss at k:

    direct          diagonal                                   exact
    alphatoken      diagonal + Value-Propagation               the paper; causal part approximate
    path            column sums                                exact, all hops
    paper_literal   column sums + Value-Propagation of the     counts the causal path twice
                    aggregated errors, head-mean alpha
    label           row sums (``forward_mode``)                exact

"walk" is none of them: it takes no gradient of a token at all (``direction.walk``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from alphatoken.model.backward import accumulate_errors, stream_errors
from alphatoken.model.capture import Recorder
from alphatoken.model.uses import AttentionUse, DeltaUse

__all__ = [
    "TokenErrors",
    "pull_back",
    "scored_attentions",
    "token_errors",
]

Consume = Callable[[str, int, Tensor], None]
"""Takes ("direct" or "causal", index in ``recorder.linears``, error (b, t, d_out))."""


@dataclass(frozen=True)
class TokenErrors:
    """Errors (b, t, d_out) at every recorded linear use; None where a part is zero.

    ``direct`` and ``causal`` are lists parallel to ``recorder.linears``; empty where the errors
    were handed over one by one. ``reached`` is False if the loss reaches nothing that was
    recorded: it belongs to another graph.
    """

    direct: list[Tensor | None]
    causal: list[Tensor | None]
    reached: bool = True


def token_errors(
    recorder: Recorder,
    loss: Tensor,
    estimator: str,
    *,
    window: int | None,
    part: str = "both",
    consume: Consume | None = None,
) -> TokenErrors:
    """Errors of the weighted loss sum, split as ``estimator`` defines.

    Args:
        recorder: one recorded forward.
        loss: scalar, sum of (weighted) token losses of that forward.
        estimator: one of ``CAPTURED``.
        window: W of Value-Propagation; None for no limit.
        part: the parts that are wanted; what is not asked for is neither computed nor returned.
            "direct" needs no attention errors, "causal" none at the linears.
        consume: gets each error as soon as it is there, and none is kept: the direct ones inside
            the backward, the causal ones after it.
    """
    # Where no causal part is wanted, one backward down to the linears is all: Psi's column sums by
    # the ordinary one, its diagonal by the self-only one.
    if estimator == "path" or (estimator == "paper_literal" and part == "direct"):
        return _undivided(recorder, loss, "ordinary", consume)
    if estimator == "direct" or part == "direct":
        return _undivided(recorder, loss, "self", consume)
    # The errors e_k at the head outputs that Value-Propagation starts from. They must be self-only:
    # ordinary ones contain what later losses sent to position k, and propagating them counts that
    # twice. paper_literal does so on purpose, as a literal reading of the paper does.
    mode = "ordinary" if estimator == "paper_literal" else "self"
    scored = scored_attentions(recorder)
    outputs = [attention.output for attention in scored]
    if part == "causal":
        heads = accumulate_errors(recorder, loss, outputs, mode)
        direct: list[Tensor | None] = [None] * len(recorder.linears)
        reached = any(error is not None for error in heads)
    else:
        # One backward gives the errors at the linears and at the head outputs on the same way.
        direct, heads, reached = _at(recorder, loss, mode, consume, outputs)
    causal: list[Tensor | None] = [None] * len(recorder.linears)
    for attention, error in zip(scored, heads, strict=True):
        if error is None:
            continue
        start, at_start = attention.propagated(
            error, window, head_mean=estimator == "paper_literal"
        )
        # An error at the value states (of a delta net: at its convolution's input). Autograd
        # carries it to the linears that made them, through whatever the model puts in between: the
        # slice of a fused projection, LoRA factors, a value norm.
        for index, propagated in pull_back(recorder, attention, start, at_start).items():
            if consume is None:
                causal[index] = propagated
            else:
                consume("causal", index, propagated)
    return TokenErrors([], [], reached) if consume else TokenErrors(direct, causal, reached)


def _at(
    recorder: Recorder,
    loss: Tensor,
    mode: str,
    consume: Consume | None,
    also: Sequence[Tensor] = (),
) -> tuple[list[Tensor | None], list[Tensor | None], bool]:
    """Errors at the linears, errors at ``also``, and whether the loss reached anything recorded.

    With ``consume`` the errors at the linears are handed to it, and the first list is empty.
    """
    if consume is not None:
        return [], *stream_errors(recorder, loss, mode, partial(consume, "direct"), also)
    uses = len(recorder.linears)
    errors = accumulate_errors(recorder, loss, [*recorder.outputs, *also], mode)
    return errors[:uses], errors[uses:], any(error is not None for error in errors)


def _undivided(recorder: Recorder, loss: Tensor, mode: str, consume: Consume | None) -> TokenErrors:
    errors, _, reached = _at(recorder, loss, mode, consume)
    return TokenErrors(errors, [None] * len(errors), reached)


def scored_attentions(recorder: Recorder) -> list[AttentionUse | DeltaUse]:
    """Calls of attention and of delta rules in block executions with at least one scored linear."""
    executions = {use.execution for use in recorder.linears}
    return [a for a in recorder.attentions if a.execution in executions]


def pull_back(
    recorder: Recorder, attention: AttentionUse | DeltaUse, outputs: Tensor, error: Tensor
) -> dict[int, Tensor]:
    """Send ``error`` from ``outputs`` back to the linears of the attention's own block execution.

    Args:
        recorder: of the forward.
        attention: one of its calls.
        outputs: a tensor of that call, in the graph.
        error: at ``outputs``, of its shape.

    Returns:
        Index in ``recorder.linears`` -> error (b, t, d_out), of the linears that lead to
        ``outputs``: most (the output projection, the MLP) come after the attention.
    """
    # A causal part is hops within one layer. Without this limit the backward would go on from the
    # value states into the layers below.
    targets = {
        index: use.s
        for index, use in enumerate(recorder.linears)
        if use.execution == attention.execution
    }
    if not targets or not outputs.requires_grad:  # as with adapters on the query projection only
        return {}
    with recorder.repeatable(attention.module):
        errors = torch.autograd.grad(
            outputs, list(targets.values()), error, retain_graph=True, allow_unused=True
        )
    return {i: e for i, e in zip(targets, errors, strict=True) if e is not None}
