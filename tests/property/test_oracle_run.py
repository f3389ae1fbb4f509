"""Values of a whole run: against differences of runs, and what they are to one-step values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis.strategies import booleans, integers, sampled_from
from torch import Tensor, nn

from alphatoken.data import EncodeOptions, collate, encode_rows
from alphatoken.data.stdlib import code_rows
from alphatoken.diagnose.statistics import spearman
from alphatoken.direction.optimizers import full_preconditioners
from alphatoken.errors import InputError
from alphatoken.oracle import gradients
from alphatoken.oracle.gradients import batch_losses, batch_mask, displaced, flatten
from alphatoken.oracle.retention import hessian
from alphatoken.oracle.run import Run, ledger_values, run_end, run_loss, run_values
from tests.property.decoder import ReferenceDecoder
from tests.property.profiles import budget
from tests.property.setups import Setup, forward_of, setups, smooth
from tests.property.strategies import CASE, TIED, make_case
from tests.property.tolerance import close

SMALL = make_case(("pprrr", "..prr"), (("pprr",),), layers=1, vocabulary=5)
BIASES = ("bias", "norm")

Batches = Sequence[dict[str, Tensor]]
Values = list[list[Tensor]]


def run_of(setup: Setup, count: int, **options: Any) -> Run:
    """Steps of one and of two batches in turn; rates rise and fall again."""
    batches = [dict(setup.case.batch), *map(dict, setup.case.validation)]
    size = len(batches)
    steps = [[batches[(s + i) % size] for i in range(1 + s % 2)] for s in range(count)]
    rates = [1e-2 * min(1.0, (s + 1) / 3) * (1 - s / (2 * count)) for s in range(count)]
    return Run(steps, rates, **options)


def undecayed(model: nn.Module) -> frozenset[str]:
    return frozenset(n for n, _ in model.named_parameters() if any(b in n for b in BIASES))


def drawn(run: Run, seed: int) -> Values:
    """Random numbers, one for each token of each step."""
    draw = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(b["labels"].shape, generator=draw, dtype=torch.float64) for b in step]
        for step in run.steps
    ]


def inner(first: Values, second: Values) -> float:
    pairs = zip(first, second, strict=True)
    return sum(float((x * y).sum()) for p, q in pairs for x, y in zip(p, q, strict=True))


def slope(setup: Setup, model: nn.Module, run: Run, along: Values, step: float) -> float:
    """-dJ/dw along these numbers, by four whole runs: central differences at h and at 2 h."""

    def loss(h: float) -> float:
        weights = [[1 + h * d for d in parts] for parts in along]
        end = run_end(model, forward_of(model), run, weights)
        return run_loss(model, forward_of(model), end, setup.case.validation)

    near, far = ((loss(h) - loss(-h)) / (2 * h) for h in (step, 2 * step))
    return -(4 * near - far) / 3


# --- the definition ------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "clip"), [("adamw", 0.3), ("sgd", None)])
def test_values_are_differences_of_whole_runs(optimizer: str, clip: float | None) -> None:
    """8 steps with warm-up, decay, accumulation and clipping: 1e-7 and better.

    Proves: values are differences of whole runs (exact), against ``run_values``, ``run_end``,
    ``run_loss``, differences of whole runs.
    """
    setup, model = Setup(CASE), CASE.model()
    before = [p.detach().clone() for p in model.parameters()]
    options: dict[str, Any] = {"weight_decay": 0.1, "undecayed": undecayed(model), "clip": clip}
    run = run_of(setup, 8, optimizer=optimizer, **options)
    values = run_values(model, forward_of(model), run, CASE.validation)
    along = drawn(run, 1)
    actual, size = inner(values, along), inner(values, values) ** 0.5
    assert size > 1e-3
    close(actual, slope(setup, model, run, along, 3e-4), size, 1e-7, name="along all weights")
    one: Values = [[torch.zeros_like(v) for v in step] for step in values]
    b, i = gradients.response_tokens(run.steps[3][1]["labels"])[-1]
    one[3][1][b, i] = 1.0
    close(values[3][1][b, i], slope(setup, model, run, one, 1e-3), size, 1e-7, name="one token")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


# At steps ten times as wide the fifth derivative along the run takes 0.3 % of the slope.
CURVED = make_case(
    ("ppprr",), (("pr",),), direction_seed=0, vocabulary=3, layers=1, hidden=4, heads=1,
    kv_heads=1, head_dim=1, mlp="plain", mlp_width=3, norm="none", positions="none",
)  # fmt: skip


@given(setups().filter(smooth), sampled_from(["adamw", "sgd"]), booleans(), integers(0, 999))
@example(Setup(TIED), "adamw", True, 0)
@example(Setup(CURVED), "adamw", False, 0)
@budget(0.03)
def test_values_of_every_decoder_are_differences(
    setup: Setup, optimizer: str, clipped: bool, seed: int
) -> None:
    """Every structural option, in runs of three steps; eps so large that no entry's step jumps.

    Proves: values of every decoder are differences (exact), against ``run_values``, ``run_end``,
    ``run_loss``, differences of whole runs.
    """
    model = setup.case.model()
    run = run_of(setup, 3, optimizer=optimizer, clip=0.1 if clipped else None, eps=1e-3)
    values, along = (
        run_values(model, forward_of(model), run, setup.case.validation),
        drawn(run, seed),
    )
    scale = inner(values, values) ** 0.5 + 1e-4
    close(inner(values, along), slope(setup, model, run, along, 1e-4), scale, 1e-5, name="slope")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_is_that_of_torch(optimizer: str) -> None:
    """torch's optimizer, schedule, clipping and accumulation, on a copy of the model.

    Proves: a run is that of torch (exact), against ``run_end``, torch's optimizers.
    """
    setup, model = Setup(CASE), CASE.model()
    options: dict[str, Any] = {"weight_decay": 0.1, "undecayed": undecayed(model), "clip": 0.3}
    run = run_of(setup, 5, optimizer=optimizer, betas=(0.8, 0.97), eps=1e-6, **options)
    twin, end = CASE.model(), run_end(model, forward_of(model), run)
    stepper = torch_optimizer(twin, run)
    for number in range(5):
        torch_step(twin, stepper, run, number)
    for name, p in twin.named_parameters():
        close(end[name], p, 1.0 + p.abs(), 1e-12, name=name)


def torch_optimizer(model: ReferenceDecoder, run: Run) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in named.items() if n not in run.undecayed]},
        {"params": [p for n, p in named.items() if n in run.undecayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if run.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=1.0, weight_decay=run.weight_decay)
    decay = run.weight_decay
    return torch.optim.AdamW(groups, lr=1.0, betas=run.betas, eps=run.eps, weight_decay=decay)


def tokens_of(batches: Any) -> int:
    """N of a step."""
    return sum(len(gradients.response_tokens(gradients.known_labels(b))) for b in batches)


def torch_step(
    model: ReferenceDecoder, stepper: torch.optim.Optimizer, run: Run, number: int
) -> None:
    stepper.zero_grad()
    for batch in run.steps[number]:  # accumulated
        (batch_losses(forward_of(model), batch).sum() / tokens_of(run.steps[number])).backward()
    if run.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), run.clip)
    for group in stepper.param_groups:
        group["lr"] = run.rates[number]
    stepper.step()


# --- what they are to one-step values ------------------------------------------------------------


@given(setups().filter(smooth))
@example(Setup(CASE))
@budget(0.05)
def test_one_step_of_sgd_gives_label_values(setup: Setup) -> None:
    """S = 1: rate / N times <grad l, G>, with G where the step ends.

    Proves: one step of sgd gives label values (exact), against ``run_values``, ``run_end``,
    ``label_values``, ``validation_gradient``.
    """
    model = setup.case.model()
    run = Run([[dict(setup.case.batch)]], [1e-2], optimizer="sgd")
    ((actual,),) = run_values(model, forward_of(model), run, setup.case.validation)
    end = run_end(model, forward_of(model), run)
    with displaced(dict(model.named_parameters()), end):
        g = gradients.validation_gradient(model, forward_of(model), setup.case.validation)
    wanted = gradients.label_values(model, forward_of(model), setup.case.batch, g)
    close(
        actual,
        wanted * 1e-2 / tokens_of(run.steps[0]),
        1e-2 * (1 + wanted.abs()),
        1e-9,
        name="S = 1",
    )


def test_the_last_step_of_adamw_is_the_full_preconditioner() -> None:
    """<P o G, grad l> with P of the optimizer before the step and G where it ends.

    Proves: the last step of adamw is the full preconditioner (exact), against ``run_values``,
    ``run_end``, ``label_values``, ``validation_gradient``.
    """
    setup, model = Setup(CASE), CASE.model()
    run = run_of(setup, 4, weight_decay=0.1, undecayed=undecayed(model), eps=1e-5)
    values = run_values(model, forward_of(model), run, CASE.validation)
    end = run_end(model, forward_of(model), run)
    stepper = torch_optimizer(model, run)
    for number in range(3):
        torch_step(model, stepper, run, number)
    named = dict(model.named_parameters())
    with displaced(named, end):
        g = gradients.validation_gradient(model, forward_of(model), CASE.validation)
    model.zero_grad()
    for batch in run.steps[3]:
        (batch_losses(forward_of(model), batch).sum() / tokens_of(run.steps[3])).backward()
    own = {n: p.grad for n, p in named.items() if p.grad is not None}
    p = full_preconditioners(stepper, named, own)
    assert p is not None
    m = {name: p[name] * g[name] for name in g}
    for batch, actual in zip(run.steps[3], values[3], strict=True):
        wanted = gradients.label_values(model, forward_of(model), batch, m)
        rate, tokens = run.rates[3], tokens_of(run.steps[3])
        scale = rate * (1 + wanted.abs())
        close(actual, wanted * rate / tokens, scale, 1e-8, name="last step")


def test_one_weight_for_all_steps_has_the_sum() -> None:
    """A token that comes again: the derivative by a weight that it has in every step.

    Proves: one weight for all steps has the sum (exact), against ``run_values``, ``run_end``,
    ``run_loss``, differences of whole runs.
    """
    setup, model = Setup(CASE), CASE.model()
    batch = dict(CASE.batch)
    run = Run([[batch]] * 5, [1e-2] * 5, weight_decay=0.1, clip=0.3)
    values = run_values(model, forward_of(model), run, CASE.validation)
    (shared,), *_ = drawn(run, 2)
    actual = inner(values, [[shared]] * 5)
    size = inner(values, values) ** 0.5
    close(actual, slope(setup, model, run, [[shared]] * 5, 1e-4), size, 1e-7, name="shared weight")


def test_a_ledger_leaves_out_what_later_steps_do() -> None:
    """SGD: run value less ledger is <grad l, prod (I - rate H) G_S - G_s> rate / N, H dense.

    Proves: a ledger leaves out what later steps do (exact), against ``run_values``,
    ``ledger_values``, ``run_end``, ``label_values``, ``validation_gradient``, ``hessian``.
    """
    model = SMALL.model()
    forward, validation = forward_of(model), list(SMALL.validation)
    batch = dict(SMALL.batch)
    run = Run([[batch]] * 3, [0.05, 0.04, 0.03], optimizer="sgd")
    values = run_values(model, forward, run, validation)
    ledgers = ledger_values(model, forward, run, validation)
    named = dict(model.named_parameters())
    ends = [run_end(model, forward, replace(run, steps=run.steps[:s], rates=run.rates[:s]))
            for s in range(4)]  # fmt: skip
    last = at(model, named, ends[3], lambda: flat_gradient(model, validation))
    count, back = tokens_of(run.steps[0]), last
    for s in reversed(range(3)):
        here = at(model, named, ends[s], lambda: flat_gradient(model, validation))
        ledger, later = (
            at(model, named, ends[s], lambda m=m: along(model, batch, named, m))
            for m in (here, back - here)
        )
        factor = run.rates[s] / count
        scale = factor * (ledger.abs() + later.abs() + 1)
        close(ledgers[s][0], factor * ledger, scale, 1e-9, name=f"ledger of step {s}")
        close(values[s][0] - ledgers[s][0], factor * later, scale, 1e-9, name=f"step {s}")
        assert float((factor * later).abs().max()) > 1e-6
        curved = at(
            model, named, ends[s], lambda: hessian(lambda: mean_loss(model, batch, count), named)
        )
        back = back - run.rates[s] * curved.T @ back


def at(model: nn.Module, named: dict[str, Any], end: Any, work: Any) -> Tensor:
    with displaced(named, end):
        result: Tensor = work()
        return result.detach()


def mean_loss(model: nn.Module, batch: dict[str, Tensor], count: int) -> Tensor:
    return batch_losses(forward_of(model), batch).sum() / count


def flat_gradient(model: nn.Module, batches: Batches) -> Tensor:
    return flatten(gradients.validation_gradient(model, forward_of(model), batches))


def along(model: nn.Module, batch: Any, named: dict[str, Any], m: Tensor) -> Tensor:
    sizes = [p.numel() for p in named.values()]
    parts = zip(named.items(), m.split(sizes), strict=True)
    direction = {name: part.view_as(p) for (name, p), part in parts}
    return gradients.label_values(model, forward_of(model), batch, direction)


# --- how it is done ------------------------------------------------------------------------------


def test_states_between_those_that_are_kept_change_no_bit() -> None:
    """Proves: states between those that are kept change no bit (exact), against ``run_values``,
    all states kept.
    """
    model = CASE.model()
    run = run_of(Setup(CASE), 7, clip=0.3)
    kept = [
        run_values(model, forward_of(model), run, CASE.validation, spacing=n) for n in (1, 3, 9)
    ]
    for other in kept[1:]:
        for step, theirs in zip(kept[0], other, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(step, theirs, strict=True))


def test_tokens_off_the_response_have_none_and_frozen_weights_stay() -> None:
    model = CASE.model()
    model.embedding.weight.requires_grad_(False)
    run = run_of(Setup(CASE), 3)
    values = run_values(model, forward_of(model), run, CASE.validation)
    for step, batches in zip(values, run.steps, strict=True):
        for actual, batch in zip(step, batches, strict=True):
            assert torch.equal(actual != 0, batch_mask(batch))
    assert "embedding.weight" not in run_end(model, forward_of(model), run)
    assert not model.embedding.weight.requires_grad


def test_one_batch_serves_for_a_list_of_one() -> None:
    """As validation and as a step; and an iterator is read once."""
    model, batch, held = CASE.model(), dict(CASE.batch), dict(CASE.validation[0])
    forward, run = forward_of(model), Run([[batch], [batch, held]], [0.1, 0.2], "sgd")
    short = Run([batch, [batch, held]], [0.1, 0.2], "sgd")
    end = run_end(model, forward, run)
    for name, weight in run_end(model, forward, short).items():
        assert torch.equal(weight, end[name])
    assert run_loss(model, forward, end, held) == run_loss(model, forward, end, [held])
    for values in (run_values, ledger_values):
        expected = flat(values(model, forward, run, [held]))
        for one in (held, iter([held])):
            assert torch.equal(flat(values(model, forward, short, one)), expected)


def flat(values: Values) -> Tensor:
    return torch.cat([one.flatten() for step in values for one in step])


def test_runs_that_say_nothing_are_refused() -> None:
    model, batch = CASE.model(), dict(CASE.batch)
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    with pytest.raises(InputError, match="no response token"):
        Run([[batch], [empty]], [0.1, 0.1])
    with pytest.raises(InputError, match="2 steps, 1 rates"):
        Run([[batch], [batch]], [0.1])
    with pytest.raises(InputError, match="AdamW or SGD"):
        Run([[batch]], [0.1], optimizer="lion")
    with pytest.raises(InputError, match="validation data have no response token"):
        run_values(model, forward_of(model), Run([[batch]], [0.1]), [empty])


@pytest.mark.slow
def test_float32_adds_no_more_than_a_few_roundings_of_the_weights(library_decoder: Path) -> None:
    """20 AdamW steps of a decoder of 260,000 parameters.

    How far a run carries an error depends on the decoder (0.0005 or 0.005 of the values for one
    rounding of the weights, on decoders trained on two versions of the standard library). So the
    bound on float32 is what a float64 run makes of such a rounding, and not a number.
    """
    double = _values_of_a_run(library_decoder, torch.float64)
    rounded = _values_of_a_run(library_decoder, torch.float64, rounding=2**-24)
    single = _values_of_a_run(library_decoder, torch.float32)
    assert float((single - double).norm()) < 15 * float((rounded - double).norm())
    assert spearman(single, double) > 0.95


def _values_of_a_run(folder: Path, dtype: torch.dtype, *, rounding: float = 0.0) -> Tensor:
    """Run values of all tokens, from weights moved by up to ``rounding`` of themselves."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    options = EncodeOptions(max_length=96, on_empty="skip")
    rows = encode_rows(code_rows(200), tokenizer, options)[0]
    steps = [[collate(rows[i : i + 2])] for i in range(8, 48, 2)]
    rates = [1e-3 * min(1.0, (s + 1) / 4) * (1 - s / 20) for s in range(20)]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            uniform = 2 * torch.rand(weight.shape, generator=generator, dtype=weight.dtype) - 1
            weight.mul_(1 + rounding * uniform)
    run = Run(steps, rates, weight_decay=0.01, clip=1.0)
    values = run_values(model, lambda b: model(**b).logits, run, [collate(rows[:8])])
    pairs = zip(values, steps, strict=True)
    return torch.cat([v[batch_mask(b)].double() for (v,), (b,) in pairs])
