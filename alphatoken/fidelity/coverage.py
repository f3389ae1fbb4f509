"""What part of the data do the kept tokens cover? A picture, and numbers that do not trust it.

Each policy keeps the same share of the same response tokens. Where they lie is seen in one t-SNE
of the contextual embeddings of all tokens that some policy keeps, as in the paper (never one per
policy, in which no two places would compare), and measured in the embeddings themselves, beside
what random selection gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from alphatoken.certificate import metrics
from alphatoken.data import Example
from alphatoken.errors import ConfigError
from alphatoken.estimate.estimators import ESTIMATORS
from alphatoken.fidelity.clouds import entropy, picture_of
from alphatoken.fidelity.coverage_statistics import (
    STATISTICS,
    Band,
    Indices,
    Mask,
    Numbers,
    Pool,
    against,
    band_of,
    measured,
)
from alphatoken.fidelity.diagnosis import Answer, Diagnosis, Table
from alphatoken.fidelity.figures import Figure
from alphatoken.fidelity.intervals import FEWEST, Estimate, bootstrap, jackknife
from alphatoken.fidelity.options import CheckedOptions, option
from alphatoken.fidelity.result import conclude
from alphatoken.fidelity.states import TokenStates, token_states
from alphatoken.fidelity.subject import Subject, places_of
from alphatoken.fidelity.tokenwise import draw
from alphatoken.fidelity.valuing import retention_term, scorer_for
from alphatoken.select.masks import keep_count

__all__ = ["POLICIES", "Options", "diagnose", "kept_by_any"]

POLICIES = ("random", "low-perplexity", "high-perplexity")
"""Policies that need no value; every estimator is one as well."""


@dataclass(frozen=True)
class Options(CheckedOptions):
    """What the diagnostic ``coverage`` can be told."""

    policies: tuple[str, ...] = option(
        ("random", "low-perplexity", "direct", "alphatoken", "label"),
        "what selects: random, low-perplexity (lowest token loss), high-perplexity, "
        "or an estimator",
        choices=(*POLICIES, *ESTIMATORS),
    )
    clusters: int = option(12, "k-means clusters of all candidates' embeddings", least=2)
    perplexity: float = option(
        30.0, "of t-SNE; at most a third of the points", least=1, below=math.inf
    )
    points: int = option(
        1500, "most kept tokens drawn in the picture; numbers use all", least=16, first=200
    )
    draws: int = option(200, "random selections that say what chance gives", least=20, first=50)

    def __post_init__(self) -> None:
        """Check every option."""
        super().__post_init__()
        if not self.policies:
            raise ConfigError("there is no policy to show", got="none")
        if len(set(self.policies)) < len(self.policies):
            raise ConfigError("a policy is named twice", got=", ".join(self.policies))


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Where the tokens kept by each policy lie among all candidates.

    Raises:
        InputError: fewer than 16 response tokens.
        ConfigError: scikit-learn or matplotlib is missing.
    """
    options = options or Options()
    rows = subject.sample()
    subject.require_tokens(rows, 2 * FEWEST, "the kept ones are measured as a cloud of points")
    states = token_states(
        subject.model, subject.batches(rows), subject.tracker("States", len(rows))
    )
    belongs = places_of(rows)[:, 0]
    pool = Pool.of(states, belongs, clusters=options.clusters, seed=subject.seed)
    kept = {
        name: metrics.kept(_ranking(subject, rows, states, name), subject.ratio)
        for name in options.policies
    }
    band = band_of(pool, keep_count(subject.ratio, len(belongs)), options.draws, subject.seed + 1)
    numbers = {
        name: {key: measured(pool, mask, key) for key in STATISTICS} for name, mask in kept.items()
    }
    overlaps = _overlaps(pool, kept)
    union = kept_by_any(kept)
    drawn = union[draw(len(union), options.points, subject.seed)]
    places = picture_of(pool.points[drawn], seed=subject.seed, perplexity=options.perplexity)
    measures = _numbers_table(pool, numbers, band)
    seen = _map_table(pool, kept, drawn, places)
    return conclude(
        "coverage",
        subject,
        _answer(numbers, band),
        [measures, overlaps, _causal_effect(pool, kept)],
        _figures(seen, measures, options.policies),
        valued=rows,
        notes=_notes(subject, states, len(union), len(drawn)),
        settings={
            "policies": ", ".join(options.policies),
            "clusters": pool.clusters,
            "t-SNE perplexity": min(options.perplexity, (len(drawn) - 1) / 3),
            "random selections": options.draws,
        },
    )


def kept_by_any(kept: Mapping[str, Mask]) -> Indices:
    """Indices of the tokens that at least one policy keeps: what the picture is fitted on."""
    return np.flatnonzero(np.logical_or.reduce([*kept.values()])).astype(np.int64)


