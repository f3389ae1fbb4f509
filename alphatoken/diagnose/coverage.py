"""Diagnostic of the data that the kept tokens cover: a picture, and numbers to check it.

Each policy keeps the same share of the same response tokens. Where they lie is seen in one t-SNE
of the contextual embeddings of all tokens that some policy keeps, as in the paper (never one per
policy, in which no two places would compare). How evenly they cover the clusters of all candidates'
embeddings is measured beside what random selection gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alphatoken.config import ESTIMATORS, WALK
from alphatoken.data import Example
from alphatoken.diagnose import CheckedOptions, statistics
from alphatoken.diagnose.clouds import clusters_of, entropy, head_states, picture_of
from alphatoken.diagnose.diagnosis import DOUBTFUL, GOOD, Diagnosis, Table
from alphatoken.diagnose.figures import Figure
from alphatoken.diagnose.statistics import FEWEST, Numbers
from alphatoken.diagnose.stepping import draw
from alphatoken.diagnose.subject import Subject, conclude, places_of
from alphatoken.diagnose.valuing import retention_term, scorer_for
from alphatoken.errors import ConfigError
from alphatoken.select.masks import keep_count
from alphatoken.support.options import option

Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]

POLICIES = ("random", "low-perplexity", "high-perplexity")
"""Policies that need no value; every estimator is one as well."""


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Options of the diagnostic ``coverage``."""

    policies: tuple[str, ...] = option(
        ("random", "low-perplexity", "direct", "alphatoken", "label"),
        "policies: random, low-perplexity (lowest token loss), high-perplexity, or an estimator",
        choices=(*POLICIES, *ESTIMATORS, WALK),
    )
    clusters: int = option(12, "k-means clusters of all candidates' embeddings", at_least=2)
    points: int = option(
        1500, "maximum number of kept tokens in the picture; numbers use all", at_least=16
    )
    draws: int = option(200, "number of random selections to compare with", at_least=20)

    def __post_init__(self) -> None:
        """Check that each policy is named once, too."""
        super().__post_init__()
        if not self.policies:
            raise ConfigError("there is no policy to show", got="none")
        if len(set(self.policies)) < len(self.policies):
            raise ConfigError("a policy is named twice", got=", ".join(self.policies))


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Place the tokens kept by each policy among all candidates.

    Raises:
        InputError: fewer than 16 response tokens.
        ConfigError: scikit-learn or matplotlib is missing.
    """
    options = options or Options()
    rows = subject.sample()
    subject.require_tokens(rows, 2 * FEWEST, "the kept ones are measured as a cloud of points")
    tracker = subject.tracker("States", len(rows))
    batches = subject.batches(rows)
    columns, place = head_states(subject.model, batches, tracker, pooled=False)
    states, losses = columns["states"], columns["losses"]
    where = places_of(rows)
    belongs = where[:, 0]
    labels = clusters_of(states, options.clusters, subject.seed)
    count = int(labels.max()) + 1
    kept = {
        name: statistics.kept(_ranking(subject, rows, losses, name), subject.ratio)
        for name in options.policies
    }
    # Another seed than that of the policy "random", whose choice is compared with the band.
    band = band_of(labels, keep_count(subject.ratio, len(belongs)), options.draws, subject.seed + 1)
    even = {name: entropy(labels[mask], count) for name, mask in kept.items()}
    # As in the paper, the picture is fitted on the tokens that at least one policy keeps.
    union = np.flatnonzero(np.logical_or.reduce([*kept.values()])).astype(np.int64)
    drawn = union[draw(len(union), options.points, subject.seed)]
    places = picture_of(states[drawn], seed=subject.seed)
    return conclude(
        "coverage",
        subject,
        _conclusion(even, band),
        [_entropy_table(even, band, entropy(labels, count))],
        [_map(rows, where, labels, losses, kept, drawn, places)],
        valued=rows,
        notes=_notes(subject, place, len(losses), len(union), len(drawn)),
        settings={
            "policies": ", ".join(options.policies),
            "clusters": count,
            "random selections": options.draws,
        },
        mark=DOUBTFUL if _evenness(even)[1] < band[0] else GOOD,
    )


def band_of(labels: Indices, kept: int, draws: int, seed: int) -> tuple[float, float]:
    """Band of 95 % of the entropies of ``draws`` random selections of ``kept`` tokens."""
    generator, count = np.random.default_rng(seed), int(labels.max()) + 1
    entropies = [entropy(generator.permutation(labels)[:kept], count) for _ in range(draws)]
    low, high = np.nanquantile(entropies, [0.025, 0.975])
    return float(low), float(high)


def _ranking(subject: Subject, rows: Sequence[Example], losses: Numbers, policy: str) -> Numbers:
    if policy == "random":
        return np.random.default_rng(subject.seed).random(len(losses))
    if policy in POLICIES:
        return -losses if policy == "low-perplexity" else losses
    scorer = scorer_for(subject, policy, retention=retention_term(subject))
    return subject.score(scorer, rows)["total"]


def _entropy_table(even: Mapping[str, float], band: tuple[float, float], whole: float) -> Table:
    shared = {"random_low": band[0], "random_high": band[1], "all_candidates": whole}
    records = [{"policy": name, "entropy": evenness, **shared} for name, evenness in even.items()]
    return Table.of(
        "coverage-entropy",
        "How evenly the kept tokens cover the clusters of contexts",
        records,
        "Entropy over its largest: 1 even, 0 all in one cluster. random: where 95 % of random "
        "selections of the same size lie.",
    )


def _map(
    rows: Sequence[Example],
    where: Indices,
    labels: Indices,
    losses: Numbers,
    kept: Mapping[str, Mask],
    drawn: Indices,
    places: Numbers,
) -> Figure:
    records = [
        {
            "row": rows[where[token, 0]].row.index,
            "token_id": rows[where[token, 0]].labels[where[token, 1]],
            "x": float(x),
            "y": float(y),
            "loss": float(losses[token]),
            "cluster": int(labels[token]),
            **{name: bool(mask[token]) for name, mask in kept.items()},
        }
        for token, (x, y) in zip(drawn, places, strict=True)
    ]
    return Figure(
        "cloud",
        "coverage-map",
        Table.of("coverage-map", "Tokens in the picture, and who keeps them", records),
        "Where the kept tokens lie",
        "One t-SNE of every token that some policy keeps, the same in every panel. Grey: tokens "
        "that others keep and this policy drops. Look for whole regions left grey.",
        x="x",
        y="y",
        facets=tuple(kept),
    )


def _evenness(even: Mapping[str, float]) -> tuple[str, float]:
    """The first policy that is no random choice, and how even it is."""
    name = next((name for name in even if name != "random"), "random")
    return name, even[name]


def _conclusion(even: Mapping[str, float], band: tuple[float, float]) -> str:
    (name, evenness), (low, high) = _evenness(even), band
    how = "as even as"
    how = "less even than" if evenness < low else how
    how = "more even than" if evenness > high else how
    return (
        f"What {name} keeps is {how} a random choice: entropy over clusters of contexts "
        f"{evenness:.3f}; of random choices 95 % lie in [{low:.3f}, {high:.3f}]."
    )


def _notes(subject: Subject, place: str, tokens: int, union: int, drawn: int) -> list[str]:
    notes = [
        f"A token's embedding is {place} at the position that predicts it: its context, "
        "not the token itself.",
        f"The picture is fitted on tokens that some policy keeps, {union} of {tokens}; it shows "
        f"{drawn} of these. t-SNE keeps neighbourhoods, not distances.",
    ]
    if retention_term(subject) is None:
        notes.append(
            "Values are adaptation only: the model is its own reference, so stability is zero."
        )
    return notes
