"""Diagnostic of which tokens of a text are valued, and by which component.

Values are drawn over the text of chosen rows, normalised within each response; what the picture
suggests is then measured over a whole sample of rows: which kinds of tokens are kept, and which
component decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.certificate.metrics import kept
from alphatoken.data import Example
from alphatoken.errors import ConfigError
from alphatoken.fidelity.diagnosis import Diagnosis, Drawing, Table
from alphatoken.fidelity.figures import Figure, Guide
from alphatoken.fidelity.intervals import FEWEST, Estimate, bootstrap
from alphatoken.fidelity.options import CheckedOptions, option
from alphatoken.fidelity.result import conclude
from alphatoken.fidelity.subject import Subject
from alphatoken.fidelity.token_text import KINDS, heatmap_figure, kind_of, normalised
from alphatoken.fidelity.valuing import retention_term, scorer_for
from alphatoken.score.values import COMPONENTS, visible

__all__ = ["Options", "Valued", "diagnose", "kinds_of", "shares_of"]

Numbers = NDArray[np.float64]
Mask = NDArray[np.bool_]

_SPLIT = ("adaptation_direct", "adaptation_causal", "stability_direct", "stability_causal")
_SIDES = ("adaptation", "stability")
_NAMES = {component.key: component.name for component in COMPONENTS}


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Options of the diagnostic ``heatmap``."""

    rows: tuple[int, ...] = option(
        (), "training rows to show, from 0; default: the first sampled", least=0
    )
    examples: int = option(3, "number of rows, if none are named", least=1)
    colours: str = option(
        "signed",
        "signed (blue helps, orange harms) or relative (the paper's: from the lowest value of the "
        "response to its highest, darker is higher)",
        choices=("signed", "relative"),
    )
    panels: str = option(
        "all",
        "parts to draw of each row: total (the paper's final value), components, or all",
        choices=("all", "total", "components"),
    )


@dataclass(frozen=True)
class Valued:
    """The pool: rows, and the values of their n response tokens.

    Attributes:
        places: number of each row among the training rows.
        rows: the rows.
        belongs: (n,) which of them a token belongs to.
        position: (n,) its index there.
        columns: component -> (n,) as it enters the total (lambda applied); "total" first.
        kept: (n,) by the total.
    """

    places: Sequence[int]
    rows: Sequence[Example]
    belongs: NDArray[np.int64]
    position: NDArray[np.int64]
    columns: Mapping[str, Numbers]
    kept: Mask

    @property
    def parts(self) -> list[str]:
        """The components that add up to the total."""
        return [key for key in self.columns if key != "total"]


# --- numbers -------------------------------------------------------------------------------------


def parts_of(columns: Mapping[str, NDArray[Any]], weight: float) -> dict[str, Numbers]:
    """Total, then the four components, or the two sides where the estimator has no split."""
    names = [key for key in _SPLIT if key in columns] or [key for key in _SIDES if key in columns]
    return {"total": columns["total"]} | {
        key: columns[key] * (weight if key.startswith("stability") else 1.0) for key in names
    }


def shares_of(valued: Valued) -> dict[str, Estimate]:
    """Share of each component in the summed magnitudes of all components, over all tokens."""
    columns = [valued.columns[key] for key in valued.parts]

    def share(place: int) -> Estimate:
        def of(*parts: Numbers) -> float:
            sizes = [float(np.abs(part).sum()) for part in parts]
            return sizes[place] / sum(sizes) if sum(sizes) > 0 else np.nan

        return bootstrap(of, *columns, groups=valued.belongs)

    return {key: share(place) for place, key in enumerate(valued.parts)}


