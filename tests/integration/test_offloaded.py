"""Label values where FSDP2 keeps the parts of the weights on the CPU, and on four processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import start_processes

from alphatoken import Scorer, ScorerConfig
from alphatoken.train.shards import Fsdp2Sharding
from tests.places import nightly
from tests.property.test_differences import llama

pytestmark = [nightly, pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = ScorerConfig("label", parameters="all", derivative="central")


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def value(rank: int, world: int, folder: str, offload: bool) -> None:
    """One process's values, and whether its parts of the weights came back to the bit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    model, mesh = llama(), init_device_mesh("cpu", (world,))
    policy: dict[str, Any] = {"mesh": mesh}
    if offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in [*model.model.layers, model]:
        fully_shard(block, **policy)
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}

    def mean(role: str, sums: dict[str, Tensor], count: float) -> dict[str, Tensor]:
        return {name: total / (count * world) for name, total in sums.items()}

    scorer = Scorer(model, [batch()], None, CONFIG, reduce=mean, sharding=Fsdp2Sharding(model))
    scorer.pin("these weights")
    values = scorer.score(batch())
    back = all(torch.equal(p.to_local(), before[name]) for name, p in model.named_parameters())
    torch.save((values.total, back), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(("offload", "world"), [(True, 2), (False, 4), (True, 4)])
def test_label_values_under_fsdp2_equal_one_process(
    offload: bool, world: int, tmp_path: Path
) -> None:
    given = (world, str(tmp_path), offload)
    start_processes(value, given, nprocs=world, start_method="spawn")
    expected = Scorer(llama(), [batch()], None, CONFIG).score(batch())
    for rank in range(world):
        total, back = torch.load(tmp_path / f"{rank}.pt")
        assert back
        assert float((total - expected.total).norm() / expected.total.norm()) < 1e-3
