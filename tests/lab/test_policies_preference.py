"""Preference policies: losses, ConfPO, SePO, TI-DPO against loops and finite differences."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import Decimal, getcontext
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken.errors import ConfigError, InputError, NumericalError, UnsupportedError
from alphatoken.model.protocol import find_adapter
from alphatoken.train.policy import PolicyBatch, PolicySettings
from alphatoken_lab.methods.confpo import ConfPO, below_mean_probability
from alphatoken_lab.methods.preference import (
    PreferencePolicy,
    both_sides,
    weighted_dpo_losses,
    weighted_simpo_losses,
)
from alphatoken_lab.methods.sepo import SePO
from alphatoken_lab.methods.ti_dpo import (
    TIDPO,
    gradient_attribution,
    importance_weights,
    packed,
    prompts_of,
    sample_anchors,
    sequence_kl,
    triplet_losses,
)
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.property.profiles import budget
from tests.property.tolerance import close

EXACT, DIFFERENCES = 1e-12, 1e-6
SEEDS = st.integers(0, 2**16)
SIDES = ("left", "right")


@dataclass(frozen=True)
class Pairs:
    """Pairs of responses with a prompt before each, padded on one side; numbers from a seed."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    side: str
    seed: int

    @property
    def width(self) -> int:
        # One column more than the longest, so that padding is always there.
        return max(p + r for p, r in zip(self.prompts, self.responses, strict=True)) + 1

    def place(self, rows: list[Tensor], fill: float = 0.0) -> Tensor:
        """Whole rows (prompt and response) at their place in the batch."""
        found = torch.full((len(rows), self.width), fill, dtype=rows[0].dtype)
        for i, row in enumerate(rows):
            start = self.width - len(row) if self.side == "left" else 0
            found[i, start : start + len(row)] = row
        return found

    def draw(self, salt: int, *, prompt: bool = False) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 2**17 * salt)
        rows = []
        for p, r in zip(self.prompts, self.responses, strict=True):
            row = torch.randn(p + r, generator=generator, dtype=torch.float64)
            if not prompt:
                row[:p] = 0.0
            rows.append(row)
        return rows

    @property
    def mask(self) -> Tensor:
        sizes = zip(self.prompts, self.responses, strict=True)
        return self.place([torch.arange(p + r) >= p for p, r in sizes], fill=False)

    @property
    def real(self) -> Tensor:
        sizes = zip(self.prompts, self.responses, strict=True)
        return self.place([torch.ones(p + r, dtype=torch.long) for p, r in sizes], fill=0)

    def log_probs(self, salt: int = 1) -> Tensor:
        return -self.place(self.draw(salt)).abs()

    def weights(self, salt: int = 2) -> Tensor:
        """Some 0, some not."""
        drawn = self.place(self.draw(salt)).abs()
        return drawn * (drawn > 0.3)

    def ids(self) -> Tensor:
        drawn = [(row.abs() * 1e6).long() % 11 for row in self.draw(9, prompt=True)]
        return self.place(drawn, fill=0)

    def batch(self, **more: object) -> PolicyBatch:
        half = len(self.prompts) // 2
        mask, ids = self.mask, self.ids()
        base = PolicyBatch(
            inputs={"input_ids": ids, "attention_mask": self.real, "completion_mask": mask.long()},
            labels=ids.masked_fill(~mask, -100),
            mask=mask,
            log_probs=self.log_probs(),
            rank_groups=[slice(0, half), slice(half, 2 * half)],
            reference=self.log_probs(salt=3),
            columns={
                "oracle_losses": self.place(self.draw(4)),
                "reference_losses": self.place(self.draw(5)),
            },
        )
        return replace(base, **more)

    def response(self, tensor: Tensor) -> list[list[float]]:
        return [row[m].tolist() for row, m in zip(tensor, self.mask, strict=True)]


@st.composite
def pairs(draw: st.DrawFn, least: int = 1) -> Pairs:
    rows = 2 * draw(st.integers(1, 3))
    sizes = st.lists(st.integers(least, 7), min_size=rows, max_size=rows)
    prompts = st.lists(st.integers(1, 3), min_size=rows, max_size=rows)
    return Pairs(
        tuple(draw(prompts)), tuple(draw(sizes)), draw(st.sampled_from(SIDES)), draw(SEEDS)
    )


# --- losses ---------------------------------------------------------------------------------------


