"""``--value``: how the words of a command become options of the values.

A preset may be named (``--value``); research options, such as ``--estimator``, may be named in its
place; and where neither is, the command has a default. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from alphatoken.config import ValueOptions, in_force

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
    unsaid = object()  # what is said may equal the default
    parser.set_defaults(**dict.fromkeys(NAMES, unsaid))
    arguments = vars(parser.parse_args(list(words)))
    named = {name: value for name in NAMES if (value := arguments.pop(name)) is not unsaid}
    value, options = in_force(arguments["value"], named, default(arguments))
    return {**arguments, **defaults, **options, "value": value}
