"""Inner products of token gradients, and greedy selection with them, against the plain thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, find, given
from hypothesis import strategies as st

from alphatoken import InputError, NumericalError
from alphatoken.estimate import estimators
from alphatoken.model import batch as batches
from alphatoken.model.capture import record
from alphatoken.model.protocol import find_adapter
from alphatoken.model.scope import find_scope
from alphatoken.model.uses import LinearUse
from alphatoken.oracle import gradients, influence
from alphatoken.select import interaction
from tests.property import properties_weights as claims
from tests.property.architectures import plain_forward
from tests.property.profiles import budget
from tests.property.properties import Setup, response_mask, setups
from tests.property.properties_weights import (
    DiverseCase,
    GramCase,
    diverse_cases,
    gram_cases,
)
from tests.property.strategies import make_case
from tests.property.tolerance import close

SCOPES = st.sampled_from(["batch", "sequence"])
BLOCKS = st.sampled_from([512, 1, 3])
SHARED = make_case(
    ("pprrrr", "..prrr"), layers=3, repeated_block=True, repeated_linear=True,
    tied_linears=True, mlp="gated", bias=True, transposed=True, heads=4, kv_heads=2,
)  # fmt: skip
"""Every way to use a weight more than once."""


# --- the Gram matrix -----------------------------------------------------------------------------


@given(gram_cases(), BLOCKS, st.booleans())
@example(GramCase(2, 5, 3, "aAba", 0), 2, True)
@example(GramCase(2, 6, 2, "a-A", 1), 512, False)
def test_the_gram_matrix_of_integers_is_exact(case: GramCase, block: int, bias: bool) -> None:
    claims.check_gram_of_integers(case, block, bias)


@given(setups(), BLOCKS)
@example(Setup(SHARED, "all", score_bias=True), 3)
@example(Setup(SHARED, 1), 512)
@budget(0.4)
def test_the_gram_matrix_of_a_decoder(setup: Setup, block: int) -> None:
    claims.check_gram_is_the_product_of_direct_gradients(setup, block)


@given(setups(train=st.sampled_from([("pr", "pr"), ("pr", "pr", "pr")]), softcap=None))
@budget(0.4)
def test_rows_of_one_position(setup: Setup) -> None:
    claims.check_gram_of_one_position(setup)


def test_products_between_uses_of_one_weight_matter() -> None:
    """A witness that dropping them would show: they change G by more than rounding."""

    def crossed(case: GramCase) -> bool:
        uses, errors = case.uses()
        whole = interaction.token_gram(uses, errors, case.mask())
        apart = sum(
            interaction.token_gram([u], [e], case.mask())
            for u, e in zip(uses, errors, strict=True)
            if e is not None
        )
        return bool((whole != apart).any())

    find(gram_cases(), crossed)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_the_two_factors_of_lora() -> None:
    """A and B are weights by themselves; through transformers' own float32 casts."""
    pytest.importorskip("peft")
    from tests.integration.test_lora import BATCH, adapted, factors

    model = adapted()
    adapter = find_adapter(model)
    scope = find_scope(adapter, 2)
    with record(adapter, scope) as recorder:
        logits = adapter.forward({k: v for k, v in BATCH.items() if k != "labels"})
        loss = batches.token_losses(logits, BATCH["labels"]).sum()
        errors = estimators.token_errors(
            recorder, loss, "direct", window=None, head_reduction="per_head"
        )
        mask = response_mask(BATCH["labels"])
        found = interaction.token_gram(recorder.linears, errors.direct, mask)
    modules = factors(model, (1, 2))
    with influence.recorded_uses(modules) as uses:
        losses = gradients.run_losses(plain_forward(model), BATCH)
    rows = []
    for (b, i), each in losses.items():
        deltas = torch.autograd.grad(each, [use.s for use in uses], retain_graph=True)
        rows.append(
            torch.cat(
                [
                    torch.outer(delta[b, i - 1], use.x[b, i - 1]).flatten()
                    for use, delta in zip(uses, deltas, strict=True)
                ]
            )
        )
    j = torch.stack(rows).double()
    close(found, j @ j.T, j.abs() @ j.abs().T, 1e-6, name="Gram, LoRA")
    assert float(found.diagonal().min()) > 0


def test_half_precision_factors_are_multiplied_in_float32() -> None:
    case = GramCase(2, 6, 3, "aA", 3)
    uses, errors = case.uses()
    narrow = [LinearUse(u.linear, u.x.bfloat16(), u.s.bfloat16(), u.execution) for u in uses]
    with torch.autocast("cpu", torch.bfloat16):
        found = interaction.token_gram(narrow, [e.bfloat16() for e in errors], case.mask())
    assert found.dtype == torch.float32
    assert torch.equal(found.double(), interaction.token_gram(uses, errors, case.mask()))


