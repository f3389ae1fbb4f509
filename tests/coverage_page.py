"""``python -m tests.coverage_page FILE``: what the fast tests run, as a page; see `make coverage`.

Reads the combined data of coverage.py. A module of the core or of ``train`` below 95 % stands on
the page with its reason, from ``REASONS``; a module there without one ends in an error once the
page is written, and so does a reason that is no longer needed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

PROMISED = 95.0
_CORE = ("model", "estimate", "direction", "scoring", "select", "support", "oracle")

_REFUSALS = "refusals of options and files that only slow tests give"
_PROCESSES = "several processes, which only slow tests start"
REASONS: dict[str, str] = {
    "alphatoken/direction/optimizers.py": f"sharded state: {_PROCESSES}",
    "alphatoken/direction/updates.py": (
        f"state in 8 and 4 bits of packages that are not installed; sharded state: {_PROCESSES}"
    ),
    "alphatoken/model/dispatch.py": "masks that a kernel makes by itself, and two refusals",
    "alphatoken/model/transformers.py": "convolutions in a block, and refusals of other models",
    "alphatoken/oracle/scope.py": f"wrappers of distributed training: {_PROCESSES}",
    "alphatoken/oracle/transfer.py": "three refusals",
    "alphatoken/train/__init__.py": "an environment without TRL: another process without it",
    "alphatoken/train/checkpoint.py": f"failed and interrupted saves, and {_PROCESSES}",
    "alphatoken/train/checks.py": _REFUSALS,
    "alphatoken/train/distributed.py": _PROCESSES,
    "alphatoken/train/dpo.py": f"policies on pairs and a Fisher by tokens: slow tests; {_REFUSALS}",
    "alphatoken/train/fisher_cache.py": f"waiting for the process that fits: {_PROCESSES}",
    "alphatoken/train/loading.py": "models that cannot be read, and other dtypes: slow tests",
    "alphatoken/train/manifest.py": "damaged files of a checkpoint: slow tests",
    "alphatoken/train/options.py": _REFUSALS,
    "alphatoken/train/policy_weigher.py": f"{_REFUSALS}, and {_PROCESSES}",
    "alphatoken/train/policy_stage.py": f"policies in a run: slow tests; {_REFUSALS}",
    "alphatoken/train/records.py": f"an environment without matplotlib, and {_PROCESSES}",
    "alphatoken/train/resume.py": f"other library versions, and {_PROCESSES}",
    "alphatoken/train/shards.py": f"FSDP2 and ZeRO-3: {_PROCESSES}",
    "alphatoken/train/token_table.py": "files of another version or damaged ones",
}
"""Why a module of the core or of ``train`` has less, by its path."""


def group_of(path: str) -> str:
    """The room of a module; those that values come out of, and their oracle, are one: the core."""
    parts = Path(path).parts
    return "core" if len(parts) == 2 or parts[1] in _CORE else parts[1]


def share(sums: dict[str, int]) -> float:
    """Lines and branches that ran, of all, in percent."""
    count = sums["num_statements"] + sums["num_branches"]
    found = sums["covered_lines"] + sums["covered_branches"]
    return 100.0 * found / count if count else 100.0


def page(files: dict[str, Any], reasons: dict[str, str]) -> tuple[str, list[str]]:
    """The page, from coverage.py's JSON, and what is wrong with the reasons."""
    groups: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    low: dict[str, dict[str, Any]] = {}
    for path, entry in sorted(files.items()):
        group = group_of(path)
        for key, number in entry["summary"].items():
            if isinstance(number, int):
                groups[group][key] += number
                groups["all"][key] += number
        if group in ("core", "train") and share(entry["summary"]) < PROMISED:
            low[path] = entry["summary"]
    wrong = [f"{path} has no reason" for path in sorted(set(low) - set(reasons))]
    wrong += [f"{path} needs no reason any more" for path in sorted(set(reasons) - set(low))]
    lines = [
        "<!-- written by `make coverage` -->",
        "# Coverage",
        "",
        "Lines and branches of `alphatoken/` that the fast tests run (`make coverage`, profile "
        "`dev`, Linux, CPU; processes that tests start are counted). It says what is run, not "
        "what is checked: for that see the [kill matrix](kill-matrix.md).",
        "",
        "| room | lines | run | branches | run | together |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    order = ["core", "train", *sorted(set(groups) - {"core", "train", "all"}), "all"]
    for name in order:
        sums = groups[name]
        lines.append(
            f"| {name} | {sums['num_statements']} | {sums['covered_lines']} | "
            f"{sums['num_branches']} | {sums['covered_branches']} | {share(sums):.1f} % |"
        )
    if low:
        lines += ["", f"Modules of core and train below {PROMISED:.0f} %:", ""]
        lines += ["| module | together | why |", "|---|---:|---|"]
        lines += [
            f"| `{path}` | {share(low[path]):.1f} % | {reasons.get(path, 'not explained')} |"
            for path in low
        ]
    return "\n".join([*lines, ""]), wrong


def main(out: str) -> None:
    """Write the page."""
    import coverage

    data = coverage.Coverage()
    data.load()
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "coverage.json")
        data.json_report(outfile=str(found))
        files = json.loads(found.read_text("utf-8"))["files"]
    text, wrong = page(files, REASONS)
    Path(out).write_text(text, encoding="utf-8")
    if wrong:
        sys.exit("tests/coverage_page.py: " + "; ".join(wrong))


if __name__ == "__main__":
    main(sys.argv[1])
