"""The GPU kit, in small on a CPU: all parts run, and what is wrong is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alphatoken import Scorer, ScorerConfig
from alphatoken.oracle import gradients as oracle
from benchmarks.gpu import __main__ as kit
from benchmarks.gpu import numbers, page
from benchmarks.models import TINY
from tests.places import nightly

ROOT = Path(__file__).resolve().parents[2]


@nightly
def test_every_part_runs_and_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert set(parts) == set(kit.PARTS)
    assert all(part["ok"] and part["rows"] and part["error"] is None for part in parts.values())
    rows = parts["numbers"]["rows"]
    kernels = numbers.kernels(torch.device("cpu"))
    assert len(rows) == len(numbers.ESTIMATORS) * len(numbers.LAYOUTS) * 2 * len(kernels)
    assert all(row["error"] is not None for row in rows)
    worst = {p: max(r["error"] for r in rows if r["precision"] == p) for p in ("fp32", "bf16")}
    assert worst["fp32"] < worst["bf16"], "narrow arithmetic is what it says"
    runs = {row["run"]: row for row in parts["training"]["rows"]}
    assert runs["all tokens"]["apart"] == 0
    assert runs["all tokens"]["last_loss"] == runs["TRL"]["last_loss"]
    assert runs["half of the tokens"]["last_loss"] != runs["TRL"]["last_loss"]
    assert parts["properties"]["rows"][0]["passed"] > 0
    monkeypatch.setattr(page, "JSON", tmp_path / "gpu.json")
    text = page.tables()
    assert all(f"### {name}\n" in text for name in kit.PARTS)
    assert "**Failed**" not in text
    assert "None" not in text


def test_the_reference_is_float64_throughout() -> None:
    """Its label values agree with per-token autograd to 1e-12: no norm casts to float32 inside."""
    batch, config = TINY.batch(), ScorerConfig(estimator="label")
    errors = {}
    for name, model in (
        ("exact", numbers.in_dtype(TINY.model(), torch.float64)),
        ("cast", TINY.model().double().eval()),  # transformers' own norms
    ):
        scorer = Scorer(model, TINY.batch(seed=1), None, config)
        values, direction = scorer.score(batch), scorer.direction.total()
        assert values.total.dtype == torch.float64
        truth = oracle.label_values(model, scorer.adapter.forward, batch, direction)
        errors[name] = float((values.total - truth).abs().max() / truth.abs().max())
    assert errors["exact"] < 1e-12 < errors["cast"]
