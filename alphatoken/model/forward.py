"""Forwards of the library's own: in evaluation mode, above the trunk alone, without logits.

*The trunk*, the layers below the first scored one: a scoring pass changes nothing in it, so no
graph is built there, and where a forward on the same tokens has run before, it need not run again.
Two places use it: label values, whose dual forward follows a training forward, and DPO's objective,
which needs two forwards of each branch. Whether the model allows it is not taken for granted: the
token losses of the shortened forward are compared with the recorded ones, and where they differ the
whole forward is run.

*Response losses* need the logits of no position but the responses'. The model's head is given one
position instead of all, and what it should have been given is kept; ``head.head_losses`` then takes
the losses of the response tokens, a block of the vocabulary at a time. Whether a model's logits are
what its head says, and not scaled or capped afterwards, is not taken for granted either: at each
pass they must be the very tensor that the head gave, not written to since, or that tensor in
another dtype (mixed precision). Else the model runs again as it is, now and ever after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from alphatoken.errors import ModelError
from alphatoken.model.batch import by_prediction, token_losses
from alphatoken.model.head import HeadUse, head_losses, output_head, rounding_tolerance
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.support.devices import holds

# --- modes of the model ---------------------------------------------------------------------------


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode inside, and each one's own flag back afterwards.

    Compiled modules run as they were written: a compiled one does not call the hooks of its parts.
    Rotary frequencies that follow the length of what was run last come back too: a forward of ours
    is none of the user's.
    """
    # Flag by flag, because ``model.train()`` at the end would also switch on those submodules that
    # the user keeps in eval mode.
    flags = {module: module.training for module in model.modules()}
    eager = torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()
    try:
        for module in flags:
            module.training = False
        with eager, kept_frequencies(model):
            yield
    finally:
        for module, flag in flags.items():
            module.training = flag


@contextmanager
def kept_frequencies(model: nn.Module) -> Iterator[None]:
    """Bring rotary frequencies back at the end that follow the length of what was run last.

    Dynamic scaling keeps those of the longest row so far, and reads the next ones by them. So a
    forward of our own would change the next one of the user's, and another of our own.
    """
    kept: list[tuple[nn.Module, dict[str, Any], dict[str, tuple[Tensor, Tensor]]]] = []
    for module in model.modules():
        if "max_seq_len_cached" in vars(module):
            numbers = {k: v for k, v in vars(module).items() if k.endswith(_OF_LENGTH)}
            few = {n: b for n, b in module._buffers.items() if b is not None and b.numel() <= _FEW}
            # Another buffer is put in their place, or they are written to.
            kept.append((module, numbers, {n: (b, b.detach().clone()) for n, b in few.items()}))
    try:
        yield
    finally:
        for module, numbers, buffers in kept:
            vars(module).update(numbers)
            for name, (buffer, copy) in buffers.items():
                module._buffers[name] = buffer
                if not buffer.is_meta:
                    buffer.data.copy_(copy)


_OF_LENGTH = ("max_seq_len_cached", "attention_scaling")
_FEW = 4096
"""Numbers of frequencies at most: tables of cosines are only ever added to."""


def is_compiled(model: nn.Module) -> bool:
    """True if a part of the model was compiled, in place or by a wrapper."""
    return any(m._compiled_call_impl is not None or is_wrapper(m) for m in model.modules())


def is_wrapper(model: nn.Module) -> bool:
    """True if this is what ``torch.compile(model)`` gives."""
    return type(model).__module__.startswith("torch._dynamo")  # not imported, which takes seconds


@cache
def _sounds_random(attribute: str) -> bool:
    """True if a number of this name may be a rate of random draws."""
    return any(word in attribute.lower() for word in ("drop", "jitter", "noise"))


def draws(model: nn.Module) -> bool:
    """True if a forward of the model, in its modes as they are, may draw random numbers."""
    for module in model.modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        # Dropout, jitter of a router and noise on embeddings that are numbers of a module.
        rates = (v for k, v in vars(module).items() if _sounds_random(k))
        if any(_positive(rate) for rate in rates):
            return True
    return False


