"""``python -m benchmarks.diagnoses``: all diagnostics on three models.

A decoder of 260,032 parameters on two kinds of text, SmolLM2-135M-Instruct and Gemma 3 270M on
grade-school mathematics. Needs the data ($ALPHATOKEN_DATA) and the models (``make models``,
$ALPHATOKEN_MODELS). Writes docs/fidelity.json; ``python -m benchmarks`` writes the tables of the
pages. Interrupted, it goes on where it was with ``--resume``; ``--collect`` runs nothing and takes
the figures of what is finished.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from alphatoken.support.storage import write_json
from benchmarks.diagnoses.facts import collect
from benchmarks.diagnoses.subjects import SUBJECTS
from benchmarks.pages import exit_status, load


def main(words: Sequence[str] | None = None) -> int:
    """Run what is asked for and collect the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnoses", description=__doc__)
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--work", type=Path, default=Path("build/diagnoses"))
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where fidelity.json is")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--collect", action="store_true", help="the runs that are there")
    options = parser.parse_args(words)
    return exit_status(partial(_run, options))


def _run(options: argparse.Namespace) -> None:
    for key in options.subjects:
        subject, folder = SUBJECTS[key], options.work / key
        if not options.collect:
            command = [sys.executable, "-m", "alphatoken.cli", *subject.words(folder)[1:]]
            resume = ["--resume"] if options.resume and folder.exists() else []
            subprocess.run([*command, *resume], check=True)
        if (folder / "run.json").is_file():
            figures = load(options.docs / "fidelity.json")
            figures[key] = collect(subject, folder)
            ordered = {name: figures[name] for name in SUBJECTS if name in figures}
            write_json(options.docs / "fidelity.json", ordered)


if __name__ == "__main__":
    sys.exit(main())
