"""Every estimator through ``Scorer`` against the influence matrix; what it refuses and leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken import (
    ConfigError,
    CoverageError,
    ModelError,
    NumericalError,
    Scorer,
    ScorerConfig,
    UnsupportedError,
)
from alphatoken.oracle import gradients, influence
from tests.property import properties_estimators as claims
from tests.property import properties_scorer as whole
from tests.property.profiles import budget
from tests.property.properties import (
    MODEL,
    Setup,
    forward_of,
    make_scorer,
    oracle_influence,
    setups,
)
from tests.property.strategies import Case, make_case
from tests.property.tolerance import close

FULL = Setup(
    make_case(
        ("pprrrrr.", "..prprr."), (("pprr",), ("prrr.", "..prr")), layers=3, heads=4, kv_heads=2,
        qk_norm=True, softcap=2.0, sinks=True, windows=(None, 3), bias=True, repeated_linear=True,
    ),
    (0, 2),
    True,
)  # fmt: skip
TWICE = Setup(make_case(("pprrr",), (("pprr",),), layers=3, repeated_block=True), 1)
FUSED = Setup(make_case(("pprrr",), (("pprr",),), fused_qkv=True, transposed=True, bias=True), 1)
TIED = Setup(
    make_case(
        ("pprrr", "..prr"), (("pprrr",), ("prrr.", "..prr")),
        mlp="gated", bias=True, tied_linears=True,
    ),
    "all",
    True,
)  # fmt: skip
PLAIN = make_case(("pprrr", "..prr"), (("pprr", "prrr"),), layers=2)


# --- exact readouts ------------------------------------------------------------------------------


@given(setups())
@example(FULL)
@example(TWICE)
@example(FUSED)
@budget(0.25)
def test_direct_is_the_diagonal(setup: Setup) -> None:
    claims.check_direct_is_the_diagonal(setup)


@given(setups())
@example(FULL)
@example(TWICE)
@budget(0.25)
def test_path_is_the_column_sums(setup: Setup) -> None:
    claims.check_path_is_the_column_sums(setup)


@given(setups())
@example(FULL)
@budget(0.1)
def test_totals_are_the_gradient_along_m(setup: Setup) -> None:
    claims.check_totals_are_the_gradient_along_m(setup)


@given(setups(max_length=2, max_rows=2))
@budget(0.05, least=3)
def test_with_one_label_position_all_estimators_coincide(setup: Setup) -> None:
    claims.check_one_label_position_makes_all_coincide(setup)


@given(setups(repeated_block=False))
@example(FULL)
@budget(0.15)
def test_same_layer_hop_is_one_hop_within_each_layer(setup: Setup) -> None:
    claims.check_same_layer_hop_is_one_hop_within_the_layer(setup)


@given(setups(last=True, repeated_block=False))
@example(FUSED)
@budget(0.15)
def test_same_layer_hop_of_the_last_layer_is_path(setup: Setup) -> None:
    claims.check_same_layer_hop_of_the_last_layer_is_path(setup)


@given(setups(), st.integers(0, 2**16 - 1))
@budget(0.1)
def test_token_weights_scale_the_rows(setup: Setup, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = setup.case.batch["labels"].shape
    claims.check_weighted_losses(
        setup, torch.randn(shape, generator=generator, dtype=torch.float64)
    )


@given(setups())
@budget(0.1)
def test_frozen_linears_are_out_of_scope(setup: Setup) -> None:
    whole.check_frozen_linears_are_out_of_scope(setup)


@given(setups(tied_linears=True, mlp="gated"))
@example(TIED)  # one weight, two modules, a bias each
@budget(0.05)
def test_a_weight_in_two_modules_is_accumulated(setup: Setup) -> None:
    claims.check_direct_is_the_diagonal(setup)
    claims.check_path_is_the_column_sums(setup)


# --- layouts -------------------------------------------------------------------------------------


@given(
    setups(explicit_positions=True, max_length=6), st.sampled_from(whole.EVERY), st.integers(0, 2)
)
@budget(0.12, least=8)
def test_padding_and_company_do_not_matter(setup: Setup, estimator: str, extra: int) -> None:
    whole.check_layout_does_not_matter(setup, estimator, extra)


@given(
    setups(mode="packed", explicit_positions=True, max_length=6, max_rows=2),
    st.sampled_from(whole.EVERY),
    st.integers(0, 1),
)
@budget(0.12, least=8)
def test_packed_documents_are_valued_as_if_alone(setup: Setup, estimator: str, extra: int) -> None:
    whole.check_layout_does_not_matter(setup, estimator, extra)


PADDED_LABELS = make_case(("..rrpr", "pprrr."), ((".rpr", "rr.."), ("..rr",)))
"""The row that has a label which only padding precedes, on both sides."""


@given(
    setups(mode=st.sampled_from(["left", "ragged"]), max_length=6),
    st.sampled_from(whole.EVERY),
    st.integers(1, 2),
)
@example(Setup(PADDED_LABELS), "alphatoken", 1)
@example(Setup(PADDED_LABELS), "label", 2)
@example(Setup(PADDED_LABELS, 1), "path", 1)
@budget(0.3, least=8)
def test_the_token_in_the_padding_does_not_matter(setup: Setup, estimator: str, shift: int) -> None:
    whole.check_padding_holds_nothing(setup, estimator, shift)


# --- one forward, and the model afterwards -------------------------------------------------------


@given(setups(), st.sampled_from(whole.EVERY))
@budget(0.12, least=8)
def test_observed_values_are_those_of_score(setup: Setup, estimator: str) -> None:
    whole.check_observed_equals_scored(setup, estimator)


@given(setups(), st.sampled_from(whole.EVERY))
@budget(0.15)
def test_the_model_is_left_alone(setup: Setup, estimator: str) -> None:
    whole.check_model_is_left_alone(setup, estimator)


def test_own_forwards_run_without_dropout() -> None:
    case = make_case(("pprrr",), (("pprr",),), residual_dropout=0.5, attention_dropout=0.5)
    plain = make_case(("pprrr",), (("pprr",),))
    for estimator in whole.EVERY:
        config = ScorerConfig(estimator, layers=2)
        model = case.model().train()
        values = Scorer(model, case.validation, config=config).score(case.batch)
        expected = Scorer(plain.model(), plain.validation, config=config).score(plain.batch)
        assert torch.equal(values.total, expected.total)
        assert all(module.training for module in model.modules())


def test_an_observed_pass_is_valued_with_its_own_dropout() -> None:
    case = make_case(("pprrrr",), (("pprr",),), residual_dropout=0.5)
    model = case.model().train()
    scorer = Scorer(model, case.validation, config=ScorerConfig("path", layers=2))
    batch = case.batch
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    torch.manual_seed(3)
    with scorer.observe() as observed:
        values = observed.values(model(**inputs), batch["labels"])
    torch.manual_seed(3)
    losses = gradients.run_losses(forward_of(model), batch)
    named, m = dict(model.named_parameters()), scorer.direction.total()
    found = torch.autograd.grad(torch.stack(list(losses.values())).sum(), [named[n] for n in m])
    terms = torch.stack([(g * d).sum() for g, d in zip(found, m.values(), strict=True)])
    total = values.total.sum() + values.unassigned.sum()
    close(total, terms.sum(), terms.abs().sum() + 1.0, MODEL, name="dropout of the pass")
    dry = scorer.score(batch).total
    assert not torch.allclose(dry, values.total)


def test_attention_dropout_in_an_observed_pass_is_refused() -> None:
    case = make_case(("pprrr",), (("pprr",),), attention_dropout=0.3)
    batch = case.batch
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    for estimator in ("alphatoken", "direct", "same_layer_hop", "paper_literal"):
        model = case.model().train()
        scorer = Scorer(model, case.validation, config=ScorerConfig(estimator, layers=2))
        with scorer.observe() as observed:
            logits = model(**inputs)
            with pytest.raises(UnsupportedError, match=r"dropout.*path"):
                observed.values(logits, batch["labels"])


def test_values_before_a_forward_are_refused() -> None:
    scorer = Scorer(PLAIN.model(), PLAIN.validation, config=ScorerConfig("path", layers=1))
    with scorer.observe() as observed, pytest.raises(ModelError, match="the model was not called"):
        observed.values(torch.zeros(2, 5, 11, dtype=torch.float64), PLAIN.batch["labels"])


# --- coverage, isolation, scope ------------------------------------------------------------------

SELF_ONLY = ("alphatoken", "direct", "same_layer_hop")
CAPTURED = (*SELF_ONLY, "path", "paper_literal")


def score(case: Case, estimator: str, **options: Any) -> Tensor:
    config = ScorerConfig(estimator, **{"layers": 1, **options})
    return Scorer(case.model(), case.validation, config=config).score(case.batch).total


@pytest.mark.parametrize("estimator", CAPTURED)
def test_a_hidden_use_is_caught_by_the_coverage_proof(estimator: str) -> None:
    case = make_case(("pprrr",), (("pprr",),), hidden_use=True)
    with pytest.raises(CoverageError, match=r"mlp\.up_proj\.weight.*label"):
        score(case, estimator)
    claims.check_label_is_the_row_sums_along(Setup(case, 1))


@pytest.mark.parametrize("estimator", CAPTURED)
@pytest.mark.parametrize("mlp", ["plain", "gated"])
def test_a_use_below_the_scored_layers_is_caught(estimator: str, mlp: str) -> None:
    """One weight in the up projections of all layers: K = 1 does not capture the lower uses."""
    case = make_case(("pprrr",), (("pprr",),), mlp="plain", tied_linears=True, layers=3)
    if mlp == "plain":
        with pytest.raises(CoverageError, match=r"mlp\.up_proj\.weight.*label"):
            score(case, estimator)
        claims.check_label_is_the_row_sums_along(Setup(case, 1))
    score(case, estimator, layers="all")  # there all of them are in scope


@pytest.mark.parametrize("estimator", CAPTURED)
def test_a_use_in_the_embedding_is_caught(estimator: str) -> None:
    case = make_case(("pprrr",), (("pprr",),), vocabulary=8, hidden=8, heads=2, head_dim=4)
    model = case.model()
    model.embedding.weight = model.layers[1].attention.q_proj.weight
    with pytest.raises(CoverageError, match=r"q_proj\.weight.*label"):
        Scorer(model, case.validation, config=ScorerConfig(estimator, layers=1)).score(case.batch)
    config = ScorerConfig("label", layers=1, derivative="forward_mode")
    scorer = Scorer(model, case.validation, config=config)
    values = scorer.score(case.batch).total
    m = gradients.validation_gradient(model, forward_of(model), case.validation, scorer.parameters)
    expected = gradients.label_values(model, forward_of(model), case.batch, m)
    close(values, expected, 1.0 + expected.abs().max(), MODEL, name="label, shared with embedding")


@pytest.mark.parametrize("estimator", SELF_ONLY)
@pytest.mark.parametrize("lines", [("pprr",), ("pprr", "...pr"[1:]), ("pr..", "pprr", "..pr")])
def test_a_hidden_mixer_is_caught_by_the_isolation_proof(
    estimator: str, lines: tuple[str, ...]
) -> None:
    case = make_case(("pprrr",), (lines,), hidden_mixer=True)
    with pytest.raises(UnsupportedError, match=r"mix outside attention.*'label' or 'path'"):
        score(case, estimator)


def test_path_and_label_are_exact_with_a_hidden_mixer() -> None:
    setup = Setup(make_case(("pprrr",), (("pprr",),), hidden_mixer=True), "all")
    claims.check_path_is_the_column_sums(setup)
    claims.check_label_is_the_row_sums(setup)


@pytest.mark.parametrize("estimator", [*SELF_ONLY, "paper_literal"])
def test_a_named_mixer_is_refused_with_label_as_the_remedy(estimator: str) -> None:
    case = make_case(("pprrr",), (("pprr",),), conv_mixer=True)
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mixer.*causal convolution.*'label'"):
        score(case, estimator)


@pytest.mark.parametrize("estimator", CAPTURED)
def test_a_loose_parameter_is_refused_by_name_or_skipped_by_name(estimator: str) -> None:
    case = make_case(("pprrr", ".prrr"), (("pprr",),), loose_parameter=True)
    with pytest.raises(CoverageError, match=r"layers\.1\.mlp\.loose.*label"):
        score(case, estimator)
    model = case.model()
    config = ScorerConfig(estimator, layers=1, uncovered="skip")
    scorer = Scorer(model, case.validation, config=config)
    values = scorer.score(case.batch)
    assert scorer.coverage.skipped == {"layers.1.mlp.loose": "a matrix used outside any linear"}
    assert "layers.1.mlp.loose" not in scorer.coverage.parameters
    if estimator == "path":
        setup = Setup(case, 1)
        psi = oracle_influence(setup, model, scorer.direction.adaptation)
        expected, scale = (
            influence.to_token_index(influence.column_sums(x)) * values.mask
            for x in (psi.matrix, psi.absolute_scale)
        )
        close(values.total, expected, scale, MODEL, name="path, a loose matrix skipped")


def test_label_covers_a_loose_parameter() -> None:
    case = make_case(("pprrr", ".prrr"), (("pprr",),), loose_parameter=True)
    claims.check_label_is_the_row_sums_along(Setup(case, 1))
    config = ScorerConfig("label", layers=1)
    assert "layers.1.mlp.loose" in Scorer(case.model(), case.validation, config=config).parameters


def test_the_coverage_report_says_what_was_proved() -> None:
    case = FULL.case
    scorer = make_scorer(FULL, "alphatoken")
    assert scorer.coverage.relative_error is None
    with whole.quiet():
        scorer.score(case.batch)
    report = scorer.coverage
    assert report.relative_error is not None
    assert report.relative_error < 1e-12
    assert report.isolated is True
    assert "layers.2.attention.q_proj" in report.linears
    assert "layers.2.attention.q_proj.bias" in report.parameters
    assert not any(name.startswith("layers.1.") for name in report.linears)


# --- bad input -----------------------------------------------------------------------------------


def test_layers_outside_the_model_are_refused() -> None:
    for layers in (0, 4, True, (2,), (-3,), (), "last", ""):
        with pytest.raises(ConfigError, match="layer"):
            Scorer(PLAIN.model(), PLAIN.validation, config=ScorerConfig(layers=layers))


def test_negative_layer_indices_count_from_the_end() -> None:
    for one, two in (((-1,), 1), ((0, -1), "all"), ((1, 0), (0, 1))):
        assert torch.equal(score(PLAIN, "direct", layers=one), score(PLAIN, "direct", layers=two))


@pytest.mark.parametrize("estimator", whole.EVERY)
def test_nan_weights_are_an_error_that_names_the_token(estimator: str) -> None:
    model = PLAIN.model()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    before = whole.snapshot(model)["random"]
    scorer = Scorer(model, PLAIN.validation, config=ScorerConfig(estimator, layers=1))
    with pytest.raises(NumericalError, match=r"row 0, token 2"):
        scorer.score(PLAIN.batch)
    assert whole.snapshot(model)["random"] == before


@pytest.mark.parametrize("estimator", whole.EVERY)
def test_no_trainable_linear_is_refused(estimator: str) -> None:
    model = PLAIN.model()
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable linear"):
        Scorer(model, PLAIN.validation, config=ScorerConfig(estimator, layers=1))