def _positive(rate: object) -> bool:
    """True if this is a positive number, or holds one: some keep one for each name or layer."""
    if isinstance(rate, Mapping):
        return any(_positive(one) for one in rate.values())
    if isinstance(rate, (list, tuple)):
        return any(map(_positive, rate))
    return isinstance(rate, (int, float)) and rate > 0


def checkpoints(adapter: DecoderAdapter) -> bool:
    """Whether decoder blocks trade time for memory in training: gradient checkpointing.

    An adapter says so by a method of this name, which it need not have.
    """
    own = getattr(adapter, "checkpoints", None)
    return own is not None and bool(own())


@contextmanager
def checkpointed(adapter: DecoderAdapter, first: int) -> Iterator[None]:
    """Run the blocks from ``first`` on under gradient checkpointing, where training does so.

    A forward inside, in evaluation mode, keeps the inputs of these blocks alone; its backward runs
    each block once more, in that mode whatever the model's is by then.
    """

    def of_evaluation(block: nn.Module) -> Callable[..., Any]:
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with evaluation_mode(block):
                return forward(*args, **kwargs)

        return run

    # By itself the model checkpoints in training mode only, by a flag that its dropout may read.
    blocks = adapter.layers()[first:] if checkpoints(adapter) else ()
    missing = object()
    before = {block: block.__dict__.get("forward", missing) for block in blocks}
    try:
        for block in before:
            block.__dict__["forward"] = partial(
                checkpoint, of_evaluation(block), use_reentrant=False, preserve_rng_state=False
            )
        yield
    finally:
        _put_back(before, missing)


def _put_back(before: Mapping[nn.Module, object], missing: object) -> None:
    """Give modules the ``forward`` of their instance again; ``missing``: that of their class."""
    for block, own in before.items():
        if own is missing:
            block.__dict__.pop("forward", None)
        else:
            block.__dict__["forward"] = own


def tokens_beside_weights(adapter: DecoderAdapter, first: int | None) -> int:
    """Tokens whose activations take the memory that the gradients of the model will take.

    Counted in numbers: inputs and outputs of the matrices of each block from ``first`` on (None:
    of all), which is what a block keeps for its backward, but for norms and what its matrices
    share; where blocks checkpoint, the input of each and all of one block.
    """
    trained = sum(p.numel() for p in adapter.model.parameters() if p.requires_grad)
    kept, inputs = [], []
    for block in adapter.layers()[first or 0 :]:
        shapes = [p.shape[-2:] for p in block.parameters() if p.dim() >= 2]
        kept.append(sum(map(sum, shapes)))
        inputs.append(min(shapes[0], default=0) if shapes else 0)
    of_token = sum(inputs) + max(kept, default=0) if checkpoints(adapter) else sum(kept)
    return trained // max(of_token, 1)


# --- the trunk ------------------------------------------------------------------------------------


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


@dataclass
class Start:
    """A forward that has run: the input of the first scored layer, and the losses it led to.

    ``refused`` is set when starting there did not give these losses again.
    """

    hidden: Tensor
    losses: Tensor
    refused: bool = False

    def gives(self, losses: Tensor, mask: Tensor) -> bool:
        """True if these losses equal the recorded ones within ``rounding_tolerance``."""
        autocast = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
        tolerance = rounding_tolerance(torch.bfloat16 if autocast else self.hidden.dtype)
        again, recorded = losses.detach()[mask].double(), self.losses[mask].double()
        return bool(torch.isclose(again, recorded, rtol=tolerance, atol=tolerance).all())


def can_start_at(adapter: DecoderAdapter, first: int) -> bool:
    """True if there are blocks below ``first`` and none of them is used again from there on.

    ``start_at`` switches the lower blocks off by object, and would switch such a block off above.
    """
    blocks = adapter.layers()
    above = {id(block) for block in blocks[first:]}
    return first > 0 and all(id(block) not in above for block in blocks[:first])


@contextmanager
def remember_start(adapter: DecoderAdapter, first: int) -> Iterator[list[Tensor]]:
    """Inputs of layer ``first`` of the forwards inside, in order, for ``start_at``.

    There are none after the context where a block hands on more than a tensor: the functions that
    ``start_at`` puts in place of blocks return one.
    """
    blocks, inputs, outputs = adapter.layers(), list[Tensor](), list[type]()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(hidden_of(args, kwargs).detach())

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs.append(type(output))

    handles = [
        blocks[first].register_forward_pre_hook(enter, with_kwargs=True),
        blocks[0].register_forward_hook(leave),
    ]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()
    if not all(issubclass(kind, Tensor) for kind in outputs):
        inputs.clear()


@contextmanager
def start_at(adapter: DecoderAdapter, first: int, hidden: Tensor) -> Iterator[None]:
    """Let the one forward inside begin at the input ``hidden`` of layer ``first``, above the trunk.

    Embeddings, masks and position tables are computed as ever, and the blocks of the trunk hand on
    what they get. A model that hands more than the hidden states from block to block (shared keys
    and values, say) will not give the same losses; whoever uses this compares them.
    """
    blocks = adapter.layers()

    def pass_on(*args: Any, **kwargs: Any) -> Any:
        return hidden_of(args, kwargs)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handle.remove()  # a block used at two depths: only the first call starts here
        # Under ``graph_from_layer`` gradients are on by now: its hook was registered earlier, so it
        # has just run. What it cut off is replaced, so the new input must begin the graph instead.
        start = hidden.requires_grad_() if torch.is_grad_enabled() else hidden
        return with_hidden(args, kwargs, start)

    hidden = hidden.detach()
    # ``forward`` is replaced in the instance, which hides the method of the class; hooks still run.
    # Libraries that wrap a block's forward do the same, so a former entry is kept and put back.
    missing = object()
    before = {block: block.__dict__.get("forward", missing) for block in blocks[:first]}
    handle = blocks[first].register_forward_pre_hook(enter, with_kwargs=True)
    try:
        for block in before:
            block.__dict__["forward"] = pass_on
        yield
    finally:
        handle.remove()
        _put_back(before, missing)


def losses_from(
    adapter: DecoderAdapter,
    first: int | None,
    start: Start | None,
    mask: Tensor,
    run: Callable[[], Tensor],
) -> Tensor:
    """Token losses of ``run()``, without the trunk if that gives those of ``start`` again."""
    if first is not None and start is not None and can_start_at(adapter, first):
        with start_at(adapter, first, start.hidden):
            losses = run()
        if start.gives(losses, mask):
            return losses
    return run()


# --- losses without logits ------------------------------------------------------------------------

_CHANGED: WeakSet[nn.Module] = WeakSet()
"""Heads of models whose logits are not what the head gives."""
_UNCHANGED: WeakSet[nn.Module] = WeakSet()
"""Heads of models whose logits were what the head gives, in one pass at least."""


def _refuse_changed(head: nn.Module) -> None:
    _CHANGED.add(head)
    raise ModelError(
        "the model's logits are no longer what its head gives",
        got=f"other numbers than those of {type(head).__name__}",
        why="losses were taken of the head's, as they could be in passes before",
        remedy="take the values, or the step, once more: logits are formed from here on",
    )


_CASTS = (Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type)


