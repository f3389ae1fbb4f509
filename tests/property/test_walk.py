"""Values along a walk: against a copy that is trained, and what they are to label values."""

from __future__ import annotations

import io
import sys
import warnings
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis.strategies import floats, integers
from torch import Tensor, nn

from alphatoken import AlphaTokenWarning, PreferenceBatch, Scorer, ScorerConfig
from alphatoken.direction.cache import DirectionCache
from alphatoken.errors import ConfigError, InputError, ModelError, NumericalError, UnsupportedError
from alphatoken.estimate import walk as walks
from alphatoken.estimate.walk import Walk, walk
from alphatoken.oracle import composite, gradients
from alphatoken.oracle import run as oracle
from alphatoken.support.progress import Tracker
from tests.property.profiles import budget
from tests.property.setups import (
    Setup,
    bits,
    forward_of,
    label_truth,
    quiet,
    quiet_score,
    setups,
    smooth,
    summed_loss,
    unchanged,
)
from tests.property.strategies import CASE, ONE, PADDED, SHARED, TIED
from tests.property.test_differences import counted, llama
from tests.property.test_differences import rows_of as token_rows
from tests.property.tolerance import close

rows_of = partial(token_rows, rows=3)
RATE, STEPS = 1e-2, 3
SHORT = 1e-3  # of ways that a few nodes of a quadrature follow


def walk_of(scorer: Scorer) -> DirectionCache[dict[str, Tensor]]:
    assert isinstance(scorer.estimator, Walk)
    return scorer.estimator.cache


def config(**options: Any) -> ScorerConfig:
    chosen = {"walk_steps": STEPS, "walk_learning_rate": RATE, **options}
    return ScorerConfig("walk", **chosen)


def adamw(parameters: Iterable[Tensor], lr: float = RATE) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)


def trained(setup: Setup, model: nn.Module, steps: int = STEPS, lr: float = RATE) -> nn.Module:
    make = partial(adamw, lr=lr)
    return oracle.walked(model, forward_of, setup.case.validation, steps, make)


def wanted(setup: Setup, model: nn.Module, steps: int = STEPS) -> Tensor:
    return oracle.walk_values(model, trained(setup, model, steps), forward_of, setup.case.batch)


@given(setups(), integers(1, 4))
@example(Setup(CASE), 3)
@example(Setup(SHARED), 2)
@example(Setup(PADDED), 2)
@budget(0.1)
def test_walk_values_are_those_of_a_trained_copy(setup: Setup, steps: int) -> None:
    """Losses now less losses after n AdamW steps, one validation batch each; weights to the bit.

    Proves: walk values are those of a trained copy (exact), against ``walked``, ``walk_values``.
    """
    model = setup.case.model()
    before, expected = bits(model), wanted(setup, model, steps)
    scorer = Scorer(model, setup.case.validation, config=config(walk_steps=steps))
    values = quiet_score(scorer, setup.case.batch)
    close(values.total, expected, 1.0 + expected.abs(), 1e-8, name="walk")
    assert unchanged(model, before)
    assert values.estimator == "walk"
    assert not bool(values.total[~values.mask].any())


@given(setups(), integers(1, 3))
@example(Setup(CASE), 3)
@example(Setup(PADDED), 2)
@budget(0.05)
def test_central_walk_values_are_those_of_two_copies(setup: Setup, steps: int) -> None:
    """Half of what losses fall by from theta - D to theta + D; weights to the bit.

    Proves: central walk values are those of two copies (exact), against ``central_walk_values``.
    """
    model = setup.case.model()
    before, end = bits(model), trained(setup, model, steps)
    expected = oracle.central_walk_values(model, end, forward_of, setup.case.batch)
    own = config(walk_steps=steps, walk_form="central")
    values = quiet_score(Scorer(model, setup.case.validation, config=own), setup.case.batch)
    close(values.total, expected, 1.0 + expected.abs(), 1e-8, name="central walk")
    assert unchanged(model, before)
    assert not bool(values.total[~values.mask].any())


