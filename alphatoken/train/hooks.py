"""Methods of transformers' that the trainers override, looked for when a trainer's class is made.

An override of a method that the library below no longer calls changes nothing and says nothing.
"""

from __future__ import annotations

from importlib.metadata import version
from types import FunctionType
from typing import Any

from alphatoken.errors import UnsupportedError

__all__ = ["OVERRIDDEN", "require_hooks"]

OVERRIDDEN = (
    "_clip_grad_norm", "_get_output_dir",
    "_load_rng_state", "_run_epoch", "_save_checkpoint", "compute_loss",
    "create_model_card", "get_batch_samples", "log", "training_step",
)  # fmt: skip
"""Methods of transformers' Trainer that ours override."""


def require_hooks(trainer: type[Any]) -> None:
    """Check that the libraries below a trainer of ours have, and call, what it overrides.

    Args:
        trainer: ours, or a subclass of it. One without a trainer below in its bases passes.

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
    if missing:
        libraries = ", ".join(f"{name} {version(name)}" for name in ("transformers", "trl"))
        raise UnsupportedError(
            f"{trainer.__name__} is hooked into what these libraries do not have",
            got=f"{libraries}, without {', '.join(sorted(missing))}",
            why="an override that nothing calls would do nothing, and say nothing",
            remedy="pip install --upgrade 'alphatoken[train]', which takes versions that have it",
        )
