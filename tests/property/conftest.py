"""Loads the Hypothesis profile; where an optional package is missing, its properties skip.

The properties must run where only torch, transformers, hypothesis, numpy, scipy and pytest are
(with what the package itself depends on). What imports anything else of the list below skips
there and says why: a file as a whole, or a test or fixture by itself. ``make card`` runs them so.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

import tests.property.profiles  # noqa: F401

OPTIONAL = (
    "accelerate", "beartype", "datasets", "lm_eval", "matplotlib", "peft", "pyarrow",
    "sklearn", "torch_optimizer", "trl", "xdist",
)  # fmt: skip


@pytest.fixture(scope="module")
def few_draws() -> Iterator[None]:
    """Intervals of 20 draws, not 200, in whole diagnoses; test_intervals.py is about them."""
    from alphatoken.diagnose import statistics

    drawn = statistics._resamples

    def few(count: int, groups: Any, draws: int, generator: Any) -> Any:
        return drawn(count, groups, min(draws, 20), generator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_resamples", few)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    call = getattr(report, "call", None)
    missing = _missing(call.excinfo.value) if call is not None and call.excinfo else None
    if report.failed and missing in OPTIONAL:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {missing} is not installed")
        del report.call
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    report = yield
    missing = _missing(call.excinfo.value) if call.excinfo else None
    if report.failed and missing in OPTIONAL:
        report.outcome = "skipped"
        report.longrepr = (
            str(item.path),
            item.location[1] + 1,
            f"Skipped: {missing} is not installed",
        )
    return report


def _missing(error: BaseException | None) -> str | None:
    """The top-level package whose absence is behind an error, if any is."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name.partition(".")[0]
        error = error.__cause__ or error.__context__
    return None
