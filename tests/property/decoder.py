"""A small decoder in which everything is float64 and every structural option is a switch.

transformers casts softmax and norms to float32, which hides errors below 1e-7. Here nothing is
cast, so the identities of the influence matrix can be asked to hold to 1e-10. The code is plain on
purpose: explicit softmax, T x T scores, no kernel and no cache.

``ReferenceAdapter`` shows the decoder to the core the way the transformers adapter shows a real
model. Importing this module registers it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alphatoken.model.protocol import (
    AttentionCall,
    AttentionOverride,
    ScoredLinear,
    register_adapter,
)


@dataclass(frozen=True, repr=False)
class DecoderConfig:
    """Structure of a ``ReferenceDecoder``; the numbers in it come from a seed."""

    vocabulary: int = 11  # number of token ids
    layers: int = 2  # depth
    hidden: int = 8  # width of the residual stream
    heads: int = 2  # query heads
    kv_heads: int = 2  # key/value heads, a divisor of ``heads``
    # Width of a query or key head; even under rotary positions. Independent of ``hidden / heads``,
    # so the projections are not square.
    head_dim: int = 4
    value_dim: int | None = None  # width of a value head; None for ``head_dim``
    attention_scale: float | None = None  # factor on q.k; None for ``head_dim ** -0.5``
    mlp: str = "gated"  # "gated" (silu) or "plain" (gelu)
    mlp_width: int = 10  # inner width of the MLP
    norm: str = "rms"  # "rms", "layernorm" or "none"
    # "pre", "post" (on the branch, before it is added) or "sandwich" (both).
    norm_place: str = "pre"
    qk_norm: bool = False  # an RMS norm on each query and key head, before rotation
    positions: str = "rotary"  # "rotary", "learned" or "none"
    rotary_factor: float = 1.0  # scales rotated queries and keys (YaRN's attention factor)
    max_positions: int = 32  # size of the learned table; no limit otherwise
    bias: bool = False  # biases on every linear of the blocks
    softcap: float | None = None  # cap of the attention logits
    sinks: bool = False  # one learned extra logit a head
    # Sliding window by layer, repeated to the depth; None for full attention, W for the W latest
    # positions, itself included.
    windows: tuple[int | None, ...] = (None,)
    tied_embeddings: bool = False  # the head shares the embedding's weight
    padding_token: int | None = None  # the embedding's backward gives this row nothing
    rare_tokens: bool = False  # it divides a row's gradient by how often the batch holds the token
    fused_qkv: bool = False  # one linear with rows q | k | v
    transposed: bool = False  # the blocks' linears store (d_in, d_out), as GPT-2's Conv1D does
    repeated_block: bool = False  # the last layer is the first layer's block object again
    repeated_linear: bool = False  # an extra linear inside the MLP, called twice
    # Gate and up projection (or, in a plain MLP, the up projections of all layers) are two modules
    # around one weight.
    tied_linears: bool = False
    final_softcap: float | None = None  # cap of the logits
    # A padding query without any key attends to nothing and outputs zero; by default it attends to
    # itself.
    blind_rows: bool = False
    # Attention masks are float64 (0 or the most negative number), not boolean.
    additive_mask: bool = False
    attention_dropout: float = 0.0  # on attention weights, in training mode
    residual_dropout: float = 0.0  # on the branches, in training mode
    # A matrix in each MLP that is used outside any linear; ``uncovered`` names it.
    loose_parameter: bool = False
    # Each MLP's up projection is also used outside its module, and nothing says so.
    hidden_use: bool = False
    # The last layer mixes neighbouring positions by a causal convolution that ``other_mixers``
    # names.
    conv_mixer: bool = False
    hidden_mixer: bool = False  # the same convolution, and nothing says so
    end_token: int | None = 0  # id that ends a generated sequence, or None

    def __post_init__(self) -> None:
        """Refuse structures that mean nothing."""
        choices = {
            "mlp": ("gated", "plain"),
            "norm": ("rms", "layernorm", "none"),
            "norm_place": ("pre", "post", "sandwich"),
            "positions": ("rotary", "learned", "none"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} kv heads do not divide {self.heads} heads")
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {self.head_dim}")
        if self.repeated_block and self.layers < 2:
            raise ValueError("a block cannot be used at two depths of one layer")
        if self.tied_linears and self.mlp == "plain" and self.layers < 2:
            raise ValueError("a plain MLP's up projections are tied across layers: two are needed")
        if self.tied_linears and self.mlp == "plain" and self.repeated_block and self.layers < 3:
            raise ValueError("one repeated block leaves no second up projection to tie")
        if self.blind_rows and self.additive_mask:
            raise ValueError("an additive mask cannot say that a row attends to nothing")

    def __repr__(self) -> str:
        """Only what differs from the defaults, so that a failing structure can be read."""
        changed = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }
        return f"DecoderConfig({', '.join(f'{k}={v!r}' for k, v in changed.items())})"

    def window(self, layer: int) -> int | None:
        """Sliding window of one layer."""
        return self.windows[layer % len(self.windows)]


def dense_mask(call: AttentionCall) -> Tensor:
    """The mask of a call, written out for every pair where the call has none."""
    if call.mask is not None:
        return call.mask
    batch, _, length, _ = call.query.shape
    mask = torch.zeros(batch, 1, length, length, dtype=torch.bool, device=call.query.device)
    documents = call.documents
    for b in range(batch):
        own = [0] * length if documents is None else documents[b].tolist()
        for k in range(length):
            seen = [t for t in range(k + 1) if own[t] == own[k] >= 0]
            mask[b, 0, k, seen if call.window is None else seen[-call.window :]] = True
    return mask


def explicit_attention(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention written out: logits, soft-cap, mask, sinks, softmax, weighted sum."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    logits = torch.einsum("bhkd,bhtd->bhkt", query, key) * call.scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    mask = dense_mask(call)
    if mask.dtype == torch.bool:
        blind = ~mask.any(-1, keepdim=True)
        # A row without keys gets finite logits first, because softmax over -inf alone is NaN.
        logits = logits.masked_fill(~mask, -torch.inf).masked_fill(blind, 0.0)
    else:
        blind = None
        logits = logits + mask
    if call.sinks is not None:
        sinks = call.sinks.view(1, -1, 1, 1).expand(logits.shape[0], -1, logits.shape[2], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = logits.softmax(-1)[..., : key.shape[2]]
    if blind is not None:
        weights = weights.masked_fill(blind, 0.0)
    weights = F.dropout(weights, call.dropout, training=call.dropout > 0)
    return torch.einsum("bhkt,bhtd->bhkd", weights, value)


class TransposedLinear(nn.Module):
    """``x W + b`` with W stored as (d_in, d_out)."""

    bias: nn.Parameter | None

    def __init__(self, d_in: int, d_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_in, d_out, dtype=torch.float64))
        bias_or_none = nn.Parameter(torch.empty(d_out, dtype=torch.float64)) if bias else None
        self.register_parameter("bias", bias_or_none)

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight
        return out if self.bias is None else out + self.bias


def _linear(config: DecoderConfig, d_in: int, d_out: int) -> nn.Module:
    if config.transposed:
        return TransposedLinear(d_in, d_out, config.bias)
    return nn.Linear(d_in, d_out, bias=config.bias, dtype=torch.float64)


class Rms(nn.Module):
    """RMS norm in the input's own dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def _norm(config: DecoderConfig, place: str) -> nn.Module:
    """The norm before ("pre") or after ("post") a branch, identity where there is none."""
    if config.norm == "none" or config.norm_place not in (place, "sandwich"):
        return nn.Identity()
    if config.norm == "rms":
        return Rms(config.hidden)
    return nn.LayerNorm(config.hidden, dtype=torch.float64)


