"""Overrides of attention: any number, on any models, entered and left in any order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from alphatoken import Scorer
from alphatoken.errors import ModelError, UnsupportedError
from alphatoken.model.transformers import TransformersAdapter
from tests.integration.tiny_scorer import BATCH, inputs, scorer_for
from tests.property.architectures import BY_NAME

MISSING = object()


@cache
def adapter(index: int) -> TransformersAdapter:
    """Two models with one implementation of attention."""
    return TransformersAdapter(BY_NAME[("llama", "gemma3")[index]].build(index))


def entry(name: str) -> Any:
    return ALL_ATTENTION_FUNCTIONS._local_mapping.get(name, MISSING)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Nothing of a test is left behind, and nothing may be there at the start."""
    assert not ALL_ATTENTION_FUNCTIONS._local_mapping
    yield
    ALL_ATTENTION_FUNCTIONS._local_mapping.clear()


def scorer_of(index: int, estimator: str = "alphatoken") -> Scorer:
    return scorer_for(adapter(index).model, estimator)


def seen(scorer: Scorer, observed: Any) -> Tensor:
    logits = scorer.adapter.model(**inputs()).logits
    values: Tensor = observed.values(logits, BATCH["labels"]).total
    return values


def test_one_model_observed_twice_at_a_time() -> None:
    """Both contexts see the pass, and both value it as one alone does."""
    scorers = [scorer_of(0), scorer_of(0, "direct")]
    expected = [scorer.score(BATCH).total for scorer in scorers]
    with ExitStack() as first, ExitStack() as second:
        outer = first.enter_context(scorers[0].observe())
        inner = second.enter_context(scorers[1].observe())
        logits = adapter(0).model(**inputs()).logits
        found = [o.values(logits, BATCH["labels"]).total for o in (outer, inner)]
        for values, alone in zip(found, expected, strict=True):
            torch.testing.assert_close(values, alone, rtol=0, atol=1e-12)
        first.close()
        assert torch.equal(seen(scorers[1], inner), expected[1])


def test_a_second_thread_may_not_override_the_same_model() -> None:
    """Its passes would be taken for those of the first."""
    caught: list[BaseException] = []

    def work() -> None:
        try:
            with scorer_of(0).observe():
                pass
        except ModelError as error:
            caught.append(error)

    with scorer_of(0).observe() as observed:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        values = seen(scorer_of(0), observed)
    assert len(caught) == 1
    assert "another thread" in str(caught[0])
    torch.testing.assert_close(values, scorer_of(0).score(BATCH).total, rtol=0, atol=1e-12)
    with scorer_of(0).observe() as observed:  # and nothing is left of the refused one
        assert torch.equal(seen(scorer_of(0), observed), values)


def test_an_entry_that_a_user_puts_in_meanwhile_stays() -> None:
    """Around ours it works, in the place of ours it is noticed; it is never taken away."""
    scorer = scorer_of(0)
    expected = scorer.score(BATCH).total
    with scorer.observe() as observed:
        ours = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def around(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return ours(module, *args, **kwargs)

        ALL_ATTENTION_FUNCTIONS["sdpa"] = around
        assert torch.equal(seen(scorer, observed), expected)
        with scorer_of(1).observe() as other:
            seen(scorer_of(1), other)
        assert entry("sdpa") is around
    assert entry("sdpa") is around
    assert torch.equal(scorer.score(BATCH).total, expected)
    assert entry("sdpa") is around


def test_a_mask_that_a_users_function_does_not_name_is_read() -> None:
    """With padding on the left the weights would be others without it."""
    mask = torch.ones_like(BATCH["input_ids"])
    mask[0, :3] = 0
    labels = torch.where(mask == 0, -100, BATCH["labels"])
    labels[0, 3] = -100
    batch = {**BATCH, "attention_mask": mask, "labels": labels}
    expected = scorer_of(0).score(batch).total
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = lambda module, *args, **kwargs: plain(module, *args, **kwargs)
    try:
        found = scorer_of(0).score(batch).total
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("before", "layer"),
    [(False, None), (True, 1)],
    ids=["all layers, at once", "one layer, after a pass that was seen"],
)
def test_a_pass_that_goes_around_the_override_is_refused(before: bool, layer: int | None) -> None:
    """Also after a pass that did not, and if one scored layer does."""
    scorer, model = scorer_of(0), adapter(0).model
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with scorer.observe() as observed:
        if before:
            seen(scorer, observed)
        ours = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def instead(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            away = layer is None or module.layer_idx == layer
            return (plain if away else ours)(module, *args, **kwargs)

        ALL_ATTENTION_FUNCTIONS["sdpa"] = instead
        with pytest.raises(UnsupportedError, match="saw no attention call"):
            seen(scorer, observed)
    assert not any(module._forward_hooks for module in model.modules())


def test_checkpointing_paused_twice_is_as_before_in_any_order() -> None:
    blocks = adapter(0).layers()
    for flag in (True, False):
        for block in blocks:
            block.gradient_checkpointing = flag
        for order in ((0, 1), (1, 0)):
            contexts = [adapter(0).pause_checkpointing(blocks) for _ in range(2)]
            for context in contexts:
                context.__enter__()
            for place in order:
                assert not any(block.gradient_checkpointing for block in blocks)
                contexts[place].__exit__(None, None, None)
            assert all(block.gradient_checkpointing is flag for block in blocks)
    for block in blocks:
        del block.gradient_checkpointing
