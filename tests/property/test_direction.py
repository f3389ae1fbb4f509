"""M = P o (G + lambda V): the algebra, and each ingredient through the scorer."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from alphatoken import (
    AlphaTokenWarning,
    FisherDrift,
    PreferenceBatch,
    Scorer,
    ScorerConfig,
    TokenValues,
)
from alphatoken.direction import algebra as direction
from alphatoken.direction.objective import (
    mean_gradient,
    objective_sums,
    require_finite_gradient,
)
from alphatoken.errors import NumericalError
from alphatoken.model.batch import read_batch, token_losses
from alphatoken.model.protocol import find_adapter
from alphatoken.oracle import gradients, influence, preference
from tests.property.decoder import ReferenceAdapter
from tests.property.profiles import budget
from tests.property.setups import (
    CONTRACTION,
    EVERY,
    MODEL,
    Setup,
    compare_path,
    drift_of,
    forward_of,
    make_scorer,
    oracle_influence,
    parameters_of,
    quiet_score,
    setups,
    truth,
)
from tests.property.strategies import SEEDS, make_case
from tests.property.tolerance import close


def mean_size(
    model: nn.Module, batches: Sequence[Mapping[str, Tensor]], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Mean over tokens of |gradient|."""
    total = {n: torch.zeros_like(p) for n, p in parameters.items()}
    count = 0
    for batch in batches:
        for one in gradients.per_token_gradients(model, forward_of(model), batch, parameters):
            count += 1
            for name, g in one.items():
                total[name] += g.abs()
    return {n: t / count for n, t in total.items()}


def absolute_gradient(*given: Any) -> dict[str, Tensor]:
    """That plus its largest entry: sums round within a token too."""
    return {n: size + size.max() for n, size in mean_size(*given).items()}


def preference_batches(setup: Setup, beta: float, normalization: str) -> list[PreferenceBatch]:
    """Validation batches 2n and 2n + 1 as chosen and rejected, with random references."""
    batches = setup.case.validation
    pairs = []
    for n in range(0, len(batches) - 1, 2):
        generator = torch.Generator().manual_seed(setup.case.seed + n)
        rows = len(batches[n]["labels"])
        reference = torch.randn(2, rows, generator=generator, dtype=torch.float64)
        pairs.append(PreferenceBatch(batches[n], batches[n + 1], *reference, beta, normalization))
    return pairs


@dataclass(frozen=True)
class DirectionCase:
    """Shapes of two parameters, lambda, and a seed."""

    o: int
    i: int
    weight: float
    seed: int

    def tensor(self, *shape: int, salt: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2**16 * salt)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


def direction_cases() -> st.SearchStrategy[DirectionCase]:
    return st.builds(
        DirectionCase,
        o=st.integers(1, 5),
        i=st.integers(1, 5),
        weight=st.sampled_from([1.5, 0.0, -0.5]),
        seed=SEEDS,
    )


SEVERAL = Setup(
    make_case(("pprrr", "..prr"), (("pprr",), ("prrrr.", "..prrr"), ("pppppr",)), layers=2), "all"
)
ROWS = st.sampled_from(["pprr..", "prrrr.", "..pprr", ".prprr", "pprrrr"])
PAIRS = st.integers(1, 2).flatmap(
    lambda n: st.sampled_from([2, 4]).flatmap(
        lambda count: st.tuples(*[st.tuples(*[ROWS] * n)] * count)
    )
)


@given(direction_cases())
def test_diagonal_drift(case: DirectionCase) -> None:
    """V = F o (W - W_ref), entry by entry and as the gradient of J_prx; exactly zero at W_ref.

    Proves: eqs. fisher_proxy, gproxy, V_layer (exact), against entry by entry.
    """
    fisher, weight, reference = (case.tensor(case.o, case.i, salt=s) for s in range(3))
    found = direction.diagonal_drift(fisher, weight, reference)
    for o in range(case.o):
        for i in range(case.i):
            expected = fisher[o, i] * (weight[o, i] - reference[o, i])
            close(found[o, i], expected, expected.abs(), CONTRACTION, name="diagonal drift")
    assert not bool(direction.diagonal_drift(fisher, weight, weight).any())
    moved = weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((fisher * (moved - reference) ** 2).sum() / 2, moved)
    close(found, gradient, found.abs(), CONTRACTION, name="gradient of the quadratic")


