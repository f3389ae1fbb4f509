"""A finished model of a cell, and its tokenizer, from a folder or by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from alphatoken.errors import ModelError

__all__ = ["load_causal_model"]


def load_causal_model(name: str | Path, **options: Any) -> tuple[nn.Module, Any]:
    """Model in evaluation mode, on a GPU if there is one, and tokenizer.

    Raises:
        ModelError: they cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(name, **options)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # whatever the file formats raise
        text = " ".join(str(error).split())
        raise ModelError("the model cannot be loaded", got=f"{name}: {text[:300]}") from None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(device).eval(), tokenizer
