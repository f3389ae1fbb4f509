"""Writes docs/options.md of the fields: ``python -m tests.options_page docs/options.md``."""

# ruff: noqa: E501  (pages are as wide as the others)
from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from alphatoken.cli.options import default_of
from alphatoken.config import ScorerConfig
from alphatoken.train.fields import AlphaFields

OF_SCORER = {
    "layers": "score_layers",
    "parameters": "value_parameters",
    "offload": "fisher_offload",
    "standard_errors": "policy",
}
"""Fields of ``ScorerConfig`` that trainers call otherwise, or set by another one."""

_HEAD = """\
# Every option

Fields of `AlphaSFTConfig`, `AlphaDPOConfig` and `AlphaConfig` beside TRL's and transformers' own; on the command line
and in recipes they have the same names. The defaults are the paper's. So is the fixed validation batch, against which
we warn: whoever changes nothing reproduces the paper, and the share of the rows that is only watched raises an alarm
when the batch is being learnt by heart. `validation_mode="pool"` is what we recommend.

<!-- Written by python -m tests.options_page docs/options.md -->

| option | default | what it is | range | when to change it | source |
|---|---|---|---|---|---|
"""

_SCORER = """
## Of the scorer

`ScorerConfig` has these of them, some by another name. The defaults are the same, but for `layers`, a number there.

| field of `ScorerConfig` | default | option of the trainers |
|---|---|---|
"""


def page() -> str:
    """The page as Markdown."""
    return _HEAD + "".join(map(_line, fields(AlphaFields))) + _SCORER + "".join(_of_scorer())


def _line(one: Field[Any]) -> str:
    said = one.metadata
    cells = (said["help"], said["within"], said["when"], said["source"])
    return f"| `{one.name}` | `{default_of(one)!r}` | {' | '.join(map(_escaped, cells))} |\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def _of_scorer() -> Iterator[str]:
    known = {one.name for one in fields(AlphaFields)}
    for one in fields(ScorerConfig):
        name = OF_SCORER.get(one.name, one.name)
        assert name in known, one.name
        said = "`policy='harmless'`" if one.name == "standard_errors" else f"`{name}`"
        yield f"| `{one.name}` | `{one.default!r}` | {said} |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
