"""Whole rows by mean walk value: against a copy that is trained, a mean and a sort."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from trl import SFTTrainer

from alphatoken import Scorer
from alphatoken.errors import ConfigError, DataError
from alphatoken.oracle import run as oracle
from alphatoken.support.storage import write_tensors
from alphatoken.train import AlphaSFTTrainer
from alphatoken.train.policies import policy, walk_rows
from alphatoken.train.policies.walk_rows import WalkRows
from alphatoken.train.policy import PolicySettings, PolicyStage
from alphatoken.train.sft import padded_batch
from tests.integration import tiny_training as tiny
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.property.profiles import budget
from tests.property.setups import forward_of, quiet
from tests.property.tolerance import close

Row = Mapping[str, Any]
RATE, OWN_RATE = 1e-2, 3e-3


def rows_of(lengths: Sequence[int], seed: int) -> list[Row]:
    """Rows of two prompt tokens and so many response tokens."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(1, 11, (2 + length,), generator=draw).tolist()
        rows.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return rows


def right_padded(rows: Sequence[Row]) -> Any:
    return padded_batch(rows, 0, "cpu")


def stage(
    folder: Path, rows: Sequence[Row], validation: Sequence[Row], size: int = 2, **changes: Any
) -> PolicyStage:
    fields = {
        "model": ReferenceDecoder(DecoderConfig(layers=1), 3),
        "batch_size": 3,
        "progress": False,
        "run": {"per_device_train_batch_size": size, "learning_rate": RATE},
    }
    return PolicyStage(
        rows=rows, validation=validation, row_batch=right_padded, folder=folder, **fields | changes
    )


def means_by_hand(of: PolicyStage, size: int, steps: int, rate: float) -> list[float]:
    """By a copy that is trained, a micro-batch of validation rows a step, and a row at a time."""
    count = len(of.validation)
    pieces = -(-count // size)
    bounds = [count * i // pieces for i in range(pieces + 1)]
    batches = [right_padded(of.validation[bounds[i] : bounds[i + 1]]) for i in range(pieces)]
    adamw = partial(torch.optim.AdamW, lr=rate, weight_decay=0.0)
    end = oracle.walked(of.model, forward_of, batches, steps, adamw)
    means = []
    for row in of.rows:
        values = oracle.walk_values(of.model, end, forward_of, right_padded([row]))
        tokens = sum(label != -100 for label in row["labels"])
        means.append(float(values.sum()) / tokens if tokens else -math.inf)
    return means


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=7).filter(any),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([None, OWN_RATE]),
    st.integers(0, 99),
)
@example([3, 0, 6, 1], [2, 4, 1], 2, 4, OWN_RATE, 0)
@budget(0.1)
def test_row_values_are_the_means_along_a_walk(
    lengths: list[int], held: list[int], size: int, steps: int, rate: float | None, seed: int
) -> None:
    """Every row's mean, whatever it is padded with; the model is as it was.

    Proves: rows by mean walk value (exact), against ``walked``, ``walk_values``.
    """
    with tempfile.TemporaryDirectory() as folder, quiet():
        of = stage(Path(folder), rows_of(lengths, seed), rows_of(held, seed + 1), size)
        before = {name: p.clone() for name, p in of.model.state_dict().items()}
        made = WalkRows(walk_steps=steps, walk_learning_rate=rate)
        values = made.row_values(of)
        expected = means_by_hand(of, size, steps, RATE if rate is None else rate)
    assert all(torch.equal(p, before[name]) for name, p in of.model.state_dict().items())
    finite = np.isfinite(expected)
    assert np.isneginf(values[~finite]).all()
    wanted = torch.tensor(np.asarray(expected)[finite])
    close(torch.tensor(values[finite]), wanted, 1.0 + wanted.abs(), 1e-8, name="means")


