"""How far did fine-tuning move the model's states on what it must not forget?

Retention probes are run through the model before and after, and through any other model that was
fine-tuned from the same one; the mean state of each probe is compared with itself, by a picture in
which all models are laid out together, by distances, and by linear CKA, which does not see
rotations. What the movement cost is read off the probes' loss.

The retention term itself, ``V = F o (W - W_ref)``, is in ``alphatoken.direction.drift``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from alphatoken.data import Example
from alphatoken.errors import ConfigError, DataError
from alphatoken.fidelity.clouds import picture_of
from alphatoken.fidelity.diagnosis import Answer, Diagnosis, Table
from alphatoken.fidelity.figures import Figure
from alphatoken.fidelity.intervals import FEWEST, bootstrap
from alphatoken.fidelity.options import CheckedOptions, option
from alphatoken.fidelity.result import conclude
from alphatoken.fidelity.similarity import cka_estimate, cosine, relative_shift
from alphatoken.fidelity.states import POOLS, PooledStates, pooled_states
from alphatoken.fidelity.subject import Subject

__all__ = [
    "BEFORE",
    "Options",
    "Pair",
    "diagnose",
    "laid_out",
    "layer_records",
    "loss_record",
    "set_record",
]

Numbers = NDArray[np.float64]
BEFORE = "before"
"""What the model before fine-tuning is called in tables and figures."""


@dataclass(frozen=True)
class Options(CheckedOptions):
    """What the diagnostic ``drift`` can be told."""

    probes: int = option(64, "retention rows of each set", least=1, first=16)
    pool: str = option(
        "all", "tokens of a probe that are averaged: all, prompt or response", choices=POOLS
    )
    perplexity: float = option(
        30.0, "of t-SNE; at most a third of the points", least=1, below=math.inf
    )
    label: str = option("after", "what the model is called beside others (--beside)")

    def __post_init__(self) -> None:
        """Check every option."""
        super().__post_init__()
        if not self.label or self.label == BEFORE:
            raise ConfigError("label must tell the model from the one before", got=self.label)


@dataclass(frozen=True)
class Pair:
    """The same probes before and after."""

    before: PooledStates
    after: PooledStates

    def at(self, place: int) -> tuple[Numbers, Numbers]:
        """States (n, d) at one place; -1 is what the head reads."""
        return self.before.states[place], self.after.states[place]


# --- measures ------------------------------------------------------------------------------------


def shared_share(before: Numbers, after: Numbers) -> float:
    """Share of the squared movement that is one shift of all probes: 1 if they moved as one."""
    moved = after - before
    whole = float((moved**2).sum(1).mean())
    return float((moved.mean(0) ** 2).sum()) / whole if whole > 0 else math.nan


def set_record(before: Numbers, after: Numbers) -> dict[str, Any]:
    """Every measure of one cloud of probes: (n, d) before and after."""
    shift, angle = relative_shift(before, after), cosine(before, after)

    def shared(places: Numbers) -> float:
        drawn = places.astype(np.int64)  # a probe with both of its states
        return shared_share(before[drawn], after[drawn])

    return {
        "probes": len(before),
        "relative_shift": bootstrap(np.mean, shift, what="probes"),
        "shared": bootstrap(shared, np.arange(len(before)), what="probes"),
        "cosine": bootstrap(np.mean, angle, what="probes"),
        "cka_debiased": cka_estimate(before, after),
    }


def layer_records(pair: Pair) -> list[dict[str, Any]]:
    """CKA and relative shift at the output of every block, and at what the head reads."""
    return [
        {
            "place": where,
            "cka_debiased": cka_estimate(*pair.at(place)),
            "relative_shift": bootstrap(np.mean, relative_shift(*pair.at(place)), what="probes"),
        }
        for place, where in enumerate(pair.before.places)
    ]


def _per_token(losses: Numbers, tokens: Numbers) -> float:
    return float(losses.sum() / tokens.sum())


def loss_record(pair: Pair) -> dict[str, Any]:
    """Mean response-token loss of the probes before, after, and the change, nats a token."""
    before, after, tokens = pair.before.losses, pair.after.losses, pair.before.tokens
    return {
        "loss_before": bootstrap(_per_token, before, tokens, what="probes"),
        "loss_after": bootstrap(_per_token, after, tokens, what="probes"),
        "loss_change": bootstrap(_per_token, after - before, tokens, what="probes"),
    }


# --- the diagnostic ------------------------------------------------------------------------------


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Distances between models' states on retention probes before and after fine-tuning.

    Raises:
        DataError: no retention rows, or a set without the tokens that are averaged.
        ConfigError: scikit-learn or matplotlib is missing; two models of one name.
    """
    options = options or Options()
    probes = subject.retention_rows(options.probes)
    start, models, origin = _models(subject, options)
    tuned = subject.reference is None and not subject.beside
    before = _pooled(subject, start, BEFORE, probes, options.pool)
    clouds = {name: {BEFORE: states.states[-1]} for name, states in before.items()}
    sets, losses, layers = [], [], []
    for model, load in models.items():
        after = _pooled(subject, load(), model, probes, options.pool)
        for name in probes:
            pair = Pair(before[name], after[name])
            check_finite(name, pair, options.pool)
            named = {"model": model, "set": name}
            sets.append(named | set_record(*pair.at(-1)))
            losses.append(named | loss_record(pair))
            layers += [named | record for record in layer_records(pair)]
            clouds[name][model] = pair.at(-1)[1]  # of its states only these are kept
    places = {
        name: laid_out(cloud, seed=subject.seed, perplexity=options.perplexity)
        for name, cloud in clouds.items()
    }
    moved = Table.of("drift-sets", "Movement of the states that the head reads", sets)
    by_layer = Table.of("drift-layers", "Movement layer by layer", layers)
    lost = Table.of("drift-losses", "Loss on the probes", losses, "Nats a response token.")
    return conclude(
        "drift",
        subject,
        _answer(moved),
        [moved, lost, by_layer, _differences(clouds)],
        _figures(_map_table(places), by_layer),
        notes=_notes(subject, before, options, origin),
        settings={
            "models": ", ".join(models),
            "probes of each set": options.probes,
            "pooled tokens": options.pool,
            "tuning_steps": subject.tuning_steps if tuned else None,
            "tuning_rate": subject.rate if tuned else None,
        },
    )


