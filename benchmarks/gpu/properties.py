"""The property tests that run on every device that is here, on this one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.measure import Run

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
    found: dict[str, Any] = {kind: int(count) for count, kind in counts}
    bad = "" if done.returncode == 0 else done.stdout[-1500:]
    yield {"ok": done.returncode == 0 and found.get("passed", 0) > 0, **found, "why": bad}
