"""Diagnostic ``estimators``: every estimator against exact values, at its price.

Two references. The *oracle* sends a sample of tokens one by one through the untouched model: exact
label values over the scored weights, and over all trainable parameters. The *label value over all
trainable parameters* of every sampled token is the first-order utility of a plain gradient step
(its own distance from the oracle is measured too). Values are of the validation side alone, P = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.certificate import metrics
from alphatoken.data import Example
from alphatoken.estimate.proofs import CoverageReport
from alphatoken.fidelity.advice import Advice, advise
from alphatoken.fidelity.cost import Cost, direction_cost, measure, step_cost, values_cost
from alphatoken.fidelity.diagnosis import Answer, Diagnosis, Table
from alphatoken.fidelity.figures import Figure, Guide, draw_all
from alphatoken.fidelity.intervals import Estimate, bootstrap, few_rows
from alphatoken.fidelity.noise import Planted, calibration, plant
from alphatoken.fidelity.options import CheckedOptions, option, thinned
from alphatoken.fidelity.readings import (
    WINDOWED,
    Numbers,
    Readings,
    Setting,
    full_gradient,
    read,
    supported,
    targets,
)
from alphatoken.fidelity.registry import find
from alphatoken.fidelity.subject import Subject
from alphatoken.fidelity.tokenwise import (
    draw_short,
    first_names,
    inner_products,
    token_gradients,
)
from alphatoken.fidelity.valuing import scorer_for
from alphatoken.model.batch import read_batch
from alphatoken.model.scope import resolve_layers
from alphatoken.select.masks import keep_count

__all__ = ["Options", "Prices", "agreement", "diagnose", "kept_share", "spread", "windows_of"]

_FEWEST = 24
_MOST_DEPTHS = 8


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Settings of the diagnostic ``estimators``; each field's help says what it is."""

    layers: tuple[int, ...] = option(
        (),
        "Numbers of scored layers K to compare; none: all, or a spread of 8 on deeper models.",
        least=1,
        first=3,
    )
    windows: tuple[int, ...] = option(
        (), "Windows W to compare; none: 0, 1, 2, 4, ... up to the longest row.", least=0, first=2
    )
    noise_share: float = option(
        0.3,
        "Share of the response tokens that is replaced by random ones to be found again.",
        above=0,
        below=1,
    )
    draws: int = option(200, "Bootstrap samples of each interval.", least=1, first=100)
    repeats: int = option(2, "Timed repeats of each computation.", least=1, first=1)
    cost_rows: int = option(
        8,
        "Most rows of the batch that is priced; costs are shares of a step on it.",
        least=1,
        first=1,
    )
    price: str = option(
        "flops",
        "What a setting is priced by: 'flops' (repeatable) or 'seconds' (this machine).",
        choices=("flops", "seconds"),
    )


# --- what is compared ----------------------------------------------------------------------------


def spread(longest: int, most: int, *extra: int) -> tuple[int, ...]:
    """1 to ``longest``: all of them, or at most ``most`` spread evenly on a log scale, and extra.

    >>> spread(5, 8), spread(32, 5, 3)
    ((1, 2, 3, 4, 5), (1, 2, 3, 6, 13, 32))
    """
    if longest <= most:
        chosen = set(range(1, longest + 1))
    else:
        chosen = {round(longest ** (i / (most - 1))) for i in range(most)}
    return tuple(sorted(chosen | {e for e in extra if 1 <= e <= longest}))


def windows_of(longest: int) -> tuple[int | None, ...]:
    """0, the powers of two below the longest row, and no limit.

    >>> windows_of(9)
    (0, 1, 2, 4, 8, None)
    """
    powers = [2**i for i in range(max(longest - 1, 1).bit_length()) if 2**i < longest]
    return (0, *powers, None)


@dataclass(frozen=True)
class _Plan:
    """Settings by the comparison they belong to; ``own`` is the user's."""

    own: Setting
    truth: Setting
    by_depth: list[Setting]
    by_window: list[Setting]

    @property
    def all(self) -> list[Setting]:
        """Each once."""
        return list(dict.fromkeys([*self.by_depth, *self.by_window, self.own, self.truth]))


