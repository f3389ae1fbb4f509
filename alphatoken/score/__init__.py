"""Values of a corpus of any size: job, engines, value files, pages; the work of ``score``.

* ``options``: :class:`ScoreOptions` says what is valued, who values and what is made of the values;
* ``rows``: what becomes of each row, in any process and from any row on; ``queries``: texts in
  place of validation rows, and their page;
* ``job``: all that the values depend on, read and checked, and saved in the output folder;
* ``engines``: a block of rows to one value file, and who values which block;
* ``results``: selection over all files, summary, page; ``kept_rows``: rows to train on, and both
  ends; ``notes``: sentences about all of these;
* ``run``: :func:`score_corpus` does all of this.

Trainers and diagnoses write the same files and pages:

* ``values``: :func:`write_values` and :func:`read_values` keep one record an example, as Parquet,
  written whole or not at all; ``statistics``: :func:`summarise` goes through all of them once.
* ``page``: one template and one style for every page of the library; nothing from outside is
  loaded, and only our own script may run. ``value_page``: :func:`write_report` makes the page of
  values with it. ``drawing``: one style of figure, a palette for all eyes, SVG.

It knows no command line. matplotlib is needed for pictures (``alphatoken[report]``), pyarrow for
Parquet. **Tests**: ``tests/integration/test_corpus.py``; the pages are opened in a real browser
(``tests/integration/test_report.py``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alphatoken.score.statistics import ComponentSummary, ValueSummary, summarise
    from alphatoken.score.value_page import write_report
    from alphatoken.score.values import (
        COMPONENTS,
        Component,
        ScoredExample,
        Visits,
        read_values,
        value_files,
        write_values,
    )

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

_PLACES = {
    "ComponentSummary": "statistics",
    "ValueSummary": "statistics",
    "summarise": "statistics",
    "write_report": "value_page",
}


def __getattr__(name: str) -> Any:
    # On first use: options are read for ``--help`` without torch, which value files need.
    if name not in __all__:
        raise AttributeError(f"module 'alphatoken.score' has no attribute '{name}'")
    return getattr(import_module(f"alphatoken.score.{_PLACES.get(name, 'values')}"), name)