class _HeadInput(TorchFunctionMode):
    """Inputs, weights and outputs of the head, set by its hooks; follows outputs through casts."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.output: Tensor | None = None
        self.casts: list[tuple[Tensor, int]] = []  # with their versions; the output itself is first
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CASTS and self.is_handed_on(args[0]):
            self.casts.append((result, result._version))
        return result

    def cut(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Keep the input, and hand on its last position alone."""
        self.calls += 1
        hidden = args[0] if len(args) == 1 else None
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return None
        # Read here, because inside ``functional_call`` the module has other weights than outside.
        self.hidden, self.weight, self.bias = hidden, module.weight, module.bias  # type: ignore[assignment]
        return (hidden[:, -1:],)

    def hear(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep what the head gave for that position."""
        if isinstance(output, Tensor):
            # A copy, since a write through ``.data`` counts as none.
            self.output = _primal(output).clone()
            self.casts = [(output, output._version)]

    def is_handed_on(self, logits: Tensor) -> bool:
        """True if this is what the head gave, or a cast of it, and was not written to."""
        return any(logits is t and t._version == version for t, version in self.casts)

    def gives(self, head: nn.Module, logits: Tensor, labels: Tensor) -> bool:
        """True if the model's logits are the head's own."""
        if self.calls != 1 or self.hidden is None or self.hidden.shape[:2] != labels.shape:
            return False
        differ = self._differ(logits) if self.is_handed_on(logits) else None
        if differ is None:
            return False
        equal = holds(differ, partial(_refuse_changed, head), before=head in _UNCHANGED)
        if equal:
            _UNCHANGED.add(head)
        return equal

    def _differ(self, logits: Tensor) -> Tensor | None:
        """Whether the head's numbers are other than the model's; None if they have no equals."""
        # Weights spread over devices: the head's own hooks move its input.
        if self.output is None or self.hidden is None or self.hidden.device != logits.device:
            return None
        own, theirs = self.output.to(logits.dtype), _primal(logits)
        if own.shape != theirs.shape:
            return None
        return ~((own == theirs) | (own.isnan() & theirs.isnan())).all()


def _primal(tensor: Tensor) -> Tensor:
    primal: Tensor = forward_ad.unpack_dual(tensor).primal
    return primal.detach()


def response_losses(
    adapter: DecoderAdapter,
    inputs: Mapping[str, Any],
    labels: Int[Tensor, "b t"],
    *,
    role: str = "batch",
    run: Callable[[], Tensor] | None = None,
    observed: HeadUse | None = None,
) -> Float[Tensor, "b t"]:
    """``token_losses(adapter.forward(inputs), labels)``, without logits where they can be spared.

    Args:
        adapter: of the model.
        inputs: of its forward.
        labels: unshifted, -100 ignored; see ``predicted_labels``.
        role: how messages call this batch.
        run: gives the logits by a forward of the caller's own, in place of ``adapter.forward``.
        observed: the head's call in an earlier forward on these tokens. Where ``run`` is a dual
            forward that gives the head the same hidden states, losses and errors are of that call.

    Returns:
        (b, t) in float32 or wider; differentiable as ``head_losses`` is, once in reverse mode.

    Raises:
        InputError: a label that is no token of the vocabulary.

    Exactness: exact up to rounding. Oracle: ``alphatoken.oracle.gradients.token_losses``.
    """
    run = kept_frequencies(adapter.model)(run or partial(adapter.forward, inputs))
    head = output_head(adapter)
    if head is not None and head not in _CHANGED:
        logits, head_input = _cut_run(head, run)
        if head_input.gives(head, logits, labels):
            return _of_hidden(head_input, labels, role, observed)
        # Nothing was cut where the head was not called, or not on hidden states.
        if head_input.hidden is None:
            return token_losses(logits, labels, role=role)
        _CHANGED.add(head)
    return token_losses(run(), labels, role=role)


def spares_logits(adapter: DecoderAdapter) -> bool:
    """Whether ``response_losses`` forms no logits, as far as its forwards so far have shown."""
    head = output_head(adapter)
    return head is not None and head not in _CHANGED


def _cut_run(head: nn.Linear, run: Callable[[], Tensor]) -> tuple[Tensor, _HeadInput]:
    """A forward whose head is asked about one position; its logits, and what the head saw."""
    head_input = _HeadInput()
    handles = (
        head.register_forward_pre_hook(head_input.cut),
        # First of all hooks: what others make of the output is another tensor, or another version.
        head.register_forward_hook(head_input.hear, prepend=True),
    )
    try:
        with head_input:
            return run(), head_input
    finally:
        for handle in handles:
            handle.remove()


def _of_hidden(
    head_input: _HeadInput, labels: Tensor, role: str, observed: HeadUse | None
) -> Tensor:
    hidden, weight, bias = head_input.hidden, head_input.weight, head_input.bias
    assert hidden is not None
    assert weight is not None

    def losses_at(positions: Tensor, targets: Tensor) -> Tensor:
        chosen, losses = hidden.flatten(0, 1)[positions], None
        if observed is not None:
            losses = observed.dual_losses(chosen, weight, bias, positions, targets)
        return head_losses(chosen, weight, bias, targets)[0] if losses is None else losses

    return by_prediction(labels, losses_at, vocabulary=len(weight), role=role)
