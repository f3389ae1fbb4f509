"""Self-contained HTML pages and figures: one template and one style for all of them.

A page has a title, a sentence or two, and sections; a section has sentences, pictures, tables and
notes. Style, drawings and data are inside the page. A content security policy keeps out everything
else: the network, and every script but the one that comes with this package.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from alphatoken.errors import ConfigError, DataError
from alphatoken.support.coloured import MINUS, PLUS
from alphatoken.support.storage import write_text
from alphatoken.support.token_texts import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = [
    "COLOURS",
    "DASHES",
    "MARKERS",
    "MINUS",
    "PLUS",
    "SEQUENTIAL",
    "Cell",
    "Column",
    "Section",
    "anchor_of",
    "canvas",
    "cell_text",
    "colour_of",
    "environment",
    "interval",
    "number",
    "parts",
    "pictures_html",
    "render_page",
    "save",
    "script_safe",
    "svg_text",
    "table_html",
]

# Okabe and Ito's palette without yellow: told apart under the common colour-vision deficiencies.
COLOURS = ("#0072b2", "#d55e00", "#007a5e", "#a3507f", "#3c3c3c", "#56b4e9", "#e69f00")
# A series never differs by colour alone.
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SEQUENTIAL = "cividis"

DARK_PLUS, DARK_MINUS = (38, 104, 176), (168, 84, 16)
"""The same on a dark page, under light letters."""

_STYLE = {
    "svg.fonttype": "path",  # no font of the reader's machine takes part
    "svg.hashsalt": "alphatoken",  # the same picture is the same file
    "font.size": 9.0,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}


def colour_of(strength: float) -> tuple[float, float, float]:
    """Red, green and blue in [0, 1] for a normalised value in [-1, 1]: white is 0."""
    end = PLUS if strength > 0 else MINUS
    red, green, blue = (1 + (channel / 255 - 1) * min(abs(strength), 1.0) for channel in end)
    return red, green, blue


@contextmanager
def canvas(width: float = 6.4, height: float = 4.0) -> Iterator[Canvas]:
    """A matplotlib figure in the house style; no global state is left changed.

    Sizes in inches. Large meshes and clouds of points should be drawn with ``rasterized=True``.
    Write the figure inside this context, since the style ends with it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ConfigError(
            "figures need matplotlib", remedy="pip install 'alphatoken[report]'"
        ) from None
    style: Any = _STYLE  # matplotlib types the keys one by one
    with mpl.rc_context(style):
        yield Canvas(figsize=(width, height))


def svg_text(figure: Canvas) -> str:
    """The figure as one SVG element; the same figure gives the same text."""
    text = _document(figure)
    return text[text.index("<svg") :]


def save(figure: Canvas, path: Path) -> None:
    """Write the figure as an SVG file, whole or not at all, without spaces at the ends of lines."""
    lines = _document(figure).splitlines()
    write_text(path, "\n".join(map(str.rstrip, lines)) + "\n")


def _document(figure: Canvas) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


# --- numbers and cells ----------------------------------------------------------------------------

Cell = str | int | float | bool | None

_DASH, _MINUS = "\u2013", "\u2212"


def number(value: int | float | None, digits: int = 3, *, signed: bool = False) -> str:
    """A short number; whole ones are written out.

    >>> [number(x) for x in (-0.00012345, 0.123456, 12345, 12345.6, 2.0, 1.5e7, None)]
    ['−1.23e-04', '0.123', '12,345', '12,346', '2', '15,000,000', '–']
    >>> number(0.5, signed=True), number(0.0, signed=True), number(float("-inf"))
    ('+0.5', '0', '−∞')
    """
    if value is None or math.isnan(value):
        return _DASH
    size = abs(value)
    sign = _MINUS if value < 0 else "+" if signed and value else ""
    if math.isinf(size):
        return f"{sign}∞"
    if 10**digits <= size < 1e6 or (size < 1e15 and size == int(size)):
        return f"{sign}{size:,.0f}"
    return sign + (f"{size:.{digits}g}" if 1e-3 <= size < 1e6 else f"{size:.{digits - 1}e}")


def cell_text(cell: Cell) -> str:
    """Text of a table's cell.

    >>> [cell_text(cell) for cell in (None, True, 0.123456, "x", " ")]
    ['–', 'yes', '0.123', 'x', '␣']
    """
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str):
        return cell if cell.strip(" ") else "\u2423" * len(cell)  # a token may be a space
    return number(cell)


