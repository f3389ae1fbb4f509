"""Token losses of a forward of our own, which needs the logits of no position but its responses'.

The model's head is given one position instead of all, and what it should have been given is kept;
``head.head_losses`` then takes the losses of the response tokens, a block of the vocabulary at a
time. Whether a model's logits are what its head says, and not scaled or capped afterwards, is not
taken for granted: the logits of the one position are compared, and where they differ the model runs
again as it is, now and ever after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd import forward_ad

from alphatoken.model.batch import by_prediction, token_losses
from alphatoken.model.head import HeadUse, head_losses, output_head
from alphatoken.model.protocol import DecoderAdapter

__all__ = ["response_losses"]

_CHANGED: WeakSet[nn.Module] = WeakSet()
"""Heads of models whose logits are not what the head gives."""


@dataclass
class _HeadInput:
    """What the head was called with, with which weights, and what it said; set by its hooks."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    said: Tensor | None = None
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
        self.said = output

    def gives(self, logits: Tensor, labels: Tensor) -> bool:
        """Whether the model's logits are the head's own, at the one position that it was given."""
        if self.calls != 1 or self.hidden is None or self.hidden.shape[:2] != labels.shape:
            return False
        # Weights spread over devices: the head's own hooks move its input.
        if not isinstance(self.said, Tensor) or self.hidden.device != logits.device:
            return False
        own, theirs = _primal(self.said), _primal(logits)
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

    Exactness: exact up to rounding. Oracle: ``alphatoken.oracle.token_losses``.
    """
    run = run or partial(adapter.forward, inputs)
    head = output_head(adapter)
    if head is not None and head not in _CHANGED:
        seen = _HeadInput()
        handles = (
            head.register_forward_pre_hook(seen.cut),
            head.register_forward_hook(seen.hear),
        )
        try:
            logits = run()
        finally:
            for handle in handles:
                handle.remove()
        if seen.gives(logits, labels):
            return _of_hidden(seen, labels, role, observed)
        if seen.hidden is None:  # the head was not called, or not on hidden states: nothing was cut
            return token_losses(logits, labels, role=role)
        _CHANGED.add(head)
    return token_losses(run(), labels, role=role)


def _of_hidden(seen: _HeadInput, labels: Tensor, role: str, observed: HeadUse | None) -> Tensor:
    hidden, weight, bias = seen.hidden, seen.weight, seen.bias
    assert hidden is not None
    assert weight is not None

    def losses_at(positions: Tensor, targets: Tensor) -> Tensor:
        chosen, losses = hidden.flatten(0, 1)[positions], None
        if observed is not None:
            losses = observed.dual_losses(chosen, weight, bias, positions, targets)
        return head_losses(chosen, weight, bias, targets) if losses is None else losses

    return by_prediction(labels, losses_at, vocabulary=len(weight), role=role)