def kinds_of(valued: Valued, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Number and kept share of the tokens of each kind."""
    kinds = np.array([kind_of(text) for text in texts])
    return [
        {
            "kind": kind,
            "tokens": int((kinds == kind).sum()),
            "kept": bootstrap(
                np.mean, valued.kept[kinds == kind], groups=valued.belongs[kinds == kind]
            ),
        }
        for kind in KINDS
        if (kinds == kind).any()
    ]


# --- the diagnostic ------------------------------------------------------------------------------


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Values over the text of chosen rows, and what they add up to over a sample.

    Raises:
        ConfigError: a row that does not exist or has no response; matplotlib is missing.
        InputError: too few response tokens in the sample.
    """
    options = options or Options()
    shown, pool = _chosen(subject, options)
    subject.require_tokens(
        [subject.train[place] for place in pool], FEWEST, "shares and agreement are statistics"
    )
    valued = _valued(subject, pool)
    words = [subject.texts(row) for row in valued.rows]
    own = [words[row][at] for row, at in zip(valued.belongs, valued.position, strict=True)]
    tokens = _tokens_table(valued, own, shown)
    kinds = Table.of("heatmap-kinds", "Kinds of tokens", kinds_of(valued, own))
    parts = [{"component": key, "share": share} for key, share in shares_of(valued).items()]
    note = "Of the summed magnitudes; stability times lambda."
    shares = Table.of("heatmap-shares", "What the values are made of", parts, note)
    drawn = [_row_figure(valued, subject, options, tokens, place) for place in shown]
    return conclude(
        "heatmap",
        subject,
        _conclusion(kinds, subject.ratio),
        [kinds, shares, tokens],
        [*drawn, _kinds_figure(kinds, subject.ratio)],
        valued=valued.rows,
        notes=_notes(subject, valued),
        settings=asdict(options) | {"rows": ", ".join(map(str, shown))},
    )


def _chosen(subject: Subject, options: Options) -> tuple[list[int], list[int]]:
    """Rows that are shown, and the pool in which tokens are ranked, both as training rows."""
    numbers = {id(row): place for place, row in enumerate(subject.train)}
    sampled = [numbers[id(row)] for row in subject.sample()]
    for place in options.rows:
        if place >= len(subject.train) or not subject.train[place].response_tokens:
            raise ConfigError(
                "a row to show does not exist, or has no response token",
                got=f"--rows {place}",
                remedy=f"rows are numbered from 0 to {len(subject.train) - 1}",
            )
    shown = list(dict.fromkeys(options.rows)) or sampled[: options.examples]
    return shown, sorted({*sampled, *shown})


def _valued(subject: Subject, pool: Sequence[int]) -> Valued:
    """Values of the pool."""
    rows = [subject.train[place] for place in pool]
    found = subject.score(scorer_for(subject, retention=retention_term(subject)), rows)
    columns = parts_of(found, subject.config.stability_weight)
    return Valued(
        pool,
        rows,
        found["row"],
        found["position"],
        columns,
        kept(columns["total"], subject.ratio),
    )


# --- text -----------------------------------------------------------------------------------------


def _row_figure(
    valued: Valued, subject: Subject, options: Options, tokens: Table, place: int
) -> Drawing:
    """One row with its panels: the total, and the components where they are several.

    A component that is 0 is left out, and one alone is the total.
    """
    row = list(valued.places).index(place)
    example, own = valued.rows[row], valued.belongs == row
    parts = {_NAMES[key]: valued.columns[key] for key in valued.parts if valued.columns[key].any()}
    total = {f"Total, {subject.config.estimator}": valued.columns["total"]}
    if len(parts) < 2 or options.panels == "total":
        parts = total
    elif options.panels == "all":
        parts = total | parts
    texts = [visible(token) for token in subject.texts(example)]
    at = valued.position[own]
    cells = tuple(cells for cells in tokens.rows if cells[0] == place)
    return heatmap_figure(
        f"row {place} ({example.row.place})",
        "".join(texts[: at[0]]),
        [texts[position] for position in at],
        {title: values[own] for title, values in parts.items()},
        valued.kept[own],
        Table(f"heatmap-row-{place}", f"Tokens of row {place}", tokens.columns, cells, tokens.note),
        relative=options.colours == "relative",
    )


def _tokens_table(valued: Valued, words: Sequence[str], shown: Sequence[int]) -> Table:
    """Each token of the rows shown, with its components as they enter the total."""
    records = []
    for place in shown:
        row = list(valued.places).index(place)
        own = np.flatnonzero(valued.belongs == row)
        scaled = normalised(valued.columns["total"][own])
        for token, colour in zip(own.tolist(), scaled.tolist(), strict=True):
            record = {"row": place, "position": int(valued.position[token]), "token": words[token]}
            record |= {key: float(values[token]) for key, values in valued.columns.items()}
            record |= {"normalised": colour, "kept": bool(valued.kept[token])}
            records.append(record)
    note = "normalised: total over the largest absolute total of the response."
    return Table.of("heatmap-tokens", "Tokens of the rows shown", records, note)


def _kinds_figure(kinds: Table, ratio: float) -> Figure:
    return Figure(
        "bars",
        "heatmap-kinds-figure",
        kinds,
        "Which kinds of tokens are kept",
        f"Dashed: {ratio:g}, the share of all tokens. Look for intervals that do not touch it. A "
        "kind without a mark has too few tokens.",
        x="kept",
        y="kind",
        guides=(Guide(ratio),),
        xlabel="share kept",
        limits=((-0.02, 1.02), None),
    )


def _conclusion(kinds: Table, ratio: float) -> str:
    """The kind of token that is kept most clearly more, or less, often than all tokens are."""
    found = [(str(one["kind"]), kinds.estimate(i, "kept")) for i, one in enumerate(kinds.records())]
    unlike = [(kind, kept) for kind, kept in found if kept.low > ratio or kept.high < ratio]
    if not unlike:
        return "No kind of token is clearly kept more or less often than the others."
    kind, kept = max(unlike, key=lambda one: abs(one[1].value - ratio))
    return (
        f"What is valued {'most' if kept.value > ratio else 'least'}: {kind}, of which {kept} are "
        f"kept, where {ratio:g} of all are."
    )


def _notes(subject: Subject, valued: Valued) -> list[str]:
    notes = ["The same colour in two panels is not the same value: each has its own scale."]
    if not any(valued.columns[key].any() for key in valued.parts if "stability" in key):
        notes.append(
            "Stability is zero for every token: it is not asked for, or the weights are those of "
            "the reference. Give the model before fine-tuning as --reference."
        )
    if subject.config.estimator in ("label", "path"):
        notes.append(f"{subject.config.estimator} has one value, not a direct and a causal part.")
    if subject.tokenizer is None:
        notes.append("There is no tokenizer: tokens are shown by number.")
    return notes
