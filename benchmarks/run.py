"""``python -m benchmarks.run``: measurements into results.json and docs/benchmarks.md.

    python -m benchmarks.run              the targets, about 25 minutes on two quiet cores
    python -m benchmarks.run --all        every size as well, optimizer steps, and precision
    python -m benchmarks.run NAME...      some cases; rows of the others stay as they are
    python -m benchmarks.run --page       the page and figures again, from what is measured

Each case is written when it is done: after an interrupt, what was measured stays, and the command
with the remaining names goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases, exponent, layers, peers, precision, real, results, step
from benchmarks.measure import Ceiling, Run, ceiling, machine
from benchmarks.page import write_page
from benchmarks.real_peak import real_memory
from benchmarks.results import Places

__all__ = ["CASES", "Case", "main", "measure"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        work: yields rows.
        minutes: about how long on two cores; only for the estimate of what remains.
        target: part of the default run.
        cpu_only: measures nothing on an accelerator.
    """

    work: Callable[[Run], Iterator[Row]]
    minutes: float
    target: bool = False
    cpu_only: bool = False

    @property
    def name(self) -> str:
        """As on the command line."""
        return self.work.__name__

    @property
    def title(self) -> str:
        """First line of the docstring."""
        return (self.work.__doc__ or "").splitlines()[0]


def train_step(run: Run) -> Iterator[Row]:
    """One optimizer step of AlphaSFTTrainer against one of TRL's SFTTrainer, in turn."""
    yield from step.train_step(_step_size(run), run.pairs(7))


def train_peak_memory(run: Run) -> Iterator[Row]:
    """Peak memory of the same two trainers, each in a fresh process."""
    yield from step.train_peak_memory(_step_size(run))


def real_smollm2(run: Run) -> Iterator[Row]:
    """SmolLM2-135M on real rows: forward, step, values, validation side, first use."""
    yield from real.rows_of(run, real.SMOLLM2)


def real_gemma3(run: Run) -> Iterator[Row]:
    """Gemma 3 270M likewise, of whose weights two thirds are the head."""
    yield from real.rows_of(run, real.GEMMA3)


def peer_time(run: Run) -> Iterator[Row]:
    """Our values and each peer's on the same work, in turn; agreement is checked first."""
    yield from _peers(run, "peer_time")


def peer_memory(run: Run) -> Iterator[Row]:
    """Peak memory of fresh processes: ours and each peer's."""
    yield from _peers(run, "peer_memory")


def peer_limits(run: Run) -> Iterator[Row]:
    """The largest T and the most validation tokens that fit, ours beside each peer's."""
    yield from _peers(run, "peer_limits")


def peer_correlation(run: Run) -> Iterator[Row]:
    """How each peer ranks the tokens of real text, against label values."""
    yield from _peers(run, "peer_correlation")


def _peers(run: Run, name: str) -> Iterator[Row]:
    """Not part of a quick look: each peer has sizes of its own."""
    if not run.quick:
        yield from next(case for case in peers.CASES if case.__name__ == name)()


def _step_size(run: Run) -> step.Size:
    if not run.quick:
        return step.SIZE
    return step.Size(width=64, depth=4, vocabulary=128, rows=8, length=32)


CASES = (
    Case(cases.projected_vs_gram, 0.7, target=True),
    Case(cases.label_vs_per_token, 0.3, target=True),
    Case(exponent.time_exponent, 1.5, target=True),
    Case(exponent.time_against_validation, 0.1, target=True),
    Case(cases.label_vs_step, 1.6, target=True),
    Case(cases.score_overhead, 2.2, target=True),
    Case(cases.score_peak_memory, 1.3, target=True),
    Case(real_smollm2, 5.0, target=True),
    Case(real_gemma3, 8.0, target=True),
    Case(real_memory, 4.0, target=True),
    Case(cases.projected_vs_gram_sizes, 0.2),
    Case(cases.label_vs_per_token_sizes, 0.2),
    Case(cases.label_vs_step_sizes, 0.3),
    Case(cases.score_overhead_small, 0.8),
    Case(cases.score_peak_memory_length, 3.0),
    Case(layers.layer_3b, 2.0),
    Case(train_step, 20.0, cpu_only=True),
    Case(train_peak_memory, 4.0, cpu_only=True),
    Case(peer_time, 2.0, cpu_only=True),
    Case(peer_memory, 1.5, cpu_only=True),
    Case(peer_limits, 4.0, cpu_only=True),
    Case(peer_correlation, 1.0, cpu_only=True),
)


def chosen(names: Sequence[str], *, everything: bool, device: torch.device) -> list[Case]:
    """The cases to run, in order."""
    picked = [c for c in CASES if (c.name in names if names else everything or c.target)]
    kept = [c for c in picked if not (c.cpu_only and device.type != "cpu")]
    for case in picked:
        if case not in kept:
            print(f"# {case.name}: measures on the CPU only, left out", file=sys.stderr)
    return kept


def measure(picked: Sequence[Case], run: Run, places: Places) -> None:
    """Run the cases one after the other; after each, results and page are whole."""
    best: Ceiling | None = ceiling(run)
    found = machine(run.device)
    begun, done = time.monotonic(), 0.0
    whole = sum(case.minutes for case in picked)
    for index, case in enumerate(picked, 1):
        remains = whole - done
        if done:  # this machine's own speed, once it is known
            remains *= (time.monotonic() - begun) / 60 / done
        print(
            f"# [{index}/{len(picked)}] {case.name}: {case.title} "
            f"(about {remains:.0f} min remain for all)",
            file=sys.stderr,
            flush=True,
        )
        rows = []
        for row in case.work(run):
            rows.append(results.finished(row, found, best, device=run.device.type))
            print(_line(rows[-1]), flush=True)
        done += case.minutes
        together = results.merged(results.load(places.results), rows)
        results.write(places.results, together)
        write_page(together, places)


def _line(row: Row) -> str:
    verdict = {True: ", met", False: ", NOT met", None: ""}[row["met"]]
    target = "" if row["target"] is None else f", target {row['target']:.3g}{verdict}"
    return f"{row['name']} ({row['size']}): {row['ratio']:.3g}, floor {row['floor']:.3g}{target}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases named on the command line, those with targets, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("cases", nargs="*", choices=[[], *names], default=[], metavar="NAME")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--targets", action="store_true", help="what is promised; the default")
    which.add_argument("--all", action="store_true", help="every case")
    which.add_argument("--page", action="store_true", help="measure nothing, write the page")
    which.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one pair: a trial run")
    parser.add_argument("--repeats", type=int, help="pairs a row, instead of each case's own")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--out", type=Path, help="a folder for all files, not the repository's own")
    options = parser.parse_args(arguments)
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    if options.quick and options.out is None and not (options.page or options.list):
        parser.error("--quick measures nothing: give --out, or its rows would replace real ones")
    if options.list:
        for case in CASES:
            print(f"{case.name:28}{'target  ' if case.target else '        '}{case.title}")
        return
    places = Places() if options.out is None else Places.under(options.out)
    if options.page:
        write_page(results.load(places.results), places)
        return
    torch.set_num_threads(options.threads)
    cuda = torch.cuda.is_available() if options.device == "auto" else options.device == "cuda"
    run = Run(torch.device("cuda" if cuda else "cpu"), options.quick, options.repeats)
    try:
        measure(chosen(options.cases, everything=options.all, device=run.device), run, places)
        if options.all:
            precision.measure(places, run.device, quick=options.quick)
            write_page(results.load(places.results), places)
    except KeyboardInterrupt:
        print("# interrupted; finished cases are written", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
