"""Masked losses against loops, cross-entropy and an independent DPO."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alphatoken import InputError
from alphatoken.model import batch
from alphatoken.oracle import gradients, preference
from alphatoken.select import losses
from tests.property import properties_algebra as claims
from tests.property.profiles import budget
from tests.property.properties import MODEL, forward_of
from tests.property.properties_algebra import LossCase, PairCase, loss_cases, pair_cases
from tests.property.strategies import Case, cases, make_case
from tests.property.tolerance import close

NORMALIZATIONS = st.sampled_from(["response", "kept", "sum"])


@given(loss_cases())
def test_token_losses_in_every_layout(case: LossCase) -> None:
    claims.check_token_losses(case)


@given(loss_cases(), st.sampled_from([1, 8, 2**22]))
def test_token_losses_to_second_order_in_blocks(case: LossCase, workspace: int) -> None:
    claims.check_token_losses_to_second_order(case, workspace)


def test_logits_of_other_positions_than_the_labels_are_refused() -> None:
    with pytest.raises(InputError, match="one entry a position"):
        batch.token_losses(torch.zeros(1, 3, 5), torch.zeros(1, 4, dtype=torch.long))


@given(loss_cases(), NORMALIZATIONS)
def test_the_masked_loss_and_its_gradient(case: LossCase, normalization: str) -> None:
    claims.check_sft_loss(case, normalization)


@given(loss_cases())
def test_keeping_everything_is_cross_entropy(case: LossCase) -> None:
    claims.check_full_mask_is_cross_entropy(case)


@given(pair_cases())
def test_unmasked_surrogate_has_the_gradient_of_dpo(case: PairCase) -> None:
    claims.check_unmasked_dpo_gradient(case)


@given(pair_cases())
def test_masks_act_on_the_update_and_not_on_the_coefficient(case: PairCase) -> None:
    claims.check_masked_dpo_gradient(case)


@given(pair_cases())
@budget(0.5)
def test_the_masked_logit_is_an_ablation(case: PairCase) -> None:
    claims.check_masked_logit_is_the_ablation(case)


@given(pair_cases())
@budget(0.5)
def test_the_masked_logit_at_the_reference(case: PairCase) -> None:
    claims.check_masked_logit_at_the_reference(case)


def test_the_masked_logit_refuses_a_reference_that_is_summed_already() -> None:
    token = torch.zeros(2, 5)
    with pytest.raises(InputError, match="each token"):
        losses.masked_dpo_loss(
            token, token, token.sum(-1), token.sum(-1), token, token, masked_logit=True
        )


@given(pair_cases())
@budget(0.5)
def test_the_coefficient(case: PairCase) -> None:
    claims.check_dpo_coefficient(case)


ROWS = st.lists(st.sampled_from(["pprr..", "prrrr.", "..pprr", "pprrrr"]), min_size=2, max_size=2)


@given(cases(train=ROWS.map(tuple), validations=ROWS.map(lambda r: (tuple(r),))), st.booleans())
@budget(0.1)
def test_dpo_through_a_model(case: Case, masked: bool) -> None:
    """Gradient of the surrogate by parameter: the oracle's, token by token."""
    model = case.model()
    chosen, rejected = case.batch, case.validation[0]
    reference = torch.linspace(-1, 1, 4, dtype=torch.float64).view(2, 2)
    pairs = preference.PreferencePairs(chosen, rejected, *reference)
    parameters = {n: p for n, p in model.named_parameters() if n.startswith("layers")}
    keep = []
    for n, labels in enumerate((chosen["labels"], rejected["labels"])):
        generator = torch.Generator().manual_seed(case.seed + n)
        random = torch.rand(labels.shape, generator=generator) < 0.5
        keep.append(random if masked else torch.ones_like(random))
    expected = preference.masked_dpo_gradient(model, forward_of(model), pairs, parameters, *keep)
    if not masked:
        whole = preference.dpo_gradient(model, forward_of(model), pairs, parameters)
        for name, g in whole.items():
            close(g, expected[name], g.abs().max() + 1e-3, MODEL, name="DPO oracles")
    each = []
    for one in (chosen, rejected):
        inputs = {k: v for k, v in one.items() if k != "labels"}
        each.append(batch.token_losses(model(**inputs), gradients.known_labels(one)))
    loss = losses.masked_dpo_loss(*each, *reference, *keep, beta=0.1)
    found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    for wanted, got in zip(expected.values(), found, strict=True):
        # A gradient is a sum over tokens of both signs; 1e-3 covers what cancelled altogether.
        close(got, wanted, wanted.abs().max() + 1e-3, MODEL, name="DPO through a model")


