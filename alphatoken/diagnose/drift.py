"""Diagnostic of how far fine-tuning moves the model's states on retention rows.

Retention probes are run through the model before and after, and through any other model that was
fine-tuned from the same one; the mean state of each probe is compared with itself, by distance and
by a picture in which all models are laid out together. What the movement cost is read off the
probes' loss.

The retention term itself, ``V = F o (theta - theta_ref)``, is in ``alphatoken.direction.drift``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from alphatoken.data import Example
from alphatoken.diagnose import CheckedOptions
from alphatoken.diagnose.clouds import head_states, picture_of
from alphatoken.diagnose.diagnosis import Diagnosis, Table
from alphatoken.diagnose.figures import Figure
from alphatoken.diagnose.statistics import FEWEST, Numbers, bootstrap
from alphatoken.diagnose.subject import Subject, conclude
from alphatoken.errors import ConfigError, DataError
from alphatoken.support.options import option

Columns = Mapping[str, Numbers]
"""States and losses of probes, as ``head_states`` names them."""
BEFORE = "before"
"""Name of the model before fine-tuning in tables and figures."""


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Options of the diagnostic ``drift``."""

    probes: int = option(64, "number of retention rows of each set", at_least=1)
    label: str = option("after", "name of the model beside others (--beside)")

    def __post_init__(self) -> None:
        """Check that the label is another name than that of the model before, too."""
        super().__post_init__()
        if not self.label or self.label == BEFORE:
            raise ConfigError("label must tell the model from the one before", got=self.label)


def relative_shift(before: Numbers, after: Numbers) -> Numbers:
    """(n,) ``||y_i - x_i|| / ||x_i||`` of each probe (n, d); NaN where the state before is zero."""
    sizes = np.linalg.norm(before, axis=1)
    shifts = np.full(len(sizes), np.nan)
    np.divide(np.linalg.norm(after - before, axis=1), sizes, out=shifts, where=sizes > 0)
    return shifts


def _per_token(losses: Numbers, tokens: Numbers) -> float:
    return float(losses.sum() / tokens.sum())


