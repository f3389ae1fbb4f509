"""How far did fine-tuning move the model's states on what it must not forget?

Retention probes are run through the model before and after; the mean state of each probe is
compared with itself, by a picture in which both are laid out together, by distances, and by linear
CKA, which does not see rotations. What the movement cost is read off the probes' loss.

The retention term itself, ``V = F o (W - W_ref)``, is in ``alphatoken.direction.drift``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.errors import DataError
from alphatoken.fidelity.clouds import picture_of
from alphatoken.fidelity.diagnosis import Diagnosis, Table
from alphatoken.fidelity.drift_figures import layers_figure, map_figure
from alphatoken.fidelity.intervals import FEWEST, Estimate, bootstrap
from alphatoken.fidelity.options import CheckedOptions, option
from alphatoken.fidelity.registry import find
from alphatoken.fidelity.running import run_as_module
from alphatoken.fidelity.similarity import (
    cka,
    cka_estimate,
    cosine,
    frechet,
    frechet_dims,
    relative_shift,
    width,
)
from alphatoken.fidelity.states import POOLS, PooledStates, pooled_states
from alphatoken.fidelity.subject import Subject

__all__ = ["Options", "Pair", "diagnose", "layer_records", "loss_record", "set_record"]

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Options(CheckedOptions):
    """What the diagnostic ``drift`` can be told."""

    probes: int = option(64, "retention rows of each set", least=1)
    pool: str = option(
        "all", "tokens of a probe that are averaged: all, prompt or response", choices=POOLS
    )
    perplexity: float = option(
        30.0, "of t-SNE; at most a third of the points", least=1, below=math.inf
    )


@dataclass(frozen=True)
class Pair:
    """The same probes before and after."""

    before: PooledStates
    after: PooledStates

    def at(self, place: int) -> tuple[Numbers, Numbers]:
        """States (n, d) at one place; -1 is what the head reads."""
        return self.before.states[place], self.after.states[place]


# --- measures ------------------------------------------------------------------------------------


def _of_probes(statistic: Any, before: Numbers, after: Numbers, *, seed: int = 0) -> Estimate:
    """A statistic of two clouds; the bootstrap draws probes, each with both of its states."""

    def of(index: Numbers) -> float:
        drawn = index.astype(np.int64)
        return float(statistic(before[drawn], after[drawn]))

    return bootstrap(of, np.arange(len(before), dtype=np.float64), seed=seed, what="probes")


def shift_in_widths(before: Numbers, after: Numbers) -> float:
    """Root mean square shift of a probe, in units of how far probes are from their centre."""
    size = width(before)
    if size == 0:
        return math.nan
    return float(np.sqrt(((after - before) ** 2).sum(1).mean())) / size


def shared_share(before: Numbers, after: Numbers) -> float:
    """Share of the squared movement that is one shift of all probes: 1 if they moved as one."""
    moved = after - before
    whole = float((moved**2).sum(1).mean())
    return float((moved.mean(0) ** 2).sum()) / whole if whole > 0 else math.nan


def set_record(before: Numbers, after: Numbers) -> dict[str, Estimate | int]:
    """Every measure of one cloud of probes: (n, d) before and after."""
    shift, angle = relative_shift(before, after), cosine(before, after)
    return {
        "probes": len(before),
        "relative_shift": bootstrap(np.mean, shift, what="probes"),
        "shift_in_widths": _of_probes(shift_in_widths, before, after),
        "shared": _of_probes(shared_share, before, after),
        "cosine": bootstrap(np.mean, angle, what="probes"),
        "frechet": _of_probes(frechet, before, after),
        "frechet_dims": frechet_dims(*before.shape),
        "cka_debiased": cka_estimate(before, after),
        "cka_biased": cka_estimate(before, after, debiased=False),
    }


def layer_records(pairs: Mapping[str, Pair]) -> list[dict[str, Any]]:
    """CKA and relative shift of each set at every place."""
    return [
        {
            "set": name,
            "place": where,
            "cka_debiased": cka_estimate(*pair.at(place)),
            "cka_biased": cka(*pair.at(place), debiased=False),
            "relative_shift": bootstrap(np.mean, relative_shift(*pair.at(place)), what="probes"),
        }
        for name, pair in pairs.items()
        for place, where in enumerate(pair.before.places)
    ]


def _per_token(losses: Numbers, tokens: Numbers) -> float:
    return float(losses.sum() / tokens.sum())


def loss_record(pair: Pair) -> dict[str, Estimate]:
    """Mean response-token loss of the probes before, after, and the change, nats a token."""
    before, after, tokens = pair.before.losses, pair.after.losses, pair.before.tokens
    return {
        "loss_before": bootstrap(_per_token, before, tokens, what="probes"),
        "loss_after": bootstrap(_per_token, after, tokens, what="probes"),
        "loss_change": bootstrap(_per_token, after - before, tokens, what="probes"),
    }


# --- the diagnostic ------------------------------------------------------------------------------


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Distances between a model's states on retention probes before and after fine-tuning.

    Raises:
        DataError: no retention rows, or a set without the tokens that are averaged.
        ConfigError: scikit-learn or matplotlib is missing.
    """
    options = options or Options()
    probes = subject.retention_rows(options.probes)
    before, after, origin = subject.before_and_after()
    pairs = {}
    for name, rows in probes.items():
        batches = subject.batches(rows)
        pairs[name] = Pair(
            *(
                pooled_states(
                    model,
                    batches,
                    subject.tracker(f"States {when}, {name}", len(rows)),
                    pool=options.pool,
                )
                for model, when in ((before, "before"), (after, "after"))
            )
        )
    check_finite(pairs, options.pool)
    numbers = {name: set_record(*pair.at(-1)) for name, pair in pairs.items()}
    losses = {name: loss_record(pair) for name, pair in pairs.items()}
    layers = layer_records(pairs)
    places = picture_of(_stacked(pairs), seed=subject.seed, perplexity=options.perplexity)
    return Diagnosis(
        name="drift",
        question=find("drift").question,
        answer=_answer(numbers, losses, layers),
        tables=(_sets_table(numbers), _losses_table(losses), _layers_table(layers)),
        figures=(
            map_figure(_places_by_set(pairs, places), numbers),
            layers_figure(layers, next(iter(pairs.values())).before.places),
        ),
        notes=_notes(subject, pairs, options, origin),
        settings={
            **subject.settings(),
            "probes of each set": options.probes,
            "pooled tokens": options.pool,
            "tuning_steps": subject.tuning_steps if subject.reference is None else None,
            "tuning_rate": subject.rate if subject.reference is None else None,
        },
    )


def check_finite(pairs: Mapping[str, Pair], pool: str) -> None:
    """Refuse probes without the tokens that are averaged, and states that are not finite."""
    for name, pair in pairs.items():
        if not all(np.isfinite(state).all() for state in (*pair.at(-1), *pair.at(0))):
            raise DataError(
                "a probe has no state to average, or one that is not finite",
                got=f"retention set '{name}', pool '{pool}'",
                remedy="another --pool, or look at the rows and the weights",
            )


def _stacked(pairs: Mapping[str, Pair]) -> Numbers:
    """All probes before, then all after: one cloud, so that one picture holds both."""
    return np.concatenate([pair.at(-1)[side] for side in (0, 1) for pair in pairs.values()])


def _places_by_set(
    pairs: Mapping[str, Pair], places: Numbers
) -> dict[str, tuple[Numbers, Numbers]]:
    before, after = np.split(places, 2)
    found, start = {}, 0
    for name, pair in pairs.items():
        stop = start + len(pair.before.losses)
        found[name] = (before[start:stop], after[start:stop])
        start = stop
    return found


def _sets_table(numbers: Mapping[str, Mapping[str, Any]]) -> Table:
    return Table.of(
        "drift-sets",
        "Movement of the states that the head reads",
        [{"set": name, **record} for name, record in numbers.items()],
        note="relative_shift: mean ||after - before|| / ||before|| of a probe. shift_in_widths: "
        "root mean square shift over the root mean square distance of the probes from their "
        "centre. shared: share of the squared movement that is one shift of all probes. cosine: "
        "mean, of a probe with itself. frechet: distance of Gaussian fits in the same widths, "
        "covariances along frechet_dims principal components. cka_debiased: linear CKA with "
        "U-centring (unbiased HSIC); cka_biased: Kornblith's, too high where probes are few. "
        "Intervals: bootstrap over probes, jackknife for CKA.",
    )


