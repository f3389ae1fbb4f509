"""How fine the proofs are, what they are asked of, and how often they run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from alphatoken import FisherDrift, Scorer, ScorerConfig
from alphatoken.errors import ModelError, UnsupportedError
from alphatoken.estimate import proofs
from alphatoken.estimate.batch_proofs import argument_kinds, prove_causality
from alphatoken.estimate.derivatives import Derivative, DerivativeProof, _tolerance
from alphatoken.estimate.differences import Differences
from alphatoken.estimate.forward_mode import label_values
from alphatoken.estimate.label import Label
from alphatoken.model.batch import read_batch, token_losses
from alphatoken.model.forward import draws
from alphatoken.model.protocol import find_adapter
from alphatoken.oracle import gradients
from tests.property.architectures import BY_NAME, plain_forward
from tests.property.decoder import ReferenceAdapter, ReferenceDecoder
from tests.property.setups import refusal
from tests.property.strategies import Case, make_batch, make_case
from tests.property.test_proofs import PLAIN


def _pairs(*ahead: tuple[int, int]) -> Tensor:
    """(1, 1, 4, 4) who may look at whom: a causal mask, and these pairs beside it."""
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    for query, key in ahead:
        mask[..., query, key] = True
    return mask


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


KINDS: dict[str, tuple[dict[str, Any], set[str] | None]] = {
    "tokens": ({}, set()),
    "token types": ({"token_type_ids": torch.zeros(1, 4)}, None),
    "a causal mask": ({"attention_mask": _pairs()}, {"causal mask of pairs"}),
    "one pair ahead": ({"attention_mask": _pairs((1, 2))}, None),
    "the same in numbers": ({"attention_mask": _pairs((1, 2)).long()}, None),
    "the same to be added": ({"attention_mask": _added(_pairs((1, 2)), torch.float32)}, None),
    "causal, to be added": (
        {"attention_mask": _added(_pairs(), torch.bfloat16)}, {"causal mask of pairs"}
    ),
    "another tensor": ({"bias": torch.zeros(1, 4)}, None),
    "a flag": ({"is_causal": False}, {"is_causal=False"}),
    "a number": ({"max_length_q": 4, "is_causal": None}, set()),
    "flags of outputs": ({"use_cache": False, "output_router_logits": True}, set()),
    "another object": ({"attention_mask_function": object()}, None),
}  # fmt: skip
"""Arguments beside the tokens, and their kinds; None where each batch has to be proved."""


def leaking(case: Case, size: float) -> ReferenceDecoder:
    """A decoder whose last layer lets tokens see a little of the next one."""
    model = case.model()
    model.layers[-1].register_forward_hook(lambda m, a, out: out + size * out.roll(-1, 1))
    return model


CASE = make_case(("pprrr", "prrrr"), (("pprr",),))


@pytest.mark.parametrize("name", KINDS)
def test_what_arguments_say_of_who_sees_whom(name: str) -> None:
    """Batches of one kind are read alike, and one that may look ahead is of no kind or its own.

    Proves: what arguments say of who sees whom (exact), against arguments by hand.
    """
    given, kinds = KINDS[name]
    ids = torch.ones(1, 4, dtype=torch.long)
    batch = read_batch({"input_ids": ids, "labels": ids})
    batch.inputs.update(given)
    assert argument_kinds(batch) == (None if kinds is None else {"input_ids", *kinds})


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_a_thousandth_of_the_next_token_is_seen(size: float) -> None:
    """A look ahead is found by its size beside the whole gradient, down to rounding.

    Proves: a thousandth of the next token is seen (exact), against a model that does.
    """
    case = make_case(("pprrr", "prrrr"), PLAIN[1])
    batch = read_batch(case.batch)
    error = refusal(lambda: prove_causality(ReferenceAdapter(leaking(case, size)), batch))
    assert isinstance(error, ModelError), "a model that looks ahead passed"
    assert prove_causality(ReferenceAdapter(case.model()), batch)


@pytest.mark.parametrize(
    ("dtype", "off", "refused"),
    [
        (torch.float64, 1e-3, True), (torch.float64, 1e-9, False), (torch.float32, 0.02, True),
        (torch.float32, 1e-6, False),
    ],
)  # fmt: skip
def test_how_far_a_backward_may_be_off(dtype: torch.dtype, off: float, refused: bool) -> None:
    batch = make_batch(("pprrr",), vocabulary=11, seed=1)
    # The library's decoder rounds its norms to float32 whatever the weights are.
    model = CASE.model() if dtype == torch.float64 else BY_NAME["llama"].build(1).to(dtype)
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g * (1 + off))
    scorer = Scorer(model, batch, config=ScorerConfig("label", layers=2))
    error = refusal(lambda: scorer.score(batch))
    assert isinstance(error, UnsupportedError) == refused
    assert refused or error is None


def _compare(proof: DerivativeProof, derivative: Derivative, only: str = "") -> None:
    _, error = proof.compare(derivative, only)
    if error is not None:
        raise error


@pytest.mark.parametrize(("off", "refused"), [(2.5e-3, False), (8e-3, True), (2.5e-2, True)])
def test_three_times_the_stated_error_is_allowed_and_no_more(off: float, refused: bool) -> None:
    """Of a derivative that states a thousandth, along M and along a random direction.

    Proves: three times the stated error is allowed and no more (exact), against derivatives that
    are off by so much.
    """
    model = CASE.model()
    adapter = ReferenceAdapter(model)
    batch = read_batch(CASE.batch)
    parameters = dict(model.named_parameters())
    m = {name: torch.sin(p.detach()) for name, p in parameters.items()}
    for only in ("M", "random"):
        losses = token_losses(adapter.forward(batch.inputs), batch.labels)
        proof = DerivativeProof(losses, parameters, m)

        def derivative(direction: Mapping[str, Tensor]) -> tuple[Tensor, float]:
            return label_values(adapter, batch, direction) * (1 + off), 1e-3

        error = refusal(partial(_compare, proof, derivative, only))
        assert isinstance(error, UnsupportedError) == refused, only


def test_errors_of_two_signs_are_seen() -> None:
    """Derivatives that are off by as much up as down, token by token, as none but sums hide.

    Proves: errors of two signs are seen (exact), against derivatives that are off by so much.
    """
    model = CASE.model()
    adapter = ReferenceAdapter(model)
    batch = read_batch(CASE.batch)
    parameters = dict(model.named_parameters())
    losses = token_losses(adapter.forward(batch.inputs), batch.labels)
    proof = DerivativeProof(losses, parameters, {})

    def derivative(direction: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        exact = label_values(adapter, batch, direction)
        rows, tokens = batch.mask.nonzero(as_tuple=True)
        wrong = torch.zeros_like(exact)
        wrong[rows[0], tokens[0]], wrong[rows[1], tokens[1]] = 1.0, -1.0
        return exact + 0.1 * exact.norm() * wrong, 0.0

    error = refusal(partial(_compare, proof, derivative))
    assert isinstance(error, UnsupportedError), "the errors cancelled"


def detached(seed: int, dtype: torch.dtype, size: float) -> tuple[Any, dict[str, Tensor]]:
    """A decoder one of whose MLPs has a branch that nothing is sent back through."""
    model = BY_NAME["llama"].build(seed, dtype=dtype)
    layer = model.model.layers[1 + seed % 2]
    layer.mlp.side = nn.Linear(16, 16, bias=False, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.mlp.side.weight.copy_(size * torch.randn(16, 16, generator=generator))
    run = layer.mlp.forward

    def branched(x: Tensor) -> Tensor:
        with torch.no_grad():
            side = layer.mlp.side(x)
        return run(x) + side

    layer.mlp.forward = branched
    ids = torch.randint(3, 23, (2, 10), generator=generator)
    return model, {"input_ids": ids, "labels": ids}


WAYS = ("auto", "central", "forward_mode")
BRANCHES = [
    pytest.param(seed, way, marks=() if seed == 0 and way == "auto" else pytest.mark.slow)
    for seed in range(40)
    for way in WAYS
]


@pytest.mark.parametrize(("seed", "way"), BRANCHES)
def test_a_detached_branch_is_refused_whatever_its_numbers(seed: int, way: str) -> None:
    """Also a weak one; and differences are not even asked where forward mode was disproved.

    Proves: a detached branch is refused whatever its numbers (exact), against a branch without
    gradients.
    """
    dtype = torch.float32 if seed % 4 < 2 else torch.float64
    model, batch = detached(seed, dtype, 0.02 if seed % 3 else 0.2)
    for options in ({"layers": 2}, {"parameters": "all"}):
        config = ScorerConfig("label", derivative=way, **options)
        with ExitStack() as stack:
            if way == "auto":
                never = mock.Mock(side_effect=AssertionError("differences were taken"))
                stack.enter_context(mock.patch.object(Differences, "values", never))
            error = refusal(partial(Scorer(model, batch, config=config).score, batch))
        assert isinstance(error, UnsupportedError), options
        assert "backward is not the derivative" in str(error)


def test_differences_are_proved_where_m_begins_as_zero() -> None:
    """V is 0 at the reference; what autograd contradicts is not taken once weights have moved.

    A norm that is detached, as DoRA's: forward mode takes it for a constant, differences do not.

    Proves: differences are proved where m begins as zero (exact), against ``label_values``.
    """
    model = BY_NAME["llama"].build(1, dtype=torch.float32)
    up = model.model.layers[1].mlp.up_proj
    up.forward = lambda x: nn.functional.linear(x, 4.0 * up.weight / up.weight.norm().detach())
    ids = torch.randint(3, 23, (2, 10), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    weights = dict(model.named_parameters())
    drift = FisherDrift(
        {name: torch.ones_like(p) for name, p in weights.items()},
        {name: p.detach().clone() for name, p in weights.items()},
    )
    config = ScorerConfig("label", objective="stability", parameters="all", stability_weight=1.0)
    scorer = Scorer(model, retention=drift, config=config)
    for _ in range(
        2
    ):  # at the 2nd direction all is proved again; the 3rd is the first that is not 0
        assert not scorer.score(batch).total.any()
        scorer.refresh()
    with torch.no_grad():
        drawn = torch.randn(up.weight.shape, generator=torch.Generator().manual_seed(2))
        # Along the weight itself the detached norm matters, and differences see none of it.
        up.weight.mul_(1.05).add_(0.05 * drawn * up.weight.std())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = scorer.score(batch)
    assert values.derivative == "forward_mode"
    (warning,) = caught
    assert "whose backward is not the derivative" in str(warning.message)
    moved = {name: p.detach() - drift.reference[name] for name, p in weights.items()}
    exact = gradients.label_values(model, plain_forward(model), batch, moved)
    assert float((values.total - exact).norm()) < 1e-3 * float(exact.norm())


def gated(mlp: Any, branched: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The branch of ``detached`` times a gate, through which alone something is sent back."""
    with torch.no_grad():
        side = mlp.side(x)
    return branched(x) + (mlp.gate - 1.0) * side


