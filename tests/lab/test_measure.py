"""Tasks of lm-eval, exported answers, and scores that other programs make of them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from alphatoken.errors import ConfigError, DataError
from alphatoken.model.loading import load_causal_model, load_tokenizer
from alphatoken_lab.measure import tasks as tasks_module
from alphatoken_lab.measure.measures import Measures
from alphatoken_lab.measure.measuring import (
    answers,
    awaited_scores,
    export_answers,
    measure,
    prepare,
    prompt_ids,
    read_questions,
    with_scores,
)
from alphatoken_lab.measure.tasks import CODE_ANSWERS, load_tasks, run_tasks
from tests.both_programs import main
from tests.lab.small import write
from tests.lab.test_compare import grid_file
from tests.places import nightly
from tests.rows import jsonl

lm_eval = [
    pytest.mark.usefixtures("lm_eval"),
    pytest.mark.filterwarnings("ignore"),  # it and what it imports warn of their own affairs
]


def marked(test: Any) -> Any:
    for mark in lm_eval:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def decoder(library_decoder: Path) -> tuple[Any, Any]:
    return load_causal_model(library_decoder, device="cpu"), load_tokenizer(library_decoder)


# --- tasks --------------------------------------------------------------------------------------


def task_files(folder: Path) -> Path:
    """Two local tasks of lm-eval: one of choices, one that generates; offline."""
    docs = [
        {"question": "If the object is a class", "choices": [" instance", " zq vxjq"],
         "gold": 0},
        {"question": "The following", "choices": [" xx qqzv", " statement"], "gold": 1},
    ]  # fmt: skip
    file = write(folder / "docs.jsonl", docs)
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": file}},
              "test_split": "test", "doc_to_text": "{{question}}"}  # fmt: skip
    choice = {
        "task": "tiny_choice", "output_type": "multiple_choice", "doc_to_target": "gold",
        "doc_to_choice": "choices", "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    written = {
        "task": "tiny_written", "output_type": "generate_until", "doc_to_target": " instance",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 4, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    tasks = folder / "tasks"
    tasks.mkdir()
    for one in (choice, written):
        (tasks / f"{one['task']}.yaml").write_text(yaml.safe_dump({**common, **one}))
    return tasks


def scored(
    decoder: tuple[Any, Any], names: Sequence[str], folder: Path | None = None, **more: Any
) -> dict[str, Any]:
    measures = Measures(target_tasks=names, **more)
    return dict(run_tasks(*decoder, load_tasks(names, measures), measures, folder))


@marked
def test_lm_eval_runs_local_tasks_offline(decoder: tuple[Any, Any], tmp_path: Path) -> None:
    path = str(task_files(tmp_path))
    found = scored(decoder, ["tiny_choice", "tiny_written"], task_path=path)
    assert found["tiny_choice"] == {
        "value": 100.0, "shots": "0", "chat_template": False, "metric": "acc", "questions": 2
    }  # fmt: skip
    assert 0 <= found["tiny_written"]["value"] <= 100
    assert not decoder[0].training
    by_file = [f"{path}/tiny_choice.yaml:acc_norm"]
    (again,) = scored(decoder, by_file, task_limit=1).items()
    assert again[0] == "tiny_choice"
    assert (again[1]["value"], again[1]["questions"]) == (100.0, 1)
    with pytest.raises(ConfigError, match=r"tiny_choice: f1.*acc,none"):
        scored(decoder, ["tiny_choice:f1"], task_path=path)
    for names, match in (
        (["no_such_task"], "no such task"),
        ([f"{path}/none.yaml"], r"no such task.*none\.yaml"),
        (["tiny_choice", "tiny_choice:acc"], "named twice"),
    ):
        with pytest.raises(ConfigError, match=match):
            load_tasks(names, Measures(target_tasks=names, task_path=path))
    (tmp_path / "docs.jsonl").unlink()
    with pytest.raises(DataError, match=r"could not read.*docs\.jsonl"):
        load_tasks(["tiny_choice"], Measures(target_tasks=["tiny_choice"], task_path=path))


@marked
def test_shots_are_shown_before_each_question(decoder: tuple[Any, Any], tmp_path: Path) -> None:
    """What the model is given holds so many examples: asked for, of the file, of the paper."""
    model, tokenizer = decoder
    path = task_files(tmp_path)
    shown = [{"question": f"example {i}", "choices": [" a", " b"], "gold": 0} for i in range(9)]
    examples = write(tmp_path / "examples.jsonl", shown)
    base = yaml.safe_load((path / "tiny_choice.yaml").read_text())
    base["dataset_kwargs"]["data_files"]["dev"] = examples
    base |= {"fewshot_split": "dev", "fewshot_config": {"sampler": "first_n"}}
    for name, more in (("mmlu", {}), ("own", {"num_fewshot": 3}), ("fixed", {"num_fewshot": 0})):
        (path / f"{name}.yaml").write_text(yaml.safe_dump({**base, "task": name, **more}))
    texts: list[str] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        texts.extend(tokenizer.batch_decode(args[0] if args else kwargs["input_ids"]))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)

    def counted(*names: str, **shots: int) -> set[int]:
        texts.clear()
        scores = scored(decoder, names, task_path=str(path), shots=shots)
        counts = {text.count("example ") for text in texts}
        assert {score["shots"] for score in scores.values()} == {str(n) for n in counts}
        return counts

    assert counted("mmlu") == {5}  # the paper's
    assert counted("own") == {3}  # the file's
    assert counted("tiny_choice") == {0}
    assert counted("mmlu", "own", mmlu=2, own=1) == {2, 1}
    hook.remove()
    with pytest.raises(ConfigError, match="fixes its shots at 0"):
        counted("fixed", fixed=2)
    with pytest.raises(ConfigError, match="has no examples to show"):
        counted("tiny_choice", tiny_choice=1)
    with pytest.raises(ConfigError, match=r"not measured. Got: mmul. Remedy: one of own"):
        prepare(Measures(target_tasks=["own"], task_path=str(path), shots={"mmul": 5}), "sft")


@marked
def test_unknown_tasks_of_all_cells_are_named_at_once(
    library_decoder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of its tasks are there, and three of two kinds of cells are not."""
    path = str(task_files(tmp_path))
    # To read lm-eval's own takes ten seconds; a dry run of the paper's tables does.
    reader = tasks_module._reader

    def quick(folder: str | None, names: tuple[str, ...]) -> Any:
        local = ["gsm8k"] if folder is None else reader(folder, ("tiny_choice",)).all_tasks
        return SimpleNamespace(all_tasks=local)

    monkeypatch.setattr(tasks_module, "_reader", quick)
    named = {
        "one": {"target_tasks": ["tiny_choice:acc", "first_wrong"], "task_path": path},
        "two": {"target_tasks": ["gsm8k"], "retention_tasks": [f"{path}/none.yaml", "mmul:acc"]},
    }
    tasks = {name: {"command": "sft", "measures": of} for name, of in named.items()}
    grid = grid_file(tmp_path, library_decoder, tasks=tasks)
    assert main(["compare", "--config", str(grid), "--output_dir", str(tmp_path / "out")]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "no such task" in line]
    for name in ("first_wrong", "none.yaml", "mmul"):
        assert name in said
    for name in ("tiny_choice", "gsm8k"):
        assert name not in said
    assert not list(tmp_path.glob("out/*"))


