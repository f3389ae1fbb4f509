"""What tests/conftest.py arranges for all tests: pictures, processes, the garbage collector."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from alphatoken.report.drawing import canvas, svg_text
from tests.conftest import unit_of_work


@pytest.fixture(autouse=True)
def workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file for each process that has come here."""
    base, worker = tmp_path_factory.getbasetemp(), os.environ.get("PYTEST_XDIST_WORKER")
    folder = (base.parent if worker else base) / "processes-of-test-suite"
    folder.mkdir(exist_ok=True)
    (folder / (worker or "one")).touch()
    return folder


def line() -> str:
    with canvas() as figure:
        figure.subplots().plot([0, 1, 0], gid="line")
        return svg_text(figure)


def test_a_figure_is_blank_where_nobody_looks() -> None:
    assert line().startswith("<svg")
    assert len(line()) < 200


@pytest.mark.pictures
def test_a_figure_is_drawn_for_those_who_look() -> None:
    assert 'id="line"' in line()


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("property/test_fidelity_fisher.py::test_a[x]", True),
        ("property/test_masks.py::test_b[/integration/::]", False),
        ("integration/test_cli.py::test_c", True),
    ],
)
def test_files_whose_tests_share_something_are_units(name: str, whole: bool) -> None:
    expected = name.partition("::")[0] if whole else name
    assert unit_of_work(f"tests/{name}") == f"tests/{expected}"


def test_this_file_is_run_by_one_process(workers: Path) -> None:
    assert len(list(workers.iterdir())) == 1


def test_what_stays_to_the_end_is_not_walked_through() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100_000
