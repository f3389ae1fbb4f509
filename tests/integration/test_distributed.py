"""Real processes under each layout against one: the same values, masks and weights.

Each layout is launched once, as ``accelerate launch`` does; the tests read what its ranks saved.
What a worker does is in ``tests/integration/distributed``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from peft import get_peft_model

from tests.integration.distributed.compare import (
    Ranks,
    close,
    decided,
    kept_of,
    nearly_same_decisions,
    same_decisions,
    same_exports,
    same_weights,
)
from tests.integration.distributed.launch import WORLD, launch, saved
from tests.integration.tiny_training import hybrid, lora, mixture, model
from tests.places import NIGHTLY, nightly

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]  # whichever test comes first waits for two launches

POLICIES = ("trainers.kept", "trainers.attention", "trainers.rows", "trainers.mixed")
JOBS: dict[str, tuple[str, ...]] = {
    "single": ("values.values", "trainers.sft_global", "trainers.dpo_global", "trainers.sft_batch",
               "trainers.empty_batch", "trainers.sft_bf16", "trainers.masters",
               "trainers.experts_global", "trainers.label_global", "trainers.lora_global",
               "trainers.empty_global", "trainers.frozen_global", "exports.exports", *POLICIES),
    "ddp": ("parts.parts", "parts.selection", "values.values", "trainers.sft_global",
            "trainers.sft_batch", "trainers.empty_batch", "trainers.full_batch",
            "exports.exports", "refusals.refusals", *POLICIES),
    "fsdp2": ("parts.parts", "values.values", "trainers.sft_global", "trainers.resumed",
              "trainers.followed", "refusals.refusals", "trainers.sft_bf16",
              "trainers.label_global", "trainers.own_weights", "trainers.lora_global",
              "trainers.frozen_global", "trainers.full_batch"),
    "zero2": ("trainers.sft_global",),
    "zero3": ("parts.parts", "values.values", "trainers.dpo_global", "refusals.refusals",
              "trainers.masters", "trainers.experts_global", "trainers.empty_global"),
}  # fmt: skip
FURTHER: dict[str, tuple[str, ...]] = {
    "single": ("trainers.hybrid_global",),
    "ddp": ("trainers.followed",),
    "fsdp2": ("parts.selection", "trainers.dpo_global", "trainers.hybrid_global"),
    "zero1": ("trainers.sft_global", "trainers.sft_batch", "trainers.sft_bf16",
              "trainers.masters"),
    "zero2": ("values.values", "trainers.dpo_global", "refusals.refusals", "trainers.sft_bf16",
              "trainers.hybrid_global", "trainers.experts_global"),
    "zero3": ("parts.selection", "trainers.sft_global", "trainers.sft_batch",
              "trainers.lora_global", "trainers.resumed", "trainers.followed",
              "trainers.label_global"),
}  # fmt: skip
"""Nightly: the same jobs under more layouts."""
RAM = "fsdp2-ram"
"""FSDP2 with ``cpu_ram_efficient_loading``, as packaged."""
TWO = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


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
                    further = FURTHER.get(layout, ()) if NIGHTLY else ()
                    launch(layout, folder, *JOBS.get(layout, ()), *further)
                    (folder / "failed").unlink()
                    (folder / "done").touch()
            known[layout] = saved(layout, folder)
        return known[layout]

    return found


def with_job(*names: str) -> pytest.MarkDecorator:
    """Every layout that runs it; where there are several, ``job`` is an argument too."""
    ran = [
        (layout, name, any(job.endswith(f".{name}") for job in JOBS.get(layout, ())))
        for name in names
        for layout in TWO
        if any(job.endswith(f".{name}") for job in JOBS.get(layout, ()) + FURTHER.get(layout, ()))
    ]
    assert ran
    cases = [
        pytest.param(*(layout, job)[: len(names)], marks=() if always else nightly)
        for layout, job, always in ran
    ]
    return pytest.mark.parametrize("layout,job" if len(names) > 1 else "layout", cases)


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


# --- the scorer alone ----------------------------------------------------------------------------


@with_job("values")
def test_values_equal_one_process(runs: Callable[[str], Ranks], layout: str) -> None:
    """Every captured estimator, retention, preference pairs; own and observed forwards."""
    expected, found = runs("single")[0]["values"], runs(layout)
    cases = found[0]["values"].keys()
    assert len(cases) == (14 if layout in ("ddp", "fsdp2") else 7)
    for case in cases:
        seen = []
        for rank in found:
            mine = dict(rank["values"][case])
            for name, ratio in mine.pop("balance", {}).items():
                assert ratio == pytest.approx(expected[case]["balance"][name], rel=1e-5)
            seen += mine
            for batch, components in mine.items():
                for name, values in components.items():
                    wanted = expected[case][batch][name]
                    if case.startswith("label"):  # differences: beside a forward, less exact
                        most = 5e-3 if case.endswith("observed") else 5e-4
                        assert off(values, wanted) < most, (case, batch, name)
                        continue
                    if case.startswith("walk"):  # AdamW's steps multiply what gradients round
                        assert (values - wanted).abs().max() <= 5e-5 * wanted.abs().max(), case
                        continue
                    assert close(values, wanted), (case, batch, name)
        assert sorted(seen) == [0, 1, 2, 3]


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


STARTS: dict[str, Callable[[], Any]] = {
    "sft_global": model,
    "dpo_global": model,
    "lora_global": lambda: get_peft_model(model(), lora()),
    "frozen_global": model,
    "hybrid_global": hybrid,
    "experts_global": mixture,  # tensors of experts in parts too: one of them is whole at a time
}


@with_job(*STARTS)
def test_runs_under_a_global_threshold(runs: Callable[[str], Ranks], layout: str, job: str) -> None:
    one, ranks = runs("single"), runs(layout)
    expected, found = decided(one, job), decided(ranks, job)
    same_decisions(expected, found)
    same_weights(one[0][job], ranks, job, STARTS[job]())
    counts = kept_of(found)
    assert len(counts) == 3 * (2 if job == "dpo_global" else 1)
    for kept, tokens in counts.values():
        assert kept == math.ceil(tokens / 2)  # of the step, over accumulation and ranks
    assert all(rank[job]["own_forward"] for rank in ranks)


@with_job("kept")
def test_policies_train_as_in_one_process(runs: Callable[[str], Ranks], layout: str) -> None:
    """Half the accumulation each: the same parameters, also divided by the step's kept tokens."""
    one, two = runs("single")[0], runs(layout)
    for job in ("kept", "attention", "rows", "mixed"):
        same_weights(one[job], two, job, model())
    assert decided([one], "mixed").keys() == decided(two, "mixed").keys()


