"""Gated delta nets position by position: what is held, what is propagated, what is left out.

Letters: b batch, t and k positions (t <= k), p = t + j a position that tap j of t reaches, h value
head, g key head, d key width, v value width, c channel, m width of the layer's input.

    D_k = exp(g_k) S_{k-1}             S_k = D_k + k_k u_k^T
    u_k = beta_k (v_k - D_k^T k_k)     o_k = S_k^T q_k

The self-only backward is the *ordinary* backward of another function with the same value: the one
in which every state that comes in, and every tap of the convolution but the last, is a constant.
Nothing is written down of a backward formula, but for the value path and the bound of the rest.

*Value path.* o is linear in the values, ``o_k = sum_t A_kt v_t``, and so in the values' rows of the
convolution's input up to the activation f: the effective coefficient of the value projection is

    d o_k / d s_t = sum_{j : t + j <= k} A_{k,t+j} diag(taps_j f'(z_{t+j})).

*What it leaves out*, of d o_k / d x_t at t < k, is everything through keys, gates and, by the
convolution, the queries. With y the read vector of o_k at p, ``o_k = S_p^T y + ..``,

    keys      (u_p y^T - beta_p (k_p . y) D_p^T) dk_p
    queries   S_k^T dq_k
    decay     D_t^T (y - beta_t (k_t . y) k_t) dg_t
    beta      (k_t . y) (v_t - D_t^T k_t) dbeta_t

and each term is bounded by the product of its factors' operator norms (:func:`left_out_bound`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

_EPSILON = 1e-6  # under the root of a length, as the layer's authors have it


@runtime_checkable
class Rule(Protocol):
    """Inputs of one call of the rule; see the library's ``DeltaCall``."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    normalised: bool


