"""``alphatoken-lab policies``: the methods by name, what each needs, and the whole text of one."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from alphatoken.cli.options import CommandParser
from alphatoken.train.policies import find_policy, policy_names
from alphatoken.train.policy import Needs, TokenPolicy

__all__ = ["description", "run"]

_NEEDS = {
    "reference": "reference model of the trainer",
    "attention": "attention of the last layer",
    "entropy": "entropy of the next token",
    "model": "passes of its own",
    "validation": "validation rows",
}


def run(words: Sequence[str]) -> int:
    """Print the list, or one policy; the exit status.

    Raises:
        ConfigError: no such policy.
    """
    about = (
        "usage: alphatoken-lab policies [NAME]\n\nThe methods that --policy takes, or one of them."
    )
    parser = CommandParser("policies", "alphatoken-lab", description=about)
    parser.add_argument("name", nargs="?", metavar="NAME", help="describe this one")
    for flag, text in (("--json", "print JSON"), ("--traceback", "of an error")):
        parser.add_argument(flag, action="store_true", help=text)
    options = parser.parse_args(list(words))
    every = [description(name) for name in ([options.name] if options.name else policy_names())]
    if options.json:
        print(json.dumps(every[0] if options.name else every, indent=1))
    else:
        print(_whole(every[0]) if options.name else _list(every))
    return 0


def _list(every: Sequence[dict[str, Any]]) -> str:
    """A table of all."""
    heads = ("name", "trainer", "loss", "needs", "what it does")
    rows = [
        (d["name"], d["family"], d["published_loss"], ", ".join(d["needs"]) or "-", d["about"])
        for d in every
    ]
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads) - 1)]
    lines = []
    for row in (heads, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]))
    return "\n".join(lines) + (
        "\n\nalso: top, bottom, harmless (by token value; alphatoken and label are top by "
        "that estimator) and all; merging with the initial model is "
        "`alphatoken-lab merge`\nuse: alphatoken sft --policy NAME [--policy_mode budget "
        "--keep_ratio 0.5] [--policy_options JSON]"
    )


def description(name: str) -> dict[str, Any]:
    """What is known of a policy, as plain JSON values.

    Raises:
        ConfigError: no such policy.
    """
    kind = find_policy(name)
    text = inspect.getdoc(kind) or ""
    return {
        "name": name,
        "family": kind.family,
        "published_loss": kind.published_loss,
        "needs": _needs(kind),
        "direction": kind.direction,
        "scope": kind.scope,
        "rounding": kind.rounding,
        "denominator": kind.denominator,
        "soft": kind.soft,
        "source": kind.source,
        "about": text.partition("\n")[0].rstrip("."),
        "options": _options(kind),
        "text": text,
    }


def _needs(kind: type[TokenPolicy]) -> list[str]:
    asked = kind.needs
    if not isinstance(asked, Needs):  # depends on the settings
        asked = kind(None).needs
    found = [text for name, text in _NEEDS.items() if getattr(asked, name)]
    return ["static pass", *found] if asked.columns else found


def _options(kind: type[TokenPolicy]) -> dict[str, Any]:
    """Own arguments and their defaults, those handed on to a base class too."""
    found: dict[str, Any] = {}
    for source in filter(None, (vars(base).get("__init__") for base in kind.__mro__)):
        taken = list(inspect.signature(source).parameters.values())
        for p in taken:
            if p.kind != inspect.Parameter.VAR_KEYWORD and p.name not in ("self", "settings"):
                plain = isinstance(p.default, (str, int, float, bool))
                found.setdefault(p.name, p.default if plain else None)
        if not any(p.kind == inspect.Parameter.VAR_KEYWORD for p in taken):
            break
    return found


def _whole(found: dict[str, Any]) -> str:
    facts = {
        "trainer": found["family"],
        "loss": found["published_loss"],
        "needs": ", ".join(found["needs"]) or "nothing",
        "first": found["direction"],
        "ranked together": found["scope"],
        "rounding": found["rounding"],
        "divided by": f"{found['denominator']} tokens",
        "own options": ", ".join(f"{k}={v!r}" for k, v in found["options"].items()) or "none",
    }
    lines = [f"{name + ':':<17}{value}" for name, value in facts.items()]
    return "\n".join([found["name"], "", *lines, "", found["text"]])
