"""Each sampled mutant against the quickest tests that execute its line, in a forked child.

The parent collects the tests once, and so has everything imported; a child replaces the function's
code, runs its tests until one fails, and ends. A mutant is *killed* by a failing test, or by taking
several times the processor time that its tests need without it; it *survives* if all pass; it is
*unreached* if no test executes its line; *stillborn* if it is no function any more.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.sampled.operators import Site, fingerprint, mutated
from tests.sampled.reach import write_whole

Entry = dict[str, Any]


class Hunt:
    """A pytest plugin that runs no test in this process.

    Args:
        sample: the mutants, in order.
        reach: file of ``reach.Reach``.
        results: file of what was found; mutants in it are not tried again, unless they survived
            fewer tests than ``seconds`` allow now.
        seconds: processor seconds of (unmutated) tests a mutant has to survive.
        most: how many tests, at most.
        say: where progress goes.
    """

    def __init__(
        self, sample: list[Site], reach: Path, results: Path, *, seconds: float, most: int,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.sample, self.results, self.seconds, self.most, self.say = (
            sample, results, seconds, most, say,
        )  # fmt: skip
        self.reach = json.loads(reach.read_text(encoding="utf-8"))
        self.found: dict[str, Entry] = {}
        if results.is_file():
            self.found = json.loads(results.read_text(encoding="utf-8"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of pytest's own loop."""
        importlib.import_module("tests.property.mutation")  # once, for all children
        items = {item.nodeid: item for item in session.items}
        for item in items.values():
            _without_shrinking(item)
        todo = [site for site in self.sample if not self._done(site)]
        begun = time.monotonic()
        for number, site in enumerate(todo, 1):
            self.found[site.key] = entry = self._try(site, items)
            write_whole(self.results, self.found)
            rate = number / (time.monotonic() - begun)
            ends = Counter(e["end"] for e in self.found.values())
            self.say(
                f"{number} of {len(todo)}  {entry['end']:9} {site.target} ({site.operator})  "
                f"[{60 * rate:.1f} a minute, {(len(todo) - number) / rate / 60:.0f} min left; "
                + ", ".join(f"{n} {end}" for end, n in sorted(ends.items())) + "]"
            )  # fmt: skip
        return True

    def _done(self, site: Site) -> bool:
        entry = self.found.get(site.key)
        if entry is None or entry["source"] != fingerprint(site.target):
            return False
        return entry["end"] not in ("survived", "unreached") or entry["budget"] >= self.seconds

    def _try(self, site: Site, items: dict[str, pytest.Item]) -> Entry:
        tests = self._tests(site, items)
        entry: Entry = {
            "operator": site.operator, "line": site.line, "before": site.before,
            "after": site.after, "source": fingerprint(site.target), "budget": self.seconds,
            "tests": len(tests),
        }  # fmt: skip
        if not tests:
            return {**entry, "end": "unreached"}
        usual = sum(self.reach["tests"][item.nodeid]["seconds"] for item in tests)
        return {**entry, "usual": round(usual, 2), **_child(site, tests, 20 + 4 * usual)}

    def _tests(self, site: Site, items: dict[str, pytest.Item]) -> list[pytest.Item]:
        """The quickest tests that execute the line, a file's second one after every first one."""
        changed = self.reach["functions"].get(site.target) != fingerprint(site.target)
        able = []
        for name, known in self.reach["tests"].items():
            lines = known["lines"].get(site.target)
            if name in items and lines and (changed or _executes(site, lines)):
                able.append((known["seconds"], name))
        seen: Counter[str] = Counter()
        ranked = []
        for seconds, name in sorted(able):
            file = name.partition("::")[0]
            ranked.append((seen[file], seconds, name))
            seen[file] += 1
        chosen: list[pytest.Item] = []
        total = 0.0
        for _, seconds, name in sorted(ranked):
            if chosen and (total + seconds > self.seconds or len(chosen) == self.most):
                continue
            chosen.append(items[name])
            total += seconds
        return chosen


def _without_shrinking(item: pytest.Item) -> None:
    """A kill needs a failing example, not the smallest one."""
    from hypothesis import Phase, settings  # pytest wants to be first

    function = getattr(item, "function", None)
    drawn = getattr(function, "_hypothesis_internal_use_settings", None)
    if drawn is not None:
        phases = (Phase.explicit, Phase.generate)
        function._hypothesis_internal_use_settings = settings(drawn, phases=phases, database=None)


def _executes(site: Site, lines: list[int]) -> bool:
    """Whether the statement of the change ran; defaults belong to every call."""
    return site.path[0][0] == "args" or any(
        site.line <= line <= site.line + site.before.count("\n") for line in lines
    ) or site.line < min(lines)  # fmt: skip


def _child(site: Site, tests: list[pytest.Item], limit: float) -> Entry:
    """Run the tests on the mutant in a process of its own."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        try:
            os.write(into, json.dumps(_verdict(site, tests, limit)).encode())
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        signal.alarm(int(20 * limit))  # a child that sleeps; its processor time has its own limit
        before = signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
        try:
            said = pipe.read()
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    _, status = os.waitpid(child, 0)
    if said:
        return json.loads(said)
    why = "took too long" if os.WIFSIGNALED(status) else "the process ended"
    return {"end": "killed", "by": "", "how": why}


def _verdict(site: Site, tests: list[pytest.Item], limit: float) -> Entry:
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
    # A fork keeps the processor time of none but itself, so the limit is the mutant's own.
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silent, stream)
    from tests.property.mutation import replaced  # imports the library, which conftest prepares

    try:
        with replaced({site.target: mutated(site)}) as calls:
            for at, item in enumerate(tests):
                following = tests[at + 1] if at + 1 < len(tests) else None
                for report in runtestprotocol(item, log=False, nextitem=following):
                    if report.failed:
                        how = str(getattr(report.longrepr, "reprcrash", report.longrepr))
                        short = " ".join(how.rpartition(": ")[2].split())[:120]
                        kind = how.split(":")[2].strip() if how.count(":") > 2 else short
                        return {"end": "killed", "by": item.nodeid, "how": kind[:80]}
            return {"end": "survived", "calls": calls.total()}
    except (LookupError, SyntaxError, NameError) as error:
        return {"end": "stillborn", "how": str(error)[:200]}
