"""What every diagnostic stands on: rows drawn, values flat, models left as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from alphatoken import ConfigError, DataError, Scorer, ScorerConfig
from alphatoken.diagnose.subject import Subject
from alphatoken.errors import NumericalError
from alphatoken_lab.measure.losses import row_losses, summary
from tests.integration import subjects
from tests.integration.subjects import examples


def subject(**changes: Any) -> Subject:
    """Small in everything, and of topics alone, which are read faster than functions."""
    kept = {name: examples("topics", first, 4, 64) for name, first in (("a", 180), ("b", 300))}
    small = {
        "train_rows": 6, "validation_rows": 4, "length": 64, "retention": kept, "tokens": 300,
        "fisher_samples": 4, "tuning_steps": 4,
    }  # fmt: skip
    return subjects.subject("near", **small | changes)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_rows_are_drawn_up_to_a_number_of_tokens() -> None:
    found = subject(tokens=150)
    drawn = found.sample()
    count = sum(row.response_tokens for row in drawn)
    assert 0 < count <= 150
    assert drawn == found.sample()
    indices = [row.row.index for row in drawn]
    assert indices == sorted(indices)
    assert [row.row.index for row in subject(tokens=150, seed=5).sample()] != indices
    assert found.resized(tokens=10**9).sample() == list(found.train)
    assert len(found.resized(tokens=1).sample()) == 1  # a row is never cut


@pytest.mark.parametrize("estimator", ["alphatoken", "label"])
def test_flat_values_are_the_scorers(estimator: str) -> None:
    found = subject(train_rows=5)  # batches of 4: the last one is smaller
    rows = list(found.train)
    config = ScorerConfig(estimator=estimator)
    scorer = Scorer(found.model, found.batches(found.validation), None, config)
    flat = found.score(scorer, rows)
    assert len(flat["total"]) == sum(row.response_tokens for row in rows)
    split = {"adaptation_direct", "adaptation_causal", "stability_direct", "stability_causal"}
    assert (split <= flat.keys()) == (estimator == "alphatoken")
    for number, batch in enumerate(found.batches(rows)):
        values = scorer.score(batch)
        for place in range(len(batch["labels"])):
            mine = flat["row"] == 4 * number + place
            positions = flat["position"][mine]
            labels = np.array(rows[4 * number + place].labels)
            np.testing.assert_array_equal(positions, np.flatnonzero(labels[1:] != -100) + 1)
            np.testing.assert_array_equal(
                flat["total"][mine], values.total[place].double().numpy()[positions]
            )


def test_a_missing_second_model_is_made_once_from_a_copy() -> None:
    found = subject()
    before = weights(found.model)
    reference, after, said = found.before_and_after()
    assert reference is found.model
    assert same(found.model, before)
    assert not same(after, before)
    assert found.before_and_after()[1] is after
    assert "4 AdamW steps" in said
    assert all(p.grad is None for p in after.parameters())
    assert not after.training
    again = subject().before_and_after()[1]  # a function of rows, settings and seed
    assert same(again, weights(after))
    losses = [
        summary(row_losses(model, list(found.train), 16))["loss"] for model in (found.model, after)
    ]
    assert losses[1] < losses[0]


def test_fishers_are_fitted_at_the_reference_and_kept() -> None:
    found = subject()
    fisher = found.fitted_fisher()
    assert fisher.structure == "diagonal"
    assert found.fitted_fisher() is fisher
    assert found.fitted_fisher("kronecker").structure == "kronecker"
    more = found.fitted_fisher(samples=2, seed=3)
    assert more is not fisher
    assert more.metadata["samples"] == 2
    assert subject(fisher=fisher).fitted_fisher() is fisher
    now = {name: p for name, p in found.model.named_parameters() if name in fisher.names}
    assert max(fisher.drift(now).values()) == 0.0  # its reference is the model before


def test_other_sizes_share_what_was_made() -> None:
    found = subject()
    smaller = found.resized(tokens=100, objective_rows=2)
    assert (smaller.tokens, len(smaller.validation), found.tokens) == (100, 2, 300)
    assert all(any(row is one for one in found.validation) for row in smaller.validation)
    after = found.before_and_after()[1]
    assert smaller.before_and_after()[1] is after
    assert found.fitted_fisher() is smaller.fitted_fisher()
    other = found.resized(tuning_steps=3, fisher_samples=2)
    assert other.before_and_after()[1] is not after
    assert other.fitted_fisher().metadata["samples"] == 2
    assert found.fitted_fisher().metadata["samples"] == 4


def test_texts_join_to_the_row_and_retention_rows_are_the_first_of_each_set() -> None:
    found = subject()
    first = {name: list(rows[:3]) for name, rows in found.retention.items()}
    assert found.retention_rows(3) == first
    row = found.train[0]
    text = "".join(found.texts(row))
    assert row.row.response.split()[0] in text
    bare = subject(tokenizer=None)
    assert bare.texts(row)[0] == f"[{row.input_ids[0]}]"


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        *(
            (lambda name=name: subject(**{name: 0}), ConfigError, name)
            for name in ("batch_size", "tokens", "oracle_tokens", "fisher_samples")
        ),
        *(
            (lambda name=name: subject(**{name: []}), DataError, f"{name} rows have no response")
            for name in ("train", "validation")
        ),
        (
            lambda: subject(tuning_rate=1e30, tuning_steps=20).before_and_after(),
            NumericalError, "does not converge(.|\n)*--tuning_rate",
        ),
        (lambda: subject(retention={"empty": []}).retention_rows(), DataError, "empty"),
    ],
)  # fmt: skip
def test_what_no_diagnostic_can_use_is_refused(call: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        call()
