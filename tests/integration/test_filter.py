"""``alphatoken filter``: values of rows beside the scorer's, verdicts, interruption, bad input."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from alphatoken import FisherDrift, Scorer, ScorerConfig
from alphatoken.cli import main
from alphatoken.data import batches, encode_rows, read_rows
from tests.integration.small_world import World, flags
from tests.rows import jsonl

WEIGHT, ROWS = 500.0, 9


def judged(world: World, out: Path, *more: object, **changed: object) -> int:
    options = {
        "model_name_or_path": world / "moved",
        "train_file": world / "train.jsonl",
        "validation_file": world / "validation.jsonl",
        "output_file": out,
        "per_device_train_batch_size": 3,
        "validation_batches": 3,
        "train_limit": ROWS,
        # So much weight on what the model was that some rows are harmful.
        "fisher_file": world / "fisher.safetensors",
        "stability_weight": WEIGHT,
    } | changed
    return main(["filter", *flags(options), "--quiet", *map(str, more)])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@cache
def values_by_hand(world: World) -> list[tuple[float, float, int]]:
    """Mean value of each response, jackknifed error, tokens: from whole scorers, row by row."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(world / "moved")
    tokenizer = AutoTokenizer.from_pretrained(world / "moved")
    train, _ = encode_rows(read_rows(world / "train.jsonl", limit=ROWS), tokenizer)
    held, _ = encode_rows(read_rows(world / "validation.jsonl"), tokenizer)
    fisher = FisherDrift.load(world / "fisher.safetensors")
    parts = [next(batches(held[k::3], 99)) for k in range(3)]
    found = []
    for validation in (parts, *([p for p in parts if p is not left] for left in parts)):
        scorer = Scorer(model, validation, fisher, ScorerConfig(stability_weight=WEIGHT))
        of_rows = []
        for example in train:
            values = scorer.score(next(batches([example], 1)))
            of_rows.append(float(values.total[values.mask].mean()))
        found.append(of_rows)
    whole, *rest = torch.tensor(found, dtype=torch.float64)
    errors = torch.sqrt(torch.stack([one - whole for one in rest]).square().sum(0) * 2 / 3)
    tokens = [example.response_tokens for example in train]
    return list(zip(whole.tolist(), errors.tolist(), tokens, strict=True))


