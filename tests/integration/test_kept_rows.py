"""``score --rows``: whole rows by their values beside the scorer's; what is printed and refused."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from alphatoken import FisherDrift, Scorer, ScorerConfig
from alphatoken.data import batches
from alphatoken.score.values import read_values
from tests.both_programs import main
from tests.integration.small_world import World

WEIGHT, ROWS = 20000.0, 9
"""So much weight on what the model was that some rows are harmful; rows of the training file."""
PAGE = Path(__file__).parents[2] / "docs" / "selection-and-losses.md"


def scored(world: World, out: Path, *more: object, **changed: object) -> int:
    options = {
        "fisher": world / "fisher.safetensors",
        "stability_weight": WEIGHT,
        "limit": ROWS,
        "batch_size": 3,
    } | changed
    return world.score(out, "--no_report", *more, **options)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@cache
def sums_by_hand(world: World) -> list[tuple[float, int]]:
    """Sum of the values of each response, and its tokens, by a scorer row by row."""
    model, _, train, validation = world.loaded()
    held, fisher = list(batches(validation, 99)), FisherDrift.load(world / "fisher.safetensors")
    scorer = Scorer(model, held, fisher, ScorerConfig(stability_weight=WEIGHT))
    rows = [scorer.score(next(batches([example], 1))) for example in train[:ROWS]]
    return [(float(row.total[row.mask].double().sum()), int(row.mask.sum())) for row in rows]


@pytest.mark.parametrize("unit", ["mean", "sum"])
def test_the_best_rows_are_written_as_they_are(world: World, tmp_path: Path, unit: str) -> None:
    assert scored(world, tmp_path, "--rows", unit, ratio=0.25) == 0
    expected = sums_by_hand(world)
    values = [total / tokens if unit == "mean" else total for total, tokens in expected]
    budget, best = 0.25 * sum(tokens for _, tokens in expected), []
    for number in sorted(range(ROWS), key=lambda i: -values[i]):
        budget -= expected[number][1]
        if budget < 0:
            break
        best.append(number)
    # The two units would choose other rows.
    means, sums = [total / tokens for total, tokens in expected], [total for total, _ in expected]
    first_two = [sorted(range(ROWS), key=lambda i: -v[i])[:2] for v in (means, sums)]
    assert len({tuple(sorted(pair)) for pair in first_two}) == 2
    rows = lines(world / "train.jsonl")[:ROWS]
    assert lines(tmp_path / "rows.jsonl") == [rows[number] for number in sorted(best)]
    assert 0 < len(best) < ROWS
    summary = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert summary["written"] == {
        "rows": len(best),
        "rows_left_out": ROWS - len(best),
        "response_tokens": sum(tokens for _, tokens in expected),
        "kept_tokens": sum(expected[number][1] for number in best),
    }
    order = sorted(range(ROWS), key=lambda i: -values[i])
    assert [one["row"] for one in summary["best"]] == order[:3]
    assert [one["row"] for one in summary["worst"]] == order[:-4:-1]
    for one in (*summary["best"], *summary["worst"]):
        total, tokens = expected[one["row"]]
        assert one["response_tokens"] == tokens
        assert one["value_sum"] == pytest.approx(total, rel=1e-3, abs=1e-6)
        assert one["value_mean"] == pytest.approx(total / tokens, rel=1e-3, abs=1e-6)


def test_written_rows_can_be_trained_on(world: World, tmp_path: Path) -> None:
    assert scored(world, tmp_path, "--rows", "mean") == 0
    words = [
        "sft", "--model_name_or_path", world / "moved", "--train_file", tmp_path / "rows.jsonl",
        "--validation_file", world / "validation.jsonl", "--output_dir", tmp_path / "trained",
        "--max_steps", 1, "--per_device_train_batch_size", 2, "--use_cpu", "--retention", "none",
        "--report_to", "none", "--bf16", "False", "--disable_tqdm", "True", "--policy", "random",
    ]  # fmt: skip
    assert main([*map(str, words)]) == 0
    assert (tmp_path / "trained" / "config.json").exists()


def test_both_ends_are_printed(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three rows each, by the value that ``--rows`` names and by loss; none with ``--quiet``."""
    words = ["score", "--model_name_or_path", world / "moved", "--train_file",
             world / "train.jsonl", "--validation_file", world / "validation.jsonl",
             "--no_report", "--output_dir"]  # fmt: skip
    for unit, place in (("mean", 0), ("sum", 1)):
        assert main([*map(str, words), str(tmp_path / unit), "--rows", unit]) == 0
        output = capsys.readouterr()
        assert re.search(r"\d+ rows with \d+ of \d+ response tokens; \d+ rows left", output.err)
        printed = output.out.splitlines()
        value = {"mean": "mean value", "sum": "sum of values"}[unit]
        titles = [f"lowest {value}:", "highest mean loss:", f"highest {value}:"]
        assert printed[0:12:4] == titles
        pattern = (
            r"  mean value (\S+), sum (\S+) of (\d+) tokens, mean loss (\S+)  "
            r"'.+'  \(train.jsonl, line (\d+)\)"
        )
        found = [re.fullmatch(pattern, printed[at]) for at in (1, 2, 3, 5, 6, 7, 9, 10, 11)]
        own = [one.groups() for one in found if one is not None]
        assert len(own) == 9
        values, losses = ([float(one[at]) for one in own] for at in (place, 3))
        assert values[:3] == sorted(values[:3])
        assert values[6:] == sorted(values[6:], reverse=True)
        assert values[2] <= values[8]
        due = {
            int(one.place.rsplit(" ", 1)[1]): float(one.values["loss"][one.response].mean())
            for one in read_values(tmp_path / unit / "values")
        }
        for *_, tokens, loss, line in own:
            assert float(loss) == pytest.approx(due[int(line)], rel=1e-3), tokens
        assert losses[3:6] == pytest.approx(sorted(due.values(), reverse=True)[:3], rel=1e-3)
        rows = json.loads((tmp_path / unit / "summary.json").read_text())["rows"]
        assert [one["row"] + 1 for one in rows["highest_loss"]] == [int(one[4]) for one in own[3:6]]
    assert scored(world, tmp_path / "quiet") == 0
    assert "mean value" not in capsys.readouterr().out


