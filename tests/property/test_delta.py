"""The gated delta rule and its convolution: backward, coefficients, propagation, bound."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from alphatoken.model import delta_rule
from alphatoken.model.delta_rule import DeltaUse
from alphatoken.model.protocol import ConvolutionCall, DeltaCall
from alphatoken.model.switch import BackwardSwitch
from alphatoken.oracle import delta_net
from tests.property.profiles import budget
from tests.property.strategies import SEEDS
from tests.property.tolerance import close

TOLERANCE = 1e-10
_NAMES = ("query", "key", "value", "decay", "beta")
_MODULE = nn.Identity()


@dataclass(frozen=True)
class DeltaCase:
    """One convolution in front of one rule.

    ``r`` value heads a key head, ``w`` taps, ``chunk`` positions a block of the library,
    ``silent`` positions at the start whose keys, queries and values are zero, as padding's are.
    ``strong``: the decay forgets within a few positions; else it hardly forgets.
    """

    b: int = 1
    g: int = 1
    r: int = 1
    t: int = 5
    d: int = 3
    v: int = 2
    w: int = 3
    chunk: int = 64
    silent: int = 0
    strong: bool = True
    normalised: bool = True
    bias: bool = False
    activation: bool = True
    seed: int = 0

    def _normal(self) -> Any:
        generator = torch.Generator().manual_seed(self.seed)
        return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)

    def convolution(self) -> ConvolutionCall:
        """A convolution over the channels of queries, keys and values."""
        normal, heads = self._normal(), self.g * self.r
        channels = 2 * self.g * self.d + heads * self.v
        x = normal(self.b, channels, self.t)
        x[..., : self.silent] = 0
        taps, bias = normal(channels, self.w), normal(channels)
        return ConvolutionCall(
            _MODULE,
            x.requires_grad_(),
            taps,
            bias if self.bias else None,
            F.silu if self.activation else None,
        )

    def call(self, y: Tensor | None = None) -> DeltaCall:
        """A rule on the channels y, or on leaves of its own."""
        normal, heads = self._normal(), self.g * self.r
        y = delta_net.convolve(self.convolution()).detach() if y is None else y
        sizes = [self.g * self.d, self.g * self.d, heads * self.v]
        query, key, value = (
            part.unflatten(1, (count, -1)).transpose(2, 3)
            for part, count in zip(y.split(sizes, 1), (self.g, self.g, heads), strict=True)
        )
        decay = -(3.0 if self.strong else 0.05) * F.softplus(normal(self.b, heads, self.t))
        beta = torch.sigmoid(2 * normal(self.b, heads, self.t))
        if not self.normalised:  # the state of long keys grows without bound
            query, key = query / 4, key / 4
        tensors = (query, key, value, decay, beta)
        if y.requires_grad:
            return DeltaCall(_MODULE, *tensors, normalised=self.normalised)
        leaves = (x.detach().clone().requires_grad_() for x in tensors)
        return DeltaCall(_MODULE, *leaves, normalised=self.normalised)

    def error(self) -> Tensor:
        """At the rule's outputs."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.b, self.g * self.r, self.t, self.v)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


def delta_cases(**pins: Any) -> st.SearchStrategy[DeltaCase]:
    """Any shape; ``pins`` fix fields."""
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "b": st.integers(1, 2),
        "g": st.integers(1, 2),
        "r": st.integers(1, 3),
        "t": st.sampled_from([1, 2, 3, 5, 8, 11]),
        "d": st.integers(1, 4),
        "v": st.integers(1, 3),
        "w": st.sampled_from([1, 2, 3, 4]),
        "chunk": st.sampled_from([1, 2, 3, 4, 64]),
        "silent": st.sampled_from([0, 0, 1, 3]),
        "strong": st.booleans(),
        "normalised": st.sampled_from([True, True, False]),
        "bias": st.booleans(),
        "activation": st.sampled_from([True, True, False]),
        "seed": SEEDS,
    }
    cases = st.builds(DeltaCase, **drawn | pins)
    return cases.map(lambda case: replace(case, silent=min(case.silent, case.t - 1)))


def chunks_of(size: int) -> AbstractContextManager[Any]:
    """Let the library work in chunks of so many positions."""
    return mock.patch.object(delta_rule, "_CHUNK", size)


def native_of(call: DeltaCall) -> Any:
    return lambda *tensors: delta_net.delta_rule(
        replace(call, **dict(zip(_NAMES, tensors, strict=True)))
    )


def inputs_of(call: DeltaCall) -> list[Tensor]:
    return [getattr(call, name) for name in _NAMES]


def largest(tensor: Tensor) -> Tensor:
    """The scale of a comparison: a position's terms are as large as the largest of them."""
    return tensor.detach().abs().amax().clamp(min=1.0)


