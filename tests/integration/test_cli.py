"""``alphatoken score`` and ``alphatoken fisher``: results, interruption, and every bad input."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from alphatoken import FisherDrift, Scorer, ScorerConfig
from alphatoken.cli import main
from alphatoken.cli.program import Command, run_program
from alphatoken.data import Example, batches
from alphatoken.direction import contraction
from alphatoken.score import ScoredExample, read_values, value_files
from tests.integration.small_world import World, make_model, make_tokenizer, write_rows
from tests.rows import jsonl

# PyTorch's own forward-mode rules are scripted when the first of them is used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def load(folder: Path) -> list[ScoredExample]:
    return list(read_values(folder / "values"))


def same(left: list[ScoredExample], right: list[ScoredExample]) -> bool:
    return len(left) == len(right) and all(
        a.row == b.row
        and list(a.ids) == list(b.ids)
        and np.array_equal(a.kept, b.kept)
        and a.values.keys() == b.values.keys()
        and all(np.array_equal(a.values[key], b.values[key]) for key in a.values)
        for a, b in zip(left, right, strict=True)
    )


# --- results --------------------------------------------------------------------------------------


def by_hand(world: World, fisher: Path, **config: Any) -> tuple[Any, list[Example], Scorer]:
    """Tokenizer, training rows and scorer as the command makes them, by the Python call."""
    model, tokenizer, train, validation_rows = world.loaded()
    validation, drift = list(batches(validation_rows, 4)), FisherDrift.load(fisher)
    return tokenizer, train, Scorer(model, validation, drift, ScorerConfig(**config))


SPLIT = {"adaptation_direct", "adaptation_causal", "stability_direct", "stability_causal"}


def test_files_hold_what_the_scorer_says(world: World, tmp_path: Path) -> None:
    fisher_file = world / "fisher.safetensors"
    assert world.score(tmp_path, fisher=fisher_file, limit=14) == 0
    assert [p.name for p in value_files(tmp_path / "values")] == [
        f"part-0000{i}.parquet" for i in range(2)
    ]
    tokenizer, train, scorer = by_hand(world, fisher_file)
    scored = load(tmp_path)
    assert [e.row for e in scored] == [e.row.index for e in train[:14]]
    for start, stop in ((0, 8), (8, 14)):  # files of 8 rows
        # Batches of 4 within each, the longest rows first.
        rows = sorted(range(start, stop), key=lambda row: -len(train[row].input_ids))
        assert rows != sorted(rows), "rows of one length, or sorted"
        for first in range(0, len(rows), 4):
            own = rows[first : first + 4]
            values = scorer.score(next(iter(batches([train[row] for row in own], 4))))
            for index, row in enumerate(own):
                example, length = scored[row], len(scored[row].ids)
                for key, column in example.values.items():
                    of_batch = getattr(values, "losses" if key == "loss" else key)
                    expected = of_batch[index, :length].double().numpy()
                    assert np.array_equal(column, expected), key
                assert np.array_equal(example.response, values.mask[index, :length].numpy())
    for start in (0, 4, 8, 12):  # and tokens are kept by batches of the file's order
        group = scored[start : min(start + 4, 14)]
        total = np.concatenate([one.values["total"][one.response] for one in group])
        kept = np.concatenate([one.kept[one.response] for one in group])
        assert kept.sum() == math.ceil(0.5 * len(kept))
        assert total[kept].min() >= total[~kept].max()
        assert not any(one.kept[~one.response].any() for one in group)
    assert scored[0].values.keys() >= SPLIT
    assert any(e.values["stability"].any() for e in scored)
    assert tokenizer.decode([scored[0].ids[0]]) == "<start>"
    assert tokenizer.decode([scored[0].ids[-1]]) == "<end>"


@pytest.mark.slow
def test_parameters_by_name_are_those_of_the_python_call(world: World, tmp_path: Path) -> None:
    """Norms and the embedding beside the linears, with a Fisher of the same parameters."""
    chosen = "linears,*norm*,*embed_tokens*"
    fisher_file = tmp_path / "fisher.safetensors"
    assert world.fit(fisher_file, parameters=chosen) == 0
    out = tmp_path / "out"
    status = world.score(
        out, "--verify", 2, estimator="label", parameters=chosen, fisher=fisher_file, limit=4
    )
    assert status == 0
    _, train, scorer = by_hand(world, fisher_file, estimator="label", parameters=chosen)
    model = scorer.adapter.model
    names = [name for name, _ in model.named_parameters() if "norm" in name or "embed" in name]
    assert set(names) < set(scorer.parameters)
    values = scorer.score(next(iter(batches(train[:4], 4))))
    for index, example in enumerate(load(out)):
        expected = values.total[index, : len(example.ids)].double().numpy()
        assert np.array_equal(example.values["total"], expected)
        assert SPLIT.isdisjoint(example.values)


def test_summary_and_report_agree_with_the_values(world: World, tmp_path: Path) -> None:
    status = world.score(
        tmp_path, "--verify", 3, fisher=world / "fisher.safetensors", validation=None,
        validation_rows=5, limit=10,
    )  # fmt: skip
    assert status == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    scored = load(tmp_path)
    totals = np.concatenate([e.values["total"][e.response] for e in scored])
    assert summary["values"]["sequences"] == len(scored) == 5
    assert summary["values"]["response_tokens"] == totals.size
    assert summary["values"]["components"][0]["maximum"] == totals.max()
    assert summary["pools"]["drawn_validation"] == 5
    assert summary["settings"]["row_format"] == "the tokenizer's chat template"
    assert "agrees with the per-token oracle" in summary["certificate"]
    page = (tmp_path / "report.html").read_text()
    assert "per-token oracle" in page
    assert "Value-Propagation" in page


@pytest.mark.slow
def test_differences_say_their_error_wherever_their_values_are(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Python, the files, the summary, the page and the last line; other values say nothing."""
    words = {"estimator": "label", "parameters": "all", "limit": 4}
    assert world.score(tmp_path / "label", **words) == 0
    said = capsys.readouterr().out
    _, train, other = by_hand(world, world / "fisher.safetensors")
    batch = next(iter(batches(train[:4], 4)))
    config = ScorerConfig("label", parameters="all")
    values = Scorer(other.adapter.model, batch, None, config).score(batch)
    assert values.derivative == "central"
    assert 0 < values.error < 0.02
    assert f"by central differences, error {values.error:.0e}: " in repr(values)
    scored = load(tmp_path / "label")
    assert {example.derivative for example in scored} == {"central"}
    (error,) = {example.error for example in scored}
    assert 0 < error < 0.02
    text = f"central differences, error {error:.0e}"
    assert f"response tokens valued ({text}); " in said
    summary = json.loads((tmp_path / "label" / "summary.json").read_text())
    assert summary["values"]["derivatives"] == {"central": error}
    assert f"taken by {text} (estimated" in (tmp_path / "label" / "report.html").read_text()
    assert world.score(tmp_path / "paper", limit=4) == 0
    assert "response tokens valued; " in capsys.readouterr().out
    assert {(e.derivative, e.error) for e in load(tmp_path / "paper")} == {(None, 0.0)}


