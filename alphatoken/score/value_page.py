"""The page of the values of a whole data set: which rows are odd, and why."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.score.meaning import Meaning
from alphatoken.score.page import (
    Column,
    Section,
    anchor_of,
    environment,
    number,
    render_page,
    table_html,
)
from alphatoken.score.summary import ValueSummary, mean_of
from alphatoken.score.token_kinds import BREAK, END, FIRST, brief_prompt
from alphatoken.score.values import COMPONENTS, LOSS, ScoredExample
from alphatoken.support.coloured import full_scale
from alphatoken.support.storage import write_text
from alphatoken.support.token_texts import visible

MOST_TOKENS = 12_000
"""Tokens shown in all rows together: keeps the page near one megabyte."""

MOST_TOKENS_A_ROW = 1_500
_PROMPT_SHOWN = 300
_END_TOKENS = 240  # of one of the lowest and highest rows on the first screen


def write_report(
    path: str | Path,
    summary: ValueSummary,
    *,
    title: str = "AlphaToken report",
    meaning: Meaning | None = None,
    trusted: Sequence[float] = (),
    selection: bool = False,
    about: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> Path:
    """Write the page, whole or not at all, and return its path.

    Args:
        path: the HTML file.
        summary: from :func:`alphatoken.score.summarise`.
        title: heading of the page.
        meaning: what the values say, and in which unit.
        trusted: mean values of the rows that are trusted, marked among those of all rows.
        selection: whether the page can show which tokens are kept.
        about: what was run, as a person would write it.
        settings: the options of the run.
        notes: sentences on how the values were computed.
        warnings: what was lost, or is probably wrong; they stand at the top.

    Raises:
        DataError: the file could not be written; an old one is intact.
    """
    meaning = meaning or Meaning()
    sections, data = _sections(summary, meaning, trusted, selection)
    html = render_page(
        title,
        meaning.lead,
        sections,
        notes=notes,
        warnings=warnings,
        about=about,
        settings=settings,
        data=data,
    )
    write_text(path, html)
    return Path(path)


def _sections(
    summary: ValueSummary, meaning: Meaning, trusted: Sequence[float], selection: bool
) -> tuple[list[Section], dict[str, Any]]:
    present, zero = _present(summary)
    described = [
        {"key": key, "name": name, "meaning": meaning.components.get(key, said)}
        for key, (name, said) in ((key, COMPONENTS[key]) for key in present)
    ]
    shown, left_out = shown_examples(summary.sample, present)
    sides = {anchor_of(end): end.capitalize() for end, rows in summary.row_ends().items() if rows}
    ends = {
        anchor_of(end): [shown_end(row, present) for _, row in rows]
        for end, rows in summary.row_ends().items()
    }
    # A row that is in the sample, or at two ends, counts once.
    outside = {one["row"]: one for side in ends.values() for one in side}
    every = [*shown, *(outside[row] for row in outside.keys() - {one["row"] for one in shown})]
    scales = {
        key: full_scale(value for one in every for value in one["values"][key]) for key in present
    }
    templates, losses = environment(), any("loss" in one for one in shown)
    overview = templates.get_template("overview.html.j2").render(
        histogram=row_histogram(summary.row_means, trusted),
        trusted=meaning.trusted,
        unit=meaning.unit,
        sides=sides,
    )
    rows = templates.get_template("rows.html.j2").render(
        components=described,
        scale=scales["total"],
        unit=meaning.unit,
        shown=len(shown),
        sequences=summary.sequences,
        left_out=left_out,
        zero=zero,
        losses=losses,
        selection=selection,
    )
    sections = [
        Section("overview", _title(meaning), html=overview),
        Section("rows", "The rows", html=rows),
        *_kinds(summary, meaning),
        *(_distributions(summary) if len(present) > 1 else []),
    ]
    data = {
        "components": described,
        "scales": scales,
        "unit": meaning.unit,
        "rate": meaning.rate,
        "after": meaning.after,
        "selection": selection,
        "examples": shown,
        "ends": ends,
    }
    return sections, data


def _title(meaning: Meaning) -> str:
    """Title of the rows at both ends: one-step values hardly tell odd rows from others."""
    return "Which rows are odd" if meaning.unit == "nats" else "Rows of lowest and highest value"


def _present(summary: ValueSummary) -> tuple[list[str], list[str]]:
    """Keys of the components to draw, and names of those that are 0 everywhere."""
    said = summary.components
    # A component that is zero everywhere is said to be so; drawing it would only take room.
    present = [
        key for key in said if key == "total" or said[key]["minimum"] or said[key]["maximum"]
    ]
    zero = [COMPONENTS[key][0] for key in said if key not in present]
    if "stability" not in present:  # then the total is the adaptation
        present = [key for key in present if key != "adaptation"]
    return present or ["total"], zero


# --- the rows in one picture ----------------------------------------------------------------------

_BINS = 40


def row_histogram(means: Sequence[float], trusted: Sequence[float] = ()) -> dict[str, Any] | None:
    """Bars over the mean values of rows, and where zero and the trusted rows lie; None of no row.

    ``bars`` has (count, height in per cent, sign) of each of equally wide bins, ``zero`` and
    ``marks`` are places from the left in per cent, None where 0 is outside. Far rows stand at the
    ends of the axis: ``outside`` counts those beyond :func:`_axis`, ``beyond`` the trusted ones
    further out than a quarter of its width, to the side ``where``.
    """
    every, others = np.asarray(means, float), np.asarray(trusted, float)
    if not len(every):
        return None
    low, high = _axis(every)
    own = np.clip(every, low, high)
    room = (high - low) / 4 or float(np.abs(others - low).max(initial=0.0))
    within = np.clip(others, low - room, high + room)
    left, right = (others < within).any(), (others > within).any()
    low, high = min([low, *within.tolist()]), max([high, *within.tolist()])
    if low == high:
        low, high = low - 1.0, high + 1.0
    edges: NDArray[Any] = np.linspace(low, high, _BINS + 1)
    if low < 0 <= high:  # 0 is the border of two bins, so that no bar has rows of both signs
        below = min(_BINS - 1, max(1, round(_BINS * -low / (high - low))))
        edges = np.arange(-below, _BINS - below + 1) * max(-low / below, high / (_BINS - below))
        # Rounding must not put the outermost rows outside.
        edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)
        low, high = float(edges[0]), float(edges[-1])
    counts, _ = np.histogram(own, edges)
    middles = (edges[:-1] + edges[1:]) / 2
    most = int(counts.max())
    return {
        "low": low,
        "high": high,
        "rows": len(own),
        "negative": int((own < 0).sum()),
        "bars": [
            (int(count), round(100 * int(count) / most, 1), "minus" if middle < 0 else "plus")
            for count, middle in zip(counts, middles, strict=True)
        ],
        "zero": round(-100 * low / (high - low), 2) if low < 0 <= high else None,
        "marks": [round(100 * float((x - low) / (high - low)), 2) for x in within],
        "outside": int((own != every).sum()),
        "beyond": int((others != within).sum()),
        "where": "out" if left and right else "left" if left else "right",
    }


def _axis(means: NDArray[np.float64]) -> tuple[float, float]:
    """Ends of an axis that a few far rows do not stretch: three quartile ranges off the middle.

    Where rows are on both sides of zero, so are the ends.
    """
    low, high = float(means.min()), float(means.max())
    first, third = np.percentile(means, [25, 75]).tolist()
    if first == third:
        return low, high
    below, reach = low < 0 <= high, 3 * (third - first)
    low, high = max(low, first - reach), min(high, third + reach)
    least = (high - low) / _BINS
    return (min(low, -least), max(high, least)) if below else (low, high)


# --- tables ---------------------------------------------------------------------------------------

_SPOKEN = {
    "number": "numbers", "word": "words", "space": "spaces", BREAK: "line breaks",
    FIRST: "first token of the answer", END: "end of the answer",
}  # fmt: skip


def _kinds(summary: ValueSummary, meaning: Meaning) -> list[Section]:
    if not summary.kinds:
        return []
    kinds = summary.kinds.values()
    means = [one["sum"] / one["count"] for one in kinds]
    unit = f" ({meaning.unit})" if meaning.unit else ""
    columns: list[Column] = [
        ("Kind", "words", [_SPOKEN.get(kind, kind) for kind in summary.kinds]),
        ("Tokens", "number", [number(one["count"]) for one in kinds]),
        (f"Mean value{unit}", "number", [number(mean, signed=True) for mean in means]),
        ("Sum", "number", [number(one["sum"], signed=True) for one in kinds]),
        ("Below zero", "number", [f"{one['negative'] / one['count']:.0%}" for one in kinds]),
    ]
    title = "Value by kind of token"
    return [Section("kinds", title, html=table_html(columns, title))]


def _distributions(summary: ValueSummary) -> list[Section]:
    said = summary.components.values()
    columns: list[Column] = [
        ("Component", "words", [COMPONENTS[key][0] for key in summary.components]),
        ("Mean", "number", [number(one["mean"], signed=True) for one in said]),
        ("Lowest", "number", [number(one["minimum"], signed=True) for one in said]),
        ("Highest", "number", [number(one["maximum"], signed=True) for one in said]),
        ("Positive", "number", [f"{one['positive']:.0%}" for one in said]),
    ]
    title = "Components"
    return [Section("distributions", title, html=table_html(columns, title))]


# --- examples -------------------------------------------------------------------------------------


def shown_examples(
    sample: Sequence[ScoredExample], keys: Sequence[str]
) -> tuple[list[dict[str, Any]], int]:
    """The examples as the page's script reads them, and the tokens left out of long ones.

    Components ``keys`` only; as many examples as fit the cap, at least one. Where not all fit, they
    are taken in a random order of a fixed seed, so that the end of a file is shown as well.
    """
    shown: dict[int, dict[str, Any]] = {}
    room, left_out = MOST_TOKENS, 0
    for place in random.Random(0).sample(range(len(sample)), len(sample)):
        example = sample[place]
        start, end = window(example)
        if shown and end - start > room:
            break
        room -= end - start
        left_out += len(example.tokens) - (end - start)
        shown[place] = shown_example(example, start, end, keys) | row_facts(example)
    return [shown[place] for place in sorted(shown)], left_out


def window(
    example: ScoredExample, most: int = MOST_TOKENS_A_ROW, prompt: int = _PROMPT_SHOWN
) -> tuple[int, int]:
    """The part of a long sequence to show: the end of its prompt, then the response."""
    length = len(example.tokens)
    if length <= most:
        return 0, length
    places = np.flatnonzero(example.response)
    first = int(places[0]) if places.size else 0
    start = max(0, first - prompt)
    return start, min(length, start + most)


def row_list(
    anchor: str, examples: Sequence[dict[str, Any]], key: str, full: float, meaning: Meaning
) -> dict[str, Any]:
    """Rows of a page that shows some, as its script draws them in the element of this anchor.

    Args:
        anchor: of the element.
        examples: by :func:`shown_example`, with what their heads say in ``said``.
        key: of the values that colour them.
        full: size of a value of full colour; see ``full_scale``.
        meaning: of the values.
    """
    return {
        "anchor": anchor,
        "examples": examples,
        "key": key,
        "full": full,
        "lead": meaning.lead,
        "unit": meaning.unit,
        "after": meaning.after,
    }


def shown_end(example: ScoredExample, keys: Sequence[str]) -> dict[str, Any]:
    """A row of lowest or highest value as the page's script reads it, the middle of a long one."""
    start, end = window(example, _END_TOKENS, _END_TOKENS // 4)
    return shown_example(example, start, end, keys) | row_facts(example)


def row_facts(example: ScoredExample) -> dict[str, Any]:
    """What rows are sorted by, and the line in their head that says it."""
    totals = np.asarray(example.values["total"], float)[example.response]
    if not len(totals):
        return {"said": "no response token", "mean": None, "negative": None}
    mean, negative = float(totals.mean()), float((totals < 0).mean())
    said = [
        f"mean {three_digits(mean, signed=True)}",
        f"sum {three_digits(float(totals.sum()), signed=True)}",
        f"{negative:.0%} below zero",
        f"{len(totals)} token{'s'[: len(totals) != 1]}",
    ]
    facts: dict[str, Any] = {"mean": mean, "negative": negative}
    if LOSS in example.values:
        facts["mean_loss"] = mean_of(example, LOSS)
        said.insert(2, f"loss {three_digits(facts['mean_loss'])}")
    return facts | {"said": " \u00b7 ".join(said)}


def three_digits(value: float, *, signed: bool = False) -> str:
    """Three digits, also where the last ones are 0: numbers below each other look alike.

    >>> three_digits(-2.0, signed=True), three_digits(85.04), three_digits(2.5e-7)
    ('−2.00', '85.0', '2.50e-07')
    """
    if not 1e-3 <= abs(value) < 1e3:
        return number(value, signed=signed)
    text = f"{abs(value):#.3g}".rstrip(".")
    return f"{'−' if value < 0 else '+' if signed else ''}{text}"


def shown_example(
    example: ScoredExample, start: int, end: int, keys: Sequence[str]
) -> dict[str, Any]:
    """Tokens ``start`` to ``end`` of an example as the page's script reads them."""
    response = example.response[start:end]
    tokens = [visible(token) for token in example.tokens[start:end]]
    shown = {
        "row": example.row,
        "place": example.place,
        "start": start,
        "length": len(example.tokens),
        "tokens": tokens,
        "response": "".join("1" if flag else "0" for flag in response),
        "briefs": _briefs(example, start, end),
        "kept": "".join("1" if flag else "0" for flag in example.kept[start:end]),
        # One number a response token; a prompt token has none.
        "values": {key: _rounded(example.values[key][start:end][response]) for key in keys},
    }
    if LOSS in example.values:
        shown["loss"] = _rounded(example.values[LOSS][start:end][response])
    return shown


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _briefs(example: ScoredExample, start: int, end: int) -> list[str]:
    """One line for each stretch of the shown tokens that is no response."""
    briefs, own = [], list[str]()
    for token, flag in zip(example.tokens[start:end], example.response[start:end], strict=True):
        if not flag:
            own.append(token)
        elif own:
            briefs.append(brief_prompt(own))
            own = []
    return [visible(brief) for brief in [*briefs, *([brief_prompt(own)] if own else [])]]
