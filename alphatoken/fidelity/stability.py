"""Which keep or drop decisions are noise?

Every source of chance is changed by itself, and the decisions that change with it are counted:
other validation rows (bootstrap), other neighbours in the batch, other padding. The last two must
change values by no more than rounding; if they do more, that is a fault of the model's code or of
its attention mask, and it is said. How many samples a Fisher needs is asked by ``fisher``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.fidelity.arrangement import rearranged
from alphatoken.fidelity.diagnosis import Answer, Diagnosis, Table
from alphatoken.fidelity.figures import Figure, Guide
from alphatoken.fidelity.intervals import Estimate, bootstrap, percent
from alphatoken.fidelity.options import CheckedOptions, option
from alphatoken.fidelity.own_values import FEWEST_ROWS, OwnValues
from alphatoken.fidelity.per_row import row_columns
from alphatoken.fidelity.resampling import (
    DECISIONS,
    NOISE,
    classify,
    noise_by_size,
    resample,
)
from alphatoken.fidelity.result import conclude
from alphatoken.fidelity.subject import Subject

__all__ = ["Options", "diagnose"]

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Options(CheckedOptions):
    """What is changed, and how often."""

    resamples: int = option(
        500, "bootstrap resamples of validation rows and of the Fisher", least=50
    )
    validation_rows: int = option(
        64, "most validation rows; of more, so many are drawn", least=FEWEST_ROWS, first=8
    )
    uncertain: float = option(
        0.05,
        "a decision is noise if more than this share of resamples reverses it",
        above=0,
        below=0.5,
    )
    padding: int = option(16, "padding positions added on a side", least=1)


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Change validation rows, batches and padding; count the decisions.

    Raises:
        InputError: too few tokens. DataError: too few validation rows. ConfigError: the objective
            has no validation side.
    """
    options = options or Options()
    base = OwnValues.of(subject, options.validation_rows)
    columns = row_columns(subject, base.scorer, base.rows, base.validation)
    redrawn, keep_share = resample(
        columns, base.rest, subject.ratio, options.resamples, seed=subject.seed
    )
    state = classify(keep_share, options.uncertain)
    arranged = rearranged(subject, base.scorer, base.rows, base.total, options.padding)
    sizes = noise_by_size(
        columns,
        base.rest,
        subject.ratio,
        options.uncertain,
        groups=base.groups,
        measured=state == NOISE,
        seed=subject.seed,
    )
    decisions = _decisions_table(base, state)
    tables = [
        decisions,
        _sources_table(base, redrawn, decisions, arranged),
        Table.of("sizes", "Noise by the number of validation rows", sizes),
    ]
    return conclude(
        "stability",
        subject,
        _answer(base, options, decisions),
        tables,
        _figures(subject, options, _tokens_table(base, keep_share, state), tables[1], tables[2]),
        valued=base.rows,
        notes=[*base.notes, *_warnings(arranged)],
        settings=asdict(options),
    )


# --- tables ---------------------------------------------------------------------------------------


def _decisions_table(base: OwnValues, state: NDArray[np.int64]) -> Table:
    """How many decisions are of each kind."""
    records = [
        {
            "decision": name,
            "tokens": int((state == number).sum()),
            "share": bootstrap(
                np.mean, state == number, groups=base.groups, seed=base.subject.seed
            ),
        }
        for number, name in enumerate(DECISIONS)
    ]
    return Table.of("decisions", "Which decisions hold under other validation rows", records)


def _sources_table(
    base: OwnValues,
    redrawn: Mapping[str, Estimate],
    decisions: Table,
    arranged: Sequence[Mapping[str, Any]],
) -> Table:
    """One record a change: other validation rows, other neighbours, other padding."""
    first = {
        "source": "validation rows",
        "variant": f"bootstrap of {len(base.validation)}",
        **redrawn,
        "noise": decisions.estimate(NOISE, "share"),
    }
    note = "Error: the largest difference over the largest value."
    title = "What each change does to values and decisions"
    return Table.of("sources", title, [first, *arranged], note)


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


# --- figures and words ----------------------------------------------------------------------------


def _figures(
    subject: Subject, options: Options, tokens: Table, sources: Table, sizes: Table
) -> list[Figure]:
    ratio, uncertain = subject.ratio, options.uncertain
    # Every resample keeps as many tokens, which is the sum of the shares.
    kept = sum(float(record["keep share"] or 0) for record in tokens.records())
    return [
        Figure(
            "scatter",
            "keep_probability",
            tokens,
            "How sure each decision is under other validation rows",
            "A sharp step at the threshold means sure decisions; a long slope means that which "
            "tokens are kept depends on which validation rows happened to be drawn. Between the "
            "level lines a decision counts as noise.",
            x="rank",
            y="keep share",
            series="decision",
            guides=(
                Guide(kept - 0.5, label="threshold"),
                Guide(uncertain, "y"),
                Guide(1 - uncertain, "y"),
            ),
            xlabel="tokens, by falling value",
            ylabel="share of resamples that keep it",
            limits=(None, (-0.03, 1.03)),
        ),
        Figure(
            "bars",
            "sources",
            sources,
            "What reverses decisions",
            "Look for marks near the dashed line, where decisions are as if drawn at random. "
            "Padding and neighbours in the batch belong at 0.",
            x="flips",
            y="variant",
            series="source",
            guides=(Guide(2 * ratio * (1 - ratio), label="by chance"),),
            xlabel="share of keep or drop decisions reversed",
            scales=("symlog", "linear"),
            limits=((0.0, 1.0), None),
        ),
        Figure(
            "lines",
            "sizes",
            sizes,
            "How many validation rows sure decisions need",
            "Where the share of noise flattens, more rows buy little. Believe what is drawn with "
            "replacement as far as the check, drawn from halves, agrees with the measured mark.",
            x="validation rows",
            y="noise",
            series="how",
            ylabel="share of noise decisions",
            scales=("log", "linear"),
            limits=(None, (0.0, None)),
        ),
    ]


def _answer(base: OwnValues, options: Options, decisions: Table) -> Answer:
    """How many decisions a redrawn validation set reverses."""
    noise = percent(decisions.estimate(NOISE, "share"))
    return Answer(
        f"With {len(base.validation)} validation rows {noise} of the decisions to keep or drop a "
        "token are noise.",
        noise,
        f"of the decisions are reversed by more than {100 * options.uncertain:g} % of the redrawn "
        "validation sets",
        "raise validation_batch_size, or drop only what is harmful beyond doubt "
        "(policy='harmless').",
    )


def _warnings(arranged: Sequence[Mapping[str, Any]]) -> list[str]:
    """What must change values by rounding only and does not."""
    named = "; ".join(
        f"{one['source']}, {one['variant']}: {one['error']:.1e} of the largest value, "
        f"{percent(one['flips'])} of the decisions"
        for one in arranged
        if not one["rounding only"]
    )
    if not named:
        return []
    return [
        f"WARNING: values depend on what they must not depend on ({named}). Look at the model's "
        "attention mask and position ids, or score one row a batch."
    ]
