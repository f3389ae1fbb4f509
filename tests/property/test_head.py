"""Losses taken at the output head, against loops; and where a model's forward may use them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

from alphatoken import InputError, Scorer, ScorerConfig
from alphatoken.estimate.forward_mode import label_values
from alphatoken.model import forward, head
from alphatoken.model.batch import read_batch, token_losses
from alphatoken.model.forward import response_losses
from alphatoken.model.head import is_plain_head, rounding_tolerance, watched_head
from alphatoken.model.protocol import find_adapter
from alphatoken.oracle import gradients
from tests.places import tiered
from tests.property.architectures import ARCHITECTURES, BY_NAME
from tests.property.setups import CONTRACTION, refusal
from tests.property.strategies import SEEDS, make_batch
from tests.property.tolerance import allowed, close


@dataclass(frozen=True)
class HeadCase:
    """Some predictions of a small head; blocks of few numbers, and of few rows.

    An ``accelerator`` is waited for nowhere, and is given what turns out to be zero, too.
    """

    predictions: int
    width: int
    vocabulary: int
    biased: bool
    impossible: bool
    accelerator: bool
    workspace: int
    rows: int
    seed: int

    def numbers(self, *shape: int, salt: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2**16 * salt)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    @property
    def targets(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2**20)
        least = int(self.impossible)
        return torch.randint(least, self.vocabulary, (self.predictions,), generator=generator)

    @property
    def weights(self) -> Tensor:
        """Of the losses; some are 0, as of tokens that selection drops."""
        drawn = self.numbers(self.predictions, salt=4)
        return drawn.masked_fill(drawn < -0.3, 0.0)

    def parameters(self) -> list[Tensor]:
        """Hidden states, W, and b where there is one, all with a graph.

        Large enough that exponentials overflow unless the maximum is subtracted. Where a token is
        ``impossible``, its logit is -inf, as some models set those of unused tokens.
        """
        hidden = 40 * self.numbers(self.predictions, self.width, salt=1)
        given = [hidden, self.numbers(self.vocabulary, self.width, salt=2)]
        if self.biased or self.impossible:
            given.append(self.numbers(self.vocabulary, salt=3))
        if self.impossible:
            given[2][0] = -torch.inf
        return [x.requires_grad_() for x in given]

    def losses(self, *given: Tensor, known: bool = False) -> Tensor:
        """As the library takes them; ``known``: of logits that were formed before."""
        hidden, weight, bias = given if len(given) == 3 else (*given, None)
        logits: dict[str, Tensor] = {}
        if known:
            formed = torch.nn.functional.linear(hidden, weight, bias).detach()
            # In another order, among rows that nobody asks about.
            order = torch.randperm(
                2 * len(formed), generator=torch.Generator().manual_seed(self.seed)
            )[: len(formed)]
            others = self.numbers(2 * len(formed), len(weight), salt=9)
            logits = {"logits": others.index_copy(0, order, formed), "rows": order}
        return head.head_losses(hidden, weight, bias, self.targets, **logits)[0]

    @contextmanager
    def in_blocks(self) -> Iterator[None]:
        """Inside, blocks are of the case's sizes; losses are taken there, and their gradients."""
        with (
            mock.patch.object(head, "_WORKSPACE", self.workspace),
            mock.patch.object(head, "_WORKSPACE_OF_ACCELERATOR", self.workspace),
            mock.patch.object(head, "on_host", return_value=not self.accelerator),
            mock.patch.object(head, "_ROWS", self.rows),
        ):
            yield


def head_cases() -> st.SearchStrategy[HeadCase]:
    return st.builds(
        HeadCase,
        predictions=st.integers(1, 7),
        width=st.integers(1, 4),
        vocabulary=st.integers(2, 9),
        biased=st.booleans(),
        impossible=st.booleans(),
        accelerator=st.booleans(),
        workspace=st.sampled_from([1, 6, 2**22]),
        rows=st.sampled_from([1, 3, 4096]),
        seed=SEEDS,
    )


