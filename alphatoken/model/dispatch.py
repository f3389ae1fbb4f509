"""The one place where transformers' attention registry is changed, and put back.

The registry has one function a name for the whole process, while any number of models may be
observed at a time, in any order and from several threads. So the entry is replaced once, by a
``_Dispatch`` that knows which modules are overridden and by what. Each override adds itself and
takes only itself away, and the last to leave puts back what was there. Had each override replaced
the entry by itself, one that leaves early would have taken a later one's entry away.

An entry that somebody else puts on top of ours meanwhile stays where it is. As long as it calls
the one that it found there, which is ours, the overrides go on working.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from alphatoken.errors import ModelError, UnsupportedError
from alphatoken.model.protocol import AttentionCall, AttentionOverride, NativeAttention

__all__ = ["dispatched", "is_understood"]

Kernel = Callable[..., tuple[Tensor, Tensor | None]]
_MISSING: Any = object()  # stands for "no entry": None could be an entry
_LOCK = threading.Lock()  # held while contexts are entered and left, never during a forward


@dataclass(frozen=True, eq=False)
class _Entered:
    """One override that is active, and the thread that entered it.

    Compared by identity, since one override may be entered by two contexts, which leave one by one.
    """

    override: AttentionOverride
    thread: int


class _Dispatch:
    """A registry entry that sends the calls of overridden modules through their overrides."""

    def __init__(self, name: str, before: Any) -> None:
        self.name, self.before = name, before
        self.active: dict[nn.Module, tuple[_Entered, ...]] = {}

    def kernel_of(self, module: nn.Module) -> Kernel:
        """What would run if this entry were not there."""
        if self.before is not _MISSING:
            return self.before  # type: ignore[no-any-return]
        # Nobody had put an entry into this instance of the registry: transformers then takes its
        # library-wide one, and for "eager", which has none, the function of the model's own file.
        if self.name == "eager":
            return _eager_function(module)
        library: dict[str, Any] = ALL_ATTENTION_FUNCTIONS._global_mapping
        kernel: Kernel = library[self.name]
        return kernel

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        kernel, entered = self.kernel_of(module), self.active.get(module, ())
        # Models that nobody observes run through this entry too, and must not notice it.
        if not entered:
            return kernel(module, query, key, value, *args, **kwargs)
        call, native, weights = _translated(kernel, module, (query, key, value), args, kwargs)
        run = native
        for one in entered:  # the last one entered is outermost, as contexts nest
            run = _through(one.override, call, run)
        # The registry's functions return (b, t, h, d); ours, as all of the core, (b, h, t, d).
        return run(query, key, value).transpose(1, 2), weights[0]


@contextmanager
def dispatched(
    name: str, modules: Sequence[nn.Module], override: AttentionOverride
) -> Iterator[None]:
    """Reroute the attention calls of ``modules``; contexts may be left in any order.

    Overrides of one module are called one within the other, the last one entered outermost.

    Args:
        name: the attention implementation of their model.
        modules: each of them once or more.
        override: what their calls go through.

    Raises:
        ModelError: another thread has an override on one of them.
    """
    chosen, entered = tuple(dict.fromkeys(modules)), _Entered(override, threading.get_ident())
    with _LOCK:
        _require_own_thread(name, chosen)
        dispatch = _installed(name)
        for module in chosen:
            dispatch.active[module] = (*dispatch.active.get(module, ()), entered)
    try:
        yield
    finally:
        # ``dispatch`` is the one that was entered; by now another one may be on top.
        with _LOCK:
            for module in chosen:
                left = tuple(one for one in dispatch.active[module] if one is not entered)
                if left:
                    dispatch.active[module] = left
                else:
                    del dispatch.active[module]
            _remove_idle(name)


def is_understood(name: str) -> bool:
    """Whether calls of this attention implementation carry all that its weights depend on.

    Those of ``sdpa`` and ``eager`` do, and those that transformers sends to a kernel of the
    flash-attn packages or of the hub. Others may encode the mask elsewhere.
    """
    function = _entry(name)
    while isinstance(function, _Dispatch):
        function = function.before
    if function is _MISSING:
        function = ALL_ATTENTION_FUNCTIONS._global_mapping.get(name)
    return name in ("sdpa", "eager") or function is flash_attention_forward


def _entry(name: str) -> Any:
    return ALL_ATTENTION_FUNCTIONS._local_mapping.get(name, _MISSING)


def _installed(name: str) -> _Dispatch:
    """The dispatch on top of the registry; one is put there unless the top entry is one already."""
    top = _entry(name)
    if isinstance(top, _Dispatch):
        return top
    dispatch = _Dispatch(name, top)
    ALL_ATTENTION_FUNCTIONS[name] = dispatch
    return dispatch


def _remove_idle(name: str) -> None:
    """Remove idle dispatches from the top of the registry, down to an entry that others put in."""
    # There can be several: where somebody's entry lay on ours, a later override put a second
    # dispatch on top of theirs. An idle one further down stays, and only passes calls on.
    while isinstance(top := _entry(name), _Dispatch) and not top.active:
        if top.before is _MISSING:
            del ALL_ATTENTION_FUNCTIONS[name]
        else:
            ALL_ATTENTION_FUNCTIONS[name] = top.before


def _require_own_thread(name: str, modules: Sequence[nn.Module]) -> None:
    top = _entry(name)
    active = top.active if isinstance(top, _Dispatch) else {}
    foreign = [
        module
        for module in modules
        if any(one.thread != threading.get_ident() for one in active.get(module, ()))
    ]
    if foreign:
        raise ModelError(
            "another thread has overridden the attention of this model",
            got=f"{len(foreign)} of its modules, such as {type(foreign[0]).__qualname__}",
            why="each would take the other's forward passes for its own",
            remedy="score from one thread at a time, or give each thread a copy of the model",
        )


def _eager_function(module: nn.Module) -> Kernel:
    # Each modeling file has a function of this name, and the models of the family look it up there.
    # A subclass in the user's own file inherits from a class whose file has it.
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if callable(function):
            return function  # type: ignore[no-any-return]
    raise UnsupportedError(
        "no eager attention function beside this module",
        got=type(module).__qualname__,
        remedy="use attn_implementation='sdpa', or estimator='path'",
    )


def _through(
    override: AttentionOverride, call: AttentionCall, native: NativeAttention
) -> NativeAttention:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return override(replace(call, query=query, key=key, value=value), native)

    return run


def _translated(
    kernel: Kernel,
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[AttentionCall, NativeAttention, list[Tensor | None]]:
    """One call of the registry's interface, translated for overrides.

    Returns the call in the canonical layout, the kernel with all other arguments bound, and a list
    in which the kernel's attention weights appear after it has run (eager kernels return them).
    """
    # Models pass the mask by position or by name, and kernels differ in what they name; binding to
    # the kernel's own signature gives each argument the name under which the kernel reads it.
    bound = inspect.signature(kernel).bind_partial(module, *tensors, *args, **kwargs)
    named = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    if named.get("position_bias") is not None:
        raise UnsupportedError(
            "attention with a position bias is not covered",
            got=type(module).__qualname__,
            remedy="estimator='path'",
        )
    # A function that a user has put around the kernel may name nothing, and take it as ``*args``.
    mask = named.get("attention_mask", args[0] if args else None)
    query = tensors[0]
    # To an sdpa kernel no mask means causal attention, as to ``AttentionCall``. An eager function
    # masks nothing then, and lets every query see every key.
    if mask is None and getattr(kernel, "__name__", "") == "eager_attention_forward":
        mask = torch.ones(
            1, 1, query.shape[2], query.shape[2], dtype=torch.bool, device=query.device
        )
    scale = named.get("scaling")
    flash, documents, window = kernel is flash_attention_forward, None, None
    if flash:
        mask, documents = None, _documents(module, named, query)
        window = named.get("sliding_window")
        if window is not None and window < 1:  # flash-attn's "none" is -1
            window = None
    call = AttentionCall(
        module,
        *tensors,
        mask=mask,
        scale=float(scale) if scale is not None else query.shape[-1] ** -0.5,
        softcap=named.get("softcap"),
        sinks=named.get("s_aux"),
        dropout=float(named.get("dropout") or 0.0),
        documents=documents,
        window=window,
        flash=flash,
    )
    weights: list[Tensor | None] = [None]

    def native(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # An override may call this with other tensors; all other arguments stay the model's.
        output, weights[0] = kernel(module, q, k, v, *args, **kwargs)
        transposed: Tensor = output.transpose(1, 2)
        return transposed

    return call, native, weights


def _documents(module: nn.Module, named: Mapping[str, Any], query: Tensor) -> Tensor | None:
    """(b, t) sequence of each position, -1 for padding, as transformers' flash wrapper reads it.

    It takes the first of these that there is: the mask of real tokens, each row then being one
    sequence; bounds of sequences in the flattened batch; positions that start again, in a batch of
    one row. None: each row is one sequence.
    """
    causal = named.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UnsupportedError(
            "attention that is not causal is not covered",
            got=type(module).__qualname__,
            remedy="attn_implementation='sdpa', or estimator='path'",
        )
    batch, _, length, _ = query.shape
    mask: Tensor | None = named.get("attention_mask")
    if mask is not None:
        return mask.long() - 1
    bounds, positions = named.get("cu_seq_lens_q"), named.get("position_ids")
    keys = ("cu_seq_lens_k", "max_length_q", "max_length_k")
    if bounds is None or any(named.get(key) is None for key in keys):
        if positions is None or batch != 1 or length == 1:
            return None
        steps = torch.arange(length, device=positions.device) + positions.min()
        if bool((steps == positions).all()):
            return None
        bounds = prepare_fa_kwargs_from_position_ids(positions)[0][0]
    flat = torch.arange(batch * length, device=query.device)
    bounds = bounds.to(query.device)
    documents = torch.bucketize(flat, bounds[1:-1], right=True)
    outside = (flat < bounds[0]) | (flat >= bounds[-1])
    rows = documents.masked_fill(outside, -1).view(batch, length)
    if batch > 1 and bool(((rows[1:, 0] == rows[:-1, -1]) & (rows[1:, 0] >= 0)).any()):
        raise UnsupportedError(
            "a packed sequence reaches over two rows of the batch",
            got=f"{batch} rows of {length} positions",
            why="values are taken row by row",
            remedy="one row, as transformers' and TRL's collators for packing give it",
        )
    return rows
