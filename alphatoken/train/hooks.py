"""Private names of other libraries on which the trainers stand, looked for before anything runs.

An override of a method that the library below no longer calls changes nothing and says nothing; a
figure that is read under a former name is lost, and a run finds out at its first save. So the names
stand in tables here. ``tests/integration/test_contracts.py`` holds each to what is done with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from alphatoken.errors import UnsupportedError

OVERRIDDEN = (
    "_clip_grad_norm", "_get_output_dir",
    "_load_rng_state", "_run_epoch", "_save_checkpoint", "compute_loss",
    "create_model_card", "get_batch_samples", "get_train_dataloader", "log", "training_step",
)  # fmt: skip
"""Methods of transformers' Trainer that ours override."""

_OF_TRL = ("_is_vision_dataset", "_metrics", "_prepare_dataset", "_total_train_tokens")
NEEDED: Mapping[str, tuple[str, ...]] = {
    "Trainer": (
        "_get_collator_with_removed_columns", "_globalstep_last_logged", "_prepare_inputs",
        "_push_from_checkpoint", "_total_loss_scalar", "_tr_loss", "callback_handler",
        "current_gradient_accumulation_steps", "model_accepts_loss_kwargs",
    ),
    "SFTTrainer": (*_OF_TRL, "_formatting_func", "_skip_prepare_dataset"),
    "DPOTrainer": (
        *_OF_TRL, "_precompute_ref_logps", "compute_ref_log_probs", "ld_alpha",
        "precompute_ref_logps", "ref_model",
    ),
}  # fmt: skip
"""Methods and attributes that are called, read or set, by the class that has them."""

MODULES: Mapping[str, tuple[str, ...]] = {
    "deepspeed.runtime.zero.parameter_offload": (
        "applied_pre_backward_ref_cnt", "ds_grads_remaining", "partition_all_parameters",
    ),
    "deepspeed.runtime.zero.partition_parameters": (
        "ds_active_sub_modules", "ds_id", "ds_numel", "ds_persist", "ds_process_group", "ds_shape",
        "ds_status", "ds_tensor",
    ),
    "deepspeed.runtime.zero.stage3": (
        "_z3_optimizer", "parameter_offload", "register_full_backward_hook", "swap_optimizer",
    ),
}  # fmt: skip
"""Attributes and hooks that DeepSpeed puts on parameters and modules, by its module that does."""


def checkpointing_option(args: Any) -> str:
    """Name of the option for checkpointing in the release of transformers that is installed."""
    renamed = hasattr(args, "activation_checkpointing")  # in 5.24; the former name goes in 6
    return "activation_checkpointing" if renamed else "gradient_checkpointing"


def require_hooks(trainer: type[Any]) -> None:
    """Check that the libraries below a trainer of ours have what it overrides, calls and reads.

    Raises:
        UnsupportedError: names what is missing.
    """
    below = [
        kind for kind in trainer.__mro__ if kind.__module__.split(".")[0] in ("transformers", "trl")
    ]
    if not below:
        return
    functions = [f for kind in below for f in vars(kind).values() if isinstance(f, FunctionType)]
    used = {name for function in functions for name in _names(inspect.unwrap(function).__code__)}
    defined = {name for kind in below for name in vars(kind)}
    missing = {name for name in OVERRIDDEN if name not in defined or name not in used}
    for kind in below:
        missing |= set(NEEDED.get(kind.__name__, ())) - defined - used
    if missing:
        raise without_names(
            trainer.__name__, ("transformers", "trl"), missing, "'alphatoken[train]'"
        )


@cache
def require_names(module: str) -> None:
    """Check that the code of a module in ``MODULES`` has the names that are read of its objects.

    Raises:
        UnsupportedError: names what is missing.
    """
    library, _, rest = module.partition(".")
    spec = find_spec(library)  # which imports nothing
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*rest.split(".")).with_suffix(".py")
    names: set[str] = set()
    if path.is_file():
        code = SourceFileLoader(module, str(path)).get_code(module)
        names = set() if code is None else set(_names(code))
    if missing := set(MODULES[module]) - names:
        raise without_names("ZeRO-3", (library,), missing, library)


def without_names(
    what: str, libraries: Collection[str], missing: Collection[str], upgrade: str
) -> UnsupportedError:
    """Error for names that a release of other libraries does not have."""
    releases = ", ".join(f"{name} {version(name)}" for name in libraries)
    return UnsupportedError(
        f"{what} needs what these releases do not have",
        got=f"{releases}, without {', '.join(sorted(missing))}",
        why="an override that nothing calls would do nothing, and what is read under a former name "
        "would be lost, and neither would say so",
        remedy=f"pip install --upgrade {upgrade} if they are old; if they are newer than "
        "alphatoken, upgrade that, or take earlier releases",
    )


def _names(code: CodeType) -> Iterator[str]:
    """Names of attributes and globals in a function's or module's code, and what it has as text."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant
