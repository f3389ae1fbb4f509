"""Matrices taken apart and put together, sums, and one threshold for all; checked on the spot."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, patch_environment
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from alphatoken.direction.optimizers import frozen_preconditioners, full_preconditioners
from alphatoken.errors import InputError
from alphatoken.model.sharding import Sharding
from alphatoken.train.distributed import Ranks, global_selection, layout, sharding_of
from alphatoken.train.policies.builtin import (
    BottomRatioPolicy,
    RandomRatioPolicy,
    TopRatioPolicy,
)
from alphatoken.train.shards import Fsdp2Sharding
from tests.integration import tiny_training


def accelerator_for(name: str) -> Accelerator:
    gloo = [] if name == "single" else [InitProcessGroupKwargs(backend="gloo")]
    with patch_environment(accelerate_gradient_accumulation_steps=1):  # "auto" is a trainer's
        return Accelerator(cpu=not name.startswith("zero"), kwargs_handlers=gloo)


def odd_model() -> LlamaForCausalLM:
    """Sizes that no number of processes divides."""
    sizes = {"vocab_size": 33, "hidden_size": 9, "intermediate_size": 11, "head_dim": 4}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "attention_bias": True}
    return tiny_training.model(layers=2, **sizes, **heads)


def prepared(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: nn.Module = accelerator.prepare(model, optimizer)[0]
    return found


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}


def parts(name: str, folder: Path) -> dict[str, Any]:
    accelerator = accelerator_for(name)
    assert layout(accelerator) == name
    model = odd_model()
    before = whole(model)
    wrapped = prepared(accelerator, model)
    ranks = Ranks(accelerator)
    check_sums(ranks)
    sharding = sharding_of(accelerator, wrapped)
    if sharding is not None:
        check_parts(sharding, accelerator.unwrap_model(wrapped), before, ranks.rank)
        assert isinstance(sharding, Sharding)
    if name == "fsdp2":
        check_single_row(ranks)
        check_preconditioners()
        check_hybrid(ranks)
    return {"sharded": sharding is not None, "rank": ranks.rank, "world": ranks.world}


def check_parts(sharding: Sharding, model: nn.Module, before: dict[str, Tensor], rank: int) -> None:
    """Round trips are bit-equal in both precisions, parts of one name fit each other."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert parameters.keys() == before.keys()
    for name, p in parameters.items():
        x = before[name]
        assert sharding.shape(name) == x.shape
        assert torch.equal(sharding.full(name, p), x)
        part = sharding.part_of(name, x)
        assert torch.equal(sharding.local(name, p), part)
        assert part.numel() < x.numel() or x.numel() == 1
        assert torch.equal(sharding.gather(name, part), x)
        wide = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).double()
        assert torch.equal(sharding.gather(name, sharding.part_of(name, wide)), wide)
        product = sharding.part_of(name, wide) * part
        assert torch.equal(sharding.gather(name, product), wide * x)
        strided = (wide * (rank + 1)).mT.contiguous().mT if wide.ndim == 2 else wide * (rank + 1)
        total = sharding.reduce(name, strided)
        torch.testing.assert_close(sharding.gather(name, total), wide * 3, rtol=1e-15, atol=0)
        # What comes back is nobody's memory but the caller's.
        for copy in (sharding.full(name, p), sharding.local(name, p), sharding.part_of(name, x)):
            copy.fill_(float("nan"))
        assert torch.equal(sharding.full(name, p), before[name])
    norms = sharding.norms({n: sharding.part_of(n, x) for n, x in before.items()})
    for name, x in before.items():
        assert abs(norms[name] - float(x.double().norm())) <= 1e-14 * (1 + norms[name])
    assert sharding.norms({}) == {}


def check_single_row(ranks: Ranks) -> None:
    """One row for two processes: one of them has none."""
    from torch.distributed.fsdp import fully_shard

    module = nn.Linear(3, 1)
    before = {n: torch.ones_like(p) * (2 + len(n)) for n, p in module.named_parameters()}
    with torch.no_grad():
        for n, p in module.named_parameters():
            p.copy_(before[n])
    fully_shard(module)
    check_parts_of_any_size(Fsdp2Sharding(module), module, before)
    part = Fsdp2Sharding(module).local("weight", module.weight)
    assert ranks.gather_objects(part.numel()) == [3, 0]


def check_parts_of_any_size(
    sharding: Sharding, module: nn.Module, before: dict[str, Tensor]
) -> None:
    for name, p in module.named_parameters():
        assert torch.equal(sharding.full(name, p), before[name])
        part = sharding.local(name, p)
        assert torch.equal(part, sharding.part_of(name, before[name]))
        assert torch.equal(sharding.gather(name, part), before[name])
    norms = sharding.norms({n: sharding.part_of(n, x) for n, x in before.items()})
    for name, x in before.items():
        assert abs(norms[name] - float(x.double().norm())) < 1e-12