def _losses_table(losses: Mapping[str, Mapping[str, Estimate]]) -> Table:
    return Table.of(
        "drift-losses",
        "Loss on the probes",
        [{"set": name, **record} for name, record in losses.items()],
        note="Mean over response tokens, nats a token; bootstrap over probes.",
    )


def _layers_table(layers: Sequence[Mapping[str, Any]]) -> Table:
    return Table.of(
        "drift-layers",
        "Movement layer by layer",
        layers,
        note="Places: the output of each decoder block, and what the output head reads.",
    )


# --- words ---------------------------------------------------------------------------------------


def _answer(
    numbers: Mapping[str, Mapping[str, Any]],
    losses: Mapping[str, Mapping[str, Estimate]],
    layers: Sequence[Mapping[str, Any]],
) -> tuple[str, ...]:
    known = [name for name in numbers if numbers[name]["relative_shift"].defined]
    if not known:
        first = next(iter(numbers.values()))["relative_shift"]
        return (f"How far the states moved is {first} in every set.",)
    most = max(known, key=lambda name: numbers[name]["relative_shift"].value)
    found = numbers[most]
    sentences = [
        f"Most moved: {most}. A probe's mean state shifts by {found['relative_shift']} of its "
        f"length, {found['shift_in_widths']} times the distance of a probe from the centre of its "
        f"set; of the squared movement {found['shared']} is one shift that all its probes share."
    ]
    sentences.append(_rotation(most, found))
    forgotten = [name for name in known if losses[name]["loss_change"].low > 0]
    gained = [name for name in known if losses[name]["loss_change"].high < 0]
    for names, said in ((forgotten, "Forgotten (loss rose)"), (gained, "Improved (loss fell)")):
        if names:
            changes = ", ".join(f"{n} {losses[n]['loss_change']:+.2f} nats" for n in names)
            sentences.append(f"{said}: {changes} a token.")
    if not forgotten and not gained:
        sentences.append("No set's loss changed by more than its interval.")
    sentences += _where(layers, most)
    return tuple(sentences)


def _rotation(name: str, found: Mapping[str, Any]) -> str:
    aligned: Estimate = found["cka_debiased"]
    if not aligned.defined:
        return f"Whether the geometry of {name} changed is {aligned}."
    text = f"{aligned:.3f}"
    if aligned.low > 0.95:
        return (
            f"Its geometry is kept: debiased CKA {text}; the probes moved together, or turned, "
            "more than apart."
        )
    if aligned.high < 0.95:
        return (
            f"Its geometry changed: debiased CKA {text}, where 1 is the same up to turns and scale."
        )
    return f"Whether its geometry changed is open: debiased CKA {text} (1: up to turns and scale)."


def _where(layers: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """The place that changed most, of one set."""
    own = [r for r in layers if r["set"] == name and r["cka_debiased"].defined]
    if not own:
        return []
    least = min(own, key=lambda record: record["cka_debiased"].value)
    if least["cka_debiased"].high > 0.999:
        return []
    return [f"By CKA, {name} changed most at {least['place']}: {least['cka_debiased']:.3f}."]


def _notes(
    subject: Subject, pairs: Mapping[str, Pair], options: Options, origin: str
) -> tuple[str, ...]:
    sizes = {name: len(pair.before.losses) for name, pair in pairs.items()}
    first = next(iter(pairs.values()))
    size = first.at(-1)[0].shape[1]
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
        if first.before.has_head
        else "the output of the last decoder block (no head was found)"
    )
    notes = [
        origin,
        f"Probes: {counts}. State: mean over {what[options.pool]} of {where}; the {size} numbers "
        "are averaged in float64.",
        "t-SNE keeps neighbourhoods, not distances: how far a probe moved is in the table.",
    ]
    if min(sizes.values()) <= size:
        notes.append(
            f"No more probes than dimensions ({min(sizes.values())} and {size}): the biased CKA "
            "would be too high, so the debiased one is used in words and figures."
        )
    few = [name for name, count in sizes.items() if count < FEWEST]
    if few:
        notes.append(f"Too few probes for numbers ({FEWEST} needed): {', '.join(few)}.")
    return tuple(notes)


if __name__ == "__main__":
    raise SystemExit(run_as_module("drift"))
