"""Gated delta nets: the rule and the convolution before it, with a switchable backward.

Letters: b batch, t and k positions (t <= k), g key head, h value head, d key width, v value width,
n chunk, i and j places in a chunk. Value head h reads the query and the key of head ``h // r``.

Per value head, with unit keys k_k, queries q_k of length d^(-1/2), the log decay g_k and the
strength beta_k, the state S (d, v) of a row runs along its positions:

    D_k = exp(g_k) S_{k-1}              the incoming state, decayed
    u_k = beta_k (v_k - D_k^T k_k)      what is written: the correction of what D_k predicts
    S_k = D_k + k_k u_k^T
    o_k = S_k^T q_k = D_k^T q_k + (q_k . k_k) u_k

*Self-only*: S_{k-1} belongs to earlier positions and is held. An error e_k at o_k then reaches,
with ``w = D_k e_k``, ``s = q_k . k_k`` and ``p = v_k . e_k - k_k . w``,

    dq = w + beta p k    dk = beta (p q - s w)    dv = beta s e
    dbeta = s p          dg = (q - beta s k) . w

*Propagation*: o is linear in the values, ``o_k = sum_{t <= k} A_kt v_t`` with one number a head,

    A_kt = beta_t q_k^T P_k P_{k-1} .. P_{t+1} k_t,     P_j = exp(g_j) (I - beta_j k_j k_j^T).

All is computed a chunk at a time, as the models compute the rule itself: within a chunk by
triangular products, between chunks by the state. No T x T matrix is kept.

*Convolution*: what the rule reads comes from a short causal convolution. Each channel c has taps w
of its own, the last of which lies on the position itself, and an activation f follows:

    y_t = f(z_t),    z_t = sum_w taps_w x_{t - W + 1 + w} + bias

*Self-only*: the last tap alone, ``dx_t = taps_{W-1} f'(z_t) dy_t``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from alphatoken.model.protocol import ConvolutionCall, DeltaCall, NativeConvolution, NativeDelta
from alphatoken.model.switch import BackwardSwitch, around
from alphatoken.support.precision import full_precision, wide

_CHUNK = 64  # positions, as in the models' own chunked rule
_EPSILON = 1e-6  # under the root of a length, as in transformers and in the fla package

Span = tuple[int, int | None]
"""Distances k - t that take part, the first and the last; None: no last one."""


@dataclass(frozen=True)
class _Chunks:
    """The rule, cut into chunks (b, h, n, i, ...) padded with positions that write nothing.

    Attributes:
        query: of the length of the kernel's, scaled.
        key: of unit length where the kernel makes them so.
        beta: (b, h, n, i).
        decay: sum of the log decays from the chunk's start through i.
        scores: ``(q_i . k_j) exp(decay_i - decay_j)`` for j <= i, else 0.
        solved: X (i, j), lower triangular: ``u = X (v - exp(decay) K S)`` with S the chunk's
            incoming state.
    """

    query: Tensor
    key: Tensor
    beta: Tensor
    decay: Tensor
    ratio: Tensor
    solved: Tensor

    @property
    def scores(self) -> Tensor:
        return (self.query @ self.key.mT) * self.ratio

    @property
    def decayed_key(self) -> Tensor:
        """Keys as they read the chunk's incoming state."""
        return self.key * self.decay.exp().unsqueeze(-1)

    @property
    def ending_key(self) -> Tensor:
        """Keys as the chunk's last state holds what they wrote."""
        return self.key * (self.decay[..., -1:] - self.decay).exp().unsqueeze(-1)

    @property
    def whole_decay(self) -> Tensor:
        """(b, h, n, 1, 1) decay of a state through the whole chunk."""
        return self.decay[..., -1].exp()[..., None, None]


