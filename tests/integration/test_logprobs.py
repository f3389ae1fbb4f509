"""Walk values from two files of log-probabilities: the command, and the models' own values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from alphatoken.cli import main
from alphatoken.report import read_values
from tests.integration import tiny_training as tiny
from tests.property.test_logprobs import _at, _other

ROWS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, the model before and after, values by both models, and both files."""
    folder = tiny.saved(tmp_path_factory.mktemp("logprobs"), ROWS)
    tiny.model(3).save_pretrained(folder / "after")
    tiny.tokenizer().save_pretrained(folder / "after")
    words = ["score", "--estimator", "walk", "--train_file", str(folder / "rows.jsonl")]
    words += ["--model_name_or_path", str(folder / "model"), "--reference", str(folder / "after")]
    assert main([*words, "--output_dir", str(folder / "by_models"), "--no_report"]) == 0
    for name in ("model", "after"):
        write(folder / f"{name}.parquet", list(records(folder, name)))
    return folder


def records(folder: Path, name: str) -> Any:
    """What an engine gives: log-probabilities of each token, None of the first."""
    model = AutoModelForCausalLM.from_pretrained(folder / name)
    for example in read_values(folder / "by_models" / "values"):
        ids = torch.tensor([example.ids])
        with torch.no_grad():
            every = model(input_ids=ids).logits.log_softmax(-1)[0, :-1]
        found = every.gather(-1, ids[0, 1:, None])[:, 0].tolist()
        yield {
            "row": example.row,
            "input_ids": list(example.ids),
            "labels": list(example.labels),
            "logprobs": [None, *found],
        }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def score(folder: Path, before: Path, after: Path, *more: str) -> int:
    words = ["score", "--logprobs", str(before), str(after), "--output_dir", str(folder)]
    return main([*words, "--quiet", *more])


@pytest.mark.parametrize("scope", ["batch", "sequence", "dataset"])
def test_values_and_selection_are_those_of_the_models(
    models: Path, tmp_path: Path, scope: str
) -> None:
    more = ["--keep_scope", scope, "--model_name_or_path", str(models / "model")]
    assert score(tmp_path, models / "model.parquet", models / "after.parquet", *more) == 0
    found = list(read_values(tmp_path / "values"))
    wanted = list(read_values(models / "by_models" / "values"))
    assert len(found) == len(wanted) == ROWS
    for one, two in zip(found, wanted, strict=True):
        assert (one.row, one.ids, one.labels) == (two.row, two.ids, two.labels)
        np.testing.assert_allclose(one.values["total"], two.values["total"], atol=2e-5)
        if scope == "batch":
            assert (one.kept == two.kept).mean() > 0.99
    kept = sum(int(one.kept.sum()) for one in found)
    assert kept == pytest.approx(sum(int(one.response.sum()) for one in found) / 2, abs=ROWS)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["values"]["response_tokens"] == sum(int(e.response.sum()) for e in wanted)
    assert "plus" in (tmp_path / "report.html").read_text()  # texts, not ids


BAD = {
    "a list of lists": lambda r: (
        [{**x, **{n: [x[n]] for n in ("input_ids", "labels", "logprobs")}} for x in r],
        "row 0, input_ids: no list of numbers",
    ),
    "halves": lambda r: (
        [{**x, "input_ids": [i + 0.5 for i in x["input_ids"]]} for x in r],
        "row 0, input_ids: no whole numbers",
    ),
    "texts": lambda r: (
        [{**x, "input_ids": list(map(str, x["input_ids"]))} for x in r],
        "row 0, input_ids: no whole numbers",
    ),
    "no label": lambda r: (_other(r, 3, **_at(r[3], "labels", 2, None)), "row 3, labels"),
    "no list": lambda r: (_other(r, 3, labels=None), "^[^:]*: log[^:]*Got: .*row 3: no labels"),
    "a negative token": lambda r: (
        _other(r, 4, **_at(r[4], "input_ids", 1, -1)),
        "row 4, position 1: a token that is no id: -1",
    ),
    "a huge token": lambda r: (_other(r, 4, **_at(r[4], "input_ids", 1, 2**40)), "no id"),
    "a negative row": lambda r: (_other(r, 4, row=-4), "row -4: its number"),
    "half rows": lambda r: ([{**x, "row": x["row"] + 0.5} for x in r], "row 0.5: its number"),
}
"""Rows that no engine should write -> what is said of them."""


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_row_of_something_else_is_refused_by_its_place(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, side: str
) -> None:
    """And nothing of the run stays."""
    good = {"before": models / "model.parquet", "after": models / "after.parquet"}
    rows, said = BAD[case](pq.read_table(good[side]).to_pylist())
    good[side] = write(tmp_path / "bad.parquet", rows)
    out = tmp_path / "out"
    assert score(out, good["before"], good["after"]) != 0
    message = capsys.readouterr().err
    assert re.search(said, message), message
    assert not (out / "values").exists()
    assert not (out / "run.json").exists()


