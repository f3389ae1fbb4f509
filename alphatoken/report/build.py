"""From scored sequences to the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alphatoken.errors import ConfigError
from alphatoken.report.examples import COMPONENTS, Component, ScoredExample, visible
from alphatoken.report.statistics import ValueSummary
from alphatoken.report.svg import histogram
from alphatoken.support.storage import replacing

if TYPE_CHECKING:
    import jinja2

__all__ = ["environment", "page_variables", "render_report", "write_report"]

MOST_TOKENS = 12_000
"""Tokens shown in all heatmaps together: keeps the page near one megabyte."""

MOST_TOKENS_A_ROW = 1_500
_PROMPT_SHOWN = 300


def write_report(
    path: str | Path,
    summary: ValueSummary,
    *,
    title: str = "AlphaToken report",
    settings: Mapping[str, object] | None = None,
    notes: Sequence[str] = (),
    balance: Sequence[Mapping[str, object]] = (),
) -> Path:
    """Write the page, whole or not at all, and return its path.

    Args:
        path: the HTML file.
        summary: from :func:`alphatoken.report.summarise`.
        title: heading of the page.
        settings: what was run, shown as a table.
        notes: sentences a reader must know before trusting the numbers.
        balance: per layer: ``layer``, ``adaptation`` (norm of G), ``stability`` (norm of
            lambda V) and ``ratio``; left out of the page if empty.

    Raises:
        ConfigError: jinja2 is not installed.
        DataError: the file could not be written; an old one is intact.
    """
    html = render_report(summary, title=title, settings=settings, notes=notes, balance=balance)
    with replacing(path) as temporary:
        temporary.write_text(html, encoding="utf-8")
    return Path(path)


def render_report(
    summary: ValueSummary,
    *,
    title: str = "AlphaToken report",
    settings: Mapping[str, object] | None = None,
    notes: Sequence[str] = (),
    balance: Sequence[Mapping[str, object]] = (),
) -> str:
    """The page as text; see :func:`write_report`."""
    variables = page_variables(summary, title, settings or {}, notes, balance)
    return environment().get_template("template.html.j2").render(variables)


def environment(*more: str) -> jinja2.Environment:
    """Where pages are rendered; packages ``more`` may hold templates that extend this one.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise ConfigError(
            "the HTML report needs jinja2",
            remedy="pip install jinja2, or leave it out: --no-report",
        ) from None
    packages = ("alphatoken.report", *more)
    found = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name, ".") for name in packages]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["visible"] = visible
    found.filters["number"] = number
    found.filters["plain"] = lambda text: text.removeprefix("+")
    return found


def page_variables(
    summary: ValueSummary,
    title: str,
    settings: Mapping[str, object],
    notes: Sequence[str] = (),
    balance: Sequence[Mapping[str, object]] = (),
    known: Sequence[Component] = COMPONENTS,
    **more_data: Any,
) -> dict[str, Any]:
    """What the template shows; ``more_data`` goes into the page's downloadable data.

    ``known`` are the components with their names and meanings, in the order of the page.
    """
    found = [component for component in known if component.key in summary.columns]
    # A component that is zero everywhere is said to be so; drawing it would only take room.
    present = [c for c in found if c.key == "total" or summary.columns[c.key].any()]
    shown, tokens_left_out = shown_examples(summary.sample, [c.key for c in present])
    data = {
        "components": [{"key": c.key, "name": c.name, "meaning": c.meaning} for c in present],
        "examples": shown,
        **more_data,
    }
    return {
        "title": title,
        "summary": summary,
        "names": {component.key: component.name for component in known},
        "components": present,
        "zero": [c.name for c in found if c not in present],
        "statistics": {component.key: component for component in summary.components},
        "histograms": {c.key: histogram(summary.columns[c.key]) for c in present},
        "shown": len(shown),
        "tokens_left_out": tokens_left_out,
        "settings": dict(settings),
        "notes": list(notes),
        "balance": list(balance),
        "data": script_safe(data),
    }


def number(value: float | None, digits: int = 3) -> str:
    """A signed short number, with a real minus sign; a dash where there is none.

    >>> number(-0.00012345), number(0.0), number(None)
    ('−1.23e-04', '0', '–')
    """
    if value is None:
        return "\u2013"
    if value == 0:
        return "0"
    text = f"{value:+.{digits}g}" if 1e-3 <= abs(value) < 1e5 else f"{value:+.{digits - 1}e}"
    return text.replace("-", "\u2212", 1) if value < 0 else text


def script_safe(data: Any) -> str:
    """JSON that can stand inside a script element: no ``<``, ``>``, ``&`` or line separators."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def shown_examples(
    sample: Sequence[ScoredExample], keys: Sequence[str]
) -> tuple[list[dict[str, Any]], int]:
    """The examples as the page's script reads them, and the tokens left out of long ones.

    Components ``keys`` only; as many examples as fit the cap, the first one in any case.
    """
    shown: list[dict[str, Any]] = []
    room, left_out = MOST_TOKENS, 0
    for example in sample:
        start, end = _window(example)
        if shown and end - start > room:
            break
        room -= end - start
        left_out += len(example.tokens) - (end - start)
        shown.append(_shown(example, start, end, keys))
    return shown, left_out


def _window(example: ScoredExample) -> tuple[int, int]:
    """The part of a long sequence to show: the end of its prompt, then the response."""
    length = len(example.tokens)
    if length <= MOST_TOKENS_A_ROW:
        return 0, length
    places = np.flatnonzero(example.response)
    first = int(places[0]) if places.size else 0
    start = max(0, first - _PROMPT_SHOWN)
    return start, min(length, start + MOST_TOKENS_A_ROW)


def _shown(example: ScoredExample, start: int, end: int, keys: Sequence[str]) -> dict[str, Any]:
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
