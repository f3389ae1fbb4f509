"""Label values by finite differences against the oracle's; weights are restored bitwise."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis.strategies import sampled_from
from torch import Tensor, nn

from alphatoken import AlphaTokenWarning, FisherDrift, Scorer, ScorerConfig
from alphatoken.errors import NumericalError, UnsupportedError
from alphatoken.estimate import differences, label, temporary_weights
from alphatoken.estimate.differences import Differences, DirectionalDerivative, precision_obstacle
from alphatoken.estimate.forward_mode import label_values
from alphatoken.estimate.label import Label
from alphatoken.estimate.temporary_weights import ShiftedWeights
from alphatoken.model.batch import LabelledBatch, read_batch
from alphatoken.model.protocol import find_adapter
from alphatoken.oracle import gradients
from tests.places import nightly
from tests.property.architectures import BY_NAME, plain_forward
from tests.property.decoder import ReferenceAdapter, ReferenceDecoder
from tests.property.profiles import budget
from tests.property.setups import (
    Setup,
    bits,
    forward_of,
    label_truth,
    quiet,
    refusal,
    setups,
    unchanged,
)
from tests.property.strategies import CASE, ONE, PADDED, SHARED, TIED
from tests.property.test_sharded import FlatSharding
from tests.property.tolerance import close

FORMS = ("central", "one_sided")
as_in_float32 = mock.patch.object(label, "_in_float64", mock.Mock(return_value=False))
"""Inside, "auto" chooses as in float32, and is held to what float64 can show."""


def config(derivative: str = "auto", **options: Any) -> ScorerConfig:
    return ScorerConfig("label", parameters="all", derivative=derivative, **options)


def rows_of(seed: int, rows: int = 2, length: int = 16) -> dict[str, Tensor]:
    """Tokens that all have a label."""
    ids = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def wanted(model: ReferenceDecoder, setup: Setup) -> tuple[Tensor, Tensor]:
    """The oracle's label values over all parameters, and the sums of their absolute terms."""
    parameters = dict(model.named_parameters())
    m = gradients.validation_gradient(model, forward_of(model), setup.case.validation, parameters)
    return label_truth(setup, model, parameters, m)


def far_drift(model: nn.Module) -> FisherDrift:
    """V = W - W_ref, with a reference that is 50 away in every entry."""
    return FisherDrift(
        {n: torch.ones_like(p) for n, p in model.named_parameters()},
        {n: p.detach() - 50.0 for n, p in model.named_parameters()},
    )


def off(values: Tensor, expected: Tensor) -> float:
    return float((values - expected).norm() / expected.norm())


@given(setups(), sampled_from(FORMS))
@example(Setup(SHARED), "central")
@example(Setup(PADDED), "central")
@example(Setup(PADDED), "one_sided")
@budget(0.15, least=2)
def test_differences_are_the_label_values(setup: Setup, form: str) -> None:
    """Central to 1e-7 of the absolute terms, one-sided to 1e-5; the weights to the bit.

    The stated error, Richardson's times 3, bounds the true one, also where it was made on a part
    of the rows.

    Proves: eq. grad_alignment (exact), against ``label_values``, ``validation_gradient``,
    ``per_token_gradients``, ``response_tokens``.
    """
    model = setup.case.model()
    before, (expected, scale) = bits(model), wanted(model, setup)
    values = Scorer(model, setup.case.validation, config=config(form)).score(setup.case.batch)
    close(values.total, expected, scale, 1e-7 if form == "central" else 1e-5, name=form)
    assert values.derivative == form
    assert unchanged(model, before)
    # What the oracle itself rounds is nobody's error.
    true = max(0.0, float((values.total - expected).norm() - 1e-12 * scale.norm()))
    assert true <= 3 * values.error * float(expected.norm())


def test_in_float32_the_stated_error_bounds_the_true_one() -> None:
    """Two sides of M, observed and alone, on a Llama in float32 against its copy in float64.

    Proves: in float32 the stated error bounds the true one (approximate), against forward mode in
    float64.
    """
    model, batch = llama(), rows_of(1, 3, 24)
    validation = {name: rows[:1] for name, rows in batch.items()}
    exact = Scorer(
        llama().double(), [validation], config=config("forward_mode")
    ).score(batch).total  # fmt: skip
    for form, most in (("central", 2e-3), ("one_sided", 1e-2)):
        values = Scorer(model, [validation], config=config(form)).score(batch)
        true = off(values.total, exact)
        assert true <= min(3 * values.error, most)
        assert values.error <= most


def hardly_reached(batch: Mapping[str, Tensor], exact: Tensor, count: int = 2) -> dict[str, Tensor]:
    """The batch with labels at the tokens alone whose values are the least."""
    size = exact.abs().masked_fill(batch["labels"] == -100, torch.inf)
    size[:, 0] = torch.inf
    least = size.flatten().argsort()[:count]
    labels = torch.full_like(batch["labels"], -100).flatten()
    labels[least] = batch["labels"].flatten()[least]
    return {**batch, "labels": labels.view_as(batch["labels"])}