def by_loops(targets: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``-log softmax(W h + b)[y]``, one prediction after the other."""
    losses = []
    for h, target in zip(hidden, targets.tolist(), strict=True):
        z = weight @ h
        z = z if bias is None else z + bias
        losses.append(z.logsumexp(-1) - z[target])
    return torch.stack(losses)


BATCH = make_batch(("pprrprr..", "prprrrrr.", "pppprrrrr"), vocabulary=23, seed=1)
INPUTS = {k: v for k, v in BATCH.items() if k != "labels"}
VALIDATION = make_batch(("pprrr.", "pprrrr"), vocabulary=23, seed=2)
CAST = 1e-6
"""transformers computes softmax and norms in float32 inside, whatever the model's dtype."""
NARROW, WIDE = torch.bfloat16, torch.float32


def built(name: str) -> Any:
    """One of the architectures."""
    return BY_NAME[name].build(1)


def caps(model: Any) -> bool:
    """Whether its logits are not what its head says."""
    return getattr(model.config, "final_logit_softcapping", None) is not None


def calls_of(module: nn.Module, run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """What ``run`` returns, and how many positions a row the head was asked about, by call."""
    seen: list[int] = []
    with module.register_forward_hook(lambda _m, args, _o: seen.append(args[0].shape[1])):
        return run(), seen


def observed(model: nn.Module) -> tuple[Tensor, head.HeadUse | None]:
    """Logits of a forward whose head is watched, and what is known of them."""
    with head.watch_head(find_adapter(model)):
        logits = model(**INPUTS).logits
    return logits, head.watched_head(logits)


def _losses_and_gradient(
    model: nn.Module, logits: Tensor | None, losses: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token losses, and the gradient of their sum in the last layer's last matrix."""
    losses = token_losses(logits, BATCH["labels"]) if losses is None else losses  # type: ignore[arg-type]
    last = [p for n, p in model.named_parameters() if "down_proj" in n][-1]
    return losses.detach(), torch.autograd.grad(losses.sum(), last)[0]


@given(head_cases(), st.booleans())
def test_head_losses(case: HeadCase, known: bool) -> None:
    """Losses and every gradient of a weighted sum of them; twice through one graph.

    Proves: head losses (exact), against loops.
    """
    given = case.parameters()
    expected = by_loops(case.targets, *given)
    with case.in_blocks():
        losses = case.losses(*given, known=known)
        scale = 1.0 + expected.detach().abs().sum()
        close(losses, expected.detach(), scale, CONTRACTION, name="losses at the head")
        for weights in (case.weights, case.weights.flip(0)):
            wanted = torch.autograd.grad((expected * weights).sum(), given, retain_graph=True)
            found = torch.autograd.grad((losses * weights).sum(), given, retain_graph=True)
            for name, a, b, x in zip(("h", "W", "b"), found, wanted, given, strict=False):
                size = b[b.isfinite()].abs().sum() + weights.abs().sum() * (1 + x.shape[-1])
                close(a, b, size * 40, CONTRACTION, name=f"gradient of {name}")
        # Only what lies below the head: the node of the weights is not visited.
        below = torch.autograd.grad((losses * case.weights).sum(), given[0], retain_graph=True)[0]
        first = torch.autograd.grad((expected * case.weights).sum(), given[0])[0]
        close(below, first, first.abs().sum() + 40.0, CONTRACTION, name="below the head")


@given(head_cases(), st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_head_tangents(case: HeadCase, moved: tuple[bool, bool, bool]) -> None:
    """The derivative along any of h, W and b is the gradient's inner product with it.

    Proves: head tangents (exact), against autograd through loops.
    """
    given = case.parameters()
    along = [
        case.numbers(*x.shape, salt=5 + i) if moved[i] else torch.zeros_like(x)
        for i, x in enumerate(given)
    ]
    expected = []
    for one in by_loops(case.targets, *given):
        slopes = torch.autograd.grad(one, given, retain_graph=True)
        terms = [(g * m).nan_to_num().sum() for g, m in zip(slopes, along, strict=True)]
        expected.append(torch.stack(terms).sum())
    with torch.no_grad(), forward_ad.dual_level(), case.in_blocks():
        duals = [
            forward_ad.make_dual(x.detach(), m) if moves else x.detach()
            for x, m, moves in zip(given, along, moved, strict=False)
        ]
        primal, tangent = forward_ad.unpack_dual(case.losses(*duals))
    wanted = torch.stack(expected).detach()
    losses = by_loops(case.targets, *given).detach()
    close(primal, losses, 1.0 + losses.abs().sum(), CONTRACTION, name="losses of duals")
    if tangent is None:
        assert not any(moved[: len(given)])
        return
    size = 40.0 * (1.0 + sum(float(m.abs().sum()) for m in along))
    close(tangent, wanted, size, CONTRACTION, name="tangents")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_sum_in_float32(dtype: torch.dtype) -> None:
    """The error of a long sum over the vocabulary is that of its terms, and does not grow."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(3000, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(3000, (20,), generator=generator)
    losses, _ = head.head_losses(hidden, weight, None, targets)
    assert losses.dtype == torch.float32
    found = torch.autograd.grad(losses.sum(), (hidden, weight))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = nn.functional.cross_entropy(wide[0] @ wide[1].mT, targets, reduction="sum")
    wanted = torch.autograd.grad(exact, wide)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        close((a.double() - b).norm(), 0.0, b.norm(), 1e-2, name="narrow gradient")


# --- a model's own forward ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [one.name for one in ARCHITECTURES])
def test_own_forward(name: str) -> None:
    """Losses and gradients of a forward without logits are those of its logits.

    A model that scales or caps what its head says is noticed, and runs as it is from then on.

    Proves: own forward (exact), against logits of a whole forward.
    """
    model = built(name)
    adapter = find_adapter(model)
    last = head.output_head(adapter)
    assert last is not None

    def losses() -> Tensor:
        return response_losses(adapter, INPUTS, BATCH["labels"])

    whole = token_losses(adapter.forward(INPUTS), BATCH["labels"])
    found, asked = calls_of(last, losses)
    close(found, whole.detach(), whole.detach().abs().sum(), CONTRACTION, name=name)
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(whole.shape, generator=generator, dtype=whole.dtype)
    parameters = [p for p in model.parameters() if p.requires_grad]
    wanted, got = (
        torch.autograd.grad((x * weights).sum(), parameters, allow_unused=True)
        for x in (whole, found)
    )
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            close((a - b).norm(), 0.0, b.norm() + 1e-3, 1e-10, name=f"{name}, gradient")
    length = BATCH["labels"].shape[1]
    changed = caps(model)
    assert asked == ([1, length] if changed else [1])
    assert calls_of(last, losses)[1] == ([length] if changed else [1])


@pytest.mark.parametrize("name", ["llama"])
def test_logits_changed_in_place(name: str) -> None:
    """Scaled in place by a hook at some positions: losses and gradients are of what is left.

    In a forward of our own, whose one position is not scaled, and below an observed one.

    Proves: logits changed in place (exact), against the logits as they were left.
    """
    model = built(name)
    adapter = find_adapter(model)

    def scale(module: nn.Module, args: Any, output: Any) -> None:
        factors = torch.full((output.logits.shape[1], 1), 3.0, dtype=output.logits.dtype)
        factors[-1] = 1.0
        output.logits.mul_(factors)

    handle = model.register_forward_hook(scale)
    losses, gradient = _losses_and_gradient(model, model(**INPUTS).logits)
    for found, other in (
        _losses_and_gradient(model, observed(model)[0]),
        _losses_and_gradient(model, None, response_losses(adapter, INPUTS, BATCH["labels"])),
    ):
        close(found, losses, losses.abs().sum(), CONTRACTION, name=f"{name}, scaled in place")
        close(other, gradient, gradient.abs().sum(), 1e-10, name=f"{name}, its gradient")
    handle.remove()


@pytest.mark.parametrize("name", ["llama"])
def test_scores_of_another_forward(name: str) -> None:
    """Label values refuse logits of another forward, by its graph; without one by the losses.

    Proves: scores of another forward (exact), against a refusal.
    """
    model = built(name).train()
    config = ScorerConfig(estimator="label", layers=2, uncovered="skip")
    scorer = Scorer(model, VALIDATION, None, config)
    again = dict(INPUTS, input_ids=INPUTS["input_ids"].flip(0))
    for tokens, gradients_on in ((INPUTS, True), (again, False)):  # the same numbers, or no graph
        with scorer.observe() as seen, torch.set_grad_enabled(gradients_on):
            other = model(**tokens).logits
            model(**INPUTS)
            error = refusal(functools.partial(seen.values, other, BATCH["labels"]))
            assert isinstance(error, InputError), "logits of another forward were valued"


@pytest.mark.parametrize("name", ["llama"])
def test_losses_that_autocast_rounded(name: str) -> None:
    """Label values over all parameters take losses that autocast rounded in the observed pass.

    Proves: losses that autocast rounded (exact), against a refusal.
    """
    model = built(name).float().eval()
    options = {"parameters": "all", "derivative": "forward_mode", "layers": "all"}
    scorer = Scorer(model, VALIDATION, None, ScorerConfig(estimator="label", **options))
    change = 1 + 0.2 * rounding_tolerance(torch.bfloat16)
    forward = model.forward
    for cast in (False, True):
        # As accelerate does: autocast is entered inside the call, after the model's own hooks.
        model.forward = torch.autocast("cpu", enabled=cast)(forward)
        with scorer.observe() as seen:
            logits = model(**INPUTS).logits * change
            model.forward = forward
            error = refusal(functools.partial(seen.values, logits, BATCH["labels"]))
            assert isinstance(error, InputError) is not cast, "autocast is known by its rounding"


def cast_around(linears: Iterable[nn.Linear], inside: torch.dtype, outside: torch.dtype) -> None:
    for linear in linears:
        linear.to(inside)
        linear.register_forward_pre_hook(lambda _m, args: (args[0].to(inside),))
        linear.register_forward_hook(lambda _m, _args, s: s.to(outside))


def mixed(kind: str) -> Any:
    """A model with 16 bits somewhere; every weight is a number of 16 bits."""
    model = built("llama").to(NARROW).to(WIDE)
    linears = [one for one in model.model.layers.modules() if isinstance(one, nn.Linear)]
    if kind == "linears":
        cast_around(linears, NARROW, WIDE)
    elif kind == "linears of the last layer":
        cast_around(linears[len(linears) // 2 :], NARROW, WIDE)
    elif kind == "between linears":
        cast_around(linears, WIDE, model.to(NARROW).dtype)
    elif kind == "all but the head":
        cast_around([model.to(NARROW).lm_head], WIDE, WIDE)
    elif kind == "the head":
        cast_around([model.lm_head], NARROW, NARROW)
    return model


@functools.cache
def values_in_float64(parameters: str) -> Tensor:
    """The oracle's label values of the weights of ``mixed``, all layers scored."""
    model = built("llama").to(NARROW).double()
    scored = {n: p for n, p in model.named_parameters() if parameters == "all" or "_proj" in n}

    def forward(batch: Any) -> Tensor:
        logits: Tensor = model(**batch).logits
        return logits

    m = gradients.validation_gradient(model, forward, VALIDATION, scored)
    return gradients.label_values(model, forward, BATCH, m)


@pytest.mark.parametrize(
    ("kind", "parameters", "graph"),
    [
        ("between linears", "linears", True),
        ("all but the head", "all", True),
        ("autocast in blocks", "linears", True),  # seen in what the linears give
        ("autocast", "linears", False),
        # Of the same kinds: casts around modules, seen or not.
        pytest.param("linears", "linears", True, marks=pytest.mark.slow),
        pytest.param("linears", "all", False, marks=pytest.mark.slow),
        pytest.param("linears of the last layer", "linears", True, marks=pytest.mark.slow),
        pytest.param("the head", "linears", True, marks=pytest.mark.slow),
    ],
)
def test_losses_that_16_bits_rounded_somewhere(kind: str, parameters: str, graph: bool) -> None:
    """They may differ as 16 bits do, and their values from those in float64; no more than that.

    Proves: losses that 16 bits rounded somewhere (approximate), against ``label_values``,
    ``validation_gradient``.
    """
    model, wanted = mixed(kind), values_in_float64(parameters)
    options = {"derivative": "forward_mode", "layers": "all", "parameters": parameters}
    config = ScorerConfig(estimator="label", uncovered="skip", **options)
    scorer = Scorer(model, VALIDATION, None, config)
    scorer.score(BATCH)  # M is not of the autocast
    layers = model.model.layers if kind == "autocast in blocks" else []
    with scorer.observe() as seen, ExitStack() as stack:
        for layer in layers:
            casting = torch.autocast("cpu")(layer.forward)
            stack.enter_context(mock.patch.object(layer, "forward", casting))
        with torch.set_grad_enabled(graph), torch.autocast("cpu", enabled=kind == "autocast"):
            with torch.no_grad():
                other = model(**dict(INPUTS, input_ids=INPUTS["input_ids"].flip(0))).logits
            logits = model(**INPUTS).logits.float() * (1 + 0.2 * rounding_tolerance(NARROW))
        stack.close()
        try:
            found = seen.values(logits, BATCH["labels"]).total
        except InputError as error:
            raise AssertionError("rounding is taken for another forward") from error
        with pytest.raises(InputError, match="mean loss"):
            seen.values(other, BATCH["labels"])
    close((found - wanted).norm(), 0.0, wanted.norm(), allowed("norm", NARROW), name=kind)


def test_a_label_outside_the_vocabulary_is_refused() -> None:
    adapter = find_adapter(BY_NAME["llama"].build(1))
    with pytest.raises(InputError, match="no token of the vocabulary"):
        response_losses(adapter, INPUTS, BATCH["labels"].clamp(max=99) * 0 + 99)


def test_heads_that_somebody_else_has_a_hand_in_are_left_alone() -> None:
    class Quantised(nn.Linear):
        pass

    head = nn.Linear(3, 5)
    assert is_plain_head(head)
    assert not is_plain_head(None)
    assert not is_plain_head(nn.Sequential(head))
    assert not is_plain_head(Quantised(3, 5))
    head.register_full_backward_hook(lambda *_: None)
    assert not is_plain_head(head)
    spread = nn.Linear(3, 5)
    spread.weight.ds_shape = (5, 3)  # type: ignore[attr-defined]  # ZeRO-3 leaves a flat rest of it
    assert not is_plain_head(spread)


# --- a forward that somebody else runs ------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama"])
def test_losses_asked_twice(name: str) -> None:
    """The same tokens asked about twice are one tensor; other tokens or other places are not.

    Proves: losses asked twice (exact), against cross-entropy of the logits.
    """
    logits, use = observed(built(name))
    assert use is not None
    positions, tokens = torch.tensor([3, 5]), torch.tensor([1, 2])
    once, twice = (use.losses(logits, positions, tokens) for _ in range(2))
    assert once is twice
    for at, asked in ((positions, torch.tensor([1, 3])), (torch.tensor([3, 6]), tokens)):
        rows = logits.flatten(0, 1)[at]
        expected = nn.functional.cross_entropy(rows, asked, reduction="none").detach()
        found = use.losses(logits, at, asked)
        close(found, expected, expected.abs().sum(), CONTRACTION, name="losses asked for anew")


def test_gradients_of_the_logits_themselves_stay_possible() -> None:
    model = BY_NAME["llama"].build(1)
    logits, use = observed(model)
    assert use is not None
    logits.retain_grad()
    assert watched_head(logits) is None
    token_losses(logits, BATCH["labels"]).sum().backward()
    assert logits.grad is not None
    logits, _ = observed(model)
    seen: list[Tensor] = []
    logits.register_hook(seen.append)
    token_losses(logits, BATCH["labels"]).sum().backward()
    assert len(seen) == 1


def test_nothing_is_remembered_without_a_graph_or_beyond_the_logits() -> None:
    model = BY_NAME["llama"].build(1)
    with torch.no_grad():
        assert observed(model)[1] is None
    gc.collect()
    before = len(head._USES)
    logits, use = observed(model)
    assert use is not None
    token_losses(logits, BATCH["labels"]).sum().backward()
    assert len(head._USES) == before + 1
    del logits, use
    gc.collect()
    assert len(head._USES) == before


# The plain one, the one that caps its logits, and the one with biases and transposed weights.
OBSERVED = ("llama", "gemma2", "gpt2")


@pytest.mark.parametrize("parameters", ["linears", "all"])
@pytest.mark.parametrize("name", tiered(BY_NAME, OBSERVED))
def test_observed_label_values(name: str, parameters: str) -> None:
    """Label values of an observed forward are the oracle's, by the error that training shares.

    Where the logits are the head's own, no product with the vocabulary is formed for them; a model
    that caps its logits gives the same values without the shared error.

    Proves: eq. grad_alignment (exact), against ``label_values``.
    """
    model = built(name).train()
    adapter = find_adapter(model)
    config = ScorerConfig(
        "label", layers="all" if parameters == "all" else 2, parameters=parameters,
        uncovered="skip", derivative="forward_mode",
    )  # fmt: skip
    scorer = Scorer(model, VALIDATION, None, config)
    m = scorer.direction.total()
    with scorer.observe() as seen:
        logits = model(**INPUTS).logits
        with mock.patch.object(forward, "head_losses", side_effect=head.head_losses) as formed:
            values = seen.values(logits, BATCH["labels"])
    expected = gradients.label_values(model, adapter.forward, BATCH, m)
    close(values.total, expected, expected.abs().sum(), CAST, name=f"{name}, {parameters}")
    assert not formed.called
    assert (head.watched_head(logits) is None) == caps(model)


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_tangents_at_other_hidden_states(name: str) -> None:
    """A call of the head on other hidden states says nothing of a dual forward.

    Here the call is one of the same tokens after the norm below the head was stretched.

    Proves: tangents at other hidden states (exact), against ``label_values``.
    """
    model = built(name)
    adapter, batch = find_adapter(model), read_batch(BATCH)
    norm = next(p for n, p in reversed(list(model.named_parameters())) if "norm" in n)
    m = {n: torch.ones_like(p) for n, p in model.named_parameters() if p.dim() == 2}
    expected = gradients.label_values(model, adapter.forward, BATCH, m)
    with torch.no_grad():
        norm *= 1.5
    logits, use = observed(model)
    assert use is not None
    token_losses(logits, BATCH["labels"])
    with torch.no_grad():
        norm /= 1.5
    values = label_values(adapter, batch, m, head=use)
    close(values, expected, expected.abs().sum(), CAST, name=f"{name}, other hidden states")
