"""Every value that the library returns, by plain autograd on a model whose attention is split.

Letters: b batch, k query position, t key position, h query head, g key/value head, o d_out, i d_in.

The self-only backward is the *ordinary* backward of another function with the same value: softmax
attention in which every key and value off the diagonal is held constant,

    s_kt = c q_k . [k_t]  for t < k,    s_kk = c q_k . k_k
    o_k  = sum_{t < k} alpha_kt [v_t] + alpha_kk v_k

where [x] is a constant of the value of x. Nothing is written down of a backward formula.
Gated delta nets likewise, by ``delta_net``: incoming states, and all taps but the last, held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from alphatoken.errors import InputError
from alphatoken.oracle import delta_net
from alphatoken.oracle.scope import Linear, ScoredModel, expert_tensors


@runtime_checkable
class Call(Protocol):
    """Inputs of one softmax-attention call; see the library's ``AttentionCall``."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    softcap: float | None
    sinks: Tensor | None
    documents: Tensor | None
    window: int | None


@dataclass(frozen=True)
class LinearUse:
    """One call of a scored linear map: input (b, t, i), output (b, t, o) in the graph.

    Each expert of a mixture is a linear map that is called on all positions.
    """

    linear: Linear
    x: Tensor
    s: Tensor
    execution: int


@dataclass(frozen=True)
class AttentionUse:
    """One attention call of a block.

    Attributes:
        value: (b, g, t, d) in the graph.
        output: (b, h, t, d) in the graph.
        alpha: (b, h, k, t), no graph.
        error: largest difference of the output from the model's own kernel, relative to
            ``sum_t alpha_kt |v_t|``.
    """

    value: Tensor
    output: Tensor
    alpha: Tensor
    error: float
    execution: int


@dataclass(frozen=True)
class DeltaUse:
    """One gated delta net of a block: its convolution, then its rule.

    Attributes:
        rule: the rule's call, in the graph.
        front: the convolution's call, in the graph.
        y: (b, c, t) what the model goes on with from the convolution.
        every: (b, c, t) the convolution with all its taps in the graph.
        output: (b, h, t, v) in the graph.
        error: as in ``AttentionUse``, relative to the largest output.
    """

    rule: delta_net.Rule
    front: delta_net.Convolution
    y: Tensor
    every: Tensor
    output: Tensor
    error: float
    execution: int

    def to_input(self, at_values: Tensor) -> Tensor:
        """An error at the values, brought to the convolution's input through every tap."""
        value = self.rule.value
        # values -> what left the convolution -> its input
        (at_y,) = torch.autograd.grad(value, self.y, at_values.to(value), retain_graph=True)
        (error,) = torch.autograd.grad(self.every, self.front.x, at_y, retain_graph=True)
        return error


