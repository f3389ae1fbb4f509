"""A decoder of one's own, unlike nanoGPT: grouped queries in one projection, rotary, its own norm.

Its blocks are in an ``nn.Sequential``, and its forward calls token ids by another name.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

HEADS, GROUPS, HEAD = 4, 2, 4


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain


def rotated(x: Tensor) -> Tensor:
    """Queries or keys (b, heads, t, d), turned by an angle that grows with the position."""
    half = x.shape[-1] // 2
    rates = 10.0 ** -torch.arange(half, dtype=x.dtype, device=x.device)
    angles = torch.arange(x.shape[2], dtype=x.dtype, device=x.device)[:, None] * rates
    left, right = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


class Mixer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, (HEADS + 2 * GROUPS) * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, width, bias=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        query, key, value = parts.split([HEADS, GROUPS, GROUPS], 1)
        heads = self.attend(rotated(query), rotated(key), value)
        return self.out(heads.transpose(1, 2).flatten(2))


class Floor(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_mixer, self.mixer = Norm(width), Mixer(width)
        self.before_gated, self.gated = Norm(width), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.before_mixer(x))
        gate, up = self.gated(self.before_gated(x)).chunk(2, -1)
        return x + self.down(silu(gate) * up)


class Tower(nn.Module):
    """Logits (b, t, vocabulary) of tokens (b, t); ``real`` (b, t) is 0 at padding."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.tower = nn.Sequential(*(Floor(width) for _ in range(depth)))
        self.norm, self.head = Norm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, real: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        x = x if real is None else x * real.unsqueeze(-1)
        return self.head(self.norm(self.tower(x)))


class TowerOfIds(Tower):
    """Under the names of a batch, without a mask."""

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids)


def tower(kind: type[Tower] = Tower) -> Tower:
    """In float64, every weight drawn."""
    generator = torch.Generator().manual_seed(1)
    model = kind(vocabulary=19, width=8, depth=3).double()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.3 * noise)
    return model