def test_a_branch_behind_a_gate_that_opens_is_refused() -> None:
    """The proofs are taken again as M is: a gate that begins at 0 hides what is behind it.

    Proves: a branch behind a gate that opens is refused (exact), against a branch without
    gradients.
    """
    for options in ({"layers": 2}, {"parameters": "all"}):
        model, batch = detached(0, torch.float32, 0.2)
        mlp = model.model.layers[1].mlp
        mlp.gate = nn.Parameter(torch.zeros(1))
        mlp.forward = partial(gated, mlp, mlp.forward)
        scorer = Scorer(model, batch, config=ScorerConfig("label", **options))
        assert scorer.score(batch).total.any()
        mlp.gate.data.fill_(1.0)
        error = refusal(partial(scorer.score, batch))
        assert isinstance(error, UnsupportedError), options


def test_a_sum_that_cancels_is_measured_by_the_others() -> None:
    """Two equal rows, whose gradients cancel where their signs differ.

    Proves: a sum that cancels is measured by the others (exact), against forward mode.
    """
    model = BY_NAME["llama"].build(1, dtype=torch.float32)
    adapter = find_adapter(model)
    one = make_batch(("pppr",), vocabulary=23, seed=1)
    batch = read_batch({name: torch.cat([row, row]) for name, row in one.items()})
    parameters = dict(model.named_parameters())
    losses = token_losses(adapter.forward(batch.inputs), batch.labels)
    proof = DerivativeProof(losses, parameters, {})
    signs = [float(s[batch.mask].sum()) for s in proof._signs]
    assert 0.0 in signs, "no sum cancels: another seed"

    def derivative(direction: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        return label_values(adapter, batch, direction), 0.0

    _compare(proof, derivative)


def test_probabilities_near_one_are_rounded_and_no_fault() -> None:
    """A model that is sure of each token: its gradients are small, and rounded all the more.

    Proves: probabilities near one are rounded and no fault (approximate), against forward mode in
    float64.
    """
    model = BY_NAME["llama"].build(3, dtype=torch.float32)
    model.lm_head.weight.data *= 8
    ids = torch.randint(3, 23, (2, 10), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = model(ids).logits
        first = logits.topk(2).values
        labels = logits.argmax(-1).roll(1, -1)
    # Tokens whose loss is about a thousandth.
    certain = (first[..., 0] - first[..., 1]).roll(1, -1) > 6.0
    labels = torch.where(certain, labels, -100)
    batch = {"input_ids": ids, "labels": labels}
    assert int((labels[:, 1:] != -100).sum()) > 4
    double = BY_NAME["llama"].build(3)
    double.lm_head.weight.data *= 8
    for options in ({"layers": 2}, {"parameters": "all"}):
        values = Scorer(model, batch, config=ScorerConfig("label", **options)).score(batch)
        exact = Scorer(double, batch, config=ScorerConfig("label", **options)).score(batch)
        away = (values.total - exact.total).norm() / exact.total.norm()
        assert float(away) < max(3 * values.error, 1e-2)


def test_the_coarsest_arithmetic_decides_how_far() -> None:
    """Also of a forward that casts inside, as one that a trainer has prepared."""
    known = _tolerance("cpu", [torch.float32])
    assert _tolerance("cpu", [torch.float64]) < known < _tolerance("cpu", [torch.bfloat16])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _tolerance("cpu", [torch.float32]) == _tolerance("cpu", [torch.bfloat16])
    batch = make_batch(("pprrr",), vocabulary=11, seed=1)
    model = BY_NAME["llama"].build(1).float()
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    scorer = Scorer(model, batch, config=ScorerConfig("label", layers=2))
    assert scorer.score(batch).total.any()
    assert known < scorer.coverage.derivatives < 0.2


def test_what_can_be_proved_once_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = dict.fromkeys(("_prove_derivative", "prove_causality", "prove_coverage"), 0)

    def counted(name: str) -> Callable[..., Any]:
        run = getattr(places[name], name)

        def prove(*args: Any, **more: Any) -> Any:
            counts[name] += 1
            return run(*args, **more)

        return prove

    places: dict[str, Any] = dict.fromkeys(counts, proofs) | {"_prove_derivative": Label}
    for name in counts:
        monkeypatch.setattr(places[name], name, counted(name))
    for estimator in ("label", "path"):
        model = CASE.model()
        scorer = Scorer(model, CASE.validation, config=ScorerConfig(estimator, layers=1))
        for _ in range(3):
            scorer.score(CASE.batch)
    assert counts["_prove_derivative"] == counts["prove_coverage"] == 1
    assert counts["prove_causality"] == 2


class Noisy(nn.Module):
    """A module whose rate is a number of its own."""

    def __init__(self, name: str, rate: object) -> None:
        super().__init__()
        setattr(self, name, rate)


@pytest.mark.parametrize(
    ("module", "drawn"),
    [
        (nn.Dropout(0.1), True), (nn.Dropout(0.0), False), (nn.Linear(1, 1), False),
        (Noisy("attention_dropout", 0.1), True), (Noisy("attention_dropout", 0.0), False),
        (Noisy("router_jitter_noise", 0.1), True), (Noisy("rank_dropout", {"default": 0.3}), True),
        (Noisy("rank_dropout", {"default": 0.0}), False), (Noisy("neftune_noise_alpha", 5), True),
        (Noisy("attention_dropout", None), False), (Noisy("scaling", 0.1), False),
    ],
)  # fmt: skip
def test_what_may_draw_random_numbers(module: nn.Module, drawn: bool) -> None:
    model = nn.Sequential(module)
    assert draws(model.train()) == drawn
    assert not draws(model.eval())