class DeltaStatistics:
    """Inputs of one call of the rule, without a graph, in float32 or wider.

    The tensors of the call are kept detached, which costs no memory, and chunks are made anew where
    they are needed.
    """

    def __init__(self, call: DeltaCall) -> None:
        self.query, self.key, self.value = (x.detach() for x in (call.query, call.key, call.value))
        self.beta, self.decay = call.beta.detach(), call.decay.detach()
        self.normalised = call.normalised
        self.groups, self.length = self.key.shape[1], self.key.shape[2]
        self.heads, self.width = self.value.shape[1], self.key.shape[-1]
        self.dtype = wide(self.value.dtype, self.decay.dtype)
        self.size = min(_CHUNK, self.length)

    def cut(self, tensor: Tensor) -> Tensor:
        """(b, h, t, ...) -> (b, h, n, i, ...), zeros behind the end."""
        missing = -self.length % self.size
        padded = F.pad(tensor.to(self.dtype), (0, 0) * (tensor.dim() - 3) + (0, missing))
        chunks: Tensor = padded.unflatten(2, (-1, self.size))
        return chunks

    def joined(self, chunks: Tensor) -> Tensor:
        """(b, h, n, i, ...) -> (b, h, t, ...)."""
        return chunks.flatten(2, 3)[:, :, : self.length]

    def lengths(self) -> tuple[Tensor, Tensor]:
        """(b, g, t, 1) one over the length of each query and key; ones where none is made."""
        query, key = (
            (x.to(self.dtype).square().sum(-1, keepdim=True) + _EPSILON).rsqrt()
            if self.normalised
            else torch.ones_like(x[..., :1], dtype=self.dtype)
            for x in (self.query, self.key)
        )
        return query, key

    def heads_of(self, tensor: Tensor) -> Tensor:
        """(b, g, ...) -> (b, h, ...): value head h reads key head h // r."""
        return tensor.repeat_interleave(self.heads // self.groups, dim=1)

    def directions(self) -> tuple[Tensor, Tensor]:
        """(b, h, t, d) queries, scaled, and keys, as the rule multiplies them."""
        to_query, to_key = self.lengths()
        query = self.query.to(self.dtype) * to_query * self.width**-0.5
        return self.heads_of(query), self.heads_of(self.key.to(self.dtype) * to_key)

    def chunks(self) -> _Chunks:
        """The rule's own triangular system, solved for each chunk."""
        query, key = (self.cut(x) for x in self.directions())
        beta, decay = self.cut(self.beta), self.cut(self.decay).cumsum(-1)
        # Differences of logarithms first: exp(decay) alone vanishes within a chunk.
        between = decay.unsqueeze(-1) - decay.unsqueeze(-2)
        later = torch.ones_like(between[0, 0, 0], dtype=torch.bool).triu(1)
        ratio = between.masked_fill(later, -torch.inf).exp()
        # (I + L) u = beta (v - ...), L_ij = beta_i (k_i . k_j) exp(decay_i - decay_j) for j < i;
        # ``unitriangular`` takes the diagonal as ones, whatever stands there.
        lower = (key @ key.mT) * ratio * beta.unsqueeze(-1)
        solved = torch.linalg.solve_triangular(
            lower, torch.diag_embed(beta), upper=False, unitriangular=True
        )
        return _Chunks(query, key, beta, decay, ratio, solved)

    @full_precision
    @torch.no_grad()
    def read_back(self, error: Float[Tensor, "b h t v"]) -> Float[Tensor, "b h t d"]:
        """``w_k = D_k e_k``: what the decayed incoming state of each position makes of an error."""
        chunks, e = self.chunks(), self.cut(error)
        value = self.cut(self.value)
        state = value.new_zeros(*value.shape[:2], self.width, value.shape[-1])
        outputs = []
        # Strictly earlier places: what a position writes itself is no part of its incoming state.
        earlier = chunks.ratio.tril(-1)
        for n in range(value.shape[2]):
            corrected = value[:, :, n] - chunks.decayed_key[:, :, n] @ state
            written = chunks.solved[:, :, n] @ corrected
            inside = (e[:, :, n] @ written.mT) * earlier[:, :, n] @ chunks.key[:, :, n]
            outside = chunks.decay[:, :, n].exp().unsqueeze(-1) * (e[:, :, n] @ state.mT)
            outputs.append(inside + outside)
            state = state * chunks.whole_decay[:, :, n]
            state = state + chunks.ending_key[:, :, n].mT @ written
        return self.joined(torch.stack(outputs, 2))

    @full_precision
    @torch.no_grad()
    def carried(
        self, error: Float[Tensor, "b h t v"], spans: Sequence[Span], *, mean: bool = False
    ) -> list[Float[Tensor, "b h t v"]]:
        """``sum_k A_kt e_k`` over ``first <= k - t <= last``, at the values, for each span.

        Args:
            error: e_k at the rule's outputs.
            spans: distances that take part; (0, None) is the ordinary backward.
            mean: A averaged over the value heads.

        Exactness: exact up to rounding. Cost: O(T (W + chunk)) with a last distance W, O(T^2)
        without; a block of chunk x chunk coefficients a time. Oracle:
        ``alphatoken.oracle.delta_net.coefficients``.
        """
        chunks, e = self.chunks(), self.cut(error)
        number, size = e.shape[2], self.size
        inner = chunks.scores @ chunks.solved
        read = chunks.query * chunks.decay.exp().unsqueeze(-1) - inner @ chunks.decayed_key
        ends = chunks.ending_key.mT @ chunks.solved
        unit = torch.eye(self.width, dtype=self.dtype, device=e.device)
        passed = chunks.whole_decay * unit - ends @ chunks.decayed_key
        parts = [torch.zeros_like(e) for _ in spans]
        place = torch.arange(size, device=e.device)
        farthest = max(self.length if last is None else last for _, last in spans)
        for ahead in range(min(number, (farthest + size - 1) // size + 1)):
            if ahead == 0:
                weights = inner
            else:  # ``ends`` holds, for each chunk, the states that its values leave behind
                ends = ends[:, :, : number - ahead]
                weights = read[:, :, ahead:] @ ends
                ends = passed[:, :, ahead:] @ ends
            if mean:
                weights = weights.mean(1, keepdim=True).expand(-1, self.heads, -1, -1, -1)
            distance = ahead * size + place.unsqueeze(-1) - place
            for part, (first, last) in zip(parts, spans, strict=True):
                in_span = (distance >= first) & (
                    distance <= (self.length if last is None else last)
                )
                part[:, :, : number - ahead] += (weights * in_span).mT @ e[:, :, ahead:]
        return [self.joined(part) for part in parts]


@full_precision
@torch.no_grad()
def self_terms(
    statistics: DeltaStatistics, error: Float[Tensor, "b h t v"]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Errors that reach a position's own query, key, value, decay and beta, incoming state held.

    Formulas in the module's docstring; through the lengths of queries and keys, and summed over the
    value heads of each key head.

    Returns:
        (dq, dk, dv, dg, dbeta), shaped as the call's tensors. Exact up to rounding.
        Oracle: ``alphatoken.oracle.delta_net.held_state``.
    """
    e = error.to(statistics.dtype)
    query, key = statistics.directions()
    beta, value = statistics.beta.to(e).unsqueeze(-1), statistics.value.to(e)
    w = statistics.read_back(e)
    s = (query * key).sum(-1, keepdim=True)
    p = (value * e).sum(-1, keepdim=True) - (key * w).sum(-1, keepdim=True)
    dquery = w + beta * p * key
    dkey = beta * (p * query - s * w)
    dvalue = beta * s * e
    dbeta = s * p
    ddecay = ((query - beta * s * key) * w).sum(-1)
    to_query, to_key = statistics.lengths()
    scale = statistics.width**-0.5
    dquery = _through_length(dquery * scale, statistics.query, to_query, statistics)
    dkey = _through_length(dkey, statistics.key, to_key, statistics)
    return (
        dquery.to(statistics.query.dtype),
        dkey.to(statistics.key.dtype),
        dvalue.to(statistics.value.dtype),
        ddecay.to(statistics.decay.dtype),
        dbeta.squeeze(-1).to(statistics.beta.dtype),
    )


def _through_length(
    error: Tensor, vector: Tensor, over: Tensor, statistics: DeltaStatistics
) -> Tensor:
    """An error at x / |x| (b, h, t, d), summed over the heads of a group and brought to x."""
    summed: Tensor = error.unflatten(1, (statistics.groups, -1)).sum(2)
    if not statistics.normalised:
        return summed
    unit = vector.to(summed) * over
    # d(x / |x|) = (I - x x^T / |x|^2) / |x|, with the small number under the root in |x|.
    across: Tensor = over * (summed - unit * (unit * summed).sum(-1, keepdim=True))
    return across


def switchable_delta_rule(
    call: DeltaCall, native: NativeDelta, switch: BackwardSwitch
) -> tuple[Tensor, DeltaStatistics]:
    """Run the model's own rule inside a graph whose backward obeys ``switch``.

    As ``attention.switchable_attention``: the outputs (b, h, t, v), and the call's statistics.

    Exactness: self mode equals the derivative with the incoming state held, exactly. Oracle:
    ``alphatoken.oracle.influence`` and ``alphatoken.oracle.delta_net.held_state``.
    """
    statistics = DeltaStatistics(call)
    inputs = (call.query, call.key, call.value, call.decay, call.beta)
    return around(native, inputs, switch, lambda e, *_: self_terms(statistics, e)), statistics


class ConvolutionStatistics:
    """Input and taps of one call, without a graph; computed with in float32 or wider."""

    def __init__(self, call: ConvolutionCall) -> None:
        self.x, self.activation = call.x.detach(), call.activation
        self.dtype = wide(self.x.dtype, call.weight.dtype)
        # Copies: where weights are sharded, the storage is freed when the module is left.
        self.taps = call.weight.detach().to(self.dtype, copy=True)
        self.bias = None if call.bias is None else call.bias.detach().to(self.dtype, copy=True)

    @property
    def width(self) -> int:
        """The number of taps."""
        return self.taps.shape[-1]

    @full_precision
    def slope(self) -> Float[Tensor, "b c t"]:
        """f'(z) at every position."""
        channels, width = self.taps.shape
        x = F.pad(self.x.to(self.dtype), (width - 1, 0))
        with torch.no_grad():
            z = F.conv1d(x, self.taps.unsqueeze(1), self.bias, groups=channels)
        if self.activation is None:
            return torch.ones_like(z)
        with torch.enable_grad():
            z.requires_grad_()
            (slope,) = torch.autograd.grad(self.activation(z).sum(), z)
        return slope

    @full_precision
    def own(self, error: Float[Tensor, "b c t"]) -> tuple[Float[Tensor, "b c t"]]:
        """The error at the input of the same position: ``taps_{W-1} f'(z_t) dy_t``."""
        own = self.taps[:, -1:] * self.slope() * error.to(self.dtype)
        return (own.to(self.x.dtype),)

    @full_precision
    def gathered(self, errors: Sequence[Tensor]) -> Float[Tensor, "b c t"]:
        """``sum_j taps_{W-1-j} f'(z_{t+j}) E^j_{t+j}``: an error for each way through the taps.

        Args:
            errors: E^j (b, c, t) at the outputs, for the tap that lies j positions back. With one
                error for all it is the ordinary backward.
        """
        slope = self.slope()
        result = torch.zeros_like(slope)
        length = slope.shape[-1]
        for back, error in enumerate(errors[:length]):
            moved = self.taps[:, -1 - back, None] * slope * error.to(self.dtype)
            result[..., : length - back] += moved[..., back:]
        return result


def switchable_convolution(
    call: ConvolutionCall, native: NativeConvolution, switch: BackwardSwitch
) -> tuple[Tensor, ConvolutionStatistics]:
    """Run the model's own convolution inside a graph whose backward obeys ``switch``.

    As ``attention.switchable_attention``: the outputs (b, c, t), and the call's statistics.

    Exactness: self mode is the last tap, exactly. Oracle: ``alphatoken.oracle.influence`` and
    ``alphatoken.oracle.delta_net.held_taps``.
    """
    statistics = ConvolutionStatistics(call)
    return around(native, (call.x,), switch, lambda error, *_: statistics.own(error)), statistics


@dataclass(frozen=True)
class DeltaUse:
    """One call of a gated delta rule, and the convolution in front of it.

    As ``AttentionUse``, which it stands beside in ``Recorder.attentions``. ``value`` are the
    rule's values, made of ``y`` by the model; Value-Propagation goes on from ``x``, the output of
    the value projection. All but the statistics are in the graph.

    Attributes:
        x: input (b, c, t) of the convolution.
        y: its output.
        taps: its statistics.
    """

    module: nn.Module
    x: Tensor
    y: Tensor
    taps: ConvolutionStatistics
    value: Tensor
    output: Tensor
    statistics: DeltaStatistics
    execution: int
    dropout: ClassVar[float] = 0.0

    def propagated(
        self, error: Tensor, window: int | None, *, head_mean: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Value-Propagation of errors at ``output``: the convolution's input, and the error there.

        With A_kp the coefficient of the value at p in the rule's output at k, and the tap of the
        convolution that lies j positions back,

            e~_t = sum_{k in (t, t+W]} sum_j taps_j f'(z_{t+j}) A_{k,t+j} e_k,

        the derivative of all o_k . e_k by the value projection's output at t, queries, keys and
        gates held. With ``head_mean`` A is averaged over the value heads.

        Exactness: exact for the value rows of the last decoder layer with W = T. Oracle:
        ``alphatoken.oracle.delta_net.propagated``.
        """
        # The value at p = t + j counts from k = p on, but never k = t, and up to k = t + W.
        spans: list[Span] = [
            (int(j == 0), None if window is None else window - j) for j in range(self.taps.width)
        ]
        parts = self.statistics.carried(error, spans, mean=head_mean)
        # Autograd brings each part from the values to their channels of the convolution's output.
        placed = [
            torch.autograd.grad(self.value, self.y, part.to(self.value.dtype), retain_graph=True)[0]
            for part in parts
        ]
        return self.x, self.taps.gathered(placed).to(self.x.dtype)