def test_hand_computed_losses() -> None:
    """In decimal arithmetic, and as the numbers that come out.

    Proves: DPO, SimPO (exact), against numbers by hand.
    """
    getcontext().prec = 40
    log_probs = torch.tensor([[0, 0, -1.0, -2.0, -0.5], [0, 0, -0.25, -3.0, -1.5]])
    reference = torch.tensor([[0, 0, -1.5, -1.5, -1.0], [0, 0, -1.25, -2.0, -1.0]])
    weights = torch.tensor([[0, 0, 1.0, 0.5, 0], [0, 0, 2.0, 0, 1.0]])
    # chosen: 1(.5) + .5(-.5) = .25; rejected: 2(1) + 1(-.5) = 1.5
    margin = Decimal("0.5") * (Decimal("0.25") - Decimal("1.5"))
    dpo = (1 + (-margin).exp()).ln()
    found = weighted_dpo_losses(log_probs, reference, weights, beta=0.5)
    assert found.tolist() == pytest.approx([float(dpo)], abs=1e-6)
    assert float(dpo) == pytest.approx(1.0537007, abs=1e-6)
    # chosen: (-1 - 1) / 1.5; rejected: (-.5 - 1.5) / 3
    margin = 2 * (Decimal(-2) / Decimal("1.5") - Decimal(-2) / 3) - Decimal("0.5")
    simpo = (1 + (-margin).exp()).ln()
    found = weighted_simpo_losses(log_probs, weights, beta=2.0, gamma=0.5)
    assert found.tolist() == pytest.approx([float(simpo)], abs=1e-6)
    assert float(simpo) == pytest.approx(1.9816497, abs=1e-6)


def test_an_empty_side_adds_nothing_and_stays_in_the_mean() -> None:
    case = Pairs((1, 1, 1, 1), (3, 3, 3, 3), "right", 5)
    weights = case.mask.double()
    weights[3] = 0.0  # the second pair's rejected side
    assert both_sides(weights).tolist() == [True, False]
    for policy in (ConfPO(), ConfPO(loss="dpo")):
        batch, leaf = case.batch(), case.log_probs().requires_grad_()
        loss = policy.loss(batch, leaf, weights)
        alone = policy.pair_losses(batch, leaf, weights)
        assert alone[1] == 0
        assert alone[0] > 0
        assert loss.item() == pytest.approx(alone[0].item() / 2, rel=1e-12)
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert bool(gradient[0].any())
        assert not bool(gradient[1].any() or gradient[3].any())


