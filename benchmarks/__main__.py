"""``python -m benchmarks``: tables of docs and README written anew, from what is measured.

``python -m benchmarks.run`` measures the targets; frontier, selection, standings, diagnoses,
paper and gpu are commands of their own (``python -m benchmarks.frontier``).
"""

from __future__ import annotations

from pathlib import Path

from alphatoken.support.storage import write_text
from benchmarks import prices
from benchmarks.diagnoses import page as diagnoses
from benchmarks.frontier import page as frontier
from benchmarks.gpu import page as gpu
from benchmarks.pages import DOCS, Writer, filled
from benchmarks.paper import page as paper
from benchmarks.peers import cases as peers
from benchmarks.selection import report as selection
from benchmarks.standings import page as standings
from benchmarks.targets import table_of_targets

WRITERS: dict[str, Writer] = {
    "targets": table_of_targets,
    "prices": prices.table_of_prices,
    "frontier": frontier.tables,
    "peers": peers.tables,
    "selection": selection.tables,
    "standings": standings.tables,
    "gpu": gpu.tables,
    "paper": paper.tables,
    **diagnoses.WRITERS,
}
"""First word of a table's comment -> what writes it."""


def pages() -> list[Path]:
    """README and the pages of docs."""
    return [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


def main() -> None:
    """Write every page anew whose tables differ, and the prices that prose is compared with."""
    prices.write()
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text, WRITERS)) != text:
            write_text(page, new)
            print(f"written: {page}")


if __name__ == "__main__":
    main()
