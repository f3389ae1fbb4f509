"""A batch and a scorer on a tiny decoder, as the tests of the core share them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from alphatoken import Scorer, ScorerConfig
from tests.property.architectures import BY_NAME, VOCABULARY
from tests.property.strategies import make_batch

BATCH = make_batch(("pprrprr.", "prprrrrr"), vocabulary=VOCABULARY, seed=1)
VALIDATION = make_batch(("pprrr.", "pprrrr"), vocabulary=VOCABULARY, seed=2)
ESTIMATORS: dict[str, dict[str, Any]] = {
    "alphatoken": {"estimator": "alphatoken"},
    "direct": {"estimator": "direct"},
    "path": {"estimator": "path"},
    "label": {"estimator": "label"},
    "label over all parameters": {"estimator": "label", "parameters": "all"},
    "by forward mode": {"estimator": "label", "parameters": "all", "derivative": "forward_mode"},
    "walk": {"estimator": "walk", "layers": "all", "walk_steps": 1},
}
"""Options of a scorer by each way of valuing."""


def inputs(batch: dict[str, Tensor] = BATCH) -> dict[str, Any]:
    """What the model is called with."""
    return {k: v for k, v in batch.items() if k != "labels"} | {"use_cache": False}


def model_of(seed: int = 1, **options: Any) -> Any:
    """A decoder of three layers, in float64."""
    return BY_NAME["llama"].build(seed, **options)


def scorer_for(model: nn.Module, estimator: str = "alphatoken", **options: Any) -> Scorer:
    """Values against ``VALIDATION`` over two layers; arguments of the scorer, options else."""
    named = ("retention", "optimizer", "sharding")
    arguments = {name: options.pop(name) for name in named if name in options}
    validation = options.pop("validation", VALIDATION)
    layers = "all" if options.get("parameters") == "all" else 2
    config = ScorerConfig(**{"estimator": estimator, "layers": layers, **options})
    return Scorer(model, validation, config=config, **arguments)


def observed_values(scorer: Scorer, batch: dict[str, Tensor] = BATCH) -> Tensor:
    """Values of a training pass."""
    with scorer.observe() as observed:
        logits = scorer.arguments.model(**inputs(batch)).logits
        return observed.values(logits, batch["labels"]).total


def printed_by(*words: str, root: Path = Path(__file__).parents[2]) -> str:
    """What Python prints in a process of its own: without the run-time type checks of pytest.

    ``words`` are its arguments ("-c", script), ``root`` is the folder of the package.
    """
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
