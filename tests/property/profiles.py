"""How many examples, and whether they are drawn anew: one profile, HYPOTHESIS_PROFILE.

| profile | examples | drawn | for |
|---|---|---|---|
| dev | 12 | derandomised: every run and every machine sees the same | everybody (default) |
| brief | 4 | derandomised | ``.ci/run`` in the card's environment, after ``dev`` |
| ci | 50 | derandomised | the workflow, at every change |
| random | 4 | anew from a printed seed | by hand: ``make random``, ``make random SEED=...`` |
| nightly | 5,000 | anew from a printed seed | ``make nightly`` |

What a derandomised profile draws follows from the test alone. Hypothesis itself would also draw
numbers that occur in whichever of our modules happen to be loaded: then a test sees other examples
alone than in a suite, and others in each process of it.

The seed is ``--hypothesis-seed``; each test draws from it by itself, so a failure is repeated by
the same seed and the name of that one test.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

RANDOM = ("random", "nightly")
"""Profiles that draw anew."""

_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("dev", max_examples=12, derandomize=True, **_COMMON)
settings.register_profile("brief", max_examples=4, derandomize=True, **_COMMON)
settings.register_profile("ci", max_examples=50, derandomize=True, **_COMMON)
# Without a database a seed alone says what is drawn.
# On a machine that says CI, Hypothesis derandomises unless it is told.
settings.register_profile("random", max_examples=4, derandomize=False, database=None, **_COMMON)
settings.register_profile("nightly", max_examples=5000, derandomize=False, database=None, **_COMMON)
# There is no setting for this.
assert hasattr(providers, "_get_local_constants")
providers._get_local_constants = lambda: providers._local_constants  # empty
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "dev")


def budget(fraction: float, least: int = 3) -> settings:
    """Settings with this share of the active profile's examples, for expensive properties.

    A share below ``least`` is ``least``, where the profile itself has as many.
    """
    whole = settings.default.max_examples
    return settings(max_examples=max(min(least, whole), round(fraction * whole)))
