"""Values of a corpus of any size: job, engines, value files, pages; the work of ``score``.

* ``options``: :class:`ScoreOptions` says what is valued, who values and what is made of the values;
* ``job``: what becomes of each row, in any process and from any row on; all that the values depend
  on, read and checked, and saved in the output folder;
* ``run``: :func:`score_corpus` has the blocks of a job valued, each to one value file;
* ``results``: selection over all files, rows to train on, notes, summary; ``queries``: texts in
  place of validation rows, and their page.

Trainers and diagnoses write the same files and pages:

* ``values``: :func:`write_values` and :func:`read_values` keep one record an example, as Parquet,
  written whole or not at all;
* ``summary``: :func:`summarise` goes through all of them once; ``value_page``:
  :func:`write_report` makes their page, and ``meaning`` says what the values on it mean;
* ``page``: one template and one style for every page and figure of the library; nothing from
  outside is loaded, and only our own script may run.

It knows no command line. matplotlib is needed for pictures (``alphatoken[report]``), pyarrow for
Parquet. **Tests**: ``tests/integration/test_corpus.py``; the pages are opened in a real browser
(``tests/integration/test_report.py``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alphatoken.score.summary import ValueSummary, summarise
    from alphatoken.score.value_page import write_report
    from alphatoken.score.values import (
        COMPONENTS,
        ScoredExample,
        Visits,
        read_values,
        value_files,
        write_values,
    )

__all__ = [
    "COMPONENTS",
    "ScoredExample",
    "ValueSummary",
    "Visits",
    "read_values",
    "summarise",
    "value_files",
    "write_report",
    "write_values",
]

_MODULES = {"ValueSummary": "summary", "summarise": "summary", "write_report": "value_page"}


def __getattr__(name: str) -> Any:
    # On first use: options are read for ``--help`` without torch, which value files need.
    if name not in __all__:
        raise AttributeError(f"module 'alphatoken.score' has no attribute '{name}'")
    return getattr(import_module(f"alphatoken.score.{_MODULES.get(name, 'values')}"), name)
