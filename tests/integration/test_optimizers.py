"""P from real optimizers on real models: state, groups, wrappers, shards, refusals, the scorer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial, wraps
from typing import Any

import pytest
import torch
import torch_optimizer
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from alphatoken import Scorer, ScorerConfig
from alphatoken.direction.optimizers import (
    check_optimizer,
    frozen_preconditioners,
    full_preconditioners,
)
from alphatoken.direction.preconditioner import RULES, rule_of
from alphatoken.errors import ConfigError, InputError, NumericalError, UnsupportedError
from alphatoken.oracle import gradients
from tests.integration.snapshot import Snapshot
from tests.integration.test_lora import adapted
from tests.integration.tiny_scorer import BATCH, VALIDATION, model_of, scorer_for
from tests.property import optimizer_steps as steps
from tests.property.architectures import plain_forward

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is dep:DeprecationWarning"),
    # peft still asks transformers by the old name
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


def trained(kind: Any, steps: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after some steps on random losses."""
    model = model_of()
    optimizer = kind(model.parameters(), **options)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad = noise
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def gradients_of(parameters: Mapping[str, Tensor], seed: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in parameters.items()
    }


def test_the_table_is_tested_whole() -> None:
    """Every rule of the table is taken through a real step by some kind of the property tests."""
    tested = set()
    for kind in (*steps.TORCH, *steps.OTHERS):
        optimizer = steps.build(kind, torch.nn.Parameter(torch.ones(2, 2)))
        tested.add(rule_of(optimizer))
    assert set(RULES.values()) <= tested


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's own: known to nobody."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.sign(), alpha=-group["lr"])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adafactor, {}),
        (torch.optim.LBFGS, {}),
        (lambda p, **o: torch.optim.Muon([x for x in p if x.ndim == 2], **o), {"lr": 1e-3}),
        (torch_optimizer.AdaBound, {}),
        (torch_optimizer.Lamb, {}),
        (Lion, {}),
    ],
)
def test_optimizers_without_a_rule_are_refused(kind: Any, options: dict[str, Any]) -> None:
    """By name, from the kind alone: no state is needed, so nothing has to be computed first."""
    model = model_of()
    optimizer = kind(model.parameters(), **options)
    with pytest.raises(UnsupportedError) as caught:
        check_optimizer(optimizer)
    message = str(caught.value)
    assert type(optimizer).__name__ in message
    for remedy in ("preconditioner=None", "AdamW", "Yogi of torch_optimizer"):
        assert remedy in message
    with pytest.raises(UnsupportedError, match=type(optimizer).__name__):
        frozen_preconditioners(optimizer, dict(model.named_parameters()))


def test_maximize_is_refused() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), maximize=True)
    with pytest.raises(ConfigError, match=r"maximize=True.*negate the loss"):
        check_optimizer(optimizer)


# --- not what the class says ---------------------------------------------------------------------


class Signed(torch.optim.AdamW):
    """AdamW on the signs of the gradients."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.sign_()
        return super().step(closure)


class Disguised(torch.optim.AdamW):
    """The same under the name and the attributes of the step that it calls."""

    @wraps(torch.optim.AdamW.step)
    def step(self, closure: Any = None) -> Any:
        return Signed.step(self, closure)


class Clipped(torch.optim.Adam):
    """Adam that clips where it collects the gradients."""

    def _init_group(self, group: Any, *rest: Any) -> Any:
        nn.utils.clip_grad_norm_(group["params"], 1e-3)
        return super()._init_group(group, *rest)


class Projected(torch_optimizer.Yogi):
    """One of torch_optimizer, whose weights are kept in a box."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.clamp_(-1, 1)
        return result


def of_the_instance(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    step = optimizer.step
    optimizer.step = lambda closure=None: step(closure)
    return optimizer


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (Signed, "Signed.step in Signed"),
        (Disguised, "AdamW by its class, and steps otherwise.* in Disguised"),
        (Clipped, r"Adam by its class.*Clipped._init_group in Clipped"),
        (Projected, "Yogi by its class.*Projected.step in Projected"),
        (of_the_instance, "of_the_instance.*lambda.* in AdamW"),
    ],
)
def test_a_step_that_is_not_the_class_s_is_refused(make: Any, step: str) -> None:
    model = model_of()
    optimizer = make(model.parameters())
    with pytest.raises(UnsupportedError, match=f"{step}.*Remedy: .* itself, preconditioner=None"):
        check_optimizer(optimizer)
    with pytest.raises(UnsupportedError, match=step):
        check_optimizer(Accelerator(cpu=True).prepare(optimizer))


