"""Loading a model and its tokenizer, with errors that say which of the two is at fault."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alphatoken.errors import AlphaTokenError, ConfigError, ModelError
from alphatoken.model.protocol import find_adapter

__all__ = [
    "load_model",
    "load_tokenizer",
    "loaded",
    "longest_allowed",
    "no_progress_bar",
    "text_only",
]


def load_tokenizer(options: argparse.Namespace) -> Any:
    """The tokenizer that belongs to ``--model``.

    Raises:
        ModelError: it is missing or unreadable.
    """
    from transformers import AutoTokenizer

    return loaded(
        "tokenizer",
        options.model,
        lambda: AutoTokenizer.from_pretrained(
            options.model, trust_remote_code=options.trust_remote_code
        ),
    )


def load_model(options: argparse.Namespace) -> nn.Module:
    """The model in evaluation mode on its device, with its LoRA adapter if one is named.

    Raises:
        ModelError: it is missing or unreadable. ConfigError: no such device.
    """
    from transformers import AutoModelForCausalLM

    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    with no_progress_bar():
        model: nn.Module = loaded(
            "model",
            options.model,
            lambda: AutoModelForCausalLM.from_pretrained(
                options.model, dtype=dtype, trust_remote_code=options.trust_remote_code
            ),
        )
        if options.adapter is not None:
            model = loaded("adapter", options.adapter, lambda: _with_adapter(model, options))
    return model.to(_device(options.device)).eval()


def _with_adapter(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    from peft import PeftModel

    adapted: nn.Module = PeftModel.from_pretrained(model, options.adapter, is_trainable=True)
    return adapted


def loaded(what: str, path: str, load: Callable[[], Any]) -> Any:
    """The result of ``load``, or one error that says what could not be loaded from where.

    Raises:
        ModelError: whatever the library raised.
    """
    if path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
        raise ModelError(f"there is no folder with the {what}", got=path, remedy="check the path")
    try:
        return load()
    except AlphaTokenError:
        raise
    except Exception as error:  # libraries raise whatever their file formats raise
        text = " ".join(str(error).split())
        raise ModelError(
            f"the {what} cannot be loaded",
            got=f"{path}: {type(error).__name__}: {text[:300]}",
            remedy="check the path and that the files in it are whole",
        ) from None


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Within the context transformers draws no bars of its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("no such device", got=f"{name}: {str(error)[:120]}") from None
    return device


def longest_allowed(model: nn.Module, asked: int | None) -> int | None:
    """``--max-length`` if given, else what the model allows, else None.

    Raises:
        ConfigError: more than the model allows.
    """
    limit = find_adapter(model).max_positions()
    if asked is not None and limit is not None and asked > limit:
        raise ConfigError(
            "--max-length is more than the model allows",
            got=f"{asked}, limit {limit}",
            why="positions past the limit have no meaning to the model",
            remedy=f"at most --max-length {limit}",
        )
    return limit if asked is None else asked


def text_only(model: nn.Module) -> int:
    """Freeze what text never reaches (a vision tower); how many numbers that are.

    Such parameters would get no gradient, but would be copied, sharded and waited for.
    """
    decoder = getattr(model, "get_decoder", lambda: None)()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if decoder is None or head is None:
        return 0
    reached = {id(p) for part in (decoder, head) for p in part.parameters()}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in reached]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return sum(p.numel() for p in frozen)
