"""Masked losses against loops, cross-entropy and an independent DPO."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from alphatoken import InputError
from alphatoken.model import batch, vocabulary
from alphatoken.oracle import preference
from alphatoken.select import losses
from tests.property.profiles import budget
from tests.property.setups import CONTRACTION
from tests.property.strategies import SEEDS
from tests.property.tolerance import close


@dataclass(frozen=True)
class LossCase:
    """Logits of a batch, labels with holes, and a mask to keep."""

    rows: int
    length: int
    vocabulary: int
    seed: int

    def numbers(self, *shape: int, salt: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2**16 * salt)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def labels(self, salt: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2**16 * salt)
        ids = torch.randint(self.vocabulary, (self.rows, self.length), generator=generator)
        hole = torch.rand(ids.shape, generator=generator) < 0.4
        hole[:, 1] = False  # every row has a response
        return ids.masked_fill(hole, -100)

    def logits(self, salt: int = 2) -> Tensor:
        return self.numbers(self.rows, self.length, self.vocabulary, salt=salt).requires_grad_()

    def keep(self, salt: int = 3) -> Tensor:
        return self.numbers(self.rows, self.length, salt=salt) > 0


def loss_cases() -> st.SearchStrategy[LossCase]:
    return st.builds(
        LossCase,
        rows=st.integers(1, 3),
        length=st.integers(2, 7),
        vocabulary=st.integers(2, 6),
        seed=SEEDS,
    )


def loop_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Token losses by a loop: index i from the logits at i - 1."""
    rows = []
    for b in range(labels.shape[0]):
        row = [logits.new_zeros(())]
        for i in range(1, labels.shape[1]):
            label = int(labels[b, i])
            if label == -100:
                row.append(logits.new_zeros(()))
            else:
                row.append(logits[b, i - 1].logsumexp(-1) - logits[b, i - 1, label])
        rows.append(torch.stack(row))
    return torch.stack(rows)


@dataclass(frozen=True)
class PairCase:
    """Logits of both branches of preference pairs, as leaves, with beta and references."""

    chosen: LossCase
    rejected: LossCase
    beta: float

    def pairs(self) -> preference.PreferencePairs:
        return preference.PreferencePairs(
            {"labels": self.chosen.labels()},
            {"labels": self.rejected.labels(salt=7)},
            self.chosen.numbers(self.chosen.rows, salt=8),
            self.chosen.numbers(self.chosen.rows, salt=9),
        )

    def logits(self) -> tuple[Tensor, Tensor]:
        return self.chosen.logits(), self.rejected.logits(salt=10)

    def reference_logits(self) -> tuple[Tensor, Tensor]:
        chosen, rejected = self.chosen.logits(salt=12), self.rejected.logits(salt=13)
        return chosen.detach(), rejected.detach()


@st.composite
def pair_cases(draw: st.DrawFn) -> PairCase:
    chosen = draw(loss_cases())
    rejected = LossCase(chosen.rows, draw(st.integers(2, 7)), chosen.vocabulary, chosen.seed)
    return PairCase(chosen, rejected, draw(st.sampled_from([0.1, 0.5, 2.0])))


def surrogate(case: PairCase, logits: tuple[Tensor, Tensor], keep: tuple[Tensor, Tensor]) -> Tensor:
    pairs = case.pairs()
    branches = (pairs.chosen["labels"], pairs.rejected["labels"])
    each = [batch.token_losses(x, y) for x, y in zip(logits, branches, strict=True)]
    return losses.masked_dpo_loss(
        *each, pairs.reference_chosen, pairs.reference_rejected, *keep, beta=case.beta
    )


def masks_of(case: PairCase) -> tuple[Tensor, Tensor]:
    return case.chosen.keep(), case.rejected.keep(salt=11)


NORMALIZATIONS = st.sampled_from(["response", "kept", "sum"])


@given(loss_cases())
def test_token_losses(case: LossCase) -> None:
    """Index i holds -log pi(z_i | z_<i); logits and both layouts of log-probabilities agree.

    Proves: token losses (exact), against loops.
    """
    logits, labels = case.logits(), case.labels()
    expected = loop_losses(logits, labels)
    actual = batch.token_losses(logits, labels)
    scale = 1.0 + logits.abs().amax()
    close(actual, expected, scale, CONTRACTION, name="token losses")
    assert torch.equal(batch.token_losses(-actual, labels), actual)
    assert torch.equal(batch.token_losses(-actual[:, 1:], labels), actual)