def test_dropped_tokens_may_hold_anything() -> None:
    """A weight of 0 leaves a token out even where its log-probability is -inf."""
    leaf = torch.tensor([[-1.0, -math.inf], [-2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    for losses in (
        weighted_dpo_losses(leaf, torch.zeros_like(leaf), weights, beta=0.1),
        weighted_simpo_losses(leaf, weights, beta=2.0, gamma=0.0),
    ):
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        assert bool(torch.isfinite(losses).all() and torch.isfinite(gradient).all())
        assert gradient[0, 1] == 0


# --- ConfPO ---------------------------------------------------------------------------------------


@given(pairs())
def test_confpo_keeps_what_is_below_the_mean_probability(case: Pairs) -> None:
    """Proves: ConfPO (exact), against loops."""
    found = ConfPO().weights(case.batch())
    for row, log_probs in zip(case.response(found), case.response(case.log_probs()), strict=True):
        p = [math.exp(x) for x in log_probs]
        mean = math.fsum(p) / len(p)
        close_call = [abs(x - mean) < 1e-8 * mean for x in p]
        for kept, x, skip in zip(row, p, close_call, strict=True):
            assert skip or kept == float(x < mean)
    assert not bool(found[~case.mask].any())


def test_confpo_by_hand() -> None:
    """Strict, arithmetic mean of probabilities; of equal tokens or of one nothing is left.

    Proves: ConfPO (exact), against numbers by hand.
    """
    p = torch.tensor([[0.9, 0.5, 0.1], [0.4, 0.2, 0.3], [0.7, 0.7, 0.7], [0.2, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 0]]).bool()
    kept = below_mean_probability(p.double().log(), mask)
    assert kept.tolist() == [[False, False, True], [False, True, False], [False] * 3, [False] * 3]
    # 0.2 is above the geometric mean (0.135) and below the arithmetic one (0.37)
    p = torch.tensor([[0.9, 0.2, 0.0136]])
    assert below_mean_probability(p.log(), p > 0).tolist() == [[False, True, True]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [2, 3, 7, 48, 1000])
def test_confpo_ties_do_not_depend_on_rounding(dtype: torch.dtype, length: int) -> None:
    for p in (0.1, 0.3, 0.7, 1 / 3):
        same = torch.full((1, length), math.log(p), dtype=dtype)
        assert not bool(below_mean_probability(same, same < 0).any())


# --- SePO -----------------------------------------------------------------------------------------


def test_sepo_by_hand() -> None:
    """Ten tokens each, k = 0.3: the three most raised of the chosen, most lowered of the other.

    Proves: SePO (exact), against numbers by hand.
    """
    gain = torch.tensor([3.0, -1, 0, 5, 2, -4, 1, -2, 4, -3]).expand(2, 10)
    case = Pairs((1, 1), (10, 10), "right", 0)
    columns = {
        "oracle_losses": case.place([torch.cat([torch.zeros(1), -row]) for row in gain]),
        "reference_losses": torch.zeros(2, case.width),
    }
    chosen, rejected = case.response(SePO().weights(case.batch(columns=columns)))
    assert [i for i, w in enumerate(chosen) if w] == [0, 3, 8]
    assert [i for i, w in enumerate(rejected) if w] == [5, 7, 9]
    skipping = SePO(skip_first=True)
    chosen, _ = case.response(skipping.weights(case.batch(columns=columns)))
    assert [i for i, w in enumerate(chosen) if w] == [3, 8]  # floor(0.3 * 9)


# --- TI-DPO: weights ------------------------------------------------------------------------------


def test_importance_weights_by_hand() -> None:
    """T = 2, sigma = 1/2: P = 1/2 each. I = (3, 1): W = 0.7 (3/4, 1/4) + 0.3 (1/2, 1/2).

    Proves: TI-DPO (exact), against numbers by hand.
    """
    span = torch.tensor([[False, True, True]])
    importance = torch.tensor([[9.0, 3.0, 1.0]], dtype=torch.float64)
    found = importance_weights(importance, span)
    assert found.tolist()[0] == pytest.approx([0.0, 1.35, 0.65], abs=1e-12)
    bell = math.exp(-0.5)
    plain = importance_weights(importance, span, normalize_prior=False, mean_one=False)
    wanted = [0.0, 0.7 * 0.75 + 0.3 * bell, 0.7 * 0.25 + 0.3 * bell]
    assert plain.tolist()[0] == pytest.approx(wanted, abs=1e-12)


class Embedded(ReferenceDecoder):
    """The float64 decoder, with transformers' accessor for its embedding."""

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding


def decoder(seed: int, **structure: object) -> Embedded:
    return Embedded(DecoderConfig(**structure), seed)  # type: ignore[arg-type]


def difference_attribution(model: Embedded, case: Pairs, row: int, step: float = 1e-5) -> Tensor:
    """One row without padding: L1 norm over dimensions of central differences."""
    ids = case.ids()[row][case.real[row] != 0].unsqueeze(0)
    found = torch.zeros(ids.shape[1], dtype=torch.float64)

    def top(at: int, dimension: int, by: float) -> float:
        def nudge(module: object, args: object, output: Tensor) -> Tensor:
            moved = output.clone()
            moved[0, at, dimension] += by
            return moved

        handle = model.embedding.register_forward_hook(nudge)
        try:
            return float(model(ids)[0, -1].max())
        finally:
            handle.remove()

    for at in range(ids.shape[1]):
        for d in range(model.config.hidden):
            found[at] += abs(top(at, d, step) - top(at, d, -step)) / (2 * step)
    return found


@given(pairs(), SEEDS)
@budget(0.3)
def test_attribution_is_finite_differences(case: Pairs, seed: int) -> None:
    """Rows of a padded batch, each against its own run without padding.

    Proves: TI-DPO (exact), against finite differences.
    """
    model = decoder(seed, hidden=6)
    with torch.no_grad():
        found = gradient_attribution(model, case.batch().inputs)
        for row in range(len(case.prompts)):
            wanted = difference_attribution(model, case, row)
            here = found[row][case.real[row] != 0]
            # Steep models leave 6e-7 to the quotient itself (an attribution of 72).
            close(here, wanted, 1.0 + wanted.sum(), 1e-5, name="attribution")
    assert not bool(found[case.real == 0].any())


def test_attribution_leaves_the_model_as_it_was() -> None:
    model = decoder(3, residual_dropout=0.5, attention_dropout=0.5).train()
    model.layers[0].eval()
    flags = {name: module.training for name, module in model.named_modules()}
    case, state = Pairs((1, 1), (4, 2), "right", 0), torch.get_rng_state()
    first = gradient_attribution(model, case.batch().inputs)
    assert torch.equal(first, gradient_attribution(model, case.batch().inputs))
    assert flags == {name: module.training for name, module in model.named_modules()}
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not model.embedding._forward_hooks
    assert torch.equal(state, torch.get_rng_state())


def test_attribution_refuses_what_it_cannot_attribute() -> None:
    class Twice(Embedded):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids, attention_mask) + super().forward(input_ids)

    case = Pairs((1, 1), (4, 2), "right", 0)
    model = Twice(DecoderConfig(), 0)
    with pytest.raises(UnsupportedError, match="2 passes"):
        gradient_attribution(model, case.batch().inputs)
    assert not model.embedding._forward_hooks
    broken = decoder(0)
    with torch.no_grad():
        broken.embedding.weight[int(case.ids()[1, 1])] = math.nan
    with pytest.raises(NumericalError, match="not finite"):
        gradient_attribution(broken, case.batch().inputs)


# --- TI-DPO: optional terms -----------------------------------------------------------------------


def logits_of(case: Pairs, salt: int, vocabulary: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(case.seed + salt)
    shape = (len(case.prompts), case.width, vocabulary)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@given(pairs())
def test_sequence_divergence_is_the_loop(case: Pairs) -> None:
    """Proves: TI-DPO (exact), against loops."""
    ours, theirs = logits_of(case, 1), logits_of(case, 2)
    wanted = torch.zeros(len(case.prompts), dtype=torch.float64)
    for row, token in case.mask.nonzero().tolist():
        p, q = theirs[row, token - 1].softmax(-1), ours[row, token - 1].softmax(-1)
        wanted[row] += sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p, q))  # noqa: B905
    found = sequence_kl(ours, theirs, case.mask)
    close(found, wanted, 1.0 + wanted, EXACT, name="KL of the reference and the policy")
    same = sequence_kl(theirs, theirs, case.mask)
    close(same, torch.zeros_like(same), 1.0, EXACT, name="KL of equals")


@given(pairs(), st.sampled_from([0.0, 0.5]))
def test_triplet_losses_are_the_loop(case: Pairs, margin: float) -> None:
    """Proves: TI-DPO (exact), against loops."""
    names = [packed(case.log_probs(s), case.mask) for s in (6, 7, 8)]
    rows = [case.response(case.log_probs(s)) for s in (6, 7, 8)]
    # Anchors are as long as the next row's response: lengths differ.
    rolled = tuple(torch.roll(part, 1, 0) for part in names[0])
    found = triplet_losses(rolled, names[1], names[2], margin=margin)
    for i, value in enumerate(found.tolist()):
        a, w, l = rows[0][i - 1], rows[1][i], rows[2][i]  # noqa: E741
        near = sum((x - y) ** 2 for x, y in zip(a, w))  # noqa: B905
        far = sum((x - y) ** 2 for x, y in zip(a, l))  # noqa: B905
        assert value == pytest.approx(max(near - far + margin, 0.0), rel=1e-12, abs=1e-12)


def test_anchors_are_drawn_from_the_model_and_not_from_the_world() -> None:
    model = decoder(2, end_token=None)
    case = Pairs((3, 1), (2, 4), "left", 6)
    batch = case.batch()
    prompts = prompts_of(batch.inputs, batch.mask)
    assert [len(p) for p in prompts] == [3, 1]
    state = torch.get_rng_state()
    adapter = find_adapter(model)
    one = sample_anchors(adapter, prompts, most=5, seed=3)
    again = sample_anchors(adapter, prompts, most=5, seed=3)
    other = sample_anchors(adapter, prompts, most=5, seed=4)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["input_ids"], other["input_ids"])
    assert (one["labels"] != -100).sum(-1).tolist() == [5, 5]
    assert one["attention_mask"].sum(-1).tolist() == [8, 6]
    assert torch.equal(one["input_ids"][0, :3], prompts[0])