def test_what_is_not_valued_is_not_written(world: World, tmp_path: Path) -> None:
    leak = lines(world / "validation.jsonl")[0]
    own = [row | {"note": text} for row, text in zip(
        lines(world / "train.jsonl")[:4], ("é", "\ud83d", "日本", ""), strict=True
    )]  # fmt: skip
    source = tmp_path / "rows.jsonl"
    texts = [json.dumps(row) for row in (leak, {"prompt": "x", "response": ""}, *own)]
    source.write_text("\n".join([*texts, '{"prompt": "no response"}', '{"prompt": "cut', ""]))
    out = tmp_path / "out"
    more = ("--rows", "mean", "--on_bad_rows", "skip")
    assert scored(world, out, *more, train=source, limit=None, ratio=1.0) == 0
    assert lines(out / "rows.jsonl") == own
    assert "日本" in (out / "rows.jsonl").read_text("utf-8")


def test_rows_are_written_anew_by_a_resumed_run(world: World, tmp_path: Path) -> None:
    """From the values that are there, by another unit or share; a new run removes them."""
    assert scored(world, tmp_path) == 0
    assert not (tmp_path / "rows.jsonl").exists()
    written = []
    for unit in ("mean", "tokens", "mean"):
        assert scored(world, tmp_path, "--resume", "--rows", unit) == 0
        written.append((tmp_path / "rows.jsonl").read_bytes())
    assert written[0] == written[2] != written[1]
    assert scored(world, tmp_path, "--overwrite_output") == 0
    assert not (tmp_path / "rows.jsonl").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rows.jsonl").write_text("mine")
    assert scored(world, tmp_path / "mine", "--rows", "mean") == 2
    assert (tmp_path / "mine" / "rows.jsonl").read_text() == "mine"


def test_rows_that_json_cannot_hold_are_refused_before_the_model(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import PreTrainedModel

    rows = [row | {"day": datetime.date(2020, 1, 2)} for row in lines(world / "train.jsonl")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    monkeypatch.setattr(
        PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded")
    )
    assert scored(world, tmp_path / "out", "--rows", "sum", train=tmp_path / "rows.parquet") == 2
    assert "a row cannot be written as JSON. Got: rows.parquet, row 1" in capsys.readouterr().err


@pytest.mark.slow
def test_the_rule_without_a_budget_on_whole_rows(world: World) -> None:
    """The page's lines, against scorers that leave out one part of the validation rows each."""
    model, _, train, validation = world.loaded()
    train, fisher = train[:ROWS], FisherDrift.load(world / "fisher.safetensors")
    parts = [next(batches(validation[k::3], 99)) for k in range(3)]
    config = ScorerConfig(stability_weight=WEIGHT)
    table = []
    for held in (parts, *([p for p in parts if p is not left] for left in parts)):
        scorer, means = Scorer(model, held, fisher, config), []
        for example in train:
            values = scorer.score(next(batches([example], 1)))
            means.append(float(values.total[values.mask].mean()))
        table.append(means)
    whole, *rest = torch.tensor(table, dtype=torch.float64)
    errors = torch.sqrt(torch.stack([one - whole for one in rest]).square().sum(0) * 2 / 3)
    expected = whole + stats.t.ppf(0.95, 2) * errors >= 0
    assert expected[whole < 0].any(), "errors decide of some row"
    assert not expected.all()
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    names: dict[str, Any] = {
        "scorer": Scorer(
            model, parts, fisher, ScorerConfig(stability_weight=WEIGHT, standard_errors=True)
        ),
        "validation_batches": parts,
        "batch": next(batches(train, 99)),
    }
    exec(compile(code, str(PAGE), "exec"), names)
    keep, mask = names["keep"], names["values"].mask
    for number in range(ROWS):
        found = float(names["means"][number][mask[number]][0])
        assert found == pytest.approx(float(whole[number]), rel=1e-3, abs=1e-6)
        error = float(names["errors"][number][mask[number]][0])
        assert error == pytest.approx(float(errors[number]), rel=1e-2, abs=1e-6)
        assert (keep[number] == mask[number]).all() if expected[number] else not keep[number].any()
    assert 0 < expected.sum() < ROWS
