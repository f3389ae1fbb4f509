"""Diagnostic ``estimators``: every estimator against exact values, at its price in FLOPs.

The reference is the *label value over all trainable parameters* of every sampled token, which is
the first-order utility of a plain gradient step. Its own distance from the *oracle*, which sends
some of the tokens one by one through the untouched model, is measured too. Values are of the
validation side alone, P = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from alphatoken.config import WALK
from alphatoken.data import Example
from alphatoken.diagnose import CheckedOptions
from alphatoken.diagnose.diagnosis import GOOD, Diagnosis, Table, graded
from alphatoken.diagnose.figures import Figure, Guide
from alphatoken.diagnose.statistics import Numbers, agreement
from alphatoken.diagnose.stepping import draw_short, token_gradients
from alphatoken.diagnose.subject import Subject, conclude, places_of
from alphatoken.diagnose.valuing import (
    WINDOWED,
    Setting,
    depths_of,
    full_gradient,
    read,
    scorer_for,
    supported,
)
from alphatoken.direction.gradients import gradient_of
from alphatoken.direction.objective import scoring_forward
from alphatoken.estimate.proofs import CoverageReport
from alphatoken.model.batch import read_batch, token_losses
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.scope import resolve_layers
from alphatoken.scorer import Scorer
from alphatoken.support.options import option
from alphatoken.support.precision import blocks

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
    subject: Subject, options: Options, estimators: Sequence[str], exact: Setting
) -> tuple[Setting, list[Setting]]:
    """The user's own setting, and those to compare by depth."""
    config = subject.config
    layers = resolve_layers(subject.adapter, config.layers)
    chosen = depths_of(options.layers, len(exact.layers), len(layers))
    scopes = list(dict.fromkeys([*(resolve_layers(subject.adapter, k) for k in chosen), layers]))

    def setting(estimator: str, scope: tuple[int, ...]) -> Setting:
        return Setting(estimator, scope, config.window if estimator in WINDOWED else None)

    by_depth = [setting(e, scope) for e in estimators for scope in scopes]
    if config.estimator == "label" and config.parameters == "all":
        return exact, by_depth
    return setting(config.estimator, layers), by_depth


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
    products: list[list[float]] = []
    for gradient in gradients:
        # One gradient beside M at a time, and no float64 copy of either beyond a block of numbers.
        products.append(
            [
                sum(float(x.double() @ y.double()) for x, y in blocks(gradient[name], m))
                for name, m in direction.items()
            ]
        )
        del gradient  # before the next one is computed
        tracker.report(len(products))
    terms = np.array(products)
    scale = float(np.abs(terms).sum(1).max())
    distance = float(np.abs(exact[places] - terms.sum(1)).max()) / (scale or 1.0)
    return (
        f"The exact value was checked on {len(places)} tokens by the per-token oracle, drawn at "
        f"random from rows of at most {longest} positions (each costs a backward through its row): "
        f"largest distance {distance:.1e} of the largest sum of absolute terms."
    )


# --- cost ----------------------------------------------------------------------------------------


_AT = torch.ops.aten
# torch counts the attention kernels of accelerators, and products that are added to a new tensor;
# those of the CPU, and those that are added in place, are the same products.
_COUNTED_TOO: dict[Any, Any] = {
    _AT.addmm_: lambda total, a, b, *_, **__: 2 * a[0] * a[1] * b[1],
    _AT._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: int(
        sdpa_flop_count(query, key, value)
    ),
    _AT._scaled_dot_product_flash_attention_for_cpu_backward: lambda error, q, k, v, *_, **__: int(
        sdpa_backward_flop_count(error, q, k, v)
    ),
}


def flops(work: Callable[[], object]) -> float:
    """FLOPs of matrix products and attention kernels of one call, as torch counts them."""
    with FlopCounterMode(display=False, custom_mapping=_COUNTED_TOO) as counter:
        work()
    return float(counter.get_total_flops())


def values_flops(scorer: Scorer, batch: Mapping[str, Tensor]) -> float:
    """FLOPs of the values of an observed forward, without the forward, M and the proofs."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    with torch.enable_grad(), scorer.observe() as observed:
        logits = scorer.adapter.forward(inputs)
        observed.values(logits, batch["labels"])
        return flops(lambda: observed.values(logits, batch["labels"]))


def direction_flops(scorer: Scorer) -> float:
    """FLOPs of building M anew, both sides, in projected form."""

    def build() -> None:
        scorer.refresh()
        _ = scorer.direction

    return flops(build)


def step_flops(adapter: DecoderAdapter, batch: Mapping[str, Tensor]) -> float:
    """FLOPs of forward and backward as a trainer runs them; no ``.grad`` is touched."""
    checked = read_batch(batch, max_length=adapter.max_positions())
    trained = [p for p in adapter.model.parameters() if p.requires_grad]

    def step() -> None:
        with scoring_forward(adapter, None):
            losses = token_losses(adapter.forward(checked.inputs), checked.labels)
            gradient_of(losses.sum(), trained)

    return flops(step)


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
        # M costs the same with each estimator of these layers: it is priced once, and afterwards
        # one row makes a direction for the values.
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
    exact = Setting("label", every, everything=True)
    proved, refused = supported(subject, every, rows)
    own, by_depth = _settings(subject, options, list(proved), exact)
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
        mark=_mark(own, exact, agreements),
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


def _mark(own: Setting, exact: Setting, agreements: Mapping[Setting, Mapping[str, Any]]) -> str:
    if own == exact:
        return GOOD
    return graded(agreements[own]["spearman"]) if own in agreements else ""


_COSTS = (
    "Agreement is with the exact value (`label` over all trainable parameters). of_a_step: FLOPs "
    "of the values, beyond the forward that training runs anyway, over those of a training step; "
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
            "Up and to the left is better. The exact value is 1 by definition.",
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
