"""The benchmark suite: the command, what it writes, and what it keeps."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from alphatoken import Scorer, ScorerConfig
from alphatoken.model.protocol import find_adapter
from benchmarks import cases, measure, targets
from benchmarks import run as results
from benchmarks.measure import timed
from benchmarks.models import Size
from benchmarks.pages import measured
from benchmarks.run import main


def row(name: str, ratio: float = 1.0, **more: Any) -> dict[str, Any]:
    """A finished row."""
    made = {"name": name, "size": "s", "ours": ratio, "other": 1.0, "ratio": ratio, "floor": 1.0}
    return results.finished({**made, "note": "", **more}, {"cpu": "c"})


# --- the command ---------------------------------------------------------------------------------


def test_the_command_measures_one_case_and_keeps_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = [row("label_vs_step", 1.3), row("projected_vs_gram", 9.0)]
    results.write(tmp_path / "results.json", old)
    words = ["projected_vs_gram", "score_overhead", "--quick", "--out", str(tmp_path)]
    main([*words, "--threads", "1", "--device", "cpu"])
    said = capsys.readouterr().err
    rows = {one["name"]: one for one in measured(tmp_path / "results.json")}
    assert rows["label_vs_step"] == old[0]
    assert rows["projected_vs_gram"]["ratio"] != 9.0
    assert set(rows) >= {"projected_vs_gram_built", "score_overhead_k3", "score_overhead_k3_fisher"}
    fresh = rows["score_overhead_k3"]
    assert fresh["ratio"] == fresh["ours"] / fresh["other"]  # of one pair
    assert fresh["target"] == 1.12
    assert fresh["met"] is (fresh["ratio"] <= 1.12)
    assert fresh["floor"] < fresh["flops"] / fresh["flops_other"]  # counted, so not below the floor
    assert "min remain" in said
    assert "[2/2]" in said
    (line,) = (tmp_path / "history.jsonl").read_text().splitlines()
    kept = json.loads(line)
    assert kept["machine"] == fresh["machine"]
    assert kept["quiet"] in (True, False)
    assert len(kept["ratios"]) == 4  # of what this run measured


# --- rows ----------------------------------------------------------------------------------------


def test_new_rows_replace_those_of_their_name_and_device_alone() -> None:
    old = [row("a", 1.0), row("b", 2.0), row("a", 3.0)]
    other = {**row("a", 4.0), "device": "cuda"}
    assert results.merged([*old, other], [row("a", 5.0)]) == [old[1], other, row("a", 5.0)]
    assert results.merged(old, []) == old


@pytest.mark.parametrize(
    ("name", "ratio", "more", "target", "met"),
    [
        ("label_vs_step", 1.25, {}, 1.25, True),
        ("label_vs_step", 1.2500001, {}, 1.25, False),
        ("label_vs_per_token", 0.03, {"target": 8 / 192}, 8 / 192, True),
        ("label_vs_per_token", 0.05, {"target": 8 / 192}, 8 / 192, False),
        ("projected_vs_gram", 0.139, {}, 1 / 7.2, False),
        ("smollm2_score_k3", 9.0, {}, None, None),
    ],
)
def test_a_row_is_judged_by_its_target(
    name: str, ratio: float, more: dict[str, Any], target: float | None, met: bool | None
) -> None:
    judged = row(name, ratio, **more)
    assert (judged["target"], judged["met"]) == (target, met)


def test_committed_results_hold_every_promise() -> None:
    rows = measured()
    text = targets.table_of_targets()
    for name in targets.TARGETS:
        found = [one for one in rows if one["name"] == name and one["device"] == "cpu"]
        assert found, name
        for one in found:
            assert set(one) >= {"ours", "other", "ratio", "floor", "machine", "target", "met"}
            assert isinstance(one["target"], float)
            assert one["floor"] > 0
            assert one["met"] is (one["ratio"] <= one["target"])
        (line,) = (line for line in text.splitlines() if line.startswith(f"| `{name}`: "))
        assert ("**no**" in line) == (not all(one["met"] for one in found)), name


# --- measuring -----------------------------------------------------------------------------------


def test_alternate_takes_the_ratio_of_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of ours: a machine that slows down from pair to pair tilts nothing."""
    now, speed = [0.0], iter([1.0, 1.0, 2.0, 2.0, 4.0, 4.0])

    def work(seconds: float) -> None:
        now[0] += seconds * next(speed)

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    found = measure.alternate(lambda: work(0.2), lambda: work(0.1), repeats=3, warm=False)
    assert found["ratio"] == pytest.approx(2.0)
    assert found["low"] <= found["ratio"] <= found["high"]
    assert measure.spread([2.0]) == {"low": 2.0, "high": 2.0}


def test_the_exponent_is_the_slope_of_logs() -> None:
    lengths = [1024, 2048, 4096, 8192] * 2
    slope, low, high = cases.fitted_exponent(lengths, [3e-4 * n**1.2 for n in lengths])
    assert math.isclose(slope, 1.2, rel_tol=1e-12)
    assert low <= slope <= high
    noisy = [n * (1.1 if i % 2 else 0.9) for i, n in enumerate(lengths)]
    slope, low, high = cases.fitted_exponent(lengths, noisy)
    assert low < slope < high


@pytest.mark.parametrize("estimator", ["alphatoken", "path", "label"])
def test_the_attention_clock_sees_both_passes_and_changes_no_value(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that sleeps is charged to attention, in the forward and in the backward."""
    size = Size(32, 2, 64, 4, length=16)
    batch, validation = size.batch(), size.batch(seed=1)
    config = ScorerConfig(estimator=estimator, layers="all")
    model = size.model()
    plain = Scorer(model, validation, None, config).score(batch)
    adapter = find_adapter(model)
    clock = cases.AttentionClock(adapter)
    scorer = Scorer(model, validation, None, config, adapter=adapter)
    assert torch.equal(scorer.score(batch).total, plain.total)
    slept = _sleepy_kernel(monkeypatch)
    clock.reset()
    whole = timed(lambda: scorer.score(batch))
    if estimator == "path":  # its attention is not rerouted, so the clock has nothing to see
        assert clock.seconds == 0.0
        return
    if estimator == "label":  # forward-mode attention has no kernel
        assert 0 < clock.seconds < whole
        assert not slept
        return
    assert len(slept) == 4  # two layers, forward and backward
    assert sum(slept) <= clock.seconds < whole


def _sleepy_kernel(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The model's kernel takes 20 ms longer in each direction; what it slept is in the list."""
    slept: list[float] = []
    native = torch.nn.functional.scaled_dot_product_attention

    def sleep(*_: Any) -> None:
        time.sleep(0.02)
        slept.append(0.02)

    def slow(*args: Any, **kwargs: Any) -> torch.Tensor:
        sleep()
        output = native(*args, **kwargs)
        if output.requires_grad:
            output.register_hook(sleep)
        return output

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", slow)
    return slept
