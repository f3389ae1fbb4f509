"""The gaps of the paper, each shown in numbers: what holds, and what does not.

Numbering as in docs/paper-gaps.md. Every test has both sides: the statement that the library
stands on, and a number that rules the other reading out. From 12 on they are about how a run is
set: default, recipe, and what the difference does; these need TRL.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from alphatoken import FisherDrift, Scorer, ScorerConfig, fit_fisher
from alphatoken.data.rows import Row, Turn
from alphatoken.data.split import split_pools
from alphatoken.direction import preconditioner
from alphatoken.oracle import gradients, influence, jacobian, utility
from alphatoken.select import masks as selection
from alphatoken.select.losses import masked_dpo_loss
from tests.property import test_fisher as fits
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


# --- settings of a run --------------------------------------------------------------------------

TASKS = ("magicoder", "metamath", "ultrachat", "ultrafeedback")
BACKBONES = ("llama", "gemma", "qwen")
VALUED = [f"{task}-{model}" for task in TASKS if task != "ultrachat" for model in BACKBONES]
PAIRS = [name for name in VALUED if name.startswith("ultrafeedback")]
EVERY = [f"{task}-{model}" for task in TASKS for model in BACKBONES]


@pytest.fixture(autouse=True)
def settings_need_trl(request: pytest.FixtureRequest) -> None:
    """Rows 12 to 36 of the page are about options of its trainers and commands."""
    number = re.match(r"test_gap_(\d+)", request.node.name)
    if number is None or 12 <= int(number[1]) <= 36:
        pytest.importorskip("trl")


@cache
def arguments(name: str, *words: str) -> Any:
    """A packaged recipe as the command line reads it; a name of no recipe: the defaults alone."""
    from alphatoken.cli.arguments import read_arguments
    from alphatoken.cli.training import trainer_of

    command = "dpo" if name in (*PAIRS, "dpo") else "sft"
    recipe = ["--config", name] if name in EVERY else ["--output_dir", "out", "--bf16", "false"]
    return read_arguments(command, [*recipe, "--dry-run", *words], trainer_of(command)[0])


def recipe_values(option: str, names: Any = EVERY) -> set[Any]:
    """What the recipes say of one option of the trainer."""
    return {getattr(arguments(name).training, option) for name in names}


def default(option: str, command: str = "sft") -> Any:
    return getattr(arguments(command).training, option)


def adam_steps(gradients_of_steps: list[Tensor], eps: float = 1e-8) -> Tensor:
    """Where AdamW without decay takes a weight of zero along these gradients."""
    weight = torch.zeros_like(gradients_of_steps[0], requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.0, eps=eps)
    for gradient in gradients_of_steps:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def drawn_gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [
        scale * torch.randn(40, generator=generator, dtype=torch.float64)
        for scale in (1.0, 0.1, 3.0, 0.5)
    ]


def test_gap_12_the_loss_is_a_sum_over_kept_tokens() -> None:
    from alphatoken.train.micro_batch import MicroBatch, normalised

    mask = torch.tensor([[False, True, True, True, True]])
    kept = torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0]])
    losses = torch.tensor([[0.0, 0.5, 2.0, 1.0, 4.0]])
    batch = MicroBatch({}, torch.zeros(1, 5), mask, [slice(0, 1)], lambda m, _: 1 / int(m.sum()))
    mean = 1 / int(mask.sum())  # the trainer's own divisor, in its coefficients already

    def loss(kind: str) -> float:
        return float((mean * normalised(kept, batch, kind) * losses).sum())

    assert loss("sum") == pytest.approx(5.5)  # eq. sft_masked_loss
    assert loss("response") == pytest.approx(5.5 / 4)
    assert recipe_values("kept_normalization", set(VALUED) - set(PAIRS)) == {"sum"}
    assert recipe_values("kept_normalization", PAIRS) == {"response"}  # a mean over pairs
    assert default("kept_normalization") == "response"
    # One constant factor at every step: AdamW's steps are the same, but for epsilon.
    steps = drawn_gradients()
    thousand = adam_steps([1000 * g for g in steps])
    close(adam_steps(steps, eps=0.0), adam_steps([1000 * g for g in steps], eps=0.0), 1.0, MODEL)
    assert float((adam_steps(steps) - thousand).abs().max()) < 1e-6
    tiny = [1e-8 * g for g in steps]
    assert far(adam_steps(tiny), adam_steps([1000 * g for g in tiny]))  # epsilon is felt here


def test_gap_13_clipping_is_no_constant_factor() -> None:
    def clipped(steps: list[Tensor]) -> list[Tensor]:
        return [g * min(1.0, 1.0 / float(g.norm())) for g in steps]

    steps = drawn_gradients()
    large = [1000 * g for g in steps]
    assert far(adam_steps(clipped(large)), adam_steps(large))
    norms = {round(float(g.norm()), 9) for g in clipped(large)}
    assert norms == {1.0}  # every step of a sum has one length, whatever its batch was
    assert recipe_values("max_grad_norm") == {0.0}
    assert default("max_grad_norm") == 1.0


def test_gap_14_a_threshold_of_the_batch_is_not_one_of_each_micro_batch() -> None:
    from alphatoken.train.distributed import Ranks, global_selection

    values = [torch.tensor([[9.0, 8.0, 7.0, 6.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])]
    masks = [torch.ones(1, 4, dtype=torch.bool)] * 2

    def half(v: Tensor, m: Tensor) -> Tensor:
        return selection.select_top(v, m, 0.5).to(v)

    class Alone:
        num_processes, process_index, device = 1, 0, torch.device("cpu")

    whole = global_selection(Ranks(Alone()), values, masks, half)
    assert [int(w.sum()) for w in whole] == [4, 0]
    assert [int(half(v, m).sum()) for v, m in zip(values, masks, strict=True)] == [2, 2]
    assert recipe_values("keep_scope", VALUED) == {"global"}
    assert default("keep_scope") == "batch"


def test_gap_15_validation_rows_beside_training_rows_or_alone_give_one_gradient() -> None:
    model = CASE.model()
    parameters = parameters_of(ALL, ReferenceAdapter(model))
    alone, training = CASE.validation[0], CASE.batch
    width = max(alone["input_ids"].shape[1], training["input_ids"].shape[1])

    def padded(batch: Any, name: str, value: int) -> Tensor:
        given = batch.get(name)
        given = torch.ones_like(batch["input_ids"]) if given is None else given
        return torch.nn.functional.pad(given, (0, width - given.shape[1]), value=value)

    fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    joint = {n: torch.cat([padded(b, n, v) for b in (training, alone)]) for n, v in fills.items()}
    rows = len(training["input_ids"])
    losses = gradients.run_losses(forward_of(model), joint)
    there = [loss for (row, _), loss in losses.items() if row >= rows]
    own = list(gradients.run_losses(forward_of(model), alone).values())
    assert len(there) == len(own) > 0
    names, tensors = zip(*parameters.items(), strict=True)
    found, wanted = (
        torch.autograd.grad(torch.stack(part).mean(), tensors, retain_graph=True)
        for part in (there, own)
    )
    for name, one, two in zip(names, found, wanted, strict=True):
        close(one, two, two.abs().sum(), MODEL, name=f"G at {name}")
    both = torch.autograd.grad(torch.stack(list(losses.values())).mean(), tensors)
    assert any(far(one, two) for one, two in zip(both, wanted, strict=True))  # all rows of it
    assert default("direction_steps") == 1  # once an optimizer step, as the weights move


def test_gap_16_all_thirty_two_validation_rows_are_used() -> None:
    from alphatoken.train.pool import ValidationPool

    def used(args: Any) -> int:
        share = args.held_out_share if args.held_out_steps else 0.0
        pool = ValidationPool(32, args.validation_batch_size, held_out_share=share)
        assert pool.rows(0) == pool.rows(7)  # fixed
        return len(pool.rows(0))

    assert {used(arguments(name).training) for name in VALUED} == {32}
    assert {arguments(name).data.validation_rows for name in VALUED} == {32}
    assert recipe_values("validation_mode", VALUED) == {"fixed"}
    assert used(arguments("sft").training) == 26


def test_gap_17_prompt_and_response_are_cut_apart() -> None:
    from alphatoken.train.datasets import cut_pair

    row = {"prompt_ids": [1, 2, 3, 4], "chosen_ids": [5, 6, 7], "rejected_ids": [8]}
    cut = cut_pair(row, max_prompt=2, max_response=2)
    assert cut == {"prompt_ids": [3, 4], "chosen_ids": [5, 6], "rejected_ids": [8]}
    together = (row["prompt_ids"] + row["chosen_ids"])[:4]  # one limit of the same sum
    assert not set(together) & set(row["chosen_ids"])  # leaves no response at all
    for name in PAIRS:
        read = arguments(name)
        limits = (read.training.max_prompt_length, read.training.max_response_length)
        assert limits == (1024, 1024)
        assert read.training.max_length == sum(limits)
        assert read.data.long_prompts == "cut"
    assert default("max_response_length", "dpo") is None
    assert arguments("dpo").data.long_prompts == "drop"


def test_gap_18_a_small_drift_is_lost_in_bf16_weights() -> None:
    weight = torch.tensor([1.0, -0.5, 0.25])
    moved = weight + 1e-3 * torch.tensor([1.0, 0.5, 0.25])  # under half a step of bf16
    drift = FisherDrift({"w.weight": torch.ones(3)}, {"w.weight": weight})
    exact = drift.direction({"w.weight": moved})["w.weight"]
    copied = drift.direction({"w.weight": moved.bfloat16().float()})["w.weight"]
    close(exact.double(), (moved - weight).double(), 1.0, 1e-9)
    assert not bool(copied.any())
    from alphatoken.train.masters import Masters

    masters = Masters(lambda name, parameter: moved, {"w.weight": torch.bfloat16})
    read = {"w.weight": masters.weight("w.weight", moved)}
    assert torch.equal(masters.started(drift).direction(read)["w.weight"], exact)


def test_gap_19_omega_reads_the_reference_through_its_sums() -> None:
    """So that its sums, known before training, give the update of a forward at each step."""
    ours = torch.tensor([[-3.0, -1.0, -2.0], [-1.0, -4.0, -2.0]], dtype=torch.float64)
    keep = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    rejected = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, -1.0, -3.0]], dtype=torch.float64)

    def update(chosen: Tensor, rejected: Tensor = rejected) -> Tensor:
        losses = (-ours).requires_grad_()
        loss = masked_dpo_loss(losses, 1.5 * losses, chosen, rejected, keep, keep.flip(-1))
        return torch.autograd.grad(loss, losses)[0]

    chosen = torch.tensor([[-1.0, -2.0, -3.0], [-2.0, -2.0, -1.0]], dtype=torch.float64)
    spread = chosen.flip(-1) + torch.tensor([2.0, 0.0, -2.0])  # the same sums, exactly
    assert torch.equal(update(chosen), update(spread))
    assert torch.equal(update(chosen), update(chosen.sum(-1), rejected.sum(-1)))
    assert far(update(chosen - 1.0), update(chosen))
    assert recipe_values("precompute_ref_log_probs", PAIRS) == {True}
    assert default("precompute_ref_log_probs", "dpo") is False


def test_gap_20_the_fisher_of_a_cut_response_is_that_of_its_beginning() -> None:
    """Its mean over draws is the exact Fisher of so many tokens, whatever would have come after."""
    model = fits.ReferenceDecoder(fits.SMALL, 3)
    for length in (1, 2):
        fits.compare_expected_fisher(model, length)
    fitted = {
        length: fit_fisher(model, fits.PROMPTS, samples=9, layers=1, max_new_tokens=length)
        for length in (1, 3)
    }
    whole = fits.sampled(model, fits.PROMPTS, 9, 3, 0)  # one response a prompt, and again
    assert fitted[3].metadata["response_tokens"] == sum(len(places) for _, places in whole)
    assert fitted[1].metadata["response_tokens"] == 9
    first = [fits.slow_gradient(model, i, p[:1], fitted[1].names) for i, p in whole]
    for name, found in fitted[1].fisher.items():
        expected = torch.stack([g[name] ** 2 for g in first]).mean(0)
        close(found, expected, expected.max() + 1e-18, 1e-10, name="of the first token")
        assert far(found, fitted[3].fisher[name])
    # Temperature 1 and the whole distribution: no option of the fit changes either.
    options = inspect.signature(fit_fisher).parameters
    assert not {name for name in options if re.search("temperature|top_", name)}
    assert options["max_new_tokens"].default == 256
    assert options["labels"].default == "sequence"
    assert recipe_values("fisher_max_new_tokens", VALUED) == {256}
    assert recipe_values("fisher_samples", VALUED) == {1000}
    assert recipe_values("fisher_labels", VALUED) == {"sequence"}


def test_gap_21_rows_that_repeat_a_held_out_row_are_not_trained_on() -> None:
    twice = [("same question", 0), ("same question", 1), *((f"question {i}", i) for i in range(8))]
    rows = [
        Row(i, f"rows, {i}", (Turn("user", q), Turn("assistant", f"answer {a}")))
        for i, (q, a) in enumerate(twice)
    ]
    seeds = range(40)
    pools = [split_pools(rows, validation_rows=3, fisher_rows=0, seed=seed) for seed in seeds]
    hit = [p for p in pools if any(row.prompt == "same question" for row in p.validation)]
    assert hit, "no draw held the repeated row out"
    for found in hit:
        assert not any(row.prompt == "same question" for row in found.train)
    assert any(len(p.train) == 7 for p in pools)  # nothing removed where nothing repeats
    for name in VALUED:
        assert arguments(name).data.on_leak == "remove"
        assert arguments(name).data.on_empty == "skip"


def test_gap_22_adamw_and_a_cosine_and_nothing_else() -> None:
    for name in EVERY:
        args = arguments(name).training
        found = (args.optim.value, args.lr_scheduler_type.value, args.warmup_steps)
        assert found == ("adamw_torch", "cosine", 0), name
        assert args.weight_decay == 0.0
        torch_own = inspect.signature(torch.optim.AdamW).parameters
        assert (args.adam_beta1, args.adam_beta2) == torch_own["betas"].default
        assert args.adam_epsilon == torch_own["eps"].default
    assert default("lr_scheduler_type").value == "linear"


def test_gap_23_one_template_for_all_methods_of_a_backbone() -> None:
    for model in BACKBONES:
        names = [f"{task}-{model}" for task in TASKS if task != "ultrafeedback"]
        templates = {arguments(name).training.chat_template_path for name in names}
        assert len(templates) == 1
        assert Path(templates.pop()).read_text(encoding="utf-8")
        ends = {arguments(name).training.eos_token for name in names}
        assert len(ends) == 1
        # The preferences begin with the warm-started model, whose tokenizer brings the template.
        pairs, warm = arguments(f"ultrafeedback-{model}"), arguments(f"ultrachat-{model}")
        assert pairs.model.model_name_or_path == warm.training.output_dir
    assert {arguments(name).data.turns for name in EVERY} == {"all"}


def test_gap_24_published_ratios_or_one_budget_for_all() -> None:
    from alphatoken.train.policies import policy
    from alphatoken.train.policy import PolicySettings

    assert PolicySettings().mode == "native"
    assert policy("sstoken").native_ratio == 0.6  # its own, not the paper's 0.5
    settings = arguments("magicoder-llama", "--policy", "sstoken", "--policy_mode", "budget")
    assert settings.training.policy_settings().keep_ratio == 0.5
    assert "keep_scope" in settings.unread  # the threshold is the recipe's own policy's
    native = arguments("magicoder-llama", "--policy", "stm")
    assert set(native.unread) == {"keep_scope", "kept_normalization"}
    assert native.training.kept_normalization == "response"
    assert native.training.max_grad_norm == 0.0  # of the run, whatever its policy


def test_gap_25_ti_dpo_has_its_triplet_and_runs_on_the_recipes() -> None:
    from alphatoken_lab.methods.ti_dpo import TIDPO

    assert (TIDPO().triplet_gamma, TIDPO().tdpo_alpha) == (0.1, 0.0)
    for name in PAIRS:
        found = arguments(name, "--policy", "ti-dpo")
        assert found.training.precompute_ref_log_probs is False
        assert set(found.unread) == {"keep_scope", "precompute_ref_log_probs"}
        assert found.run.accelerate_config == "zero2"  # whole weights on each process
        kept = arguments(name, "--policy", "confpo")
        assert kept.training.precompute_ref_log_probs is True  # it reads no reference


def test_gap_26_adapters_in_attention_and_mlp() -> None:
    from alphatoken_lab.compare.methods import known_methods

    options = known_methods()["lora"].options
    assert options["lora_target_modules"] == ["all-linear"]
    sizes = [options[name] for name in ("lora_r", "lora_alpha", "lora_dropout")]
    assert sizes == [16, 32, 0.05]
    assert "learning_rate" not in options
    assert {arguments(name).model.use_peft for name in EVERY} == {False}


def test_gap_27_linears_of_the_last_three_layers_and_nothing_else() -> None:
    model = make_case(("pprr",), (("pr",),), layers=4, heads=2, kv_heads=2, seed=1).model()
    scorer = Scorer(model, CASE.validation[:1], None, ScorerConfig("path", layers=3))
    names = set(scorer.direction.adaptation)
    every = {n for n, p in model.named_parameters() if p.requires_grad}
    last = {n for n in every if n.startswith(("layers.1.", "layers.2.", "layers.3."))}
    assert names < last
    assert all("norm" not in name and name.endswith("weight") for name in names)
    assert {n.split(".")[1] for n in names} == {"1", "2", "3"}
    assert recipe_values("score_layers", VALUED) == {"3"}
    assert recipe_values("value_parameters", VALUED) == {"linears"}
    assert ScorerConfig().score_bias is False  # what trainers leave it at


def test_gap_28_the_validation_gradient_does_not_grow_with_its_batch() -> None:
    model = CASE.model()
    once = Scorer(model, CASE.validation, None, ScorerConfig("path", layers="all"))
    doubled = [*CASE.validation, *CASE.validation]
    twice = Scorer(model, doubled, None, ScorerConfig("path", layers="all"))
    for name, one in once.direction.adaptation.items():
        two = twice.direction.adaptation[name]
        close(one, two, one.abs().sum(), MODEL, name=f"G at {name}")
        assert far(one, 2 * two)


def test_gap_29_one_seed_a_recipe_three_a_grid() -> None:
    from alphatoken_lab.compare.grid import Grid

    assert Grid.seeds == (0, 1, 2)
    assert recipe_values("seed") == {0}


RELEASED = {
    "magicoder": (
        "ise-uiuc/Magicoder-OSS-Instruct-75K", 75_000,
        {"lang": "python", "raw_index": 1, "seed": "S", "problem": "Q", "solution": "A"},
    ),
    "metamath": (
        "meta-math/MetaMathQA", 395_000,
        {"type": "GSM_Rephrased", "query": "Q", "original_question": "O", "response": "A"},
    ),
    "ultrachat": (
        "HuggingFaceH4/ultrachat_200k", 200_000,
        {
            "prompt": "Q", "prompt_id": "x",
            "messages": [
                {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"},
            ],
        },
    ),
    "ultrafeedback": (
        "argilla/ultrafeedback-binarized-preferences", 63_600,
        {
            "source": "s", "instruction": "Q", "chosen_response": "A", "rejected_response": "R",
            "chosen_avg_rating": 5.0, "rejected_avg_rating": 3.0, "chosen_model": "m",
        },
    ),
}  # fmt: skip
"""Name, rows and one row's columns of the releases that the recipes name."""


