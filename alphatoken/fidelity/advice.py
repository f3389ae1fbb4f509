"""What is worth its price: the Pareto front of cost and fidelity, and what stands out on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.certificate import metrics
from alphatoken.errors import InputError
from alphatoken.fidelity.intervals import Estimate, bootstrap
from alphatoken.fidelity.readings import Numbers, Setting

__all__ = ["Advice", "advise", "front"]


def front(costs: Sequence[float], scores: Sequence[float]) -> list[int]:
    """Places of what is worth its price, by rising cost: nothing as cheap scores as high.

    Of equals the first is kept. Places with a NaN are left out.

    Raises:
        InputError: different lengths.
    """
    if len(costs) != len(scores):
        raise InputError(
            "costs and scores must be equally many", got=f"{len(costs)} and {len(scores)}"
        )
    usable = [i for i in range(len(costs)) if not math.isnan(costs[i] + scores[i])]
    best, chosen = -math.inf, []
    for place in sorted(usable, key=lambda i: (costs[i], -scores[i], i)):
        if scores[place] > best:
            best = scores[place]
            chosen.append(place)
    return chosen


@dataclass(frozen=True)
class Advice:
    """The cheapest setting that is worth its price.

    Attributes:
        setting: what to compute.
        cost: of values and direction, in training steps.
        spearman: with the reference.
        gain: in Spearman over the advice before it, paired; undefined for the first.
    """

    setting: Setting
    cost: float
    spearman: Estimate
    gain: Estimate


def advise(
    values: Mapping[Setting, Numbers],
    truth: Numbers,
    costs: Mapping[Setting, float],
    rows: Sequence[int] | NDArray[Any],
    draws: int,
) -> list[Advice]:
    """By rising cost, settings that rank clearly better than every cheaper one that is advised.

    Of the Pareto front, a setting is left out where the 95 % interval of its gain in Spearman,
    paired on the same resampled rows, reaches 0. Costs within 0.01 count as equal.
    """
    settings, groups = list(costs), np.asarray(rows, dtype=np.int64)
    scores = [metrics.spearman(values[s], truth) for s in settings]
    chosen: list[Advice] = []
    for place in front([round(costs[s], 2) for s in settings], scores):
        setting = settings[place]
        gain = Estimate.undefined(len(truth), "the cheapest")
        if chosen:
            gain = bootstrap(
                lambda a, b, t: metrics.spearman(a, t) - metrics.spearman(b, t),
                values[setting],
                values[chosen[-1].setting],
                truth,
                groups=groups,
                draws=draws,
            )
            if not gain.low > 0:
                continue
        score = bootstrap(metrics.spearman, values[setting], truth, groups=groups, draws=draws)
        chosen.append(Advice(setting, costs[setting], score, gain))
    return chosen