def _ranking(
    subject: Subject, rows: Sequence[Example], states: TokenStates, policy: str
) -> Numbers:
    """What a policy ranks by; highest is kept."""
    if policy == "random":
        return np.random.default_rng(subject.seed).random(len(states.ids))
    if policy in POLICIES:
        return -states.losses if policy == "low-perplexity" else states.losses
    scorer = scorer_for(subject, policy, retention=retention_term(subject))
    return subject.score(scorer, rows)["total"]


def _overlaps(pool: Pool, kept: Mapping[str, Mask]) -> Table:
    names = list(kept)
    records = [
        {
            "policy": one,
            "other": other,
            "in_common": bootstrap(metrics.overlap, kept[one], kept[other], groups=pool.rows),
        }
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    ]
    note = "By chance the ratio."
    return Table.of("coverage-overlap", "Kept tokens in common", records, note)


def _numbers_table(
    pool: Pool,
    numbers: Mapping[str, Mapping[str, Estimate]],
    band: Mapping[str, Band],
) -> Table:
    every = np.arange(len(pool.ids))
    records = [
        {
            "policy": name,
            "statistic": key,
            "value": estimate,
            "random_low": band[key][0],
            "random_high": band[key][1],
            "all_candidates": STATISTICS[key][2](pool, every, every),
            "than_random": against(estimate, band[key]),
        }
        for name, found in numbers.items()
        for key, estimate in found.items()
    ]
    what = (f"{key}: {name.lower()}, {unit}" for key, (name, unit, _) in STATISTICS.items())
    return Table.of(
        "coverage-numbers",
        "Coverage in numbers",
        records,
        note=f"{'; '.join(what)}. random: where 95 % of random selections of the same size lie.",
    )


def _map_table(pool: Pool, kept: Mapping[str, Mask], drawn: Indices, places: Numbers) -> Table:
    records = [
        {
            "row": int(pool.rows[token]),
            "token_id": int(pool.ids[token]),
            "x": float(x),
            "y": float(y),
            "loss": float(pool.losses[token]),
            "cluster": int(pool.labels[token]),
            **{name: bool(mask[token]) for name, mask in kept.items()},
        }
        for token, (x, y) in zip(drawn, places, strict=True)
    ]
    return Table.of("coverage-map", "Tokens in the picture, and who keeps them", records)


def _figures(points: Table, numbers: Table, policies: Sequence[str]) -> list[Figure]:
    return [
        Figure(
            "cloud",
            "coverage-map",
            points,
            "Where the kept tokens lie",
            "One t-SNE of every token that some policy keeps, the same in every panel. Grey: "
            "tokens that others keep and this policy drops. Look for whole regions left grey, and "
            "whether the loss there (first panel, in nats) is high or low.",
            x="x",
            y="y",
            facets=tuple(policies),
            colour="loss",
        ),
        Figure(
            "bars",
            "coverage-statistics",
            numbers,
            "Coverage against chance",
            "Grey band: 95 % of random selections of the same size. Left of it a policy covers "
            "less than chance does.",
            x="value",
            y="policy",
            facets="statistic",
            band="random",
        ),
    ]


# --- words --------------------------------------------------------------------------------------


def _answer(numbers: Mapping[str, Mapping[str, Estimate]], band: Mapping[str, Band]) -> Answer:
    """Of the first policy: evenness of what it keeps, beside random selections."""
    name = next((name for name in numbers if name != "random"), "random")
    found, (low, high) = numbers[name]["entropy"], band["entropy"]
    how = {"below": "less even than", "above": "more even than", "within": "as even as"}
    return Answer(
        f"What {name} keeps is {how[against(found, band['entropy'])]} a random choice.",
        str(found),
        f"entropy over clusters of contexts of what {name} keeps ({low:.3f} to {high:.3f} at "
        "random)",
        "where kept tokens leave parts of the data out, raise keep_ratio or rank within sequences "
        "(keep_scope='sequence').",
    )


def _causal_effect(pool: Pool, kept: Mapping[str, Mask]) -> Table:
    """Whether the causal part makes the kept tokens more diverse, as the paper's figure says."""
    if not {"alphatoken", "direct"} <= set(kept):
        return Table.of_numbers({})

    def difference(among: Indices) -> float:
        ours, direct = (
            entropy(pool.labels[among[kept[name][among]]], pool.clusters)
            for name in ("alphatoken", "direct")
        )
        return ours - direct

    found = jackknife(difference, len(pool.ids), groups=pool.rows)
    return Table.of_numbers({"cluster entropy of alphatoken minus that of direct": found})


def _notes(subject: Subject, states: TokenStates, union: int, drawn: int) -> list[str]:
    where = (
        "the input of the output head (after the final norm)"
        if states.has_head
        else "the output of the last decoder block (no head was found)"
    )
    notes = [
        f"A token's embedding is {where} at the position that predicts it: its context, not the "
        "token itself.",
        f"The picture is fitted on tokens that some policy keeps, {union} of {len(states.ids)}; it "
        f"shows {drawn} of these. t-SNE keeps neighbourhoods, not distances.",
    ]
    if retention_term(subject) is None:
        notes.append(
            "Values are adaptation only: the model is its own reference, so stability is zero."
        )
    return notes
