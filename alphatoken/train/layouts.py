"""Layout of a run over processes, and refusals by name of what does not work there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch import nn

from alphatoken.errors import ConfigError
from alphatoken.model.parameter_choice import ParameterChoice
from alphatoken.support.resume import SAMPLED_NUMBERS, tensor_digest
from alphatoken.train.distributed import Ranks
from alphatoken.train.options import AlphaOptions
from alphatoken.train.refused_settings import checkpointing, compiled, scaled
from alphatoken.train.shards import Fsdp2Sharding, Zero3Sharding

__all__ = [
    "SHARDED",
    "check_layout",
    "check_same_weights",
    "layout",
    "name_wrapped_layers",
    "needs_own_forward",
    "sharding_of",
]

SHARDED = ("fsdp2", "zero3")


def layout(accelerator: Any) -> str:
    """Name of the layout of a run over processes.

    "single", "ddp", "fsdp2", "zero1", "zero2" or "zero3"; and, to be refused by ``check_layout``,
    "fsdp1", "zero0" or the name of another backend.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind == "NO":
        return "single"
    if kind == "FSDP":
        return "fsdp2" if accelerator.is_fsdp2 else "fsdp1"
    if kind == "DEEPSPEED":
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    return "ddp" if kind.startswith("MULTI_") else kind.lower()


def check_same_weights(accelerator: Any, model: nn.Module) -> None:
    """Check that all processes hold the same weights, before the model is wrapped.

    Raises:
        ConfigError: they do not: a model was made at random by each, or loaded by the first
            alone.
    """
    ranks = Ranks(accelerator)
    if ranks.world == 1 or layout(accelerator) != "fsdp2":
        return
    own = ranks.gather_objects(tensor_digest(model.named_parameters(), numbers=SAMPLED_NUMBERS))
    if len(set(own)) > 1:
        raise ConfigError(
            "the processes hold different weights",
            got=f"process {next(i for i, one in enumerate(own) if one != own[0])} has others than "
            "the first",
            why="Fisher, start weights and static passes are taken before FSDP hands the first "
            "one's weights on",
            remedy="load one model in all of them, where it must be with "
            "fsdp_cpu_ram_efficient_loading: false",
        )


def name_wrapped_layers(accelerator: Any, model: nn.Module, config: Any) -> None:
    """Have FSDP gather weights by those layer classes that this model has, before it is wrapped.

    Accelerate takes all classes that the model's family names, and ends at the first one that is
    not there: the blocks of a vision tower, in a model of the same family for text alone. It also
    keeps the names of the first model for all later ones of the process. What the user named, in
    the launcher's configuration or the trainer's, stays.

    Args:
        accelerator: of the trainer.
        model: before it is wrapped.
        config: the trainer's ``fsdp_config``, or None.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    named_by_user = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP") or (config or {}).get(
        "transformer_layer_cls_to_wrap"
    )
    if plugin is None or named_by_user:
        return
    there = {type(module).__name__ for module in model.modules()}
    named = [name for name in getattr(model, "_no_split_modules", None) or () if name in there]
    if named:
        plugin.transformer_cls_names_to_wrap = named


def sharding_of(accelerator: Any, model: nn.Module) -> Fsdp2Sharding | Zero3Sharding | None:
    """Access to the prepared model's weights, or None if each process has them all."""
    kind = layout(accelerator)
    if kind not in SHARDED:
        return None
    plain = accelerator.unwrap_model(model)
    return Fsdp2Sharding(plain) if kind == "fsdp2" else Zero3Sharding(plain)


def needs_own_forward(accelerator: Any, options: AlphaOptions) -> bool:
    """True if scoring runs a forward of its own: under DeepSpeed, a global threshold, or if asked.

    DeepSpeed's engine follows its own forward through its own backward, once; errors asked for
    on the way would be taken for that backward.
    """
    own_forward = options.scoring_forward == "own" or options.keep_scope == "global"
    return own_forward or layout(accelerator).startswith("zero")


def check_layout(accelerator: Any, args: Any, model: nn.Module) -> None:
    """Refuse by name what token values cannot be had under.

    Args:
        accelerator: of the trainer.
        args: the trainer's configuration.
        model: before or after ``accelerator.prepare``.

    Raises:
        ConfigError: the first of the settings that do not work, what it does, what to use.
    """
    kind = layout(accelerator)
    for refusal in (
        *_refused_layouts(accelerator, args, kind),
        *_refused_arguments(accelerator, args, model),
        *_refused_options(accelerator, args, kind),
    ):
        raise refusal


