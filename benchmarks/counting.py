"""Kernels and waits of a piece of work, as an accelerator would be given it: counted on any CPU.

An operator that is no view and no bare allocation is at least one kernel; reading a number of the
device (by ``item``, ``nonzero``, a Boolean index, ``tolist``) is a wait.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from alphatoken.model import attention, fingerprint
from alphatoken.support import devices

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_NO_KERNEL = {"_unsafe_view", "detach", "lift_fresh", "set_", "resize_", "_reshape_alias"}
_WAITS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
_READS = {"tolist", "cpu", "__array__"}


@dataclass
class Launches:
    """Counts of one piece of work, each by the place in this library that asked for it."""

    kernels: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        self.kernels.clear()
        self.waits.clear()


def _place() -> str:
    """The innermost line of this library on the stack, or else of another one above torch."""
    frame, other = sys._getframe(2), "elsewhere"
    while frame is not None:
        name = frame.f_code.co_filename
        for package in ("/alphatoken/", "/site-packages/"):
            if package in name and "/site-packages/torch/" not in name:
                line = f"{name.split(package)[-1]}:{frame.f_code.co_name}"
                if package == "/alphatoken/":
                    return line
                other = line if other == "elsewhere" else other
        frame = frame.f_back
    return other


class _Kernels(TorchDispatchMode):
    """What is dispatched below autograd."""

    def __init__(self, counts: Launches) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in _ALLOCATIONS or name in _NO_KERNEL:
            return result
        if name in _WAITS or (name.startswith("index") and any(map(_boolean, args[1]))):
            self.counts.waits[_place()] += 1
        if name != "_local_scalar_dense":
            self.counts.kernels[_place()] += 1
        return result


def _boolean(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


class _Reads(TorchFunctionMode):
    """Tensors that are read whole, which the dispatcher of a CPU does not see."""

    def __init__(self, counts: Launches) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS and args and isinstance(args[0], Tensor):
            self.counts.waits[_place()] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def as_accelerator() -> Iterator[None]:
    """Inside, the processor is given what an accelerator would be given.

    Defaults of a CPU launch more than an accelerator's would, or wait where that would not:
    optimizers and clipping without ``foreach``, fingerprints of weights in small blocks, and what
    this library does where ``on_host`` is true.
    """
    foreach = _foreach_utils._get_foreach_kernels_supported_devices
    defaults = {foreach: [*foreach(), "cpu"], devices.on_host: False}
    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            for default, value in defaults.items():
                if vars(module).get(default.__name__) is default:
                    patched = mock.patch.object(module, default.__name__, return_value=value)
                    stack.enter_context(patched)
        stack.enter_context(mock.patch.object(fingerprint, "_JOINED_ON_CPU", fingerprint._JOINED))
        yield


@contextmanager
def counting(counts: Launches) -> Iterator[Launches]:
    """Inside, everything is counted as an accelerator would be given it.

    As in a new process: kernels of attention are compared with their calls after the same numbers
    of calls.
    """
    attention._ATTENDED_AS_CALLED.clear()
    with ExitStack() as stack:
        stack.enter_context(as_accelerator())
        stack.enter_context(_Reads(counts))
        stack.enter_context(_Kernels(counts))
        yield counts
