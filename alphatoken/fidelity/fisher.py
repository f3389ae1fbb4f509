"""``fisher``: does the Fisher-drift proxy rank tokens as real retention data would?

    proxy score    stability component with V = F o (W - W_ref), or S_F (W - W_ref) A_F
    oracle score   the same with V = gradient of the loss on held-out retention rows

Both at the model after fine-tuning, with the Fisher fitted at the reference: as in the paper, by
responses sampled freely after prompts of rows that are not valued. ``none`` is the control
F = 1: does the Fisher add anything to the drift itself? The oracle is also split: what
it was at the reference already (r_0), which no proxy can know, and what the drift changed, which is
all that the proxy models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from alphatoken.certificate.metrics import spearman, top_overlap
from alphatoken.data import Example
from alphatoken.direction.drift import FisherDrift
from alphatoken.errors import ConfigError, InputError
from alphatoken.fidelity.agreement import agreement
from alphatoken.fidelity.diagnosis import Answer, Diagnosis, Table
from alphatoken.fidelity.figures import Figure, Guide
from alphatoken.fidelity.intervals import FEWEST, Estimate, bootstrap
from alphatoken.fidelity.options import CheckedOptions, option
from alphatoken.fidelity.result import conclude
from alphatoken.fidelity.retention_scores import (
    DIAGONALS,
    TunedModel,
    fitting,
    growing_fishers,
    unit_fisher,
    variants,
)
from alphatoken.fidelity.subject import Subject, places_of
from alphatoken.fidelity.valuing import values_along
from alphatoken.select.masks import keep_count

__all__ = [
    "CHANGE",
    "POOLED",
    "Options",
    "convergence_records",
    "diagnose",
    "random_overlap",
]

NAME = "fisher"
Numbers = NDArray[Any]
POOLED, CHANGE = "all sets", "all sets, change since the reference"
START = "oracle at the reference"


@dataclass(frozen=True)
class Options(CheckedOptions):
    """What is fitted and compared; the subject has the rows, the Fisher and the settings."""

    rows: int = option(8, "held-out rows of each retention set", least=1, first=FEWEST)
    sizes: tuple[int, ...] = option(
        (8, 24, 72), "numbers of samples whose Fishers are compared", least=1, first=1
    )
    max_new_tokens: int = option(48, "longest sampled response", least=1, first=12)
    draws: int = option(60, "bootstrap samples of each interval", least=10)

    def __post_init__(self) -> None:
        """Check every option."""
        super().__post_init__()
        if list(self.sizes) != sorted(set(self.sizes)):
            raise ConfigError("sizes must be growing numbers of samples", got=repr(self.sizes))


def random_overlap(tokens: int, ratio: float) -> Estimate:
    """Overlap of a random choice with any fixed one of the same size, and where 95 % of them lie.

    Of n tokens m are kept: the number in common is hypergeometric, m^2 / n in the mean.
    """
    kept = keep_count(ratio, tokens)
    if tokens < FEWEST:
        return Estimate.undefined(tokens, f"{tokens} tokens, {FEWEST} needed")
    low, high = stats.hypergeom(tokens, kept, kept).ppf([0.025, 0.975])
    return Estimate(kept / tokens, float(low) / kept, float(high) / kept, tokens)


def convergence_records(
    scores: Mapping[str, Numbers],
    grown: Mapping[str, tuple[str, str, int]],
    rows: Numbers,
    draws: int,
) -> list[dict[str, Any]]:
    """One record a grown Fisher: Spearman with the main fit of its labels, and with the oracle.

    ``grown`` maps a name in ``scores`` to (labels, name of the main fit, samples).
    """
    ranked = partial(bootstrap, spearman, groups=rows, draws=draws)
    return [
        {
            "labels": labels,
            "samples": samples,
            "with_main_fit": ranked(scores[name], scores[main]),
            "with_oracle": ranked(scores[name], scores[POOLED]),
        }
        for name, (labels, main, samples) in grown.items()
    ]


# --- answer ------------------------------------------------------------------------------------


def _answer(found: Table) -> Answer:
    """Whether the diagonal proxy ranks as all retention rows together do."""
    (place,) = (
        place
        for place, record in enumerate(found.records())
        if (record["retention"], record["proxy"]) == (POOLED, "diagonal")
    )
    score = found.estimate(place, "spearman")
    how = "not clearly as real retention rows do"
    how = "as real retention rows do" if score.low > 0 else how
    how = "the wrong way round" if score.high < 0 else how
    return Answer(
        f"The Fisher proxy ranks tokens {how}.",
        str(score),
        "rank correlation of the diagonal Fisher proxy with real retention rows",
        "where the proxy does not rank as real retention rows do, give such rows "
        "(retention='data'), or leave stability out (objective='adaptation').",
    )


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Compare the Fisher proxy with held-out retention rows on the subject's model.

    Raises:
        DataError: no retention rows.
        InputError: too few response tokens, or a model that has not left its reference.
    """
    options = options or Options()
    retention = subject.retention_rows(options.rows)
    rows = subject.sample()
    subject.require_tokens(rows, FEWEST, "a rank correlation of so few tokens means nothing")
    before, after, said = subject.before_and_after()
    pooled = subject.batches([row for found in retention.values() for row in found])
    model = TunedModel(subject, after, pooled)
    _require_drift(before, model.scorer.parameters)
    fishers, notes = variants(subject, options.max_new_tokens)
    named = dict(before.named_parameters(remove_duplicate=False))
    fishers["none"] = unit_fisher({name: named[name] for name in model.scorer.parameters})
    more, grown = _grown(subject, options)
    directions = {name: model.along(drift) for name, drift in (fishers | more).items()}
    directions |= _oracles(subject, model, TunedModel(subject, before, pooled), retention, pooled)
    columns = values_along(subject, model.scorer, rows, list(directions.values()), "Scores")
    scores, row = dict(zip(directions, columns.T, strict=True)), places_of(rows)[:, 0]
    targets = [POOLED, CHANGE, *(f"oracle {name}" for name in retention)]
    tables = (
        _agreement_table(subject, options, scores, [*fishers, START], targets, row),
        _gains_table(scores, [name for name in fishers if name != "none"], row, options.draws),
        Table.of(
            "convergence",
            "Fishers of few samples",
            convergence_records(scores, grown, row, options.draws),
        ),
    )
    overlaps = _overlap_figure(scores, list(fishers), row, options.draws)
    return conclude(
        NAME,
        subject,
        _answer(tables[0]),
        tables,
        [
            *_scatters(scores["diagonal"], scores[POOLED]),
            overlaps,
            *_figures(tables[0], tables[2]),
        ],
        valued=rows,
        notes=[said, *notes, *_notes(subject, retention)],
        settings={"fisher_samples": subject.fisher_samples, "retention_rows_each": options.rows},
    )


