"""Token heatmaps as HTML: no script, nothing from outside."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from alphatoken.fidelity.token_text import Panel, ValuedText
from alphatoken.report.drawing import colour_of
from alphatoken.report.numbers import number

__all__ = ["heatmap_html"]


def heatmap_html(texts: Sequence[ValuedText], *, most: int) -> str:
    """Rows with every panel, to stand inside a page; all text is escaped.

    The page's style sets the type; colours, paper and ink are set here, so that the text can be
    read without that style too, and whether or not the page follows the reader's dark mode.

    Args:
        texts: rows.
        most: response tokens shown of a row; a longer one is cut, and says so.
    """
    relative = any(panel.relative for text in texts for panel in text.panels)
    legend = _RELATIVE if relative else _SIGNED
    return "".join(
        _row(text, most, legend if place == 0 else "") for place, text in enumerate(texts)
    )


_SIGNED = (
    "<p>Colour: value over the largest absolute value of the response and panel. <span "
    'class="ramp" role="img" aria-label="from orange, negative, to blue, positive"></span> '
    "orange: negative (training on it would do harm), blue: positive. Underlined: kept. Grey: "
    "prompt. Point at a token for its number.</p>"
)
_RELATIVE = (
    "<p>Colour: place of the value between the lowest (white) and the highest (full blue) of the "
    "response and panel; darker is higher, and a sign is not told. Underlined: kept. Grey: prompt. "
    "Point at a token for its number.</p>"
)


def _row(text: ValuedText, most: int, legend: str) -> str:
    count = len(text.shown)
    cut = (
        f"<p>The first {most} of {count} response tokens are shown; all are in the table.</p>"
        if count > most
        else ""
    )
    panels = "".join(
        _panel(text, panel, most, whole=place == 0) for place, panel in enumerate(text.panels)
    )
    return (
        '<section class="example paper" style="background:#fff;color:#111">'
        f'<h4>{escape(text.place)}</h4>{legend}{cut}<div class="panels">{panels}</div></section>'
    )


def _panel(text: ValuedText, panel: Panel, most: int, *, whole: bool) -> str:
    """One colouring; with ``whole`` the prompts are shown, otherwise a mark stands for them."""
    parts: list[str] = []
    grey = ""
    spans = iter(_spans(text.shown, panel))
    shown = 0
    for token, own in zip(text.tokens, text.response, strict=True):
        if shown == most:
            parts.append("\u2026")
            break
        if not own:
            grey += token
            continue
        parts += _between(grey, whole=whole, first=shown == 0)
        parts.append(next(spans))
        grey, shown = "", shown + 1
    return (
        f"<div><h5>{escape(panel.title)} <span>{escape(panel.scale)}</span></h5>"
        '<div class="text" dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere">'
        f"{''.join(parts)}</div></div>"
    )


def _between(grey: str, *, whole: bool, first: bool) -> list[str]:
    if not grey:
        return []
    if whole:
        return [f'<span class="prompt">{escape(grey)}</span>']
    return [] if first else ['<span class="prompt"> \u2026 </span>']


def _spans(tokens: Sequence[str], panel: Panel) -> list[str]:
    spans, of = [], "the range" if panel.relative else "the largest"
    for token, value, colour, kept in zip(
        tokens, panel.values, panel.colours, panel.kept, strict=True
    ):
        said = f"{number(float(value), signed=True)} ({colour:+.2f} of {of}), "
        said += "kept" if kept else "dropped"
        name = "u" if kept else "span"
        fill = ",".join(f"{255 * channel:.0f}" for channel in colour_of(float(colour)))
        spans.append(
            f'<{name} class="tok{" kept" * bool(kept)}" style="background:rgb({fill})" '
            f'title="{escape(said, quote=True)}">{escape(token)}</{name}>'
        )
    return spans
