"""Scoring a corpus: every kind of source, bad rows, engines, killed processes, bounded memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphatoken import ConfigError, DataError, Scorer
from alphatoken.cli import main
from alphatoken.data import EncodeOptions, EncodeReport, Fields, read_records
from alphatoken.data.encode import about_encoding
from alphatoken.data.source import find_source, source_of
from alphatoken.score import value_files
from alphatoken.score.job import Corpus, draw_rows
from tests.integration.small_world import World, flags, write_rows
from tests.integration.test_cli import load, same
from tests.places import nightly
from tests.rows import jsonl

QUERIES = ("5 plus 0 is 5 .", '{"prompt": "say : it", "response": "the last is d ."}')
ROWS = [{"prompt": f"add : {n} and 4", "response": f"the sum of {n} is 7 ."} for n in range(700)]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "RAY_DISABLE_IMPORT_WARNING": "1"}


def parquet(path: Path, rows: list[Any], group: int = 50) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def folder(path: Path, rows: list[Any]) -> Path:
    path.mkdir()
    jsonl(path / "A.JSONL", rows[:100])  # read whatever the case of its name
    parquet(path / "b.parquet", rows[100:450])
    (path / "c.json").write_text(json.dumps(rows[450:]))
    (path / "notes.txt").write_text("no rows")
    return path


def listed(path: Path, rows: list[Any]) -> Path:
    path.write_text(json.dumps(rows))
    return path


KINDS: dict[str, tuple[str, Callable[[Path, list[Any]], Path]]] = {
    "jsonl": ("rows.jsonl", jsonl),
    "json": ("rows.json", listed),
    "parquet": ("rows.parquet", parquet),
    "folder": ("rows", folder),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_is_read_from_any_row(kind: str, tmp_path: Path) -> None:
    name, write = KINDS[kind]
    path = write(tmp_path / name, ROWS)
    source = source_of(json.loads(json.dumps(asdict(find_source(path)))))
    assert source.rows == 700
    for start, stop in ((0, 700), (0, 1), (49, 51), (90, 460), (256, 257), (699, 700), (650, 900)):
        rows = list(source.read(start, stop))
        assert [one.record for one in rows] == ROWS[start:stop]
        assert [one.index for one in rows] == list(range(start, min(stop, 700)))
    if path.is_file():
        places = [place for place, _ in read_records(path)]
        assert [one.place for one in source.read()] == places
    assert source.limited(5).rows == 5
    assert len({one.sha256 for one in (source, source.limited(5), source.limited(6))}) == 3
    assert source.limited(900) is source
    other = write(tmp_path / f"other{Path(name).suffix}", [*ROWS[:-1], ROWS[0]])
    assert find_source(other).sha256 != source.sha256


def test_a_file_that_changed_is_noticed(tmp_path: Path) -> None:
    path = folder(tmp_path / "rows", ROWS)
    source = find_source(path)
    jsonl(path / "A.JSONL", ROWS[:99])
    with pytest.raises(DataError, match=r"changed while it was in use. Got: .*A\.JSONL"):
        list(source.read(0, 10))
    (path / "A.JSONL").unlink()
    with pytest.raises(DataError, match="no such data file"):
        list(source.read(0, 10))


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "empty").mkdir()
    datasets.Dataset.from_list(ROWS[:2]).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    for name, message in (
        ("missing.jsonl", "no such data file"),
        ("empty", "holds no data files"),
        ("saved", "save_to_disk of datasets, which is not read"),
        ("broken.parquet", "Parquet file cannot be read"),
    ):
        with pytest.raises(DataError, match=message):
            find_source(tmp_path / name)


# --- bad rows -------------------------------------------------------------------------------------


def test_bad_rows_are_named_and_the_rest_goes_on(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = (world / "train.jsonl").read_text().splitlines()
    bad = ["{oops", '{"prompt": 3, "response": "x"}', '{"title": "no response"}', "[]"]
    odd = [
        '{"prompt": "add : 1 and 2", "response": "half \\ud83d"}',
        '{"prompt": "add", "response": "x", "n": ' + "9" * 5000 + "}",
        '{"messages": [{"role": ["user"], "content": "x"}]}',
        "[" * 100_000,
    ]
    empty = '{"prompt": "add : 1 and 2", "response": ""}'
    mixed = [*good[:5], bad[0], *good[5:9], *bad[1:3], *good[9:], empty, bad[3], *odd]
    path = jsonl(tmp_path / "mixed.jsonl", mixed)
    out = tmp_path / "out"
    assert world.score(out, train=path) == 2
    assert "broken JSON line. Got: mixed.jsonl, line 6" in capsys.readouterr().err
    assert not out.exists(), "nothing was valued before the row was found"
    files = {"model": world / "moved", "train": path, "validation": world / "validation.jsonl"}
    assert (
        main(["score", *flags(files | {"out": out, "on_bad_rows": "skip", "shard_size": 8})]) == 0
    )
    said = capsys.readouterr().err
    assert said.count("the response is empty") == 1
    assert "Scoring (9 rows left out): 29/29" in said
    bad_rows = [json.loads(line) for line in (out / "bad_rows.jsonl").read_text().splitlines()]
    assert [row["place"] for row in bad_rows] == [
        f"mixed.jsonl, line {n}" for n in (6, 11, 12, 25, 26, 27, 28, 29)
    ]
    assert [row["index"] for row in bad_rows] == [5, 10, 11, *range(24, 29)]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["pools"]["rows"], summary["pools"]["train"]) == (29, 20)
    assert summary["pools"]["bad_rows"] == 8
    assert summary["pools"]["without_response"] == 1
    assert "8 rows cannot be read; bad_rows.jsonl names them." in summary["notes"]
    assert summary["values"]["sequences"] == 20
    rows = [example.row for example in load(out)]
    assert rows == [n for n in range(25) if n not in (5, 10, 11, 23, 24)]


def test_a_length_that_no_response_reaches_is_named(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.score(tmp_path / "out", "--max_length", "2") == 2
    assert "a larger --max_length: the responses begin beyond it" in capsys.readouterr().err


def test_notes_say_each_number_with_its_noun() -> None:
    report = EncodeReport(
        truncated_rows=8, truncated_tokens=1058, skipped_empty=3, skipped_cut=2, skipped_bad=3,
        first_skipped=["a, line 2: it is empty", "a, line 5: half a tag"],
    )  # fmt: skip
    assert about_encoding("train", report) == [
        "8 training rows longer than --max_length allows: 1058 tokens cut off at the end.",
        "2 training rows left out: no response within the length.",
        "1 training row left out: no token to learn.",
        "3 training rows left out: not to be written as tokens.",
        "The first training rows left out: a, line 2: it is empty; a, line 5: half a tag.",
    ]
    assert about_encoding("validation", EncodeReport()) == []
    one = EncodeReport(skipped_empty=1, first_skipped=["a, line 2: it is empty"])
    assert about_encoding("train", one)[1] == "The training row left out: a, line 2: it is empty."


def test_rows_that_repeat_a_held_out_one_are_named(
    world: World, tmp_path: Path, capsys: Any
) -> None:
    """On the terminal and among the page's warnings; of one file under two names that is said."""
    good, held = (
        (world / name).read_text().splitlines() for name in ("train.jsonl", "validation.jsonl")
    )
    mixed = jsonl(tmp_path / "mixed.jsonl", [*good[:5], held[0]])
    files = {"model": world / "moved", "validation": world / "validation.jsonl"}
    assert main(["score", *flags(files | {"train": mixed, "out": tmp_path / "out"})]) == 0
    said = "1 training row repeats a validation row or prompt and was removed (mixed.jsonl, line 6)"
    assert f"note: {said}." in capsys.readouterr().err
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert said in page[page.index("<strong>Warnings</strong>") : page.index("<main")]
    assert page.count(said) == 1
    copied = jsonl(tmp_path / "copied.jsonl", held)
    (tmp_path / "same.jsonl").symlink_to(world / "validation.jsonl")
    for name, error in (
        (tmp_path / "same.jsonl", "--train_file and --validation_file are the same file"),
        (copied, "no training row is left: each repeats a held-out row"),
    ):
        assert main(["score", *flags(files | {"train": name, "out": tmp_path / "no"})]) == 2
        assert error in capsys.readouterr().err


