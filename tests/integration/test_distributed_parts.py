"""The pieces of distributed runs that one process can show, and what no layout takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from alphatoken.errors import ConfigError
from alphatoken.train.distributed import Ranks, even_micro_batches, global_selection
from alphatoken.train.layouts import (
    check_layout,
    layout,
    name_wrapped_layers,
    needs_own_forward,
    sharding_of,
)
from alphatoken.train.options import AlphaOptions
from alphatoken.train.shards import Zero3Sharding
from tests.integration.distributed.compare import close, same_weights
from tests.integration.tiny_training import hybrid, mixture

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


def test_one_process_ranks_its_micro_batches_together() -> None:
    values = [torch.tensor([[1.0, -5.0, 2.0]]), torch.tensor([[2.0, 9.0], [2.0, 0.0]])]
    masks = [torch.tensor([[True, False, True]]), torch.tensor([[True, False], [True, True]])]
    found = global_selection(Ranks(), values, masks, keep_half)
    # Of 1, 2 | 2 | 2, 0 three are kept: the 2s. The masked -5 and 9 have no say.
    assert torch.equal(found[0], torch.tensor([[0.0, 0.0, 1.0]]))
    assert torch.equal(found[1], torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert [w.dtype for w in found] == [torch.float32] * 2


def test_ties_fall_to_the_earlier_micro_batch() -> None:
    same = [torch.ones(1, 3), torch.ones(1, 2)]
    found = global_selection(Ranks(), same, [v > 0 for v in same], keep_half)
    assert [w.sum() for w in found] == [3, 0]


def test_nothing_to_select_from() -> None:
    assert global_selection(Ranks(), [], [], keep_half) == []
    none = [torch.zeros(2, 3)]
    [found] = global_selection(Ranks(), none, [none[0] > 0], keep_half)
    assert torch.equal(found, none[0])


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


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """A real one; what a GPU or a second process would have put into its state is put there."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}


def arguments(**changed: Any) -> Any:
    own = {"n_gpu": 0, "gradient_checkpointing": True, **changed}
    return SimpleNamespace(**{**vars(AlphaOptions()), **own})


def refuse(
    accelerator: Accelerator,
    *parts: str,
    args: Any = None,
    model: nn.Module | None = None,
) -> None:
    model = nn.Linear(2, 2) if model is None else model
    with pytest.raises(ConfigError) as caught:
        check_layout(accelerator, args or arguments(), model)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert caught.value.why
    assert caught.value.remedy


def test_one_process_is_a_layout(accelerator: Accelerator) -> None:
    assert layout(accelerator) == "single"
    assert sharding_of(accelerator, nn.Linear(2, 2)) is None
    check_layout(accelerator, arguments(), nn.Linear(2, 2))
    assert not needs_own_forward(accelerator, AlphaOptions())
    assert needs_own_forward(accelerator, AlphaOptions(keep_scope="global"))
    assert needs_own_forward(accelerator, AlphaOptions(scoring_forward="own"))


@pytest.mark.parametrize(
    ("args", "parts"),
    [({"ddp_static_graph": True}, ["static_graph"]), ({"n_gpu": 2}, ["DataParallel", "2 GPUs"])],
)
def test_arguments_are_refused(
    accelerator: Accelerator, args: dict[str, Any], parts: list[str]
) -> None:
    refuse(accelerator, *parts, args=arguments(**args))


def test_a_model_spread_by_its_device_map(accelerator: Accelerator) -> None:
    """TRL loads a name with device_map="auto" and sets n_gpu to 1: past the refusal above."""
    spread = nn.Linear(2, 2)
    spread.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1, "lm_head": 1}
    refuse(accelerator, "spread over several devices", "0, 1", model=spread)
    spread.hf_device_map = {"": 0}
    check_layout(accelerator, arguments(), spread)


def test_static_graph_by_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    handler = DistributedDataParallelKwargs(static_graph=True)
    refuse(Accelerator(cpu=True, kwargs_handlers=[handler]), "static_graph")
    AcceleratorState._reset_state(reset_partial_state=True)


def test_compiled_models(accelerator: Accelerator) -> None:
    whole = torch.compile(nn.Linear(2, 2), backend="eager")
    refuse(accelerator, "torch.compile", model=whole)
    inside = nn.Linear(2, 2)
    inside.compile(backend="eager")
    refuse(accelerator, "torch.compile", model=inside)


@pytest.mark.parametrize("kind", ["tensor", "context", "sequence"])
def test_parallel_within_a_layer(accelerator: Accelerator, kind: str) -> None:
    axis = f"{kind[0]}p_size"
    accelerator.state.parallelism_config = ParallelismConfig(**{axis: 2})
    refuse(accelerator, f"{kind} parallelism", f"{axis}=2")


@pytest.mark.parametrize(
    ("kind", "version", "activation", "said", "remedy"),
    [
        (DistributedType.FSDP, 1, False, "fsdp1", "fsdp_version: 2"),
        (DistributedType.MEGATRON_LM, 2, False, "megatron_lm", "FSDP2"),
        (DistributedType.XLA, 2, False, "xla", "DDP"),
        (DistributedType.FSDP, 2, True, "activation_checkpointing", "gradient_checkpointing=True"),
    ],
)
def test_other_backends(
    accelerator: Accelerator, kind: DistributedType, version: int, activation: bool, said: str,
    remedy: str,
) -> None:  # fmt: skip
    accelerator.state.distributed_type = kind
    accelerator.state.fsdp_plugin = SimpleNamespace(
        fsdp_version=version, activation_checkpointing=activation
    )
    assert activation or layout(accelerator) == said
    refuse(accelerator, said, remedy)


def test_fsdp_wraps_the_layers_that_a_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its family names a vision tower's blocks too, which a model for text does not have."""
    monkeypatch.delenv("FSDP_TRANSFORMER_CLS_TO_WRAP", raising=False)
    model = hybrid()
    assert "Qwen3_5VisionBlock" in model._no_split_modules
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=None)
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    name_wrapped_layers(accelerator, model, None)
    assert plugin.transformer_cls_names_to_wrap == ["Qwen3_5DecoderLayer"]
    # The configuration is one for all models of the process, and another one comes.
    name_wrapped_layers(accelerator, mixture(), {})
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
    name_wrapped_layers(accelerator, hybrid(), config)
    assert plugin.transformer_cls_names_to_wrap == ["Mine"]


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
