"""Labels to positions, padding and packing, preference pairs, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alphatoken import InputError, PreferenceBatch
from alphatoken.model import batch
from alphatoken.oracle import gradients, influence
from alphatoken.select import losses
from tests.property.strategies import MODES, make_batch, rows
from tests.property.test_losses import LossCase, loss_cases

IDS = torch.arange(1, 11).view(2, 5)


@given(loss_cases())
def test_the_mask_is_the_oracles_list_of_response_tokens(case: LossCase) -> None:
    labels = case.labels()
    labels[:, 0] = 1  # a first token is never predicted, labelled or not
    before = labels.clone()
    mask = batch.label_mask(labels)
    assert mask.nonzero().tolist() == [list(t) for t in gradients.response_tokens(labels)]
    assert torch.equal(labels, before)


@given(loss_cases())
def test_the_two_shifts(case: LossCase) -> None:
    by_position = case.numbers(case.rows, case.length)
    by_token = batch.to_token_index(by_position)
    assert torch.equal(by_token, influence.to_token_index(by_position))
    assert not bool(by_token[:, 0].any())
    back = batch.to_label_position(by_token)
    assert torch.equal(back[:, :-1], by_position[:, :-1])
    assert not bool(back[:, -1].any())


@given(st.sampled_from(MODES).flatmap(rows), st.booleans())
def test_reading_counts_tokens_and_positions_and_finds_documents(
    lines: tuple[str, ...], accelerator: bool
) -> None:
    """Of either kind of device.

    Proves: what a batch is read as (exact), against its letters, one by one.
    """
    data = make_batch(lines, vocabulary=7, seed=0)
    with mock.patch.object(batch, "on_host", return_value=not accelerator):
        found = batch.read_batch(data)
        places = batch.response_places(found.labels)
    assert places.tolist() == found.mask.flatten().nonzero().flatten().tolist()
    plain = [line.replace("|", "") for line in lines]
    predicted = [a != "." and b == "r" for line in plain for a, b in pairwise(line)]
    assert found.response_tokens == sum(predicted)
    assert torch.equal(found.labels, gradients.known_labels(data))
    assert found.positions == sum(c != "." for line in plain for c in line)
    assert "labels" not in found.inputs
    assert found.inputs["input_ids"] is data["input_ids"]
    starts = found.document_starts
    if any("|" in line for line in lines):
        assert starts is not None
        for b, line in enumerate(lines):
            pieces = line.split("|")
            expected = [sum(map(len, pieces[:n])) for n in range(len(pieces))]
            assert starts[b].nonzero().flatten().tolist() == expected
    else:
        assert starts is None


@pytest.mark.parametrize("accelerator", [False, True])
def test_places_follow_labels_that_are_written_to(accelerator: bool) -> None:
    """Places and bounds that a device keeps with the labels, until these change.

    Proves: places of response tokens (exact), against the labels as they are.
    """
    labels = torch.tensor([[-100, 3, -100, 4]])
    logits = torch.randn(1, 4, 7, dtype=torch.float64)
    with mock.patch.object(batch, "on_host", return_value=not accelerator):
        assert batch.response_places(labels).tolist() == [1, 3]
        batch.token_losses(logits, labels)
        labels[0, 2] = 6
        assert batch.response_places(labels).tolist() == [1, 2, 3]
        expected = gradients.token_losses(logits, labels)
        torch.testing.assert_close(batch.token_losses(logits, labels), expected)
        labels[0, 1] = 7
        with pytest.raises(InputError, match="label of the batch is no token.*7 at row 0, token 1"):
            batch.token_losses(logits, labels)
        with torch.inference_mode():
            assert batch.response_places(labels.clone()).tolist() == [1, 2, 3]


WRITERS = {
    "numpy": lambda labels, new: np.copyto(labels.numpy(), new.numpy()),
    "data": lambda labels, new: labels.data.copy_(new),
}


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
def test_places_follow_writes_that_torch_does_not_count(writer: str, accelerator: bool) -> None:
    """On the host at once; on a device, where a look would wait, when the batch is read again.

    Proves: places of response tokens after such a write (exact), against the labels as they are.
    """
    labels = torch.tensor([[-100, 3, -100, 4, -100]])
    logits = torch.randn(1, 5, 7, dtype=torch.float64)
    data = {"input_ids": torch.ones_like(labels), "labels": labels}
    written = [-100, 3, 6, 4, 5], [-100, 3, 6, -100, 5], [-100, -100, -100, 2, -100]
    for new in written:
        with mock.patch.object(batch, "on_host", return_value=not accelerator):
            batch.token_losses(logits, labels)
            WRITERS[writer](labels, torch.tensor([new]))
            found = batch.read_batch(data) if accelerator else None
            losses_ = batch.token_losses(logits, labels)
        torch.testing.assert_close(losses_, gradients.token_losses(logits, labels))
        assert found is None or found.response_tokens == sum(n >= 0 for n in new)
    outside = torch.tensor([[-100, 1, 2, 3, 7]])
    WRITERS[writer](labels, outside)
    if not accelerator:
        with pytest.raises(InputError, match="no token of the vocabulary.*7 at row 0, token 4"):
            batch.token_losses(logits, labels)


def test_a_label_after_padding_has_neither_loss_nor_weight() -> None:
    """By the mask in the batch, for losses too; a mask of pairs says nothing about it."""
    data = make_batch(("..rrr", "rprrr"), vocabulary=7, seed=0)
    real, labels = data["attention_mask"], data["labels"].clone()
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    expected = gradients.token_losses(logits, gradients.known_labels(data))
    assert float(expected[0, 2]) == 0.0
    for found in (
        batch.token_losses(logits, batch.predicted_labels(labels, real)),
        batch.token_losses(logits, batch.read_batch(data).labels),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    keep = torch.ones_like(labels)
    mean = losses.masked_sft_loss(logits, labels, keep, attention_mask=real)
    torch.testing.assert_close(mean, expected.sum() / 5)
    assert torch.equal(data["labels"], labels)
    pairs = real[:, None, None, :] * torch.ones(5, 5, dtype=torch.long).tril()
    for other in (None, pairs):
        assert batch.predicted_labels(labels, other) is labels


@pytest.mark.parametrize(("row", "index"), [(0, 0), (0, 1), (1, 4)])
def test_a_label_on_padding_is_refused_on_either_side(row: int, index: int) -> None:
    """transformers would train on it; it is neither counted here nor dropped without a word."""
    data = make_batch(("..rrr", "rprr."), vocabulary=7, seed=0)
    ids, real = data["input_ids"], data["attention_mask"]
    labels = data["labels"].clone()
    labels[row, index] = 3
    found = f"label 3 at row {row}, token {index}.*labels.masked_fill"
    logits, keep = torch.zeros(2, 5, 7), torch.ones_like(labels)
    for mask in (real, real.bool()):
        with pytest.raises(InputError, match=f"a label of the validation batch lies.*{found}"):
            batch.read_batch(data | {"labels": labels}, role="validation batch")
        with pytest.raises(InputError, match=found):
            losses.masked_sft_loss(logits, labels, keep, attention_mask=mask)
        remedied = labels.masked_fill(mask == 0, -100)
        assert torch.equal(batch.read_batch(data | {"labels": remedied}).mask, real_mask(data))
    assert torch.equal(batch.labels_of_all(ids, None), ids)
    every = batch.label_mask(batch.labels_of_all(ids, real))
    assert every.int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 0]]


def real_mask(data: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch.label_mask(gradients.known_labels(data))


def test_one_row_of_position_ids_serves_all_rows() -> None:
    data = {"input_ids": IDS, "labels": IDS.clone(), "position_ids": torch.arange(5)[None]}
    assert batch.read_batch(data).document_starts is None
    data["position_ids"] = torch.tensor([[0, 1, 0, 1, 2]])
    data["labels"][:, 2] = -100
    starts = batch.read_batch(data).document_starts
    assert starts is not None
    assert starts.tolist() == [[True, False, True, False, False]] * 2


def test_left_padding_is_no_document() -> None:
    data = make_batch(("..pprr", "pprrrr"), vocabulary=7, seed=0, explicit_positions=True)
    assert batch.read_batch(data).document_starts is None


def test_preference_pairs_are_checked_once() -> None:
    data = {"input_ids": IDS, "labels": IDS}
    two, three = torch.zeros(2), torch.zeros(3)
    pairs = PreferenceBatch(data, data, two, two)
    assert [(b is data, sign) for b, _, sign in pairs.branches()] == [(True, 1), (True, -1)]
    with pytest.raises(InputError, match=r"one row a pair.*\[2, 3\]"):
        PreferenceBatch(data, data, two, three)
    with pytest.raises(InputError, match="must be one of tokens, pairs"):
        PreferenceBatch(data, data, two, two, normalization="mean")