def _refused_layouts(accelerator: Any, args: Any, kind: str) -> Iterator[ConfigError]:
    if kind not in ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3"):
        yield ConfigError(
            "token values are not available under this distributed backend",
            got=kind,
            why="they were not shown to be right there",
            remedy="use fsdp_version: 2" if kind == "fsdp1" else "use DDP, FSDP2 or ZeRO-1, 2 or 3",
        )
    parallel = getattr(accelerator, "parallelism_config", None)
    for name in ("tp", "cp", "sp"):
        size = getattr(parallel, f"{name}_size", 1) or 1
        if size > 1:
            full = {"tp": "tensor", "cp": "context", "sp": "sequence"}[name]
            yield ConfigError(
                f"{full} parallelism does not work with token values",
                got=f"{name}_size={size}",
                why="each process holds a piece of a layer or sequence, so inputs and errors of "
                "scored linears are pieces too",
                remedy="use FSDP2 or ZeRO-3 for models that do not fit",
            )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if kind == "fsdp2" and plugin is not None and plugin.activation_checkpointing:
        yield ConfigError(
            "FSDP's activation_checkpointing wraps every decoder layer",
            got="fsdp_activation_checkpointing: true",
            why="the scored layers must run without checkpointing",
            remedy=f"{checkpointing(args)}=True of the trainer, which is paused on them",
        )


def _refused_arguments(accelerator: Any, args: Any, model: nn.Module) -> Iterator[ConfigError]:
    if getattr(args, "n_gpu", 1) > 1:
        yield ConfigError(
            "torch.nn.DataParallel does not work with token values",
            got=f"{args.n_gpu} GPUs in one process",
            why="its replicas live for one forward only",
            remedy="start one process a GPU with `accelerate launch`, or show it one GPU",
        )
    spread = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    if len(spread) > 1:
        yield ConfigError(
            "a model that is spread over several devices does not work with token values",
            got=f"device_map over {', '.join(sorted(spread))}",
            why="directions and errors of its layers would lie on different devices; TRL spreads "
            "a model that is given by its name over all GPUs that one process sees",
            remedy="one process a GPU with `accelerate launch`, or model_init_kwargs={'device_map':"
            " None} and one GPU shown",
        )
    handler = accelerator.ddp_handler
    if getattr(handler, "static_graph", False) or getattr(args, "ddp_static_graph", False):
        yield ConfigError(
            "DistributedDataParallel with static_graph does not work with token values",
            got="static_graph=True",
            why="a scored first step records the wrong graph; gradients are then silently never "
            "averaged over processes",
            remedy="ddp_static_graph=False",
        )
    if _compiled(accelerator, model):
        yield compiled()
    if accelerator.mixed_precision == "fp16" and args.needs_values:  # of the launcher
        yield scaled()


def _compiled(accelerator: Any, model: nn.Module) -> bool:
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    backend = getattr(getattr(plugin, "backend", None), "value", "NO")
    whole = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    return whole or str(backend) != "NO"


def _refused_options(accelerator: Any, args: Any, kind: str) -> Iterator[ConfigError]:
    option = checkpointing(args)
    reentrant = (getattr(args, f"{option}_kwargs", None) or {}).get("use_reentrant")
    own = needs_own_forward(accelerator, args)
    if getattr(args, option, False) and reentrant and not own:
        yield ConfigError(
            "reentrant gradient checkpointing does not share its forward with scoring",
            got="use_reentrant=True",
            why="autograd cannot ask such a forward for the errors of single layers",
            remedy=f"{option}_kwargs={{'use_reentrant': False}}, or scoring_forward='own'",
        )
    captured = ParameterChoice.read(args.parameters, "parameters").captured
    mixed = str(getattr(accelerator, "mixed_precision", "no"))
    precision = "bf16" if getattr(args, "bf16", False) else mixed
    moved = args.estimator == "label" or not captured
    if kind in SHARDED and moved and precision != "no":
        yield ConfigError(
            "label values on sharded weights need forwards in float32",
            got=f"mixed precision {precision}, estimator={args.estimator!r}, layout {kind}",
            why="they are differences between forwards at weights that move by little, which drown "
            "in 16 bits",
            remedy="no mixed precision; or DDP, ZeRO-1 or 2; or estimator='alphatoken', 'direct' "
            "or 'path' over 'linears' or 'linears,experts'",
        )
    if args.preconditioner is not None and kind.startswith("zero"):
        yield ConfigError(
            "preconditioned values cannot be had of DeepSpeed's optimizer",
            got=f"preconditioner={args.preconditioner!r}, layout {kind}",
            why="its state lies in flat partitions, each with parts of many parameters",
            remedy="preconditioner=None; or DDP or FSDP2, whose state has the parameter's shape",
        )
    if args.preconditioner == "full" and kind == "fsdp2" and moved:
        yield ConfigError(
            "preconditioner='full' cannot be had for label values on sharded weights",
            got=f"estimator={args.estimator!r}, parameters={args.parameters!r}, layout {kind}",
            why="the gradient of each step would be reduced by a backward of its own",
            remedy="preconditioner='frozen', or DDP; or estimator='alphatoken', 'direct' or 'path'"
            " over 'linears' or 'linears,experts'",
        )