@dataclass(frozen=True)
class _Context:
    """What every block of one forward shares: rotary tables and the neighbours that may mix."""

    rotary: tuple[Tensor, Tensor] | None
    linked: Tensor  # (b, t, 1): 1 where position t may read position t - 1


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Self-attention; every call goes through ``attend``, which an override may replace."""

    sinks: nn.Parameter | None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.override: AttentionOverride | None = None
        self.value_dim = config.head_dim if config.value_dim is None else config.value_dim
        self.widths = [
            config.heads * config.head_dim,
            config.kv_heads * config.head_dim,
            config.kv_heads * self.value_dim,
        ]
        if config.fused_qkv:
            self.qkv_proj = _linear(config, config.hidden, sum(self.widths))
        else:
            self.q_proj = _linear(config, config.hidden, self.widths[0])
            self.k_proj = _linear(config, config.hidden, self.widths[1])
            self.v_proj = _linear(config, config.hidden, self.widths[2])
        self.o_proj = _linear(config, config.heads * self.value_dim, config.hidden)
        if config.qk_norm:
            self.q_norm, self.k_norm = Rms(config.head_dim), Rms(config.head_dim)
        sinks = nn.Parameter(torch.empty(config.heads, dtype=torch.float64))
        self.register_parameter("sinks", sinks if config.sinks else None)

    def linears(self) -> tuple[str, ...]:
        """Names of this module's linears in forward order."""
        return ("qkv_proj", "o_proj") if self.config.fused_qkv else _SPLIT_NAMES

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (b, h, t, d), keys (b, g, t, d) and values (b, g, t, dv), before rotation."""
        if self.config.fused_qkv:
            q, k, v = self.qkv_proj(x).split(self.widths, dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        heads = (self.config.heads, self.config.kv_heads, self.config.kv_heads)
        q, k, v = (
            s.unflatten(-1, (n, -1)).transpose(1, 2) for s, n in zip((q, k, v), heads, strict=True)
        )
        return q, k, v

    def forward(self, x: Tensor, mask: Tensor | None, context: _Context) -> Tensor:
        query, key, value = self.project(x)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if context.rotary is not None:
            query, key = _rotate(query, context.rotary), _rotate(key, context.rotary)
        scale = self.config.attention_scale
        call = AttentionCall(
            module=self,
            query=query,
            key=key,
            value=value,
            mask=mask,
            scale=self.config.head_dim**-0.5 if scale is None else scale,
            softcap=self.config.softcap,
            sinks=self.sinks,
            dropout=self.config.attention_dropout if self.training else 0.0,
        )
        return self.o_proj(self.attend(call).transpose(1, 2).flatten(2))

    def attend(self, call: AttentionCall) -> Tensor:
        """Head outputs (b, h, t, dv) of one attention call."""

        def native(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return explicit_attention(call, query, key, value)

        if self.override is None:
            return native(call.query, call.key, call.value)
        return self.override(call, native)


_SPLIT_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


class Mlp(nn.Module):
    """Gated or plain MLP, with the traps that an option may set."""

    loose: nn.Parameter | None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        if config.mlp == "gated":
            self.gate_proj = _linear(config, config.hidden, config.mlp_width)
        self.up_proj = _linear(config, config.hidden, config.mlp_width)
        if config.repeated_linear:
            self.inner_proj = _linear(config, config.mlp_width, config.mlp_width)
        self.down_proj = _linear(config, config.mlp_width, config.hidden)
        loose = nn.Parameter(torch.empty(config.hidden, config.hidden, dtype=torch.float64))
        self.register_parameter("loose", loose if config.loose_parameter else None)

    def linears(self) -> tuple[str, ...]:
        """Names of this module's linears in forward order."""
        gate = ("gate_proj",) if self.config.mlp == "gated" else ()
        inner = ("inner_proj",) if self.config.repeated_linear else ()
        return (*gate, "up_proj", *inner, "down_proj")

    def forward(self, x: Tensor) -> Tensor:
        if self.config.mlp == "gated":
            inner = F.silu(self.gate_proj(x)) * self._up(x)
        else:
            inner = F.gelu(self._up(x))
        if self.config.repeated_linear:
            inner = inner + torch.tanh(self.inner_proj(torch.tanh(self.inner_proj(inner))))
        out = self.down_proj(inner)
        return out if self.loose is None else out + torch.tanh(x) @ self.loose

    def _up(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        if not self.config.hidden_use:
            return up
        weight = self.up_proj.weight
        assert isinstance(weight, Tensor)
        return up + torch.tanh(x) @ (weight if self.config.transposed else weight.T)


class Mixer(nn.Module):
    """Causal depthwise convolution of two taps: position t reads itself and its predecessor."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.empty(2, config.hidden, dtype=torch.float64))

    def forward(self, x: Tensor, linked: Tensor) -> Tensor:
        previous = F.pad(x[:, :-1], (0, 0, 1, 0)) * linked
        return x * self.taps[0] + previous * self.taps[1]


class Block(nn.Module):
    """One decoder layer: attention, then (optionally) a convolution, then the MLP."""

    def __init__(self, config: DecoderConfig, mixes: bool) -> None:
        super().__init__()
        self.config = config
        self.attention_norm, self.attention_post_norm = _norm(config, "pre"), _norm(config, "post")
        self.attention = Attention(config)
        self.mixer = Mixer(config) if mixes else None
        self.mlp_norm, self.mlp_post_norm = _norm(config, "pre"), _norm(config, "post")
        self.mlp = Mlp(config)

    def forward(self, hidden_states: Tensor, mask: Tensor | None, context: _Context) -> Tensor:
        x = hidden_states
        branch = self.attention(self.attention_norm(x), mask, context)
        x = x + self._drop(self.attention_post_norm(branch))
        if self.mixer is not None:
            x = x + self.mixer(x, context.linked)
        return x + self._drop(self.mlp_post_norm(self.mlp(self.mlp_norm(x))))

    def _drop(self, branch: Tensor) -> Tensor:
        return F.dropout(branch, self.config.residual_dropout, self.training)


class ReferenceDecoder(nn.Module):
    """The decoder: ``forward`` gives float64 logits (b, t, vocabulary).

    Args:
        config: structure.
        seed: of the generator that all weights are drawn from.
    """

    def __init__(self, config: DecoderConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(
            config.vocabulary,
            config.hidden,
            config.padding_token,
            scale_grad_by_freq=config.rare_tokens,
            dtype=torch.float64,
        )
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(
                config.max_positions, config.hidden, dtype=torch.float64
            )
        mixing = config.conv_mixer or config.hidden_mixer
        distinct = config.layers - 1 if config.repeated_block else config.layers
        blocks = [
            Block(config, mixes=mixing and i == (0 if config.repeated_block else distinct - 1))
            for i in range(distinct)
        ]
        self.layers = nn.ModuleList([*blocks, blocks[0]] if config.repeated_block else blocks)
        self.final_norm = _norm(replace(config, norm_place="pre"), "pre")
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False, dtype=torch.float64)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        if config.tied_linears:
            _tie_linears(blocks)
        draw_weights(self, seed)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        b, t = input_ids.shape
        documents = None if attention_mask is not None else _documents(position_ids)
        if position_ids is None:
            position_ids = torch.arange(t, device=input_ids.device).unsqueeze(0)
        position_ids = position_ids.expand(b, t)
        x = self.embedding(input_ids)
        if self.config.positions == "learned":
            x = x + self.position_embedding(position_ids)
        context = _Context(
            rotary_tables(self.config, position_ids) if self.config.positions == "rotary" else None,
            _linked(b, t, attention_mask, documents, x),
        )
        for i, block in enumerate(self.layers):
            mask = _mask(self.config, i, (b, t), attention_mask, documents, x.device)
            x = block(x, mask, context)
        logits = self.head(self.final_norm(x))
        cap = self.config.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _documents(position_ids: Tensor | None) -> Tensor | None:
    """(b or 1, t) number of the packed document that each position belongs to; None if one."""
    if position_ids is None:
        return None
    starts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return F.pad(starts, (1, 0)).cumsum(-1) if bool(starts.any()) else None


def _mask(
    config: DecoderConfig,
    layer: int,
    shape: tuple[int, int],
    attention_mask: Tensor | None,
    documents: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """(b, 1, t, t) of one layer: causal, window, padding, documents; None if only causal."""
    window = config.window(layer)
    if window is None and attention_mask is None and documents is None:
        return None
    b, t = shape
    every = torch.arange(t, device=device)
    distance = every.unsqueeze(-1) - every
    near = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    mask = near.expand(b, 1, t, t)
    if attention_mask is not None:
        mask = mask & (attention_mask != 0)[:, None, None, :]
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    if not config.blind_rows:
        mask = mask | ((distance == 0) & ~mask.any(-1, keepdim=True))
    if not config.additive_mask:
        return mask
    lowest = torch.finfo(torch.float64).min
    return torch.zeros(mask.shape, dtype=torch.float64, device=device).masked_fill(~mask, lowest)


def _linked(
    b: int, t: int, attention_mask: Tensor | None, documents: Tensor | None, like: Tensor
) -> Tensor:
    """(b, t, 1): 1 where a position and its predecessor are both real and of one document."""
    linked = torch.ones(b, t, dtype=torch.bool, device=like.device)
    linked[:, 0] = False
    if attention_mask is not None:
        linked = linked & (attention_mask != 0)
        linked[:, 1:] &= attention_mask[:, :-1] != 0
    if documents is not None:
        linked[:, 1:] &= documents[:, 1:] == documents[:, :-1]
    return linked.to(like.dtype).unsqueeze(-1)


def rotary_tables(config: DecoderConfig, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (b, 1, t, d), times the rotary factor."""
    half = config.head_dim // 2
    exponent = torch.arange(half, dtype=torch.float64, device=position_ids.device) / half
    angle = position_ids.to(torch.float64).unsqueeze(-1) * 100.0**-exponent
    angle = torch.cat([angle, angle], dim=-1).unsqueeze(1)
    return angle.cos() * config.rotary_factor, angle.sin() * config.rotary_factor


def _tie_linears(blocks: Sequence[Block]) -> None:
    first = blocks[0].mlp
    for block in blocks:
        if first.config.mlp == "gated":
            block.mlp.up_proj.weight = block.mlp.gate_proj.weight
        else:
            block.mlp.up_proj.weight = first.up_proj.weight


def draw_weights(model: ReferenceDecoder, seed: int) -> None:
    """Weights of order 1/sqrt(d_in), gains around 1, everything else of order 1.

    Unit-scale queries and keys keep attention far from uniform, so that errors in the score path
    show.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            parameter.copy_(_scaled(name, noise, model.config))


def _scaled(name: str, noise: Tensor, config: DecoderConfig) -> Tensor:
    if "norm" in name:
        return 0.3 * noise + (0.0 if name.endswith("bias") else 1.0)
    if name.endswith(("bias", "taps")):
        return 0.4 * noise
    if name.endswith("sinks"):
        return noise
    if "embedding" in name:
        return 0.8 * noise
    stored_transposed = config.transposed and not name.startswith("head")
    d_in = noise.shape[0] if stored_transposed or name.endswith("loose") else noise.shape[1]
    # Queries and keys wider than a variance-preserving draw: attention logits of order 1 to 2.
    scores = name.rpartition(".")[0].endswith(("q_proj", "k_proj", "qkv_proj"))
    gain = 1.5 if scores else 1.1
    if config.norm_place == "post" or (config.norm == "none" and not scores):
        gain *= 0.6  # unnormalised streams grow with depth, and softmax would saturate
    return gain * noise / math.sqrt(d_in)


class ReferenceAdapter:
    """``DecoderAdapter`` of the reference decoder (see ``alphatoken.model.protocol``)."""

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, ReferenceDecoder)
        self.model: nn.Module = model
        self.decoder = model
        # Shared blocks keep their first name, as in ``named_modules`` and ``named_parameters``.
        self.names = {module: name for name, module in model.named_modules()}

    def layers(self) -> Sequence[nn.Module]:
        return list(self.decoder.layers)

    def _blocks(self, layers: Sequence[int]) -> Iterator[tuple[int, Block]]:
        """(layer, block) of these layers, each block object once."""
        seen: set[nn.Module] = set()
        for layer in layers:
            block = self.decoder.layers[layer]
            assert isinstance(block, Block)
            if block not in seen:
                seen.add(block)
                yield layer, block

    def scored_linears(self, layers: Sequence[int]) -> list[ScoredLinear]:
        found = []
        for layer, block in self._blocks(layers):
            for parent in (block.attention, block.mlp):
                for child in parent.linears():
                    module = getattr(parent, child)
                    if module.weight.requires_grad:
                        name = self.names[module]
                        found.append(
                            ScoredLinear(name, module, layer, self.decoder.config.transposed)
                        )
        return found

    def uncovered(self, layers: Sequence[int]) -> dict[str, str]:
        return {
            f"{self.names[block.mlp]}.loose": "a matrix used outside any linear"
            for _, block in self._blocks(layers)
            if block.mlp.loose is not None and block.mlp.loose.requires_grad
        }

    def attention_modules(self, layer: int) -> tuple[nn.Module, ...]:
        block = self.decoder.layers[layer]
        assert isinstance(block, Block)
        return (block.attention,)

    def other_mixers(self, layers: Sequence[int]) -> dict[str, str]:
        if self.decoder.config.hidden_mixer:
            return {}
        return {
            self.names[block.mixer]: "causal convolution"
            for _, block in self._blocks(layers)
            if block.mixer is not None
        }

    @contextmanager
    def override_attention(
        self, modules: Sequence[nn.Module], override: AttentionOverride
    ) -> Iterator[None]:
        before: dict[Attention, AttentionOverride | None] = {}
        try:
            for module in modules:
                assert isinstance(module, Attention)
                before.setdefault(module, module.override)
                module.override = override
            yield
        finally:
            for module, previous in before.items():
                module.override = previous

    def pause_checkpointing(self, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, inputs: Mapping[str, Any]) -> Tensor:
        return self.logits_of(self.model(**self.arguments(inputs)))

    def arguments(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(inputs)

    def logits_of(self, output: Any) -> Tensor:
        assert isinstance(output, Tensor)
        return output

    def next_token_logits(
        self, input_ids: Tensor, attention_mask: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        logits = self.decoder(input_ids, attention_mask, position_ids)
        return logits[:, -1], None

    def max_positions(self) -> int | None:
        config = self.decoder.config
        return config.max_positions if config.positions == "learned" else None

    def end_tokens(self) -> tuple[int, ...]:
        end = self.decoder.config.end_token
        return () if end is None else (end,)

    def identity(self) -> dict[str, str]:
        config = self.decoder.config
        return {
            "class": type(self.model).__qualname__,
            "layers": str(config.layers),
            "hidden": str(config.hidden),
            "heads": str(config.heads),
            "kv_heads": str(config.kv_heads),
            "mlp_width": str(config.mlp_width),
            "vocabulary": str(config.vocabulary),
        }


register_adapter(__name__, f"{__name__}:ReferenceAdapter")