@runtime_checkable
class Convolution(Protocol):
    """Inputs of one convolution; see the library's ``ConvolutionCall``."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor] | None


def _directions(call: Rule) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b h t d"]]:
    """Queries and keys as the rule multiplies them, one of each for a value head."""
    normalised = []
    for x in (call.query, call.key):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if call.normalised:
            # x / sqrt(|x|^2 + eps)
            wide = wide / (wide.square().sum(-1, keepdim=True) + _EPSILON).sqrt()
        normalised.append(wide.repeat_interleave(call.value.shape[1] // x.shape[1], dim=1))
    # the query carries the scale 1 / sqrt(d)
    return normalised[0] / normalised[0].shape[-1] ** 0.5, normalised[1]


def delta_rule(call: Rule, *, constant_past: bool = False) -> Float[Tensor, "b h t v"]:
    """The rule, one position after the other.

    Args:
        call: its tensors, in a graph or not.
        constant_past: the state that comes in is a constant at each position.
    """
    query, key = _directions(call)
    value, decay, beta = (x.to(key.dtype) for x in (call.value, call.decay, call.beta))
    state = key.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for t in range(value.shape[2]):
        # self-only: what earlier positions have written is a constant
        incoming = state.detach() if constant_past else state
        # D_t = exp(g_t) S_{t-1}
        decayed = decay[:, :, t, None, None].exp() * incoming
        # D_t^T k_t
        predicted = torch.einsum("bhdv,bhd->bhv", decayed, key[:, :, t])
        # u_t = beta_t (v_t - D_t^T k_t)
        written = beta[:, :, t, None] * (value[:, :, t] - predicted)
        # S_t = D_t + k_t u_t^T
        state = decayed + torch.einsum("bhd,bhv->bhdv", key[:, :, t], written)
        # o_t = S_t^T q_t
        outputs.append(torch.einsum("bhdv,bhd->bhv", state, query[:, :, t]))
    return torch.stack(outputs, 2)


def convolve(call: Convolution, *, constant_past: bool = False) -> Float[Tensor, "b c t"]:
    """The convolution, tap by tap.

    Args:
        call: its input and taps.
        constant_past: the input is a constant under every tap but the last.
    """
    width, length = call.weight.shape[-1], call.x.shape[-1]
    total = torch.zeros_like(call.x)
    for tap in range(width):
        back = width - 1 - tap
        # self-only: tap 0, the position's own input, alone has a gradient
        source = call.x.detach() if constant_past and back else call.x
        # z_t = sum_j taps_j x_{t-j}, ``back`` = j
        total = total + call.weight[:, tap, None] * F.pad(source, (back, 0))[..., :length]
    if call.bias is not None:
        total = total + call.bias[:, None]
    return total if call.activation is None else call.activation(total)


def coefficients(call: Rule) -> Float[Tensor, "b h t t"]:
    """A[b, h, k, t] = d o_k / d v_t, a number a head: 0 for t > k.

    Formula: ``beta_t q_k^T P_k .. P_{t+1} k_t`` with ``P_j = exp(g_j) (I - beta_j k_j k_j^T)``,
    the product taken one factor after the other.
    """
    query, key = (x.detach() for x in _directions(call))
    decay, beta = (x.detach().to(key.dtype) for x in (call.decay, call.beta))
    rows, heads, length, _ = key.shape
    result = key.new_zeros(rows, heads, length, length)
    written = torch.zeros_like(key)  # what is left at k of what each t has written
    for k in range(length):
        # (I - beta_k k_k k_k^T) on what earlier t have written
        kept = torch.einsum("bhtd,bhd->bht", written, key[:, :, k]) * beta[:, :, k, None]
        written = written - torch.einsum("bht,bhd->bhtd", kept, key[:, :, k])
        # exp(g_k): together P_k
        written = written * decay[:, :, k, None, None].exp()
        # what k writes of v_k: beta_k k_k
        written[:, :, k] = beta[:, :, k, None] * key[:, :, k]
        # A_kt = q_k^T P_k .. P_{t+1} beta_t k_t
        result[:, :, k] = torch.einsum("bhtd,bhd->bht", written, query[:, :, k])
    return result


def propagated_parts(
    rule: Rule,
    error: Float[Tensor, "b h t v"],
    to_input: Callable[[Tensor], Tensor],
    *,
    window: int | None,
    head_reduction: str = "per_head",
) -> Float[Tensor, "k b c t"]:
    """Value-Propagation's terms at the convolution's input: one for each k, 0 outside its window.

    Formula: ``(d o_k / d s_t)^T e_k`` for t in [k - W, k), the value path alone; their sum over k
    is e~. With ``head_reduction="mean"`` A is averaged over the value heads.

    Args:
        rule: one call.
        error: e_k at its outputs, self-only.
        to_input: brings an error at the values (b, h, t, v) to the convolution's input (b, c, t),
            through every tap, by autograd.
        window: W; None means no limit.
        head_reduction: "per_head" or "mean".

    Source: eqs. app_causal_rank1, phi_tgt_causal. Oracle of: ``DeltaUse.propagated``.
    """
    weights = coefficients(rule)
    if head_reduction == "mean":
        weights = weights.mean(1, keepdim=True).expand_as(weights)
    terms = []
    for k in range(weights.shape[2]):
        # (d o_k / d v_p)^T e_k = A_kp e_k at every p
        at_values = weights[:, :, k].unsqueeze(-1) * error[:, :, k].unsqueeze(2).to(weights)
        term = to_input(at_values)
        # The input may begin earlier than the rule does (a cache pads it): places from the end.
        place = torch.arange(term.shape[-1], device=term.device)
        place = place - term.shape[-1] + weights.shape[2]
        # t in [k - W, k)
        in_window = place < k
        if window is not None:
            in_window = in_window & (place >= k - window)
        terms.append(term * in_window)
    return torch.stack(terms)


@dataclass(frozen=True)
class DeltaNet:
    """One layer from its input to its rule's outputs, one value head and one key head.

    Attributes:
        w_q: (d, m); w_k: (d, m); w_v: (v, m).
        w_beta: (m,); w_decay: (m,), inputs of sigmoid and softplus.
        taps: (2 d + v, w) of the queries', keys' and values' channels, in this order.
        rate: A > 0, ``g = -A softplus(w_decay x + shift)``.
        shift: see ``rate``.
    """

    w_q: Float[Tensor, "d m"]
    w_k: Float[Tensor, "d m"]
    w_v: Float[Tensor, "v m"]
    w_beta: Float[Tensor, " m"]
    w_decay: Float[Tensor, " m"]
    taps: Float[Tensor, "c w"]
    rate: float
    shift: float

    def call(self, x: Float[Tensor, "t m"], *, values_only: bool = False) -> Rule:
        """The rule's inputs at the layer's inputs x; ``values_only``: all others constant."""
        # the value path: queries, keys and gates are constants
        constant = x.detach() if values_only else x
        mixed = torch.cat([constant @ self.w_q.T, constant @ self.w_k.T, x @ self.w_v.T], -1)
        convolution = self._convolution(mixed, F.silu)
        d = self.w_q.shape[0]
        parts = convolve(convolution)[0].T.split([d, d, self.w_v.shape[0]], -1)
        query, key, value = (part[None, None] for part in parts)
        decay = -self.rate * F.softplus(constant @ self.w_decay + self.shift)
        beta = torch.sigmoid(constant @ self.w_beta)
        return SimpleNamespace(
            query=query, key=key, value=value, decay=decay[None, None], beta=beta[None, None],
            normalised=True,
        )  # fmt: skip

    def _convolution(self, mixed: Tensor, activation: Any) -> Convolution:
        x = mixed.T[None]
        return SimpleNamespace(x=x, weight=self.taps, bias=None, activation=activation)

    def slopes(self, x: Float[Tensor, "t m"]) -> Float[Tensor, "c t"]:
        """f'(z) of every channel and position."""
        weights = torch.cat([self.w_q, self.w_k, self.w_v])
        z = convolve(self._convolution(x @ weights.T, None))[0]
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            (slope,) = torch.autograd.grad(F.silu(z).sum(), z)
        return slope


def net_jacobian(
    net: DeltaNet, x: Float[Tensor, "t m"], *, values_only: bool = False
) -> Float[Tensor, "k v t m"]:
    """d o_k / d x_t by autograd; ``values_only``: through the values alone, the rest held."""
    return torch.autograd.functional.jacobian(  # type: ignore[no-any-return]
        lambda y: delta_rule(net.call(y, values_only=values_only))[0, 0], x
    )


