"""Values under many settings along one direction: each estimator, choice of layers and window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.config import ScorerConfig
from alphatoken.data import Example
from alphatoken.direction.objective import objective_gradient
from alphatoken.errors import CoverageError, UnsupportedError
from alphatoken.estimate.estimators import ESTIMATORS
from alphatoken.estimate.proofs import CoverageReport
from alphatoken.fidelity.subject import Subject
from alphatoken.fidelity.valuing import scorer_for, values_along
from alphatoken.model.batch import read_batch
from alphatoken.model.batch_slice import around_responses
from alphatoken.model.layer_choice import layers_within
from alphatoken.scorer import Scorer

__all__ = [
    "WINDOWED",
    "Setting",
    "along",
    "depths_of",
    "full_gradient",
    "read",
    "supported",
    "windows_of",
]

WINDOWED = ("alphatoken", "paper_literal")
"""Estimators that Value-Propagation's window changes."""

_DEPTHS = 8  # numbers of layers that are tried

Numbers = NDArray[np.float64]


def depths_of(asked: Sequence[int], depth: int, own: int) -> list[int]:
    """Numbers of last layers to try: those asked for, or a spread on a log scale; and ``own``.

    >>> depths_of((), 5, 3), depths_of((), 32, 3), depths_of((2, 20), 28, 3)
    ([1, 2, 3, 4, 5], [1, 2, 3, 4, 7, 12, 20, 32], [2, 3, 20])

    Raises:
        ConfigError: more layers than there are.
    """
    layers_within(max(asked, default=1), depth)
    spread = {round(depth ** (i / (_DEPTHS - 1))) for i in range(_DEPTHS)}
    usual = sorted(range(1, depth + 1) if depth <= _DEPTHS else spread)
    return sorted({min(k, depth) for k in (*(asked or usual), own)})


def windows_of(asked: Sequence[int], longest: int, own: int | None) -> list[int | None]:
    """Windows to try: those asked for, or 0 and powers of two below the longest row; own; no limit.

    >>> windows_of((), 9, 3)
    [0, 1, 2, 3, 4, 8, None]
    """
    powers = [2**i for i in range(longest.bit_length()) if 2**i < longest]
    chosen = {*(asked or (0, *powers))} | ({own} if own is not None else set())
    return [*sorted(chosen), None]


@dataclass(frozen=True, order=True)
class Setting:
    """One setting of an estimator.

    Attributes:
        estimator: one of ``ESTIMATORS``.
        layers: indices of the scored layers.
        window: W; None for no limit, and where there is none.
        everything: label values over all trainable parameters, not only over the layers' linears.
    """

    estimator: str
    layers: tuple[int, ...]
    window: int | None = None
    everything: bool = False

    def __str__(self) -> str:
        """Text of the setting for a reader."""
        if self.everything:
            return f"{self.estimator}, all parameters"
        whole = f"{self.estimator}, K={len(self.layers)}"
        if self.estimator not in WINDOWED:
            return whole
        return f"{whole}, W={'T' if self.window is None else self.window}"

    @property
    def columns(self) -> dict[str, Any]:
        """Cells of a table for this setting."""
        windowed = self.estimator in WINDOWED
        window = ("T" if self.window is None else self.window) if windowed else None
        weights = "all parameters" if self.everything else "linears"
        found = {"estimator": self.estimator, "K": len(self.layers), "W": window}
        return found | {"weights": weights}

    def config(self, base: ScorerConfig) -> ScorerConfig:
        """Options of a scorer that computes it: the validation side alone, P = 1."""
        return replace(
            base,
            estimator=self.estimator,
            derivative=base.derivative if self.estimator == "label" else "auto",
            curvature=False,
            layers=list(self.layers),
            window=self.window,
            parameters="all" if self.everything else "linears",
            objective="adaptation",
            part="both",
            preconditioner=None,
        )


def full_gradient(subject: Subject) -> dict[str, Tensor]:
    """Gradient of the mean validation loss by every trainable parameter, by name."""
    named = {n: p for n, p in subject.model.named_parameters() if p.requires_grad}
    validation = subject.batches(subject.validation)
    return objective_gradient(subject.adapter, named, validation, first=None)


def supported(
    subject: Subject, layers: tuple[int, ...], rows: Sequence[Example]
) -> tuple[dict[str, CoverageReport], dict[str, str]]:
    """Estimators that this model allows on these layers with what was proved; why not the others.

    Each scores a slice of the two shortest rows for real, with the scorer's own proofs of coverage
    and isolation.
    """
    whole, *_ = subject.batches(sorted(rows, key=lambda row: len(row.input_ids))[:2])
    shown = around_responses(read_batch(whole, max_length=subject.adapter.max_positions()))
    batch = {**shown.inputs, "labels": shown.labels}
    tracker = subject.tracker("What the model allows", len(ESTIMATORS))
    found, refused = {}, {}
    for number, estimator in enumerate(ESTIMATORS):
        tracker.report(number)
        config = Setting(estimator, layers, subject.config.window).config(subject.config)
        try:
            scorer = Scorer(subject.model, batch, None, config)
            scorer.score(batch)
        except (UnsupportedError, CoverageError) as problem:
            refused[estimator] = str(problem).splitlines()[0]
        else:
            found[estimator] = scorer.coverage
    return found, refused


def read(
    subject: Subject,
    rows: Sequence[Example],
    direction: Mapping[str, Tensor],
    settings: Sequence[Setting],
) -> dict[Setting, Numbers]:
    """Values of the response tokens of ``rows`` under every setting, along one direction.

    Args:
        subject: model, batch size, options that are not varied.
        rows: to value.
        direction: parameter name -> M, at least over the parameters of every setting.
        settings: what to compute.

    Returns:
        Of each setting, flat in (row, position) order, what ``Scorer.score(...).total`` gives for
        its config, up to rounding; label values by forward mode.
    """
    values: dict[Setting, Numbers] = {}
    proved: dict[str, CoverageReport] = {}
    for setting in sorted(settings, key=lambda one: -len(one.layers)):
        config = setting.config(subject.config)
        scorer = scorer_for(subject, rows=subject.validation[:1], config=config)
        if setting.estimator in proved:  # of at least these layers
            scorer.valuer.capture_check.take(proved[setting.estimator])
        own = along(subject.model, direction, scorer.parameters)
        values[setting] = values_along(subject, scorer, rows, [own], f"Values, {setting}")[:, 0]
        proved[setting.estimator] = scorer.coverage
    return {setting: values[setting] for setting in settings}


def along(
    model: nn.Module, direction: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The direction of these parameters, under their own names: a tied one has several."""
    named = dict(model.named_parameters(remove_duplicate=False))
    known = {id(named[name]): matrix for name, matrix in direction.items()}
    return {name: known[id(parameter)] for name, parameter in parameters.items()}
