"""Scoring one decoder layer of Llama-3.2-3B's widths, with its vocabulary of 128,256 (random)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from alphatoken import Scorer, ScorerConfig
from benchmarks.cases import overhead_row
from benchmarks.measure import Run
from benchmarks.models import LLAMA_3B_LAYER, TINY

__all__ = ["layer_3b"]


def layer_3b(run: Run) -> Iterator[dict[str, Any]]:
    """One layer of Llama-3.2-3B and its tied head: a step with scoring against the step."""
    size = TINY if run.quick else LLAMA_3B_LAYER.on(run.device)
    model = size.model(run.device)
    for estimator in ("alphatoken", "label"):
        config = ScorerConfig(estimator=estimator, layers=1)
        scorer = Scorer(model, size.batch(run.device, seed=1), None, config)
        subject = (model, size, f"{estimator}, K=1")
        yield overhead_row(run, f"layer_3b_{estimator}", subject, scorer, pairs=3)
