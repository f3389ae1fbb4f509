"""How many examples: HYPOTHESIS_PROFILE is dev (25, default), ci (200, derandomised) or nightly."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["budget"]

_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("dev", max_examples=25, **_COMMON)
settings.register_profile("ci", max_examples=200, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=5000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "dev")


def budget(fraction: float, least: int = 10) -> settings:
    """Settings with this share of the active profile's examples, for expensive properties."""
    return settings(max_examples=max(least, round(fraction * settings.default.max_examples)))