@given(loss_cases(), st.sampled_from([1, 8, 2**22]))
def test_gradient_and_tangent_of_token_losses(case: LossCase, workspace: int) -> None:
    """In blocks of any size: gradient and tangent are those of plain loops.

    Proves: gradient and tangent of token losses (exact), against autograd through loops.
    """
    logits, labels = case.logits(), case.labels()
    weights, along = case.numbers(*labels.shape, salt=6), case.numbers(*logits.shape, salt=7)
    expected = (loop_losses(logits, labels) * weights).sum()
    slope = torch.autograd.grad(expected, logits)[0]
    scale = (weights.abs().sum() + 1.0) * (along.abs().sum() + 1.0)
    with mock.patch.object(vocabulary, "_WORKSPACE", workspace):
        loss = (batch.token_losses(logits, labels) * weights).sum()
        gradient = torch.autograd.grad(loss, logits)[0]
        with forward_ad.dual_level():
            dual = batch.token_losses(forward_ad.make_dual(logits.detach(), along), labels)
            tangent = forward_ad.unpack_dual(dual).tangent
    assert tangent is not None
    for name, actual, wanted in (
        ("gradient", gradient, slope),
        ("tangent", (tangent * weights).sum(), (slope * along).sum()),
    ):
        close(actual, wanted.detach(), scale, CONTRACTION, name=f"token losses, {name}")


@given(loss_cases(), NORMALIZATIONS)
def test_sft_loss(case: LossCase, normalization: str) -> None:
    """Sum of kept losses over the normaliser, and its gradient: only kept tokens push.

    Proves: eq. sft_masked_loss (exact), against loops.
    """
    logits, labels, keep = case.logits(), case.labels(), case.keep()
    actual = losses.masked_sft_loss(logits, labels, keep, normalization=normalization)
    each = loop_losses(logits, labels)
    mask = labels != -100
    mask[:, 0] = False
    count = {"sum": 1, "response": int(mask.sum()), "kept": int((mask & keep).sum())}[normalization]
    expected = each[keep & mask].sum() / max(count, 1)
    scale = each.detach().abs().sum() + 1.0
    close(actual, expected, scale, CONTRACTION, name=f"masked loss, {normalization}")
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (actual, expected)]
    close(*gradients, 1.0, CONTRACTION, name=f"masked loss, gradient, {normalization}")


@given(loss_cases())
def test_full_mask_is_cross_entropy(case: LossCase) -> None:
    """keep = mask under "response": transformers' own loss.

    Proves: full mask is cross entropy (exact), against transformers' loss.
    """
    logits, labels = case.logits(), case.labels()
    actual = losses.masked_sft_loss(logits, labels, labels != -100)
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    close(actual, expected, 1.0 + expected.abs(), CONTRACTION, name="cross-entropy")


@given(pair_cases())
def test_unmasked_dpo_gradient(case: PairCase) -> None:
    """All masks 1: exactly the gradient of mean -log sigma(s).

    Proves: unmasked dpo gradient (exact), against ``dpo_loss``.
    """
    logits = case.logits()
    whole = tuple(torch.ones_like(m) for m in masks_of(case))
    expected = torch.autograd.grad(preference.dpo_loss(*logits, case.pairs(), case.beta), logits)
    actual = torch.autograd.grad(surrogate(case, logits, whole), logits)
    for got, wanted in zip(actual, expected, strict=True):
        close(got, wanted, case.beta, CONTRACTION, name="DPO, unmasked gradient")


@given(pair_cases())
def test_masked_dpo_gradient(case: PairCase) -> None:
    """omega from the unmasked logit, + on kept chosen, - on kept rejected, mean over pairs.

    Proves: eq. dpo_masked_loss (exact), against ``dpo_token_errors``.
    """
    logits, keep, pairs = case.logits(), masks_of(case), case.pairs()
    errors = preference.dpo_token_errors(*logits, pairs, case.beta)
    actual = torch.autograd.grad(surrogate(case, logits, keep), logits)
    for got, error, kept in zip(actual, errors, keep, strict=True):
        # keep holds token indices; the error of token i sits at position i - 1.
        at_position = torch.zeros(kept.shape, dtype=torch.float64)
        at_position[:, :-1] = kept[:, 1:].double()
        expected = error.detach() * at_position.unsqueeze(-1) / case.chosen.rows
        close(got, expected, case.beta, CONTRACTION, name="DPO, masked gradient")


@given(pair_cases())
@budget(0.5)
def test_masked_logit_is_the_ablation(case: PairCase) -> None:
    """Omega of the kept tokens' log-ratios, detached, by the oracle.

    Proves: masked logit is the ablation (exact), against ``masked_dpo_omega``.
    """
    logits, reference, pairs = case.logits(), case.reference_logits(), case.pairs()
    keep, labels = masks_of(case), (pairs.chosen["labels"], pairs.rejected["labels"])
    log_p = [-batch.token_losses(x, y) for x, y in zip(logits, labels, strict=True)]
    of_reference = [-batch.token_losses(x, y) for x, y in zip(reference, labels, strict=True)]
    actual = losses.masked_dpo_coefficient(*log_p, *of_reference, *keep, case.beta)
    assert not actual.requires_grad
    expected = preference.masked_dpo_omega(logits, reference, pairs, keep, case.beta)
    close(actual, expected.detach(), case.beta, CONTRACTION, name="omega of the masked logit")


