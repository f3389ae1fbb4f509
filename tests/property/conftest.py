"""Loads the Hypothesis profile; where an optional package is missing, its properties skip.

The properties must run where only torch, transformers, hypothesis, numpy, scipy and pytest are
(with what the package itself depends on). A file that imports anything else of the list below
skips as a whole there, and says why.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tests.property.profiles  # noqa: F401

OPTIONAL = (
    "accelerate", "beartype", "datasets", "jinja2", "matplotlib", "peft", "pyarrow", "sklearn",
    "torch_optimizer", "trl", "xdist",
)  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Iterator[None]:
    report = yield
    call = getattr(report, "call", None)
    missing = _missing(call.excinfo.value) if call is not None and call.excinfo else None
    if report.failed and missing in OPTIONAL:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {missing} is not installed")
        del report.call
    return report


def _missing(error: BaseException | None) -> str | None:
    """The top-level package whose absence is behind an error, if any is."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name.partition(".")[0]
        error = error.__cause__ or error.__context__
    return None
