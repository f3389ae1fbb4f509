"""Claims about the pure functions: contraction, direction, preconditioner, selection, losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from alphatoken.direction import algebra as direction
from alphatoken.direction import preconditioner
from alphatoken.estimate import contraction
from alphatoken.model import batch, vocabulary
from alphatoken.oracle import preference, utility
from alphatoken.select import losses
from alphatoken.select import masks as selection
from benchmarks.gram import contract_gram
from tests.property.strategies import SEEDS, ContractionCase
from tests.property.tolerance import close

EXACT = 1e-12


# --- contraction ---------------------------------------------------------------------------------


def loop_values(case: ContractionCase, integers: bool, bias: bool) -> tuple[Tensor, Tensor]:
    """<delta_t (x) x_t, M> (+ delta . m_b) and the sum of its absolute terms, one token a time."""
    f = case.factors(integers=integers)
    value = torch.zeros(case.b, case.t, dtype=torch.float64)
    scale = torch.zeros_like(value)
    for b in range(case.b):
        for t in range(case.t):
            terms = [torch.outer(f.delta[b, t], f.x[b, t]) * f.m]
            if bias:
                terms.append(f.delta[b, t] * f.m_bias)
            value[b, t] = sum(term.sum() for term in terms)
            scale[b, t] = sum(term.abs().sum() for term in terms)
    return value, scale


def check_projected_is_the_loop(case: ContractionCase, bias: bool) -> None:
    """Projected contraction equals the explicit rank-1 matrices; exactly so for small integers."""
    for integers in (False, True):
        f = case.factors(integers=integers)
        found = contraction.contract(f.delta, f.x, f.m, f.m_bias if bias else None)
        expected, scale = loop_values(case, integers, bias)
        assert found.dtype == torch.float64
        if integers:
            assert torch.equal(found, expected)
        else:
            close(found, expected, scale, EXACT, name="projected")


def loop_gram(case: ContractionCase, integers: bool) -> tuple[Tensor, Tensor]:
    """Sum over validation tokens of <delta_t (x) x_t, delta_v (x) x_v>."""
    f = case.factors(integers=integers)
    value = torch.zeros(case.b, case.t, dtype=torch.float64)
    scale = torch.zeros_like(value)
    for b in range(case.b):
        for t in range(case.t):
            for v in range(case.v):
                terms = torch.outer(f.delta[b, t], f.x[b, t]) * torch.outer(f.delta_v[v], f.x_v[v])
                value[b, t] += terms.sum()
                scale[b, t] += terms.abs().sum()
    return value, scale


def check_gram_is_the_loop(case: ContractionCase, chunk: int) -> None:
    """Gram contraction equals the explicit double loop, whatever the block of validation tokens."""
    for integers in (False, True):
        f = case.factors(integers=integers)
        found = contract_gram(f.delta, f.x, f.delta_v, f.x_v, chunk=chunk)
        expected, scale = loop_gram(case, integers)
        assert found.dtype == torch.float64
        if integers:
            assert torch.equal(found, expected)
        else:
            close(found, expected, scale, EXACT, name="gram")


def check_gram_is_projected(case: ContractionCase) -> None:
    """The gram form is the library's contraction where M is the outer sum of validation factors."""
    for integers in (False, True):
        f = case.factors(integers=integers)
        m = contraction.outer_sum(f.delta_v[None], f.x_v[None])
        projected = contraction.contract(f.delta, f.x, m)
        gram = contract_gram(f.delta, f.x, f.delta_v, f.x_v)
        if integers:
            assert torch.equal(projected, gram)
        else:
            close(gram, projected, loop_gram(case, False)[1], EXACT, name="gram, projected")


def check_outer_sum_is_the_weight_gradient(case: ContractionCase) -> None:
    """Outer product first, sum second: autograd's gradient of the weight, over all sequences."""
    for integers in (False, True):
        f = case.factors(integers=integers)
        weight = f.m.clone().requires_grad_()
        output = torch.einsum("oi,bti->bto", weight, f.x)
        (expected,) = torch.autograd.grad(output, weight, f.delta)
        found = contraction.outer_sum(f.delta, f.x)
        if integers:
            assert torch.equal(found, expected)
        else:
            scale = torch.einsum("bto,bti->oi", f.delta.abs(), f.x.abs())
            close(found, expected, scale, EXACT, name="outer sum")


