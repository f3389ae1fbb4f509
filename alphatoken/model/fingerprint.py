"""A digest of all that values depend on, by which changes are noticed.

Version counters do not tell: fused optimizers and writes through ``.data`` leave them as they are.
So every number of every parameter and buffer is read, into 64 bits a tensor: one pass over the
weights, about what a forward of one token reads. Samples would be cheaper, and would miss a step
that rounding lets arrive at a few weights only. What a model does besides is in plain attributes of
its modules (an adapter's scaling, which adapter is active, the attention's implementation, a tensor
that is no buffer) and in its hooks. They are read through whatever holds them: collections,
configurations, objects, functions.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cache, partial
from hashlib import blake2b
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from alphatoken.errors import AlphaTokenWarning, warn_caller

# Attributes of a module that no value depends on, or that are read apart: weights, hooks, and the
# mode, since values are taken with dropout off.
_PASSING = frozenset(
    (*vars(nn.Module()), "gradient_checkpointing", "_output_capturing_hooks_installed")
)
# Where transformers' hooks are from that note hidden states and router logits for the outputs; it
# puts them there inside the first forward that is asked for them.
_READING = "transformers.utils.output_capturing"

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def trained_of(model: nn.Module) -> tuple[object, ...]:
    """Modules and parameters by identity, and which of them train: what a scope is chosen from."""
    named = model.named_parameters(remove_duplicate=False)
    return (
        tuple((name, id(p), p.requires_grad) for name, p in named),
        tuple(map(id, model.modules())),
    )


def numbers_of(tensors: Iterable[Tensor]) -> tuple[object, ...]:
    """64 bits of each large tensor and of small ones together, by which a change shows.

    The change of one number always shows, others but for chance. With the bytes as 64-bit words
    w_(j,i), i the lane, and odd random factors r_i, a block of rows j is
    ``sum_i r_i sum_j w_(j,i) mod 2^64``. Two words of one lane and one block that exchange places
    do not show. Tensors without storage (``meta``) count by their version.
    """
    digests: list[object] = []
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        for part in _parts(tensor.detach()):
            if part.is_meta:
                digests.append((id(tensor), _version(tensor)))
            else:
                words = _words(part)
                by_kind.setdefault((words.device, words.dtype), []).append(words)
    for (device, _), alike in by_kind.items():
        most = _JOINED_ON_CPU if device.type == "cpu" else _JOINED
        # One transfer, since each of them waits for the device.
        digests.append(tuple(torch.stack([_digest(w) for w in _joined(alike, most)]).tolist()))
    return tuple(digests)


# Words that are copied side by side, to start fewer kernels: a digest takes a dozen of them, and a
# model has hundreds of weights.
_JOINED, _JOINED_ON_CPU = 2**22, 2**15


def _joined(words: Iterable[Tensor], most: int) -> Iterator[Tensor]:
    """Neighbours as one tensor while they have at most so many words; a longer one as it is."""
    some: list[Tensor] = []
    total = 0
    for one in words:
        if some and total + len(one) > most:
            yield torch.cat(some) if len(some) > 1 else some[0]
            some, total = [], 0
        some.append(one)
        total += len(one)
    yield torch.cat(some) if len(some) > 1 else some[0]


Written = Mapping[str, frozenset[str]]
"""Places that forwards of a model write to, and those below them that were there before."""
_NONE: Written = MappingProxyType({})


def settings_of(model: nn.Module, written: Written = _NONE) -> tuple[object, ...]:
    """Plain attributes of all modules, whatever they hold, and hooks of others than us.

    The places of ``written_between`` in ``written`` are not read; of what a forward adds to, such
    as a dict, the rest is.
    """
    modules = dict(model.named_modules())
    plain, tensors = _read(modules, written)
    weights = {id(p): p for one in modules.values() for p in one._parameters.values()}
    return (
        [(name, type(module), foreign_hooks(module)) for name, module in modules.items()],
        plain,
        [(place, one.shape, one.dtype) for place, one in tensors.items()],
        numbers_of(tensors.values()),
        [tuple(p._backward_hooks) for p in weights.values() if p is not None and p._backward_hooks],
    )


def stamps_of(model: nn.Module) -> dict[str, object]:
    """Place to value of each plain attribute, or to identity and version of a tensor there."""
    plain, tensors = _read(dict(model.named_modules()))
    return plain | {place: (id(one), _version(one)) for place, one in tensors.items()}


def written_between(before: Mapping[str, object], after: Mapping[str, object]) -> Written:
    """Places whose value differs in two of ``stamps_of``, with forwards of the model between."""
    changed = [place for place, one in before.items() if place in after and after[place] != one]
    return {at: frozenset(p for p in before if p.startswith(f"{at}.")) for at in changed}


_PLAIN = (
    bool, int, float, complex, str, bytes, bytearray, array, Decimal, Fraction, np.generic, range,
    slice, Enum, torch.dtype, torch.device, torch.Size,
)  # fmt: skip
_MANY = 256
"""Entries from which a collection of plain values is one place."""
_OBJECTS = 10_000
"""Objects and collections that are opened, and ten more for each module."""


def _read(
    modules: Mapping[str, nn.Module], written: Written = _NONE
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Place to value of what plain attributes and foreign hooks lead to, and the tensors there."""
    plain: dict[str, object] = {}
    tensors: dict[str, Tensor] = {}
    # Modules are gone through here, and their parameters and buffers are read apart.
    registered = {id(module) for module in modules.values()}
    for module in modules.values():
        registered.update(map(id, module._parameters.values()), map(id, module._buffers.values()))
    opened: dict[int, object] = {}  # held, so that no identity is given away meanwhile
    most = _OBJECTS + 10 * len(modules)
    for name, module in modules.items():
        hooks = {f"{kind} {key}": getattr(module, kind)[key] for kind, key in foreign_hooks(module)}
        todo = list(_parts_of(name, _attributes(module) | hooks))
        while todo:
            place, value = todo.pop()
            if value is None or id(value) in registered or id(value) in opened:
                continue
            own = _content(value)
            if isinstance(value, Tensor):
                tensors |= {} if place in written else {place: value}
            elif own is not None:
                plain |= {} if place in written else {place: own}
            else:
                opened[id(value)] = value
                parts = _parts_of(place, value)
                if place in written:
                    todo += [part for part in parts if part[0] in written[place]]
                else:
                    plain[place] = _kind(value)
                    todo += parts
            if len(opened) > most:
                warn_caller(
                    f"the attribute '{place}' leads to more than {most} objects, and their numbers "
                    "are not read: call scorer.refresh() where a value depends on one that changed",
                    AlphaTokenWarning,
                )
                return plain, tensors
    return plain, tensors


