"""Tests of the tests: a relative error of 1e-9, or a NaN, is rejected by every main property.

Each property is run with one function of the core replaced by itself times (1 + 1e-9), on a case
on which it passes otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from alphatoken.direction import algebra as direction
from alphatoken.direction import build, preconditioner
from alphatoken.estimate import columns, contraction, forward_mode
from alphatoken.model import attention
from alphatoken.model import batch as batches
from alphatoken.scoring import label
from alphatoken.select import interaction, losses
from tests.property import (
    test_attention,
    test_contraction,
    test_direction,
    test_estimators,
    test_interaction,
    test_label,
    test_losses,
    test_preconditioner,
    test_value_propagation,
)
from tests.property.mutation import body, without_proofs
from tests.property.properties import Setup
from tests.property.strategies import ContractionCase, make_case
from tests.property.test_attention import AttentionCase
from tests.property.test_direction import DirectionCase
from tests.property.test_losses import LossCase, PairCase
from tests.property.test_preconditioner import AdamCase
from tests.property.tolerance import close, unrecorded

SLIGHTLY = 1 + 1e-9
CASE = make_case(
    ("pprrrr", "..prrr"), (("pprr",), ("prrr.", "..prr")), layers=2, heads=4, kv_heads=2, seed=5
)
SETUP, LAST = Setup(CASE, "all"), Setup(CASE, 1)
HEADS = AttentionCase(b=2, g=2, r=2, t=6, mask="left", sinks=True, softcap=1.5, chunk=3)
NUMBERS = ContractionCase(2, 3, 4, 5, 6)


def changed(found: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every floating tensor changed."""
    if isinstance(found, Tensor):
        return change(found) if found.is_floating_point() else found
    if isinstance(found, (tuple, list)):
        return type(found)(changed(x, change) for x in found)
    if isinstance(found, dict):
        return {k: changed(x, change) for k, x in found.items()}
    if found is None or isinstance(found, (int, float, str)):
        return found
    return replace(found, **{k: changed(v, change) for k, v in vars(found).items()})


