"""What the trainers need of transformers' and TRL's beside their public methods, checked on import.

An override of a method that the library below no longer calls changes nothing and says nothing, and
so does an attribute that it no longer reads. So each of them is looked for when a trainer's class
is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from types import FunctionType
from typing import Any

from alphatoken.errors import UnsupportedError

__all__ = ["OVERRIDDEN", "USED", "require_hooks"]

OVERRIDDEN = (
    "_clip_grad_norm", "_get_output_dir", "_issue_warnings_after_load",
    "_load_rng_state", "_run_epoch", "_save_checkpoint", "compute_loss",
    "create_model_card", "get_batch_samples", "log", "training_step",
)  # fmt: skip
"""Methods of transformers' Trainer that ours override."""
USED = (
    "_get_learning_rate", "_globalstep_last_logged", "_prepare_inputs", "_total_loss_scalar",
    "_push_from_checkpoint", "_tr_loss", "compute_loss_context_manager",
    "current_gradient_accumulation_steps",
)  # fmt: skip
"""What they call, read or write of it."""


def require_hooks(trainer: type[Any], more: Iterable[str] = ()) -> None:
    """See that the libraries below a trainer of ours have, and call, what it is hooked into.

    Args:
        trainer: ours, or a subclass of it. One without a trainer below in its bases passes.
        more: names that it uses beside ``USED``, of TRL.

    Raises:
        UnsupportedError: names what is missing.
    """
    below = [
        kind for kind in trainer.__mro__ if kind.__module__.split(".")[0] in ("transformers", "trl")
    ]
    if not below:
        return
    functions = [f for kind in below for f in vars(kind).values() if isinstance(f, FunctionType)]
    named = {name for function in functions for name in function.__code__.co_names}
    defined = {function.__name__ for function in functions}
    missing = {name for name in OVERRIDDEN if name not in defined or name not in named}
    missing |= {name for name in (*USED, *more) if name not in named}
    if missing:
        libraries = ", ".join(f"{name} {version(name)}" for name in ("transformers", "trl"))
        raise UnsupportedError(
            f"{trainer.__name__} is hooked into what these libraries do not have",
            got=f"{libraries}, without {', '.join(sorted(missing))}",
            why="an override that nothing calls would do nothing, and say nothing",
            remedy="pip install --upgrade 'alphatoken[train]', which takes versions that have it",
        )
