"""Packed rows: documents that read each other are refused, on the forward that is valued."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from alphatoken.errors import InputError, ModelError
from tests.integration.tiny_scorer import scorer_for
from tests.property.architectures import BY_NAME, VOCABULARY

EACH = pytest.mark.parametrize("estimator", ["label", "path", "direct"])


def packed(lengths: tuple[int, ...] = (5, 3, 4)) -> dict[str, Tensor]:
    """One row of several documents, told apart by their positions."""
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (1, sum(lengths)), generator=drawn)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def numbered(lengths: tuple[int, ...] = (5, 3, 4)) -> dict[str, Tensor]:
    """The same row with documents numbered in the mask: 1 1 1 1 1 2 2 2 3 3 3 3."""
    batch = packed(lengths)
    batch.pop("position_ids")
    numbers = [torch.full((n,), k + 1) for k, n in enumerate(lengths)]
    return batch | {"attention_mask": torch.cat(numbers)[None]}


@EACH
def test_an_observed_forward_that_mixes_documents_is_refused(estimator: str) -> None:
    """transformers separates them by positions only where it keeps no cache."""
    model = BY_NAME["llama"].build(1).double().train()
    scorer, batch = scorer_for(model, estimator), packed()
    expected = scorer.score(batch).total  # runs without a cache: nothing mixes
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    state = torch.get_rng_state()
    for _ in range(2):  # refused once, refused again
        with scorer.observe() as observed:
            logits = model(**inputs).logits
            with pytest.raises(ModelError, match=r"documents see each other.*use_cache=False"):
                observed.values(logits, batch["labels"])
    with scorer.observe() as observed:
        logits = model(**inputs, use_cache=False).logits
        found = observed.values(logits, batch["labels"]).total
    torch.testing.assert_close(found, expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("attention", "estimator"), [("sdpa", "label"), ("eager", "path"), ("sdpa", "direct")]
)
def test_documents_that_a_mask_numbers_are_no_plain_row(attention: str, estimator: str) -> None:
    """Kernels that take the numbers for ones let documents see each other: refused, each time."""
    model = BY_NAME["llama"].build(1)
    model.set_attn_implementation(attention)
    scorer = scorer_for(model, estimator)
    for _ in range(2):
        with pytest.raises(ModelError, match="documents see each other"):
            scorer.score(numbered())
    first = numbered()
    first["labels"] = first["input_ids"]
    with pytest.raises(InputError, match="first token of a packed document"):
        scorer.score(first)


@pytest.mark.parametrize("mask", [[[0.0, -1e9]], [[1, -1]], [[1.0, 0.5]]])
def test_a_mask_that_is_none_is_refused(mask: list[list[float]]) -> None:
    batch = packed((2,)) | {"attention_mask": torch.tensor(mask)}
    with pytest.raises(InputError, match="attention_mask"):
        scorer_for(BY_NAME["llama"].build(1), "label").score(batch)
