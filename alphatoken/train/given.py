"""A trainer's arguments by name, its ``args`` among them, which are a configuration of ours."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.import_utils import (
    is_torch_bf16_gpu_available,
    is_torch_xla_available,
)

from alphatoken.errors import ConfigError

__all__ = ["by_name", "choose_bf16", "own_config"]


def choose_bf16(args: Any) -> None:
    """Leave bfloat16 out where the machine has none and nothing was said of it.

    TRL's default is bfloat16 everywhere, which transformers then refuses on a machine without a
    GPU. Where there is one that can, TRL's default stands.
    """
    if args.bf16 is None and not (is_torch_bf16_gpu_available() or is_torch_xla_available()):
        args.bf16 = False


def by_name(trainer: type[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that a trainer of this class was given, by name.

    Raises:
        TypeError: more arguments than it takes, or one twice.
    """
    names = [name for name in inspect.signature(trainer.__init__).parameters if name != "self"]
    twice = kwargs.keys() & set(names[: len(args)])
    if len(args) > len(names) or twice:
        raise TypeError(
            f"{trainer.__name__} takes {len(names)} arguments, each once; "
            f"got {len(args)} by position and {', '.join(kwargs) or 'none'} by name"
        )
    return {**dict(zip(names, args, strict=False)), **kwargs}


def own_config(given: Any, ours: type[Any]) -> Any:
    """``given``, a configuration of the class ``ours``; its defaults for None.

    Raises:
        ConfigError: it is another one, of TRL's or transformers' too.
    """
    if given is None:
        return ours()
    if not isinstance(given, ours):
        raise ConfigError(
            f"args must be an {ours.__name__}",
            got=type(given).__name__,
            why="it has all fields of the configuration below it, and those of token weights",
            remedy=f"{ours.__name__}(...) with the same fields",
        )
    return given
