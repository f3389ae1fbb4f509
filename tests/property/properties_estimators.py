"""Claims about the estimators, each through ``Scorer`` against the oracles; see ``properties``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from alphatoken import TokenValues
from alphatoken.errors import ConfigError
from alphatoken.estimate.forward_mode import label_values
from alphatoken.model.batch import read_batch
from alphatoken.oracle import gradients, influence, propagation
from tests.property.decoder import ReferenceAdapter, ReferenceDecoder
from tests.property.properties import (
    MODEL,
    Columns,
    Setup,
    compare_values,
    forward_of,
    layer_indices,
    make_scorer,
    propagated,
    quiet,
    quiet_score,
    readout,
    scored,
    seen_attention,
    summed_gradient,
    truth,
    zeros,
)
from tests.property.tolerance import close

# --- exact readouts ------------------------------------------------------------------------------


def check_direct_is_the_diagonal(setup: Setup) -> None:
    """direct = diag(Psi), exactly; its causal part is zero."""
    values = quiet_score(make_scorer(setup, "direct"), setup.case.batch)
    compare_values(values, setup, readout(setup, influence.diagonal), zeros(setup), name="direct")


def check_path_is_the_column_sums(setup: Setup) -> None:
    """path = column sums of Psi, the prompt's in ``unassigned``."""
    values = quiet_score(make_scorer(setup, "path"), setup.case.batch)
    compare_values(values, setup, readout(setup, influence.column_sums), None, name="path")


def check_label_is_the_row_sums(setup: Setup) -> None:
    """label = row sums of Psi; nothing is unassigned."""
    values = quiet_score(make_scorer(setup, "label"), setup.case.batch)
    compare_values(values, setup, readout(setup, influence.row_sums), None, name="label")
    assert not bool(values.unassigned.any())


def check_label_is_linear_in_m(setup: Setup, factor: float) -> None:
    """label along ``factor * M``, a power of two far from 1: ``factor`` times those along M."""
    model = setup.case.model()
    scorer = make_scorer(setup, "label", model=model)
    m = scorer.direction.total()
    batch = read_batch(setup.case.batch)
    near = label_values(scorer.adapter, batch, m)
    far = label_values(scorer.adapter, batch, {n: factor * x for n, x in m.items()})
    assert bool(near.any())
    scale = near.abs().sum()
    close(far / factor, near, scale, MODEL, name="label, linear in M")


def check_totals_are_the_gradient_along_m(setup: Setup) -> None:
    """path and label: total + unassigned = <grad L, M>, by one ordinary backward of the oracle."""
    t = truth(setup)
    found = summed_gradient(setup, setup.case.model())
    for estimator in ("path", "label"):
        scorer = make_scorer(setup, estimator)
        values = quiet_score(scorer, setup.case.batch)
        m = scorer.direction.total()
        expected = torch.stack([(g * m[n]).sum() for n, g in found.items()])
        scale = torch.stack([i.absolute_scale.sum() for i in t.influences])
        close(
            values.total.sum() + values.unassigned.sum(),
            expected.sum(),
            scale[0] + abs(values.stability_weight) * scale[1],
            MODEL,
            name=f"{estimator}, <grad L, M>",
        )


def check_one_label_position_makes_all_coincide(setup: Setup) -> None:
    """T = 1: every estimator gives the same values, and no causal part."""
    reference = quiet_score(make_scorer(setup, "label"), setup.case.batch).total
    scale = sum(c.scale * w for c, w in zip(readout(setup, _rows), (1.0, 1.5), strict=True))
    scale = influence.to_token_index(torch.as_tensor(scale))
    for estimator in ("direct", "path", "alphatoken", "same_layer_hop", "paper_literal"):
        values = quiet_score(make_scorer(setup, estimator), setup.case.batch)
        close(values.total, reference, scale, MODEL, name=f"T = 1, {estimator}")
        if values.adaptation_causal is not None:
            nothing = torch.zeros_like(reference)
            close(values.adaptation_causal, nothing, scale, MODEL, name="T = 1, no causal part")


