"""Options of all ten diagnostics: each says what it is, and refuses what has no meaning."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from alphatoken.diagnose.registry import DIAGNOSTICS, find
from alphatoken.errors import ConfigError
from alphatoken.support.options import limits_of

NAMES = [entry.name for entry in DIAGNOSTICS]
BEYOND = {"at_least": -1, "above": 0, "at_most": 1, "below": 0}


@pytest.mark.parametrize("name", NAMES)
def test_every_option_has_its_help_and_every_number_its_limits(name: str) -> None:
    made = find(name).load().Options
    for one in fields(made):
        assert one.metadata["help"]
        limits = limits_of(one)
        ends = {name: getattr(limits, name) for name in BEYOND}
        ends = {name: end for name, end in ends.items() if end not in (None, math.inf)}
        assert "str" in str(one.type) or "bool" in str(one.type) or ends
        for limit, end in ends.items():
            kind = float if "float" in str(one.type) else int
            wrong: Any = kind(end + BEYOND[limit])
            with pytest.raises(ConfigError, match=f"{one.name} must be"):
                made(**{one.name: (wrong,) if "tuple" in str(one.type) else wrong})


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("coverage", {"policies": ("best",)}, "policies must be one of"),
        ("coverage", {"policies": ()}, "no policy"),
        ("coverage", {"policies": ("random", "random")}, "named twice"),
        ("drift", {"label": "before"}, "label must tell"),
        ("sensitivity", {"estimators": ("magic",)}, "estimators must be one of"),
        ("utility", {"optimizer": "lion"}, "optimizer must be one of"),
        ("utility", {"warmup": 0}, "at least one warm-up step"),
        ("value-propagation", {"collected": "nowhere.safetensors"}, "no file of collected pairs"),
    ],
)
def test_options_without_meaning_are_refused(name: str, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find(name).load().Options(**wrong)