def check_narrow_inputs_are_widened(case: ContractionCase) -> None:
    """bfloat16 factors are contracted in float32: equal to the float32 copies, bit by bit."""
    f = case.factors(integers=True)
    narrow = [x.to(torch.bfloat16) for x in (f.delta, f.x, f.m)]
    found = contraction.contract(*narrow)
    assert found.dtype == torch.float32
    assert torch.equal(found.double(), loop_values(case, True, False)[0])
    validation = [x.to(torch.bfloat16) for x in (f.delta_v, f.x_v)]
    gram = contract_gram(*narrow[:2], *validation)
    assert gram.dtype == torch.float32
    assert torch.equal(gram.double(), loop_gram(case, True)[0])


# --- direction -----------------------------------------------------------------------------------


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


def check_diagonal_drift(case: DirectionCase) -> None:
    """V = F o (W - W_ref), entry by entry and as the gradient of J_prx; exactly zero at W_ref."""
    fisher, weight, reference = (case.tensor(case.o, case.i, salt=s) for s in range(3))
    found = direction.diagonal_drift(fisher, weight, reference)
    for o in range(case.o):
        for i in range(case.i):
            expected = fisher[o, i] * (weight[o, i] - reference[o, i])
            close(found[o, i], expected, expected.abs(), EXACT, name="diagonal drift")
    assert not bool(direction.diagonal_drift(fisher, weight, weight).any())
    moved = weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((fisher * (moved - reference) ** 2).sum() / 2, moved)
    close(found, gradient, found.abs(), EXACT, name="gradient of the quadratic")


def check_kronecker_drift(case: DirectionCase) -> None:
    """V = S (W - W_ref) A; as a flat map it is S (x) A acting on the drift, row by row."""
    s, a = case.tensor(case.o, case.o, salt=0), case.tensor(case.i, case.i, salt=1)
    s, a = s @ s.T, a @ a.T
    weight, reference = (case.tensor(case.o, case.i, salt=n) for n in (2, 3))
    found = direction.kronecker_drift(s, a, weight, reference)
    drift = (weight - reference).flatten()
    matrix = torch.kron(s, a)
    expected = (matrix @ drift).view(case.o, case.i)
    scale = (matrix.abs() @ drift.abs()).view(case.o, case.i)
    close(found, expected, scale, EXACT, name="Kronecker drift")
    assert not bool(direction.kronecker_drift(s, a, weight, weight).any())


def check_direction_algebra(case: DirectionCase) -> None:
    """M = P o G + lambda P o V; P = 1 where it is not given; balance = ||lambda V|| / ||G||."""
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
        close(m.total()[name], expected, scale, EXACT, name="P o (G + lambda V)")
        ratio = abs(case.weight) * (factor * v[name]).norm() / (factor * g[name]).norm()
        close(m.balance()[name], ratio, ratio, EXACT, name="balance")
    alone = direction.Direction(g, None, case.weight)
    assert all(torch.equal(alone.total()[n], g[n]) for n in names)
    assert alone.balance() == dict.fromkeys(names, 0.0)
    assert direction.precondition(g, None) == g


# --- preconditioner ------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdamCase:
    """An Adam state before a step, the step's gradient, and one token's."""

    step: int
    beta1: float
    beta2: float
    eps: float
    seed: int
    zeros: bool = False

    def tensor(self, salt: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2**16 * salt)
        found = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        if self.zeros:
            found[0] = 0.0  # a row that no gradient has reached yet
        return found

    @property
    def m(self) -> Tensor:
        return self.tensor(0) * float(self.step > 0)

    @property
    def v(self) -> Tensor:
        return self.tensor(1).square() * float(self.step > 0)

    def state(self) -> utility.AdamState:
        return utility.AdamState(
            self.step, {"w": self.m}, {"w": self.v}, (self.beta1, self.beta2), self.eps
        )

    def moments(self) -> preconditioner.Update:
        return preconditioner.adam_update(
            self.step, self.m, self.v, self.beta1, self.beta2, self.eps
        )


def adam_cases(least: int = 0) -> st.SearchStrategy[AdamCase]:
    return st.builds(
        AdamCase,
        step=st.integers(least, 40),
        beta1=st.sampled_from([0.9, 0.5, 0.0]),
        beta2=st.sampled_from([0.999, 0.9]),
        eps=st.sampled_from([1e-8, 1e-3]),
        seed=SEEDS,
        zeros=st.booleans(),
    )