def _rows(matrix: Tensor) -> Tensor:
    return matrix.sum(2)


# --- the causal part -----------------------------------------------------------------------------


def check_alphatoken_is_direct_plus_propagation(
    setup: Setup, window: int | None, head_reduction: str, position: str
) -> None:
    """The paper's estimator: diagonal plus Value-Propagation of the self-only errors."""
    scorer = make_scorer(
        setup,
        "alphatoken",
        window=window,
        head_reduction=head_reduction,
        causal_position=position,
    )
    compare_values(
        quiet_score(scorer, setup.case.batch),
        setup,
        readout(setup, influence.diagonal),
        propagated(setup, window=window, head_reduction=head_reduction),
        position=position,
        name=f"alphatoken, {head_reduction}, {position}",
    )


def check_paper_literal(setup: Setup, window: int | None, position: str) -> None:
    """Column sums plus head-mean Value-Propagation of the aggregated errors."""
    scorer = make_scorer(setup, "paper_literal", window=window, causal_position=position)
    compare_values(
        quiet_score(scorer, setup.case.batch),
        setup,
        readout(setup, influence.column_sums),
        propagated(setup, window=window, head_reduction="mean", aggregated=True),
        position=position,
        name="paper_literal",
    )


def check_no_window_no_causal_part(setup: Setup) -> None:
    """W = 0: alphatoken is direct, bit by bit."""
    without = quiet_score(make_scorer(setup, "alphatoken", window=0), setup.case.batch)
    direct = quiet_score(make_scorer(setup, "direct"), setup.case.batch)
    assert without.adaptation_causal is not None
    assert without.stability_causal is not None
    assert not bool(without.adaptation_causal.any())
    assert not bool(without.stability_causal.any())
    assert torch.equal(without.total, direct.total)


def check_a_window_as_long_as_the_row_is_no_window(setup: Setup) -> None:
    """W >= T equals W = None."""
    length = setup.case.batch["labels"].shape[1]
    wide = quiet_score(make_scorer(setup, "alphatoken", window=length), setup.case.batch)
    free = quiet_score(make_scorer(setup, "alphatoken", window=None), setup.case.batch)
    scale = propagated(setup, window=None)
    for found, expected, side in (
        (wide.adaptation_causal, free.adaptation_causal, scale[0]),
        (wide.stability_causal, free.stability_causal, scale[1]),
    ):
        assert found is not None
        assert expected is not None
        close(found, expected, influence.to_token_index(side.scale), MODEL, name="W = T")


def check_same_layer_hop_is_one_hop_within_the_layer(setup: Setup) -> None:
    """Per scored layer, the one hop of the self-only errors to that layer's own projections."""
    adapter = setup.case.adapter()
    model = adapter.model
    sides = []
    for direction in truth(setup).directions:
        pairs = torch.zeros(1, dtype=torch.float64)
        for layer in layer_indices(setup):
            alone = Setup(setup.case, (layer,), setup.score_bias)
            linears = scored(alone, adapter)
            with seen_attention(alone, adapter) as seen:
                pairs = pairs + propagation.one_hop(
                    model,
                    forward_of(model),
                    setup.case.batch,
                    {linear.name: linear.module for linear in linears},
                    direction,
                    lambda seen=seen: [
                        propagation.Hop(s.call.key, s.call.value, s.output) for s in seen
                    ],
                    score_bias=setup.score_bias,
                    transposed=[linear.name for linear in linears if linear.transposed],
                )
        sides.append(pairs.sum(1))
    # A hop is a part of the off-diagonal of Psi; its terms are no larger than all of Psi's.
    scales = [i.absolute_scale.sum((1, 2)).unsqueeze(1) for i in truth(setup).influences]
    columns = [
        Columns(value, scale.expand_as(value)) for value, scale in zip(sides, scales, strict=True)
    ]
    compare_values(
        quiet_score(make_scorer(setup, "same_layer_hop"), setup.case.batch),
        setup,
        readout(setup, influence.diagonal),
        (columns[0], columns[1]),
        name="same_layer_hop",
    )


