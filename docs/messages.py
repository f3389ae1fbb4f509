"""Every message that the library raises, read from its source, for the page *Troubleshooting*.

On that page ``<!-- messages: DataError -->`` becomes a list of all messages of this class, by the
room of the package that raises them, each with its reason and remedy. A message is the first
argument of an error's constructor; what is put in at run time is written as an ellipsis.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (ROOT / "lab" / "alphatoken_lab", ROOT / "alphatoken")  # no room has the name of another
MARK = re.compile(r"<!-- messages: (\w+) -->")
ROOMS = {
    "certificate": "The certificate",
    "cli": "The command line",
    "commands": "The command line of the lab",
    "config": "Options of the scorer",
    "data": "Rows and their files",
    "demo": "The demo and its models",
    "direction": "Validation gradient, Fisher and optimizer",
    "errors": "Options with a list of choices",
    "estimate": "Estimators",
    "diagnose": "Diagnostics",
    "measure": "Measures of the lab",
    "methods": "Methods of others (policies)",
    "model": "Models and batches",
    "oracle": "Oracles",
    "paper": "The paper's tables and figures",
    "presets": "The three ways to value",
    "race": "Races of short runs",
    "runner": "Grids of the lab",
    "score": "Values of a corpus: files and pages",
    "scorer": "The scorer",
    "select": "Selection, weights and losses",
    "support": "Files, memory and numbers",
    "train": "Trainers",
    "values": "Values",
}
"""Heading of each room of the package; a room without one ends in an error."""

_SAID = "The message says what was found, and where."


@dataclass(frozen=True)
class Message:
    """One message: its class, the file that raises it, and three of its four parts."""

    kind: str
    file: str
    what: str
    why: str
    remedy: str

    @property
    def room(self) -> str:
        return self.file.split("/")[0].removesuffix(".py")


def messages() -> list[Message]:
    """All of both packages, each once."""
    return _messages(PACKAGES)


@cache
def _messages(packages: tuple[Path, ...]) -> list[Message]:
    trees = {
        str(path.relative_to(package)): ast.parse(path.read_text(encoding="utf-8"))
        for package in packages
        for path in sorted(package.rglob("*.py"))
    }
    kinds = _error_classes(trees.values())
    found: dict[tuple[str, str, str], Message] = {}
    for file, tree in trees.items():
        for call, within in _calls(tree):
            kind = _name(call.func)
            kind = "AlphaTokenError" if kind == "error" and _has_parts(call) else kind
            if kind in kinds and call.args:
                for one in _of_call(kind, file, call, within, trees):
                    found.setdefault((one.kind, one.room, one.what), one)
    return list(found.values())


def _error_classes(trees: Any) -> set[str]:
    kinds = {"AlphaTokenError"}
    classes = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    while more := {c.name for c in classes if {_name(b) for b in c.bases} & kinds} - kinds:
        kinds |= more
    return kinds


@cache  # asked again for every helper
def _calls(tree: ast.AST) -> list[tuple[ast.Call, list[ast.AST]]]:
    """Every call, with the functions and the module around it, innermost first."""

    def walk(node: ast.AST, within: list[ast.AST]) -> Iterator[tuple[ast.Call, list[ast.AST]]]:
        if isinstance(node, ast.FunctionDef | ast.Module):
            within = [node, *within]
        if isinstance(node, ast.Call):
            yield node, within
        for child in ast.iter_child_nodes(node):
            yield from walk(child, within)

    return list(walk(tree, []))


def _has_parts(call: ast.Call) -> bool:
    return bool({k.arg for k in call.keywords} & {"got", "remedy"})


def _of_call(
    kind: str, file: str, call: ast.Call, within: list[ast.AST], trees: Mapping[str, ast.Module]
) -> Iterator[Message]:
    given = {k.arg: k.value for k in call.keywords}
    texts = list(_texts(call.args[0], within))
    why, remedy = (next(_texts(given.get(n), within), "") for n in ("why", "remedy"))
    if texts:
        yield from (Message(kind, file, text, why, remedy) for text in texts)
    elif (helper := within[0]) and isinstance(helper, ast.FunctionDef):
        yield from _of_helper(kind, call, helper, trees)


def _of_helper(
    kind: str, call: ast.Call, helper: ast.FunctionDef, trees: Mapping[str, ast.Module]
) -> Iterator[Message]:
    """A helper's ``what``, ``why`` and ``remedy`` are those that its callers hand it."""
    names = [a.arg for a in helper.args.args]
    for file, tree in trees.items():
        for outer, around in _calls(tree):
            if _name(outer.func) != helper.name:
                continue
            given = dict(zip(names, outer.args, strict=False))
            given |= {k.arg: k.value for k in outer.keywords if k.arg}
            for text in _texts(given.get(_name(call.args[0])), around):
                why, remedy = (next(_texts(given.get(n), around), "") for n in ("why", "remedy"))
                yield Message(kind, file, text, why, remedy)


def _texts(node: ast.AST | None, within: list[ast.AST]) -> Iterator[str]:
    """What an expression may say: one text, or each of a choice."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(next(_texts(part, []), "…") for part in node.values)
    elif isinstance(node, ast.BinOp):
        yield next(_texts(node.left, within), "…") + next(_texts(node.right, within), "…")
    elif isinstance(node, ast.IfExp):
        yield from (*_texts(node.body, within), *_texts(node.orelse, within))
    elif isinstance(node, ast.Name):
        for place in within:
            for line in ast.walk(place):
                if isinstance(line, ast.Assign) and _name(line.targets[0]) == node.id:
                    yield from _texts(line.value, [])


def _name(node: ast.AST | None) -> str:
    return getattr(node, "id", getattr(node, "attr", ""))


def listed(kind: str) -> str:
    """All messages of a class as Markdown: a heading a room, a term a message."""
    rooms: dict[str, list[Message]] = defaultdict(list)
    for one in messages():
        if one.kind == kind:
            rooms[ROOMS[one.room]].append(one)
    lines = []
    for room in sorted(rooms):
        lines += [f"### {kind}: {room}", ""]
        for one in sorted(rooms[room], key=lambda m: m.what.lstrip("…' ").lower()):
            parts = {"Why it matters": one.why, "Remedy": one.remedy}
            said = [f"{title}: {_plain(text)}." for title, text in parts.items() if text]
            lines += [_plain(one.what), f": {' '.join(said) or _SAID}", ""]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is."""
    flat = " ".join(text.replace("\N{SOFT HYPHEN}", "").split()).rstrip(".")
    return re.sub(r"([\\`*_{}\[\]<>#$|~])", r"\\\1", flat)


def _fill(app: Any, name: str, source: list[str]) -> None:
    source[0] = MARK.sub(lambda m: listed(m[1]), source[0])


def setup(app: Any) -> dict[str, bool]:
    """Fill the page before it is parsed."""
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True}
