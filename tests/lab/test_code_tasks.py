"""Tasks that execute code: answered here, scored by lm-eval in what the user names; or refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from alphatoken.errors import ConfigError, DataError
from alphatoken_lab.compare.code_tasks import require_container, score_in_container
from tests.places import nightly
from tests.rows import jsonl

ENGINE = """#!{python}
import json, os, sys
words = sys.argv[1:]
json.dump(words, open({log!r}, "w"))
image = next(i for i, word in enumerate(words[1:], 1) if not word.startswith("-"))
if words[image] != "code-eval":
    sys.exit("no such image")
os.execv({python!r}, [{python!r}, *words[image + 2 :]])
"""
"""Stands in for docker: runs the command of an image on this machine."""

METRIC = """
def passes(references, predictions, **_):
    space = {}
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
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a docker of our own, which is the only engine here."""
    folder, log = tmp_path / "bin", tmp_path / "words.json"
    folder.mkdir()
    place = folder / "docker"
    place.write_text(ENGINE.format(python=sys.executable, log=str(log)))
    place.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return log


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with one task of lm-eval, as humaneval is written."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = jsonl(folder / "rows.jsonl", ROWS)
    (folder / "metric.py").write_text(METRIC)
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
    return folder


def test_no_code_is_executed_where_no_container_is_named(engine: Path) -> None:
    with pytest.raises(ConfigError, match="--code_container IMAGE"):
        require_container(["humaneval"], None)
    assert require_container(["humaneval"], "code-eval").endswith("docker")


def test_a_machine_without_containers_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="nothing to run a container with"):
        require_container(["humaneval"], "code-eval")


def test_a_container_that_cannot_score_says_why(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such image"):
        score_in_container(
            "functions", [], "another", shots=0, limit=None, task_path=None, folder=tmp_path
        )
    assert json.loads((tmp_path / "code-functions.json").read_text())["task"] == "functions"


@pytest.mark.usefixtures("lm_eval")
@pytest.mark.filterwarnings("ignore")  # lm-eval and what it imports warn of their own affairs
def test_lm_eval_scores_the_answers_in_the_container(engine: Path, tasks: Path) -> None:
    written = ["    return a + b\n", "    return a - b\n", "    return b + a\n"]
    found = score_in_container(
        "functions",
        [(row["prompt"], [text]) for row, text in zip(ROWS, written, strict=True)],
        "code-eval",
        shots=0,
        limit=None,
        task_path=str(tasks),
        folder=None,
    )
    assert found["functions"]["passes,create_test"] == pytest.approx(2 / 3)
    words = json.loads(engine.read_text())
    assert {"--rm", "--network=none", "--cap-drop=ALL"} < set(words)
    assert f"--volume={tasks}:{tasks}:ro" in words


@nightly
@pytest.mark.usefixtures("lm_eval")
@pytest.mark.filterwarnings("ignore")
def test_a_model_answers_here_and_nothing_of_it_runs_here(
    engine: Path, tasks: Path, tmp_path: Path, library_decoder: Path
) -> None:
    from alphatoken.model.loading import load_causal_model, load_tokenizer
    from alphatoken_lab.compare.harness import load_tasks, task_scores

    with pytest.raises(ConfigError, match="--code_container IMAGE"):
        load_tasks(["functions:passes"], include_path=str(tasks))
    ready = load_tasks(["functions:passes"], include_path=str(tasks), code_container="code-eval")
    model, tokenizer = load_causal_model(library_decoder), load_tokenizer(library_decoder)
    (tasks / "metric.py").write_text(
        f"import os\nassert os.getpid() != {os.getpid()}, 'executed here'\n" + METRIC
    )
    found = task_scores(model, tokenizer, ready, limit=2, folder=tmp_path)
    score = found["functions"]
    assert score.value == 0.0, "a model of documentation writes no function"
    assert score.how == {
        "shots": "0", "chat_template": False, "metric": "passes,create_test", "questions": 2
    }  # fmt: skip
    asked = json.loads((tmp_path / "code-functions.json").read_text())
    assert [context for context, _ in asked["answers"]] == [row["prompt"] for row in ROWS[:2]]
