"""Examples run as they stand: those of the folder, of README and docs, and of docstrings."""

from __future__ import annotations

import ast
import doctest
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import webbrowser
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from alphatoken.demo.__main__ import run_demo
from alphatoken.demo.models import SMOLLM2, fetch_model
from alphatoken.demo.rows import demo_rows
from alphatoken.score import ScoredExample, read_values
from alphatoken.support.coloured import full_scale
from alphatoken.support.storage import open_line
from tests.both_programs import main
from tests.integration import tiny_training as tiny
from tests.places import nightly

# PyTorch's own forward-mode rules are scripted when the first of them is used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / name), run_name="example")


def test_every_example_is_run_here() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == {
        "draw_rows.py",
        "plain_pytorch_loop.py",
        "score_real_model.py",
        "walk_from_logprobs.py",
    }


@pytest.mark.slow
def test_plain_loop_gains_from_choosing_tokens() -> None:
    losses = load("plain_pytorch_loop.py")["main"]()
    assert losses["value"] < 0.6 * min(losses["all"], losses["random"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The adaptation side alone decides")
def test_real_model_by_hand(library_decoder: Path, tmp_path: Path) -> None:
    scored = load("score_real_model.py")["main"](
        ["--out", str(tmp_path), "--rows", "16", "--samples", "6", "--model", str(library_decoder)]
    )
    assert 8 <= len(scored) <= 12
    assert all(example.values["stability"].any() for example in scored)
    back = list(read_values(tmp_path))
    assert all(
        np.array_equal(a.values["total"], b.values["total"])
        for a, b in zip(scored, back, strict=True)
    )
    assert "per-token oracle" in (tmp_path / "report.html").read_text()


def log_probabilities(model: str, scored: list[ScoredExample], path: Path) -> Path:
    """A file of what an engine gives: log-probabilities of each token, None of the first."""
    decoder, rows = AutoModelForCausalLM.from_pretrained(model), []
    for example in scored:
        ids = torch.tensor([example.ids])
        with torch.no_grad():
            every = decoder(input_ids=ids).logits.log_softmax(-1)[0, :-1]
        predicted = every.gather(-1, ids[0, 1:, None])[:, 0].tolist()
        rows.append({"row": example.row, "input_ids": example.ids, "labels": example.labels,
                     "logprobs": [None, *predicted]})  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_walk_values_are_the_difference_of_two_files(tmp_path: Path) -> None:
    """Values equal those of both models; files of other tokens, or with gaps, are refused."""
    folder = tiny.saved(tmp_path / "models", 24)
    tiny.model(3).save_pretrained(folder / "after")
    tiny.tokenizer().save_pretrained(folder / "after")
    model, after = str(folder / "model"), str(folder / "after")
    words = ["score", "--estimator", "walk", "--train_file", str(folder / "rows.jsonl")]
    words += ["--model_name_or_path", model, "--reference", after, "--keep_scope", "sequence"]
    assert main([*words, "--output_dir", str(tmp_path / "scored"), "--no_report", "--quiet"]) == 0
    expected = list(read_values(tmp_path / "scored/values"))
    first, second = (
        log_probabilities(place, expected, tmp_path / f"{Path(place).name}.parquet")
        for place in (model, after)
    )
    run = load("walk_from_logprobs.py")["main"]
    out, more = tmp_path / "out", ["--model", model, "--out", str(tmp_path / "out")]
    run([str(first), str(second), *more])
    for one, two in zip(read_values(out), expected, strict=True):
        assert (one.row, one.ids, one.labels) == (two.row, two.ids, two.labels)
        np.testing.assert_allclose(one.values["total"], two.values["total"], atol=2e-5)
        assert one.kept.sum() == two.kept.sum()
        assert set(one.values["total"][~one.response]) == {0.0}
    assert "plus" in (out / "report.html").read_text()  # texts, not ids
    rows, bad = pq.read_table(second).to_pylist(), tmp_path / "bad.parquet"
    for changed, message in (
        ({"input_ids": [*rows[3]["input_ids"][:-1], 7]}, "row 3: the two files are not of"),
        ({"logprobs": [*rows[3]["logprobs"][:-1], float("nan")]}, "row 3: .* NaN or infinite"),
        ({"logprobs": [*rows[3]["logprobs"][:-1], None]}, "row 3: .* is missing"),
    ):
        pq.write_table(pa.Table.from_pylist([*rows[:3], rows[3] | changed, *rows[4:]]), bad)
        with pytest.raises(ValueError, match=message):
            run([str(first), str(bad), *more])
    pq.write_table(pa.Table.from_pylist(rows[:-1]), bad)
    with pytest.raises(ValueError, match="shorter"):
        run([str(first), str(bad), *more])


@pytest.fixture
def in_smollm2s_place(
    library_decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small decoder stands where SmolLM2 would, which takes minutes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALPHATOKEN_MODELS", str(tmp_path / "models"))
    Path("models").mkdir()
    Path("models", SMOLLM2.name).symlink_to(library_decoder.resolve())


@pytest.mark.slow
def test_the_demo_says_where_spoiled_rows_stand_and_writes_the_page(
    in_smollm2s_place: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What ``make demo`` does, on a small decoder, which finds no row odd."""
    opened = list[str]()
    monkeypatch.setattr(webbrowser, "open", opened.append)
    for earlier in (tmp_path / "rows/train.jsonl", tmp_path / "verdict/run.json"):
        earlier.parent.mkdir()
        earlier.write_text("{}")  # of an earlier demo, which is replaced
    run_demo(tmp_path, open_page=True, train=9, trusted=8, wrong_words=2, foreign=2)
    told = capsys.readouterr()
    rows = demo_rows(9, 8, 2, 2)
    means = {
        one.row: float(one.values["total"][one.response].mean())
        for one in read_values(tmp_path / "verdict/data/values")
    }
    assert len(means) == 9
    order = sorted(means, key=lambda row: means[row])
    lines = told.out.splitlines()
    for row, what in rows.spoiled.items():
        (line,) = (line for line in lines if f"line {row + 1}, {what}: " in line)
        assert line.split()[:2] == [str(order.index(row) + 1), f"{means[row]:+.2f}"]
    assert f"lowest value, line {order[0] + 1}: " in told.out
    assert f"highest value, line {order[-1] + 1}: " in told.out
    assert "cut" not in told.err  # every row fits its length
    assert "\x1b" not in told.out + told.err
    page = tmp_path / "report.html"
    ends = [line.split(":")[0] for line in lines[-5:]]
    called = ["its page", "page of the values", "open", "next, on your own rows"]
    assert ends == ["verdict", *called]
    assert lines[-3] == f"page of the values: {page}"
    assert lines[-4].startswith("its page: ")
    assert Path(lines[-4].removeprefix("its page: ")).is_file()
    assert lines[-2] == open_line(page)
    assert opened == [page.resolve().as_uri()]
    assert page.is_file()


@pytest.mark.pictures
def test_the_readmes_pictures_hold_the_values_that_lie_beside_them(tmp_path: Path) -> None:
    """Each token's colour in both pictures; drawn anew from the JSON they have the same ones."""
    kept = json.loads((ROOT / "docs/rows.json").read_text("utf-8"))
    spoiled, clean = (row["mean"] for row in kept)
    assert spoiled < -1 < 0 < clean
    every = [value for row in kept for _, value in row["tokens"]]
    full, values = full_scale(every), [value for value in every if value]
    load("draw_rows.py")["main"]([str(ROOT / "docs/rows.json"), "--out", str(tmp_path / "rows")])
    for page in ("light", "dark"):
        for folder in (ROOT / "docs", tmp_path):
            text = (folder / f"rows-{page}.svg").read_text()
            # A value of 0 has no colour; the scale of 24 comes last.
            drawn = re.findall(r"fill: #(4c9ade|f09637); fill-opacity: ([\d.]+)", text)
            for value, (colour, opacity) in zip(values, drawn[:-24], strict=True):
                assert colour == ("4c9ade" if value > 0 else "f09637")
                strength = min(1, abs(value) / full) ** 0.5
                assert float(opacity) == pytest.approx(0.65 * strength, abs=1e-3)


def test_rows_of_a_value_folder_are_drawn(tmp_path: Path) -> None:
    """Texts and values of the lines that are named, in either picture's JSON."""
    folder = tiny.saved(tmp_path, 24)
    model = str(folder / "model")
    words = ["score", "--estimator", "walk", "--train_file", str(folder / "rows.jsonl")]
    words += ["--model_name_or_path", model, "--validation_rows", "4", "--walk_steps", "1"]
    assert main([*words, "--output_dir", str(tmp_path / "out"), "--no_report", "--quiet"]) == 0
    draw, values = load("draw_rows.py")["main"], str(tmp_path / "out/values")
    chosen = list(read_values(values))[2:4]
    rows = [f"row {one.row}={one.row + 1}" for one in chosen]
    draw([values, "--model", model, *(x for r in rows for x in ("--row", r)),
          "--out", str(tmp_path / "rows")])  # fmt: skip
    made = json.loads((tmp_path / "rows.json").read_text("utf-8"))
    for one, row in zip(chosen, made, strict=True):
        expected = one.values["total"][one.response]
        got = [value for _, value in row["tokens"]]
        assert len(expected) - len(got) in (0, 1)  # without the end token
        assert got == pytest.approx(expected[: len(got)], abs=1e-3)
        assert row["line"] == one.row + 1
    assert {path.name for path in tmp_path.glob("rows-*.svg")} == {
        "rows-light.svg",
        "rows-dark.svg",
    }
    with pytest.raises(SystemExit, match="no values of line 999"):
        draw([values, "--model", model, "--row", "none=999"])


@pytest.mark.slow
@nightly
@pytest.mark.smollm2
def test_the_readmes_values_are_those_of_the_demo(smollm2: Path, tmp_path: Path) -> None:
    """Two minutes: the demo as it is."""
    run_demo(tmp_path)
    kept = json.loads((ROOT / "docs/rows.json").read_text("utf-8"))
    names = [word for row in kept for word in ("--row", f"{row['name']}={row['line']}")]
    values, out = str(tmp_path / "verdict/data/values"), tmp_path / "made"
    load("draw_rows.py")["main"]([values, "--model", str(smollm2), *names, "--out", str(out)])
    for one, two in zip(json.loads(Path(f"{out}.json").read_text()), kept, strict=True):
        assert one["prompt"] == two["prompt"]
        assert [text for text, _ in one["tokens"]] == [text for text, _ in two["tokens"]]
        expected = [value for _, value in two["tokens"]]
        assert [value for _, value in one["tokens"]] == pytest.approx(expected, rel=0.05, abs=0.05)


# --- code on pages --------------------------------------------------------------------------------

FIRST_PAGES = ("README.md", "docs/quickstart.md")
"""Pages whose blocks run one after the other; ``test_printed_commands.py`` runs other commands."""

BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each fenced block; a command has no language."""
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


PAGES = [
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
]
WITH_PYTHON = {
    page: texts
    for page in PAGES
    if (texts := [text for kind, text in blocks(page) if kind == "python"])
}


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_on_a_page_compiles_and_imports_what_there_is(page: str) -> None:
    """Most blocks name a reader's own model or rows, so only their imports of this package run."""
    for text in WITH_PYTHON[page]:
        for node in ast.walk(ast.parse(text, page)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("alphatoken"):
                exec(compile(ast.Module([node], []), page, "exec"), {})


@pytest.mark.parametrize("page", FIRST_PAGES)
def test_a_bare_shell_has_what_the_lines_after_make_demo_call(page: str, tmp_path: Path) -> None:
    """``make demo`` leaves .venv; the next line makes python and alphatoken those of it."""
    commands = "".join(text for kind, text in blocks(page) if not kind)
    first, second, *others = filter(None, commands.replace("\\\n", " ").splitlines())
    assert first.startswith("make demo")
    assert second == "source .venv/bin/activate"
    called = {line.removeprefix("MODEL=$(").split()[0] for line in others}
    assert called <= {"python", "alphatoken", "alphatoken-lab"}
    here = Path(sys.prefix)
    if not (here / "bin/activate").is_file():
        pytest.skip("these tests do not run in an environment with a script that enters it")
    (tmp_path / ".venv").symlink_to(here)
    script = f"{second}; command -v {' '.join(sorted(called))}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    places = {Path(line).name: Path(line).parent.resolve() for line in done.stdout.splitlines()}
    assert places == dict.fromkeys(called, (here / "bin").resolve())


def run_line(line: str, patch: pytest.MonkeyPatch) -> None:
    """A line for the shell, as it is printed; what installs is for the package matrix."""
    if line.startswith("MODEL=$(python -m alphatoken.demo.models "):
        patch.setenv("MODEL", str(fetch_model()))
        return
    words = [os.path.expandvars(word) for word in shlex.split(line, comments=True)]
    if words[:1] in (["alphatoken"], ["alphatoken-lab"]):
        assert main(words[1:]) == 0, line
    elif words[:2] == ["python", "-m"]:
        patch.setattr(sys, "argv", words[2:])
        runpy.run_module(words[2], run_name="__main__")
    else:
        assert words[:1] in (["make"], ["pip"], ["source"]), line


SMALL = "--budget 0.1s --oracle_tokens 8 --fisher_samples 8 --tuning_steps 4"
"""Sizes of the diagnoses in tests, which say nothing then."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of a user's session: fewer rows, libraries' own
@pytest.mark.parametrize("page", FIRST_PAGES)
def test_what_a_newcomer_pastes_runs_in_order(
    page: str, in_smollm2s_place: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the small decoder and fewer rows."""
    names: dict[str, Any] = {"__name__": "pasted"}
    code = [(kind, text) for kind, text in blocks(page) if kind in ("", "python")]
    assert {kind for kind, _ in code} == {"", "python"}
    if page == "README.md":
        demo_rows(9, 16, 2, 2).write(Path("demo-output/rows"))  # as ``make demo`` leaves them
    else:
        assert "--train_limit 40 " in "".join(text for _, text in code)
    for kind, text in code:
        if kind:
            exec(compile(text, page, "exec"), names)
        else:
            for line in text.replace("\\\n", " ").splitlines():
                line = line.replace("--train_limit 40 ", "--train_limit 12 ")
                run_line(line.replace(" diagnose all ", f" diagnose all {SMALL} "), monkeypatch)
    assert names["values"].total.isfinite().all()
    assert [*Path().glob("*values/report.html")]


def test_the_pages_policy_is_imported_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name that the page says, in either program, whose folder is not that of the rows."""
    (lines,) = (text for text in WITH_PYTHON["docs/own.md"] if "class Surprising" in text)
    (tmp_path / "my_policy.py").write_text(lines)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != ""])
    before = list(sys.path)
    assert main(["policies", "my_policy:Surprising"]) == 0
    assert "Unlikely tokens first." in capsys.readouterr().out
    assert main(["sft", "--policy", "my_policy:Surprising", "--use_cpu"]) == 2
    assert "no model is named" in capsys.readouterr().err  # the policy was read before
    assert main(["sft", "--policy", "your_policy:Surprising", "--use_cpu"]) == 2
    assert "module.py in the folder where the command is called" in capsys.readouterr().err
    assert sys.path == before


# --- recorded tutorials ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/tutorials").glob("*.ipynb")), ids=lambda path: path.name
)
def test_a_recorded_tutorial_is_whole_small_and_of_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < 200_000
    assert not re.search(r"/tmp/|/home/|/root/|/work/|site-packages|Warning", text)
    book = json.loads(text)
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    if not book["metadata"].get("recorded", True):
        assert all(not cell["outputs"] for cell in cells)
        pytest.skip("not recorded yet: make tutorials")
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert len(cells) > 2
    assert outputs
    assert all(output["output_type"] != "error" for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)


# --- examples in docstrings -----------------------------------------------------------------------

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.glob("alphatoken/**/*.py"))
    if ">>> " in path.read_text("utf-8")
]


def test_there_are_examples() -> None:
    assert len(MODULES) > 10


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each runs, and prints what it shows."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testmod(import_module(name), optionflags=flags)
    assert results.attempted
    assert not results.failed, capsys.readouterr().out
