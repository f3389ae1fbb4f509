"""When two runs count as the same: what they decided, and where it led."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

Ranks = list[dict[str, Any]]
"""What each rank of a launch saved: job -> result."""

ROUNDING = 5e-6
"""Of the largest value beside it: float32 sums in another order."""


def close(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    assert torch.isfinite(expected).all()
    return float((found - expected).abs().max()) <= ROUNDING * float(expected.abs().max())


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

    Values that differ by rounding may change places at a threshold, and only they: one is kept
    here in the place of one that is kept there.
    """
    assert expected.keys() == found.keys()
    for step in {key[0] for key in expected}:
        rows = [key for key in expected if key[0] == step and len(expected[key][1])]
        scale = max(float(expected[key][0].abs().max()) for key in rows)
        assert scale > 0
        gained: list[float] = []
        lost: list[float] = []
        for key in rows:
            (value, weight), (other, chosen) = expected[key], found[key]
            assert float((other - value).abs().max()) <= ROUNDING * scale, key
            gained += value[chosen > weight].tolist()
            lost += value[chosen < weight].tolist()
        assert len(gained) == len(lost)
        for here, there in zip(sorted(gained), sorted(lost), strict=True):
            assert abs(here - there) <= ROUNDING * scale


def same_exports(expected: dict[Any, Tensor], found: dict[Any, Tensor]) -> None:
    """The same documents, and the same values but for what rounding and differences leave."""
    assert expected.keys() == found.keys()
    most = max(float(values.abs().max()) for values in expected.values())
    assert most > 0
    for key, values in expected.items():
        assert float((found[key] - values).abs().max()) <= 1e-3 * most, key


def nearly_same_decisions(expected: Decided, found: Decided) -> None:
    """The same rows; values that agree but for bfloat16; tokens that differ at the threshold only.

    bfloat16 has 8 bits: one rounding is off by 2^-9 at most. At the first step, where the weights
    are the same, the values' error stays below twice that in norm. After a step the weights
    differ by rounding too, which Adam lets grow where a gradient is near zero; measured 2^-7.
    """
    assert expected.keys() == found.keys()
    for step in sorted({key[0] for key in expected}):
        rows = [key for key in expected if key[0] == step and len(expected[key][1])]
        value, other = (torch.cat([side[key][0] for key in rows]) for side in (expected, found))
        weight, chosen = (torch.cat([side[key][1] for key in rows]) for side in (expected, found))
        assert other.dtype == torch.float32
        assert bool(torch.isfinite(other).all())
        error = (other - value).abs()
        assert float(error.norm()) <= (2**-8 if step == 0 else 2**-5) * float(value.norm())
        assert spearmanr(value, other).statistic > 0.999
        assert int(weight.sum()) == int(chosen.sum()) == math.ceil(len(value) / 2)
        moved = weight != chosen
        threshold = value[weight > 0].min()
        # A token may change sides only if its value and the threshold differ by no more than the
        # errors of the two.
        assert bool(((value - threshold).abs()[moved] <= 2 * error.max()).all())
        assert int((weight * chosen).sum()) >= 0.97 * int(weight.sum())


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
