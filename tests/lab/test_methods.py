"""Policies of supervised fine-tuning: numbers by hand, directions, budgets, invariances."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from alphatoken.errors import ConfigError
from alphatoken.model.attention import AttentionStatistics
from alphatoken.model.protocol import AttentionCall
from alphatoken.select.masks import keep_count
from alphatoken.train import AlphaSFTTrainer, AlphaTrainer
from alphatoken.train.log_prob_proxy import top_entropy
from alphatoken.train.policies import find_policy, policy
from alphatoken.train.policy import PolicyBatch, PolicySettings, PolicyStage, TokenPolicy
from alphatoken.train.sft import padded_batch
from alphatoken_lab.methods.dft import DFT
from alphatoken_lab.methods.eaft import EAFT
from alphatoken_lab.methods.flow import Flow
from alphatoken_lab.methods.gce import GCE
from alphatoken_lab.methods.loss_truncation import LossTruncation
from alphatoken_lab.methods.preference import PreferencePolicy
from alphatoken_lab.methods.prift import PriFT
from alphatoken_lab.methods.rho_1 import Rho1
from alphatoken_lab.methods.sstoken import SsToken, prompt_attention
from alphatoken_lab.methods.talr import TALR
from tests.integration import tiny_training as tiny
from tests.lab.small import stage
from tests.options_page import arguments, every_method
from tests.property.test_policies import batch, on_tokens

SIDES = ("left", "right")


def attention_of(query: Tensor, key: Tensor, mask: Tensor | None = None) -> AttentionStatistics:
    return AttentionStatistics(AttentionCall(torch.nn.Identity(), query, key, key, mask, scale=1.0))


def test_rho_1_by_hand() -> None:
    """Excess losses 2, -1, 0.5 | -3, 1; the best ceil(0.6 * 5) = 3 of the batch, signed.

    Proves: Rho-1 (exact), against numbers by hand.
    """
    of = batch(
        [[3.0, 1.0, 2.5], [0.5, 2.0]],
        columns={"reference_losses": [[1.0, 2.0, 2.0], [3.5, 1.0]]},
    )
    assert on_tokens(Rho1().scores(of), of) == [[2.0, -1.0, 0.5], [-3.0, 1.0]]
    assert on_tokens(Rho1().weights(of), of) == [[1, 0, 1], [0, 1]]
    assert on_tokens(Rho1(ratio=0.2).weights(of), of) == [[1, 0, 0], [0, 0]]
    assert float(Rho1().kept_tokens(of)) == 3  # known before the forward


def test_rho_1_by_response() -> None:
    """Means 1, 2 and -1 of three responses: the second whole, then the first, up to the budget.

    Proves: Rho-1 (exact), against numbers by hand.
    """
    of = batch(
        [[3.0, 1.0, 2.0], [2.0, 4.0], [5.0]],
        columns={"reference_losses": [[0.0, 2.0, 1.0], [1.0, 1.0], [6.0]]},
    )
    policy = Rho1(ratio=0.5, unit="response")
    assert on_tokens(policy.scores(of), of) == [[1.0, 1.0, 1.0], [2.0, 2.0], [-1.0]]
    assert on_tokens(policy.weights(of), of) == [[1, 0, 0], [1, 1], [0]]
    assert float(policy.kept_tokens(of)) == 3
    assert on_tokens(Rho1(ratio=0.8, unit="response").weights(of), of) == [[1, 1, 1], [1, 1], [0]]
    with pytest.raises(ConfigError, match="unit of Rho-1"):
        Rho1(unit="row")


def test_talr_by_hand() -> None:
    """Sequence means 2 and 1, tau 1.5: weights exp(-l / 1.5), at least 0.01.

    Proves: TALR (exact), against numbers by hand.
    """
    of = batch([[1.0, 3.0], [0.5, 0.5, 2.0], [9.0]])
    policy = TALR()
    assert float(policy.temperature(of)) == 2.0  # the median of 2, 1 and 9
    expected = [[math.exp(-x / 2) for x in row] for row in ([1.0, 3.0], [0.5, 0.5, 2.0], [9.0])]
    expected[2][0] = max(expected[2][0], 0.01)
    for row, wanted in zip(on_tokens(policy.weights(of), of), expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-6)
    low = TALR(tau=0.5).weights(of)
    assert on_tokens(low, of)[2] == pytest.approx([0.01])
    assert on_tokens(low, of)[0] == pytest.approx([math.exp(-2), 0.01])
    token = TALR(tau="token_median", w_min=0.0)
    assert float(token.temperature(of)) == pytest.approx(1.5)  # of .5 .5 1 2 3 9
    assert float(TALR().temperature(batch([[0.0, 0.0]]))) == 1e-6


def test_dft_by_hand() -> None:
    """Proves: DFT (exact), against numbers by hand."""
    of = batch([[1.0, 3.0], [0.5]])
    assert on_tokens(DFT().weights(of), of) == [
        pytest.approx([math.exp(-1), math.exp(-3)]),
        pytest.approx([math.exp(-0.5)]),
    ]
    kept = on_tokens(DFT(PolicySettings("budget", 0.3)).weights(of), of)
    assert kept == [[0, 0], [1]]


@given(
    st.lists(st.floats(0.01, 6.0), min_size=1, max_size=5),
    st.sampled_from([1e-6, 0.3, 0.7, 1.0]),
)
def test_gce_is_the_gradient_of_its_loss(losses: list[float], q: float) -> None:
    """Of (1 - p^q) / q over log-probabilities; at q = 1 DFT's, towards 0 cross-entropy's.

    Proves: GCE (exact), against autograd of the written loss.
    """
    of = batch([losses])
    leaf = of.log_probs.clone().requires_grad_()
    p = leaf.exp()
    (((1 - p**q) / q) * of.mask).sum().backward()
    policy = GCE(q=q)
    weights = policy.weights(of)
    # w dl = -w d log p
    assert leaf.grad is not None
    torch.testing.assert_close(-weights, leaf.grad, rtol=1e-9, atol=1e-12)
    if q == 1.0:
        assert torch.equal(weights, DFT().weights(of))
    if q == 1e-6:
        torch.testing.assert_close(weights, of.mask.to(weights), rtol=0, atol=1e-5)


def test_gce_at_a_budget_takes_likely_tokens_first() -> None:
    of = batch([[1.0, 3.0], [0.5]])
    kept = GCE(PolicySettings("budget", 0.3)).weights(of)
    assert on_tokens(kept, of) == [[0, 0], [1]]


@given(
    st.lists(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=5), min_size=1, max_size=4),
    st.sampled_from([0.1, 0.2, 0.4, 0.75]),
)
def test_loss_truncation_is_a_sort(losses: list[list[float]], drop: float) -> None:
    """The ceil((1 - c) N) lowest losses of what is ranked together, of equal ones the first.

    Proves: loss truncation (exact), against a sort.
    """
    of = batch(losses)
    flat = [(loss, i) for i, loss in enumerate(x for row in losses for x in row)]
    count = math.ceil((1 - Fraction(str(drop))) * len(flat))
    kept = {i for _, i in sorted(flat)[:count]}
    policy = LossTruncation(drop=drop)
    weights = [x for row in on_tokens(policy.weights(of), of) for x in row]
    assert weights == [float(i in kept) for i in range(len(flat))]
    assert float(policy.kept_tokens(of)) == count
    assert policy.denominator == "response"


def test_loss_truncation_by_response() -> None:
    """Means 3, 1 and 2 of three responses; of five tokens three are kept, the second's first.

    Proves: loss truncation (exact), against numbers by hand.
    """
    of = batch([[3.0, 3.0], [1.0, 1.0], [2.0]])
    policy = LossTruncation(drop=0.4, unit="response")
    assert on_tokens(policy.weights(of), of) == [[0, 0], [1, 1], [1]]


def truncated_step(model: Any, unit: str, drop: float, rate: float) -> dict[str, Tensor]:
    """Weights after one step of SGD on eight rows, of which the highest losses are left out."""
    rows = [torch.tensor([row["input_ids"], row["labels"]]) for row in tiny.tokenised(8)]
    losses = []
    for ids, labels in rows:
        own = F.cross_entropy(
            model(input_ids=ids[None]).logits[0, :-1], labels[1:], reduction="none"
        )
        losses.append(own[labels[1:] != -100])
    ranks = [
        own.detach() if unit == "token" else own.detach().mean().expand_as(own) for own in losses
    ]
    order = sorted(range(len(every := torch.cat(ranks))), key=lambda place: float(every[place]))
    kept = order[: math.ceil((1 - Fraction(str(drop))) * len(every))]
    (torch.cat(losses)[kept].sum() / len(every)).backward()
    return {name: p.detach() - rate * p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["sft", "plain"])
@pytest.mark.parametrize("unit", ["token", "response"])
@pytest.mark.parametrize("rows", [8, 2])
def test_loss_truncation_is_of_the_step(tmp_path: Path, rows: int, unit: str, kind: str) -> None:
    """However a step is cut into micro-batches, and whatever a micro-batch has of high losses.

    Proves: loss truncation of an accumulated step (exact), against autograd of the kept losses.
    """
    made = tiny.made(
        AlphaSFTTrainer if kind == "sft" else AlphaTrainer, tmp_path, policy="loss-truncation",
        policy_options={"drop": 0.4, "unit": unit}, train_dataset=tiny.tokenised(8), max_steps=1,
        per_device_train_batch_size=rows, gradient_accumulation_steps=8 // rows, optim="sgd",
        max_grad_norm=0.0, learning_rate=0.5,
        **({} if kind == "sft" else {"data_collator": tiny.padded}),
    )  # fmt: skip
    expected = truncated_step(tiny.model(), unit, 0.4, 0.5)
    made.train()
    for name, weight in tiny.weights(made.model).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-6)


@pytest.mark.parametrize("narrow", [False, True])
def test_losses_of_a_step_are_of_a_forward_without_dropout(tmp_path: Path, narrow: bool) -> None:
    """In the run's precision; TRL's running metrics have nothing of it.

    Proves: losses that a step is ranked by (exact), against log_softmax in evaluation mode.
    """
    batches = list[PolicyBatch]()

    class Watched(LossTruncation):
        def scores(self, batch: PolicyBatch) -> Tensor:
            batches.append(batch)
            return super().scores(batch)

    trainer = tiny.made(
        AlphaSFTTrainer, tmp_path, policy=Watched(), model=tiny.model(dropout=0.5), bf16=narrow,
        train_dataset=tiny.tokenised(4), max_steps=1, per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer.train()
    assert len(batches) == 2
    own = tiny.model().eval()
    for ranked in batches:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            inputs = {name: ranked.inputs[name] for name in ("input_ids", "attention_mask")}
            logits = own(**inputs).logits
        losses = F.cross_entropy(
            logits[:, :-1].float().transpose(1, 2), ranked.labels[:, 1:], reduction="none"
        )
        torch.testing.assert_close(-ranked.log_probs[:, 1:], losses, rtol=0, atol=1e-5)
    assert not trainer._metrics["eval"]


def test_prift_by_hand(tmp_path: Path) -> None:
    """exp(-l) of the start model's losses, whatever the current model finds.

    Proves: PriFT (exact), against numbers by hand.
    """
    of = batch([[1.0, 3.0], [0.5]], columns={"start_losses": [[0.25, 2.0], [1.5]]})
    expected = [pytest.approx([math.exp(-0.25), math.exp(-2.0)]), pytest.approx([math.exp(-1.5)])]
    assert on_tokens(PriFT().weights(of), of) == expected
    assert on_tokens(PriFT(PolicySettings("budget", 0.3)).weights(of), of) == [[1, 0], [0]]
    model = tiny.model(layers=1)
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]}]
    table = PriFT().prepare(stage(tmp_path, rows, model))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([rows[0]["input_ids"]])).logits[0, :-1]
    losses = F.cross_entropy(logits, torch.tensor([6, 7, 8]), reduction="none")
    assert table.columns["start_losses"].tolist() == pytest.approx(losses.tolist(), rel=1e-5)


def test_eaft_by_hand() -> None:
    """Of two tokens at 1/4 and 3/4 and others far below, of three alike, and of one alone.

    Proves: EAFT (exact), against numbers by hand.
    """
    rare = -80.0
    logits = torch.tensor([
        [0.0, math.log(3), rare, rare],
        [0.0, 0.0, 0.0, rare],
        [9.0, rare, rare, rare],
    ], dtype=torch.float64)  # fmt: skip
    two = math.log(4) - 0.75 * math.log(3)
    assert top_entropy(logits, 2).tolist() == pytest.approx([two, math.log(2), 0.0])
    assert top_entropy(logits, 3).tolist() == pytest.approx([two, math.log(3), 0.0])
    assert torch.equal(top_entropy(logits, 9), top_entropy(logits, 4))

    def entropy(k: int) -> Tensor:
        # At the prompt there is some as well: it has no weight.
        return torch.cat([torch.full((2,), 7.0), top_entropy(logits, k)])[None]

    of = batch([[1.0, 2.0, 9.0]], entropy=entropy)
    found = on_tokens(EAFT(k=3).weights(of), of)[0]
    assert found == pytest.approx([two / math.log(3), 1.0, 0.0])
    square = on_tokens(EAFT(k=3, alpha=2.0).weights(of), of)[0]
    assert square == pytest.approx([x**2 for x in found])
    # Of the three alike two count: an entropy of all three, over log 2, would be above 1.
    assert on_tokens(EAFT(k=2).weights(of), of)[0] == pytest.approx([two / math.log(2), 1.0, 0.0])
    kept = EAFT(PolicySettings("budget", 0.3), k=3).weights(of)
    assert on_tokens(kept, of) == [[0, 1, 0]]
    assert EAFT().k == 20
    assert float(EAFT().weights(of)[0, 2]) == pytest.approx(two / math.log(20), rel=1e-6)


def test_sstoken_by_hand() -> None:
    """Uniform causal attention: token t gives 2 / (t + 1) to the two prompt tokens.

    Proves: ssToken (exact), against numbers by hand.
    """
    query, key = torch.zeros(1, 2, 5, 3), torch.zeros(1, 1, 5, 3)
    of = batch(
        [[0.5, 1.5, 1.0]],
        columns={"initial_losses": [[1.0, 1.0, 1.25]]},
        attention=attention_of(query, key),
    )
    seen = prompt_attention(attention_of(query, key), torch.tensor([[1, 1, 0, 0, 0]]).bool())
    assert seen[0].tolist() == pytest.approx([1, 1, 2 / 3, 2 / 4, 2 / 5])
    # REL = 0.5, -0.5, 0.25: scaled by the sample to 1, 0, 0.75.
    expected = [0.5 + 1 / 3, 0.25, 0.375 + 0.2]
    found = SsToken().scores(of)
    assert found[0, 2:].tolist() == pytest.approx(expected, abs=1e-6)
    assert on_tokens(SsToken(ratio=0.5).weights(of), of) == [[1, 0, 1]]
    only = SsToken(gamma=0.5, attention_only_steps=1, ratio=0.5)
    assert on_tokens(only.weights(of), of) == [[1, 1, 0]]


def test_prompt_attention_averages_heads() -> None:
    """Two query heads on one key head, against a dense softmax.

    Proves: ssToken (exact), against dense softmax.
    """
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, 4, 7, 5, generator=generator, dtype=torch.float64)
    key = torch.randn(2, 2, 7, 5, generator=generator, dtype=torch.float64)
    prompt = torch.tensor([[1, 1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0]]).bool()
    logits = torch.einsum("bhkd,bhtd->bhkt", query, key.repeat_interleave(2, 1))
    dense = torch.softmax(logits.masked_fill(~torch.ones(7, 7).bool().tril(), -torch.inf), -1)
    expected = (dense * prompt[:, None, None]).sum(-1).mean(1)
    assert torch.allclose(prompt_attention(attention_of(query, key), prompt), expected, atol=1e-12)


def seven_rows(folder: Path) -> PolicyStage:
    """Rows of 5 to 11 tokens, one of them of two turns, under a float64 model."""
    rows = []
    generator = torch.Generator().manual_seed(5)
    for i in range(7):
        ids = torch.randint(4, 40, (5 + i,), generator=generator).tolist()
        labels = [-100, -100, *ids[2:]]
        if i == 3:  # two turns
            labels[4] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return stage(folder, rows, tiny.model().double())


def losses_of(found: PolicyStage) -> list[Tensor]:
    """-log p of the response tokens of each row, read off the logits."""
    every = []
    for row in found.rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        with torch.no_grad():
            logits = found.model(input_ids=ids).logits[0]
        chosen = F.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
        every.append(chosen[labels[1:] != -100])
    return every


@pytest.mark.parametrize("normalize", [False, True])
def test_flow_by_hand(tmp_path: Path, normalize: bool) -> None:
    """w_i = exp(-f_i / median f), read back for a batch in another order and padding.

    Proves: FLOW (exact), against numbers by hand.
    """
    found = seven_rows(tmp_path)
    losses = losses_of(found)
    means = [float(row.mean()) for row in losses]
    tau = sorted(means)[3]
    weights = [math.exp(-f / tau) for f in means]
    assert weights[means.index(tau)] == pytest.approx(math.exp(-1))
    if normalize:
        counts = [len(row) for row in losses]
        mean = sum(w * n for w, n in zip(weights, counts, strict=True)) / sum(counts)
        weights = [w / mean for w in weights]
    flow = Flow(normalize_weights=normalize)
    table = flow.prepare(found)
    order = [5, 3, 0]
    inputs = padded_batch([found.rows[i] for i in order], 0, "cpu")
    mask = inputs["labels"] != -100
    columns = table.columns_of(inputs, mask, flow.needs.columns)
    of = PolicyBatch(inputs, inputs["labels"], mask, -mask.double(), [slice(0, 3)], columns)
    for i, row in zip(order, on_tokens(flow.weights(of), of), strict=True):
        assert row == pytest.approx([weights[i]] * len(losses[i]), abs=1e-6)
    assert float(flow.kept_tokens(of)) == pytest.approx(float(flow.weights(of).sum()))


def test_flow_by_token_and_temperature(tmp_path: Path) -> None:
    """Proves: FLOW (exact), against numbers by hand."""
    found = seven_rows(tmp_path)
    table = Flow(level="token", tau=2.0).prepare(found)
    expected = torch.cat(losses_of(found)).div(-2).exp()
    assert torch.allclose(torch.as_tensor(table.columns["flow_weights"]), expected, atol=1e-6)


def test_flow_budget_over_the_data_set(tmp_path: Path) -> None:
    found = seven_rows(tmp_path)
    flow = Flow(PolicySettings(mode="budget", keep_ratio=0.35))
    table = flow.prepare(found)
    assert int(table.columns["flow_kept"].sum()) == keep_count(0.35, table.tokens)
    means = [float(row.mean()) for row in losses_of(found)]
    kept = table.sums(table.columns["flow_kept"])
    assert kept[means.index(min(means))] == len(losses_of(found)[means.index(min(means))])
    assert kept[means.index(max(means))] == 0


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    ratio=st.sampled_from([0.1, 0.3, 0.5, 0.55, 1.0]),
    scope=st.sampled_from(["batch", "sequence"]),
    seed=st.integers(0, 99),
)
def test_budget_is_met_exactly(sizes: list[int], ratio: float, scope: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.rand(n, generator=generator).tolist() for n in sizes]
    of = batch(rows, columns={"reference_losses": [[0.5] * n for n in sizes]})
    settings = PolicySettings("budget", ratio)
    groups = [sum(sizes)] if scope == "batch" else sizes
    wanted = sum(keep_count(ratio, n) for n in groups)
    for kind in (TALR, Rho1):
        made = type("Scoped", (kind,), {"scope": scope})(settings)
        assert float(made.weights(of).sum()) == wanted
        assert float(made.kept_tokens(of)) == wanted


ROWS = [[0.3, 2.0, 1.1, 0.2], [2.5, 0.4], [0.7, 0.6, 1.9]]
COLUMNS = {
    "reference_losses": [[1.0, 0.2, 1.5, 0.1], [0.6, 0.9], [0.6, 1.6, 0.3]],
    "initial_losses": [[2.0, 2.2, 1.5, 0.9], [2.6, 0.1], [1.6, 0.6, 2.3]],
}


class Rho1BySequence(Rho1):
    scope = "sequence"


def with_attention(of: PolicyBatch) -> PolicyBatch:
    """Attention that depends on a token's place in its row, not in the batch."""
    width = of.mask.shape[1]
    real = of.inputs["attention_mask"].bool()
    place = (real.long().cumsum(-1) * real).double()
    query = torch.stack([place, place.sqrt()], -1)[:, None]
    key = torch.stack([place.cos(), place.sin()], -1)[:, None]
    causal = torch.ones(width, width).bool().tril()
    mask = causal & real[:, None, None, :]
    return PolicyBatch(**{**vars(of), "attention": attention_of(query, key, mask)})


