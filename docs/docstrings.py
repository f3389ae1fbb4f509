"""Docstrings are written for reading in the source; this makes them safe to typeset.

Formulas stand indented, norms are bars, tables are Markdown. reStructuredText would read these as
quotations, substitutions and line blocks. Here they become literal blocks and escaped bars, so an
author need not think about it. Also: a reference to a name of this package that exists but has no
page of its own is shown without a link; one to a name that does not exist is an error.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

SECTIONS = {
    "Args:",
    "Attributes:",
    "Example:",
    "Examples:",
    "Keyword Args:",
    "Note:",
    "Notes:",
    "Raises:",
    "References:",
    "Returns:",
    "Warns:",
    "Yields:",
}
ITEM = re.compile(r"([-*+]|\d+[.)]|\(\d+\))\s")


def _escape(text: str, literal: bool) -> tuple[str, bool]:
    """Escape bars and trailing underscores outside ``literal`` spans, which may cross lines."""
    pieces = text.split("``")
    for n, piece in enumerate(pieces):
        if literal == (n % 2 == 1):  # outside a literal span
            piece = re.sub(r"(?<!\\)\|", r"\\|", piece)
            pieces[n] = re.sub(r"(?<=[\w)\]])_(?![\w`])", r"\\_", piece)
    return "``".join(pieces), literal != (len(pieces) % 2 == 0)


def _is_formula(line: str, before: list[str], continues: bool) -> bool:
    """Indented text that belongs to no section, list item or directive."""
    last = next((b for b in reversed(before) if b.strip()), "")
    return line.startswith(" ") and not continues and not last.rstrip().endswith("::")


def typeset(lines: list[str]) -> list[str]:
    """One docstring as reStructuredText (still with Google sections)."""
    out: list[str] = []
    continues = False  # inside a section, list item or directive, where indentation is structure
    literal = block = doctest = False
    for line in lines:
        text = line.strip()
        if not text:
            literal = doctest = False
            out.append("")
            continue
        doctest = doctest or text.startswith(">>>")
        if not line.startswith(" "):
            item = text.startswith("..") or ITEM.match(text) is not None
            continues = item or text in SECTIONS
        table = text.startswith("|") and text.endswith("|") and not line.startswith(" ")
        if not doctest and (table or block or _is_formula(line, out, continues)):
            if table or line.startswith(" "):
                if not block:
                    out += ["", "::", ""]
                block = True
                out.append("    " + line)
                continue
            out.append("")
            block = False
        if doctest:
            out.append(line)
            continue
        if out and out[-1] in ("Returns:", "Yields:"):
            # A colon in the prose is not the end of a type: say that there is none.
            line = line[: len(line) - len(text)] + ": " + text
        line, literal = _escape(line, literal)
        out.append(line)
    return out


def _process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = typeset(lines)


def _missing(app: Any, env: Any, node: Any, content: Any) -> Any:
    target = str(node.get("reftarget", ""))
    parts = target.split(".")
    if parts[0] not in ("alphatoken", "alphatoken_lab"):
        return None
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for attribute in parts[cut:]:
            found = getattr(found, attribute, None)
        return None if found is None else content
    return None


def setup(app: Any) -> dict[str, bool]:
    """Register before napoleon, which reads what is left here."""
    app.connect("autodoc-process-docstring", _process, priority=100)
    app.connect("missing-reference", _missing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
