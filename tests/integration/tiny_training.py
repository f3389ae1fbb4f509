"""A tiny random decoder, a character tokenizer and made-up rows, for runs of real trainers."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from tests.rows import jsonl

if TYPE_CHECKING:  # beside transformers, what a test needs that runs a trainer
    from datasets import Dataset
    from peft import LoraConfig

ALPHABET = string.ascii_lowercase + string.digits + " +=?.-"
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
SIZES: dict[str, int] = {
    "vocab_size": len(SPECIAL) + len(ALPHABET),
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def tokenizer(alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {piece: i for i, piece in enumerate([*SPECIAL, *alphabet])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def model(
    seed: int = 0, *, layers: int = 3, dropout: float = 0.0, **sizes: int
) -> LlamaForCausalLM:
    """A random Llama; ``sizes`` are options of its configuration."""
    torch.manual_seed(seed)
    own = {"intermediate_size": 48, "num_hidden_layers": layers, "attention_dropout": dropout}
    config = LlamaConfig(**{**SIZES, **own, **sizes})
    return LlamaForCausalLM(config)


def mixture(seed: int = 0, **sizes: int) -> MixtralForCausalLM:
    """The same with a mixture of four experts in each layer, of which each token meets two."""
    torch.manual_seed(seed)
    own = {"intermediate_size": 24, "num_hidden_layers": 3}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = MixtralConfig(**{**SIZES, **own, **experts, **sizes})
    return MixtralForCausalLM(config)


def hybrid(seed: int = 0, **sizes: int) -> Qwen3_5ForCausalLM:
    """The same with gated delta nets in two of three layers."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        **SIZES | sizes, intermediate_size=48, num_hidden_layers=3, head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention"] * 2 + ["full_attention"],
    )  # fmt: skip
    return Qwen3_5ForCausalLM(config)


def lora() -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", **LORA)