def _plan(
    subject: Subject, options: Options, rows: Sequence[Example], estimators: Sequence[str]
) -> _Plan:
    config, depth = subject.config, len(subject.adapter.layers())
    every = tuple(range(depth))
    layers = resolve_layers(subject.adapter, config.layers)
    chosen = options.layers or thinned(spread(depth, _MOST_DEPTHS, len(layers)), 3, subject.share)
    last = [resolve_layers(subject.adapter, k) for k in chosen]
    scopes = list(dict.fromkeys([*last, layers]))
    longest = max(len(row.input_ids) for row in rows)
    windows: Sequence[int | None] = (*options.windows, None) if options.windows else ()
    windows = windows or thinned(windows_of(longest), 2, subject.share)
    windows = [*dict.fromkeys([*windows, config.window])]
    windows.sort(key=lambda w: math.inf if w is None else w)

    def setting(estimator: str, scope: tuple[int, ...], window: int | None) -> Setting:
        return Setting(estimator, scope, window if estimator in WINDOWED else None)

    return _Plan(
        own=setting(config.estimator, layers, config.window),
        truth=Setting("label", every, None, everything=True),
        by_depth=[setting(e, scope, config.window) for e in estimators for scope in scopes],
        by_window=[setting(e, layers, w) for e in WINDOWED if e in estimators for w in windows],
    )


# --- agreement -----------------------------------------------------------------------------------


def agreement(
    values: Numbers, truth: Numbers, rows: Sequence[int] | NDArray[Any], ratio: float, draws: int
) -> dict[str, Estimate]:
    """Every measure of agreement with ``truth``, with intervals over rows."""
    measures: dict[str, Callable[..., float]] = {
        "spearman": metrics.spearman,
        "kendall": metrics.kendall,
        "overlap": partial(metrics.top_overlap, ratio=ratio),
        "gain_share": partial(metrics.gain_share, ratio=ratio),
        "sign_agreement": metrics.sign_agreement,
        "share_of_total": metrics.share_of_total,
    }
    groups = np.asarray(rows, dtype=np.int64)
    return {
        name: bootstrap(measure, values, truth, groups=groups, draws=draws)
        for name, measure in measures.items()
    }


def _named(setting: Setting) -> dict[str, Any]:
    return setting.columns | {"weights": "all parameters" if setting.everything else "linears"}


def _agreements(
    subject: Subject, options: Options, readings: Readings, plan: _Plan
) -> dict[Setting, dict[str, Estimate]]:
    truth = readings.values[plan.truth]
    wanted = [setting for setting in plan.all if setting != plan.truth]
    tracker = subject.tracker("Agreement with intervals", len(wanted))
    found = {}
    for number, setting in enumerate(wanted):
        values = readings.values[setting]
        found[setting] = agreement(values, truth, readings.row, subject.ratio, options.draws)
        tracker.report(number + 1)
    return found


# --- the oracle ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Oracle:
    """Inner products of sampled tokens' exact gradients with M.

    Attributes:
        places: of the sampled tokens among all that were read.
        terms: (token, parameter), float64.
        names: of the parameters.
        longest: positions of the longest row that tokens were drawn from.
    """

    places: NDArray[np.int64]
    terms: Numbers
    names: list[str]
    longest: int

    def values(self, names: Sequence[str]) -> Numbers:
        """Label values over these parameters."""
        wanted = set(names)
        columns = [i for i, name in enumerate(self.names) if name in wanted]
        total: Numbers = self.terms[:, columns].sum(1)
        return total


def _oracle(
    subject: Subject,
    rows: Sequence[Example],
    readings: Readings,
    direction: Mapping[str, Tensor],
) -> _Oracle:
    places, longest = draw_short(
        [len(row.input_ids) for row in rows], readings.row, subject.oracle_tokens, subject.seed
    )
    tokens = [(int(readings.row[i]), int(readings.position[i])) for i in places]
    named = {n: p for n, p in subject.model.named_parameters() if n in direction}
    tracker = subject.tracker("Tokens one by one", len(tokens))
    gradients = token_gradients(subject.adapter, rows, tokens, named, subject.device)
    terms = inner_products(gradients, direction, tracker.report)
    return _Oracle(places, terms, list(direction), longest)


