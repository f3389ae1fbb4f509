"""Loads the Hypothesis profile."""

from __future__ import annotations

import tests.property.profiles  # noqa: F401
