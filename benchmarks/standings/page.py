"""What the cells of a model and a task say."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from typing import Any

from benchmarks.standings.tasks import TASKS
from benchmarks.standings.yardsticks import DROPS, ENDS, lds, rivals, subset

__all__ = ["summary"]


def summary(cells: Any) -> dict[str, Any]:
    """LDS of every value, J after dropping its best and worst tokens, and the ceilings."""
    scale = cells.scale

    def loss(name: str) -> float:
        found = json.loads((cells.folder / f"{name}.json").read_text(encoding="utf-8"))
        return float(found["validation"])

    count = {0: scale.subsets, 1: scale.subsets // 2}
    losses = {
        (unit, seed): [loss(f"{unit} {i}{', seed 1' * seed}") for i in range(count[seed])]
        for unit in scale.units
        for seed in count
    }
    kept = {
        unit: [subset(cells.setting, unit, i) for i in range(scale.subsets)] for unit in scale.units
    }
    shares = DROPS if scale.drops else ()
    random = {share: [loss(f"random {i} {share}") for i in range(scale.drops)] for share in shares}
    spread = {share: statistics.stdev(found) for share, found in random.items()}
    values = {}
    for name in cells.names:
        numbers = cells.values(name)
        values[name] = {
            "lds": {unit: lds(numbers, kept[unit], losses[unit, 0]) for unit in scale.units},
            "drops": {
                f"{end} {share}": (loss(f"{end} {share} {name}") - statistics.fmean(random[share]))
                / spread[share]
                for share in shares
                for end in ENDS
            },
        }
    return {
        "says": TASKS[cells.folder.name].says,
        "scale": {**asdict(scale), "without": sorted(scale.without)},
        "tokens": cells.setting.tokens,
        "plain": [loss(f"all, seed {seed}") for seed in (0, 1)],
        "ceiling": {
            unit: rivals(losses[unit, 0][: count[1]], losses[unit, 1]) for unit in scale.units
        },
        "spread": {str(share): found for share, found in spread.items()},
        "values": values,
    }
