"""Exact Shapley values of small games, by enumeration of every coalition."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from math import factorial
from typing import TypeVar

__all__ = ["exact_shapley"]

Player = TypeVar("Player", bound=Hashable)


def exact_shapley(
    utility: Callable[[frozenset[Player]], float], players: Sequence[Player]
) -> dict[Player, float]:
    """Shapley value of each player of the game ``utility``, exact.

    ``phi_u = sum over S without u of |S|! (n - |S| - 1)! / n! (U(S + u) - U(S))``.
    ``utility`` is evaluated once on each of the 2^n coalitions. The values add to
    ``U(all) - U(none)``. Source: App. A of the paper; with the utility of one SGD step
    (:func:`alphatoken.oracle.utility.one_step_utility`) they tend to the first-order values of
    eq. shapley_closed_form_step as the step size goes to 0.
    """
    count = len(players)
    worth = {
        coalition: utility(coalition)
        for size in range(count + 1)
        for coalition in map(frozenset, combinations(players, size))
    }
    return {player: _value(worth, player, count) for player in players}


def _value(worth: dict[frozenset[Player], float], player: Player, count: int) -> float:
    return sum(
        (
            factorial(len(others))
            * factorial(count - len(others) - 1)
            / factorial(count)
            * (worth[others | {player}] - worth[others])
            for others in worth
            if player not in others
        ),
        0.0,
    )