@dataclass
class Trace:
    """Record of one forward: uses of the scored linear maps and attention calls, in order."""

    shape: torch.Size
    linears: list[LinearUse] = field(default_factory=list)
    attentions: list[AttentionUse | DeltaUse] = field(default_factory=list)
    execution: int = 0
    fronts: dict[Any, tuple[Any, Tensor, float]] = field(default_factory=dict)

    def on_block(self, module: nn.Module, args: Any) -> None:
        """Hook before a decoder block runs."""
        # one run of a block: a block that runs twice has its uses twice
        self.execution += 1

    def on_linear(
        self, linear: Linear, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        """Hook after a scored linear map; later code may work in place, not on the record."""
        x = args[0] if args else next(iter(kwargs.values()))
        if not output.requires_grad:
            output.requires_grad_()
        s = output.reshape(*self.shape, -1)
        if x.numel() // x.shape[-1] != self.shape.numel():
            raise InputError(
                "a scored linear map is not called once on every position",
                got=f"{linear.name}: input {tuple(x.shape)}",
                why="its uses cannot be assigned to positions",
                remedy="estimator='label'",
            )
        self.linears.append(
            LinearUse(linear, x.detach().reshape(*self.shape, -1), s, self.execution)
        )
        return s.reshape(output.shape).clone()

    def on_mixture(self, name: str, module: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Instead of a mixture of experts: every expert on every position, weighed by the router.

        ``y = sum_e w_e D_e(act(U_e x))``, the weight of an expert that was not chosen being zero:
        its errors there are zero as well.
        """
        hidden, chosen, weights = (*args, *kwargs.values())
        linear = partial(self._expert, name, module)
        count = next(p.shape[0] for p in expert_tensors(name, module).values())
        # w_e of every expert, 0 where it was not chosen
        router = weights.new_zeros(len(hidden), count).scatter_add(1, chosen, weights)
        output: Any = 0
        for expert in range(count):
            if module.has_gate:
                inner = module._apply_gate(linear("gate_up_proj", expert, hidden))
            else:
                inner = module.act_fn(linear("up_proj", expert, hidden))
            outer = linear("down_proj", expert, inner)
            if module.has_post_expert_norm:
                outer = module.post_expert_norm(outer)
            # y = sum_e w_e D_e(act(U_e x))
            output = output + router[:, expert, None] * outer
        mixed: Tensor = output.to(hidden.dtype)
        return mixed

    def _expert(self, name: str, module: Any, parameter: str, expert: int, x: Tensor) -> Tensor:
        linear = Linear(
            f"{name}.{parameter}", module, bool(module.is_transposed), parameter, expert
        )
        weight = getattr(module, parameter)[expert]
        s: Tensor = x @ (weight if linear.transposed else weight.mT)
        if module.has_bias:
            s = s + getattr(module, f"{parameter}_bias")[expert]
        if linear.name not in expert_tensors(name, module):  # it does not train
            return s
        use = s.reshape(*self.shape, -1)
        at = x.detach().reshape(*self.shape, -1)
        self.linears.append(LinearUse(linear, at, use, self.execution))
        return use.reshape(s.shape)

    def on_attention(
        self, split: bool, call: Call, native: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Instead of one attention call."""
        with torch.no_grad():
            kernel = native(call.query, call.key, call.value)
        self_only, alpha = split_attention(call)
        values = _per_head(call.value, call.query).detach().to(alpha).abs()
        # sum_t alpha_kt |v_t|, by which rounding is measured
        size = (alpha @ values).amax().clamp(min=1e-30)
        error = float((self_only.detach() - kernel).abs().amax() / size)
        if split:  # the kernel's own numbers, the split function's derivatives
            output = kernel + (self_only - self_only.detach()).to(kernel.dtype)
        else:
            output = native(call.query, call.key, call.value)
        self.attentions.append(AttentionUse(call.value, output, alpha, error, self.execution))
        return output

    def on_convolution(self, split: bool, call: Any, native: Callable[[Tensor], Tensor]) -> Tensor:
        """Instead of the convolution of one delta net; its rule comes next."""
        own = delta_net.convolve(call, constant_past=True)
        y, error = _replaced(split, own, partial(native, call.x))
        self.fronts[call.module] = (call, y, error)
        return y

    def on_delta(self, split: bool, call: Any, native: Callable[..., Tensor]) -> Tensor:
        """Instead of one call of the gated delta rule."""
        front, y, before = self.fronts.pop(call.module)
        inputs = (call.query, call.key, call.value, call.decay, call.beta)
        own = delta_net.delta_rule(call, constant_past=True)
        output, error = _replaced(split, own, partial(native, *inputs))
        every = delta_net.convolve(front)
        self.attentions.append(
            DeltaUse(call, front, y, every, output, max(before, error), self.execution)
        )
        return output


def _replaced(split: bool, own: Tensor, run: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The kernel's own numbers, with the derivatives of ``own``; and how far they differ."""
    if not split:
        output = run()
        kernel = output.detach()
    else:
        with torch.no_grad():
            kernel = run()
        output = kernel + (own - own.detach()).to(kernel.dtype)
    size = float(kernel.abs().amax().clamp(min=1e-30))
    return output, float((own.detach() - kernel).abs().amax()) / size


@contextmanager
def traced(
    scope: ScoredModel,
    shape: torch.Size,
    *,
    split: bool | None = None,
    override: Callable[[Any], Any] | None = None,
    deltas: Callable[[Any, Any], Any] | None = None,
) -> Iterator[Trace]:
    """Record the forwards inside; hooks go with the context.

    Args:
        scope: what is scored.
        shape: (b, t) of the batch.
        split: attention as :func:`split_attention` has it (True), the model's own (False); None
            leaves attention alone.
        override: context manager that sends every attention call through a function of the call
            and the model's own kernel.
        deltas: likewise for the convolution and the rule of every gated delta net; None: there are
            none.
    """
    trace = Trace(shape)
    with ExitStack() as stack:
        for block in dict.fromkeys(scope.blocks):
            stack.callback(block.register_forward_pre_hook(trace.on_block).remove)
        for linear in scope.linears:
            hook = partial(trace.on_linear, linear)
            handle = linear.module.register_forward_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        for name, module in scope.mixtures.items():
            module.forward = partial(trace.on_mixture, name, module)
            stack.callback(delattr, module, "forward")
        if split is not None:
            assert override is not None
            stack.enter_context(override(partial(trace.on_attention, split)))
            if deltas is not None:
                stack.enter_context(
                    deltas(partial(trace.on_convolution, split), partial(trace.on_delta, split))
                )
        yield trace


def _per_head(keys: Tensor, query: Tensor) -> Tensor:
    """(b, g, t, d) -> (b, h, t, d): query head h reads key/value head h // (H // G)."""
    return keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)


def split_attention(call: Call) -> tuple[Tensor, Tensor]:
    """The head outputs as functions of their own position's key and value alone; and alpha.

    Returns:
        (self-only output (b, h, t, d), alpha (b, h, k, t) without graph). The output has the value
        of ordinary attention, in float32 or wider.
    """
    wide = torch.promote_types(call.query.dtype, torch.float32)
    query = call.query.to(wide)
    key, value = (_per_head(x, query).to(wide) for x in (call.key, call.value))
    # c q_k . [k_t]: gradient to the query in full, to no key
    logits = call.scale * query @ key.detach().mT
    # 0 in value; its gradient is that of c [q_k] . k_k
    own = call.scale * (query.detach() * (key - key.detach())).sum(-1)
    # s_kt for t < k and s_kk in one matrix
    alpha = _softmax(call, logits + torch.diag_embed(own))
    # alpha_kk
    diagonal = torch.diagonal(alpha, dim1=-2, dim2=-1).unsqueeze(-1)
    # o_k = sum_t alpha_kt [v_t] + [alpha_kk] (v_k - [v_k])
    self_only = alpha @ value.detach() + diagonal.detach() * (value - value.detach())
    return self_only, alpha.detach()


def _attended(call: Call) -> Tensor:
    """(b or 1, 1, k, t) True where k attends to t, of a call that has no mask.

    A causal one; within a document, where ``documents`` numbers them (-1: padding, in none); and
    to the last ``window`` positions of it alone, k's own being one of them.
    """
    length, device = call.query.shape[2], call.query.device
    one = torch.zeros(1, length, dtype=torch.long, device=device)
    of = one if call.documents is None else call.documents
    # A_kt = 1 if t <= k and D_t = D_k >= 0, else 0
    past = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    attended = past & (of[:, :, None] == of[:, None, :]) & (of >= 0)[:, :, None]
    if call.window is not None:
        # n_k = sum_t A_kt: k is the n_k-th position of its document
        place = attended.sum(-1)
        # k attends to t if A_kt = 1 and n_k - n_t < W
        attended = attended & (place[:, :, None] - place[:, None, :] < call.window)
    return attended.unsqueeze(1)


def _softmax(call: Call, logits: Tensor) -> Tensor:
    """Soft-cap, mask, sinks, softmax over the last axis; a query that sees nothing gets zeros."""
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    mask = _attended(call) if call.mask is None else call.mask
    if mask.dtype == torch.bool:
        blind = ~mask.any(-1, keepdim=True)
        logits = logits.masked_fill(~mask, -torch.inf).masked_fill(blind, 0.0)
    else:
        blind = torch.zeros((), dtype=torch.bool, device=logits.device)
        logits = logits + mask.to(logits.dtype)
    if call.sinks is not None:
        column = call.sinks.detach().to(logits).view(1, -1, 1, 1)
        # a sink takes weight as one more key, and is cut off again: it gives no value
        logits = torch.cat([logits, column.expand(*logits.shape[:-1], 1)], -1)
    alpha = logits.softmax(-1)[..., : call.key.shape[2]]
    return alpha.masked_fill(blind, 0.0)


def propagated_errors(
    trace: Trace,
    errors: Sequence[Tensor | None],
    *,
    window: int | None,
    head_reduction: str,
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Value-Propagation: errors at the linear uses, from errors at the heads' outputs.

    ``e~_t = sum_{k in (t, t+W]} sum_{h in g} alpha_kt^h e_k^h`` at the value states ("mean": alpha
    averaged over all heads, errors summed over those of g), sent back to the same block's uses. Of
    a delta net it is ``delta_net.propagated_parts``, at its convolution's input.

    Returns:
        The errors, and by how much the absolute terms of e~ exceed it, (b, t) of each use.

    Source: eqs. app_causal_rank1, phi_tgt_causal.
    """
    at_uses: list[Tensor | None] = [None] * len(trace.linears)
    spread = [torch.ones(trace.shape, device=use.x.device) for use in trace.linears]
    for use, error in zip(trace.attentions, errors, strict=True):
        if error is None:
            continue
        if isinstance(use, DeltaUse):
            terms = delta_net.propagated_parts(
                use.rule, error, use.to_input, window=window, head_reduction=head_reduction
            )
            end, summed, size = use.front.x, terms.sum(0).mT, terms.abs().sum(0).mT
        else:
            end = use.value
            summed, size = _mixed_back(use, error, window, head_reduction)
        kept = tuple(n for n in range(summed.dim()) if n not in (0, summed.dim() - 2))
        # cancellation in e~: absolute terms over the absolute value of their sum
        ratio = size.sum(kept) / summed.abs().sum(kept).clamp(min=1e-30)
        for n, linear in enumerate(trace.linears):
            if linear.execution == use.execution:
                spread[n] = ratio.clamp(1.0, 1e6)
        at_end = summed.mT if isinstance(use, DeltaUse) else summed
        _send(trace, use, end, at_end.to(end.dtype), at_uses)
    return at_uses, spread


def _mixed_back(
    use: AttentionUse, error: Tensor, window: int | None, head_reduction: str
) -> tuple[Tensor, Tensor]:
    """e~ (b, g, t, d) at the value states, and the sum of its absolute terms."""
    k = torch.arange(use.alpha.shape[-1], device=use.alpha.device)
    # k in (t, t + W]
    later = k.unsqueeze(-1) > k
    if window is not None:
        later = later & (k.unsqueeze(-1) - k <= window)
    alpha = use.alpha * later
    if head_reduction == "mean":
        # the paper's scalar alpha, one for all heads
        alpha = alpha.mean(1, keepdim=True).expand_as(alpha)
    groups = use.value.shape[1]
    summed, size = (
        # e~_t = sum_k sum_{h in g} alpha_kt^h e_k^h
        (alpha.mT @ e.to(alpha)).unflatten(1, (groups, -1)).sum(2)
        for e in (error, error.abs())
    )
    return summed, size


def _send(
    trace: Trace,
    use: AttentionUse | DeltaUse,
    end: Tensor,
    error: Tensor,
    errors: list[Tensor | None],
) -> None:
    """Send an error back from ``end`` to the uses of the same execution of a block."""
    # Value-Propagation ends in its own block: uses in lower blocks belong to other paths
    places = [n for n, u in enumerate(trace.linears) if u.execution == use.execution]
    if not places or not end.requires_grad:
        return
    outputs = [trace.linears[n].s for n in places]
    parts = torch.autograd.grad(end, outputs, error, retain_graph=True, allow_unused=True)
    for n, part in zip(places, parts, strict=True):
        if part is not None:
            before = errors[n]
            errors[n] = part if before is None else before + part


def contract(
    trace: Trace,
    errors: Sequence[Tensor | None],
    direction: Mapping[int, Tensor],
    *,
    rows: Any = slice(None),
    spread: Sequence[Tensor] | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """``sum_o delta_o (M x)_o`` of every use, by linear map, in float64; and of |.| its terms.

    Args:
        trace: of the forward.
        errors: at its linear uses.
        direction: id of a parameter -> M.
        rows: index of (b, t); with it values and scales have the index's shape.
        spread: factors (b, t) on the absolute terms of each use.
    """
    parts: dict[str, tuple[Tensor, Tensor]] = {}
    for n, (use, error) in enumerate(zip(trace.linears, errors, strict=True)):
        if error is None:
            continue
        linear = use.linear
        m = getattr(linear.module, linear.parameter)
        which = ... if linear.expert is None else linear.expert
        matrix = direction[id(m)][which].double()
        # M x_t
        moved = use.x[rows].double() @ (matrix if linear.transposed else matrix.mT)
        # eq. app_ap_gdp: delta^T M x, summed over o below
        terms = error[rows].double() * moved
        value, size = terms.sum(-1), terms.abs().sum(-1)
        if spread is not None:
            size = size * spread[n]
        if linear.name in parts:
            value, size = parts[linear.name][0] + value, parts[linear.name][1] + size
        parts[linear.name] = (value, size)
    return parts
