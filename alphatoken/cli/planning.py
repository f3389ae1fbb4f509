"""``--dry_run``: the model's shape without its weights, the plan, and how it is printed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alphatoken.cli.arguments import Arguments
from alphatoken.cli.training_data import check_rows, count_rows, held_out
from alphatoken.cli.training_rows import check_source
from alphatoken.errors import ConfigError, ModelError, quoted
from alphatoken.train.loading import freeze_unreached
from alphatoken.train.plan import Layout, Plan, make_plan

__all__ = ["check_known", "meta_model", "plan_run", "show_plan"]


def plan_run(arguments: Arguments, layout: Layout) -> Plan:
    """The plan of the run that ``arguments`` describe.

    Raises:
        ModelError: the model's shape cannot be had offline.
        ConfigError, CoverageError, UnsupportedError: what the run itself would refuse.
    """
    model, source = meta_model(arguments)
    has = check_rows(arguments, layout.processes)
    given, drawn = count_rows(arguments), held_out(arguments).drawn
    plan = make_plan(
        model,
        arguments.training,
        layout,
        command=arguments.command,
        name=arguments.model.model_name_or_path or "",
        rows=None if given is None else max(given - drawn, 0),
        options=arguments.changed,
        given=has,
    )
    plan.model["shape_from"] = source
    plan.notes.extend(_notes(arguments, given))
    return plan


def check_known(arguments: Arguments, layout: Layout) -> None:
    """Refuse before weights are loaded what the run would refuse after.

    Nothing is checked where the model's shape is not here before the run has fetched it.

    Raises:
        ConfigError, CoverageError, UnsupportedError: what the run itself would refuse.
    """
    with suppress(ModelError):
        plan_run(arguments, layout)


def show_plan(plan: Plan) -> None:
    """Print it as YAML; scored linears are grouped by their name within a layer."""
    import yaml  # type: ignore[import-untyped]

    document = json.loads(json.dumps(plan.as_dict(), default=str))
    document["scored"]["linears"] = _grouped(plan.scored["linears"])
    print(yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=100), end="")


def _grouped(linears: Mapping[str, list[int]]) -> list[str]:
    """Linears by what they are called inside their layer, with shape and number."""
    grouped: dict[tuple[str, int, int], int] = {}
    for name, (d_out, d_in) in linears.items():
        inside = name.split(".layers.")[-1].split(".h.")[-1].partition(".")[2] or name
        key = (inside, d_out, d_in)
        grouped[key] = grouped.get(key, 0) + 1
    return [f"{n} x {inside} {d_out} x {d_in}" for (inside, d_out, d_in), n in grouped.items()]


# --- the model's shape --------------------------------------------------------------------------


def meta_model(arguments: Arguments) -> tuple[nn.Module, str]:
    """The model without weights, adapters attached, and where its shape is from.

    A local folder, the hub's cache, or the recipe's ``model_shape``, in this order; nothing is
    downloaded.

    Raises:
        ModelError: none of them has it.
    """
    from transformers import AutoConfig

    name, recipe = arguments.model.model_name_or_path, arguments.recipe
    if name is None:
        raise ConfigError("no model is named", remedy="--model_name_or_path FOLDER_OR_HUB_NAME")
    try:
        config = AutoConfig.from_pretrained(
            name,
            revision=arguments.model.model_revision,
            trust_remote_code=arguments.training.trust_remote_code,
            local_files_only=True,
        )
        source = "its config.json"
    except (OSError, ValueError) as error:
        shape = None if recipe is None else recipe.model_shape
        if shape is None or recipe is None or recipe.options.get("model_name_or_path") != name:
            raise _no_shape(name, error) from None
        config = _config(shape)
        source = f"model_shape of {recipe.path.name}"
    if arguments.model.use_peft:  # they are put into the model itself
        return _with_adapters(_on_meta(config), arguments), source
    return _shaped(config), source


def _no_shape(name: str, error: Exception) -> ModelError:
    if Path(name).expanduser().exists():
        return ModelError(
            "the model's config.json cannot be read",
            got=f"{name}: {quoted(error)}",
            remedy="check that the files in the folder are whole",
        )
    return ModelError(
        "there is no model folder of this name, and none in the hub's cache",
        got=name,
        remedy="--model_name_or_path FOLDER of a model that is here; or write model_shape into "
        "the recipe",
    )


_SHAPES: dict[str, nn.Module] = {}
"""The model of a configuration, by the configuration's text: several plans look at one."""


def _shaped(config: Any) -> nn.Module:
    text = json.dumps(config.to_dict(), sort_keys=True, default=str)
    if text not in _SHAPES:
        _SHAPES[text] = _on_meta(config)
    return _SHAPES[text]


def _config(shape: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**deepcopy(dict(shape)))
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            "model_shape of the recipe is not a model's shape", got=str(error)[:200]
        ) from None


def _on_meta(config: Any) -> nn.Module:
    """The class that TRL would load: the checkpoint's own, else a causal language model."""
    import transformers

    names = getattr(config, "architectures", None) or [""]
    kind = getattr(transformers, names[0], None)
    with torch.device("meta"), _quiet():
        if kind is None:
            made = transformers.AutoModelForCausalLM.from_config(config)
        else:
            made = kind(config)
    assert isinstance(made, nn.Module)
    freeze_unreached(made)
    return made


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' remarks on kernels that are not installed here."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _with_adapters(model: nn.Module, arguments: Arguments) -> nn.Module:
    from trl.trainer.utils import get_peft_config

    config = get_peft_config(arguments.model)
    if config is None:
        return model
    from peft import get_peft_model

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of peft to transformers
            adapted: nn.Module = get_peft_model(model, config)
    except ValueError as error:  # no such target modules
        raise ConfigError(
            "the adapters do not fit the model", got=" ".join(str(error).split())[:300]
        ) from None
    return adapted


def _notes(arguments: Arguments, given: int | None) -> list[str]:
    notes = []
    if not check_source(arguments):
        notes.append("No training rows are named: the run would refuse. --train_file names some.")
    elif given is None:
        notes.append("How many training rows there are is not known without reading them.")
    if arguments.unread:
        notes.append(
            f"{', '.join(arguments.unread)} of the recipe: of no use to "
            f"policy {arguments.training.policy} as it is run here, left out."
        )
    if arguments.training.output_dir is None:
        notes.append("No output_dir is given: trainer_output would be used.")
    return notes
