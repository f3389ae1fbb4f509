"""The one place where transformers' registries of functions are changed, and put back.

There is one for attention and one for mixtures of experts. A registry has one function a name for
the whole process, while any number of models may be observed at a time, in any order and from
several threads. So the entry is replaced once, by a ``Dispatch`` that knows which modules are
overridden and by what. Each override adds itself and takes only itself away, and the last to leave
puts back what was there. Had each override replaced the entry by itself, one that leaves early
would have taken a later one's entry away.

An entry that somebody else puts on top of ours meanwhile stays where it is. As long as it calls
the one that it found there, which is ours, the overrides go on working.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from alphatoken.errors import ModelError, UnsupportedError
from alphatoken.model.batch import documents_in_rows
from alphatoken.model.experts import ExpertsListener, routed_experts
from alphatoken.model.protocol import AttentionCall, AttentionOverride, NativeAttention

_MISSING: Any = object()  # stands for "no entry": None could be an entry
_LOCK = threading.Lock()  # held while contexts are entered and left, never during a forward
# One override that is active, and the thread that entered it. Compared by identity, since one
# override may be entered by two contexts, which leave one by one.
_Entered = tuple[Any, int]


class Dispatch:
    """A registry entry that sends the calls of overridden modules through their overrides."""

    registry: Any = ALL_ATTENTION_FUNCTIONS
    what = "attention"

    def __init__(self, name: str, before: Any) -> None:
        self.name, self.before = name, before
        self.active: dict[nn.Module, tuple[_Entered, ...]] = {}

    def kernel_of(self, module: nn.Module) -> Callable[..., Any]:
        """The kernel that would run without this entry."""
        kernel: Callable[..., Any] = self.before
        return self.own_kernel(module) if kernel is _MISSING else kernel

    def own_kernel(self, module: nn.Module) -> Callable[..., Any]:
        """The kernel where nobody has put an entry into this instance of the registry."""
        # transformers then takes its library-wide one, and for "eager", which has none, the
        # function of the model's own file.
        if self.name == "eager":
            return _eager_function(module)
        kernel: Callable[..., Any] = self.registry._global_mapping[self.name]
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
        """Run a call of attention through the overrides of its module."""
        kernel, entered = self.kernel_of(module), self.active.get(module, ())
        # Models that nobody observes run through this entry too, and must not notice it.
        if not entered:
            plain: tuple[Tensor, Tensor | None] = kernel(module, query, key, value, *args, **kwargs)
            return plain
        call, native, weights = _translated(kernel, module, (query, key, value), args, kwargs)
        run = native
        for override, _ in entered:  # the last one entered is outermost, as contexts nest
            run = _through(override, call, run)
        # The registry's functions return (b, t, h, d); ours, as all of the core, (b, h, t, d).
        # Contiguous, as those of the registry are: some models view what they get.
        return run(query, key, value).transpose(1, 2).contiguous(), weights[0]


class ExpertsDispatch(Dispatch):
    """The same for mixtures of experts: their rows are shown to all listeners."""

    registry = ALL_EXPERTS_FUNCTIONS
    what = "mixtures of experts"

    def own_kernel(self, module: nn.Module) -> Callable[..., Any]:
        """The library's function of the name, or the forward of the mixture's class."""
        own = _own_experts(module)
        kernel: Callable[..., Any] = self.registry._global_mapping.get(self.name, own)
        return kernel

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Show the rows of an overridden mixture to its listeners."""
        entered = self.active.get(module, ())
        # Without a graph no backward comes, and the model's own kernel is faster. It has no forward
        # mode.
        if not entered or not (
            torch.is_grad_enabled() or _has_tangent(module, *args, *kwargs.values())
        ):
            return self.kernel_of(module)(module, *args, **kwargs)
        if getattr(module, "_is_expert_parallel", False):
            raise UnsupportedError(
                "experts that are spread over processes cannot be captured",
                got=type(module).__qualname__,
                why="no process sees all rows of a token",
                remedy="parameters='linears' with uncovered='skip', or a layout in which each "
                "process has all experts",
            )
        bound = inspect.signature(_own_experts(module)).bind(module, *args, **kwargs)
        _, hidden, experts, weights = bound.arguments.values()
        listeners = [listener for listener, _ in entered]
        return routed_experts(module, hidden, experts, weights, listeners)


def _has_tangent(module: nn.Module, *tensors: Any) -> bool:
    """Whether a tensor of the mixture, or one that it is called with, has a tangent."""
    every = (*tensors, *module.parameters(recurse=False))
    floating = (t for t in every if isinstance(t, Tensor) and t.is_floating_point())
    return any(forward_ad.unpack_dual(t).tangent is not None for t in floating)