def with_terms(case: Pairs, model: Embedded, reference: Embedded, **options: float) -> tuple:
    generator = torch.Generator().manual_seed(1)
    batch = case.batch(
        model=model,
        generator=generator,
        reference_logits=lambda inputs: reference(**inputs).detach(),
    )
    return TIDPO(**options), batch


@given(pairs(), SEEDS)
@budget(0.2)
def test_the_divergence_enters_the_margin_with_a_stopped_gradient(case: Pairs, seed: int) -> None:
    """Value and gradient of -log sigma(beta (u - u' - alpha (KL' - sg KL)))."""
    model, reference = decoder(seed), decoder(seed + 1)
    policy, batch = with_terms(case, model, reference, tdpo_alpha=0.5, triplet_gamma=0.0)
    weights = case.mask.double()
    found = policy.loss(batch, batch.log_probs, weights)
    inputs = {k: batch.inputs[k] for k in ("input_ids", "attention_mask")}
    half = len(case.prompts) // 2

    def loss(stopped: Tensor | None) -> tuple[Tensor, Tensor]:
        kl = []
        ours, theirs = model(**inputs).log_softmax(-1), reference(**inputs).log_softmax(-1)
        for row in range(2 * half):
            here = case.mask[row].nonzero().flatten() - 1
            p, q = theirs[row, here].detach(), ours[row, here]
            kl.append((p.exp() * (p - q)).sum())
        chosen = torch.stack(kl[:half])
        stopped = chosen.detach() if stopped is None else stopped
        u = ((batch.log_probs - batch.reference) * weights).sum(-1)
        margin = u[:half] - u[half:] - 0.5 * (torch.stack(kl[half:]) - stopped)
        return torch.log1p(torch.exp(-0.1 * margin)).mean(), stopped

    wanted, stopped = loss(None)
    close(found, wanted, 1.0, 1e-10, name="TDPO's margin")
    got = torch.autograd.grad(found, model.head.weight)[0]
    slope = torch.autograd.grad(wanted, model.head.weight)[0]
    close(got, slope, 1.0, 1e-10, name="TDPO's gradient")
    step, at = 1e-5, (0, 0)
    ends = []
    for by in (step, -2 * step):
        with torch.no_grad():
            model.head.weight[at] += by
            ends.append(float(loss(stopped)[0]))
    close(got[at], (ends[0] - ends[1]) / (2 * step), 1.0, DIFFERENCES, name="TDPO, differences")