def test_gap_30_data_sets_of_the_papers_size(tmp_path: Path) -> None:
    """And the recipe reads question and answer where this release has them."""
    from alphatoken.cli.training_rows import RowReader
    from tests.integration.tiny_training import tokenizer

    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    for task, (name, size, record) in RELEASED.items():
        (tmp_path / f"{task}.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
        for model in BACKBONES:
            read = arguments(f"{task}-{model}")
            assert read.data.dataset_name == name
            assert read.recipe.expected_rows == pytest.approx(size, rel=0.05)
            source = str(tmp_path / f"{task}.jsonl")
            (row,) = RowReader(read, words).source_rows(source, "training")
            if task == "ultrafeedback":
                texts = [[turn.text for turn in part] for part in (row.prompt, row.chosen)]
                assert (*texts, row.rejected[0].text) == (["Q"], ["A"], "R")
            else:
                assert [(turn.role, turn.text) for turn in row.row.turns] == [
                    ("user", "Q"), ("assistant", "A"),
                ]  # fmt: skip
    for option in ("num_train_epochs", "max_length", "learning_rate"):
        for model in BACKBONES:
            like = getattr(arguments(f"magicoder-{model}").training, option)
            assert getattr(arguments(f"metamath-{model}").training, option) == like


def test_gap_31_shots_are_those_asked_for_else_the_tasks_own_else_the_papers() -> None:
    from alphatoken_lab.compare.harness import PUBLISHED, settle_shots

    def shots(name: str, own: int | None, asked: int | None = None) -> int:
        said = {"num_fewshot": own}
        task = SimpleNamespace(
            config=SimpleNamespace(num_fewshot=own, fewshot_split="train", fewshot_config=None),
            has_validation_docs=lambda: True,
            has_test_docs=lambda: True,
            set_config=lambda key, value: said.update({key: value}),
        )
        number = settle_shots(task, name, asked)
        assert (said["num_fewshot"] or 0) == number  # what lm-eval will do
        return number

    paper = {"arc_challenge": 0, "hellaswag": 0, "mmlu": 5, "gsm8k": 5}
    assert paper == PUBLISHED
    assert {name: shots(name, None) for name in paper} == paper
    assert (shots("mmlu", 3), shots("mmlu", 3, 2), shots("mmlu", None, 2)) == (3, 2, 2)
    assert shots("some_other_task", None) == 0
    said = {name for task in EVERY for name in arguments(task).recipe.options}
    assert not {n for n in said if re.search("shot|judge|task|win_rate", n)}
    assert recipe_values("eval_strategy") == {"no"}


def test_gap_32_batches_are_the_papers_in_any_layout() -> None:
    from alphatoken.cli.recipes import accelerate_config

    for name in EVERY:
        read = arguments(name)
        layout = read.run.accelerate_config
        processes = accelerate_config(layout)[1]["num_processes"]
        args = read.training
        rows = processes * args.per_device_train_batch_size * args.gradient_accumulation_steps
        assert rows == (128 if name.startswith("ultrachat") else 64)
        assert layout in ("fsdp2", "zero2")
        assert (args.bf16, args.gradient_checkpointing) == (True, True)
        assert read.model.dtype == "float32"


def test_gap_33_what_no_row_reaches_is_frozen_and_two_of_three_layers_have_no_attention() -> None:
    from alphatoken.cli.planning import meta_model

    model, _ = meta_model(arguments("magicoder-gemma"))
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert any("vision" in name for name in frozen)
    assert not any("language_model" in name for name in frozen)
    qwen, _ = meta_model(arguments("magicoder-qwen"))
    kinds = qwen.config.get_text_config().layer_types[-3:]
    assert kinds == ["linear_attention", "linear_attention", "full_attention"]


def test_gap_34_a_row_is_a_row_of_the_batch() -> None:
    for name in EVERY:
        args = arguments(name).training
        assert not getattr(args, "packing", False)
        assert not getattr(args, "padding_free", False)
        assert args.dataloader_drop_last is False


def test_gap_35_a_fisher_that_no_cell_hands_over_is_fitted_on_so_many_rows() -> None:
    from alphatoken.cli.diagnose_options import PROMPTS
    from alphatoken.fidelity.fisher import Options
    from alphatoken_lab.paper.exhibits import find

    assert (PROMPTS, Options().max_new_tokens) == (200, 48)
    asked = find("fig:fisher_proxy_fidelity").diagnosis
    assert asked is not None
    full = asked.options["full"]
    assert [full[n] for n in ("fisher_samples", "fisher_prompts", "max_new_tokens")] == [
        1000, 1000, 256,
    ]  # fmt: skip
    assert "fisher_file" not in full


def test_gap_36_the_papers_value_is_on_each_assumed_axis() -> None:
    from alphatoken_lab.paper.exhibits import find

    axes = {
        group.title.split()[-1]: [float(line.name) for line in group.lines]
        for group in find("fig:sensitivity").groups
    }
    own = {
        line.method: float(line.name)
        for group in find("fig:sensitivity").groups
        for line in group.lines
    }
    assert axes == {
        "ρ": [0.3, 0.4, 0.5, 0.6, 0.7], "λ": [0.6, 0.9, 1.2, 1.5, 1.8], "W": [4, 8, 16, 32, 64],
        "layers": [1, 2, 3, 5, 8], "B_val": [4, 8, 16, 32, 64],
    }  # fmt: skip
    assert all(own[name] == float(name.rpartition("-")[2]) for name in own if name != "alphatoken")
    args = arguments("magicoder-llama").training
    for name, value in (("ρ", args.keep_ratio), ("λ", args.stability_weight), ("W", args.window)):
        assert value in axes[name]
    assert float(args.score_layers) in axes["layers"]
    assert args.validation_batch_size in axes["B_val"]


def test_gap_37_no_multiple_of_the_divergence_bounds_the_calibration_gap() -> None:
    """One weight w and two tokens, of logits w^2 and 0: the gap falls as the divergence's root."""
    w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    log_p = torch.stack([w**2, 0 * w]).log_softmax(0)
    first = [torch.autograd.grad(-one, w, create_graph=True)[0] for one in log_p]
    second = torch.stack([torch.autograd.grad(one, w, retain_graph=True)[0] for one in first])
    p, slopes = log_p.detach().exp(), torch.stack(first).detach()
    fisher = (p * slopes**2).sum()
    close((p * second).sum(), fisher, fisher, 1e-12)  # the model's own data have no gap
    ratios = []
    for shift in (0.1, 0.01, 0.001):
        q = p + torch.tensor([shift, -shift])
        gap = abs((q * second).sum() - fisher)
        divergence = (q * (q.log() - log_p.detach())).sum()
        assert gap <= second.abs().max() * (2 * divergence).sqrt()
        ratios.append(float(gap / divergence))
    assert ratios[2] > 8 * ratios[1] > 64 * ratios[0]


GAINS: dict[str, Any] = {
    "tab:main_rq1_sft": {"overall": (1.54, 2.80, 2.51)},
    "tab:main_rq1_dpo": {
        "overall": (1.73, 1.54, 1.83), "target": (2.55, 2.95, 2.86), "retention": (0.91, 0.12, 0.80)
    },
    "tab:magicoder_forgetting_gemma4b": {"overall": (0.95,)},
}  # fmt: skip


@pytest.mark.parametrize("label", GAINS)
def test_gap_38_gains_in_the_text_are_differences_of_its_tables(label: str) -> None:
    from alphatoken_lab.paper.exhibits import find

    exhibit = find(label)
    keys = [column.key for column in exhibit.columns["full"]]
    for number, group in enumerate(exhibit.groups):
        rows = {
            line.method: {k: float(v.split()[0]) for k, v in zip(keys, line.printed, strict=True)}
            for line in group.lines
        }
        own = rows.pop("alphatoken")
        rows.pop("start", None)
        best = max(rows.values(), key=lambda row: row["overall"])
        for key, said in GAINS[label].items():
            assert own[key] - best[key] == pytest.approx(said[number], abs=0.011), (label, key)


PAGE = Path(__file__).parents[2] / "docs" / "paper-gaps.md"


def test_every_option_of_the_recipes_has_a_place() -> None:
    """Nothing that a recipe sets is silent, and the page names nothing that none sets."""
    text = PAGE.read_text(encoding="utf-8").split("## The paper's recipes, option by option")[1]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", text, re.MULTILINE)
    places = {name: place for names, place in rows for name in re.findall(r"`([a-z0-9_]+)`", names)}
    assert all(place for place in places.values())
    said = {name for task in EVERY for name in arguments(task).recipe.options}
    assert said == set(places)


def test_every_row_of_the_page_has_its_test() -> None:
    text = PAGE.read_text(encoding="utf-8")
    numbers = [int(n) for n in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert numbers == list(range(1, 39))
    tests = {name for name in globals() if name.startswith("test_gap_")}
    for number in numbers:
        assert f"`test_gap_{number:02d}`" in text
        assert len([name for name in tests if name.startswith(f"test_gap_{number:02d}_")]) == 1
