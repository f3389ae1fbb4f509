"""Diagnostic of which tokens of a text are valued, and by which component.

Values are drawn over the text of chosen rows, normalised within each response; what the picture
suggests is then measured over a whole sample of rows: which kinds of tokens are kept, and which
component decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.data import Example
from alphatoken.diagnose import CheckedOptions
from alphatoken.diagnose.diagnosis import Diagnosis, Drawing, Table
from alphatoken.diagnose.figures import Figure, Guide
from alphatoken.diagnose.statistics import FEWEST, Estimate, Numbers, bootstrap, kept
from alphatoken.diagnose.subject import Subject, conclude
from alphatoken.diagnose.valuing import retention_term, scorer_for
from alphatoken.errors import ConfigError, first_few
from alphatoken.score.page import colour_of
from alphatoken.score.page import number as written
from alphatoken.score.token_kinds import KINDS, kind_of
from alphatoken.score.values import COMPONENTS
from alphatoken.support.options import option
from alphatoken.support.token_texts import visible

Columns = Mapping[str, NDArray[Any]]
"""Of each valued token its ``row`` of the pool, its ``position`` there, whether it is ``kept``,
and its ``total`` and components as they enter the total, each (n,)."""

_SPLIT = ("adaptation_direct", "adaptation_causal", "stability_direct", "stability_causal")
_SIDES = ("adaptation", "stability")


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Options of the diagnostic ``heatmap``."""

    rows: tuple[int, ...] = option(
        (),
        "rows to show, by their place in the training file, from 0; default: the first sampled",
        at_least=0,
    )
    examples: int = option(3, "number of rows, if none are named", at_least=1)
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


# --- numbers -------------------------------------------------------------------------------------


def parts_of(columns: Mapping[str, NDArray[Any]], weight: float) -> dict[str, Numbers]:
    """Total, then the four components, or the two sides where the estimator has no split."""
    names = [key for key in _SPLIT if key in columns] or [key for key in _SIDES if key in columns]
    return {"total": columns["total"]} | {
        key: columns[key] * (weight if key.startswith("stability") else 1.0) for key in names
    }


def _components(columns: Columns) -> list[str]:
    return [key for key in (*_SPLIT, *_SIDES) if key in columns]


def shares_of(columns: Columns) -> dict[str, Estimate]:
    """Share of each component in the summed magnitudes of all components, over all tokens."""
    names = _components(columns)

    def share(place: int, *parts: Numbers) -> float:
        sizes = [float(np.abs(part).sum()) for part in parts]
        return sizes[place] / sum(sizes) if sum(sizes) > 0 else np.nan

    parts = [columns[key] for key in names]
    return {
        key: bootstrap(partial(share, place), *parts, groups=columns["row"])
        for place, key in enumerate(names)
    }


