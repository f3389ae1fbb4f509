"""Second moments read from real optimizers: P = c / (sqrt(v) + eps), checked on their own steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_optimizer
from torch import Tensor, nn

from alphatoken import Scorer, ScorerConfig
from alphatoken.adapters.optimizers import frozen_preconditioners, read_moments
from alphatoken.errors import ConfigError
from tests.integration.snapshot import Snapshot
from tests.property.architectures import BY_NAME, VOCABULARY
from tests.property.strategies import make_batch
from tests.property.tolerance import close

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is dep:DeprecationWarning")

BATCH = make_batch(("pprrprr.", "prprrrrr"), vocabulary=VOCABULARY, seed=1)
VALIDATION = make_batch(("pprrr.", "pprrrr"), vocabulary=VOCABULARY, seed=2)
ADAM = {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6}


def inputs() -> dict[str, Any]:
    return {k: v for k, v in BATCH.items() if k != "labels"} | {"use_cache": False}


def trained(kind: Any, steps: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after some steps on random losses."""
    model = BY_NAME["llama"].build(1)
    optimizer = kind(model.parameters(), **options)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad = noise
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_P_is_the_sensitivity_of_a_step_whose_denominator_is_held(kind: Any, steps: int) -> None:
    """With beta2 = 1 in the next step v stays, and a step is linear in the gradient with slope P.

    Independent of the library: two copies take the next step with gradients g and g + d.
    """
    moves = []
    model, optimizer = trained(kind, steps, **ADAM)
    parameters = dict(model.named_parameters())
    found = frozen_preconditioners(optimizer, parameters)
    assert found is not None
    name = "model.layers.1.mlp.up_proj.weight"
    generator = torch.Generator().manual_seed(6)
    g, d = torch.randn(2, *parameters[name].shape, generator=generator, dtype=torch.float64)
    for gradient in (g, g + d):
        copy, own = trained(kind, steps, **ADAM)
        weight = dict(copy.named_parameters())[name]
        state = own.state[weight]
        before, second = weight.detach().clone(), state["exp_avg_sq"].clone()
        step = float(state["step"])
        weight.grad = gradient
        # Hold the bias-corrected denominator: v / (1 - beta2^s) of before the step.
        _, beta2 = own.param_groups[0]["betas"]
        held = second * (1 - beta2 ** (step + 1)) / (1 - beta2**step)
        state["exp_avg_sq"] = (held - (1 - beta2) * gradient.square()) / beta2
        own.step()
        moves.append(before - weight.detach())
    slope = (moves[1] - moves[0]) / (ADAM["lr"] * d)
    close(found[name], slope, slope.abs(), 1e-8, name="P of Adam")


