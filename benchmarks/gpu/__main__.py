"""``python -m benchmarks.gpu``: numbers, ratios and a training run of one GPU, in ten minutes.

    python -m benchmarks.gpu                        writes benchmarks/gpu.json and docs/gpu.md
    python -m benchmarks.gpu --device cpu --out X   the same in small on a CPU, into a folder
    python -m benchmarks.gpu ratios                 one part; the others stay as they are
    python -m benchmarks.gpu --page                 the page again, from what is measured

Each row is written when it is done. A part that went well is not measured again by the next call
unless it is named; one that failed or was cut off is, as are parts that the time did not allow.
The exit status is 1 where a check of correctness failed; a target that is missed is written down
and fails nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.numbers import numbers
from benchmarks.gpu.page import page
from benchmarks.gpu.properties import properties
from benchmarks.gpu.ratios import contraction, ratios, rows_of_ratios
from benchmarks.gpu.training import training
from benchmarks.measure import Run, machine
from benchmarks.results import write_text

__all__ = ["PARTS", "main"]

ROOT = Path(__file__).resolve().parents[2]
JSON, PAGE = ROOT / "benchmarks/gpu.json", ROOT / "docs/gpu.md"
PARTS: dict[str, tuple[Callable[[Run], Iterator[dict[str, Any]]], str, float]] = {
    "numbers": (numbers, "Values against float64 on the CPU", 2.0),
    "training": (training, "Training in bf16", 0.7),
    "contraction": (contraction, "Routes of one contraction", 0.5),
    "ratios": (ratios, "Steps at real shapes", 4.5),
    "properties": (properties, "Property tests on this device", 2.0),
}
"""Name -> what it does, its title, and about how many minutes it takes."""
ROWS = {"ratios": rows_of_ratios}
"""Of the part that may take longer than there is time, how many rows it has; others end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[], metavar="PART")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="a folder for both files")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no row after these")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page")
    options = parser.parse_args(arguments)
    if options.out is None:
        places = JSON, PAGE
    else:
        places = options.out / "gpu.json", options.out / "gpu.md"
    if options.page:
        write_text(places[1], page(_read(places[0])))
        return 0
    on_cpu = options.device == "cpu"
    # Of several GPUs one is measured; trainers would spread over all of them.
    if not on_cpu:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[0]
    if on_cpu and options.out is None:
        parser.error("--device cpu measures nothing: give --out, or it would replace real figures")
    if not on_cpu and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --out FOLDER shows that all runs")
    run = Run(torch.device(options.device), quick=on_cpu)
    return _measure(run, options.parts, options.minutes, *places)


def _measure(run: Run, names: Sequence[str], minutes: float, path: Path, text: Path) -> int:
    found = _kept(path, run)
    begun = time.monotonic()
    for number, (name, (work, title, expected)) in enumerate(PARTS.items(), 1):
        done = found["parts"].get(name, {}).get("ok", False)
        if name not in names if names else done:
            continue
        left = minutes - (time.monotonic() - begun) / 60
        if left <= 0 or (not run.quick and left < expected / 2):
            print(f"# {name}: no time left; the same command goes on with it", file=sys.stderr)
            continue
        _say(f"[{number}/{len(PARTS)}] {title} (about {expected:g} min; {left:.1f} min left)")
        stop = time.monotonic() + 60 * left
        for part in _so_far(work(run), title, stop, ROWS[name](run) if name in ROWS else None):
            found["parts"][name] = part
            write_text(path, json.dumps(found, indent=1) + "\n")
        write_text(text, page(found))
    wrong = [name for name, part in found["parts"].items() if not part["ok"]]
    _say(f"written: {path}, {text}" + (f"; FAILED: {', '.join(wrong)}" if wrong else ""))
    return 1 if wrong else 0


def _so_far(
    work: Iterator[dict[str, Any]], title: str, stop: float, count: int | None
) -> Iterator[dict[str, Any]]:
    """The part after each of its rows, and when it is done, or cut off short of ``count`` rows."""
    rows: list[dict[str, Any]] = []
    start, error = time.monotonic(), "cut off before its end"
    part = {"title": title, "ok": False, "error": error, "rows": rows}
    try:
        for row in work:
            rows.append(row)
            _say("  " + ", ".join(f"{k} {_short(v)}" for k, v in row.items() if v is not None))
            yield {**part, "seconds": time.monotonic() - start}
            if count is not None and len(rows) < count and time.monotonic() > stop:
                break
        else:
            error = ""
    except Exception as caught:  # the other parts are wanted all the same
        traceback.print_exc()
        error = f"{type(caught).__name__}: {caught}"
    # A row of which "ok" is None could not be asked; a part with no other row has shown nothing.
    said = [row.get("ok", True) for row in rows]
    part |= {"error": error or None, "seconds": time.monotonic() - start}
    yield {**part, "ok": not error and any(said) and False not in said}


def _kept(path: Path, run: Run) -> dict[str, Any]:
    """What an earlier call found on the same machine."""
    fresh = {"machine": machine(run.device), "quick": run.quick, "parts": {}}
    found = _read(path)
    if found is None or any(found[key] != fresh[key] for key in ("machine", "quick")):
        return fresh
    return found


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:100]


def _say(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
