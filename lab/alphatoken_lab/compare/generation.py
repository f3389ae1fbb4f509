"""Greedy answers of a model, for judges and for code that is executed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from alphatoken.errors import ModelError
from alphatoken.model.modes import evaluation_mode

__all__ = ["answers", "prompt_ids"]


def prompt_ids(tokenizer: Any, prompt: str, *, chat: bool = True) -> list[int]:
    """A prompt as the model reads it: in the chat template, or as plain text."""
    if chat and getattr(tokenizer, "chat_template", None) is not None:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(prompt)["input_ids"])


@torch.no_grad()
def answers(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 256,
    chat: bool = True,
) -> list[str]:
    """Greedy answers of the model to each prompt, up to its end token.

    One prompt at a time: padding on the left would move the numbers of some models. A prompt that
    leaves no room is cut at its beginning.
    """
    generate: Any = getattr(model, "generate", None)
    if generate is None:
        raise ModelError("the model cannot generate", got=type(model).__name__)
    device = next(model.parameters()).device
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    written = []
    with evaluation_mode(model):
        for prompt in prompts:
            ids = prompt_ids(tokenizer, prompt, chat=chat)
            new = max_new_tokens if limit is None else min(max_new_tokens, limit - 1)
            ids = ids if limit is None else ids[-(limit - new) :]
            given = torch.tensor([ids], device=device)
            found = generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id or 0,  # asked for, though nothing is padded
            )
            written.append(tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True))
    return written
