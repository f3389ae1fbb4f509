"""``python -m benchmarks.run``: what is promised, measured into results.json.

    python -m benchmarks.run              the targets, about 25 minutes on two quiet cores
    python -m benchmarks.run NAME...      some cases, also those against peers; other rows stay
    python -m benchmarks.run --list       name the cases

Each case is written when it is done: after an interrupt, what was measured stays, and the command
with the remaining names goes on. Each run adds a line to history.jsonl. ``python -m benchmarks``
writes the tables of the pages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from alphatoken.support.storage import write_text
from benchmarks import cases, real
from benchmarks.measure import Run, machine, quiet
from benchmarks.pages import RESULTS, measured
from benchmarks.peers.cases import CASES as PEER_CASES
from benchmarks.real import checkpointed_memory, real_memory
from benchmarks.targets import judged

Row = dict[str, Any]
Case = Callable[[Run], Iterator[Row]]
"""One measurement: yields rows, and is called by its name."""


def real_smollm2(run: Run) -> Iterator[Row]:
    """SmolLM2-135M on real rows: forward, step, values, validation side, first use."""
    yield from real.rows_of(run, real.SMOLLM2)


def real_gemma3(run: Run) -> Iterator[Row]:
    """Gemma 3 270M likewise, of whose weights two thirds are the head."""
    yield from real.rows_of(run, real.GEMMA3)


def differences_smollm2(run: Run) -> Iterator[Row]:
    """SmolLM2-135M: label values over all parameters by two forwards, or by one beside a step."""
    yield from real.differences_of(run, real.SMOLLM2)


def differences_gemma3(run: Run) -> Iterator[Row]:
    """Gemma 3 270M likewise."""
    yield from real.differences_of(run, real.GEMMA3)


MINUTES: dict[Case, float] = {
    cases.projected_vs_gram: 0.7,
    cases.label_vs_per_token: 0.3,
    cases.time_exponent: 1.5,
    cases.score_long: 0.5,
    cases.time_against_validation: 0.1,
    cases.label_vs_step: 1.6,
    cases.score_overhead: 2.2,
    cases.score_peak_memory: 1.3,
    real_smollm2: 5.0,
    real_gemma3: 8.0,
    differences_smollm2: 6.0,
    differences_gemma3: 10.0,
    real_memory: 4.0,
    checkpointed_memory: 2.0,
    **dict.fromkeys(PEER_CASES, 1.5),
}
"""About how long each case takes on two cores, for the estimate of what remains.

Cases against peers have no target.
"""


def title_of(case: Case) -> str:
    """First line of the docstring."""
    return (case.__doc__ or "").splitlines()[0]


def chosen(names: Sequence[str]) -> list[Case]:
    """The cases to run, in order: those named, or those with a target."""
    return [c for c in MINUTES if (c.__name__ in names if names else c not in PEER_CASES)]


def measure(picked: Sequence[Case], run: Run, folder: Path) -> None:
    """Run the cases one after the other; after each, the results are whole."""
    machine_facts, calm = machine(run.device), quiet()
    begun, done, new = time.monotonic(), 0.0, list[Row]()
    whole = sum(map(MINUTES.__getitem__, picked))
    for index, case in enumerate(picked, 1):
        remains = whole - done
        if done:  # this machine's own speed, once it is known
            remains *= (time.monotonic() - begun) / 60 / done
        print(
            f"# [{index}/{len(picked)}] {case.__name__}: {title_of(case)} "
            f"(about {remains:.0f} min remain for all)",
            file=sys.stderr,
            flush=True,
        )
        rows = []
        for row in case(run):
            rows.append(finished(row, machine_facts, device=run.device.type))
            print(_line(rows[-1]), flush=True)
        done += MINUTES[case]
        new += rows
        write(folder / "results.json", merged(measured(folder / "results.json"), rows))
    remember(folder / "history.jsonl", machine_facts, calm, new)


def _line(row: Row) -> str:
    verdict = {True: ", met", False: ", NOT met", None: ""}[row["met"]]
    target = "" if row["target"] is None else f", target {row['target']:.3g}{verdict}"
    return f"{row['name']} ({row['size']}): {row['ratio']:.3g}, floor {row['floor']:.3g}{target}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases named on the command line, or those with targets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.__name__ for case in MINUTES]
    parser.add_argument("cases", nargs="*", choices=[[], *names], default=[], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one pair: a trial run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--out", type=Path, help="a folder for the files, not the repository's own")
    options = parser.parse_args(arguments)
    if options.quick and options.out is None and not options.list:
        parser.error("--quick measures nothing: give --out, or its rows would replace real ones")
    if options.list:
        for case in MINUTES:
            target = "" if case in PEER_CASES else "target"
            print(f"{case.__name__:28}{target:8}{title_of(case)}")
        return
    torch.set_num_threads(options.threads)
    cuda = torch.cuda.is_available() if options.device == "auto" else options.device == "cuda"
    run = Run(torch.device("cuda" if cuda else "cpu"), options.quick)
    try:
        measure(chosen(options.cases), run, options.out or RESULTS.parent)
    except KeyboardInterrupt:
        print("# interrupted; finished cases are written", file=sys.stderr)
        raise SystemExit(130) from None


# --- the file of results ------------------------------------------------------------------------


def finished(row: Row, machine: Mapping[str, str], *, device: str = "cpu") -> Row:
    """The row with target and machine."""
    return {**judged(row), "machine": dict(machine), "device": device}


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """The old rows with those of a newly measured name, on its kind of device, replaced."""
    anew = {(row["name"], row["device"]) for row in new}
    return [row for row in old if (row["name"], row["device"]) not in anew] + new


def write(path: Path, rows: list[Row]) -> None:
    """The rows as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(rows, indent=1) + "\n")


def remember(path: Path, machine: Mapping[str, str], quiet: bool, rows: Sequence[Row]) -> None:
    """Add one run to the history: commit, machine, whether it was quiet, and the ratios."""
    git = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"]
    described = subprocess.run(git, capture_output=True, text=True, check=False)
    line = {
        "commit": described.stdout.strip() or None,
        "machine": dict(machine),
        "quiet": quiet,
        "ratios": {f"{row['name']}: {row['size']}": round(row["ratio"], 4) for row in rows},
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
