"""Choice of the backward of attention and delta nets: ``BackwardSwitch``, and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alphatoken.errors import ConfigError

__all__ = ["MODES", "BackwardSwitch", "around"]

MODES = ("ordinary", "self", "cross")
"""Gradient to all positions, to the same one only, or to the other ones only."""

SelfTerms = Callable[[Tensor], tuple[Tensor, ...]]
"""Errors at a mixer's outputs to those at its inputs."""


class BackwardSwitch:
    """Tells the mixers' nodes of a graph which backward to run: ordinary, self or cross.

    The nodes are made in the forward and hold this object, whose mode they read when a backward
    passes them. So one forward can be differentiated self-only for values and as usual by the
    training step that follows.
    """

    def __init__(self) -> None:
        self.mode = "ordinary"

    @contextmanager
    def to(self, mode: str) -> Iterator[None]:
        """Run the backward in ``mode`` inside the context; as before afterwards.

        Raises:
            ConfigError: there is no such mode; an unknown one would run as the ordinary backward.
        """
        if mode not in MODES:
            raise ConfigError(
                "no such backward of attention",
                got=repr(mode),
                remedy=f"one of {', '.join(MODES)}",
            )
        before, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = before


class _Gate(torch.autograd.Function):
    """Identity before a kernel whose self-only backward is not its own; passes nothing then.

    The tap behind the kernel gives the self-only errors, around the kernel. What the kernel makes
    of no error, zeros most likely, must not reach them.
    """

    @staticmethod
    def forward(ctx: Any, switch: BackwardSwitch, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.switch = switch
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *errors: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.switch.mode != "self"
        return (None, *(error if kept else None for error in errors))


class _Tap(torch.autograd.Function):
    """Identity on the outputs; in self mode their errors go past the kernel, to its inputs.

    The inputs are handed to the forward only so that the backward can return errors for them.
    """

    @staticmethod
    def forward(
        ctx: Any, switch: BackwardSwitch, own: SelfTerms, output: Tensor, *inputs: Tensor
    ) -> Tensor:
        ctx.switch, ctx.own, ctx.inputs = switch, own, len(inputs)
        return output.view_as(output)

    @staticmethod
    @once_differentiable  # the closed form has no graph: a second derivative would lack its part
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.switch.mode != "self":
            return None, None, error, *([None] * ctx.inputs)
        return None, None, None, *ctx.own(error)


def around(
    native: Callable[..., Tensor], inputs: Sequence[Tensor], switch: BackwardSwitch, own: SelfTerms
) -> Tensor:
    """Run a kernel whose self-only backward is ``own``; any other mode of it is the kernel's.

    Args:
        native: the kernel, of the inputs.
        inputs: in the graph.
        switch: read at backward time.
        own: an error at the output to those at the inputs, of the same position alone.
    """
    gated = _Gate.apply(switch, *inputs)  # type: ignore[no-untyped-call]
    tapped: Tensor = _Tap.apply(switch, own, native(*gated), *inputs)  # type: ignore[no-untyped-call]
    return tapped
