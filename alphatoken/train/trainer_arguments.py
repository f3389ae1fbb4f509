"""Arguments of the trainers as they are handed over in Python: names, rows, model, end token."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, set_seed

from alphatoken.errors import ConfigError, InputError, refuse_unknown
from alphatoken.model.folder import is_adapter, require_tokenizer_files
from alphatoken.model.loading import find_parts, load_for_training, load_or_refuse, text_tokenizer
from alphatoken.model.transformers import require_head
from alphatoken.train.options import RENAMED

__all__ = ["bind_arguments", "load_model_and_tokenizer", "require_rows"]

_RENAMED = {
    "tokenizer": "processing_class",
    "dataset": "train_dataset",
}
"""Arguments of earlier versions of TRL and transformers, by what they are called today."""


def bind_arguments(
    trainer: type[Any], own: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of the trainer below ours, by name.

    Args:
        trainer: ours.
        own: names of our arguments beside them.
        args: by position.
        kwargs: by name.

    Raises:
        ConfigError: a name that no argument has. InputError: no model, or no training rows.
    """
    name, signature = trainer.__name__, inspect.signature(trainer.BASE)
    known = [*signature.parameters, *own]
    options = {one.name for one in fields(trainer.CONFIG)}
    for written in kwargs.keys() - set(known):
        if (option := RENAMED.get(written, written)) in options:
            raise ConfigError(
                f"{name} has no such argument",
                got=written,
                why="it is an option of the configuration",
                remedy=f"args={trainer.CONFIG.__name__}({option}=...)",
            )
    refuse_unknown(name, "argument", kwargs, known, _RENAMED)
    given = dict(signature.bind_partial(*args, **kwargs).arguments)
    if not _takes_names(trainer.BASE):
        if isinstance(given.get("model"), str):
            raise InputError(
                f"{name} takes a model, and not its name",
                got=repr(given["model"]),
                remedy="AutoModelForCausalLM.from_pretrained(NAME)",
            )
        return given
    if given.get("model") is None:
        raise InputError("there is no model", remedy="pass model=..., a name, a folder or a model")
    if given.get("train_dataset") is None:
        raise InputError(
            "there are no training rows",
            got="train_dataset=None",
            remedy="pass train_dataset=..., a datasets.Dataset or a list of records",
        )
    return given


def require_rows(rows: Any, name: str) -> None:
    """Refuse tables and iterators of other libraries, which TRL reads in none of its forms.

    Raises:
        InputError: names what makes a data set of them.
    """
    library = type(rows).__module__.partition(".")[0]
    made = {
        "pandas": "datasets.Dataset.from_pandas(rows, preserve_index=False)",
        "polars": "datasets.Dataset.from_polars(rows)",
        "pyarrow": "datasets.Dataset(rows)",
        "numpy": "datasets.Dataset.from_list(rows.tolist())",
    }.get(library)
    if made is None and (isinstance(rows, Iterator) or inspect.isfunction(rows)):
        made = "datasets.Dataset.from_list(list(rows)), or datasets.IterableDataset.from_generator"
    if made is not None:
        raise InputError(
            f"the {name} data set is no set of rows",
            got=f"{type(rows).__module__}.{type(rows).__qualname__}",
            why="rows are looked at by their number before training, and again in it",
            remedy=made,
        )


def _takes_names(base: type[Any]) -> bool:
    """True for TRL's trainers, which load models by name."""
    return "quantization_config" in inspect.signature(base).parameters


def load_model_and_tokenizer(base: type[Any], given: dict[str, Any]) -> None:
    """Put the model in the place of its name, loaded as TRL loads it, and see to its end token.

    Raises:
        ModelError, ConfigError: as of ``load_for_training``; an adapter on which another is to be
            put; a tokenizer with which nothing can be padded.
    """
    if _takes_names(base):
        _require_dataset(given["train_dataset"])
    model = given.get("model")
    if isinstance(model, str):
        _load_named(model, given)
    else:
        unwrapped = getattr(model, "get_base_model", lambda: model)()  # of an adapter
        if isinstance(unwrapped, PreTrainedModel):
            require_head(unwrapped)
    tokenizer = text_tokenizer(given.get("processing_class"))
    if tokenizer is None or given.get("data_collator") is not None or not _takes_names(base):
        return
    args = given["args"]
    names = [getattr(args, name, None) for name in ("pad_token", "eos_token")]
    if not any((*names, tokenizer.pad_token, tokenizer.eos_token)):
        raise _without_end(given["model"], tokenizer)


def _require_dataset(rows: Any) -> None:
    """Refuse rows that TRL does not take."""
    from datasets import Dataset, IterableDataset

    if not isinstance(rows, (Dataset, IterableDataset)):
        raise InputError(
            "the training data set is none that TRL reads",
            got=f"{type(rows).__module__}.{type(rows).__qualname__}",
            remedy="datasets.Dataset.from_list([dict(row) for row in rows])",
        )


def _load_named(name: str, given: dict[str, Any]) -> None:
    args = given["args"]
    options = dict(args.model_init_kwargs or {})
    options.setdefault("trust_remote_code", args.trust_remote_code)
    if given.get("peft_config") is not None and is_adapter(name):
        raise ConfigError(
            "the model is an adapter, and another one is asked for",
            got=f"{name}, {type(given['peft_config']).__name__}",
            why="the second would be put onto the first, which could train no more",
            remedy="leave it out (--use_peft, peft_config) to train the adapter on; or merge it "
            f"first: alphatoken-lab merge --before BASE --adapter {name} --alpha 1",
        )
    quantization = given.pop("quantization_config", None)
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
    given["model"] = load_for_training(name, **options)
    if given.get("processing_class") is None:  # TRL would look for it beside an adapter's base
        from transformers import AutoProcessor

        hub = {n: options[n] for n in ("revision", "trust_remote_code") if n in options}
        place = find_parts(name).tokenizer
        require_tokenizer_files(place)
        given["processing_class"] = load_or_refuse("tokenizer", place, AutoProcessor, **hub)


def _without_end(model: Any, tokenizer: Any) -> ConfigError:
    """Refusal of a tokenizer that has neither a padding nor an end token."""
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