def test_the_very_class_with_another_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.Adagrad(model_of().parameters())
    check_optimizer(optimizer)
    monkeypatch.setattr(torch.optim.Adagrad, "step", Signed.step)
    with pytest.raises(UnsupportedError, match=r"Signed.step in Adagrad"):
        check_optimizer(optimizer)


def normalised(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad /= p.grad.norm()


@pytest.mark.parametrize(
    ("form", "register"),
    [
        ("frozen", lambda o: o.register_step_pre_hook(normalised)),
        ("full", lambda o: o.register_step_post_hook(partial(normalised))),
        ("full", lambda _: register_optimizer_step_pre_hook(normalised)),
        ("frozen", lambda _: register_optimizer_step_post_hook(normalised)),
    ],
)
def test_hooks_on_the_step_are_refused(form: str, register: Any) -> None:
    """By name, and also where they come after values were taken; not when they are gone."""
    model, optimizer = trained(torch.optim.AdamW, 1)
    options = {"preconditioner": form, "precondition_after": 1, "optimizer": optimizer}
    scorer = scorer_for(model, "path", layers=1, **options)
    before = scorer.score(BATCH).total
    handle = register(optimizer)
    try:
        for ask in (lambda: scorer.score(BATCH), lambda: check_optimizer(optimizer)):
            with pytest.raises(
                UnsupportedError, match=r"hook .*test_optimizers.normalised.*handle"
            ):
                ask()
    finally:
        handle.remove()
    assert torch.equal(scorer.score(BATCH).total, before)


@pytest.mark.parametrize("form", ["frozen", "full"])
def test_hooks_on_accumulated_gradients_are_refused(form: str) -> None:
    """They run after the backward, which values take, and before the step."""
    model, optimizer = trained(torch.optim.AdamW, 1)
    options = {"preconditioner": form, "precondition_after": 1, "optimizer": optimizer}
    scorer = scorer_for(model, "path", layers=1, **options)
    before = scorer.score(BATCH).total
    name, weight = next(iter(scorer.parameters.items()))

    def clamped(parameter: Any) -> None:
        parameter.grad.clamp_(-1e-3, 1e-3)

    handle = weight.register_post_accumulate_grad_hook(clamped)
    with pytest.raises(UnsupportedError, match=rf"accumulated gradient.*{name}: .*clamped.*handle"):
        scorer.score(BATCH)
    handle.remove()
    assert torch.equal(scorer.score(BATCH).total, before)


class Named(torch.optim.AdamW):
    """A subclass that keeps the step, and says more about itself."""

    def __init__(self, params: Any, name: str = "mine", **options: Any) -> None:
        super().__init__(params, **options)
        self.name = name

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, Named, torch_optimizer.Yogi])
def test_what_steps_as_its_class_says_is_served_under_every_wrapper(kind: Any) -> None:
    """A scheduler's count, a profiler's hook, a compiled step, accelerate, a scaler, a copy."""
    model, optimizer = trained(kind, 1)
    parameters = dict(model.named_parameters())
    gradients = gradients_of(parameters)
    forms = (frozen_preconditioners, partial(full_preconditioners, gradients=gradients))
    expected = [form(optimizer, parameters) for form in forms]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    handle = register_optimizer_step_post_hook(torch.profiler._optimizer_post_hook)
    try:
        wrapped = Accelerator(cpu=True).prepare(optimizer)
        assert wrapped is not optimizer
        torch.optim.lr_scheduler.ConstantLR(wrapped)
        for one in (optimizer, wrapped):
            for form, values in zip(forms, expected, strict=True):
                again = form(one, parameters)
                assert all(torch.equal(again[n], p) for n, p in values.items())
    finally:
        handle.remove()
    optimizer.step = optimizer.step  # as accelerate does after a scaled step
    check_optimizer(optimizer)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    check_optimizer(optimizer)
    check_optimizer(copy.deepcopy(kind(model.parameters())))


def test_state_and_gradients_that_do_not_fit_are_refused() -> None:
    model, optimizer = trained(torch.optim.Adam, 1)
    name, weight = next(iter(model.named_parameters()))
    with pytest.raises(InputError, match=name):
        full_preconditioners(optimizer, {name: weight}, {})
    with pytest.raises(InputError, match="parameter's shape"):
        full_preconditioners(optimizer, {name: weight}, {name: torch.ones(3)})
    seconds = optimizer.state[weight]["exp_avg_sq"]
    seconds.view(-1)[0] = float("nan")
    with pytest.raises(NumericalError, match=name):
        frozen_preconditioners(optimizer, {name: weight})
    optimizer.state[weight]["exp_avg_sq"] = torch.zeros(weight.numel())
    with pytest.raises(ConfigError, match="exp_avg_sq of Adam"):
        frozen_preconditioners(optimizer, {name: weight})


