"""Diagnostic ``fisher``: agreement of the Fisher-drift proxy with real retention rows.

    proxy score    stability component with V = F o (theta - theta_ref), or its Kronecker form
    oracle score   the same with V = gradient of the loss on held-out retention rows

Both at the model after fine-tuning, with the Fisher fitted at the reference: as in the paper, by
responses sampled freely after prompts of rows that are not valued. ``none`` is the control
F = 1: does the Fisher add anything to the drift itself?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from alphatoken.data import Example
from alphatoken.diagnose import CheckedOptions
from alphatoken.diagnose.diagnosis import Diagnosis, Table, graded
from alphatoken.diagnose.figures import Figure
from alphatoken.diagnose.statistics import FEWEST, Estimate, agreement, bootstrap, top_overlap
from alphatoken.diagnose.subject import Subject, conclude, places_of, require_first_order
from alphatoken.diagnose.valuing import values_along
from alphatoken.direction.drift import FisherDrift
from alphatoken.errors import CoverageError, InputError
from alphatoken.model.choice import ParameterChoice
from alphatoken.scorer import Scorer
from alphatoken.select.masks import keep_count
from alphatoken.support.options import option

NAME = "fisher"
Numbers = NDArray[Any]
POOLED = "all sets"


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Options for fitting and comparing; the subject has the rows, the Fisher and the settings."""

    rows: int = option(8, "number of held-out rows of each retention set", at_least=1)
    max_new_tokens: int = option(48, "maximum number of tokens of a sampled response", at_least=1)


def random_overlap(tokens: int, ratio: float) -> Estimate:
    """Overlap of a random choice with any fixed one of the same size, and where 95 % of them lie.

    Of n tokens m are kept: the number in common is hypergeometric, m^2 / n in the mean.
    """
    kept = keep_count(ratio, tokens)
    if tokens < FEWEST:
        return Estimate.undefined(tokens, f"{tokens} tokens, {FEWEST} needed")
    low, high = stats.hypergeom(tokens, kept, kept).ppf([0.025, 0.975])
    return Estimate(kept / tokens, float(low) / kept, float(high) / kept, tokens)


def variants(subject: Subject, max_new_tokens: int) -> tuple[dict[str, FisherDrift], list[str]]:
    """Diagonal and Kronecker Fisher, the diagonal one by token labels too; and what was left out.

    All are fitted on ``subject.fisher_rows``. A Fisher that was given takes the place of the one of
    its structure.
    """
    structures, notes = ["diagonal", "kronecker"], []
    if not ParameterChoice.read(subject.config.parameters).only_linears:
        structures.remove("kronecker")
        notes.append("No Kronecker Fisher: values are over more than linears.")
    fishers = {}
    for structure in structures:
        if subject.fisher is not None and subject.fisher.structure == structure:
            fishers[structure] = subject.fisher
            continue
        try:
            fishers[structure] = subject.fitted_fisher(
                structure, labels="sequence", max_new_tokens=max_new_tokens
            )
        except CoverageError as problem:
            if structure == "diagonal":
                raise
            notes.append(f"No Kronecker Fisher: {str(problem).splitlines()[0]}.")
    fishers["diagonal, token labels"] = subject.fitted_fisher("diagonal", labels="token")
    return fishers, notes


def _along(scorer: Scorer, retention: Any) -> dict[str, Tensor]:
    """V of a Fisher or of retention batches, at the scorer's model."""
    scorer.set_retention(retention)
    stability = scorer.direction.stability
    assert stability is not None
    return {name: part.detach().clone() for name, part in stability.items()}


def _score(scores: Table) -> Estimate:
    """Of the diagonal proxy, with all retention rows together."""
    pairs = [(record["retention"], record["proxy"]) for record in scores.records()]
    return scores.estimate(pairs.index((POOLED, "diagonal")), "spearman")