def uses_of(case: DeltaCase) -> tuple[ConvolutionCall, DeltaCall, DeltaUse]:
    """A convolution in front of a rule, as a forward leaves them."""
    front, switch = case.convolution(), BackwardSwitch()
    y, taps = delta_rule.switchable_convolution(
        front, lambda x: delta_net.convolve(replace(front, x=x)), switch
    )
    call = case.call(y)
    output, statistics = delta_rule.switchable_delta_rule(call, native_of(call), switch)
    return front, call, DeltaUse(_MODULE, front.x, y, taps, call.value, output, statistics, 1)


HARD = DeltaCase(b=2, g=2, r=3, t=11, d=4, v=3, w=4, chunk=3, silent=3, strong=False, bias=True)
SHORT = DeltaCase(b=1, g=1, r=2, t=1, w=4)
SPANS = st.sampled_from([(0, None), (1, None), (1, 2), (0, 1), (1, 0), (0, -1), (1, 7), (0, 3)])
WINDOWS = st.sampled_from([None, 0, 1, 2, 3, 5, 32])
REDUCTIONS = st.sampled_from(["per_head", "mean"])


@given(delta_cases())
@example(HARD)
@example(SHORT)
def test_the_self_backward_holds_the_incoming_state(case: DeltaCase) -> None:
    """Self mode is the ordinary derivative of the rule whose incoming states are constants.

    Proves: the self backward holds the incoming state (exact), against ``delta_rule``.
    """
    call, error = case.call(), case.error()
    held = delta_net.delta_rule(call, constant_past=True)
    expected = torch.autograd.grad(held, inputs_of(call), error, materialize_grads=True)
    switch = BackwardSwitch()
    with chunks_of(case.chunk), switch.to("self"):
        output, _ = delta_rule.switchable_delta_rule(call, native_of(call), switch)
        gradients = torch.autograd.grad(output, inputs_of(call), error, materialize_grads=True)
    assert torch.equal(output, native_of(call)(*inputs_of(call)))
    for name, one, other in zip(_NAMES, gradients, expected, strict=True):
        close(one, other, largest(other) * 10, TOLERANCE, name=f"self-only d{name}")


@given(delta_cases())
@example(HARD)
@budget(0.25)
def test_one_forward_of_the_rule_serves_both_backwards(case: DeltaCase) -> None:
    """The mode is read at backward time: one graph gives self, ordinary and self gradients.

    Ordinary ones are the kernel's own, bit by bit.

    Proves: one forward of the rule serves both backwards (exact), against a forward for each mode.
    """
    call, error = case.call(), case.error()
    switch, inputs = BackwardSwitch(), inputs_of(call)
    output, _ = delta_rule.switchable_delta_rule(call, native_of(call), switch)
    for mode in ("self", "ordinary", "self"):
        with switch.to(mode):
            gradients = torch.autograd.grad(output, inputs, error, retain_graph=True)
        truth = delta_net.delta_rule(call, constant_past=mode == "self")
        expected = torch.autograd.grad(truth, inputs, error, materialize_grads=True)
        for name, one, other in zip(_NAMES, gradients, expected, strict=True):
            close(one, other, largest(other) * 10, TOLERANCE, name=f"{mode}, d{name}")
            assert mode == "self" or torch.equal(one, other), f"the kernel's own d{name}"


@given(delta_cases())
@example(HARD)
@example(SHORT)
@budget(0.5)
def test_the_convolution_alone(case: DeltaCase) -> None:
    """Self mode is the last tap; ordinary mode is the kernel's, and so is all taps gathered.

    Proves: the convolution alone (exact), against ``convolve``.
    """
    call = case.convolution()
    error = torch.randn(
        call.x.shape, generator=torch.Generator().manual_seed(case.seed), dtype=torch.float64
    )
    switch = BackwardSwitch()
    y, statistics = delta_rule.switchable_convolution(
        call, lambda x: delta_net.convolve(replace(call, x=x)), switch
    )
    plain = delta_net.convolve(call)
    assert torch.equal(y, plain)
    for mode, output in (
        ("self", delta_net.convolve(call, constant_past=True)),
        ("ordinary", plain),
    ):
        (expected,) = torch.autograd.grad(output, call.x, error, retain_graph=True)
        with switch.to(mode):
            (found,) = torch.autograd.grad(y, call.x, error, retain_graph=True)
        close(found, expected, largest(expected), TOLERANCE, name=f"convolution, {mode}")
    every = statistics.gathered([error] * case.w)
    close(every, expected, largest(expected) * case.w, TOLERANCE, name="every tap gathered")


