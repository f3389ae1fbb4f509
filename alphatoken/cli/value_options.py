"""``--value``: how the words of a command become options of the values.

A preset may be named (``--value``); research options, such as ``--estimator``, may be named in its
place; and where neither is, the command has a default. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from alphatoken.cli.program import replace_default, shown
from alphatoken.config import RESEARCH, ValueOptions, in_force
from alphatoken.presets import PRESETS, written_options

NAMES = tuple(one.name for one in fields(ValueOptions))


def parse_values(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    default: Callable[[Mapping[str, Any]], str],
) -> dict[str, Any]:
    """Parse the words; options of the values are those of the preset in force, if there is one.

    Args:
        parser: with the options of ``PresetOptions``.
        words: of the command.
        default: from the other options to the preset of a command line that names none.

    Raises:
        ConfigError: words that cannot be read, or an estimator beside a preset of another one.
    """
    defaults = {name: parser.get_default(name) for name in NAMES}
    others = {action.dest: action.default for action in parser._actions}
    say_preset(parser, words, default(others))
    unsaid = object()  # what is said may equal the default
    parser.set_defaults(**dict.fromkeys(NAMES, unsaid))
    arguments = vars(parser.parse_args(list(words)))
    named = {name: value for name in NAMES if (value := arguments.pop(name)) is not unsaid}
    value, options = in_force(arguments["value"], named, default(arguments))
    return {**arguments, **defaults, **options, "value": value}


def say_preset(parser: argparse.ArgumentParser, words: Sequence[str], default: str) -> None:
    """Have the help of each option that a preset sets say its value there, which is in force.

    Args:
        parser: with the options of the values.
        words: of the command, which may name another preset, or research options in its place.
        default: the preset of a command line that names none.
    """
    pairs = [word.partition("=") for word in words]
    if {flag.removeprefix("--") for flag, *_ in pairs} & {*RESEARCH}:
        return
    following = zip(pairs, [*words[1:], ""], strict=False)
    named = [value if equals else after for (flag, equals, value), after in following
             if flag == "--value"]  # fmt: skip
    preset = next((name for name in named[::-1] if name in PRESETS), default)
    for name, value in written_options(preset, {}).items():
        if value is not None:
            replace_default(parser, name, f"(of --value {preset}: {shown(value)})")
