"""The pieces of distributed runs that one process can show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from alphatoken.train import policy_stage, run_rows
from alphatoken.train.distributed import (
    Ranks,
    even_micro_batches,
    global_selection,
    name_wrapped_layers,
    on_accelerator,
)
from alphatoken.train.policy import PolicySettings
from alphatoken.train.sft import AlphaSFTTrainer
from alphatoken.train.shards import Zero3Sharding
from alphatoken_lab.methods.stm import STM
from tests.integration import tiny_training as tiny
from tests.integration.distributed.compare import close, same_weights

SIZES = st.integers(1, 40), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 7))


@given(*SIZES)
def test_micro_batches_are_even(count: int, world: int, size: int | None) -> None:
    """Every row once, as many micro-batches on every process, none empty, none much too large."""
    rows = list(range(100, 100 + count))
    assume(count >= world)  # else the pool refuses
    dealt = [even_micro_batches(rows, rank, world, size) for rank in range(world)]
    assert len({len(own) for own in dealt}) == 1
    assert sorted(row for own in dealt for part in own for row in part) == rows
    assert all(part for own in dealt for part in own)
    if size is not None:
        assert max(len(part) for own in dealt for part in own) <= size + (count % world != 0)
    else:
        assert len(dealt[0]) == 1


def keep_half(values: Tensor, mask: Tensor) -> Tensor:
    """By definition: sort the values, ties in the order in which they come."""
    assert mask.all()
    order = sorted(range(values.shape[1]), key=lambda i: (-float(values[0, i]), i))
    weights = torch.zeros_like(values)
    weights[0, order[: math.ceil(values.shape[1] / 2)]] = 1.0
    return weights


M = -9.0
"""A masked token's value, which has no say."""


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([[[1, M, 2]], [[2, M], [2, 0]]], [[[0, 0, 1]], [[1, 0], [1, 0]]]),
        ([[[1, 1, 1]], [[1, 1]]], [[[1, 1, 1]], [[0, 0]]]),  # ties fall to the earlier micro-batch
        ([[[M, M], [M, M]]], [[[0, 0], [0, 0]]]),
        ([], []),
    ],
)
def test_one_process_ranks_its_micro_batches_together(values: Any, kept: Any) -> None:
    batches = [torch.tensor(one, dtype=torch.float32) for one in values]
    weights = global_selection(Ranks(), batches, [one != M for one in batches], keep_half)
    assert [one.tolist() for one in weights] == kept
    assert all(one.dtype == torch.float32 for one in weights)


class Dealt(Ranks):
    """One of several processes, to which the others have sent their values."""

    def __init__(self, rank: int, of_ranks: list[list[Tensor]]) -> None:
        super().__init__()
        self.rank, self.world, self.of_ranks = rank, len(of_ranks), of_ranks

    def gather_objects(self, item: Any) -> list[Any]:
        assert [x.tolist() for x in item] == [x.tolist() for x in self.of_ranks[self.rank]]
        return self.of_ranks


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=7), st.integers(1, 3))
def test_processes_rank_in_the_order_of_one(batches: list[list[int]], world: int) -> None:
    """Batches are dealt like cards, and ties fall as where one process has all of them."""
    rows = [torch.tensor([own], dtype=torch.float64).view(1, -1) for own in batches]
    masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    expected = global_selection(Ranks(), rows, masks, keep_half)
    of_ranks = [[row[0] for row in rows[rank::world]] for rank in range(world)]
    for rank in range(world):
        own = slice(rank, None, world)
        weights = global_selection(Dealt(rank, of_ranks), rows[own], masks[own], keep_half)
        assert [one.tolist() for one in weights] == [one.tolist() for one in expected[own]]


def test_one_process_communicates_nothing() -> None:
    ranks = Ranks()
    sums = {"w": torch.ones(2)}
    assert ranks.sum_gradients(sums, 3.0) == (sums, 3.0)
    assert ranks.gather_objects("x") == ["x"]
    assert ranks.broadcast_object("x") == "x"
    assert ranks.any(True)
    assert not ranks.any(False)
    assert (ranks.rank, ranks.world) == (0, 1)


# --- what the comparison of runs would notice --------------------------------------------------


