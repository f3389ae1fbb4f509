"""Forwards of which only the part from the first scored layer on has a graph, or runs at all.

The layers below are the trunk. A scoring pass changes nothing in it, so where a forward on the same
tokens has run before, the trunk need not run again. Two places use it: label values, whose dual
forward follows a training forward, and DPO's objective, which needs two forwards of each branch.
Whether the model allows it is not taken for granted: the token losses of the shortened forward are
compared with the known ones, and where they differ the whole forward is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.model.head import rounding_tolerance
from alphatoken.model.protocol import DecoderAdapter

__all__ = [
    "Start",
    "can_start_at",
    "graph_from_layer",
    "hidden_of",
    "losses_from",
    "remember_start",
    "start_at",
    "with_hidden",
]


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The hidden states among the arguments of a decoder block."""
    return args[0] if args else kwargs.get("hidden_states")


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a decoder block with these hidden states in place of its own."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def _cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # A block that is used at two depths is entered twice; gradients are on since the first time,
    # and a second cut would take the graph between the two away.
    if torch.is_grad_enabled():
        return None
    # Gradients stay on for all that follows in this forward, the head included;
    # ``torch.no_grad`` in ``graph_from_layer`` puts the caller's setting back at the end.
    torch.set_grad_enabled(True)
    return with_hidden(args, kwargs, hidden_of(args, kwargs).detach().requires_grad_())


@contextmanager
def graph_from_layer(adapter: DecoderAdapter, first: int) -> Iterator[None]:
    """Build the graph from the input of layer ``first`` on; the layers below leave none.

    Inside, gradients are off until that decoder block is entered, which saves the activations of
    the layers below. The block's input is then detached and made to require gradients, so that
    errors exist even where the weights between two scored linears are frozen.
    """
    block = adapter.layers()[first]
    handle = block.register_forward_pre_hook(_cut, with_kwargs=True)
    try:
        with torch.no_grad():
            yield
    finally:
        handle.remove()


@dataclass
class Start:
    """A forward that has run: the input of the first scored layer, and the losses it led to.

    ``refused`` is set when starting there did not give these losses again.
    """

    hidden: Tensor
    losses: Tensor
    refused: bool = False

    def gives(self, losses: Tensor, mask: Tensor) -> bool:
        """True if these losses equal the known ones within ``rounding_tolerance``."""
        autocast = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
        tolerance = rounding_tolerance(torch.bfloat16 if autocast else self.hidden.dtype)
        again, recorded = losses.detach()[mask].double(), self.losses[mask].double()
        return bool(torch.isclose(again, recorded, rtol=tolerance, atol=tolerance).all())


def can_start_at(adapter: DecoderAdapter, first: int) -> bool:
    """True if there are blocks below ``first`` and none of them is used again from there on.

    ``start_at`` switches the lower blocks off by object, and would switch such a block off above.
    """
    blocks = adapter.layers()
    above = {id(block) for block in blocks[first:]}
    return first > 0 and all(id(block) not in above for block in blocks[:first])


@dataclass
class Trunk:
    """Hidden states that ``remember_start`` saw, and the form in which blocks pass tensors."""

    hidden: list[Tensor] = field(default_factory=list)
    plain: bool = True


@contextmanager
def remember_start(adapter: DecoderAdapter, first: int) -> Iterator[Trunk]:
    """Keep the input of layer ``first`` of every forward inside, in order."""
    blocks, trunk = adapter.layers(), Trunk()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trunk.hidden.append(hidden_of(args, kwargs).detach())

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        trunk.plain = trunk.plain and isinstance(output, Tensor)

    handles = [
        blocks[first].register_forward_pre_hook(enter, with_kwargs=True),
        blocks[0].register_forward_hook(leave),
    ]
    try:
        yield trunk
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def start_at(adapter: DecoderAdapter, first: int, hidden: Tensor) -> Iterator[None]:
    """Let the one forward inside begin at the input ``hidden`` of layer ``first``, above the trunk.

    Embeddings, masks and position tables are computed as ever, and the blocks of the trunk hand on
    what they get. A model that hands more than the hidden states from block to block (shared keys
    and values, say) will not give the same losses; whoever uses this compares them.
    """
    blocks = adapter.layers()

    def pass_on(*args: Any, **kwargs: Any) -> Any:
        return hidden_of(args, kwargs)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handle.remove()  # a block used at two depths: only the first call starts here
        # Under ``graph_from_layer`` gradients are on by now: its hook was registered earlier, so it
        # has just run. What it cut off is replaced, so the new input must begin the graph instead.
        start = hidden.requires_grad_() if torch.is_grad_enabled() else hidden
        return with_hidden(args, kwargs, start)

    hidden = hidden.detach()
    # ``forward`` is replaced in the instance, which hides the method of the class; hooks still run.
    # Libraries that wrap a block's forward do the same, so a former entry is kept and put back.
    missing = object()
    before = {block: block.__dict__.get("forward", missing) for block in blocks[:first]}
    handle = blocks[first].register_forward_pre_hook(enter, with_kwargs=True)
    try:
        for block in before:
            block.__dict__["forward"] = pass_on
        yield
    finally:
        handle.remove()
        for block, own in before.items():
            if own is missing:
                del block.__dict__["forward"]
            else:
                block.__dict__["forward"] = own


def losses_from(
    adapter: DecoderAdapter,
    first: int | None,
    start: Start | None,
    mask: Tensor,
    run: Callable[[], Tensor],
) -> Tensor:
    """Token losses of ``run()``, without the trunk if that gives those of ``start`` again."""
    if first is not None and start is not None and can_start_at(adapter, first):
        with start_at(adapter, first, start.hidden):
            losses = run()
        if start.gives(losses, mask):
            return losses
    return run()
