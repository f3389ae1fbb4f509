"""Tests of the tests: a relative error of 1e-9, or a NaN, is rejected by every main property.

Each property is run with one function of the core replaced by itself times (1 + 1e-9), on a case
on which it passes otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from tests.property import properties_algebra as algebra
from tests.property import properties_attention as heads
from tests.property import properties_estimators as claims
from tests.property import properties_scorer as whole
from tests.property import properties_weights as weighing
from tests.property.mutation import without_proofs
from tests.property.properties import Setup
from tests.property.properties_attention import AttentionCase
from tests.property.strategies import ContractionCase, make_case
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


Property = Callable[[], None]
PROPERTIES: dict[str, tuple[Any, str, Property]] = {
    "projected": (
        contraction, "contract", lambda: algebra.check_projected_is_the_loop(NUMBERS, True)
    ),
    "outer sum": (
        contraction, "outer_sum", lambda: algebra.check_outer_sum_is_the_weight_gradient(NUMBERS)
    ),
    "diagonal drift": (
        direction, "diagonal_drift",
        lambda: algebra.check_diagonal_drift(algebra.DirectionCase(3, 4, 1.5, 0)),
    ),
    "Kronecker drift": (
        direction, "kronecker_drift",
        lambda: algebra.check_kronecker_drift(algebra.DirectionCase(3, 4, 1.5, 0)),
    ),
    "full preconditioner": (
        preconditioner, "full_preconditioner",
        lambda: algebra.check_full_preconditioner(algebra.AdamCase(5, 0.9, 0.999, 1e-8, 0)),
    ),
    "frozen preconditioner": (
        preconditioner, "frozen_preconditioner",
        lambda: algebra.check_frozen_preconditioner(algebra.AdamCase(5, 0.9, 0.999, 1e-8, 0)),
    ),
    "self-only backward": (
        attention, "self_terms", lambda: heads.check_self_backward_is_the_diagonal(HEADS)
    ),
    "cross backward": (
        attention, "self_terms", lambda: heads.check_cross_backward_is_the_rest(HEADS)
    ),
    "forward mode": (
        attention, "forward_mode_attention",
        lambda: heads.check_forward_mode_is_the_jvp(
            HEADS, frozenset({"query", "key", "value", "sinks"})
        ),
    ),
    "banded sum": (
        attention, "propagate_values",
        lambda: heads.check_value_propagation(HEADS, 3, "per_head"),
    ),
    "weights": (
        attention.AttentionStatistics, "weights",
        lambda: heads.check_log_sum_exp_and_weights(HEADS),
    ),
    "direct": (
        columns.ColumnSums, "columns", lambda: claims.check_direct_is_the_diagonal(SETUP)
    ),
    "path": (columns.ColumnSums, "columns", lambda: claims.check_path_is_the_column_sums(SETUP)),
    "label": (label, "label_values", lambda: claims.check_label_is_the_row_sums(SETUP)),
    "label, losses": (
        forward_mode, "response_losses", lambda: claims.check_label_is_the_row_sums(SETUP)
    ),
    "alphatoken": (
        columns.ColumnSums, "columns",
        lambda: claims.check_alphatoken_is_direct_plus_propagation(SETUP, 2, "per_head", "label"),
    ),
    "paper_literal": (
        columns.ColumnSums, "columns", lambda: claims.check_paper_literal(SETUP, 2, "label")
    ),
    "same_layer_hop": (
        columns.ColumnSums, "columns",
        lambda: claims.check_same_layer_hop_of_the_last_layer_is_path(LAST),
    ),
    "exact propagation": (
        columns.ColumnSums, "columns",
        lambda: claims.check_propagation_is_exact_for_the_last_value_projection(LAST),
    ),
    "totals": (
        columns.ColumnSums, "columns", lambda: claims.check_totals_are_the_gradient_along_m(SETUP)
    ),
    "all parameters": (
        label, "label_values", lambda: claims.check_label_over_all_parameters(SETUP)
    ),
    "validation gradient": (
        build, "objective_sums", lambda: whole.check_validation_gradient(SETUP)
    ),
    "retention by data": (
        build, "objective_sums", lambda: whole.check_retention_by_data(SETUP)
    ),
    "given preconditioner": (
        build, "precondition", lambda: whole.check_given_preconditioner(SETUP)
    ),
    "token losses": (
        batches, "token_losses",
        lambda: algebra.check_token_losses(algebra.LossCase(2, 5, 4, 0)),
    ),
    "masked loss": (
        losses, "masked_sft_loss",
        lambda: algebra.check_sft_loss(algebra.LossCase(2, 5, 4, 0), "sum"),
    ),
    "Gram of tokens": (
        interaction, "token_gram",
        lambda: weighing.check_gram_is_the_product_of_direct_gradients(SETUP, 3),
    ),
    "DPO": (
        losses, "masked_dpo_loss",
        lambda: algebra.check_masked_dpo_gradient(
            algebra.PairCase(algebra.LossCase(2, 5, 4, 0), algebra.LossCase(2, 4, 4, 0), 0.5)
        ),
    ),
}  # fmt: skip
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "times 1 + 1e-9": lambda x: x * SLIGHTLY,
    "NaN": lambda x: x * float("nan"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_rejects(name: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, function, check = PROPERTIES[name]
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