@given(delta_cases(), SPANS, st.booleans())
@example(HARD, (1, 4), False)
@example(replace(HARD, chunk=4), (1, 5), False)
@example(HARD, (0, None), True)
@example(SHORT, (0, None), False)
def test_carried_errors_are_the_coefficients(
    case: DeltaCase, span: tuple[int, int | None], mean: bool
) -> None:
    """Errors carried back are sums of products with A, in_span one factor after the other.

    The coefficients themselves are the derivatives of the outputs by the values, and every
    distance at once is the ordinary backward.

    Proves: carried errors are the coefficients (exact), against ``coefficients``.
    """
    call, error = case.call(), case.error()
    weights = delta_net.coefficients(call)
    if mean:
        weights = weights.mean(1, keepdim=True).expand_as(weights)
    distance = torch.arange(case.t)[:, None] - torch.arange(case.t)
    first, last = span
    in_span = (distance >= first) & (distance <= (case.t if last is None else last))
    kept = weights * in_span
    expected, scale = kept.mT @ error, kept.abs().mT @ error.abs()
    with chunks_of(case.chunk):
        statistics = delta_rule.DeltaStatistics(call)
        # Alone it reaches as far as it says, over the ends of chunks, and so beside a wider one.
        (alone,) = statistics.carried(error, [span], mean=mean)
        beside, whole = statistics.carried(error, [span, (0, None)], mean=mean)
    assert torch.equal(beside, alone)
    largest_term = scale + 1e-3 * largest(weights) * largest(error)
    close(alone, expected, largest_term, TOLERANCE, name="carried")
    if not mean:
        output = native_of(call)(*inputs_of(call))
        (ordinary,) = torch.autograd.grad(output, call.value, error)
        close(whole, ordinary, largest(ordinary) * 10, TOLERANCE, name="carried from everywhere")


@given(delta_cases(), WINDOWS, REDUCTIONS)
@example(HARD, None, "per_head")
@example(HARD, 2, "mean")
@example(SHORT, 2, "per_head")
def test_propagation_goes_through_the_taps(
    case: DeltaCase, window: int | None, reduction: str
) -> None:
    """Value-Propagation of a delta net: each pair's coefficient and every tap, in its window.

    Without a window and per head it is what the ordinary backward gives through the values alone,
    less the part that stays at its position.

    Proves: propagation goes through the taps (approximate), against ``propagated_parts``.
    """
    front, call, use = uses_of(case)
    error = case.error()
    full = delta_net.convolve(front)

    def to_input(at_values: Tensor) -> Tensor:
        (at_y,) = torch.autograd.grad(
            call.value, use.y, at_values, retain_graph=True, allow_unused=True
        )
        (found,) = torch.autograd.grad(full, front.x, at_y, retain_graph=True)
        return found

    terms = delta_net.propagated_parts(
        call, error, to_input, window=window, head_reduction=reduction
    )
    with chunks_of(case.chunk):
        start, found = use.propagated(error, window, head_mean=reduction == "mean")
    assert start is use.x
    scale = terms.abs().sum(0) + 1e-3 * largest(terms)
    close(found, terms.sum(0), scale, TOLERANCE, name="propagated")
    if window is None and reduction == "per_head":
        exact = torch.zeros_like(front.x)
        for k in range(case.t):  # queries, keys and gates are constants of the rule
            alone = torch.zeros_like(error)
            alone[:, :, k] = error[:, :, k]
            constants = {n: getattr(call, n).detach() for n in _NAMES if n != "value"}
            value = case.call(full).value
            output = delta_net.delta_rule(replace(call, value=value, **constants))
            (reached,) = torch.autograd.grad(output, front.x, alone, retain_graph=True)
            exact[..., :k] += reached[..., :k]
        close(found, exact, scale, TOLERANCE, name="all but the own position")


@given(delta_cases(t=st.sampled_from([1, 2, 4, 6])))
@budget(0.5)
def test_what_is_left_out_is_bounded(case: DeltaCase) -> None:
    """The closed value path is autograd's, and the rest of the Jacobian keeps within its bound.

    Proves: what is left out is bounded (exact), against ``net_jacobian``, ``value_path``,
    ``left_out_bound``.
    """
    normal = case._normal()
    d, v, m = case.d, case.v, 4
    net = delta_net.DeltaNet(
        normal(d, m), normal(d, m), normal(v, m), normal(m), normal(m),
        normal(2 * d + v, case.w), 3.0 if case.strong else 0.1, float(normal(1)),
    )  # fmt: skip
    x = normal(case.t, m)
    whole = delta_net.net_jacobian(net, x)
    kept = delta_net.value_path(net, x)
    through = delta_net.net_jacobian(net, x, values_only=True)
    close(kept, through, largest(through) * 10, TOLERANCE, name="value path")
    norms = torch.linalg.matrix_norm((whole - kept).transpose(1, 2), 2).tril(-1)
    bound = delta_net.left_out_bound(net, x)
    assert bool((norms <= bound * (1 + 1e-9) + 1e-12).all()), (norms, bound)
