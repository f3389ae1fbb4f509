"""Models and tokenizers of transformers from a folder or by name; errors say which is at fault.

A LoRA adapter brings along what it was trained with: the tokenizer and chat template in its folder,
and the rows of the embedding that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alphatoken.errors import AlphaTokenError, ConfigError, ModelError, quoted
from alphatoken.model.protocol import find_adapter
from alphatoken.model.token_ids import embedding_rows
from alphatoken.support.storage import read_json

__all__ = [
    "Limits",
    "ModelParts",
    "find_limits",
    "find_parts",
    "freeze_unreached",
    "has_tokenizer",
    "limits_of",
    "load_causal_model",
    "load_or_refuse",
    "load_tokenizer",
    "model_name",
    "no_progress_bar",
    "rows_tokenizer",
    "text_tokenizer",
]


@dataclass(frozen=True)
class ModelParts:
    """Places of a model's parts, each a folder or a name on the hub.

    Attributes:
        model: of an adapter, its base.
        adapter: LoRA adapter, if there is one.
        tokenizer: the adapter's own where it has one, or else the model's.
    """

    model: str
    adapter: str | None
    tokenizer: str


def find_parts(name: str | Path, adapter: str | Path | None = None) -> ModelParts:
    """The parts of a model; the folder of an adapter alone names its base.

    Raises:
        ConfigError: the base of such an adapter does not exist, or peft is not installed.
    """
    model, folder = str(name), Path(name).expanduser()
    alone = (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()
    if adapter is None and alone:
        base = (read_json(folder / "adapter_config.json") or {}).get("base_model_name_or_path")
        if not base or (str(base).startswith((".", "/", "~")) and not Path(base).is_dir()):
            raise ConfigError(
                "the adapter's base does not exist",
                got=f"{name}: {base or 'names none'}",
                remedy=f"--model_name_or_path BASE --adapter {name}",
            )
        model, adapter = str(base), folder
    if adapter is None:
        return ModelParts(model, None, model)
    if find_spec("peft") is None:
        raise ConfigError(
            "an adapter needs peft", got=str(adapter), remedy="pip install 'alphatoken[lora]'"
        )
    return ModelParts(model, str(adapter), str(adapter) if has_tokenizer(adapter) else model)


@dataclass(frozen=True)
class Limits:
    """Limits of a model, from its configuration alone.

    Attributes:
        positions: longest sequence; None has no limit.
        tokens: rows of the embedding; None is not known.
        layers: of the decoder; None is not known.
    """

    positions: int | None
    tokens: int | None
    layers: int | None = None

    def length(self, asked: int | None) -> int | None:
        """The longest sequence to be read: as long as the model allows, or as was asked for.

        Raises:
            ConfigError: more is asked for than the model allows.
        """
        if asked is not None and self.positions is not None and asked > self.positions:
            raise ConfigError(
                "max_length is more than the model allows",
                got=f"{asked}, limit {self.positions}",
                why="positions past the limit have no meaning to the model",
                remedy=f"at most --max_length {self.positions} (max_length: {self.positions})",
            )
        return self.positions if asked is None else asked


def find_limits(parts: ModelParts, **options: Any) -> Limits:
    """Find a model's limits before it is loaded.

    Args:
        parts: of the model.
        **options: of ``from_pretrained``.

    Raises:
        ModelError: the configuration is missing or unreadable.
    """
    from transformers import AutoConfig

    from alphatoken.model.transformers import position_limit

    config = load_or_refuse("model", parts.model, AutoConfig, **options).get_text_config()
    tokens = getattr(config, "vocab_size", None)
    if parts.adapter is not None and tokens is not None:
        tokens = max([tokens, *_rows_held(parts.adapter, config.hidden_size)])
    return Limits(position_limit(config), tokens, getattr(config, "num_hidden_layers", None))


def limits_of(model: Any, args: Any = None) -> Limits:
    """Limits of a model: one at hand, or one that a trainer will load by its name."""
    if not isinstance(model, str):
        adapter = find_adapter(model)
        return Limits(adapter.max_positions(), embedding_rows(model), len(adapter.layers()))
    given: Any = getattr(args, "model_init_kwargs", None) or {}
    options = {n: given[n] for n in ("revision", "trust_remote_code") if n in given}
    trusted = getattr(args, "trust_remote_code", False)
    return find_limits(find_parts(model), **{"trust_remote_code": trusted, **options})


def _rows_held(adapter: str, width: int) -> Iterator[int]:
    """Rows of whole embeddings and heads that an adapter holds."""
    from peft.utils import load_peft_weights

    weights = load_or_refuse("adapter", adapter, lambda path: load_peft_weights(path, device="cpu"))
    for name, weight in weights.items():
        named = any(part in name for part in ("embed", "wte", "lm_head"))
        if named and "lora_" not in name and weight.dim() == 2 and weight.shape[1] == width:
            yield len(weight)


def has_tokenizer(name: str | Path, **options: Any) -> bool:
    """True if a folder, or the hub under a name (``options`` of ``cached_file``), has one."""
    from transformers.utils.hub import cached_file

    file, folder = "tokenizer_config.json", Path(name).expanduser()
    if folder.is_dir():
        return (folder / file).is_file()
    try:
        return cached_file(str(name), file, **options) is not None
    except OSError:
        return False


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
        ModelError: model or adapter is missing or unreadable, or the adapter holds an embedding of
            another size and not the head that belongs to it. ConfigError: no such device.
    """
    from transformers import AutoModelForCausalLM

    with no_progress_bar():
        model: nn.Module = load_or_refuse("model", name, AutoModelForCausalLM, **options)
        if adapter is not None:
            from peft import PeftModel

            model = load_or_refuse(
                "adapter",
                adapter,
                lambda path: PeftModel.from_pretrained(
                    _with_rows_of(model, path), path, is_trainable=True
                ),
            )
    return model.to(_device(device)).eval()


