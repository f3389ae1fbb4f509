"""A race: short runs from one start, compared by row on trusted rows, before one of them goes on.

No rule gains on all rows, and values do not say on which. So arms (policies with their options)
train from the same weights, on the same rows in the same order under the same seeds, by the
schedule of the whole run. At a few steps, the looks, each is measured on rows that neither run nor
walk has seen, the choosing rows. What the differences mean is decided by ``decision``; the winner
goes on from where it is.

- ``decision``: pure functions. Differences, their standard errors and intervals, who leaves, who
  wins, and what is promised.
- ``arms``: what an arm is, how it is written, and at which steps there are looks.
- ``runner``: trains the arms, one after the other, and keeps the state of the race in one file.
- ``rows``: choosing rows set aside of the trusted ones, and rows that an arm leaves out.
- ``python``: ``race``, for trainers in Python; the command line has ``alphatoken race``.
- ``page``: the page about it.

**May import** ``train`` and what it stands on; not ``cli``. **Oracle**: the decision in loops, and
the run without a race, in ``tests/property/test_race_decision.py`` and
``tests/integration/test_race.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from alphatoken.race.options import RaceConfig

if TYPE_CHECKING:
    from alphatoken.race.python import race
    from alphatoken.race.runner import RaceResult

__all__ = ["RaceConfig", "RaceResult", "race"]


def __getattr__(name: str) -> Any:
    # Options are read without torch; what runs a race is imported when it is called for.
    if name == "race":
        from alphatoken.race.python import race

        return race
    if name == "RaceResult":
        from alphatoken.race.runner import RaceResult

        return RaceResult
    raise AttributeError(f"module 'alphatoken.race' has no attribute '{name}'")
