"""``python -m benchmarks.run``: every case, results.json and docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import ALL
from benchmarks.measure import machine
from benchmarks.step import train_peak_memory, train_step

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
CASES = (*ALL, train_step, train_peak_memory)

INTRODUCTION = """# Benchmarks

Written by `make bench`; do not edit by hand. Every row is a ratio of two things measured in turn in
one run (median of pairwise ratios, quartiles in brackets), with the floor beside it: the ratio that
the arithmetic alone asks for. Times are seconds, memory is MiB. Machines are shared and noisy: read
the ratios, not the seconds.

Measured on: {machine}.

"""


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the rows."""
    lines = [
        "| measurement | size | ours | other | ratio | floor | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = f" [{row['low']:.2f}, {row['high']:.2f}]" if "low" in row else ""
        lines.append(
            f"| {row['name']} | {row['size']} | {row['ours']:.4g} | {row['other']:.4g} "
            f"| {row['ratio']:.3g}{spread} | {row['floor']:.3g} | {row['note']} |"
        )
    return "\n".join(lines) + "\n"


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The old rows with those of a newly measured name replaced."""
    measured = {row["name"] for row in new}
    return [row for row in old if row["name"] not in measured] + new


def main() -> None:
    """Run the cases named on the command line, or all; rows of other cases stay as they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *(c.__name__ for c in CASES)], default=[])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if arguments.cases and case.__name__ not in arguments.cases:
            continue
        print(f"# {case.__name__}: {(case.__doc__ or '').splitlines()[0]}", file=sys.stderr)
        for row in case():
            row["machine"] = machine()
            rows.append(row)
            print(f"{row['name']} ({row['size']}): {row['ratio']:.3g}, floor {row['floor']:.3g}")
    old = json.loads(RESULTS.read_text()) if arguments.cases and RESULTS.exists() else []
    rows = merged(old, rows)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    machines = {", ".join(f"{k} {v}" for k, v in row["machine"].items()) for row in rows}
    text = INTRODUCTION.format(machine="; ".join(sorted(machines))) + table(rows)
    (ROOT / "docs" / "benchmarks.md").write_text(text)


if __name__ == "__main__":
    main()
