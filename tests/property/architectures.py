"""Tiny random transformers decoders, one per architecture: real classes, small numbers.

Weights are drawn anew from a seed, norms and biases included (libraries start them at one and at
zero), large enough that attention is far from uniform. ``model.double()`` does not make everything
float64: norms, softmax and rotary tables are cast to float32 inside, so agreement ends near 1e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.flash_standin import NAME, standin

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

ROPES: Mapping[str, Mapping[str, Any] | None] = {
    "plain": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 4},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}  # fmt: skip
"""Scalings of the rotary angles, all of them active on rows of five tokens and more."""


@dataclass(frozen=True)
class Architecture:
    """One family: its classes, its options, and what the estimators need to know of it."""

    name: str  # as in the tests' ids
    config: str  # name of the configuration class
    model: str  # name of the causal language model class
    options: Mapping[str, Any] = field(default_factory=dict)  # of the configuration
    # Option -> other values that it may take; "rope" picks one of ``ROPES``.
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Attention implementations that the family has here; "flash" is a kernel of our own behind
    # transformers' flash wrapper.
    implementations: tuple[str, ...] = ("sdpa", "eager", "flash")
    value: str = "v_proj"  # suffix of the linear that makes the value states
    output: str = "o_proj"  # suffix of the linear that takes the heads' outputs
    fused: bool = False  # that linear makes queries and keys as well, in front of the values
    masks_by_type: bool = False  # the model takes one attention mask for each type of layer
    experts: bool = False  # it has a mixture of experts, whose weights no linear covers

    def changed(self, options: Mapping[str, Any]) -> Architecture:
        """The same family with other options."""
        return replace(self, options={**self.options, **options})

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return int(self.options.get("num_hidden_layers", self.options.get("n_layer", 0)))

    @property
    def heads(self) -> int:
        """Query heads."""
        return int(self.options.get("num_attention_heads", self.options.get("n_head", 0)))

    @property
    def groups(self) -> int:
        """Key/value heads."""
        return int(self.options.get("num_key_value_heads", self.heads))

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return int(self.options.get("head_dim", 16 // self.heads))

    @property
    def value_rows(self) -> tuple[int, int] | None:
        """(first, last) of the value's rows in a fused linear; None: all are."""
        first, width = (self.heads + self.groups) * self.head_dim, self.groups * self.head_dim
        return (first, first + width) if self.fused else None

    def _configuration(self, implementation: str | None) -> Any:
        options = dict(self.options)
        rope = options.pop("rope", "plain")
        if rope == "dynamic":
            options["max_position_embeddings"] = 2  # it scales what is longer: every row
        scaling = ROPES[rope] and {**ROPES[rope], "rope_theta": 10_000.0}
        if scaling and self.name == "gemma3":
            scaling = {"full_attention": scaling, "sliding_attention": dict(scaling)}
        if scaling:
            options["rope_parameters"] = scaling
        if "sliding_window" in self.choices and "layer_types" in options:
            options["layer_types"] = (options["layer_types"] * 2)[: self.depth]
        kind = implementation or self.implementations[0]
        config = getattr(transformers, self.config)(
            **options, attn_implementation="eager" if kind == "flash" else kind
        )
        config._experts_implementation = "eager"  # the grouped kernel has no float64
        return config

    def build(
        self,
        seed: int = 0,
        *,
        implementation: str | None = None,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        **options: Any,
    ) -> nn.Module:
        """A new model in evaluation mode; equal numbers for equal seeds."""
        architecture = self.changed(options)
        config = architecture._configuration(implementation)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # some vectors start at random
            model = getattr(transformers, self.model)(config)
        if implementation == "flash":
            with standin():
                model.set_attn_implementation(NAME)
        draw_weights(model, seed)
        model = model.to(device, dtype).eval()
        if architecture.options.get("rope") == "dynamic":
            # Its angles depend on the longest row that the model has met, which is this one.
            with torch.no_grad():
                model(torch.zeros(1, 16, dtype=torch.long, device=device), use_cache=False)
            config.max_position_embeddings = _WIDTHS["max_position_embeddings"]
        return model


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
_DEPTH = (2, 3)
_GROUPS = {"num_key_value_heads": (2, 4, 1), "num_hidden_layers": _DEPTH}
_FLAG = (False, True)
_ROPE = {"rope": tuple(ROPES)}
_SLIDING = {"use_sliding_window": _FLAG, "sliding_window": (3, 2), "max_window_layers": (1, 0)}

