"""Options of a diagnostic as the command line sees them: flags, texts, and back to values."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from alphatoken.errors import ConfigError

__all__ = ["OptionField", "assignments", "option_fields"]

_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


@dataclass(frozen=True)
class OptionField:
    """One field of a diagnostic's ``Options``.

    Attributes:
        name: of the field.
        kind: its type: int, float, str, bool, a tuple of one of these, or one of these or None.
        default: what it is when nothing is said.
        help: what it does.
    """

    name: str
    kind: Any
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """On the command line.

        >>> OptionField("learning_rate", float, 0.1, "").flag
        '--learning-rate'
        """
        return "--" + self.name.replace("_", "-")

    @property
    def shown(self) -> str:
        """The default, as it would be written.

        >>> OptionField("rates", tuple[float, ...], (0.1, 1.0), "").shown
        '0.1,1.0'
        """
        if isinstance(self.default, (tuple, list)):
            return ",".join(map(str, self.default)) or "none"
        return "none" if self.default is None else str(self.default)

    @property
    def metavar(self) -> str:
        """What stands for a value in the help.

        >>> OptionField("rates", tuple[float, ...], (), "").metavar
        'X,X,...'
        """
        several = typing.get_origin(self.kind) is tuple
        kind = typing.get_args(self.kind)[0] if several else self.kind
        letter = {int: "N", str: "TEXT"}.get(kind, "X")
        return f"{letter},{letter},..." if several else letter

    def read(self, text: str) -> Any:
        """The value that ``text`` writes.

        >>> OptionField("rates", tuple[float, ...], (), "").read("0.1,1e-3")
        (0.1, 0.001)

        Raises:
            ConfigError: it writes none of this kind.
        """
        try:
            return _read(self.kind, text)
        except ValueError:
            raise ConfigError(
                f"{self.flag} cannot be read", got=repr(text), remedy=_expected(self.kind)
            ) from None

    def argument(self, text: str) -> Any:
        """The same for ``argparse``, whose own error names the flag."""
        try:
            return _read(self.kind, text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"cannot be read: {text!r}; expected {_expected(self.kind)}"
            ) from None


def option_fields(options: type) -> tuple[OptionField, ...]:
    """The fields of a diagnostic's ``Options``, in their order.

    Raises:
        TypeError: a field without default, or of a kind that has no text. A programmer's mistake.
    """
    kinds = typing.get_type_hints(options)
    found = []
    for field in fields(options):
        _expected(kinds[field.name])
        found.append(
            OptionField(
                field.name, kinds[field.name], _default(field), str(field.metadata.get("help", ""))
            )
        )
    return tuple(found)


def assignments(
    texts: Sequence[str], known: Mapping[str, Sequence[OptionField]]
) -> dict[str, dict[str, Any]]:
    """``NAME.option=value`` texts as name -> field -> value.

    Raises:
        ConfigError: another shape, an unknown name or option, a value that cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        target, equals, value = text.partition("=")
        name, dot, option = target.strip().partition(".")
        if not (equals and dot):
            raise ConfigError(
                "--set cannot be read", got=repr(text), remedy="--set NAME.option=value"
            )
        if name not in known:
            raise ConfigError(
                "--set names no diagnostic", got=repr(name), remedy=f"one of {', '.join(known)}"
            )
        field = {one.name: one for one in known[name]}.get(option.replace("-", "_"))
        if field is None:
            options = ", ".join(one.flag.removeprefix("--") for one in known[name])
            raise ConfigError(
                f"{name} has no option {option!r}", got=repr(text), remedy=f"one of {options}"
            )
        found.setdefault(name, {})[field.name] = field.read(value.strip())
    return found


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    raise TypeError(f"option {field.name} has no default")


def _choices(kind: Any) -> tuple[Any, ...]:
    """The kinds of a union, without None; empty if it is none."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return ()
    return tuple(one for one in typing.get_args(kind) if one is not type(None))


def _read(kind: Any, text: str) -> Any:
    if _choices(kind):
        return None if text.lower() == "none" else _read(_choices(kind)[0], text)
    if typing.get_origin(kind) is tuple:
        parts = [] if text.lower() in ("", "none") else text.split(",")
        return tuple(_read(typing.get_args(kind)[0], part.strip()) for part in parts)
    if kind is bool:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise ValueError(text)
        return text.lower() in _TRUE
    return kind(text)


def _expected(kind: Any) -> str:
    """What a text of this kind looks like; also the check that there is one."""
    if len(_choices(kind)) == 1:
        return f"{_expected(_choices(kind)[0])}, or none"
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and len(arguments) == 2 and arguments[1] is ...:
        return f"{_expected(arguments[0])}; several with commas between them"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    if kind not in words:
        raise TypeError(f"an option of type {kind!r} has no text")
    return words[kind]
