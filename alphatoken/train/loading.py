"""Models and tokenizers of transformers from a folder or by name; errors say which is at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alphatoken.errors import AlphaTokenError, ConfigError, ModelError

__all__ = [
    "freeze_unreached",
    "load_causal_model",
    "load_or_refuse",
    "load_tokenizer",
    "load_with_tokenizer",
    "no_progress_bar",
]


def load_causal_model(
    name: str | Path,
    *,
    adapter: str | Path | None = None,
    device: str | torch.device = "auto",
    **options: Any,
) -> nn.Module:
    """A causal language model in evaluation mode, on a GPU if there is one.

    Args:
        name: folder, or name on the hub.
        adapter: LoRA adapter that is put onto it, trainable.
        device: where it runs; "auto" takes a GPU if there is one.
        **options: of ``from_pretrained``, such as ``dtype`` and ``trust_remote_code``.

    Raises:
        ModelError: model or adapter is missing or unreadable. ConfigError: no such device.
    """
    from transformers import AutoModelForCausalLM

    with no_progress_bar():
        model: nn.Module = load_or_refuse("model", name, AutoModelForCausalLM, **options)
        if adapter is not None:
            from peft import PeftModel

            model = load_or_refuse(
                "adapter",
                adapter,
                lambda path: PeftModel.from_pretrained(model, path, is_trainable=True),
            )
    return model.to(_device(device)).eval()


def load_tokenizer(name: str | Path, **options: Any) -> Any:
    """The tokenizer of a model, from its folder or by its name on the hub.

    Raises:
        ModelError: it is missing or unreadable.
    """
    from transformers import AutoTokenizer

    return load_or_refuse("tokenizer", name, AutoTokenizer, **options)


def load_with_tokenizer(name: str | Path) -> tuple[nn.Module, Any]:
    """A causal language model, as ``load_causal_model`` gives it, and its tokenizer.

    Raises:
        ModelError: one of them is missing or unreadable.
    """
    return load_causal_model(name), load_tokenizer(name)


def load_or_refuse(what: str, name: str | Path, load: Any, **options: Any) -> Any:
    """What ``load`` makes of a name, or one error that says what could not be loaded from where.

    Args:
        what: is loaded, for the error.
        name: folder, or name on the hub.
        load: a class with ``from_pretrained``, or a function of the name.
        **options: of ``from_pretrained``.

    Raises:
        ModelError: whatever the library raised.
    """
    text = str(name)
    if text.startswith((".", "/", "~")) and not Path(text).expanduser().exists():
        raise ModelError(f"there is no folder with the {what}", got=text, remedy="check the path")
    make: Callable[..., Any] = getattr(load, "from_pretrained", load)
    try:
        return make(name, **options)
    except AlphaTokenError:
        raise
    except Exception as error:  # libraries raise whatever their file formats raise
        said = " ".join(str(error).split())
        raise ModelError(
            f"the {what} cannot be loaded",
            got=f"{text}: {type(error).__name__}: {said[:300]}",
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


def _device(name: str | torch.device) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("no such device", got=f"{name}: {str(error)[:120]}") from None
    return device


def freeze_unreached(model: nn.Module) -> int:
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
