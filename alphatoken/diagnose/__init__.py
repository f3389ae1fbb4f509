"""Diagnostics: the user's own rows before training, and how far values can be trusted.

**The diagnostics** (``alphatoken diagnose NAME``; ``DIAGNOSTICS`` lists them): one file each.

- ``data``: whether the rows differ from the rows that are trusted.
- ``estimators``: every estimator against exact values, at its price. ``utility``: predicted against
  actual change of the loss after one step (eq. local_utility_def). ``value_propagation``: how much
  of the flow between tokens Value-Propagation sees (eq. app_value_path_bound).
- ``fisher``: whether the proxy ranks as real retention data would (eq. fisher_proxy).
  ``drift``: how far fine-tuning moved what must not be forgotten.
- ``sensitivity``, ``stability``, ``arithmetic``, ``coverage``, ``heatmap``: settings, noise,
  dtypes, what kept tokens cover, and which tokens of a text are valued.

Each has ``Options`` and ``diagnose(subject, options)``, which goes the same way in all: rows of the
``subject`` are drawn and valued (``valuing``: one engine, any settings, any directions), compared
(``statistics``), put into tables, and ``subject.conclude`` makes these a
:class:`~alphatoken.diagnose.diagnosis.Diagnosis`: an answer, tables, and figures, which
``figures`` draws as they are declared. ``diagnosis.section_of`` shows it on a page, and
``subject.diagnosed_before`` keeps it to a time.

**May import** ``scorer`` and the rooms below, ``data``, ``score``, and the ``oracle``, which
otherwise only tests and benchmarks may; no trainer. **Tests**: planted cases with known answers in
``tests/property/test_diagnose_*.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from alphatoken.errors import ConfigError
from alphatoken.support.options import check_options

__all__ = ["DIAGNOSTICS", "SIZES", "CheckedOptions", "Entry", "find"]

SIZES = {"tokens": 1500, "oracle_tokens": 48, "fisher_samples": 200, "tuning_steps": 40}
"""Sizes that all diagnostics share, by their names in ``Subject``, and the most of each."""


@dataclass(frozen=True)
class CheckedOptions:
    """Base of the options of all diagnostics.

    Raises:
        ConfigError: a value, or an entry of a tuple, that its field does not allow.
    """

    def __post_init__(self) -> None:
        """Check choices and ranges."""
        check_options(self)


@dataclass(frozen=True)
class Entry:
    """One diagnostic.

    Attributes:
        name: on the command line; with underscores for dashes, of its module in this package.
        question: what it answers.
        needs_retention: True if it cannot do without rows of what must not be forgotten.
        needs_sklearn: True if it cannot do without scikit-learn.
        needs_trusted: True if it cannot do without validation rows of their own file.
        rounds: whether it reads less where a budget stops before.
        lead: sentences at the top of a page that shows it alone; "" for those of all.
        value: preset of the values by default; of another than "paper" no other is allowed.
        defaults: shared options -> its own defaults of them, by the names of their flags.
    """

    name: str
    question: str
    needs_retention: bool = False
    needs_sklearn: bool = False
    needs_trusted: bool = False
    rounds: bool = True
    lead: str = ""
    value: str = "paper"
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> ModuleType:
        """Import its module, which has ``Options`` and ``diagnose(subject, options=None)``."""
        # By name: ``alphatoken diagnose --help`` lists all of them and must not import torch.
        return import_module(f"{__name__}.{self.name.replace('-', '_')}")


DIAGNOSTICS = (
    Entry(
        "data",
        "Do my rows look like the rows that I trust?",
        needs_trusted=True,
        rounds=False,
        lead="Answered before any training. A number in brackets is a 95 % interval over rows.",
        value="walk",
        defaults={"fisher_prompts": 0},  # it fits no Fisher
    ),
    Entry(
        "estimators",
        "Which estimator ranks my tokens as their true first-order utility does, at which cost?",
    ),
    Entry(
        "utility",
        "Does the value of a token predict what really happens to the validation loss when one "
        "optimizer step is taken without it?",
    ),
    Entry(
        "value-propagation",
        "How much of what flows from token to token does Value-Propagation see on my model?",
    ),
    Entry(
        "fisher",
        "Does the Fisher-drift proxy rank tokens as real retention data would?",
        needs_retention=True,
    ),
    Entry("heatmap", "Which tokens of my text are valued, and by which component?"),
    Entry("coverage", "What part of the data do the kept tokens cover?", needs_sklearn=True),
    Entry(
        "drift",
        "How far did fine-tuning move the model's states on what it must not forget?",
        needs_retention=True,
        needs_sklearn=True,
    ),
    Entry("sensitivity", "How much do the kept tokens depend on each setting?"),
    Entry("stability", "Which keep or drop decisions are noise?"),
    Entry("arithmetic", "Is my dtype good enough?"),
)
"""In the order of the report."""


def find(name: str) -> Entry:
    """Find the diagnostic ``name``.

    Raises:
        ConfigError: there is none of that name.
    """
    entries = {entry.name: entry for entry in DIAGNOSTICS}
    if name not in entries:
        remedy = f"one of {', '.join(entries)}, all"
        raise ConfigError("there is no such diagnostic", got=repr(name), remedy=remedy)
    return entries[name]