def _agreement_table(
    subject: Subject,
    options: Options,
    scores: Mapping[str, Numbers],
    proxies: Sequence[str],
    targets: Sequence[str],
    rows: Numbers,
) -> Table:
    records = [
        {"retention": target, "proxy": proxy}
        | agreement(scores[proxy], scores[target], subject.ratio, rows, draws=options.draws)
        for target in targets
        for proxy in proxies
    ]
    return Table.of("agreement", "Proxy against oracle", records)


def _gains_table(
    scores: Mapping[str, Numbers], fishers: Sequence[str], rows: Numbers, draws: int
) -> Table:
    """Spearman with the pooled oracle minus that of the bare drift, on the same resamples."""

    def difference(one: Numbers, other: Numbers, oracle: Numbers) -> float:
        return spearman(one, oracle) - spearman(other, oracle)

    bare, oracle = scores["none"], scores[POOLED]
    records = [
        {
            "proxy": name,
            "gain": bootstrap(difference, scores[name], bare, oracle, groups=rows, draws=draws),
        }
        for name in fishers
    ]
    return Table.of("gains", "Spearman gained over the bare drift", records)


def _oracles(
    subject: Subject,
    after: TunedModel,
    before: TunedModel,
    retention: Mapping[str, Sequence[Example]],
    pooled: Sequence[Any],
) -> dict[str, dict[str, Tensor]]:
    """Retention gradients: of each set, of all, of all at the reference, and what changed."""
    found = {
        f"oracle {name}": after.along(subject.batches(rows)) for name, rows in retention.items()
    }
    whole, start = after.along(pooled), before.along(pooled)
    change = {name: whole[name] - part for name, part in start.items()}
    return {**found, POOLED: whole, START: start, CHANGE: change}


