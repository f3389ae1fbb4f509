"""``python -m benchmarks.diagnoses``: all diagnostics on three models, and the pages about them.

A decoder of 260,032 parameters on two kinds of text, SmolLM2-135M-Instruct and Gemma 3 270M on
grade-school mathematics. Needs the data ($ALPHATOKEN_DATA) and the models (``make models``,
$ALPHATOKEN_MODELS). Writes docs/fidelity.json, and the tables of docs/fidelity.md,
docs/estimators.md and README.md. Interrupted, it goes on where it
was with ``--resume``; ``--page`` writes the pages from what is finished.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from alphatoken.errors import AlphaTokenError
from alphatoken.support.storage import replacing, write_json
from benchmarks.diagnoses.figures import collect
from benchmarks.diagnoses.page import with_tables
from benchmarks.diagnoses.subjects import SUBJECTS
from benchmarks.frontier.figures import load


def main(words: Sequence[str] | None = None) -> int:
    """Run what is asked for and write the pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnoses", description=__doc__)
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--work", type=Path, default=Path("build/diagnoses"))
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where the pages are")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--page", action="store_true", help="of the runs that are there")
    options = parser.parse_args(words)
    try:
        for key in options.subjects:
            subject, folder = SUBJECTS[key], options.work / key
            if not options.page:
                command = [sys.executable, "-m", "alphatoken.cli", *subject.words(folder)[1:]]
                resume = ["--resume"] if options.resume and folder.exists() else []
                subprocess.run([*command, *resume], check=True)
            if (folder / "run.json").is_file():
                figures = load(options.docs / "fidelity.json")
                figures[key] = collect(subject, folder)
                ordered = {name: figures[name] for name in SUBJECTS if name in figures}
                write_json(options.docs / "fidelity.json", ordered)
        write_pages(options.docs)
    except AlphaTokenError as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def write_pages(docs: Path) -> None:
    """All pages that show figures of the diagnoses or of the frontier, from the figures alone."""
    figures, frontier = load(docs / "fidelity.json"), load(docs / "frontier.json")
    written = {}
    for page in (docs / "fidelity.md", docs / "estimators.md", docs.parent / "README.md"):
        if page.is_file():
            written[page] = with_tables(page.read_text(encoding="utf-8"), figures, frontier)
    for path, text in written.items():
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
        print(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())