def _oracle_table(
    subject: Subject, options: Options, readings: Readings, plan: _Plan, oracle: _Oracle
) -> Table:
    everything = oracle.values(oracle.names)
    labels = [replace(s, estimator="label", window=None) for s in plan.by_depth]
    scopes = targets(subject, list(dict.fromkeys(labels)))
    records = []
    for setting in [*plan.by_depth, plan.truth]:
        same = everything
        if not setting.everything:
            target = scopes[replace(setting, estimator="label", window=None)]
            same = oracle.values(first_names(subject.model, target.parameters))
        values, rows = readings.values[setting][oracle.places], readings.row[oracle.places]
        for reference, truth in (("same weights", same), ("all parameters", everything)):
            found = agreement(values, truth, rows, subject.ratio, options.draws)
            records.append(_named(setting) | {"reference": reference} | found)
    return Table.of(
        "oracle",
        f"Against the per-token oracle, {len(oracle.places)} tokens",
        records,
        "Reference 'same weights': exact label values over the weights that the setting scores; "
        "'all parameters': over everything that is trained. " + _MEASURES,
    )


def _label_error(readings: Readings, plan: _Plan, oracle: _Oracle) -> float:
    """Largest distance of the label pass from the oracle, of the largest sum of |terms|."""
    found = readings.values[plan.truth][oracle.places]
    scale = float(np.abs(oracle.terms).sum(1).max())
    away = float(np.abs(found - oracle.values(oracle.names)).max())
    return away / scale if scale else away


_MEASURES = (
    "spearman, kendall: rank correlation. overlap: share of the kept tokens that the reference "
    "keeps too (chance: the ratio). gain_share: what keeping by these values gains over keeping at "
    "random, of the most that could be gained (1: as good as the reference, 0: chance). "
    "share_of_total: sum of the values over sum of the reference's. low and high: 95 % interval."
)


# --- cost ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prices:
    """What valuing one batch costs, beside training on it.

    Attributes:
        values: per setting, beyond the forward that training runs anyway.
        direction: building M from as many validation rows as the batch has, per setting.
        step: forward and backward of training.
        forward: a forward alone.
        rows: of the batch.
    """

    values: dict[Setting, Cost]
    direction: dict[Setting, Cost]
    step: Cost
    forward: Cost
    rows: int

    def relative(self, setting: Setting, unit: str = "flops") -> float:
        """Values and direction together, in training steps."""
        spent = getattr(self.values[setting], unit) + getattr(self.direction[setting], unit)
        return float(spent / getattr(self.step, unit))


def _prices(
    subject: Subject,
    options: Options,
    rows: Sequence[Example],
    settings: Sequence[Setting],
    proved: Mapping[str, CoverageReport],
) -> Prices:
    count = min(options.cost_rows, subject.batch_size, len(rows))
    batch, *_ = subject.batches(rows[:count])
    tracker = subject.tracker("Cost", len(settings))
    values, direction, known = {}, {}, {}
    for number, setting in enumerate(settings):
        config = setting.config(subject.config)
        scorer = scorer_for(subject, rows=subject.validation[:1], config=config)
        scorer.valuer.witness.take(proved[setting.estimator])
        values[setting] = values_cost(scorer, batch, repeats=options.repeats)
        place = (setting.layers, setting.everything)
        if place not in known:
            scorer = scorer_for(subject, rows=subject.validation[:count], config=config)
            known[place] = direction_cost(scorer, repeats=options.repeats)
        direction[setting] = known[place]
        tracker.report(number + 1)
    step = step_cost(subject.adapter, batch, repeats=options.repeats)
    return Prices(values, direction, step, _forward_cost(subject, batch, options.repeats), count)


