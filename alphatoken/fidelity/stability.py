"""Which keep or drop decisions are noise?

Every source of chance is changed by itself, and the decisions that change with it are counted:
other validation rows (bootstrap), other samples of the Fisher, another precision, other neighbours
in the batch, other padding. The last two must change values by no more than rounding; if they do
more, that is a fault of the model's code or of its attention mask, and it is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.data import Example
from alphatoken.direction.drift import FisherDrift
from alphatoken.direction.fisher import fit_fisher
from alphatoken.errors import ConfigError, DataError, require_choice
from alphatoken.fidelity import stability_figures as figures
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
from alphatoken.fidelity.diagnosis import Diagnosis, Table
from alphatoken.fidelity.intervals import FEWEST, Estimate, bootstrap, few_rows
from alphatoken.fidelity.per_row import RowColumns, row_columns, values_along
from alphatoken.fidelity.registry import find
from alphatoken.fidelity.resampling import (
    FEWEST_ROWS,
    Resampled,
    noise_by_size,
    noise_share,
    resample,
)
from alphatoken.fidelity.running import run_as_module
from alphatoken.fidelity.subject import Subject
from alphatoken.fidelity.valuing import retention_term, scorer_for
from alphatoken.scorer import Scorer

__all__ = [
    "Options",
    "diagnose",
    "fisher_columns",
    "fisher_parts",
    "sample_notes",
    "validation_sample",
]

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Options:
    """What is changed, and how often."""

    resamples: int = field(
        default=500, metadata={"help": "bootstrap resamples of validation rows and of the Fisher"}
    )
    validation_rows: int = field(
        default=64, metadata={"help": "most validation rows; of more, so many are drawn"}
    )
    uncertain: float = field(
        default=0.05,
        metadata={"help": "a decision is noise if more than this share of resamples reverses it"},
    )
    fisher_parts: int = field(
        default=20,
        metadata={"help": "parts into which the Fisher's samples are split; 0 leaves it out"},
    )
    precisions: tuple[str, ...] = field(
        default=("float64", "float32", "bfloat16"),
        metadata={"help": "dtypes that are compared; the first is the reference"},
    )
    copied_parameters: int = field(
        default=500_000_000,
        metadata={"help": "a model with more parameters is not copied to other precisions"},
    )
    shuffles: int = field(
        default=20, metadata={"help": "pairs of row orders whose batch thresholds are compared"}
    )
    padding: int = field(default=16, metadata={"help": "padding positions added on a side"})

    def __post_init__(self) -> None:
        """Check every option."""
        least = {
            "resamples": 50,
            "validation_rows": FEWEST_ROWS,
            "copied_parameters": 0,
            "shuffles": FEWEST,
            "padding": 1,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}", got=repr(getattr(self, name)))
        if self.fisher_parts != 0 and self.fisher_parts < FEWEST:
            raise ConfigError(
                f"fisher_parts must be 0 or at least {FEWEST}",
                got=repr(self.fisher_parts),
                why="parts are drawn again from themselves; fewer say nothing of each other",
            )
        if not 0 < self.uncertain < 0.5:
            raise ConfigError(
                "uncertain must lie between 0 and 0.5",
                got=repr(self.uncertain),
                why="it is the share of resamples that may reverse a sure decision",
            )
        for name in self.precisions:
            require_choice("precisions", name, DTYPES)


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Change validation rows, Fisher, precision, batches and padding; count the decisions.

    Raises:
        InputError: too few tokens. DataError: too few validation rows. ConfigError: the objective
            has no validation side.
    """
    options = options or Options()
    base = _Base.of(subject, options)
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


# --- before anything is changed ----------------------------------------------------------------


