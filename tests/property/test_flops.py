"""Regression guard on cost: FLOPs counted, not seconds, against formulas of the model's shape.

``torch.utils.flop_counter`` counts matrix products and attention kernels as they run. Where the
work is settled the count must equal its formula; where a cheaper way could be found, it must lie
between what the estimator cannot do without and what it takes today, plus two percent. The
formulas are in ``benchmarks/floors.py``; what they are worth is tested here too, on counts of
plain PyTorch that no estimator takes part in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from alphatoken import Scorer, ScorerConfig
from alphatoken.estimate import contraction
from alphatoken.estimate.estimators import SELF_ONLY
from alphatoken.model import batch_slice
from alphatoken.model.batch_slice import LENGTH, ROWS
from alphatoken.scoring import label as label_module
from benchmarks.floors import Shape
from benchmarks.measure import flops
from benchmarks.models import Size, fisher
from benchmarks.peak import observed_step, plain_step
from tests.places import nightly

ROOM = 1.02
"""What a count may exceed today's by."""

SMALL = Size(64, 6, vocabulary=96, heads=4, rows=2, length=48)
DEEP = Size(128, 28, vocabulary=512, heads=4, length=64)
"""As deep as the targets' model, so that ratios to a step are like its."""

CAPTURED = ("alphatoken", "direct", "path", "same_layer_hop", "paper_literal")


@dataclass(frozen=True)
class Bounds:
    """What a count must lie between."""

    least: float
    most: float

    def admit(self, counted: float, what: str) -> None:
        """Fail, naming the excess, unless the count lies within."""
        assert counted >= self.least, (
            f"{what}: {counted:.0f} FLOPs counted, {self.least - counted:.0f} fewer than the "
            "estimator cannot do without: the counter misses work, or the formula is wrong"
        )
        assert counted <= self.most, (
            f"{what}: {counted:.0f} FLOPs counted, {counted / self.most - 1:.1%} above the bound"
        )


@cache
def model_of(size: Size) -> Any:
    return size.model()


def ready(size: Size, estimator: str, layers: int, *, retention: bool = False) -> Scorer:
    """A scorer whose G and V are built and whose proofs have been given."""
    model = model_of(size)
    made = Scorer(
        model,
        size.batch(rows=3, seed=1),
        fisher(model, layers) if retention else None,
        ScorerConfig(estimator=estimator, layers=layers),
    )
    made.warn = False
    made.score(size.batch())
    return made


def observed_values(made: Scorer, size: Size, **options: Any) -> float:
    """FLOPs of the values of an observed forward, the forward not counted."""
    batch = size.batch()
    with made.observe() as observed:
        logits = model_of(size)(input_ids=batch["input_ids"], use_cache=False).logits
        return flops(lambda: observed.values(logits, batch["labels"], **options))


# --- formulas ------------------------------------------------------------------------------------


def predictions(size: Size) -> int:
    """Response tokens of a batch."""
    return int((size.batch()["labels"][:, 1:] != -100).sum())


def head_of(shape: Shape, tokens: int) -> int:
    """One product with the head, of so many positions."""
    return shape.head * tokens // shape.tokens


def own_forward(shape: Shape, tokens: int) -> int:
    """Its head is asked about response tokens only, and once a row to see that it is the last."""
    return shape.forward - shape.head + head_of(shape, tokens + shape.rows)


def scores(shape: Shape) -> int:
    """One T x T product of one attention call."""
    return shape.attention // 2


def diagonal(shape: Shape) -> int:
    """One product along the diagonal only."""
    return 2 * shape.rows * shape.heads * shape.length * shape.head_dim


def value_part(shape: Shape) -> int:
    """Contraction of one layer's value projection, its dot products included."""
    d_in, d_out = shape.qkv[-1]
    return 2 * shape.tokens * d_out * (d_in + 1)