@pytest.mark.parametrize("made", [TALR(), Rho1(), Rho1BySequence(), SsToken()])
def test_padding_moves_nothing(made: TokenPolicy) -> None:
    """Left or right, and three columns more."""
    found = []
    for side in SIDES:
        for extra in (0, 3):
            of = with_attention(batch(ROWS, columns=COLUMNS, side=side, extra=extra))
            found.append(on_tokens(made.weights(of), of))
    for other in found[1:]:
        for row, wanted in zip(other, found[0], strict=True):
            assert row == pytest.approx(wanted, abs=1e-12)


def test_later_prompts_count_in_sstoken() -> None:
    """Two turns: the second prompt is a prompt to the second response, and not to the first."""
    query, key = torch.zeros(1, 1, 6, 2), torch.zeros(1, 1, 6, 2)
    mask = torch.tensor([[0, 1, 0, 0, 1, 1]]).bool()
    of = PolicyBatch(
        inputs={"input_ids": mask.long()},
        labels=torch.where(mask, 1, -100),
        mask=mask,
        log_probs=-mask.double(),
        rank_groups=[slice(0, 1)],
        columns={"initial_losses": mask.double()},
        attention=attention_of(query, key),
    )
    found = SsToken(gamma=0.0).scores(of)[0]
    assert found[[1, 4, 5]].tolist() == pytest.approx([1 / 2, 3 / 5, 3 / 6])


