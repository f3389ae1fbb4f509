"""Models and tokenizers of transformers from a folder or by name; errors say which is at fault.

A LoRA adapter brings along what it was trained with: the tokenizer and chat template in its folder,
and the rows of the embedding that it holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alphatoken.errors import AlphaTokenError, ConfigError, ModelError, quoted, unsaid
from alphatoken.model.batch import embedding_rows
from alphatoken.model.folder import (
    is_adapter,
    require_adapter_folder,
    require_model_folder,
    require_tokenizer_files,
    require_weights,
)
from alphatoken.model.protocol import find_adapter
from alphatoken.support.storage import read_json


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
        ModelError: a folder holds no whole model or adapter; says what it holds instead.
    """
    model = str(name)
    if adapter is None and is_adapter(name):
        model, adapter = _base_of(name), Path(name).expanduser()
    require_model_folder(model)
    if adapter is None:
        return ModelParts(model, None, model)
    if find_spec("peft") is None:
        raise ConfigError(
            "an adapter needs peft", got=str(adapter), remedy="pip install 'alphatoken[lora]'"
        )
    require_adapter_folder(adapter)
    return ModelParts(model, str(adapter), str(adapter) if has_tokenizer(adapter) else model)


def _base_of(adapter: str | Path) -> str:
    """The model that an adapter says it belongs to."""
    require_adapter_folder(adapter)
    file = Path(adapter).expanduser() / "adapter_config.json"
    base = str((read_json(file) or {}).get("base_model_name_or_path") or "")
    if not base or not (Path(base).expanduser().is_dir() or _has_file(base, "config.json")):
        raise ConfigError(
            "the adapter's base does not exist",
            got=f"{adapter}: {base or 'names none'}",
            remedy=f"write the folder of its base into {file} (base_model_name_or_path); where a "
            f"command has --adapter, --model_name_or_path BASE --adapter {adapter} does as well",
        )
    if is_adapter(base):
        raise ConfigError(
            "the adapter's base is an adapter itself",
            got=f"{adapter}: {base}",
            remedy=f"merge that one first, and write the merged model's folder into {file}",
        )
    return base


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

    def length(self, requested: int | None) -> int | None:
        """The longest sequence to be read: as long as the model allows, or as was asked for.

        Raises:
            ConfigError: more is asked for than the model allows.
        """
        if requested is not None and self.positions is not None and requested > self.positions:
            raise ConfigError(
                "max_length is more than the model allows",
                got=f"{requested}, limit {self.positions}",
                why="positions past the limit have no meaning to the model",
                remedy=f"at most --max_length {self.positions} (max_length: {self.positions})",
            )
        return self.positions if requested is None else requested


def find_limits(parts: ModelParts, **options: Any) -> Limits:
    """Find a model's limits before it is loaded; ``options`` are those of ``from_pretrained``.

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
    init_kwargs: Any = getattr(args, "model_init_kwargs", None) or {}
    options = {n: init_kwargs[n] for n in ("revision", "trust_remote_code") if n in init_kwargs}
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
    return _has_file(name, "tokenizer_config.json", **options)


def _has_file(name: str | Path, file: str, **options: Any) -> bool:
    from transformers.utils.hub import cached_file

    folder = Path(name).expanduser()
    if folder.is_dir():
        return (folder / file).is_file()
    if str(name).startswith((".", "/", "~")):
        return False
    try:
        return cached_file(str(name), file, **options) is not None
    except OSError:
        return False


class _WholeWeights:
    """A class of models whose ``from_pretrained`` refuses weights that were not in the files."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def from_pretrained(self, name: str, **options: Any) -> nn.Module:
        # Sizes that differ are refused below, by name.
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        with unsaid("transformers.modeling_utils", "LOAD REPORT"):
            model, report = self._kind.from_pretrained(name, **options)
        require_weights(report, name)
        loaded: nn.Module = model
        return loaded


