"""Settings under which no token can be valued: known without a model, and refused before one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from alphatoken.errors import ConfigError

__all__ = ["checkpointing", "compiled", "refused_settings", "scaled"]


def checkpointing(args: Any) -> str:
    """Name of the option for checkpointing in the release of transformers that is installed."""
    renamed = hasattr(args, "activation_checkpointing")  # in 5.24; the former name goes in 6
    return "activation_checkpointing" if renamed else "gradient_checkpointing"


def refused_settings(args: Any) -> Iterator[ConfigError]:
    """Reasons for refusing a configuration of one of our trainers.

    Args:
        args: the configuration.
    """
    if args.torch_compile:
        yield compiled()
    if getattr(args, "use_liger_kernel", False):
        yield ConfigError(
            "Liger kernels do not work with token values",
            got="use_liger_kernel=True",
            why="the backward of its gated MLP overwrites the activations that it saved, and "
            "values take a backward of their own through the graph that the step uses",
            remedy="use_liger_kernel=False; flash attention is supported",
        )
    smoothing = getattr(args, "label_smoothing_factor", 0)
    if smoothing > 0 and args.FAMILY == "sft":  # DPO does not read it
        yield ConfigError(
            "smoothed labels do not work with token values",
            got=f"label_smoothing_factor={smoothing}",
            why="transformers builds their loss of the logits, and token weights act on the "
            "log-probability of each token",
            remedy="label_smoothing_factor=0, or policy='standard'",
        )
    if getattr(args, "activation_offloading", False):
        yield ConfigError(
            "offloaded activations do not work with token values",
            got="activation_offloading=True",
            why="TRL forgets an activation when the first backward has fetched it, and values take "
            "a backward of their own through the graph that the step uses",
            remedy=f"activation_offloading=False; {checkpointing(args)}=True saves more memory",
        )
    if args.fp16 and args.needs_values:
        yield scaled()
    if args.push_to_hub and args.hub_strategy in ("checkpoint", "all_checkpoints"):
        yield ConfigError(
            "checkpoints are not pushed to the hub",
            got=f"hub_strategy={args.hub_strategy.value!r}",
            why="they name tokens of the training rows, and without those no run goes on from one",
            remedy="hub_strategy='every_save' or 'end', which push the model",
        )


def compiled() -> ConfigError:
    """Error for a model that is compiled as a whole."""
    return ConfigError(
        "a compiled model does not work with token values",
        got="torch.compile",
        why="inputs and outputs of the scored linears are not part of the compiled graph",
        remedy="torch_compile=False; compiling single layers below the scored ones is fine",
    )


def scaled() -> ConfigError:
    """Error for float16, whose loss is scaled."""
    return ConfigError(
        "fp16 does not work with token values",
        got="fp16=True",
        why="a step whose gradient overflows is skipped, and its values would count all the same",
        remedy="bf16=True, or neither",
    )
