"""Inner products of token gradients, and greedy selection with them, against the plain thing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, find, given
from hypothesis import strategies as st
from torch import Tensor, nn

from alphatoken import InputError, NumericalError
from alphatoken.estimate import estimators
from alphatoken.model import batch as batches
from alphatoken.model.capture import record
from alphatoken.model.partial_forward import graph_from_layer
from alphatoken.model.protocol import ScoredLinear, find_adapter
from alphatoken.model.scope import find_scope
from alphatoken.model.uses import LinearUse
from alphatoken.oracle import gradients, influence
from alphatoken.select import interaction
from alphatoken.select import masks as selection
from tests.property.architectures import plain_forward
from tests.property.decoder import ReferenceAdapter, ReferenceDecoder, TransposedLinear
from tests.property.profiles import budget
from tests.property.setups import MODEL, Setup, forward_of, response_mask, scored, setups
from tests.property.strategies import SEEDS, make_case
from tests.property.tolerance import close

EXACT = 1e-12


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class GramCase:
    """Uses of linears with small-integer factors: some share a weight, some have no error.

    ``sharing`` names, use by use, the weight and how it is used: "a" once more, "A" through a
    linear that stores it the other way round, "b" by another one, "-" without an error.
    """

    rows: int
    length: int
    width: int
    sharing: str
    seed: int

    def parameters(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        names = self.sharing.lower().replace("-", "")
        shape = (self.width, self.width)
        return {
            name: (nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(self.width)))
            for name in names
        }

    def uses(self) -> tuple[list[LinearUse], list[Tensor | None]]:
        parameters = self.parameters()
        uses: list[LinearUse] = []
        errors: list[Tensor | None] = []
        for index, kind in enumerate(self.sharing):
            weight, bias = parameters.get(kind.lower(), next(iter(parameters.values())))
            module = TransposedLinear(1, 1, True) if kind.isupper() else nn.Linear(1, 1)
            module.weight, module.bias = weight, bias
            linear = ScoredLinear(f"use{index}", module, 0, transposed=kind.isupper())
            x, delta = (self.integers(2 * index + j) for j in (0, 1))
            uses.append(LinearUse(linear, x, delta, index))
            errors.append(None if kind == "-" else delta)
        return uses, errors

    def integers(self, salt: int) -> Tensor:
        shape = (self.rows, self.length, self.width)
        return torch.randint(-3, 4, shape, generator=seeded(self.seed + 2**16 * salt)).double()

    def mask(self) -> Tensor:
        mask = torch.rand((self.rows, self.length), generator=seeded(self.seed)) < 0.7
        mask[:, 0] = False
        return mask


def gram_cases() -> st.SearchStrategy[GramCase]:
    return st.builds(
        GramCase,
        rows=st.integers(1, 3),
        length=st.integers(1, 6),
        width=st.integers(1, 3),
        sharing=st.sampled_from(["a", "ab", "aa", "aA", "aba", "a-A", "aAba", "-ab"]),
        seed=SEEDS,
    )


def recorded_gram(
    setup: Setup, model: ReferenceDecoder, batch: dict[str, Tensor], block: int = 512
) -> Tensor:
    """``token_gram`` of one recorded forward of a real decoder."""
    return recorded(setup, model, batch, interaction.token_gram, block=block)


def recorded(
    setup: Setup,
    model: ReferenceDecoder,
    batch: dict[str, Tensor],
    take: Callable[..., Tensor],
    **options: Any,
) -> Tensor:
    """What ``take`` makes of the self-only errors of one recorded forward."""
    adapter = ReferenceAdapter(model)
    scope = find_scope(adapter, setup.layers)
    mask = response_mask(gradients.known_labels(batch))
    with record(adapter, scope) as recorder:
        with graph_from_layer(adapter, scope.first):
            logits = adapter.forward({k: v for k, v in batch.items() if k != "labels"})
        loss = batches.token_losses(logits, gradients.known_labels(batch)).sum()
        errors = estimators.token_errors(
            recorder, loss, "direct", window=None, head_reduction="per_head"
        )
        return take(recorder.linears, errors.direct, mask, score_bias=setup.score_bias, **options)


def direct_gradients(setup: Setup, model: ReferenceDecoder, batch: dict[str, Tensor]) -> Tensor:
    """(n, parameters): each token's outer products at the position that predicts it.

    One ``autograd.grad`` a token: at its own position the full error of its loss is the self-only
    one.
    """
    linears = {x.name: x for x in scored(setup, ReferenceAdapter(model))}
    modules = {name: x.module for name, x in linears.items()}
    with influence.recorded_uses(modules) as uses:
        losses = gradients.run_losses(forward_of(model), batch)
    rows = []
    for (b, i), loss in losses.items():
        deltas = torch.autograd.grad(loss, [use.s for use in uses], retain_graph=True,
                                     allow_unused=True)  # fmt: skip
        gradient: dict[int, Tensor] = {}
        for linear in linears.values():
            gradient.setdefault(id(linear.weight), torch.zeros_like(linear.weight))
            if setup.score_bias and linear.bias is not None:
                gradient.setdefault(id(linear.bias), torch.zeros_like(linear.bias))
        for use, delta in zip(uses, deltas, strict=True):
            if delta is None:
                continue
            linear = linears[use.name]
            part = torch.outer(delta[b, i - 1], use.x[b, i - 1])
            gradient[id(linear.weight)] += part.T if linear.transposed else part
            if id(linear.bias) in gradient:
                gradient[id(linear.bias)] += delta[b, i - 1]
        rows.append(torch.cat([g.detach().flatten() for g in gradient.values()]))
    return torch.stack(rows)


@dataclass(frozen=True)
class DiverseCase:
    """Small-integer values and gradients of one or two rows; everything is exact in float64."""

    rows: int
    length: int
    width: int
    weight: float
    seed: int
    hundredths: int
    positive: bool = False

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values (b, t), mask (b, t) and gradients (n, d)."""
        generator = seeded(self.seed)
        shape = (self.rows, self.length)
        values = torch.randint(-6, 9, shape, generator=generator).double()
        mask = torch.rand(shape, generator=generator) < 0.8
        g = torch.randint(-2, 3, (int(mask.sum()), self.width), generator=generator).double()
        return values, mask, g.abs() if self.positive else g

    @property
    def ratio(self) -> float:
        return self.hundredths / 100

    def keep(self, scope: str = "batch", **options: Any) -> Tensor:
        values, mask, g = self.draw()
        options = {"weight": self.weight, **options}
        return interaction.select_diverse(
            values,
            mask,
            self.ratio,
            g @ g.T,
            scope=scope,
            **options,
        )