@dataclass(frozen=True)
class _Base:
    """The values as the user's run makes them, at the model as given."""

    subject: Subject
    scorer: Scorer
    rows: list[Example]
    validation: list[Example]
    values: dict[str, NDArray[Any]]
    notes: list[str]

    @classmethod
    def of(cls, subject: Subject, options: Options) -> _Base:
        if subject.config.objective == "stability":
            raise ConfigError(
                "decisions can only depend on validation rows through a validation side",
                got="objective='stability'",
                remedy="objective='both' or 'adaptation'",
            )
        rows = subject.sample()
        subject.require_tokens(rows, 2 * FEWEST, "shares of decisions are estimated")
        validation, notes = validation_sample(subject, options.validation_rows)
        retention = retention_term(subject)
        scorer = scorer_for(subject, retention=retention, rows=validation)
        values = subject.score(scorer, rows, "Values")
        notes = [
            *sample_notes(
                subject,
                rows,
                len(values["total"]),
                ". All were ranked in one pool, unless it says otherwise.",
            ),
            *notes,
        ]
        if retention is None and subject.config.objective == "both":
            notes.append(
                "The model as given is its own reference, so its retention term is zero: these "
                "are adaptation values."
            )
        return cls(subject, scorer, rows, validation, values, notes)

    @property
    def total(self) -> Numbers:
        return self.values["total"]

    @property
    def groups(self) -> NDArray[Any]:
        return self.values["row"]

    @property
    def rest(self) -> Numbers:
        """What no validation row changes: lambda times the stability value."""
        stability = self.values.get("stability", np.zeros_like(self.total))
        return stability * self.subject.config.stability_weight


def sample_notes(subject: Subject, rows: Sequence[Example], valued: int, ending: str) -> list[str]:
    """Which tokens were valued, and what so few rows mean for the intervals."""
    every = sum(row.response_tokens for row in subject.train)
    return [
        f"{valued} of {every} response tokens were valued, in {len(rows)} of "
        f"{len(subject.train)} rows{ending}",
        *few_rows(len(rows)),
    ]


def validation_sample(subject: Subject, most: int) -> tuple[list[Example], list[str]]:
    """Validation rows that are used, at most ``most``, and what is to be said of them.

    Raises:
        DataError: fewer than ``FEWEST_ROWS`` with a response.
    """
    usable = [row for row in subject.validation if row.response_tokens]
    if len(usable) < FEWEST_ROWS:
        raise DataError(
            f"at least {FEWEST_ROWS} validation rows are needed",
            got=f"{len(usable)} with a response",
            why="rows are drawn again from themselves; fewer say nothing of each other",
            remedy="give more validation rows",
        )
    if len(usable) > most:
        chosen = sorted(np.random.default_rng(subject.seed).permutation(len(usable))[:most])
        said = (
            f"{most} of {len(usable)} validation rows were drawn, and stand for a run with {most}."
        )
        return [usable[place] for place in chosen], [said]
    if len(usable) < 16:
        return usable, [
            f"Only {len(usable)} validation rows: a bootstrap of so few understates the noise."
        ]
    return usable, []


# --- sources that need models of their own -----------------------------------------------------


def _precisions(base: _Base, options: Options) -> list[Rearranged]:
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
    retention = base.scorer.target.retention
    return precisions(
        subject,
        subject.model,
        retention if isinstance(retention, FisherDrift) else None,
        base.rows,
        base.validation,
        options.precisions,
    )