def test_validation_rows_are_drawn_among_the_good(tmp_path: Path) -> None:
    rows: list[Any] = [row if n % 3 else "{oops" for n, row in enumerate(ROWS)]
    source, how = find_source(jsonl(tmp_path / "r.jsonl", rows)), EncodeOptions(on_bad_rows="skip")
    corpus = Corpus(source, Fields(), None, how)
    counts = Counter[int]()
    for seed in range(24):
        drawn = [row.index for row in draw_rows(corpus, 40, seed)]
        assert drawn == sorted(set(drawn))
        assert len(drawn) == 40
        assert all(index % 3 for index in drawn)
        counts.update(drawn)
    thirds = [sum(counts[i] for i in range(a, a + 233)) for a in (0, 233, 466)]
    assert min(thirds) > 0.85 * 320, "uniform over the file"
    with pytest.raises(ConfigError, match="cannot be drawn"):
        draw_rows(corpus, 500, 0)


def test_no_row_left_is_said(world: World, tmp_path: Path, capsys: Any) -> None:
    path = jsonl(tmp_path / "bad.jsonl", ["{oops", "[]"])
    assert world.score(tmp_path / "out", "--on_bad_rows", "skip", train=path) == 2
    assert "no training row is left" in capsys.readouterr().err
    drawn = {"train": path, "validation": None, "validation_rows": 1}
    assert world.score(tmp_path / "out", "--on_bad_rows", "skip", **drawn) == 2
    assert "cannot be drawn" in capsys.readouterr().err