@pytest.mark.parametrize("off", [1e-4, float("nan")])
def test_values_and_weights_that_differ_are_told_apart(off: float) -> None:
    values = torch.tensor([1.0, -2.0])
    assert close(values * (1 + 1e-7), values)
    assert not close(values + off, values)
    start, end = nn.Linear(2, 2), {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    one = {"parameters": end, "losses": [1.0]}
    same_weights(one, [{"job": one}, {"job": one}], "job", start)
    other = {"parameters": {**end, "bias": end["bias"] + off}, "losses": [1.0]}
    for ranks in ([one, other], [other, one], [other, other]):
        with pytest.raises(AssertionError):
            same_weights(one, [{"job": rank} for rank in ranks], "job", start)


# --- layouts -------------------------------------------------------------------------------------


def test_fsdp_wraps_the_layers_that_a_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its family names a vision tower's blocks too, which a model for text does not have."""
    monkeypatch.delenv("FSDP_TRANSFORMER_CLS_TO_WRAP", raising=False)
    model = tiny.hybrid()
    assert "Qwen3_5VisionBlock" in model._no_split_modules
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=None)
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    name_wrapped_layers(accelerator, model, None)
    assert plugin.transformer_cls_names_to_wrap == ["Qwen3_5DecoderLayer"]
    # The configuration is one for all models of the process, and another one comes.
    name_wrapped_layers(accelerator, tiny.mixture(), {})
    assert plugin.transformer_cls_names_to_wrap == ["MixtralDecoderLayer"]
    name_wrapped_layers(accelerator, nn.Linear(2, 2), None)  # which names none
    assert plugin.transformer_cls_names_to_wrap == ["MixtralDecoderLayer"]


@pytest.mark.parametrize("place", ["launcher", "trainer"])
def test_layers_that_the_user_names_stay(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.delenv("FSDP_TRANSFORMER_CLS_TO_WRAP", raising=False)
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=["Mine"])
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    if place == "launcher":
        monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Mine")
    config = {"transformer_layer_cls_to_wrap": ["Mine"]} if place == "trainer" else {}
    name_wrapped_layers(accelerator, tiny.hybrid(), config)
    assert plugin.transformer_cls_names_to_wrap == ["Mine"]


# --- where the model is before training -----------------------------------------------------------

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where models are sent; nothing moves."""
    sent: list[str] = []

    def to(model: nn.Module, place: Any) -> nn.Module:
        sent.append(str(place))
        return model

    monkeypatch.setattr(nn.Module, "to", to)
    return sent


def test_a_model_that_waits_on_the_cpu_is_taken_there_and_back(places: list[str]) -> None:
    def inside() -> None:
        with on_accelerator(tiny.model(), GPU):
            assert places == ["cuda:0"]
            raise KeyError("an error inside")

    with pytest.raises(KeyError):
        inside()
    assert places == ["cuda:0", "cpu"]
    places.clear()
    cut: Any = tiny.model()
    next(cut.parameters()).ds_id = 0
    with torch.device("meta"):
        elsewhere = tiny.model()
    for model, device in ((cut, GPU), (elsewhere, GPU), (tiny.model(), CPU)):
        with on_accelerator(model, device):
            pass
    assert places == [], "these stay where they are"


def test_fisher_and_static_passes_run_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of a run's passes before training are inside."""
    entries: list[Any] = []

    @contextmanager
    def spy(model: nn.Module, device: torch.device) -> Iterator[None]:
        entries.append(device)
        yield
        entries.append("left")

    for module in (run_rows, policy_stage):
        monkeypatch.setattr(module, "on_accelerator", spy)
    rows = {"train_dataset": tiny.sft_rows(8)}
    tiny.sft(tmp_path / "a", **rows, fisher_samples=2, fisher_max_new_tokens=2)
    assert entries == [CPU, "left"]
    policy = STM(PolicySettings("budget", 0.5))
    tiny.made(AlphaSFTTrainer, tmp_path / "b", policy=policy, **rows, retention="none")
    assert entries == [CPU, "left"] * 2


def test_float32_parts_of_zero_3_are_padded_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two parts of five numbers; what a frozen parameter has none of is its own."""
    from deepspeed import utils

    model = nn.Linear(5, 1, bias=False)
    weight: Any = model.weight
    weight.ds_id, weight.ds_numel = 0, 5
    weight.ds_tensor = torch.tensor([3.0, 4.0, 77.0]).bfloat16()
    weight.ds_tensor.ds_numel = 3
    weight._z3_optimizer = None
    monkeypatch.setattr(Zero3Sharding, "_place", staticmethod(lambda p: (1, 2)))
    monkeypatch.setattr(Zero3Sharding, "_device", staticmethod(lambda p: "cpu"))
    held = torch.tensor([3.001, 4.001, 99.0])
    monkeypatch.setattr(utils, "safe_get_local_fp32_param", lambda p: held)
    sharding = Zero3Sharding(model)
    found = sharding.master("weight", weight)
    assert found.tolist() == pytest.approx([3.001, 4.001, 0.0], abs=1e-6)
    assert held[2] == 99.0, "DeepSpeed's own memory is left alone"
    assert sharding.local("weight", weight).tolist() == [3.0, 4.0, 0.0]
    weight.requires_grad_(False)
    assert sharding.master("weight", weight).tolist() == [3.0, 4.0, 0.0]
