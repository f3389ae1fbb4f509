"""``alphatoken-lab policies``: the methods by name, what each needs, and the whole text of one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from alphatoken.cli.program import CommandParser
from alphatoken.errors import ConfigError
from alphatoken.train.policies import find_policy, policy_names
from alphatoken.train.policy import Needs, TokenPolicy

_NEEDS = {
    "reference": "reference model of the trainer",
    "attention": "attention of the last layer",
    "entropy": "entropy of the next token",
    "model": "passes of its own",
    "validation": "validation rows",
    "row_weights": "weights in the rows",
}
_HEADS = ("name", "trainer", "loss", "needs", "what it does")
_END = """
also: random, top and bottom (by token value; alphatoken and label are top by that estimator) and \
all; merging with the initial model is `alphatoken-lab merge`
use: alphatoken sft --policy NAME [--policy_mode budget --keep_ratio 0.5] [--policy_options JSON]"""


def run(words: Sequence[str]) -> int:
    """Print the list, or one policy; the exit status.

    Raises:
        ConfigError: no such policy.
    """
    about = (
        "usage: alphatoken-lab policies [NAME]\n\nThe methods that --policy takes, or one of them."
    )
    parser = CommandParser("policies", "alphatoken-lab", description=about)
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of the policy to describe")
    parser.add_argument(
        "--traceback", action="store_true", help="show the whole traceback of an error"
    )
    name = parser.parse_args(list(words)).name
    rows = [_row(name, find_policy(name))] if name else [*map(_listed, policy_names())]
    if name:
        facts = zip(_HEADS[:-1], rows[0], strict=False)
        print("\n".join(f"{head + ':':<9}{said}" for head, said in facts))
        print(f"\n{inspect.getdoc(find_policy(name))}")
        return 0
    widths = [max(len(row[i]) for row in (_HEADS, *rows)) for i in range(len(_HEADS) - 1)]
    for row in (_HEADS, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]))
    print(_END)
    return 0


def _listed(name: str) -> tuple[str, ...]:
    """Its row; of one that cannot be imported, why."""
    try:
        return _row(name, find_policy(name))
    except ConfigError as error:
        return name, "-", "-", "-", f"{error.what}: {error.got}"


def _row(name: str, kind: type[TokenPolicy]) -> tuple[str, ...]:
    own = kind.needs
    if not isinstance(own, Needs):  # depends on the settings
        own = kind(None).needs
    needs = ["static pass"] * bool(own.columns)
    needs += [text for what, text in _NEEDS.items() if getattr(own, what)]
    about = (inspect.getdoc(kind) or "").partition("\n")[0].rstrip(".")
    return name, kind.family, kind.published_loss, ", ".join(needs) or "-", about
