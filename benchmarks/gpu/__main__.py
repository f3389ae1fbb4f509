"""``python -m benchmarks.gpu``: are values and training on this GPU what they should be?

    python -m benchmarks.gpu                        writes benchmarks/gpu.json
    python -m benchmarks.gpu --device cpu --out X   the same in small on a CPU, into a folder
    python -m benchmarks.gpu training               one part; the others stay as they are

Each part is written when it is done. The exit status is 1 where a check of correctness failed.
``python -m benchmarks.run --device cuda`` measures what it costs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from alphatoken.support.storage import write_json
from benchmarks.gpu.numbers import numbers
from benchmarks.gpu.page import JSON
from benchmarks.gpu.training import training
from benchmarks.measure import Run, machine
from benchmarks.pages import load

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300
_FILES = ("tests/property/test_transformers.py", "tests/property/test_contraction.py")


def properties(run: Run) -> Iterator[dict[str, Any]]:
    """What pytest says of them; needs pytest and hypothesis."""
    missing = [name for name in ("pytest", "hypothesis", "jaxtyping") if find_spec(name) is None]
    if missing:
        yield {"ok": None, "why": f"not installed: {', '.join(missing)}"}
        return
    # Of the machine's own plugins none is wanted, and its packages may warn of each other.
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
    command += ["-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin", "-k"]
    # Contractions draw their device among those that are here; models name it.
    chosen = f"{run.device.type} or test_contraction"
    command += [chosen, *(_FILES[1:] if run.quick else _FILES)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        yield {"ok": False, "why": f"not done within {SECONDS} s"}
        return
    counts = re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)
    counted: dict[str, Any] = {kind: int(count) for count, kind in counts}
    bad = "" if done.returncode == 0 else done.stdout[-1500:]
    yield {"ok": done.returncode == 0 and counted.get("passed", 0) > 0, **counted, "why": bad}


PARTS: dict[str, Callable[[Run], Iterator[dict[str, Any]]]] = {
    "numbers": numbers,
    "training": training,
    "properties": properties,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[], metavar="PART")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="a folder for gpu.json")
    options = parser.parse_args(arguments)
    on_cpu = options.device == "cpu"
    if on_cpu and options.out is None:
        parser.error("--device cpu measures nothing: give --out, or it would replace real figures")
    if not on_cpu and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --out FOLDER shows that all runs")
    if not on_cpu:  # of several GPUs one is measured; trainers would spread over all of them
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
    path = JSON if options.out is None else options.out / "gpu.json"
    run = Run(torch.device(options.device), quick=on_cpu)
    report = {"parts": {}, **load(path), "machine": machine(run.device)}
    for name in options.parts or PARTS:
        report["parts"][name] = _asked(name, PARTS[name](run))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, report)
    wrong = [name for name, part in report["parts"].items() if not part["ok"]]
    print(f"# written: {path}" + (f"; FAILED: {', '.join(wrong)}" if wrong else ""))
    return 1 if wrong else 0


def _asked(name: str, work: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The rows of one part, and whether it went well."""
    rows: list[dict[str, Any]] = []
    error = None
    try:
        for row in work:
            rows.append(row)
            print(f"# {name}: " + ", ".join(f"{k} {v}" for k, v in row.items()), file=sys.stderr)
    except Exception as caught:  # the other parts are wanted all the same
        traceback.print_exc()
        error = f"{type(caught).__name__}: {caught}"
    # A row of which "ok" is None could not be asked; a part with no other row has shown nothing.
    said = [row["ok"] for row in rows]
    return {"rows": rows, "error": error, "ok": not error and any(said) and False not in said}


if __name__ == "__main__":
    raise SystemExit(main())
