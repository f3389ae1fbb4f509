"""Models and inputs that ended in a bare error: served, or refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, weight_norm

from alphatoken import AlphaTokenWarning, Scorer
from alphatoken.errors import CoverageError, InputError, UnsupportedError
from alphatoken.model.token_ids import embedding_rows
from tests.integration.tiny_scorer import (
    BATCH,
    model_of,
    observed_values,
    printed_by,
    scorer_for,
)
from tests.places import nightly

EACH = pytest.mark.parametrize("estimator", ["label", "path", "direct"])


def scorer_of(model: nn.Module, estimator: str = "label", **options: Any) -> Scorer:
    return scorer_for(model, estimator, **options)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.tanh()


NORMS: dict[str, Callable[..., Any]] = {
    "parametrized": lambda linear: parametrize.register_parametrization(
        linear, "weight", Doubled()
    ),
    "weight_norm": parametrizations.weight_norm,
    "the former weight_norm": weight_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("how", NORMS)
def test_a_weight_that_is_computed_is_followed_or_refused(how: str) -> None:
    model = model_of()
    NORMS[how](model.model.layers[-1].mlp.up_proj)
    with pytest.raises(CoverageError, match="parametrisation"):
        scorer_of(model, "path")
    assert scorer_of(model, "path", uncovered="skip").score(BATCH).total.any()
    scorer = scorer_of(model)
    if how == "parametrized":
        assert "model.layers.2.mlp.up_proj.parametrizations.weight.original" in scorer.parameters
        assert scorer.verify(BATCH).passed
    else:  # torch has no forward mode for its kernel
        with pytest.raises(UnsupportedError, match="_weight_norm_interface"):
            scorer_of(model, derivative="forward_mode").score(BATCH)
        with pytest.warns(AlphaTokenWarning, match="taken by finite differences"):
            values = scorer.score(BATCH)
        assert values.derivative == "central"


def test_rows_of_an_embedding_are_known_under_an_adapter() -> None:
    own = nn.Embedding(7, 2)
    for embedding, rows in (
        (own, 7),
        (SimpleNamespace(base_layer=own), 7),
        (nn.Linear(1, 1), None),
    ):
        model = SimpleNamespace(get_input_embeddings=lambda found=embedding: found)
        assert embedding_rows(model) == rows
    assert embedding_rows(SimpleNamespace()) is None


@EACH
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_labels_of_any_integers(dtype: torch.dtype, estimator: str) -> None:
    scorer = scorer_of(model_of(), estimator)
    expected = scorer.score(BATCH).total
    narrow = BATCH | {"labels": BATCH["labels"].to(dtype)}
    assert torch.equal(scorer.score(narrow).total, expected)
    torch.testing.assert_close(observed_values(scorer, narrow), expected)
    with pytest.raises(InputError, match="input_ids"):
        scorer.score(BATCH | {"input_ids": BATCH["input_ids"].to(torch.int16)})


@EACH
def test_weights_off_the_response_are_not_read(estimator: str) -> None:
    scorer = scorer_of(model_of(), estimator)
    mask = scorer.score(BATCH).mask
    weights = torch.ones(mask.shape, dtype=torch.float64)
    expected = scorer.score(BATCH, token_weights=weights).total
    wild = weights.masked_fill(~mask, float("nan"))
    assert torch.equal(scorer.score(BATCH, token_weights=wild).total, expected)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="token_weights are not finite"):
            scorer.score(BATCH, token_weights=weights.masked_fill(mask, bad))


def test_two_threads() -> None:
    """torch has one level of forward mode, and a model one set of hooks."""
    model = model_of()
    scorers = [scorer_of(model), scorer_of(model)]
    expected = [s.score(BATCH).total for s in scorers]
    found: dict[int, list[Tensor]] = {0: [], 1: []}

    def work(number: int) -> None:
        for _ in range(4):
            found[number].append(scorers[number].score(BATCH).total)

    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (0, 1):
        assert [torch.equal(x, expected[number]) for x in found[number]] == [True] * 4


# --- compiled models ------------------------------------------------------------------------------


def compiled(how: str) -> nn.Module:
    model = model_of()
    if how == "wrapper":
        return torch.compile(model, backend="eager")  # type: ignore[return-value]
    part = model if how == "model.compile()" else model.model.layers[-1]
    part.compile(backend="eager")
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("estimator", ["label", "direct"])
@pytest.mark.parametrize("how", ["wrapper", "model.compile()", "a layer"])
def test_compiled_models_are_scored_as_they_were_written(how: str, estimator: str) -> None:
    scorer = scorer_of(compiled(how), estimator)
    expected = scorer_of(model_of(), estimator).score(BATCH).total
    assert torch.equal(scorer.score(BATCH).total, expected)
    if how == "wrapper" or estimator != "label":
        with pytest.raises(UnsupportedError, match="compiled"), scorer.observe():
            pass


OBSERVED = """
from tests.integration import test_core_inputs as own
model = own.compiled("model.compile()")
scorer = own.scorer_of(model)
own.torch.testing.assert_close(own.observed_values(scorer), scorer.score(own.BATCH).total)
print("equal")
"""


@pytest.mark.slow
@nightly
def test_label_observes_a_model_that_was_compiled_in_place() -> None:
    # By itself, because Dynamo cannot trace the checks of shapes that the tests put in.
    assert printed_by(OBSERVED).endswith("equal\n")
