"""Which keep or drop decisions are noise?

Every source of chance is changed by itself, and the decisions that change with it are counted:
other validation rows (bootstrap), other neighbours in the batch, other padding. The last two must
change values by no more than rounding; if they do more, that is a fault of the model's code or of
its attention mask, and it is said. How many samples a Fisher needs is asked by ``fisher``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.fidelity.arrangement import (
    Rearranged,
    Reference,
    composition,
    padding,
    thresholds,
)
from alphatoken.fidelity.decisions import DECISIONS, margins, noise_margin, percent
from alphatoken.fidelity.diagnosis import Answer, Diagnosis, Table
from alphatoken.fidelity.figures import Figure, Guide, draw_all
from alphatoken.fidelity.intervals import FEWEST, Estimate, bootstrap
from alphatoken.fidelity.options import CheckedOptions, option
from alphatoken.fidelity.own_values import FEWEST_ROWS, OwnValues
from alphatoken.fidelity.per_row import row_columns
from alphatoken.fidelity.registry import find
from alphatoken.fidelity.resampling import Resampled, noise_by_size, noise_share, resample
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
    shuffles: int = option(
        20, "pairs of row orders whose batch thresholds are compared", least=FEWEST
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
    rearranged = [*composition(reference), *padding(reference, options.padding)]
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
    )
    return found.diagnosis()


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