def test_nothing_but_linears_without_errors_gives_zeros() -> None:
    case = GramCase(1, 4, 2, "ab", 1)
    uses, _ = case.uses()
    n = int(case.mask().sum())
    assert torch.equal(interaction.token_gram(uses, [None, None], case.mask()), torch.zeros(n, n))
    assert interaction.token_gram([], [], case.mask()).shape == (n, n)


def test_gram_of_bad_input() -> None:
    case = GramCase(2, 4, 2, "ab", 1)
    uses, errors = case.uses()
    with pytest.raises(InputError, match="2 uses, 1 errors"):
        interaction.token_gram(uses, errors[:1], case.mask())
    first = case.mask()
    first[1, 0] = True
    with pytest.raises(InputError, match="row 1, token 0"):
        interaction.token_gram(uses, errors, first)


# --- selection -----------------------------------------------------------------------------------


@given(diverse_cases(), SCOPES)
def test_greedy_selection(case: DiverseCase, scope: str) -> None:
    claims.check_greedy_by_the_objective(case, scope)


@given(diverse_cases(), SCOPES, st.sampled_from(["absolute", "relative"]))
def test_weight_zero_is_select_top(case: DiverseCase, scope: str, units: str) -> None:
    claims.check_weight_zero_is_select_top(case, scope, units)


@given(diverse_cases())
@budget(0.4)
def test_greedy_against_the_optimum(case: DiverseCase) -> None:
    claims.check_greedy_against_the_optimum(case)


@given(diverse_cases())
def test_the_gain_is_the_decrease_of_a_quadratic(case: DiverseCase) -> None:
    claims.check_gain_is_the_decrease_of_a_quadratic(case)


@given(diverse_cases())
def test_the_relative_weight(case: DiverseCase) -> None:
    claims.check_relative_weight(case)


def test_a_repeated_token_makes_room_for_another() -> None:
    """Three copies of the best gradient and one that is new: one copy and the new one are kept."""
    g = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 1.0]]).double()
    values, mask = torch.tensor([[3.0, 3.0, 3.0, 1.0]]), torch.ones(1, 4).bool()
    keep = interaction.select_diverse(values, mask, 0.5, g @ g.T, 1.0)
    assert keep.tolist() == [[True, False, False, True]]
    keep = interaction.select_diverse(values, mask, 0.5, g @ g.T, 0.0)
    assert keep.tolist() == [[True, True, False, False]]


def test_greedy_is_not_always_the_best_set() -> None:
    """The honest half of the claim: with opposed gradients greedy can be far from the best."""

    def missed(case: DiverseCase) -> bool:
        values, mask, g = case.draw()
        v, g = values[mask][:6], g[:6]
        count = -(-case.hundredths * len(v) // 100)
        if not len(v):
            return False
        keep = interaction.select_diverse(
            v[None], torch.ones(1, len(v)).bool(), case.ratio, g @ g.T, case.weight
        )[0]
        found = claims.objective(v, g, case.weight, keep.nonzero().flatten().tolist())
        best = claims.best_by_enumeration(v, g, case.weight, count)
        return best > 0 and found < (1 - 1 / 2.72) * best

    find(diverse_cases(), missed)


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        ("weight", -1.0, "not negative"),
        ("weight", float("nan"), "not negative"),
        ("weight", float("inf"), "not negative"),
        ("units", "mean", "units"),
        ("scope", "rank", "scope"),
        ("ratio", 0.0, "ratio"),
        ("gram", torch.zeros(3, 3), "4 tokens"),
    ],
)
def test_nonsense_is_refused(option: str, value: Any, what: str) -> None:
    options = {"ratio": 0.5, "gram": torch.eye(4), "weight": 1.0, option: value}
    values, mask = torch.zeros(1, 4), torch.ones(1, 4).bool()
    with pytest.raises(InputError, match=what):
        interaction.select_diverse(values, mask, **options)


def test_numbers_that_are_not_finite_are_named() -> None:
    values, mask = torch.zeros(1, 4), torch.ones(1, 4).bool()
    gram = torch.eye(4)
    gram[2, 3] = gram[3, 2] = float("nan")
    with pytest.raises(NumericalError, match="token 2"):
        interaction.select_diverse(values, mask, 0.5, gram, 1.0)
    values[0, 1] = float("inf")
    with pytest.raises(NumericalError, match="row 0, token 1"):
        interaction.select_diverse(values, mask, 0.5, torch.eye(4), 1.0)


def test_an_empty_mask_keeps_nothing() -> None:
    for scope in ("batch", "sequence"):
        for units in ("absolute", "relative"):
            keep = interaction.select_diverse(
                torch.zeros(2, 4), torch.zeros(2, 4).bool(), 0.5, torch.zeros(0, 0), 1.0,
                scope=scope, units=units,
            )  # fmt: skip
            assert not bool(keep.any())