def _conclusion(scores: Table) -> str:
    score = _score(scores)
    how = "not clearly as real retention rows do"
    how = "as real retention rows do" if score.low > 0 else how
    how = "the wrong way round" if score.high < 0 else how
    return f"The diagonal Fisher proxy ranks tokens {how}: rank correlation {score}."


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Compare the Fisher proxy with held-out retention rows on the subject's model.

    Raises:
        DataError: no retention rows. ConfigError: values along a walk.
        InputError: too few response tokens, or a model that has not left its reference.
    """
    options = options or Options()
    require_first_order(subject.config)
    retention = subject.retention_rows(options.rows)
    rows = subject.sample()
    subject.require_tokens(rows, FEWEST, "a rank correlation of so few tokens means nothing")
    before, after, origin = subject.before_and_after()
    pooled = subject.batches([row for rows_of_set in retention.values() for row in rows_of_set])
    config = replace(subject.config, objective="stability", preconditioner=None)
    scorer = Scorer(after, None, list(pooled), config)
    scorer.warn = False
    _require_drift(before, scorer.parameters)
    fishers, notes = variants(subject, options.max_new_tokens)
    named = dict(before.named_parameters(remove_duplicate=False))
    reference = {name: named[name].detach().clone() for name in scorer.parameters}
    # F = 1, the control: V is the drift theta - theta_ref itself.
    ones = {name: torch.ones_like(weight) for name, weight in reference.items()}
    fishers["none"] = FisherDrift(ones, reference, {"labels": "none"})
    directions = {name: _along(scorer, drift) for name, drift in fishers.items()}
    directions |= {
        f"oracle {name}": _along(scorer, subject.batches(rows)) for name, rows in retention.items()
    }
    directions[POOLED] = _along(scorer, pooled)
    columns = values_along(subject, scorer, rows, list(directions.values()), "Scores")
    scores, row = dict(zip(directions, columns.T, strict=True)), places_of(rows)[:, 0]
    targets = [POOLED, *(f"oracle {name}" for name in retention)]
    records = [
        {"retention": target, "proxy": proxy}
        | agreement(scores[proxy], scores[target], subject.ratio, row)
        for target in targets
        for proxy in fishers
    ]
    agreed = Table.of("agreement", "Proxy against oracle", records)
    return conclude(
        NAME,
        subject,
        _conclusion(agreed),
        [agreed],
        [
            _scatter(scores["diagonal"], scores[POOLED]),
            _overlap_figure(scores, list(fishers), row),
        ],
        valued=rows,
        notes=[origin, *notes, *_notes(subject, retention)],
        settings={"fisher_samples": subject.fisher_samples, "retention_rows_each": options.rows},
        mark=graded(_score(agreed)),
    )


def _require_drift(before: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    named = dict(before.named_parameters(remove_duplicate=False))
    unlike = [n for n, p in parameters.items() if n not in named or named[n].shape != p.shape]
    if unlike:
        raise InputError(
            "the reference is not the same kind of model",
            got=f"'{unlike[0]}' is missing from it or has another shape",
            why="theta - theta_ref needs the same weights in both",
            remedy="give the model that fine-tuning began with, adapters included",
        )
    if all(torch.equal(weight, named[name]) for name, weight in parameters.items()):
        raise InputError(
            "the model has not left its reference in any scored weight",
            got=f"{len(parameters)} weights with theta = theta_ref",
            why="V = F o (theta - theta_ref) is zero, and so is every proxy value: nothing to rank",
            remedy="give the model before fine-tuning as --reference, or a larger --tuning_rate",
        )


def _scatter(proxy: Numbers, oracle: Numbers) -> Figure:
    """Diagonal proxy against pooled oracle, token by token, each over its largest size."""
    scaled = [x / max(float(np.abs(x).max()), 1e-300) for x in (proxy, oracle)]
    records = [{"proxy": a, "oracle": b} for a, b in zip(*scaled, strict=True)]
    return Figure(
        "scatter",
        "scatter",
        Table.of("scatter", "Scores of the tokens", records),
        "Proxy and oracle score of each token, over the largest",
        "A useful proxy fills the diagonal from lower left to upper right.",
        x="proxy",
        y="oracle",
    )


def _overlap_figure(scores: Mapping[str, Numbers], proxies: Sequence[str], rows: Numbers) -> Figure:
    """Overlap of the kept part with the oracle's, by ratio, beside a random choice."""
    overlap = partial(bootstrap, groups=rows)
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


def _notes(subject: Subject, retention: Mapping[str, Sequence[Example]]) -> list[str]:
    sets = ", ".join(f"{len(rows_of_set)} of {name}" for name, rows_of_set in retention.items())
    rows = len(subject.fisher_rows)
    notes = [
        f"Held-out retention rows: {sets}.",
        f"Fishers are fitted on the prompts of {rows} rows that are not valued; whether the model "
        "was tuned on them is not known here."
        if subject.prompts
        else f"No prompts were held out: Fishers are fitted on those of the {rows} training rows, "
        "which are valued too. The paper's are held out.",
    ]
    if subject.fisher is not None:
        fitted = subject.fisher.metadata.get("labels", "an unknown kind of")
        notes.append(f"The {subject.fisher.structure} Fisher is the one given ({fitted} labels).")
    return notes
