"""The eleven gaps of the paper, each shown in numbers: what holds, and what does not.

Numbering as in docs/paper-gaps.md. Every test has both sides: the statement that the library
stands on, and a number that rules the other reading out.
"""

from __future__ import annotations

import inspect
import math

import torch
from torch import Tensor

from alphatoken import FisherDrift, Scorer, ScorerConfig, fit_fisher
from alphatoken.data.rows import Row, Turn
from alphatoken.data.split import split_pools
from alphatoken.direction import preconditioner
from alphatoken.oracle import gradients, influence, jacobian, utility
from alphatoken.select import masks as selection
from tests.property import properties_algebra as algebra
from tests.property.decoder import ReferenceAdapter
from tests.property.properties import (
    MODEL,
    Setup,
    drift_of,
    forward_of,
    make_scorer,
    parameters_of,
    propagated,
    quiet_score,
    scored,
    summed_gradient,
    truth,
)
from tests.property.strategies import make_case
from tests.property.tolerance import close

CASE = make_case(
    ("pppprrrr",), (("ppprr",), ("prrr.", "..prr")), layers=3, heads=4, kv_heads=2, seed=5
)
ALL, LAST = Setup(CASE, "all"), Setup(CASE, 1)
ONE_HEAD = Setup(make_case(("pprrrrr",), (("ppprr",),), layers=3, heads=1, kv_heads=1, seed=2), 1)


def far(one: Tensor, two: Tensor, share: float = 0.01) -> bool:
    """They differ by more than this share of the larger one."""
    size = max(float(one.abs().max()), float(two.abs().max()))
    return float((one - two).abs().max()) > share * size


def test_gap_01_only_the_diagonal_as_self_term_and_all_positions_recover_the_gradient() -> None:
    t = truth(ALL)
    psi, scale = t.influences[0].matrix, t.influences[0].absolute_scale.sum()
    model = CASE.model()
    found = summed_gradient(ALL, model)
    whole = torch.stack([(g * t.directions[0][n]).sum() for n, g in found.items()]).sum()
    self_term, causal = influence.diagonal(psi), influence.causal(psi)
    close((self_term + causal).sum(), whole, scale, MODEL, name="diagonal + causal, all positions")
    responses = torch.zeros_like(self_term)
    responses[:, :-1] = t.mask[:, 1:].double()
    assert far(((self_term + causal) * responses).sum(), whole)  # the prompt's share is missing
    full = influence.row_sums(psi)  # the whole grad l_t as self term counts the off-diagonal twice
    close((full + causal).sum(), whole + causal.sum(), scale, MODEL, name="full self term")
    assert far((full + causal).sum(), whole)


def test_gap_02_the_gradient_of_one_token_has_a_rank_up_to_its_position() -> None:
    # Distinct tokens: equal ones at the start have equal inputs, which lowers the rank.
    case = make_case(("pppprrrr",), (("pprr",),), layers=3, vocabulary=100, seed=2)
    assert len(set(case.batch["input_ids"].flatten().tolist())) == 8
    model = case.model()
    name = "layers.0.attention.o_proj.weight"
    weight = {name: dict(model.named_parameters())[name]}
    ranks = [
        int(torch.linalg.matrix_rank(one[name], rtol=1e-9))
        for one in gradients.per_token_gradients(model, forward_of(model), case.batch, weight)
    ]
    positions = [i - 1 for _, i in gradients.response_tokens(gradients.known_labels(case.batch))]
    assert ranks == [p + 1 for p in positions]  # positions 0 .. p, one outer product each
    top = {n: p for n, p in model.named_parameters() if n == "layers.2.mlp.down_proj.weight"}
    for one in gradients.per_token_gradients(model, forward_of(model), case.batch, top):
        # Above the last attention a weight is used by the token's own position only.
        assert int(torch.linalg.matrix_rank(next(iter(one.values())), rtol=1e-9)) == 1


def test_gap_03_aggregated_errors_plus_propagation_count_the_causal_path_twice() -> None:
    batch = ONE_HEAD.case.batch
    values = {
        name: quiet_score(make_scorer(ONE_HEAD, name), batch)
        for name in ("alphatoken", "path", "direct", "paper_literal")
    }
    scale = influence.to_token_index(truth(ONE_HEAD).influences[0].absolute_scale.sum(1))
    # One head, one layer: path already holds the causal part, and paper_literal adds it again.
    once = values["alphatoken"].adaptation_causal
    assert once is not None
    again = values["paper_literal"].adaptation - values["path"].adaptation
    close(again, once, scale, MODEL, name="the second count")
    assert far(values["path"].adaptation, values["direct"].adaptation)  # the first count
    assert float(once.abs().max()) > 0.01 * float(values["direct"].adaptation.abs().max())


