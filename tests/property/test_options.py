"""Objective, part, the full preconditioner and what may change over a run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken import FisherDrift, PreferenceBatch, Scorer, ScorerConfig
from alphatoken.errors import ConfigError, InputError, ModelError, NumericalError
from alphatoken.model.batch_slice import LENGTH, ROWS
from tests.property import properties_options as claims
from tests.property.profiles import budget
from tests.property.properties import Setup, drift_of, quiet, quiet_score, setups
from tests.property.properties_scorer import EVERY
from tests.property.strategies import make_batch, make_case

CASE = make_case(("pprrrr", "..prrr"), (("pprr",), ("prrr.", "..prr")), layers=3, seed=3)
SETUP = Setup(CASE, 2)
PACKED = Setup(make_case(("pprr|prr", "pr|pprrr"), (("pprr", "prr."),), layers=2, seed=5), "all")
OBJECTIVES = ("both", "adaptation", "stability")
SPLIT = ("alphatoken", "direct", "paper_literal")


@given(
    setups(),
    st.sampled_from([
        (e, o, p)
        for e in (*SPLIT, "label", "path")
        for o in OBJECTIVES
        for p in ("both", "direct", "causal")
        if p == "both" or (e in SPLIT and (e, p) != ("direct", "causal"))
    ]),
)  # fmt: skip
@budget(0.6)
def test_each_component_is_the_right_part(setup: Setup, options: tuple[str, str, str]) -> None:
    claims.check_objective_and_part(setup, *options)


@pytest.mark.parametrize("part", ["both", "direct", "causal"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_and_part_of_the_papers_estimator(objective: str, part: str) -> None:
    claims.check_objective_and_part(SETUP, "alphatoken", objective, part)


@given(setups())
@budget(0.1)
def test_the_direct_path_alone_costs_what_direct_costs(setup: Setup) -> None:
    claims.check_direct_only_is_the_direct_estimator(setup)


# --- the full preconditioner ----------------------------------------------------------------------

KINDS = ("Adam", "Adam, L2", "AdamW")


@given(
    setups(), st.sampled_from([1, 4]), st.sampled_from(KINDS),
    st.sampled_from(["linears", "all"]), st.booleans(),
)  # fmt: skip
@budget(0.3)
def test_full_values_are_the_derivative_of_the_step(
    setup: Setup, steps: int, kind: str, parameters: str, given: bool
) -> None:
    claims.check_full_values_are_the_steps_derivative(setup, steps, kind, parameters, given)


@given(setups(), st.sampled_from([1, 4]), st.sampled_from(KINDS))
@example(SETUP, 3, "AdamW")
@budget(0.2)
def test_full_values_predict_a_real_step(setup: Setup, steps: int, kind: str) -> None:
    claims.check_full_values_predict_a_real_step(setup, steps, kind)


@given(setups(), st.sampled_from([1, 4]), st.booleans())
@budget(0.2)
def test_full_scales_the_direction_of_captured_estimators(
    setup: Setup, steps: int, given: bool
) -> None:
    claims.check_full_scales_the_direction_of_captured_estimators(setup, steps, given)


@given(setups())
@budget(0.1)
def test_full_waits_for_the_optimizer(setup: Setup) -> None:
    claims.check_full_waits_for_the_optimizer(setup)


def test_full_needs_the_steps_weights_where_values_have_their_own() -> None:
    model, optimizer = claims.stepped(SETUP, 2, "Adam")
    scorer = claims.full_scorer(SETUP, model, optimizer, "path")
    weights = torch.ones_like(CASE.batch["labels"], dtype=torch.float64)
    with pytest.raises(InputError, match=r"needs step_weights where token_weights are given"):
        scorer.score(CASE.batch, token_weights=weights)
    with pytest.raises(InputError, match=r"step_weights must have one entry a token"):
        scorer.score(CASE.batch, step_weights=weights[:, 1:])


# --- the total alone ------------------------------------------------------------------------------

PRECONDITIONERS = ("none", "given", "full")


@given(
    setups(),
    st.tuples(st.sampled_from(EVERY), st.sampled_from(PRECONDITIONERS)),
    st.sampled_from(["label", "context"]),
)
@budget(0.2)
def test_one_contraction_gives_the_total_of_two(
    setup: Setup, how: tuple[str, str], position: str
) -> None:
    claims.check_total_alone(setup, *how, position)


@given(setups(), st.booleans())
@budget(0.1)
def test_errors_contracted_in_the_backward_give_the_same_bits(setup: Setup, cut: bool) -> None:
    claims.check_errors_streamed_are_the_errors_kept(setup, cut)


@pytest.mark.parametrize("kind", PRECONDITIONERS)
@pytest.mark.parametrize("estimator", EVERY)
def test_the_total_alone_on_padded_and_packed_rows(estimator: str, kind: str) -> None:
    claims.check_total_alone(SETUP, estimator, kind)
    claims.check_total_alone(PACKED, estimator, kind, "context")


@pytest.mark.parametrize("objective", ["adaptation", "stability"])
@pytest.mark.parametrize("estimator", EVERY)
def test_the_total_alone_of_one_side(estimator: str, objective: str) -> None:
    claims.check_total_alone_of_one_side(SETUP, estimator, objective)


def test_components_follow_values() -> None:
    scorer = Scorer(CASE.model(), CASE.validation, None, ScorerConfig("path", layers=2))
    with (
        scorer.observe() as observed,
        pytest.raises(ModelError, match=r"components\(\) follows values\(\)"),
    ):
        observed.components()


# --- what changes over a run ----------------------------------------------------------------------


@given(setups(), st.sampled_from(EVERY))
@budget(0.2)
def test_replaced_sides_equal_a_fresh_scorer(setup: Setup, estimator: str) -> None:
    claims.check_replaced_sides_equal_a_fresh_scorer(setup, estimator)


@given(setups(), st.sampled_from(EVERY))
@budget(0.2)
def test_lambda_in_units_of_the_balance(setup: Setup, estimator: str) -> None:
    claims.check_stability_units(setup, estimator)


@given(setups(), st.sampled_from(EVERY))
@budget(0.1)
def test_a_pinned_version_decides_what_is_stale(setup: Setup, estimator: str) -> None:
    claims.check_pinned_direction(setup, estimator)


@given(setups(), st.sampled_from(EVERY))
@budget(0.2)
def test_gradients_reduced_over_processes(setup: Setup, estimator: str) -> None:
    claims.check_reduced_gradient(setup, estimator)


@given(setups(), st.sampled_from(EVERY), st.booleans())
@budget(0.2)
def test_interaction_is_the_gram_of_direct_gradients(
    setup: Setup, estimator: str, weighted: bool
) -> None:
    claims.check_interaction(setup, estimator, weighted)


@given(setups())
@example(SETUP)
@example(Setup(CASE, "all"))
@example(Setup(make_case(("pprrr",), (("pprr",),), layers=3, repeated_block=True), 1))
@budget(0.2)
def test_label_starts_at_the_observed_hidden_states(setup: Setup) -> None:
    claims.check_label_starts_at_the_observed_hidden_states(setup)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["label", "path"])
@pytest.mark.parametrize("part", ["direct", "causal"])
def test_no_part_of_an_undivided_value(estimator: str, part: str) -> None:
    with pytest.raises(ConfigError, match=r"Remedy: estimator one of alphatoken, direct"):
        ScorerConfig(estimator=estimator, part=part)


def test_no_causal_part_of_direct() -> None:
    with pytest.raises(ConfigError, match="every value would be zero"):
        ScorerConfig(estimator="direct", part="causal")


@pytest.mark.parametrize("option", ["objective", "part"])
def test_unknown_choices(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be one of both"):
        ScorerConfig(**{option: "neither"})


def test_stability_needs_a_retention_term_and_adaptation_a_validation_set() -> None:
    model = CASE.model()
    with pytest.raises(ConfigError, match="needs a retention term"):
        Scorer(model, None, None, ScorerConfig(objective="stability"))
    with pytest.raises(InputError, match="no validation tokens"):
        Scorer(model, None, [CASE.batch])
    scorer = Scorer(model, None, [CASE.batch], ScorerConfig(objective="stability", layers=2))
    with pytest.raises(ConfigError, match="needs a retention term"):
        scorer.set_retention(None)


def test_the_proofs_run_without_a_validation_set_too() -> None:
    """With a Fisher there is no forward before the batch's own: it is the one they run on."""
    drift = FisherDrift(*drift_of(SETUP, CASE.model()))
    for retention in ([CASE.batch], drift):
        config = ScorerConfig(objective="stability", layers=2, max_relative_drift=None)
        scorer = Scorer(CASE.model(), None, retention, config)
        scorer.score(CASE.batch)
        assert scorer.coverage.isolated
        assert scorer.coverage.relative_error is not None
        assert scorer.coverage.relative_error < 1e-12


