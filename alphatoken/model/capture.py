"""Inputs, outputs and errors of scored linears in a forward that the model does not notice.

``record`` hooks the model, so that a ``Recorder`` gathers the uses of the scored linears and of
attention while the model runs. When the context is left, also by an exception, all that was changed
on the model (hooks, attention dispatch, checkpointing flags) is put back. Errors come by
``torch.autograd.grad``: no ``.grad`` is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.errors import ModelError
from alphatoken.model.attention import AttentionUse, switchable_attention
from alphatoken.model.delta_rule import (
    ConvolutionStatistics,
    DeltaUse,
    switchable_convolution,
    switchable_delta_rule,
)
from alphatoken.model.forward import hidden_of
from alphatoken.model.observed_forward import ObservedForward, scores_in
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
    attention_overridden,
)
from alphatoken.model.scope import Scope
from alphatoken.model.sharding import Sharding
from alphatoken.model.switch import BackwardSwitch

_Convolution = tuple[Tensor, Tensor, ConvolutionStatistics]
"""Input, output and statistics of one call."""


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
    capturing: bool = True  # whether inputs and outputs of uses are kept, or their graph alone
    switch: BackwardSwitch = field(default_factory=BackwardSwitch)
    linears: list[LinearUse] = field(default_factory=list)
    nodes: dict[Any, torch.dtype] = field(default_factory=dict)  # in place of ``linears``
    attentions: list[AttentionUse | DeltaUse] = field(default_factory=list)
    forward: ObservedForward | None = None  # the pass that is kept
    begun: ObservedForward | None = None  # the pass that began last, with a graph or without
    sharding: Sharding | None = None
    weights: frozenset[torch.dtype] = frozenset()  # dtypes of the model's, scored or not
    # The convolution of each delta net whose rule has not run yet; None: it was not in a graph.
    _convolved: dict[nn.Module, _Convolution | None] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> dict[tuple[nn.Module, str], ScoredExperts]:
        """The experts in scope, by the module that holds them and their name in it."""
        experts = (one for one in self.scope.linears if isinstance(one, ScoredExperts))
        return {(one.module, one.parameter): one for one in experts}

    def repeatable(self, within: nn.Module | None = None) -> AbstractContextManager[None]:
        """Enter this around every backward through the recorded forward but the last.

        See ``Sharding.repeatable``; without sharding it does nothing.
        """
        return nullcontext() if self.sharding is None else self.sharding.repeatable(within)

    def clear(self) -> None:
        """Forget the last forward, and let its graph go."""
        self.linears.clear()
        self.nodes.clear()
        self.attentions.clear()
        self._convolved.clear()
        self.forward = self.begun = None

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Forwards inside leave no trace: what was recorded before is what is kept."""
        kept = self.forward, self.begun, self.linears, self.nodes, self.attentions, self._convolved
        self.forward, self.begun = None, None
        self.linears, self.nodes, self.attentions, self._convolved = [], {}, [], {}
        try:
            yield
        finally:
            (
                self.forward, self.begun, self.linears, self.nodes, self.attentions,
                self._convolved,
            ) = kept  # fmt: skip

    def _keep(self) -> None:
        """Make the pass that runs the one that is kept."""
        # A tensor in a graph is met, and it is the first of its pass, so what was recorded is an
        # earlier pass's. Dropping it here also frees that pass's graph before the new one grows.
        if self.begun is not self.forward:
            self.linears.clear()
            self.nodes.clear()
            self.attentions.clear()
            self.forward = self.begun

    @property
    def latest(self) -> ObservedForward | None:
        """The pass that is kept; where none is, the one that began last."""
        return self.forward or self.begun

    @property
    def products(self) -> frozenset[torch.dtype]:
        """Dtypes that round the pass: the weights', its scored linears', and its first layer's."""
        began = None if self.latest is None else self.latest.products
        # Autocast that a block enters by itself shows in what its linears give.
        here = [*self.nodes.values(), *(use.s.dtype for use in self.linears)]
        return self.weights.union(here if began is None else [*here, began])

    @property
    def execution(self) -> int:
        """Number of the decoder-block call that runs; the first scored layer is number 1."""
        return 0 if self.begun is None else self.begun.blocks

    @property
    def attention_seen(self) -> bool:
        """True if every block of the pass, in the graph or not, brought its attention here."""
        # It is False where a model computes attention without the registry, or where somebody put
        # another entry into the registry that does not call ours. The self-only backward would then
        # silently be the ordinary one in that block.
        latest = self.latest
        if latest is None or not latest.blocks:
            return False
        return latest.attended.issuperset(range(1, latest.blocks + 1))

    @property
    def outputs(self) -> list[Tensor]:
        """Outputs of all linear uses, the tensors whose errors are asked for."""
        return [use.s for use in self.linears]

    def on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the model's arguments; forget the pass before if this one has a graph."""
        self.begun = ObservedForward(module, args, kwargs)
        # With gradients off nothing is decided yet: generation never makes a graph, but a pass
        # under ``graph_from_layer`` does, once the first scored layer is entered.
        if torch.is_grad_enabled():
            self._keep()

    def on_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep what the model returned; blocks that run after this are not of its call."""
        if self.begun is not None:
            self.begun.leave(scores_in(output))

    def on_first_block(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Keep the input of the first scored layer, once a pass."""
        # A block that is used at two depths comes here twice; the graph starts at the first call.
        if self.begun is not None and self.begun.hidden is None:
            hidden = hidden_of(args, kwargs)
            if isinstance(hidden, Tensor):
                device = hidden.device.type
                cast = torch.is_autocast_enabled(device)
                self.begun.hidden = hidden.detach()
                self.begun.products = torch.get_autocast_dtype(device) if cast else hidden.dtype

    def on_trunk(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note if the lowest block passed on a tensor, or a tuple around it."""
        # ``forward.start_at`` replaces the lower blocks by functions that return a tensor, so it
        # can be used only where the model's own blocks do.
        if self.begun is not None:
            self.begun.plain = isinstance(output, Tensor)

    def on_block(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Count a decoder block before it runs."""
        if _inside_backward():
            return
        if self.begun is None or self.begun.returned:  # the decoder by itself was called
            self.begun = ObservedForward()
            if torch.is_grad_enabled():
                self._keep()
        self.begun.blocks += 1

    def on_linear(
        self, linear: ScoredLinear, module: nn.Module, args: tuple[Any, ...], s: Any
    ) -> Tensor | None:
        """Keep one use if it is in a graph; generation and reference models leave no trace.

        Raises:
            ModelError: the linear was not called once on every position of the batch.
        """
        if not isinstance(s, Tensor) or not args or not s.requires_grad or _inside_backward():
            return None
        if not self.capturing:  # nothing is asked of it but where scores come from
            self._keep()
            self.nodes[s.grad_fn] = s.dtype
            return None
        x: Tensor = args[0]
        if s.ndim == 3:
            self._keep()
            self.linears.append(LinearUse(linear, x.detach(), s, self.execution))
            return None
        # Shared experts are called on (b t, i), the positions of all rows one after the other. Such
        # a use is kept as (b, t, i); errors are asked for at a view that the model goes on with.
        shape = self._positions(linear.name, s.shape[:-1])
        self._keep()
        x, rows = x.detach().reshape(*shape, -1), s.view(*shape, -1)
        self.linears.append(LinearUse(linear, x, rows, self.execution))
        return rows.view(s.shape)

    def _positions(self, name: str, rows: torch.Size) -> torch.Size:
        """(b, t) of the pass that runs, all of whose positions these rows are, in order."""
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
        if tensor is None or not s.requires_grad or _inside_backward():
            return s
        shape = self._positions(tensor.name, s.shape[:1])
        self._keep()
        # What is kept lies between the experts' product and all that follows, so that errors can
        # be asked for at it.
        rows = s.view(*shape, *s.shape[1:])
        x, experts = x.detach().unflatten(0, shape), experts.unflatten(0, shape)
        self.linears.append(LinearUse(tensor, x, rows, self.execution, experts))
        return rows.view(s.shape)

    def _joins(self, tensors: Sequence[Tensor], *, cached: bool, complete: bool = True) -> bool:
        """Note the call of a mixer, and say whether it is recorded: in a graph, without a cache."""
        graph = _in_graph(tensors)
        if self.begun is not None:
            if complete:
                self.begun.attended.add(self.execution)
            # It runs as the model's own, and ``require_self_rule`` refuses to value the pass.
            self.begun.cached |= graph and cached
        if graph and not cached:
            self._keep()
        return graph and not cached

    def on_attention(self, call: AttentionCall, native: NativeAttention) -> Tensor:
        """Run one attention call with the switchable backward and keep it."""
        tensors = (call.query, call.key, call.value)
        # With more keys than queries a cache is in use, and the statistics, which take query k and
        # key k to be one position, would be wrong.
        cached = call.query.shape[2] != call.key.shape[2]
        if not self._joins(tensors, cached=cached):
            return native(*tensors)
        output, statistics = switchable_attention(call, native, self.switch)
        if not _inside_backward():
            self.attentions.append(
                AttentionUse(
                    call.module, call.value, output, statistics, call.dropout, self.execution
                )
            )
        return output

    def on_convolution(self, call: ConvolutionCall, native: NativeConvolution) -> Tensor:
        """Run the convolution of a delta net with the switchable backward; its rule comes next."""
        self._convolved[call.module] = None
        if not _in_graph((call.x, call.weight, call.bias)):
            return native(call.x)
        output, statistics = switchable_convolution(call, native, self.switch)
        self._convolved[call.module] = (call.x, output, statistics)
        return output

    def on_delta(self, call: DeltaCall, native: NativeDelta) -> Tensor:
        """Run one call of a gated delta rule with the switchable backward and keep it."""
        tensors = (call.query, call.key, call.value, call.decay, call.beta)
        convolved = call.module in self._convolved
        convolution = self._convolved.pop(call.module, None)
        # A convolution that did not come here may be a kernel of its own, which nothing switches:
        # its block counts as one that was not seen. From a cache both come as single steps.
        if not self._joins(tensors, cached=call.cached, complete=convolved or call.cached):
            return native(*tensors)
        output, statistics = switchable_delta_rule(call, native, self.switch)
        if convolution is not None and not _inside_backward():
            self.attentions.append(
                DeltaUse(call.module, *convolution, call.value, output, statistics, self.execution)
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


def _in_graph(tensors: Sequence[Tensor | None]) -> bool:
    """True if a backward comes to what is made of these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _inside_backward() -> bool:
    """True in a forward that a backward runs, as that of a block which its user checkpoints.

    It goes through the same nodes as the first one, whose uses are the ones that are kept.
    """
    return torch._C._current_graph_task_id() != -1


@contextmanager
def record(
    adapter: DecoderAdapter,
    scope: Scope,
    *,
    attention: bool = True,
    capturing: bool = True,
    sharding: Sharding | None = None,
) -> Iterator[Recorder]:
    """Hook the model so that forwards inside the context are recorded; only the last one is kept.

    Args:
        adapter: of the model.
        scope: what to capture.
        attention: route softmax attention and gated delta nets of all layers from the first scored
            one on through the switchable backward.
        capturing: keep inputs and outputs of the scored linears, whose errors can then be asked
            for. Else blocks that checkpoint go on doing so, and only the graph of scores is known.
        sharding: of the weights.
    """
    weights = frozenset(p.dtype for p in adapter.model.parameters() if p.is_floating_point())
    recorder = Recorder(scope, capturing, sharding=sharding, weights=weights)
    blocks = adapter.layers()
    with ExitStack() as stack:
        for module, enter in (
            (adapter.model, recorder.on_forward),
            (blocks[scope.first], recorder.on_first_block),
        ):
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        leave = adapter.model.register_forward_hook(recorder.on_output, always_call=True)
        stack.callback(leave.remove)
        stack.callback(blocks[0].register_forward_hook(recorder.on_trunk).remove)
        # Each block gets one hook: one that stands in the list twice would be counted twice a call.
        for block in {id(b): b for b in blocks[scope.first :]}.values():
            stack.callback(block.register_forward_pre_hook(recorder.on_block).remove)
        for linear in scope.linears:
            if not isinstance(linear, ScoredExperts):
                hook = partial(recorder.on_linear, linear)
                stack.callback(linear.module.register_forward_hook(hook).remove)
        if recorder.tensors and capturing:
            mixtures = tuple(dict.fromkeys(module for module, _ in recorder.tensors))
            override: Any = getattr(adapter, "override_experts")  # noqa: B009  (no protocol has it)
            stack.enter_context(override(mixtures, recorder.on_experts))
        # A checkpointed block runs without a graph first, and once more inside the backward: there
        # would be no output to ask for errors at, and the second run would be recorded as another.
        if capturing:
            stack.enter_context(adapter.pause_checkpointing(blocks[scope.first :]))
        if attention:
            # Self-only errors need it in the layers above the scored ones too, because they pass
            # through their attention on the way down.
            layers = range(scope.first, len(blocks))
            modules = [module for layer in layers for module in adapter.attention_modules(layer)]
            stack.enter_context(attention_overridden(adapter, modules, recorder.on_attention))
            if isinstance(adapter, DeltaNets):
                nets = [net for layer in layers for net in adapter.delta_nets(layer)]
                stack.enter_context(
                    adapter.override_delta_nets(nets, recorder.on_convolution, recorder.on_delta)
                )
        try:
            yield recorder
        finally:
            # The caller may hold the recorder for longer; its graph must not live on with it.
            recorder.clear()


def graph_nodes(tensor: Tensor) -> Iterator[Any]:
    """Nodes of the graph that ends in a tensor, each once."""
    visited, waiting = set[Any](), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            waiting += [above for above, _ in node.next_functions]


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
    as the activations of the scored layers.

    Args:
        recorder: one recorded forward.
        loss: scalar of that forward; its graph, and every .grad, stay as they are.
        mode: of the attention backward.
        consume: gets (index in ``recorder.linears``, error); a use without a path gives nothing.
        also: tensors whose errors are returned.

    Returns:
        The errors at ``also``, and whether the loss reached anything that was recorded.
    """
    consumed: set[int] = set()

    def hand_over(index: int, error: Tensor | None) -> None:
        if error is not None:  # a node runs with no error where a backward above gave none
            consumed.add(index)
            consume(index, error)

    uses = recorder.linears
    # Autograd is asked only for the errors of the lowest recorded block, and hooks receive those of
    # all later uses as the backward passes them. Executions are numbered in forward order, so the
    # backward reaches the lowest number last.
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
    # Autograd visits only nodes that lead to what it was asked for, so a hook does not fire where
    # no path leads down to the lowest block: one with a detached input lies between, say.
    missed = [i for i in range(len(uses)) if i not in consumed]
    late = accumulate_errors(recorder, loss, [uses[i].s for i in missed], mode) if missed else []
    for index, error in zip(missed, late, strict=True):
        hand_over(index, error)
    others = errors[len(ends) :]
    return others, bool(consumed) or any(error is not None for error in others)