def value_path(net: DeltaNet, x: Float[Tensor, "t m"]) -> Float[Tensor, "k v t m"]:
    """The part that Value-Propagation keeps, by its closed form: A, taps, slopes and W_V."""
    weights, slopes = coefficients(net.call(x))[0, 0], net.slopes(x)
    length, width = x.shape[0], net.taps.shape[-1]
    first = 2 * net.w_q.shape[0]  # the values' channels
    result = x.new_zeros(length, net.w_v.shape[0], length, x.shape[1])
    for k in range(length):
        for t in range(k + 1):
            for j in range(min(width, k - t + 1)):
                # taps_j f'(z_{t+j}) of the values' channels
                channels = net.taps[first:, width - 1 - j] * slopes[first:, t + j]
                # A_{k,t+j} diag(taps_j f'(z_{t+j})) W_V
                result[k, :, t] += weights[k, t + j] * channels[:, None] * net.w_v
    return result


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


@torch.no_grad()
def left_out_bound(net: DeltaNet, x: Float[Tensor, "t m"]) -> Float[Tensor, "k t"]:
    """``|| d o_k / d x_t - value path ||_op`` for t < k is at most this; 0 elsewhere.

    Formula, the sum of: for each p = t + j <= k,
    ``(|u_p| |y| + beta_p |k_p . y| ||D_p||) ||diag(taps_j f'(z_p)) W_K|| / |key_p|``;
    for k - t < w, ``||S_k|| ||diag(taps_{k-t} f'(z_k)) W_Q|| / (sqrt(d) |query_k|)``;
    ``|k_t . y| |v_t - D_t^T k_t| beta_t (1 - beta_t) |w_beta|``; and
    ``|D_t^T (y - beta_t (k_t . y) k_t)| |dg_t/da| |w_decay|``, with y the read vector at p or t.

    Oracle: :func:`net_jacobian` less :func:`value_path`. It bounds a layer's Jacobian, not the
    error of the values.
    """
    slopes = net.slopes(x)
    call, length, d = net.call(x), x.shape[0], net.w_q.shape[0]
    (query, key), value = (q[0, 0] for q in _directions(call)), call.value[0, 0]
    beta, decay = call.beta[0, 0], call.decay[0, 0].exp()
    over = [1 / (r[0, 0].square().sum(-1) + _EPSILON).sqrt() for r in (call.query, call.key)]
    state, incoming, states = x.new_zeros(d, value.shape[-1]), [], []
    for t in range(length):
        incoming.append(decay[t] * state)
        # v_t - D_t^T k_t
        rest = value[t] - incoming[t].T @ key[t]
        state = incoming[t] + beta[t] * torch.outer(key[t], rest)
        states.append(state)
    width = net.taps.shape[-1]

    def tap(part: int, weight: Tensor, j: int, p: int) -> float:
        rows = slice(part * d, (part + 1) * d)
        return _norm((net.taps[rows, width - 1 - j] * slopes[rows, p])[:, None] * weight)

    steep = net.rate * torch.sigmoid(x @ net.w_decay + net.shift)  # |dg/da|
    bound = x.new_zeros(length, length)
    for k in range(length):
        y = query[k].clone()  # o_k = S_p^T y + what is written after p
        at_keys, at_gates = x.new_zeros(length), x.new_zeros(length)
        for p in range(k, -1, -1):
            rest = value[p] - incoming[p].T @ key[p]
            read = torch.dot(key[p], y)
            # keys: |u_p| |y| + beta_p |k_p . y| ||D_p||
            through = (rest.norm() * y.norm() + read.abs() * _norm(incoming[p])) * beta[p]
            # a normalised key's Jacobian has norm at most 1 / |key_p|
            at_keys[p] = through * over[1][p]
            # (I - beta_p k_p k_p^T) y
            y_before = y - beta[p] * read * key[p]
            # |k_p . y| |v_p - D_p^T k_p| |dbeta/dx|, sigmoid' = beta (1 - beta)
            by_beta = read.abs() * rest.norm() * beta[p] * (1 - beta[p]) * net.w_beta.norm()
            # |D_p^T (y - beta_p (k_p . y) k_p)| |dg/da| |w_decay|
            by_decay = (incoming[p].T @ y_before).norm() * steep[p] * net.w_decay.norm()
            at_gates[p] = by_beta + by_decay
            # the read vector one position earlier: P_p^T y
            y = decay[p] * y_before
        for t in range(k):
            reached = range(min(width, k - t + 1))
            bound[k, t] = at_gates[t] + sum(
                at_keys[t + j] * tap(1, net.w_k, j, t + j) for j in reached
            )
            if k - t < width:
                # queries: ||S_k|| / (sqrt(d) |query_k|), where the convolution reaches from t to k
                size = _norm(states[k]) * over[0][k] / d**0.5
                bound[k, t] += size * tap(0, net.w_q, k - t, k)
    return bound