def test_full_without_an_optimizer() -> None:
    with pytest.raises(ConfigError, match=r"preconditioner='full' needs the optimizer"):
        Scorer(CASE.model(), CASE.validation, None, ScorerConfig(preconditioner="full"))


def test_interaction_comes_after_values_and_needs_self_only_errors() -> None:
    model = CASE.model()
    inputs = {k: v for k, v in CASE.batch.items() if k != "labels"}
    scorer = Scorer(model, CASE.validation, None, ScorerConfig("label", layers=2))
    with scorer.observe(interaction=True) as observed:
        logits = model(**inputs)
        with pytest.raises(ModelError, match="follows values"):
            observed.interaction()
    with scorer.observe() as observed:
        logits = model(**inputs)
        observed.values(logits, CASE.batch["labels"])
        with pytest.raises(ConfigError, match=r"observe\(interaction=True\)"):
            observed.interaction()


def test_the_proofs_add_forwards_of_a_few_rows_once() -> None:
    model = CASE.model()
    calls: list[tuple[int, ...]] = []
    model.register_forward_hook(lambda _m, _a, output: calls.append(tuple(output.shape[:2])))
    long = make_batch(("p" * 60 + "r" * 30,) * 4, vocabulary=11, seed=1)
    scorer = Scorer(model, [long, CASE.batch], None, ScorerConfig("alphatoken", layers=2))
    for _ in range(2):
        scorer.refresh()
        quiet_score(scorer, CASE.batch)
    whole = [(4, 90), (2, 6), (2, 6)]  # both validation batches, and the one that is valued
    # Causality by each kind of arguments, that of the padded batch first, and then coverage.
    assert calls == [(2, 6), (ROWS, LENGTH), (ROWS, LENGTH), *whole, *whole]
    assert scorer.coverage.relative_error is not None


