"""Losses taken at the output head, against loops; and where a model's forward may use them."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from alphatoken import InputError
from alphatoken.model import head as heads
from alphatoken.model.batch import predicted_labels, token_losses
from alphatoken.model.head import is_plain_head, watched_head
from alphatoken.model.protocol import find_adapter
from alphatoken.model.response_losses import response_losses
from tests.property.architectures import ARCHITECTURES, BY_NAME, VOCABULARY
from tests.property.properties_head import (
    BATCH,
    HeadCase,
    built,
    caps,
    check_head_losses,
    check_head_tangents,
    check_logits_changed_in_place,
    check_losses_asked_twice,
    check_observed_label_values,
    check_own_forward,
    check_scores_of_another_forward,
    check_tangents_at_other_hidden_states,
    head_cases,
    observed,
)
from tests.property.strategies import make_batch
from tests.property.tolerance import close


@given(head_cases(), st.booleans())
def test_losses_and_their_gradients(case: HeadCase, known: bool) -> None:
    check_head_losses(case, known)


@given(head_cases(), st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_tangents(case: HeadCase, moved: tuple[bool, bool, bool]) -> None:
    check_head_tangents(case, moved)


def test_no_prediction_at_all() -> None:
    hidden = torch.randn(0, 3, requires_grad=True)
    weight = torch.randn(5, 3, requires_grad=True)
    losses = heads.head_losses(hidden, weight, None, torch.zeros(0, dtype=torch.long))
    losses.sum().backward()
    assert losses.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_sum_in_float32(dtype: torch.dtype) -> None:
    """The error of a long sum over the vocabulary is that of its terms, and does not grow."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(3000, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(3000, (20,), generator=generator)
    losses = heads.head_losses(hidden, weight, None, targets)
    assert losses.dtype == torch.float32
    found = torch.autograd.grad(losses.sum(), (hidden, weight))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = nn.functional.cross_entropy(wide[0] @ wide[1].mT, targets, reduction="sum")
    wanted = torch.autograd.grad(exact, wide)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        close((a.double() - b).norm(), 0.0, b.norm(), 1e-2, name="narrow gradient")


# --- a model's own forward ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [one.name for one in ARCHITECTURES])
def test_a_forward_of_our_own_gives_the_same_losses_and_gradients(name: str) -> None:
    check_own_forward(name)


def test_logits_changed_in_place() -> None:
    check_logits_changed_in_place("llama")


def test_scores_of_another_forward() -> None:
    check_scores_of_another_forward("llama")


def test_padding_on_the_left() -> None:
    adapter = find_adapter(BY_NAME["llama"].build(1))
    batch = make_batch(("..pprrprr", "....rrrrr"), vocabulary=VOCABULARY, seed=2)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    real = batch["attention_mask"]
    whole = token_losses(adapter.forward(inputs), batch["labels"], attention_mask=real)
    found = response_losses(adapter, inputs, predicted_labels(batch["labels"], real))
    close(found, whole.detach(), whole.detach().sum(), 1e-12, name="left padding")


def test_some_architectures_of_either_kind_are_tried() -> None:
    capped = [name for name in BY_NAME if caps(built(name))]
    assert capped
    assert len(capped) < len(BY_NAME) / 2


def test_a_label_outside_the_vocabulary_is_refused() -> None:
    adapter = find_adapter(BY_NAME["llama"].build(1))
    inputs = {k: v for k, v in BATCH.items() if k != "labels"}
    with pytest.raises(InputError, match="no token of the vocabulary"):
        response_losses(adapter, inputs, BATCH["labels"].clamp(max=99) * 0 + 99)


def test_heads_that_somebody_else_has_a_hand_in_are_left_alone() -> None:
    class Quantised(nn.Linear):
        pass

    head = nn.Linear(3, 5)
    assert is_plain_head(head)
    assert not is_plain_head(None)
    assert not is_plain_head(nn.Sequential(head))
    assert not is_plain_head(Quantised(3, 5))
    head.register_full_backward_hook(lambda *_: None)
    assert not is_plain_head(head)
    spread = nn.Linear(3, 5)
    spread.weight.ds_shape = (5, 3)  # type: ignore[attr-defined]  # ZeRO-3 leaves a flat rest of it
    assert not is_plain_head(spread)


# --- a forward that somebody else runs ------------------------------------------------------------


def test_losses_of_one_forward_are_shared_where_they_are_the_same() -> None:
    check_losses_asked_twice("llama")


def test_gradients_of_the_logits_themselves_stay_possible() -> None:
    model = BY_NAME["llama"].build(1)
    logits, use = observed(model)
    assert use is not None
    logits.retain_grad()
    assert watched_head(logits) is None
    token_losses(logits, BATCH["labels"]).sum().backward()
    assert logits.grad is not None
    logits, _ = observed(model)
    seen: list[Tensor] = []
    logits.register_hook(seen.append)
    token_losses(logits, BATCH["labels"]).sum().backward()
    assert len(seen) == 1


def test_nothing_is_remembered_without_a_graph_or_beyond_the_logits() -> None:
    model = BY_NAME["llama"].build(1)
    with torch.no_grad():
        assert observed(model)[1] is None
    gc.collect()
    before = len(heads._USES)
    logits, use = observed(model)
    assert use is not None
    token_losses(logits, BATCH["labels"]).sum().backward()
    assert len(heads._USES) == before + 1
    del logits, use
    gc.collect()
    assert len(heads._USES) == before


@pytest.mark.parametrize("parameters", ["linears", "all"])
@pytest.mark.parametrize("name", [one.name for one in ARCHITECTURES])
def test_label_values_take_the_error_that_training_shares(name: str, parameters: str) -> None:
    check_observed_label_values(name, parameters)


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_a_call_on_other_hidden_states_is_not_believed(name: str) -> None:
    check_tangents_at_other_hidden_states(name)


def test_capped_logits_are_not_the_heads() -> None:
    model = next(model for model in map(built, BY_NAME) if caps(model))
    assert observed(model)[1] is None
