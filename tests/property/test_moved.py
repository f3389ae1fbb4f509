"""Former places of modules still lead to them, and say so."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest

from alphatoken import Scorer, ScorerConfig
from alphatoken.moved import FORMER
from tests.property.strategies import make_case

OPTIONAL = ("adapters.dispatch", "adapters.transformers")
CASE = make_case(("pprrr",), (("pprr",),), layers=3)


@pytest.mark.parametrize("former", FORMER)
def test_a_former_name_warns_and_gives_the_module(
    former: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if former in OPTIONAL:
        pytest.importorskip("transformers")
    monkeypatch.delitem(sys.modules, f"alphatoken.{former}", raising=False)
    now = importlib.import_module(f"alphatoken.{FORMER[former]}")
    if "." in former:  # its package is a former name as well, and warns by itself
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("alphatoken.adapters")
    spec = now.__spec__
    with pytest.warns(DeprecationWarning, match=f"alphatoken.{FORMER[former]} now"):
        found = importlib.import_module(f"alphatoken.{former}")
    assert found is now
    assert now.__spec__ is spec
    assert now.__name__ == f"alphatoken.{FORMER[former]}"


def test_the_warning_points_at_the_import_and_comes_once() -> None:
    code = (
        "import warnings; warnings.simplefilter('always')\n"
        "from alphatoken.selection import select_top\n"
        "import alphatoken.selection, alphatoken\n"
        "assert select_top is alphatoken.select_top\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr.count("DeprecationWarning") == 1
    assert "<string>:2:" in run.stderr


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="alphatoken.no_such"):
        importlib.import_module("alphatoken.no_such")


def test_former_names_of_the_scorer_warn() -> None:
    """An option that has no effect any more, and an attribute under another name now."""
    with pytest.warns(DeprecationWarning, match="contraction=.* has no effect"):
        config = ScorerConfig(contraction="gram")
    assert config == ScorerConfig()
    scorer = Scorer(CASE.model(), CASE.validation)
    with pytest.warns(DeprecationWarning, match=r"Scorer\.builder now"):
        assert scorer.target is scorer.builder
