"""What GitHub runs against what is there: targets, files, owners and locked versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def _commands(path: Path) -> list[str]:
    jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"].values()
    return [
        step["run"].replace("${{ matrix.target }}", target)
        for job in jobs
        for target in job.get("strategy", {}).get("matrix", {}).get("target", [""])
        for step in job["steps"]
        if "run" in step
    ]


def test_workflows_call_what_is_there() -> None:
    targets = set(re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    names = {name for line in targets for name in line.split()}
    called: set[str] = set()
    for path in WORKFLOWS:
        for line in _commands(path):
            program, *words = line.split()
            if program == "make":
                called |= set(words)
                assert set(words) <= names, (path.name, line)
            if program.startswith(".ci/"):
                assert (ROOT / program).is_file(), (path.name, line)
    assert {"lint", "types", "imports", "fast", "card", "slow", "random", "docs"} <= called


def test_contracts_are_tried_on_what_is_not_released() -> None:
    """Once a week: development branches of transformers and TRL, and the newest torch."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text("utf-8"))
    job = jobs["jobs"]["contracts"]
    weekly = jobs["jobs"]["newest"]["if"]
    assert job["if"] == weekly
    assert "17 4 * * 0" in weekly
    words = [set(line.split()) for line in job["strategy"]["matrix"]["packages"]]
    branches = {f"git+https://github.com/huggingface/{name}" for name in ("transformers", "trl")}
    assert any(branches <= one for one in words)
    assert {"torch"} in words
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert any("pip install --upgrade ${{ matrix.packages }}" in line for line in commands)
    files = [word for word in commands[-1].split() if word.endswith(".py")]
    assert "tests/integration/test_contracts.py" in files
    assert all((ROOT / file).is_file() for file in files)


def test_the_lowest_python_is_tested_and_declared() -> None:
    checks = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text("utf-8"))
    lowest = checks["jobs"]["fast"]["strategy"]["matrix"]["python"][0]
    assert PROJECT["requires-python"] == f">={lowest}"
    named = [c.split(" :: ")[-1] for c in PROJECT["classifiers"] if ":: Python :: 3." in c]
    assert named[0] == lowest
    assert [int(name.split(".")[1]) for name in named] == list(range(11, 11 + len(named)))


def test_the_lock_has_what_the_package_asks_for() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["test"], *extras["docs"]]
    names = {re.split(r"[\[<>=!~ ;]", one)[0].lower() for one in wanted} - {"alphatoken"}
    lock = (ROOT / ".ci" / "lock.txt").read_text("utf-8")
    assert names <= set(re.findall(r"^([\w.-]+)(?=[=\[])", lock, re.MULTILINE))
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert all(pin in lock.splitlines() for pin in pins if pin and not pin.startswith("#"))