@given(setups().filter(smooth))
@budget(0.02)
def test_the_second_order_of_a_central_walk_cancels(setup: Setup) -> None:
    """Half as far a walk is off the label value by an eighth; of the one-sided form by a quarter.

    Proves: central walk values are off by the third order (exact), against ``label_values``.
    """
    model, batch = setup.case.model(), setup.case.batch
    end = trained(setup, model, lr=SHORT)
    parameters, back = dict(model.named_parameters()), oracle._along(model, end)
    first, scale = label_truth(setup, model, parameters, back)
    off = {}
    for share in (0.25, 0.125):
        there = oracle.moved_along(model, end, share)
        central = oracle.central_walk_values(model, there, forward_of, batch)
        off[share] = float((central - share * first).norm())
    rounding = 1e-13 * float((1.0 + scale).norm())
    assert off[0.125] <= off[0.25] / 6 + rounding
    forth = oracle.walk_values(model, end, forward_of, batch)
    behind = oracle.moved_along(model, end, -1.0)
    back_again = oracle.walk_values(model, behind, forward_of, batch)
    central = oracle.central_walk_values(model, end, forward_of, batch)
    close(central, (forth - back_again) / 2, 1.0 + forth.abs(), 1e-12, name="both ways")


def test_a_second_model_has_nothing_behind_it() -> None:
    model, reference = ONE.model(), replace(ONE, seed=1).model()
    with pytest.raises(ConfigError, match="nothing behind it"):
        Scorer(model, None, None, config(walk_form="central"), reference=reference)


def test_the_way_of_a_central_walk_is_that_of_its_end() -> None:
    """M = -D by parameter, and no other names."""
    ways = []
    for form in ("one_sided", "central"):
        model = ONE.model()
        with quiet():
            m = Scorer(model, ONE.validation, config=config(walk_form=form)).direction.total()
        ways.append(m)
        assert m.keys() <= dict(model.named_parameters()).keys()
    assert all(torch.equal(m, ways[1][name]) for name, m in ways[0].items())


@given(setups())
@budget(0.03)
def test_an_observed_forward_is_one_of_the_two(setup: Setup) -> None:
    """One forward beside it, and the same values; its graph still gives the step's gradient."""
    model = setup.case.model()
    batch = setup.case.batch
    scorer = Scorer(model, setup.case.validation, config=config())
    with quiet():
        alone = scorer.score(batch)
        for _ in range(2):  # kinds of arguments are looked at once
            with scorer.observe() as observed:
                logits = model(**setup.case.inputs)
                with counted(model) as calls:
                    values = observed.values(logits, batch["labels"])
    assert calls == [1]
    close(values.total, alone.total, 1.0 + alone.total.abs(), 1e-10, name="observed")
    losses = gradients.scalar_losses(logits, gradients.known_labels(batch))
    torch.stack(list(losses.values())).sum().backward()
    plain = setup.case.model()
    summed_loss(plain, batch).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if q.grad is not None:
            assert p.grad is not None
            assert torch.equal(p.grad, q.grad), name


def test_token_weights_scale_their_token() -> None:
    """As of every estimator; negative ones too.

    Proves: token weights scale their token (exact), against values without weights.
    """
    model = ONE.model()
    scorer = Scorer(model, ONE.validation, config=config())
    weights = torch.linspace(-1, 2, ONE.batch["labels"].numel(), dtype=torch.float64)
    weights = weights.reshape(ONE.batch["labels"].shape)
    with quiet():
        plain, scaled = scorer.score(ONE.batch), scorer.score(ONE.batch, token_weights=weights)
    assert torch.allclose(scaled.total, plain.total * weights, rtol=1e-12, atol=0)


