"""``python -m benchmarks.paper run NAME|page``: the paper in small, resumed where it was."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from alphatoken_lab.paper.exhibits import find
from benchmarks.paper.sources import write_sources
from benchmarks.paper.store import synchronise, work_of


def main() -> None:
    """Parse the command line and go."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__)
    parser.add_argument("command", choices=["run", "page"])
    parser.add_argument("name", nargs="?", help="table or figure, by its label")
    parser.add_argument("--work", type=Path, default=Path("build/paper"), help="work folder")
    options, more = parser.parse_known_args()
    work = options.work.absolute()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.command == "page":
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


if __name__ == "__main__":
    main()