def test_gap_04_the_validation_gradient_needs_all_positions_and_aggregated_errors() -> None:
    model = CASE.model()
    adapter = ReferenceAdapter(model)
    linear = next(n for n in scored(ALL, adapter) if n.name.endswith("0.mlp.up_proj"))
    batch = CASE.validation[0]
    with influence.recorded_uses({linear.name: linear.module}) as uses:
        losses = gradients.run_losses(forward_of(model), batch)
    (use,) = uses
    each = {
        token: torch.autograd.grad(loss, use.s, retain_graph=True)[0]
        for token, loss in losses.items()
    }
    aggregated = torch.stack(list(each.values())).sum(0) / len(each)
    own = torch.zeros_like(aggregated)
    for (b, i), error in each.items():
        own[b, i - 1] = error[b, i - 1] / len(each)
    label = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    label[:, :-1] = (batch["labels"][:, 1:] != -100).double()

    def outer(error: Tensor) -> Tensor:
        return torch.einsum("bto,bti->oi", error, use.x)

    config = ScorerConfig("path", layers="all")
    built = Scorer(model, batch, config=config).direction.adaptation[linear.weight_name]
    scale = torch.einsum("bto,bti->oi", aggregated.abs(), use.x.abs())
    close(built, outer(aggregated), scale, MODEL, name="G, all positions")
    assert far(outer(aggregated * label.unsqueeze(-1)), built)  # prompt positions dropped
    assert far(outer(own), built)  # self-only errors


def test_gap_05_a_token_is_predicted_at_one_position_and_read_at_the_next() -> None:
    found = {
        position: quiet_score(
            make_scorer(ALL, "alphatoken", causal_position=position, window=2), CASE.batch
        )
        for position in ("label", "context")
    }
    one, two = found["label"], found["context"]
    assert torch.equal(one.adaptation_direct, two.adaptation_direct)  # type: ignore[arg-type]
    label, context = one.adaptation_causal, two.adaptation_causal
    assert label is not None
    assert context is not None
    both = one.mask[:, :-1] & one.mask[:, 1:]
    # The column where token i is read is the one where token i + 1 is predicted.
    assert torch.equal(context[:, :-1][both], label[:, 1:][both])
    assert far(label, context)
    columns = propagated(ALL, window=2)[0]
    close(context, columns.value * one.mask, columns.scale, MODEL, name="context")


def test_gap_06_attention_weights_belong_to_a_head() -> None:
    exact = influence.to_token_index(influence.causal(_value_terms()))
    errors = {}
    for reduction in ("per_head", "mean"):
        scorer = make_scorer(LAST, "alphatoken", head_reduction=reduction)
        values = quiet_score(scorer, CASE.batch)
        causal = values.stability_causal
        assert causal is not None
        errors[reduction] = float((causal - exact * values.mask).abs().max())
    assert errors["per_head"] < 1e-10 * float(exact.abs().max())
    assert errors["mean"] > 0.02 * float(exact.abs().max())
    single = [
        quiet_score(make_scorer(ONE_HEAD, "alphatoken", head_reduction=r), ONE_HEAD.case.batch)
        for r in ("per_head", "mean")
    ]
    assert torch.equal(single[0].total, single[1].total)


def _value_terms() -> Tensor:
    """Psi of the last layer's value projection alone, along the stability direction."""
    return truth(LAST).influences[1].terms["layers.2.attention.v_proj"]