def diverse_cases(**pins: Any) -> st.SearchStrategy[DiverseCase]:
    options: dict[str, Any] = {
        "rows": st.integers(1, 3),
        "length": st.integers(1, 5),
        "width": st.integers(1, 3),
        "weight": st.sampled_from([0.5, 0.0, 0.25, 1.0, 4.0]),
        "seed": SEEDS,
        "hundredths": st.integers(1, 100),
    }
    options |= {
        name: pin if isinstance(pin, st.SearchStrategy) else st.just(pin)
        for name, pin in pins.items()
    }
    return st.builds(DiverseCase, **options)


def objective(values: Tensor, g: Tensor, weight: float, kept: list[int]) -> float:
    """sum v - w / 2 ||sum g||^2 of a set, from the gradients themselves."""
    return float(values[kept].sum() - weight / 2 * g[kept].sum(0).square().sum())


def greedy_by_objective(values: Tensor, g: Tensor, weight: float, count: int) -> set[int]:
    """Add, each time, the first of the tokens after which the objective is largest."""
    kept: list[int] = []
    for _ in range(count):
        left = [k for k in range(len(values)) if k not in kept]
        kept.append(max(left, key=lambda k: (objective(values, g, weight, [*kept, k]), -k)))
    return set(kept)


def best_by_enumeration(values: Tensor, g: Tensor, weight: float, count: int) -> float:
    """The largest objective of any set of this size."""
    sets = itertools.combinations(range(len(values)), count)
    return max(objective(values, g, weight, list(kept)) for kept in sets)


