"""Sharded weights, in the layouts of one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from alphatoken import FisherDrift, Scorer, ScorerConfig
from alphatoken.config import CAPTURED
from alphatoken.errors import FisherError, UnsupportedError
from alphatoken.model.sharding import Sharding
from alphatoken.oracle import gradients, run
from tests.property.decoder import ReferenceAdapter, ReferenceDecoder
from tests.property.profiles import budget
from tests.property.setups import (
    BETAS,
    MODEL,
    Setup,
    bits,
    drift_of,
    forward_of,
    label_truth,
    make_scorer,
    oracle_influence,
    quiet_score,
    scored,
    setups,
    stepped,
    truth,
    unchanged,
)
from tests.property.strategies import PADDED, make_case
from tests.property.tolerance import close


class FlatSharding:
    """One process's parts: flat, padded at the end; ``gathered`` names what was made whole."""

    def __init__(self, model: nn.Module) -> None:
        named = model.named_parameters(remove_duplicate=False)
        self._shapes = {n: p.shape for n, p in named}
        self.gathered: list[str] = []

    def shape(self, name: str) -> torch.Size:
        return self._shapes[name]

    def full(self, name: str, parameter: Tensor) -> Tensor:
        return parameter.detach().clone()

    def local(self, name: str, parameter: Tensor) -> Tensor:
        return self.part_of(name, parameter)

    def part_of(self, name: str, full: Tensor) -> Tensor:
        assert full.shape == self._shapes[name]
        return torch.cat([full.detach().flatten(), full.new_zeros(3)])

    def reduce(self, name: str, full: Tensor) -> Tensor:
        return self.part_of(name, full)

    def gather(self, name: str, part: Tensor) -> Tensor:
        self.gathered.append(name)
        return part[:-3].reshape(self._shapes[name])

    @contextmanager
    def repeatable(self, within: nn.Module | None = None) -> Iterator[None]:
        yield

    def norms(self, parts: Mapping[str, Tensor]) -> dict[str, float]:
        return {n: float(p.norm()) for n, p in parts.items()}

    def local_shard_and_direction(
        self, name: str, parameter: Tensor, part: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert part.shape == (parameter.numel() + 3,)
        return parameter.data.view(-1), part[:-3]

    def regather(self) -> None:
        pass

    def low_precision_reason(self) -> str | None:
        return None

    def summed(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)


class WholeSharding(FlatSharding):
    """Parts are whole, as where a group has one process."""

    def part_of(self, name: str, full: Tensor) -> Tensor:
        return full.detach().clone()

    def gather(self, name: str, part: Tensor) -> Tensor:
        self.gathered.append(name)
        return part.clone()


@contextmanager
def other_objects_inside(model: ReferenceDecoder) -> Iterator[None]:
    """Every linear's parameters are copies while it runs."""
    kept: dict[nn.Module, dict[str, nn.Parameter | None]] = {}

    def enter(module: nn.Module, _: object) -> None:
        kept[module] = dict(module._parameters)
        for name, parameter in kept[module].items():
            if parameter is not None:
                copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                module._parameters[name] = copy

    def leave(module: nn.Module, *_: object) -> None:
        module._parameters.update(kept.pop(module))

    adapter = ReferenceAdapter(model)
    with ExitStack() as hooks:
        for linear in adapter.scored_linears(range(len(adapter.layers()))):
            hooks.enter_context(linear.module.register_forward_pre_hook(enter))
            hooks.enter_context(linear.module.register_forward_hook(leave))
        yield


def _kronecker(setup: Setup, drift: FisherDrift) -> FisherDrift:
    factors = {}
    for index, (name, w) in enumerate(drift.reference.items()):
        rows, columns = (*w.shape, 1)[:2]
        generator = torch.Generator().manual_seed(setup.case.direction_seed + index)
        pair = [torch.randn(n, n, generator=generator, dtype=w.dtype) for n in (rows, columns)]
        factors[name] = tuple(a @ a.T for a in pair)
    return FisherDrift({}, drift.reference, {}, factors)  # type: ignore[arg-type]


CASE = make_case(("pprrr",), (("pprr",),), layers=2)
SETUP = Setup(CASE, "all")


@given(setups(), st.sampled_from([*CAPTURED]), st.sampled_from(["diagonal", "kronecker", "data"]))
@budget(0.6)
def test_sharded_values_equal_whole_ones(setup: Setup, estimator: str, retention: str) -> None:
    """G from captured errors, V from parts, M gathered: as with whole weights.

    Proves: sharded values equal whole ones (exact), against ``exact_influence``, whole weights.
    """
    model = setup.case.model()
    data: object = [setup.case.batch]
    if retention != "data":
        data = FisherDrift(*drift_of(setup, model))
    if retention == "kronecker":
        data = _kronecker(setup, data)  # type: ignore[arg-type]
    whole = make_scorer(setup, estimator, model=model, retention=data)
    expected = quiet_score(whole, setup.case.batch)
    sharding = FlatSharding(model)
    assert isinstance(sharding, Sharding)
    scorer = make_scorer(setup, estimator, model=model, retention=data, sharding=sharding)
    with other_objects_inside(model):
        found = quiet_score(scorer, setup.case.batch)
    direction = whole.direction
    sides = (("adaptation", direction.adaptation), ("stability", direction.stability))
    for part, m in sides:
        assert m is not None
        psi = oracle_influence(setup, model, m)
        size = psi.absolute_scale.sum() + sum(
            i.absolute_scale.sum() for i in truth(setup).influences
        )
        close(getattr(found, part), getattr(expected, part), size, MODEL, name=f"sharded {part}")
    assert set(found.balance) == set(expected.balance)
    assert set(scorer.coverage.unproved) == {"causality", "coverage", "derivatives", "documents"}
    assert scorer.coverage.relative_error is None
    assert sorted(sharding.gathered) == sorted(2 * list(scorer.parameters))  # once a side


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@given(setup=setups())
@budget(0.05, least=2)
def test_drift_is_that_of_the_weights_that_the_optimizer_keeps(
    setup: Setup, structure: str, sharded: bool
) -> None:
    """V of master weights, which lie elsewhere than the model's, in parts and whole.

    Proves: drift is that of the weights that the optimizer keeps (exact), against V of
    whole weights.
    """
    model = setup.case.model()
    drift = FisherDrift(*drift_of(setup, model))
    if structure == "kronecker":
        drift = _kronecker(setup, drift)
    kept = {n: 1.1 * p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
    sharding = FlatSharding(model) if sharded else None

    def masters(name: str, _: Tensor) -> Tensor:
        return kept[name] if sharding is None else sharding.part_of(name, kept[name])

    more = {"model": model, "retention": drift, "masters": masters, "sharding": sharding}
    found = make_scorer(setup, "path", **more).direction.stability
    assert found is not None
    expected = drift.direction({name: kept[name] for name in found})
    for name, v in expected.items():
        part = found[name] if sharding is None else sharding.gather(name, found[name])
        close(part, v, v.abs().max() + 1e-30, MODEL, name=f"{structure} of masters, {name}")


@given(setups(), st.sampled_from(["diagonal", "data"]))
@budget(0.2, least=4)
def test_a_sharded_direction_is_never_stale(setup: Setup, retention: str) -> None:
    """Weights written past every version counter, as shards are: the values of a fresh scorer.

    Proves: a sharded direction is never stale (exact), against a fresh scorer, bit by bit.
    """
    model = setup.case.model()
    data: object = [setup.case.batch]
    if retention != "data":
        data = FisherDrift(*drift_of(setup, model))

    def scorer() -> Scorer:
        sharding = FlatSharding(model)
        return make_scorer(setup, "path", model=model, retention=data, sharding=sharding)

    lasting = scorer()
    before = quiet_score(lasting, setup.case.batch).total
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(1.25)
    found = quiet_score(lasting, setup.case.batch).total
    assert torch.equal(found, quiet_score(scorer(), setup.case.batch).total)
    assert not torch.equal(found, before)


@pytest.mark.parametrize("steps", [3])
@given(setup=setups(tied_linears=False), kind=st.sampled_from(["frozen", "full", "given"]))
@budget(0.3)
def test_sharded_preconditioners(setup: Setup, kind: str, steps: int) -> None:
    """P from the optimizer's state, in parts: frozen, full, and a given one.

    Proves: sharded preconditioners (exact), against whole weights.
    """
    model, optimizer = stepped(setup, steps, "AdamW")
    assert optimizer.param_groups[0]["betas"] == BETAS
    given = {
        linear.weight_name: torch.rand(linear.weight.shape, dtype=torch.float64)
        for linear in scored(setup, ReferenceAdapter(model))
    }
    options = {"preconditioner": kind if kind != "given" else given, "precondition_after": 1}
    options |= {"model": model, "retention": [setup.case.batch], "optimizer": optimizer}
    expected = quiet_score(make_scorer(setup, "path", **options), setup.case.batch)
    sharding = WholeSharding(model)
    scorer = make_scorer(setup, "path", sharding=sharding, **options)
    found = quiet_score(scorer, setup.case.batch)
    ones = {name: torch.ones_like(p) for name, p in given.items()}
    whole = 1e3 * oracle_influence(setup, model, ones).absolute_scale.sum()
    for part in ("adaptation", "stability"):
        one, two = getattr(found, part), getattr(expected, part)
        size = whole + two.abs().max()
        close(one, two, size, MODEL, name=f"sharded {kind} {part}")


# One token after a norm: what reaches the weights below it cancels nearly to nothing.
_CANCELLED = make_case(
    ("pr",), (("pr",),), direction_seed=0, vocabulary=3, hidden=4, kv_heads=1, head_dim=2,
    value_dim=1, mlp="plain", mlp_width=3, norm_place="post", positions="none", fused_qkv=True,
    transposed=True,
)  # fmt: skip


@given(setups(), st.sampled_from(["linears", "all", "linears,embedding.weight"]))
@example(Setup(PADDED), "all")
@example(Setup(_CANCELLED, "all"), "linears")
@budget(0.2)
def test_sharded_label_values_are_the_oracles(setup: Setup, parameters: str) -> None:
    """G by autograd through other objects, weights moved part by part; nothing is gathered.

    Proves: sharded label values are the oracles (exact), against ``label_values``,
    ``validation_gradient``, ``per_token_gradients``, ``response_tokens``.
    """
    model = setup.case.model()
    layers = "all" if parameters == "all" else setup.layers
    config = ScorerConfig("label", layers=layers, parameters=parameters)
    sharding = FlatSharding(model)
    scorer = Scorer(model, setup.case.validation, None, config, sharding=sharding)
    with other_objects_inside(model):
        found = quiet_score(scorer, setup.case.batch)
    chosen, forward = dict(scorer.parameters), forward_of(model)
    everything = dict(model.named_parameters())
    whole = gradients.validation_gradient(model, forward, setup.case.validation, everything)
    m = {name: whole[name] for name in chosen}
    # The terms of an entry are products with errors that may cancel on their way down from the
    # head: of the size of the largest gradient, whatever the entry's own.
    size = max(float(g.abs().max()) for g in whole.values())
    for name, part in scorer.direction.adaptation.items():
        close(part[:-3].view_as(m[name]), m[name], size, MODEL, name=name)
    expected, scale = label_truth(setup, model, chosen, m)
    close(found.total, expected, scale, 1e-7, name=f"sharded label, {parameters}")
    assert found.derivative == "central"
    assert not sharding.gathered


@given(setups())
@example(Setup(PADDED))
@budget(0.05)
def test_sharded_walk_values_are_those_of_a_trained_copy(setup: Setup) -> None:
    """Every part walks and comes back by itself: AdamW is elementwise, and nothing is gathered.

    Proves: sharded walk values are those of a trained copy (exact), against ``walked``,
    ``walk_values``.
    """
    model = setup.case.model()
    before = bits(model)
    adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)
    end = run.walked(model, forward_of, setup.case.validation, 2, adamw)
    expected = run.walk_values(model, end, forward_of, setup.case.batch)
    config = ScorerConfig("walk", walk_steps=2, walk_learning_rate=1e-2)
    sharding = FlatSharding(model)
    scorer = Scorer(model, setup.case.validation, None, config, sharding=sharding)
    with other_objects_inside(model):
        found = quiet_score(scorer, setup.case.batch)
    close(found.total, expected, 1.0 + expected.abs(), 1e-8, name="sharded walk")
    assert not sharding.gathered
    assert unchanged(model, before)


class Mixed(FlatSharding):
    def low_precision_reason(self) -> str | None:
        return "mixed precision in bfloat16"


LABEL = ScorerConfig("label", layers=1)
REFUSED: dict[str, tuple[ScorerConfig, type[FlatSharding], str]] = {
    "forward mode": (replace(LABEL, derivative="forward_mode"), FlatSharding, "'auto'.*DDP"),
    "a full step": (replace(LABEL, preconditioner="full"), FlatSharding, "'full'.*'label'.*DDP"),
    "16 bits": (LABEL, Mixed, "float32 or wider.*mixed precision.*DDP"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_label_cannot_do_on_sharded_weights_is_refused(name: str) -> None:
    config, sharding, cause = REFUSED[name]
    model = CASE.model()
    optimizer = torch.optim.AdamW(model.parameters())

    def score() -> object:
        own = {"optimizer": optimizer, "sharding": sharding(model)}
        return Scorer(model, CASE.validation, None, config, **own).score(CASE.batch)

    with pytest.raises(UnsupportedError, match=cause):
        score()


def test_a_weight_shared_with_a_module_outside_is_refused() -> None:
    case = make_case(("pprrr",), (("pprr",),), layers=3, tied_linears=True, mlp="gated")
    model = case.model()
    model.head.weight = model.layers[-1].mlp.down_proj.weight  # type: ignore[union-attr,assignment]
    with pytest.raises(UnsupportedError, match="tied to a module outside the scored layers"):
        Scorer(
            model, case.validation, None, ScorerConfig(layers=1),
            sharding=FlatSharding(model),
        )  # fmt: skip


def test_a_fisher_of_another_model_is_refused_from_parts_too() -> None:
    model = CASE.model()
    sharding = FlatSharding(model)
    fisher, reference = drift_of(SETUP, model)
    far = FisherDrift(fisher, {n: w / 10 for n, w in reference.items()})
    few = FisherDrift(dict(list(fisher.items())[:1]), dict(list(reference.items())[:1]))
    odd = FisherDrift(
        {n: f[:1] for n, f in fisher.items()}, {n: w[:1] for n, w in reference.items()}
    )
    config = ScorerConfig(layers="all")
    for drift, message in ((far, "too far"), (few, "does not cover"), (odd, "another shape")):
        with pytest.raises(FisherError, match=message):
            Scorer(model, CASE.validation, drift, config, sharding=sharding)
