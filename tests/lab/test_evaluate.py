"""``alphatoken-lab evaluate``: a trained folder measured for real, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.normalizers import Lowercase

from alphatoken.data import encode_rows, read_rows
from alphatoken.model import loading
from alphatoken.model.loading import load_causal_model, load_tokenizer
from alphatoken_lab.measure.losses import row_losses, summary
from tests.both_programs import main
from tests.lab.small import write

ROWS = [{"prompt": f"If the object is {i},", "response": " the value is used."} for i in range(4)]
QUESTIONS = [{"instruction": "If the object is"}, {"instruction": "The following statement is"}]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    pairs = [{"prompt": "ask", "chosen": " the value", "rejected": " zq vx"}] * 2
    (tmp_path / "broken.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in ROWS[:2]) + '{"prompt": "If'
    )
    silent = [{"prompt": "If the object is", "response": " "}]
    return {
        "broken": str(tmp_path / "broken.jsonl"),
        "empty": write(tmp_path / "empty.jsonl", []),
        "silent": write(tmp_path / "silent.jsonl", silent),
        "mixed": write(tmp_path / "mixed.jsonl", [*pairs, ROWS[0]]),
        "texts": write(tmp_path / "texts.jsonl", [{"text": "no question"}]),
        "rows": write(tmp_path / "rows.jsonl", ROWS),
        "pairs": write(tmp_path / "pairs.jsonl", pairs),
        "questions": write(tmp_path / "questions.jsonl", QUESTIONS),
        "out": str(tmp_path / "out"),
    }


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command sets for libraries goes with the test."""
    for name in ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")


def result(files: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(files["out"]) / "evaluation.json").read_text())
    return found


pytestmark = pytest.mark.usefixtures("quiet")


def test_losses_and_answers_of_a_folder(
    library_decoder: Path, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "evaluate", str(library_decoder), "--target-file", files["rows"],
        "--questions", f"mine={files['questions']}",
        "--max_new_tokens", "8", "--output_dir", files["out"],
    ]  # fmt: skip
    assert main(words) == 0
    said, out = capsys.readouterr().out, Path(files["out"])
    found = result(files)
    model, tokenizer = load_causal_model(library_decoder), load_tokenizer(library_decoder)
    examples = encode_rows(read_rows(files["rows"]), tokenizer)[0]
    loss = summary(row_losses(model, examples, 16))["loss"]
    assert found["details"]["target_loss"] == pytest.approx(loss)
    assert found["target"] is found["overall"] is None  # the win rate is awaited
    assert len(found["rows"]["target"]["loss"]) == 4
    table = (out / "evaluation.md").read_text()
    line = "| Target | `mine` | {} | no chat template, win rate, scored by alpaca_eval, 2 questions"
    assert line.format("awaited") in table
    assert "Avg" not in table
    assert table.split("\n\n", 1)[1] in said
    rows = json.loads((out / "answers-mine.json").read_text())
    assert [row["generator"] for row in rows] == [library_decoder.name] * 2
    assert main(words) == 2
    assert "an evaluation is there already" in capsys.readouterr().err
    board = out / "scores" / "mine" / "leaderboard.csv"
    board.parent.mkdir(parents=True)
    board.write_text(f",win_rate\n{library_decoder.name},62.5\n")
    assert main([*words, "--only_report"]) == 0
    table = (out / "evaluation.md").read_text()
    assert line.format("62.50") in table
    assert "| **Target Avg.** |  | **62.50** |" in table
    assert "Overall" not in table  # nothing was measured of general capability
    assert result(files)["details"]["target/mine"] == result(files)["target"] == 62.5
    assert main([*words, "--overwrite_output", "--quiet"]) == 0
    assert result(files)["target"] is None  # that win rate was of the answers before
    assert main(["evaluate", "m", "--only_report", "--output_dir", files["out"] + "2"]) == 2
    assert "no evaluation is there" in capsys.readouterr().err


