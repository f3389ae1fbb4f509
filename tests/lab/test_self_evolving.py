"""Self-evolving Token Cleaning in the real trainer, against the same rounds by hand with TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import SFTTrainer

from alphatoken.errors import ConfigError
from alphatoken.model.batch import label_mask
from alphatoken.oracle.gradients import token_losses
from alphatoken.train import AlphaSFTTrainer
from alphatoken.train.policies.trained_weights import save_weights
from alphatoken.train.policy import PolicySettings
from alphatoken_lab.methods import token_cleaning
from alphatoken_lab.methods.token_cleaning import TokenCleaning
from tests.integration import tiny_training as tiny

OPTIONS = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 3}
ROWS, ROUNDS, RATIO = 24, 3, 0.6


def run(folder: Path, policy: Any, **more: Any) -> AlphaSFTTrainer:
    """Train by a policy: an object, or a name as a recipe has it."""
    own = {"model": tiny.model(layers=2), "train_dataset": tiny.sft_rows(ROWS), **OPTIONS, **more}
    trainer = tiny.made(AlphaSFTTrainer, folder, policy=policy, **own)
    trainer.train()
    return trainer


def by_hand(
    folder: Path, rows: list[dict[str, Any]], start: Any, keep: list[list[bool]]
) -> torch.nn.Module:
    """TRL's own trainer; ``keep`` marks the tokens whose label stays."""
    torch.manual_seed(11)
    marked = [
        {
            "input_ids": row["input_ids"],
            "labels": [x if k else -100 for x, k in zip(row["labels"], one, strict=True)],
        }
        for row, one in zip(rows, keep, strict=True)
    ]
    given = {"model": start, "train_dataset": Dataset.from_list(marked), **OPTIONS}
    trainer = tiny.made(SFTTrainer, folder, **given)
    trainer.train()
    found: torch.nn.Module = trainer.model
    return found


def losses(model: Any, row: dict[str, Any]) -> np.ndarray[Any, Any]:
    """(t,) by the oracle; NaN off the response."""
    ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
    with torch.no_grad():
        found = token_losses(model.eval()(input_ids=ids).logits, labels)
    return np.where(label_mask(labels)[0], found[0], np.nan)


def test_rounds_are_those_done_by_hand(tmp_path: Path) -> None:
    """Three rounds of the policy; by hand: TRL trains each round on labels that are cut by hand."""
    policy = TokenCleaning(rounds=ROUNDS, ratio=RATIO)
    found = run(tmp_path / "own" / "run", policy)
    rows = tiny.prepared(tmp_path / "rows", tiny.sft_rows(ROWS))
    parts = [rows[8 * t : 8 * (t + 1)] for t in range(ROUNDS)]
    base, model = tiny.model(layers=2), tiny.model(layers=2)
    for t, part in enumerate(parts):
        if t == 0:
            keep = [[x != -100 for x in row["labels"]] for row in part]
        else:
            gains = [losses(base, row) - losses(model, row) for row in part]
            every = np.concatenate([g[~np.isnan(g)] for g in gains])
            count = int(len(every) * 6 // 10)
            least = np.sort(every)[::-1][count - 1]
            keep = [[bool(x >= least) for x in g] for g in gains]
            assert sum(map(sum, keep)) == count
        model = by_hand(tmp_path / f"hand-{t}", part, model, keep)
    own, wanted = tiny.weights(found.model), tiny.weights(model)
    furthest = max(float((own[n] - wanted[n]).abs().max()) for n in wanted)
    moved = max(float((wanted[n] - w).abs().max()) for n, w in tiny.weights(base).items())
    assert moved > 1e-2
    assert furthest < 1e-6
    record = json.loads((tmp_path / "own" / "run" / "policy.json").read_text())
    assert record["policy"] == "token-cleaning, 3 rounds"
    summary = record["summary"]
    assert summary["kept_share"] == pytest.approx(RATIO, abs=0.01)
    # 3 steps of 4 rows on 8: every row once and half of them twice, of the two earlier rounds
    whole = sum(sum(x != -100 for x in row["labels"]) for part in parts[:2] for row in part)
    assert 1.3 * whole < summary["earlier_tokens"] < 1.7 * whole
    first = sum(sum(x != -100 for x in row["labels"]) for row in parts[0])
    assert summary["earlier_kept"] < summary["earlier_tokens"] - 0.3 * (whole - first)
    left = [path.name for path in (tmp_path / "own" / "policies").iterdir()]
    assert not [name for name in left if name.startswith("run-")], "folders of copies are gone"


def test_killed_between_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished rounds are not trained again, and the end is that of an unbroken run."""
    options: dict[str, Any] = {
        "policy": "token-cleaning", "policy_options": {"rounds": ROUNDS}
    }  # fmt: skip
    kept, keep = [], save_weights

    def counted(model: Any, folder: Path) -> None:
        kept.append(folder.name)
        if len(kept) == 2:
            raise KeyboardInterrupt
        keep(model, folder)

    monkeypatch.setattr(token_cleaning, "save_weights", counted)
    broken = tmp_path / "broken" / "run"
    with pytest.raises(KeyboardInterrupt):
        run(broken, **options)
    assert kept == ["round-0", "round-1"]
    found = run(broken, **options)
    assert kept == ["round-0", "round-1", "round-1"]
    whole = run(tmp_path / "whole" / "run", **options)
    own, wanted = tiny.weights(found.model), tiny.weights(whole.model)
    assert all(torch.equal(own[name], wanted[name]) for name in wanted)
    assert len(kept) == 5


def test_budget(tmp_path: Path) -> None:
    settings = PolicySettings(mode="budget", keep_ratio=0.25)
    policy = TokenCleaning(settings, rounds=2)
    trainer = run(tmp_path / "run", policy)
    assert len(trainer.train_dataset) == ROWS // 2
    assert policy.summary["kept_share"] == pytest.approx(0.25, abs=0.03)
    assert policy.summary["earlier_kept"] == policy.summary["earlier_tokens"] > 0


@pytest.mark.parametrize(
    ("policy", "more", "match"),
    [
        (lambda: TokenCleaning(rounds=2, warmup_share=0.5), {}, "no warm-up"),
        (lambda: TokenCleaning(rounds=2), {"packing": True}, "packed rows"),
        (lambda: TokenCleaning(rounds=ROWS + 1), {}, "a row for each"),
        (lambda: TokenCleaning(rounds=2, reference="x"), {}, "no reference"),
    ],
)
def test_bad_input(tmp_path: Path, policy: Any, more: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        run(tmp_path / "run", policy(), **more)
