"""Logits that are not what the head gave, and scores of another forward: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from alphatoken import masked_sft_loss
from alphatoken.direction.build import Ingredients
from alphatoken.errors import InputError, ModelError
from alphatoken.model import response_losses
from alphatoken.model.head import rounding_tolerance
from tests.integration.tiny_scorer import BATCH, inputs, model_of, scorer_for
from tests.property.architectures import VOCABULARY

# --- logits that are changed after the head -------------------------------------------------------


def replacing(change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        output.logits = change(output.logits)

    return hook


def cut_past(logits: Tensor) -> Tensor:
    """Bites at some positions only, and never at the last one."""
    factor = torch.ones(logits.shape[1], 1, dtype=logits.dtype)
    factor[:-1] = 3.0
    return logits.mul_(factor[-logits.shape[1] :])


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled in place": lambda z: z.mul_(3.0),
    "capped in place": lambda z: z.clamp_(-1.0, 1.0),
    "in place, not at the end": cut_past,
    "widened and capped": lambda z: z.double().clamp(-1.0, 1.0),
}


@pytest.mark.parametrize(
    ("change", "where", "estimator"),
    [
        ("scaled in place", "model", "label"),
        ("in place, not at the end", "model", "path"),
        ("widened and capped", "model", "label"),
        ("capped in place", "head", "path"),
    ],
)
def test_changed_logits_have_the_values_of_their_own_loss(
    change: str, where: str, estimator: str
) -> None:
    model = model_of()
    if where == "model":
        model.register_forward_hook(replacing(CHANGES[change]))
    else:
        model.lm_head.register_forward_hook(lambda module, args, z: CHANGES[change](z))
    scorer = scorer_for(model, estimator)
    found = scorer.verify(BATCH)  # of score and of observe, by one backward a token
    assert found.passed, str(found)
    # The training step that shares the observed pass is the plain one as well.
    keep = BATCH["labels"] != -100
    gradients = []
    for observes in (True, False):
        model.zero_grad()
        if observes:
            with scorer.observe() as observed:
                logits = model(**inputs(BATCH)).logits
                observed.values(logits, BATCH["labels"])
        else:
            logits = model(**inputs(BATCH)).logits
        masked_sft_loss(logits, BATCH["labels"], keep).backward()
        gradients.append(model.model.layers[-1].mlp.up_proj.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_a_change_that_comes_after_a_clean_pass_is_noticed() -> None:
    model = model_of()
    scorer = scorer_for(model, "label")
    scorer.score(BATCH)
    model.register_forward_hook(replacing(CHANGES["scaled in place"]))
    assert scorer.verify(BATCH).passed


def test_widened_logits_still_spare_the_logits_of_all_positions() -> None:
    """As mixed precision hands them on: another dtype of what the head gave."""
    model = model_of().float()
    expected = scorer_for(model, "path").score(BATCH).total
    model.register_forward_hook(replacing(lambda z: z.double()))
    found = scorer_for(model, "path").score(BATCH).total
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-5)
    assert model.lm_head not in response_losses._CHANGED
    # What is changed on the way is seen all the same.
    model.register_forward_hook(replacing(lambda z: z.clamp(-0.5, 0.5)))
    assert scorer_for(model, "path").verify(BATCH).passed
    assert model.lm_head in response_losses._CHANGED


# --- scores of another forward, or of none --------------------------------------------------------


def test_logits_that_differ_by_more_than_rounding_are_refused() -> None:
    model = model_of().eval()
    scorer = scorer_for(model, "label")
    limit = rounding_tolerance(torch.float64)
    with scorer.observe() as observed:
        logits = model(**inputs(BATCH)).logits
        assert observed.values(logits * (1 + 0.01 * limit), BATCH["labels"]).total.any()
        with pytest.raises(InputError, match="mean loss"):
            observed.values(logits * (1 + 20 * limit), BATCH["labels"])


@pytest.mark.parametrize(
    ("change", "estimator"),
    [(lambda z: z / 2.0, "label"), (lambda z: z.div_(2.0), "path")],
)
def test_logits_that_the_loop_changes_are_valued_as_changed_or_refused(
    change: Callable[[Tensor], Tensor], estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    scorer = scorer_for(model, estimator)
    hooked = model_of()
    hooked.register_forward_hook(replacing(lambda z: change(z.clone())))
    scorer_changed = scorer_for(hooked, estimator)
    known = scorer.direction.adaptation
    monkeypatch.setattr(Ingredients, "_gradient", lambda *_: known)
    with scorer.observe() as observed:
        logits = change(model(**inputs(BATCH)).logits)
        if estimator == "label":
            with pytest.raises(InputError, match="do not belong to the observed forward"):
                observed.values(logits, BATCH["labels"])
            return
        found = observed.values(logits, BATCH["labels"]).total
    expected = scorer_changed.score(BATCH).total
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", ["label", "direct"])
def test_values_after_the_context_and_without_a_forward_are_refused(estimator: str) -> None:
    model = model_of()
    scorer = scorer_for(model, estimator)
    with scorer.observe() as observed:
        with pytest.raises(ModelError, match="the model was not called"):
            observed.values(torch.zeros(2, 8, VOCABULARY), BATCH["labels"])
        if estimator != "label":  # which needs no graph
            with torch.no_grad():
                blind = model(**inputs(BATCH)).logits
            with pytest.raises(ModelError, match="Remedy: call the model"):
                observed.values(blind, BATCH["labels"])
        logits = model(**inputs(BATCH)).logits
    with pytest.raises(ModelError, match=r"observe\(\) has ended"):
        observed.values(logits, BATCH["labels"])
