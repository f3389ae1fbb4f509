"""Sizes of the repository: lines, files, classes and comments by room, and the words of the pages.

    python -m tests.sizes

No test reads them. They say where there may be more ideas than needed, and whether a change took
some out: a room that grows by a fifth for one feature deserves a second look.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]

LIMITS = {
    "alphatoken": {"lines": 41_000, "files": 170, "classes": 210, "dataclasses": 120},
    "lab": {"lines": 8_000},
    "tests": {"lines": 40_000},
    "benchmarks": {"lines": 6_000},
}
"""The most that each part should have; a twentieth more is still within."""

WORDS = {"users": 30_000, "notebook": 15_000, "measured": 800}
NOTEBOOK = (
    "selection", "standings", "fidelity", "frontier", "paper", "benchmarks", "gpu", "peers",
    "paper-gaps", "adr",
)  # fmt: skip
"""Pages and folders of the lab notebook; docs/measured.md is apart, every other page for users."""

VAGUE = {"found", "given", "seen", "asked", "held", "known", "taken"}
"""Names that need the rest of the file to be understood; alphatoken/ and lab/ store none."""

COLUMNS = ("lines", "files", "classes", "dataclasses", "comments", "vague names")


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository that git tracks or is about to."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in map(ROOT.joinpath, sorted(listed.stdout.split())) if path.is_file()]


def sizes(path: Path) -> Counter[str]:
    """Counts of one file."""
    text = path.read_text("utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return Counter(
        {
            "lines": text.count("\n"),
            "files": 1,
            "classes": len(classes),
            "dataclasses": sum(
                any("dataclass" in ast.unparse(one) for one in node.decorator_list)
                for node in classes
            ),
            "comments": sum(token.type == tokenize.COMMENT for token in tokens),
            "vague names": sum(name.lstrip("_") in VAGUE for name in _stored(nodes)),
        }
    )


def _stored(nodes: Iterable[ast.AST]) -> Iterable[str]:
    """Names that are written: variables, parameters and attributes."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def by_room() -> dict[str, Counter[str]]:
    """Counts of each folder of the second level, and of each part as a whole."""
    rooms: dict[str, Counter[str]] = {}
    for path in tracked(*(f"{part}/*.py" for part in LIMITS)):
        folders = path.relative_to(ROOT).parts[:-1]
        depth = 3 if folders[0] == "lab" else 2
        for room in dict.fromkeys((folders[0], "/".join(folders[:depth]))):
            rooms.setdefault(room, Counter()).update(sizes(path))
    return rooms


def words() -> Counter[str]:
    """Words of the pages in Markdown, code and tables included; the page of results is apart."""
    counts: Counter[str] = Counter()
    for path in tracked("docs/*.md", "README.md", "CONTRIBUTING.md"):
        own = {path.stem, path.parent.name} & {*NOTEBOOK}
        reader = "measured" if path.stem == "measured" else "notebook" if own else "users"
        counts[reader] += len(path.read_text("utf-8").split())
    return counts


def main() -> None:
    print(f"{'':28}" + "".join(f"{name:>13}" for name in COLUMNS))
    for room, counts in sorted(by_room().items()):
        share = f"{counts['comments'] / counts['lines']:.1%}"
        cells = {name: share if name == "comments" else f"{counts[name]:,}" for name in COLUMNS}
        limits = LIMITS.get(room, {})
        print(f"{room:28}" + "".join(f"{cells[name]:>13}" for name in COLUMNS))
        if limits:
            most = "".join(f"{limits.get(name, ''):>13}" for name in COLUMNS)
            print(f"{'  at most':28}{most}".rstrip())
    for reader, count in words().items():
        print(f"words of pages, {reader}: {count:,}, at most {WORDS[reader]:,}")


if __name__ == "__main__":
    sys.exit(main())
