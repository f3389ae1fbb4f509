"""The diagnostics by name, and the sizes that they share; nothing heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from alphatoken.errors import ConfigError

__all__ = ["DIAGNOSTICS", "SIZES", "Entry", "find"]

SIZES = {"tokens": 1500, "oracle_tokens": 48, "fisher_samples": 200, "tuning_steps": 40}
"""Sizes that all diagnostics share, by their names in ``Subject``, and the most of each."""


@dataclass(frozen=True)
class Entry:
    """Entry of one diagnostic.

    Attributes:
        name: on the command line.
        question: what it answers.
        needs_retention: True if it cannot do without rows of what must not be forgotten.
        needs_sklearn: True if it cannot do without scikit-learn.
    """

    name: str
    question: str
    needs_retention: bool = False
    needs_sklearn: bool = False

    @property
    def module(self) -> str:
        """Name of the diagnostic's module in ``alphatoken.diagnose``.

        It has ``Options`` (a frozen dataclass whose fields carry their help in
        ``metadata["help"]``) and ``diagnose(subject, options=None) -> Diagnosis``.
        """
        return self.name.replace("-", "_")

    def load(self) -> ModuleType:
        """Import it; heavy libraries come with this."""
        return import_module(f"alphatoken.diagnose.{self.module}")


_QUESTIONS = {
    "estimators": "Which estimator ranks my tokens as their true first-order utility does, at "
    "which cost?",
    "utility": "Does the value of a token predict what really happens to the validation loss when "
    "one optimizer step is taken without it?",
    "value-propagation": "How much of what flows from token to token does Value-Propagation see on "
    "my model?",
    "fisher": "Does the Fisher-drift proxy rank tokens as real retention data would?",
    "heatmap": "Which tokens of my text are valued, and by which component?",
    "coverage": "What part of the data do the kept tokens cover?",
    "drift": "How far did fine-tuning move the model's states on what it must not forget?",
    "sensitivity": "How much do the kept tokens depend on each setting?",
    "stability": "Which keep or drop decisions are noise?",
    "arithmetic": "Is my dtype good enough?",
}
_OF_RETENTION, _OF_CLOUDS = ("fisher", "drift"), ("coverage", "drift")
DIAGNOSTICS = tuple(
    Entry(name, question, name in _OF_RETENTION, name in _OF_CLOUDS)
    for name, question in _QUESTIONS.items()
)
"""In the order of the report."""


def find(name: str) -> Entry:
    """Find the diagnostic ``name``.

    Raises:
        ConfigError: there is none of that name.
    """
    for entry in DIAGNOSTICS:
        if entry.name == name:
            return entry
    names = ", ".join(entry.name for entry in DIAGNOSTICS)
    raise ConfigError("there is no such diagnostic", got=repr(name), remedy=f"one of {names}, all")