def test_the_triplet_loss_reaches_policy_through_anchor_and_pairs() -> None:
    case = Pairs((2, 1, 2, 1), (4, 3, 5, 2), "right", 3)
    model, reference = decoder(5, end_token=None), decoder(6)
    policy, batch = with_terms(
        case, model, reference, triplet_gamma=0.1, triplet_margin=50.0, anchor_tokens=4
    )
    leaf = batch.log_probs.clone().requires_grad_()
    weights = case.mask.double()
    found = policy.loss(batch, leaf, weights)
    # the same by hand: anchors of the same seed, one by one
    seed = int(torch.randint(2**31 - 1, (1,), generator=torch.Generator().manual_seed(1)))
    prompts = [case.ids()[i][: case.prompts[i]] for i in range(2)]
    anchors = sample_anchors(find_adapter(model), prompts, most=4, seed=seed)
    ratio = leaf - batch.reference
    losses = []
    for i in range(2):
        ids = anchors["input_ids"][i][anchors["attention_mask"][i] != 0]
        ours, theirs = (m(ids.unsqueeze(0))[0].log_softmax(-1) for m in (model, reference))
        each = [ours[j - 1, ids[j]] - theirs[j - 1, ids[j]].detach()
                for j in range(len(prompts[i]), len(ids))]  # fmt: skip
        w, l = ratio[i][case.mask[i]], ratio[2 + i][case.mask[2 + i]]  # noqa: E741
        near = sum((a - b) ** 2 for a, b in zip(each, w))  # noqa: B905
        far = sum((a - b) ** 2 for a, b in zip(each, l))  # noqa: B905
        losses.append(torch.relu(near - far + 50.0))
    base = weighted_dpo_losses(leaf, batch.reference, weights, beta=0.1)
    wanted = (base + 0.1 * torch.stack(losses)).mean()
    close(found, wanted, 1.0 + wanted.abs(), 1e-10, name="triplet loss")
    for to, name in ((leaf, "pairs"), (model.head.weight, "anchors")):
        got = torch.autograd.grad(found, to, retain_graph=True)[0]
        slope = torch.autograd.grad(wanted, to, retain_graph=True)[0]
        assert bool(slope.any())
        close(got, slope, 1.0 + slope.abs().sum(), 1e-10, name=f"triplet, gradient at {name}")


# --- budget, padding, batches: all of them --------------------------------------------------------