def kinds_of(columns: Columns, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Number and kept share of the tokens of each kind."""
    kinds = np.array([kind_of(text) for text in texts])
    return [
        {
            "kind": kind,
            "tokens": int(own.sum()),
            "kept": bootstrap(np.mean, columns["kept"][own], groups=columns["row"][own]),
        }
        for kind in KINDS
        if (own := kinds == kind).any()
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
    rows = [subject.train[place] for place in pool]
    subject.require_tokens(rows, FEWEST, "shares and agreement are statistics")
    columns = _columns(subject, rows)
    words = [subject.texts(row) for row in rows]
    own = [words[row][at] for row, at in zip(columns["row"], columns["position"], strict=True)]
    numbers = [subject.train[place].row.index for place in shown]
    tokens = _tokens_table(columns, own, dict(zip(numbers, map(pool.index, shown), strict=True)))
    kinds = Table.of("heatmap-kinds", "Kinds of tokens", kinds_of(columns, own))
    parts = [{"component": key, "share": share} for key, share in shares_of(columns).items()]
    note = "Of the summed magnitudes; stability times lambda."
    shares = Table.of("heatmap-shares", "What the values are made of", parts, note)
    drawn = [_row_figure(subject, options, place, pool, columns, tokens) for place in shown]
    return conclude(
        "heatmap",
        subject,
        _conclusion(kinds, subject.ratio),
        [kinds, shares, tokens],
        [*drawn, _kinds_figure(kinds, subject.ratio)],
        valued=rows,
        notes=_notes(subject, columns),
        settings=asdict(options) | {"rows": ", ".join(map(str, numbers))},
    )


def _chosen(subject: Subject, options: Options) -> tuple[list[int], list[int]]:
    """Rows that are shown, and the pool in which tokens are ranked, both by place in ``train``."""
    # Two rows may be equal: their identity tells which of the training rows was drawn.
    numbers = {id(row): place for place, row in enumerate(subject.train)}
    sampled = [numbers[id(row)] for row in subject.sample()]
    drawn = {row.row.index: place for place, row in enumerate(subject.train) if row.response_tokens}
    if missing := [row for row in options.rows if row not in drawn]:
        raise ConfigError(
            "a row to show was not drawn, or has no response token",
            got=f"--rows {missing[0]}",
            remedy="rows are numbered as in the training file, such as "
            f"{first_few([*map(str, drawn)], 5)}; --train_rows draws more of them",
        )
    shown = list(dict.fromkeys(drawn[row] for row in options.rows)) or sampled[: options.examples]
    return shown, sorted({*sampled, *shown})


def _columns(subject: Subject, rows: Sequence[Example]) -> Columns:
    scores = subject.score(scorer_for(subject, retention=retention_term(subject)), rows)
    parts = parts_of(scores, subject.config.stability_weight)
    return {
        "row": scores["row"],
        "position": scores["position"],
        "kept": kept(parts["total"], subject.ratio),
        **parts,
    }


# --- text in coloured boxes: letters of equal width, written as SVG -------------------------------


def normalised(values: Numbers) -> Numbers:
    """``v / max |v|``: in [-1, 1], sign and zero kept; zeros stay where all are zero."""
    largest = float(np.abs(values).max()) if len(values) else 0.0
    return values / largest if largest > 0 else np.zeros_like(values)


def ranged(values: Numbers) -> Numbers:
    """``(v - min) / (max - min)``: in [0, 1], order kept; zeros where all values are equal."""
    low, high = _ends(values)
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def _ends(values: Numbers) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)


Piece = tuple[int, int, int, str]
"""A part of a token on one line: number of the token, line, column, and its letters."""


def laid_out(tokens: Sequence[str], columns: int, lines: int) -> tuple[list[Piece], int]:
    """Break tokens into lines of ``columns`` letters; the pieces, and how many tokens were shown.

    A line break in a token ends its line. Tokens that would need more than ``lines`` lines are
    left out, the rest of their row too.
    """
    # Breaks anywhere: every letter takes one place, so that boxes stay in line.
    pieces: list[Piece] = []
    line = column = 0
    for number, token in enumerate(tokens):
        own: list[Piece] = []
        for part, text in enumerate(token.split("\n")):
            if part:
                line, column = line + 1, 0
            while text:
                if column == columns:
                    line, column = line + 1, 0
                room = text[: columns - column]
                own.append((number, line, column, room))
                column += len(room)
                text = text[len(room) :]
        if own and own[-1][1] >= lines:
            return pieces, number
        pieces += own
    return pieces, len(tokens)


_LETTER, _LINE, _GAP, _HEAD = 6.0, 16.0, 24.0, 28.0  # pixels
_COLUMNS = 72
_PROMPT = 2 * _COLUMNS  # letters of the prompt that are shown
_LINES = 16  # of text in a panel; more is cut, and the title says so

_SIGNED = (
    "Blue: training on the token lowers the objective; orange: it does harm; full colour is the "
    "largest absolute value of the response in that panel. Look for which words carry a component, "
    "and where two panels disagree in sign."
)
_RELATIVE = (
    "Values are normalised within the response, panel by panel: white is its lowest, full blue its "
    "highest value, so that darker is higher. Look for which words carry a component."
)


def heatmap_figure(
    place: str,
    prompt: str,
    tokens: Sequence[str],
    panels: Mapping[str, Numbers],
    kept: NDArray[np.bool_],
    data: Table,
    *,
    relative: bool = False,
) -> Drawing:
    """Every panel of one row, two beside each other.

    Args:
        place: how a person finds the row.
        prompt: the text before the response.
        tokens: (n) text that each response token adds, made visible.
        panels: title -> (n,) values, normalised within this response; the first is the total.
        kept: (n,) True where the selection keeps the token.
        data: what is drawn.
        relative: whether colours run from the lowest value of the response to its highest, as the
            paper's do, instead of telling signs.
    """
    prompt = prompt.replace("\n", " ")
    prompt = prompt if len(prompt) <= _PROMPT else "\u2026" + prompt[1 - _PROMPT :]
    above = [prompt[at : at + _COLUMNS] for at in range(0, len(prompt), _COLUMNS)]
    pieces, shown = laid_out(tokens, _COLUMNS, _LINES)
    cut = "" if shown == len(tokens) else f"; first {shown} of {len(tokens)} tokens"
    lines = pieces[-1][1] + 1 if pieces else 1
    drawn, top, height = [_written(_GAP, _LINE, place)], 2 * _LINE, 0.0
    for number, (title, values) in enumerate(panels.items()):
        left = _GAP + number % 2 * (_COLUMNS * _LETTER + _GAP)
        if number and not number % 2:
            top, above = top + height, []  # the first two panels show the prompt
        height = _HEAD + _LINE * (lines + len(above))
        low, high = _ends(values)
        scale = f"full colour \u00b1{written(max(abs(low), abs(high)))}"
        scale = f"light {written(low)}, dark {written(high)}" if relative else scale
        drawn.append(_written(left, top + 0.7 * _LINE, f"{title}   ({scale}{cut})"))
        colours = ranged(values) if relative else normalised(values)
        drawn += _panel(pieces, colours, kept, above, left, top + _HEAD)
    width, height = 2 * _COLUMNS * _LETTER + 3 * _GAP, top + height
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="monospace" font-size="10">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(drawn)}</svg>\n'
    )
    return Drawing(
        data.key,
        f"Values over the text of {place}",
        f"{_RELATIVE if relative else _SIGNED} Underlined tokens are kept.",
        data,
        svg,
        f"Text of {place} with each response token coloured by its value, in panels: "
        f"{', '.join(panels)}.",
    )


def _written(x: float, y: float, text: str, colour: str = "#111") -> str:
    """Letters of equal width, whichever font there is; spaces count."""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" xml:space="preserve" '
        f'textLength="{_LETTER * len(text):g}" lengthAdjust="spacingAndGlyphs">'
        f"{escape(text)}</text>"
    )


def _panel(
    pieces: Sequence[Piece],
    colours: Numbers,
    kept: NDArray[np.bool_],
    above: Sequence[str],
    left: float,
    top: float,
) -> Iterator[str]:
    """The lines ``above`` in grey, and every piece of a token in its box."""
    for part in above:
        yield _written(left, top + 0.7 * _LINE, part, "#6b7280")
        top += _LINE
    for token, line, column, text in pieces:
        x, y, width = left + _LETTER * column, top + _LINE * line, _LETTER * len(text)
        fill = "".join(f"{round(255 * channel):02x}" for channel in colour_of(colours[token]))
        box = f'x="{x:g}" y="{y:g}" width="{width:g}"'
        yield f'<rect {box} height="{_LINE - 2:g}" fill="#{fill}"/>'
        if kept[token]:
            under = f'x="{x:g}" y="{y + _LINE - 3:g}" width="{width:g}"'
            yield f'<rect {under} height="1" fill="#222"/>'
        if not text.isspace():
            yield _written(x, y + 0.7 * _LINE, text)


# --- one row --------------------------------------------------------------------------------------


def _row_figure(
    subject: Subject,
    options: Options,
    place: int,
    pool: Sequence[int],
    columns: Columns,
    tokens: Table,
) -> Drawing:
    """The row at ``place`` of ``train`` with its panels: the total and the components."""
    own, number = columns["row"] == pool.index(place), subject.train[place].row.index
    # Components that are 0 for every token of the pool say nothing; one alone is the total.
    present = [key for key in _components(columns) if columns[key].any()]
    parts = {COMPONENTS[key][0]: columns[key][own] for key in present}
    total = {f"Total, {subject.config.estimator}": columns["total"][own]}
    if len(parts) < 2 or options.panels == "total":
        parts = total
    elif options.panels == "all":
        parts = total | parts
    example = subject.train[place]
    texts = [visible(token) for token in subject.texts(example)]
    at = columns["position"][own]
    rows = tuple(cells for cells in tokens.rows if cells[0] == number)
    return heatmap_figure(
        f"row {number} ({example.row.place})",
        "".join(texts[: at[0]]),
        [texts[position] for position in at],
        parts,
        columns["kept"][own],
        Table(
            f"heatmap-row-{number}", f"Tokens of row {number}", tokens.columns, rows, tokens.note
        ),
        relative=options.colours == "relative",
    )


def _tokens_table(columns: Columns, words: Sequence[str], shown: Mapping[int, int]) -> Table:
    """Each token of the rows shown: their numbers in the training file -> in the pool."""
    records: list[dict[str, Any]] = []
    for number, row in shown.items():
        own = np.flatnonzero(columns["row"] == row)
        scaled = normalised(columns["total"][own])
        records += [
            {"row": number, "position": int(columns["position"][token]), "token": words[token]}
            | {key: float(columns[key][token]) for key in ("total", *_components(columns))}
            | {"normalised": colour, "kept": bool(columns["kept"][token])}
            for token, colour in zip(own.tolist(), scaled.tolist(), strict=True)
        ]
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
    shares = [
        (str(one["kind"]), kinds.estimate(i, "kept")) for i, one in enumerate(kinds.records())
    ]
    unlike = [(kind, kept) for kind, kept in shares if kept.low > ratio or kept.high < ratio]
    if not unlike:
        return "No kind of token is clearly kept more or less often than the others."
    kind, kept = max(unlike, key=lambda one: abs(one[1].value - ratio))
    return (
        f"What is valued {'most' if kept.value > ratio else 'least'}: {kind}, of which {kept} are "
        f"kept, where {ratio:g} of all are."
    )


def _notes(subject: Subject, columns: Columns) -> list[str]:
    notes = ["The same colour in two panels is not the same value: each has its own scale."]
    if not any(columns[key].any() for key in _components(columns) if "stability" in key):
        notes.append(
            "Stability is zero for every token: it is not asked for, or the weights are those of "
            "the reference. Give the model before fine-tuning as --reference."
        )
    if subject.config.estimator in ("label", "path"):
        notes.append(f"{subject.config.estimator} has one value, not a direct and a causal part.")
    if subject.tokenizer is None:
        notes.append("There is no tokenizer: tokens are shown by number.")
    return notes