def _fisher(base: _Base, options: Options) -> Resampled | None:
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
    reference = subject.model if subject.reference is None else subject.reference
    given = [row for row in subject.train if row.response_tokens]
    order = np.random.default_rng((subject.seed, 3)).permutation(len(given))
    size = -(-subject.fisher_samples // parts)
    tracker = subject.tracker("Fishers", parts)
    found = []
    for part in range(parts):
        places = [order[(part * size + i) % len(order)] for i in range(size)]
        (batch,) = subject.batches([given[place] for place in places], size)
        found.append(
            fit_fisher(
                reference,
                batch,
                samples=size,
                layers=subject.config.layers,
                labels="token",
                parameters=subject.config.parameters,
                seed=subject.seed + 1 + part,
                batch_size=subject.batch_size,
                score_bias=subject.config.score_bias,
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

    base: _Base
    options: Options
    resampled: Resampled
    sizes: list[dict[str, Any]]
    rearranged: list[Rearranged]
    by_batch: list[dict[str, Any]]
    fisher: Resampled | None

    def diagnosis(self) -> Diagnosis:
        base, subject = self.base, self.base.subject
        tokens, sources = self.tokens(), self.sources()
        return Diagnosis(
            "stability",
            find("stability").question,
            tuple(self.answer()),
            tables=(
                self.decisions(),
                Table.of(
                    "sources",
                    "What each change does to values and decisions",
                    sources,
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
                self.examples(),
            ),
            figures=(
                figures.keep_probability(tokens, self.options.uncertain),
                figures.sources(sources, self.by_batch, subject.ratio),
                figures.sizes(self.sizes),
            ),
            notes=tuple(base.notes),
            settings={**subject.settings(), **asdict(self.options)},
        )

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

    # --- sentences -----------------------------------------------------------------------------

    def answer(self) -> list[str]:
        """Findings, most important first."""
        return [self._noise(), self._size(), self._margin(), self._others(), self._rounding()]

    def _noise(self) -> str:
        noise, rows = self.share(self.state == 1), len(self.base.validation)
        keep, drop = (int((self.state == number).sum()) for number in (0, 2))
        return (
            f"{percent(noise)} of the keep or drop decisions are noise at this validation size "
            f"({rows} rows): more than {100 * self.options.uncertain:g} % of the redrawn "
            f"validation sets reverse them. Of {len(self.state)} tokens, {keep} are surely kept "
            f"and {drop} surely dropped."
        )

    def _size(self) -> str:
        by = {(record["validation rows"], record["how"]): record["noise"] for record in self.sizes}
        rows = len(self.base.validation)
        said = []
        if (rows // 2, "subsets") in by:
            said.append(f"With {rows // 2} rows it is {percent(by[rows // 2, 'subsets'])}")
        more = by[2 * rows, "drawn"]
        said.append(f"with {2 * rows} it would be about {percent(more)}")
        sentence = "; ".join(said)
        if (rows, "check") in by:
            sentence += (
                f" (drawn from the {rows}; the same way, drawing {rows} from {rows // 2} gives "
                f"{percent(by[rows, 'check'])} where {percent(by[rows, 'measured'])} was measured)"
            )
        return sentence[0].upper() + sentence[1:] + "."

    def _margin(self) -> str:
        noise, distance = self.state == 1, np.abs(self.distance)
        if not noise.any():
            return "No decision is noise, however near to the threshold."
        within = noise_margin(distance, noise, self.base.groups, seed=self.base.subject.seed)
        if not within.defined:
            return f"Where the noise lies is {within}."
        near = bootstrap(
            np.mean,
            (distance[~noise] <= within.value).astype(np.float64),
            groups=self.base.groups[~noise],
            seed=self.base.subject.seed,
        )
        return (
            f"95 % of the noise lies within {within} interquartile ranges of the threshold; "
            f"{percent(near)} of the sure decisions lie there too."
        )

    def _others(self) -> str:
        said = []
        if self.fisher is not None:
            noise = self.share(self.fisher.state(self.options.uncertain) == 1)
            said.append(
                f"the sampling of the Fisher makes {percent(noise)} of the decisions noise after "
                "fine-tuning"
            )
        said += [
            f"{one.variant} changes {percent(one.agreement.flips)}"
            for one in self.rearranged
            if one.source == "precision"
        ]
        shuffled = [r for r in self.by_batch if "flips between two orders" in r]
        if shuffled:
            record = shuffled[0]
            said.append(
                f"with a threshold for each batch of {record['rows a batch']} rows, two orders of "
                f"the same rows differ in {percent(record['flips between two orders'])}"
            )
        sentence = "; ".join(said) or "no other source was looked at"
        return "Other sources of chance: " + sentence + "."

    def _rounding(self) -> str:
        must = [one for one in self.rearranged if one.source in ("batch", "padding")]
        bad = [one for one in must if not one.passed]
        if not bad:
            worst = max(must, key=lambda one: one.error)
            return (
                "Padding and neighbours in the batch change values by rounding only (largest error "
                f"{worst.error:.1e} of the absolute terms, {worst.tolerance:.0e} allowed)."
            )
        named = "; ".join(
            f"{one.source}, {one.variant}: {one.error:.1e} of the absolute terms, "
            f"{percent(one.agreement.flips)} of the decisions"
            for one in bad
        )
        return (
            f"WARNING: values depend on what they must not depend on ({named}). Look at the "
            "model's attention mask and position ids, or score one row a batch."
        )


if __name__ == "__main__":
    raise SystemExit(run_as_module("stability"))