def sums(rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Prompt and completion: additions, of differing lengths."""
    numbers = torch.randint(1, 999, (rows, 2), generator=torch.Generator().manual_seed(seed))
    return [
        {"prompt": f"{a}+{b}=?", "completion": f" {a} plus {b} is {a + b}."}
        for a, b in numbers.tolist()
    ]


def losses(trainer: Any) -> list[float]:
    """Of all logs of a run."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def furthest(first: Any, second: Any) -> float:
    """Largest difference between the weights of two trainers."""
    one, two = weights(first.model), weights(second.model)
    assert one.keys() == two.keys()
    return max(float((one[n] - two[n]).abs().max()) for n in one)


def saved(place: Path, count: int) -> Path:
    """The model with its tokenizer, so many rows, and a dozen pairs."""
    model().save_pretrained(place / "model")
    tokenizer().save_pretrained(place / "model")
    jsonl(place / "rows.jsonl", sums(count))
    jsonl(place / "pairs.jsonl", preference_rows(12))
    return place


def dataset(rows: list[dict[str, Any]]) -> Dataset:
    from datasets import Dataset

    return Dataset.from_list(rows)


def sft_rows(rows: int = 48, seed: int = 0) -> Dataset:
    return dataset(sums(rows, seed))


def preference_rows(rows: int = 32, seed: int = 0) -> Dataset:
    """The same completions as chosen ones, with wrong ones beside them."""
    wrong = [" i do not know, ask me again.", " it is {}."]
    return dataset(
        [
            {
                "prompt": row["prompt"],
                "chosen": row["completion"],
                "rejected": wrong[i % 2].format(i * 7 % 100),
            }
            for i, row in enumerate(sums(rows, seed))
        ]
    )


def tokenised(rows: int = 48, seed: int = 0) -> Dataset:
    """Of ``sums``, as transformers' own trainer takes them."""
    encode, encoded = tokenizer(), []
    for row in sums(rows, seed):
        prompt, answer = (encode(row[name])["input_ids"] for name in ("prompt", "completion"))
        encoded.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return dataset(encoded)


def padded(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator of a user's own: what one of transformers makes of labelled rows."""
    width = max(len(row["input_ids"]) for row in rows)
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        ids, labels = (torch.as_tensor(row[name]).tolist() for name in ("input_ids", "labels"))
        rest = width - len(ids)
        columns["input_ids"].append(ids + [0] * rest)
        columns["labels"].append(labels + [-100] * rest)
        columns["attention_mask"].append([1] * len(ids) + [0] * rest)
    return {name: torch.tensor(table) for name, table in columns.items()}


def options(folder: Any, **more: Any) -> dict[str, Any]:
    """Arguments that every run of these tests shares."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "max_length": 64,
        "seed": 3,
        **more,
    }


ALPHA: dict[str, Any] = {
    "layers": "2",
    "validation_batch_size": 6,
    "retention": "diagonal",
    "fisher_samples": 4,
    "fisher_max_new_tokens": 8,
    "held_out_steps": 2,
}
"""Small values of our own options."""


def with_ours(more: dict[str, Any]) -> dict[str, Any]:
    """Options, and small values of ours that the run of this policy takes beside them."""
    from alphatoken.train.policies import OF_VALUES, unread_options
    from alphatoken.train.policy import Needs

    own = {**ALPHA, **({"layers": "all"} if more.get("parameters") == "all" else {})}
    named = more if isinstance(more.get("policy", ""), str) else {**more, "policy": None}
    unread = dict(unread_options(named, "sft"))
    if not getattr(more.get("policy"), "needs", Needs(values=True)).values:
        unread |= OF_VALUES
    return {k: v for k, v in own.items() if k not in unread.keys() & OF_VALUES} | more


def made(kind: Any, folder: Any, *, peft: bool = False, **more: Any) -> Any:
    """A trainer of this class, of ours or of those below them; what is missing is made.

    Fields of its configuration are options, all others (and a policy that is no name) go to the
    trainer by themselves.
    """
    from transformers import Trainer, TrainingArguments
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    theirs = {SFTTrainer: SFTConfig, DPOTrainer: DPOConfig, Trainer: TrainingArguments}
    config = getattr(kind, "CONFIG", None) or theirs[kind]
    own = set(config.__dataclass_fields__)
    if not isinstance(more.get("policy", ""), str):
        own.remove("policy")
    chosen = options(folder, **{name: value for name, value in more.items() if name in own})
    arguments = {name: value for name, value in more.items() if name not in own}
    makers = {
        "model": model,
        "train_dataset": preference_rows if issubclass(kind, DPOTrainer) else sft_rows,
        "processing_class": tokenizer,
    } | ({"peft_config": lora} if peft else {})
    arguments |= {name: make() for name, make in makers.items() if name not in arguments}
    args = config(**{name: value for name, value in chosen.items() if name in own})
    return kind(args=args, **arguments)


def sft(folder: Any, kind: Any = None, **more: Any) -> Any:
    """An ``AlphaSFTTrainer``, or a subclass, with small values of our own options."""
    from alphatoken.train import AlphaSFTTrainer

    more = {"validation_dataset": sft_rows(12, seed=5), **with_ours(more)}
    return made(kind or AlphaSFTTrainer, folder, **more)


def dpo(folder: Any, kind: Any = None, **more: Any) -> Any:
    """The same of preference pairs."""
    from alphatoken.train import AlphaDPOTrainer

    more = {"validation_dataset": preference_rows(12, seed=5), **with_ours(more)}
    return made(kind or AlphaDPOTrainer, folder, **more)


def prepared(folder: Any, rows: Dataset) -> list[dict[str, list[int]]]:
    """Token ids and labels as a trainer has them."""
    from alphatoken.train import AlphaSFTTrainer

    own = {"policy": "all", "export_values": False}
    trainer = made(AlphaSFTTrainer, folder, model=model(layers=2), train_dataset=rows, **own)
    return [
        {"input_ids": list(row["input_ids"]), "labels": list(row["labels"])}
        for row in trainer.train_dataset
    ]


def weights(trained: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trained.named_parameters()}