def _with_rows_of(model: Any, adapter: str | Path) -> Any:
    """The base with as many rows of its embedding as the adapter holds, if it holds them.

    An adapter that was trained with added tokens holds the whole embedding and the whole head
    (PEFT saves both, also where they are tied) and can be loaded into a base of that size only.
    """
    from peft.utils import load_peft_weights

    parts = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    names = {f"base_model.model.{name}.weight": one for name, one in model.named_modules()}
    held = {
        what: len(weight)
        for name, weight in load_peft_weights(str(adapter), device="cpu").items()
        for what, part in parts.items()
        if part is not None and names.get(name) is part
    }
    sizes = {len(part.weight) for part in parts.values() if part is not None}
    if not held or set(held.values()) == sizes:
        return model
    if len(set(held.values())) > 1 or len(held) < len(parts):
        raise ModelError(
            "the adapter does not hold both the embedding and the head that it was trained with",
            got=f"{adapter}: " + ", ".join(f"{what} {rows}" for what, rows in held.items())
            + f"; the base has {', '.join(map(str, sorted(sizes)))}",
            why="the tokens that were added would have no row in one of the two",
            remedy="save it by save_pretrained(..., save_embedding_layers=True), or merge it first",
        )  # fmt: skip
    model.resize_token_embeddings(held.popitem()[1], mean_resizing=False)
    return model


def load_tokenizer(name: str | Path, **options: Any) -> Any:
    """The tokenizer of a model, from its folder or by its name on the hub.

    Raises:
        ModelError: it is missing or unreadable.
    """
    from transformers import AutoTokenizer

    return load_or_refuse("tokenizer", name, AutoTokenizer, **options)


def rows_tokenizer(args: Any, tokenizer: Any) -> Any:
    """The tokenizer with the template, tokens and end token that TRL will give it.

    Args:
        args: configuration of a trainer, of which ``eos_token`` and ``chat_template_path`` count.
        tokenizer: of the model, which stays as it is.
    """
    end, path = getattr(args, "eos_token", None), getattr(args, "chat_template_path", None)
    if end is None and path is None:
        return tokenizer
    own = deepcopy(tokenizer)
    if end is not None:
        own.eos_token = end
    if path is not None and Path(path).suffix in (".jinja", ".j2"):
        own.chat_template = Path(path).read_text(encoding="utf-8")
    elif path is not None:
        other = load_tokenizer(path)
        own.chat_template, own.eos_token = other.chat_template, other.eos_token
        known = own.get_vocab()
        own.add_tokens([t for t in other.added_tokens_decoder.values() if t.content not in known])
    return own


def text_tokenizer(processing_class: Any) -> Any:
    """The tokenizer that a processor holds; one that is a tokenizer, itself."""
    return getattr(processing_class, "tokenizer", processing_class)


def model_name(model: nn.Module | None) -> str:
    """Name or folder that a model was loaded from, by its configuration; "" if none says."""
    return str(getattr(getattr(model, "config", None), "name_or_path", None) or "")


def load_or_refuse(what: str, name: str | Path, load: Any, **options: Any) -> Any:
    """Result of ``load`` for a name, or one error that says what failed to load from where.

    Args:
        what: is loaded, for the error.
        name: folder, or name on the hub.
        load: a class with ``from_pretrained``, or a function of the name.
        **options: of ``from_pretrained``.

    Raises:
        ModelError: whatever the library raised.
    """
    text = str(name)
    there = Path(text).expanduser().exists()
    folder = "adapter" if what == "adapter" else "model"
    flag = "--adapter FOLDER" if what == "adapter" else "--model_name_or_path FOLDER"
    if text.startswith((".", "/", "~")) and not there:
        raise ModelError(f"no such {folder} folder", got=text, remedy="check the path")
    make: Callable[..., Any] = getattr(load, "from_pretrained", load)
    try:
        return make(name, **options)
    except AlphaTokenError:
        raise
    except Exception as error:  # libraries raise whatever their file formats raise
        if isinstance(error, OSError) and not there:
            raise ModelError(
                f"no such {folder} folder, and no {what} of this name from the hub",
                got=f"{text}: {quoted(error)}",
                remedy=f"check the path, or without the network name a folder that is here: {flag}",
            ) from None
        raise ModelError(
            f"the {what} cannot be loaded",
            got=f"{text}: {quoted(error)}",
            remedy="check the path and that the files in it are whole",
        ) from None


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Context in which transformers draws no bars of its own."""
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
        raise ConfigError(
            "no such device",
            got=f"{name}: {quoted(error)}",
            remedy="--device cpu, or leave it out to take what is there",
        ) from None
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
