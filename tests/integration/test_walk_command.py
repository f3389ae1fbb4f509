"""``score --estimator walk``: its options, and what it refuses before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alphatoken.cli import main
from tests.integration import tiny_training as tiny


def test_a_walk_of_the_models_own_and_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Validation rows in place of a second model; what has no meaning is refused before work."""
    models = tiny.saved(tmp_path / "models", 24)
    tiny.model(3).save_pretrained(models / "after")
    tiny.tokenizer().save_pretrained(models / "after")
    common = ["score", "--train_file", str(models / "rows.jsonl"), "--no_report", "--quiet"]
    common += ["--model_name_or_path", str(models / "model"), "--validation_rows", "8"]
    walk = ["--estimator", "walk", "--walk_steps", "2", "--walk_learning_rate", "1e-3"]
    assert main([*common, *walk, "--output_dir", str(tmp_path / "own")]) == 0
    settings = json.loads((tmp_path / "own" / "run.json").read_text())["settings"]
    assert (settings["walk_steps"], settings["walk_learning_rate"]) == (2, 1e-3)
    refused = {
        "certificate": [*walk, "--verify", "3"],
        "stability side": [*walk, "--fisher_file", "none.safetensors"],
        "walk_steps": ["--walk_steps", "2", "--estimator", "path"],
        "not allowed with": [*walk, "--reference", str(models / "after")],
    }
    for message, words in refused.items():
        assert main([*common, *words, "--output_dir", str(tmp_path / "no")]) != 0
        assert message in capsys.readouterr().err
    alone = [word for word in common if word not in ("--validation_rows", "8")]
    words = ["--reference", str(models / "after"), "--output_dir", str(tmp_path / "no")]
    assert main([*alone, *words, "--value", "exact"]) != 0
    assert "--value walk alone" in capsys.readouterr().err
