"""``python -m benchmarks.peers [CASE ...]``: only the comparison with peers; prints rows."""

from __future__ import annotations

import argparse
import json
import sys

import torch

from benchmarks.measure import machine
from benchmarks.peers import CASES


def main() -> None:
    """Run the cases named on the command line, or all; one JSON object a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *(c.__name__ for c in CASES)], default=[])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for case in CASES:
        if arguments.cases and case.__name__ not in arguments.cases:
            continue
        print(f"# {case.__name__}: {(case.__doc__ or '').splitlines()[0]}", file=sys.stderr)
        for row in case():
            print(json.dumps({**row, "machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
