"""Parts chosen by measurement: the best of what a price can buy, tested on other kinds of rows.

For each budget and each lowest layer, all norms from there up and the parts in closed form are
taken (carrying a tangent past them costs the same), and then the layer that raises the mean
Spearman most, one after the other, as long as the price allows. What is reported for the rows of
one format was chosen on those of all the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from alphatoken.diagnose.statistics import spearman
from benchmarks.frontier.measure import Numbers
from benchmarks.frontier.parts import norm_groups
from benchmarks.frontier.price import Scope
from benchmarks.frontier.settings import Setting
from benchmarks.frontier.tables import Draws, Record, measured

BUDGETS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9)


@dataclass(frozen=True)
class _Search:
    """What is searched on.

    Attributes:
        draws: for their prices.
        places: of the draws to look at.
        depth: layers of the model.
    """

    draws: Draws
    places: Sequence[int]
    depth: int

    def score(self, setting: Setting) -> float:
        """Mean Spearman."""
        shares = [self.draws.shares[place] for place in self.places]
        return float(np.mean([spearman(setting.values(s), s.columns["total"]) for s in shares]))

    def best(self, budget: float) -> Setting | None:
        """The best that the budget can buy; None where it is below the cheapest."""
        found = [s for s in (self._from(g.start, budget) for g in norm_groups(self.depth)) if s]
        return max(found, key=self.score, default=None)

    def _from(self, lowest: int, budget: float) -> Setting | None:
        upper = tuple(range(lowest, self.depth))
        scope = Scope("label", (), upper, embedding=lowest == 0, final=True, head=True)
        setting = Setting(f"label, chosen for {budget:.2f}", "label, chosen", scope)
        if self.draws.price(setting) > budget:
            return None
        while True:
            wider = [w for w in self._wider(setting, upper) if self.draws.price(w) <= budget]
            best = max(wider, key=self.score, default=None)
            if best is None or self.score(best) <= self.score(setting):
                return setting
            setting = best

    @staticmethod
    def _wider(setting: Setting, upper: Sequence[int]) -> Iterator[Setting]:
        for layer in upper:
            if layer not in setting.scope.layers:
                yield setting.with_layers((*setting.scope.layers, layer))


def chosen(draws: Draws, depth: int) -> list[Record]:
    """For each budget, the choices of all folds as one setting: values by those of the others.

    The scope that is reported is the choice on all draws.
    """
    found = []
    formats = [name.rsplit("-", 1)[0] for name in draws.names]
    if len(set(formats)) < 2:
        return []
    for budget in BUDGETS:
        whole = _Search(draws, range(len(formats)), depth).best(budget)
        folds: dict[str, Setting | None] = {}
        for own in dict.fromkeys(formats):
            others = [i for i, name in enumerate(formats) if name != own]
            folds[own] = _Search(draws, others, depth).best(budget)
        best = [folds[name] for name in formats]
        values: list[Numbers] = [
            setting.values(shares) for setting, shares in zip(best, draws.shares, strict=True)
            if setting is not None
        ]  # fmt: skip
        if whole is not None and len(values) == len(formats):
            found.append(measured(draws, whole, values))
    return found
