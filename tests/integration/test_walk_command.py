"""``score --estimator walk``: its options, and what it refuses before any work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from alphatoken.cli import main
from alphatoken.estimate import walk
from alphatoken.presets import WALK_RATE
from alphatoken.score import read_values
from alphatoken.support import progress
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
    options = ["--estimator", "walk", "--walk_steps", "2", "--walk_learning_rate", "1e-3"]
    assert main([*common, *options, "--verify", "3", "--output_dir", str(tmp_path / "own")]) == 0
    assert "agrees with a copy that plain PyTorch trained" in capsys.readouterr().out
    settings = json.loads((tmp_path / "own" / "run.json").read_text())["settings"]
    assert (settings["walk_steps"], settings["walk_learning_rate"]) == (2, 1e-3)
    assert (settings["layers"], settings["parameters"]) == ("all", "all")
    assert not settings.keys() & {"window", "part", "derivative", "uncovered", "stability_weight"}
    refused = {
        "stability side": [*options, "--fisher_file", "none.safetensors"],
        "walk_steps": ["--walk_steps", "2", "--estimator", "path"],
        "not allowed with": [*options, "--reference", str(models / "after")],
    }
    for message, words in refused.items():
        assert main([*common, *words, "--output_dir", str(tmp_path / "no")]) != 0
        assert message in capsys.readouterr().err
    alone = [word for word in common if word not in ("--validation_rows", "8")]
    words = ["--reference", str(models / "after"), "--output_dir", str(tmp_path / "no")]
    assert main([*alone, *words, "--value", "exact"]) != 0
    assert "--value walk alone" in capsys.readouterr().err


def test_the_page_marks_the_rows_that_the_walk_was_taken_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their values are kept beside those of the others, so that a page is written again alike."""
    models = tiny.saved(tmp_path / "models", 24)
    words = ["score", "--train_file", str(models / "rows.jsonl"), "--walk_steps", "2"]
    words += ["--model_name_or_path", str(models / "model"), "--validation_rows", "8"]
    words += ["--estimator", "walk", "--output_dir", str(tmp_path / "out"), "--max_length", "20"]
    monkeypatch.setattr(progress, "_FIRST", 0.0)  # what is shown within the first second
    begun: list[str] = []
    walked, shown = walk.walk, progress.Tracker
    monkeypatch.setattr(walk, "walk", lambda *own: begun.append("walk") or walked(*own))
    seen = "alphatoken.score.run.Tracker"
    monkeypatch.setattr(seen, lambda label, *own: begun.append(label) or shown(label, *own))
    assert main(words) == 0
    assert begun == ["walk", "Scoring (8 rows left out)", "Valuing trusted rows"], (
        "a row takes no part of the walk"
    )
    said = capsys.readouterr().err
    assert re.search(r"note: Values are measured against \d+ response tokens of 8 validation", said)
    told = [line for line in said.splitlines() if "Valuing trusted rows" in line]
    assert [line.split(" (")[0] for line in told] == [
        "Valuing trusted rows: 0/8", "Valuing trusted rows: 8/8"
    ]  # fmt: skip
    settings = json.loads((tmp_path / "out" / "run.json").read_text())["settings"]
    assert settings["walk_learning_rate"] == WALK_RATE, "the default in force, and not null"
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Triangles are trusted rows. The walk was taken on them, so they lie higher" in page
    trusted = list(read_values(tmp_path / "out" / "trusted"))
    assert page.count('<i style="left') == len(trusted) == 8
    means = [float(one.values["total"][one.response].mean()) for one in trusted]
    assert len(set(means)) > 1
    assert (
        "Blue: the loss of this token falls, by so many nats, when the model takes 2 AdamW" in page
    )
    assert re.search(r"\d+ of \d+ rows were longer than 20 tokens: \d+ tokens? cut\.", page)
    assert 'id="selection"' not in page
    monkeypatch.setattr("alphatoken.estimate.walk.walk", None)  # no walk is taken again
    assert main([*words, "--resume", "--keep_ratio", "0.5"]) == 0
    assert "trusted rows" not in capsys.readouterr().err
    again = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert again.count('<i style="left') == 8
    assert 'id="selection"' in again, "it was asked for"
