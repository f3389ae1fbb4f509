"""What the cells of a model and a task say."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from typing import Any

from benchmarks.standings.tasks import TASKS, Scale
from benchmarks.standings.values import VALUES
from benchmarks.standings.yardsticks import DROPS, ENDS, UNITS, lds, rivals, subset

__all__ = ["summary"]


def summary(cells: Any, scale: Scale, subsets: int, drops: int) -> dict[str, Any]:
    """LDS of every value, J after dropping its best and worst tokens, and the ceilings."""

    def loss(name: str) -> float:
        found = json.loads((cells.folder / f"{name}.json").read_text(encoding="utf-8"))
        return float(found["validation"])

    losses = {
        (unit, seed): [loss(f"{unit} {i}{', seed 1' * seed}") for i in range(count)]
        for unit in UNITS
        for seed, count in ((0, subsets), (1, subsets // 2))
    }
    kept = {unit: [subset(cells.setting, unit, i) for i in range(subsets)] for unit in UNITS}
    random = {share: [loss(f"random {i} {share}") for i in range(drops)] for share in DROPS}
    spread = {share: statistics.stdev(found) for share, found in random.items()}
    values = {}
    for name in VALUES:
        numbers = cells.values(name)
        values[name] = {
            "lds": {unit: lds(numbers, kept[unit], losses[unit, 0]) for unit in UNITS},
            "drops": {
                f"{end} {share}": (loss(f"{end} {share} {name}") - statistics.fmean(random[share]))
                / spread[share]
                for share in DROPS
                for end in ENDS
            },
        }
    return {
        "says": TASKS[cells.folder.name].says,
        "scale": asdict(scale),
        "subsets": subsets,
        "random_drops": drops,
        "tokens": cells.setting.tokens,
        "plain": [loss(f"all, seed {seed}") for seed in (0, 1)],
        "ceiling": {
            unit: rivals(losses[unit, 0][: subsets // 2], losses[unit, 1]) for unit in UNITS
        },
        "spread": {str(share): found for share, found in spread.items()},
        "values": values,
    }