SCOPES = st.sampled_from(["batch", "sequence"])
BLOCKS = st.sampled_from([512, 1, 3])
SHARED = make_case(
    ("pprrrr", "..prrr"), layers=3, repeated_block=True, repeated_linear=True,
    tied_linears=True, mlp="gated", bias=True, transposed=True, heads=4, kv_heads=2,
)  # fmt: skip
"""Every way to use a weight more than once."""


# --- the Gram matrix -----------------------------------------------------------------------------


@given(gram_cases(), BLOCKS, st.booleans())
@example(GramCase(2, 5, 3, "aAba", 0), 2, True)
@example(GramCase(2, 6, 2, "a-A", 1), 512, False)
def test_gram_of_integers(case: GramCase, block: int, bias: bool) -> None:
    """Outer products written out per token, summed per parameter, multiplied: bit for bit."""
    uses, errors = case.uses()
    mask = case.mask()
    rows = []
    for b, i in mask.nonzero().tolist():
        gradient: dict[int, Tensor] = {}
        for use, error in zip(uses, errors, strict=True):
            if error is None:
                continue
            part = torch.outer(error[b, i - 1], use.x[b, i - 1])
            part = part.T if use.linear.transposed else part
            w, at_bias = id(use.linear.weight), id(use.linear.bias)
            gradient[w] = gradient.get(w, torch.zeros_like(part)) + part
            if bias:
                before = gradient.get(at_bias, torch.zeros(case.width).double())
                gradient[at_bias] = before + error[b, i - 1]
        rows.append(torch.cat([gradient[key].flatten() for key in sorted(gradient)]))
    found = interaction.token_gram(uses, errors, mask, score_bias=bias, block=block)
    assert found.dtype == torch.float64
    assert found.shape == (len(rows), len(rows))
    if rows:
        matrix = torch.stack(rows)
        assert torch.equal(found, matrix @ matrix.T)


@given(setups(), BLOCKS)
@example(Setup(SHARED, "all", score_bias=True), 3)
@example(Setup(SHARED, 1), 512)
@budget(0.4)
def test_gram_is_the_product_of_direct_gradients(setup: Setup, block: int) -> None:
    """G = J J^T with J the tokens' direct gradients by autograd, per parameter, uses summed."""
    model, batch = setup.case.model(), setup.case.batch
    found = recorded_gram(setup, model, batch, block)
    j = direct_gradients(setup, model, batch)
    close(found, j @ j.T, j.abs() @ j.abs().T, MODEL, name="Gram of direct gradients")
    assert torch.equal(found, found.T)
    least = torch.linalg.eigvalsh(found).amin()
    assert float(least) >= -MODEL * float(found.diagonal().sum())


@given(setups(train=st.sampled_from([("pr", "pr"), ("pr", "pr", "pr")]), softcap=None))
@budget(0.4)
def test_gram_of_one_position(setup: Setup) -> None:
    """Rows of two tokens have one predicting position: direct is all, and G that of autograd."""
    model = setup.case.model()
    batch = setup.case.batch
    assert batch["input_ids"].shape[1] == 2
    found = recorded_gram(setup, model, batch)
    names = {id(p): n for n, p in model.named_parameters()}
    chosen: dict[str, Tensor] = {}
    for linear in scored(setup, ReferenceAdapter(model)):
        chosen[names[id(linear.weight)]] = linear.weight
        if setup.score_bias and linear.bias is not None:
            chosen[names[id(linear.bias)]] = linear.bias
    losses = list(gradients.run_losses(forward_of(model), batch).values())
    each = [
        torch.autograd.grad(x, list(chosen.values()), retain_graph=True, materialize_grads=True)
        for x in losses
    ]
    j = torch.stack([torch.cat([g.flatten() for g in row]) for row in each])
    scale = j.abs() @ j.abs().T
    close(found, j @ j.T, scale, MODEL, name="Gram of one position")


