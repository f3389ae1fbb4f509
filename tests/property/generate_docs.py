"""Writes docs/claims.md and docs/kill-matrix.md: ``python -m tests.property.generate_docs``.

With ``claims`` (instant) or ``kills`` (a minute) after it, only that one.
The table of claims is read from the sources alone (docstrings, and which test names which
property), so the same sources give the same text. The kill matrix is what the mutants did.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.property.mutation import Kill, Mutant

__all__ = [
    "CLAIMS_PAGE",
    "KILLS_PAGE",
    "Row",
    "claims",
    "claims_text",
    "kills_text",
    "read_kill_matrix",
]

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
CLAIMS_PAGE = DOCS / "claims.md"
KILLS_PAGE = DOCS / "kill-matrix.md"
COMMAND = "python -m tests.property.generate_docs"
HEAD = f"<!-- written by {COMMAND}; do not edit by hand -->\n\n"


# --- claims, from the sources --------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One check_ or test_ function: what it claims, and for a property the tests that run it."""

    file: str
    name: str
    claim: str
    tests: tuple[str, ...]
    is_check: bool


@dataclass(frozen=True)
class _Source:
    """One file: what it says of itself, its functions, and the names that each definition uses."""

    file: str
    purpose: str
    functions: tuple[ast.FunctionDef, ...]
    uses: dict[str, frozenset[str]]

    def reached_from(self, name: str) -> frozenset[str]:
        """All names that a definition uses, through other definitions of the same file too."""
        reached: set[str] = set()
        waiting = [name]
        while waiting:
            for used in self.uses.get(waiting.pop(), frozenset()) - reached:
                reached.add(used)
                waiting.append(used)
        return frozenset(reached)


def _read(path: Path) -> _Source:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = tuple(node for node in tree.body if isinstance(node, ast.FunctionDef))
    uses: dict[str, frozenset[str]] = {}
    for node in tree.body:
        found = frozenset(_names(node))
        for name in _defined(node):
            uses[name] = uses.get(name, frozenset()) | found
    return _Source(path.name, _first(ast.get_docstring(tree)), functions, uses)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return [name.id for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)]


def _names(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.Attribute):
            yield child.attr


def _first(docstring: str | None) -> str:
    """The first paragraph, on one line."""
    return " ".join((docstring or "").partition("\n\n")[0].split())


def _claim(function: ast.FunctionDef) -> str:
    """What the docstring says; without one, the name read as a sentence."""
    said = _first(ast.get_docstring(function))
    words = function.name.partition("_")[2].replace("_", " ")
    return said or f"{words[0].upper()}{words[1:]}."


def _sources() -> list[_Source]:
    return [_read(path) for path in sorted(HERE.glob("*.py"))]


def claims() -> list[Row]:
    """Every property with the tests that run it, then every test that runs none; file by file."""
    sources = _sources()
    checks = {f.name for s in sources for f in s.functions if f.name.startswith("check_")}
    run: dict[str, list[str]] = {name: [] for name in checks}
    others = []
    for source in sources:
        for function in source.functions:
            if not function.name.startswith("test_") or not source.file.startswith("test_"):
                continue
            reached = sorted(source.reached_from(function.name) & checks)
            for name in reached:
                run[name].append(f"{source.file}::{function.name}")
            if not reached:
                others.append(Row(source.file, function.name, _claim(function), (), False))
    rows = [
        Row(source.file, function.name, _claim(function), tuple(run[function.name]), True)
        for source in sources
        for function in source.functions
        if function.name in checks
    ]
    return [*rows, *others]


def claims_text() -> str:
    """The page of claims."""
    purposes = {source.file: source.purpose for source in _sources()}
    rows = claims()
    parts = [
        HEAD + "# Claims and the tests that hold them\n",
        "A *property* is a function that takes any drawn case, and is run on mutants of the core "
        "too ([kill matrix](kill-matrix.md)); a test draws the cases. Everything lies in "
        "`tests/property`.\n",
    ]
    for is_check, title in ((True, "Properties"), (False, "Other tests")):
        parts.append(f"## {title}\n")
        for file in dict.fromkeys(row.file for row in rows if row.is_check == is_check):
            head = ["Claim", "Property", "Run by"] if is_check else ["Claim", "Test"]
            lines = [
                [text(row.claim), code(f"{row.file}::{row.name}")]
                + ([", ".join(map(code, row.tests))] if is_check else [])
                for row in rows
                if row.file == file and row.is_check == is_check
            ]
            parts.append(f"### {file}\n\n{text(purposes[file])}\n\n{table(head, lines)}")
    return "\n".join(parts)