def set_record(before: Columns, after: Columns, tokens: Numbers) -> dict[str, Any]:
    """Shift of the states, and mean response-token loss in nats a token, of one set of probes."""
    shift = relative_shift(before["states"], after["states"])
    change = after["losses"] - before["losses"]
    return {
        "probes": len(shift),
        "relative_shift": bootstrap(np.mean, shift, what="probes"),
        "loss_before": bootstrap(_per_token, before["losses"], tokens, what="probes"),
        "loss_after": bootstrap(_per_token, after["losses"], tokens, what="probes"),
        "loss_change": bootstrap(_per_token, change, tokens, what="probes"),
    }


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Distances between models' states on retention probes before and after fine-tuning.

    Raises:
        DataError: no retention rows, or states that are not finite.
        ConfigError: scikit-learn or matplotlib is missing; two models of one name.
    """
    options = options or Options()
    probes = subject.retention_rows(options.probes)
    start, models, origin = _models(subject, options)
    tuned = subject.reference is None and not subject.beside
    before, place = _pooled(subject, start, BEFORE, probes)
    clouds = {name: {BEFORE: columns["states"]} for name, columns in before.items()}
    records = []
    for model, load in models.items():
        after, _ = _pooled(subject, load(), model, probes)
        for name in probes:
            tokens = np.array([float(row.response_tokens) for row in probes[name]])
            record = set_record(before[name], after[name], tokens)
            records.append({"model": model, "set": name} | record)
            clouds[name][model] = after[name]["states"]
    places = {name: laid_out(cloud, seed=subject.seed) for name, cloud in clouds.items()}
    sets = Table.of(
        "drift-sets",
        "Movement of the states that the head reads, and loss",
        records,
        "relative_shift: of a probe's mean state, in its own lengths. Losses in nats a token.",
    )
    return conclude(
        "drift",
        subject,
        _conclusion(sets),
        [sets],
        [_map(places)],
        notes=_notes(subject, before, place, origin),
        settings={
            "models": ", ".join(models),
            "probes of each set": options.probes,
            "tuning_steps": subject.tuning_steps if tuned else None,
            "tuning_rate": subject.rate if tuned else None,
        },
    )


def _models(
    subject: Subject, options: Options
) -> tuple[nn.Module, dict[str, Callable[[], nn.Module]], str]:
    """The model before, how to get each one after, by name, and where they come from."""
    if duplicates := {options.label, BEFORE} & set(subject.beside):
        raise ConfigError(
            "two models have one name",
            got=", ".join(sorted(duplicates)),
            remedy="--beside NAME=MODEL with other names, or --label NAME",
        )
    # A single model with others beside it is the one before; alone, it has a copy fine-tuned.
    if subject.beside and subject.reference is None:
        return subject.model, dict(subject.beside), "Before: the model given."
    before, after, origin = subject.before_and_after()
    return before, {options.label: lambda: after} | dict(subject.beside), origin


def _pooled(
    subject: Subject, model: nn.Module, name: str, probes: Mapping[str, Sequence[Example]]
) -> tuple[dict[str, Columns], str]:
    states: dict[str, Columns] = {}
    place = ""
    for one, rows in probes.items():
        tracker = subject.tracker(f"States {name}, {one}", len(rows))
        states[one], place = head_states(model, subject.batches(rows), tracker, pooled=True)
        if not np.isfinite(states[one]["states"]).all():
            raise DataError(
                "a probe has a state that is not finite",
                got=f"retention set '{one}', model '{name}'",
                remedy="look at the rows and the weights",
            )
    return states, place


def laid_out(clouds: Mapping[str, Numbers], *, seed: int) -> dict[str, Numbers]:
    """Places (n, 2) of each model's probes in one t-SNE, fitted on the union of all models.

    A projection of each model's own would place equal clouds differently: no two could be compared.
    """
    places = picture_of(np.concatenate([*clouds.values()]), seed=seed)
    ends = np.cumsum([len(cloud) for cloud in clouds.values()])[:-1]
    return dict(zip(clouds, np.split(places, ends), strict=True))


def _map(places: Mapping[str, Mapping[str, Numbers]]) -> Figure:
    records = [
        {"set": name, "model": model, "probe": probe, "x": float(x), "y": float(y)}
        for name, clouds in places.items()
        for model, cloud in clouds.items()
        for probe, (x, y) in enumerate(cloud)
    ]
    return Figure(
        "cloud",
        "drift-map",
        Table.of("drift-map", "Places of the probes in the picture", records),
        "Probes before and after",
        "One t-SNE of the mean states of a set's probes under all models together, with ellipses "
        "that hold 95 % of a normal cloud and densities along each axis. Lengths here are no "
        "distances; the mean shift, measured in the states themselves, is in the table.",
        x="x",
        y="y",
        facets="set",
        series="model",
        across=2,
    )


def _conclusion(sets: Table) -> str:
    shifts = [(sets.estimate(i, "relative_shift"), one) for i, one in enumerate(sets.records())]
    shifts = [(shift, record) for shift, record in shifts if shift.defined]
    if not shifts:
        return "How far states moved is not defined."
    shift, record = max(shifts, key=lambda pair: pair[0].value)
    return (
        f"Most moved: {record['set']} ({record['model']}), a probe by {shift} lengths of its mean "
        "state."
    )


def _notes(subject: Subject, before: Mapping[str, Columns], place: str, origin: str) -> list[str]:
    sizes = {name: len(columns["losses"]) for name, columns in before.items()}
    counts = ", ".join(
        f"{count} of {len(subject.retention[name])} rows of {name}" for name, count in sizes.items()
    )
    notes = [origin, f"Probes: {counts}. State: mean over all tokens of {place}."]
    few = [name for name, count in sizes.items() if count < FEWEST]
    if few:
        notes.append(f"Too few probes for numbers ({FEWEST} needed): {', '.join(few)}.")
    return notes