def test_products_between_uses_of_one_weight_matter() -> None:
    """A witness that dropping them would show: they change G by more than rounding."""

    def crossed(case: GramCase) -> bool:
        uses, errors = case.uses()
        whole = interaction.token_gram(uses, errors, case.mask())
        apart = sum(
            interaction.token_gram([u], [e], case.mask())
            for u, e in zip(uses, errors, strict=True)
            if e is not None
        )
        return bool((whole != apart).any())

    find(gram_cases(), crossed)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_the_two_factors_of_lora() -> None:
    """A and B are weights by themselves; through transformers' own float32 casts."""
    pytest.importorskip("peft")
    from tests.integration.test_lora import BATCH, adapted, factors

    model = adapted()
    adapter = find_adapter(model)
    scope = find_scope(adapter, 2)
    with record(adapter, scope) as recorder:
        logits = adapter.forward({k: v for k, v in BATCH.items() if k != "labels"})
        loss = batches.token_losses(logits, BATCH["labels"]).sum()
        errors = estimators.token_errors(
            recorder, loss, "direct", window=None, head_reduction="per_head"
        )
        mask = response_mask(BATCH["labels"])
        found = interaction.token_gram(recorder.linears, errors.direct, mask)
    modules = factors(model, (1, 2))
    with influence.recorded_uses(modules) as uses:
        losses = gradients.run_losses(plain_forward(model), BATCH)
    rows = []
    for (b, i), each in losses.items():
        deltas = torch.autograd.grad(each, [use.s for use in uses], retain_graph=True)
        rows.append(
            torch.cat(
                [
                    torch.outer(delta[b, i - 1], use.x[b, i - 1]).flatten()
                    for use, delta in zip(uses, deltas, strict=True)
                ]
            )
        )
    j = torch.stack(rows).double()
    close(found, j @ j.T, j.abs() @ j.abs().T, 1e-6, name="Gram, LoRA")
    assert float(found.diagonal().min()) > 0


def test_half_precision_factors_are_multiplied_in_float32() -> None:
    case = GramCase(2, 6, 3, "aA", 3)
    uses, errors = case.uses()
    narrow = [LinearUse(u.linear, u.x.bfloat16(), u.s.bfloat16(), u.execution) for u in uses]
    with torch.autocast("cpu", torch.bfloat16):
        found = interaction.token_gram(narrow, [e.bfloat16() for e in errors], case.mask())
    assert found.dtype == torch.float32
    assert torch.equal(found.double(), interaction.token_gram(uses, errors, case.mask()))


def test_nothing_but_linears_without_errors_gives_zeros() -> None:
    case = GramCase(1, 4, 2, "ab", 1)
    uses, _ = case.uses()
    n = int(case.mask().sum())
    assert torch.equal(interaction.token_gram(uses, [None, None], case.mask()), torch.zeros(n, n))
    assert interaction.token_gram([], [], case.mask()).shape == (n, n)


def test_gram_of_bad_input() -> None:
    case = GramCase(2, 4, 2, "ab", 1)
    uses, errors = case.uses()
    with pytest.raises(InputError, match="2 uses, 1 errors"):
        interaction.token_gram(uses, errors[:1], case.mask())
    first = case.mask()
    first[1, 0] = True
    with pytest.raises(InputError, match="row 1, token 0"):
        interaction.token_gram(uses, errors, first)


# --- selection -----------------------------------------------------------------------------------


