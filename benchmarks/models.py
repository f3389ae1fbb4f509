"""Random decoders of stated size, and random batches for them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


def decoder(
    width: int, depth: int, *, vocabulary: int = 2048, heads: int = 8, length: int = 8192
) -> LlamaForCausalLM:
    """A Llama-like decoder with random weights (seeded)."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=width * 8 // 3 // 8 * 8,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            max_position_embeddings=length,
        )
    )


def random_batch(
    rows: int, length: int, vocabulary: int = 2048, *, seed: int = 0
) -> dict[str, Tensor]:
    """Random tokens; the first quarter of each row is prompt."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, : length // 4] = -100
    return {"input_ids": ids, "labels": labels}