def check_full_preconditioner(case: AdamCase) -> None:
    """P o g_k is the exact derivative of Adam's step by the token's weight."""
    gradient, token = case.tensor(2), case.tensor(3)
    expected = utility.adam_step_derivative({"w": gradient}, {"w": token}, case.state())["w"]
    found = preconditioner.full_preconditioner(case.moments(), gradient, floor=0.0) * token
    # Both terms may be large and nearly equal (at step 1 the update is sign(g)).
    first = (1 - case.beta1) / (1 - case.beta1 ** (case.step + 1))
    v = case.beta2 * case.v + (1 - case.beta2) * gradient.square()
    root = (v / (1 - case.beta2 ** (case.step + 1))).sqrt()
    scale = 10 * first * token.abs() / (root + case.eps)
    close(found, expected, scale + expected.abs(), EXACT, name="full preconditioner")


def check_frozen_preconditioner(case: AdamCase) -> None:
    """P is the derivative of a step whose denominator is the state's own."""
    gradient = case.tensor(2)
    closed = utility.adam_preconditioner({"w": gradient}, case.state(), "frozen")["w"]
    found = preconditioner.frozen_preconditioner(case.moments(), floor=0.0)
    close(found, closed, closed, EXACT, name="frozen preconditioner")
    root = (case.v / (1 - case.beta2**case.step)).sqrt() + case.eps

    def update(weight: Tensor) -> Tensor:
        m = case.beta1 * case.m + (1 - case.beta1) * (gradient + weight * case.tensor(3))
        return m / (1 - case.beta1 ** (case.step + 1)) / root

    _, expected = torch.func.jvp(update, (torch.zeros(()).double(),), (torch.ones(()).double(),))
    close(found * case.tensor(3), expected, expected.abs(), EXACT, name="frozen denominator")


def check_floor_bounds_the_preconditioners(case: AdamCase, floor: float) -> None:
    """v^ = 0 does not explode: P stays below c / (sqrt(floor) + eps), and is finite."""
    silent = AdamCase(case.step, case.beta1, case.beta2, case.eps, case.seed, zeros=True)
    c = (1 - case.beta1) / (1 - case.beta1 ** (case.step + 1))
    limit = c / (math.sqrt(floor) + case.eps)
    frozen = preconditioner.frozen_preconditioner(silent.moments(), floor=floor)
    full = preconditioner.full_preconditioner(silent.moments(), silent.tensor(2), floor=floor)
    assert bool(torch.isfinite(frozen).all())
    assert bool(torch.isfinite(full).all())
    assert bool((frozen <= limit * (1 + EXACT)).all())
    close(frozen[0], torch.full_like(frozen[0], limit), limit, EXACT, name="floor, frozen")
    close(full[0], torch.full_like(full[0], limit), limit, EXACT, name="floor, full")


# --- selection -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SelectionCase:
    """Values with many ties, and a mask."""

    rows: int
    length: int
    levels: int
    seed: int

    def draw(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.rows, self.length)
        values = torch.randint(self.levels, shape, generator=generator).double()
        return values, torch.rand(shape, generator=generator) < 0.7


def selection_cases() -> st.SearchStrategy[SelectionCase]:
    return st.builds(
        SelectionCase,
        rows=st.integers(1, 4),
        length=st.integers(1, 9),
        levels=st.sampled_from([1, 2, 5, 1000]),
        seed=SEEDS,
    )


