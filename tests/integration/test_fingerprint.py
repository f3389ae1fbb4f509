"""Two times are told apart by whatever values depend on, and by nothing else."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from alphatoken import PreferenceBatch, Scorer, ScorerConfig
from alphatoken.direction.drift import FisherDrift
from alphatoken.direction.influence import fit_influence
from alphatoken.errors import AlphaTokenWarning
from alphatoken.model.fingerprint import numbers_of, settings_of, trained_of
from tests.integration.tiny_scorer import BATCH, inputs, model_of
from tests.property.architectures import VOCABULARY
from tests.property.strategies import make_batch

# --- numbers --------------------------------------------------------------------------------------

BLOCK = 32 * 8191
SIZE = 2 * BLOCK + 3 * 8191 + 8
"""Bytes or words of 64 bits: two blocks, some rows and a rest, by either."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("offset", [0, 1])
def test_each_number_shows_wherever_it_stands(dtype: torch.dtype, offset: int) -> None:
    """Also in views that begin between two words, as those of a flat buffer do."""
    drawn = torch.Generator().manual_seed(1)
    numbers = torch.randint(1, 100, (SIZE + offset,), generator=drawn).to(dtype)[offset:]
    before = numbers_of([numbers])
    assert numbers_of([numbers.clone()]) == before or offset  # words may begin elsewhere
    for place in (0, 7, BLOCK // 8, BLOCK, 2 * BLOCK + 8191, SIZE - 9, SIZE - 1):
        kept = numbers[place].clone()
        numbers[place] = 0
        assert numbers_of([numbers]) != before
        numbers[place] = kept
    assert numbers_of([numbers]) == before


@pytest.mark.parametrize("size", [(4, BLOCK), (9, 512), (64, 2048), (40, 8190), (7, 64, 33)])
def test_rows_that_change_places_show(size: tuple[int, ...]) -> None:
    """Blocks as they are read, and rows of weights of other widths."""
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = numbers_of([numbers])
    for order in ([1, 0, *range(2, size[0])], [*range(1, size[0]), 0]):
        assert numbers_of([numbers[order]]) != before
    assert numbers_of([numbers[:0]]) != before
    assert numbers_of([-numbers]) != before


def test_each_of_many_tensors_shows() -> None:
    """They are read together as far as they are small, and of several types apart."""
    drawn = torch.Generator().manual_seed(1)
    sizes = (1, 2**15, 5, 2**15 - 6, 7, 2**16, 3, 64)
    many = [torch.rand(n, generator=drawn, dtype=torch.float64) for n in sizes]
    many += [torch.rand(n, generator=drawn) for n in (3, 4, 2**16)]
    before = numbers_of(many)
    for tensor in many:
        for place in (0, len(tensor) - 1):
            kept = tensor[place].clone()
            tensor[place] = 2
            assert numbers_of(many) != before
            tensor[place] = kept
    assert numbers_of(many) == before
    assert numbers_of(many[::-1]) != before, "tensors that change places"


class Started(TorchDispatchMode):
    """Operators that do more than to look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_many_small_tensors_start_few_kernels() -> None:
    """A GPU waits for each: a digest of each weight would take longer than a training step."""
    with Started() as mode:
        numbers_of([torch.full((64,), float(i)) for i in range(400)])
    assert mode.count - 400 <= 20  # the tensors themselves apart


# --- settings -------------------------------------------------------------------------------------


class Other(nn.Linear):
    """The same weight in another forward."""


class Holder:
    """An object of somebody else's."""

    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def scaled(self, x: Any) -> Any:
        return x * self.scale


def with_settings() -> Any:
    """A decoder whose last linear has an attribute of each kind that is looked at."""
    model = model_of()
    linear = model.model.layers[-1].mlp.up_proj
    linear.scaling = {"default": 2.0}
    linear.active = {"default"}
    linear.order = ["default", "second"]
    linear.factor = torch.tensor(2.0)
    model.config.text = SimpleNamespace(scale=2.0, to_dict=dict)
    return model


def passes_on(*_: Any) -> None:
    """A hook of somebody else."""


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "a hook before": lambda model, linear: linear.register_forward_pre_hook(passes_on),
    "a hook": lambda model, linear: linear.register_forward_hook(passes_on),
    "a backward hook": lambda model, linear: linear.register_full_backward_hook(passes_on),
    "a hook before the backward": (
        lambda model, linear: linear.register_full_backward_pre_hook(passes_on)
    ),
    "a hook on a weight": lambda model, linear: linear.weight.register_hook(passes_on),
    "a number of a mapping": lambda model, linear: linear.scaling.update(default=3.0),
    "a set": lambda model, linear: linear.active.add("second"),
    "an order": lambda model, linear: linear.order.reverse(),
    "a tensor of one number": lambda model, linear: linear.factor.data.mul_(2),
    "the configuration": lambda model, linear: setattr(model.config, "rms_norm_eps", 0.5),
    "a part of the configuration": lambda model, linear: setattr(model.config.text, "scale", 3.0),
    "a forward of the instance": lambda model, linear: setattr(linear, "forward", passes_on),
    "the class": lambda model, linear: setattr(linear, "__class__", Other),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_setting_shows(change: str) -> None:
    model = with_settings()
    before = settings_of(model)
    assert settings_of(model) == before
    CHANGES[change](model, model.model.layers[-1].mlp.up_proj)
    assert settings_of(model) != before


class Mapped(dict[str, float]):
    """A mapping with a number beside its entries."""

    def __init__(self) -> None:
        super().__init__(a=1.0)
        self.scale = 1.0


ODD: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "a sparse tensor": (torch.eye(3).to_sparse(), lambda t: t._values().mul_(2)),
    "a rest of complex numbers": (
        torch.ones(3, dtype=torch.complex128),
        lambda t: t.__setitem__(2, 1j),
    ),
    # As quantised and sharded weights are.
    "a tensor made of others": (TwoTensor(torch.ones(3), torch.ones(3)), lambda t: t.b.mul_(2)),
    "an array of objects": (np.array([{}, {"a": 1.0}], object), lambda a: a[1].update(a=2.0)),
    "a queue": (deque([1.0, 2.0]), lambda q: q.rotate()),
    "a long list": ([1.0] * 300, lambda x: x.__setitem__(7, 2.0)),
    "a long mapping": (dict.fromkeys(range(300), 1.0), lambda x: x.update({7: 2.0})),
    "a class": ([nn.ReLU], lambda x: x.__setitem__(0, nn.GELU)),
    "a function of torch": ([F.gelu], lambda x: x.__setitem__(0, torch.tanh)),
    "a method": (partial(Holder(1.0).scaled, 2), lambda p: setattr(p.func.__self__, "scale", 3.0)),
    "keywords of a partial": (
        partial(F.gelu, scale=[1.0]),
        lambda p: p.keywords["scale"].append(2.0),
    ),
    "a default by keyword": (
        [lambda x, *, scale=[1.0]: x],
        lambda x: x[0].__kwdefaults__["scale"].append(2.0),
    ),
    "an attribute of a function": (
        [lambda x: x],
        lambda x: setattr(x[0], "scale", len(vars(x[0]))),
    ),
    "bytes that change": (bytearray(b"ab"), lambda b: b.__setitem__(0, 7)),
    "an array of numbers": (array("d", [1.0]), lambda a: a.__setitem__(0, 2.0)),
    "a decimal number": ([Decimal("1.0")], lambda x: x.__setitem__(0, Decimal("2.0"))),
    "an attribute of a mapping": (Mapped(), lambda m: setattr(m, "scale", 2.0)),
    "a default": ([lambda x, scale=[1.0]: x], lambda x: x[0].__defaults__[0].append(2.0)),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_an_attribute_holds_shows(kind: str) -> None:
    value, change = ODD[kind]
    model = model_of()
    model.model.layers[1].mlp.held = {"deep": [Holder(value)]}
    before = settings_of(model)
    assert settings_of(model) == before
    change(value)
    assert settings_of(model) != before


def test_objects_that_hold_each_other_are_read_once() -> None:
    """Cycles end; other modules of the model, and the state of an optimizer, are read elsewhere."""
    model = model_of()
    first = model.model.layers[0]
    first.held = Holder(Holder(model))
    first.held.back = first.held
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = settings_of(model)
    assert settings_of(model) == before
    model.optimizer.param_groups[0]["lr"] = 0.2
    model.model.layers[1].mlp.up_proj.weight.data.mul_(2)
    assert settings_of(model) == before
    first.held.back.scale.other = 1.0
    assert settings_of(model) != before


def test_what_leads_to_too_many_objects_is_said() -> None:
    model = model_of()
    model.model.layers[0].chain = [Holder([i]) for i in range(10_000)]
    with pytest.warns(AlphaTokenWarning, match=r"layers.0.chain.*scorer.refresh\(\)"):
        settings_of(model)


def test_what_no_value_depends_on_does_not_show() -> None:
    """Modes, our own hooks, and those that a forward leaves where hidden states were asked for."""
    model = with_settings()
    before = settings_of(model)
    model(input_ids=torch.ones(1, 2, dtype=torch.long), output_hidden_states=True)
    model.train()
    model.model.layers[0].gradient_checkpointing = True
    model.register_forward_hook(partial(numbers_of))  # as one of ours
    assert settings_of(model) == before


def test_modules_and_parameters_count_by_identity() -> None:
    model = with_settings()
    before, linear = trained_of(model), model.model.layers[-1].mlp.up_proj
    linear.weight.requires_grad_(False)
    assert trained_of(model) != before
    linear.weight.requires_grad_(True)
    assert trained_of(model) == before
    wrapped = nn.Sequential(nn.Dropout(0.0))  # without parameters
    model.model.layers[-1].mlp.act_fn = wrapped
    assert trained_of(model) != before


# --- what a direction depends on ------------------------------------------------------------------


def rows(seed: int) -> dict[str, Tensor]:
    return make_batch(("pprrr.", "pprrrr"), vocabulary=VOCABULARY, seed=seed)


def of_batches(model: Any) -> tuple[Scorer, Callable[[], object]]:
    """Values against retention rows, of which some are unlabelled."""
    kept = rows(3)
    config = ScorerConfig("path", layers=2)
    return Scorer(model, rows(2), kept, config), lambda: kept["labels"].data[0].fill_(-100)


def of_a_drift(model: Any) -> tuple[Scorer, Callable[[], object]]:
    named = {n: p.detach() for n, p in model.named_parameters() if "layers" in n}
    drift = FisherDrift(
        {n: torch.ones_like(p) for n, p in named.items()}, {n: 0.9 * p for n, p in named.items()}
    )
    config = ScorerConfig("label", layers=2, max_relative_drift=None)
    scorer = Scorer(model, rows(2), drift, config)
    return scorer, lambda: [m.mul_(2) for m in drift.fisher.values()]  # type: ignore[union-attr]


def of_pairs(model: Any) -> tuple[Scorer, Callable[[], object]]:
    reference = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    pairs = PreferenceBatch(rows(2), rows(3), reference, reference.clone(), 1.0)
    scorer = Scorer(model, pairs, config=ScorerConfig("path", layers=2))
    return scorer, lambda: reference.data.add_(5)


def of_a_mapping(model: Any) -> tuple[Scorer, Callable[[], object]]:
    name = "model.layers.2.mlp.up_proj.weight"
    scale = {name: torch.ones_like(model.get_parameter(name))}
    config = ScorerConfig("path", layers=2, preconditioner=scale)
    return Scorer(model, rows(2), config=config), lambda: scale[name].data.mul_(2)


def of_an_optimizer(model: Any) -> tuple[Scorer, Callable[[], object]]:
    """A step of warm-up with learning rate 0 moves no weight, and moves P."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def stepped(batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    stepped(BATCH)
    config = ScorerConfig("label", layers=2, preconditioner="frozen", precondition_after=1)
    scorer = Scorer(model, rows(2), config=config, optimizer=optimizer)
    return scorer, lambda: stepped(rows(3))


def of_another_fisher(model: Any) -> tuple[Scorer, Callable[[], object]]:
    """A tensor in the place of another, and as new as that was."""
    scorer, _ = of_a_drift(model)
    fisher = scorer.arguments.retention.fisher  # type: ignore[union-attr]
    name = next(name for name in fisher if "layers.2.mlp" in name)
    return scorer, lambda: fisher.update({name: torch.full_like(fisher[name], 3.0)})


def of_the_groups(model: Any) -> tuple[Scorer, Callable[[], object]]:
    """An option that P is made of, and no state."""
    scorer, _ = of_an_optimizer(model)
    return scorer, lambda: scorer.arguments.optimizer.param_groups[0].update(eps=0.1)


def of_a_number_of_the_groups(model: Any) -> tuple[Scorer, Callable[[], object]]:
    """The same kept in a tensor, as a fused optimizer's rate is."""
    scorer, _ = of_an_optimizer(model)
    eps = torch.tensor(1e-8, dtype=torch.float64)
    scorer.arguments.optimizer.param_groups[0]["eps"] = eps  # type: ignore[union-attr]
    return scorer, lambda: eps.data.fill_(0.1)


def of_factors(model: Any) -> tuple[Scorer, Callable[[], object]]:
    factors = fit_influence(model, rows(4), samples=2, layers=2, progress=False)
    config = ScorerConfig("label", layers=2, preconditioner="kronecker")
    scorer = Scorer(model, rows(2), config=config, influence=factors)
    return scorer, lambda: [m.mul_(2).add_(1) for m in factors.eigenvalues.values()]


@pytest.mark.parametrize(
    "made",
    [
        of_batches,
        of_a_drift,
        of_another_fisher,
        of_pairs,
        of_a_mapping,
        of_an_optimizer,
        of_the_groups,
        of_a_number_of_the_groups,
        of_factors,
    ],
)
def test_what_m_is_made_of_is_followed(made: Callable[..., Any]) -> None:
    scorer, change = made(model_of())
    scorer.warn = False
    before = scorer.score(BATCH).total
    assert torch.equal(scorer.score(BATCH).total, before)
    change()
    found = scorer.score(BATCH).total
    scorer.refresh()
    assert torch.equal(found, scorer.score(BATCH).total)
    assert not torch.equal(found, before)


def test_m_is_of_the_products_as_autocast_rounds_them() -> None:
    scorer = Scorer(model_of().float(), rows(2), config=ScorerConfig("path"))
    scorer.score(BATCH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scorer.score(BATCH).total
        scorer.refresh()
        assert torch.equal(found, scorer.score(BATCH).total)


def test_under_a_pin_a_step_between_forward_and_values_is_the_users_choice() -> None:
    model = model_of()
    scorer = Scorer(model, rows(2), config=ScorerConfig("path", layers=2))
    scorer.pin("kept")
    expected = scorer.score(BATCH).total
    with scorer.observe() as observed:
        logits = model(**inputs()).logits
        model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)  # below the scored layers
        torch.testing.assert_close(observed.values(logits, BATCH["labels"]).total, expected)
