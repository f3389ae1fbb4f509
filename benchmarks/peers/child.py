"""In a fresh process: the peak memory of one side, or the largest sizes that fit.

``python -m benchmarks.peers.child memory NAME THREADS``
``python -m benchmarks.peers.child limits NAME THREADS MIB SECONDS``

NAME is a peer's, or ``ours:ESTIMATOR``. Prints one JSON object a line.
"""

from __future__ import annotations

import gc
import json
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.peak import peak_mib
from benchmarks.peers import sizes
from benchmarks.peers.agreement import ours
from benchmarks.peers.peer import Run, Work, started
from benchmarks.peers.registry import BY_NAME

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "Cannot allocate")
"""What torch's allocator, the C++ library and the system say."""


@contextmanager
def side(name: str, work: Work) -> Iterator[Run]:
    """A peer, or ours, set up for this work."""
    if not name.startswith("ours:"):
        with started(BY_NAME[name], work) as run:
            yield run
        return
    score = ours(work, name.removeprefix("ours:"))
    yield lambda: score().total


def status_mib(field: str) -> float:
    """One line of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith(field)).split()[1]) / 1024


def warm(name: str, model: torch.nn.Module) -> None:
    """One tiny run: imports and what libraries keep for good are no part of the measurement."""
    tiny = sizes.batch_of(1, 8, 9)
    work = Work(model, tiny, [tiny], sizes.LAYERS)
    with side(name, work) as run:
        run()
    gc.collect()


def memory(name: str) -> None:
    """Peak of the whole work above what the process held before."""
    model = sizes.model()
    warm(name, model)
    before = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    with side(name, sizes.standard(model, disposable=True)) as run:
        run()
    print(json.dumps({"mib": peak_mib() - before}))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError inside after so much processor time of all threads together.

    Not by the clock: on a machine that others load, that would measure the others.
    """

    def late(_: int, __: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def outcome(name: str, work: Work, seconds: float) -> str:
    """ "fits", or what stopped it: "memory", "time", or the error in words."""
    try:
        with side(name, work) as run, time_limit(seconds):
            run()
    except TimeoutError:
        return "time"
    except Exception as error:
        return "memory" if out_of_memory(error) else f"{type(error).__name__}: {error}"
    return "fits"


def doubling(name: str, axis: str, model: torch.nn.Module, seconds: float) -> Iterator[Any]:
    """Each size tried and what came of it, up to the first that does not fit."""
    grow, size, last = sizes.AXES[axis]
    while size <= last:
        found = outcome(name, grow(model, size), seconds)
        gc.collect()
        yield {"axis": axis, "size": size, "outcome": found}
        if found != "fits":
            return
        size *= 2


def limits(name: str, mib: float, seconds: float) -> None:
    """Largest sizes within ``mib`` beyond the warm process and ``seconds`` of processor time.

    The seconds are for each size. The budget is RLIMIT_DATA (private writable memory), to which
    Linux holds a process.
    """
    model = sizes.model()
    warm(name, model)
    held = int(status_mib("VmData") * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (held + int(mib * 2**20), resource.RLIM_INFINITY))
    for axis in sizes.AXES:
        for line in doubling(name, axis, model, seconds):
            print(json.dumps(line), flush=True)


def main(arguments: list[str]) -> None:
    """See the module's text."""
    what, name, threads, *rest = arguments
    torch.set_num_threads(int(threads))
    if what == "memory":
        memory(name)
    else:
        limits(name, *map(float, rest))


if __name__ == "__main__":
    main(sys.argv[1:])