def check_hybrid(ranks: Ranks) -> None:
    """Replicas of shards, and a parameter that FSDP2 is told to leave alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.arange(p.numel()).view_as(p) - 2.0)
    before = whole(module)
    mesh = init_device_mesh("cpu", (ranks.world, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(module, mesh=mesh, ignored_params=set(module[1].parameters()))
    check_parts_of_any_size(Fsdp2Sharding(module), module, before)


def check_preconditioners() -> None:
    """P of both forms from an optimizer's parts is that of one process, bit for bit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    def model() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()

    mesh = init_device_mesh("cpu", (2,))
    one, sharded = model(), model()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    found = []
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).double()
    for each in (one, sharded):
        optimizer = torch.optim.Adam(each.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
        parameters = dict(each.named_parameters())
        own = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        frozen = frozen_preconditioners(optimizer, parameters)
        found.append((frozen, full_preconditioners(optimizer, parameters, own)))
    for alone, shards in zip(*found, strict=True):
        assert shards
        for name, p in shards.items():
            layout = sharded.get_parameter(name)
            expected = distribute_tensor(alone[name], mesh, layout.placements).to_local()
            assert torch.allclose(p, expected, rtol=1e-12, atol=0)


def check_sums(ranks: Ranks) -> None:
    """Sums over ranks, in place and in the order of names, whatever order they came in."""
    world, r = ranks.world, ranks.rank
    items = [("b", torch.full((2, 3), r + 1.0)), ("a", torch.full((4,), 10.0 * r).double())]
    given = dict(items if r % 2 else reversed(items))
    sums, count = ranks.sum_gradients(given, 1.5 + r)
    assert sums is given
    assert torch.equal(sums["b"], torch.full((2, 3), world * (world + 1) / 2))
    assert torch.equal(sums["a"], torch.full((4,), 5.0 * world * (world - 1)).double())
    assert count == 1.5 * world + world * (world - 1) / 2
    alone = {"x": torch.ones(1) * r}
    assert ranks.sum_gradients(alone, 1.0, sharded=True) == (alone, float(world))
    assert float(alone["x"]) == r
    assert ranks.gather_objects({"rank": r}) == [{"rank": i} for i in range(world)]
    assert ranks.broadcast_object(r) == 0
    assert ranks.any(r == world - 1)
    assert not ranks.any(False)
    if world > 1:
        with pytest.raises(InputError, match=f"on rank {r}"):
            ranks.sum_gradients({str(i): torch.ones(1) for i in range(r)}, 1.0)


def micro_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Values with many ties, of different shapes, one without any response token."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for i in range(count):
        values = torch.randint(-3, 4, (2 + i % 2, 5 + i), generator=generator).float() / 2
        mask = torch.rand(values.shape, generator=generator) < 0.6
        found.append((values, mask & (i != 2)))
    return found


POLICIES = (TopRatioPolicy, BottomRatioPolicy, RandomRatioPolicy)


def selection(name: str, folder: Path) -> dict[str, Any]:
    """Any number of ranks gives what one process gives, ties and draws included."""
    ranks = Ranks(accelerator_for(name))
    everything = micro_batches(4 * ranks.world)
    own = everything[ranks.rank :: ranks.world]
    found = []
    for policy in POLICIES:

        def decide(values: Tensor, mask: Tensor, policy: type[TopRatioPolicy] = policy) -> Tensor:
            return policy().select(values, mask, 0.3, torch.Generator().manual_seed(7))

        choose = partial(global_selection, decide=decide)
        alone = choose(Ranks(), *map(list, zip(*everything, strict=True)))
        shared = choose(ranks, *map(list, zip(*own, strict=True)))
        for expected, weights in zip(alone[ranks.rank :: ranks.world], shared, strict=True):
            assert torch.equal(expected, weights)
        total = sum(float(w.sum()) for w in alone)
        tokens = sum(int(m.sum()) for _, m in everything)
        assert total == -(-3 * tokens // 10)
        found.append(total)
    # The last round of an epoch may not reach every rank.
    short = everything[: 4 * ranks.world - 1]
    uneven = short[ranks.rank :: ranks.world]
    alone = global_selection(Ranks(), *map(list, zip(*short, strict=True)), decide)
    shared = global_selection(ranks, *map(list, zip(*uneven, strict=True)), decide)
    for expected, weights in zip(alone[ranks.rank :: ranks.world], shared, strict=True):
        assert torch.equal(expected, weights)
    nothing = [(v, torch.zeros_like(m)) for v, m in own]
    empty = global_selection(ranks, *map(list, zip(*nothing, strict=True)), decide)
    assert all(not w.any() for w in empty)
    return {"kept": found}