def _forward_cost(subject: Subject, batch: Mapping[str, Tensor], repeats: int) -> Cost:
    """Of a forward alone."""
    checked = read_batch(batch, max_length=subject.adapter.max_positions())

    def forward() -> None:
        with torch.no_grad():
            subject.adapter.forward(checked.inputs)

    return measure(forward, repeats=repeats)


def _cost_table(prices: Prices, settings: Sequence[Setting]) -> Table:
    base = [
        {"estimator": name, "K": None, "W": None, "weights": "", "flops": cost.flops,
         "seconds": cost.seconds, "of_a_step": cost.flops / prices.step.flops,
         "seconds_of_a_step": cost.seconds / prices.step.seconds}
        for name, cost in (("(training step)", prices.step), ("(forward)", prices.forward))
    ]  # fmt: skip
    records = [
        _named(setting)
        | {
            "flops": prices.values[setting].flops,
            "seconds": prices.values[setting].seconds,
            "of_a_step": prices.values[setting].flops / prices.step.flops,
            "of_a_forward": prices.values[setting].flops / prices.forward.flops,
            "seconds_of_a_step": prices.values[setting].seconds / prices.step.seconds,
            "direction_of_a_step": prices.direction[setting].flops / prices.step.flops,
            "total_of_a_step": prices.relative(setting),
            "total_seconds_of_a_step": prices.relative(setting, "seconds"),
        }
        for setting in settings
    ]
    return Table.of(
        "cost",
        f"Cost of valuing a batch of {prices.rows} rows",
        [*base, *records],
        "Beyond the forward that training runs anyway. direction: building M from as many "
        "validation rows, once an optimizer step (less often with direction_steps). FLOPs are of "
        "matrix products and attention alone; seconds are medians on this machine, as busy as it "
        "was.",
    )


# --- what to use ---------------------------------------------------------------------------------


def _advice_table(advice: Sequence[Advice], prices: Prices) -> Table:
    return Table.of(
        "budget",
        "Which estimator for which budget",
        [
            {
                "cost_in_training_steps": found.cost,
                "the_same_in_seconds": prices.relative(found.setting, "seconds"),
            }
            | _named(found.setting)
            | {"spearman": found.spearman, "gain_over_the_one_above": found.gain}
            for found in advice
        ],
        "Each row is the best choice from its cost on. A dearer setting is listed only where it "
        "ranks clearly better (95 %). the_same_in_seconds: what the clock said, in training steps "
        "as well; forward mode has few fast kernels, so label costs more by the clock.",
    )


# --- planted noise -------------------------------------------------------------------------------


def _noise_settings(plan: _Plan) -> list[Setting]:
    own = [s for s in plan.by_depth if s.layers == plan.own.layers]
    return list(dict.fromkeys([*own, plan.own, plan.truth]))


def _noise_table(
    subject: Subject, options: Options, rows: Sequence[Example], plan: _Plan,
    direction: Mapping[str, Tensor],
) -> Table:  # fmt: skip
    everything = [*subject.train, *subject.validation]
    alphabet = sorted({token for row in everything for token in row.input_ids})
    planted = plant(rows, options.noise_share, alphabet, subject.seed)
    settings = _noise_settings(plan)
    readings = read(subject, planted.rows, direction, settings, "Values, planted noise")
    records = [
        {"score": "loss, high", "weights": ""}
        | _found(subject, options, readings, planted, -readings.loss)
    ]
    for setting in settings:
        found = _found(subject, options, readings, planted, readings.values[setting])
        named = _named(setting)
        records.append({"score": f"{setting}, low", "weights": named["weights"]} | found)
    return Table.of(
        "noise",
        f"Finding planted noise ({planted.marked.mean():.0%} of {len(planted.marked)} tokens)",
        records,
        "auc: chance that a planted token is more suspect than a real one; 0.5 knows nothing, "
        "below 0.5 is the wrong way round. noise_kept: share of noise among the tokens kept at the "
        f"ratio {subject.ratio:g} by this score (by loss: the low ones are kept).",
    )