class Planted(WalkRows):
    """Has its values by hand."""

    def __init__(self, values: Sequence[float], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._values = np.asarray(values, float)

    def row_values(self, stage: PolicyStage) -> Any:
        return self._values


@given(st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=9))
@example([0.5, 0.5, 2.0, 0.5, -math.inf])
def test_the_best_rows_are_kept(values: list[float]) -> None:
    """The ceil(share R) largest, of equal ones the first, none without a response.

    Proves: rows by mean walk value (exact), against a sort.
    """
    lengths = [0 if v == -math.inf else 1 + i % 3 for i, v in enumerate(values)]
    of = stage(Path(), rows_of(lengths, 0), rows_of([1], 1))
    finite = [i for i, v in enumerate(values) if v > -math.inf]
    best = sorted(finite, key=lambda i: (-values[i], i))
    for share in (0.3, 0.5, 1.0):
        made = Planted(values, share=share)
        if not finite:
            with pytest.raises(DataError, match="no training row has a response"):
                made.choose_rows(of)
            continue
        wanted = sorted(best[: math.ceil(round(share * len(values), 6))])
        assert made.choose_rows(of) == wanted
        assert made.summary["chosen_rows"] == len(wanted)
        assert made.summary["lowest_value"] == min(values[i] for i in wanted)
        tokens = sum(lengths[i] for i in wanted) / sum(lengths)
        assert made.summary["kept_share"] == pytest.approx(tokens)


def test_a_budget_is_one_of_tokens() -> None:
    """Half of 8 tokens: the rows of 3 and of 1, in the order of their values."""
    of = stage(Path(), rows_of([2, 3, 1, 2], 0), rows_of([1], 1))
    made = Planted([0.0, 3.0, 2.0, 1.0], PolicySettings("budget", 0.5))
    assert made.choose_rows(of) == [1, 2]


# --- the pass -------------------------------------------------------------------------------------


def counted_scores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each batch that is valued from now on."""
    scored: list[int] = []
    score = Scorer.score

    def counting(self: Any, batch: Any, **more: Any) -> Any:
        scored.append(len(batch["labels"]))
        return score(self, batch, **more)

    monkeypatch.setattr(Scorer, "score", counting)
    return scored


def values_are_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all that they depend on: rows, weights, steps, rate, validation rows and their batch."""
    rows, held = rows_of([3, 1, 4, 2, 2], 0), rows_of([2, 3], 1)
    with quiet():
        first = WalkRows(walk_steps=2).row_values(stage(folder, rows, held))
        scored = counted_scores(monkeypatch)
        again = WalkRows(walk_steps=2).row_values(stage(folder, rows, held))
        assert scored == []
        assert np.array_equal(again, first)
        other = ReferenceDecoder(DecoderConfig(layers=1), 4)
        for made, of in (
            (WalkRows(walk_steps=3), stage(folder, rows, held)),
            (WalkRows(walk_steps=2, walk_learning_rate=OWN_RATE), stage(folder, rows, held)),
            (WalkRows(walk_steps=2), stage(folder, rows, held, model=other)),
            (WalkRows(walk_steps=2), stage(folder, rows, rows_of([2, 3], 2))),
            (WalkRows(walk_steps=2), stage(folder, rows[::-1], held)),
            (WalkRows(walk_steps=2), stage(folder, rows, held, 1)),
        ):
            scored.clear()
            assert not np.array_equal(made.row_values(of), first)
            assert sum(scored) == 5


def test_values_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves: rows by mean walk value (exact), against values of other rows and settings."""
    values_are_found_again(tmp_path, monkeypatch)


def test_a_killed_pass_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same bits; files that were written are not made again."""
    monkeypatch.setattr(walk_rows, "_ROWS", 2)
    rows, held = rows_of([3, 1, 4, 2, 2], 0), rows_of([2, 3], 1)
    with quiet():
        whole = WalkRows(walk_steps=2).row_values(stage(tmp_path / "whole", rows, held))
        write, written = write_tensors, list[Path]()

        def killed(path: Path, *args: Any) -> None:
            if len(written) == 2:
                raise KeyboardInterrupt
            written.append(path)
            write(path, *args)

        with monkeypatch.context() as patch:
            patch.setattr(walk_rows, "write_tensors", killed)
            with pytest.raises(KeyboardInterrupt):
                WalkRows(walk_steps=2).row_values(stage(tmp_path / "part", rows, held))
        scored = counted_scores(monkeypatch)
        again = WalkRows(walk_steps=2).row_values(stage(tmp_path / "part", rows, held))
    assert sum(scored) == 1  # the last of five rows
    assert np.array_equal(again, whole)


