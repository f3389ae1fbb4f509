"""Logits that are not what the head gave, and scores of another forward: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from alphatoken import masked_sft_loss
from alphatoken.errors import InputError, ModelError
from alphatoken.model import forward
from tests.integration.tiny_scorer import BATCH, ESTIMATORS, inputs, model_of, scorer_for
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
    result = scorer.verify(BATCH)  # of score and of observe, by one backward a token
    assert result.passed, str(result)
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
    actual = scorer_for(model, "path").score(BATCH).total
    torch.testing.assert_close(actual.float(), expected, rtol=1e-4, atol=1e-5)
    assert model.lm_head not in forward._CHANGED
    # What is changed on the way is seen all the same.
    model.register_forward_hook(replacing(lambda z: z.clamp(-0.5, 0.5)))
    assert scorer_for(model, "path").verify(BATCH).passed
    assert model.lm_head in forward._CHANGED


# --- scores of another forward, or of none --------------------------------------------------------


def log_probs_of(logits: Tensor) -> Tensor:
    """Log-probabilities (b, t - 1) of the batch's tokens, as a training loop takes them."""
    tokens = BATCH["input_ids"][:, 1:].unsqueeze(-1)
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens).squeeze(-1)


def forbidding(logits: Tensor) -> Tensor:
    """One word that is no label gets no probability."""
    unused = next(v for v in range(VOCABULARY) if not bool((BATCH["labels"] == v).any()))
    return logits.index_fill(-1, torch.tensor([unused]), -torch.inf)


def scaled_without_gradients(logits: Tensor) -> Tensor:
    with torch.no_grad():
        return logits.mul_(0.97)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a temperature": lambda z: z / 2.0,
    "hardly scaled": lambda z: z * (1 + 1e-5),
    "scaled in place": lambda z: z.mul_(0.97),
    "scaled without gradients": scaled_without_gradients,
    "scaled through another name": lambda z: (z.detach().mul_(0.97), z)[1],
    "a cast, scaled without gradients": lambda z: scaled_without_gradients(z.float()),
    "a view, whose base is scaled": lambda z: (z[:, :], scaled_without_gradients(z))[0],
    "one word forbidden": forbidding,
    "log-probabilities at a temperature": lambda z: log_probs_of(z * 0.97),
}
"""What is not the model's output any more."""
THE_SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "narrower": lambda z: z.float(),
    "another view": lambda z: z[:, :, None].squeeze(2).clone(),
    "sums that change nothing": lambda z: z + 0.0,
    "log-probabilities": log_probs_of,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_scores_are_those_that_the_model_returned_or_refused(name: str) -> None:
    """One rule for all estimators: what was observed is what is valued."""
    model = model_of().eval()
    scorer = scorer_for(model, **ESTIMATORS[name])
    expected = scorer.score(BATCH)
    for change in OTHERS.values():
        with scorer.observe() as observed:
            logits = model(**inputs(BATCH)).logits
            with pytest.raises(InputError, match="do not belong to the observed forward"):
                observed.values(change(logits), BATCH["labels"])
    for same in THE_SAME.values():
        with scorer.observe() as observed:
            logits = model(**inputs(BATCH)).logits
            values = observed.values(same(logits), BATCH["labels"])
        away = (values.total - expected.total).norm() / expected.total.norm()
        assert float(away) <= 3 * (values.error + expected.error) + 1e-4


@pytest.mark.parametrize("name", ESTIMATORS)
def test_scores_of_fewer_words_are_refused(name: str) -> None:
    """Their normaliser is another one, though each number is the model's."""
    model = model_of().eval()
    scorer = scorer_for(model, **ESTIMATORS[name])
    labels = BATCH["labels"].masked_fill(BATCH["labels"] == VOCABULARY - 1, -100)
    with scorer.observe() as observed:
        logits = model(**inputs(BATCH)).logits
        with pytest.raises(InputError, match="do not belong to the observed forward"):
            observed.values(logits[..., :-1], labels)


def test_a_walk_is_no_difference_of_rounded_losses() -> None:
    """Scores that the user rounds are seen to be the forward's, and its losses are taken anew."""
    model = model_of().eval()
    scorer = scorer_for(model, "walk", layers="all", walk_steps=1)
    expected = scorer.score(BATCH).total
    for narrow in (torch.float32, torch.bfloat16):
        with scorer.observe() as observed:
            logits = model(**inputs(BATCH)).logits
            actual = observed.values(logits.to(narrow), BATCH["labels"]).total
        assert float((actual - expected).norm()) <= 1e-5 * float(expected.norm())


def test_scores_whose_output_is_gone_are_compared_with_another_forward() -> None:
    """With dropout there is none to compare with."""
    model = model_of().eval()
    scorer = scorer_for(model, "path")
    with scorer.observe() as observed:
        scores = log_probs_of(model(**inputs(BATCH)).logits)
        assert observed.values(scores, BATCH["labels"]).total.any()
        with pytest.raises(InputError, match="mean loss"):
            observed.values(1.02 * scores, BATCH["labels"])
        model.train()
        model.model.layers[0].self_attn.attention_dropout = 0.1
        with pytest.raises(InputError, match="forward with dropout"):
            observed.values(1.02 * scores, BATCH["labels"])


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
