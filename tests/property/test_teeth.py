"""A relative error of 1e-9 is rejected by the main properties.

Each property is run with one function of the core replaced by itself times (1 + 1e-9), on a case
on which it passes otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from alphatoken.direction import build, preconditioner
from alphatoken.estimate.columns import ColumnSums
from alphatoken.model import attention
from alphatoken.scoring import label
from alphatoken.select import losses
from tests.property import (
    test_attention,
    test_direction,
    test_estimators,
    test_label,
    test_losses,
    test_preconditioner,
    test_value_propagation,
)
from tests.property.mutation import body, without_proofs
from tests.property.setups import Setup
from tests.property.strategies import make_case
from tests.property.test_attention import AttentionCase
from tests.property.test_losses import LossCase, PairCase
from tests.property.test_preconditioner import AdamCase

CASE = make_case(
    ("pprrrr", "..prrr"), (("pprr",), ("prrr.", "..prr")), layers=2, heads=4, kv_heads=2, seed=5
)
SETUP = Setup(CASE, "all")
HEADS = AttentionCase(b=2, g=2, r=2, t=6, mask="left", sinks=True, softcap=1.5, chunk=3)
PAIRS = PairCase(LossCase(2, 5, 4, 0), LossCase(2, 4, 4, 0), 0.5)


def changed(found: Any) -> Any:
    """The same structure with every floating tensor times 1 + 1e-9."""
    if isinstance(found, Tensor):
        return found * (1 + 1e-9) if found.is_floating_point() else found
    if isinstance(found, (tuple, list)):
        return type(found)(changed(x) for x in found)
    if isinstance(found, dict):
        return {k: changed(x) for k, x in found.items()}
    if found is None or isinstance(found, (int, float, str)):
        return found
    return replace(found, **{k: changed(v) for k, v in vars(found).items()})


Teeth = tuple[Any, str, Callable[..., None], tuple[Any, ...]]
PROPERTIES: dict[str, Teeth] = {
    "full preconditioner": (
        preconditioner,
        "full_preconditioner",
        test_preconditioner.test_full_preconditioner,
        (AdamCase(5, 0.9, 0.999, 1e-8, 0),),
    ),
    "self-only backward": (
        attention, "self_terms", test_attention.test_self_backward_is_the_diagonal, (HEADS,)
    ),
    "banded sum": (
        attention,
        "propagate_values",
        test_value_propagation.test_value_propagation,
        (HEADS, 3, "per_head"),
    ),
    "direct": (ColumnSums, "columns", test_estimators.test_direct_is_the_diagonal, (SETUP,)),
    "path": (ColumnSums, "columns", test_estimators.test_path_is_the_column_sums, (SETUP,)),
    "label": (label, "label_values", test_label.test_label_is_the_row_sums, (SETUP,)),
    "alphatoken": (
        ColumnSums,
        "columns",
        test_value_propagation.test_alphatoken_is_direct_plus_propagation,
        (SETUP, 2, "per_head", "label"),
    ),
    "validation gradient": (
        build, "objective_sums", test_direction.test_validation_gradient, (SETUP,)
    ),
    "DPO": (losses, "masked_dpo_loss", test_losses.test_masked_dpo_gradient, (PAIRS,)),
}  # fmt: skip


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_rejects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, function, test, arguments = PROPERTIES[name]
    check = partial(body(test), *arguments)
    check()
    original = getattr(place, function)

    def altered(*args: Any, **kwargs: Any) -> Any:
        return changed(original(*args, **kwargs))

    monkeypatch.setattr(place, function, altered)
    with without_proofs(), pytest.raises(AssertionError):
        check()