# --- code ---------------------------------------------------------------------------------------

METRIC = """
import os
assert os.getpid() != {process}, "executed here"

def passes(references, predictions, **_):
    space = {{}}
    try:
        exec(predictions[0][0], space)
        exec(references[0], space)
    except Exception:
        return 0.0
    return 1.0

def whole(resps, docs):
    return [[doc["prompt"] + r for r in resp] for resp, doc in zip(resps, docs)]
"""

ROWS = [
    {"prompt": f"def f(a, b):\n    # number {i}\n", "test": f"assert f({i}, 2) == {i} + 2"}
    for i in range(3)
]


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    """A folder with one task of lm-eval, as humaneval is written."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = jsonl(folder / "rows.jsonl", ROWS)
    (folder / "metric.py").write_text(METRIC.format(process=-1))
    task = {
        "task": "functions", "dataset_path": "json", "unsafe_code": True,
        "dataset_kwargs": {"data_files": {"test": str(rows)}}, "test_split": "test",
        "output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "{{test}}",
        "num_fewshot": 0,
        "generation_kwargs": {"until": ["\ndef"], "max_gen_toks": 8, "do_sample": False},
    }  # fmt: skip
    text = yaml.safe_dump(task) + (
        "metric_list:\n"
        "  - {metric: !function metric.passes, aggregation: mean, higher_is_better: true}\n"
        "filter_list:\n"
        "  - name: create_test\n"
        "    filter: [{function: custom, filter_fn: !function metric.whole}]\n"
    )
    (folder / "functions.yaml").write_text(text)
    (folder / "again.yaml").write_text(text.replace("task: functions", "task: again"))
    return folder


@nightly
@marked
def test_code_is_answered_here_and_executed_by_lm_eval_elsewhere(
    functions: Path, tmp_path: Path, decoder: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exported answers are all that its command needs, and what it leaves is read.

    Two groups of tasks share them; those of an earlier model are gone.
    """
    measures = Measures(
        target_tasks=["functions:passes"], retention_tasks=["again:passes"],
        task_path=str(functions),
    )  # fmt: skip
    ready = prepare(measures, "sft")
    written = iter(["    return a + b\n", "    return a - b\n", "    return b + a\n"])
    model, tokenizer = decoder

    def answer(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        rows = [tokenizer(next(written), add_special_tokens=False)["input_ids"] for _ in input_ids]
        longest = max(map(len, rows))
        pad = tokenizer.pad_token_id or 0
        new = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
        return torch.cat([input_ids, new], 1)

    monkeypatch.setattr(model, "generate", answer)
    place = tmp_path / "cell"
    place.mkdir()
    (place / f"{CODE_ANSWERS}_rank0.db").write_text("answers of another model")
    result = measure(
        model, tokenizer, measures, ready, start=lambda: model, folder=place, name="mine"
    )
    assert result["target"] is None
    assert list(awaited_scores(result)) == ["target/functions", "retention/again"]
    assert [path.name for path in place.iterdir()] == [f"{CODE_ANSWERS}_rank0.db"]
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "dummy", "--tasks", "functions,again",
        "--include_path", str(functions), "--use_cache", str(place / CODE_ANSWERS),
        "--confirm_run_unsafe_code", "--output_path", str(place / "scores"),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    full = with_scores(result, place)
    assert full["target"] == full["details"]["target/functions"] == pytest.approx(100 * 2 / 3)
    assert full["overall"] == pytest.approx(100 * 2 / 3)
    assert full["settings"]["target/functions"]["metric"] == "passes,create_test"
    assert not awaited_scores(full)


# --- answers ------------------------------------------------------------------------------------


def test_answers_are_exported_as_alpaca_eval_reads_them(
    decoder: tuple[Any, Any], tmp_path: Path
) -> None:
    model, tokenizer = decoder
    asked = [{"instruction": "If the object is"}, {"instruction": "The following statement is"}]
    path = write(tmp_path / "questions.jsonl", asked)
    measures = Measures(questions={"mine": path}, max_new_tokens=6)
    result = measure(
        model, tokenizer, measures, prepare(measures, "sft"),
        start=lambda: model, folder=tmp_path, name="the-model",
    )  # fmt: skip
    rows = json.loads((tmp_path / "answers-mine.json").read_text())
    assert [set(row) for row in rows] == [{"instruction", "output", "generator"}] * 2
    assert [row["instruction"] for row in rows] == [one["instruction"] for one in asked]
    for row in rows:
        ids = torch.tensor([prompt_ids(tokenizer, row["instruction"])])
        own = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6,
                             do_sample=False, pad_token_id=0)  # fmt: skip
        assert row["output"] == tokenizer.decode(own[0, ids.shape[1] :], skip_special_tokens=True)
        assert row["generator"] == "the-model"
    assert result["target"] is None
    board = tmp_path / "scores" / "mine" / "weighted" / "leaderboard.csv"
    board.parent.mkdir(parents=True)
    with board.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", "win_rate", "standard_error", "length_controlled_winrate"])
        writer.writerows([["gpt4", 50.0, 0.0, 50.0], ["the-model", 37.5, 2.0, 41.0]])
    full = with_scores(result, tmp_path)
    assert full["details"]["target/mine"] == full["target"] == 37.5
    assert full["settings"]["target/mine"]["scored_by"] == "alpaca_eval"
    assert full["overall"] is None
    with pytest.raises(DataError, match="no win rate of these answers"):
        with_scores({**result, "settings": {"target/mine": {
            "scored_by": "alpaca_eval", "generator": "another"}}}, tmp_path)  # fmt: skip


