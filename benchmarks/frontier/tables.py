"""From the draws of one model to figures: rank agreement and price of every setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken.diagnose.statistics import Estimate, bootstrap, spearman, top_overlap
from alphatoken.support.progress import Tracker
from benchmarks.data import Model
from benchmarks.floors import Shape
from benchmarks.frontier.measure import Numbers, Shares
from benchmarks.frontier.parts import norm_groups
from benchmarks.frontier.settings import Setting, all_parameters, flops_of, plain

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
                spent += flops_of(batch, setting)
                steps += batch.step
        return spent / steps


Record = dict[str, Any]
"""What was measured of one setting, as the file of figures has it; see ``measured``."""


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
        by_draw = [(measure(a[at == i], b[at == i]), (at == i).sum()) for i in np.unique(at)]
        return float(np.average([x for x, _ in by_draw], weights=[n for _, n in by_draw]))

    both = np.concatenate(values), np.concatenate(truths)
    return bootstrap(mean, *both, draw, groups=groups.astype(np.int64), draws=_RESAMPLES)


def records(draws: Draws, settings: Iterable[Setting], label: str) -> list[Record]:
    """Every setting on every draw."""
    settings = list(settings)
    tracker = Tracker(label, len(settings), True)
    results = []
    for number, setting in enumerate(settings):
        values = [setting.values(shares) for shares in draws.shares]
        results.append(measured(draws, setting, values))
        tracker.report(number + 1)
    return results


def measured(
    draws: Draws, setting: Setting, values: Sequence[Numbers], price: float | None = None
) -> Record:
    """The record of a setting whose values are at hand.

    ``price`` is in training steps, by default as counted for its scope. ``spearman`` and
    ``overlap`` with the exact values are means over the draws, with intervals over their rows.
    """
    truths = [shares.columns["total"] for shares in draws.shares]
    rows = [shares.columns["row"] for shares in draws.shares]
    estimates = {
        name: agreement(values, truths, rows, measure) for name, measure in MEASURES.items()
    }
    by_draw = zip(draws.names, map(spearman, values, truths), strict=True)
    return {
        "name": setting.name,
        "family": setting.family,
        "layers": list(setting.layers),
        "lowest": min(setting.norms, default=None),
        "usable": setting.usable,
        "options": setting.options(draws.depth),
        "price": round(draws.price(setting) if price is None else price, 4),
        **{n: [round(x, 4) for x in (e.value, e.low, e.high)] for n, e in estimates.items()},
        "by_draw": {name: round(value, 4) for name, value in by_draw},
    }


# --- parts chosen by measurement -----------------------------------------------------------------

BUDGETS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9)


def chosen(draws: Draws, depth: int) -> list[Record]:
    """For each budget, the best of what its price can buy, tested on other kinds of rows.

    Values of the rows of one format are those of the choice on all the other formats. The scope
    that is reported is the choice on all draws.
    """
    choices = []
    formats = [name.rsplit("-", 1)[0] for name in draws.names]
    if len(set(formats)) < 2:
        return []
    for budget in BUDGETS:
        whole = _best(draws, draws.shares, budget, depth)
        folds = {
            own: _best(
                draws,
                [s for s, name in zip(draws.shares, formats, strict=True) if name != own],
                budget,
                depth,
            )
            for own in dict.fromkeys(formats)
        }
        values: list[Numbers] = [
            setting.values(shares)
            for name, shares in zip(formats, draws.shares, strict=True)
            if (setting := folds[name]) is not None
        ]
        if whole is not None and len(values) == len(formats):
            choices.append(measured(draws, whole, values))
    return choices


def _best(draws: Draws, shares: Sequence[Shares], budget: float, depth: int) -> Setting | None:
    """The best on these shares that the budget can buy; None where it is below the cheapest."""

    def score(setting: Setting) -> float:
        """Mean Spearman."""
        return float(np.mean([spearman(setting.values(s), s.columns["total"]) for s in shares]))

    def grown(lowest: int) -> Setting | None:
        # All norms from there up and the parts in closed form: carrying a tangent past them costs
        # the same. Then the layer that raises the score most, one after the other.
        upper = tuple(range(lowest, depth))
        setting = Setting(
            f"label, chosen for {budget:.2f}", "label, chosen", "label", (), upper,
            embedding=lowest == 0, final=True, head=True,
        )  # fmt: skip
        if draws.price(setting) > budget:
            return None
        while True:
            layers = setting.layers
            wider = [setting.with_layers((*layers, i)) for i in upper if i not in layers]
            best = max((w for w in wider if draws.price(w) <= budget), key=score, default=None)
            if best is None or score(best) <= score(setting):
                return setting
            setting = best

    settings = [grown(group.start) for group in norm_groups(depth)]
    return max((s for s in settings if s is not None), key=score, default=None)


# --- all figures of a model -----------------------------------------------------------------------

_OF_ADAM = {
    "frozen": "label, all parameters, frozen denominator",
    "plain": "label, all parameters, without P",
    "plain alphatoken K=3": "alphatoken, last 3, without P",
}
"""Columns of Adam's draws: values that are ranked against those of the exact next step."""


def collect(model: Model, folder: Path, sizes: Any) -> dict[str, Any] | None:
    """The figures of one model; None where no draw is there."""
    draws = Draws.load(folder, sizes)
    if not draws.names:
        return None
    depth = int(sizes.config.num_hidden_layers)
    adam = Draws.load(folder, sizes, adam=True)
    family = "without the exact P"
    last = Setting("", family, "alphatoken", tuple(range(depth))[-3:])
    whole = all_parameters("", family, depth)
    others = [
        measured(
            adam,
            replace(last if column.endswith("K=3") else whole, name=name),
            [shares.columns[column] for shares in adam.shares],
        )
        for column, name in (_OF_ADAM.items() if adam.names else ())
    ]
    own = _described(draws, depth, f"{model.name}, figures")
    return {
        "name": model.name,
        "depth": depth,
        **{name: own[name] for name in ("draws", "tokens", "rows")},
        "sum_error": max(shares.facts["sum_error"] for shares in draws.shares),
        "records": own["records"],
        "adam": _described(adam, depth, f"{model.name}, Adam", others) if adam.names else None,
    }


def _described(
    draws: Draws, depth: int, label: str, others: Sequence[Record] = ()
) -> dict[str, Any]:
    every = [*records(draws, plain(depth), label), *chosen(draws, depth), *others]
    return {
        "draws": list(draws.names),
        "tokens": draws.tokens,
        "rows": draws.rows,
        "records": every,
    }
