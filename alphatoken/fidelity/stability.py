"""Which keep or drop decisions are noise?

Every source of chance is changed by itself, and the decisions that change with it are counted:
other validation rows (bootstrap), other samples of the Fisher, another precision, other neighbours
in the batch, other padding. The last two must change values by no more than rounding; if they do
more, that is a fault of the model's code or of its attention mask, and it is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.data import Example
from alphatoken.direction.drift import FisherDrift
from alphatoken.errors import ConfigError
from alphatoken.fidelity.arrangement import (
    DTYPES,
    Rearranged,
    Reference,
    composition,
    padding,
    precisions,
    thresholds,
)
from alphatoken.fidelity.decisions import DECISIONS, margins, noise_margin, percent
from alphatoken.fidelity.diagnosis import Answer, Diagnosis, Table
from alphatoken.fidelity.figures import Figure, Guide, draw_all
from alphatoken.fidelity.intervals import FEWEST, Estimate, bootstrap
from alphatoken.fidelity.options import CheckedOptions, option
from alphatoken.fidelity.own_values import FEWEST_ROWS, OwnValues
from alphatoken.fidelity.per_row import RowColumns, row_columns, values_along
from alphatoken.fidelity.registry import find
from alphatoken.fidelity.resampling import Resampled, noise_by_size, noise_share, resample
from alphatoken.fidelity.subject import Subject
from alphatoken.fidelity.valuing import scorer_for
from alphatoken.scorer import Scorer

__all__ = [
    "Options",
    "diagnose",
    "fisher_columns",
    "fisher_parts",
]

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
    fisher_parts: int = option(
        20, "parts into which the Fisher's samples are split; 0 leaves it out"
    )
    precisions: tuple[str, ...] = option(
        ("float64", "float32", "bfloat16"),
        "dtypes that are compared; the first is the reference",
        choices=DTYPES,
        first=2,
    )
    copied_parameters: int = option(
        500_000_000, "a model with more parameters is not copied to other precisions", least=0
    )
    shuffles: int = option(
        20, "pairs of row orders whose batch thresholds are compared", least=FEWEST
    )
    padding: int = option(16, "padding positions added on a side", least=1)

    def __post_init__(self) -> None:
        """Check every option."""
        super().__post_init__()
        if self.fisher_parts != 0 and self.fisher_parts < FEWEST:
            raise ConfigError(
                f"fisher_parts must be 0 or at least {FEWEST}",
                got=repr(self.fisher_parts),
                why="parts are drawn again from themselves; fewer say nothing of each other",
            )


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Change validation rows, Fisher, precision, batches and padding; count the decisions.

    Raises:
        InputError: too few tokens. DataError: too few validation rows. ConfigError: the objective
            has no validation side.
    """
    options = options or Options()
    base = OwnValues.of(subject, options.validation_rows)
    columns = row_columns(subject, base.scorer, base.rows, base.validation)
    resampled = resample(columns, base.rest, subject.ratio, options.resamples, seed=subject.seed)
    state = resampled.state(options.uncertain)
    sizes = noise_by_size(
        columns,
        base.rest,
        subject.ratio,
        options.uncertain,
        groups=base.groups,
        measured=state == 1,
        seed=subject.seed,
    )
    reference = Reference.of(subject, base.scorer, base.rows, base.total)
    rearranged = [
        *composition(reference),
        *padding(reference, options.padding),
        *_precisions(base, options),
    ]
    found = _Findings(
        base,
        options,
        resampled,
        sizes,
        rearranged,
        thresholds(
            base.total,
            base.groups,
            subject.ratio,
            [*(subject.batch_size * factor for factor in (1, 2, 4)), len(base.rows) // 2],
            shuffles=options.shuffles,
            seed=subject.seed,
        ),
        _fisher(base, options),
    )
    return found.diagnosis()


# --- sources that need models of their own -----------------------------------------------------


def _precisions(base: OwnValues, options: Options) -> list[Rearranged]:
    subject = base.subject
    size = sum(p.numel() for p in subject.model.parameters())
    if len(options.precisions) < 2:
        return []
    if size > options.copied_parameters:
        base.notes.append(
            f"The model has {size:,} parameters: it was not copied to other precisions "
            f"(copied_parameters={options.copied_parameters:,})."
        )
        return []
    return precisions(
        subject, subject.model, base.retention, base.rows, base.validation, options.precisions
    )


def _fisher(base: OwnValues, options: Options) -> Resampled | None:
    """Bootstrap of the Fisher's samples, at the model after fine-tuning."""
    subject = base.subject
    if subject.config.objective == "adaptation" or not options.fisher_parts:
        return None
    _, after, said = subject.before_and_after()
    scorer = scorer_for(subject, model=after, rows=base.validation)
    values = subject.score(scorer, base.rows, "Values after fine-tuning")
    columns = fisher_columns(subject, scorer, base.rows, options.fisher_parts)
    base.notes.append(
        "The Fisher is resampled at the model after fine-tuning, where the retention term is not "
        f"zero. {said}"
    )
    if subject.fisher is not None:
        base.notes.append(
            "It is refitted for that, as the one given cannot be taken apart into samples; the one "
            "given may have more of them."
        )
    weight = subject.config.stability_weight
    weighted = RowColumns(weight * columns.sums, columns.tokens)
    return resample(
        weighted, values["adaptation"], subject.ratio, options.resamples, seed=subject.seed
    )


def fisher_parts(subject: Subject, parts: int) -> list[FisherDrift]:
    """``parts`` diagonal Fishers of the reference, with a share of the samples each.

    Rows are drawn without replacement as long as they last, labels anew for each sample. The mean
    of the parts is a Fisher with all samples.
    """
    given = subject.fisher_rows
    order = np.random.default_rng((subject.seed, 3)).permutation(len(given))
    size = -(-subject.fisher_samples // parts)
    tracker = subject.tracker("Fishers", parts)
    found = []
    for part in range(parts):
        rows = [given[order[(part * size + i) % len(order)]] for i in range(size)]
        found.append(
            subject.fit_fisher(
                rows,
                parameters=subject.config.parameters,
                seed=subject.seed + 1 + part,
                progress=False,
            )
        )
        tracker.report(part + 1)
    return found


def fisher_columns(
    subject: Subject, scorer: Scorer, rows: Sequence[Example], parts: int
) -> RowColumns:
    """Stability values, before lambda, against each of ``fisher_parts``.

    V is linear in the Fisher, so the mean of the columns is the value under the mean of the parts.

    Args:
        subject: whose reference is the Fisher's.
        scorer: at the model after fine-tuning.
        rows: to be valued.
        parts: number of Fishers.
    """
    sides = [part.direction(scorer.parameters) for part in fisher_parts(subject, parts)]
    found = [values_along(scorer, batch, sides) for batch in subject.batches(rows)]
    return RowColumns(np.concatenate(found), np.ones(parts, dtype=np.int64))


# --- what is said ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Findings:
    """Everything that was measured, and its presentation."""

    base: OwnValues
    options: Options
    resampled: Resampled
    sizes: list[dict[str, Any]]
    rearranged: list[Rearranged]
    by_batch: list[dict[str, Any]]
    fisher: Resampled | None

    def diagnosis(self) -> Diagnosis:
        subject = self.base.subject
        tables = {table.key: table for table in self.tables()}
        return Diagnosis(
            "stability",
            find("stability").question,
            self.answer(),
            tables=tuple(tables.values()),
            figures=draw_all(self.figures(tables)),
            notes=(*self.base.notes, *self.warnings()),
            settings={**subject.settings(), **asdict(self.options)},
        )

    def tables(self) -> list[Table]:
        return [
            self.decisions(),
            Table.of(
                "sources",
                "What each change does to values and decisions",
                self.sources(),
                "Flips: share of all tokens whose decision changes. Overlap: share of the kept "
                "tokens that are kept again. Noise: share of the decisions that more than "
                f"{100 * self.options.uncertain:g} % of the resamples reverse. Error: the "
                "largest difference over the largest sum of absolute terms of a value.",
            ),
            Table.of(
                "thresholds",
                "What a threshold for each batch adds",
                self.by_batch,
                "The same values; each batch keeps its own top share.",
            ),
            Table.of(
                "sizes",
                "Noise by the number of validation rows",
                self.sizes,
                "Subsets: of the rows there are. Drawn: more rows than there are, with "
                "replacement. Check: drawn from halves, to be compared with measured.",
            ),
            self.numbers(),
            self.examples(),
        ]

    def figures(self, tables: Mapping[str, Table]) -> list[Figure]:
        ratio, uncertain = self.base.subject.ratio, self.options.uncertain
        return [
            Figure(
                "scatter",
                "keep_probability",
                Table.of("keep_probability", "Keep share of each token", self.tokens()),
                "How sure each decision is under other validation rows",
                "A sharp step at the threshold means sure decisions; a long slope means that which "
                "tokens are kept there depends on which validation rows happened to be drawn. "
                "Between the level lines a decision counts as noise.",
                x="rank",
                y="keep share",
                series="decision",
                # Every resample keeps as many tokens, which is the sum of the shares.
                guides=(
                    Guide(float(self.resampled.keep_share.sum()) - 0.5, label="threshold"),
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
                tables["sources"],
                "What reverses decisions",
                "Each mark is a change that should not matter for a good decision. Look for marks "
                "near the dashed line, where decisions are as if drawn at random. Padding and "
                "neighbours in the batch belong at 0.",
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
                tables["sizes"],
                "How many validation rows sure decisions need",
                "The share of noise falls with the rows; where it flattens, more rows buy little. "
                "Believe what is drawn as far as the check agrees with the measured mark.",
                x="validation rows",
                y="noise",
                series="how",
                ylabel="share of noise decisions",
                scales=("log", "linear"),
                limits=(None, (0.0, None)),
            ),
        ]

    @property
    def state(self) -> NDArray[np.int64]:
        return self.resampled.state(self.options.uncertain)

    @property
    def distance(self) -> Numbers:
        return margins(self.base.total, self.base.subject.ratio)

    def share(self, flags: NDArray[np.bool_]) -> Estimate:
        return noise_share(flags, self.base.groups, self.base.subject.seed)

    def sources(self) -> list[dict[str, Any]]:
        """One record a change."""
        rows = len(self.base.validation)
        records = [
            {
                "source": "validation rows",
                "variant": f"bootstrap of {rows}",
                **self.resampled.agreement.record(),
                "noise": self.share(self.state == 1),
            }
        ]
        if self.fisher is not None:
            parts, samples = self.options.fisher_parts, self.base.subject.fisher_samples
            noise = self.share(self.fisher.state(self.options.uncertain) == 1)
            records.append(
                {
                    "source": "Fisher samples",
                    "variant": f"bootstrap of {samples} in {parts} parts",
                    **self.fisher.agreement.record(),
                    "noise": noise,
                }
            )
        records += [
            {
                "source": one.source,
                "variant": one.variant,
                **one.agreement.record(),
                "error": one.error,
                "tolerance": one.tolerance,
                "rounding only": one.passed,
            }
            for one in self.rearranged
        ]
        return records

    def decisions(self) -> Table:
        base, records = self.base, []
        for number, name in enumerate(DECISIONS):
            here = self.state == number
            records.append(
                {
                    "decision": name,
                    "tokens": int(here.sum()),
                    "share": self.share(here),
                    "distance": bootstrap(
                        np.median,
                        np.abs(self.distance[here]),
                        groups=base.groups[here],
                        seed=base.subject.seed,
                    ),
                }
            )
        return Table.of(
            "decisions",
            "Which decisions hold under other validation rows",
            records,
            "Distance: median distance of the values from the threshold, in interquartile ranges.",
        )

    def tokens(self) -> list[dict[str, Any]]:
        """One record a token, by falling value."""
        base, distance, state = self.base, self.distance, self.state
        return [
            {
                "rank": rank,
                "row": base.rows[int(base.groups[place])].row.index,
                "position": int(base.values["position"][place]),
                "value": float(base.total[place]),
                "margin": float(distance[place]),
                "keep share": float(self.resampled.keep_share[place]),
                "decision": DECISIONS[int(state[place])],
            }
            for rank, place in enumerate(np.argsort(-base.total, kind="stable"))
        ]

    def examples(self) -> Table:
        """The tokens whose decision is closest to a coin's, with their text."""
        base, shares = self.base, self.resampled.keep_share
        records = []
        for place in np.argsort(np.abs(shares - 0.5), kind="stable")[:12]:
            row = base.rows[int(base.groups[place])]
            position = int(base.values["position"][place])
            pieces = [piece.text for piece in base.subject.texts(row)]
            records.append(
                {
                    "row": row.row.index,
                    "position": position,
                    "text before": "".join(pieces[max(0, position - 12) : position])[-40:],
                    "token": pieces[position],
                    "keep share": float(shares[place]),
                    "margin": float(self.distance[place]),
                }
            )
        return Table.of("coins", "Decisions that a coin could have made", records)

    def answer(self) -> Answer:
        """How many decisions a redrawn validation set reverses."""
        noise = self.share(self.state == 1)
        return Answer(
            f"With {len(self.base.validation)} validation rows {percent(noise)} of the decisions "
            "to keep or drop a token are noise.",
            percent(noise),
            "of the decisions are reversed by more than "
            f"{100 * self.options.uncertain:g} % of the redrawn validation sets",
            "raise validation_batch_size, or drop only what is harmful beyond doubt "
            "(policy='harmless').",
        )

    def numbers(self) -> Table:
        """Where the noise lies."""
        noise, distance = self.state == 1, np.abs(self.distance)
        groups, seed = self.base.groups, self.base.subject.seed
        within = Estimate.undefined(0, "no decision is noise")
        if noise.any():
            within = noise_margin(distance, noise, groups, seed=seed)
        found = {"distance from the threshold within which 95 % of the noise lies": within}
        if within.defined:
            near = (distance[~noise] <= within.value).astype(np.float64)
            found["share of the sure decisions that lie there too"] = bootstrap(
                np.mean, near, groups=groups[~noise], seed=seed
            )
        return Table.of_numbers(found)

    def warnings(self) -> list[str]:
        """What must change values by rounding only and does not."""
        named = "; ".join(
            f"{one.source}, {one.variant}: {one.error:.1e} of the absolute terms, "
            f"{percent(one.agreement.flips)} of the decisions"
            for one in self.rearranged
            if one.source in ("batch", "padding") and not one.passed
        )
        if not named:
            return []
        return [
            f"WARNING: values depend on what they must not depend on ({named}). Look at the "
            "model's attention mask and position ids, or score one row a batch."
        ]