@pytest.mark.parametrize("own", [False, True], ids=["base's tokenizer", "its own tokenizer"])
def test_an_adapter_s_folder_is_its_base_with_it(
    own: bool, library_decoder: Path, files: dict[str, str], tmp_path: Path
) -> None:
    """Base and adapter are found from the folder alone; the base is the reference of pairs."""
    import peft
    import torch

    base = load_causal_model(library_decoder, device="cpu")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, config)
    # Both factors by one seed: PEFT draws A from wherever the process's draws stand, and some
    # of those answer six tokens like the base.
    drawn = torch.Generator().manual_seed(0)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.3, generator=drawn)
    adapted.save_pretrained(tmp_path / "lora")
    tokenizer = load_tokenizer(library_decoder)
    if own:  # as after a training with another one: it reads other tokens
        tokenizer.backend_tokenizer.normalizer = Lowercase()
        tokenizer.save_pretrained(tmp_path / "lora")
    examples = encode_rows(read_rows(files["rows"]), tokenizer)[0]
    wanted = summary(row_losses(adapted, examples, 16))["loss"]
    words = ["evaluate", str(tmp_path / "lora"), "--retention_file", files["rows"], "--quiet"]
    pairs = ["--target_file", files["pairs"]]
    assert main([*words, *pairs, "--output_dir", files["out"]]) == 0
    found = result(files)
    assert found["details"]["retention_loss"] == pytest.approx(wanted, rel=1e-5)
    assert found["details"]["target_margin"] != 0.0  # against the base alone


def test_pairs_are_measured_against_the_start(
    library_decoder: Path, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(library_decoder), "--target_file", files["pairs"]]
    words += ["--output_dir", files["out"], "--quiet"]
    assert main(words) == 2
    assert "the model before training is not named" in capsys.readouterr().err
    assert main([*words, "--start", str(library_decoder)]) == 0
    found = result(files)["details"]
    assert found == {"target_loss": pytest.approx(0.6931472), "target_accuracy": 50.0,
                     "target_margin": 0.0}  # fmt: skip


REFUSED: dict[str, tuple[list[str], str]] = {
    "a broken row": (["--target_file", "{broken}"], "broken JSON line. Got: broken.jsonl, line 3"),
    "no row": (["--retention_file", "{empty}"], "the data file has no rows"),
    "no response": (["--target_file", "{silent}"], "target_file has no response to measure"),
    "one row that is no pair": (
        ["--target_file", "{mixed}", "--start", "m"], "the row has no chosen response",
    ),
    "nothing": ([], "nothing is to be measured"),
    "no file": (["--target_file", "no.jsonl"], "target_file does not exist"),
    "no questions": (["--questions", "a=none.jsonl"], "questions a does not exist"),
    "a row without a question": (["--questions", "a={texts}"], "the row has no question"),
    "a set without a file": (["--questions", "alpaca"], "--questions is NAME=VALUE"),
    "not a number": (
        ["--retention_tasks", "mmlu", "--shots", "mmlu=five"], "--shots is NAME=VALUE"
    ),
    "shots of nothing": (["--target_file", "{rows}", "--shots", "mmlu=5"], "no lm-eval task"),
    "no measures": (["--measures", "no.yaml"], "file of --measures does not exist"),
    "no template": (["--target_file", "{rows}", "--task_chat"], "the tokenizer has none"),
    "a beta below 0": (["--target_file", "{pairs}", "--beta", "-1"], "--beta must lie above 0"),
    "a folder that is no place": (
        ["--target_file", "{rows}", "--output_dir", "/proc/out"], "folder cannot be written",
    ),
    "a file for a folder": (["--target_file", "{rows}", "--output_dir", "{rows}"], "is a file"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_measured_is_refused_before_the_model_is_loaded(
    name: str,
    library_decoder: Path,
    files: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(loading, "load_causal_model", lambda *_, **__: pytest.fail("loaded"))
    more, said = REFUSED[name]
    words = ["evaluate", str(library_decoder), "--output_dir", files["out"]]
    words += [word.format(**files) for word in more]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len([line for line in error.splitlines() if not line.startswith("note: ")]) == 1
    assert not Path(files["out"]).exists()
