"""In a fresh process: the peak memory of one side, printed as JSON.

    python -m benchmarks.peers.child NAME --threads 2

NAME is a peer's, or ``ours:ESTIMATOR``. The peak is that of the whole work, above what the process
held before it.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.peak import peak_mib
from benchmarks.peers import sizes
from benchmarks.peers.agreement import ours
from benchmarks.peers.peer import Run, Work, started
from benchmarks.peers.registry import BY_NAME


@contextmanager
def side(name: str, work: Work) -> Iterator[Run]:
    """A peer, or ours, set up for this work."""
    if not name.startswith("ours:"):
        with started(BY_NAME[name], work) as run:
            yield run
        return
    score = ours(work, name.removeprefix("ours:"))
    yield lambda: score().total


def memory(name: str) -> float:
    """Peak MiB of the whole work, after a tiny run: what libraries keep for good is no part."""
    model = sizes.model()
    tiny = sizes.batch_of(1, 8, 9)
    with side(name, Work(model, tiny, [tiny], sizes.LAYERS)) as run:
        run()
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    before = int(next(x for x in lines if x.startswith("VmRSS")).split()[1]) / 1024
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    with side(name, sizes.standard(model, disposable=True)) as run:
        run()
    return peak_mib() - before


def main() -> None:
    """Do one thing and print the peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps({"mib": memory(options.name)}))


if __name__ == "__main__":
    main()
