"""Tiny random transformers decoders, one per architecture: real classes, small numbers.

Weights are drawn anew from a seed, norms and biases included (libraries start them at one and at
zero), large enough that attention is far from uniform. ``model.double()`` does not make everything
float64: norms, softmax and rotary tables are cast to float32 inside, so agreement ends near 1e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

__all__ = [
    "ARCHITECTURES",
    "BY_NAME",
    "MIXTURES",
    "SOFTMAX",
    "VOCABULARY",
    "Architecture",
    "plain_forward",
]

VOCABULARY = 23
_WIDTHS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Architecture:
    """One family: its classes, its options, and what the estimators need to know of it.

    Attributes:
        name: as in the tests' ids.
        config: name of the configuration class.
        model: name of the causal language model class.
        options: of the configuration.
        implementations: attention implementations that the family has here.
        value: suffix of the linear that makes the value states.
        output: suffix of the linear that takes the heads' outputs.
        value_rows: (first, last) of the value's rows in that linear, a fused one; None: all.
        groups: key/value heads.
        head_dim: width of a head.
        experts: it has a mixture of experts, whose weights no linear covers.
    """

    name: str
    config: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    implementations: tuple[str, ...] = ("sdpa", "eager")
    value: str = "v_proj"
    output: str = "o_proj"
    value_rows: tuple[int, int] | None = None
    groups: int = 2
    head_dim: int = 4
    experts: bool = False

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return int(self.options.get("num_hidden_layers", self.options.get("n_layer", 0)))

    def build(
        self,
        seed: int = 0,
        *,
        implementation: str | None = None,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> nn.Module:
        """A new model in evaluation mode; equal numbers for equal seeds."""
        config = getattr(transformers, self.config)(
            **{**self.options, **options},
            attn_implementation=implementation or self.implementations[0],
        )
        config._experts_implementation = "eager"  # the grouped kernel has no float64
        with torch.random.fork_rng(devices=[]):
            model = getattr(transformers, self.model)(config)
        draw_weights(model, seed)
        return model.to(dtype).eval()


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int) -> None:
    """Matrices with entries of variance 1.4 / fan-in, vectors a step away from where they start."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter.add_(0.3 * noise)
        else:
            parameter.copy_(noise * (1.4 / parameter.shape[-1]) ** 0.5)


def plain_forward(model: nn.Module) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """The model's own forward, as the oracles take it."""

    def forward(batch: Mapping[str, Tensor]) -> Tensor:
        assert "labels" not in batch
        logits: Tensor = model(**batch, use_cache=False).logits
        return logits

    return forward


_THREE = {**_WIDTHS, "num_hidden_layers": 3}
_TWO = {**_WIDTHS, "num_hidden_layers": 2}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

ARCHITECTURES = (
    Architecture("llama", "LlamaConfig", "LlamaForCausalLM", _THREE),
    Architecture(
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**_THREE, "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 3,
         "layer_types": _MIXED},
    ),
    Architecture(
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**_THREE, "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 3,
         "layer_types": _MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
        implementations=("eager",),
    ),
    Architecture("qwen3", "Qwen3Config", "Qwen3ForCausalLM", {**_TWO, "head_dim": 4}),
    Architecture("qwen2", "Qwen2Config", "Qwen2ForCausalLM", _TWO),
    Architecture("mistral", "MistralConfig", "MistralForCausalLM", {**_TWO, "sliding_window": 3}),
    Architecture("olmo2", "Olmo2Config", "Olmo2ForCausalLM", _TWO),
    Architecture(
        "phi3", "Phi3Config", "Phi3ForCausalLM", _TWO, value="qkv_proj", value_rows=(24, 32)
    ),
    Architecture(
        "gpt2",
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
         "eos_token_id": 2},
        value="attn.c_attn",
        output="attn.c_proj",
        value_rows=(32, 48),
        groups=4,
    ),
    Architecture(
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        {**_TWO, "head_dim": 4, "sliding_window": 3, "num_local_experts": 3,
         "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]},
        implementations=("eager",),
        experts=True,
    ),
    Architecture(
        "mixtral",
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_TWO, "num_local_experts": 3, "num_experts_per_tok": 2},
        experts=True,
    ),
    Architecture(
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_TWO, "head_dim": 4, "num_experts": 3, "num_experts_per_tok": 2,
         "moe_intermediate_size": 6, "norm_topk_prob": True},
        experts=True,
    ),
    Architecture(
        "qwen3_5",
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {**_THREE, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 3,
         "layer_types": ["full_attention", "linear_attention", "full_attention"]},
        head_dim=8,
    ),
)  # fmt: skip
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
SOFTMAX = tuple(a.name for a in ARCHITECTURES if a.name != "qwen3_5")
"""Every layer mixes positions by softmax attention only."""
MIXTURES = tuple(a.name for a in ARCHITECTURES if a.experts)
