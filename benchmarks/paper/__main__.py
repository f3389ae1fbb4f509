"""``python -m benchmarks.paper NAME``: an exhibit of the paper in small, resumed where it was.

What was measured is kept in results/; ``python -m benchmarks`` writes the tables of docs/paper.md.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from alphatoken_lab.paper.exhibits import find
from benchmarks.paper.page import keep_figure
from benchmarks.paper.sources import write_sources
from benchmarks.paper.store import synchronise, work_of


def main() -> int:
    """``alphatoken-lab paper NAME --scale laptop`` on the public rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__)
    parser.add_argument("name", help="table or figure, by its label")
    parser.add_argument("--work", type=Path, default=Path("build/paper"), help="work folder")
    options, more = parser.parse_known_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from alphatoken_lab.commands import main as lab

    work, exhibit = options.work.absolute(), find(options.name)
    family = work_of(exhibit, work).family
    sources = write_sources(work / "sources" / family, family)
    files = [word for source, path in sources.items() for word in (f"--{source}_file", str(path))]
    words = ["paper", exhibit.label, "--scale", "laptop", "--output_dir", str(work), *files]
    synchronise(work)
    try:
        return lab([*words, *more])
    finally:
        synchronise(work)
        if exhibit.diagnosis is not None:
            keep_figure(exhibit, work)


if __name__ == "__main__":
    raise SystemExit(main())