def _found(
    subject: Subject, options: Options, readings: Readings, planted: Planted, good: Numbers
) -> dict[str, Estimate]:
    """How well ``good`` tells real tokens (high) from planted ones (low)."""
    marked, groups = planted.marked.astype(np.float64), readings.row

    def kept(score: Numbers, mark: Numbers) -> float:
        return kept_share(score, mark, subject.ratio)

    return {
        "auc": bootstrap(metrics.auc, -good, marked, groups=groups, draws=options.draws),
        "noise_kept": bootstrap(kept, good, marked, groups=groups, draws=options.draws),
    }


def kept_share(score: Numbers, marked: Numbers, ratio: float) -> float:
    """Share of marked tokens among the top ``ratio`` by score."""
    keep = keep_count(ratio, len(score))
    return float(marked[np.argsort(-score, kind="stable")[:keep]].mean())


# --- the diagnosis -------------------------------------------------------------------------------


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Compare all estimators on the subject's rows; see the head of this file."""
    options = options or Options()
    rows = subject.sample()
    subject.require_tokens(rows, _FEWEST, "rank correlations of fewer tokens are noise")
    every = tuple(range(len(subject.adapter.layers())))
    proved, refused = supported(subject, every, rows)
    usable = list(proved)
    plan = _plan(subject, options, rows, usable)
    direction = full_gradient(subject)
    settings = [s for s in plan.all if s.estimator in usable]
    plan = replace(plan, own=plan.own if plan.own in settings else plan.truth)
    readings = read(subject, rows, direction, settings)
    found = _agreements(subject, options, readings, plan)
    oracle = _oracle(subject, rows, readings, direction)
    prices = _prices(subject, options, rows, settings, proved)
    costs = {s: prices.relative(s, options.price) for s in settings}
    truth = readings.values[plan.truth]
    advice = advise(readings.values, truth, costs, readings.row, options.draws)
    noise = _noise_table(subject, options, rows, plan, direction)
    layers = _agreement_table("layers", "By number of scored layers", plan.by_depth, found, costs)
    windows = _agreement_table("windows", "By window", plan.by_window, found, costs)
    tables = (
        _advice_table(advice, prices),
        layers,
        windows,
        _oracle_table(subject, options, readings, plan, oracle),
        _cost_table(prices, settings),
        noise,
        _numbers(subject, _label_error(readings, plan, oracle)),
    )
    priced = _priced_table(found, costs, plan.own, {one.setting for one in advice})
    return Diagnosis(
        "estimators",
        find("estimators").question,
        _answer(plan, found, costs, advice),
        tuple(table for table in tables if table.rows),
        draw_all(_figures(priced, layers, windows, noise, options.price)),
        _notes(subject, rows, refused, plan, oracle),
        subject.settings() | {"noise_share": options.noise_share, "draws": options.draws},
    )


def _priced_table(
    found: Mapping[Setting, dict[str, Estimate]],
    costs: Mapping[Setting, float],
    own: Setting,
    advised: set[Setting],
) -> Table:
    records = [
        setting.columns
        | {
            "cost_in_training_steps": costs[setting],
            "spearman": measures["spearman"],
            "advised": setting in advised,
            "yours": setting == own,
        }
        for setting, measures in found.items()
    ]
    return Table.of("pareto", "Cost against fidelity", records)


