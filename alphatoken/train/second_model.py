"""A second model whose view of the training tokens a policy compares with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alphatoken.errors import ConfigError, ModelError, require_choice
from alphatoken.train.loading import find_parts, load_causal_model, load_tokenizer

__all__ = ["check_tokenizers", "load_reference"]

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_PROBE = "A token, 12.5 % of 3 × “words”;\n\tdef f(x): return x**2  # été 你好"


def load_reference(
    name: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
    tokenizer: Any = None,
) -> nn.Module:
    """A causal language model without gradients, in evaluation mode.

    A folder with a PEFT adapter gives its base model with the adapter merged.

    Args:
        name: folder, or name on the hub.
        device: where it runs; need not be the trained model's.
        dtype: of its weights: "bfloat16" halves the memory of "float32".
        tokenizer: of the model that is trained; None compares nothing.

    Raises:
        ConfigError: it cannot be loaded, an unknown dtype, or its tokenizer or vocabulary differ.
    """
    kind = _dtype(dtype)
    try:
        model = _loaded(name, device, kind)
    except ModelError as problem:
        raise ConfigError(
            "the reference model cannot be loaded",
            got=problem.got,
            remedy="give a folder written by save_pretrained, or a name on the hub",
        ) from problem
    if tokenizer is not None:
        rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        if rows < len(tokenizer):
            raise _differ(f"{rows} rows of embeddings, {len(tokenizer)} tokens in the tokenizer")
        check_tokenizers(tokenizer, _tokenizer_of(name))
    return model.requires_grad_(False)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    require_choice("dtype of the reference model", name, _DTYPES)
    return _DTYPES[name]


def _loaded(name: str | Path, device: str | torch.device, dtype: torch.dtype) -> nn.Module:
    parts = find_parts(name)
    model: Any = load_causal_model(parts.model, adapter=parts.adapter, device=device, dtype=dtype)
    merged: nn.Module = model if parts.adapter is None else model.merge_and_unload()
    return merged.eval()


def _tokenizer_of(name: str | Path) -> Any:
    try:
        return load_tokenizer(find_parts(name).tokenizer)
    except ModelError as problem:
        raise ConfigError(
            "the reference model has no tokenizer to compare with the trained model's",
            got=problem.got,
            why="with another tokenizer the same ids are other words",
            remedy="save its tokenizer beside it",
        ) from problem


def check_tokenizers(own: Any, other: Any) -> None:
    """Refuse two tokenizers that do not give every id the same text.

    Compared are the vocabularies (text to id), and the ids of one text with digits, code, accents
    and other scripts, because merges and normalisation may differ where vocabularies agree.

    Raises:
        ConfigError: naming what differs.
    """
    ours, theirs = _vocabulary(own), _vocabulary(other)
    wrong = [text for text, number in ours.items() if theirs.get(text) != number]
    if wrong:
        text = wrong[0]
        raise _differ(
            f"{len(wrong)} of {len(ours)} tokens, such as {text!r}: id {ours[text]} here, "
            f"{theirs.get(text, 'none')} in the reference"
        )
    if _ids(own) != _ids(other):
        raise _differ("the vocabularies agree, and one text is split into other tokens")


def _vocabulary(tokenizer: Any) -> Mapping[str, int]:
    found = tokenizer.get_vocab()
    if not isinstance(found, Mapping) or not found:
        raise ModelError("the tokenizer names no vocabulary", got=type(tokenizer).__qualname__)
    return found


def _ids(tokenizer: Any) -> list[int]:
    return list(tokenizer(_PROBE, add_special_tokens=False)["input_ids"])


def _differ(what: str) -> ConfigError:
    return ConfigError(
        "the reference model's tokenizer is not the trained model's",
        got=what,
        why="token by token the two would be asked about other words",
        remedy="take a reference model of the same family",
    )
