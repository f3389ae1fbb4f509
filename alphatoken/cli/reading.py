"""How the commands read rows and common options."""

from __future__ import annotations

import argparse

from alphatoken.data import EncodeOptions, Fields, Row, read_rows
from alphatoken.errors import ConfigError

__all__ = ["options_of", "read_file", "window_of"]


def read_file(
    path: str, options: argparse.Namespace, *, limit: int | None, prompt_only: bool = False
) -> list[Row]:
    """Rows of ``path`` with the field names of the command line."""
    fields = Fields(
        options.prompt_field, options.response_field, options.messages_field, prompt_only
    )
    return read_rows(path, fields=fields, limit=limit)


def options_of(options: argparse.Namespace, max_length: int | None) -> EncodeOptions:
    """How rows become tokens; a command without an option takes its default."""
    default = EncodeOptions()
    return EncodeOptions(
        max_length=max_length,
        on_long=getattr(options, "on_long", default.on_long),
        on_empty=getattr(options, "on_empty", default.on_empty),
        turns=getattr(options, "turns", default.turns),
        chat_template=not options.no_chat_template,
        end_token=not getattr(options, "no_end_token", False),
    )


def window_of(options: argparse.Namespace) -> int | None:
    """``--window``: a number of tokens, or "none" for no limit.

    Raises:
        ConfigError: anything else.
    """
    try:
        return None if options.window.lower() == "none" else int(options.window)
    except ValueError:
        raise ConfigError(
            "--window cannot be read", got=repr(options.window), remedy="32, or none"
        ) from None