def _require_drift(before: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    named = dict(before.named_parameters(remove_duplicate=False))
    unlike = [n for n, p in parameters.items() if n not in named or named[n].shape != p.shape]
    if unlike:
        raise InputError(
            "the reference is not the same kind of model",
            got=f"'{unlike[0]}' is missing from it or has another shape",
            why="W - W_ref needs the same weights in both",
            remedy="give the model that fine-tuning began with, adapters included",
        )
    if all(torch.equal(weight, named[name]) for name, weight in parameters.items()):
        raise InputError(
            "the model has not left its reference in any scored weight",
            got=f"{len(parameters)} weights with W = W_ref",
            why="V = F o (W - W_ref) is zero, and so is every proxy value: there is no ranking",
            remedy="give the model before fine-tuning as --reference, or a larger --tuning_rate",
        )


def _grown(
    subject: Subject, options: Options
) -> tuple[dict[str, FisherDrift], dict[str, tuple[str, str, int]]]:
    """Fishers of growing numbers of samples, and what each is to be compared with."""
    fishers: dict[str, FisherDrift] = {}
    grown: dict[str, tuple[str, str, int]] = {}
    for labels, main in DIAGONALS.items():
        how = fitting(labels, options.max_new_tokens)
        for size, drift in growing_fishers(subject, sizes=options.sizes, **how).items():
            name = f"{labels} {size}"
            fishers[name], grown[name] = drift, (labels, main, size)
    return fishers, grown


def _scatters(proxy: Numbers, oracle: Numbers) -> Iterator[Figure]:
    """Diagonal proxy against pooled oracle, token by token: values and ranks."""
    scaled = [x / max(float(np.abs(x).max()), 1e-300) for x in (proxy, oracle)]
    ranks = [stats.rankdata(x) / len(x) for x in (proxy, oracle)]
    records = [
        {"proxy": a, "oracle": b, "proxy_rank": c, "oracle_rank": d}
        for a, b, c, d in zip(*scaled, *ranks, strict=True)
    ]
    data = Table.of("scatter", "Scores of the tokens", records)
    for key, suffix, what, caption in (
        ("scatter", "", "value / largest", "As the paper draws them: a few heavy tokens decide "
         "the impression."),
        ("scatter-ranks", "_rank", "rank / tokens", "Ranks alone decide what is kept."),
    ):  # fmt: skip
        yield Figure(
            "scatter",
            key,
            data,
            f"Proxy and oracle score of each token, {what}",
            f"A useful proxy fills the diagonal from lower left to upper right. {caption}",
            x=f"proxy{suffix}",
            y=f"oracle{suffix}",
            xlabel=f"proxy, {what}",
            ylabel=f"oracle, {what}",
        )


def _overlap_figure(
    scores: Mapping[str, Numbers], proxies: Sequence[str], rows: Numbers, draws: int
) -> Figure:
    """Overlap of the kept part with the oracle's, by ratio, beside a random choice."""
    overlap = partial(bootstrap, groups=rows, draws=draws)
    curve = [
        {
            "proxy": proxy,
            "ratio": ratio,
            "overlap": overlap(partial(top_overlap, ratio=ratio), scores[proxy], scores[POOLED]),
            "random": random_overlap(len(rows), ratio),
        }
        for proxy in proxies
        for ratio in (round(0.1 * i, 1) for i in range(1, 10))
    ]
    return Figure(
        "lines",
        "overlap",
        Table.of("overlap", "Overlap by ratio", curve),
        "Kept tokens in common with the oracle",
        "Share of the oracle's kept tokens that each proxy keeps too. Only what lies above the "
        "grey band, 95 % of random choices, is better than chance.",
        x="ratio",
        y="overlap",
        series="proxy",
        band="random",
        xlabel="kept ratio",
        ylabel="overlap with the oracle's choice",
    )


def _figures(agreement: Table, convergence: Table) -> list[Figure]:
    return [
        Figure(
            "bars",
            "agreement",
            agreement,
            "Rank correlation with each retention set",
            "Points to the right of zero rank tokens as real retention data would. Compare each "
            "Fisher with 'none', the bare drift; and the first row with the second, which leaves "
            "out what the reference's own gradient decides.",
            x="spearman",
            y="retention",
            series="proxy",
            guides=(Guide(0.0),),
            xlabel="Spearman with the oracle",
        ),
        Figure(
            "lines",
            "convergence",
            convergence,
            "How many samples a Fisher needs",
            "Lines to the full fit (independent draws) rise to 1 as noise goes; where they are "
            "flat, more samples change no ranking. A flat line to the oracle says that samples are "
            "not what is missing.",
            x="samples",
            y=("with_main_fit", "with_oracle"),
            series="labels",
            xlabel="samples of the Fisher",
            ylabel="Spearman of the scores",
            scales=("log", "linear"),
        ),
    ]


def _notes(subject: Subject, retention: Mapping[str, Sequence[Example]]) -> list[str]:
    sets = ", ".join(f"{len(found)} of {name}" for name, found in retention.items())
    held = len(subject.fisher_rows)
    notes = [
        f"Held-out retention rows: {sets}.",
        f"Fishers are fitted on the prompts of {held} rows that are not valued; whether the model "
        "was tuned on them is not known here."
        if subject.prompts
        else f"No prompts were held out: Fishers are fitted on those of the {held} training rows, "
        "which are valued too. The paper's are held out.",
    ]
    if subject.fisher is not None:
        fitted = subject.fisher.metadata.get("labels", "an unknown kind of")
        notes.append(f"The {subject.fisher.structure} Fisher is the one given ({fitted} labels).")
    return notes
