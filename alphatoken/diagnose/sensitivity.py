"""Diagnostic of how much the kept tokens depend on each setting.

One setting at a time is changed from the run's own: estimator, number of layers K, window W,
lambda. The kept set is compared with that of the run. What each costs is in ``estimators``,
and what other validation rows do in ``stability``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from alphatoken.config import ESTIMATORS, WALK, ScorerConfig
from alphatoken.diagnose import CheckedOptions
from alphatoken.diagnose.diagnosis import GOOD, Diagnosis, Table, graded
from alphatoken.diagnose.figures import Figure, Guide
from alphatoken.diagnose.statistics import Estimate, Numbers, agreement, percent
from alphatoken.diagnose.subject import Subject, conclude, require_first_order
from alphatoken.diagnose.valuing import (
    WINDOWED,
    OwnValues,
    depths_of,
    scorer_for,
    windows_of,
    with_estimator,
)
from alphatoken.direction.algebra import norms
from alphatoken.errors import CoverageError, FisherError, UnsupportedError
from alphatoken.model.choice import ParameterChoice
from alphatoken.support.options import option


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Values of the settings; the run's own are always added."""

    estimators: tuple[str, ...] = option(
        ESTIMATORS, "estimators to compare", choices=(*ESTIMATORS, WALK)
    )
    layers: tuple[int, ...] = option(
        (),
        "numbers of last layers K; none: all, or a spread of 8 on deeper models",
        at_least=1,
    )
    windows: tuple[int, ...] = option(
        (), "windows W; none: 0, 1, 2, 4, ... up to the longest row", at_least=0
    )
    weights: tuple[float, ...] = option(
        (0.0, 0.15, 0.5, 1.5, 5.0, 15.0, 50.0, 150.0, 500.0),
        "stability weights lambda",
        above=-math.inf,
        below=math.inf,
    )


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Change one setting at a time; compare kept sets with the run's own.

    Raises:
        InputError: too few tokens. DataError: too few validation rows. ConfigError: the objective
            has no validation side, or values along a walk.
    """
    options = options or Options()
    require_first_order(subject.config)
    own = OwnValues.of(subject, tuned=True)
    config = subject.config
    names = dict.fromkeys([*options.estimators, config.estimator])
    tried: dict[str, Mapping[object, ScorerConfig]] = {
        "estimator": {name: with_estimator(config, name) for name in names},
        "K": _depths(own, options),
        "W": _windows(own, options),
    }
    records = {setting: _sweep(own, setting, configs) for setting, configs in tried.items()}
    if own.retention is not None and bool(np.abs(own.values["stability"]).max() > 0):
        gain, keep = own.values["adaptation"], own.values["stability"]
        default = config.stability_weight
        records["lambda"] = [
            _compared(own, weight, own.total if weight == default else gain + weight * keep)
            for weight in sorted({*options.weights, default})
        ]
        direction = own.scorer.direction
        sides = (direction.stability or {}, direction.adaptation)
        sizes = [float(np.linalg.norm(list(norms(side).values()))) for side in sides]
        balance = abs(default) * sizes[0] / sizes[1]
        own.notes.append(f"||lambda V|| / ||G|| over all scored weights: {balance:.3g}.")
    settings = Table.of(
        "settings",
        "Kept tokens, one setting changed at a time",
        [{"setting": setting, **record} for setting in records for record in records[setting]],
    )
    return conclude(
        "sensitivity",
        subject,
        _conclusion(settings),
        [settings],
        [_figure(settings, subject.ratio)],
        valued=own.rows,
        notes=own.notes,
        settings=asdict(options),
        mark=_mark(settings),
    )


def _depths(own: OwnValues, options: Options) -> dict[object, ScorerConfig]:
    config, scope = own.subject.config, own.scorer.scope.layers
    if ParameterChoice.read(config.parameters).everything:
        own.notes.append("Values over all parameters have no number of layers K.")
        return {}
    depth = len(own.scorer.adapter.layers())
    if scope != tuple(range(depth - len(scope), depth)):
        own.notes.append(f"The run scores layers {scope}, which are no last K layers.")
    return {
        k: config if scope == tuple(range(depth - k, depth)) else replace(config, layers=k)
        for k in depths_of(options.layers, depth, len(scope))
    }


def _windows(own: OwnValues, options: Options) -> dict[object, ScorerConfig]:
    config = own.subject.config
    if config.estimator not in WINDOWED or config.part == "direct":
        own.notes.append(f"'{config.estimator}' has no window W.")
        return {}
    longest = max(len(row.input_ids) for row in own.rows)
    # A window of at least the longest row changes nothing: only the run's own is kept of those.
    return {
        f"all ({longest})" if w is None else w: replace(config, window=w)
        for w in windows_of(options.windows, longest, config.window)
        if w is None or w < longest or w == config.window
    }


def _sweep(
    own: OwnValues, setting: str, tried: Mapping[object, ScorerConfig]
) -> list[dict[str, Any]]:
    """Score and compare under each configuration; what the model does not allow is noted."""
    records = []
    for value, config in tried.items():
        try:
            total = own.total if config == own.subject.config else scored(own, config)
        except (CoverageError, FisherError, UnsupportedError) as problem:
            own.notes.append(f"{setting} = {value} was left out: {problem.what}.")
            continue
        records.append(_compared(own, value, total))
    return records


def _compared(own: OwnValues, value: object, total: Numbers) -> dict[str, Any]:
    measures = agreement(own.total, total, own.subject.ratio, own.groups, seed=own.subject.seed)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return {"value": text, "default": total is own.total, **measures}


def scored(own: OwnValues, config: ScorerConfig) -> Numbers:
    """Totals under another configuration."""
    scorer = scorer_for(
        own.subject,
        model=own.model,
        retention=own.retention,
        rows=own.validation,
        config=config,
    )
    return own.subject.score(scorer, own.rows)["total"]


def _figure(settings: Table, ratio: float) -> Figure:
    return Figure(
        "bars",
        "settings",
        settings,
        "Kept tokens, one setting at a time",
        "Marks near 1 belong to a setting that hardly matters; at the dashed line tokens are kept "
        "as if drawn at random.",
        x="value",
        y="overlap",
        facets="setting",
        guides=(Guide(ratio, "y", "by chance"),),
        ylabel="overlap with the run",
        limits=(None, (0.0, 1.05)),
    )


def _least(settings: Table) -> tuple[Estimate, str, dict[str, Any]] | None:
    """The smallest overlap of another setting's kept tokens, that setting, and its record."""
    others = [
        (settings.estimate(place, "overlap"), f"{record['setting']} {record['value']}", record)
        for place, record in enumerate(settings.records())
        if not record["default"] and settings.estimate(place, "overlap").defined
    ]
    return min(others, key=lambda other: other[0].value, default=None)


def _mark(settings: Table) -> str:
    least = _least(settings)
    return GOOD if least is None else graded(least[0])


def _conclusion(settings: Table) -> str:
    smallest = _least(settings)
    if smallest is None:
        return "No setting changes anything that was kept."
    least, value, record = smallest
    return (
        f"The kept tokens depend most on {record['setting']}: {percent(least)} of those that your "
        f"run keeps are kept with {value}."
    )
