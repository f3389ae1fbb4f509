"""The Wasserstein form of the Fisher transfer error, on finite prompt sets.

    || F_dagger - F_ref ||  <=  L_g W_1  <=  L_g W_2

Both Fishers are the mean, over their prompts, of one map f from a prompt to a diagonal Fisher; L_g
is the Lipschitz constant of f on the space of prompts (eq. app_wasser).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from alphatoken.errors import InputError
from alphatoken.oracle.enumeration import exact_fisher
from alphatoken.oracle.gradients import Forward

__all__ = [
    "Metric",
    "TransferBound",
    "lipschitz_constant",
    "prompt_fishers",
    "transfer_bound",
    "wasserstein",
]

Metric = Callable[[Tensor, Tensor], float]
"""A distance between two prompts (vectors of token ids), positive unless they are equal."""


@dataclass(frozen=True)
class TransferBound:
    """Both sides of eq. app_wasser: ``transfer <= lipschitz * wasserstein_2``.

    ``largest`` is the largest entry of the two Fishers, by which rounding is measured.
    """

    transfer: float
    largest: float
    lipschitz: float
    wasserstein_1: float
    wasserstein_2: float

    @property
    def right(self) -> float:
        """``L_g W_2``, the paper's bound."""
        return self.lipschitz * self.wasserstein_2

    @property
    def right_tight(self) -> float:
        """``L_g W_1``, which the proof needs and which is never larger."""
        return self.lipschitz * self.wasserstein_1

    @property
    def holds(self) -> bool:
        """True if both forms hold (rounding of 1e-12 of the right side and the Fishers allowed)."""
        # eq. app_wasser, by W_2 as printed and by W_1
        return self.transfer <= min(self.right, self.right_tight) * (1 + 1e-12) + (
            1e-12 * self.largest
        )


def wasserstein(
    left: Sequence[Tensor], right: Sequence[Tensor], metric: Metric, power: int
) -> float:
    """``W_power`` between the uniform distributions on two finite prompt lists.

    Exact optimal transport: each point is repeated until both lists have the same length; the
    vertices of that transport polytope are permutations (Birkhoff), so an optimal assignment is an
    optimal plan.
    """
    # equal masses: each of n points lcm / n times
    common = math.lcm(len(left), len(right))
    # d(a, b)^power of every pair
    costs = np.array([[metric(a, b) ** power for b in right] for a in left], dtype=np.float64)
    costs = costs.repeat(common // len(left), axis=0).repeat(common // len(right), axis=1)
    rows, columns = linear_sum_assignment(costs)
    # W_p = (mean over the plan of d^p)^(1/p)
    return math.pow(costs[rows, columns].mean(), 1.0 / power)


def prompt_fishers(
    model: nn.Module,
    forward: Forward,
    prompts: Sequence[Tensor],
    response_length: int,
    parameters: Mapping[str, Tensor],
    vocabulary: int,
    eos: int | None = None,
) -> list[Tensor]:
    """The map of eq. app_wasser at each prompt: its own diagonal Fisher, flat, by enumeration.

    Exact. Raises as :func:`exact_fisher`.
    """
    return [
        exact_fisher(model, forward, [x], response_length, parameters, vocabulary, eos).diagonal()
        for x in prompts
    ]


def lipschitz_constant(
    prompts: Sequence[Tensor], images: Sequence[Tensor], metric: Metric
) -> float:
    """The smallest L with ``||f(x) - f(y)|| <= L d(x, y)`` on a finite set of prompts, all pairs.

    The norm is the operator norm of a diagonal matrix, i.e. its largest entry. For L_g of the paper
    ``prompts`` is the whole space that both distributions live on, not only what was drawn.

    Raises:
        InputError: two different prompts at distance 0 (then no L exists).
    """
    steepest = 0.0
    for i, (a, f_a) in enumerate(zip(prompts, images, strict=True)):
        for b, f_b in zip(prompts[:i], images[:i], strict=True):
            if torch.equal(a, b):
                continue
            # d(x, y) and ||f(x) - f(y)||
            distance, gap = metric(a, b), float((f_a - f_b).abs().max())
            if distance <= 0.0:
                raise InputError(
                    "the metric does not separate two different prompts",
                    got=f"{a.tolist()} and {b.tolist()} at distance {distance}",
                    why="no Lipschitz constant exists",
                )
            # L = max ||f(x) - f(y)|| / d(x, y)
            steepest = max(steepest, gap / distance)
    return steepest


def transfer_bound(
    model: nn.Module,
    forward: Forward,
    retention_prompts: Sequence[Tensor],
    reference_prompts: Sequence[Tensor],
    response_length: int,
    parameters: Mapping[str, Tensor],
    vocabulary: int,
    metric: Metric,
    *,
    lipschitz: float,
    eos: int | None = None,
) -> TransferBound:
    """Both sides of ``||F_dagger - F_ref|| <= L_g W_2`` (eq. app_wasser).

    F_dagger is the diagonal Fisher of the retention prompts, F_ref that of the reference prompts,
    each by enumeration of all responses; W_1 and W_2 are exact. ``lipschitz`` is L_g of the
    per-prompt Fisher on the *space of prompts*, from a closed form or from
    :func:`lipschitz_constant`. A constant of the drawn prompts alone would say nothing: with it the
    inequality holds for any two lists and any map.

    Raises:
        InputError: as :func:`exact_fisher`.
    """
    # eq. app_F_ret_dagger and eq. mc_fisher, by enumeration
    f_retention, f_reference = (
        exact_fisher(
            model, forward, prompts, response_length, parameters, vocabulary, eos
        ).diagonal()
        for prompts in (retention_prompts, reference_prompts)
    )
    return TransferBound(
        transfer=float((f_retention - f_reference).abs().max()),
        largest=float(torch.cat([f_retention, f_reference]).max()),
        lipschitz=lipschitz,
        wasserstein_1=wasserstein(retention_prompts, reference_prompts, metric, 1),
        wasserstein_2=wasserstein(retention_prompts, reference_prompts, metric, 2),
    )
