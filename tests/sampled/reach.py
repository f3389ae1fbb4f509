"""Which test executes which line of which function, and how long it takes.

A pytest plugin around coverage.py. What it finds is kept in one file, by test and by function
(lines count from the function's ``def``), so that a later run measures only what is new.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.property.sources import PACKAGE, definition
from tests.sampled.operators import fingerprint, functions

EVERY = 20
"""Tests between two writes of the file."""


def write_whole(path: Path, content: object) -> None:
    """Write JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(part, path)


class Reach:
    """Runs the tests and keeps, for each one that passes, its seconds and the lines it executes.

    The file: ``{"tests": {test: {"seconds": s, "lines": {function: [line, ...]}}},
    "functions": {function: digest of its source}}``.
    """

    def __init__(self, file: Path, modules: list[str]) -> None:
        import coverage

        self.file, self.known = file, {"tests": {}, "functions": {}}
        if file.is_file():
            self.known = json.loads(file.read_text(encoding="utf-8"))
        self.targets: dict[str, list[tuple[int, int, str]]] = {}
        for target in functions(modules):
            _, node, classes = definition(target)
            parts = target.split(".")[: -len(classes) - 1]
            source = str(PACKAGE.joinpath(*parts).with_suffix(".py"))
            end = node.end_lineno or node.lineno
            self.targets.setdefault(source, []).append((node.lineno, end, target))
            self.known["functions"][target] = fingerprint(target)
        self.coverage = coverage.Coverage(
            data_file=None, config_file=False, include=[f"{PACKAGE}/*"]
        )
        self.coverage.set_option("run:disable_warnings", ["no-data-collected"])
        self.since = 0

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Only tests that were not measured yet."""
        new = [item for item in items if item.nodeid not in self.known["tests"]]
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid in self.known["tests"]])
        items[:] = new

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure one test, its fixtures included."""
        self.passed = False
        self.coverage.erase()
        self.coverage.start()
        begun = time.process_time()
        try:
            return (yield)
        finally:
            self.coverage.stop()
            self.keep(item.nodeid, time.process_time() - begun)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that fails or skips is no judge."""
        if report.when == "call":
            self.passed = report.outcome == "passed"

    def keep(self, test: str, seconds: float) -> None:
        """Remember one test."""
        data = self.coverage.get_data()
        lines: dict[str, list[int]] = {}
        for file in data.measured_files():
            executed = data.lines(file) or []
            for first, last, target in self.targets.get(file, []):
                # The line of the def itself runs at import.
                inside = sorted(n - first for n in executed if first < n <= last)
                if inside:
                    lines[target] = inside
        entry: dict[str, Any] = {"seconds": round(seconds, 3), "lines": lines}
        self.known["tests"][test] = entry if self.passed else {"seconds": None, "lines": {}}
        self.since += 1
        if self.since % EVERY == 0:
            write_whole(self.file, self.known)

    def pytest_sessionfinish(self) -> None:
        """The last write."""
        write_whole(self.file, self.known)
