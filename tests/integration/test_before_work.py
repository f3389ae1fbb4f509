"""What a command refuses before its first expensive step, in which words, and with which status."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedModel

from alphatoken.errors import DataError
from tests.both_programs import main
from tests.integration.tiny_training import saved
from tests.rows import jsonl

ROW = {"prompt": "one and two", "response": "three"}


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return str(jsonl(tmp_path / "rows.jsonl", [ROW] * 4))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command that must end before tokenizer and model; gives status and message."""
    from alphatoken.model import loading

    monkeypatch.setattr(loading, "load_or_refuse", lambda *_, **__: pytest.fail("loaded"))

    def run(*words: object) -> tuple[int, str]:
        status = main([str(word) for word in words])
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        return status, error

    return run


def words_of(command: str, rows: str, out: object) -> list[object]:
    model = ["--model_name_or_path", "./model", "--train_file", rows]
    return {
        "fisher": ["fisher", *model, "--output_file", out],
        "score": ["score", *model, "--validation_rows", 2, "--output_dir", out],
        **{
            name: [name, *model, "--validation_rows", 2, "--output_dir", out, "--use_cpu",
                   "--bf16", "false"]
            for name in ("sft", "dpo")
        },
        "merge": ["merge", "--before", "./a", "--after", "./b", "--output_dir", out],
    }[command]  # fmt: skip


@pytest.mark.parametrize("command", ["fisher", "merge"])
def test_nothing_is_overwritten_unasked(command: str, rows: str, tmp_path: Path, said: Any) -> None:
    out = tmp_path / "out"
    out.write_text("the only copy")
    status, message = said(*words_of(command, rows, out))
    assert status == 2
    assert "is there already" in message or "exists" in message
    assert out.read_text() == "the only copy"


@pytest.mark.parametrize("command", ["fisher", "merge", "score"])
def test_what_cannot_be_written_is_said_first(
    command: str, rows: str, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    status, message = said(*words_of(command, rows, Path(rows).parent / "new"))
    assert status == 1
    assert "No space left on device" in message


@pytest.mark.parametrize("command", ["score", "fisher"])
def test_layers_that_the_model_lacks_are_said_before_its_weights_are_loaded(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    place, out = saved(tmp_path, 8), tmp_path / "out"
    monkeypatch.setattr(
        PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded")
    )
    words = words_of(command, str(place / "rows.jsonl"), out)
    words[2] = place / "model"
    assert main([*map(str, words), "--layers", "99"]) == 2
    assert "layers=99, model depth 3" in capsys.readouterr().err


def test_an_earlier_run_is_refused_before_rows_are_read(
    rows: str, tmp_path: Path, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alphatoken.score import run

    monkeypatch.setattr(run, "prepare_job", lambda _: pytest.fail("read"))
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.json").write_text("{}")
    status, message = said(*words_of("score", rows, out))
    assert status == 2
    assert "holds an earlier run" in message
    assert (out / "run.json").read_text() == "{}"


def test_a_full_disk_is_no_wrong_input(tmp_path: Path) -> None:
    """The command's status is that of a file's error."""
    from alphatoken.cli.program import Program
    from alphatoken.cli.training import _save

    def last(_: str) -> None:
        raise OSError(28, "No space left on device")

    def save_model() -> int:
        _save(SimpleNamespace(save_model=last), str(tmp_path))
        return 0

    with pytest.raises(DataError, match="trained model could not be written"):
        save_model()
    assert Program("alphatoken", "", "", {})._guarded(save_model, False) == 1