def test_warnings_are_in_the_notes_the_summary_and_the_page(world: World, tmp_path: Path) -> None:
    """Such as of weights that have no place in a model of fewer layers."""
    model = tmp_path / "model"
    shutil.copytree(world / "moved", model)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    config.pop("layer_types", None)
    (model / "config.json").write_text(json.dumps(config))
    assert world.score(tmp_path / "out", model=model, limit=4, layers=1) == 0
    said = "weights in the files of .* have no place in the model and are not loaded"
    notes = json.loads((tmp_path / "out" / "summary.json").read_text())["notes"]
    assert [note for note in notes if re.search(said, note)]
    assert re.search(said, (tmp_path / "out" / "report.html").read_text())


def test_values_that_do_not_agree_end_in_an_error(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The certificate is in the summary and the report, and the status says that it failed."""
    right = contraction.contract
    monkeypatch.setattr(contraction, "contract", lambda *arguments: 1.01 * right(*arguments))
    fisher = world / "fisher.safetensors"
    assert world.score(tmp_path, "--verify", 2, fisher=fisher, limit=4) == 2
    assert "the values do not agree with the oracle" in capsys.readouterr().err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["certificate"].endswith("does not agree")
    assert "adaptation_direct" in summary["certificate"]
    assert "does not agree" in (tmp_path / "report.html").read_text()


def test_step_zero_says_that_stability_is_zero(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fisher = world / "fisher.safetensors"
    assert world.score(tmp_path, model=world / "reference", fisher=fisher, limit=4) == 0
    assert not any(e.values["stability"].any() for e in load(tmp_path))
    notes = " ".join(json.loads((tmp_path / "summary.json").read_text())["notes"])
    assert "retention term is exactly zero" in notes
    assert "retention term is exactly zero" in (tmp_path / "report.html").read_text()
    assert capsys.readouterr().err == ""


def test_rows_of_the_fisher_and_of_validation_are_kept_out(world: World, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.jsonl"
    names = ("train", "prompts", "validation")
    mixed.write_text("".join((world / f"{name}.jsonl").read_text().upper() for name in names)
                     .replace("PROMPT", "prompt").replace("RESPONSE", "response"))  # fmt: skip
    out, fisher = tmp_path / "out", world / "fisher.safetensors"
    assert world.score(out, train=mixed, fisher=fisher) == 0
    counts = json.loads((out / "summary.json").read_text())["pools"]
    assert counts["removed_same_as_validation"] == 6
    assert counts["removed_same_as_fisher"] == 5
    assert [e.row for e in load(out)] == list(range(20))


# --- the Fisher -----------------------------------------------------------------------------------


def test_fisher_file_knows_its_model_and_prompts(world: World) -> None:
    fisher = FisherDrift.load(world / "fisher.safetensors")
    assert fisher.metadata["layers"] == [1, 2, 3]
    assert fisher.metadata["samples"] == 6
    assert len(fisher.metadata["row_keys"]) == 10  # prompt and conversation of five rows
    weights = load_file(world / "reference" / "model.safetensors")
    name = fisher.names[0]
    assert torch.equal(fisher.reference[name], weights[name])


def test_a_checkpoint_goes_when_its_fisher_is_saved(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, out = tmp_path / "state", tmp_path / "f.safetensors"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FisherDrift, "save", killed)
        assert world.fit(out, "--checkpoint", state, samples=60) == 130
    assert state.exists()
    assert world.fit(out, "--checkpoint", state, samples=60) == 0
    assert out.exists()
    assert not state.exists()


def test_another_fisher_fits_and_scores(world: World, tmp_path: Path) -> None:
    out = tmp_path / "f.safetensors"
    assert world.fit(out, "--labels", "token", "--structure", "kronecker") == 0
    assert world.score(tmp_path / "o", "--no_report", fisher=out, limit=4) == 0
    assert any(e.values["stability"].any() for e in load(tmp_path / "o"))


# peft still asks transformers by the old name.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_lora_adapter_is_valued_by_its_factors(world: World, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(
        make_model(make_tokenizer()),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False),
    )
    adapted.save_pretrained(tmp_path / "adapter")
    out, fisher, adapter = tmp_path / "out", tmp_path / "f.safetensors", tmp_path / "adapter"
    assert world.fit(fisher, adapter=adapter, samples=2) == 0
    assert all("lora_" in name for name in FisherDrift.load(fisher).names)
    status = world.score(out, "--verify", 3, model=world / "reference", adapter=adapter, limit=6)
    assert status == 0
    assert "agrees" in json.loads((out / "summary.json").read_text())["certificate"]
    plain = tmp_path / "plain"
    assert world.score(plain, "--no_report", model=world / "reference", limit=6) == 0
    assert not same(load(out), load(plain))


# --- interruption ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of all rows writes."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert world.score(out) == 0
    return out


def test_interrupt_keeps_finished_files_and_resume_gives_the_same(
    world: World,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls, score = [], Scorer.score

    def interrupted(self: Scorer, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return score(self, batch)

    monkeypatch.setattr(Scorer, "score", interrupted)
    assert world.score(tmp_path / "cut") == 130
    message = capsys.readouterr().err
    assert "8 of 20 rows are finished and kept" in message
    assert "--resume" in message
    assert [p.name for p in (tmp_path / "cut" / "values").iterdir()] == ["part-00000.parquet"]
    monkeypatch.undo()
    parts = tmp_path / "cut" / "values"
    finished = parts / "part-00000.parquet"
    before = finished.stat().st_mtime_ns
    (parts / ".part-00099.parquet.0123abcd.tmp").write_text("half")  # as a kill may leave
    assert world.score(tmp_path / "cut", "--resume") == 0
    assert same(load(tmp_path / "cut"), load(whole))
    assert finished.stat().st_mtime_ns == before
    assert not list(parts.glob(".*"))


def test_resume_refuses_another_run(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"limit": 2}
    assert world.score(tmp_path, "--no_report", **small) == 0
    assert world.score(tmp_path, "--no_report", **small) == 2
    said = capsys.readouterr().err
    assert "holds an earlier run" in said
    assert "--resume to continue it and keep what is finished, --overwrite_output to remove" in said
    other = write_rows(tmp_path / "other.jsonl", 6, seed=77)
    for changed, named in (
        ({"ratio": 0.4}, "keep_ratio"),
        ({"batch_size": 1}, "per_device_train_batch_size"),
        ({"leak_key": "conversation"}, "leak_key"),
        ({"model": world / "reference"}, "model_name_or_path, model_sha256"),
        ({"train": other}, "train_file, train_sha256"),
        ({"limit": 1}, "train_sha256"),
        ({"fisher": world / "fisher.safetensors"}, "fisher_file, fisher_sha256"),
    ):
        assert world.score(tmp_path, "--no_report", "--resume", **(small | changed)) == 2
        said = capsys.readouterr().err
        assert f"differs in {named}" in said
        assert "repeat the earlier arguments, and what is finished is kept; or another" in said
        assert "--overwrite_output, which removes the results in the folder and begins anew" in said
    assert world.score(tmp_path, "--no_report", "--overwrite_output", limit=1) == 0
    assert len(load(tmp_path)) == 1
    (tmp_path / "run.json").write_text("{")
    assert world.score(tmp_path, "--resume", limit=1) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_exchanged_value_files_are_noticed(
    world: World, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    files = value_files(out / "values")
    shutil.copy(files[0], files[1])
    assert world.score(out, "--resume") == 2
    assert "do not hold the training rows" in capsys.readouterr().err
    files[1].write_bytes(files[1].read_bytes()[:100])
    assert world.score(out, "--resume") == 2
    assert "part-00001" in capsys.readouterr().err


# --- bad input ------------------------------------------------------------------------------------


def broken_model(world: World, tmp_path: Path, name: str, content: bytes) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(world / "moved", copy)
    (copy / name).write_bytes(content)
    return copy


def cut(path: Path, source: Path) -> Path:
    path.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
    return path


ROW = {"prompt": "add : 3 and 4", "response": "3 plus 4 is 7 ."}
Case = Callable[[World, Path], dict[str, object]]
BAD: dict[str, tuple[Case, str]] = {
    "no file": (lambda w, t: {"train": t / "no.jsonl"}, "no such data file"),
    "no validation tokens": (
        lambda w, t: {"validation": jsonl(t / "v.jsonl", [ROW | {"response": ""}])},
        "no validation row is left",
    ),
    "too many validation rows": (
        lambda w, t: {"validation": None, "validation_rows": 20},
        "validation rows cannot be drawn",
    ),
    "max-length": (lambda w, t: {"max_length": 97}, "the model allows. Got: 97, limit 96"),
    "layers": (lambda w, t: {"layers": "last"}, "layers cannot be read"),
    "no model": (lambda w, t: {"model": t / "nowhere"}, "no such model folder"),
    "tokenizer": (
        lambda w, t: {"model": broken_model(w, t, "tokenizer.json", b"{]")},
        "tokenizer cannot be loaded",
    ),
    "weights": (
        lambda w, t: {"model": broken_model(w, t, "model.safetensors", b"\x08")},
        "model.safetensors is no safetensors file",
    ),
    "truncated Fisher": (
        lambda w, t: {"fisher": cut(t / "f.safetensors", w / "fisher.safetensors")},
        "f.safetensors' cannot be read",
    ),
    "device": (lambda w, t: {"device": "abacus"}, "no such device"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_that_says_what(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    case, message = BAD[name]
    status = world.score(tmp_path / "out", **case(world, tmp_path))
    output = capsys.readouterr()
    assert status in (1, 2)
    assert re.search(message, output.err), output.err
    assert output.err.count("\n") == 1, output.err
    assert output.err.startswith("alphatoken: ")
    assert output.out == ""
    assert not (tmp_path / "out" / "summary.json").exists()


def test_missing_extra_is_said_before_the_work(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from alphatoken.score import run

    monkeypatch.setattr(run, "find_spec", lambda name: None)
    assert world.score(tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "pyarrow" in said
    assert "pip install" in said
    assert not (tmp_path / "out").exists()


def test_traceback_is_shown(world: World, tmp_path: Path) -> None:
    from alphatoken.errors import DataError

    with pytest.raises(DataError):
        world.score(tmp_path, "--traceback", train=tmp_path / "no.jsonl")


def test_full_disk_is_exit_1_and_resume_mends_it(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replace, done = os.replace, []

    def full(source: Any, target: Any) -> None:
        if "part-00001" in str(target):
            raise OSError(28, "No space left on device")
        done.append(str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    small = {"limit": 4, "shard_size": 2}
    assert world.score(tmp_path, **small) == 1
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert "part-00001" in error
    assert error.count("\n") == 1
    assert [p.name for p in (tmp_path / "values").iterdir()] == ["part-00000.parquet"]
    monkeypatch.undo()
    assert world.score(tmp_path, "--resume", **small) == 0
    assert len(load(tmp_path)) == 4


# --- the face -------------------------------------------------------------------------------------


def test_a_reader_that_goes_early_is_no_error() -> None:
    words = [sys.executable, "-m", "alphatoken.cli", "sft", "--help"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        run.stdout.close()
        assert run.stderr.read() == b""


def test_wrong_arguments_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["score"], ["score", "--estimator", "magic"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("alphatoken: ")
        assert error.endswith("Remedy: alphatoken score --help.\n")
        assert error.count("\n") == 1
    assert main(["scores"]) == main(["xyz"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "no command 'scores'; did you mean 'score'? Commands: show, score" in first
    assert "no command 'xyz'. Commands: show, score" in second


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["score", "--trian_file", "x"], "Got: --trian_file. Remedy: did you mean --train_file?"),
        (["score", "--valdation-file=x"], "did you mean --validation_file?"),
        (["diagnose", "data", "--validation_fil", "x"], "did you mean --validation_file?"),
        (["fisher", "--mesages_column", "x"], "did you mean --messages_column?"),
        (["score", "--qwxyz"], "Remedy: alphatoken score --help_all lists them."),
    ],
)
def test_an_option_that_is_misspelt_is_said_before_one_that_is_missing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("alphatoken: there is no such option. Got: --")
    assert said in error


NOISE = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from "
    "kernels-community: %s. Please make sure you already `pip install kernels`",
    "DeepSpeed": "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable",
}
PINNED = "'pin_memory' argument is set as true but no accelerator is found, then device pinned"


def say_much(words: list[str]) -> None:
    """A command that says what other libraries do, and one line more of each."""
    for name, text in NOISE.items():
        log = logging.getLogger(name)
        log.warning(text, *["no kernels"] * text.count("%s"))
        log.warning("something else of %s", name)
    warnings.warn(PINNED, stacklevel=1)
    warnings.warn("something else of torch", stacklevel=1)


@pytest.mark.filterwarnings("always")
def test_lines_of_other_libraries_that_say_nothing_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """These alone, and in a command alone."""
    said: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    monkeypatch.setattr(warnings, "showwarning", lambda text, *_, **__: said.append(str(text)))
    monkeypatch.setattr(warnings, "filters", [("always", None, Warning, None, 0)])
    for name in NOISE:
        monkeypatch.setattr(logging.getLogger(name), "handlers", [handler])
    commands = {"noisy": Command("", "tests.integration.test_cli:say_much")}
    assert run_program("alphatoken", "", "", commands, ["noisy"]) == 0
    others = [f"something else of {name}" for name in (*NOISE, "torch")]
    assert said == others
    said.clear()
    say_much([])
    assert len(said) == 2 * len(others)


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: alphatoken" in (help_ := capsys.readouterr().err)
    assert "alphatoken race --config laptop-sft" in help_
