"""What each profile promises: the same examples every time, or new ones from a seed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import core, given, settings
from hypothesis import strategies as st

from tests.property.profiles import RANDOM, budget

PROFILES = {"dev": 25, "ci": 100, "random": 4, "nightly": 5000}


def drawn(profile: str, examples: int = 8) -> list[int]:
    """What one property sees under a profile, in order."""
    seen: list[int] = []

    @settings(settings.get_profile(profile), max_examples=examples)
    @given(st.integers(0, 2**40))
    def look(number: int) -> None:
        seen.append(number)

    look()
    return seen


def test_what_is_loaded_does_not_change_what_is_drawn(tmp_path: Path) -> None:
    before = drawn("ci", 200)
    source = tmp_path / "alphatoken_numbers.py"
    source.write_text("\n".join(f"number_{i} = {10**9 + 977 * i}" for i in range(500)))
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.stem] = module
    try:
        spec.loader.exec_module(module)
        assert drawn("ci", 200) == before
    finally:
        del sys.modules[source.stem]


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_draws_as_it_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = settings.get_profile(name)
    assert profile.max_examples == PROFILES[name]
    assert profile.derandomize == (name not in RANDOM)
    assert profile.database is None  # nothing but the seed decides
    by_seed = []
    for seed in (1, 2, 1):
        monkeypatch.setattr(core, "global_force_seed", seed)
        by_seed.append(drawn(name))
    assert by_seed[0] == by_seed[2]
    assert (by_seed[0] == by_seed[1]) == (name not in RANDOM)


def test_without_a_seed_random_examples_are_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "global_force_seed", None)
    assert drawn("random") != drawn("random")
    assert drawn("dev") == drawn("dev")


def test_an_expensive_property_has_a_share_and_a_least() -> None:
    before = settings.get_current_profile_name()
    try:
        settings.load_profile("ci")
        assert budget(0.5).max_examples == 50
        assert budget(0.0).max_examples == 10
        assert budget(0.0, least=3).max_examples == 3
    finally:
        settings.load_profile(before)
