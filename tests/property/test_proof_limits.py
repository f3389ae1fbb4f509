"""How fine the proofs are, what they are asked of, and how often they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from alphatoken import Scorer, ScorerConfig
from alphatoken.direction.objective import objective_gradient
from alphatoken.errors import AlphaTokenError, ModelError, UnsupportedError
from alphatoken.estimate import proofs
from alphatoken.estimate.causality import prove_causality
from alphatoken.estimate.derivatives import _tolerance
from alphatoken.model.batch import documents_in_rows, read_batch
from alphatoken.model.modes import draws
from tests.property import properties_proofs as claims
from tests.property.architectures import BY_NAME
from tests.property.decoder import ReferenceAdapter
from tests.property.properties_proofs import leaking, refusal
from tests.property.strategies import make_batch, make_case

CASE = make_case(("pprrr", "prrrr"), (("pprr",),))

# --- causality ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", claims.KINDS)
def test_what_arguments_say_of_who_sees_whom(name: str) -> None:
    claims.check_what_arguments_say_of_who_sees_whom(name)


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_a_thousandth_of_the_next_token_is_seen(size: float) -> None:
    claims.check_a_thousandth_of_the_next_token_is_seen(size)


def test_the_row_that_looks_ahead_is_named() -> None:
    """Rows without a response are passed over, and do not move the count."""
    batch = read_batch(make_batch(("ppppp", "prrrr", "pprrr"), vocabulary=11, seed=1))
    adapter = ReferenceAdapter(leaking(CASE, 1.0, slice(2, 3)))
    with pytest.raises(ModelError, match=r"row 2: the loss of token 2"):
        prove_causality(adapter, batch)


def test_a_model_that_was_refused_is_refused_again() -> None:
    scorer = Scorer(leaking(CASE, 1.0), CASE.validation, config=ScorerConfig("path", layers=1))
    for _ in range(2):
        with pytest.raises(ModelError, match="looks ahead"):
            scorer.score(CASE.batch)


# --- derivatives ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "off", "refused"),
    [
        (torch.float64, 1e-3, True), (torch.float64, 1e-9, False), (torch.float32, 0.02, True),
        (torch.float32, 1e-6, False),
    ],
)  # fmt: skip
def test_how_far_a_backward_may_be_off(dtype: torch.dtype, off: float, refused: bool) -> None:
    batch = make_batch(("pprrr",), vocabulary=11, seed=1)
    # The library's decoder rounds its norms to float32 whatever the weights are.
    model = CASE.model() if dtype == torch.float64 else BY_NAME["llama"].build(1).to(dtype)
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g * (1 + off))
    scorer = Scorer(model, batch, config=ScorerConfig("label", layers=2))
    error = refusal(lambda: scorer.score(batch))
    assert isinstance(error, UnsupportedError) == refused
    assert refused or error is None


def test_the_coarsest_arithmetic_decides_how_far() -> None:
    """Also of a forward that casts inside, as one that a trainer has prepared."""
    known = _tolerance("cpu", [torch.float32])
    assert _tolerance("cpu", [torch.float64]) < known < _tolerance("cpu", [torch.bfloat16])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _tolerance("cpu", [torch.float32]) == _tolerance("cpu", [torch.bfloat16])
    batch = make_batch(("pprrr",), vocabulary=11, seed=1)
    model = BY_NAME["llama"].build(1).float()
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    scorer = Scorer(model, batch, config=ScorerConfig("label", layers=2))
    assert scorer.score(batch).total.any()
    assert known < scorer.coverage.derivatives < 0.2


def test_what_can_be_proved_once_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = dict.fromkeys(("prove_derivatives", "prove_causality", "prove_coverage"), 0)

    def counted(name: str) -> Callable[..., Any]:
        run = getattr(proofs, name)

        def prove(*args: Any, **more: Any) -> Any:
            counts[name] += 1
            return run(*args, **more)

        return prove

    for name in counts:
        monkeypatch.setattr(proofs, name, counted(name))
    for estimator in ("label", "path"):
        model = CASE.model()
        scorer = Scorer(model, CASE.validation, config=ScorerConfig(estimator, layers=1))
        for _ in range(3):
            scorer.score(CASE.batch)
    assert counts["prove_derivatives"] == counts["prove_coverage"] == 1
    assert counts["prove_causality"] == 2


def test_losses_that_no_parameter_moves_have_no_direction() -> None:
    model = CASE.model()
    aside = {"aside": nn.Parameter(torch.ones(2, dtype=torch.float64))}
    with pytest.raises(ModelError, match="depends on no parameter in scope"):
        objective_gradient(ReferenceAdapter(model), aside, CASE.validation, first=None)


# --- documents over rows --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "rows"),
    [
        ([0, 8], None),
        ([0, 3, 5, 8], None),
        ([0, 4, 8], [[0, 0, 0, 0], [1, 1, 1, 1]]),
        ([0, 1, 4, 6, 8], [[0, 1, 1, 1], [2, 2, 3, 3]]),
        ([0, 3], [[0, 0, 0, -1], [-1, -1, -1, -1]]),
        ([0, 2, 4, 7], [[0, 0, 1, 1], [2, 2, 2, -1]]),
    ],
)
def test_documents_by_their_bounds(bounds: list[int], rows: list[list[int]] | None) -> None:
    if rows is None:
        with pytest.raises(AlphaTokenError, match="reaches over two rows"):
            documents_in_rows(torch.tensor(bounds), 2, 4)
        return
    assert documents_in_rows(torch.tensor(bounds), 2, 4).tolist() == rows


# --- forwards that draw ---------------------------------------------------------------------------


class Noisy(nn.Module):
    """A module whose rate is a number of its own."""

    def __init__(self, name: str, rate: object) -> None:
        super().__init__()
        setattr(self, name, rate)


@pytest.mark.parametrize(
    ("module", "drawn"),
    [
        (nn.Dropout(0.1), True), (nn.Dropout(0.0), False), (nn.Linear(1, 1), False),
        (Noisy("attention_dropout", 0.1), True), (Noisy("attention_dropout", 0.0), False),
        (Noisy("router_jitter_noise", 0.1), True), (Noisy("neftune_noise_alpha", 5), True),
        (Noisy("attention_dropout", None), False), (Noisy("scaling", 0.1), False),
    ],
)  # fmt: skip
def test_what_may_draw_random_numbers(module: nn.Module, drawn: bool) -> None:
    model = nn.Sequential(module)
    assert draws(model.train()) == drawn
    assert not draws(model.eval())