@pytest.mark.slow
def test_values_errors_and_verdicts(world: World, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert judged(world, out, confidence=0.7) == 0
    found, rows = lines(out), lines(world / "train.jsonl")[:ROWS]
    assert [{k: row[k] for k in rows[0]} for row in found] == rows
    expected = values_by_hand(world)
    quantile = stats.t.ppf(0.7, 2)
    for row, (value, error, _) in zip(found, expected, strict=True):
        assert row["value"] == pytest.approx(value, rel=1e-3, abs=1e-6)
        assert row["value_error"] == pytest.approx(error, rel=1e-2, abs=1e-6)
        assert row["verdict"] == ("keep" if value + quantile * error >= 0 else "drop")
    assert {row["verdict"] for row in found} == {"keep", "drop"}
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_the_best_of_a_budget(world: World, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert judged(world, out, ratio=0.4) == 0
    expected = values_by_hand(world)
    budget, best = 0.4 * sum(tokens for *_, tokens in expected), []
    for number in sorted(range(len(expected)), key=lambda i: -expected[i][0]):
        budget -= expected[number][2]
        if budget < 0:
            break
        best.append(number)
    kept = [i for i, row in enumerate(lines(out)) if row["verdict"] == "keep"]
    assert kept == sorted(best)
    assert 0 < len(best) < len(expected)


def test_what_is_not_valued_says_why(world: World, tmp_path: Path) -> None:
    rows = lines(world / "train.jsonl")
    held = lines(world / "validation.jsonl")[0]
    source = tmp_path / "rows.jsonl"
    odd = [held, {"prompt": "x", "response": ""}, *rows[:6]]
    jsonl(source, odd)
    out = tmp_path / "out.jsonl"
    assert judged(world, out, train_file=source, on_empty="skip") == 0
    found = lines(out)
    assert [row["verdict"] for row in found[:2]] == ["leak", "empty"]
    assert found[0]["value"] is None
    assert all(row["verdict"] in ("keep", "drop") for row in found[2:])
    drawn = tmp_path / "drawn.jsonl"
    more = {"validation_file": None, "validation_rows": 4, "validation_batches": 2}
    assert judged(world, drawn, **more) == 0
    assert [row["verdict"] for row in lines(drawn)].count("held out") == 4


def turned_round(path: Path, folder: Path) -> Path:
    """The same rows from the last to the first."""
    return jsonl(folder / path.name, path.read_text().splitlines()[::-1])


def test_an_interrupted_run_goes_on_to_the_same(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert judged(world, whole) == 0
    score, calls = Scorer.score, []

    def interrupted(self: Scorer, batch: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(self, batch, **more)

    monkeypatch.setattr(Scorer, "score", interrupted)
    assert judged(world, out) == 130
    assert "6 of 9 rows" in capsys.readouterr().err
    journal = tmp_path / ".out.jsonl.partial"
    with journal.open("a") as file:
        file.write('{"row": 6, "val')  # killed while it wrote
    assert not out.exists()
    assert judged(world, out) == 2
    assert "--resume" in capsys.readouterr().err
    changes = {"config": {"layers": 2}, "fisher": {"fisher_file": None}} | {
        name: {f"{name}_file": turned_round(world / f"{name}.jsonl", tmp_path)}
        for name in ("train", "validation")
    }
    for what, changed in changes.items():
        assert judged(world, out, "--resume", **changed) == 2
        assert f"differs in {what}" in capsys.readouterr().err
    calls[:] = [1] * 3
    assert judged(world, out, "--resume") == 0
    assert len(calls) == 3 + 1  # one batch of three rows was left
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"confidence": 0.3}, "--confidence"),
        ({"ratio": 1.5}, "ratio"),
        ({"model_name_or_path": "nowhere", "estimator": Path("walk")}, "or --estimator label"),
        ({"output_file": "NOWHERE/out.jsonl"}, "folder"),
        ({"output_file": "out.parquet"}, "filter can only write JSONL"),
        ({"validation_batches": 1}, "validation_batches"),
        ({"train_file": "judged.jsonl"}, "field of ours"),
    ],
)
def test_bad_input_is_one_line(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any], says: str,
) -> None:  # fmt: skip
    (tmp_path / "judged.jsonl").write_text(json.dumps({"prompt": "a", "response": "b", "value": 1}))
    paths = {k: tmp_path / v if isinstance(v, str) else v for k, v in changed.items()}
    assert judged(world, paths.pop("output_file", tmp_path / "out.jsonl"), **paths) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_that_is_there_is_left_alone(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    assert judged(world, out) == 2
    assert "--overwrite_output" in capsys.readouterr().err
    assert out.read_text() == "mine"
    for name in ("train.jsonl", "validation.jsonl", "fisher.safetensors"):
        before = (world / name).read_bytes()
        assert judged(world, world / name, "--overwrite_output") == 2
        assert "--output_file is the input" in capsys.readouterr().err
        assert (world / name).read_bytes() == before
    assert judged(world, out, "--overwrite_output") == 0
    assert len(lines(out)) == ROWS


def test_every_row_is_written_or_counted(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    known = lines(world / "train.jsonl")[:6]
    text = "".join(json.dumps(row) + "\n" for row in [*known, {"prompt": "no response"}])
    source.write_text(text + '{"prompt": "cut\n"a string"\n')
    assert judged(world, out, "--on_bad_rows", "skip", train_file=source) == 0
    verdicts = [row["verdict"] for row in lines(out)]
    assert verdicts[6:] == ["cannot be read"]
    assert capsys.readouterr().out.strip() == (
        f"9 rows: 6 valued, {verdicts.count('keep')} to keep; 1 cannot be read: not valued; "
        f"2 without a record: not written: {out}"
    )
