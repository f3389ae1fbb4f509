"""Overrides of methods of transformers: all are known, and looked for on import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer
from trl import DPOTrainer, SFTTrainer

from alphatoken.errors import UnsupportedError
from alphatoken.train import AlphaSFTTrainer
from alphatoken.train.hooks import NEEDED, OVERRIDDEN
from alphatoken.train.mixin import AlphaTrainerMixin

FOLDER = Path(__file__).parents[2] / "alphatoken" / "train"
TREES = [ast.parse(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.py"))]
PUBLIC = {"__init__", "__new__", "train", "__init_subclass__"}


def overrides() -> Iterator[str]:
    """Methods of the mixins that call their own name above: theirs stands in another's place."""
    for tree in TREES:
        for one in ast.walk(tree):
            if isinstance(one, ast.FunctionDef):
                text = ast.unparse(one)
                if f"super().{one.name}" in text and hasattr(AlphaSFTTrainer.BASE, one.name):
                    yield one.name


def test_every_override_is_looked_for() -> None:
    result = set(overrides()) - PUBLIC
    assert len(result) > 8
    assert result - {"_prepare_dataset"} == set(OVERRIDDEN)


def without(kind: Any, name: str, stays: bool) -> dict[str, Any]:
    """What a class has but for all that calls or reads a name; the method itself may stay."""
    functions = {n: f for n, f in vars(kind).items() if callable(f)}
    return {
        n: f
        for n, f in functions.items()
        if (n == name and stays)
        or (n != name and name not in getattr(getattr(f, "__code__", None), "co_names", ()))
    }


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("name", ["_run_epoch", "_clip_grad_norm"])
def test_a_library_without_a_hook_is_refused_on_import(name: str, stays: bool) -> None:
    """As transformers 5.2 is, where the override would be called by nobody; also if it stays."""
    own = {**without(Trainer, name, stays), "__module__": "transformers.trainer"}
    former = type("Trainer", (), own)
    with pytest.raises(UnsupportedError, match=rf"without .*{name}"):
        type("Ours", (AlphaTrainerMixin, former), {})
    type("Ours", (AlphaTrainerMixin, Trainer), {})


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in (Trainer, SFTTrainer, DPOTrainer)
                       for name in NEEDED[kind.__name__]]
)  # fmt: skip
def test_a_library_without_what_is_read_is_refused_on_import(kind: Any, name: str) -> None:
    """Else figures would be lost without a word, or a run would end at its first save."""
    own = {**without(kind, name, stays=False), "__module__": kind.__module__}
    below = () if kind is Trainer else (Trainer,)
    former = type(kind.__name__, below, own)
    with pytest.raises(UnsupportedError, match=rf"without .*{name}"):
        type("Ours", (AlphaTrainerMixin, former), {})
    type("Ours", (AlphaTrainerMixin, kind), {})