def _content(value: object) -> object:
    """All that a plain value or an array of numbers says; None of an object with parts."""
    if isinstance(value, _PLAIN):
        return repr(value)  # a NaN equals itself as text
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest = blake2b(value.tobytes(), digest_size=16).digest()
        return value.shape, str(value.dtype), digest
    return None


def _attributes(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name not in _PASSING}


def _kind(value: object) -> object:
    """What stands for an object beside its parts."""
    if callable(value) or isinstance(value, ModuleType):  # another one does something else
        return type(value), id(value)
    if isinstance(value, (list, tuple, deque, dict, set, frozenset, np.ndarray)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value)


def _parts_of(place: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Places and values of what an object holds; of one that cannot be opened, nothing."""
    parts: Mapping[Any, Any] = {}
    if isinstance(value, (dict, MappingProxyType)):
        parts = value
    elif isinstance(value, Set):
        parts = {"": sorted(map(repr, value))}
    elif isinstance(value, (list, tuple, deque)):
        parts = dict(enumerate(value))
    elif isinstance(value, np.ndarray):  # of objects
        parts = dict(enumerate(value.flat))
    elif isinstance(value, partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
    elif isinstance(value, MethodType):
        parts = {"self": value.__self__, "func": value.__func__}
    elif isinstance(value, FunctionType):
        parts = _of_function(value)
    elif isinstance(value, nn.Module):  # one that is registered nowhere
        registered = (value._parameters, value._buffers, value._modules)
        parts = _attributes(value) | {k: v for entries in registered for k, v in entries.items()}
    # A step's state is no setting of a forward.
    elif not isinstance(value, (type, ModuleType, torch.optim.Optimizer)):
        slots = (s for c in type(value).__mro__ for s in _listed(vars(c).get("__slots__", ())))
        parts = {s: getattr(value, s) for s in slots if hasattr(value, s)}
        parts = parts | getattr(value, "__dict__", {})
    if isinstance(value, (dict, Set, list, tuple, deque)) and hasattr(value, "__dict__"):
        parts = {**parts, **{f" {name}": one for name, one in vars(value).items()}}
    if len(parts) > _MANY and all(isinstance(one, _PLAIN) for one in parts.values()):
        return [(f"{place}.*", repr(parts))]
    return [(f"{place}.{key}", one) for key, one in parts.items()]


def _listed(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _of_function(function: FunctionType) -> dict[str, object]:
    """Defaults of a function, and the variables of others that it uses."""
    names = function.__code__.co_freevars
    cells = dict(zip(names, function.__closure__ or (), strict=False))
    defaults = {"defaults": function.__defaults__, "keywords": function.__kwdefaults__}
    defaults |= {f" {name}": one for name, one in vars(function).items() if name != "__wrapped__"}
    return defaults | {name: cell.cell_contents for name, cell in cells.items() if _filled(cell)}


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that has no value yet
        return False


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def foreign_hooks(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """Kind and number of a module's hooks, but for ours and those that outputs are read by."""
    return tuple(
        (kind, key)
        for kind in _HOOKS
        for key, hook in getattr(module, kind).items()
        if not _is_ours(hook)
    )


def _is_ours(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)  # of a ``functools.partial``
    place = str(getattr(hook, "__module__", ""))
    return place.partition(".")[0] == "alphatoken" or place == _READING


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of: itself, or those of a quantised or spread one."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _parts(getattr(tensor, name))


@torch.no_grad()
def _digest(words: Tensor) -> Tensor:
    factors = _factors(words.device)
    count = len(words) // _LANES
    blocks, rest = count // _ROWS, words[count * _LANES :]
    rows = words[: count * _LANES].view(count, _LANES)
    totals = [(rest * factors[: len(rest)]).sum(0, keepdim=True)]
    if count:
        summed = rows[: blocks * _ROWS].view(blocks, _ROWS, _LANES).sum(1)
        last = rows[blocks * _ROWS :].sum(0, keepdim=True)
        totals += [(part * factors).sum(1) for part in (summed, last)]
    total = torch.cat(totals)
    return (total * _powers(words.device, len(total))).sum()


# Words that are multiplied by factors of their own, and such rows that are added up before:
# multiplying every word takes five times as long as adding them. A prime number of lanes, so that
# rows of a weight that change places come to lie in other lanes.
_LANES, _ROWS = 8191, 32


def _words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as integers, eight of them in each where it can be had so."""
    flat = tensor.reshape(-1)
    if flat.element_size() == 8:  # the sign of a whole word is lost in an even number of them
        return flat.view(torch.int32)
    each = 8 // flat.element_size()
    if each and flat.numel() % each == 0 and flat.storage_offset() % each == 0:
        return flat.view(torch.int64)
    return flat.view(torch.uint8)


@cache
def _factors(device: torch.device) -> Tensor:
    """Odd 64-bit numbers, one a lane."""
    generator = torch.Generator().manual_seed(_LANES)
    return (torch.randint(-(2**62), 2**62, (_LANES,), generator=generator) * 2 + 1).to(device)


@cache
def _powers(device: torch.device, count: int) -> Tensor:
    """Powers of an odd number, so that no block is lost among those that follow."""
    odd = torch.full((count,), 6364136223846793005, dtype=torch.int64)
    return odd.cumprod(0).to(device)
