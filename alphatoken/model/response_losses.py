"""Token losses of a forward of our own, which needs the logits of no position but its responses'.

The model's head is given one position instead of all, and what it should have been given is kept;
``head.head_losses`` then takes the losses of the response tokens, a block of the vocabulary at a
time. Whether a model's logits are what its head says, and not scaled or capped afterwards, is not
taken for granted: at each pass they must be the very tensor that the head gave, not written to
since, or that tensor in another dtype (mixed precision). Else the model runs again as it is, now
and ever after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from alphatoken.model.batch import by_prediction, token_losses
from alphatoken.model.head import HeadUse, head_losses, output_head
from alphatoken.model.modes import kept_frequencies
from alphatoken.model.protocol import DecoderAdapter

__all__ = ["response_losses"]

_CHANGED: WeakSet[nn.Module] = WeakSet()
"""Heads of models whose logits are not what the head gives."""

_CASTS = (Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type)


class _Followed(TorchFunctionMode):
    """Follows what the head gave through casts, and through nothing else."""

    def __init__(self, head_input: _HeadInput) -> None:
        super().__init__()
        self.head_input = head_input

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CASTS and self.head_input.is_handed_on(args[0]):
            self.head_input.handed_on.append((result, result._version))
        return result


@dataclass
class _HeadInput:
    """Inputs, weights and outputs of the head, set by its hooks."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    said: Tensor | None = None
    handed_on: list[tuple[Tensor, int]] = field(default_factory=list)
    calls: int = 0

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
            self.said = _primal(output).clone()
            self.handed_on = [(output, output._version)]

    def is_handed_on(self, logits: Tensor) -> bool:
        """True if this is what the head gave, or a cast of it, and was not written to."""
        return any(logits is t and t._version == version for t, version in self.handed_on)

    def gives(self, logits: Tensor, labels: Tensor) -> bool:
        """True if the model's logits are the head's own."""
        if self.calls != 1 or self.hidden is None or self.hidden.shape[:2] != labels.shape:
            return False
        return self.is_handed_on(logits) and self._equal(logits)

    def _equal(self, logits: Tensor) -> bool:
        # Weights spread over devices: the head's own hooks move its input.
        if self.said is None or self.hidden is None or self.hidden.device != logits.device:
            return False
        own, theirs = self.said.to(logits.dtype), _primal(logits)
        if own.shape != theirs.shape:
            return False
        return bool(((own == theirs) | (own.isnan() & theirs.isnan())).all())


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
        if head_input.gives(logits, labels):
            return _of_hidden(head_input, labels, role, observed)
        if (
            head_input.hidden is None
        ):  # the head was not called, or not on hidden states: nothing was cut
            return token_losses(logits, labels, role=role)
        _CHANGED.add(head)
    return token_losses(run(), labels, role=role)


def _cut_run(head: nn.Linear, run: Callable[[], Tensor]) -> tuple[Tensor, _HeadInput]:
    """A forward whose head is asked about one position; its logits, and what the head saw."""
    head_input = _HeadInput()
    handles = (
        head.register_forward_pre_hook(head_input.cut),
        # First of all hooks: what others make of the output is another tensor, or another version.
        head.register_forward_hook(head_input.hear, prepend=True),
    )
    try:
        with _Followed(head_input):
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
        return head_losses(chosen, weight, bias, targets) if losses is None else losses

    return by_prediction(labels, losses_at, vocabulary=len(weight), role=role)
