"""Diagnostic ``estimators``: every estimator against exact values, at its price.

The reference is the *label value over all trainable parameters* of every sampled token, which is
the first-order utility of a plain gradient step. Its own distance from the *oracle*, which sends
some of the tokens one by one through the untouched model, is measured too. Values are of the
validation side alone, P = 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from alphatoken.data import Example
from alphatoken.diagnose.cost import direction_flops, step_flops, values_flops
from alphatoken.diagnose.diagnosis import Diagnosis, Table
from alphatoken.diagnose.figures import Figure, Guide
from alphatoken.diagnose.options import CheckedOptions
from alphatoken.diagnose.statistics import agreement
from alphatoken.diagnose.stepping import draw_short, inner_products, token_gradients
from alphatoken.diagnose.subject import Subject, conclude, places_of
from alphatoken.diagnose.valuing import (
    WINDOWED,
    Numbers,
    Setting,
    depths_of,
    full_gradient,
    read,
    scorer_for,
    supported,
)
from alphatoken.estimate.names import WALK
from alphatoken.estimate.proofs import CoverageReport
from alphatoken.model.scope import resolve_layers
from alphatoken.support.options import option

__all__ = ["Options", "diagnose"]

_FEWEST = 24
_PRICED = 8  # most rows of the batch that is priced


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Settings of the diagnostic ``estimators``; each field's help says what it is."""

    layers: tuple[int, ...] = option(
        (),
        "Numbers of scored layers K to compare; none: all, or a spread of 8 on deeper models.",
        at_least=1,
    )


# --- what is compared ----------------------------------------------------------------------------


def _settings(
    subject: Subject, options: Options, estimators: Sequence[str]
) -> tuple[Setting, list[Setting]]:
    """The user's own setting, and those to compare by depth."""
    config, depth = subject.config, len(subject.adapter.layers())
    every, layers = tuple(range(depth)), resolve_layers(subject.adapter, config.layers)
    chosen = depths_of(options.layers, depth, len(layers))
    scopes = list(dict.fromkeys([*(resolve_layers(subject.adapter, k) for k in chosen), layers]))

    def setting(estimator: str, scope: tuple[int, ...]) -> Setting:
        return Setting(estimator, scope, config.window if estimator in WINDOWED else None)

    by_depth = [setting(e, scope) for e in estimators for scope in scopes]
    if config.estimator == "label" and config.parameters == "all":
        return _exact(every), by_depth
    return setting(config.estimator, layers), by_depth


def _exact(layers: tuple[int, ...]) -> Setting:
    """Label values over all trainable parameters of a model with these layers."""
    return Setting("label", layers, None, everything=True)


# --- against the exact value ----------------------------------------------------------------------


def _oracle(
    subject: Subject, rows: Sequence[Example], exact: Numbers, direction: Mapping[str, Tensor]
) -> str:
    """Distance of the exact values from the oracle's, and the tokens of that comparison."""
    where = places_of(rows)
    lengths = [len(row.input_ids) for row in rows]
    places, longest = draw_short(lengths, where[:, 0], subject.oracle_tokens, subject.seed)
    named = {n: p for n, p in subject.model.named_parameters() if n in direction}
    tracker = subject.tracker("Tokens one by one", len(places))
    tokens = [(int(row), int(position)) for row, position in where[places]]
    gradients = token_gradients(subject.adapter, rows, tokens, named, subject.device)
    terms = inner_products(gradients, direction, tracker.report)
    scale = float(np.abs(terms).sum(1).max())
    away = float(np.abs(exact[places] - terms.sum(1)).max())
    return (
        f"The exact value was checked on {len(places)} tokens by the per-token oracle, drawn at "
        f"random from rows of at most {longest} positions (each costs a backward through its row): "
        f"largest distance {away / (scale or 1.0):.1e} of the largest sum of absolute terms."
    )


# --- cost ----------------------------------------------------------------------------------------


