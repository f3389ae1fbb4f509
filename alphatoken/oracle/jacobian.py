"""The exact cross-position Jacobian of one attention layer, and the Value-Propagation bound.

For t != k and query head h, from the projections' input x_t to that head's output o_k:

    J[k, t] = alpha W_V + c f alpha (v_t - o_k) (x) (B_t^T q_k)        value path + score path
    B_t     = R_t N_t W_K          dk_t/dx_t: rotary matrix, Jacobian of the key norm, projection
    f       = 1 - (s / cap)^2      slope of the soft-cap at the capped logit s; 1 without one

with c the scale, q_k the query and v_t the value as the scores use them (normed, rotated), and
(x) the outer product. Sinks, windows and masks enter through alpha and o_k only: a sink takes
weight and gives no value, so o_k is not renormalised.

| letter | meaning |
|---|---|
| h, g | query head, key/value head g(h) = h // (H // G) |
| k, t | query position, key position |
| d, v | key and query width of a head, value width of a head |
| m    | width of the layer's input x |

Everything is computed twice: by autograd through :func:`attend` and by the closed form. Plain
loops over (h, k, t): slow, obvious, for tiny layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """One attention layer, from the input of its projections to its heads' outputs.

    Attributes:
        w_q: (H d, m); w_k: (G d, m); w_v: (G v, m), as ``nn.Linear`` stores them.
        heads: H. groups: G, the number of key/value heads; H is a multiple of G.
        scale: c, the factor of q.k.
        b_q: bias of the query projection, and so on; None without.
        q_norm: effective weight of the query's RMS norm, before rotation: (d,) for a norm per
            head, (H d,) for one over the whole projection (OLMo-2); None without. Gemma's
            ``1 + weight`` is passed as that sum.
        k_norm: the same for the key, (d,) or (G d,).
        norm_eps: epsilon of both norms, inside the root.
        cos: (t, r), r <= d, rotary table in the rotate-half convention, scaled by
            ``attention_factor`` where the model scales it; the remaining d - r dimensions pass.
        sin: the same.
        softcap: cap of ``cap tanh(logits / cap)``, or None.
        sinks: (H,) extra logits that take probability and give no value.
        mask: (t, t), True where query row may attend to key column; None means causal. Put
            sliding windows and document boundaries here. A row that may attend to nothing gives 0.
    """

    w_q: Float[Tensor, "hd m"]
    w_k: Float[Tensor, "gd m"]
    w_v: Float[Tensor, "gv m"]
    heads: int
    groups: int
    scale: float
    b_q: Float[Tensor, " hd"] | None = None
    b_k: Float[Tensor, " gd"] | None = None
    b_v: Float[Tensor, " gv"] | None = None
    q_norm: Float[Tensor, " nq"] | None = None
    k_norm: Float[Tensor, " nk"] | None = None
    norm_eps: float = 1e-6
    cos: Float[Tensor, "t r"] | None = None
    sin: Float[Tensor, "t r"] | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " h"] | None = None
    mask: Bool[Tensor, "t t"] | None = None

    @property
    def head_dim(self) -> int:
        """d: width of one head's query and key."""
        return self.w_q.shape[0] // self.heads

    @property
    def value_dim(self) -> int:
        """v: width of one head's value and output."""
        return self.w_v.shape[0] // self.groups

    def group_of(self, head: int) -> int:
        """g(h): the key/value head that query head h reads; heads of one group are adjacent."""
        return head // (self.heads // self.groups)

    def allowed(self, length: int) -> Bool[Tensor, "t t"]:
        """The mask, causal by default."""
        if self.mask is not None:
            return self.mask
        ones = torch.ones(length, length, dtype=torch.bool, device=self.w_q.device)
        return torch.tril(ones)


@dataclass(frozen=True)
class AttentionState:
    """Results of the attention layer: all per head, query and key as the scores use them.

    ``slope`` is f[h, k, t], the derivative of the capped by the raw logit.
    """

    query: Float[Tensor, "h t d"]
    key: Float[Tensor, "g t d"]
    value: Float[Tensor, "g t v"]
    slope: Float[Tensor, "h t t"]
    alpha: Float[Tensor, "h t t"]
    output: Float[Tensor, "h t v"]