@given(pair_cases())
@budget(0.5)
def test_masked_logit_at_the_reference(case: PairCase) -> None:
    """masked_logit with policy = reference: omega is beta / 2 for any mask and any lengths.

    Proves: masked logit at the reference (exact), against ``masked_dpo_omega``.
    """
    logits, pairs, keep = case.logits(), case.pairs(), masks_of(case)
    half = torch.full((case.chosen.rows,), case.beta / 2, dtype=torch.float64)
    assert torch.equal(preference.masked_dpo_omega(logits, logits, pairs, keep, case.beta), half)
    labels = (pairs.chosen["labels"], pairs.rejected["labels"])
    log_p = [-batch.token_losses(x, y).detach() for x, y in zip(logits, labels, strict=True)]
    result = losses.masked_dpo_coefficient(*log_p, *log_p, *keep, case.beta)
    close(result, half, case.beta, CONTRACTION, name="omega at the reference")


@given(pair_cases())
@budget(0.5)
def test_dpo_coefficient(case: PairCase) -> None:
    """omega = beta sigma(-s), detached, by the oracle.

    Proves: eq. dpo_masked_loss (exact), against ``dpo_omega``, ``dpo_margin``.
    """
    logits, pairs = case.logits(), case.pairs()
    margin = preference.dpo_margin(*logits, pairs, case.beta)
    each = [
        preference.branch_log_probabilities(x, b["labels"])
        for x, b in zip(logits, (pairs.chosen, pairs.rejected), strict=True)
    ]
    result = losses.dpo_coefficient(
        *each, pairs.reference_chosen, pairs.reference_rejected, case.beta
    )
    assert not result.requires_grad
    close(result, preference.dpo_omega(margin, case.beta), case.beta, CONTRACTION, name="omega")


def test_num_tokens_replaces_the_batchs_own_count() -> None:
    case = LossCase(2, 5, 4, 0)
    logits, labels, keep = case.logits(), case.labels(), case.keep()
    total = losses.masked_sft_loss(logits, labels, keep, normalization="sum")
    for normalization in ("response", "kept"):
        for count in (7, torch.tensor(7)):
            result = losses.masked_sft_loss(
                logits, labels, keep, normalization=normalization, num_tokens=count
            )
            close(result, total / 7, total.abs(), CONTRACTION, name="num_tokens")


def test_float_weights_are_constants() -> None:
    case = LossCase(1, 4, 3, 2)
    logits, labels = case.logits(), case.labels()
    weights = torch.rand(1, 4, dtype=torch.float64, requires_grad=True)
    loss = losses.masked_sft_loss(logits, labels, weights, normalization="sum")
    expected = (loop_losses(logits, labels) * weights.detach()).sum()
    close(loss, expected, expected.abs(), CONTRACTION, name="float weights")
    assert torch.autograd.grad(loss, weights, allow_unused=True) == (None,)


@given(loss_cases(), st.sampled_from([1e-8, 0.01, 0.1, 3.0]))
def test_the_kept_divisor_is_the_sum_of_the_weights_however_small(
    case: LossCase, size: float
) -> None:
    """A factor on all weights divides out: the loss stays a mean.

    Proves: masked loss by float weights, divided by their sum (exact), against loops.
    """
    logits, labels = case.logits(), case.labels()
    generator = torch.Generator().manual_seed(case.seed)
    weights = size * torch.rand(labels.shape, generator=generator, dtype=torch.float64)
    actual = losses.masked_sft_loss(logits, labels, weights, normalization="kept")
    each, mask = loop_losses(logits, labels), labels != -100
    mask[:, 0] = False
    total = weights[mask].sum()
    expected = (each * weights)[mask].sum() / total if bool(mask.any()) else 0.0 * each.sum()
    close(actual, expected, each.detach().abs().sum() + 1.0, CONTRACTION, name="kept loss")


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
    with pytest.raises(InputError, match="one entry a position"):
        batch.token_losses(torch.zeros(1, 3, 5), torch.zeros(1, 4, dtype=torch.long))


def test_low_precision_logits_are_scored_in_float32() -> None:
    case = LossCase(2, 5, 4, 5)
    narrow, labels = case.logits().detach().to(torch.bfloat16), case.labels()
    result = batch.token_losses(narrow, labels)
    assert result.dtype == torch.float32
    assert torch.equal(result, batch.token_losses(narrow.float(), labels))