def attention_work(shape: Shape, estimator: str) -> int:
    """Per scored layer, beside the ordinary backward; rows of one block (T <= 64).

    Self-only: the log-sum-exp and four products along the diagonal. Value-Propagation: weights
    again, their product with the errors (of key/value heads for the head mean), and one more
    contraction. Same-layer hop: the attention backward once more, with the diagonal taken off, and
    contractions at the key and the value projection.
    """
    own = scores(shape) + 4 * diagonal(shape)
    mean = scores(shape) * shape.kv_heads // shape.heads
    return {
        "path": 0,
        "direct": own,
        "alphatoken": own + 2 * scores(shape) + value_part(shape),
        "paper_literal": 2 * scores(shape) + mean + value_part(shape),
        "same_layer_hop": own
        + shape.attention_backward
        + 4 * diagonal(shape)
        + 2 * value_part(shape),
    }[estimator]


def captured(shape: Shape, layers: int, estimator: str, tokens: int) -> Bounds:
    """Values of an observed forward; the errors below the head are formed, and are the step's."""
    least = shape.partial_backward(layers, head=False) + head_of(shape, tokens)
    least += shape.contraction(layers)
    today = least + shape.dots(layers) + layers * attention_work(shape, estimator)
    return Bounds(least, ROOM * today)


def label(shape: Shape, layers: int, tokens: int, *, observed: bool) -> Bounds:
    """One dual forward; of an observed pass from the first scored layer on.

    Today: the head at the one position of a row that the model itself asks it about.
    """
    trunk = shape.dual_forward(layers) - shape.forward - shape.head
    tangents = trunk + head_of(shape, tokens)
    own = layers * (2 * shape.tokens * shape.block + shape.attention)
    forward = head_of(shape, tokens) + (own if observed else shape.forward - shape.head)
    today = forward + tangents + head_of(shape, 2 * shape.rows)
    return Bounds(tangents, ROOM * today)


# --- the formulas themselves ---------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, Size(48, 2, 64, 4, length=33, ffn=80, kv_heads=1)])
def test_a_training_step_costs_what_its_shape_says(size: Size) -> None:
    model = size.model()
    shape = size.shape(model)
    batch = size.batch()
    assert flops(lambda: plain_step(model, batch)) == shape.step
    with torch.no_grad():
        assert flops(lambda: model(batch["input_ids"], use_cache=False)) == shape.forward