def check_same_layer_hop_of_the_last_layer_is_path(setup: Setup) -> None:
    """K = 1: direct part the diagonal, causal part all of the rest of the column.

    The library gets the hop as the kernel's backward minus its k = t terms, so rounding is relative
    to the whole column, diagonal included.
    """
    rest = zip(readout(setup, influence.causal), readout(setup, influence.column_sums), strict=True)
    first, second = (Columns(part.value, column.scale) for part, column in rest)
    compare_values(
        quiet_score(make_scorer(setup, "same_layer_hop"), setup.case.batch),
        setup,
        readout(setup, influence.diagonal),
        (first, second),
        name="same_layer_hop, K = 1",
    )


def check_propagation_is_exact_for_the_last_value_projection(setup: Setup) -> None:
    """K = 1, W = T, per head: the off-diagonal of Psi of the value projection alone."""
    model = setup.case.model()
    linears = scored(setup, ReferenceAdapter(model))
    name = next(n.name for n in linears if n.name.endswith(("v_proj", "qkv_proj")))
    columns = []
    for direction in truth(setup).directions:
        only = {n: torch.zeros_like(m) for n, m in direction.items()}
        rows = _value_rows(setup)
        for key in (f"{name}.weight", f"{name}.bias"):
            if key in direction:
                flip = setup.case.config.transposed and key.endswith("weight")
                kept, source = (only[key].T, direction[key].T) if flip else (
                    only[key], direction[key]
                )  # fmt: skip
                kept[rows] = source[rows]
        alone = influence.exact_influence(
            model,
            forward_of(model),
            setup.case.batch,
            {name: next(n.module for n in linears if n.name == name)},
            only,
            score_bias=setup.score_bias,
            transposed=[name] if setup.case.config.transposed else [],
        )
        columns.append(
            Columns(influence.causal(alone.matrix), influence.causal(alone.absolute_scale))
        )
    # Head by head the terms are alpha e (M x), whose sum may be larger than |delta| |M x|.
    scale = propagated(setup, window=None)
    columns = [Columns(c.value, c.scale + s.scale) for c, s in zip(columns, scale, strict=True)]
    compare_values(
        quiet_score(make_scorer(setup, "alphatoken", window=None), setup.case.batch),
        setup,
        readout(setup, influence.diagonal),
        (columns[0], columns[1]),
        name="Value-Propagation exact in the last layer",
    )


def _value_rows(setup: Setup) -> slice:
    config = setup.case.config
    width = config.kv_heads * (config.value_dim or config.head_dim)
    return slice(-width, None)


# --- label, weights, scope -----------------------------------------------------------------------


def check_label_over_all_parameters(setup: Setup) -> None:
    """parameters="all": <grad l_k, M> over embeddings, norms, head, sinks and tied weights too."""
    model = setup.case.model()
    everything = dict(model.named_parameters())
    _check_label_over(setup, model, "all", everything)


NAMED = (
    "*norm*",
    "linears,*norm*,embedding.weight",
    "head.weight",
    "layers.0.*",
    "layers.[12].mlp_norm.*",
    "final_norm.*, linears",
    "*attention.?_proj.weight,head.*",
)
"""Choices by name: below, between, inside and above the scored layers; a tied head's alias."""