@given(diverse_cases(), SCOPES)
def test_greedy_by_the_objective(case: DiverseCase, scope: str) -> None:
    """Each token added is the best by the objective re-evaluated; exactly ceil(ratio n) are."""
    values, mask, g = case.draw()
    keep = case.keep(scope)
    assert keep.dtype == torch.bool
    assert not bool((keep & ~mask).any())
    start = 0
    for length, row in zip(
        mask.sum(1).tolist() if scope == "sequence" else [int(mask.sum())],
        range(case.rows) if scope == "sequence" else [slice(None)],
        strict=True,
    ):
        count = -(-case.hundredths * length // 100)
        part = slice(start, start + length)
        v = values[row][mask[row]]
        expected = greedy_by_objective(v, g[part], case.weight, count)
        assert set(keep[row][mask[row]].nonzero().flatten().tolist()) == expected
        assert len(expected) == count
        start += length


@given(diverse_cases(), SCOPES, st.sampled_from(["absolute", "relative"]))
def test_weight_zero_is_select_top(case: DiverseCase, scope: str, units: str) -> None:
    """Without interaction: select_top, bit for bit."""
    values, mask, _ = case.draw()
    top = selection.select_top(values, mask, case.ratio, scope=scope)
    assert torch.equal(case.keep(scope, weight=0.0, units=units), top)


@given(diverse_cases())
@budget(0.4)
def test_greedy_against_the_optimum(case: DiverseCase) -> None:
    """Never above the best set. At least 1 - 1/e of it where no product and no gain is negative.

    Orthogonal gradients: the objective is a sum over tokens, and greedy is the best.
    """
    values, mask, g = case.draw()
    values, g = values[mask][:7], g[:7]
    n, count = len(values), -(-case.hundredths * min(len(values), 7) // 100)
    if n == 0:
        return
    everyone = torch.ones(1, n, dtype=torch.bool)

    def reached(v: Tensor, vectors: Tensor, weight: float) -> tuple[float, float]:
        keep = interaction.select_diverse(
            v[None], everyone, case.ratio, vectors @ vectors.T, weight
        )[0]
        kept = keep.nonzero().flatten().tolist()
        return objective(v, vectors, weight, kept), best_by_enumeration(v, vectors, weight, count)

    found, best = reached(values, g, case.weight)
    assert found <= best
    found, best = reached(values, torch.diag(torch.arange(n).double()), case.weight)
    assert found == best
    positive = g.abs()
    gram = positive @ positive.T
    lift = case.weight * (gram.sum(1) + gram.diagonal() / 2)  # no gain is negative then
    found, best = reached(values.abs() + lift, positive, case.weight)
    assert found >= (1 - 1 / math.e) * best


@given(diverse_cases())
def test_gain_is_the_decrease_of_a_quadratic(case: DiverseCase) -> None:
    """With J = h/2 ||theta - c||^2 and w = eta h, eta times the objective is J's decrease, exactly.

    J is evaluated before and after the step -eta sum g; values are <g, grad J>.
    """
    g = case.draw()[2]
    n = len(g)
    if n == 0:
        return
    h, eta = 2.0, 0.25
    away = torch.randint(-4, 5, (case.width,), generator=seeded(case.seed + 1)).double()

    def j(theta: Tensor) -> float:
        return h / 2 * float(theta.square().sum())  # c = 0

    values = g @ (h * away)
    keep = interaction.select_diverse(
        values[None], torch.ones(1, n, dtype=torch.bool), case.ratio, g @ g.T, eta * h
    )[0]
    kept = keep.nonzero().flatten().tolist()
    decrease = j(away) - j(away - eta * g[kept].sum(0))
    assert eta * objective(values, g, eta * h, kept) == decrease
    # And greedily so: the last token added was the one after which J is smallest.
    expected = greedy_by_objective(values, g, eta * h, len(kept))
    assert set(kept) == expected


@given(diverse_cases())
def test_relative_weight(case: DiverseCase) -> None:
    """w = weight sum v / ||sum g||^2 of the top tokens: at weight 1 their step is the best one."""
    values, mask, g = case.draw()
    v = values[mask]
    if len(v) == 0:
        return
    count = -(-case.hundredths * len(v) // 100)
    w = interaction.absolute_weight(v, g @ g.T, count, 1.0)
    top = sorted(range(len(v)), key=lambda k: (-float(v[k]), k))[:count]
    gain, step = float(v[top].sum()), g[top].sum(0)
    if gain > 0 and bool(step.any()):
        sizes = [0.5, 0.9, 1.0, 1.1, 2.0]
        gains = [a * gain - w / 2 * float((a * step).square().sum()) for a in sizes]
        assert max(gains) == gains[2]
        close(gains[4], 0.0, gain, EXACT, name="twice the best step gains nothing")
    else:
        assert w == 0.0
    twice = interaction.absolute_weight(v, g @ g.T, count, 2.0)
    assert twice == 2 * w
    relative = case.keep(weight=0.5, units="relative")
    assert torch.equal(relative, case.keep(weight=0.5 * w))
    gram = g @ g.T
    for a, b in ((4.0, 1.0), (0.5, 16.0)):
        scaled = interaction.select_diverse(
            a * values, mask, case.ratio, b * gram, 0.5, units="relative"
        )
        assert torch.equal(scaled, relative)


def test_a_repeated_token_makes_room_for_another() -> None:
    """Three copies of the best gradient and one that is new: one copy and the new one are kept."""
    g = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 1.0]]).double()
    values, mask = torch.tensor([[3.0, 3.0, 3.0, 1.0]]), torch.ones(1, 4).bool()
    keep = interaction.select_diverse(values, mask, 0.5, g @ g.T, 1.0)
    assert keep.tolist() == [[True, False, False, True]]
    keep = interaction.select_diverse(values, mask, 0.5, g @ g.T, 0.0)
    assert keep.tolist() == [[True, True, False, False]]


