"""Settings under which no token can be valued: known without a model, and refused before one.

The trainers' configurations ask when they are made, and the layout of a run once more, which knows
what a launcher has set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from alphatoken.errors import ConfigError

__all__ = ["compiled", "reentrant_checkpoints", "refused_early", "refused_settings"]


def refused_early(args: Any) -> Iterator[ConfigError]:
    """What a configuration is refused for; DeepSpeed's launcher changes what two of them mean.

    Args:
        args: a configuration of one of our trainers.
    """
    if args.torch_compile:
        yield compiled()
    yield from refused_settings(args)
    if args.push_to_hub and args.hub_strategy in ("checkpoint", "all_checkpoints"):
        yield ConfigError(
            "checkpoints are not pushed to the hub",
            got=f"hub_strategy={args.hub_strategy.value!r}",
            why="they name tokens of the training rows, and without those no run goes on from one",
            remedy="hub_strategy='every_save' or 'end', which push the model",
        )
    deepspeed = args.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "") == "true"
    own = deepspeed or args.scoring_forward == "own" or args.keep_scope == "global"
    reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if args.gradient_checkpointing and reentrant and not own:
        yield reentrant_checkpoints()


def refused_settings(args: Any) -> Iterator[ConfigError]:
    """What is refused in every layout.

    Args:
        args: a trainer's configuration.
    """
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
            remedy="activation_offloading=False; gradient_checkpointing=True saves more memory",
        )
    if getattr(args, "fp16", False) and args.preconditioner == "full":
        yield ConfigError(
            "preconditioner='full' does not work with fp16",
            got="fp16=True",
            why="its values count in how the last step was cut, and a gradient that overflows in "
            "16 bits, whose step is skipped, has no norm",
            remedy="bf16=True, or preconditioner='frozen'",
        )


def compiled() -> ConfigError:
    """Of a model that is compiled as a whole."""
    return ConfigError(
        "a compiled model does not work with token values",
        got="torch.compile",
        why="inputs and outputs of the scored linears are not part of the compiled graph",
        remedy="torch_compile=False; compiling single layers below the scored ones is fine",
    )


def reentrant_checkpoints() -> ConfigError:
    """Of checkpoints whose forward scoring cannot share."""
    return ConfigError(
        "reentrant gradient checkpointing does not share its forward with scoring",
        got="use_reentrant=True",
        why="autograd cannot ask such a forward for the errors of single layers",
        remedy="gradient_checkpointing_kwargs={'use_reentrant': False}, or scoring_forward='own'",
    )
