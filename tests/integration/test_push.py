"""Nothing of the training rows is in what ``push_to_hub`` uploads: a fake hub looks at it all."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from alphatoken.errors import ConfigError
from alphatoken.train import AlphaSFTConfig
from tests.integration.tiny_training import options, sft, tokenizer
from tests.places import nightly

MARKER = "qzxjvwkq"
"""In every response; its letters in this order are in nothing else."""


OTHER = "wkqzzjx"
"""The same in validation rows."""


def rows(count: int, marker: str = MARKER) -> Dataset:
    more = 1 if marker == MARKER else 2  # no prompt of one set is one of the other
    result = [
        {"prompt": f"{i}+{more}=?", "completion": f" {marker}{i % 10} is it"} for i in range(count)
    ]
    return Dataset.from_list(result)


def traces(marker: str) -> list[bytes]:
    """The marker as text, as its pieces in JSON, and as token ids in the usual forms."""
    ids = tokenizer()(marker, add_special_tokens=False)["input_ids"]
    pieces = [json.dumps(list(marker), separators=s)[1:-1] for s in ((",", ":"), (", ", ": "))]
    numbers = [sep.join(map(str, ids)) for sep in (",", ", ", " ", "\n")]
    binary = [np.array(ids, dtype=kind).tobytes() for kind in ("<i4", "<i8", "<f4", "<f8")]
    return [text.encode() for text in (marker, *pieces, *numbers)] + binary


def told(content: bytes, marker: str = MARKER) -> bool:
    """Whether the bytes tell the marker, white space and markup between its letters or not."""
    plain = re.sub(rb"<[^>]*>|\s", b"", content)
    return any(trace in text for trace in traces(marker) for text in (content, plain))


class Hub:
    """Takes what huggingface_hub would send, chosen by huggingface_hub's own filter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import HfApi

        self.files: dict[str, bytes] = {}
        self.commits: list[str] = []
        monkeypatch.setattr(HfApi, "create_repo", self.create_repo)
        monkeypatch.setattr(HfApi, "upload_folder", self.upload_folder)
        monkeypatch.setattr(HfApi, "_validate_yaml", lambda *_, **__: None)
        for name in ("create_commit", "upload_file"):
            monkeypatch.setattr(HfApi, name, self.unexpected)

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=f"user/{repo_id}")

    def unexpected(self, *_: Any, **__: Any) -> None:
        raise AssertionError("an upload that this test does not see")

    def upload_folder(self, *, folder_path: Any, path_in_repo: str = "", **named: Any) -> Any:
        from huggingface_hub import HfApi

        patterns = {k: named.get(k) for k in ("allow_patterns", "ignore_patterns")}
        chosen = HfApi()._prepare_upload_folder_additions(folder_path, path_in_repo, **patterns)
        assert chosen
        self.commits.append(named["commit_message"])
        for one in chosen:
            self.files[f"{len(self.commits)}/{one.path_in_repo}"] = Path(
                one.path_or_fileobj
            ).read_bytes()
        done: Future[None] = Future()
        done.set_result(None)
        return done if named.get("run_as_future") else None

    def names(self) -> set[str]:
        return {name.partition("/")[2] for name in self.files}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(monkeypatch)


def trained(folder: Path, strategy: str, **more: Any) -> Any:
    arguments: dict[str, Any] = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "hub_always_push": True,
    }
    arguments |= {"train_dataset": rows(16), "validation_dataset": rows(8, OTHER)}
    trainer = sft(folder, push_to_hub=True, hub_strategy=strategy, **arguments, **more)
    trainer.train()
    trainer.save_model(str(folder))  # as the command line does: this pushes
    trainer.push_to_hub()
    return trainer


@pytest.mark.parametrize(
    "strategy", ["every_save", pytest.param("end", marks=(pytest.mark.slow, nightly))]
)
def test_nothing_of_the_training_rows_is_uploaded(tmp_path: Path, hub: Hub, strategy: str) -> None:
    folder = tmp_path / "run"
    trained(folder, strategy)
    result = [name for name, content in hub.files.items() if told(content) or told(content, OTHER)]
    assert result == []
    results = folder / "_alphatoken"
    assert told((results / "alphatoken-report.html").read_bytes())  # the look has eyes
    assert told((folder / "checkpoint-4" / "alphatoken-rank0.safetensors").read_bytes())
    assert (results / "values" / "part-00000.parquet").exists()
    assert "model.safetensors" in hub.names()
    assert not any("alphatoken-rank" in name or "values" in name for name in hub.names())
    assert len(hub.commits) == {"end": 2, "every_save": 4}[strategy]
    assert not any("/" in name for name in hub.names())


def test_checkpoints_are_not_pushed(tmp_path: Path) -> None:
    for strategy in ("checkpoint", "all_checkpoints"):
        with pytest.raises(ConfigError, match=f"hub_strategy='{strategy}'"):
            AlphaSFTConfig(**options(tmp_path), push_to_hub=True, hub_strategy=strategy)
