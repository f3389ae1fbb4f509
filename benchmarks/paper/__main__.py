"""``python -m benchmarks.paper run NAME|costs|page``: the paper in small, resumed where it was."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from alphatoken.support.storage import write_json
from alphatoken_lab.paper.exhibits import every, find
from benchmarks.paper.sources import write_sources
from benchmarks.paper.store import synchronise, work_of


def main() -> None:
    """Parse the command line and go."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__)
    parser.add_argument("command", choices=["run", "costs", "page"])
    parser.add_argument("name", nargs="?", help="table or figure, by its label")
    parser.add_argument("--work", type=Path, default=Path("build/paper"), help="work folder")
    options, more = parser.parse_known_args()
    work = options.work.absolute()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.command == "costs":
        write_costs(options.name)
    elif options.command == "page":
        from benchmarks.paper.page import write_page

        print(write_page(work))
    else:
        raise SystemExit(_run(options.name, work, more))


def _run(name: str, work: Path, more: list[str]) -> int:
    """``alphatoken-lab paper NAME --scale laptop`` on the public rows."""
    from alphatoken_lab.commands import main as lab

    exhibit = find(name)
    family = work_of(exhibit, work).family
    sources = write_sources(work / "sources" / family, family)
    files = [word for source, path in sources.items() for word in (f"--{source}_file", str(path))]
    words = ["paper", exhibit.label, "--scale", "laptop", "--output_dir", str(work), *files]
    synchronise(work)
    try:
        return lab([*words, *more])
    finally:
        synchronise(work)


def write_costs(name: str | None = None) -> None:
    """The file that ``alphatoken-lab paper --list`` reads: anew, or one exhibit's part of it."""
    from alphatoken_lab.commands.paper_list import COSTS, every_cost
    from alphatoken_lab.compare.folder import read_json

    found: dict[str, Any] = (read_json(COSTS) or {}) if name else {}
    with tempfile.TemporaryDirectory() as place:
        for exhibit in every() if name is None else [find(name)]:
            if cost := every_cost(exhibit, place):
                found[exhibit.label] = cost
                print(exhibit.label, flush=True)
                write_json(COSTS, dict(sorted(found.items())))


if __name__ == "__main__":
    main()