# --- wrappers, groups, layouts -------------------------------------------------------------------


def test_each_group_has_its_own_numbers() -> None:
    """Two groups with different betas, eps and coupled decay: each P is its own optimizer's."""
    model = model_of()
    parameters = {n: p for n, p in model.named_parameters() if p.ndim == 2}
    names = list(parameters)
    options = ({"betas": (0.8, 0.9), "eps": 1e-3}, {"weight_decay": 0.2})
    halves = [names[::2], names[1::2]]

    def stepped(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(groups, lr=0.0)  # the weights stay, so that both agree
        for number in range(3):
            for group in groups:
                for p in group["params"]:
                    p.grad = gradients_of({"p": p}, number)["p"]
            optimizer.step()
        return optimizer

    groups = [
        {"params": [parameters[n] for n in half], **own}
        for half, own in zip(halves, options, strict=True)
    ]
    together = stepped(groups)
    gradients = gradients_of(parameters)
    result = full_preconditioners(together, parameters, gradients)
    for half, group in zip(halves, groups, strict=True):
        part = {n: parameters[n] for n in half}
        alone = full_preconditioners(stepped([group]), part, gradients)
        assert all(torch.equal(result[n], alone[n]) for n in half)


@pytest.mark.parametrize("full", [False, True])
def test_P_is_1_until_every_parameter_has_taken_the_steps(full: bool) -> None:
    """None before the first step; one that no gradient has reached yet keeps all others plain."""
    model, optimizer = trained(torch.optim.AdamW, 0)
    parameters = dict(model.named_parameters())
    late = "model.layers.1.mlp.up_proj.weight"
    gradients = gradients_of(parameters)

    def found(after: int) -> dict[str, Tensor] | None:
        if full:
            return full_preconditioners(optimizer, parameters, gradients, after=after)
        return frozen_preconditioners(optimizer, parameters, after=after)

    assert found(1) is None
    for _ in range(2):
        for name, parameter in parameters.items():
            parameter.grad = None if name == late else gradients[name].clone()
        optimizer.step()
    assert found(1) is None
    parameters[late].grad = gradients[late].clone()
    optimizer.step()
    assert found(1) is not None
    assert found(2) is None


# --- through the scorer --------------------------------------------------------------------------


def test_a_parameter_that_the_optimizer_does_not_hold() -> None:
    model = model_of()
    optimizer = torch.optim.Adam(model.model.layers[0].parameters())
    options = {"preconditioner": "frozen", "precondition_after": 1, "optimizer": optimizer}
    scorer = scorer_for(model, "path", layers=1, **options)
    before = Snapshot(model)
    with pytest.raises(ConfigError, match="not held by the optimizer"):
        scorer.score(BATCH)
    before.check()


@pytest.mark.parametrize("form", ["frozen", "full"])
def test_the_scorer_refuses_before_any_work(form: str) -> None:
    """At construction: the model is not run."""
    model = model_of()

    def run(*_: Any) -> None:
        raise AssertionError("the model was run")

    model.register_forward_pre_hook(run)
    config = ScorerConfig("path", layers=1, preconditioner=form)
    with pytest.raises(UnsupportedError, match="SGD.*preconditioner=None"):
        Scorer(
            model, VALIDATION, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
        )


def test_both_forms_stay_finite_on_a_lora_factor_that_no_gradient_has_reached() -> None:
    """After the first step B is not 0 any more, but A's second moment is."""
    model = adapted(trained=False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = gradients.run_losses(plain_forward(model), BATCH)
    torch.stack(list(losses.values())).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds = [s["exp_avg_sq"] for s in optimizer.state.values()]
    assert any(not bool(v.any()) for v in seconds)
    result = {}
    for form in (None, "frozen", "full"):
        options = {"preconditioner": form, "precondition_after": 1, "optimizer": optimizer}
        scorer = scorer_for(model, "path", layers=1, **options)
        result[form] = scorer.score(BATCH).total
        assert bool(torch.isfinite(result[form]).all())
    # Where v^ = 0 the step is a sign: frozen P is huge there and wrong, full P is about 0.
    assert float(result["frozen"].abs().max()) > 1e3 * float(result["full"].abs().max())
