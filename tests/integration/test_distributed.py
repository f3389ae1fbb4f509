"""Two real processes under each layout against one: the same values, masks and weights.

Each layout is launched once, with ``accelerate launch``; the tests read what its ranks saved. What
a worker does is in ``tests/integration/distributed``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from tests.integration.distributed.launch import WORLD, launch, saved
from tests.integration.tiny_training import lora, model

Ranks = list[dict[str, Any]]

JOBS = {
    "single": ("values.values", "trainers.sft_global", "trainers.dpo_global", "trainers.sft_batch",
               "trainers.lora_global", "trainers.empty_global", "trainers.empty_batch"),
    "ddp": ("parts.parts", "parts.selection", "values.values", "trainers.sft_global",
            "trainers.dpo_global", "trainers.sft_batch", "trainers.empty_batch",
            "trainers.reused", "trainers.resumed", "refusals.refusals"),
    "fsdp2": ("parts.parts", "parts.selection", "values.values", "trainers.sft_global",
              "trainers.dpo_global", "trainers.sft_batch", "trainers.lora_global",
              "trainers.empty_global", "trainers.resumed", "refusals.refusals"),
    "zero1": ("trainers.sft_global", "trainers.sft_batch"),
    "zero2": ("values.values", "trainers.sft_global", "trainers.dpo_global",
              "refusals.refusals"),
    "zero3": ("parts.parts", "parts.selection", "values.values", "trainers.sft_global",
              "trainers.dpo_global", "trainers.sft_batch", "trainers.lora_global",
              "trainers.empty_global", "trainers.reused", "trainers.resumed",
              "refusals.refusals"),
}  # fmt: skip
EMPTY = ("empty_global", "empty_batch")
TWO = [layout for layout in JOBS if layout != "single"]

ROUNDING = 5e-6
"""Of the largest value beside it: float32 sums in another order."""


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ranks]:
    """What the ranks of a layout found; launched once, also by several test processes."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    known: dict[str, Ranks] = {}

    def found(layout: str) -> Ranks:
        if layout not in known:
            folder = shared / f"distributed-{layout}"
            with FileLock(f"{folder}.lock"):
                if (folder / "failed").exists():
                    pytest.fail(f"{layout} failed before; see the first failure")
                if not (folder / "done").exists():
                    folder.mkdir()
                    (folder / "failed").touch()
                    launch(layout, folder, *JOBS[layout])
                    (folder / "failed").unlink()
                    (folder / "done").touch()
            known[layout] = saved(layout, folder)
        return known[layout]

    return found


def with_job(name: str) -> pytest.MarkDecorator:
    layouts = [lay for lay in TWO if any(job.endswith(f".{name}") for job in JOBS[lay])]
    assert layouts
    return pytest.mark.parametrize("layout", layouts)


# --- the scorer alone ----------------------------------------------------------------------------


@with_job("values")
def test_values_equal_one_process(runs: Callable[[str], Ranks], layout: str) -> None:
    """Every captured estimator, retention, preference pairs; own and observed forwards."""
    expected, found = runs("single")[0]["values"], runs(layout)
    cases = found[0]["values"].keys()
    assert len(cases) == (12 if layout in ("ddp", "fsdp2") else 6)
    for case in cases:
        seen = []
        for rank in found:
            mine = dict(rank["values"][case])
            for name, ratio in mine.pop("balance", {}).items():
                assert ratio == pytest.approx(expected[case]["balance"][name], rel=1e-5)
            seen += mine
            for batch, components in mine.items():
                for name, values in components.items():
                    assert close(values, expected[case][batch][name]), (case, batch, name)
        assert sorted(seen) == [0, 1, 2, 3]