@pytest.mark.parametrize("form", FORMS)
def test_the_stated_error_is_that_of_its_batch(form: str) -> None:
    """Also of batches that are not looked at: rounding weighs more where M hardly reaches.

    Proves: the stated error is that of its batch (approximate), against forward mode in float64.
    """
    model, drawn = llama(), rows_of(3, 12)["input_ids"].split(2)
    batches = [{"input_ids": ids, "labels": ids} for ids in drawn]
    scorer = Scorer(model, batches[:1], config=config(form))
    m = {name: x.double() for name, x in scorer.direction.adaptation.items()}
    double = find_adapter(llama().double())
    ages, errors = [], []
    for batch in batches:
        exact = label_values(double, read_batch(batch), m)
        for rows in (batch, hardly_reached(batch, exact)):
            mask = rows["labels"] != -100
            mask[:, 0] = False
            try:
                values = scorer.score(rows)
            except UnsupportedError:  # as it is said for what cannot be stated
                continue
            assert off(values.total[mask], exact[mask]) <= 3 * values.error
            ages.append(values.error_age)
            errors.append(values.error)
    assert max(ages) > 0
    assert max(errors) > 3 * errors[0]


def test_rows_that_m_hardly_reaches_are_taken_by_forward_mode_and_no_others() -> None:
    """Where only differences may be taken, an error that is small beside other rows is stated.

    Proves: rows that m hardly reaches are taken by forward mode and no others (approximate),
    against forward mode.
    """
    model, batch = llama(), rows_of(3)
    scorer = Scorer(model, [batch], config=config())
    exact = scorer.score(batch)
    assert exact.derivative == "central"
    few = hardly_reached(batch, exact.total, 1)
    # The token's value is less than what rounding adds to it.
    few_exact = float(exact.total[few["labels"] != -100].abs())
    noise = exact.error * float(exact.total[exact.mask].square().mean().sqrt())
    with mock.patch.object(differences, "TOLERANCE", 0.5 * noise / few_exact):
        with pytest.warns(AlphaTokenWarning, match="taken by forward mode.*on this batch"):
            assert scorer.score(few).derivative == "forward_mode"
        assert scorer.score(batch).derivative == "central"
        with quiet():  # said once
            assert scorer.score(few).derivative == "forward_mode"
        only = Scorer(model, [batch], config=config("central"))
        only.score(batch)
        stated = only.score(few)
    assert stated.derivative == "central"
    assert stated.error > 0.5 * noise / few_exact


