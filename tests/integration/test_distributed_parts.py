"""The pieces that distributed runs are made of, on two real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from alphatoken.errors import ConfigError, InputError
from alphatoken.train.distributed import Ranks, even_micro_batches, global_selection
from alphatoken.weights import token_weights
from tests.integration.distributed.launch import WORLD, launch

SHARDED = {"fsdp2", "zero3"}


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "zero2", "zero3"])
def test_parts_sums_and_one_threshold(layout: str, tmp_path: Path) -> None:
    """The worker checks; see tests/integration/distributed/parts.py."""
    found = launch(layout, tmp_path, "parts", "selection")
    assert [rank["parts"]["rank"] for rank in found] == list(range(WORLD))
    assert {rank["parts"]["world"] for rank in found} == {WORLD}
    assert {rank["parts"]["sharded"] for rank in found} == {layout in SHARDED}
    assert found[0]["selection"] == found[1]["selection"]