def test_a_forward_with_dropout_is_run_again() -> None:
    """Values are of the model without dropout, whatever the observed pass drew.

    Proves: a forward with dropout is run again (exact), against ``walked``, ``walk_values``.
    """
    model = ONE.model()
    expected = wanted(Setup(ONE), model)
    model.add_module("drop", nn.Dropout(0.5))
    # A dropped pass has other losses.
    model.register_forward_hook(lambda m, args, z: 1.1 * z if m.training else z)
    scorer = Scorer(model, ONE.validation, config=config())
    for training in (False, True):  # the losses of the first pass are compared with the model's
        model.train(training)
        with quiet(), scorer.observe() as observed:
            logits = model(**ONE.inputs)
            values = observed.values(logits, ONE.batch["labels"])
        close(values.total, expected, 1.0 + expected.abs(), 1e-8, name="dropout")
        assert model.training is training


def test_scores_that_are_not_the_forwards_are_refused() -> None:
    """Scaled ones, detached ones, and those of other tokens; looked at again on later passes."""
    model = ONE.model()
    scorer = Scorer(model, ONE.validation, config=config())
    labels = ONE.batch["labels"]
    with quiet(), scorer.observe() as observed:
        logits = model(**ONE.inputs)
        for other in (1.5 * logits, 1.5 * logits.detach(), logits.roll(1, -1)):
            with pytest.raises(InputError, match="do not belong"):
                observed.values(other, labels)
        for _ in range(32):
            observed.values(logits, labels)
        with pytest.raises(InputError, match="do not belong"):
            observed.values(1.5 * logits, labels)


