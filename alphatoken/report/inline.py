"""SVG pictures made fit to stand in one HTML page, many together."""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.etree import ElementTree

from alphatoken.errors import DataError

__all__ = ["Inlined", "inlined"]

_DRAWN = frozenset(
    {
        *("svg", "g", "defs", "use", "symbol", "title", "desc", "image", "text", "tspan"),
        *("path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "marker"),
        *("clipPath", "mask", "pattern", "linearGradient", "radialGradient", "stop"),
    }
)
"""Elements that draw. Whatever else is in a file (scripts, links, foreign HTML) is left out."""

_REFERENCE = re.compile(r"url\(\s*(['\"]?)(.*?)\1\s*\)")
_RULE = re.compile(r"\*\s*\{([^{}]*)\}")


@dataclass(frozen=True)
class Inlined:
    """A picture as an element of a page, and its natural width in CSS pixels."""

    html: str
    width: int


def inlined(svg: str, prefix: str, label: str) -> Inlined:
    """``svg`` as an element of an HTML page.

    Names of elements get ``prefix``, so that no two pictures of a page share one; references
    follow. Anything that runs, or that refers to another place than this picture, is dropped:
    the result is as safe as its text. The size is left to the page. A style rule for all elements
    (matplotlib writes one) would reach the whole page; it moves to the root, from where its
    properties are inherited.

    Args:
        svg: a whole SVG document.
        prefix: letters, digits and hyphens.
        label: what the picture shows, for those who do not see it.

    Raises:
        DataError: it is not well-formed.
    """
    try:
        root = ElementTree.fromstring(svg)
    except ElementTree.ParseError as error:
        raise DataError("a figure is not well-formed SVG", got=f"{prefix}: {error}") from None
    if _local(root.tag) != "svg":
        raise DataError("a figure is not SVG", got=f"{prefix}: <{_local(root.tag)}>")
    inherited = _rules_for_all(root)
    _clean(root, prefix)
    size = [root.attrib.pop(name, "") for name in ("width", "height")]
    if "viewBox" not in root.attrib:
        root.set("viewBox", "0 0 " + " ".join(f"{_number(one, prefix):g}" for one in size))
    width = _number(size[0] or root.get("viewBox", "").split()[2], prefix)
    if inherited:
        root.set("style", inherited)
    root.set("role", "img")
    root.set("aria-label", label)
    root.tail = None
    pixels = width * 4 / 3 if size[0].endswith("pt") else width
    return Inlined(ElementTree.tostring(root, encoding="unicode"), round(pixels))


def _local(tag: object) -> str:
    return str(tag).rpartition("}")[2]


def _number(length: str, prefix: str) -> float:
    found = re.match(r"[0-9]+(\.[0-9]+)?", length)
    if found is None:
        raise DataError("a figure has no size", got=prefix)
    return float(found[0])


def _rules_for_all(root: ElementTree.Element) -> str:
    styles = [e.text or "" for e in root.iter() if _local(e.tag) == "style"]
    found = [rule.strip(" ;") for text in styles for rule in _RULE.findall(text)]
    return "; ".join(rule for rule in found if "url" not in rule)


def _clean(element: ElementTree.Element, prefix: str) -> None:
    """Drop what is not drawn, plain names without name spaces, references within the picture."""
    element.tag = _local(element.tag)
    attributes = dict(element.attrib)
    element.attrib.clear()
    for key, value in attributes.items():
        name = _local(key)
        kept = _attribute(name, value, prefix)
        if kept is not None:
            element.set(name, kept)
    for child in list(element):
        # Comments and processing instructions are gone: the parser drops them.
        if _local(child.tag) in _DRAWN:
            _clean(child, prefix)
        else:
            element.remove(child)


def _attribute(name: str, value: str, prefix: str) -> str | None:
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href":
        if value.startswith("#"):
            return f"#{prefix}-{value[1:]}"
        return value if value.startswith("data:image/") else None
    if name.lower().startswith("on"):
        return None
    targets = [target for _, target in _REFERENCE.findall(value)]
    if any(not target.startswith("#") for target in targets):
        return None
    return _REFERENCE.sub(lambda found: f"url(#{prefix}-{found[2][1:]})", value)