def test_a_long_prompt_is_cut_at_its_beginning(decoder: tuple[Any, Any]) -> None:
    model, tokenizer = decoder
    limit = model.config.max_position_embeddings
    (text,) = answers(model, tokenizer, ["the value " * limit], max_new_tokens=3, chat=False)
    assert len(tokenizer(text)["input_ids"]) <= 4


LAYOUTS: dict[str, dict[str, Any]] = {
    "AlpacaEval": {"instruction": "What is 1?", "output": "One."},
    "Arena-Hard": {"uid": "a1", "prompt": "What is 1?"},
    "Arena-Hard v0.1": {"question_id": 7, "turns": [{"content": "What is 1?"}, {"content": "2?"}]},
    "MT-Bench": {"question_id": 7, "turns": ["What is 1?", "And 2?"]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("as_list", [False, True])
def test_questions_of_every_layout(layout: str, as_list: bool, tmp_path: Path) -> None:
    rows = [LAYOUTS[layout], LAYOUTS[layout]]
    path = tmp_path / ("q.json" if as_list else "q.jsonl")
    path.write_text(json.dumps(rows) if as_list else "".join(json.dumps(r) + "\n" for r in rows))
    assert read_questions(path) == ["What is 1?"] * 2
    assert read_questions(path, 1) == ["What is 1?"]


def test_questions_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the row has no question"):
        read_questions(write(tmp_path / "q.jsonl", [{"prompt": " "}]))
    with pytest.raises(ConfigError, match="mapping by name"):
        Measures(questions=["q.jsonl"])  # type: ignore[arg-type]


def test_exported_answers_are_one_a_question(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shorter"):
        export_answers(tmp_path / "a.json", ["q", "p"], ["a"], "m")
    assert not (tmp_path / "a.json").exists()


def test_means_are_of_all_scores_of_a_part(tmp_path: Path) -> None:
    """A part of which one score is awaited has no mean yet."""
    how: dict[str, Any] = {"metric": None, "scored_by": "lm-eval"}
    settings = {f"retention/{n}": {} for n in "ab"} | {f"target/{n}": how for n in ("c", "d")}
    details = {"retention/a": 10.0, "retention/b": 20.0, "target/c": 40.0, "target_loss": 2.0}
    result = {"details": details, "settings": settings}
    part = with_scores(result, tmp_path)
    assert (part["target"], part["retention"], part["overall"]) == (None, 15.0, None)
    (tmp_path / "scores").mkdir()
    scores = {"results": {"d": {"alias": "d", "pass@1,create_test": 0.6, "pass@1_stderr,x": 0.1}}}
    (tmp_path / "scores" / "results_2024.json").write_text(json.dumps(scores))
    full = with_scores(result, tmp_path)
    assert (full["target"], full["retention"], full["overall"]) == (50.0, 15.0, 32.5)
    assert full["unit"] == full["retention_unit"] == "score"
    losses = with_scores({"details": {"target_loss": 2.0, "retention/a": 3.0},
                          "settings": {"retention/a": {}}}, tmp_path)  # fmt: skip
    assert (losses["target"], losses["unit"], losses["overall"]) == (2.0, "loss", None)
