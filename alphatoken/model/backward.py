"""Errors of a recorded forward, by ``torch.autograd.grad``: no ``.grad`` is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alphatoken.model.capture import Recorder

__all__ = ["accumulate_errors", "graph_nodes", "stream_errors"]


def graph_nodes(tensor: Tensor) -> Iterator[Any]:
    """Nodes of the graph that ends in a tensor, each once."""
    visited, waiting = set[Any](), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            waiting += [above for above, _ in node.next_functions]


def accumulate_errors(
    recorder: Recorder, loss: Tensor, targets: Sequence[Tensor], mode: str
) -> list[Tensor | None]:
    """Errors d(loss)/d(target) under one backward mode; the graph and every .grad stay as is."""
    # The graph is retained because it is not ours alone: other errors are taken through it, and a
    # training step runs its own backward through it afterwards. Unused targets are no fault: the
    # loss may not reach an expert to which no token was sent.
    with recorder.switch.to(mode), recorder.repeatable():
        return list(torch.autograd.grad(loss, list(targets), retain_graph=True, allow_unused=True))


def stream_errors(
    recorder: Recorder,
    loss: Tensor,
    mode: str,
    consume: Callable[[int, Tensor], None],
    also: Sequence[Tensor] = (),
) -> tuple[list[Tensor | None], bool]:
    """Hand over the error of every linear use inside the backward, and keep none of them.

    The errors are those of ``accumulate_errors``, which holds all of them at once: as much memory
    as the activations of the scored layers. Here autograd is asked only for the errors of the
    lowest recorded block, and hooks receive those of all later uses as the backward passes them.
    Autograd visits only nodes that lead to what it was asked for, so a hook does not fire where no
    path leads down to the lowest block (a block with a detached input, say). Such uses are
    differentiated in a second call.

    Args:
        recorder: one recorded forward.
        loss: scalar of that forward; its graph, and every .grad, stay as they are.
        mode: of the attention backward.
        consume: gets (index in ``recorder.linears``, error); a use without a path gives nothing.
        also: tensors whose errors are returned.

    Returns:
        The errors at ``also``, and whether the loss reached anything that was recorded.
    """
    consumed: set[int] = set()

    def hand_over(index: int, error: Tensor | None) -> None:
        if error is not None:  # a node runs with no error where a backward above gave none
            consumed.add(index)
            consume(index, error)

    uses = recorder.linears
    # Executions are numbered in forward order, so the backward reaches the lowest number last.
    lowest = min((use.execution for use in uses), default=0)
    ends = [use.s for use in uses if use.execution == lowest]
    # The lowest block's uses have hooks too, so that every error is consumed in one way. Of what
    # autograd returns, only the errors at ``also`` are used.
    hooks = [use.s.register_hook(partial(hand_over, i)) for i, use in enumerate(uses)]
    try:
        errors = accumulate_errors(recorder, loss, [*ends, *also], mode)
    finally:
        # Before anything else: the training step's backward through this graph must not fire them.
        for hook in hooks:
            hook.remove()
    missed = [i for i in range(len(uses)) if i not in consumed]
    late = accumulate_errors(recorder, loss, [uses[i].s for i in missed], mode) if missed else []
    for index, error in zip(missed, late, strict=True):
        hand_over(index, error)
    others = errors[len(ends) :]
    return others, bool(consumed) or any(error is not None for error in others)