def _best(tokens: list[tuple[float, int, int]], ratio: Fraction) -> set[tuple[int, int]]:
    """The first ceil(ratio n) by value, then batch index, then position."""
    count = -(-(ratio.numerator * len(tokens)) // ratio.denominator)
    ordered = sorted(tokens, key=lambda token: (-token[0], token[1], token[2]))
    return {(b, i) for _, b, i in ordered[:count]}


def check_keep_count(part: int, whole: int, count: int) -> None:
    """ceil(ratio n) of the ratio that was rounded to a float, in exact arithmetic."""
    assert selection.keep_count(part / whole, count) == -(-part * count // whole)


def check_selection(case: SelectionCase, hundredths: int, scope: str, *, bottom: bool) -> None:
    """Exactly ceil(ratio n) response tokens per scope, ties by (batch index, position)."""
    values, mask = case.draw()
    ratio = Fraction(hundredths, 100)
    select = selection.select_bottom if bottom else selection.select_top
    keep = select(values, mask, hundredths / 100, scope=scope)
    sign = -1.0 if bottom else 1.0
    tokens = [(sign * float(values[b, i]), b, i) for b, i in mask.nonzero().tolist()]
    if scope == "batch":
        expected = _best(tokens, ratio)
    else:
        rows = [[t for t in tokens if t[1] == b] for b in range(case.rows)]
        expected = set().union(*(_best(row, ratio) for row in rows))
    assert {(b, i) for b, i in keep.nonzero().tolist()} == expected
    assert keep.dtype == torch.bool
    assert not bool((keep & ~mask).any())


def check_response_values(case: SelectionCase, hundredths: int) -> None:
    """The mean over each row's response by a loop; and top-ranked, whole responses but for one."""
    values, mask = case.draw()
    found = selection.response_values(values, mask)
    for b in range(case.rows):
        own = [Fraction(float(values[b, i])) for i in range(case.length) if mask[b, i]]
        mean = float(sum(own) / len(own)) if own else 0.0
        for i in range(case.length):
            expected = mean if mask[b, i] else 0.0
            assert abs(float(found[b, i]) - expected) <= 1e-6 * max(1.0, abs(mean))
    assert found.dtype == values.dtype
    keep = selection.select_top(found, mask, hundredths / 100)
    assert int(keep.sum()) == selection.keep_count(hundredths / 100, int(mask.sum()))
    rows = [(float(found[b][mask[b]][0]), b) for b in range(case.rows) if bool(mask[b].any())]
    if len({mean for mean, _ in rows}) < len(rows):
        return  # equal means share the budget in order of rows
    cut = [b for _, b in rows if 0 < int(keep[b].sum()) < int(mask[b].sum())]
    assert len(cut) <= 1
    kept = [mean for mean, b in rows if bool(keep[b].any())]
    dropped = [mean for mean, b in rows if not bool(keep[b].any())]
    assert not dropped or max(dropped) < min(kept)
    for b in cut:  # the first tokens of the one at the edge
        places = mask[b].nonzero().squeeze(-1)
        count = int(keep[b].sum())
        assert bool(keep[b][places[:count]].all())


def check_padding_never_ranks(case: SelectionCase, hundredths: int) -> None:
    """Whatever stands outside the mask, NaN included, changes nothing."""
    values, mask = case.draw()
    keep = selection.select_top(values, mask, hundredths / 100)
    for filler in (1e30, -1e30, float("nan"), float("inf")):
        again = selection.select_top(values.masked_fill(~mask, filler), mask, hundredths / 100)
        assert torch.equal(again, keep)


# --- losses --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossCase:
    """Logits of a batch, labels with holes, and a mask to keep."""

    rows: int
    length: int
    vocabulary: int
    seed: int

    def numbers(self, *shape: int, salt: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2**16 * salt)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def labels(self, salt: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2**16 * salt)
        ids = torch.randint(self.vocabulary, (self.rows, self.length), generator=generator)
        hole = torch.rand(ids.shape, generator=generator) < 0.4
        hole[:, 1] = False  # every row has a response
        return ids.masked_fill(hole, -100)

    def logits(self, salt: int = 2) -> Tensor:
        return self.numbers(self.rows, self.length, self.vocabulary, salt=salt).requires_grad_()

    def keep(self, salt: int = 3) -> Tensor:
        return self.numbers(self.rows, self.length, salt=salt) > 0


def loss_cases() -> st.SearchStrategy[LossCase]:
    return st.builds(
        LossCase,
        rows=st.integers(1, 3),
        length=st.integers(2, 7),
        vocabulary=st.integers(2, 6),
        seed=SEEDS,
    )


def loop_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Token losses by a loop: index i from the logits at i - 1."""
    rows = []
    for b in range(labels.shape[0]):
        row = [logits.new_zeros(())]
        for i in range(1, labels.shape[1]):
            label = int(labels[b, i])
            if label == -100:
                row.append(logits.new_zeros(()))
            else:
                row.append(logits[b, i - 1].logsumexp(-1) - logits[b, i - 1, label])
        rows.append(torch.stack(row))
    return torch.stack(rows)


def check_token_losses(case: LossCase) -> None:
    """Index i holds -log pi(z_i | z_<i); logits and both layouts of log-probabilities agree."""
    logits, labels = case.logits(), case.labels()
    expected = loop_losses(logits, labels)
    found = batch.token_losses(logits, labels)
    scale = 1.0 + logits.abs().amax()
    close(found, expected, scale, EXACT, name="token losses")
    assert torch.equal(batch.token_losses(-found, labels), found)
    assert torch.equal(batch.token_losses(-found[:, 1:], labels), found)


def check_token_losses_to_second_order(case: LossCase, workspace: int) -> None:
    """In blocks of any size: gradient, Hessian product and tangent are those of plain loops."""
    logits, labels = case.logits(), case.labels()
    weights, along = case.numbers(*labels.shape, salt=6), case.numbers(*logits.shape, salt=7)
    expected = (loop_losses(logits, labels) * weights).sum()
    slope = torch.autograd.grad(expected, logits, create_graph=True)[0]
    curved = torch.autograd.grad((slope * along).sum(), logits)[0]
    scale = (weights.abs().sum() + 1.0) * (along.abs().sum() + 1.0)
    with mock.patch.object(vocabulary, "_WORKSPACE", workspace):
        loss = (batch.token_losses(logits, labels) * weights).sum()
        once = torch.autograd.grad(loss, logits, retain_graph=True)[0]
        again = torch.autograd.grad(loss, logits, create_graph=True)[0]
        twice = torch.autograd.grad((again * along).sum(), logits)[0]
        with forward_ad.dual_level():
            dual = batch.token_losses(forward_ad.make_dual(logits.detach(), along), labels)
            tangent = forward_ad.unpack_dual(dual).tangent
    assert tangent is not None
    for name, found, wanted in (
        ("gradient", once, slope),
        ("gradient with a graph", again, slope),
        ("Hessian product", twice, curved),
        ("tangent", (tangent * weights).sum(), (slope * along).sum()),
    ):
        close(found, wanted.detach(), scale, EXACT, name=f"token losses, {name}")


def check_sft_loss(case: LossCase, normalization: str) -> None:
    """Sum of kept losses over the normaliser, and its gradient: only kept tokens push."""
    logits, labels, keep = case.logits(), case.labels(), case.keep()
    found = losses.masked_sft_loss(logits, labels, keep, normalization=normalization)
    each = loop_losses(logits, labels)
    mask = labels != -100
    mask[:, 0] = False
    count = {"sum": 1, "response": int(mask.sum()), "kept": int((mask & keep).sum())}[normalization]
    expected = each[keep & mask].sum() / max(count, 1)
    scale = each.detach().abs().sum() + 1.0
    close(found, expected, scale, EXACT, name=f"masked loss, {normalization}")
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (found, expected)]
    close(*gradients, 1.0, EXACT, name=f"masked loss, gradient, {normalization}")


def check_full_mask_is_cross_entropy(case: LossCase) -> None:
    """keep = mask under "response": transformers' own loss."""
    logits, labels = case.logits(), case.labels()
    found = losses.masked_sft_loss(logits, labels, labels != -100)
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    close(found, expected, 1.0 + expected.abs(), EXACT, name="cross-entropy")


@dataclass(frozen=True)
class PairCase:
    """Logits of both branches of preference pairs, as leaves, with beta and references."""

    chosen: LossCase
    rejected: LossCase
    beta: float

    def pairs(self) -> preference.PreferencePairs:
        return preference.PreferencePairs(
            {"labels": self.chosen.labels()},
            {"labels": self.rejected.labels(salt=7)},
            self.chosen.numbers(self.chosen.rows, salt=8),
            self.chosen.numbers(self.chosen.rows, salt=9),
        )

    def logits(self) -> tuple[Tensor, Tensor]:
        return self.chosen.logits(), self.rejected.logits(salt=10)

    def reference_logits(self) -> tuple[Tensor, Tensor]:
        chosen, rejected = self.chosen.logits(salt=12), self.rejected.logits(salt=13)
        return chosen.detach(), rejected.detach()


@st.composite
def pair_cases(draw: st.DrawFn) -> PairCase:
    chosen = draw(loss_cases())
    rejected = LossCase(chosen.rows, draw(st.integers(2, 7)), chosen.vocabulary, chosen.seed)
    return PairCase(chosen, rejected, draw(st.sampled_from([0.1, 0.5, 2.0])))


def surrogate(case: PairCase, logits: tuple[Tensor, Tensor], keep: tuple[Tensor, Tensor]) -> Tensor:
    pairs = case.pairs()
    branches = (pairs.chosen["labels"], pairs.rejected["labels"])
    each = [batch.token_losses(x, y) for x, y in zip(logits, branches, strict=True)]
    return losses.masked_dpo_loss(
        *each,
        pairs.reference_chosen,
        pairs.reference_rejected,
        *keep,
        beta=case.beta,
    )


def masks_of(case: PairCase) -> tuple[Tensor, Tensor]:
    return case.chosen.keep(), case.rejected.keep(salt=11)


def check_unmasked_dpo_gradient(case: PairCase) -> None:
    """All masks 1: exactly the gradient of mean -log sigma(s)."""
    logits = case.logits()
    whole = tuple(torch.ones_like(m) for m in masks_of(case))
    expected = torch.autograd.grad(preference.dpo_loss(*logits, case.pairs(), case.beta), logits)
    found = torch.autograd.grad(surrogate(case, logits, whole), logits)
    for got, wanted in zip(found, expected, strict=True):
        close(got, wanted, case.beta, EXACT, name="DPO, unmasked gradient")


def check_masked_dpo_gradient(case: PairCase) -> None:
    """omega from the unmasked logit, + on kept chosen, - on kept rejected, mean over pairs."""
    logits, keep, pairs = case.logits(), masks_of(case), case.pairs()
    errors = preference.dpo_token_errors(*logits, pairs, case.beta)
    found = torch.autograd.grad(surrogate(case, logits, keep), logits)
    for got, error, kept in zip(found, errors, keep, strict=True):
        # keep holds token indices; the error of token i sits at position i - 1.
        at_position = torch.zeros(kept.shape, dtype=torch.float64)
        at_position[:, :-1] = kept[:, 1:].double()
        expected = error.detach() * at_position.unsqueeze(-1) / case.chosen.rows
        close(got, expected, case.beta, EXACT, name="DPO, masked gradient")


def masked_logit_surrogate(
    case: PairCase, logits: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]
) -> Tensor:
    labels = [part["labels"] for part in (case.pairs().chosen, case.pairs().rejected)]
    own, other = (
        [batch.token_losses(x, y) for x, y in zip(both, labels, strict=True)]
        for both in (logits, reference)
    )
    keep = masks_of(case)
    return losses.masked_dpo_loss(
        *own, -other[0], -other[1], *keep, beta=case.beta, masked_logit=True
    )


def check_masked_logit_is_the_ablation(case: PairCase) -> None:
    """masked_logit: omega of the kept tokens' log-ratios, by the oracle; the same update."""
    logits, reference, pairs = case.logits(), case.reference_logits(), case.pairs()
    keep = masks_of(case)
    omega = preference.masked_dpo_omega(logits, reference, pairs, keep, case.beta)
    labels = (pairs.chosen["labels"], pairs.rejected["labels"])
    kept = [(loop_losses(x, y) * m).sum(1) for x, y, m in zip(logits, labels, keep, strict=True)]
    expected = (omega * (kept[0] - kept[1])).mean()
    found = masked_logit_surrogate(case, logits, reference)
    scale = 1.0 + case.beta * sum(k.detach().sum() for k in kept)
    close(found, expected, scale, EXACT, name="DPO, masked logit")
    gradients = [torch.autograd.grad(x, logits, retain_graph=True) for x in (found, expected)]
    for got, wanted in zip(*gradients, strict=True):
        close(got, wanted, case.beta, EXACT, name="DPO, masked logit, gradient")


def check_masked_logit_at_the_reference(case: PairCase) -> None:
    """masked_logit with policy = reference: omega is beta / 2 for any mask and any lengths."""
    logits, pairs, keep = case.logits(), case.pairs(), masks_of(case)
    half = torch.full((case.chosen.rows,), case.beta / 2, dtype=torch.float64)
    assert torch.equal(preference.masked_dpo_omega(logits, logits, pairs, keep, case.beta), half)
    labels = (pairs.chosen["labels"], pairs.rejected["labels"])
    log_p = [-batch.token_losses(x, y).detach() for x, y in zip(logits, labels, strict=True)]
    found = losses.masked_dpo_coefficient(*log_p, *log_p, *keep, case.beta)
    close(found, half, case.beta, EXACT, name="omega at the reference")


def check_dpo_coefficient(case: PairCase) -> None:
    """omega = beta sigma(-s), detached, by the oracle."""
    logits, pairs = case.logits(), case.pairs()
    margin = preference.dpo_margin(*logits, pairs, case.beta)
    each = [
        preference.branch_log_probabilities(x, b["labels"])
        for x, b in zip(logits, (pairs.chosen, pairs.rejected), strict=True)
    ]
    found = losses.dpo_coefficient(
        *each, pairs.reference_chosen, pairs.reference_rejected, case.beta
    )
    assert not found.requires_grad
    close(found, preference.dpo_omega(margin, case.beta), case.beta, EXACT, name="omega")