def test_the_pass_runs_in_the_runs_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the values of a run in bf16 do, and beside values of another precision.

    Proves: rows by mean walk value (exact), against values within the rounding of bf16.
    """
    rows, held = tiny.sft_rows(6), tiny.sft_rows(4, seed=5)
    precisions: list[bool] = []
    score = Scorer.score

    def noting(self: Any, batch: Any, **more: Any) -> Any:
        precisions.append(torch.is_autocast_enabled("cpu"))
        return score(self, batch, **more)

    monkeypatch.setattr(Scorer, "score", noting)
    values, row_values = list[Any](), WalkRows.row_values

    def kept(self: WalkRows, stage: PolicyStage) -> Any:
        values.append(row_values(self, stage))
        return values[-1]

    monkeypatch.setattr(WalkRows, "row_values", kept)
    options = {"walk_steps": 2, "walk_learning_rate": 1e-3}
    own = {"policy": "walk-rows", "policy_options": options, "validation_dataset": held}
    for narrow in (False, True):
        precisions.clear()
        data = {"train_dataset": rows, "policy_cache": str(tmp_path / "cache")}
        tiny.made(AlphaSFTTrainer, tmp_path / f"run-{narrow}", **own, **data, bf16=narrow)
        assert precisions, "values of the other precision were read"
        assert set(precisions) == {narrow}
    assert not np.array_equal(*values)
    assert np.allclose(*values, atol=0.05)


@pytest.mark.slow
def test_a_run_is_trls_on_the_chosen_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Proves: rows by mean walk value (exact), against TRL on the rows that are left."""
    rows, held = tiny.sft_rows(12), tiny.sft_rows(4, seed=5)
    sgd = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 3}
    options = {"share": 0.4, "walk_steps": 3, "walk_learning_rate": 1e-3}
    own = {"policy": "walk-rows", "policy_options": options, "validation_dataset": held}
    data = {"train_dataset": rows}
    ours = tiny.made(AlphaSFTTrainer, tmp_path / "ours" / "run", **own, **data, **sgd)
    said = capfd.readouterr().err
    assert "4 validation rows, 12 training rows" in said
    assert "5 of 12 rows are trained on" in said
    kept = [list(row["input_ids"]) for row in ours.train_dataset]
    every = [row["input_ids"] for row in tiny.prepared(tmp_path / "rows", rows)]
    chosen = [every.index(ids) for ids in kept]
    assert chosen == sorted(chosen)
    assert len(chosen) == 5
    trl = tiny.made(SFTTrainer, tmp_path / "trl", train_dataset=rows.select(chosen), **sgd)
    for trainer in (ours, trl):
        trainer.train()
    assert tiny.furthest(ours, trl) == 0


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"share": 0.0}, "share"),
        ({"share": 1.1}, "share"),
        ({"share": True}, "share"),
        ({"share": "half"}, "share"),
        ({"share": math.nan}, "share"),
        ({"walk_steps": 0}, "walk_steps"),
        ({"walk_learning_rate": 0.0}, "walk_learning_rate"),
        ({"walk_learning_rate": math.nan}, "walk_learning_rate"),
        ({"steps": 3}, "does not take"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        policy("walk-rows", **options)


def test_bad_rows_are_refused(tmp_path: Path) -> None:
    rows = rows_of([2, 2], 0)
    packed = [{**rows[0], "seq_lengths": [2, 2]}]
    for of, match in (
        (stage(tmp_path, rows, ()), "0 and 2|needs validation rows"),
        (stage(tmp_path, (), rows), "needs validation rows and training rows"),
        (stage(tmp_path, packed, rows), "packed"),
    ):
        with pytest.raises(ConfigError, match=match):
            WalkRows().row_values(of)


def test_a_run_without_validation_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a validation dataset"):
        tiny.made(AlphaSFTTrainer, tmp_path, policy="walk-rows")
