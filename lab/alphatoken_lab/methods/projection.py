"""Random projections of gradients: signs made block by block from a seed, never kept as a matrix.

y = R^T x / sqrt(d),   R (D, d) of independent +-1            E <R^T a, R^T b> / d = <a, b>
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from alphatoken.errors import ConfigError, InputError
from alphatoken.support.precision import full_precision

_BLOCK = 1024  # rows of the sign matrix at a time
_GOLDEN = 0x9E3779B97F4A7C15


class Projection:
    """Rademacher projection from D numbers to d.

    The same seed gives the same signs on the same kind of device; the generators of CPU and CUDA
    differ. Several vectors at a time share the cost of making the signs.

    Args:
        width: D.
        dimension: d; None, or one that is not below D, for no projection (y = x).
        seed: of the signs.

    Raises:
        ConfigError: a dimension below 1.

    Exactness: inner products are unbiased, with variance below 2 |a|^2 |b|^2 / d.
    Source: TRAK, LESS (d = 8192, seed 0).
    """

    def __init__(self, width: int, dimension: int | None, seed: int = 0) -> None:
        if dimension is not None and dimension < 1:
            raise ConfigError(
                "the dimension of a projection must be at least 1", got=str(dimension)
            )
        self.width, self.seed = width, seed
        self.dimension = None if dimension is not None and dimension >= width else dimension

    def _signs(self, block: int, rows: int, device: torch.device) -> Tensor:
        """(rows, d) of +-1 in float32; eight to a random byte."""
        assert self.dimension is not None
        generator = torch.Generator(device)
        generator.manual_seed((self.seed * _GOLDEN + block) % 2**63)
        size = (rows, -(-self.dimension // 8))
        drawn = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
        bits = drawn.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=device) & 1
        signs: Tensor = bits.flatten(1)[:, : self.dimension].float().mul_(2).sub_(1)
        return signs

    @full_precision
    @torch.no_grad()
    def __call__(self, vectors: Float[Tensor, "n D"]) -> Float[Tensor, "n d"]:
        """Project each row, in float32.

        Raises:
            InputError: rows of another length.
        """
        if vectors.shape[-1] != self.width:
            raise InputError(
                "vectors to project have another length",
                got=f"{vectors.shape[-1]}, the projection is of {self.width}",
            )
        if self.dimension is None:
            return vectors.float()
        projected = torch.zeros(len(vectors), self.dimension, device=vectors.device)
        for block, start in enumerate(range(0, self.width, _BLOCK)):
            part = vectors[:, start : start + _BLOCK].float()
            projected += part @ self._signs(block, part.shape[1], vectors.device)
        return projected / math.sqrt(self.dimension)
