"""What a half by value keeps of planted words: shares by hand, a real run, agreement of halves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphatoken.data.stdlib import code_rows
from benchmarks.selection import kept
from benchmarks.selection.finding import examples_of
from benchmarks.selection.kept import agreement, kept_shares, response, run


def record(row: int, token: int, keep: bool, step: int) -> dict[str, Any]:
    return {"rows": [row], "token_id": token, "kept_share": float(keep), "last_step": step}


def test_shares_by_quarter_by_hand() -> None:
    planted = {(10, 11, 12, 20 + i): np.asarray([True, True, False, False]) for i in range(5)}
    choices = {  # row -> (step, kept tokens)
        0: (0, [1, 1, 0, 0]), 1: (0, [1, 0, 1, 0]), 2: (1, [0, 0, 1, 1]), 3: (2, [0, 0, 0, 0]),
        4: (3, [1, 1, 1, 1]),
    }  # fmt: skip
    records = [
        record(row, 10 + i if i < 3 else 20 + row, bool(keep), step)
        for row, (step, keeps) in choices.items()
        for i, keep in enumerate(keeps)
    ]
    assert kept_shares(records, planted) == [
        {"planted": 0.75, "real": 0.25},
        {"planted": 0.0, "real": 1.0},
        {"planted": 0.0, "real": 0.0},
        {"planted": 1.0, "real": 1.0},
    ]
    del planted[10, 11, 12, 22]
    with pytest.raises(RuntimeError, match="row 2 was valued"):
        kept_shares(records, planted)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows of the standard library; of the validation rows every one is there twice."""
    # Short ones: a row that is cut at 160 tokens may have no response left.
    found = [{"prompt": row.prompt[-40:], "response": row.response[:60]} for row in code_rows(24)]
    twice = [row for i in range(0, 8, 2) for row in (*found[i : i + 2], *found[i : i + 2])]
    for name, lines in (("noisy-words", found[8:]), ("validation", twice), ("other", found[:8])):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def test_a_run_says_of_every_token_whether_it_was_kept(library_decoder: Path, rows: Path) -> None:
    from transformers import AutoTokenizer

    records = run({
        "model_name_or_path": str(library_decoder), "train_file": str(rows / "noisy-words.jsonl"),
        "validation_file": str(rows / "validation.jsonl"), "validation_mode": "pool",
        "validation_batch_size": 4, "row_format": "text", "max_length": 160, "use_cpu": True,
        "dtype": "float32", "bf16": False, "gradient_checkpointing": False, "policy": "top",
        "estimator": "label", "keep_ratio": 0.5, "score_layers": "2", "retention": "none",
        "objective": "adaptation", "max_relative_drift": None, "max_steps": 4, "held_out_steps": 0,
        "per_device_train_batch_size": 4, "report_to": "none", "save_strategy": "no",
        "fisher_cache": str(rows / "f"), "policy_cache": str(rows / "p"), "logging_strategy": "no",
    })  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(library_decoder)
    examples = examples_of(rows / "noisy-words.jsonl", tokenizer)
    assert {one["kept_share"] for one in records} == {0.0, 1.0}
    assert {one["last_step"] for one in records} == {0, 1, 2, 3}
    assert sum(one["kept_share"] for one in records) == pytest.approx(len(records) / 2, abs=4)
    planted = {response(one): np.arange(one.response_tokens) % 3 == 0 for one in examples}
    found = kept_shares(records, planted)
    assert len(found) == kept.QUARTERS
    total = sum(one.response_tokens for one in examples)
    assert len(records) == total, "16 rows in 4 steps of 4: each once"


def test_halves_that_are_the_same_agree(library_decoder: Path, rows: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(library_decoder)
    tokenizer = AutoTokenizer.from_pretrained(library_decoder)
    said: list[str] = []
    # The four parts hold rows 0 2 0 2 and 1 3 1 3: both halves are the same rows.
    same = agreement(model, tokenizer, rows, said.append)
    (rows / "validation.jsonl").write_text((rows / "other.jsonl").read_text())
    other = agreement(model, tokenizer, rows, said.append)
    assert len(said) == 2 * len(kept.SETTINGS)
    for name in kept.SETTINGS:
        assert same[name]["rho"] == pytest.approx(1.0, abs=1e-3)
        assert other[name]["low"] < other[name]["rho"] < other[name]["high"]
        assert other[name]["rho"] < 0.98
