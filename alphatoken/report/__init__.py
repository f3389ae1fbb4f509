"""Value files, and one self-contained HTML page: heatmaps, distributions, extremes.

:func:`write_values` and :func:`read_values` keep scored sequences as Parquet or JSONL.
:func:`summarise` goes through them once, and :func:`write_report` draws the page. The page needs no
network: style, script, drawings and data are inside it.
"""

from __future__ import annotations

from alphatoken.report.build import write_report
from alphatoken.report.examples import COMPONENTS, Component, ScoredExample
from alphatoken.report.files import read_values, value_files, write_values
from alphatoken.report.statistics import ComponentSummary, ValueSummary, summarise

__all__ = [
    "COMPONENTS",
    "Component",
    "ComponentSummary",
    "ScoredExample",
    "ValueSummary",
    "read_values",
    "summarise",
    "value_files",
    "write_report",
    "write_values",
]