def _outside(within: str) -> list[float]:
    """Numbers just outside of a range in words: "above 0, to 1", "from 2", "0 to 1"."""
    numbers = []
    if lowest := re.search(r"(above|from) (\d+)", within):
        numbers.append(float(lowest[2]) - (0 if lowest[1] == "above" else 1))
    if highest := re.search(r"(below|\bto) (\d+)", within):
        numbers.append(float(highest[2]) + (0 if highest[1] == "below" else 0.5))
    if re.match(r"\d+ to", within):
        numbers.append(float(within[0]) - 0.5)
    return numbers


def test_numbers_outside_of_a_methods_range_are_refused_by_name() -> None:
    tried = 0
    for _, kind in every_method():
        made, fixed = (
            (find_policy("confpo"), {"loss": "simpo"}) if kind is PreferencePolicy else (kind, {})
        )
        for argument in arguments(kind):
            for number in _outside(argument.within):
                value = int(number) if isinstance(argument.default, int) else number
                with pytest.raises(ConfigError, match=argument.name.removeprefix("warmup_")):
                    made(**{**fixed, argument.name: value})
                tried += 1
    assert tried > 40


def test_bad_input() -> None:
    for name, more in (("eaft", {"alpha": 0}), ("flow", {"level": "word"})):
        with pytest.raises(ConfigError, match=next(iter(more))):
            policy(name, **more)


def test_needs_that_depend_on_settings_are_asked_of_the_policy(tmp_path: Path) -> None:
    """Of FLOW they are a property; a run of it makes no values."""
    pytest.importorskip("trl")
    from alphatoken.train import AlphaSFTConfig

    options = AlphaSFTConfig(str(tmp_path), policy="flow", bf16=False)
    assert not options.needs_values
    assert options.weighs