def _decoder_class(name: str | Path, **options: Any) -> _WholeWeights:
    """The class that a model's configuration names, by the rule of TRL's trainers."""
    # A vision-language model is loaded whole; its text part is valued and trained. A bare decoder
    # gets its head; where that is not tied to the embedding, its weights are missing.
    import transformers

    require_model_folder(name)
    hub = {n: options[n] for n in ("revision", "trust_remote_code") if n in options}
    config = load_or_refuse("model", name, transformers.AutoConfig, **hub)
    own = getattr(transformers, (config.architectures or ["?"])[0], None)
    if own is not None and own.can_generate():
        return _WholeWeights(own)
    if own is None and "AutoModelForImageTextToText" in (getattr(config, "auto_map", None) or {}):
        return _WholeWeights(transformers.AutoModelForImageTextToText)
    return _WholeWeights(transformers.AutoModelForCausalLM)


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
        ModelError: model or adapter is missing or unreadable, some of its weights are not in its
            files, or the adapter holds an embedding of another size and not the head that belongs
            to it. ConfigError: no such device.
    """
    with no_progress_bar():
        kind = _decoder_class(name, **options)
        model: nn.Module = load_or_refuse("model", name, kind, **options)
        if adapter is not None:
            model = _with_adapter(model, adapter)
    config: Any = model.config
    if config.get_text_config() is not config:
        freeze_unreached(model)
    return model.to(_device(device)).eval()


def load_for_training(name: str, **options: Any) -> nn.Module:
    """The model that TRL's trainers load under a name, with the adapter whose folder it is.

    ``options`` are those of ``from_pretrained``; errors are raised as by :func:`load_causal_model`
    and :func:`find_parts`.
    """
    from trl.trainer.utils import create_model_from_path

    parts = find_parts(name)
    kind = _decoder_class(parts.model, **options)

    def make(path: str, **options: Any) -> Any:
        return create_model_from_path(path, architecture=kind, **options)  # type: ignore[arg-type]

    with no_progress_bar():
        model: nn.Module = load_or_refuse("model", parts.model, make, **options)
        return model if parts.adapter is None else _with_adapter(model, parts.adapter)


def _with_adapter(model: nn.Module, adapter: str | Path) -> nn.Module:
    from peft import PeftModel

    def load(path: str) -> Any:
        loaded = PeftModel.from_pretrained(_with_rows_of(model, path), path, is_trainable=True)
        return loaded, loaded.load_adapter(path, "default", is_trainable=True)

    require_adapter_folder(adapter)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Found missing adapter keys")
        loaded, report = load_or_refuse("adapter", adapter, load)
    whole = ("modules_to_save", "original_module")  # an embedding is saved under three names
    has = [name for name in report.unexpected_keys if not any(part in name for part in whole)]
    for kind, names in (("lacks", report.missing_keys), ("has", has)):
        if names:
            raise ModelError(
                "the adapter is of another model",
                got=f"{adapter} {kind} {len(names)} weights of the modules that the model "
                f"{'has' if kind == 'lacks' else 'lacks'}, such as {sorted(names)[0]}",
                why="only some of its weights would be loaded",
                remedy="the base that it was trained on: base_model_name_or_path in its "
                "adapter_config.json, or --model_name_or_path",
            )
    adapted: nn.Module = loaded
    return adapted


def _with_rows_of(model: Any, adapter: str | Path) -> Any:
    # An adapter that was trained with added tokens holds the whole embedding and the whole head
    # (PEFT saves both, also where they are tied) and can be loaded into a base of that size only.
    from peft.utils import load_peft_weights

    parts = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    names = {f"base_model.model.{name}.weight": one for name, one in model.named_modules()}
    adapter_rows = {
        what: len(weight)
        for name, weight in load_peft_weights(str(adapter), device="cpu").items()
        for what, part in parts.items()
        if part is not None and names.get(name) is part
    }
    sizes = {len(part.weight) for part in parts.values() if part is not None}
    if not adapter_rows or set(adapter_rows.values()) == sizes:
        return model
    if len(set(adapter_rows.values())) > 1 or len(adapter_rows) < len(parts):
        raise ModelError(
            "the adapter does not hold both the embedding and the head that it was trained with",
            got=f"{adapter}: " + ", ".join(f"{what} {rows}" for what, rows in adapter_rows.items())
            + f"; the base has {', '.join(map(str, sorted(sizes)))}",
            why="the tokens that were added would have no row in one of the two",
            remedy="save it by save_pretrained(..., save_embedding_layers=True), or merge it first",
        )  # fmt: skip
    model.resize_token_embeddings(adapter_rows.popitem()[1], mean_resizing=False)
    return model


def load_tokenizer(name: str | Path, **options: Any) -> Any:
    """The tokenizer of a model, from its folder or by its name on the hub.

    Raises:
        ModelError: it is missing or unreadable.
    """
    from transformers import AutoTokenizer

    require_tokenizer_files(name)
    return load_or_refuse("tokenizer", name, AutoTokenizer, **options)


def rows_tokenizer(args: Any, tokenizer: Any) -> Any:
    """A tokenizer with the template, tokens and end token that TRL will give it.

    ``args``, the configuration of a trainer, names them by ``eos_token`` and
    ``chat_template_path``. The ``tokenizer`` stays as it is.
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
        vocabulary = own.get_vocab()
        own.add_tokens(
            [t for t in other.added_tokens_decoder.values() if t.content not in vocabulary]
        )
    return own


def text_tokenizer(processing_class: Any) -> Any:
    """The tokenizer that a processor holds; one that is a tokenizer, itself."""
    return getattr(processing_class, "tokenizer", processing_class)


def model_name(model: nn.Module | None) -> str:
    """Name or folder that a model was loaded from, by its configuration; "" if none says."""
    return str(getattr(getattr(model, "config", None), "name_or_path", None) or "")


def load_or_refuse(what: str, name: str | Path, load: Any, **options: Any) -> Any:
    """Result of ``load``, a class with ``from_pretrained`` or a function of the name.

    Raises:
        ModelError: whatever the library raised, with ``what`` failed to load from where.
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
                remedy="check the name and the network, or name a folder that is here "
                f"({flag} on the command line)",
            ) from None
        raise _refusal(what, text, error) from None


def _refusal(what: str, name: str, error: Exception) -> ModelError:
    """An error of a library that loads models, by its cause."""
    said, got = str(error), f"{name}: {quoted(error)}"
    if "trust_remote_code" in said:
        return ModelError(
            "the model comes with code of its own",
            got=got,
            why="loading it runs that code on this machine",
            remedy="--trust_remote_code (in Python trust_remote_code=True), once you have read it",
        )
    if "does not recognize this architecture" in said:
        return ModelError(
            "the model is of a type that this version of transformers does not know",
            got=got,
            remedy="a newer transformers (pip install -U transformers), or a model of a known type",
        )
    if "Unrecognized configuration class" in said:
        remedy = "a causal language model, such as the family's ...ForCausalLM"
    elif "prompt learning adapter" in said:
        remedy = "an adapter that trains weights of the layers, such as LoRA"
    elif isinstance(error, ImportError):
        remedy = (
            "install what is named there; or, of a quantised model, name the one that it was made "
            "from"
        )
    elif what == "tokenizer":
        remedy = (
            "the files of the tokenizer that the model began with: "
            f"AutoTokenizer.from_pretrained(BASE).save_pretrained('{name}')"
        )
    else:
        remedy = "check the path and that the files in it are whole"
    return ModelError(f"the {what} cannot be loaded", got=got, remedy=remedy)


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