# --- Markdown ------------------------------------------------------------------------------------


def code(source: str) -> str:
    """Inline code, also inside a table."""
    ticks = "``" if "`" in source else "`"
    return f"{ticks}{source}{ticks}".replace("|", "\\|")


def text(sentence: str) -> str:
    """Prose with ``code`` in it, safe in a table: nothing else is markup."""
    pieces = re.split(r"``?([^`]+)``?", sentence)
    return "".join(
        code(piece) if index % 2 else re.sub(r"([\\*_\[\]<>|$#{}])", r"\\\1", piece)
        for index, piece in enumerate(pieces)
    )


def table(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


# --- kills ---------------------------------------------------------------------------------------


def kills_text() -> str:
    """The kill matrix; every mutant is hunted by each of its properties. Raises if one survives."""
    from tests.property.catalogue import LISTED, ROOMS

    return "\n".join(
        [
            HEAD + "# Kill matrix\n",
            "A mutant is the core with a few words replaced. It is *killed* when a property fails "
            "by its own assertion, the replaced code ran, the same example passes on the core as "
            "it is, and the library's own run-time proofs were switched off meanwhile. Beside "
            "each property stands the number of the example at which it failed (of six through a "
            "whole model, else of twenty, drawn with the structure that the mutant needs). The "
            "last column says whether the "
            "library's proofs refuse the mutant by themselves, before any value is returned.\n",
            "## Errors that must be noticed\n",
            _kill_table(LISTED),
            *(
                part
                for title, room in ROOMS.items()
                for part in (f"## {title}\n", _kill_table(room))
            ),
        ]
    )


def _kill_table(mutants: Sequence[Mutant]) -> str:
    head = ["Mutant", "What it stands for", "Change", "Killed by", "Own proofs"]
    return table(head, [_kill_row(mutant, _kills(mutant)) for mutant in mutants])


def _kills(mutant: Mutant) -> list[Kill]:
    from tests.property.mutation import hunt

    kills = []
    for one in mutant.claims:
        kill = hunt(mutant, one)
        if kill is None:
            raise SystemExit(f"'{mutant.name}' survives {one.name}: a property is missing")
        kills.append(kill)
    return kills


def _kill_row(mutant: Mutant, kills: list[Kill]) -> list[str]:
    changes = [
        f"{code(edit.target)}: {_words(edit.old)} → {_words(edit.new)}" for edit in mutant.edits
    ]
    refusals = sorted({kill.refused for kill in kills if kill.refused})
    return [
        code(mutant.name),
        text(mutant.sentence),
        "; ".join(changes),
        ", ".join(f"{code(kill.claim)} ({kill.example})" for kill in kills),
        ", ".join(map(code, refusals)) or "no",
    ]


def _words(source: str) -> str:
    return code(" ".join(source.split())) if source else "nothing"  # a table's row is one line


_CELL = re.compile(r"(?<!\\)\|")
_KILLED = re.compile(r"`([\w.]+::\w+)` \(\d+\)")


def read_kill_matrix(page: str) -> list[tuple[str, tuple[str, ...]]]:
    """(mutant, properties) of each row of a written kill matrix."""
    rows = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in _CELL.split(line)][1:-1]
        if len(cells) == 5 and cells[0].startswith("`"):
            rows.append((cells[0].strip("`"), tuple(_KILLED.findall(cells[3]))))
    return rows


def main(pages: list[str]) -> None:
    """Write the pages that are named, both by default."""
    if "claims" in pages or not pages:
        CLAIMS_PAGE.write_text(claims_text(), encoding="utf-8")
    if "kills" in pages or not pages:
        KILLS_PAGE.write_text(kills_text(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