@pytest.mark.parametrize("fault", ["label", "weight"])
def test_what_is_wrong_with_a_token_is_said_by_its_place_in_the_batch(fault: str) -> None:
    """The slice that is read first stumbles over it, and leaves it to the whole batch to say."""
    model = CASE.model()
    batch = make_batch(("p" * 60 + "r" * 30,) * 4, vocabulary=11, seed=1)
    if fault == "label":
        batch["labels"][0, 80:] = 11
        message = "row 0, token 80"
    else:
        model.embedding.weight.data[3] = torch.nan
        batch["input_ids"].fill_(1)[:, 84] = 3
        message = "row 0, token 60"  # masked positions are multiplied with zero, and NaN stays
    scorer = Scorer(model, batch, None, ScorerConfig("alphatoken", layers=2))
    with pytest.raises((InputError, NumericalError), match=message):
        scorer.score(CASE.batch)
    assert scorer.coverage.relative_error is None


def test_preference_pairs_run_the_trunk_once_a_branch() -> None:
    """The pass that is sent back starts where the pass for omega stood."""
    model = CASE.model()
    calls: list[int] = []
    model.layers[0].attention.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    zeros = torch.zeros(1, dtype=torch.float64)
    pairs = PreferenceBatch(CASE.validation[0], CASE.validation[0], zeros, zeros)
    scorer = Scorer(model, pairs, None, ScorerConfig("path", layers=2))
    quiet_score(scorer, CASE.batch)
    # Causality by both kinds of arguments, coverage; both branches', the batch's.
    assert len(calls) == 3 + 2 + 1
    calls.clear()
    scorer.refresh()
    quiet_score(scorer, CASE.batch)
    assert len(calls) == 2 + 1  # nothing is proved again


@pytest.mark.parametrize("estimator", ["label", "path", "alphatoken"])
def test_the_certificate_holds_for_full_values(estimator: str) -> None:
    model, optimizer = claims.stepped(SETUP, 2, "AdamW")
    scorer = claims.full_scorer(SETUP, model, optimizer, estimator)
    with quiet():
        found = scorer.verify(CASE.batch)
    assert found.passed
    assert estimator != "label" or found.spearman > 1 - 1e-9