def check_label_over_named_parameters(setup: Setup, parameters: str) -> None:
    """parameters="linears,*norm*": <grad l_k, M> over what the names choose; observed as well."""
    model = setup.case.model()
    parts = [_part(setup, model, text.strip()) for text in parameters.split(",")]
    if not all(parts):  # a decoder of one layer has no layers.1
        with pytest.raises(ConfigError, match="fits no trainable parameter"):
            make_scorer(setup, "label", model=model, retention=False, parameters=parameters)
        return
    chosen = {id(p) for part in parts for p in part.values()}
    wanted = {name: p for name, p in model.named_parameters() if id(p) in chosen}
    values = _check_label_over(setup, model, parameters, wanted)
    scorer = make_scorer(setup, "label", model=model, retention=False, parameters=parameters)
    # No layer below the lowest one that is chosen takes part in any graph.
    held = [chosen & {id(p) for p in block.parameters()} for block in model.layers]
    inside = chosen == set().union(*held)
    assert scorer.scored.first == (min(i for i, own in enumerate(held) if own) if inside else None)
    inputs = {name: x for name, x in setup.case.batch.items() if name != "labels"}
    with quiet(), scorer.observe() as observed:
        again = observed.values(model.train()(**inputs), setup.case.batch["labels"])
    scale = values.total.abs().max() + 1e-30
    close(again.total, values.total, scale, MODEL, name="label, observed")


def _part(setup: Setup, model: ReferenceDecoder, text: str) -> dict[str, Tensor]:
    """What one part of a choice means, by a regular expression."""
    if text == "linears":
        return make_scorer(setup, "label", model=model, retention=False).parameters
    spelt = text.replace(".", r"\.").replace("*", ".*").replace("?", ".")
    every = model.named_parameters(remove_duplicate=False)
    return {name: p for name, p in every if re.fullmatch(spelt, name)}


def _check_label_over(
    setup: Setup, model: ReferenceDecoder, parameters: str, everything: dict[str, Tensor]
) -> TokenValues:
    """Label values over these parameters, by their oracle; what the scorer found."""
    scorer = make_scorer(setup, "label", model=model, retention=False, parameters=parameters)
    known = {id(p) for p in scorer.parameters.values()}
    assert known == {id(p) for p in everything.values()}
    assert len(scorer.parameters) == len(known)
    values = quiet_score(scorer, setup.case.batch)
    m = gradients.validation_gradient(model, forward_of(model), setup.case.validation, everything)
    expected = gradients.label_values(model, forward_of(model), setup.case.batch, m)
    scale = torch.zeros_like(expected)
    tokens = gradients.response_tokens(gradients.known_labels(setup.case.batch))
    each = gradients.per_token_gradients(model, forward_of(model), setup.case.batch, everything)
    for (b, i), gradient in zip(tokens, each, strict=True):
        scale[b, i] = sum((g.abs() * m[n].abs()).sum() for n, g in gradient.items())
    close(values.total, expected, scale, MODEL, name=f"label, {parameters}")
    assert torch.equal(values.total, values.adaptation)
    return values


def check_weighted_losses(setup: Setup, weights: Tensor) -> None:
    """token_weights (any sign) scale the rows of Psi, before and after which nothing changes."""
    batch = {k: v for k, v in setup.case.batch.items() if k != "labels"}
    labels = setup.case.batch["labels"]
    expectations: Mapping[str, tuple[Any, Any]] = {
        "direct": (readout(setup, influence.diagonal, weights), zeros(setup)),
        "path": (readout(setup, influence.column_sums, weights), None),
        "label": (readout(setup, influence.row_sums, weights), None),
    }
    for estimator, (direct, causal) in expectations.items():
        model = setup.case.model()
        scorer = make_scorer(setup, estimator, model=model)
        with quiet(), scorer.observe() as observed:
            logits = model(**batch)
            values = observed.values(logits, labels, token_weights=weights)
        compare_values(values, setup, direct, causal, name=f"{estimator}, weighted")


def check_label_is_the_row_sums_along(setup: Setup) -> None:
    """label against per-token autograd over its own parameters, captured by linears or not."""
    model = setup.case.model()
    scorer = make_scorer(setup, "label", model=model, retention=False)
    values = quiet_score(scorer, setup.case.batch)
    parameters = dict(scorer.parameters)
    m = gradients.validation_gradient(model, forward_of(model), setup.case.validation, parameters)
    expected = gradients.label_values(model, forward_of(model), setup.case.batch, m)
    scale = sum(g.abs().sum() for g in m.values()) + 1.0
    close(values.total, expected, torch.as_tensor(scale), MODEL, name="label, own parameters")
