"""A digest of all that values depend on, by which changes are noticed.

Version counters do not tell: fused optimizers and writes through ``.data`` leave them as they are.
So every number of every parameter and buffer is read, into 64 bits a tensor: one pass over the
weights, about what a forward of one token reads. Samples would be cheaper, and would miss a step
that rounding lets arrive at a few weights only. What a model does besides is in plain attributes of
its modules (an adapter's scaling, which adapter is active, the attention's implementation) and in
its hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["foreign_hooks", "numbers_of", "settings_of", "trained_of"]

_PASSING = frozenset(
    (*vars(nn.Module()), "gradient_checkpointing", "_output_capturing_hooks_installed")
)
"""Attributes of a module that no value depends on, or that are read apart: weights, hooks, and
the mode, since values are taken with dropout off."""
_READING = "transformers.utils.output_capturing"
"""Where transformers' hooks are from that note hidden states and router logits for the outputs."""

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
    found: list[object] = []
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        for part in _parts(tensor.detach()):
            if part.is_meta:
                found.append((id(tensor), tensor._version))
            else:
                words = _words(part)
                by_kind.setdefault((words.device, words.dtype), []).append(words)
    for (device, _), alike in by_kind.items():
        most = _JOINED_ON_CPU if device.type == "cpu" else _JOINED
        # One transfer, since each of them waits for the device.
        found.append(tuple(torch.stack([_digest(w) for w in _joined(alike, most)]).tolist()))
    return tuple(found)


_JOINED, _JOINED_ON_CPU = 2**22, 2**15
"""Words that are copied side by side, to start fewer kernels: a digest takes a dozen of them, and
a model has hundreds of weights."""


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


def settings_of(model: nn.Module) -> tuple[object, ...]:
    """Plain attributes of all modules and of their configurations, and hooks of others than us."""
    found: list[object] = []
    configs: dict[int, Any] = {}
    for name, module in model.named_modules():
        attributes = {k: v for k, v in vars(module).items() if k not in _PASSING}
        config = attributes.pop("config", None)
        if config is not None:
            configs[id(config)] = config
        # A forward that was put into the instance hides the method of its class.
        forward = id(attributes.get("forward"))
        found.append((name, type(module), forward, foreign_hooks(module), _plain(attributes)))
    found += [_plain(vars(c)) for c in configs.values() if hasattr(c, "__dict__")]
    weights = (p._backward_hooks for p in model.parameters())
    return (*found, tuple(tuple(hooks) for hooks in weights if hooks))


def foreign_hooks(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """Kind and number of the hooks on a module that neither we put there nor outputs are read by.

    transformers puts its own there inside the first forward that is asked for them.
    """
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


def _plain(value: object) -> object:
    """Numbers, names, and collections of them, in comparable form; None for all else."""
    if isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)  # a NaN equals itself as text
    if isinstance(value, Tensor):
        whole = value.numel() == 1 and not value.is_meta
        return repr(value.detach().item()) if whole else None
    if isinstance(value, Mapping):
        items = ((str(key), _plain(item)) for key, item in value.items())
        return tuple((key, item) for key, item in items if item not in (None, ()))
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(str, map(_plain, value))))
    # A configuration inside another one, as of the text part of a larger model.
    nested = hasattr(value, "to_dict") and not isinstance(value, type)
    return _plain(vars(value)) if nested and hasattr(value, "__dict__") else None


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of: itself, or those of a quantised or spread one."""
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


_LANES, _ROWS = 8191, 32
"""Words that are multiplied by factors of their own, and such rows that are added up before.

Multiplying every word takes five times as long as adding them. A prime number of lanes: rows of a
weight that change places come to lie in other lanes.
"""


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