PROPERTIES: dict[str, tuple[Any, str, Callable[..., None], tuple[Any, ...]]] = {
    "projected": (
        contraction,
        "contract",
        test_contraction.test_projected_is_the_loop,
        (NUMBERS, True),
    ),
    "outer sum": (
        contraction,
        "outer_sum",
        test_contraction.test_outer_sum_is_the_weight_gradient,
        (NUMBERS,),
    ),
    "diagonal drift": (
        direction,
        "diagonal_drift",
        test_direction.test_diagonal_drift,
        (DirectionCase(3, 4, 1.5, 0),),
    ),
    "Kronecker drift": (
        direction,
        "kronecker_drift",
        test_direction.test_kronecker_drift,
        (DirectionCase(3, 4, 1.5, 0),),
    ),
    "full preconditioner": (
        preconditioner,
        "full_preconditioner",
        test_preconditioner.test_full_preconditioner,
        (AdamCase(5, 0.9, 0.999, 1e-8, 0),),
    ),
    "frozen preconditioner": (
        preconditioner,
        "frozen_preconditioner",
        test_preconditioner.test_frozen_preconditioner,
        (AdamCase(5, 0.9, 0.999, 1e-8, 0),),
    ),
    "self-only backward": (
        attention,
        "self_terms",
        test_attention.test_self_backward_is_the_diagonal,
        (HEADS,),
    ),
    "cross backward": (
        attention,
        "self_terms",
        test_attention.test_cross_backward_is_the_rest,
        (HEADS,),
    ),
    "forward mode": (
        attention,
        "forward_mode_attention",
        test_attention.test_forward_mode_is_the_jvp,
        (HEADS, frozenset({"query", "key", "value", "sinks"})),
    ),
    "banded sum": (
        attention,
        "propagate_values",
        test_value_propagation.test_value_propagation,
        (HEADS, 3, "per_head"),
    ),
    "weights": (
        attention.AttentionStatistics,
        "weights",
        test_attention.test_log_sum_exp_and_weights,
        (HEADS,),
    ),
    "direct": (
        columns.ColumnSums,
        "columns",
        test_estimators.test_direct_is_the_diagonal,
        (SETUP,),
    ),
    "path": (columns.ColumnSums, "columns", test_estimators.test_path_is_the_column_sums, (SETUP,)),
    "label": (label, "label_values", test_label.test_label_is_the_row_sums, (SETUP,)),
    "label, losses": (
        forward_mode,
        "response_losses",
        test_label.test_label_is_the_row_sums,
        (SETUP,),
    ),
    "alphatoken": (
        columns.ColumnSums,
        "columns",
        test_value_propagation.test_alphatoken_is_direct_plus_propagation,
        (SETUP, 2, "per_head", "label"),
    ),
    "paper_literal": (
        columns.ColumnSums,
        "columns",
        test_value_propagation.test_paper_literal,
        (SETUP, 2, "label"),
    ),
    "same_layer_hop": (
        columns.ColumnSums,
        "columns",
        test_estimators.test_same_layer_hop_of_the_last_layer_is_path,
        (LAST,),
    ),
    "exact propagation": (
        columns.ColumnSums,
        "columns",
        test_value_propagation.test_propagation_is_exact_for_the_last_value_projection,
        (LAST,),
    ),
    "totals": (
        columns.ColumnSums,
        "columns",
        test_estimators.test_totals_are_the_gradient_along_m,
        (SETUP,),
    ),
    "all parameters": (label, "label_values", test_label.test_label_over_all_parameters, (SETUP,)),
    "validation gradient": (
        build,
        "objective_sums",
        test_direction.test_validation_gradient,
        (SETUP,),
    ),
    "retention by data": (build, "objective_sums", test_direction.test_retention_by_data, (SETUP,)),
    "given preconditioner": (
        build,
        "precondition",
        test_preconditioner.test_given_preconditioner,
        (SETUP,),
    ),
    "token losses": (
        batches,
        "token_losses",
        test_losses.test_token_losses,
        (LossCase(2, 5, 4, 0),),
    ),
    "masked loss": (
        losses,
        "masked_sft_loss",
        test_losses.test_sft_loss,
        (LossCase(2, 5, 4, 0), "sum"),
    ),
    "Gram of tokens": (
        interaction,
        "token_gram",
        test_interaction.test_gram_is_the_product_of_direct_gradients,
        (SETUP, 3),
    ),
    "DPO": (
        losses,
        "masked_dpo_loss",
        test_losses.test_masked_dpo_gradient,
        (PairCase(LossCase(2, 5, 4, 0), LossCase(2, 4, 4, 0), 0.5),),
    ),
}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "times 1 + 1e-9": lambda x: x * SLIGHTLY,
    "NaN": lambda x: x * float("nan"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_rejects(name: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, function, test, arguments = PROPERTIES[name]
    check = partial(body(test), *arguments)
    check()
    original = getattr(place, function)

    def altered(*args: Any, **kwargs: Any) -> Any:
        return changed(original(*args, **kwargs), CHANGES[change])

    monkeypatch.setattr(place, function, altered)
    with unrecorded(), without_proofs(), pytest.raises((AssertionError, ArithmeticError)):
        check()


def test_close_rejects_what_it_must() -> None:
    one = torch.ones(3, dtype=torch.float64)
    close(one * (1 + 1e-11), one, one, 1e-10)
    for wrong in (one * SLIGHTLY, one * float("nan"), one * float("inf"), one[:2], -one):
        with unrecorded(), pytest.raises(AssertionError):
            close(wrong, one, one, 1e-10)
    with unrecorded(), pytest.raises(AssertionError):
        close(one, one * float("nan"), one, 1e-10)
    with unrecorded(), pytest.raises(AssertionError):
        close(one, one, one * float("nan"), 1e-10)
    with unrecorded(), pytest.raises(AssertionError):
        close(one * (1 + 1e-15), one, 0.0, 1e-10)