def _models(
    subject: Subject, options: Options
) -> tuple[nn.Module, dict[str, Callable[[], nn.Module]], str]:
    """The model before, how to get each one after, by name, and where they come from.

    Others are loaded one at a time. A single model with others beside it is the one before; one
    that stands alone has a copy fine-tuned.
    """
    if taken := {options.label, BEFORE} & set(subject.beside):
        raise ConfigError(
            "two models have one name",
            got=", ".join(sorted(taken)),
            remedy="--beside NAME=MODEL with other names, or --label NAME",
        )
    if subject.beside and subject.reference is None:
        return subject.model, dict(subject.beside), "Before: the model given."
    before, after, origin = subject.before_and_after()
    return before, {options.label: lambda: after} | dict(subject.beside), origin


def _pooled(
    subject: Subject,
    model: nn.Module,
    name: str,
    probes: Mapping[str, Sequence[Example]],
    pool: str,
) -> dict[str, PooledStates]:
    """States of one model on every set."""
    return {
        one: pooled_states(
            model,
            subject.batches(rows),
            subject.tracker(f"States {name}, {one}", len(rows)),
            pool=pool,
        )
        for one, rows in probes.items()
    }


def check_finite(name: str, pair: Pair, pool: str) -> None:
    """Refuse probes without the tokens that are averaged, and states that are not finite."""
    if not all(np.isfinite(state).all() for state in (*pair.at(-1), *pair.at(0))):
        raise DataError(
            "a probe has no state to average, or one that is not finite",
            got=f"retention set '{name}', pool '{pool}'",
            remedy="another --pool, or look at the rows and the weights",
        )


def laid_out(
    clouds: Mapping[str, Numbers], *, seed: int, perplexity: float = 30.0
) -> dict[str, Numbers]:
    """Places (n, 2) of each model's probes in one t-SNE, fitted on the union of all models.

    A projection of each model's own would place equal clouds differently: no two could be compared.
    """
    places = picture_of(np.concatenate([*clouds.values()]), seed=seed, perplexity=perplexity)
    ends = np.cumsum([len(cloud) for cloud in clouds.values()])[:-1]
    return dict(zip(clouds, np.split(places, ends), strict=True))


