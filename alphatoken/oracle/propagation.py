"""Value-Propagation, one hop, and the paper's causal decomposition, spelled out in loops.

Every oracle here is handed what the caller recorded in one forward pass; positions are label
positions k (whose loss) and use positions t (where a weight is used), as in ``influence``.

Einsum letters: b batch, h query head, g key/value head, k loss position, t token position,
v value width of a head, i width of the projection's input.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alphatoken.oracle.gradients import (
    Batch,
    Forward,
    directed_parameters,
    known_labels,
    label_values,
    response_tokens,
    run_losses,
)
from alphatoken.oracle.influence import moved_outputs, recorded_uses, to_token_index

HeadReduction = Literal["per_head", "mean"]
CausalPosition = Literal["label", "context"]


@dataclass(frozen=True)
class PropagationLayer:
    """Inputs that Value-Propagation reads of one attention layer.

    Attributes:
        alpha: (b, h, k, t) attention weights as the model computes them.
        errors: (b, h, k, v) self-only errors at the heads' outputs, from ``head_output_errors``.
        inputs: (b, t, i) input of the value projection.
        direction: (g v, i) direction M_V of the value projection's weight. Of a fused projection
            its rows for the value; of a LoRA pair ``s (B M_A + M_B A)``.
    """

    alpha: Float[Tensor, "b h t t"]
    errors: Float[Tensor, "b h t v"]
    inputs: Float[Tensor, "b t i"]
    direction: Float[Tensor, "gv i"]


def head_output_errors(
    forward: Forward, batch: Batch, head_outputs: Callable[[], Sequence[Tensor]]
) -> list[Float[Tensor, "b h t v"]]:
    """e[b, h, k] = d l_k / d o_k^h at position k only, one ``autograd.grad`` per label position.

    A path from o_k to l_k never leaves position k, so this is the error that a self-only backward
    gives; the aggregated error sum_k dl_k/do_t of one ordinary backward is not.

    Args:
        forward: batch without labels -> logits.
        batch: with ``labels``.
        head_outputs: called after the forward pass; returns one tensor (b, h, t, v) per layer that
            lies *in the graph* of that pass (a view made on the side does not).

    Returns:
        One float64 tensor per layer, zero where position k has no label.
    """
    losses = run_losses(forward, batch)
    outputs = list(head_outputs())
    errors = [torch.zeros_like(output, dtype=torch.float64) for output in outputs]
    for (b, i), loss in losses.items():
        # d l_k / d o_j for every j; only j = k is the self-only error e_k
        gradients = torch.autograd.grad(loss, outputs, retain_graph=True)
        for error, gradient in zip(errors, gradients, strict=True):
            error[b, :, i - 1] = gradient[b, :, i - 1].double()
    return errors


def value_propagation_pairs(
    layer: PropagationLayer, head_reduction: HeadReduction = "per_head"
) -> Float[Tensor, "b t t"]:
    """Value-Propagation of each pair k > t in one layer, no window.

    Formulas, with M_V^g the rows of key/value head g:
        per_head: ``out[b, k, t] = sum_h alpha[h, k, t] e_k^h . (M_V^g(h) x_t)``
        mean: ``out[b, k, t] = (mean_h alpha[h, k, t]) sum_g (sum_{h in g} e_k^h) . (M_V^g x_t)``,
        the paper's scalar alpha.

    Exactness: per head, in the last decoder layer, exactly the off-diagonal Psi of the value
    projection; otherwise an approximation of the off-diagonal Psi.

    Source: eq. app_causal_rank1, app_aa_causal. Oracle: ``exact_influence`` of that projection.
    """
    alpha = layer.alpha.double()
    rows, heads, length, _ = alpha.shape
    width = layer.errors.shape[-1]
    groups = layer.direction.shape[0] // width
    pairs = torch.zeros(rows, length, length, dtype=torch.float64, device=alpha.device)
    for b in range(rows):
        for t in range(length):
            # M_V x_t of every key/value head
            moved = layer.direction.double() @ layer.inputs[b, t].double()
            for k in range(t + 1, length):
                for h in range(heads):
                    # g(h): adjacent query heads share a key/value head
                    g = h // (heads // groups)
                    error = layer.errors[b, h, k].double()
                    weight = alpha[b, h, k, t]
                    if head_reduction == "mean":
                        # the paper's scalar alpha: mean over all query heads
                        weight = alpha[b, :, k, t].mean()
                    moved_value = moved[g * width : (g + 1) * width]
                    # eq. app_causal_rank1, against M_V^g: alpha e_k . (M_V^g x_t)
                    pairs[b, k, t] += weight * torch.dot(error, moved_value)
    return pairs


def value_propagation(
    layers: Sequence[PropagationLayer],
    *,
    window: int | None = None,
    causal_position: CausalPosition = "label",
    head_reduction: HeadReduction = "per_head",
) -> Float[Tensor, "b t"]:
    """The paper's causal value by label position, all layers: a windowed column sum of the pairs.

    Formula: ``out[b, p] = sum_l sum_{k in (u, u + W]} pairs_l[b, k, u]`` with u = p for
    ``causal_position="label"`` and u = p + 1, where the token is read, for ``"context"``.

    Args:
        layers: what was recorded of each scored attention layer.
        window: W; None means no limit, 0 gives 0.
        causal_position: the column of label position p: at p, or at p + 1.
        head_reduction: see :func:`value_propagation_pairs`.

    Returns:
        (b, t) in float64 at label position p, prompt positions included; pass it to
        ``to_token_index`` for the library's index p + 1.

    Source: eq. phi_tgt_causal. Oracle of: the causal part of ``alphatoken``.
    """
    pairs = torch.stack([value_propagation_pairs(layer, head_reduction) for layer in layers]).sum(0)
    rows, length, _ = pairs.shape
    reach = length if window is None else window
    values = torch.zeros(rows, length, dtype=torch.float64, device=pairs.device)
    for p in range(length):
        # y_t is predicted at p and read at p + 1; the paper writes t for both
        u = p if causal_position == "label" else p + 1
        # eq. phi_tgt_causal: k in (t, min(t + W, T)], the last position being length - 1
        for k in range(u + 1, min(u + reach, length - 1) + 1):
            values[:, p] += pairs[:, k, u]
    return values


def equation_causal_decomp(
    model: nn.Module,
    forward: Forward,
    batch: Batch,
    direction: Mapping[str, Tensor],
    layers: Sequence[PropagationLayer],
    *,
    window: int | None = None,
    causal_position: CausalPosition = "label",
    head_reduction: HeadReduction = "per_head",
) -> Float[Tensor, "b t"]:
    """The paper's equation word by word: the *full* <grad l_t, M> plus Value-Propagation.

    Formula: ``out[b, i] = <grad l_i, M> + value_propagation[i - 1]`` on response tokens, 0
    elsewhere, at the library's index i.

    The first term is the whole row of Psi (it already holds what reaches l_t through earlier
    positions), so these values do not add up to <grad L, M>. The library's estimator takes the
    diagonal instead.

    Source: eq. causal_decomp with eq. phi_tgt_causal for its second term.
    """
    # eq. causal_decomp, first term: <grad l_t, M>
    own = label_values(model, forward, batch, direction)
    # eq. causal_decomp, second term, by its Value-Propagation
    propagated = to_token_index(
        value_propagation(
            layers, window=window, causal_position=causal_position, head_reduction=head_reduction
        )
    )
    values = torch.zeros_like(own)
    for b, i in response_tokens(known_labels(batch)):
        values[b, i] = own[b, i] + propagated[b, i].to(own.device)
    return values


def via_t(
    model: nn.Module,
    forward: Forward,
    batch: Batch,
    direction: Mapping[str, Tensor],
    hidden: Callable[[], Sequence[Tensor]],
) -> Float[Tensor, "b t t"]:
    """The paper's token routing, read literally: sum_l delta_k^l J_{k,t}^l Theta_t^{l-1} . M.

    Formula: ``out[b, k, t] = sum_l <d(u . h_t^{l-1}) / d theta, M>`` with
    ``u = (d l_k / d h_k^l) (d h_k^l / d h_t^{l-1})`` held constant, l over the blocks.

    Theta_t^{l-1} holds only weights below block l and J_{k,k} counts each block again, so the sum
    over t is *not* grad l_k, although the paper says so under eq. app_via_t: weights of the last
    block get nothing, those of the first are counted once per block above.

    Args:
        model: resolves the names in ``direction``.
        forward: batch without labels -> logits.
        batch: with ``labels``.
        direction: parameter name -> M; must name parameters below the last block to be non-zero.
        hidden: called after the forward pass; h^0 .. h^L, (b, t, d), the tensors in the graph.

    Source: eq. app_via_t, app_causal_decomp. It is no estimator of the library; it documents a gap.
    """
    losses = run_losses(forward, batch)
    states = list(hidden())
    parameters = directed_parameters(model, direction)
    rows, length = batch["labels"].shape
    values = torch.zeros(rows, length, length, dtype=torch.float64)
    for (b, i), loss in losses.items():
        # token i is predicted from label position k = i - 1
        k = i - 1
        # l = 1 .. L: h^{l-1} and h^l
        for below, above in pairwise(states):
            # eq. app_via_t: delta_k^l = d l_k / d h_k^l, other positions set to 0
            (error,) = torch.autograd.grad(loss, above, retain_graph=True)
            at_k = torch.zeros_like(error)
            at_k[b, k] = error[b, k]
            # u = delta_k^l J_{k,t}^l at every t, J_{k,t}^l = d h_k^l / d h_t^{l-1}
            (routed,) = torch.autograd.grad(above, below, at_k, retain_graph=True)
            # t = k too: by J_{k,k} weights count once for every block above them
            for t in range(k + 1):
                # u . h_t^{l-1}; u is constant, so its gradient is u Theta_t^{l-1}
                reached = torch.dot(routed[b, t], below[b, t])
                gradients = torch.autograd.grad(
                    reached, list(parameters.values()), retain_graph=True, allow_unused=True
                )
                for name, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        # <u Theta_t^{l-1}, M>
                        part = torch.sum(gradient.double() * direction[name].double())
                        values[b, k, t] += part.cpu()
    return values


def one_hop(
    model: nn.Module,
    forward: Forward,
    batch: Batch,
    modules: Mapping[str, nn.Module],
    direction: Mapping[str, Tensor],
    hops: Callable[[], Sequence[tuple[Tensor, Tensor, Tensor]]],
    *,
    transposed: Collection[str] = (),
) -> Float[Tensor, "b t t"]:
    """The part of Psi[b, k, t], t < k, that changes position exactly once.

    Formula: with every cross-position gradient (o_k to k_t and v_t, t < k) scaled by epsilon, Psi
    is a polynomial in epsilon; this is its derivative at 0. Per layer of the hop:
    ``sum_l' <d (gk . k_t + gv . v_t) / d s_t^l', M^l' x_t^l'>`` with (gk, gv) the derivative of l_k
    through o_k alone by that layer's k_t, v_t, held constant; l' runs over the uses at t below it.

    Args:
        model: resolves the names in ``direction``.
        forward: batch without labels -> logits.
        batch: with ``labels``.
        modules: the scored linears by name.
        direction: parameter name -> M, as in ``exact_influence``.
        hops: called after the forward pass; of each attention call of the model (key, value,
            output) in its graph: (b, g, t, d) and (b, g, t, v) as the scores and the mix use them,
            (b, h, t, v).
        transposed: see ``exact_influence``.

    Returns:
        (b, k, t) in float64, strictly lower triangular.

    Exactness: equals the off-diagonal of Psi for K = 1 and, at any depth, for k = t + 1.
    """
    with recorded_uses(modules) as uses:
        losses = run_losses(forward, batch)
    # M^l' x_t^l' of every use
    moved = moved_outputs(model, uses, modules, direction, transposed=transposed)
    rows, length = batch["labels"].shape
    values = torch.zeros(rows, length, length, dtype=torch.float64)
    uses_s = [use.s for use in uses]
    for (b, i), loss in losses.items():
        k = i - 1
        for key, value, output in hops():
            # d l_k / d o_j; only j = k, so that this layer is the one hop
            (error,) = torch.autograd.grad(loss, output, retain_graph=True)
            at_k = torch.zeros_like(error)
            at_k[b, :, k] = error[b, :, k]
            # (gk, gv) at every t: (d o_k / d k_t)^T e_k and (d o_k / d v_t)^T e_k
            to_key, to_value = torch.autograd.grad(output, (key, value), at_k, retain_graph=True)
            # t < k: what stays at k is no hop
            for t in range(k):
                # gk . k_t + gv . v_t, with gk and gv constant
                reached = torch.sum(to_key[b, :, t] * key[b, :, t])
                reached = reached + torch.sum(to_value[b, :, t] * value[b, :, t])
                # uses at t alone are read below: no second change of position is counted
                deltas = torch.autograd.grad(reached, uses_s, retain_graph=True, allow_unused=True)
                for delta, mx in zip(deltas, moved, strict=True):
                    if delta is not None:
                        # delta_t^l' . (M^l' x_t^l')
                        values[b, k, t] += torch.dot(delta[b, t].double(), mx[b, t]).cpu()
    return values
