"""The page of all options, which each build of the documentation writes anew."""

# ruff: noqa: E501  (pages are as wide as the others)
from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NamedTuple

from alphatoken.cli.program import default_of
from alphatoken.cli.training_options import RaceArguments
from alphatoken.config import ScorerConfig
from alphatoken.presets import PRESETS
from alphatoken.support.options import limits_of
from alphatoken.train.fields import AlphaFields
from alphatoken.train.policies import find_policy, policy_names
from alphatoken_lab.methods.preference import PreferencePolicy

ALONE = ("standard_errors", "damping")
"""Fields of ``ScorerConfig`` that trainers leave at their defaults."""

_HEAD = """\
# Every option

This page lists the fields that `AlphaSFTConfig`, `AlphaDPOConfig` and `AlphaConfig` add to TRL's and transformers' own. They have the same
names on the command line and in recipes. The defaults of the method (estimator, lambda, K, W, ratio, the fixed validation batch) are the
paper's. Other defaults are not: `retention` (its Fisher takes hours), and [some of the training](paper-gaps.md) (rows 12 to 16 there). The
recipes `paper-sft` and `paper-dpo` set all as the paper has them; [a table](paper-gaps.md#the-papers-recipes-option-by-option) names the places. We recommend `validation_mode="pool"`, because a fixed batch is overfitted.

| option | default | what it is | range |
|---|---|---|---|
"""

_SCORER = """
## Of the scorer

`ScorerConfig` has these of the options under the same names, with the same defaults (`layers` is a number there), and a few that trainers
leave at their defaults ([rows 5, 6 and 27 of the gaps](paper-gaps.md)).

| field of `ScorerConfig` | default | an option of the trainers |
|---|---|---|
"""


_PRESETS = """
## Three ways to value

`--value` of the commands, and `ScorerConfig.walk()`, `.exact()` and `.paper()` in Python, set these options. An option that is named beside
them goes before theirs. `score`, `diagnose data` and `race` take a walk where nothing is named, the others the paper's values.

| value | sets | a value says |
|---|---|---|
"""


_RACE = """
## Of a race

[`alphatoken race`](race.md) takes these beside the options of a run; those of `RaceConfig` have the same names in Python.

| option | default | what it is | range |
|---|---|---|---|
"""

_POLICIES = """
## Of the methods

`policy_options` takes these options; `alphatoken-lab policies NAME` prints the formula that uses them.

| method | option | default | what it is | range | when to change it | source |
|---|---|---|---|---|---|---|
"""


class Argument(NamedTuple):
    """One argument of a method, as its docstring has it: ``name: what. [range; when; source]``."""

    name: str
    default: Any
    what: str
    within: str
    when: str
    source: str


def page() -> str:
    """The page as Markdown."""
    lines = [_HEAD, *map(_line, fields(AlphaFields)), _PRESETS, *_of_presets()]
    lines += [_RACE, *map(_line, fields(RaceArguments))]
    lines += [_POLICIES, *_of_policies()]
    return "".join([*lines, _SCORER, *_of_scorer()])


def arguments(kind: type[Any]) -> list[Argument]:
    """Those of a method's class, without what all preference methods take.

    Raises:
        ValueError: one has no range, no time to change it, or no source.
    """
    said = {
        name: " ".join(text.split())
        for name, text in re.findall(
            r"^    (\w+): (.*?)(?=^    \**\w+: |\n\n)", inspect.getdoc(kind) or "", re.M | re.S
        )
    }
    found = []
    for one in inspect.signature(kind).parameters.values():
        if one.name == "settings" or one.kind is one.VAR_KEYWORD:
            continue
        parts = re.fullmatch(r"(.*) \[([^;]+); ([^;]+); ([^]]+)\]", said.get(one.name, ""))
        if parts is None:
            raise ValueError(f"{kind.__name__}: {one.name} lacks [range; when; source]")
        found.append(Argument(one.name, one.default, *parts.groups()))
    return found


def _of_presets() -> Iterator[str]:
    for name, (options, about) in PRESETS.items():
        sets = ", ".join(f"`{option}={value!r}`" for option, value in options.items())
        yield f"| `{name}` | {sets} | {_escaped(about.format(**options))} |\n"


def _of_policies() -> Iterator[str]:
    for name, kind in every_method():
        for one in arguments(kind):
            cells = (one.what, one.within, one.when, one.source)
            row = " | ".join(_escaped(cell).replace("``", "`") for cell in cells)
            yield f"| {name} | `{one.name}` | `{one.default!r}` | {row} |\n"


def every_method() -> Iterator[tuple[str, type[Any]]]:
    """Title and class of each, those first whose arguments all methods of pairs take."""
    yield "of preference pairs", PreferencePolicy
    for name in policy_names():
        if (kind := find_policy(name)).__init__ is not PreferencePolicy.__init__:
            yield f"`{name}`", kind


def _line(one: Field[Any]) -> str:
    cells = (one.metadata["help"], _within(one))
    return f"| `{one.name}` | `{default_of(one)!r}` | {' | '.join(map(_escaped, cells))} |\n"


def _within(one: Field[Any]) -> str:
    """Values that an option may have, in words."""
    limits = limits_of(one)
    if isinstance(one.default, bool):
        return "true or false"
    if limits.within:
        return limits.within
    if limits.choices:
        return " or ".join("null" if name is None else f"'{name}'" for name in limits.choices)
    return "null, or " * limits.optional + limits.range_in_words()


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def _of_scorer() -> Iterator[str]:
    known = {one.name for one in fields(AlphaFields)}
    for one in fields(ScorerConfig):
        assert (one.name in known) != (one.name in ALONE), one.name
        yield f"| `{one.name}` | `{one.default!r}` | {'no' if one.name in ALONE else 'yes'} |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