def interval(value: Cell, low: Cell, high: Cell) -> str:
    """``value [low, high]``, all three with the decimals that the interval's width gives meaning.

    >>> interval(0.914, 0.871, 0.95), interval(3e-9, 1e-9, 5e-9), interval(None, None, None)
    ('0.914 [0.871, 0.950]', '3.00e-09 [1.00e-09, 5.00e-09]', 'not defined')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "not defined"
    finite = [one for one in (value, low, high) if isinstance(one, (int, float))]
    finite = [float(one) for one in finite if math.isfinite(one)]
    largest = max(map(abs, finite), default=0.0)
    if len(finite) < 3 or not 1e-3 <= largest < 1e5:
        return f"{cell_text(value)} [{cell_text(low)}, {cell_text(high)}]"
    width = finite[2] - finite[1] or 0.1 * largest
    decimals = min(6, max(0, 1 - math.floor(math.log10(width))))
    texts = [f"{one:.{decimals}f}".replace("-", _MINUS) for one in finite]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"


_SIZE = re.compile(r'<svg\b[^>]*?\swidth="([0-9.]+)(pt)?"')


def pictures_html(pictures: Mapping[str, tuple[str, str, str, str]]) -> str:
    """Pictures side by side: anchor -> title, caption, SVG document, what it shows in words.

    The page shows each as an image: nothing in it runs, or refers to a place outside itself.

    Raises:
        DataError: one is no SVG.
    """
    shown = [
        {"anchor": anchor, "title": title, "caption": caption, "svg": svg, "alt": alt}
        | {"width": _natural_width(anchor, svg)}
        for anchor, (title, caption, svg, alt) in pictures.items()
    ]
    return str(parts().pictures(shown)) if shown else ""


def _natural_width(anchor: str, svg: str) -> int:
    """In CSS pixels."""
    size = _SIZE.search(svg)
    if size is None:
        raise DataError("a figure is no SVG with a width", got=anchor)
    return round(float(size[1]) * (4 / 3 if size[2] else 1))


Column = tuple[str, Literal["number", "words", "html"], Sequence[str]]
"""Heading, what the cells are, and the cells as shown; those of kind "html" are safe as they are,
all others are escaped."""


def table_html(columns: Sequence[Column], label: str, *, note: str = "", left_out: int = 0) -> str:
    """A table of equally long columns.

    Args:
        columns: in their order.
        label: its name for those who hear the page.
        note: what a reader must know before.
        left_out: rows that are in a file alone.
    """
    rows = list(zip(*(cells for _, _, cells in columns), strict=True))
    return str(parts().table(columns, rows, label, note, left_out))


@dataclass(frozen=True)
class Section:
    """A part of a page; what is empty is not shown.

    Attributes:
        anchor: its name on the page.
        title: heading.
        name: short name over the heading.
        failure: why there is nothing in it.
        verdict: the finding in one line.
        remarks: how to read what follows.
        html: pictures, tables and anything else, safe as it is.
        notes: warnings.
        settings: what this section depends on and others do not.
        mark: "good", "doubtful" or "bad", before its verdict; or "".
        lists: rows in colours, by ``value_page.row_list``, which the script draws where ``html``
            has an element of their anchor.
    """

    anchor: str
    title: str
    name: str = ""
    failure: str = ""
    verdict: str = ""
    remarks: Sequence[str] = ()
    html: str = ""
    notes: Sequence[str] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    mark: str = ""
    lists: Sequence[Mapping[str, Any]] = ()


def render_page(
    title: str,
    lead: str,
    sections: Sequence[Section],
    *,
    contents: bool = False,
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
    rows: Sequence[str] = (),
    about: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
    command: str = "",
    data: Mapping[str, Any] | None = None,
) -> str:
    """The page as text; title, warnings, notes, ``about`` and settings are as of ``write_report``.

    With ``contents`` it begins with a card for each of its sections, its verdict, and has their
    names in view wherever one reads. At the end stand ``command``, which made the page, ``rows``,
    sentences about the rows used, and, folded, the settings. Its script reads ``data`` and the
    lists of the sections; without either there is no script.
    """
    script, lists = "", [one for section in sections for one in section.lists]
    if lists:
        data = {**(data or {}), "lists": lists}
    if data is not None:  # the one script; its digest in the page's policy lets no other run
        script = files("alphatoken.score").joinpath("page.js").read_text(encoding="utf-8")
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            title=title,
            lead=lead,
            sections=sections,
            contents=contents,
            notes=notes,
            warnings=warnings,
            rows=rows,
            about=dict(about or {}),
            settings=dict(settings or {}),
            command=command,
            data="" if data is None else script_safe(data),
            script=script,
            digest=_base64(hashlib.sha256(script.encode()).digest()) if script else "",
            plus=", ".join(map(str, PLUS)),
            minus=", ".join(map(str, MINUS)),
            dark_plus=", ".join(map(str, DARK_PLUS)),
            dark_minus=", ".join(map(str, DARK_MINUS)),
        )
    )


@cache
def environment() -> jinja2.Environment:
    """Environment of jinja2 that renders pages and their parts."""
    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("alphatoken.score", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"visible": visible, "number": number, "address": _address}
    pages.filters["setting"] = setting_text
    return pages


def parts() -> Any:
    """The macros for parts of a page."""
    return environment().get_template("parts.html.j2").module


def setting_text(value: object) -> str:
    """The value of an option as a person would write it; what is empty inside another is left out.

    >>> setting_text({"prompt": "q", "messages": None, "roles": ["user", "tool"], "chat": True})
    'prompt: q; roles: user, tool; chat: yes'
    >>> setting_text(None), setting_text([]), setting_text(0.05)
    ('none', 'none', '0.05')
    """
    if isinstance(value, Mapping):
        inner = {key: one for key, one in value.items() if one not in (None, "", [], (), {})}
        return "; ".join(f"{key}: {setting_text(one)}" for key, one in inner.items()) or "none"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(map(setting_text, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def anchor_of(text: str) -> str:
    """A name for the address line: letters, digits, hyphens.

    >>> anchor_of("adaptation_causal, share")
    'adaptation-causal-share'
    """
    return re.sub(r"[^0-9A-Za-z]+", "-", text).strip("-")


def script_safe(data: Any) -> str:
    """JSON that can stand inside a script element: no ``<``, ``>``, ``&`` or line separators."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _address(svg: str) -> str:
    """A picture as its own address."""
    return f"data:image/svg+xml;base64,{_base64(svg.encode())}"


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