def _map_table(places: Mapping[str, Mapping[str, Numbers]]) -> Table:
    """Places in the picture: set -> model -> (n, 2), the model before first."""
    records = [
        {"set": name, "model": model, "probe": probe, "x": float(x), "y": float(y)}
        for name, clouds in places.items()
        for model, cloud in clouds.items()
        for probe, (x, y) in enumerate(cloud)
    ]
    return Table.of("drift-map", "Places of the probes in the picture", records)


def _figures(points: Table, layers: Table) -> list[Figure]:
    return [
        Figure(
            "cloud",
            "drift-map",
            points,
            "Probes before and after",
            "One t-SNE of the mean states of a set's probes under all models together, with "
            "ellipses that hold 95 % of a normal cloud and densities along each axis. Look for "
            "clouds that have left that of the model before. Lengths here are no distances; the "
            "mean shift, measured in the states themselves, is in the table.",
            x="x",
            y="y",
            facets="set",
            series="model",
            across=2,
        ),
        Figure(
            "lines",
            "drift-layers-cka",
            layers,
            "Where in the model the geometry changed",
            "1 where the probes keep their geometry, up to turns and scale. Look for the layer "
            "where the lines leave 1.",
            x="place",
            y="cka_debiased",
            series=("set", "model"),
            ylabel="debiased linear CKA",
        ),
        Figure(
            "lines",
            "drift-layers-shift",
            layers,
            "Where in the model it moved",
            "How far a probe moved, turns included. Sets that move far with a CKA near 1 shifted "
            "together, which the layers above may undo.",
            x="place",
            y="relative_shift",
            series=("set", "model"),
            ylabel="mean relative shift",
            limits=(None, (0.0, None)),
        ),
    ]


# --- words ---------------------------------------------------------------------------------------


def _answer(sets: Table) -> Answer:
    """The set and model that moved most."""
    advice = (
        "where states of what must be kept have moved, raise stability_weight or lower the "
        "learning rate."
    )
    moved = [(sets.estimate(i, "relative_shift"), one) for i, one in enumerate(sets.records())]
    moved = [one for one in moved if one[0].defined]
    if not moved:
        return Answer("How far states moved is not defined.", "", "", advice)
    shift, record = max(moved, key=lambda one: one[0].value)
    return Answer(
        f"Most moved: {record['set']} ({record['model']}).",
        str(shift),
        f"shift of a probe of {record['set']}, in lengths of its mean state",
        advice,
    )


def _differences(clouds: Mapping[str, Mapping[str, Numbers]]) -> Table:
    """For each set, how much farther the last model moved than the first; of one model nothing.

    Mean relative shift of a probe; both models on the same resampled probes.
    """
    differences = {}
    for name, cloud in clouds.items():
        _, first, *_, last = [*cloud, *cloud]
        if len(cloud) > 2:
            shifts = [relative_shift(cloud[BEFORE], cloud[model]) for model in (first, last)]
            differences[f"mean shift of a probe of {name}, {last} minus {first}"] = bootstrap(
                lambda a, b: float(b.mean() - a.mean()), *shifts, what="probes"
            )
    return Table.of_numbers(differences)


def _notes(
    subject: Subject, before: Mapping[str, PooledStates], options: Options, origin: str
) -> list[str]:
    sizes = {name: len(states.losses) for name, states in before.items()}
    counts = ", ".join(
        f"{count} of {len(subject.retention[name])} rows of {name}" for name, count in sizes.items()
    )
    what = {
        "all": "all tokens that are no padding",
        "prompt": "the prompt",
        "response": "the response",
    }
    where = (
        "what the output head reads (after the final norm)"
        if next(iter(before.values())).has_head
        else "the output of the last decoder block (no head was found)"
    )
    notes = [origin, f"Probes: {counts}. State: mean over {what[options.pool]} of {where}."]
    few = [name for name, count in sizes.items() if count < FEWEST]
    if few:
        notes.append(f"Too few probes for numbers ({FEWEST} needed): {', '.join(few)}.")
    return notes
