"""Overrides of methods of transformers: all are known, and looked for on import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from alphatoken.errors import UnsupportedError
from alphatoken.train import AlphaSFTTrainer
from alphatoken.train.hooks import OVERRIDDEN
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
    found = set(overrides()) - PUBLIC
    assert len(found) > 8
    assert found - {"_prepare_dataset"} == set(OVERRIDDEN)


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("name", ["_run_epoch", "_clip_grad_norm"])
def test_a_library_without_a_hook_is_refused_on_import(name: str, stays: bool) -> None:
    """As transformers 5.2 is, where the override would be called by nobody; also if it stays."""

    def without(kind: Any) -> dict[str, Any]:
        functions = {n: f for n, f in vars(kind).items() if callable(f)}
        return {
            n: f
            for n, f in functions.items()
            if (n == name and stays)
            or (n != name and name not in getattr(getattr(f, "__code__", None), "co_names", ()))
        }

    former = type("Trainer", (), {**without(Trainer), "__module__": "transformers.trainer"})
    with pytest.raises(UnsupportedError, match=rf"without .*{name}"):
        type("Ours", (AlphaTrainerMixin, former), {})
    type("Ours", (AlphaTrainerMixin, Trainer), {})