@given(direction_cases())
def test_direction_algebra(case: DirectionCase) -> None:
    """M = P o G + lambda P o V; P = 1 where it is not given; balance = ||lambda V|| / ||G||.

    Proves: eqs. composite_val, composite_val_obj (exact), against entry by entry.
    """
    names = ("a", "b")
    g, v, p = ({n: case.tensor(case.o, case.i, salt=3 * s + j) for j, n in enumerate(names)}
               for s in range(3))  # fmt: skip
    partly = {"a": p["a"]}
    m = direction.Direction(
        direction.precondition(g, partly), direction.precondition(v, partly), case.weight
    )
    for name in names:
        factor = p[name] if name in partly else torch.ones_like(p[name])
        expected = factor * (g[name] + case.weight * v[name])
        scale = factor.abs() * (g[name].abs() + abs(case.weight) * v[name].abs())
        close(m.total()[name], expected, scale, CONTRACTION, name="P o (G + lambda V)")
        ratio = abs(case.weight) * (factor * v[name]).norm() / (factor * g[name]).norm()
        close(m.balance[name], ratio, ratio, CONTRACTION, name="balance")
    alone = direction.Direction(g, None, case.weight)
    assert all(torch.equal(alone.total()[n], g[n]) for n in names)
    assert alone.balance == dict.fromkeys(names, 0.0)
    assert direction.precondition(g, None) == g


def test_the_first_gradient_that_is_not_finite_is_named() -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, float("inf")])
    require_finite_gradient("validation", {})
    require_finite_gradient("validation", {"a": good, "b": good.half()})
    with pytest.raises(NumericalError, match=r"validation gradient is not finite.*\bb\b"):
        require_finite_gradient("validation", {"a": good, "b": bad, "c": -bad})


@given(setups())
@example(SEVERAL)
@budget(0.15)
def test_validation_gradient(setup: Setup) -> None:
    """G: mean over the response tokens of all batches, whatever their lengths; V entry by entry.

    Proves: validation gradient (exact), against ``validation_gradient``.
    """
    model = setup.case.model()
    scorer = make_scorer(setup, "path", model=model)
    gain, keep = truth(setup).directions
    size = absolute_gradient(model, setup.case.validation, parameters_of(setup, scorer.adapter))  # type: ignore[arg-type]
    found = scorer.direction
    assert set(found.adaptation) == set(gain)
    assert found.stability is not None
    for name, g in gain.items():
        close(found.adaptation[name], g, size[name], MODEL, name="G")
        v = keep[name]
        close(found.stability[name], v, v.abs() + size[name], CONTRACTION, name="V")


@given(setups())
@budget(0.1)
def test_retention_by_data(setup: Setup) -> None:
    """V = gradient of the mean token loss on given retention batches.

    Proves: retention by data (exact), against ``validation_gradient``, ``exact_influence``.
    """
    model = setup.case.model()
    data = [setup.case.batch, *setup.case.validation]
    parameters = parameters_of(setup, ReferenceAdapter(model))
    v = gradients.validation_gradient(model, forward_of(model), data, parameters)
    for retention in (data, data[0]):
        scorer = make_scorer(setup, "path", model=model, retention=retention)
        values = quiet_score(scorer, setup.case.batch)
        if retention is not data:
            v = gradients.validation_gradient(model, forward_of(model), data[0], parameters)
        compare_path(setup, model, values, v, "stability, retention data")


@given(setups(), st.sampled_from([0.0, -2.0, 7.0]))
@budget(0.1)
def test_lambda(setup: Setup, weight: float) -> None:
    """stability is reported before lambda; total = adaptation + lambda stability.

    Proves: eqs. phi_total, decomposition (exact), against lambda = 1.
    """
    values = quiet_score(make_scorer(setup, "direct"), setup.case.batch)
    scorer = make_scorer(setup, "direct", stability_weight=weight)
    other = quiet_score(scorer, setup.case.batch)
    assert torch.equal(other.stability, values.stability)
    assert torch.equal(other.adaptation, values.adaptation)
    expected = values.adaptation + weight * values.stability
    scale = values.adaptation.abs() + abs(weight) * values.stability.abs()
    close(other.total, expected, scale, CONTRACTION, name="lambda")


@given(setups(validations=PAIRS), st.sampled_from([0.1, 1.0]), st.sampled_from(["tokens", "pairs"]))
@budget(0.15)
def test_preference_validation(setup: Setup, beta: float, normalization: str) -> None:
    """G of preference pairs: gradient of the summed -log sigma(s) over its normaliser.

    Proves: preference validation (exact), against ``preference_objective``.
    """
    model = setup.case.model()
    parameters = parameters_of(setup, ReferenceAdapter(model))
    items = preference_batches(setup, beta, normalization)
    total = {n: torch.zeros_like(p) for n, p in parameters.items()}
    count = 0
    for item in items:
        pairs = preference.PreferencePairs(
            dict(item.chosen), dict(item.rejected), item.reference_chosen, item.reference_rejected
        )
        own = len(item.reference_chosen)
        if normalization == "tokens":
            own = sum(
                len(gradients.response_tokens(gradients.known_labels(b)))
                for b in (item.chosen, item.rejected)
            )
        objective = preference.preference_objective(
            forward_of(model), pairs, beta, normalisation=normalization
        )
        found = torch.autograd.grad(objective * own, list(parameters.values()), allow_unused=True)
        count += own
        for name, gradient in zip(parameters, found, strict=True):
            if gradient is not None:
                total[name] += gradient
    gain = {n: t / count for n, t in total.items()}
    for estimator in ("path", "label"):
        given = {"validation": items if len(items) > 1 else items[0], "derivative": "auto"}
        scorer = make_scorer(setup, estimator, model=model, retention=False, **given)
        values = quiet_score(scorer, setup.case.batch)
        psi = oracle_influence(setup, model, gain)
        how = influence.column_sums if estimator == "path" else influence.row_sums
        expected, scale = (
            influence.to_token_index(how(x)) * values.mask for x in (psi.matrix, psi.absolute_scale)
        )
        # G is a difference of two branches: rounding is relative to both, not to what is left.
        size = scale + scale.max()
        close(values.total, expected, size, MODEL, name=f"preference, {estimator}")