def _costs(
    subject: Subject,
    rows: Sequence[Example],
    settings: Sequence[Setting],
    proved: Mapping[str, CoverageReport],
) -> dict[Setting, dict[str, float]]:
    """FLOPs of valuing one batch with each setting, over those of a training step.

    ``of_a_step`` are the values, beyond the forward that training runs anyway, and
    ``direction_of_a_step`` is building M from as many validation rows;
    ``cost_in_training_steps`` is both together.
    """
    count = min(_PRICED, subject.batch_size, len(rows))
    batch, *_ = subject.batches(rows[:count])
    tracker = subject.tracker("Cost", len(settings))
    step = step_flops(subject.adapter, batch)
    costs: dict[Setting, dict[str, float]] = {}
    direction_costs: dict[Any, float] = {}
    for number, setting in enumerate(settings):
        config, place = setting.config(subject.config), (setting.layers, setting.everything)
        validation = subject.validation[: 1 if place in direction_costs else count]
        scorer = scorer_for(subject, rows=validation, config=config)
        scorer.estimator.proofs.take(proved[setting.estimator])
        if place not in direction_costs:
            direction_costs[place] = direction_flops(scorer) / step
        values = values_flops(scorer, batch) / step
        costs[setting] = {
            "of_a_step": values,
            "direction_of_a_step": direction_costs[place],
            "cost_in_training_steps": values + direction_costs[place],
        }
        tracker.report(number + 1)
    return costs


# --- the diagnosis -------------------------------------------------------------------------------


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Compare all estimators on the subject's rows; see the head of this file."""
    options = options or Options()
    rows = subject.sample()
    subject.require_tokens(rows, _FEWEST, "rank correlations of fewer tokens are noise")
    every = tuple(range(len(subject.adapter.layers())))
    proved, refused = supported(subject, every, rows)
    own, by_depth = _settings(subject, options, list(proved))
    exact = _exact(every)
    direction = full_gradient(subject)
    settings = [s for s in dict.fromkeys([*by_depth, own, exact]) if s.estimator in proved]
    readings = read(subject, rows, direction, settings)
    truth, row = readings[exact], places_of(rows)[:, 0]
    agreements = {
        setting: agreement(values, truth, subject.ratio, row)
        for setting, values in readings.items()
        if setting != exact
    }
    checked = _oracle(subject, rows, truth, direction)
    costs = _costs(subject, rows, settings, proved)

    def table(key: str, title: str, settings: Sequence[Setting]) -> Table:
        records = [
            {**setting.columns, **agreements[setting], **costs[setting], "yours": setting == own}
            for setting in settings
        ]
        return Table.of(key, title, records, _COSTS)

    layers = table("layers", "By number of scored layers", by_depth)
    return conclude(
        "estimators",
        subject,
        _conclusion(own, exact, agreements, costs),
        [layers],
        _figures(table("pareto", "Cost against fidelity", list(agreements)), layers),
        valued=rows,
        notes=[checked, *_notes(subject, refused, own in settings)],
    )


def _conclusion(
    own: Setting,
    exact: Setting,
    agreements: Mapping[Setting, Mapping[str, Any]],
    costs: Mapping[Setting, Mapping[str, float]],
) -> str:
    price = f"costs {costs[exact]['cost_in_training_steps']:.1f} training steps"
    if own == exact:
        return f"Your setting is the exact first-order value, and {price}."
    if own not in agreements:
        return f"Your estimator, {own.estimator}, is not compared here; the exact value {price}."
    return (
        f"Your setting, {own}, ranks tokens at {agreements[own]['spearman']} to their exact "
        f"first-order values, and costs {costs[own]['cost_in_training_steps']:.1f} training steps; "
        f"the exact value costs {costs[exact]['cost_in_training_steps']:.1f}."
    )


_COSTS = (
    "Agreement is with the label value over all trainable parameters. of_a_step: FLOPs of the "
    "values, beyond the forward that training runs anyway, over those of a training step; "
    "direction: of building M from as many validation rows; cost: both."
)


def _figures(priced: Table, layers: Table) -> list[Figure]:
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
            "Up and to the left is better. The exact value over all parameters is 1 by definition.",
            x="cost_in_training_steps",
            xlabel="cost of values and direction, in training steps (FLOPs)",
            **ranked,
        ),
        Figure(
            "lines",
            "depth",
            layers,
            "Rank agreement by number of scored layers",
            "Look for lines that stop rising: more layers cost more and rank no better.",
            x="K",
            xlabel="K, the last K layers are scored",
            **ranked,
        ),
    ]


def _notes(subject: Subject, refused: Mapping[str, str], compared: bool) -> list[str]:
    notes = ["Values are of the validation side alone (no retention term) with P = 1."]
    if subject.config.estimator == WALK:
        notes.append("Values along a walk are no first-order values: none are compared here.")
    elif not compared:
        notes.append("Your estimator is not defined on this model.")
    if subject.config.parameters not in ("linears", "all"):
        notes.append(
            f"Settings by layer are over linears: your parameters {subject.config.parameters!r} "
            "were left out here."
        )
    if subject.config.preconditioner is not None:
        notes.append("Your preconditioner was left out here; the diagnostic 'utility' has it.")
    return notes + [f"{name} is left out on this model: {why}" for name, why in refused.items()]
