"""Choice of the backward of attention and delta nets: ``BackwardSwitch``, and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alphatoken.errors import ConfigError

MODES = ("ordinary", "self")
"""Gradient to all positions, or to the same one only."""

SelfTerms = Callable[..., tuple[Tensor, ...]]
"""(error at a mixer's output, that output, inputs) -> errors at these inputs."""


class BackwardSwitch:
    """Tells the mixers' nodes of a graph which backward to run: ordinary or self.

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
    """Identity before a kernel; in self mode gradients of the first ``passing`` inputs alone go on.

    The others are sums over positions, and the kernel gives the sums only. The tap behind the
    kernel gives the self-only ones, around the kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, switch: BackwardSwitch, passing: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.switch, ctx.passing = switch, passing
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *errors: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.switch.mode != "self":
            return None, None, *errors
        dropped = len(errors) - ctx.passing
        return None, None, *errors[: ctx.passing], *([None] * dropped)


class _Tap(torch.autograd.Function):
    """Identity on the outputs; in self mode adds the self-only errors at the kernel's inputs.

    The inputs are handed to the forward only so that the backward can return errors for them. They
    are those from before the gate, which therefore does not drop these errors. The error at the
    outputs goes through the kernel too where the gate passes something on.
    """

    @staticmethod
    def forward(
        ctx: Any, switch: BackwardSwitch, own: SelfTerms, passing: int, output: Tensor,
        *inputs: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.switch, ctx.own, ctx.passing, ctx.inputs = switch, own, passing, len(inputs)
        ctx.save_for_backward(output, *inputs)
        return output.view_as(output)

    @staticmethod
    @once_differentiable  # the closed form has no graph: a second derivative would lack its part
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.switch.mode != "self":
            return None, None, None, error, *([None] * ctx.inputs)
        through = error if ctx.passing else None
        return None, None, None, through, *ctx.own(error, *ctx.saved_tensors)


def around(
    native: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    switch: BackwardSwitch,
    own: SelfTerms,
    *,
    passing: int = 0,
) -> Tensor:
    """Run a kernel between two identity nodes, so that its self-only backward is ``own``.

    The ordinary backward is the kernel's.

    Args:
        native: the kernel, of the inputs.
        inputs: in the graph.
        switch: read at backward time.
        own: an error at the output, the output and the inputs but the first ``passing`` to errors
            at these inputs, of the same position alone.
        passing: number of inputs whose gradient is of their own position as the kernel gives it.
    """
    gated = _Gate.apply(switch, passing, *inputs)  # type: ignore[no-untyped-call]
    tapped: Tensor = _Tap.apply(  # type: ignore[no-untyped-call]
        switch, own, passing, native(*gated), *inputs[passing:]
    )
    return tapped