@with_job("sft_global")
def test_logged_statistics_are_of_all_processes(runs: Callable[[str], Ranks], layout: str) -> None:
    expected = runs("single")[0]["sft_global"]["history"]
    found = runs(layout)[0]["sft_global"]["history"]
    names = [n for n in expected[0] if n.startswith("alpha/") and "second" not in n]
    assert {"alpha/kept_share", "alpha/balance", "alpha/validation_gap"} <= set(names)
    for here, there in zip(expected, found, strict=True):
        for name in names:
            if name in here:
                assert there[name] == pytest.approx(here[name], rel=1e-4, abs=1e-6), name


@with_job("sft_batch")
def test_sft_with_the_threshold_of_each_micro_batch(
    runs: Callable[[str], Ranks], layout: str
) -> None:
    """A pool; scoring shares the training forward where the layout allows it."""
    one, ranks = runs("single"), runs(layout)
    same_decisions(decided(one, "sft_batch"), decided(ranks, "sft_batch"))
    same_weights(one[0]["sft_batch"], ranks, "sft_batch", model())
    for rank in ranks:
        assert rank["sft_batch"]["own_forward"] is layout.startswith("zero")
        for batch in rank["sft_batch"]["decided"]:
            assert float(batch["weights"].sum()) == math.ceil(int(batch["mask"].sum()) / 2)


@with_job("full_batch")
def test_the_full_preconditioner_is_of_the_gradients_of_all_processes(
    runs: Callable[[str], Ranks], layout: str
) -> None:
    """So it is another one than that of one process, and DDP's wherever the state lies."""
    other, ranks = runs("ddp"), runs(layout)
    same_decisions(decided(other, "full_batch"), decided(ranks, "full_batch"))
    same_weights(other[0]["full_batch"], ranks, "full_batch", model())


@with_job("empty_global", "empty_batch")
def test_a_process_without_a_response_token_does_not_hold_up_the_others(
    runs: Callable[[str], Ranks], layout: str, job: str
) -> None:
    one, ranks = runs("single"), runs(layout)
    same_decisions(decided(one, job), decided(ranks, job))
    same_weights(one[0][job], ranks, job, model())
    empty = [not b["mask"].any() for rank in ranks for b in rank[job]["decided"]]
    assert any(empty)
    assert not all(empty)


@with_job("sft_global", "dpo_global")
def test_exported_values_are_those_of_one_process(
    runs: Callable[[str], Ranks], layout: str, job: str
) -> None:
    same_exports(runs("single")[0][job]["exported"], runs(layout)[0][job]["exported"])


OWN = ("SFT, counts of each process", "plain, counts of each process")
"""Kinds of run that weigh a token by the tokens on its process: not as one process does."""


