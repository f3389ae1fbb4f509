"""Diagnostic of which keep or drop decisions are noise.

Validation rows are drawn again from themselves (bootstrap), and the decisions that change with them
are counted. Neighbours in the batch and padding must change values by no more than rounding; if
they do more, that is a fault of the model's code or of its attention mask, and a note says so.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from alphatoken.diagnose import CheckedOptions
from alphatoken.diagnose.diagnosis import Diagnosis, Table, graded
from alphatoken.diagnose.figures import Figure, Guide
from alphatoken.diagnose.statistics import Estimate, Numbers, bootstrap, percent
from alphatoken.diagnose.subject import Subject, conclude
from alphatoken.diagnose.valuing import OwnValues, keep_shares, row_columns
from alphatoken.support.options import option

UNCERTAIN = 0.05
"""A decision is noise if more than this share of the draws reverses it."""

DECISIONS = ("sure keep", "noise", "sure drop")
NOISE = DECISIONS.index("noise")

# Largest rounding difference over the largest value; loose, because the terms of a value cancel.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
_NARROW = 1e-1


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Options of the diagnostics ``stability`` and ``arithmetic``."""

    resamples: int = option(
        500, "number of bootstrap resamples of the validation rows", at_least=50
    )


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Redraw the validation rows; count the decisions.

    Raises:
        InputError: too few tokens. DataError: too few validation rows. ConfigError: the objective
            has no validation side.
    """
    options = options or Options()
    base = OwnValues.of(subject)
    columns = row_columns(subject, base.scorer, base.rows, base.validation)
    rows = len(base.validation)
    shares = keep_shares(columns, base.rest, subject.ratio, options.resamples, seed=subject.seed)
    state = classify(shares)
    records = [
        {
            "decision": name,
            "tokens": int((state == number).sum()),
            "share": bootstrap(np.mean, state == number, groups=base.groups, seed=subject.seed),
        }
        for number, name in enumerate(DECISIONS)
    ]
    decisions = Table.of("decisions", "Which decisions hold under other validation rows", records)
    share = decisions.estimate(NOISE, "share")
    noise = percent(share)
    return conclude(
        "stability",
        subject,
        f"With {rows} validation rows {noise} of the decisions to keep or drop a token are noise: "
        f"more than {100 * UNCERTAIN:g} % of the redrawn validation sets reverse them.",
        [decisions],
        [_figure(_tokens_table(base, shares, state))],
        valued=base.rows,
        notes=[*base.notes, *_dependence(base)],
        settings=asdict(options),
        mark=graded(Estimate(1 - share.value, 1 - share.high, 1 - share.low, share.count)),
    )


def classify(keep_share: Numbers) -> NDArray[np.int64]:
    """Index into ``DECISIONS``: a decision is noise unless one side has all but ``UNCERTAIN``.

    Args:
        keep_share: share of the draws in which a token is kept.
    """
    sure_keep, sure_drop = keep_share >= 1 - UNCERTAIN, keep_share <= UNCERTAIN
    return np.where(sure_keep, 0, np.where(sure_drop, 2, NOISE)).astype(np.int64)


def _tokens_table(base: OwnValues, keep_share: Numbers, state: NDArray[np.int64]) -> Table:
    """One record a token, by falling value."""
    records = [
        {
            "rank": rank,
            "row": base.rows[int(base.groups[place])].row.index,
            "position": int(base.values["position"][place]),
            "value": float(base.total[place]),
            "keep share": float(keep_share[place]),
            "decision": DECISIONS[int(state[place])],
        }
        for rank, place in enumerate(np.argsort(-base.total, kind="stable"))
    ]
    return Table.of("keep_probability", "Keep share of each token", records)


def _figure(tokens: Table) -> Figure:
    return Figure(
        "scatter",
        "keep_probability",
        tokens,
        "How sure each decision is under other validation rows",
        "A sharp step means sure decisions, a long slope that which tokens are kept depends on "
        "the validation rows drawn. Between the lines a decision counts as noise.",
        x="rank",
        y="keep share",
        series="decision",
        guides=(Guide(UNCERTAIN, "y"), Guide(1 - UNCERTAIN, "y")),
        xlabel="tokens, by falling value",
        ylabel="share of resamples that keep it",
        limits=(None, (-0.03, 1.03)),
    )


def _dependence(base: OwnValues) -> list[str]:
    """Say so if values change by more than rounding where each row is a batch of its own."""
    alone = base.subject.resized(batch_size=1).score(base.scorer, base.rows, "Row by row")["total"]
    error = float(np.abs(alone - base.total).max()) / (float(np.abs(base.total).max()) or 1.0)
    dtype = next(iter(base.scorer.parameters.values())).dtype
    if error <= _TOLERANCE.get(dtype, _NARROW):  # False for NaN
        return []
    return [
        f"WARNING: values depend on padding or on neighbours in the batch, by {error:.1e} of the "
        "largest. Look at the model's attention mask and position ids, or score one row a batch."
    ]