@pytest.mark.parametrize(
    ("kind", "options", "first", "second"),
    [
        (torch.optim.Adam, {}, "exp_avg", "exp_avg_sq"),
        (torch.optim.Adam, {"amsgrad": True}, "exp_avg", "max_exp_avg_sq"),
        (torch.optim.AdamW, {}, "exp_avg", "exp_avg_sq"),
        (torch.optim.NAdam, {}, "exp_avg", "exp_avg_sq"),
        (torch.optim.RAdam, {}, "exp_avg", "exp_avg_sq"),
        (torch.optim.RMSprop, {}, None, "square_avg"),
        (torch.optim.Adagrad, {}, None, "sum"),
        (torch_optimizer.Lamb, {}, "exp_avg", "exp_avg_sq"),
        (torch_optimizer.Yogi, {}, "exp_avg", "exp_avg_sq"),
        (torch_optimizer.DiffGrad, {}, "exp_avg", "exp_avg_sq"),
        (torch_optimizer.AdaBelief, {}, "exp_avg", "exp_avg_var"),
        (torch_optimizer.AdaMod, {}, "exp_avg", "exp_avg_sq"),
        (torch_optimizer.AdamP, {}, "exp_avg", "exp_avg_sq"),
    ],
)
@pytest.mark.filterwarnings("ignore:This overload of :UserWarning")
def test_state_is_read_where_each_optimizer_keeps_it(
    kind: Any, options: dict[str, Any], first: str | None, second: str
) -> None:
    model, optimizer = trained(kind, 3, lr=1e-3, **options)
    weight = model.model.layers[2].mlp.up_proj.weight
    moments = read_moments(optimizer, weight)
    assert moments is not None
    assert torch.equal(moments.second, optimizer.state[weight][second])
    if first is None:
        assert moments.first is None
    else:
        assert moments.first is not None
        assert torch.equal(moments.first, optimizer.state[weight][first])
    assert moments.step == 3
    found = frozen_preconditioners(optimizer, {"w": weight})
    assert found is not None
    assert bool(torch.isfinite(found["w"]).all())
    assert bool((found["w"] > 0).all())


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_before_the_first_step_there_is_no_preconditioner(kind: Any) -> None:
    model, optimizer = trained(kind, 0)
    assert frozen_preconditioners(optimizer, dict(model.named_parameters())) is None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adafactor, {}),
        (torch_optimizer.NovoGrad, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:This overload of :UserWarning")
def test_optimizers_without_a_second_moment_of_that_shape_are_refused(
    kind: Any, options: dict[str, Any]
) -> None:
    model, optimizer = trained(kind, 1, **options)
    with pytest.raises(ConfigError) as caught:
        frozen_preconditioners(optimizer, dict(model.named_parameters()))
    message = str(caught.value)
    assert kind.__name__ in message
    assert "preconditioner=None" in message


def test_a_parameter_that_the_optimizer_does_not_hold() -> None:
    model = BY_NAME["llama"].build(1)
    optimizer = torch.optim.Adam(model.model.layers[0].parameters())
    config = ScorerConfig("path", layers=1, preconditioner="frozen", precondition_after=1)
    scorer = Scorer(model, VALIDATION, config=config, optimizer=optimizer)
    before = Snapshot(model)
    with pytest.raises(ConfigError, match="not held by the optimizer"):
        scorer.score(BATCH)
    before.check()


@pytest.mark.parametrize("estimator", ["alphatoken", "direct", "path", "label"])
def test_the_scorer_uses_the_optimizers_P_once(estimator: str) -> None:
    """Equal to handing the same P over as a mapping; on the direction, not on the token side."""
    model, optimizer = trained(torch.optim.AdamW, 4, lr=1e-3)
    options: dict[str, Any] = {"layers": 2, "contraction": "projected"}
    plain = Scorer(model, VALIDATION, config=ScorerConfig(estimator, **options))
    frozen = ScorerConfig(estimator, preconditioner="frozen", precondition_after=4, **options)
    scorer = Scorer(model, VALIDATION, config=frozen, optimizer=optimizer)
    P = frozen_preconditioners(optimizer, scorer.parameters)
    assert P is not None
    given = ScorerConfig(estimator, preconditioner=P, **options)
    values = scorer.score(BATCH).total
    assert torch.equal(values, Scorer(model, VALIDATION, config=given).score(BATCH).total)
    for name, m in scorer.direction.adaptation.items():
        expected = P[name] * plain.direction.adaptation[name]
        close(m, expected, expected.abs(), 1e-12, name="P o G")
    assert not torch.allclose(values, plain.score(BATCH).total)


def test_P_follows_the_optimizer() -> None:
    """A step changes the weights and the state; from the third on, P is used."""
    model, optimizer = trained(torch.optim.AdamW, 2, lr=1e-3)
    config = ScorerConfig("path", layers=1, preconditioner="frozen", precondition_after=3)
    scorer = Scorer(model, VALIDATION, config=config, optimizer=optimizer)
    plain = Scorer(
        model, VALIDATION, config=ScorerConfig("path", layers=1, contraction="projected")
    )
    assert torch.equal(scorer.score(BATCH).total, plain.score(BATCH).total)  # two steps: not yet
    first = scorer.score(BATCH).total
    model(**inputs()).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    second = scorer.score(BATCH).total
    fresh = Scorer(model, VALIDATION, config=config, optimizer=optimizer).score(BATCH).total
    assert torch.equal(second, fresh)
    assert not torch.allclose(first, second)
    assert not torch.allclose(second, plain.score(BATCH).total)


def test_before_the_first_step_values_are_plain() -> None:
    model, optimizer = trained(torch.optim.AdamW, 0)
    config = ScorerConfig("path", layers=1, preconditioner="frozen")
    scorer = Scorer(model, VALIDATION, config=config, optimizer=optimizer)
    plain = Scorer(model, VALIDATION, config=ScorerConfig("path", layers=1))
    found: Tensor = scorer.score(BATCH).total
    expected = plain.score(BATCH).total
    close(found, expected, float(expected.abs().sum()), 1e-10, name="no state yet")
