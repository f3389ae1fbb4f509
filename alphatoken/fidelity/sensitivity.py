"""How much do the kept tokens, and the cost, depend on each setting?

One setting at a time is changed from the run's own: estimator, number of layers K, window W,
lambda, ratio, validation rows. The kept set is compared with that of the run, and the scoring
side is counted in FLOPs beside a training step on the same batch.
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
from alphatoken.fidelity import sensitivity_figures as figures
from alphatoken.fidelity.cost import (
    ScoringCost,
    direction_cost,
    step_cost,
    values_cost,
)
from alphatoken.fidelity.decisions import Agreement, agreement, percent
from alphatoken.fidelity.diagnosis import Diagnosis, Table, Verdict
from alphatoken.fidelity.intervals import FEWEST, Estimate, bootstrap
from alphatoken.fidelity.options import CheckedOptions, option
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
from alphatoken.model.capture import find_scope, resolve_layers
from alphatoken.model.protocol import find_adapter
from alphatoken.scorer import Scorer
from alphatoken.select.masks import keep_count

__all__ = ["Options", "diagnose", "layer_choices"]

Numbers = NDArray[np.float64]

_DISJOINT = "overlap, disjoint subsets"
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
        ESTIMATORS, "estimators that are compared", choices=ESTIMATORS
    )
    layers: tuple[int, ...] = option(
        (), "numbers of last layers K; by default 1, 2, ... to the depth", least=1
    )
    windows: tuple[int, ...] = option(
        (0, 1, 2, 4, 8, 16, 32, 64, 128), "windows W, in positions", least=0
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
        64, "most validation rows; of more, so many are drawn", least=FEWEST_ROWS
    )
    draws: int = option(20, "subsets of validation rows drawn for each size", least=FEWEST)
    changed: float = option(
        0.1, "share of decisions whose change by lambda is looked for", above=0, below=1
    )
    repeats: int = option(3, "timings, of which the median is taken", least=1)


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Change one setting at a time; compare kept sets and cost with the run's own.

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
    sizes, alone = (
        size_sweep(columns, rest, subject.ratio, options.draws, seed=subject.seed)
        for rest in (run.rest, np.zeros_like(gain))
    )
    found["validation rows"] = [
        *(record | {"cost": run.cost_of_rows(int(record["value"]))} for record in sizes),
        run.default_record(len(run.validation)),
    ]
    ratios = ratio_sweep(
        run.total,
        sorted({*options.ratios, subject.ratio}),
        subject.ratio,
        run.groups,
        seed=subject.seed,
    )
    return _Findings(run, options, found, ratios, alone).diagnosis()


# --- the run that is compared with --------------------------------------------------------------


@dataclass(frozen=True)
class _Run(OwnValues):
    """The run's own settings: model, retention, values, cost.

    ``wide`` is M's two sides over every layer that will be tried: any setting contracts with the
    part that it scores, so that the validation rows are sent through the model once.
    """

    wide: Direction
    cost: ScoringCost
    repeats: int

    @classmethod
    def measured(cls, subject: Subject, options: Options) -> _Run:
        """The values and their cost."""
        layers, config = _tried_layers(subject, options), subject.config
        own = OwnValues.of(subject, options.validation_rows, fisher_layers=layers)
        batch = subject.batches(own.rows)[0]
        shape = tuple(batch["input_ids"].shape)
        own.notes.append(
            f"Cost is that of one batch of {shape[0]} rows and {shape[1]} positions, scored in the "
            "forward that training runs, with M built anew from all validation rows; a step is "
            "its forward and backward."
        )
        cost = ScoringCost(
            direction_cost(own.scorer, repeats=1),
            values_cost(own.scorer, batch, repeats=options.repeats),
            step_cost(own.scorer.adapter, batch, repeats=options.repeats),
        )
        covered = _covered(own.retention, own.model, layers, own.notes)
        wide = scorer_for(
            subject,
            model=own.model,
            retention=own.retention,
            rows=own.validation,
            config=replace(config, layers=covered),
        ).direction
        return cls(**vars(own), wide=wide, cost=cost, repeats=options.repeats)

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
        return {"value": value, "default": True, **itself.record(), "cost": self.cost}

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
            for k in layer_choices(options.layers, depth, len(scope) if last else None)
        }

    def windows(self, options: Options) -> dict[object, ScorerConfig]:
        config = self.subject.config
        if config.estimator not in WINDOWED or config.path == "direct":
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
                scorer, total = self.scored(config)
            except (CoverageError, FisherError, UnsupportedError) as problem:
                self.notes.append(f"{setting} = {value} was left out: {problem.what}.")
                continue
            compared = agreement(self.total, total, subject.ratio, self.groups, seed=subject.seed)
            records.append(
                {
                    "value": value,
                    "default": False,
                    **compared.record(),
                    "cost": self.cost_of(scorer, own=setting == "K"),
                }
            )
            tracker.report(number + 1)
        return records

    def scored(self, config: ScorerConfig) -> tuple[Scorer, Numbers]:
        """Totals under another configuration, and a scorer of it that knows one validation row.

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
        return scorer, np.concatenate(found)

    def cost_of(self, scorer: Scorer, *, own: bool) -> ScoringCost:
        """Of another configuration; M is counted anew only where it is another one (``own``)."""
        values = values_cost(scorer, self.subject.batches(self.rows)[0], repeats=self.repeats)
        direction = self.cost.direction
        if own:
            scorer.set_validation(self.subject.batches(self.validation))
            direction = direction_cost(scorer, repeats=0)
        return ScoringCost(direction, values, self.cost.step)

    def cost_of_rows(self, size: int) -> ScoringCost:
        """The run's cost with the first ``size`` validation rows."""
        rows = self.validation[:size]
        scorer = scorer_for(self.subject, model=self.model, retention=self.retention, rows=rows)
        return replace(self.cost, direction=direction_cost(scorer, repeats=0))


