"""A trainer's ``args`` in whatever form TRL takes them, as a configuration of ours.

TRL's trainers take no ``args`` at all, a configuration of their own, a subclass of it, or
transformers' ``TrainingArguments``. Ours take all of these; the fields of ``AlphaOptions`` then
have their defaults, and nothing of what was given is lost.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import TrainingArguments
from transformers.utils.import_utils import (
    is_torch_bf16_gpu_available,
    is_torch_xla_available,
)
from trl.trainer.utils import get_config_model_id

from alphatoken.errors import ConfigError
from alphatoken.train.options import AlphaOptions

__all__ = ["by_name", "choose_bf16", "model_name", "own_config"]


def choose_bf16(args: Any) -> None:
    """Leave bfloat16 out where the machine has none and nothing was said of it.

    TRL's default is bfloat16 everywhere, which transformers then refuses on a machine without a
    GPU. Where there is one that can, TRL's default stands.
    """
    if args.bf16 is None and not (is_torch_bf16_gpu_available() or is_torch_xla_available()):
        args.bf16 = False


def by_name(trainer: type[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What was given to a trainer of this class, each argument by its name.

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


def model_name(model: Any) -> str:
    """The last part of a model's name, as TRL makes a folder's name of it."""
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    return str(name).split("/")[-1]


def own_config(given: Any, ours: type[Any], base: type[Any], folder: Callable[[], str]) -> Any:
    """``given`` as a configuration of ours.

    Args:
        given: what the caller passed as ``args``. None takes TRL's defaults and ours. A ``base`` is
            taken over attribute by attribute, without running its checks again. Plain
            ``TrainingArguments`` are made anew as TRL makes them.
        ours: ``AlphaSFTConfig``, ``AlphaDPOConfig`` or ``AlphaConfig``.
        base: TRL's or transformers' class that ``ours`` extends.
        folder: gives ``output_dir`` where nothing is given.

    Raises:
        ConfigError: the configuration of another trainer, or no configuration.
    """
    if given is None:
        return ours(output_dir=folder())
    if not isinstance(given, base) and _of_another_trainer(given):
        raise ConfigError(
            f"args must be {ours.__name__}, {base.__name__} or TrainingArguments",
            got=type(given).__name__,
            why="a configuration of another trainer has other fields",
            remedy=f"{ours.__name__}(output_dir=...)",
        )
    if isinstance(given, AlphaOptions):
        if given.FAMILY != ours.FAMILY or not isinstance(given, base):
            raise ConfigError(
                f"args belong to another trainer than {ours.__name__}",
                got=type(given).__name__,
                remedy=f"{ours.__name__}(output_dir=...)",
            )
        return given
    kind = _joined(ours, type(given))
    if not isinstance(given, base):
        values = given.to_dict()
        hidden = [name for name in values if name.endswith("_token")]  # to_dict masks these
        return kind(**{**values, **{name: getattr(given, name) for name in hidden}})
    made = _blank(ours, type(given))
    options = {option.name: option.default for option in fields(AlphaOptions)}
    vars(made).update({**options, **vars(given)})
    made.check_alpha()
    return made


def _of_another_trainer(given: Any) -> bool:
    """Whether it is neither transformers' arguments nor an extension of them by the user."""
    trl = any(kind.__module__.startswith("trl.") for kind in type(given).__mro__)
    return trl or not isinstance(given, TrainingArguments)


_JOINED: dict[tuple[type[Any], type[Any]], type[Any]] = {}


def _joined(ours: type[Any], theirs: type[Any]) -> type[Any]:
    """A class that is both: a user's subclass keeps its fields, methods and properties."""
    if issubclass(ours, theirs):
        return ours
    if (ours, theirs) in _JOINED:
        return _JOINED[ours, theirs]

    @dataclass
    class Joined(ours, theirs):  # type: ignore[misc]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return _blank, (ours, theirs), dict(vars(self))  # trainers save their arguments

    Joined.__name__ = Joined.__qualname__ = f"Alpha{theirs.__name__}"
    _JOINED[ours, theirs] = Joined
    return Joined


def _blank(ours: type[Any], theirs: type[Any]) -> Any:
    """An instance without attributes, which no check has seen."""
    kind = _joined(ours, theirs)
    return object.__new__(kind)