@with_job("exports")
def test_exported_values_add_up_to_the_fall_of_the_validation_loss(
    runs: Callable[[str], Ranks], layout: str
) -> None:
    """Of plain SGD, by whatever each process divides its loss; of pairs they are as in one process.

    Pairs' values are per response token of the validation pairs, whose loss is per pair.
    """
    one, found = (runs(lay)[0]["exports"] for lay in ("single", layout))
    for kind, run in found.items():
        if kind not in OWN:
            same_exports(one[kind]["exported"], run["exported"])
        for each in (one[kind], run) if kind != "pairs" else ():
            total = sum(float(values.sum()) for values in each["exported"].values())
            assert each["fall"] == pytest.approx(total, rel=0.01), kind


@with_job("resumed", "followed")
def test_a_resumed_run_has_the_bits_of_one_that_went_on(
    runs: Callable[[str], Ranks], layout: str, job: str
) -> None:
    for rank in runs(layout):
        assert rank[job]["steps"] == [2, 2, 3, 3]
        assert rank[job]["equal"], rank[job]["furthest"]


@with_job("own_weights")
def test_weights_of_each_process_are_refused(runs: Callable[[str], Ranks], layout: str) -> None:
    for rank in runs(layout):
        assert "the processes hold different weights" in rank["own_weights"]["refused"]


@nightly
def test_fsdp_as_packaged(runs: Callable[[str], Ranks], tmp_path: Path) -> None:
    """Weights that the first process hands on: the run of one process."""
    found = launch(RAM, tmp_path / RAM, "trainers.by_name")
    expected = runs("single")[0]["sft_global"]
    same_decisions(decided([{"by_name": expected}], "by_name"), decided(found, "by_name"))
    same_weights(expected, found, "by_name", model())


@with_job("label_global")
def test_label_values_over_all_parameters_decide_as_in_one_process(
    runs: Callable[[str], Ranks], layout: str
) -> None:
    """Up to what differences round: each process moves its own part of the weights."""
    one, ranks = runs("single"), runs(layout)
    nearly_same_decisions(decided(one, "label_global"), decided(ranks, "label_global"))
    first, second = (rank["label_global"]["parameters"] for rank in ranks)
    assert all(torch.equal(first[name], second[name]) for name in first)


@with_job("sft_bf16")
def test_bfloat16_decides_nearly_as_in_one_process(
    runs: Callable[[str], Ranks], layout: str
) -> None:
    """Autocast under DDP; bfloat16 copies of float32 weights under FSDP2 and DeepSpeed."""
    one, ranks = runs("single"), runs(layout)
    nearly_same_decisions(decided(one, "sft_bf16"), decided(ranks, "sft_bf16"))
    here, there, exact = ranks[0]["sft_bf16"], one[0]["sft_bf16"], one[0]["sft_global"]
    assert here["losses"] == pytest.approx(there["losses"], rel=2**-8)
    assert here["dtypes"] == ["torch.bfloat16" if layout.startswith("zero") else "torch.float32"]
    first, second = (rank["sft_bf16"]["parameters"] for rank in ranks)
    assert all(torch.equal(first[name], second[name]) for name in first)
    # It was not float32 after all: there, two layouts agree to 5e-6.
    assert here["losses"] != pytest.approx(exact["losses"], rel=2e-6)


@with_job("sft_bf16")
def test_balance_of_bfloat16_runs_is_that_of_what_the_layout_trains(
    runs: Callable[[str], Ranks], layout: str
) -> None:
    """Float32 weights, which have not moved at the first step, also where the model has copies.

    In the second run they move by less than bfloat16 shows.
    """
    for name in ("history", "slow"):
        one, here = (runs(lay)[0]["sft_bf16"][name] for lay in ("single", layout))
        assert here[0]["alpha/balance"] == 0
        for logged, expected in zip(here[:3], one[:3], strict=True):
            assert logged["alpha/balance"] == pytest.approx(expected["alpha/balance"], rel=0.01)


@with_job("masters")
def test_masters_of_every_kind_of_run(runs: Callable[[str], Ranks], layout: str) -> None:
    """Factors, and adapters beside frozen weights."""
    one, here = runs("single")[0]["masters"], runs(layout)[0]["masters"]
    for kind, expected in one.items():
        logged = [entry for entry in here[kind]["history"] if "alpha/balance" in entry]
        wanted = [entry for entry in expected["history"] if "alpha/balance" in entry]
        assert len(logged) == len(wanted) >= 3
        assert logged[0]["alpha/balance"] == 0
        for found, entry in zip(logged[:3], wanted[:3], strict=True):
            assert found["alpha/balance"] == pytest.approx(entry["alpha/balance"], rel=0.02), kind


SAYS = {
    "ddp": ["static_graph"],
    "fsdp2": ["mixed precision", "preconditioner='full'"],
    "zero2": ["preconditioner='full'"],
    "zero3": ["preconditioner='frozen'"],
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