def layer_choices(given: Sequence[int], depth: int, own: int | None) -> list[int]:
    """Numbers of last layers that are tried: those given, or a spread up to the depth.

    >>> layer_choices((), 5, 3)
    [1, 2, 3, 4, 5]
    >>> layer_choices((2, 40), 28, 3)
    [2, 3]
    """
    chosen = {k for k in (given or (*_SOME_LAYERS, depth)) if k <= depth}
    return sorted(chosen | ({own} if own is not None else set()))


def _tried_layers(subject: Subject, options: Options) -> list[int]:
    """Indices of all layers that some setting scores."""
    adapter = find_adapter(subject.model)
    depth, own = len(adapter.layers()), resolve_layers(adapter, subject.config.layers)
    most = max(layer_choices(options.layers, depth, None), default=1)
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
    alone: list[dict[str, Any]]
    """By validation rows, without the stability side."""

    def diagnosis(self) -> Diagnosis:
        subject, settings = self.run.subject, self.settings()
        subsets = [r for r in self.found["validation rows"] if not r["default"]]
        tables = [
            Table.of(
                "settings",
                "Kept tokens and cost, one setting changed at a time",
                [_without(record, _DISJOINT) for record in settings],
                "Overlap: share of the run's kept tokens that are kept again. Validation rows: "
                "mean over random subsets, intervals over subsets; for all else intervals are "
                "over rows of tokens. Costs are shares of a training step on the same batch.",
            ),
            Table.of(
                "ratios",
                "What each ratio keeps",
                self.ratios,
                "Captured: sum of the kept values over the sum of all positive values. Kept sets "
                "of different ratios are nested, so their overlap says nothing.",
            ),
            Table.of(
                "subsets",
                "Agreement of validation sets that have no row in common",
                [
                    {
                        "rows": both["value"],
                        "overlap": both[_DISJOINT],
                        "overlap, adaptation alone": alone[_DISJOINT],
                    }
                    for both, alone in zip(subsets, self.alone, strict=True)
                    if _DISJOINT in both
                ],
                "Overlap of the tokens that two disjoint random subsets keep.",
            ),
        ]
        if "lambda" in self.found:
            tables.append(
                Table.of(
                    "weights",
                    "What lambda does",
                    [
                        {"lambda": r["value"], **{name: r[name] for name in _OF_WEIGHTS}}
                        for r in self.found["lambda"]
                    ],
                    "Norms are over all scored weights; magnitudes are those of the values.",
                )
            )
        return Diagnosis(
            "sensitivity",
            find("sensitivity").question,
            tuple(self.answer()),
            tables=tuple(tables),
            figures=(figures.masks(settings), figures.ratios(self.run.total, self.ratios)),
            notes=tuple(self.run.notes),
            settings={**subject.settings(), **asdict(self.options)},
            verdict=self.verdict(),
        )

    def settings(self) -> list[dict[str, Any]]:
        """All settings, with the columns that they share."""
        return [
            {
                "setting": setting,
                "value": f"{record['value']:g}" if setting == "lambda" else str(record["value"]),
                **_without(record, "value", "cost", *_OF_WEIGHTS),
                **(record["cost"].record() if "cost" in record else {}),
            }
            for setting, records in self.found.items()
            for record in records
        ]

    # --- sentences -----------------------------------------------------------------------------

    def answer(self) -> list[str]:
        """Findings, most important first."""
        said = [self._order(), self._ratio()]
        if "lambda" in self.found:
            said.append(self._weight())
        return [*said, self._rows(), self._cost()]

    def verdict(self) -> Verdict:
        """The setting on which the kept tokens depend most."""
        found = self._worst()
        text, number, label = "No setting changes anything that was kept.", "", ""
        if found:
            setting, record = found[0]
            text = f"The kept tokens depend most on {setting}."
            number = percent(record["overlap"])
            label = f"of the tokens that your run keeps are kept with {setting} {record['value']}"
        return Verdict(
            text,
            number,
            label,
            "settings that change few decisions may be as cheap as you like; choose the others "
            "with care.",
        )

    def _worst(self) -> list[tuple[str, dict[str, Any]]]:
        """Settings by the least overlap that one of their values has with the run."""
        worst = {}
        for setting, records in self.found.items():
            others = [r for r in records if not r["default"] and r["overlap"].defined]
            if others:
                worst[setting] = min(others, key=lambda record: float(record["overlap"].value))
        return sorted(worst.items(), key=lambda item: float(item[1]["overlap"].value))

    def _order(self) -> str:
        ordered = self._worst()
        chance = keep_count(self.run.subject.ratio, len(self.run.total)) / len(self.run.total)
        said = [
            f"{setting} ({record['value']} keeps {percent(record['overlap'])} of the run's tokens)"
            for setting, record in ordered
        ]
        return (
            "The kept tokens depend on the settings in this order, each at the tried value that "
            f"changes most: {'; '.join(said)}. By chance it would be {100 * chance:.0f} %."
        )

    def _ratio(self) -> str:
        run = self.run

        def estimate(statistic: Any) -> Estimate:
            return bootstrap(statistic, run.total, groups=run.groups, seed=run.subject.seed)

        own = estimate(lambda values: captured(values, run.subject.ratio))
        return (
            f"{percent(estimate(positive_share))} of the tokens have a positive value: the kept "
            "total is largest at that ratio. The run's ratio of "
            f"{run.subject.ratio:g} captures {percent(own)} of all positive value, keeping every "
            f"token {percent(estimate(lambda values: captured(values, 1.0)))}."
        )

    def _weight(self) -> str:
        run, changed = self.run, self.options.changed
        gain, keep = run.values["adaptation"], run.values["stability"]
        found = bootstrap(
            lambda a, b: weight_for_change(a, b, run.subject.ratio, changed),
            gain,
            keep,
            groups=run.groups,
            draws=50,
            seed=run.subject.seed,
        )
        own = next(record for record in self.found["lambda"] if record["default"])
        reached = (
            f"lambda = {found.value:.3g} [{found.low:.3g}, {found.high:.3g}]"
            if found.defined
            else "no lambda that was tried"
        )
        return (
            f"The stability side reverses {100 * changed:g} % of the decisions at {reached}. The "
            f"run's {run.weight:g} makes ||lambda V|| / ||G|| {own['||lambda V|| / ||G||']:.2g} "
            f"and reverses {percent(own['flips from adaptation alone'])}."
        )

    def _rows(self) -> str:
        records = [r for r in self.found["validation rows"] if _DISJOINT in r]
        said = [f"{r['value']} rows {percent(r[_DISJOINT])}" for r in (records[0], records[-1])]
        sentence = (
            "Of the tokens that one validation set keeps, another without a common row keeps: "
            f"{'; '.join(said)}"
        )
        if "lambda" in self.found:
            largest = [r for r in self.alone if _DISJOINT in r][-1]
            sentence += (
                f"; with {largest['value']} rows, but without the stability side: "
                f"{percent(largest[_DISJOINT])}"
            )
        return sentence + "."

    def _cost(self) -> str:
        run, cost = self.run, self.run.cost
        shares = {
            str(record["value"]): record["cost"].values_share for record in self.found["estimator"]
        }
        named = ", ".join(
            f"{name} {share:.2f}" for name, share in sorted(shares.items(), key=lambda x: x[1])
        )
        return (
            f"Counted in FLOPs, scoring a batch in the forward of training adds "
            f"{cost.values_share:.2f} of its step, and building M from all {len(run.validation)} "
            f"validation rows {cost.direction_share:.2f}; the first by estimator: {named}. In "
            f"seconds, measured here, it is {cost.values.seconds / cost.step.seconds:.2f} and "
            f"{cost.direction.seconds / cost.step.seconds:.2f} (counts are exact; single timings "
            "have no interval)."
        )


def _without(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: cell for name, cell in record.items() if name not in names}