# --- the job --------------------------------------------------------------------------------------


def test_two_runs_in_one_folder_are_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    score, said = Scorer.score, []

    def second(self: Scorer, batch: Any) -> Any:
        if not said:
            said.append(world.score(tmp_path / "out", "--overwrite_output", ratio=0.3))
        return score(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "score", second)
        assert world.score(tmp_path / "out", "--no_report") == 0
    assert said == [2]
    assert "another run is at work in this folder" in capsys.readouterr().err


def test_a_selection_over_all_keeps_the_best_and_the_files_types(
    world: World, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    types = set()
    for scope in ("batch", "sequence", "dataset"):
        small = {"limit": 9, "ratio": 0.3}
        assert world.score(tmp_path / scope, "--no_report", scope=scope, **small) == 0
        schema = pq.read_schema(value_files(tmp_path / scope / "values")[0])
        types.add(str(schema.field("value").type))
    assert types == {"list<element: float>"}
    for one in load(tmp_path / "sequence"):
        own, chosen = one.values["total"][one.response], one.kept[one.response]
        assert chosen.sum() == -(-3 * own.size // 10)
        assert own[chosen].min() >= own[~chosen].max()
    scored = load(tmp_path / "dataset")
    totals = np.concatenate([e.values["total"][e.response] for e in scored])
    kept = np.concatenate([e.kept[e.response] for e in scored])
    assert kept.sum() == -(-3 * totals.size // 10)
    assert totals[kept].min() >= totals[~kept].max()
    assert not any(e.kept[~e.response].any() for e in scored)
    assert not (tmp_path / "dataset" / "report.html").exists()


def test_engines_are_refused_before_any_work(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from alphatoken.score import run

    assert world.score(tmp_path / "out", "--workers", 2) == 2
    assert "--workers needs --engine ray" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(run, "find_spec", lambda _: None)
        assert world.score(tmp_path / "out", "--engine", "ray") == 2
    assert "pip install 'alphatoken[ray]'" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
            patch.setenv(name, value)
        assert world.score(tmp_path / "out", "--engine", "ray") == 2
    assert "only one engine can run at a time" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- several processes ----------------------------------------------------------------------------


def command(words: list[str], engine: str, out: Path) -> list[str]:
    """The command line of an engine with two workers."""
    own = ["-m", "alphatoken.cli", *words, "--output_dir", str(out)]
    if engine == "torchrun":
        port = str(20000 + os.getpid() % 20000)
        own = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, *own]
    return [sys.executable, *own, *(["--engine", "ray", "--workers", "2"] * (engine == "ray"))]


@pytest.fixture(scope="module", params=["queries", pytest.param("rows", marks=nightly)])
def corpus(
    request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Words that value many rows of the small world against two queries, or validation rows."""
    queries = [word for query in QUERIES for word in ("--query", query)]
    rows = ["--validation_file", str(world / "validation.jsonl")]
    train = write_rows(tmp_path_factory.mktemp("corpus") / "train.jsonl", 120, seed=11)
    return [
        "score", "--model_name_or_path", str(world / "moved"), "--train_file", str(train),
        "--per_device_train_batch_size", "4", "--shard_size", "4", "--no_report",
        "--keep_scope", "dataset", *(queries if request.param == "queries" else rows),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of it."""
    out = tmp_path_factory.mktemp("whole")
    assert main([*corpus, "--output_dir", str(out / "out"), "--quiet"]) == 0
    return out / "out"


def agree(left: Path, right: Path) -> None:
    """The files of two runs hold the same, file by file and to the bit."""
    names = [path.name for path in value_files(left / "values")]
    assert names == [path.name for path in value_files(right / "values")]
    assert same(load(left), load(right))
    one, other = (json.loads((p / "summary.json").read_text()) for p in (left, right))
    for key in ("pools", "encoded", "values", "certificate"):
        assert one[key] == other[key], key


def children(process: int) -> Iterator[tuple[int, str]]:
    """All processes below one, with what their command lines say."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, ValueError):
            continue  # it has ended meanwhile
        if parent == process:
            yield int(path.name), words
            yield from children(int(path.name))


def victim(process: subprocess.Popen[str], mark: str) -> int:
    """A process below this one whose command line holds ``mark``; the last one started."""
    processes = sorted(number for number, words in children(process.pid) if mark in words)
    assert processes, f"no process of {mark}"
    return processes[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "mark"),
    [("torchrun", "alphatoken.cli"), ("ray", "MapWorker")],
)
def test_killed_processes_lose_nothing(
    corpus: list[str], whole: Path, tmp_path: Path, engine: str, mark: str
) -> None:
    """One of two ranks, one of two actors: in the end the files are those of one process."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(corpus, engine, out), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 200
        while len(value_files(out / "values")) < 3:
            assert process.poll() is None, process.communicate()[1][-3000:]
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(victim(process, mark), signal.SIGKILL)
        _, errors = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    left = len(value_files(out / "values"))
    assert errors.count("query 1 is read as plain text") == 1
    if mark == "MapWorker":
        assert process.returncode == 0, errors[-3000:]
        assert left == 30
    else:
        assert process.returncode != 0
        assert 3 <= left < 30
        # By one process, which is an engine too.
        assert main([*corpus, "--output_dir", str(out), "--resume", "--quiet"]) == 0
    agree(whole, out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("few", "many", "growth"),
    [(500, 3_500, 1.03), pytest.param(2_000, 12_000, 1.1, marks=nightly)],
)
def test_memory_does_not_grow_with_the_rows(
    world: World, tmp_path: Path, few: int, many: int, growth: float
) -> None:
    """Peaks of few and of many rows, each in a process of its own."""
    peaks = {}
    for count in (few, many):
        train = tmp_path / f"{count}.jsonl"
        with train.open("w") as file:
            for n in range(count):
                row = {"prompt": f"add : {n % 9} and 4", "response": "7 ."}
                file.write(json.dumps(row) + "\n")
        own = {"prompt": "say : it", "response": "3 plus 4 ."}
        validation = jsonl(tmp_path / "validation.jsonl", [own])
        code = (
            "import re, sys\nfrom alphatoken.cli import main\nstatus = main(sys.argv[1:])\n"
            # Not getrusage, which counts what the process was before it became this program.
            "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
            "sys.exit(status)\n"
        )
        words = [
            "score", "--model_name_or_path", world / "moved", "--train_file", train,
            "--validation_file", validation, "--output_dir", tmp_path / f"out{count}",
            "--per_device_train_batch_size", 256, "--layers", 1, "--keep_scope", "dataset",
        ]  # fmt: skip
        run = subprocess.run(
            [sys.executable, "-c", code, *map(str, words)],
            env=ENVIRONMENT, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-3000:]
        peaks[count] = int(run.stdout.split()[-1])
        summary = json.loads((tmp_path / f"out{count}" / "summary.json").read_text())
        assert summary["values"]["sequences"] == count
    assert peaks[many] <= growth * peaks[few], peaks