def rotary_matrix(
    cos: Float[Tensor, "t r"], sin: Float[Tensor, "t r"], width: int
) -> Float[Tensor, "t d d"]:
    """R_t as a matrix: ``u -> cos * u + sin * (-u_2, u_1)`` on the first r dimensions.

    A rotation if cos^2 + sin^2 = 1; times a if the tables carry an ``attention_factor`` a.
    """
    length, rotated = cos.shape
    half = rotated // 2
    # turn u = (-u_2, u_1), the two halves of the rotated dimensions exchanged
    turn = torch.zeros(rotated, rotated, dtype=cos.dtype, device=cos.device)
    turn[range(half), range(half, rotated)] = -1.0
    turn[range(half, rotated), range(half)] = 1.0
    matrix = torch.eye(width, dtype=cos.dtype, device=cos.device).repeat(length, 1, 1)
    # R_t = Diag(cos_t) + Diag(sin_t) turn; the identity beyond r
    matrix[:, :rotated, :rotated] = torch.diag_embed(cos) + sin[:, :, None] * turn
    return matrix


def rms_norm(
    u: Float[Tensor, "*batch n"], weight: Float[Tensor, " n"], eps: float
) -> Float[Tensor, "*batch n"]:
    """``w * u / r`` with ``r = sqrt(mean(u^2) + eps)``."""
    root: Tensor = torch.sqrt(u.square().mean(dim=-1, keepdim=True) + eps)
    normed: Tensor = weight * u / root
    return normed


def rms_norm_jacobian(
    u: Float[Tensor, " n"], weight: Float[Tensor, " n"], eps: float
) -> Float[Tensor, "n n"]:
    """N = Diag(w) (I - u u^T / (n r^2)) / r."""
    # r^2 = mean(u^2) + eps
    mean_square = u.square().mean() + eps
    identity = torch.eye(len(u), dtype=u.dtype, device=u.device)
    # I - u u^T / (n r^2), from dr/du = u / (n r)
    projected = identity - torch.outer(u, u) / (len(u) * mean_square)
    return weight[:, None] * projected / torch.sqrt(mean_square)


def _project(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, heads: int
) -> Tensor:
    """Normed projection (heads, t, width), before rotation."""
    u = x @ weight.T
    if bias is not None:
        u = u + bias
    # a norm per head acts on each width d alone, one over the projection before the split
    split = u.unflatten(-1, (heads, -1))
    if norm is not None:
        if len(norm) == split.shape[-1]:
            split = rms_norm(split, norm, eps)
        else:
            split = rms_norm(u, norm, eps).unflatten(-1, (heads, -1))
    by_head: Tensor = split.transpose(0, 1)
    return by_head


def _rotate(spec: AttentionSpec, u: Tensor) -> Tensor:
    if spec.cos is None or spec.sin is None:
        return u
    # R_t u_t
    return torch.einsum("tij,htj->hti", rotary_matrix(spec.cos, spec.sin, u.shape[-1]), u)


