"""The demo's tokenizer and decoder, both made here."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from alphatoken.data import Example, Row, Turn, collate, encode_rows
from alphatoken.demo.world import draw_exchanges, general_text, vocabulary
from alphatoken.select.losses import masked_sft_loss

__all__ = ["fine_tune", "make_model", "make_tokenizer", "pretrain"]

TEMPLATE = (
    "<start> {% for message in messages %}{% if message.role == 'assistant' %}<assistant> "
    "{{ message.content }} <end> {% else %}<user> {{ message.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_tokenizer() -> Any:
    """One token a word, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unknown>", "<start>", "<end>", "<user>", "<assistant>"]
    words = {word: number for number, word in enumerate([*special, *vocabulary()])}
    core = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", words["<start>"])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unknown>",
        bos_token="<start>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: Any, seed: int = 0) -> Any:
    """A Llama of four layers and about 200,000 parameters, freshly initialised."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _text_examples(count: int, tokenizer: Any, generator: random.Random) -> list[Example]:
    """General text as examples whose every token but the first is a label."""
    rows = [
        Row(index, f"text {index}", (Turn("assistant", general_text(generator)),))
        for index in range(count)
    ]
    return encode_rows(rows, tokenizer)[0]


def _task_examples(count: int, tokenizer: Any, generator: random.Random) -> list[Example]:
    rows = [
        Row(i, f"task {i}", (Turn("user", e.prompt), Turn("assistant", " ".join(e.response))))
        for i, e in enumerate(draw_exchanges(count, generator))
    ]
    return encode_rows(rows, tokenizer)[0]


def pretrain(model: nn.Module, tokenizer: Any, *, steps: int, seed: int = 0) -> float:
    """Train on general text with few clean tasks among it; returns the last step's loss."""
    generator = random.Random(seed)
    texts = _text_examples(2000, tokenizer, generator)
    tasks = _task_examples(300, tokenizer, generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    chosen = (generator.sample(texts, 30) + generator.sample(tasks, 2) for _ in range(steps))
    return _train(model, optimizer, chosen, schedule)


def fine_tune(model: nn.Module, examples: Sequence[Example], *, steps: int, seed: int = 0) -> None:
    """A few steps of ordinary fine-tuning on all tokens, in place."""
    generator = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    _train(model, optimizer, (generator.sample(examples, 16) for _ in range(steps)))


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[Example]],
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> float:
    """One step on all response tokens of each batch; returns the last step's loss."""
    model.train()
    loss = torch.zeros(())
    for chosen in steps:
        batch = collate(chosen)
        labels = batch["labels"]
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        loss = masked_sft_loss(model(**inputs).logits, labels, labels != -100)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    model.eval()
    return float(loss.detach())
