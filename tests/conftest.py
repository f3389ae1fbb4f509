"""For every test: no network, one thread, shapes checked at run time, the tolerance table."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch

from tests.property import tolerance

# Read when huggingface_hub is imported, which nothing above does.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

# Annotated shapes and types hold at run time, in tests only. Nothing above imports the package.
assert "alphatoken" not in sys.modules
_SPEC = importlib.util.find_spec("alphatoken")
assert _SPEC is not None
# Not train/: its configurations inherit TRL's annotations, which TRL does not keep.
_CHECKED = [
    f"alphatoken.{found.name}"
    for found in pkgutil.iter_modules(_SPEC.submodule_search_locations)
    if found.name != "train"
]
jaxtyping.install_import_hook(_CHECKED, "beartype.beartype")

torch.set_num_threads(1)

# A shell's background jobs ignore SIGINT, and children inherit that: the tests that interrupt a
# command would then interrupt nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# torch's forward mode compiles some of its rules with torch.jit at first use, which torch itself
# deprecates. Done here once, the warning (an error under pytest) hits no test.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    importlib.import_module("torch._decomp.decompositions_for_jvp")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder with the real model and rows. ALPHATOKEN_DATA unset: skip; set but absent: failure."""
    name = os.environ.get("ALPHATOKEN_DATA")
    if not name:
        pytest.skip("ALPHATOKEN_DATA is not set: no real model and rows to run on")
    folder = Path(name)
    if not folder.is_dir():
        pytest.fail(f"ALPHATOKEN_DATA is set to {name!r}, and there is no such folder")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, which `make models` fetches; elsewhere the test skips."""
    from alphatoken.demo.models import SMOLLM2

    shared = os.environ.get("ALPHATOKEN_MODELS")
    folder = (Path(shared) if shared else Path(__file__).parents[1] / "models") / SMOLLM2.name
    if not folder.is_dir():
        pytest.skip(f"{SMOLLM2.name} is not in {folder.parent}: `make models` reached no registry")
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    tolerance.begin()
    try:
        return (yield)
    finally:
        records = tolerance.finish()
        if records:
            item.user_properties.append((tolerance.PROPERTY, records))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Read from the reports, which reach this process from every worker.
    records = [
        (report.nodeid, *record)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call"
        for key, found in report.user_properties
        if key == tolerance.PROPERTY
        for record in found
    ]
    if records:
        terminalreporter.section("worst error over tolerance")
        for line in tolerance.summary(records):
            terminalreporter.line(line)
