"""What tests/conftest.py arranges for all tests: pictures, processes, the garbage collector."""

from __future__ import annotations

import gc
import os

import pytest

from alphatoken.report.drawing import canvas, svg_text


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


def test_tests_of_a_file_are_one_process_s(request: pytest.FixtureRequest) -> None:
    """pytest-xdist knows a group by the end of a test's name."""
    assert [mark.args for mark in request.node.iter_markers("xdist_group")] == [("test_suite",)]
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@test_suite")


def test_what_stays_to_the_end_is_not_walked_through() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100_000
