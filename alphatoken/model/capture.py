"""Inputs and errors of scored linears, captured in a forward that the model does not notice.

The file has three parts. ``find_scope`` chooses the layers and linears that are valued.
``record`` hooks the model, so that a ``Recorder`` gathers the input and the output of each scored
linear while the model runs. ``accumulate_errors`` and ``stream_errors`` then take the errors at
those outputs with ``torch.autograd.grad``, which touches no ``.grad``. Context managers put back
everything that is changed on the model (hooks, attention dispatch, modes, checkpointing flags),
also when an exception passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from alphatoken.errors import ConfigError, ModelError
from alphatoken.model.attention import (
    AttentionStatistics,
    BackwardSwitch,
    propagate_values,
    switchable_attention,
)
from alphatoken.model.convolution import ConvolutionStatistics, switchable_convolution
from alphatoken.model.delta_rule import DeltaStatistics, Span, switchable_delta_rule
from alphatoken.model.layer_choice import layers_within
from alphatoken.model.protocol import (
    AttentionCall,
    ConvolutionCall,
    DecoderAdapter,
    DeltaCall,
    DeltaNets,
    NativeAttention,
    NativeConvolution,
    NativeDelta,
    ScoredExperts,
    ScoredLinear,
)
from alphatoken.model.sharding import Sharding

__all__ = [
    "AttentionUse",
    "ConvolutionUse",
    "DeltaUse",
    "LinearUse",
    "ObservedForward",
    "Recorder",
    "Scope",
    "delta_nets_of",
    "draws",
    "evaluation_mode",
    "find_scope",
    "graph_from_layer",
    "hidden_of",
    "is_compiled",
    "is_wrapper",
    "mixers_without_rule",
    "record",
    "resolve_layers",
    "used_outside",
    "with_hidden",
]


def resolve_layers(adapter: DecoderAdapter, layers: int | str | Sequence[int]) -> tuple[int, ...]:
    """Indices of the scored decoder layers of this model, as ``layers_within`` gives them."""
    return layers_within(layers, len(adapter.layers()))


@dataclass(frozen=True)
class Scope:
    """What is valued: the scored layers and their trainable linears (S in docs/notation.md).

    Attributes:
        layers: indices of the scored layers.
        linears: scored linears, in forward order, each module once; after those of their layer
            the tensors of its experts, where these were chosen.
        uncovered: trainable parameters of these layers that no scored linear covers, and why.
        mixers: modules that mix positions without softmax attention and have no self-only rule
            (state space, convolution, other linear attention than gated delta nets), and their
            kind, in all layers from ``first`` to the last.
        first: the first layer that uses a weight in scope; the graph starts at its input. Lower
            than the first scored layer where a block or a weight is shared between depths.
        named: further parameters of any layer, chosen by their names.
    """

    layers: tuple[int, ...]
    linears: tuple[ScoredLinear, ...]
    uncovered: dict[str, str] = field(default_factory=dict)
    mixers: dict[str, str] = field(default_factory=dict)
    first: int = 0
    named: dict[str, Tensor] = field(default_factory=dict)

    def parameters(self, *, biases: bool) -> dict[str, Tensor]:
        """Weights of the linears by name, with ``biases`` their trained ones too; then ``named``.

        What is named and belongs to a linear as well is there once.
        """
        chosen = {linear.weight_name: linear.weight for linear in self.linears}
        for linear in self.linears if biases else ():
            if linear.trained_bias is not None:
                chosen[linear.bias_name] = linear.trained_bias
        known = {id(parameter) for parameter in chosen.values()}
        return chosen | {name: p for name, p in self.named.items() if id(p) not in known}


def find_scope(
    adapter: DecoderAdapter, layers: int | str | Sequence[int], *, experts: bool = False
) -> Scope:
    """The scope of ``layers`` in the adapter's model; with ``experts`` their 3-D tensors too.

    Raises:
        ConfigError: bad ``layers``, no trainable linear in them, or ``experts`` where none of
            their 3-D tensors can be captured.
    """
    chosen = resolve_layers(adapter, layers)
    linears = tuple(adapter.scored_linears(chosen))
    uncovered = adapter.uncovered(chosen)
    if experts:
        tensors = _scored_experts(adapter, chosen, uncovered)
        linears = tuple(sorted((*linears, *tensors), key=lambda linear: linear.layer))
        taken = {name for tensor in tensors for name in (tensor.weight_name, tensor.bias_name)}
        uncovered = {name: why for name, why in uncovered.items() if name not in taken}
    # Matrices that no linear covers are enough for ``label``. Estimators that need captured errors
    # are refused afterwards, by ``require_covered``.
    if not linears and not uncovered:
        raise ConfigError(
            "no trainable linear in the scored layers",
            got=f"layers {list(chosen)}",
            why="values are inner products with gradients of trainable weights",
            remedy="unfreeze them (requires_grad_), attach adapters, or choose other layers",
        )
    first = _first_use(adapter, chosen, linears, uncovered)
    # The layers above the scored ones count too: the error of a token passes through them on its
    # way down, and one that mixes positions would spoil the self-only backward.
    mixers = mixers_without_rule(adapter, range(first, len(adapter.layers())))
    return Scope(chosen, linears, uncovered, mixers, first)


def mixers_without_rule(adapter: DecoderAdapter, layers: Sequence[int]) -> dict[str, str]:
    """Modules of these layers that are neither softmax attention nor gated delta nets, by name."""
    return {
        name: kind
        for layer in layers
        if not delta_nets_of(adapter, layer)
        for name, kind in adapter.other_mixers([layer]).items()
    }


def delta_nets_of(adapter: DecoderAdapter, layer: int) -> tuple[nn.Module, ...]:
    """The gated delta nets of a layer; an adapter need not know of any."""
    return adapter.delta_nets(layer) if isinstance(adapter, DeltaNets) else ()


def _scored_experts(
    adapter: DecoderAdapter, layers: Sequence[int], uncovered: Mapping[str, str]
) -> list[ScoredExperts]:
    find = getattr(adapter, "scored_experts", None)
    tensors: list[ScoredExperts] = [] if find is None else find(layers)
    if not tensors:
        name, reason = next(iter(uncovered.items()), ("", "no trainable tensor of experts"))
        raise ConfigError(
            "no expert of the scored layers can be captured",
            got=f"layers {list(layers)}: {name and name + ': '}{reason}",
            why="their rows are seen where transformers dispatches a mixture of experts "
            "(its ExpertsInterface), on trainable tensors",
            remedy="parameters='linears', or estimator='label', which follows any weight",
        )
    return tensors


def _first_use(
    adapter: DecoderAdapter,
    chosen: tuple[int, ...],
    linears: Sequence[ScoredLinear],
    uncovered: Mapping[str, str],
) -> int:
    """The lowest layer that holds a parameter in scope, weights shared between layers included."""
    # A graph that began above a second use of a weight would lack that use's part of the gradient.
    # The proof of coverage could not see it: autograd's gradient would lack the same part.
    named = dict(adapter.model.named_parameters(remove_duplicate=False))
    owned = {id(p) for linear in linears for p in (linear.weight, linear.bias) if p is not None}
    owned |= {id(named[name]) for name in uncovered}
    below = (
        layer
        for layer, block in enumerate(adapter.layers()[: chosen[0]])
        if any(id(p) in owned for p in block.parameters())
    )
    return next(below, chosen[0])


def used_outside(adapter: DecoderAdapter, first: int, parameters: Iterable[Tensor]) -> bool:
    """Whether a parameter also sits in a module outside the blocks from ``first`` on (tied).

    The graph must then start at the embeddings, or that part of its gradient is lost.
    """
    inside = {m for block in adapter.layers()[first:] for m in block.modules()}
    others = (m for m in adapter.model.modules() if m not in inside)
    elsewhere = {id(p) for module in others for p in module.parameters(recurse=False)}
    return any(id(parameter) in elsewhere for parameter in parameters)


@dataclass(frozen=True)
class LinearUse:
    """One call of a scored linear: its input x (detached) and its output s (in the graph).

    Of a linear x is (b, t, i) and s (b, t, o). Of experts, to c of which each token was sent, they
    are (b, t, c, i) and (b, t, c, o), and ``experts`` (b, t, c) says to which.

    ``execution`` is the number of the decoder-block call that it happened in, counted from the
    first scored layer on. It tells the uses of a block that is called at two depths from each
    other, which the name of the linear cannot.
    """

    linear: ScoredLinear
    x: Tensor
    s: Tensor
    execution: int
    experts: Tensor | None = None


@dataclass(frozen=True)
class AttentionUse:
    """One attention call: value states and head outputs (in the graph), and its statistics.

    Errors are taken at ``output``; Value-Propagation sends them on from ``value``. Of the hops
    within the layer, ``crossing`` says that the backward knows them by themselves.
    """

    module: nn.Module
    value: Tensor
    output: Tensor
    statistics: AttentionStatistics
    dropout: float
    execution: int
    crossing: ClassVar[bool] = True

    def propagated(
        self, error: Tensor, window: int | None, head_reduction: str
    ) -> tuple[Tensor, Tensor]:
        """Value-Propagation of errors at ``output``: a tensor of the graph, and the error there."""
        found = propagate_values(
            self.statistics, error, window=window, head_reduction=head_reduction
        )
        return self.value, found.to(self.value.dtype)


@dataclass(frozen=True)
class ConvolutionUse:
    """One convolution: its input and its output (in the graph), and its statistics."""

    x: Tensor
    y: Tensor
    statistics: ConvolutionStatistics


@dataclass(frozen=True)
class DeltaUse:
    """One call of a gated delta rule, and the convolution in front of it.

    As ``AttentionUse``, which it stands beside in ``Recorder.attentions``. ``value`` are the
    rule's values, made by the convolution; Value-Propagation goes on from the convolution's input,
    the output of the value projection.
    """

    module: nn.Module
    convolution: ConvolutionUse
    value: Tensor
    output: Tensor
    statistics: DeltaStatistics
    execution: int
    dropout: ClassVar[float] = 0.0
    crossing: ClassVar[bool] = False

    def propagated(
        self, error: Tensor, window: int | None, head_reduction: str
    ) -> tuple[Tensor, Tensor]:
        """Value-Propagation of errors at ``output``: the convolution's input, and the error there.

        With A_kp the coefficient of the value at p in the rule's output at k, and the tap of the
        convolution that lies j positions back,

            e~_t = sum_{k in (t, t+W]} sum_j taps_j f'(z_{t+j}) A_{k,t+j} e_k,

        the derivative of all o_k . e_k by the value projection's output at t, queries, keys and
        gates held. Where ``head_reduction`` is "mean", A is averaged over the value heads.

        Exactness: exact for the value rows of the last decoder layer with W = T. Oracle:
        ``alphatoken.oracle.delta_net.propagated``.
        """
        taps = self.convolution.statistics
        # The value at p = t + j counts from k = p on, but never k = t, and up to k = t + W.
        spans: list[Span] = [
            (int(j == 0), None if window is None else window - j) for j in range(taps.width)
        ]
        parts = self.statistics.carried(error, spans, mean=head_reduction == "mean")
        # Autograd brings each part from the values to their channels of the convolution's output.
        placed = [
            torch.autograd.grad(
                self.value, self.convolution.y, part.to(self.value.dtype), retain_graph=True
            )[0]
            for part in parts
        ]
        x = self.convolution.x
        return x, taps.gathered(placed).to(x.dtype)


@dataclass
class ObservedForward:
    """Arguments of one call of the model, and where its scored part began.

    ``hidden`` is the (detached) input of the first scored layer. ``plain`` says that the blocks
    below pass on a bare tensor, so that ``partial_forward.start_at`` can stand in for them.
    ``blocks`` counts the decoder blocks run from there on, ``attended`` holds the numbers of those
    whose attention came to the recorder, ``cached`` says that some of it read keys of a cache.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor | None = None
    plain: bool = False
    blocks: int = 0
    attended: set[int] = field(default_factory=set)
    cached: bool = False

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments by name; the first one by position is ``input_ids``."""
        return {**self.kwargs, **({"input_ids": self.args[0]} if self.args else {})}


@dataclass
class Recorder:
    """Keeps what the last forward with a graph left: uses of scored linears, attention calls.

    The hooks of ``record`` call it while the model runs. A user may run the model many times inside
    the context, with gradients (training) and without (generation, a reference), and only the last
    pass with a graph is to be valued. When a pass begins, its graph may not have begun: under
    ``graph_from_layer`` gradients are off until the first scored layer, and the first tensor in a
    graph appears there. So two passes are told apart, the one that began last and the one that is
    kept:

    ::

        model is called                     on_forward    begun = this pass
          with gradients on                 _keep         forward = begun, earlier uses forgotten
        first scored layer is entered       on_first_block  begun.hidden = its input
        a decoder block is entered          on_block      begun.blocks counts
        a scored linear has run             on_linear
          its output is in a graph          _keep         forward = begun, if it is not yet
                                                          linears gains this use
          its output is in none                           nothing is kept
        attention is called                 on_attention  likewise, into attentions
        the context ends                    clear         everything is let go

    So ``forward`` is None until a graph is seen, and stays the earlier pass while a later one
    without a graph runs. Label values need no graph: they read ``begun`` where ``forward`` is None.
    """

    scope: Scope
    switch: BackwardSwitch = field(default_factory=BackwardSwitch)
    linears: list[LinearUse] = field(default_factory=list)
    attentions: list[AttentionUse | DeltaUse] = field(default_factory=list)
    forward: ObservedForward | None = None  # the pass that is kept
    begun: ObservedForward | None = None  # the pass that began last, with a graph or without
    sharding: Sharding | None = None
    # The convolution of each delta net whose rule has not run yet; None: it was not in a graph.
    _convolved: dict[nn.Module, ConvolutionUse | None] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> dict[tuple[nn.Module, str], ScoredExperts]:
        """The experts in scope, by the module that holds them and their name in it."""
        experts = (one for one in self.scope.linears if isinstance(one, ScoredExperts))
        return {(one.module, one.parameter): one for one in experts}

    def repeatable(self, within: nn.Module | None = None) -> AbstractContextManager[None]:
        """Enter this around every backward through the recorded forward but the last.

        Sharded weights are freed when a backward leaves their module. Inside this context they are
        kept count of, so that the next backward finds them again. Without sharding it does nothing.

        Args:
            within: the module that the backward starts and ends in; None for the whole model.
        """
        return nullcontext() if self.sharding is None else self.sharding.repeatable(within)

    def clear(self) -> None:
        """Forget the last forward (and let go of its graph)."""
        self.linears.clear()
        self.attentions.clear()
        self._convolved.clear()
        self.forward = self.begun = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Forwards inside leave no trace: what was recorded before is what is kept."""
        kept = self.forward, self.begun, self.linears, self.attentions, self._convolved
        self.forward, self.begun = None, None
        self.linears, self.attentions, self._convolved = [], [], {}
        try:
            yield
        finally:
            self.forward, self.begun, self.linears, self.attentions, self._convolved = kept

    def _keep(self) -> None:
        """Make the pass that runs the one that is kept; called when a tensor in a graph is seen."""
        # This is the first such tensor of its pass, so what was recorded is an earlier pass's.
        # Dropping it here also frees that pass's graph before the new one grows.
        if self.begun is not self.forward:
            self.linears.clear()
            self.attentions.clear()
            self.forward = self.begun

    @property
    def latest(self) -> ObservedForward | None:
        """The pass that is kept; where none is, the one that began last."""
        return self.forward or self.begun

    @property
    def execution(self) -> int:
        """Number of the decoder-block call that runs; the first scored layer is number 1."""
        return 0 if self.begun is None else self.begun.blocks

    @property
    def attention_seen(self) -> bool:
        """Whether every block of the pass, in the graph or not, brought its attention here.

        It is False where a model computes attention without the registry, or where somebody put
        another entry into the registry that does not call ours. The self-only backward would then
        silently be the ordinary one in that block.
        """
        seen = self.latest
        if seen is None or not seen.blocks:
            return False
        return seen.attended.issuperset(range(1, seen.blocks + 1))

    @property
    def outputs(self) -> list[Tensor]:
        """Outputs of all linear uses, the tensors whose errors are asked for."""
        return [use.s for use in self.linears]

    def on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model runs: keep the arguments; forget the pass before if this has a graph."""
        self.begun = ObservedForward(args, kwargs)
        # With gradients off nothing is decided yet: generation never makes a graph, but a pass
        # under ``graph_from_layer`` does, once the first scored layer is entered.
        if torch.is_grad_enabled():
            self._keep()

    def on_first_block(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Before the first scored layer runs: keep its input, once a pass."""
        # A block that is used at two depths comes here twice; the graph starts at the first call.
        if self.begun is not None and self.begun.hidden is None:
            hidden = hidden_of(args, kwargs)
            self.begun.hidden = hidden.detach() if isinstance(hidden, Tensor) else None

    def on_trunk(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After the lowest block ran: note whether blocks pass on a tensor, or a tuple around it.

        ``partial_forward.start_at`` replaces the lower blocks by functions that return a tensor, so
        it can be used only where the model's own blocks do.
        """
        if self.begun is not None:
            self.begun.plain = isinstance(output, Tensor)

    def on_block(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before a decoder block runs: count it."""
        # The user has called a decoder block, not the model: there was no on_forward.
        if self.begun is None:
            self.begun = ObservedForward((), {})
        self.begun.blocks += 1

    def on_call(
        self, linear: ScoredLinear, module: nn.Module, args: tuple[Any, ...], output: Any
    ) -> Tensor | None:
        """After a scored linear ran; the forward hook that ``record`` puts on it."""
        if not isinstance(output, Tensor) or not args:
            return None
        return self.on_linear(linear, args[0], output)

    def on_linear(self, linear: ScoredLinear, x: Tensor, s: Tensor) -> Tensor | None:
        """Keep one use if it is in a graph; generation and reference models leave no trace.

        Shared experts are called on (b t, i), the positions of all rows one after the other. Such
        a use is kept as (b, t, i), and errors are asked for at a view that the model goes on with.

        Returns:
            That view in the shape of ``s``; None where the model goes on with ``s`` itself.

        Raises:
            ModelError: the linear was not called once on every position of the batch.
        """
        if not s.requires_grad:
            return None
        if s.ndim == 3:
            self._keep()
            self.linears.append(LinearUse(linear, x.detach(), s, self.execution))
            return None
        shape = self._positions(linear.name, s.shape[:-1])
        self._keep()
        x, rows = x.detach().reshape(*shape, -1), s.view(*shape, -1)
        self.linears.append(LinearUse(linear, x, rows, self.execution))
        return rows.view(s.shape)

    def _positions(self, name: str, rows: torch.Size) -> torch.Size:
        """(b, t) of the pass that runs, all of whose positions these rows are, one after the other.

        Raises:
            ModelError: they are more or fewer, or lie in more than one dimension.
        """
        hidden = None if self.begun is None else self.begun.hidden
        shape = torch.Size() if hidden is None else hidden.shape[:2]
        if len(shape) != 2 or rows != (shape.numel(),):
            raise ModelError(
                "a part of a decoder layer was not called once on every position",
                got=f"{name}: {tuple(rows)} rows of a batch of {tuple(shape)}",
                why="its rows cannot be assigned to positions",
                remedy="estimator='label', which follows any weight; experts can be left out by "
                "parameters='linears' with uncovered='skip'",
            )
        return shape

    def on_experts(
        self, module: nn.Module, parameter: str, x: Tensor, s: Tensor, experts: Tensor
    ) -> Tensor:
        """Keep the rows (n, c, .) of a mixture on their way through one of its tensors.

        Raises:
            ModelError: the mixture was not given every position of the batch once.
        """
        tensor = self.tensors.get((module, parameter))
        if tensor is None or not s.requires_grad:
            return s
        shape = self._positions(tensor.name, s.shape[:1])
        self._keep()
        # What is kept lies between the experts' product and all that follows, so that errors can
        # be asked for at it.
        rows = s.view(*shape, *s.shape[1:])
        self.linears.append(
            LinearUse(
                tensor,
                x.detach().unflatten(0, shape),
                rows,
                self.execution,
                experts.unflatten(0, shape),
            )
        )
        return rows.view(s.shape)

    def on_attention(self, call: AttentionCall, native: NativeAttention) -> Tensor:
        """Run one attention call with the switchable backward and keep it."""
        if self.begun is not None:
            self.begun.attended.add(self.execution)
        graph = torch.is_grad_enabled() and any(
            t.requires_grad for t in (call.query, call.key, call.value)
        )
        # Without a graph no backward comes. With more keys than queries a cache is in use, and the
        # statistics, which take query k and key k to be one position, would be wrong: such a pass
        # runs as the model's own, and ``require_self_rule`` refuses to value it.
        cached = call.query.shape[2] != call.key.shape[2]
        if graph and cached and self.begun is not None:
            self.begun.cached = True
        if not graph or cached:
            return native(call.query, call.key, call.value)
        self._keep()
        output, statistics = switchable_attention(call, native, self.switch)
        self.attentions.append(
            AttentionUse(call.module, call.value, output, statistics, call.dropout, self.execution)
        )
        return output

    def on_convolution(self, call: ConvolutionCall, native: NativeConvolution) -> Tensor:
        """Run the convolution of a delta net with the switchable backward; its rule comes next."""
        self._convolved[call.module] = None
        tensors = (call.x, call.weight, call.bias)
        if not torch.is_grad_enabled() or not any(
            t is not None and t.requires_grad for t in tensors
        ):
            return native(call.x)
        output, statistics = switchable_convolution(call, native, self.switch)
        self._convolved[call.module] = ConvolutionUse(call.x, output, statistics)
        return output

    def on_delta(self, call: DeltaCall, native: NativeDelta) -> Tensor:
        """Run one call of a gated delta rule with the switchable backward and keep it."""
        tensors = (call.query, call.key, call.value, call.decay, call.beta)
        seen = call.module in self._convolved
        convolution = self._convolved.pop(call.module, None)
        # A convolution that did not come here may be a kernel of its own, which nothing switches:
        # its block counts as one that was not seen. From a cache both come as single steps.
        if self.begun is not None and (seen or call.cached):
            self.begun.attended.add(self.execution)
        graph = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if graph and call.cached and self.begun is not None:
            self.begun.cached = True
        if not graph or call.cached:
            return native(*tensors)
        self._keep()
        output, statistics = switchable_delta_rule(call, native, self.switch)
        if convolution is not None:
            self.attentions.append(
                DeltaUse(call.module, convolution, call.value, output, statistics, self.execution)
            )
        return output

    def require_graph(self) -> None:
        """Raise unless a forward with a graph was recorded."""
        if not self.linears:
            raise ModelError(
                "no scored linear was seen in a forward pass with gradients",
                why="values need the inputs and errors of that pass",
                remedy="call the model inside the context, with gradients enabled, before values()",
            )


def accumulate_errors(
    recorder: Recorder, loss: Tensor, targets: Sequence[Tensor], mode: str
) -> list[Tensor | None]:
    """Errors d(loss)/d(target) under one backward mode; the graph and every .grad stay as is."""
    # The graph is retained because it is not ours alone: other errors are taken through it, and a
    # training step runs its own backward through it afterwards. Unused targets are no fault: the
    # loss may not reach an expert to which no token was sent.
    with recorder.switch.to(mode), recorder.repeatable():
        return list(torch.autograd.grad(loss, list(targets), retain_graph=True, allow_unused=True))


def stream_errors(
    recorder: Recorder,
    loss: Tensor,
    mode: str,
    consume: Callable[[int, Tensor], None],
    also: Sequence[Tensor] = (),
) -> tuple[list[Tensor | None], bool]:
    """Hand over the error of every linear use inside the backward, and keep none of them.

    The errors are those of ``accumulate_errors``, which holds all of them at once: as much memory
    as the activations of the scored layers. Here autograd is asked only for the errors of the
    lowest recorded block, and hooks receive those of all later uses as the backward passes them.
    Autograd visits only nodes that lead to what it was asked for, so a hook does not fire where no
    path leads down to the lowest block (a block with a detached input, say). Such uses are
    differentiated in a second call.

    Args:
        recorder: one recorded forward.
        loss: scalar of that forward; its graph, and every .grad, stay as they are.
        mode: of the attention backward.
        consume: gets (index in ``recorder.linears``, error); a use without a path gives nothing.
        also: tensors whose errors are returned.

    Returns:
        The errors at ``also``, and whether the loss reached anything that was recorded.
    """
    seen: set[int] = set()

    def hand_over(index: int, error: Tensor | None) -> None:
        if error is not None:  # a node runs with no error where a backward above gave none
            seen.add(index)
            consume(index, error)

    uses = recorder.linears
    # Executions are numbered in forward order, so the backward reaches the lowest number last.
    lowest = min((use.execution for use in uses), default=0)
    ends = [use.s for use in uses if use.execution == lowest]
    # The lowest block's uses have hooks too, so that every error is consumed in one way. Of what
    # autograd returns, only the errors at ``also`` are used.
    hooks = [use.s.register_hook(partial(hand_over, i)) for i, use in enumerate(uses)]
    try:
        errors = accumulate_errors(recorder, loss, [*ends, *also], mode)
    finally:
        # Before anything else: the training step's backward through this graph must not fire them.
        for hook in hooks:
            hook.remove()
    missed = [i for i in range(len(uses)) if i not in seen]
    late = accumulate_errors(recorder, loss, [uses[i].s for i in missed], mode) if missed else []
    for index, error in zip(missed, late, strict=True):
        hand_over(index, error)
    others = errors[len(ends) :]
    return others, bool(seen) or any(error is not None for error in others)


@contextmanager
def record(
    adapter: DecoderAdapter,
    scope: Scope,
    *,
    attention: bool = True,
    sharding: Sharding | None = None,
) -> Iterator[Recorder]:
    """Hook the model so that forwards inside the context are recorded; only the last one is kept.

    Args:
        adapter: of the model.
        scope: what to capture.
        attention: route softmax attention and gated delta nets of all layers from the first scored
            one on through the switchable backward. Self-only errors need it in the layers above the
            scored ones too, because they pass through their attention on the way down.
        sharding: of the weights.
    """
    recorder = Recorder(scope, sharding=sharding)
    blocks = adapter.layers()
    with ExitStack() as stack:
        handle = adapter.model.register_forward_pre_hook(recorder.on_forward, with_kwargs=True)
        stack.callback(handle.remove)
        first = blocks[scope.first].register_forward_pre_hook(
            recorder.on_first_block, with_kwargs=True
        )
        stack.callback(first.remove)
        stack.callback(blocks[0].register_forward_hook(recorder.on_trunk).remove)
        # Each block gets one hook: one that stands in the list twice would be counted twice a call.
        for block in {id(b): b for b in blocks[scope.first :]}.values():
            stack.callback(block.register_forward_pre_hook(recorder.on_block).remove)
        for linear in scope.linears:
            if not isinstance(linear, ScoredExperts):
                hook = partial(recorder.on_call, linear)
                stack.callback(linear.module.register_forward_hook(hook).remove)
        if recorder.tensors:
            mixtures = tuple(dict.fromkeys(module for module, _ in recorder.tensors))
            override: Any = getattr(adapter, "override_experts")  # noqa: B009  (no protocol has it)
            stack.enter_context(override(mixtures, recorder.on_experts))
        # A checkpointed block runs without a graph first, and once more inside the backward: there
        # would be no output to ask for errors at, and the second run would be recorded as another.
        stack.enter_context(adapter.pause_checkpointing(blocks[scope.first :]))
        if attention:
            modules = [
                module
                for layer in range(scope.first, len(blocks))
                for module in adapter.attention_modules(layer)
            ]
            stack.enter_context(adapter.override_attention(modules, recorder.on_attention))
            if isinstance(adapter, DeltaNets):
                nets = [
                    net
                    for layer in range(scope.first, len(blocks))
                    for net in adapter.delta_nets(layer)
                ]
                stack.enter_context(
                    adapter.override_delta_nets(nets, recorder.on_convolution, recorder.on_delta)
                )
        try:
            yield recorder
        finally:
            # The caller may hold the recorder for longer; its graph must not live on with it.
            recorder.clear()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode inside, and each one's own flag back afterwards.

    Compiled modules run as they were written: a compiled one does not call the hooks of its parts.
    """
    # Flag by flag, because ``model.train()`` at the end would also switch on those submodules that
    # the user keeps in eval mode.
    flags = {module: module.training for module in model.modules()}
    eager = torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()
    try:
        for module in flags:
            module.training = False
        with eager:
            yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of the model was compiled, in place or by a wrapper."""
    return any(m._compiled_call_impl is not None or is_wrapper(m) for m in model.modules())


def is_wrapper(model: nn.Module) -> bool:
    """Whether this is what ``torch.compile(model)`` gives."""
    return type(model).__module__.startswith("torch._dynamo")  # not imported, which takes seconds


_DRAWS = ("drop", "jitter", "noise")


def draws(model: nn.Module) -> bool:
    """Whether a forward of the model, in its modes as they are, may draw random numbers."""
    for module in model.modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        # Dropout, jitter of a router and noise on embeddings that are numbers of a module.
        rates = (v for k, v in vars(module).items() if any(word in k.lower() for word in _DRAWS))
        if any(isinstance(rate, (int, float)) and rate > 0 for rate in rates):
            return True
    return False


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The hidden states among the arguments of a decoder block."""
    return args[0] if args else kwargs.get("hidden_states")


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a decoder block with these hidden states in place of its own."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def _cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # A block that is used at two depths is entered twice; gradients are on since the first time,
    # and a second cut would take the graph between the two away.
    if torch.is_grad_enabled():
        return None
    # Gradients stay on for all that follows in this forward, the head included;
    # ``torch.no_grad`` in ``graph_from_layer`` puts the caller's setting back at the end.
    torch.set_grad_enabled(True)
    return with_hidden(args, kwargs, hidden_of(args, kwargs).detach().requires_grad_())


@contextmanager
def graph_from_layer(adapter: DecoderAdapter, first: int) -> Iterator[None]:
    """Build the graph from the input of layer ``first`` on; the layers below leave none.

    Inside, gradients are off until that decoder block is entered, which saves the activations of
    the layers below. The block's input is then detached and made to require gradients, so that
    errors exist even where the weights between two scored linears are frozen.
    """
    block = adapter.layers()[first]
    handle = block.register_forward_pre_hook(_cut, with_kwargs=True)
    try:
        with torch.no_grad():
            yield
    finally:
        handle.remove()
