"""``--dry_run``: the model's shape without its weights, the plan, and how it is printed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
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

__all__ = ["check_known", "meta_model", "plan_run", "scope_line", "show_plan"]


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


def show_plan(plan: Plan, *, as_json: bool) -> None:
    """Print it, as text or as JSON."""
    if as_json:
        print(json.dumps(plan.as_dict(), indent=1, default=str))
        return
    for line in _lines(plan):
        print(line)


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
        config = _config(json.dumps(shape, sort_keys=True))
        source = f"model_shape of {recipe.path.name}"
    if arguments.model.use_peft:  # they are put into the model itself
        return _with_adapters(_on_meta(config), arguments), source
    return _shaped(
        json.dumps(config.to_dict(), sort_keys=True, default=str), _Shared(config)
    ), source


def scope_line(scored: Mapping[str, Any]) -> str:
    """The layers and how many linears of them; "all" parameters name no linears."""
    layers, count = _layers(scored["layers"]), len(scored["linears"])
    return f"{layers}: {count} linear{'s'[: count != 1]}" if count else layers


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


class _Shared:
    """A configuration that is no part of a cache's key: the key says the same as text."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shared)


@lru_cache(maxsize=3)
def _shaped(text: str, shared: _Shared) -> nn.Module:
    """The model of a configuration, whose text says which; several plans look at one."""
    return _on_meta(shared.config)


@lru_cache(maxsize=8)
def _config(shape: str) -> Any:
    from transformers import AutoConfig

    arguments = json.loads(shape)
    try:
        return AutoConfig.for_model(arguments.pop("model_type"), **arguments)
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


# --- text ---------------------------------------------------------------------------------------


def _lines(plan: Plan) -> Iterator[str]:
    model, scored, batch = plan.model, plan.scored, plan.batch
    yield f"alphatoken {plan.command}: the plan"
    yield _line(
        "model",
        f"{model['name']}: {model['class']}, {model['layers']} layers, "
        f"{_count(model['parameters'])} parameters, {_count(model['trainable'])} trained "
        f"(shape from {model['shape_from']})",
    )
    yield _line(
        "scored",
        f"{scope_line(scored)}, {_count(scored['parameters'])} parameters "
        f"({scored['share_of_trainable']:.1%} of the trained); "
        f"estimator {scored['estimator']}, policy {scored['policy']}",
    )
    for text in _linears(scored["linears"]):
        yield _line("", text)
    yield _line("layout", _layout(plan.layout))
    yield _line(
        "batch",
        f"{batch['rows']} {'pairs' if plan.command == 'dpo' else 'rows'} a step "
        f"({batch['rows_per_micro_batch']} x {batch['accumulation']} accumulated), at most "
        f"{batch['tokens_at_most']:,} tokens of {batch['length']} a sequence",
    )
    share = batch["keep_ratio"]
    yield _line(
        "kept",
        f"what the rule of {scored['policy']} keeps of the response tokens"
        if share is None
        else f"{share:.0%} of the response tokens, at most {batch['kept_at_most']:,} a step",
    )
    yield _line("validation", _validation(plan.validation))
    yield _line("steps", _steps(plan.steps))
    yield _line("options", f"{len(plan.options)} differ from their defaults:")
    for name, (value, default) in plan.options.items():
        yield _line("", f"{name}: {value!r} (default {default!r})")
    for note in plan.notes:
        yield _line("note", note)


def _line(title: str, text: str) -> str:
    return f"  {title:<11} {text}"


def _count(number: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _layers(layers: list[int]) -> str:
    if len(layers) > 4:
        return f"{len(layers)} layers, {layers[0]} to {layers[-1]}"
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"


def _linears(linears: Mapping[str, list[int]]) -> Iterator[str]:
    """Linears by what they are called inside their layer, with shape and number."""
    grouped: dict[tuple[str, int, int], int] = {}
    for name, (d_out, d_in) in linears.items():
        inside = name.split(".layers.")[-1].split(".h.")[-1].partition(".")[2] or name
        key = (inside, d_out, d_in)
        grouped[key] = grouped.get(key, 0) + 1
    for (inside, d_out, d_in), count in grouped.items():
        yield f"{count} x {inside} {d_out} x {d_in}"


def _layout(layout: Mapping[str, Any]) -> str:
    kind = {"single": "one process", "ddp": "DDP", "fsdp2": "FSDP2"}.get(
        layout["kind"], layout["kind"].replace("zero", "ZeRO-")
    )
    forward = (
        "scoring runs a forward of its own"
        if layout["own_forward"]
        else ("one forward serves scoring and training")
    )
    several = f" on {layout['processes']} processes" if layout["processes"] > 1 else ""
    return f"{kind}{several}; {forward}"


def _validation(part: Mapping[str, Any]) -> str:
    if not part["rows"]:
        return "none"
    ratio = f"1:{1 / part['ratio']:.3g}" if part["ratio"] <= 1 else f"{part['ratio']:.3g}:1"
    often = "each step" if part["per_steps"] == 1 else f"every {part['per_steps']} steps"
    return f"{part['rows']} rows {often} ({part['mode']}), validation:batch = {ratio}"


def _steps(part: Mapping[str, Any]) -> str:
    if part["steps"] is None:
        return f"not known: {part['epochs']:g} epochs of an unknown number of rows"
    if part["epochs"] is None:
        return f"{part['steps']:,} (max_steps)"
    return f"{part['steps']:,} in {part['epochs']:g} epochs of {part['rows']:,} rows"