def close(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    assert torch.isfinite(expected).all()
    return float((found - expected).abs().max()) <= ROUNDING * float(expected.abs().max())


@with_job("parts")
def test_parts_of_matrices_and_sums(runs: Callable[[str], Ranks], layout: str) -> None:
    """Checked in the workers: tests/integration/distributed/parts.py."""
    found = runs(layout)
    assert [rank["parts"]["rank"] for rank in found] == list(range(WORLD))
    assert {rank["parts"]["sharded"] for rank in found} == {layout in ("fsdp2", "zero3")}


@with_job("selection")
def test_one_threshold_for_all(runs: Callable[[str], Ranks], layout: str) -> None:
    """Checked in the workers too: ties and draws fall as in one process."""
    found = runs(layout)
    assert found[0]["selection"] == found[1]["selection"]


# --- the trainers --------------------------------------------------------------------------------


Decided = dict[tuple[Any, ...], tuple[Tensor | None, Tensor]]


def decided(ranks: Ranks, job: str) -> Decided:
    """(step, branch, tokens of the row) -> values and weights of its response tokens."""
    found: Decided = {}
    for rank in ranks:
        for batch in rank[job]["decided"]:
            half = len(batch["ids"]) // 2
            for i, ids in enumerate(batch["ids"]):
                branch = job.startswith("dpo") and i >= half
                key = (batch["step"], branch, tuple(ids[ids != 0].tolist()))
                assert key not in found
                mask = batch["mask"][i]
                values = None if batch["values"] is None else batch["values"][i][mask]
                found[key] = (values, batch["weights"][i][mask])
    return found


def same_decisions(expected: Decided, found: Decided) -> None:
    """The same rows at the same steps, the same values, and the same tokens kept of them.

    A token may be kept here and not there if its value is the threshold, up to rounding.
    """
    assert expected.keys() == found.keys()
    for step in {key[0] for key in expected}:
        keys = [key for key in expected if key[0] == step]
        scale = max(float(expected[k][0].abs().max()) for k in keys if len(expected[k][1]))
        assert scale > 0
        for key in keys:
            value, weight = expected[key]
            if value is None or not len(weight):
                assert not found[key][1].any()
                continue
            assert float((found[key][0] - value).abs().max()) <= ROUNDING * scale
            flipped = value[weight != found[key][1]]
            if len(flipped):
                kept = [v[w > 0] for (s, b, _), (v, w) in expected.items() if (s, b) == key[:2]]
                threshold = min(float(v.min()) for v in kept if len(v))
                assert float((flipped - threshold).abs().max()) <= ROUNDING * scale


def same_weights(expected: dict[str, Any], ranks: Ranks, job: str, start: Any) -> None:
    """Bit-equal on all ranks, and equal to one process; the run went somewhere."""
    first = ranks[0][job]["parameters"]
    for rank in ranks[1:]:
        assert all(torch.equal(rank[job]["parameters"][n], p) for n, p in first.items())
    initial = dict(start.named_parameters())
    moved = 0.0
    assert first.keys() == expected["parameters"].keys()
    for name, p in expected["parameters"].items():
        assert float((first[name] - p).abs().max()) < 1e-6, name
        if name in initial:
            moved = max(moved, float((p - initial[name].detach()).abs().max()))
    assert moved > 1e-3
    assert ranks[0][job]["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def kept_of(found: Decided) -> dict[tuple[int, bool], tuple[float, int]]:
    """(step, branch) -> kept tokens, response tokens."""
    counts: dict[tuple[int, bool], tuple[float, int]] = {}
    for (step, branch, _), (_, weights) in found.items():
        kept, tokens = counts.get((step, branch), (0.0, 0))
        counts[step, branch] = kept + float(weights.sum()), tokens + len(weights)
    return counts


@with_job("sft_global")
def test_sft_under_a_global_threshold(runs: Callable[[str], Ranks], layout: str) -> None:
    compare_global(runs, layout, "sft_global", branches=1)


@with_job("dpo_global")
def test_dpo_under_a_global_threshold(runs: Callable[[str], Ranks], layout: str) -> None:
    compare_global(runs, layout, "dpo_global", branches=2)


def compare_global(runs: Callable[[str], Ranks], layout: str, job: str, *, branches: int) -> None:
    one, ranks = runs("single"), runs(layout)
    expected, found = decided(one, job), decided(ranks, job)
    same_decisions(expected, found)
    same_weights(one[0][job], ranks, job, model())
    counts = kept_of(found)
    assert len(counts) == 3 * branches
    for kept, tokens in counts.values():
        assert kept == math.ceil(tokens / 2)  # of the step, over accumulation and ranks
    assert all(rank[job]["own_forward"] for rank in ranks)


@with_job("sft_global")
def test_logged_statistics_are_of_all_processes(runs: Callable[[str], Ranks], layout: str) -> None:
    expected = runs("single")[0]["sft_global"]["history"]
    found = runs(layout)[0]["sft_global"]["history"]
    names = [n for n in expected[0] if n.startswith("alpha/") and "second" not in n]
    assert {"alpha/kept_share", "alpha/drift", "alpha/validation_gap"} <= set(names)
    for here, there in zip(expected, found, strict=True):
        for name in names:
            if name in here:
                assert there[name] == pytest.approx(here[name], rel=1e-4, abs=1e-6), name


@with_job("sft_batch")
def test_sft_with_the_threshold_of_each_micro_batch(
    runs: Callable[[str], Ranks], layout: str
) -> None:
    """A pool, a running mean; scoring shares the training forward where the layout allows it."""
    one, ranks = runs("single"), runs(layout)
    same_decisions(decided(one, "sft_batch"), decided(ranks, "sft_batch"))
    same_weights(one[0]["sft_batch"], ranks, "sft_batch", model())
    for rank in ranks:
        assert rank["sft_batch"]["own_forward"] is layout.startswith("zero")
        for batch in rank["sft_batch"]["decided"]:
            assert float(batch["weights"].sum()) == math.ceil(int(batch["mask"].sum()) / 2)


@with_job("lora_global")
def test_lora(runs: Callable[[str], Ranks], layout: str) -> None:
    from peft import get_peft_model

    one, ranks = runs("single"), runs(layout)
    same_decisions(decided(one, "lora_global"), decided(ranks, "lora_global"))
    same_weights(one[0]["lora_global"], ranks, "lora_global", get_peft_model(model(), lora()))


@pytest.mark.parametrize(
    ("layout", "job"),
    [(lay, job) for lay in TWO for job in EMPTY if f"trainers.{job}" in JOBS[lay]],
)
def test_a_process_without_a_response_token_does_not_hold_up_the_others(
    runs: Callable[[str], Ranks], layout: str, job: str
) -> None:
    one, ranks = runs("single"), runs(layout)
    same_decisions(decided(one, job), decided(ranks, job))
    same_weights(one[0][job], ranks, job, model())
    empty = [not b["mask"].any() for rank in ranks for b in rank[job]["decided"]]
    assert any(empty)
    assert not all(empty)


@with_job("reused")
def test_reused_values_are_agreed_upon(runs: Callable[[str], Ranks], layout: str) -> None:
    """A row may be known on one process only; then both score, and stay equal."""
    ranks = runs(layout)
    assert sum(h.get("alpha/reused_share", 0.0) for h in ranks[0]["reused"]["history"]) > 0
    first, second = (rank["reused"]["parameters"] for rank in ranks)
    assert all(torch.equal(first[n], second[n]) for n in first)


@with_job("resumed")
def test_a_resumed_run_has_the_bits_of_one_that_went_on(
    runs: Callable[[str], Ranks], layout: str
) -> None:
    for rank in runs(layout):
        assert rank["resumed"]["steps"] == [3, 3, 4, 4, 5, 5]
        assert rank["resumed"]["equal"], rank["resumed"]["furthest"]


SAYS = {
    "ddp": ["static_graph"],
    "fsdp2": ["estimator='label'", "value_parameters='all'", "preconditioner='frozen'"],
    "zero2": ["scoring_forward='shared'", "preconditioner='full'"],
    "zero3": ["scoring_forward='shared'", "estimator='label'"],
}


@with_job("refusals")
def test_refused_by_name(runs: Callable[[str], Ranks], layout: str) -> None:
    for rank in runs(layout):
        said = list(rank["refusals"].values())
        assert len(said) == len(SAYS[layout])
        for message, name in zip(said, SAYS[layout], strict=True):
            assert message.startswith("ConfigError: ")
            assert name in message
            assert "Remedy: " in message
