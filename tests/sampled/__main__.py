"""``python -m tests.sampled measure``, then ``run``: how many operator mutants survive.

    measure   which test executes which line (once; later only tests that are new)
    run       draw mutants and hunt them; goes on where it was stopped
    survivors print those that no test saw, with what was changed
    publish   keep what was found for the page of kills (found.json)

Everything lies in build/mutants/, which git ignores; docs/kill-matrix.md shows what was found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
from pathlib import Path

import pytest

from tests.property.sources import PACKAGE
from tests.sampled.operators import Site, functions, sites

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "mutants"
_CORE = ("model", "estimate", "direction", "scoring", "select")
TESTS = ["tests/property", "tests/integration"]
DESELECT = ["test_mutants.py", "test_teeth.py", "test_generators.py", "test_fidelity_"]
"""They test the tests, or what lies above the core."""


def rooms() -> dict[str, list[str]]:
    """Modules to be mutated, by room."""

    def modules(room: str) -> list[str]:
        return [f"{room}.{f.stem}" for f in sorted((PACKAGE / room).glob("[!_]*.py"))]

    core = ["scorer", "values", "support.precision", *itertools.chain(*map(modules, _CORE))]
    return {"core": core, "train": modules("train"), "policies": modules("train/policies")}


def sample(modules: list[str], count: int, seed: int) -> list[Site]:
    """The first ``count`` of all mutants in an order drawn by ``seed``."""
    every = [site for target in functions(modules) for site in sites(target)]
    random.Random(seed).shuffle(every)
    return every[:count]


def _pytest(plugin: object, arguments: list[str]) -> int:
    quiet = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "--no-header",
        "-m",
        "not slow and not smollm2",
    ]
    ignored = [f"--ignore-glob=*{part}*" for part in DESELECT]
    return int(pytest.main([*quiet, *ignored, *arguments], plugins=[plugin]))


def _publish(note: str) -> int:
    from tests.sampled.publish import FOUND, summary
    from tests.sampled.reach import write_whole

    found = {}
    for room in rooms():
        file = FOLDER / f"{room}.json"
        if file.is_file():
            found[room] = summary(json.loads(file.read_text(encoding="utf-8")))
    write_whole(FOUND, {"note": note, "rooms": found})
    return 0


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sampled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["measure", "run", "survivors", "publish"])
    parser.add_argument("tests", nargs="*", default=TESTS, help="which tests may judge")
    parser.add_argument("--room", choices=list(rooms()), default="core")
    parser.add_argument("--count", type=int, default=150, help="mutants of the room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20, help="of tests for each mutant")
    parser.add_argument("--most", type=int, default=12, help="tests for each mutant")
    parser.add_argument("--note", default="", help="of what is published: commit, machine")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    reach, results = FOLDER / "reach.json", FOLDER / f"{options.room}.json"
    if options.what == "measure":
        from tests.sampled.reach import Reach

        every = [module for modules in rooms().values() for module in modules]
        return _pytest(Reach(reach, every), options.tests)
    if options.what == "publish":
        return _publish(options.note)
    drawn = sample(rooms()[options.room], options.count, options.seed)
    if options.what == "survivors":
        found = json.loads(results.read_text(encoding="utf-8"))
        for site in drawn:
            entry = found.get(site.key)
            if entry is not None and entry["end"] in ("survived", "unreached"):
                print(f"{entry['end']} {site.key} ({site.operator}, line {site.line}, "
                      f"{entry['tests']} tests)\n  {site.before}\n  {site.after}")  # fmt: skip
        return 0
    from tests.sampled.hunt import Hunt

    with (FOLDER / f"{options.room}.log").open("a", encoding="utf-8", buffering=1) as log:

        def say(line: str) -> None:
            print(line, file=log)
            print(line, file=sys.__stderr__, flush=True)

        plugin = Hunt(drawn, reach, results, seconds=options.seconds, most=options.most, say=say)
        return _pytest(plugin, options.tests)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
