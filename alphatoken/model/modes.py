"""Modes of the user's model: temporary evaluation mode, and use of random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

__all__ = ["draws", "evaluation_mode", "is_compiled", "is_wrapper"]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode inside, and each one's own flag back afterwards.

    Compiled modules run as they were written: a compiled one does not call the hooks of its parts.
    """
    # Flag by flag, because ``model.train()`` at the end would also switch on those submodules that
    # the user keeps in eval mode.
    flags = {module: module.training for module in model.modules()}
    eager = torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()
    try:
        for module in flags:
            module.training = False
        with eager:
            yield
    finally:
        for module, flag in flags.items():
            module.training = flag


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
    """True if this is a positive number, or holds one: some adapters keep one for each name."""
    if isinstance(rate, Mapping):
        return any(_positive(one) for one in rate.values())
    return isinstance(rate, (int, float)) and rate > 0
