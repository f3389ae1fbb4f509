"""From the draws of one model to figures: rank agreement and price of every setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken.diagnose.statistics import Estimate, bootstrap, spearman, top_overlap
from alphatoken.support.progress import Tracker
from benchmarks.floors import Shape
from benchmarks.frontier.measure import Numbers, Shares
from benchmarks.frontier.price import flops_of
from benchmarks.frontier.settings import Setting

MEASURES: dict[str, Callable[..., float]] = {"spearman": spearman, "overlap": top_overlap}
_RESAMPLES = 100


@dataclass(frozen=True)
class Draws:
    """All draws of one model, and the price of its settings on them.

    Attributes:
        names: format and number of each draw.
        shares: their columns.
        model: sizes of the model, as ``floors.Shape`` reads them.
    """

    names: tuple[str, ...]
    shares: tuple[Shares, ...]
    model: Any

    @classmethod
    def load(cls, folder: Path, model: Any, *, adam: bool = False) -> Draws:
        """Those of a folder; of Adam's step, or of gradient descent's."""
        paths = sorted(p for p in folder.glob("*.npz") if p.stem.endswith("-adam") == adam)
        names = tuple(path.stem.removesuffix("-adam") for path in paths)
        return cls(names, tuple(map(Shares.load, paths)), model)

    @property
    def formats(self) -> list[str]:
        """Each once."""
        return list(dict.fromkeys(name.rsplit("-", 1)[0] for name in self.names))

    @property
    def depth(self) -> int:
        """Layers of the model."""
        return int(self.model.config.num_hidden_layers)

    @property
    def tokens(self) -> int:
        """Valued in all draws."""
        return sum(len(shares.columns["total"]) for shares in self.shares)

    @property
    def rows(self) -> int:
        """Valued in all draws."""
        return sum(len(np.unique(shares.columns["row"])) for shares in self.shares)

    def price(self, setting: Setting) -> float:
        """In training steps: mean over the batches of all draws, weighted by what steps cost."""
        spent = steps = 0.0
        for shares in self.shares:
            for rows, length, tokens in shares.facts["batches"]:
                batch = Shape.of(self.model, rows, length).with_responses(tokens)
                spent += flops_of(batch, setting.scope)
                steps += batch.step
        return spent / steps


@dataclass(frozen=True)
class Record:
    """What was measured of one setting.

    Attributes:
        setting: which.
        price: in training steps.
        measures: Spearman and overlap with the exact values: mean over the draws, interval over
            their rows.
        by_draw: Spearman in each draw.
        depth: layers of the model.
    """

    setting: Setting
    price: float
    measures: Mapping[str, Estimate]
    by_draw: Mapping[str, float]
    depth: int

    def as_dict(self) -> dict[str, Any]:
        """For the file of figures."""
        estimates = {
            name: [round(x, 4) for x in (e.value, e.low, e.high)]
            for name, e in self.measures.items()
        }
        return {
            "name": self.setting.name,
            "family": self.setting.family,
            "layers": list(self.setting.scope.layers),
            "lowest": min(self.setting.scope.norms, default=None),
            "usable": self.setting.usable,
            "options": self.setting.options(self.depth),
            "price": round(self.price, 4),
            **estimates,
            "by_draw": {name: round(value, 4) for name, value in self.by_draw.items()},
        }


def agreement(
    values: Sequence[Numbers], truths: Sequence[Numbers], rows: Sequence[Numbers],
    measure: Callable[..., float],
) -> Estimate:  # fmt: skip
    """Mean over draws of a measure, each draw by itself; the interval draws rows of all anew.

    A draw counts by its tokens: few of its rows, in a resample, say little.
    """
    draw = np.concatenate([np.full(len(v), i, float) for i, v in enumerate(values)])
    places = [np.unique(own, return_inverse=True)[1] for own in rows]
    starts = np.cumsum([0, *(own.max() + 1 for own in places)])
    groups = np.concatenate([own + start for own, start in zip(places, starts, strict=False)])

    def mean(a: Numbers, b: Numbers, at: Numbers) -> float:
        found = [(measure(a[at == i], b[at == i]), (at == i).sum()) for i in np.unique(at)]
        return float(np.average([x for x, _ in found], weights=[n for _, n in found]))

    both = np.concatenate(values), np.concatenate(truths)
    return bootstrap(mean, *both, draw, groups=groups.astype(np.int64), draws=_RESAMPLES)


def records(draws: Draws, settings: Iterable[Setting], label: str) -> list[Record]:
    """Every setting on every draw."""
    settings = list(settings)
    tracker = Tracker(label, len(settings), True)
    found = []
    for number, setting in enumerate(settings):
        values = [setting.values(shares) for shares in draws.shares]
        found.append(measured(draws, setting, values))
        tracker.report(number + 1)
    return found


def measured(draws: Draws, setting: Setting, values: Sequence[Numbers]) -> Record:
    """The record of a setting whose values are at hand."""
    truths = [shares.columns["total"] for shares in draws.shares]
    rows = [shares.columns["row"] for shares in draws.shares]
    measures = {
        name: agreement(values, truths, rows, measure) for name, measure in MEASURES.items()
    }
    by_draw = {n: spearman(v, t) for n, v, t in zip(draws.names, values, truths, strict=True)}
    return Record(setting, draws.price(setting), measures, by_draw, draws.depth)
