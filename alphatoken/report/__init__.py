"""Value files, and self-contained HTML pages: heatmaps, distributions, extremes.

- ``files``: :func:`write_values` and :func:`read_values` keep one record an example, as Parquet,
  written whole or not at all; ``examples``: the scored sequences that they hold.
- ``statistics``: :func:`summarise` goes through all of them once.
- ``page``: one template and one style for every page of the library (values, a training run,
  diagnoses); nothing from outside is loaded, and only our own script may run.
  :func:`write_report` (``build``) makes the page of values with it.
- ``drawing``: one style of figure, a palette for all eyes, SVG. ``numbers``: how a page writes a
  number.

**May import** ``values``, ``support`` and ``errors``. matplotlib is needed for
pictures (``alphatoken[report]``), pyarrow for Parquet. **Tests**: the pages are opened in a
real browser (``tests/integration/test_report.py``).
"""

from __future__ import annotations

from alphatoken.report.build import write_report
from alphatoken.report.examples import COMPONENTS, Component, ScoredExample, Visits
from alphatoken.report.files import read_values, value_files, write_values
from alphatoken.report.statistics import ComponentSummary, ValueSummary, summarise

__all__ = [
    "COMPONENTS",
    "Component",
    "ComponentSummary",
    "ScoredExample",
    "ValueSummary",
    "Visits",
    "read_values",
    "summarise",
    "value_files",
    "write_report",
    "write_values",
]