def policies(settings: PolicySettings | None = None) -> list[PreferencePolicy]:
    return [ConfPO(settings), ConfPO(settings, loss="dpo"), SePO(settings), TIDPO(settings)]


@given(pairs(), st.integers(1, 100), SEEDS)
@budget(0.4)
def test_a_budget_is_kept_to_the_token(case: Pairs, hundredths: int, seed: int) -> None:
    """The best share of the chosen tokens of a batch, and of the rejected ones, as published."""
    half, exact = len(case.prompts) // 2, Fraction(hundredths, 100)
    for policy in policies(PolicySettings("budget", hundredths / 100)):
        found = policy.weights(case.batch(model=decoder(seed)))
        assert set(found.unique().tolist()) <= {0.0, 1.0}
        counts = found.sum(-1).tolist()
        whole = math.ceil if policy.rounding == "ceil" else math.floor
        for rows in (slice(0, half), slice(half, None)):
            if policy.scope == "sequence":
                assert counts[rows] == [whole(exact * n) for n in case.responses[rows]]
            else:
                assert sum(counts[rows]) == whole(exact * sum(case.responses[rows]))
    everything = PolicySettings("budget", 1.0)
    for policy in policies(everything):
        kept = policy.weights(case.batch(model=decoder(seed)))
        assert torch.equal(kept, case.mask.to(kept))


@given(pairs(), SEEDS)
@example(Pairs((1, 2), (3, 5), "left", 0), 0)
@budget(0.5)
def test_weights_know_neither_padding_nor_other_rows(case: Pairs, seed: int) -> None:
    model, half = decoder(seed), len(case.prompts) // 2
    other = replace(case, side=SIDES[1 - SIDES.index(case.side)])
    for policy in (ConfPO(), SePO(), TIDPO(), TIDPO(span="sequence", sigma_divisor=8.0)):
        batch = case.batch(model=model)
        here, there = policy.weights(batch), policy.weights(other.batch(model=model))
        for a, b in zip(case.response(here), other.response(there), strict=True):
            assert a == pytest.approx(b, rel=1e-9, abs=1e-9)
        for pair in range(half):
            rows = [pair, half + pair]
            part = replace(
                batch,
                inputs={name: tensor[rows] for name, tensor in batch.inputs.items()},
                mask=batch.mask[rows],
                log_probs=batch.log_probs[rows],
                columns={name: column[rows] for name, column in batch.columns.items()},
                rank_groups=[slice(0, 1), slice(1, 2)],
            )
            close(policy.weights(part), here[rows], 1.0 + here[rows], 1e-9, name="one pair")


# --- what is refused ------------------------------------------------------------------------------


def test_bad_arguments_are_refused_by_name() -> None:
    refused: list[tuple[type[PreferencePolicy], dict, str]] = [
        (ConfPO, {"loss": "ipo"}, "not defined on this base loss"),
        (TIDPO, {"loss": "simpo"}, "not defined on this base loss"),
        (ConfPO, {"loss": "dpo", "gamma": 1.0}, "SimPO's margin"),
        (SePO, {"beta": math.nan}, "beta must be"),
        (TIDPO, {"span": "prompt"}, "span must be"),
    ]
    for kind, options, message in refused:
        with pytest.raises(ConfigError, match=message):
            kind(**options)


def test_missing_inputs_are_refused_by_name() -> None:
    case = Pairs((1, 1), (3, 2), "right", 0)
    batch = case.batch(reference=None, model=decoder(0))
    with pytest.raises(ConfigError, match="reference model's token log-probabilities"):
        ConfPO(loss="dpo").loss(batch, batch.log_probs, case.weights())
    batch = case.batch(model=decoder(0))
    with pytest.raises(ConfigError, match="plain forward of the reference"):
        TIDPO(tdpo_alpha=0.5).loss(batch, batch.log_probs, case.weights())
    with pytest.raises(InputError, match="generator"):
        TIDPO().loss(batch, batch.log_probs, case.weights())
    with pytest.raises(InputError, match="chosen rows, then as many rejected"):
        weighted_simpo_losses(torch.zeros(3, 4), torch.ones(3, 4), beta=1.0, gamma=0.0)
    with pytest.raises(InputError, match="no prompt or no chosen response"):
        prompts_of({"input_ids": torch.ones(1, 3)}, torch.zeros(1, 3).bool())
    scores = case.batch(log_probs=case.log_probs().masked_fill(case.mask, math.nan))
    with pytest.raises(NumericalError, match="not finite"):
        ConfPO(PolicySettings("budget")).weights(scores)
