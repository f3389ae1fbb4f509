"""Label values by forward-mode differentiation: all rows of the influence matrix in one pass.

    label value of token k  =  <grad l_k, M>  =  d/d(eps) l_k(theta + eps M) at eps = 0

is the directional derivative of the vector of token losses along M. One forward on dual tensors
gives it for every token at once, through every module type.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from alphatoken.errors import AlphaTokenWarning, NumericalError, UnsupportedError, warn_caller
from alphatoken.estimate.token_values import require_finite_numbers
from alphatoken.model.attention import forward_mode_attention
from alphatoken.model.batch import LabelledBatch, require_finite
from alphatoken.model.forward import (
    Start,
    can_start_at,
    evaluation_mode,
    response_losses,
    start_at,
)
from alphatoken.model.head import HeadUse
from alphatoken.model.protocol import (
    AttentionCall,
    DecoderAdapter,
    NativeAttention,
    attention_overridden,
)
from alphatoken.model.scope import mixtures_of
from alphatoken.support.precision import wide


def _attention(call: AttentionCall, native: NativeAttention) -> Tensor:
    """The model's own kernel while no input carries a tangent, the forward-mode rule otherwise."""
    # The kernel is faster, but a fused one has no rule for dual tensors.
    tensors = (call.query, call.key, call.value, call.sinks)
    if all(t is None or forward_ad.unpack_dual(t).tangent is None for t in tensors):
        return native(call.query, call.key, call.value)
    if call.flash:
        warn_caller(
            "label values replace flash attention by plain products in blocks of queries, since "
            "its kernels have no forward mode: exact, memory linear in the length, but slower; "
            "'alphatoken', 'direct' and 'path' run on the kernel itself",
            AlphaTokenWarning,
        )
    return forward_mode_attention(call)


def _as_it_is(module: nn.Module, name: str, x: Tensor, s: Tensor, experts: Tensor) -> Tensor:
    # The product of a mixture was formed by products that have forward mode.
    return s


def _run(call: Callable[[], Any]) -> Any:
    """Result of ``call``; UnsupportedError names a kernel without a forward derivative."""
    try:
        return call()
    except NotImplementedError as error:
        message = str(error)
        if not any(word in message for word in ("forward AD", "jvp")):
            raise
    raise UnsupportedError(
        "'label' meets a kernel without forward mode",
        got=message.partition(". ")[0],
        why="label values are one pass of forward-mode differentiation",
        remedy="plain layers in place of fused ones (no Liger, no kernels of the hub), or "
        "estimator='alphatoken', 'direct' or 'path'",
    )


class _Rules(TorchFunctionMode):
    """Inside, some functions of dual tensors follow the rules below."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs.keys() - {"bias"}:
            return _linear(*args, **kwargs)
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        if func is F.scaled_dot_product_attention and _moves(*args[:3]):
            # A model calls torch's kernels itself, of which the plain one alone has forward mode.
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _moves(*tensors: Any) -> bool:
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``d(x W^T + b) = dx W^T + x dW^T + db``, with one product where only one factor moves."""
    # torch forms both products, one of them with zeros, as soon as either factor has a tangent.
    # Only one has in every linear above the highest scored layer and between scored ones, and in
    # those of the lowest whose input does not move yet. The numbers are the same.
    (input_, dx), (w, dw) = forward_ad.unpack_dual(x), forward_ad.unpack_dual(weight)
    if (dx is None) == (dw is None):
        return F.linear(x, weight, bias)
    b, db = (None, None) if bias is None else forward_ad.unpack_dual(bias)
    tangent = F.linear(input_, dw) if dx is None else F.linear(dx, w)
    if db is not None:
        tangent = tangent + db
    dual: Tensor = forward_ad.make_dual(F.linear(input_, w, b), tangent)
    return dual


