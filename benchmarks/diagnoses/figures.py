"""docs/fidelity.json: all that the pages show of the runs, so that they can be written again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from alphatoken.diagnose.diagnosis import Diagnosis
from alphatoken.diagnose.registry import DIAGNOSTICS
from benchmarks.diagnoses.facts import FACTS, cell
from benchmarks.diagnoses.subjects import Subject


def collect(subject: Subject, folder: Path) -> dict[str, Any]:
    """Figures of the diagnoses that are finished in a folder."""
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    done = {
        entry.name: Diagnosis.load(folder / entry.name)
        for entry in DIAGNOSTICS
        if Diagnosis.finished(folder / entry.name)
    }
    seconds = [float(record["diagnostics"][name]["seconds"]) for name in done]
    return {
        "name": subject.name,
        "said": subject.said,
        "command": shlex.join(subject.command("out")).replace("'", ""),
        "minutes": round(sum(seconds) / 60, 1),
        "facts": {
            table: {
                fact.label: cell(fact, done[fact.diagnostic])
                for fact in facts
                if fact.diagnostic in done
            }
            for table, facts in FACTS.items()
        },
    }