@given(setups(), st.sampled_from(EVERY))
@budget(0.1)
def test_direction_is_never_stale(setup: Setup, estimator: str) -> None:
    """After any write, of frozen weights too, counted or not: a fresh scorer's values, exactly.

    Proves: direction is never stale (exact), against a fresh scorer, bit by bit.
    """
    model = setup.case.model()
    drift = FisherDrift(*drift_of(setup, model))
    scorer = make_scorer(setup, estimator, model=model)
    first = quiet_score(scorer, setup.case.batch).total
    assert torch.equal(quiet_score(scorer, setup.case.batch).total, first)
    scoped = {id(p) for p in scorer.parameters.values()}
    outside = [p for p in model.parameters() if id(p) not in scoped]

    def require_fresh() -> None:
        fresh = Scorer(model, setup.case.validation, drift, scorer.config)
        expected = quiet_score(fresh, setup.case.batch).total
        assert torch.equal(quiet_score(scorer, setup.case.batch).total, expected)

    for p in (next(iter(scorer.parameters.values())), outside[0]):
        with torch.no_grad():
            p.mul_(1.25)
        require_fresh()
    first_weight = next(iter(scorer.parameters.values()))
    if len(first_weight) > 1:  # the same numbers, in other places
        first_weight.data[[0, 1]] = first_weight.data[[1, 0]].clone()
    else:
        outside[0].data.mul_(0.8)
    require_fresh()
    first_weight.requires_grad_(False)
    if any(p.requires_grad for p in scorer.scope.parameters().values()):
        require_fresh()


@pytest.mark.parametrize(
    ("share", "side"), [(9e-4, "adaptation"), (1.1e-3, None), (0.9989, None), (0.9991, "stability")]
)
def test_a_side_is_said_to_decide_alone_from_a_share_of_0_999_on(
    share: float, side: str | None
) -> None:
    case = SEVERAL.case
    model = case.model()
    drift = FisherDrift(*drift_of(SEVERAL, model))

    def score(weight: float) -> TokenValues:
        config = ScorerConfig("direct", layers=2, stability_weight=weight, max_relative_drift=None)
        return Scorer(model, case.validation, drift, config).score(case.batch)

    at_one = score(1.0).shares()["stability_direct"]
    odds = share / (1 - share) / (at_one / (1 - at_one))
    said = pytest.warns(AlphaTokenWarning, match=f"{side} side alone") if side else nullcontext()
    with said:
        found = score(odds)
    assert found.shares()["stability_direct"] == pytest.approx(share, rel=1e-6)


def test_gradients_are_summed_one_by_one_and_none_is_held() -> None:
    """Several batches' sums are autograd's, and of one batch two gradients at most are alive."""
    model = SEVERAL.case.model()
    adapter, parameters = find_adapter(model), dict(model.named_parameters())
    unused = torch.zeros(3, requires_grad=True)
    given = {"unused": unused, **dict(reversed(parameters.items()))}
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []

    def look(gradient: Tensor) -> None:
        made.append(weakref.ref(gradient))
        alive.append(sum(one() is not None for one in made))

    hooks = [p.register_hook(look) for p in parameters.values()]
    sums, count = objective_sums(adapter, given, SEVERAL.case.validation, first=None)
    for hook in hooks:
        hook.remove()
    assert list(sums) == list(given)
    assert not sums["unused"].any()
    assert len(alive) == len(parameters) * len(SEVERAL.case.validation)
    assert max(alive) <= 2
    assert not any(p._backward_hooks for p in given.values())
    assert all(p.grad is None for p in given.values())
    expected = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for batch in SEVERAL.case.validation:
        loss = token_losses(adapter.forward(read_batch(batch).inputs), batch["labels"]).sum()
        for name, g in zip(
            parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True
        ):
            expected[name] += g
    for name, known in expected.items():
        scale = 1.0 + known.abs().sum()
        close(sums[name], known.detach(), scale, 1e-12, name=name)
    assert count == sum(read_batch(b).response_tokens for b in SEVERAL.case.validation)
    copies = {name: one.clone() for name, one in sums.items()}  # whose memory the means take
    means = mean_gradient("validation", copies, count)
    assert not copies
    assert all(torch.equal(means[name], sums[name] / count) for name in given)
