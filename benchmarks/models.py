"""Random decoders of stated size, and random batches for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from alphatoken import FisherDrift
from benchmarks.floors import Shape


def decoder(
    width: int,
    depth: int,
    *,
    vocabulary: int = 2048,
    heads: int = 8,
    length: int = 8192,
    device: torch.device | str = "cpu",
    **config: Any,
) -> LlamaForCausalLM:
    """A Llama-like decoder with random weights (seeded); ``config`` overrides its other sizes."""
    torch.manual_seed(0)
    sizes = {
        "intermediate_size": width * 8 // 3 // 8 * 8,
        "num_key_value_heads": heads // 2,
        **config,
    }
    with torch.device(device):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=width,
                num_hidden_layers=depth,
                num_attention_heads=heads,
                max_position_embeddings=length,
                **sizes,
            )
        )


def random_batch(
    rows: int,
    length: int,
    vocabulary: int = 2048,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Random tokens; the first quarter of each row is prompt."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, : length // 4] = -100
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


@dataclass(frozen=True)
class Size:
    """A decoder and a training batch for it."""

    width: int
    depth: int
    vocabulary: int = 2048
    heads: int = 8
    rows: int = 1
    length: int = 256
    ffn: int | None = None
    kv_heads: int | None = None
    tied: bool = False

    @property
    def text(self) -> str:
        """As the tables have it."""
        layers = "1 layer" if self.depth == 1 else f"{self.depth} layers"
        return (
            f"d={self.width}, {layers}, vocabulary {self.vocabulary}, "
            f"{self.rows} x {self.length} tokens"
        )

    def model(self, device: torch.device | str = "cpu") -> Any:
        """The decoder, in training mode."""
        others: dict[str, Any] = {"tie_word_embeddings": self.tied}
        if self.ffn is not None:
            others["intermediate_size"] = self.ffn
        if self.kv_heads is not None:
            others["num_key_value_heads"] = self.kv_heads
        return decoder(
            self.width,
            self.depth,
            vocabulary=self.vocabulary,
            heads=self.heads,
            length=self.length,
            device=device,
            **others,
        ).train()

    def batch(
        self, device: torch.device | str = "cpu", *, rows: int | None = None, seed: int = 0
    ) -> dict[str, Tensor]:
        """Rows of this length; another seed for validation."""
        count = self.rows if rows is None else rows
        return random_batch(count, self.length, self.vocabulary, seed=seed, device=device)

    def shape(self, model: Any) -> Shape:
        """What floors are computed from."""
        return Shape.of(model, self.rows, self.length)

    def on(self, device: torch.device) -> Size:
        """The same with a batch that keeps an accelerator busy."""
        if device.type != "cuda":
            return self
        return replace(self, rows=8 * self.rows, length=4 * self.length)


DEEP = Size(1024, 28, vocabulary=8192, heads=16)
"""The targets' model: 28 layers at d = 1024; one step takes seconds on two cores."""

TINY = Size(32, 4, vocabulary=64, heads=4, length=32)
"""For ``--quick``."""


def fisher(model: Any, layers: int) -> FisherDrift:
    """A Fisher of the last layers, the reference one percent away from the weights."""
    depth = model.config.num_hidden_layers
    inside = tuple(f"model.layers.{i}." for i in range(depth - layers, depth))
    weights = {
        n: p.detach() for n, p in model.named_parameters() if n.startswith(inside) and p.dim() == 2
    }
    values = {n: torch.full_like(p, 1e-4) for n, p in weights.items()}
    return FisherDrift(values, {n: 1.01 * p for n, p in weights.items()})
