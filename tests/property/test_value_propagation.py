"""Value-Propagation: the banded sum itself, and the paper's causal part through the scorer."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken.model import attention
from alphatoken.model.protocol import AttentionCall
from alphatoken.oracle import influence
from tests.property.decoder import ReferenceAdapter
from tests.property.profiles import budget
from tests.property.setups import (
    CONTRACTION,
    Columns,
    Setup,
    attention_weights,
    compare_values,
    forward_of,
    make_scorer,
    propagated,
    quiet_score,
    readout,
    scored,
    setups,
    truth,
)
from tests.property.strategies import make_case
from tests.property.test_attention import AttentionCase, attention_cases, blocks_of
from tests.property.tolerance import close


def _value_rows(setup: Setup) -> slice:
    config = setup.case.config
    width = config.kv_heads * (config.value_dim or config.head_dim)
    return slice(-width, None)


def explicit_propagation(
    case: AttentionCase, call: AttentionCall, window: int | None, head_mean: bool
) -> tuple[Tensor, Tensor]:
    """e~ (b, g, t, v) and its scale, with the whole of alpha."""
    k = torch.arange(case.t).unsqueeze(-1)
    j = torch.arange(case.t)
    band = (j < k) & (k <= j + (case.t if window is None else window))
    alpha, error = attention_weights(call) * band, case.error()
    results = []
    for e in (error, error.abs()):
        if head_mean:
            by_group = e.unflatten(1, (case.g, case.r)).sum(2)
            results.append(torch.einsum("bkt,bgkv->bgtv", alpha.mean(1), by_group))
        else:
            each = torch.einsum("bhkt,bhkv->bhtv", alpha, e)
            results.append(each.unflatten(1, (case.g, case.r)).sum(2))
    return results[0], results[1]


WINDOWS = st.sampled_from([None, 0, 1, 2, 3, 5, 9])
GROUPED = Setup(
    make_case(
        ("pprrrrr.", "..pprrrr"), (("pprr",), ("prrr.", "..prr")), layers=3, heads=6, kv_heads=2,
        value_dim=3, softcap=2.0, sinks=True, windows=(None, 3, None), bias=True,
    ),
    "all",
)  # fmt: skip


@given(
    attention_cases() | attention_cases(t=st.integers(60, 150), b=1, d=2, v=1),
    WINDOWS | st.sampled_from([63, 64, 65, 100]),
    st.booleans(),
)
def test_value_propagation(case: AttentionCase, window: int | None, head_mean: bool) -> None:
    """e~_t = sum over k in (t, t + W] of alpha_kt e_k, per head or with the head mean of alpha.

    Proves: value propagation (approximate), against explicit attention.
    """
    call = case.call()
    expected, scale = explicit_propagation(case, call, window, head_mean)
    with blocks_of(case.chunk):
        statistics = attention.AttentionStatistics(call)
        found = attention.propagate_values(
            statistics, case.error(), window=window, head_mean=head_mean
        )
    # alpha carries a relative error of eps |logit|, and logits here stay below 100.
    close(found, expected, scale, CONTRACTION, name=f"Value-Propagation, {head_mean=}")


@given(setups(), WINDOWS)
@example(GROUPED, 2)
@example(GROUPED, None)
@budget(0.25)
def test_alphatoken_is_direct_plus_propagation(setup: Setup, window: int | None) -> None:
    """The paper's estimator: diagonal plus Value-Propagation of the self-only errors.

    Proves: eqs. phi_proxy, phi_tgt_causal, phi_total, app_causal_rank1 (approximate), against
    ``value_propagation``, ``head_output_errors``.
    """
    compare_values(
        quiet_score(make_scorer(setup, "alphatoken", window=window), setup.case.batch),
        setup,
        readout(setup, influence.diagonal),
        propagated(setup, window=window),
        name="alphatoken",
    )


@given(setups(), WINDOWS)
@example(GROUPED, 2)
@budget(0.15)
def test_paper_literal(setup: Setup, window: int | None) -> None:
    """Column sums plus head-mean Value-Propagation of the aggregated errors.

    Proves: paper literal (approximate), against ``value_propagation``.
    """
    compare_values(
        quiet_score(make_scorer(setup, "paper_literal", window=window), setup.case.batch),
        setup,
        readout(setup, influence.column_sums),
        propagated(setup, window=window, head_reduction="mean", aggregated=True),
        name="paper_literal",
    )


@given(setups())
@budget(0.1)
def test_no_window_no_causal_part(setup: Setup) -> None:
    """W = 0: alphatoken is direct, bit by bit.

    Proves: no window no causal part (exact), against direct, bit by bit.
    """
    without = quiet_score(make_scorer(setup, "alphatoken", window=0), setup.case.batch)
    direct = quiet_score(make_scorer(setup, "direct"), setup.case.batch)
    assert without.adaptation_causal is not None
    assert without.stability_causal is not None
    assert not bool(without.adaptation_causal.any())
    assert not bool(without.stability_causal.any())
    assert torch.equal(without.total, direct.total)


@given(setups(last=True, repeated_block=False))
@example(Setup(GROUPED.case, 1))
@budget(0.2)
def test_propagation_is_exact_for_the_last_value_projection(setup: Setup) -> None:
    """K = 1, W = T, per head: the off-diagonal of Psi of the value projection alone.

    Proves: eq. app_aa_causal (exact), against ``exact_influence``, ``value_propagation``.
    """
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