ARCHITECTURES = (
    Architecture(
        "llama", "LlamaConfig", "LlamaForCausalLM", _THREE,
        {**_GROUPS, **_ROPE, "attention_bias": _FLAG, "mlp_bias": _FLAG,
         "tie_word_embeddings": _FLAG, "head_dim": (4, 6)},
    ),
    Architecture(
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**_THREE, "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 3,
         "layer_types": _MIXED},
        {**_GROUPS, **_ROPE, "sliding_window": (3, 2), "attention_bias": _FLAG,
         "head_dim": (4, 6)},
        masks_by_type=True,
    ),
    Architecture(
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**_THREE, "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 3,
         "layer_types": _MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
        {**_GROUPS, **_ROPE, "sliding_window": (3, 2), "attn_logit_softcapping": (2.0, 0.7, None),
         "attention_bias": _FLAG},
        implementations=("eager", "flash"),
        masks_by_type=True,
    ),
    Architecture(
        "qwen3", "Qwen3Config", "Qwen3ForCausalLM", {**_TWO, "head_dim": 4},
        {**_GROUPS, **_ROPE, **_SLIDING, "attention_bias": _FLAG, "head_dim": (4, 6)},
        masks_by_type=True,
    ),
    Architecture(
        "qwen2", "Qwen2Config", "Qwen2ForCausalLM", _TWO,
        {**_GROUPS, **_ROPE, **_SLIDING, "tie_word_embeddings": _FLAG},
        masks_by_type=True,
    ),
    Architecture(
        "mistral", "MistralConfig", "MistralForCausalLM", {**_TWO, "sliding_window": 3},
        {**_GROUPS, **_ROPE, "sliding_window": (3, 2, None), "head_dim": (4, 6)},
    ),
    Architecture(
        "olmo2", "Olmo2Config", "Olmo2ForCausalLM", _TWO,
        {**_GROUPS, **_ROPE, "attention_bias": _FLAG},
    ),
    Architecture(
        "phi3", "Phi3Config", "Phi3ForCausalLM", _TWO,
        {**_GROUPS, "sliding_window": (None, 3)}, value="qkv_proj", fused=True,
    ),
    Architecture(
        "gpt2",
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
         "eos_token_id": 2},
        {"n_layer": _DEPTH, "n_head": (4, 2, 1), "scale_attn_by_inverse_layer_idx": _FLAG,
         "scale_attn_weights": (True, False)},
        value="attn.c_attn",
        output="attn.c_proj",
        fused=True,
    ),
    Architecture(
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        {**_TWO, "head_dim": 4, "sliding_window": 3, "num_local_experts": 3,
         "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]},
        {**_GROUPS, **_ROPE, "sliding_window": (3, 2), "num_experts_per_tok": (2, 1, 3)},
        implementations=("eager", "flash"),
        masks_by_type=True,
        experts=True,
    ),
    Architecture(
        "mixtral",
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_TWO, "head_dim": 4, "num_local_experts": 3, "num_experts_per_tok": 2},
        {**_GROUPS, **_ROPE, "sliding_window": (None, 3), "num_experts_per_tok": (2, 1, 3)},
        experts=True,
    ),
    Architecture(
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_TWO, "head_dim": 4, "num_experts": 3, "num_experts_per_tok": 2,
         "moe_intermediate_size": 6, "norm_topk_prob": True},
        {**_GROUPS, **_ROPE, "norm_topk_prob": (True, False), "decoder_sparse_step": (1, 2),
         "attention_bias": _FLAG},
        experts=True,
    ),
    Architecture(
        "qwen3_5",
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {**_THREE, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 3,
         "layer_types": ["full_attention", "linear_attention", "full_attention"]},
        {"num_key_value_heads": (2, 4, 1), "attention_bias": _FLAG,
         "linear_conv_kernel_dim": (3, 2), "linear_num_value_heads": (4, 2),
         "layer_types": (["full_attention", "linear_attention", "full_attention"],
                         ["linear_attention", "full_attention", "full_attention"],
                         ["linear_attention", "linear_attention", "full_attention"],
                         ["full_attention", "linear_attention", "linear_attention"])},
        masks_by_type=True,
    ),
)  # fmt: skip
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
MIXER = Architecture(
    "lfm2", "Lfm2Config", "Lfm2ForCausalLM",
    {**_THREE, "layer_types": ["full_attention", "conv", "full_attention"], "conv_L_cache": 3},
)  # fmt: skip
"""Its middle layer is a gated convolution alone, which has no self-only rule."""
SOFTMAX = tuple(a.name for a in ARCHITECTURES if a.name != "qwen3_5")
"""Every layer mixes positions by softmax attention only."""
MIXTURES = tuple(a.name for a in ARCHITECTURES if a.experts)
_SHARED = {
    **BY_NAME["qwen3_5"].options, "num_hidden_layers": 2, "num_experts": 3,
    "num_experts_per_tok": 2, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 5,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
SHARED = {
    "qwen3_next": Architecture("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", _SHARED),
    "qwen3_5_moe": Architecture(
        "qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _SHARED
    ),
}
"""Families whose mixtures have an expert for all tokens, called on positions in one dimension."""
