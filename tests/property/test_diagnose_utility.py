"""The ``utility`` diagnostic: steps against the oracle, first order where it must hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from alphatoken import Scorer, ScorerConfig
from alphatoken.diagnose import statistics
from alphatoken.diagnose import utility as diagnostic
from alphatoken.diagnose.stepping import OPTIMIZERS, Stepper
from alphatoken.diagnose.subject import Subject
from alphatoken.diagnose.utility import slope
from alphatoken.diagnose.valuing import full_gradient
from alphatoken.errors import NumericalError
from alphatoken.oracle import utility as oracle
from alphatoken.oracle.gradients import displaced
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.property.tolerance import close
from tests.rows import random_rows as rows_of
from tests.rows import renumbered

pytestmark = pytest.mark.usefixtures("few_draws")

QUICK = diagnostic.Options(warmup=2, learning_rate=1e-4)


def decoder_of(**config: object) -> ReferenceDecoder:
    return ReferenceDecoder(DecoderConfig(**config), 1)  # type: ignore[arg-type]


def subject_of(model: nn.Module, **changes: object) -> Subject:
    given: dict[str, object] = {
        "train": rows_of([8, 7, 9]),
        "validation": rows_of([6, 8, 7], seed=8),
        "config": ScorerConfig(layers=1, window=3),
        "batch_size": 3,
        "oracle_tokens": 100,
    }
    return Subject(model, **given | changes)  # type: ignore[arg-type]


# --- steps ---------------------------------------------------------------------------------------


def stepped(subject: Subject, optimizer: str = "sgd", **options: object) -> Stepper:
    batches = subject.batches(subject.validation)
    stepper = Stepper(subject.model, optimizer, batches, **options)  # type: ignore[arg-type]
    if optimizer != "sgd":
        train = [stepper.read(b) for b in subject.batches(subject.train, 1)]
        stepper.warm_up(iter(train))
    return stepper


def moved(stepper: Stepper, gradient: Mapping[str, Tensor], lr: float) -> dict[str, Tensor]:
    """Weights after one step; the stepper is back where it was."""
    with stepper.stepped(gradient.__getitem__, lr):
        return {name: p.detach().clone() for name, p in stepper.parameters.items()}


def adam_state(stepper: Stepper) -> oracle.AdamState:
    held = {n: stepper.optimizer.state[p] for n, p in stepper.parameters.items()}
    return oracle.AdamState(
        step=int(next(iter(held.values()))["step"]),
        m={n: s["exp_avg"].clone() for n, s in held.items()},
        v={n: s["exp_avg_sq"].clone() for n, s in held.items()},
        weight_decay=float(stepper.optimizer.param_groups[0]["weight_decay"]),
        decoupled=True,
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_leaving_one_out_is_the_oracles(optimizer: str) -> None:
    """The diagnostic's steps, shared gradients and all, against one fresh step a token."""
    subject = subject_of(decoder_of(tied_embeddings=True))
    options = replace(
        QUICK, optimizer=optimizer, learning_rate=1e-2,
        weight_decay=0.1 if optimizer != "sgd" else 0.0,
    )  # fmt: skip
    bench = diagnostic._bench(subject, options)
    tokens = diagnostic._tokens(bench)
    found = diagnostic._actual(bench, tokens, 1e-2)
    stepper = bench.stepper
    adaptive = optimizer != "sgd"
    wanted = oracle.leave_one_out_utility(
        stepper.model,
        stepper.adapter.forward,
        {**bench.batch.inputs, "labels": bench.batch.labels},
        lambda: torch.tensor(stepper.objective(), dtype=torch.float64),
        "adam" if adaptive else "sgd",
        1e-2,
        "response",
        parameters=stepper.parameters,
        state=adam_state(stepper) if adaptive else None,
    )
    assert len(tokens) == bench.count == int(bench.batch.mask.sum())
    exact = wanted[bench.batch.mask].double()
    close(torch.from_numpy(found), exact, float(exact.abs().max()), 1e-7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_the_optimizers_and_is_taken_back(optimizer: str) -> None:
    """Against torch's own optimizer on another copy, warmed up in the same way."""
    subject = subject_of(decoder_of())
    stepper = stepped(subject, optimizer, weight_decay=0.01)
    batch = stepper.read(*subject.batches(subject.train))
    gradient = stepper.gradient(batch, batch.mask / batch.response_tokens)
    before = {n: p.detach().clone() for n, p in stepper.parameters.items()}
    first = moved(stepper, gradient, 1e-2)
    second = moved(stepper, gradient, 1e-2)
    for name, p in stepper.parameters.items():
        assert torch.equal(first[name], second[name])
        assert torch.equal(p, before[name])
        assert not torch.equal(first[name], before[name])
        assert p.grad is None
    other = stepped(subject, optimizer, weight_decay=0.01)
    for name, p in other.parameters.items():
        p.grad = gradient[name].clone()
    other.set_rate(1e-2)
    other.optimizer.step()
    for name, p in other.parameters.items():
        assert torch.equal(p.detach(), first[name])


def test_a_step_into_nowhere_is_reported() -> None:
    stepper = stepped(subject_of(decoder_of()))
    broken = {n: torch.full_like(p, math.nan) for n, p in stepper.parameters.items()}
    with displaced(stepper.parameters, broken), pytest.raises(NumericalError, match="not finite"):
        stepper.objective()
    assert math.isfinite(stepper.objective())


# --- first order ---------------------------------------------------------------------------------


def test_sgd_at_a_tiny_step_is_predicted_exactly() -> None:
    """Correlation and slope 1, error of the order of the step."""
    subject = subject_of(decoder_of(heads=4, kv_heads=2))
    bench = diagnostic._bench(subject, replace(QUICK, optimizer="sgd", learning_rate=1e-5))
    (name, best), *_ = diagnostic._predictions(bench)[0].items()
    assert name == "exact, all parameters"
    assert bench.calibrated(diagnostic._wanted(bench)[name])
    tokens = diagnostic._tokens(bench)
    actual = diagnostic._actual(bench, tokens, 1e-5)
    predicted = bench.predicted(best, tokens)
    assert np.corrcoef(predicted, actual)[0, 1] > 0.999999
    assert slope(predicted, actual) == pytest.approx(1.0, abs=1e-3)
    assert statistics.relative_error(predicted, actual) < 2e-3
    assert statistics.spearman(predicted, actual) > 0.999
    # The same values at a tenth of the step: a tenth of the error.
    nearer = diagnostic._actual(bench, tokens, 1e-6)
    error = statistics.relative_error(predicted / 10, nearer)
    assert error == pytest.approx(statistics.relative_error(predicted, actual) / 10, rel=0.2)


def test_predictions_are_the_oracles_derivative() -> None:
    """<grad J, du/dw> of every token, from autograd through Adam's formulas."""
    subject = subject_of(decoder_of())
    bench = diagnostic._bench(subject, replace(QUICK, optimizer="adamw", warmup=4))
    best, *_ = diagnostic._predictions(bench)[0].values()
    *configs, _ = diagnostic._wanted(bench).items()
    calibrated = {name.rpartition("P=")[2]: bench.calibrated(one) for name, one in configs}
    assert calibrated == {"full": True, "frozen": True, "1": False}
    stepper = bench.stepper
    state, without = adam_state(stepper), bench.gradient_without(None)
    total = {name: without(name) for name in bench.summed}
    slope_here = full_gradient(replace(subject, model=stepper.model))
    wanted = []
    for place in diagnostic._tokens(bench):
        token = {n: g / bench.count for n, g in bench.gradient_of(place).items()}
        moved = oracle.adam_step_derivative(total, token, state)
        wanted.append(bench.count * sum(float((slope_here[n] * moved[n]).sum()) for n in moved))
    size = max(abs(x) for x in wanted)
    # The library's floor under v^ shows where a weight has hardly had a gradient.
    close(torch.from_numpy(best), torch.tensor(wanted, dtype=torch.float64), size, 1e-6)


def test_slope_and_relative_error() -> None:
    x = np.array([1.0, -2.0, 3.0])
    assert slope(x, 2 * x) == pytest.approx(2.0)
    assert statistics.relative_error(x, x) == 0.0
    assert statistics.relative_error(0 * x, x) == 1.0
    assert math.isnan(slope(0 * x, x))
    assert math.isnan(statistics.relative_error(x, 0 * x))


# --- the diagnosis -------------------------------------------------------------------------------


@pytest.mark.pictures
def test_tables_and_figures() -> None:
    """The user's model is left alone."""
    model = decoder_of().train()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    lengths = [9, 9, 9, 9, 10, 10, 11, 12]
    rows = renumbered(rows_of(lengths))
    subject = subject_of(model, train=rows, batch_size=8, oracle_tokens=40)
    found = diagnostic.diagnose(subject, QUICK)
    assert model.training
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None
    one = found.table("one-token").records()
    assert [r["prediction"] for r in one] == [
        *(f"exact, all parameters, P={k}" for k in ("full", "frozen", "1")),
        "alphatoken, 1 layers, P=full",
        "alphatoken, 1 layers, P=1",
    ]
    for record in one:
        assert record["spearman_low"] <= record["spearman"] <= record["spearman_high"]
    figure = found.figure("scatter")
    assert len(figure.data.rows) == 40
    left_out = {record["row"] for record in figure.data.records()}
    assert left_out <= {row.row.index for row in rows}
    # The shorter half has too few tokens: the note names the length that was drawn from.
    longest = max(len(row.input_ids) for row in rows if row.row.index in left_out)
    assert f"at random from rows of at most {longest} positions" in " ".join(found.notes)
    assert figure.svg.startswith("<svg")


@pytest.mark.parametrize("parameters", ["", "all", "linears,*norm*"])
def test_predictions_are_the_scorers_own(parameters: str) -> None:
    """P = 1: the user's estimator and parameters, from a scorer made by hand."""
    options = {"parameters": parameters, "derivative": "forward_mode"}
    layers = "all" if parameters == "all" else 1
    config = ScorerConfig("label", layers=layers, **options) if parameters else None  # type: ignore[arg-type]
    subject = subject_of(decoder_of(), **({} if config is None else {"config": config}))
    bench = diagnostic._bench(subject, replace(QUICK, optimizer="sgd"))
    *_, own = diagnostic._predictions(bench)[0].values()
    scorer = Scorer(subject.model, subject.batches(subject.validation), None, subject.config)
    wanted = subject.score(scorer, subject.train)["total"]
    close(torch.from_numpy(own), torch.from_numpy(wanted), abs(wanted).max(), 1e-11)


def test_a_model_with_another_mixer_leaves_the_estimator_out() -> None:
    subject = subject_of(decoder_of(conv_mixer=True), train=rows_of([9] * 8), batch_size=8)
    found = diagnostic.diagnose(subject, replace(QUICK, optimizer="sgd"))
    assert any("is left out" in note for note in found.notes)
    assert len(found.table("one-token").rows) == 1
