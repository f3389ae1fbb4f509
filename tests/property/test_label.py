"""Label values: row sums of the influence matrix, by forward mode."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import example, given
from hypothesis.strategies import sampled_from
from torch import Tensor

from alphatoken import Scorer, ScorerConfig, TokenValues
from alphatoken.errors import ConfigError
from alphatoken.estimate.forward_mode import label_values
from alphatoken.model.batch import read_batch
from alphatoken.oracle import gradients, influence
from tests.property.decoder import ReferenceDecoder
from tests.property.profiles import budget
from tests.property.setups import (
    MODEL,
    Setup,
    compare_values,
    forward_of,
    label_truth,
    make_scorer,
    quiet,
    quiet_score,
    readout,
    setups,
)
from tests.property.strategies import PADDED, SHARED, make_case
from tests.property.tolerance import close

NAMED = (
    "*norm*",
    "linears,*norm*,embedding.weight",
    "linears,*bias*",
    "head.weight",
    "layers.0.*",
    "layers.[12].mlp_norm.*",
    "final_norm.*, linears",
    "*attention.?_proj.weight,head.*",
)
"""Choices by name: below, between, inside and above the scored layers; a tied head's alias."""


def _part(setup: Setup, model: ReferenceDecoder, text: str) -> dict[str, Tensor]:
    """What one part of a choice means, by a regular expression."""
    if text == "linears":
        return make_scorer(setup, "label", model=model, retention=False).parameters
    spelt = text.replace(".", r"\.").replace("*", ".*").replace("?", ".")
    every = model.named_parameters(remove_duplicate=False)
    return {name: p for name, p in every if re.fullmatch(spelt, name)}


def _label_over(
    setup: Setup, model: ReferenceDecoder, parameters: str, everything: dict[str, Tensor]
) -> TokenValues:
    """Label values over these parameters, by their oracle; what the scorer found."""
    scorer = make_scorer(setup, "label", model=model, retention=False, parameters=parameters)
    known = {id(p) for p in scorer.parameters.values()}
    assert known == {id(p) for p in everything.values()}
    assert len(scorer.parameters) == len(known)
    values = quiet_score(scorer, setup.case.batch)
    m = gradients.validation_gradient(model, forward_of(model), setup.case.validation, everything)
    expected, scale = label_truth(setup, model, everything, m)
    close(values.total, expected, scale, MODEL, name=f"label, {parameters}")
    assert torch.equal(values.total, values.adaptation)
    return values


@given(setups() | setups(tied_linears=True, mlp="gated") | setups(conv_mixer=True))
@example(Setup(SHARED, 1))
@example(Setup(make_case(("pprrr",), (("pprr",),), hidden_mixer=True), "all"))
@budget(0.25)
def test_label_is_the_row_sums(setup: Setup) -> None:
    """label = row sums of Psi; nothing is unassigned.

    Proves: label is the row sums (exact), against ``row_sums``, ``exact_influence``.
    """
    values = quiet_score(make_scorer(setup, "label"), setup.case.batch)
    compare_values(values, setup, readout(setup, influence.row_sums), None, name="label")
    assert not bool(values.unassigned.any())


@given(setups(), sampled_from([2.0**80, 2.0**-80]))
@budget(0.05)
def test_label_is_linear_in_m(setup: Setup, factor: float) -> None:
    """label along ``factor * M``, a power of two far from 1: ``factor`` times those along M.

    Proves: label is linear in m (exact), against values along M.
    """
    model = setup.case.model()
    scorer = make_scorer(setup, "label", model=model)
    m = scorer.direction.total()
    batch = read_batch(setup.case.batch)
    near = label_values(scorer.adapter, batch, m)
    far = label_values(scorer.adapter, batch, {n: factor * x for n, x in m.items()})
    assert bool(near.any())
    scale = near.abs().sum()
    close(far / factor, near, scale, MODEL, name="label, linear in M")


@given(setups())
@example(Setup(SHARED))
@example(Setup(PADDED))
@budget(0.15)
def test_label_over_all_parameters(setup: Setup) -> None:
    """parameters="all": <grad l_k, M> over embeddings, norms, head, sinks and tied weights too.

    Proves: eq. grad_alignment (exact), against ``label_values``, ``per_token_gradients``,
    ``response_tokens``.
    """
    model = setup.case.model()
    everything = dict(model.named_parameters())
    _label_over(setup, model, "all", everything)


@given(setups(), sampled_from(NAMED))
@example(Setup(SHARED), "head.weight")
@example(Setup(SHARED), "layers.[12].mlp_norm.*")
@budget(0.15)
def test_label_over_named_parameters(setup: Setup, parameters: str) -> None:
    """parameters="linears,*norm*": <grad l_k, M> over what the names choose; observed as well.

    Proves: eq. grad_alignment (exact), against ``label_values``, ``per_token_gradients``,
    ``response_tokens``.
    """
    model = setup.case.model()
    parts = [_part(setup, model, text.strip()) for text in parameters.split(",")]
    if not all(parts):  # a decoder of one layer has no layers.1
        with pytest.raises(ConfigError, match="fits no trainable parameter"):
            make_scorer(setup, "label", model=model, retention=False, parameters=parameters)
        return
    chosen = {id(p) for part in parts for p in part.values()}
    wanted = {name: p for name, p in model.named_parameters() if id(p) in chosen}
    values = _label_over(setup, model, parameters, wanted)
    scorer = make_scorer(setup, "label", model=model, retention=False, parameters=parameters)
    # No layer below the lowest one that is chosen takes part in any graph.
    held = [chosen & {id(p) for p in block.parameters()} for block in model.layers]
    inside = chosen == set().union(*held)
    assert scorer.scored.first == (min(i for i, own in enumerate(held) if own) if inside else None)
    with quiet(), scorer.observe() as observed:
        again = observed.values(model.train()(**setup.case.inputs), setup.case.batch["labels"])
    scale = values.total.abs().max() + 1e-30
    close(again.total, values.total, scale, MODEL, name="label, observed")


def test_the_model_keeps_its_parameters_when_a_block_is_used_twice() -> None:
    """torch's tie_weights swaps a place twice here, and would leave the dual tensors behind."""
    model = SHARED.model()
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    Scorer(model, SHARED.validation, config=ScorerConfig(estimator="label")).score(SHARED.batch)
    after = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    assert after == before
    assert all(isinstance(p, torch.nn.Parameter) for p in model.parameters())


def test_a_zero_direction_gives_zero_values() -> None:
    case = make_case(("pprrr",), (("pprr",),), layers=1)
    model = case.model()
    with torch.no_grad():
        for p in model.head.parameters():
            p.zero_()  # the loss no longer depends on anything below
    values = Scorer(model, case.validation, config=ScorerConfig(estimator="label", layers=1)).score(
        case.batch
    )
    assert not bool(values.total.any())
