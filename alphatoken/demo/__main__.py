"""``python -m alphatoken.demo [--out DIR]``."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from alphatoken.demo import run_demo


def main() -> None:
    """Read the one argument and run."""
    parser = argparse.ArgumentParser(prog="python -m alphatoken.demo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("demo-output"), help="folder (default demo-output)"
    )
    # Matrices this small are faster on one thread; on a busy machine two spin on each other.
    torch.set_num_threads(1)
    run_demo(parser.parse_args().out)


if __name__ == "__main__":
    main()