def test_gap_07_the_factor_of_the_bound_does_not_vanish_with_the_head_width() -> None:
    """c ||q_k|| ||W_K||, weights drawn alike at every width: it grows, though c = 1 / sqrt(d)."""

    def factor(width: int, seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        m, length = 32, 6

        def drawn(rows: int) -> Tensor:
            weight = torch.randn(rows, m, generator=generator, dtype=torch.float64)
            return weight / math.sqrt(m)

        spec = jacobian.AttentionSpec(
            drawn(width), drawn(width), drawn(width), heads=1, groups=1, scale=width**-0.5
        )
        x = torch.randn(length, m, generator=generator, dtype=torch.float64)
        state, bound = jacobian.attend(spec, x), jacobian.value_path_bound(spec, x)
        away = (state.value[0][None] - state.output[0][:, None]).norm(dim=-1)
        later = torch.ones(length, length, dtype=torch.bool).tril(-1)
        return float((bound[0] / (state.alpha[0] * away))[later].mean())

    means = {d: sum(factor(d, seed) for seed in range(10)) / 10 for d in (4, 16, 64)}
    assert means[4] < means[16] < means[64]
    assert means[64] > 1.5 * means[4]  # 1 / sqrt(d) alone would make it 4 times smaller


def test_gap_08_retention_is_silent_at_step_zero_and_on_a_factor_for_ever() -> None:
    model = CASE.model()
    fisher, _ = drift_of(ALL, model)
    named = dict(model.named_parameters())
    reference = {n: named[n].detach().clone() for n in fisher}
    scorer = Scorer(
        model, CASE.validation, FisherDrift(fisher, reference), ScorerConfig("path", layers="all")
    )
    assert not bool(quiet_score(scorer, CASE.batch).stability.any())
    with torch.no_grad():
        named["layers.1.mlp.up_proj.weight"].mul_(1.01)
    assert bool(quiet_score(scorer, CASE.batch).stability.any())

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    b = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    loss = (x @ a.T @ b.T).logsumexp(-1).sum() - (x @ a.T @ b.T)[:, 0].sum()
    grad_a, grad_b = torch.autograd.grad(loss, (a, b))
    assert not bool(grad_a.any())  # B_ref = 0: the reference does not feel A
    assert bool(grad_b.any())
    lora = FisherDrift(
        {"a.weight": grad_a.square(), "b.weight": grad_b.square()},
        {"a.weight": a.detach(), "b.weight": b.detach()},
    )
    moved = lora.direction({"a.weight": a.detach() + 1.0, "b.weight": b.detach() + 1.0})
    assert not bool(moved["a.weight"].any())
    assert bool(moved["b.weight"].any())


def test_gap_09_adam_does_not_step_along_the_gradient() -> None:
    def state_after(steps: int) -> tuple[utility.AdamState, Tensor]:
        generator = torch.Generator().manual_seed(1)
        size = torch.logspace(-2, 2, 200, dtype=torch.float64)
        state = utility.AdamState(0, {"w": torch.zeros_like(size)}, {"w": torch.zeros_like(size)})
        for _ in range(steps):
            g = size * torch.randn(200, generator=generator, dtype=torch.float64)
            _, state = utility.adam_step({"w": torch.zeros_like(size)}, {"w": g}, 0.0, state)
        return state, size * torch.randn(200, generator=generator, dtype=torch.float64)

    def errors(steps: int) -> dict[str, float]:
        state, g = state_after(steps)
        one = torch.ones_like(g)
        exact = utility.adam_step_derivative({"w": g}, {"w": one}, state)["w"]
        moments = preconditioner.adam_update(
            steps, state.m["w"], state.v["w"], *state.betas, state.eps
        )
        found = {
            "frozen": preconditioner.frozen_preconditioner(moments),
            "full": preconditioner.full_preconditioner(moments, g),
        }
        return {n: float((p - exact).norm() / exact.norm()) for n, p in found.items()}

    early, late = errors(3), errors(300)
    assert early["frozen"] > 0.3
    assert late["frozen"] < 0.05
    assert max(early["full"], late["full"]) < 1e-9
    state, g = state_after(300)
    step = utility.adam_direction(g, state.m["w"], state.v["w"], state)[0]
    assert float(torch.cosine_similarity(step, g, dim=0)) < 0.7
    # Step 1 is the gradient's sign: no token's weight moves it, to first order.
    fresh, g = state_after(0)
    silent = utility.adam_step_derivative({"w": g}, {"w": g}, fresh)["w"]
    assert float(silent.abs().max()) < 1e-3  # epsilon beside the smallest g


def test_gap_10_a_threshold_keeps_all_ties_and_a_float_ceiling_one_too_many() -> None:
    values = torch.tensor([[3.0, 2, 2, 2], [2, 2, 1, 0]])
    mask = torch.ones(2, 4, dtype=torch.bool)
    tau = values.flatten().sort(descending=True).values[selection.keep_count(0.5, 8) - 1]
    keep = selection.select_top(values, mask, 0.5)
    assert int((values >= tau).sum()) == 6
    assert keep.tolist() == [[True, True, True, True], [False, False, False, False]]
    assert math.ceil(0.55 * 100) == 56
    assert selection.keep_count(0.55, 100) == 55
    algebra.check_selection(algebra.SelectionCase(3, 9, 2, 0), 55, "batch", bottom=False)


def test_gap_11_fisher_prompts_are_held_out_and_the_reference_is_a_choice() -> None:
    assert inspect.signature(fit_fisher).parameters["samples"].default == 1000
    rows = [
        Row(i, f"rows, {i}", (Turn("user", f"question {i}"), Turn("assistant", f"answer {i}")))
        for i in range(10)
    ]
    pools = split_pools(rows, validation_rows=2, fisher_rows=3)
    prompts = [{row.prompt for row in pool} for pool in (pools.train, pools.fisher)]
    assert len(pools.fisher) == 3
    assert not prompts[0] & prompts[1]
    # SFT measures drift from the pre-trained model, DPO from the warm-started one.
    model = CASE.model()
    fisher, _ = drift_of(ALL, model)
    named = parameters_of(ALL, ReferenceAdapter(model))
    pretrained = {n: p.detach().clone() for n, p in named.items()}
    with torch.no_grad():
        for p in named.values():
            p.mul_(1.01)
    warm = {n: p.detach().clone() for n, p in named.items()}
    assert all(bool(v.any()) for v in FisherDrift(fisher, pretrained).direction(named).values())
    assert not any(bool(v.any()) for v in FisherDrift(fisher, warm).direction(named).values())