def test_a_batch_without_values_puts_no_look_off() -> None:
    """A look that is due on a batch that M does not reach is taken on the next.

    Proves: a batch without values puts no look off (exact), against ages that were stated.
    """
    model = llama()
    rows = [torch.arange(2, 12)[None], torch.arange(30, 40)[None]]
    batches = [{"input_ids": ids, "labels": ids} for ids in rows]
    embedding = replace(config("central"), parameters="model.embed_tokens.weight")
    scorer = Scorer(model, batches[:1], config=embedding)
    turns = torch.randint(0, 2, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    ages = []
    for turn in turns:
        values = scorer.score(batches[turn])
        assert bool(values.total.any()) == (turn == 0)
        ages += [values.error_age] if turn == 0 else []
    assert max(ages) <= 2 * differences.CHECKED_EVERY


def test_a_batch_of_another_size_is_looked_at() -> None:
    """Smaller values as well as larger ones, before a look is due.

    Proves: a batch of another size is looked at (exact), against ages that were stated.
    """
    model, batch = llama(), rows_of(5)
    ids, rows = batch["input_ids"], read_batch(batch)
    m = dict(Scorer(model, [batch]).direction.adaptation)
    differences_of = Differences(find_adapter(model))
    for _ in range(8):
        values = differences_of.values(rows, m, "central").values
    assert differences_of.values(rows, m, "central").age > 0
    size = values[rows.mask].square().mean().sqrt()
    sizes = values.abs().where(rows.mask, size)
    place = sizes.argmin()
    assert float(sizes.flatten()[place]) < size / 3
    labels = torch.full_like(ids, -100).flatten()
    labels[place] = ids.flatten()[place]
    one = read_batch({"input_ids": ids, "labels": labels.view_as(ids)})
    with mock.patch.object(differences, "TOLERANCE", 10.0):
        assert differences_of.values(one, m, "central").age == 0


def test_a_truncation_grows_with_values_that_were_not_looked_at() -> None:
    """It is taken to be as large, relative to the values, on larger ones, and no smaller.

    Proves: a truncation grows with values that were not looked at (exact), against errors by hand.
    """
    step = differences.Step(1e-3, 1.0, 0.0, 0.0, truncation=1e-3, sizes=(0.5, 1.0))
    errors = [step.error(size) for size in (0.5, 1.0, 2.0, 100.0)]
    assert errors == pytest.approx([2e-3, 1e-3, 1e-3, 1e-3])


def quotients(ahead: list[float], twice: list[float]) -> differences._Quotients:
    """Of losses whose central quotients at h = 1 and at 2 are these."""
    sides = {1.0: ahead, -1.0: [-x for x in ahead], 2.0: [2 * x for x in twice]}
    sides[-2.0] = [-x for x in sides[2.0]]
    known = {h: torch.tensor([losses]).double() for h, losses in sides.items()}
    mask = torch.ones(1, len(ahead), dtype=torch.bool)
    return differences._Quotients(known.__getitem__, mask, "central", None, list)


def test_curvature_of_one_large_token_is_no_jump() -> None:
    """A token counts beside its own value; a small one beside those of the batch.

    Proves: curvature of one large token is no jump (exact), against quotients by hand.
    """
    few = [1.0] * 63
    assert not quotients([100.0, *few], [103.0, *few]).jumps(1.0)
    assert quotients([100.0, *few], [160.0, *few]).jumps(1.0)
    assert quotients([1.0, *few], [1.2, *few]).jumps(1.0)


@pytest.mark.parametrize("side", [1, -1])
def test_an_infinite_loss_on_either_side_is_named(side: int) -> None:
    """Proves: an infinite loss on either side is named (exact), against a loss that was put
    there.
    """
    model, batch = llama(), rows_of(5)
    rows, m = read_batch(batch), dict(Scorer(model, [batch]).direction.adaptation)
    differences_of = Differences(find_adapter(model))
    differences_of.values(rows, m, "central")
    (step,) = differences_of._steps.values()
    true = differences._Quotients.at

    def at(self: Any, length: float) -> Tensor:
        losses = true(self, length)
        return losses.index_fill(1, torch.tensor([3]), torch.inf) if length * side > 0 else losses

    assert step.length > 0
    with mock.patch.object(differences._Quotients, "at", at):
        error = refusal(partial(differences_of.values, rows, m, "central"))
    assert isinstance(error, NumericalError), "an infinite loss is handed on"


def test_few_tokens_may_agree_by_chance() -> None:
    """A single token's quotients at h and at 2 h do; the stated error bounds the true one still.

    The rows on which the step was found have more tokens to say, and so has what rounds a loss.

    Proves: few tokens may agree by chance (approximate), against forward mode in float64.
    """
    model, batch = llama(), rows_of(5)
    ids, rows = batch["input_ids"], read_batch(batch)
    m = dict(Scorer(model, [batch], config=config("one_sided")).direction.adaptation)
    double = {name: x.double() for name, x in m.items()}
    exact = label_values(find_adapter(llama().double()), rows, double)
    differences_of = Differences(find_adapter(model))
    differences_of.values(rows, m, "one_sided")
    (step,) = differences_of._steps.values()
    new = differences.Step(step.length, step.norm, step.relative, step.rounding)
    with mock.patch.object(differences, "TOLERANCE", 10.0):  # whatever is stated is handed out
        for row, token in exact.nonzero().tolist():
            labels = torch.full_like(ids, -100)
            labels[row, token] = ids[row, token]
            differences_of._steps["one_sided", 0] = new  # so that this batch is looked at
            one = read_batch({"input_ids": ids, "labels": labels})
            values = differences_of.values(one, m, "one_sided")
            assert values.age == 0
            assert values.error >= step.relative
            true = abs(float(values.values[row, token] / exact[row, token]) - 1)
            assert true <= 3 * values.error


def test_the_stated_error_of_a_step_has_truncation_and_rounding() -> None:
    """Both in parts of the values' size, together no less than on the rows of the step.

    Proves: the stated error of a step (exact), against numbers written by hand.
    """
    step = differences.Step(length=0.5, norm=1.0, relative=0.01, rounding=0.3)
    assert step.error(2.0, 0.4) == pytest.approx(0.25)
    assert step.error(2.0, 0.0) == pytest.approx(0.15)
    assert step.error(100.0, 0.4) == pytest.approx(0.01)
    assert step.error(0.0, 0.4) == 0.0


def test_the_stated_error_is_that_of_the_worse_side() -> None:
    """Of V here, which is of another length and direction than G.

    Proves: the stated error is that of the worse side (exact), against errors that were stated.
    """
    model = ONE.model()
    scorer = Scorer(
        model, ONE.validation, far_drift(model), config("central", max_relative_drift=None)
    )
    stated = []
    exact = Differences.values

    def kept(*arguments: Any, **options: Any) -> DirectionalDerivative:
        derivative = replace(exact(*arguments, **options), error=1e-3 * (1 + len(stated)), age=7)
        stated.append(derivative.error)
        return derivative

    scorer.score(ONE.batch)
    with quiet(), mock.patch.object(Differences, "values", kept):
        values = scorer.score(ONE.batch)
    assert len(stated) == 2
    assert values.error == max(stated)
    assert values.error_age == 7


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


@as_in_float32
def test_the_observed_forward_is_one_side_of_the_difference() -> None:
    """One forward beside it and no more, once the step and the base were looked at."""
    setup = Setup(ONE)
    model = ONE.model().train()
    expected, scale = wanted(model, setup)
    scorer = Scorer(model, ONE.validation, config=config())
    for again in range(3):
        with quiet(), scorer.observe() as observed:
            logits = model(**ONE.inputs)
            with counted(model) as calls:
                values = observed.values(logits, ONE.batch["labels"])
        assert values.derivative == "one_sided"
        close(values.total, expected, scale, 1e-5, name="observed")
        if again == 2:  # the first is looked at, and the one after it
            assert calls == [1]


@contextmanager
def counted(model: nn.Module) -> Iterator[list[int]]:
    """How often the model runs inside."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    with model.register_forward_hook(count):
        yield calls


@as_in_float32
def test_an_observed_forward_with_dropout_is_no_base() -> None:
    """Proves: an observed forward with dropout is no base (exact), against forward mode."""
    model, batch = llama(attention_dropout=0.3).double(), rows_of(1, 3, 24)
    ids = batch["input_ids"]
    exact = Scorer(model, [batch], config=config("forward_mode")).score(batch).total
    model.train()
    for way, form in (("one_sided", "one_sided"), ("auto", "central")):
        with quiet(), Scorer(model, [batch], config=config(way)).observe() as observed:
            values = observed.values(model(input_ids=ids).logits, ids)
        assert values.derivative == form
        assert off(values.total, exact) < 5e-3  # Llama's norms are in float32


@as_in_float32
def test_an_observed_forward_of_coarser_losses_is_no_base() -> None:
    """Losses rounded in a way that ours are not would be multiplied by 1 / h."""
    model = ONE.model()
    expected, scale = wanted(model, Setup(ONE))
    scorer = Scorer(model, ONE.validation, config=config())
    for _ in range(2):
        with quiet(), scorer.observe() as observed:
            # As another kernel in training would give them.
            with model.register_forward_hook(lambda m, a, z: z + 1e-7 * torch.sin(1e3 * z)):
                logits = model(**ONE.inputs)
            values = observed.values(logits, ONE.batch["labels"])
        close(values.total, expected, scale, 1e-5, name="coarse base")
    assert values.derivative == "central"
    scorer.refresh()  # as one that a resumed run builds: it knows nothing of coarse losses
    with quiet(), scorer.observe() as observed:
        values = observed.values(model(**ONE.inputs), ONE.batch["labels"])
    assert values.derivative == "one_sided"


@as_in_float32
def test_an_observed_forward_whose_scores_were_cast_is_no_base() -> None:
    """Losses of a float64 model, rounded to float32 by the loop, would be divided by h.

    Proves: an observed forward whose scores were cast is no base (approximate), against
    ``label_values``.
    """
    model = ONE.model()
    expected, scale = wanted(model, Setup(ONE))
    scorer = Scorer(model, ONE.validation, config=config())
    for _ in range(3):
        with quiet(), scorer.observe() as observed:
            values = observed.values(model(**ONE.inputs).float(), ONE.batch["labels"])
        close(values.total, expected, scale, 1e-5, name="cast")
        assert values.derivative == "central"


@pytest.mark.parametrize("graph", [True, False])
def test_an_observed_forward_in_16_bits_is_no_base(graph: bool) -> None:
    """On a batch that no error is looked at on, along both sides of M: autocast, over by now.

    With a graph within the blocks alone, where what the linears give shows it; else around all.

    Proves: an observed forward in 16 bits is no base (approximate), against forward mode in
    float64.
    """
    batch = rows_of(1, 3, 24)
    ids = batch["input_ids"]
    options = {"max_relative_drift": None, "stability_weight": 0.01, "uncovered": "skip"}

    def scorer(model: Any, way: str) -> Scorer:
        drift = far_drift(model)
        return Scorer(model, [batch], drift, replace(config(way, **options), parameters="linears"))

    model = llama()
    with quiet():
        exact = scorer(llama().double(), "forward_mode").score(batch).total
        found = scorer(model, "one_sided")
        for _ in range(2):
            found.score(batch)
        with found.observe() as observed, ExitStack() as stack:
            for part in model.model.layers if graph else [model]:
                casting = torch.autocast("cpu")(part.forward)
                stack.enter_context(mock.patch.object(part, "forward", casting))
            with torch.set_grad_enabled(graph):
                logits = model(input_ids=ids).logits.float()
            stack.close()
            total = observed.values(logits, ids).total
    assert off(total, exact) < 1e-2
    # It was not tried as one either, after which no later forward would be.
    assert isinstance(found.estimator, Label)
    assert found.estimator._bases


def test_weighted_rows_and_both_sides_of_m() -> None:
    """Values scale with their token's weight; M's sides are taken apart, each with its step."""
    model = ONE.model()
    drift = far_drift(model)
    options = {"max_relative_drift": None, "stability_weight": 0.01}
    weights = torch.linspace(-2.0, 2.0, ONE.batch["labels"].numel()).view(2, -1).double()
    found = []
    for way in ("forward_mode", "central"):
        scorer = Scorer(model, ONE.validation, drift, config(way, **options))
        with quiet():
            found.append(scorer.score(ONE.batch, token_weights=weights))
    exact, values = found
    for name in ("adaptation", "stability", "total"):
        one, other = getattr(values, name), getattr(exact, name)
        close(one, other, other.abs().max(), 1e-7, name=name)
    assert exact.error == 0.0 < values.error < 1e-6


def test_a_side_has_the_step_that_it_has_alone() -> None:
    """V here is as long as G, so that a step of G's would be kept for it.

    Proves: a side has the step that it has alone (exact), against V alone, bit by bit.
    """
    model = ONE.model()
    own = {"max_relative_drift": None}
    drift = far_drift(model)
    sides = Scorer(model, [ONE.batch], drift, config("central", **own)).direction
    assert sides.stability is not None
    longer = torch.stack([x.norm() for x in sides.adaptation.values()]).norm()
    longer = longer / torch.stack([x.norm() for x in sides.stability.values()]).norm()
    drift = FisherDrift({n: longer * f for n, f in drift.fisher.items()}, drift.reference)
    with quiet():
        both = Scorer(model, [ONE.batch], drift, config("central", **own)).score(ONE.batch)
    alone = Scorer(model, None, drift, config("central", objective="stability", **own))
    assert torch.equal(both.stability, alone.score(ONE.batch).stability)


@pytest.mark.parametrize("memory", ["one buffer", "shards"])
def test_lora_on_an_embedding_leaves_its_padding_row(memory: str) -> None:
    """Its factor is looked up in a transposed view, and held by a module that nobody calls."""
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(
        r=2, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(llama(pad_token_id=1).double(), options).eval()
    ids = torch.randint(2, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    ids[:, 3:9:2] = 1
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    forward = plain_forward(model)
    m = gradients.validation_gradient(model, forward, [batch])
    expected = gradients.label_values(model, forward, batch, m)
    if memory == "one buffer":  # as ZeRO 1 and 2 hold them
        trained = [p for p in model.parameters() if p.requires_grad][::-1]
        parts = torch.cat([p.data.flatten() for p in trained]).split([p.numel() for p in trained])
        for p, part in zip(trained, parts, strict=True):
            p.data = part.view_as(p)
    sharding = FlatSharding(model) if memory == "shards" else None
    scorer = Scorer(model, [batch], config=config("central"), sharding=sharding)
    scorer.pin("these weights")
    assert off(scorer.score(batch).total, expected) < 5e-3  # Llama's norms are in float32


def checked() -> LabelledBatch:
    return read_batch(ONE.batch, max_length=64)


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_m_does_not_reach_have_values_of_zero(form: str) -> None:
    """An embedding of tokens that the batch does not hold; a batch that holds them has its own."""
    model = ONE.model()
    m = {"embedding.weight": torch.zeros_like(model.embedding.weight)}
    tokens = set(ONE.batch["input_ids"].unique().tolist())
    other = next(i for i in range(ONE.config.vocabulary) if i not in tokens)
    m["embedding.weight"][other] = 1.0
    zero = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for unreached in (m, zero):
        nothing = Differences(ReferenceAdapter(model)).values(checked(), unreached, form)
        assert nothing.error == 0.0
        assert not nothing.values.any()
    batch = {**ONE.batch, "input_ids": ONE.batch["input_ids"].clone()}
    batch["input_ids"][:, :2] = other
    there = read_batch(batch, max_length=64)
    values = Differences(ReferenceAdapter(model)).values(there, m, form, shown=checked).values
    assert off(values, gradients.label_values(model, forward_of(model), batch, m)) < 1e-5


def direction(model: nn.Module, factor: float = 1.0) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    m = gradients.validation_gradient(model, forward_of(model), ONE.validation, parameters)
    return {name: factor * x for name, x in m.items()}


def test_the_step_is_kept_until_m_changes_its_length() -> None:
    """Proves: the step is kept until m changes its length (exact), against ``label_values``,
    ``validation_gradient``.
    """
    model = ONE.model()
    differences_of = Differences(ReferenceAdapter(model))
    expected, scale = wanted(model, Setup(ONE))
    counts = []
    for factor in (1.0, 1.2, 1.5, 4.0, 1.5):
        m = direction(model, factor)
        with counted(model) as calls:
            values = differences_of.values(checked(), m, "central").values
        close(values, factor * expected, factor * scale, 1e-7, name="kept step")
        counts.append(calls[0])
    first, looked, kept, longer, shorter = counts
    assert (looked, kept) == (4, 2)
    assert min(first, longer, shorter) > 6


def test_the_error_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon, then on every CHECKED_EVERY-th batch, by the forwards at twice the step."""
    monkeypatch.setattr(differences, "CHECKED_EVERY", 2)
    model, m = ONE.model(), direction(ONE.model())
    differences_of = Differences(ReferenceAdapter(model))
    counts = []
    for _ in range(8):
        with counted(model) as calls:
            differences_of.values(checked(), m, "central")
        counts.append(calls[0])
    # After one batch, after two more, and so on up to the most.
    assert counts[1:] == [4, 2, 4, 2, 4, 2, 4]


def test_a_forward_that_draws_is_refused() -> None:
    """No step makes losses exact that differ from call to call; "auto" takes forward mode."""
    model = CASE.model()
    noise = torch.Generator().manual_seed(0)
    handle = model.register_forward_hook(
        lambda module, args, out: out + 1e-3 * torch.randn(out.shape, generator=noise).double()
    )
    scorer = Scorer(model, CASE.validation, config=config("central"))
    with pytest.raises(UnsupportedError, match=r"not exact enough.*forward_mode"):
        Differences(ReferenceAdapter(model)).values(checked(), direction(model), "central")
    handle.remove()
    assert scorer.score(CASE.batch).derivative == "central"


def test_more_curved_rows_are_seen_in_the_stated_error() -> None:
    """The step is found on validation rows; a batch that is more curved says so by its error.

    Proves: more curved rows are seen in the stated error (approximate), against forward mode.
    """
    model = llama().double()
    model.lm_head.weight.data *= 4
    calm = rows_of(2, 2, 12)
    ids = calm["input_ids"]
    # Rows that the model is nearly sure of are curved the most, relative to their values.
    sure = model(ids).logits.argmax(-1).roll(1, -1)
    curved = {"input_ids": ids, "labels": sure}
    exact = Scorer(model, [calm], config=config("forward_mode")).score(curved).total
    scorer = Scorer(model, [calm], config=config("one_sided"))
    own = scorer.score(calm)
    scorer.refresh()
    values = scorer.score(curved)
    assert off(values.total, exact) <= 3 * values.error
    assert values.error > 1.5 * own.error


def test_a_refreshed_scorer_is_a_new_one() -> None:
    """To the bit, whatever it has valued before: as a resumed run goes on from a checkpoint.

    Proves: a refreshed scorer is a new one (exact), against a new scorer.
    """
    model = ONE.model()
    scorer = Scorer(model, ONE.validation, config=config("one_sided"))
    scorer.score(ONE.batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    scorer.refresh()
    fresh = Scorer(model, ONE.validation, config=config("one_sided"))
    assert torch.equal(scorer.score(ONE.batch).total, fresh.score(ONE.batch).total)


@as_in_float32
def test_a_refreshed_scorer_forgets_what_a_batch_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer(ONE.model(), ONE.validation, config=config())
    assert scorer.score(ONE.batch).derivative == "central"
    with monkeypatch.context() as coarse:
        coarse.setattr(differences, "TOLERANCE", 1e-20)
        with pytest.warns(AlphaTokenWarning, match="taken by forward mode"):
            assert scorer.score(ONE.batch).derivative == "forward_mode"
    assert scorer.score(ONE.batch).derivative == "forward_mode"
    scorer.refresh()
    assert scorer.score(ONE.batch).derivative == "central"


def test_values_do_not_depend_on_the_rows_that_came_first() -> None:
    model = ONE.model()
    one, other = (Scorer(model, ONE.validation, config=config()) for _ in range(2))
    one.score(ONE.validation[0])
    assert torch.equal(one.score(ONE.batch).total, other.score(ONE.batch).total)


@pytest.mark.parametrize("fails", ["error", "interrupt"])
def test_weights_come_back_after_an_exception_in_a_shifted_forward(fails: str) -> None:
    """Proves: weights come back after an exception in a shifted forward (exact), against the
    weights before.
    """
    model = TIED.model()
    before, calls = bits(model), [0]
    scorer = Scorer(model, TIED.validation, config=config("central"))

    def fail(*_: Any) -> None:
        if unchanged(model, before):
            return
        calls[0] += 1
        if calls[0] == 2:
            if fails == "error":
                raise RuntimeError("a kernel failed")
            os.kill(os.getpid(), signal.SIGINT)

    handle = model.head.register_forward_hook(fail)
    raised = RuntimeError if fails == "error" else KeyboardInterrupt
    with pytest.raises(raised):
        scorer.score(TIED.batch)
    assert calls[0] == 2
    assert unchanged(model, before)
    handle.remove()
    assert scorer.score(TIED.batch).derivative == "central"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_a_signal_raises_while_weights_come_back_waits_for_the_last(
    number: signal.Signals,
) -> None:
    """Ctrl-C, or a handler that ends the process when it is preempted.

    Proves: what a signal raises while weights come back waits for the last (exact), against the
    weights before.
    """
    model = ONE.model()
    before = bits(model)
    shift = ShiftedWeights(model, direction(model))
    put, handler, patch = temporary_weights._put, signal.getsignal(number), pytest.MonkeyPatch()

    def end(*_: object) -> None:
        raise SystemExit("preempted")

    def interrupted(parameter: Tensor, memory: Tensor) -> None:
        patch.undo()
        os.kill(os.getpid(), number)
        put(parameter, memory)

    def move() -> None:
        with shift.open():
            shift.to(1.0)
            patch.setattr(temporary_weights, "_put", interrupted)

    if number != signal.SIGINT:
        signal.signal(number, end)
    try:
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
            move()
    finally:
        patch.undo()
        signal.signal(number, handler)
    assert unchanged(model, before)


def test_a_shift_is_what_it_says() -> None:
    """theta + step M from the weights as they were, tied places once; graphs do not see it.

    Proves: a shift is what it says (exact), against the weights before.
    """
    model = TIED.model()
    before, m = bits(model), {n: torch.ones_like(p) for n, p in model.named_parameters()}
    assert model.head.weight is model.embedding.weight
    m["head.weight"] = m["embedding.weight"]
    memory = {n: p.data_ptr() for n, p in model.named_parameters()}
    loss = model(input_ids=TIED.batch["input_ids"]).square().sum()
    shift = ShiftedWeights(model, m)
    with shift.open():
        for step in (0.5, -0.25):
            shift.to(step)
            for name, p in model.named_parameters():
                assert torch.equal(p, before[name] + step)
    assert unchanged(model, before)
    assert memory == {n: p.data_ptr() for n, p in model.named_parameters()}
    loss.backward()  # no tensor that the graph saved was written to


def test_a_tied_weight_moves_once() -> None:
    """Under whichever of its names M has it, and under both.

    Proves: a tied weight moves once (exact), against the weights before.
    """
    model = TIED.model()
    before = model.head.weight.detach().clone()
    one = torch.ones_like(before)
    for m in (
        {"head.weight": one},
        {"embedding.weight": one},
        dict.fromkeys(("head.weight", "embedding.weight"), one),
    ):
        shift = ShiftedWeights(model, m)
        assert shift.direction_norm() == pytest.approx(one.norm().item())
        with shift.open():
            shift.to(0.5)
            assert torch.equal(model.head.weight, before + 0.5)
        assert torch.equal(model.head.weight, before)


def test_auto_takes_differences_over_all_parameters_and_forward_mode_on_top() -> None:
    """In float32; whoever computes in float64 has forward mode everywhere."""
    options: tuple[dict[str, Any], ...] = (
        {"layers": 1}, {"parameters": "all", "layers": "all"}, {"parameters": "linears,*norm*"}
    )  # fmt: skip
    batch = rows_of(1)

    def ways(model: Any) -> list[str | None]:
        scorers = (Scorer(model, [batch], config=ScorerConfig("label", **one)) for one in options)
        return [scorer.score(batch).derivative for scorer in scorers]

    assert ways(llama()) == ["forward_mode", "central", "central"]
    assert ways(llama().double()) == ["forward_mode"] * 3
    mixed = llama().double()
    mixed.model.layers[0].float().requires_grad_(False)
    assert not label._in_float64(mixed)
    assert Scorer(llama(), [batch]).score(batch).derivative is None


@given(setups())
@example(Setup(SHARED))
@example(Setup(TIED))
@budget(0.15, least=2)
def test_auto_in_float64_is_exact_over_all_parameters(setup: Setup) -> None:
    """To forward mode's error, without a stated one of differences.

    Proves: eq. grad_alignment (exact), against ``label_values``, ``validation_gradient``,
    ``per_token_gradients``, ``response_tokens``.
    """
    model = setup.case.model()
    expected, scale = wanted(model, setup)
    values = Scorer(model, setup.case.validation, config=config()).score(setup.case.batch)
    assert (values.derivative, values.error) == ("forward_mode", 0.0)
    close(values.total, expected, scale, 1e-10, name="auto in float64")


def grouped(seed: int) -> tuple[Any, dict[str, Tensor]]:
    """A mixture of experts in float32, under the kernel that transformers takes by itself."""
    model = BY_NAME["mixtral"].build(seed, dtype=torch.float32)
    model.set_experts_implementation("grouped_mm")
    ids = torch.randint(3, 23, (2, 9), generator=torch.Generator().manual_seed(seed))
    return model, {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("options", [{"layers": 1}, {"parameters": "all"}], ids=str)
def test_values_of_a_mixture_are_derivatives(options: dict[str, Any], observed: bool) -> None:
    """And no jumps of its router, at whichever token, under the kernel without forward mode.

    Proves: values of a mixture are derivatives (exact), against ``label_values``.
    """
    model, validation = grouped(1)
    scorer = Scorer(model, [validation], config=ScorerConfig("label", **options))
    m = scorer.direction.adaptation
    for number in range(3):
        batch = grouped(100 + number)[1]
        if observed:
            with scorer.observe() as watched:
                logits = model(input_ids=batch["input_ids"]).logits
                values = watched.values(logits, batch["labels"])
        else:
            values = scorer.score(batch)
        exact = gradients.label_values(model, plain_forward(model), batch, m)
        assert float((values.total - exact).abs().max() / exact.abs().max()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_values_of_a_mixture_are_derivatives_on_many_batches(seed: int) -> None:
    """A router's choice that moved weights change is rare: forty batches of eight models."""
    model, validation = grouped(seed)
    scorer = Scorer(model, [validation], config=ScorerConfig("label", parameters="all"))
    m = scorer.direction.adaptation
    for number in range(40):
        batch = grouped(100 * seed + number)[1]
        if seed % 2:
            with scorer.observe() as watched:
                logits = model(input_ids=batch["input_ids"]).logits
                values = watched.values(logits, batch["labels"])
        else:
            values = scorer.score(batch)
        exact = gradients.label_values(model, plain_forward(model), batch, m)
        assert float((values.total - exact).abs().max() / exact.abs().max()) < 1e-4


def test_differences_of_a_mixture_are_looked_at_token_by_token() -> None:
    """On each batch: where a router's choice changed between h and 2 h, they are refused.

    Proves: differences of a mixture are looked at token by token (approximate), against
    ``label_values``.
    """
    refused = 0
    model, validation = grouped(1)
    scorer = Scorer(model, [validation], config=config("central"))
    m = scorer.direction.adaptation
    for number in range(12):
        batch = grouped(100 + number)[1]
        try:
            values = scorer.score(batch)
        except UnsupportedError:
            refused += 1
            continue
        exact = gradients.label_values(model, plain_forward(model), batch, m)
        assert off(values.total, exact) <= 3 * values.error
        assert values.error_age == 0
    assert 0 < refused < 6


def test_one_small_jump_among_many_tokens_is_seen() -> None:
    """A choice that moved weights change, of a token that weighs nothing in the batch's norm.

    Proves: one small jump among many tokens is seen (exact), against a jump that was put there.
    """
    model, batch = llama().double(), rows_of(1, 8, 48)
    ids = batch["input_ids"]
    weight, jump = model.lm_head.weight, [0.0]
    before = weight.detach().clone()

    def choose(module: nn.Module, args: Any, hidden: Tensor) -> Tensor:
        hidden.topk(1)
        if hidden.shape[:2] != ids.shape:
            return hidden
        moved = (weight.detach() - before)[0, 0].sign()
        added = torch.zeros_like(hidden)
        added[3, 7] = jump[0] * moved * before[ids[3, 8]] / before[ids[3, 8]].square().sum()
        return hidden + added

    model.model.norm.register_forward_hook(choose)
    scorer = Scorer(model, [batch], config=config("central"))
    values = scorer.score(batch)
    assert isinstance(scorer.estimator, Label)
    (step,) = scorer.estimator._differences._steps.values()
    mean = float(values.total[values.mask].square().mean().sqrt())
    jump[0] = 0.5 * mean * step.length  # half a mean value: one percent of the batch's norm
    error = refusal(lambda: scorer.score(batch))
    assert isinstance(error, UnsupportedError), "a jump was taken for a derivative"
    assert "not exact enough on this batch" in str(error)


@as_in_float32
def test_auto_takes_forward_mode_through_a_mixture_of_experts() -> None:
    """Moved weights send some tokens to other experts, and their losses jump.

    Proves: auto takes forward mode through a mixture of experts (exact), against which way is
    taken.
    """
    batch = grouped(4)[1]
    scorer = Scorer(BY_NAME["mixtral"].build(1), [batch], config=config())
    assert scorer.score(batch).derivative == "forward_mode"


def of_16_bits() -> nn.Module:
    model: nn.Module = llama().bfloat16()
    return model


def of_a_frozen_16_bit_layer() -> nn.Module:
    model = llama()
    model.model.layers[0].bfloat16().requires_grad_(False)
    return model  # type: ignore[no-any-return]


def cast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def coarse() -> Any:
    return mock.patch.object(torch, "get_float32_matmul_precision", return_value="high")


@pytest.mark.parametrize(
    ("build", "context", "reason"),
    [
        (of_16_bits, nullcontext, "bfloat16"),
        (of_a_frozen_16_bit_layer, nullcontext, "bfloat16"),
        (llama, cast, "autocast to bfloat16"),
        (llama, coarse, "products of 'high' precision"),
    ],
)
def test_a_shift_that_would_drown_is_refused_with_its_reason(
    build: Callable[[], Any], context: Callable[[], Any], reason: str
) -> None:
    """Proves: a shift that would drown is refused with its reason (exact), against dtypes."""
    model = build()
    with context():
        assert reason in str(precision_obstacle(model, dict(model.named_parameters())))
    assert precision_obstacle(llama(), {}) is None
    # As an offloading device map leaves weights: what is written there is read by nobody.
    away = {"lm_head.weight": model.lm_head.weight.to("meta")}
    assert precision_obstacle(llama(), away) == "lm_head.weight not in memory between forwards"


def test_auto_takes_forward_mode_where_a_shift_would_drown() -> None:
    model, batch = of_16_bits(), rows_of(1, 2, 12)
    assert Scorer(model, [batch], config=config()).score(batch).derivative == "forward_mode"
    with pytest.raises(UnsupportedError, match=r"float32 or wider.*bfloat16.*forward_mode"):
        Scorer(model, [batch], config=config("central")).score(batch)


class Unknown(torch.autograd.Function):
    """The identity, by a kernel that has a backward and no forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def with_hook(function: Callable[[Tensor], Tensor]) -> ReferenceDecoder:
    model = ONE.model()
    model.layers[0].register_forward_hook(lambda module, args, out: function(out))
    return model


def test_a_kernel_without_forward_mode_has_its_values() -> None:
    """By differences; with one warning where forward mode comes first, as in float64."""
    model = with_hook(Unknown.apply)
    expected, scale = wanted(model, Setup(ONE))
    with as_in_float32:
        Scorer(model, ONE.validation, config=config()).score(ONE.batch)
    scorer = Scorer(model, ONE.validation, config=config())
    with pytest.warns(AlphaTokenWarning, match="taken by finite differences") as warned:
        values = scorer.score(ONE.batch)
    assert len(warned) == 1
    assert torch.equal(scorer.score(ONE.batch).total, values.total)
    close(values.total, expected, scale, 1e-7, name="no forward mode")
    scorer = Scorer(model, ONE.validation, config=ScorerConfig("label", layers=1))
    with pytest.warns(AlphaTokenWarning, match="taken by finite differences"):
        values = scorer.score(ONE.batch)
    assert values.derivative == "central"
    plain = Scorer(ONE.model(), ONE.validation, config=ScorerConfig("label", layers=1))
    exact = plain.score(ONE.batch).total
    close(values.total, exact, exact.abs().max(), 1e-7, name="no forward mode, last layer")


def test_a_state_space_model_has_its_values() -> None:
    """Mamba of transformers: no attention, no linear that is called on every position alone."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    model = MambaForCausalLM(MambaConfig(vocab_size=40, **sizes)).eval()
    compare_with_the_oracle(model, model)


# Both trace forward and backward; the second also writes kernels, which takes half a minute.
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=nightly)])
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_model_has_its_values(backend: str) -> None:
    """Alone by a forward of its own, which runs uncompiled; beside a compiled training forward."""
    model = llama()
    model.compile(backend=backend)
    batch = compare_with_the_oracle(model, llama())
    scorer = Scorer(model, [batch], config=config())
    exact = Scorer(llama().double(), [batch], config=config("forward_mode")).score(batch).total
    with quiet(), scorer.observe() as observed:
        values = observed.values(model(input_ids=batch["input_ids"]).logits, batch["labels"])
    assert values.derivative == "one_sided"
    assert off(values.total, exact) < 1e-2


def compare_with_the_oracle(model: Any, plain: Any) -> dict[str, Tensor]:
    """Values of all parameters by "auto" in float32, against one backward a token."""
    ids = torch.randint(0, 40, (2, 10), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "labels": ids}

    forward, parameters = plain_forward(plain), dict(plain.named_parameters())
    m = gradients.validation_gradient(plain, forward, [batch], parameters)
    values = Scorer(model, [batch], config=config()).score(batch)
    assert values.derivative == "central"
    assert off(values.total, gradients.label_values(plain, forward, batch, m)) < 2e-3
    return batch


def straight_through(x: Tensor) -> Tensor:
    """Rounding whose backward is the identity: differences would see the steps."""
    return x + ((4 * x).round() / 4 - x).detach()


@as_in_float32
def test_differences_through_a_detached_part_fall_back() -> None:
    """What trains is what the backward says; forward mode sees it, differences do not."""
    model = with_hook(straight_through)
    expected, scale = wanted(model, Setup(ONE))
    with pytest.warns(AlphaTokenWarning, match="taken by forward mode"):
        values = Scorer(model, ONE.validation, config=config()).score(ONE.batch)
    assert values.derivative == "forward_mode"
    close(values.total, expected, scale, 1e-10, name="straight through")
    with pytest.raises(UnsupportedError, match=r"differences|backward"):
        Scorer(model, ONE.validation, config=config("central")).score(ONE.batch)


@pytest.mark.parametrize("form", ["one_sided", pytest.param("central", marks=pytest.mark.slow)])
def test_the_certificate_allows_the_stated_error_and_no_more(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = Scorer(ONE.model(), ONE.validation, config=config(form))
    with quiet():
        certificate = scorer.verify(ONE.batch, tokens=4)
        assert certificate.passed, str(certificate)
        assert f"by differences ({form})" in str(certificate)
        assert certificate.derivative == form
        least = min(check.tolerance for check in certificate.checks)
        wider = {check.component for check in certificate.checks if check.tolerance > least}
        assert wider == {"total", "adaptation", "stability"}, "the direction is no difference"
        exact = Differences.values

        def wrong(*arguments: Any, **options: Any) -> DirectionalDerivative:
            derivative = exact(*arguments, **options)
            return replace(derivative, values=derivative.values * 1.001)

        monkeypatch.setattr(Differences, "values", wrong)
        assert not scorer.verify(ONE.batch, tokens=4).passed