def test_greedy_is_not_always_the_best_set() -> None:
    """The honest half of the claim: with opposed gradients greedy can be far from the best."""

    def missed(case: DiverseCase) -> bool:
        values, mask, g = case.draw()
        v, g = values[mask][:6], g[:6]
        count = -(-case.hundredths * len(v) // 100)
        if not len(v):
            return False
        keep = interaction.select_diverse(
            v[None], torch.ones(1, len(v)).bool(), case.ratio, g @ g.T, case.weight
        )[0]
        found = objective(v, g, case.weight, keep.nonzero().flatten().tolist())
        best = best_by_enumeration(v, g, case.weight, count)
        return best > 0 and found < (1 - 1 / 2.72) * best

    find(diverse_cases(), missed)


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        ("weight", -1.0, "not negative"),
        ("weight", float("nan"), "not negative"),
        ("weight", float("inf"), "not negative"),
        ("units", "mean", "units"),
        ("scope", "rank", "scope"),
        ("ratio", 0.0, "ratio"),
        ("gram", torch.zeros(3, 3), "4 tokens"),
    ],
)
def test_nonsense_is_refused(option: str, value: Any, what: str) -> None:
    options = {"ratio": 0.5, "gram": torch.eye(4), "weight": 1.0, option: value}
    values, mask = torch.zeros(1, 4), torch.ones(1, 4).bool()
    with pytest.raises(InputError, match=what):
        interaction.select_diverse(values, mask, **options)


def test_numbers_that_are_not_finite_are_named() -> None:
    values, mask = torch.zeros(1, 4), torch.ones(1, 4).bool()
    gram = torch.eye(4)
    gram[2, 3] = gram[3, 2] = float("nan")
    with pytest.raises(NumericalError, match="token 2"):
        interaction.select_diverse(values, mask, 0.5, gram, 1.0)
    values[0, 1] = float("inf")
    with pytest.raises(NumericalError, match="row 0, token 1"):
        interaction.select_diverse(values, mask, 0.5, torch.eye(4), 1.0)


def test_an_empty_mask_keeps_nothing() -> None:
    for scope in ("batch", "sequence"):
        for units in ("absolute", "relative"):
            keep = interaction.select_diverse(
                torch.zeros(2, 4), torch.zeros(2, 4).bool(), 0.5, torch.zeros(0, 0), 1.0,
                scope=scope, units=units,
            )  # fmt: skip
            assert not bool(keep.any())
