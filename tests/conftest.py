"""For every test: no network, one thread, shapes checked at run time."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import pkgutil
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import pictures, shapes
from tests.places import data_folder, models_folder

# Read when huggingface_hub is imported, which nothing above does.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

# Annotated shapes and types hold at run time, in tests only (and where there is a checker: the
# properties also run without). Nothing above imports the package.
assert "alphatoken" not in sys.modules
_SPEC = importlib.util.find_spec("alphatoken")
assert _SPEC is not None
# Not train/: its configurations inherit TRL's annotations, which TRL does not keep.
_CHECKED = [
    f"alphatoken.{module.name}"
    for module in pkgutil.iter_modules(_SPEC.submodule_search_locations)
    if module.name != "train"
]
if importlib.util.find_spec("beartype") is not None:
    shapes.install(_CHECKED)

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
    """Folder with the larger sets of rows, for slow tests."""
    return data_folder()


def _real_model(name: str) -> Path:
    folder = models_folder() / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not in {folder.parent}: `make models` puts it there")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, which `make models` fetches; elsewhere the test skips."""
    from alphatoken.demo.models import SMOLLM2

    return _real_model(SMOLLM2.name)


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Folder of Gemma 3 270M, for slow tests; continuous integration does not fetch it."""
    from alphatoken.demo.models import GEMMA3

    return _real_model(GEMMA3.name)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny saved model with rows and a Fisher; see small_world.py."""
    from tests.integration.small_world import make_world

    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside, a connection is a failure."""

    def refuse(*arguments: Any, **named: Any) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="session")
def library_decoder() -> Path:
    """Folder of a trained decoder of 260,000 parameters, made here; see library_decoder.py."""
    from tests.integration.library_decoder import decoder_folder

    return decoder_folder()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow are pages in a browser, which not every machine has, and all that is not the library."""
    beside = [Path(__file__).parent / name for name in ("lab", "benchmarks")]
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.pictures)
        if any(item.path.is_relative_to(folder) for folder in beside):
            item.add_marker(pytest.mark.slow)


def unit_of_work(nodeid: str) -> str:
    """What one process runs: a test, or a whole file whose tests share what they have made.

    That is a file of integration, lab or benchmarks (a saved model, a finished run) and one about a
    diagnosis.
    """
    file = nodeid.partition("::")[0]
    whole = any(
        part in file for part in ("/integration/", "/lab/", "/benchmarks/", "/test_diagnose_")
    )
    return file if whole else nodeid


@pytest.hookimpl(optionalhook=True)  # where pytest-xdist is not installed
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests are handed out by units of work, the largest units first."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of_work(nodeid)

    return Units(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What libraries and tests are made of stays to the end: the garbage collector passes it by.

    Walking through it, while it is made and again and again later, took a tenth of all time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Only tests that are marked as looking at pictures have them drawn, their fixtures too."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("pictures") is None:
            pictures.leave_blank(patch)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    shapes.begin()
    return (yield)
