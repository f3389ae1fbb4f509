"""Arguments of the trainers as their caller wrote them: names, model, end token."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, set_seed

from alphatoken.errors import ConfigError, InputError, refuse_unknown
from alphatoken.model.folder import is_adapter, require_tokenizer_files
from alphatoken.model.loading import find_parts, load_for_training, load_or_refuse, text_tokenizer
from alphatoken.model.transformers import require_head
from alphatoken.train.options import RENAMED
from alphatoken.train.python_rows import require_trls_dataset

_RENAMED = {
    "tokenizer": "processing_class",
    "dataset": "train_dataset",
}
"""Arguments of earlier versions of TRL and transformers, by what they are called today."""


def bind_arguments(
    trainer: type[Any], own: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of the trainer below ours, by name.

    Raises:
        ConfigError: a name that no argument has. InputError: no model, or no training rows.
    """
    name, signature = trainer.__name__, inspect.signature(trainer.BASE)
    takes = [*signature.parameters, *own]
    options = {one.name for one in fields(trainer.CONFIG)}
    for argument in kwargs.keys() - set(takes):
        if (option := RENAMED.get(argument, argument)) in options:
            raise ConfigError(
                f"{name} has no such argument",
                got=argument,
                why="it is an option of the configuration",
                remedy=f"args={trainer.CONFIG.__name__}({option}=...)",
            )
    refuse_unknown(name, "argument", kwargs, takes, _RENAMED)
    arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
    if not _takes_names(trainer.BASE):
        if isinstance(arguments.get("model"), str):
            raise InputError(
                f"{name} takes a model, and not its name",
                got=repr(arguments["model"]),
                remedy="AutoModelForCausalLM.from_pretrained(NAME)",
            )
        return arguments
    if arguments.get("model") is None:
        raise InputError("there is no model", remedy="pass model=..., a name, a folder or a model")
    if arguments.get("train_dataset") is None:
        raise InputError(
            "there are no training rows",
            got="train_dataset=None",
            remedy="pass train_dataset=..., a datasets.Dataset or a list of records",
        )
    return arguments


def _takes_names(base: type[Any]) -> bool:
    # TRL's trainers, which load models by name.
    return "quantization_config" in inspect.signature(base).parameters


def load_model_and_tokenizer(base: type[Any], arguments: dict[str, Any]) -> None:
    """Put the model in the place of its name, loaded as TRL loads it, and see to its end token.

    Raises:
        ModelError, ConfigError: as of ``load_for_training``; an adapter on which another is to be
            put; a tokenizer with which nothing can be padded.
    """
    if _takes_names(base):
        require_trls_dataset(arguments["train_dataset"])
    model = arguments.get("model")
    if isinstance(model, str):
        _load_named(model, arguments)
    else:
        unwrapped = getattr(model, "get_base_model", lambda: model)()  # of an adapter
        if isinstance(unwrapped, PreTrainedModel):
            require_head(unwrapped)
    tokenizer = text_tokenizer(arguments.get("processing_class"))
    if tokenizer is None or arguments.get("data_collator") is not None or not _takes_names(base):
        return
    args = arguments["args"]
    names = [getattr(args, name, None) for name in ("pad_token", "eos_token")]
    if not any((*names, tokenizer.pad_token, tokenizer.eos_token)):
        raise _without_end(arguments["model"], tokenizer)


def _load_named(name: str, arguments: dict[str, Any]) -> None:
    args = arguments["args"]
    options = dict(args.model_init_kwargs or {})
    options.setdefault("trust_remote_code", args.trust_remote_code)
    if arguments.get("peft_config") is not None and is_adapter(name):
        raise ConfigError(
            "the model is an adapter, and another one is asked for",
            got=f"{name}, {type(arguments['peft_config']).__name__}",
            why="the second would be put onto the first, which could train no more",
            remedy="leave it out (--use_peft, peft_config) to train the adapter on; or merge it "
            f"first: alphatoken-lab merge --before BASE --adapter {name} --alpha 1",
        )
    quantization = arguments.pop("quantization_config", None)
    if quantization is not None:
        if "quantization_config" in options:
            raise ConfigError(
                "a quantization is named twice",
                got="quantization_config, and in model_init_kwargs",
                remedy="one of them",
            )
        options["quantization_config"] = quantization
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        options["device_map"] = None  # "auto" would spread the model over the processes' devices
    set_seed(args.seed)  # as TRL does before it loads
    arguments["model"] = load_for_training(name, **options)
    if arguments.get("processing_class") is None:  # TRL would look for it beside an adapter's base
        from transformers import AutoProcessor

        hub = {n: options[n] for n in ("revision", "trust_remote_code") if n in options}
        place = find_parts(name).tokenizer
        require_tokenizer_files(place)
        arguments["processing_class"] = load_or_refuse("tokenizer", place, AutoProcessor, **hub)


def _without_end(model: Any, tokenizer: Any) -> ConfigError:
    end = getattr(model.config.get_text_config(), "eos_token_id", None)
    number = end[0] if isinstance(end, list) and end else end
    token = None if number is None else tokenizer.convert_ids_to_tokens(number)
    named, folder = f'"{token or "..."}"', Path(str(tokenizer.name_or_path))
    return ConfigError(
        "the tokenizer has no padding token and no end token",
        got=f"{folder}: pad_token and eos_token are not set",
        why="rows of different lengths cannot be put into one batch",
        remedy=f'write "eos_token": {named} into {folder / "tokenizer_config.json"}'
        f"{' (config.json says so)' if token else ''}; in Python tokenizer.eos_token = {named}",
    )
