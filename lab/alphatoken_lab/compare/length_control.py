"""Win rates with the advantage of longer answers taken out (arXiv 2404.04475, AlpacaEval 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from alphatoken.errors import DataError

__all__ = ["RIDGE", "length_controlled_rate"]

RIDGE = 0.01
"""Of the length's coefficient: keeps it finite where length alone tells wins from losses."""


def length_controlled_rate(
    preferences: Sequence[float], ours: Sequence[str], theirs: Sequence[str]
) -> float:
    r"""Win rate that the model would have at equal length, in percent.

    With :math:`y_i \in [0, 1]` how far answer i wins, and :math:`d_i` its length in characters
    minus the opponent's,

    .. math::
        p_i = \sigma\big(\theta + \varphi \tanh(d_i / s)\big), \qquad
        \min_{\theta, \varphi}\; -\sum_i \big[y_i \log p_i + (1 - y_i) \log(1 - p_i)\big]
            + \tfrac{r}{2} \varphi^2, \qquad \text{rate} = 100\, \sigma(\theta),

    where s is the sample standard deviation of the :math:`d_i` (n - 1; the differences are not
    centred: 0 is equal length) and r is ``RIDGE``.

    The published model has a third term, ability times the difficulty of each instruction, whose
    difficulties were fitted over all models of its leaderboard, and it regularises towards answers
    that were made long or short on purpose. From one pair of models neither can be fitted: a number
    of its own for every instruction would explain every preference. What is left are the two terms
    above, so rates are not those of the leaderboard, and compare among themselves.

    Exactness: where y has no sample covariance with the length term, :math:`\varphi = 0` and the
    rate is the plain win rate; where :math:`y_i = \sigma(\varphi \tanh(d_i / s))`, length alone,
    it is 50 up to the ridge, whose weight is r against n comparisons; exchanging the two models
    gives 100 minus the rate. Where all differences are equal, or all comparisons are won (lost),
    nothing can be told apart and it is the plain rate.

    Raises:
        DataError: no comparison, or other numbers of answers.
    """
    y = np.asarray(preferences, dtype=np.float64)
    if y.size == 0 or len(ours) != y.size or len(theirs) != y.size:
        raise DataError(
            "a length-controlled rate needs one answer of each side to every comparison",
            got=f"{y.size} comparisons, {len(ours)} and {len(theirs)} answers",
        )
    d = np.array([len(one) - len(other) for one, other in zip(ours, theirs, strict=True)], float)
    spread = float(d.std(ddof=1)) if d.size > 1 else 0.0
    if spread == 0.0 or y.min() == y.max() in (0.0, 1.0):
        return float(100.0 * y.mean())
    return float(100.0 * expit(_fitted(y, np.tanh(d / spread))[0]))


def _fitted(y: Any, t: Any) -> Any:
    """(theta, phi): strictly convex, unless y is 0 or 1 throughout."""
    terms = np.stack([np.ones_like(t), t], axis=1)
    ridge = np.diag([0.0, RIDGE])

    def loss(x: Any) -> tuple[float, Any]:
        z = terms @ x
        value = np.logaddexp(0.0, z).sum() - y @ z + 0.5 * x @ ridge @ x
        return float(value), terms.T @ (expit(z) - y) + ridge @ x

    def curvature(x: Any) -> Any:
        p = expit(terms @ x)
        return (terms * (p * (1.0 - p))[:, None]).T @ terms + ridge

    found = minimize(
        loss, np.zeros(2), jac=True, hess=curvature, method="trust-exact", options={"gtol": 1e-10}
    )
    return found.x
