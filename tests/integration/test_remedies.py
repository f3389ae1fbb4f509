"""Each remedy of a trainer's refusal, applied: a table of what is refused and what then runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from alphatoken.errors import AlphaTokenError
from tests.integration import tiny_training as tiny

pytestmark = pytest.mark.slow  # fifty short runs

SIZES = {
    "vocab_size": 4 + len(tiny.ALPHABET), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_DROPOUT = {"attn_pdrop": 0.0}


def gpt2(**more: Any) -> GPT2LMHeadModel:
    """With attention dropout, as the hub has it."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=128, **SIZES, **more)
    )


def routed(*, eager: bool = False) -> Qwen3MoeForCausalLM:
    """Experts and a router that is no linear."""
    torch.manual_seed(0)
    made = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
            num_experts_per_tok=2, max_position_embeddings=128, **SIZES,
        )
    )  # fmt: skip
    if eager:
        made.set_experts_implementation("eager")
    return made


def dora() -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", use_dora=True, **tiny.LORA)


def ia3() -> Any:
    from peft import IA3Config

    names = {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    return IA3Config(task_type="CAUSAL_LM", **names)


def run(kind: str, folder: Path, given: Mapping[str, Any]) -> None:
    """Make the trainer and take two steps. A callable is made here; "rows" etc. are its data."""
    made = {name: value() if callable(value) else value for name, value in given.items()}
    rows = {"sft": tiny.sft_rows, "dpo": tiny.preference_rows}[kind]
    arguments = {
        "train_dataset": rows(8),
        "retention_dataset": rows(6, seed=7) if made.pop("kept", False) else None,
        "fisher_dataset": rows(4, seed=8) if made.pop("prompts", False) else None,
        "peft_config": made.pop("peft", None),
        **({} if made.pop("validation", True) else {"validation_dataset": None}),
        **({"ref_model": tiny.model()} if kind == "dpo" else {}),
    }
    make = {"sft": tiny.sft, "dpo": tiny.dpo}[kind]
    make(folder, **{"retention": "none", "max_steps": 2, **arguments, **made}).train()


LABEL, PATH = {"estimator": "label"}, {"estimator": "path"}
Cases = dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]]

SFT: Cases = {
    "values without validation rows": (
        {"policy": "all", "validation": False},
        {
            "validation_dataset=": {"validation": True},
            "policy='standard'": {"policy": "standard"},
            "'random'": {"policy": "random"},
        },
    ),
    "retention rows that are not there": (
        {"retention": "data"},
        {"retention_dataset=": {"kept": True}, "retention='none'": {"retention": "none"}},
    ),
    "a retention term alone, and none": (
        {"objective": "stability"},
        {"retention='diagonal'": {"retention": "diagonal"}},
    ),
    "rows for no Fisher": (
        {"prompts": True},
        {"leave it out": {"prompts": False}, "retention='diagonal'": {"retention": "diagonal"}},
    ),
    "DoRA": ({"peft": dora}, {"estimator='label'": LABEL}),
    "IA3": ({"peft": ia3}, {"estimator='label'": LABEL}),
    "DoRA and a Fisher": (
        {"peft": dora, "retention": "diagonal", **LABEL},
        {
            "retention='none'": {"retention": "none"},
            "parameters='all'": {"parameters": "all"},
        },
    ),
    "experts and a router": (
        {"model": routed},
        {
            "set_experts_implementation('eager')": {"model": lambda: routed(eager=True), **LABEL},
            "uncovered='skip'": {"uncovered": "skip"},
            "parameters": {"parameters": "linears,experts", "uncovered": "skip"},
        },
    ),
    "a router": (
        {"model": routed, "parameters": "linears,experts"},
        {
            "set_experts_implementation('eager')": {"model": lambda: routed(eager=True), **LABEL},
            "uncovered='skip'": {"uncovered": "skip"},
        },
    ),
    "experts and a Fisher": (
        {"model": lambda: routed(eager=True), "retention": "diagonal", **LABEL},
        {"retention='none'": {"retention": "none"}},
    ),
    "attention dropout": (
        {"model": gpt2},
        {
            "dropout to 0": {"model": lambda: gpt2(**NO_DROPOUT)},
            "estimator='path'": PATH,
            "scoring_forward='own'": {"scoring_forward": "own"},
        },
    ),
    "label smoothing": (
        {"label_smoothing_factor": 0.1},
        {"label_smoothing_factor=0": {"label_smoothing_factor": 0.0}},
    ),
    "reentrant checkpointing": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {
            "{'use_reentrant': False}": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
            "scoring_forward='own'": {"scoring_forward": "own"},
        },
    ),
    "packed responses": (
        {"value_unit": "response", "packing": True},
        {"value_unit='token'": {"value_unit": "token"}},
    ),
    "a published divisor": (
        {"policy": "stm", "policy_options": {"threshold": 1e9}, "kept_normalization": "sum"},
        {
            "leave it out": {"kept_normalization": "response"},
            "policy_mode='budget'": {"policy_mode": "budget"},
        },
    ),
    "a small pool": (
        {"validation_mode": "pool", "validation_batch_size": 12},
        {
            "validation_batch_size=10 (--validation_batch_size 10)": {"validation_batch_size": 10},
            "held_out_share=0 (--held_out_share 0)": {"held_out_share": 0.0},
        },
    ),
    "an optimizer without full state": (
        {"preconditioner": "full", "precondition_after": 1, "optim": "adafactor"},
        {"preconditioner=None": {"preconditioner": None}},
    ),
}  # fmt: skip

DPO: Cases = {
    "a sum over pairs": (
        {"kept_normalization": "sum"},
        {
            "'response'": {"kept_normalization": "response"},
            "'kept'": {"kept_normalization": "kept"},
        },
    ),
    "a likelihood loss": (
        {"loss_type": ["sft"]},
        {"policy='standard'": {"policy": "standard"}},
    ),
    "masked sums": (
        {"masked_logit": True, "precompute_ref_log_probs": True},
        {"precompute_ref_log_probs=False": {"precompute_ref_log_probs": False}},
    ),
    "masked logit of another loss": (
        {"masked_logit": True, "ld_alpha": 0.3},
        {"ld_alpha=None": {"ld_alpha": None}},
    ),
    "responses of no room": (
        {"max_response_length": 0},
        {"None, or a number at least 1": {"max_response_length": None}},
    ),
}
REFUSALS = [
    pytest.param(kind, *case, id=name)
    for kind, cases in (("sft", SFT), ("dpo", DPO))
    for name, case in cases.items()
]


@pytest.mark.filterwarnings("ignore:label values are taken by forward mode")  # DoRA's norm
@pytest.mark.parametrize(("kind", "given", "remedies"), REFUSALS)
def test_every_remedy_works(
    tmp_path: Path, kind: str, given: dict[str, Any], remedies: dict[str, dict[str, Any]]
) -> None:
    """It is refused, the message holds each remedy's own words, and with each of them it runs."""
    with pytest.raises(AlphaTokenError) as caught:
        run(kind, tmp_path / "refused", given)
    for words, change in remedies.items():
        assert words in caught.value.remedy
        run(kind, tmp_path / "remedied", {**given, **change})