def test_files_that_are_none_are_refused(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing file, one that is no Parquet, one file only, an empty one."""
    good, text = models / "model.parquet", tmp_path / "text.parquet"
    text.write_text("no parquet")
    for before, said in ((tmp_path / "none.parquet", "none.parquet"), (text, "text.parquet")):
        for pair in ((before, good), (good, before)):
            assert score(tmp_path / "out", *pair) != 0
            assert said in capsys.readouterr().err
    assert main(["score", "--logprobs", str(good), "--output_dir", str(tmp_path / "o")]) != 0
    assert "takes two files" in capsys.readouterr().err
    schema = pq.read_schema(good)
    empty = tmp_path / "empty.parquet"
    pq.write_table(schema.empty_table(), empty)
    assert score(tmp_path / "out", empty, empty) != 0
    assert "no row" in capsys.readouterr().err
    shorter = pq.read_table(good).slice(0, ROWS - 1)
    pq.write_table(shorter, empty)
    assert score(tmp_path / "out", good, empty) != 0
    assert f"row {ROWS - 1}: the other file ends before it" in capsys.readouterr().err
    assert not (tmp_path / "out" / "values").exists()
    assert not (tmp_path / "out" / "run.json").exists()


def test_columns_that_no_row_can_be_read_of_are_refused(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers beyond 64 bits, and a name that stands there twice."""
    table = pq.read_table(models / "model.parquet")
    twice = table.append_column("logprobs", table["logprobs"])
    ids = [[2**63 + 1 for _ in row] for row in table["input_ids"].to_pylist()]
    place = table.column_names.index("input_ids")
    huge = table.set_column(place, "input_ids", pa.array(ids, pa.list_(pa.uint64())))
    for bad, said in ((twice, "more than one column 'logprobs'"), (huge, "row 0, input_ids")):
        pq.write_table(bad, tmp_path / "bad.parquet")
        assert score(tmp_path / "out", tmp_path / "bad.parquet", models / "after.parquet") == 2
        assert said in capsys.readouterr().err


def test_a_tokenizer_that_is_not_there_is_said_before_work(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the folder is free for the run that has it. A run that may speak says how far it is."""
    files = models / "model.parquet", models / "after.parquet"
    for model, code in ((tmp_path / "nowhere", 2), (models / "model", 0)):
        more = ["--model_name_or_path", str(model), "--no_report"]
        assert score(tmp_path / "out", *files, *more) == code
    assert (tmp_path / "out" / "run.json").exists()
    words = ["score", "--logprobs", *map(str, files), "--no_report"]
    assert main([*words, "--output_dir", str(tmp_path / "loud")]) == 0
    assert f"Reading log-probabilities: {ROWS}/{ROWS}" in capsys.readouterr().err


def test_an_earlier_run_is_kept_unless_it_may_go(models: Path, tmp_path: Path) -> None:
    files = models / "model.parquet", models / "after.parquet"
    assert score(tmp_path, *files, "--no_report") == 0
    assert score(tmp_path, *files, "--no_report") != 0
    assert score(tmp_path, *files, "--no_report", "--overwrite_output") == 0
    lost = tmp_path / "values" / "before.parquet"
    lost.write_bytes(files[0].read_bytes())
    assert score(tmp_path, lost, files[1], "--no_report", "--overwrite_output") != 0
    assert lost.is_file()


def test_a_walk_of_the_models_own_and_its_options(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Validation rows in place of a second model; what has no meaning is said before work."""
    common = ["score", "--train_file", str(models / "rows.jsonl"), "--no_report", "--quiet"]
    common += ["--model_name_or_path", str(models / "model"), "--validation_rows", "8"]
    walk = ["--estimator", "walk", "--walk_steps", "2", "--walk_learning_rate", "1e-3"]
    assert main([*common, *walk, "--output_dir", str(tmp_path / "own")]) == 0
    settings = json.loads((tmp_path / "own" / "run.json").read_text())["settings"]
    assert (settings["walk_steps"], settings["walk_learning_rate"]) == (2, 1e-3)
    refused = {
        "certificate": [*walk, "--verify", "3"],
        "stability side": [*walk, "--fisher_file", "none.safetensors"],
        "walk_steps": ["--walk_steps", "2"],
        "not allowed with": [*walk, "--reference", str(models / "after")],
    }
    for said, words in refused.items():
        assert main([*common, *words, "--output_dir", str(tmp_path / "no")]) != 0
        assert said in capsys.readouterr().err
    alone = [word for word in common if word not in ("--validation_rows", "8")]
    words = ["--reference", str(models / "after"), "--output_dir", str(tmp_path / "no")]
    assert main([*alone, *words]) != 0
    assert "--estimator walk alone" in capsys.readouterr().err