def _figures(
    priced: Table, layers: Table, windows: Table, noise: Table, price: str
) -> list[Figure]:
    ranked: dict[str, Any] = {
        "y": "spearman",
        "series": "estimator",
        "ylabel": "Spearman with the exact value",
        "guides": (Guide(0.0, "y"),),
    }
    return [
        Figure(
            "scatter",
            "pareto",
            priced,
            "Cost against fidelity",
            "Up and to the left is better. Stars are the settings that are worth their price; the "
            "ring is your setting: what lies above it and not to its right is better at no higher "
            "cost. The exact value over all parameters is 1 by definition.",
            x="cost_in_training_steps",
            marked={"advised": "worth its price", "yours": "your setting"},
            xlabel=f"cost of values and direction, in training steps ({price})",
            **ranked,
        ),
        Figure(
            "lines",
            "depth",
            layers,
            "Rank agreement by number of scored layers",
            "Look for lines that stop rising: more layers cost more and rank no better. Where "
            "'label' is far above the others, the exact value is not what the estimators measure. "
            "Bars are 95 % intervals.",
            x="K",
            xlabel="K, the last K layers are scored",
            **ranked,
        ),
        Figure(
            "lines",
            "window",
            windows,
            "Rank agreement by window, your layers",
            "In positions (T: no limit); W = 0 has no causal part. Look whether the line rises "
            "with W: if it stays level or falls, Value-Propagation does not pay on this model.",
            x="W",
            **ranked,
        ),
        Figure(
            "bars",
            "noise-auc",
            noise,
            "Finding planted random tokens",
            "To the right of the dashed line a score finds noise, to the left it prefers noise to "
            "real text. Bars are 95 % intervals.",
            x="auc",
            y="score",
            guides=(Guide(0.5),),
            xlabel="AUC (0.5: knows nothing, 1: finds all)",
            limits=((0.0, 1.0), None),
        ),
    ]


def _numbers(subject: Subject, error: float) -> Table:
    seen = calibration(subject, subject.validation)
    return Table.of_numbers(
        {
            "label pass, largest distance from the oracle over the absolute terms": error,
            "mean loss of the validation tokens": seen.loss,
            "the same as the model expects it (entropy)": seen.entropy,
        }
    )


def _agreement_table(
    key: str,
    title: str,
    settings: Sequence[Setting],
    found: Mapping[Setting, dict[str, Estimate]],
    costs: Mapping[Setting, float],
) -> Table:
    records = [_named(s) | {"cost_in_training_steps": costs[s]} | found[s] for s in settings]
    note = "Against the label value over all trainable parameters. " + _MEASURES
    return Table.of(key, title, records, note)


_ENOUGH = 0.9
"""Rank correlation of a setting that is advised, where one reaches it."""


def _answer(
    plan: _Plan,
    found: Mapping[Setting, dict[str, Estimate]],
    costs: Mapping[Setting, float],
    advice: Sequence[Advice],
) -> Answer:
    own = plan.own
    text, score = "No setting could be ranked: all values are equal.", ""
    if advice and own in found:
        score = str(found[own]["spearman"])
        best = next((one for one in advice if one.spearman.value >= _ENOUGH), advice[-1])
        text = (
            f"Use {best.setting}: it ranks at {best.spearman} and costs {best.cost:.1f} training "
            f"steps. Yours, {own}, ranks at {score} and costs {costs[own]:.1f}."
        )
    return Answer(
        text,
        score,
        f"rank correlation of your setting, {own}, with the exact first-order value",
        "take the cheapest setting whose rank correlation is enough for you; estimator='label' "
        "over all parameters is exact.",
    )


def _notes(
    subject: Subject,
    rows: Sequence[Example],
    refused: Mapping[str, str],
    plan: _Plan,
    oracle: _Oracle,
) -> tuple[str, ...]:
    checked = len(oracle.places)
    depths = sorted({len(s.layers) for s in plan.by_depth})
    notes = [
        f"{subject.counted(rows)} were valued, {checked} of them by the per-token oracle; K = "
        f"{', '.join(map(str, depths))} of {len(subject.adapter.layers())} layers.",
        f"The oracle's tokens were drawn at random from rows of at most {oracle.longest} "
        "positions, the shorter half, because each costs a backward through its row: what the "
        "oracle's table says holds for rows of that length. It also checks the exact value that "
        "all rows are compared with.",
        "Values are of the validation side alone (no retention term) with P = 1, in "
        f"{subject.settings()['dtype']}.",
    ]
    notes += [f"{note} A larger --tokens draws more rows." for note in few_rows(len(rows))]
    if plan.own == plan.truth:
        notes.append("Your estimator is not defined on this model: label values stand in for it.")
    if subject.config.preconditioner is not None:
        notes.append("Your preconditioner was left out here; the diagnostic 'utility' has it.")
    notes += [f"{name} is left out on this model: {why}" for name, why in refused.items()]
    return tuple(notes)