def test_num_tokens_replaces_the_batchs_own_count() -> None:
    case = LossCase(2, 5, 4, 0)
    logits, labels, keep = case.logits(), case.labels(), case.keep()
    total = losses.masked_sft_loss(logits, labels, keep, normalization="sum")
    for normalization in ("response", "kept"):
        for count in (7, torch.tensor(7)):
            found = losses.masked_sft_loss(
                logits, labels, keep, normalization=normalization, num_tokens=count
            )
            close(found, total / 7, total.abs(), claims.EXACT, name="num_tokens")


def test_accumulated_steps_with_a_global_count_equal_one_batch() -> None:
    case = LossCase(4, 6, 5, 1)
    logits, labels, keep = case.logits(), case.labels(), case.keep()
    count = int((labels[:, 1:] != -100).sum())
    whole = losses.masked_sft_loss(logits, labels, keep)
    parts = [
        losses.masked_sft_loss(logits[rows], labels[rows], keep[rows], num_tokens=count)
        for rows in (slice(0, 1), slice(1, 4))
    ]
    close(parts[0] + parts[1], whole, whole.abs(), claims.EXACT, name="accumulation")


def test_float_weights_are_constants() -> None:
    case = LossCase(1, 4, 3, 2)
    logits, labels = case.logits(), case.labels()
    weights = torch.rand(1, 4, dtype=torch.float64, requires_grad=True)
    loss = losses.masked_sft_loss(logits, labels, weights, normalization="sum")
    expected = (claims.loop_losses(logits, labels) * weights.detach()).sum()
    close(loss, expected, expected.abs(), claims.EXACT, name="float weights")
    assert torch.autograd.grad(loss, weights, allow_unused=True) == (None,)


def test_nothing_kept_is_zero_and_not_a_division_by_zero() -> None:
    case = LossCase(2, 4, 3, 3)
    logits, labels = case.logits(), case.labels()
    nothing = torch.zeros(labels.shape, dtype=torch.bool)
    for normalization in ("response", "kept", "sum"):
        loss = losses.masked_sft_loss(logits, labels, nothing, normalization=normalization)
        assert not bool(loss.detach().any())
        assert not bool(torch.autograd.grad(loss, logits)[0].any())


def test_wrong_shapes_and_names_are_refused() -> None:
    case = LossCase(2, 4, 3, 4)
    logits, labels, keep = case.logits(), case.labels(), case.keep()
    with pytest.raises(InputError, match="shape of labels"):
        losses.masked_sft_loss(logits, labels, keep[:, 1:])
    with pytest.raises(InputError, match="'response', 'kept' or 'sum'"):
        losses.masked_sft_loss(logits, labels, keep, normalization="mean")


def test_low_precision_logits_are_scored_in_float32() -> None:
    case = LossCase(2, 5, 4, 5)
    narrow, labels = case.logits().detach().to(torch.bfloat16), case.labels()
    found = batch.token_losses(narrow, labels)
    assert found.dtype == torch.float32
    assert torch.equal(found, batch.token_losses(narrow.float(), labels))


def test_model_losses_are_the_oracles() -> None:
    case = make_case(("pprrr", "..prr", "prpr."), (("pprr",),))
    model, data = case.model(), case.batch
    inputs = {k: v for k, v in data.items() if k != "labels"}
    logits = model(**inputs)
    expected = gradients.token_losses(logits, data["labels"])
    found = batch.token_losses(logits, data["labels"])
    close(found, expected, 1.0 + expected.abs(), claims.EXACT, name="losses of a model")
