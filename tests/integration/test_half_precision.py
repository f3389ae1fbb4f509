"""Models whose activations float16 cannot hold: refused by the number format, which mends it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from alphatoken import Scorer, ScorerConfig
from alphatoken.errors import AlphaTokenError, CoverageError
from alphatoken.support.precision import float16_named
from tests.integration import tiny_training as tiny

OTHERS = ["direct", "path", "paper_literal"]
ESTIMATORS = ["alphatoken", "label", *(pytest.param(e, marks=pytest.mark.slow) for e in OTHERS)]
IDS = torch.randint(4, 40, (2, 12), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


def massive(dtype: torch.dtype, scale: float = 3e4) -> Any:
    """A model with activations of some 10,000 behind its first layer, as large models have them.

    At 3e4 all losses are finite, and gradients are lost; at 1e5 activations are.
    """
    model = tiny.model(layers=4)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight *= scale
        model.model.layers[0].mlp.up_proj.weight *= 300
    return model.to(dtype).eval()


@pytest.mark.parametrize("scale", [3e4, 1e5])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_float16_is_named_and_no_estimator_sends_to_another(estimator: str, scale: float) -> None:
    config = ScorerConfig(estimator, layers=2)
    with pytest.raises(AlphaTokenError, match="float16") as error:
        Scorer(massive(torch.float16, scale), BATCH, config=config).score(BATCH)
    assert "--dtype bfloat16" in error.value.remedy
    assert "dtype=torch.bfloat16" in error.value.remedy
    assert "estimator" not in error.value.remedy
    values = Scorer(massive(torch.bfloat16, scale), BATCH, config=config).score(BATCH)
    assert bool(values.total.isfinite().all()), "the remedy works"


@pytest.mark.parametrize("estimator", ["alphatoken", "label"])
def test_float16_is_named_on_an_observed_pass(estimator: str) -> None:
    model = massive(torch.float16)
    scorer = Scorer(model, BATCH, config=ScorerConfig(estimator, layers=2))
    with (
        pytest.raises(AlphaTokenError, match="float16.*--dtype bfloat16"),
        scorer.observe() as observed,
    ):
        observed.values(model(**BATCH).logits, IDS)


def test_other_formats_and_other_errors_keep_their_words() -> None:
    for dtype, kinds in ((torch.bfloat16, (CoverageError,)), (torch.float16, ())):
        model = torch.nn.Linear(2, 2, dtype=dtype)
        with pytest.raises(CoverageError) as error, float16_named(model, kinds):
            raise CoverageError("what", remedy="estimator='label'")
        assert error.value.remedy == "estimator='label'"
    model = torch.nn.Linear(2, 2)
    with (
        pytest.raises(CoverageError, match="in float16"),
        torch.autocast("cpu", torch.float16),
        float16_named(model, (CoverageError,)),
    ):
        raise CoverageError("what", remedy="estimator='label'")