def _own_experts(module: nn.Module) -> Callable[..., Any]:
    """The forward of the mixture's own class, which takes (hidden, experts, weights)."""
    # transformers' decorator puts the dispatch around it.
    own: Callable[..., Any] = inspect.unwrap(type(module).forward)
    return own


@contextmanager
def dispatched(
    name: str,
    modules: Sequence[nn.Module],
    override: AttentionOverride | ExpertsListener,
    *,
    kind: type[Dispatch] = Dispatch,
) -> Iterator[None]:
    """Reroute calls of ``modules``; contexts may be left in any order.

    Overrides of one module are called one within the other, the last one entered outermost.
    Listeners of experts are shown the rows of forwards with gradients.

    Args:
        name: the implementation of attention (of experts) in their model.
        modules: each of them once or more.
        override: what their calls go through, or a listener of experts.
        kind: ``Dispatch`` for calls of attention, ``ExpertsDispatch`` for mixtures of experts.

    Raises:
        ModelError: another thread has an override on one of them.
        UnsupportedError: inside, of experts that are spread over processes.
    """
    chosen, entered = tuple(dict.fromkeys(modules)), (override, threading.get_ident())
    with _LOCK:
        _require_own_thread(name, chosen, kind)
        dispatch = _installed(name, kind)
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
            _remove_idle(name, kind)


def is_understood(name: str) -> bool:
    """True if calls of this attention implementation carry all that its weights depend on."""
    # Those of ``sdpa`` and ``eager`` do, and those that transformers sends to a kernel of the
    # flash-attn packages or of the hub. Others may encode the mask elsewhere.
    function = _entry(name, Dispatch)
    while isinstance(function, Dispatch):
        function = function.before
    if function is _MISSING:
        function = ALL_ATTENTION_FUNCTIONS._global_mapping.get(name)
    return name in ("sdpa", "eager") or function is flash_attention_forward


def _entry(name: str, kind: type[Dispatch]) -> Any:
    return kind.registry._local_mapping.get(name, _MISSING)


def _installed(name: str, kind: type[Dispatch]) -> Dispatch:
    """The dispatch on top of the registry; one is put there unless the top entry is one already."""
    top = _entry(name, kind)
    if isinstance(top, Dispatch):
        return top
    dispatch = kind(name, top)
    kind.registry[name] = dispatch
    return dispatch


def _remove_idle(name: str, kind: type[Dispatch]) -> None:
    """Remove idle dispatches from the top of the registry, down to an entry that others put in."""
    # There can be several: where somebody's entry lay on ours, a later override put a second
    # dispatch on top of theirs. An idle one further down stays, and only passes calls on.
    while isinstance(top := _entry(name, kind), Dispatch) and not top.active:
        if top.before is _MISSING:
            del kind.registry[name]
        else:
            kind.registry[name] = top.before


def _require_own_thread(name: str, modules: Sequence[nn.Module], kind: type[Dispatch]) -> None:
    top = _entry(name, kind)
    active = top.active if isinstance(top, Dispatch) else {}
    foreign = [
        module
        for module in modules
        if any(thread != threading.get_ident() for _, thread in active.get(module, ()))
    ]
    if foreign:
        raise ModelError(
            f"another thread has overridden the {kind.what} of this model",
            got=f"{len(foreign)} of its modules, such as {type(foreign[0]).__qualname__}",
            why="each would take the other's forward passes for its own",
            remedy="score from one thread at a time, or give each thread a copy of the model",
        )


def _eager_function(module: nn.Module) -> Callable[..., Any]:
    # Each modeling file has a function of this name, and the models of the family look it up there.
    # A subclass in the user's own file inherits from a class whose file has it.
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if callable(function):
            return function  # type: ignore[no-any-return]
    raise UnsupportedError(
        "the model's module has no eager attention function",
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
    kernel: Callable[..., Any],
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[AttentionCall, NativeAttention, list[Tensor | None]]:
    """The call in the canonical layout, the kernel with all other arguments bound, and a list.

    The kernel's attention weights appear in it after it has run (eager kernels return them).
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
    # To an sdpa kernel no mask means causal attention, as to ``AttentionCall``, unless the module
    # says otherwise. An eager function masks nothing then, and lets every query see every key.
    causal = named.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    eager = getattr(kernel, "__name__", "") == "eager_attention_forward"
    if mask is None and (eager or not causal) and kernel is not flash_attention_forward:
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
    """(b, t) sequence of each position, -1 for padding; None where each row is one sequence."""
    # As transformers' flash wrapper does, the first of these that there is: the mask of real
    # tokens, each row then being one sequence; bounds of sequences in the flattened batch;
    # positions that start again, in a batch of one row.
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
    return documents_in_rows(bounds.to(query.device), batch, length)
