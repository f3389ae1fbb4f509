"""The page of scored sequences, or sections of another page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken.score.page import Column, Section, ShownTable, environment, number, render_page
from alphatoken.score.statistics import Extreme, ValueSummary
from alphatoken.score.values import COMPONENTS, ScoredExample, visible
from alphatoken.support.storage import write_text

__all__ = ["setting_tiles", "shown_example", "shown_examples", "window", "write_report"]

MOST_TOKENS = 12_000
"""Tokens shown in all heatmaps together: keeps the page near one megabyte."""

MOST_TOKENS_A_ROW = 1_500
_PROMPT_SHOWN = 300

_HEADER = {
    "model_name_or_path": "model", "policy": "policy", "estimator": "estimator",
    "layers": "layers scored", "parameters": "parameters valued",
    "last_loss": "training loss of the last log",
}  # fmt: skip
"""Settings that stand at the top of the page -> what they are called there."""

_LEAD = (
    "Value of each response token: positive (blue) says that a small step on it lowers the "
    "validation objective or keeps what the model knew; negative (orange) says the opposite. It is "
    "no verdict on the token."
)


def write_report(
    path: str | Path,
    summary: ValueSummary,
    *,
    title: str = "AlphaToken report",
    settings: Mapping[str, object] | None = None,
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> Path:
    """Write the page, whole or not at all, and return its path.

    Args:
        path: the HTML file.
        summary: from :func:`alphatoken.score.summarise`.
        title: heading of the page.
        settings: what was run, shown as a table.
        notes: sentences a reader must know before trusting the numbers.
        warnings: what is probably wrong, shown apart from the notes.

    Raises:
        DataError: the file could not be written; an old one is intact.
    """
    settings = settings or {}
    tiles = [
        (number(summary.sequences), "sequences"),
        (number(summary.response_tokens), "response tokens valued"),
        (_share(summary), f"kept by the selection, {number(summary.kept_tokens)} tokens"),
        *setting_tiles(settings),
    ]
    sections, data = _value_sections(summary)
    html = render_page(
        title,
        _LEAD,
        sections,
        tiles=tiles,
        notes=notes,
        warnings=warnings,
        settings=settings,
        data=data,
    )
    write_text(path, html)
    return Path(path)


def setting_tiles(settings: Mapping[str, object]) -> list[tuple[str, str]]:
    """The settings that stand at the top of a page, each with its name there."""
    linears = settings.get("parameters", "linears") == "linears"
    hidden = {"parameters" if linears else "layers"}
    if settings.get("estimator") == "walk":  # all trainable parameters take part
        hidden = {"parameters", "layers"}
    shown = {key: str(settings[key]) for key in _HEADER if key in settings and key not in hidden}
    if model := shown.get("model_name_or_path"):
        shown["model_name_or_path"] = Path(model).name or model  # a long path breaks in words
    return [(text, _HEADER[key]) for key, text in shown.items()]


def _share(summary: ValueSummary) -> str:
    tokens = summary.response_tokens
    return f"{summary.kept_tokens / tokens:.1%}" if tokens else "none"


def _value_sections(summary: ValueSummary) -> tuple[list[Section], dict[str, Any]]:
    """Sections of a page about values, and the data for its script."""
    said = {one.key: one for one in summary.components}
    components = [component for component in COMPONENTS if component.key in said]
    # A component that is zero everywhere is said to be so; drawing it would only take room.
    present = [
        c for c in components if c.key == "total" or said[c.key].minimum or said[c.key].maximum
    ]
    zero = [c.name for c in components if c not in present]
    if not any(c.key == "stability" for c in present):  # then the total is the adaptation
        present = [c for c in present if c.key != "adaptation"]
    shown, left_out = shown_examples(summary.sample, [c.key for c in present])
    heatmaps = environment().get_template("heatmap.html.j2")
    html = heatmaps.render(
        components=present,
        shown=len(shown),
        sequences=summary.sequences,
        left_out=left_out,
        zero=zero,
    )
    sections = [
        Section("heatmaps", "Values over the text", html=html),
        _distributions(summary),
        _extremes("Highest", summary.highest),
        _extremes("Lowest", summary.lowest),
    ]
    described = [{"key": c.key, "name": c.name, "meaning": c.meaning} for c in present]
    return sections, {"components": described, "examples": shown}


# --- tables ---------------------------------------------------------------------------------------


def _distributions(summary: ValueSummary) -> Section:
    names = {component.key: component.name for component in COMPONENTS}
    said = summary.components
    columns = [
        Column("Component", [names[one.key] for one in said], "words"),
        Column("Mean", [number(one.mean, signed=True) for one in said]),
        Column("Lowest", [number(one.minimum, signed=True) for one in said]),
        Column("Highest", [number(one.maximum, signed=True) for one in said]),
        Column("Positive", [f"{one.positive:.0%}" for one in said]),
    ]
    table = ShownTable("distributions-table", "", columns)
    return Section("distributions", "Distributions", tables=[table])


def _extremes(side: str, tokens: Sequence[Extreme]) -> Section:
    columns = [
        Column("Total", [number(one.values["total"], signed=True) for one in tokens]),
        Column("In its context", [_in_context(one) for one in tokens], "html"),
        Column("Where", [f"{one.place}, token {one.position}" for one in tokens], "words"),
        Column("Kept", ["yes" if one.kept else "no" for one in tokens], "words"),
    ]
    table = ShownTable(f"{side.lower()}-table", "", columns)
    return Section(side.lower(), f"{side} tokens", tables=[table])


def _in_context(one: Extreme) -> str:
    before, token, after = (escape(visible(text)) for text in (one.before, one.token, one.after))
    side = "plus" if one.values["total"] >= 0 else "minus"
    return f'{before}<mark class="{side}">{token}</mark>{after}'


# --- examples -------------------------------------------------------------------------------------


def shown_examples(
    sample: Sequence[ScoredExample], keys: Sequence[str]
) -> tuple[list[dict[str, Any]], int]:
    """The examples as the page's script reads them, and the tokens left out of long ones.

    Components ``keys`` only; as many examples as fit the cap, the first one in any case.
    """
    shown: list[dict[str, Any]] = []
    room, left_out = MOST_TOKENS, 0
    for example in sample:
        start, end = window(example)
        if shown and end - start > room:
            break
        room -= end - start
        left_out += len(example.tokens) - (end - start)
        shown.append(shown_example(example, start, end, keys))
    return shown, left_out


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


def shown_example(
    example: ScoredExample, start: int, end: int, keys: Sequence[str]
) -> dict[str, Any]:
    """Tokens ``start`` to ``end`` of an example as the page's script reads them."""
    response = example.response[start:end]
    return {
        "row": example.row,
        "place": example.place,
        "start": start,
        "length": len(example.tokens),
        "tokens": [visible(token) for token in example.tokens[start:end]],
        "response": "".join("1" if flag else "0" for flag in response),
        "kept": "".join("1" if flag else "0" for flag in example.kept[start:end]),
        # One number a response token; a prompt token has none.
        "values": {
            key: [float(f"{value:.4g}") for value in example.values[key][start:end][response]]
            for key in keys
        },
    }
