"""Token heatmaps as HTML: no script, nothing from outside, names that meet no others."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from alphatoken.fidelity.token_text import Panel, ValuedText
from alphatoken.report.build import number

__all__ = ["heatmap_html"]

# Blue and orange as in the report of values. Panels set paper and ink themselves, so that the text
# can be read whether or not the page around follows the reader's dark mode.
_STYLE = """
.at-heat{margin:14px 0;border:1px solid #8c959f;border-radius:8px;padding:10px 14px;
 background:#fff;color:#111}
.at-heat h4{margin:0 0 6px;font-size:1rem}
.at-heat p{margin:4px 0;font-size:.8125rem;max-width:none}
.at-heat .at-grid{display:grid;grid-template-columns:repeat(auto-fit,
 minmax(min(100%,max(320px,50% - 9px)),1fr));
 gap:10px 18px}
.at-heat h5{margin:8px 0 2px;font-size:.875rem;font-weight:600}
.at-heat h5 span{font-weight:400;opacity:.75}
.at-heat .at-text{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.8;font-size:.875rem}
.at-heat .at-prompt{opacity:.65}
.at-heat .at-tok{border-radius:3px 3px 0 0;padding:1px 0;border-bottom:2px solid transparent}
.at-heat .at-plus{background-color:rgba(76,154,222,var(--at-s))}
.at-heat .at-minus{background-color:rgba(240,150,55,var(--at-s))}
.at-heat .at-kept{border-bottom-color:currentColor}
.at-heat .at-ramp{display:inline-block;width:150px;height:12px;vertical-align:middle;
 border:1px solid #8c959f;border-radius:3px;
 background:linear-gradient(90deg,rgb(240,150,55),rgba(240,150,55,0) 50%,
 rgba(76,154,222,0) 50%,rgb(76,154,222))}
@supports (color:light-dark(#000,#fff)){
.at-heat{background:light-dark(#fff,#14181d);color:light-dark(#111,#f0f3f6)}
.at-heat .at-plus{background-color:color-mix(in srgb,
 light-dark(rgb(76,154,222),rgb(28,96,160)) calc(var(--at-s)*100%),transparent)}
.at-heat .at-minus{background-color:color-mix(in srgb,
 light-dark(rgb(240,150,55),rgb(156,84,12)) calc(var(--at-s)*100%),transparent)}
.at-heat .at-ramp{background:linear-gradient(90deg,
 light-dark(rgb(240,150,55),rgb(156,84,12)),transparent 50%,
 light-dark(rgb(76,154,222),rgb(28,96,160)))}
}
"""


def heatmap_html(texts: Sequence[ValuedText], *, most: int) -> str:
    """Rows with every panel, to stand inside a page; all text is escaped.

    Args:
        texts: rows.
        most: response tokens shown of a row; a longer one is cut, and says so.
    """
    legend = (
        "<p>Colour: value over the largest absolute value of the response and panel. <span "
        'class="at-ramp" role="img" aria-label="from orange, negative, to blue, positive"></span> '
        "orange: negative (training on it would do harm), blue: positive. Underlined: kept. Grey: "
        "prompt. Point at a token for its number.</p>"
    )
    rows = "".join(
        _row(text, most, legend if place == 0 else "") for place, text in enumerate(texts)
    )
    return f"<style>{_STYLE}</style>{rows}"


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
        f'<section class="at-heat"><h4>{escape(text.place)}</h4>{legend}{cut}'
        f'<div class="at-grid">{panels}</div></section>'
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
    largest = float(np.abs(panel.values).max()) if len(panel.values) else 0.0
    scale = f"full colour at \u00b1{number(largest).removeprefix('+')}"
    return (
        f"<div><h5>{escape(panel.title)} <span>{escape(scale)}</span></h5>"
        f'<div class="at-text" dir="auto">{"".join(parts)}</div></div>'
    )


def _between(grey: str, *, whole: bool, first: bool) -> list[str]:
    if not grey:
        return []
    if whole:
        return [f'<span class="at-prompt">{escape(grey)}</span>']
    return [] if first else ['<span class="at-prompt"> \u2026 </span>']


def _spans(tokens: Sequence[str], panel: Panel) -> list[str]:
    spans = []
    for token, value, colour, kept in zip(
        tokens, panel.values, panel.colours, panel.kept, strict=True
    ):
        classes = ["at-tok"]
        classes += ["at-plus" if colour > 0 else "at-minus"] if colour else []
        classes += ["at-kept"] if kept else []
        said = f"{number(float(value))} ({colour:+.2f} of the largest), "
        said += "kept" if kept else "dropped"
        spans.append(
            f'<span class="{" ".join(classes)}" style="--at-s:{abs(colour):.3f}" '
            f'title="{escape(said, quote=True)}">{escape(token)}</span>'
        )
    return spans