def test_the_former_end_is_let_go_before_the_next_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as large as the weights that walk, which lie in memory beside their optimizer."""
    model = ONE.model()
    scorer = Scorer(model, ONE.validation, config=config(walk_refresh=1))
    scorer.score(ONE.batch)
    former = [weakref.ref(weight) for weight in walk_of(scorer).current().values()]
    alive: list[bool] = []
    plain = walks.walk

    def walk_again(*args: Any) -> Any:
        alive.extend(one() is not None for one in former)
        return plain(*args)

    monkeypatch.setattr(walks, "walk", walk_again)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.01)
    scorer.score(ONE.batch)
    assert alive
    assert not any(alive)


def test_values_to_a_second_model_read_no_weights() -> None:
    """Their losses are those of the observed forward, whatever is written to a weight later."""
    model, reference = ONE.model(), replace(ONE, seed=1).model()
    scorer = Scorer(model, None, None, ScorerConfig("walk"), reference=reference)
    with scorer.observe() as observed:
        logits = model(**ONE.inputs)
        expected = observed.values(logits, ONE.batch["labels"]).total
        with torch.no_grad():
            next(iter(model.parameters())).mul_(1.01)
        assert torch.equal(observed.values(logits, ONE.batch["labels"]).total, expected)


@given(setups().filter(smooth))
@example(Setup(TIED))
@budget(0.05)
def test_one_short_step_is_the_label_value(setup: Setup) -> None:
    """n = 1, plain gradient, step eta -> 0: e / eta -> <grad l, G> over all parameters.

    Proves: one short step is the label value (exact), against ``label_values``,
    ``validation_gradient``.
    """
    model = setup.case.model()
    parameters = dict(model.named_parameters())
    validation = list(setup.case.validation[:1])
    g = gradients.validation_gradient(model, forward_of(model), validation, parameters)
    expected, scale = label_truth(setup, model, parameters, g)
    eta = 1e-6 / max(1.0, float(sum(m.square().sum() for m in g.values())) ** 0.5)
    scorer = Scorer(model, validation, config=config())
    sgd = partial(torch.optim.SGD, lr=eta)
    inputs = scorer.estimator.inputs
    end = walk(model, inputs.scored.parameters, inputs.gradient_of_step, 1, sgd)
    walk_of(scorer).keep(end)
    values = quiet_score(scorer, setup.case.batch)
    # Curvature at a step of 1e-6, and the rounding of losses over it.
    close(values.total / eta, expected, scale + 1e-10 / eta, 1e-4, name="short walk")


@given(integers(0, 10_000), integers(1, 40), floats(0.01, 0.9))
@budget(0.1)
def test_a_walk_on_a_quadratic_is_the_filtered_newton_step(
    seed: int, steps: int, share: float
) -> None:
    """D = -(I - (I - eta H)^n) H^-1 G: from eta n G (small eta n h) to Newton (n to infinity).

    Proves: a walk on a quadratic is the filtered newton step (exact), against closed form.
    """
    draw = torch.Generator().manual_seed(seed)
    root = torch.randn(5, 5, generator=draw, dtype=torch.float64)
    hessian = root @ root.T + 0.1 * torch.eye(5, dtype=torch.float64)
    start, best = torch.randn(2, 5, generator=draw, dtype=torch.float64)
    curvatures, basis = torch.linalg.eigh(hessian)
    eta = share / float(curvatures[-1])
    model = nn.ParameterDict({"x": nn.Parameter(start.clone())})

    def gradient_of_step(number: int) -> dict[str, Tensor]:
        return {"x": hessian @ (model["x"].detach() - best)}

    end = walk(model, ["x"], gradient_of_step, steps, partial(torch.optim.SGD, lr=eta))["x"]
    gradient = basis.T @ hessian @ (start - best)
    filtered = -(1 - (1 - eta * curvatures) ** steps) / curvatures * gradient
    close(end - start, basis @ filtered, 1.0 + start.abs().sum(), 1e-10, name="quadratic")


@given(setups().filter(smooth))
@budget(0.02)
def test_a_walk_value_is_the_mean_label_value_along_the_way(setup: Setup) -> None:
    """e = integral over the way of <grad l, -D>, along the straight line from start to end.

    Proves: a walk value is the mean label value along the way (exact), against
    ``label_values_along``.
    """
    model = setup.case.model()
    end = trained(setup, model, lr=SHORT)
    along = oracle.label_values_along(model, end, forward_of, setup.case.batch)
    scorer = Scorer(model, setup.case.validation, config=config(walk_learning_rate=SHORT))
    values = quiet_score(scorer, setup.case.batch)
    close(values.total, along, 1.0 + along.abs(), 1e-6, name="along the way")


@given(setups().filter(smooth))
@budget(0.02)
def test_first_order_is_off_by_the_curvature_along_the_way(setup: Setup) -> None:
    """|e - v(-D)| <= max |D' H D| / 2 along the way; M = -D is the scorer's direction.

    Proves: first order is off by the curvature along the way (exact), against ``curvature_along``,
    ``label_values``.
    """
    model = setup.case.model()
    end = trained(setup, model, lr=SHORT)
    scorer = Scorer(model, setup.case.validation, config=config(walk_learning_rate=SHORT))
    with quiet():
        values, m = scorer.score(setup.case.batch), scorer.direction.total()
    parameters = dict(model.named_parameters())
    first, scale = label_truth(
        setup, model, parameters, {n: m.get(n, 0 * p) for n, p in parameters.items()}
    )
    most = torch.stack(
        [
            oracle.curvature_along(model, end, forward_of, setup.case.batch, share).abs()
            for share in torch.linspace(0, 1, 9).tolist()
        ]
    ).amax(0)
    # Nine points see the largest curvature but for a part.
    assert bool(((values.total - first).abs() <= 0.6 * most + 1e-8 * (1 + scale)).all())


@given(setups())
@budget(0.03)
def test_values_of_a_chain_of_walks_add_up(setup: Setup) -> None:
    """From a to b and from b to c is from a to c, exactly: each is one loss less another.

    Proves: values of a chain of walks add up (exact), against ``walked``.
    """
    a = setup.case.model()
    b = trained(setup, a)
    c = trained(setup, b)

    def between(first: nn.Module, second: nn.Module) -> Tensor:
        scorer = Scorer(first, None, config=ScorerConfig("walk"), reference=second)
        return scorer.score(setup.case.batch).total

    whole, parts = between(a, c), between(a, b) + between(b, c)
    close(parts, whole, 1.0 + whole.abs(), 1e-12, name="chain")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_walk_of_many_seconds_shows_its_progress(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, by the first process; a log gets no line of what is over at once."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("LOCAL_RANK", rank)
    Scorer(ONE.model(), ONE.validation, config=config()).score(ONE.batch)
    assert "Walk" not in sys.stderr.getvalue()  # type: ignore[attr-defined]
    now = lambda *given, delay: Tracker(*given, delay=0.0 * delay)  # noqa: E731
    monkeypatch.setattr("alphatoken.estimate.walk.Tracker", now)
    monkeypatch.setattr("alphatoken.direction.inputs.Tracker", now)
    Scorer(ONE.model(), ONE.validation, config=config()).score(ONE.batch)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert (f"Walk: 0/{STEPS} (0%)" in shown) == (rank == "0")
    assert (f"Walk: {STEPS}/{STEPS} (100%)" in shown) == (rank == "0")
    assert "Gradient" not in shown
    count = len(ONE.validation)
    Scorer(ONE.model(), ONE.validation, config=ScorerConfig("label")).score(ONE.batch)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    for done in (0, count):
        assert (f"Gradient of the validation rows: {done}/{count} (" in shown) == (rank == "0")


def _stepped(model: nn.Module) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.01 * (number + 1))


@pytest.mark.parametrize(("refresh", "pinned"), [(0, False), (1, True), (2, False)])
def test_a_new_walk_is_taken_when_it_is_due(refresh: int, pinned: bool) -> None:
    """From the start alone, or from where the weights are after every k steps.

    Proves: a new walk is taken when it is due (exact), against ``walked``, ``walk_values``.
    """
    setup, model = Setup(ONE), ONE.model()
    scorer = Scorer(model, ONE.validation, config=config(walk_refresh=refresh))
    end = trained(setup, model)
    for step in range(4):
        if refresh and step % refresh == 0:
            end = trained(setup, model)
        expected = oracle.walk_values(model, end, forward_of, ONE.batch)
        if pinned:
            scorer.pin(("step", step))
        with quiet():
            for _ in range(2):  # two micro-batches of a step
                found = scorer.score(ONE.batch).total
        close(found, expected, 1.0 + expected.abs(), 1e-8, name="refresh")
        _stepped(model)


def test_other_validation_rows_and_a_refresh_take_a_new_walk() -> None:
    """Each from the weights as they are.

    Proves: other validation rows and a refresh take a new walk (exact), against ``walked``,
    ``walk_values``.
    """
    model = ONE.model()
    scorer = Scorer(model, ONE.validation, config=config())
    quiet_score(scorer, ONE.batch)
    for change in (
        lambda: scorer.set_validation(ONE.validation[:1]),
        scorer.refresh,
    ):
        _stepped(model)
        change()
        rows = scorer.validation
        end = oracle.walked(model, forward_of, rows, STEPS, adamw)
        expected = oracle.walk_values(model, end, forward_of, ONE.batch)
        with quiet():
            close(scorer.score(ONE.batch).total, expected, 1.0 + expected.abs(), 1e-8, name="new")


def test_a_changed_setting_keeps_the_walk() -> None:
    """A new attribute of a module builds the scorer anew, and the end stays where it was.

    Proves: a changed setting keeps the walk (exact), against ``walked``, ``walk_values``.
    """
    setup, model = Setup(ONE), ONE.model()
    scorer = Scorer(model, ONE.validation, config=config())
    end = trained(setup, model)
    with quiet():
        scorer.score(ONE.batch)
        _stepped(model)
        model.a_setting = 3  # type: ignore[assignment]
        found = scorer.score(ONE.batch).total
    expected = oracle.walk_values(model, end, forward_of, ONE.batch)
    close(found, expected, 1.0 + expected.abs(), 1e-8, name="kept")


def test_rows_that_were_written_to_take_a_new_walk() -> None:
    """By whichever writer; whatever the weights have become, training writes to no rows.

    Proves: rows that were written to take a new walk (exact), against ``walked``, ``walk_values``.
    """
    model = ONE.model()
    rows = [{name: tensor.clone() for name, tensor in batch.items()} for batch in ONE.validation]
    scorer = Scorer(model, rows, config=config())
    quiet_score(scorer, ONE.batch)
    for number, stepped in enumerate((False, True)):
        if stepped:
            _stepped(model)
        for batch in rows:
            ids = batch["input_ids"].numpy()  # torch does not count what numpy writes
            ids[:] = (ids + 1 + number) % 7
            batch["labels"][batch["labels"] != -100] = batch["input_ids"][batch["labels"] != -100]
        end = oracle.walked(model, forward_of, rows, STEPS, adamw)
        expected = oracle.walk_values(model, end, forward_of, ONE.batch)
        found = quiet_score(scorer, ONE.batch).total
        close(found, expected, 1.0 + expected.abs(), 1e-8, name="rows")


def _rescaled(model: nn.Module, scaling: float) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["first"] = scaling  # type: ignore[index,operator]


def test_another_setting_of_the_same_weights_takes_a_new_walk() -> None:
    """Nothing has been trained, so that there is no end to keep; also back at the first weights.

    Proves: another setting of the same weights takes a new walk (exact), against a new scorer.
    """
    model = lora("first")
    scorer, batch = Scorer(model, rows_of(1), config=config()), rows_of(2)
    quiet_score(scorer, batch)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def fresh() -> Tensor:
        return quiet_score(Scorer(model, rows_of(1), config=config()), batch).total

    for scaling in (7.0, 3.0):
        _rescaled(model, scaling)
        assert torch.equal(quiet_score(scorer, batch).total, fresh())
    _stepped(model)
    _rescaled(model, 5.0)
    assert not torch.equal(quiet_score(scorer, batch).total, fresh())  # it may be training's own
    model.load_state_dict(before)
    assert torch.equal(quiet_score(scorer, batch).total, fresh())


def test_a_walk_that_began_at_other_weights_is_named() -> None:
    """Once a walk, where values are not those of a training loop; nor can they be certified.

    Proves: a walk that began at other weights is named (exact), against the warnings that are
    given.
    """
    model = ONE.model()
    scorer = Scorer(model, ONE.validation, config=config())
    quiet_score(scorer, ONE.batch)
    assert scorer.verify(ONE.batch, progress=False).passed
    for _ in range(2):
        _stepped(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with scorer.observe() as observed:
                observed.values(model(**ONE.inputs), ONE.batch["labels"])
            assert not said
            for _ in range(2):
                scorer.score(ONE.batch)
        assert len(said) == 1
        assert "began at other weights" in str(said[0].message)
        with pytest.raises(UnsupportedError, match="began at other weights"):
            scorer.verify(ONE.batch, progress=False)
        scorer.refresh()
        assert scorer.verify(ONE.batch, progress=False).passed
    renewed = Scorer(model, ONE.validation, config=config(walk_refresh=2))
    quiet_score(renewed, ONE.batch)
    _stepped(model)
    with warnings.catch_warnings(record=True) as said:
        renewed.score(ONE.batch)
    assert not said


def lora(*names: str) -> Any:
    peft = pytest.importorskip("peft")
    chosen = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), chosen, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, chosen)
    return model


def test_a_walk_of_factors_that_no_forward_uses_is_refused() -> None:
    """An adapter that was merged, or left for another, after the walk: each value would be 0."""
    model = lora("first", "second")
    scorer = Scorer(model, rows_of(1), config=config())
    with quiet():
        before = scorer.score(rows_of(2)).total
        model.merge_adapter()
        for _ in range(2):
            with pytest.raises(ModelError, match="depends on no parameter"):
                scorer.score(rows_of(2))
        model.unmerge_adapter()
        assert float((scorer.score(rows_of(2)).total - before).abs().max()) < 1e-5
        model.base_model.set_adapter("second")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".first." in name)
        with pytest.raises(ModelError, match="depends on no parameter"):
            scorer.score(rows_of(2))


def test_walks_of_two_threads_wait_for_each_other() -> None:
    """Also those that a direction is made of: values and weights are to the bit."""
    model = llama()
    before = bits(model)
    first, second = (Scorer(model, rows_of(1), config=config()) for _ in range(2))
    wanted_values = quiet_score(first, rows_of(2)).total
    over = Event()

    def others() -> None:
        while not over.is_set():
            second.refresh()
            _ = second.direction

    with quiet(), ThreadPoolExecutor(1) as pool:
        beside = pool.submit(others)
        try:
            found = [first.score(rows_of(2)).total for _ in range(5)]
        finally:
            over.set()
        beside.result()
    assert all(torch.equal(one, wanted_values) for one in found)
    assert unchanged(model, before)


def test_a_walk_on_pairs_lowers_the_preference_loss() -> None:
    """Its gradient is that of the preference objective, step by step.

    Proves: a walk on pairs lowers the preference loss (exact), against ``walk_values``, steps on
    the preference objective.
    """
    model, plain = ONE.model(), ONE.model()
    chosen, rejected = ONE.batch, {**ONE.batch, "input_ids": ONE.batch["input_ids"].flip(0)}
    rejected["labels"] = torch.where(
        ONE.batch["labels"] == -100, ONE.batch["labels"], rejected["input_ids"]
    )
    zeros = torch.zeros(len(chosen["labels"]), dtype=torch.float64)
    pairs = PreferenceBatch(chosen, rejected, zeros, zeros, beta=0.3)
    parameters = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    stepper = adamw(parameters.values())
    for _ in range(STEPS):
        g = composite.objective_gradient(forward_of(plain), [pairs], parameters)
        for name, p in parameters.items():
            p.grad = g[name]
        stepper.step()
    expected = oracle.walk_values(model, plain, forward_of, ONE.batch)
    values = quiet_score(Scorer(model, pairs, config=config()), ONE.batch)
    close(values.total, expected, 1.0 + expected.abs(), 1e-8, name="pairs")


def test_weights_in_16_bits_walk_in_float32() -> None:
    """Forty steps that are each smaller than a weight's rounding still move it, as in float32.

    Proves: weights in 16 bits walk in float32 (exact), against the walk in float32.
    """
    ends = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = llama().bfloat16().to(dtype)
        scorer = Scorer(model, rows_of(1), config=config(walk_steps=40, walk_learning_rate=2e-5))
        with quiet():
            ends[dtype] = walk_of(scorer).current()
    assert all(end.dtype == torch.bfloat16 for end in ends[torch.bfloat16].values())
    name = "model.layers.0.mlp.up_proj.weight"
    start = dict(llama().bfloat16().named_parameters())[name].float()
    wide, narrow = (end[name].float() - start.detach().float() for end in ends.values())
    assert float(torch.nn.functional.cosine_similarity(wide.flatten(), narrow.flatten(), 0)) > 0.9


def test_autocast_keeps_no_cast_of_weights_that_moved() -> None:
    """Under an autocast of the caller's, which caches casts, as without one.

    Proves: autocast keeps no cast of weights that moved (approximate), against values without
    autocast.
    """
    model, batch = llama(), rows_of(2)
    scorer = Scorer(model, rows_of(1), config=config(walk_steps=8))
    with quiet():
        scorer.score(batch)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch["input_ids"]).logits  # fills the cache
            cast = scorer.score(batch).total
            again = model(input_ids=batch["input_ids"]).logits
        exact = scorer.score(batch).total
    assert torch.equal(logits, again)
    assert float((cast - exact).norm() / exact.norm()) < 0.2


class _StopError(Exception):
    pass


def test_weights_come_back_after_an_exception() -> None:
    """In the middle of the walk."""
    model = ONE.model()
    before = bits(model)
    scorer = Scorer(model, ONE.validation, config=config())

    def fail(*_: Any) -> None:
        if not unchanged(model, before):
            raise _StopError

    handle = model.register_forward_pre_hook(fail)
    scorer.pin("as it is")
    with quiet(), pytest.raises(_StopError):
        scorer.score(ONE.batch)
    handle.remove()
    assert unchanged(model, before)
    # The walk that failed passes for none.
    expected = wanted(Setup(ONE), model)
    with quiet():
        close(scorer.score(ONE.batch).total, expected, 1.0 + expected.abs(), 1e-8, name="again")


def test_a_walk_that_climbs_is_said() -> None:
    """A rate so high that the validation loss rises, by half or far; not one that lowers it.

    Proves: a walk that climbs is said (exact), against the validation loss.
    """
    for rate, said in ((1.0, 1), (5.0, 1), (1e-3, 0)):
        scorer = Scorer(ONE.model(), ONE.validation, config=config(walk_learning_rate=rate))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", AlphaTokenWarning)
            scorer.score(ONE.batch)
        assert sum("raised the mean loss" in str(one.message) for one in caught) == said


def test_a_walk_that_learns_its_rows_by_heart_is_said() -> None:
    """Where their mean loss ends below 0.05 nats and 5 % of where it began; not where it falls.

    Proves: a walk that learns its rows by heart is said (exact), against a trained copy.
    """
    model, rate = ONE.model(), 0.05
    for steps in (4, 16, 20):  # to 1.6, 0.08 and 0.03 nats
        scorer = Scorer(
            model, ONE.validation, config=config(walk_steps=steps, walk_learning_rate=rate)
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", AlphaTokenWarning)
            scorer.score(ONE.batch)
        told = [str(one.message) for one in caught if "by heart" in str(one.message)]
        before, after = (
            float(sum(summed_loss(one, batch).detach() for batch in ONE.validation)) / 7
            for one in (model, trained(Setup(ONE), model, steps, rate))
        )
        assert len(told) == (after < 0.05 and after < 0.05 * before), (before, after)
        assert all("its rows by heart" in one and f"to {after:.3g}" in one for one in told)
    assert told, "the longest one does"
    sure = trained(Setup(ONE), model, 20, rate)  # rows that are certain before the walk
    scorer = Scorer(sure, ONE.validation, config=config(walk_steps=1, walk_learning_rate=1e-4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AlphaTokenWarning)
        scorer.score(ONE.batch)
    assert not any("by heart" in str(one.message) for one in caught)


def test_losses_that_are_not_finite_are_refused() -> None:
    """At the end of the walk, by their place."""
    model = ONE.model()
    scorer = Scorer(model, ONE.validation, config=config())
    with quiet():
        end = dict(walk_of(scorer).current())
    name = next(iter(end))
    walk_of(scorer).keep({**end, name: torch.full_like(end[name], float("nan"))})
    with quiet(), pytest.raises(NumericalError, match="end of the walk"):
        scorer.score(ONE.batch)


def test_a_reference_without_a_row_for_a_token_is_refused() -> None:
    """By its place, and not by an index inside of torch."""
    other = llama()
    other.resize_token_embeddings(32)
    scorer = Scorer(llama(), None, config=ScorerConfig("walk"), reference=other)
    with quiet(), pytest.raises(InputError, match="under the reference model has no row"):
        scorer.score(rows_of(2))


def test_a_reference_that_holds_the_model_itself_is_refused() -> None:
    """As an adapter put onto the model does: it is in use in both, and each value would be 0."""
    model = ONE.model()
    with pytest.raises(ConfigError, match="parameters of the model itself"):
        Scorer(model, None, config=ScorerConfig("walk"), reference=nn.Sequential(model))


def test_what_belongs_to_a_walk_is_refused_elsewhere() -> None:
    """A second model, and a retention term."""
    model = ONE.model()
    with pytest.raises(ConfigError, match="second model"):
        Scorer(model, ONE.validation, reference=ONE.model())
    with pytest.raises(ConfigError, match="no stability side"):
        Scorer(model, ONE.validation, ONE.validation, config=config())
    second = Scorer(model, None, config=ScorerConfig("walk"), reference=ONE.model())
    with pytest.raises(UnsupportedError, match="no direction"):
        _ = second.direction
