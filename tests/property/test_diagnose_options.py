"""All eleven diagnostics: options say what they are; what has no meaning or no rows is refused."""

from __future__ import annotations

import math
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from alphatoken.cli.diagnose_run import _one_round
from alphatoken.config import ScorerConfig
from alphatoken.diagnose import DIAGNOSTICS, Entry, find
from alphatoken.errors import AlphaTokenError, ConfigError, DataError, InputError
from alphatoken.support.options import limits_of
from tests.property.test_diagnose_heatmap import tiny_subject
from tests.rows import drawn_rows

NAMES = [entry.name for entry in DIAGNOSTICS]
BEYOND = {"at_least": -1, "above": 0, "below": 0}


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


SHORT = {"train": drawn_rows([(2, 3)] * 2)}
WALK = {"config": ScorerConfig("walk")}


@pytest.mark.parametrize(
    ("name", "options", "changes", "error", "cause"),
    [
        *(
            (name, {}, SHORT, InputError, rf"at least {fewest} response tokens")
            for name, fewest in {
                "estimators": 24, "utility": 16, "value-propagation": 8, "heatmap": 8,
                "coverage": 16, "sensitivity": 16, "stability": 16, "arithmetic": 16,
            }.items()
        ),
        ("fisher", {}, SHORT | {"retention": {"a": drawn_rows([(2, 3)])}}, InputError, "at least"),
        *((name, {}, {}, DataError, "--retention_set") for name in ("fisher", "drift")),
        *(
            (name, {}, {"validation": drawn_rows([(2, 4)] * 3)}, DataError, "validation rows")
            for name in ("sensitivity", "stability", "arithmetic")
        ),
        *((name, {}, WALK, ConfigError, "first-order") for name in ("utility", "sensitivity")),
        ("fisher", {}, WALK | {"retention": {"a": []}}, ConfigError, "first-order"),
        (
            "stability", {}, {"config": ScorerConfig(objective="stability")}, ConfigError,
            "validation side",
        ),
        ("estimators", {"layers": (7,)}, {}, ConfigError, "lie within the model"),
        ("heatmap", {"rows": (14,)}, {}, ConfigError, "was not drawn"),
    ],
)  # fmt: skip
def test_what_a_diagnostic_cannot_do_without_is_refused(
    name: str,
    options: dict[str, Any],
    changes: dict[str, Any],
    error: type[AlphaTokenError],
    cause: str,
) -> None:
    module = find(name).load()
    with pytest.raises(error, match=cause):
        module.diagnose(tiny_subject(**changes), module.Options(**options))


def test_a_diagnosis_has_the_name_of_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a diagnostic whose last line still has the other's name says where."""
    given = SimpleNamespace(name="heatmap", notes=())
    module = SimpleNamespace(diagnose=lambda subject, options: given, __name__="copied")
    monkeypatch.setattr(Entry, "load", lambda self: module)
    with pytest.raises(ConfigError, match=r"'heatmap' from 'drift', in copied.*conclude\('drift'"):
        _one_round(find("drift"), None, tiny_subject())
