"""The one place where the functions of transformers' gated delta nets are changed, and put back.

Such a layer calls a short convolution and the delta rule by their names in its modeling file, and
hands them no module. So the names are replaced once, by a ``_Reroute`` each, and a hook on every
overridden layer tells the thread which layer runs. Calls outside of one, or in another thread, pass
through. As in ``dispatch``, each override adds itself and takes only itself away, and the last to
leave puts back what was there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from alphatoken.errors import UnsupportedError
from alphatoken.model.protocol import (
    ConvolutionCall,
    ConvolutionOverride,
    DeltaCall,
    DeltaOverride,
    NativeConvolution,
    NativeDelta,
)

_NETS = (
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
    "Qwen3NextGatedDeltaNet",
    "OlmoHybridGatedDeltaNet",
)
"""Classes that call the functions below, and mix positions in no other way."""
_CONVOLUTION = "causal_conv1d_fn"
# The second steps by one token, from the state of a cache.
_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_PACKED = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
_LOCK = threading.Lock()  # held while contexts are entered and left, never during a forward
_RUNNING = threading.local()  # the overridden layers that this thread is in, innermost last
# One override that is active; compared by identity, as one may be entered twice.
_Entered = tuple[ConvolutionOverride, DeltaOverride]
_ACTIVE: dict[nn.Module, tuple[_Entered, ...]] = {}


class _Reroute:
    """Stands in a modeling file for one of its functions."""

    def __init__(self, before: Callable[..., Any], translate: Callable[..., Any]) -> None:
        self.before, self.translate, self.users = before, translate, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = getattr(_RUNNING, "modules", ())
        if not running:
            return self.before(*args, **kwargs)
        # What somebody has put on top of another of these may end in that one, which then passes
        # the call on: it has been through the overrides.
        _RUNNING.modules = ()
        try:
            return self.translate(running[-1], self.before, *args, **kwargs)
        finally:
            _RUNNING.modules = running


def _file_of(module: nn.Module) -> dict[str, Any] | None:
    """The names of the modeling file that defines the layer; a subclass inherits from there."""
    for cls in type(module).__mro__:
        if cls.__name__ in _NETS:
            return vars(sys.modules[cls.__module__])
    return None


def is_delta_net(module: nn.Module) -> bool:
    """True if the layer's convolution and rule are called by names that can be rerouted."""
    names = _file_of(module)
    return names is not None and all(callable(names.get(n)) for n in (_CONVOLUTION, *_RULES))


@contextmanager
def rerouted(
    modules: Sequence[nn.Module], convolution: ConvolutionOverride, rule: DeltaOverride
) -> Iterator[None]:
    """Send both calls of each of ``modules`` through an override; contexts may leave in any order.

    Overrides of one module are called one within the other, the last one entered outermost.
    """
    chosen, entered = tuple(dict.fromkeys(modules)), (convolution, rule)
    with ExitStack() as stack:
        stack.enter_context(_entering(chosen, entered))
        for module in chosen:
            # First in, last out: whatever else is hooked to the layer runs outside.
            stack.callback(module.register_forward_pre_hook(_enter).remove)
            stack.callback(module.register_forward_hook(_leave, always_call=True).remove)
        yield


@contextmanager
def _entering(chosen: Sequence[nn.Module], entered: _Entered) -> Iterator[None]:
    files = list({id(names): names for m in chosen if (names := _file_of(m)) is not None}.values())
    with _LOCK:
        for module in chosen:
            _ACTIVE[module] = (*_ACTIVE.get(module, ()), entered)
        for names in files:
            _install(names)
    try:
        yield
    finally:
        with _LOCK:
            for module in chosen:
                left = tuple(one for one in _ACTIVE[module] if one is not entered)
                if left:
                    _ACTIVE[module] = left
                else:
                    del _ACTIVE[module]
            for names in files:
                _remove(names)


def _install(names: dict[str, Any]) -> None:
    for name in (_CONVOLUTION, *_RULES):
        if not isinstance(names[name], _Reroute):
            names[name] = _Reroute(names[name], _convolve if name == _CONVOLUTION else _step)
        names[name].users += 1


def _remove(names: dict[str, Any]) -> None:
    for name in (_CONVOLUTION, *_RULES):
        reroute = names[name]
        if isinstance(reroute, _Reroute):  # else somebody has put a function of their own there
            reroute.users -= 1
            if not reroute.users:
                names[name] = reroute.before


def _enter(module: nn.Module, args: Any) -> None:
    _RUNNING.modules = (*getattr(_RUNNING, "modules", ()), module)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    _RUNNING.modules = getattr(_RUNNING, "modules", ())[:-1]


def _refuse_packed(module: nn.Module, kwargs: dict[str, Any]) -> None:
    packed = [name for name in _PACKED if kwargs.get(name) is not None]
    if packed:
        raise UnsupportedError(
            "the bounds of packed documents are not known to the rule of a gated delta net",
            got=f"{packed[0]} in a call of {type(module).__qualname__}",
            why="its self-only backward would read a state that ends where a document does",
            remedy="one document a row (packing=False), or estimator='label' or 'path'",
        )


def _convolve(
    module: nn.Module,
    before: Callable[..., Any],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """One call of the convolution through the layer's overrides."""
    _refuse_packed(module, kwargs)

    def native(x: Tensor) -> Tensor:
        output: Tensor = before(x, weight, bias, activation=activation, **kwargs)
        return output

    function = None if activation is None else ACT2FN[activation]
    call = ConvolutionCall(module, hidden_states, weight, bias, function)
    run: NativeConvolution = native
    for convolution, _ in _ACTIVE.get(module, ()):
        run = partial(_through, convolution, call, ("x",), run)
    return run(hidden_states)


def _step(
    module: nn.Module,
    before: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    # Overrides see (b, h, t, d), as all the core.
    _refuse_packed(module, kwargs)
    last: list[Any] = [None]  # the kernel's last state, which a cache keeps
    options = {
        "initial_state": initial_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        **kwargs,
    }

    def native(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
        q, k, v, decay, strength = (x.transpose(1, 2) for x in (q, k, v, decay, strength))
        output, last[0] = before(q, k, v, g=decay, beta=strength, **options)
        transposed: Tensor = output.transpose(1, 2)
        return transposed

    q, k, v, decay, strength = (x.transpose(1, 2) for x in (query, key, value, g, beta))
    cached, normalised = initial_state is not None, use_qk_l2norm_in_kernel
    call = DeltaCall(module, q, k, v, decay, strength, normalised=normalised, cached=cached)
    run: NativeDelta = native
    for _, rule in _ACTIVE.get(module, ()):
        run = partial(_through, rule, call, ("query", "key", "value", "decay", "beta"), run)
    return run(q, k, v, decay, strength).transpose(1, 2), last[0]


def _through(
    override: Callable[..., Tensor],
    call: ConvolutionCall | DeltaCall,
    names: tuple[str, ...],
    native: Callable[..., Tensor],
    *tensors: Tensor,
) -> Tensor:
    """An override of this call, with other tensors under these of its names."""
    of_these: dict[str, Any] = dict(zip(names, tensors, strict=True))
    return override(replace(call, **of_these), native)