def _embedding(
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    *_: Any,
    **__: Any,
) -> Tensor:
    """An embedding moves as its backward says, which trains, and not as its forward does."""
    w, dw = forward_ad.unpack_dual(weight)
    rows = F.embedding(ids, w, padding_idx, max_norm, norm_type)
    if dw is None:
        return rows
    moved = F.embedding(ids, dw)
    # The backward gives this row nothing, though a head tied to the same weight does.
    if padding_idx is not None:
        moved = moved.masked_fill((ids == padding_idx % len(w)).unsqueeze(-1), 0.0)
    dual: Tensor = forward_ad.make_dual(rows, moved)
    return dual


def _places(model: nn.Module, duals: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Every place of the model that holds a parameter in ``duals`` (by id), each once."""
    return {
        f"{prefix}.{name}" if prefix else name: duals[id(parameter)]
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in duals
    }


def label_values(
    adapter: DecoderAdapter,
    batch: LabelledBatch,
    direction: Mapping[str, Tensor],
    *,
    first: int = 0,
    start: Start | None = None,
    head: HeadUse | None = None,
    see: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """``<grad l_k, M>`` for every response token k: one dual forward, no backward.

    Args:
        adapter: of the model.
        batch: the tokens to value; dropout is off.
        direction: parameter name -> M in the parameter's shape; any parameters of the model,
            embeddings, norms, experts and tied weights included.
        first: first layer that the direction reaches; attention below keeps its kernel.
        start: of an earlier forward on the same tokens: the layers below ``first`` are not run
            again. If the losses then differ (dropout below, or a model that hands more than hidden
            states from layer to layer), ``start.refused`` is set and the whole forward is run.
        head: the head's call in an earlier forward on the same tokens. Where its hidden states are
            the same, its errors are multiplied by their tangents, and the product with the
            vocabulary is not formed again.
        see: gets the token losses (b, t) of the dual forward, and may refuse them.

    Returns:
        (b, t), index i for token i, 0 off the response; float32 or wider.

    Raises:
        NumericalError: M or a loss is not finite; or a derivative, at any length of the tangents.

    Exactness: exact up to rounding in the model's dtype. Source: eq. shapley_closed_form_step.
    Oracle: ``alphatoken.oracle.gradients.label_values``.
    """
    scale = _scale(adapter, direction)
    # M = 0, as V is before the first step: every value is 0, and dividing by the norm would give
    # NaN.
    if scale == 0.0:
        return torch.zeros(batch.labels.shape, dtype=torch.float32, device=batch.labels.device)
    if not math.isfinite(scale):
        raise NumericalError(
            "the direction M is not finite",
            got=f"a norm of {scale}",
            why="every value would be NaN",
            remedy="look at the weights, the retention term and the preconditioner",
        )
    take = partial(_losses_and_derivatives, adapter, batch, direction, first, start, head)
    losses, derivatives = take(scale)
    if not bool(torch.isfinite(derivatives[batch.mask]).all()):
        derivatives = _in_range(take, scale, batch.mask)
        require_finite_numbers(derivatives.masked_fill(~batch.mask, 0.0), "the value of a token")
    if see is not None:
        see(losses)
    values: Tensor = derivatives.to(wide(derivatives.dtype)) * scale
    return values.masked_fill(~batch.mask, 0.0)


def _losses_and_derivatives(
    adapter: DecoderAdapter,
    batch: LabelledBatch,
    direction: Mapping[str, Tensor],
    first: int,
    start: Start | None,
    head: HeadUse | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Token losses (b, t), finite, and their derivatives along ``direction / scale``."""
    if start is not None and not start.refused and can_start_at(adapter, first):
        with start_at(adapter, first, start.hidden):
            losses, tangent = _dual_losses(adapter, batch, direction, scale, first, head)
        start.refused = not start.gives(losses, batch.mask)
        if not start.refused:
            return losses, tangent
    losses, tangent = _dual_losses(adapter, batch, direction, scale, first, head)
    require_finite(losses, batch.mask, "batch")
    return losses, tangent


_SHORTER = tuple(2.0**power for power in (4, 8, 12, 16, 20))
_VANISHED = 5e-2


def _in_range(take: Callable[[float], tuple[Tensor, Tensor]], scale: float, mask: Tensor) -> Tensor:
    """Derivatives along ``direction / scale`` by tangents that are shorter than that; or NaN."""
    # A tangent of a 16-bit activation may be beyond its range where the activation is not. The map
    # is linear, so that a shorter one serves, until the parts of the shortest vanish: tangents of a
    # quarter must give a quarter.
    for shorter in _SHORTER:
        _, short = take(scale * shorter)
        if bool(torch.isfinite(short[mask]).all()):
            again = 4 * take(scale * shorter * 4)[1]
            away = (again - short)[mask].norm()
            return short * shorter if away <= _VANISHED * short[mask].norm() else short * math.nan
    return short


_NEAR_ONE = 2.0**40
"""A norm within this factor of 1 leaves float32 tangents all the range that they need."""


def _scale(adapter: DecoderAdapter, direction: Mapping[str, Tensor]) -> float:
    """Divisor of the tangents; the map is linear, so values are multiplied by it again."""
    # A tangent has the dtype of its weight, and a very long or short direction would leave the
    # range of 16-bit numbers: its norm there, and wherever the norm is far from 1. Else 1, so that
    # M is the tangent without a copy of every matrix.
    parameters = dict(adapter.model.named_parameters(remove_duplicate=False))
    norms = [torch.linalg.vector_norm(m, dtype=wide(m.dtype)).double() for m in direction.values()]
    norm = float(torch.stack(norms).norm())
    roomy = all(parameters[name].dtype == m.dtype == wide(m.dtype) for name, m in direction.items())
    return 1.0 if roomy and 1 / _NEAR_ONE < norm < _NEAR_ONE else norm


def _tangent(m: Tensor, scale: float, like: Tensor) -> Tensor:
    return m.to(like) if scale == 1.0 else (m.to(wide(m.dtype)) / scale).to(like)


_ONE_AT_A_TIME = threading.Lock()
"""torch has one level of forward mode for all threads of a process."""


@torch.no_grad()  # forward mode works without, and no graph for a backward is stored
def _dual_losses(
    adapter: DecoderAdapter,
    batch: LabelledBatch,
    direction: Mapping[str, Tensor],
    scale: float,
    first: int,
    head: HeadUse | None,
) -> tuple[Tensor, Tensor]:
    """Token losses (b, t) and their derivatives along ``direction / scale``, by one forward."""
    parameters = dict(adapter.model.named_parameters(remove_duplicate=False))
    layers = range(first, len(adapter.layers()))
    mixtures = mixtures_of(adapter, layers)
    experts: Any = getattr(adapter, "override_experts", None) if mixtures else None
    modules = [module for layer in layers for module in adapter.attention_modules(layer)]
    # Only attention from ``first`` on can meet a tangent; below it the kernel is left as it is.
    with (
        _ONE_AT_A_TIME,
        evaluation_mode(adapter.model),  # dropout off: the loss as a function of the weights alone
        attention_overridden(adapter, modules, _attention),
        nullcontext() if experts is None else experts(mixtures, _as_it_is),
        forward_ad.dual_level(),
        _Rules(),
    ):
        # By identity: a tied weight moves at all its places, and its derivative goes through them
        # all.
        duals = {
            id(parameters[name]): forward_ad.make_dual(
                parameters[name].detach(), _tangent(m, scale, parameters[name])
            )
            for name, m in direction.items()
        }
        # ``_places`` lists each place once, instead of torch's tie_weights: with a block used at
        # two depths that would swap the same place twice, and leave the model with the dual
        # tensors.
        places = _places(adapter.model, duals)

        def logits() -> Tensor:
            arguments = adapter.arguments(batch.inputs)
            call = partial(functional_call, adapter.model, places, (), arguments, tie_weights=False)
            return adapter.logits_of(_run(call))

        losses, tangent = forward_ad.unpack_dual(
            response_losses(adapter, batch.inputs, batch.labels, run=logits, observed=head)
        )
        # No tangent: the direction reaches no loss, as with an unrouted expert.
        return losses, torch.zeros_like(losses) if tangent is None else tangent
