"""Modes of the user's model: temporary evaluation mode, and use of random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["draws", "evaluation_mode", "is_compiled", "is_wrapper", "kept_frequencies"]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode inside, and each one's own flag back afterwards.

    Compiled modules run as they were written: a compiled one does not call the hooks of its parts.
    Rotary frequencies that follow the length of what was run last come back too: a forward of ours
    is none of the user's.
    """
    # Flag by flag, because ``model.train()`` at the end would also switch on those submodules that
    # the user keeps in eval mode.
    flags = {module: module.training for module in model.modules()}
    eager = torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()
    try:
        for module in flags:
            module.training = False
        with eager, kept_frequencies(model):
            yield
    finally:
        for module, flag in flags.items():
            module.training = flag


@contextmanager
def kept_frequencies(model: nn.Module) -> Iterator[None]:
    """Bring rotary frequencies back at the end that follow the length of what was run last.

    Dynamic scaling keeps those of the longest row so far, and reads the next ones by them. So a
    forward of our own would change the next one of the user's, and another of our own.
    """
    kept: list[tuple[nn.Module, dict[str, Any], dict[str, tuple[Tensor, Tensor]]]] = []
    for module in model.modules():
        if "max_seq_len_cached" in vars(module):
            numbers = {k: v for k, v in vars(module).items() if k.endswith(_OF_LENGTH)}
            few = {n: b for n, b in module._buffers.items() if b is not None and b.numel() <= _FEW}
            # Another buffer is put in their place, or they are written to.
            kept.append((module, numbers, {n: (b, b.detach().clone()) for n, b in few.items()}))
    try:
        yield
    finally:
        for module, numbers, buffers in kept:
            vars(module).update(numbers)
            for name, (buffer, copy) in buffers.items():
                module._buffers[name] = buffer
                if not buffer.is_meta:
                    buffer.data.copy_(copy)


_OF_LENGTH = ("max_seq_len_cached", "attention_scaling")
_FEW = 4096
"""Numbers of frequencies at most: tables of cosines are only ever added to."""


def is_compiled(model: nn.Module) -> bool:
    """True if a part of the model was compiled, in place or by a wrapper."""
    return any(m._compiled_call_impl is not None or is_wrapper(m) for m in model.modules())


def is_wrapper(model: nn.Module) -> bool:
    """True if this is what ``torch.compile(model)`` gives."""
    return type(model).__module__.startswith("torch._dynamo")  # not imported, which takes seconds


_DRAWS = ("drop", "jitter", "noise")


def draws(model: nn.Module) -> bool:
    """True if a forward of the model, in its modes as they are, may draw random numbers."""
    for module in model.modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        # Dropout, jitter of a router and noise on embeddings that are numbers of a module.
        rates = (v for k, v in vars(module).items() if any(word in k.lower() for word in _DRAWS))
        if any(_positive(rate) for rate in rates):
            return True
    return False


def _positive(rate: object) -> bool:
    """True if this is a positive number, or holds one: some keep one for each name or layer."""
    if isinstance(rate, Mapping):
        return any(_positive(one) for one in rate.values())
    if isinstance(rate, (list, tuple)):
        return any(map(_positive, rate))
    return isinstance(rate, (int, float)) and rate > 0
