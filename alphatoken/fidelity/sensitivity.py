"""How much do the kept tokens depend on each setting?

One setting at a time is changed from the run's own: estimator, number of layers K, window W,
lambda, ratio, validation rows. The kept set is compared with that of the run. What each costs is
in ``estimators``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.config import ScorerConfig
from alphatoken.direction.algebra import Direction, norms
from alphatoken.direction.drift import FisherDrift
from alphatoken.errors import CoverageError, FisherError, UnsupportedError
from alphatoken.estimate.estimators import ESTIMATORS
from alphatoken.fidelity.decisions import Agreement, agreement, percent
from alphatoken.fidelity.diagnosis import Answer, Diagnosis, Table
from alphatoken.fidelity.figures import Figure, Guide, draw_all
from alphatoken.fidelity.intervals import FEWEST, Estimate, bootstrap
from alphatoken.fidelity.options import CheckedOptions, option, thinned
from alphatoken.fidelity.own_values import FEWEST_ROWS, OwnValues
from alphatoken.fidelity.per_row import row_columns, values_along
from alphatoken.fidelity.readings import WINDOWED
from alphatoken.fidelity.registry import find
from alphatoken.fidelity.subject import Subject
from alphatoken.fidelity.sweeps import (
    captured,
    positive_share,
    ratio_sweep,
    size_sweep,
    weight_for_change,
    weight_sweep,
)
from alphatoken.fidelity.valuing import scorer_for, with_estimator
from alphatoken.model.protocol import find_adapter
from alphatoken.model.scope import find_scope, resolve_layers
from alphatoken.select.masks import keep_count

__all__ = ["Options", "diagnose", "layer_choices"]

Numbers = NDArray[np.float64]

_OF_WEIGHTS = (
    "||lambda V|| / ||G||",
    "stability's share of the magnitudes",
    "flips from adaptation alone",
)
_SOME_LAYERS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Values of the settings; the run's own are always added."""

    estimators: tuple[str, ...] = option(
        ESTIMATORS, "estimators that are compared", choices=ESTIMATORS, first=3
    )
    layers: tuple[int, ...] = option(
        (), "numbers of last layers K; by default 1, 2, ... to the depth", least=1, first=2
    )
    windows: tuple[int, ...] = option(
        (0, 1, 2, 4, 8, 16, 32, 64, 128), "windows W, in positions", least=0, first=2
    )
    weights: tuple[float, ...] = option(
        (0.0, 0.15, 0.5, 1.5, 5.0, 15.0, 50.0, 150.0, 500.0),
        "stability weights lambda",
        above=-math.inf,
        below=math.inf,
    )
    ratios: tuple[float, ...] = option(
        (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), "shares of tokens to keep", above=0, most=1
    )
    validation_rows: int = option(
        64, "most validation rows; of more, so many are drawn", least=FEWEST_ROWS, first=8
    )
    draws: int = option(20, "subsets of validation rows drawn for each size", least=FEWEST)
    changed: float = option(
        0.1, "share of decisions whose change by lambda is looked for", above=0, below=1
    )


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Change one setting at a time; compare kept sets with the run's own.

    Raises:
        InputError: too few tokens. DataError: too few validation rows. ConfigError: the objective
            has no validation side.
    """
    options = options or Options()
    run = _Run.measured(subject, options)
    found = {
        "estimator": run.sweep("estimator", run.estimators(options)),
        "K": run.sweep("K", run.layers(options)),
        "W": run.sweep("W", run.windows(options)),
    }
    weight = run.weight
    gain, keep = run.values["adaptation"], run.values["stability"]
    if run.retains:
        found["lambda"] = weight_sweep(
            gain,
            keep,
            sorted({*options.weights, weight}),
            weight,
            subject.ratio,
            run.balance,
            run.groups,
            seed=subject.seed,
        )
    columns = row_columns(subject, run.scorer, run.rows, run.validation)
    sizes = size_sweep(columns, run.rest, subject.ratio, options.draws, seed=subject.seed)
    found["validation rows"] = [*sizes, run.default_record(len(run.validation))]
    ratios = ratio_sweep(
        run.total,
        sorted({*options.ratios, subject.ratio}),
        subject.ratio,
        run.groups,
        seed=subject.seed,
    )
    return _Findings(run, options, found, ratios).diagnosis()


# --- the run that is compared with --------------------------------------------------------------


@dataclass(frozen=True)
class _Run(OwnValues):
    """The run's own settings: model, retention, values.

    ``wide`` is M's two sides over every layer that will be tried: any setting contracts with the
    part that it scores, so that the validation rows are sent through the model once.
    """

    wide: Direction

    @classmethod
    def measured(cls, subject: Subject, options: Options) -> _Run:
        """The values, and M over all layers."""
        layers, config = _tried_layers(subject, options), subject.config
        own = OwnValues.of(subject, options.validation_rows, fisher_layers=layers)
        covered = _covered(own.retention, own.model, layers, own.notes)
        wide = scorer_for(
            subject,
            model=own.model,
            retention=own.retention,
            rows=own.validation,
            config=replace(config, layers=covered),
        ).direction
        return cls(**vars(own), wide=wide)

    @property
    def weight(self) -> float:
        return self.subject.config.stability_weight

    @property
    def retains(self) -> bool:
        """Whether lambda multiplies anything."""
        return self.retention is not None and bool(np.abs(self.values["stability"]).max() > 0)

    @property
    def balance(self) -> float:
        """``||V|| / ||G||`` over all scored weights."""
        direction = self.scorer.direction
        return _norm(direction.stability or {}) / _norm(direction.adaptation)

    def default_record(self, value: object) -> dict[str, Any]:
        """The run against itself."""
        same = Estimate(1.0, 1.0, 1.0, len(self.total))
        none = Estimate(0.0, 0.0, 0.0, len(self.total))
        chance = keep_count(self.subject.ratio, len(self.total)) / len(self.total)
        itself = Agreement(same, same, none, chance)
        return {"value": value, "default": True, **itself.record()}

    # --- what is tried -----------------------------------------------------------------------

    def estimators(self, options: Options) -> dict[object, ScorerConfig]:
        config = self.subject.config
        names = dict.fromkeys([*options.estimators, config.estimator])
        return {name: with_estimator(config, name) for name in names}

    def layers(self, options: Options) -> dict[object, ScorerConfig]:
        config, scope = self.subject.config, self.scorer.scope.layers
        depth = len(self.scorer.adapter.layers())
        last = scope == tuple(range(depth - len(scope), depth))
        if not last:
            self.notes.append(f"The run scores layers {scope}, which are no last K layers.")
        return {
            k: config if last and k == len(scope) else replace(config, layers=k)
            for k in layer_choices(
                options.layers, depth, len(scope) if last else None, self.subject.share
            )
        }

    def windows(self, options: Options) -> dict[object, ScorerConfig]:
        config = self.subject.config
        if config.estimator not in WINDOWED or config.part == "direct":
            self.notes.append(f"'{config.estimator}' has no window W.")
            return {}
        longest = max(len(row.input_ids) for row in self.rows)
        chosen = {*options.windows, *([] if config.window is None else [config.window])}
        widths = sorted(width for width in chosen if width < longest or width == config.window)
        tried: dict[object, ScorerConfig] = {w: replace(config, window=w) for w in widths}
        return tried | {f"all ({longest})": replace(config, window=None)}

    def sweep(self, setting: str, tried: Mapping[object, ScorerConfig]) -> list[dict[str, Any]]:
        """Score and compare under each configuration; what the model does not allow is noted."""
        subject = self.subject
        tracker = subject.tracker(f"Setting {setting}", len(tried))
        records = []
        for number, (value, config) in enumerate(tried.items()):
            if config == subject.config:
                records.append(self.default_record(value))
                continue
            try:
                total = self.scored(config)
            except (CoverageError, FisherError, UnsupportedError) as problem:
                self.notes.append(f"{setting} = {value} was left out: {problem.what}.")
                continue
            compared = agreement(self.total, total, subject.ratio, self.groups, seed=subject.seed)
            records.append({"value": value, "default": False, **compared.record()})
            tracker.report(number + 1)
        return records

    def scored(self, config: ScorerConfig) -> Numbers:
        """Totals under another configuration, by a scorer that knows one validation row.

        That scorer's own values are not used: they make it run the proofs on this model.
        """
        subject = self.subject
        scorer = scorer_for(
            subject,
            model=self.model,
            retention=self.retention,
            rows=self.validation[:1],
            config=config,
        )
        scorer.score(subject.batches(self.rows[:1])[0])
        missing = [name for name in scorer.parameters if name not in self.wide.adaptation]
        if missing:
            raise FisherError("the Fisher given does not cover every scored weight", got=missing[0])
        whole = self.wide.total()
        side = {name: whole[name] for name in scorer.parameters}
        found = [values_along(scorer, batch, [side])[:, 0] for batch in subject.batches(self.rows)]
        return np.concatenate(found)


def layer_choices(
    given: Sequence[int], depth: int, own: int | None, share: float = 1.0
) -> list[int]:
    """Numbers of last layers that are tried: those given, or a spread up to the depth.

    >>> layer_choices((), 5, 3)
    [1, 2, 3, 4, 5]
    >>> layer_choices((2, 40), 28, 3)
    [2, 3]
    """
    usual = thinned(sorted({k for k in (*_SOME_LAYERS, depth) if k <= depth}), 2, share)
    chosen = {k for k in (given or usual) if k <= depth}
    return sorted(chosen | ({own} if own is not None else set()))


def _tried_layers(subject: Subject, options: Options) -> list[int]:
    """Indices of all layers that some setting scores."""
    adapter = find_adapter(subject.model)
    depth, own = len(adapter.layers()), resolve_layers(adapter, subject.config.layers)
    most = max(layer_choices(options.layers, depth, None, subject.share), default=1)
    return sorted({*own, *range(depth - most, depth)})


def _covered(
    retention: FisherDrift | None, model: nn.Module, layers: Sequence[int], notes: list[str]
) -> list[int]:
    """Those of the layers whose scored weights the Fisher has."""
    if retention is None:
        return list(layers)
    adapter, known = find_adapter(model), set(retention.names)
    found = [
        layer
        for layer in layers
        if all(linear.weight_name in known for linear in find_scope(adapter, [layer]).linears)
    ]
    if len(found) < len(layers):
        notes.append(f"The Fisher given covers layers {found} only; no other K is tried.")
    return found


def _norm(direction: Mapping[str, Tensor]) -> float:
    return float(np.linalg.norm(list(norms(direction).values())))


# --- what is said ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Findings:
    """Everything that was measured, and its presentation."""

    run: _Run
    options: Options
    found: dict[str, list[dict[str, Any]]]
    ratios: list[dict[str, Any]]

    def diagnosis(self) -> Diagnosis:
        subject = self.run.subject
        settings, ratios = self.settings(), self.of_ratios()
        return Diagnosis(
            "sensitivity",
            find("sensitivity").question,
            self.answer(),
            tables=(settings, ratios, *self.weights(), self.numbers()),
            figures=draw_all(self.figures(settings, ratios)),
            notes=tuple(self.run.notes),
            settings={**subject.settings(), **asdict(self.options)},
        )

    def settings(self) -> Table:
        """All settings, with the columns that they share."""
        records = [
            {
                "setting": setting,
                "value": f"{record['value']:g}" if setting == "lambda" else str(record["value"]),
                **_without(record, "value", *_OF_WEIGHTS),
            }
            for setting, records in self.found.items()
            for record in records
        ]
        return Table.of(
            "settings",
            "Kept tokens, one setting changed at a time",
            records,
            "Overlap: share of the run's kept tokens that are kept again. Validation rows: "
            "mean over random subsets, intervals over subsets; for all else intervals are "
            "over rows of tokens.",
        )

    def of_ratios(self) -> Table:
        return Table.of(
            "ratios",
            "What each ratio keeps",
            self.ratios,
            "Captured: sum of the kept values over the sum of all positive values. Kept sets "
            "of different ratios are nested, so their overlap says nothing.",
        )

    def weights(self) -> list[Table]:
        """By lambda, where there is a retention term."""
        if "lambda" not in self.found:
            return []
        records = [
            {"lambda": r["value"], **{name: r[name] for name in _OF_WEIGHTS}}
            for r in self.found["lambda"]
        ]
        note = "Norms are over all scored weights; magnitudes are those of the values."
        return [Table.of("weights", "What lambda does", records, note)]

    def numbers(self) -> Table:
        run, changed = self.run, self.options.changed

        def estimate(statistic: Any, *columns: Numbers, draws: int = 200) -> Estimate:
            return bootstrap(
                statistic, *columns, groups=run.groups, draws=draws, seed=run.subject.seed
            )

        found = {"share of tokens with a positive value": estimate(positive_share, run.total)}
        found["captured by keeping every token"] = estimate(lambda v: captured(v, 1.0), run.total)
        if "lambda" in self.found:
            found[f"lambda that reverses {100 * changed:g} % of the decisions"] = estimate(
                lambda a, b: weight_for_change(a, b, run.subject.ratio, changed),
                run.values["adaptation"],
                run.values["stability"],
                draws=50,
            )
        return Table.of_numbers(found)

    def figures(self, settings: Table, ratios: Table) -> list[Figure]:
        chance = keep_count(self.run.subject.ratio, len(self.run.total)) / len(self.run.total)
        own = {"default": "the run's own value"}
        return [
            Figure(
                "bars",
                "settings",
                settings,
                "Kept tokens, one setting at a time",
                "Marks near 1 belong to a setting that hardly matters; at the dashed line tokens "
                "are kept as if drawn at random.",
                x="value",
                y="overlap",
                facets="setting",
                marked=own,
                guides=(Guide(chance, "y", "by chance"),),
                ylabel="overlap with the run",
                limits=(None, (0.0, 1.05)),
            ),
            Figure(
                "lines",
                "ratios",
                ratios,
                "How much value each ratio captures",
                "A steep rise and a long flat top mean that few tokens carry the value and the "
                "ratio may be small; where it falls again, tokens are kept that speak against the "
                "objective.",
                x="value",
                y="captured",
                marked=own,
                xlabel="ratio kept",
                ylabel="kept value over all positive value",
            ),
        ]

    def answer(self) -> Answer:
        """The setting on which the kept tokens depend most."""
        worst = {}
        for setting, records in self.found.items():
            others = [r for r in records if not r["default"] and r["overlap"].defined]
            if others:
                worst[setting] = min(others, key=lambda record: float(record["overlap"].value))
        advice = (
            "settings that change few decisions may be as cheap as you like; choose the others "
            "with care."
        )
        if not worst:
            return Answer("No setting changes anything that was kept.", "", "", advice)
        setting = min(worst, key=lambda name: float(worst[name]["overlap"].value))
        return Answer(
            f"The kept tokens depend most on {setting}.",
            percent(worst[setting]["overlap"]),
            f"of the tokens that your run keeps are kept with {setting} {worst[setting]['value']}",
            advice,
        )


def _without(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: cell for name, cell in record.items() if name not in names}
