"""Greedy answers of a model to the questions of a file, as alpaca_eval reads them.

    answers-NAME.json   [{"instruction": ..., "output": ..., "generator": ...}, ...]

``alpaca_eval --model_outputs answers-NAME.json --reference_outputs OPPONENT`` compares them with
those of another model, which are of the same layout, and leaves ``leaderboard.csv``.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alphatoken.data import read_records
from alphatoken.errors import DataError, ModelError
from alphatoken.model.modes import evaluation_mode
from alphatoken.support.storage import write_json

__all__ = ["answers", "export_answers", "prompt_ids", "read_questions", "win_rate"]

_QUESTION = ("instruction", "prompt", "question", "turns")
"""Fields of AlpacaEval's, Arena-Hard's and MT-Bench's questions that hold the text."""


def read_questions(path: str | Path, limit: int | None = None) -> list[str]:
    """Questions of a file; of several turns the first.

    Raises:
        DataError: the file cannot be read, has no rows, or a row has no question.
    """
    questions: list[str] = []
    for place, record in read_records(path):
        if limit is not None and len(questions) >= limit:
            break
        text = _question(record)
        if not text:
            raise DataError(
                "the row has no question",
                got=f"{place}: {', '.join(record)}",
                remedy=f"one of {', '.join(_QUESTION)}",
            )
        questions.append(text)
    if not questions:
        raise DataError("there are no questions", got=str(path))
    return questions


def _question(record: Mapping[str, Any]) -> str | None:
    value = next((record[name] for name in _QUESTION if name in record), None)
    value = value[0] if isinstance(value, list) and value else value
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) and value.strip() else None


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

    Raises:
        ModelError: the model cannot generate.
    """
    generate: Any = getattr(model, "generate", None)
    if generate is None:
        raise ModelError("the model cannot generate", got=type(model).__name__)
    device = next(model.parameters()).device
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    texts = []
    with evaluation_mode(model):
        for prompt in prompts:
            ids = prompt_ids(tokenizer, prompt, chat=chat)
            new = max_new_tokens if limit is None else min(max_new_tokens, limit - 1)
            ids = ids if limit is None else ids[-(limit - new) :]
            inputs = torch.tensor([ids], device=device)
            generated = generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id or 0,  # asked for, though nothing is padded
            )
            texts.append(tokenizer.decode(generated[0, len(ids) :], skip_special_tokens=True))
    return texts


def export_answers(
    path: Path, questions: Sequence[str], outputs: Sequence[str], generator: str
) -> None:
    """Write answers as alpaca_eval's ``--model_outputs`` and ``--reference_outputs`` hold them."""
    rows = [
        {"instruction": question, "output": output, "generator": generator}
        for question, output in zip(questions, outputs, strict=True)
    ]
    write_json(path, rows)


def win_rate(path: Path, generator: str) -> float:
    """Win rate in percent of a model's answers, of the leaderboard that alpaca_eval wrote.

    Raises:
        DataError: the file has no such model, or no win rate.
    """
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if generator in (next(iter(row.values())), row.get("name"), row.get("generator")):
                try:
                    return float(row["win_rate"])
                except (KeyError, ValueError):
                    break
    raise DataError(
        "the leaderboard has no win rate of these answers",
        got=f"{path}: {generator}",
        remedy="alpaca_eval --model_outputs with the answers-NAME.json of this folder",
    )