def _weights(logits: Tensor, allowed: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax over the allowed keys and the sink; a row with neither is 0, not NaN."""
    logits = logits.masked_fill(~allowed, -torch.inf)
    top = logits.detach().amax(dim=-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    # no key and no sink: exp(-inf - 0) = 0, where exp(-inf + inf) is NaN
    top = torch.where(top.isinf(), 0.0, top)
    weights = torch.exp(logits - top)
    total = weights.sum(dim=-1, keepdim=True)
    if sink is not None:
        # a sink is one more term of the denominator, with no value
        total = total + torch.exp(sink - top)
    return weights / torch.where(total == 0, 1.0, total)


def attend(spec: AttentionSpec, x: Float[Tensor, "t m"]) -> AttentionState:
    """The layer's forward pass on one sequence, head by head; differentiable in x."""
    eps = spec.norm_eps
    # q_k = R_k norm(W_Q x_k)
    query = _rotate(spec, _project(x, spec.w_q, spec.b_q, spec.q_norm, eps, spec.heads))
    # k_t = R_t norm(W_K x_t)
    key = _rotate(spec, _project(x, spec.w_k, spec.b_k, spec.k_norm, eps, spec.groups))
    # v_t = W_V x_t: neither normed nor rotated
    value = _project(x, spec.w_v, spec.b_v, None, eps, spec.groups)
    slopes, alphas, outputs = [], [], []
    for h in range(spec.heads):
        g = spec.group_of(h)
        # c q_k . k_t; the paper's c is 1 / sqrt(d_h)
        logits = spec.scale * query[h] @ key[g].T
        slope = torch.ones_like(logits)
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
            # f = 1 - (s / cap)^2 = d s / d (c q_k . k_t), since tanh' = 1 - tanh^2
            slope = 1 - (logits / spec.softcap).square()
        sink = None if spec.sinks is None else spec.sinks[h]
        alpha = _weights(logits, spec.allowed(len(x)), sink)
        slopes.append(slope)
        alphas.append(alpha)
        # o_k = sum_t alpha_kt v_t
        outputs.append(alpha @ value[g])
    return AttentionState(
        query, key, value, torch.stack(slopes), torch.stack(alphas), torch.stack(outputs)
    )


def jacobian_by_autograd(
    spec: AttentionSpec, x: Float[Tensor, "t m"]
) -> Float[Tensor, "h t t v m"]:
    """J[h, k, t] = d o_k^h / d x_t by autograd, zero at t = k (there the query moves too).

    Exactness: exact. Oracle of: the closed form; checked by finite differences.
    """

    def heads_output(inputs: Tensor) -> Tensor:
        return attend(spec, inputs).output

    full = torch.autograd.functional.jacobian(heads_output, x)  # (h, k, v, t, m)
    assert isinstance(full, Tensor)
    jacobian = full.permute(0, 1, 3, 2, 4).clone()
    same = torch.arange(len(x))
    # at t = k x_t moves the query as well: that is outside the formula
    jacobian[:, same, same] = 0.0
    return jacobian


def _norm_matrix(spec: AttentionSpec, x_t: Tensor, group: int) -> Tensor:
    """N_t of key head g: (d, d) of a norm per head, (d, G d) rows of one over the projection."""
    assert spec.k_norm is not None
    own = slice(group * spec.head_dim, (group + 1) * spec.head_dim)
    # N_t is the norm's Jacobian at u = W_K x_t + b_K
    u = spec.w_k @ x_t
    if spec.b_k is not None:
        u = u + spec.b_k
    if len(spec.k_norm) == spec.head_dim:
        return rms_norm_jacobian(u[own], spec.k_norm, spec.norm_eps)
    # the rows of head g: such a norm mixes the heads of the projection
    return rms_norm_jacobian(u, spec.k_norm, spec.norm_eps)[own]


def _key_factors(spec: AttentionSpec, x: Tensor, t: int, g: int) -> list[Tensor]:
    """The matrices whose product maps a change of the key projection's output to the rotated key.

    [R_t, N_t, E] with E choosing the rows of the projection that this key head depends on.
    """
    d = spec.head_dim
    # E: the rows of key head g
    own = torch.eye(len(spec.w_k), dtype=x.dtype, device=x.device)[g * d : (g + 1) * d]
    factors = []
    if spec.cos is not None and spec.sin is not None:
        factors.append(rotary_matrix(spec.cos[t : t + 1], spec.sin[t : t + 1], d)[0])
    if spec.k_norm is not None:
        factors.append(_norm_matrix(spec, x[t], g))
        if len(spec.k_norm) != d:
            # E = I: a norm over the projection reads the rows of all key heads
            own = torch.eye(len(spec.w_k), dtype=x.dtype, device=x.device)
    return [*factors, own]


def _product(factors: list[Tensor]) -> Tensor:
    result = factors[0]
    for factor in factors[1:]:
        result = result @ factor
    return result


def key_jacobian(spec: AttentionSpec, x: Float[Tensor, "t m"]) -> Float[Tensor, "g t d m"]:
    """B[g, t] = dk_t / dx_t = R_t N_t W_K of key head g."""
    return torch.stack(
        [
            torch.stack([_product(_key_factors(spec, x, t, g)) @ spec.w_k for t in range(len(x))])
            for g in range(spec.groups)
        ]
    )


def key_norm_bound(spec: AttentionSpec, x: Float[Tensor, "t m"]) -> Float[Tensor, "g t"]:
    """||R_t|| ||N_t|| ||W_K|| >= ||B[g, t]||, operator norms, W_K the rows that N_t reads.

    ||R_t|| is 1 for plain rotary embeddings and a for scaled ones; the spec's ||W_K|| alone holds
    only without key norm and with a = 1.
    """
    bound = torch.zeros(spec.groups, len(x), dtype=x.dtype, device=x.device)
    for g in range(spec.groups):
        for t in range(len(x)):
            *maps, own = _key_factors(spec, x, t, g)
            # ||R_t|| ||N_t|| ||E W_K||: the norm of a product is at most that product
            norm = _operator_norm(own @ spec.w_k)
            for factor in maps:
                norm = norm * _operator_norm(factor)
            bound[g, t] = norm
    return bound


def _operator_norm(matrix: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.matrix_norm(matrix, ord=2)
    return norm


def _pairs(spec: AttentionSpec, length: int) -> Iterator[tuple[int, int, int, int]]:
    """(h, g(h), k, t) over all heads and all t != k."""
    for h in range(spec.heads):
        for k in range(length):
            for t in range(length):
                if t != k:
                    yield h, spec.group_of(h), k, t


def cross_position_jacobian(
    spec: AttentionSpec, x: Float[Tensor, "t m"]
) -> tuple[Float[Tensor, "h t t v m"], Float[Tensor, "h t t v m"]]:
    """The two paths of J[h, k, t] in closed form: value path, score path; J is their sum.

    Formula: ``alpha W_V`` and ``c f alpha (v_t - o_k) (x) (B_t^T q_k)``.

    Exactness: exact for t != k; zero at t = k, where the query path is missing from the formula.

    Source: eq. app_two_paths, app_score_path, app_exact_jacobian (there without grouped heads,
    rotary embedding, key norm, soft-cap and sinks). Oracle: :func:`jacobian_by_autograd`.
    """
    state, keys = attend(spec, x), key_jacobian(spec, x)
    # W_V^g of every key/value head
    values = spec.w_v.unflatten(0, (spec.groups, -1))
    length = len(x)
    shape = (spec.heads, length, length, spec.value_dim, x.shape[1])
    value_path, score_path = x.new_zeros(shape), x.new_zeros(shape)
    for h, g, k, t in _pairs(spec, length):
        alpha = state.alpha[h, k, t]
        # eq. app_two_paths, first term: alpha W_V
        value_path[h, k, t] = alpha * values[g]
        # d alpha_ki / d (c q_k . k_t) = f alpha_ki (1[i = t] - alpha_kt), summed over v_i
        factor = spec.scale * state.slope[h, k, t] * alpha
        # eq. app_score_path: c f alpha (v_t - o_k) (x) (B_t^T q_k)
        score_path[h, k, t] = factor * torch.outer(
            state.value[g, t] - state.output[h, k], keys[g, t].T @ state.query[h, k]
        )
    return value_path, score_path


def _pair_norms(
    spec: AttentionSpec, x: Tensor, key_factor: Tensor | None
) -> Float[Tensor, "h t t"]:
    """c f alpha ||v_t - o_k|| times ||B_t^T q_k||, or times ||q_k|| key_factor[g, t] if given."""
    state, keys = attend(spec, x), key_jacobian(spec, x)
    norms = torch.zeros_like(state.alpha)
    for h, g, k, t in _pairs(spec, len(x)):
        query = state.query[h, k]
        if key_factor is None:
            # eq. app_score_residual: ||B_t^T q_k||
            pulled = torch.linalg.vector_norm(keys[g, t].T @ query)
        else:
            # eq. app_value_path_bound: ||B_t^T q_k|| <= ||q_k|| ||B_t||, and ||B_t|| <= key_factor
            pulled = torch.linalg.vector_norm(query) * key_factor[g, t]
        # c f alpha; a norm takes |c|
        factor = abs(spec.scale) * state.slope[h, k, t] * state.alpha[h, k, t]
        # ||v_t - o_k|| tends to 0 as alpha tends to 1: the residual vanishes at both ends of alpha
        deviation = torch.linalg.vector_norm(state.value[g, t] - state.output[h, k])
        # ||u (x) v||_op = ||u|| ||v||
        norms[h, k, t] = factor * deviation * pulled
    return norms


def score_residual_norm(spec: AttentionSpec, x: Float[Tensor, "t m"]) -> Float[Tensor, "h t t"]:
    """||J - alpha W_V||_op = c f alpha ||v_t - o_k|| ||B_t^T q_k||: the residual has rank 1.

    Exactness: exact. Source: eq. app_score_residual.
    """
    return _pair_norms(spec, x, None)


def value_path_bound(spec: AttentionSpec, x: Float[Tensor, "t m"]) -> Float[Tensor, "h t t"]:
    """b_h = c f alpha ||v_t - o_k|| ||q_k|| (||R_t|| ||N_t|| ||W_K||) >= ||J - alpha W_V||_op.

    Attained where q_k lies along the top singular direction of B_t and no factor of B_t loses
    norm: for instance W_K with orthonormal rows, no key norm.

    Source: eq. app_value_path_bound, with the operator norms of key norm and scaled rotary
    embedding carried (left out in the paper) and the soft-cap's slope f <= 1 kept.
    """
    return _pair_norms(spec, x, key_norm_bound(spec, x))


def residual_after_output(
    w_o: Float[Tensor, "n hv"], score_path: Float[Tensor, "h t t v m"]
) -> Float[Tensor, "t t n m"]:
    """Residual of the attention block: sum_h W_O^h (J^h - alpha^h W_V)."""
    per_head = w_o.unflatten(1, (score_path.shape[0], -1))
    # W_O^h are the columns of W_O that head h is multiplied with
    return torch.einsum("nhv,hktvm->ktnm", per_head, score_path)


def output_bounds(
    w_o: Float[Tensor, "n hv"], bound: Float[Tensor, "h t t"]
) -> tuple[Float[Tensor, "t t"], Float[Tensor, "t t"]]:
    """Two bounds on the residual after W_O: sum_h ||W_O^h|| b_h and ||W_O|| (sum_h b_h^2)^(1/2).

    Neither is always the smaller one. They bound the attention block's Jacobian, not the paper's
    d h_k^l / d h_t^{l-1} (norm, residual and MLP come on top), and not the estimator's error.
    """
    per_head = w_o.unflatten(1, (len(bound), -1))
    norms = torch.stack([_operator_norm(per_head[:, h]) for h in range(len(bound))])
    # triangle inequality over heads: sum_h ||W_O^h|| b_h
    by_head = torch.einsum("h,hkt->kt", norms, bound)
    # W_O on the stacked heads: ||W_O|| (sum_h b_h^2)^(1/2)
    return by_head, _operator_norm(w_o) * bound.square().sum(0).sqrt()


def value_propagation_error(
    spec: AttentionSpec,
    x: Float[Tensor, "t m"],
    head_errors: Float[Tensor, "h t v"],
    m_k: Float[Tensor, "gd m"],
) -> Float[Tensor, "h t t"]:
    """Exact values minus Value-Propagation's, per head and pair in the last layer.

    Formula: ``error[h, k, t] = c f alpha ((v_t - o_k).e_k) (q_k^T R_t N_t M_K x_t)``.

    Args:
        spec: the last decoder layer's attention.
        x: input of its projections, one sequence.
        head_errors: e[h, k] = d l_k / d o_k^h.
        m_k: direction of the key projection's weight.

    Exactness: with K = 1 and W = T, summed over heads it is exactly the off-diagonal of Psi minus
    the per-head Value-Propagation: the key projection is the only other scored weight whose use
    at t reaches a later position (no scored weight tied to a lower layer's).

    Oracle: the off-diagonal of ``exact_influence``.
    """
    state = attend(spec, x)
    error = torch.zeros_like(state.alpha)
    for h, g, k, t in _pairs(spec, len(x)):
        # R_t N_t M_K x_t: how k_t moves when W_K moves by M_K
        moved_key = _product(_key_factors(spec, x, t, g)) @ (m_k @ x[t])
        factor = spec.scale * state.slope[h, k, t] * state.alpha[h, k, t]
        # (v_t - o_k) . e_k
        pull = torch.dot(state.value[g, t] - state.output[h, k], head_errors[h, k])
        # what eq. app_score_path gives through W_K: c f alpha ((v_t - o_k).e_k) (q_k . dk_t)
        error[h, k, t] = factor * pull * torch.dot(state.query[h, k], moved_key)
    return error