def gemma(length: int) -> tuple[Any, dict[str, torch.Tensor], Shape]:
    """A Gemma 3 in small: heads wider than the model, a tied head of most weights, windows."""
    config = Gemma3TextConfig(
        vocab_size=2000, hidden_size=24, intermediate_size=40, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=8,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], query_pre_attn_scalar=16,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config).train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.randint(0, 2000, (2, length))
    labels = ids.where(torch.arange(length) >= length // 3, -100)
    return model, {"input_ids": ids, "labels": labels}, Shape.of(model, 2, length)


def test_a_gemma_costs_what_its_shape_says() -> None:
    model, batch, shape = gemma(24)
    assert shape.head > shape.forward / 3
    assert flops(lambda: plain_step(model, batch)) == shape.step
    config = ScorerConfig(estimator="path", layers=2)
    made = Scorer(model, batch, None, config)
    made.score(batch)
    tokens = int((batch["labels"][:, 1:] != -100).sum())
    exact = own_forward(shape, tokens) + head_of(shape, tokens)
    exact += shape.partial_backward(2, head=False) + shape.contraction(2)
    assert flops(lambda: made.score(batch)) - exact in (0, shape.dots(2))
    made = Scorer(
        model,
        batch,
        None,
        ScorerConfig("label", layers="all", parameters="all", derivative="forward_mode"),
    )
    made.score(batch)
    responses = shape.with_responses(int((batch["labels"] != -100).sum()))
    assert responses.head < shape.head
    counted = flops(lambda: made.score(batch))
    Bounds(responses.dual_forward_all, ROOM * shape.dual_forward_all).admit(counted, "label, all")


def test_the_error_backward_costs_what_its_shape_says() -> None:
    model = model_of(SMALL)
    shape = SMALL.shape(model)
    kept: list[torch.Tensor] = []
    handles = [
        module.register_forward_hook(lambda _m, _a, output: kept.append(output))
        for layer in model.model.layers[-2:]
        for module in layer.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    loss = model(**SMALL.batch(), use_cache=False).loss
    for handle in handles:
        handle.remove()
    assert len(kept) == 2 * len(shape.linears)
    counted = flops(lambda: torch.autograd.grad(loss, kept, retain_graph=True))
    assert counted == shape.partial_backward(2)


# --- the scorer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3, 6])
@pytest.mark.parametrize("estimator", CAPTURED)
def test_captured_estimators(estimator: str, layers: int) -> None:
    shape = SMALL.shape(model_of(SMALL))
    bounds = captured(shape, layers, estimator, predictions(SMALL))
    made = ready(SMALL, estimator, layers)
    seen = observed_values(made, SMALL)
    bounds.admit(seen, f"{estimator}, observed, K={layers}")
    batch = SMALL.batch()
    # A forward of its own adds that forward, and nothing else.
    assert flops(lambda: made.score(batch)) - seen == own_forward(shape, predictions(SMALL))


def test_path_is_one_partial_backward_and_one_contraction() -> None:
    shape = SMALL.shape(model_of(SMALL))
    for layers in (1, 3):
        exact = shape.partial_backward(layers, head=False) + shape.contraction(layers)
        exact += head_of(shape, predictions(SMALL))
        counted = observed_values(ready(SMALL, "path", layers), SMALL)
        # The dot products with the errors are counted or not, by the way they are written.
        assert counted - exact in (0, shape.dots(layers))


@pytest.mark.parametrize("layers", [1, 3, 6])
def test_label_is_one_dual_forward(layers: int) -> None:
    shape = SMALL.shape(model_of(SMALL))
    made, batch = ready(SMALL, "label", layers), SMALL.batch()
    own = flops(lambda: made.score(batch))
    tokens = predictions(SMALL)
    label(shape, layers, tokens, observed=False).admit(own, f"label, K={layers}")
    assert own >= own_forward(shape, tokens)  # its own forward is part of it
    seen = observed_values(made, SMALL)
    label(shape, layers, tokens, observed=True).admit(seen, f"label, observed, K={layers}")


@pytest.mark.parametrize("estimator", ["alphatoken", "path", "label"])
@pytest.mark.parametrize("layers", [1, 3, 6])
def test_building_G_is_one_forward_and_one_backward_to_the_first_scored_layer(
    estimator: str, layers: int
) -> None:
    made = ready(SMALL, estimator, layers)
    shape = replace(SMALL.shape(model_of(SMALL)), rows=3)

    def build() -> None:
        made.refresh()
        assert made.direction.adaptation

    tokens = int((SMALL.batch(rows=3, seed=1)["labels"][:, 1:] != -100).sum())
    forward = own_forward(shape, tokens) + head_of(shape, tokens)  # the head's errors with it
    backward = shape.backward(layers, embeddings=False) - shape.head
    assert flops(build) == forward + backward


FIRST = Size(64, 6, vocabulary=96, heads=4, rows=8, length=128)
"""A batch of which a slice is a small part."""


def proofs(shape: Shape, layers: int, estimator: str) -> int:
    """What proving takes on a batch of this shape.

    A forward and a backward down to the first layer, to see that no prediction looks ahead. Then
    a forward; the errors at the scored linears, their sums of outer products and autograd's
    gradients, which are compared; for self-only estimators their errors of one token a row. Of
    label a forward, autograd's gradients, and a dual forward.
    """
    ahead = shape.forward + shape.partial_backward(FIRST.depth)
    if estimator == "label":
        return ahead + shape.backward(layers, embeddings=False) + 4 * shape.forward
    outer = shape.contraction(layers)  # as many multiply-adds, in another order
    ordinary = shape.partial_backward(layers) + shape.backward(layers, embeddings=False)
    own = shape.partial_backward(layers) + layers * attention_work(shape, "direct")
    return ahead + shape.forward + ordinary + outer + (own if estimator in SELF_ONLY else 0)


def first_use(estimator: str, layers: int, *, retention: bool = False) -> float:
    """FLOPs of the first score beyond those of a second one that builds M anew."""
    model, batch = model_of(FIRST), FIRST.batch()
    drift = fisher(model, layers) if retention else None
    objective = "stability" if retention else "both"
    config = ScorerConfig(estimator, objective=objective, layers=layers)
    made = Scorer(model, None if retention else FIRST.batch(seed=1), drift, config)
    made.warn = False
    first = flops(lambda: made.score(batch))
    made.refresh()
    return first - flops(lambda: made.score(batch))


@pytest.mark.parametrize(("layers", "retention"), [(1, True), (6, False)])
@pytest.mark.parametrize("estimator", [*CAPTURED, "label"])
def test_the_first_use_costs_a_slice_more(estimator: str, layers: int, retention: bool) -> None:
    shape = FIRST.shape(model_of(FIRST))
    counted = first_use(estimator, layers, retention=retention)
    piece = replace(shape, rows=ROWS, length=LENGTH)
    label = estimator == "label"
    least = 0.6 * proofs(piece, layers, "label") if label else 0.8 * proofs(piece, layers, "path")
    Bounds(least, ROOM * proofs(piece, layers, estimator)).admit(counted, f"first use, {estimator}")
    assert counted < shape.step / 4


def test_proofs_of_whole_batches_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_slice, "LENGTH", FIRST.length)
    piece = replace(FIRST.shape(model_of(FIRST)), rows=ROWS, length=LENGTH)
    with pytest.raises(AssertionError, match="above the bound"):
        Bounds(0, ROOM * proofs(piece, 6, "path")).admit(first_use("path", 6), "first use")


def test_the_total_alone_costs_one_contraction_whatever_its_sides() -> None:
    shape = SMALL.shape(model_of(SMALL))
    one_side = observed_values(ready(SMALL, "alphatoken", 3), SMALL)
    both = ready(SMALL, "alphatoken", 3, retention=True)
    assert observed_values(both, SMALL, components=False) == one_side
    second = observed_values(both, SMALL, components=True) - one_side
    least = shape.contraction(3)
    Bounds(least, ROOM * (least + shape.dots(3) + 3 * value_part(shape))).admit(second, "second")


def test_the_interaction_is_two_products_a_linear() -> None:
    made, batch = ready(SMALL, "alphatoken", 3), SMALL.batch()
    shape = SMALL.shape(model_of(SMALL))
    with made.observe(interaction=True) as observed:
        logits = model_of(SMALL)(input_ids=batch["input_ids"], use_cache=False).logits
        observed.values(logits, batch["labels"])
        counted = flops(observed.interaction)
    n = int((batch["labels"][:, 1:] != -100).sum())
    assert counted == 3 * sum(2 * n * n * (i + o) for i, o in shape.linears)


def test_scoring_is_flat_in_the_validation_set_once_G_is_built() -> None:
    counted = []
    for rows in (1, 16):
        config = ScorerConfig()
        made = Scorer(model_of(SMALL), SMALL.batch(rows=rows, seed=1), None, config)
        batch = SMALL.batch()
        made.score(batch)
        counted.append(flops(lambda made=made, batch=batch: made.score(batch)))
    assert counted[0] == counted[1]


@pytest.mark.parametrize("estimator", ["alphatoken", "direct", "path", "label"])
def test_all_but_attention_is_linear_in_T(estimator: str) -> None:
    """A quadratic through three lengths: its square term is no more than whole T x T products."""
    lengths, counted = (128, 256, 512), []
    model = Size(32, 3, 64, 4, length=512).model()
    for length in lengths:
        size = Size(32, 3, 64, 4, length=length)
        config = ScorerConfig(estimator=estimator, layers="all")
        made, batch = Scorer(model, size.batch(seed=1), None, config), size.batch()
        made.score(batch)
        counted.append(flops(lambda made=made, batch=batch: made.score(batch)))
    first, second, third = counted
    square = ((third - second) / 256 - (second - first) / 128) / 384
    one = scores(Size(32, 3, 64, 4, length=1).shape(model))  # of one layer, per T^2
    # Forward 2 products; backward 5 and the log-sum-exp; dual: the log-sum-exp, 2, and 4 tangents.
    products = {"path": 7, "direct": 8, "alphatoken": 8, "label": 8}[estimator]
    assert 0 < square <= 3 * one * products


# --- ratios to a training step -------------------------------------------------------------------

TODAY = {
    ("alphatoken", 1): 1.0219,
    ("alphatoken", 3): 1.0734,
    ("alphatoken", 28): 1.7172,
    ("direct", 3): 1.0690,
    ("path", 3): 1.0674,
    ("label", 3): 1.1085,
    ("label", 28): 1.9787,
}
"""Observed step over plain step as counted on ``DEEP``; lower an entry when its estimator gets
cheaper, so that it stays so."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "layers"),
    [pytest.param(*case, marks=nightly if case[1] == 3 else ()) for case in TODAY],
)
def test_the_overhead_of_an_observed_step_stays(estimator: str, layers: int) -> None:
    model, batch = model_of(DEEP), DEEP.batch()
    made = ready(DEEP, estimator, layers)
    counted = flops(lambda: observed_step(made, model, batch, components=True))
    excess = counted / flops(lambda: plain_step(model, batch)) - 1
    # Room on the excess alone: two percent of a step would hide a quarter of what scoring costs.
    assert 0 < excess <= ROOM * (TODAY[estimator, layers] - 1), f"{1 + excess:.4f} of a step"


def test_label_values_of_all_layers_cost_no_more_than_a_training_step() -> None:
    model, batch = model_of(DEEP), DEEP.batch()
    made = ready(DEEP, "label", 28)
    step = flops(lambda: plain_step(model, batch))
    assert flops(lambda: made.score(batch)) <= ROOM * step  # 0.979 today


# --- the guard can fail --------------------------------------------------------------------------


def _twice(function: Callable[..., Any]) -> Callable[..., Any]:
    def doubled(*args: Any, **kwargs: Any) -> Any:
        function(*args, **kwargs)
        return function(*args, **kwargs)

    return doubled


@pytest.mark.parametrize(
    ("module", "name"),
    [(contraction, "contract"), (torch.autograd, "grad")],
    ids=["contracts twice", "two backward passes"],
)
@pytest.mark.parametrize("estimator", ["path", "direct", "alphatoken"])
def test_double_work_is_caught(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, estimator: str
) -> None:
    made = ready(SMALL, estimator, 3)
    bounds = captured(SMALL.shape(model_of(SMALL)), 3, estimator, predictions(SMALL))
    bounds.admit(observed_values(made, SMALL), "as it is")
    monkeypatch.setattr(module, name, _twice(getattr(module, name)))
    with pytest.raises(AssertionError, match="above the bound"):
        bounds.admit(observed_values(made, SMALL), "doubled")


def test_a_second_dual_forward_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ready(SMALL, "label", 3)
    bounds = label(SMALL.shape(model_of(SMALL)), 3, predictions(SMALL), observed=True)
    monkeypatch.setattr(label_module, "label_values", _twice(label_module.label_values))
    with pytest.raises(AssertionError, match="above the bound"):
        bounds.admit(observed_values(made, SMALL), "label, doubled")


def test_a_graph_that_reaches_too_far_is_caught() -> None:
    """One layer more than was asked for is above the bound, one fewer below what is needed."""
    shape = SMALL.shape(model_of(SMALL))
    for layers, message in ((4, "above the bound"), (2, "fewer than")):
        counted = observed_values(ready(SMALL, "path", layers), SMALL)
        with pytest.raises(AssertionError, match=message):
            captured(shape, 3, "path", predictions(SMALL)).admit(counted, "another scope")
