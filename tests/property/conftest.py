"""Loads the Hypothesis profile before any property is decorated."""

from __future__ import annotations

import tests.property.profiles  # noqa: F401
