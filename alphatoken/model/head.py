"""The output head, ``z = W h + b``: losses of its predictions without the logits of all of them.

    l_p = log sum_v exp z_p[v] - z_p[y_p]
    e_p = dl_p / dh_p = sum_v softmax(z_p)_v W_v - W_{y_p}

A vocabulary of 262,144 makes the head two thirds of a small model, and its logits larger than all
other activations together. Here they are formed a block of the vocabulary at a time and let go.
The errors ``e_p`` come with the losses, by one more product, and stay: whatever weights c_p a loss
gives its tokens, its error below the head is ``c_p e_p``. So values and training step, which weigh
the same losses differently, pay for one backward through the head and not for two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from alphatoken.model.protocol import DecoderAdapter
from alphatoken.support.devices import on_host
from alphatoken.support.precision import full_precision, wide

# Numbers of one block of logits: in a processor's caches, and as an accelerator is filled by.
_WORKSPACE, _WORKSPACE_OF_ACCELERATOR = 2**22, 2**27
_ROWS = 4096  # predictions of one block; each block of rows reads the whole of W once


@dataclass(frozen=True)
class _Predictions:
    """n predictions ``z = W h + b``, and the token that each of them is asked about.

    ``logits`` are those of the model where it has formed them, (m, V), with the row of each
    prediction in ``rows``; else both are None and blocks are products of their own.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    logits: Tensor | None = None
    rows: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return wide(self.hidden.dtype, self.weight.dtype)

    def chosen(self, picked: Tensor | slice) -> _Predictions:
        rows = None if self.rows is None else self.rows[picked]
        hidden, targets = self.hidden[picked], self.targets[picked]
        return _Predictions(hidden, self.weight, self.bias, targets, self.logits, rows)

    def in_rows(self) -> Iterator[tuple[slice, _Predictions]]:
        for start in range(0, len(self.targets), _ROWS):
            block = slice(start, start + _ROWS)
            yield block, self.chosen(block)

    def columns(self) -> Iterator[slice]:
        vocabulary = len(self.weight)
        workspace = _WORKSPACE if on_host(self.targets) else _WORKSPACE_OF_ACCELERATOR
        size = max(1, workspace // max(1, len(self.targets)))
        for start in range(0, vocabulary, size):
            yield slice(start, min(start + size, vocabulary))

    def block(self, columns: slice) -> Tensor:
        """Logits of these columns, (n, v), wide; a tensor of its own that may be written to."""
        if self.logits is not None:
            assert self.rows is not None
            return self.logits[:, columns][self.rows].to(self.dtype)
        bias = None if self.bias is None else self.bias[columns]
        hidden, weight = self.hidden, self.weight[columns]
        if hidden.dtype != weight.dtype:  # a head that computes wider than its input
            hidden, weight = hidden.to(self.dtype), weight.to(self.dtype)
            bias = None if bias is None else bias.to(self.dtype)
        return F.linear(hidden, weight, bias).to(self.dtype)

    def target_in(self, columns: slice) -> tuple[Tensor, Tensor]:
        """(whether a prediction's target lies in these columns (n, 1), its place or some place)."""
        # Of all predictions, since the number of those inside could only be waited for.
        places = (self.targets - columns.start).unsqueeze(-1)
        size = columns.stop - columns.start
        return (places >= 0) & (places < size), places.clamp(0, size - 1)


def head_losses(
    hidden: Float[Tensor, "n d"],
    weight: Float[Tensor, "v d"],
    bias: Float[Tensor, " v"] | None,
    targets: Int[Tensor, " n"],
    *,
    logits: Float[Tensor, "m v"] | None = None,
    rows: Int[Tensor, " n"] | None = None,
) -> tuple[Float[Tensor, " n"], Float[Tensor, "n d"] | None]:
    """``-log softmax(W h_p + b)[y_p]`` for each prediction, and its error at ``h_p``.

    Args:
        hidden: inputs of the head at the predicting positions, attached to their graph.
        weight: of the head; (V, d), as ``nn.Linear`` has it.
        bias: of the head.
        targets: the token that each position predicts.
        logits: the model's own logits, where they have been formed: no product forms them again.
        rows: with ``logits``, the row of each prediction in them.

    Returns:
        (n,) losses in float32 or wider, differentiable once in reverse mode, and in forward mode;
        and the errors ``e_p`` if ``hidden`` has a graph.

    Work in products of n V d multiply-adds: one for the losses (none with ``logits``), one for the
    errors ``e_p`` where ``hidden`` has a graph; a backward to ``hidden`` takes none. A backward to
    ``weight`` takes two (one with ``logits``) for the predictions whose loss has a weight that is
    not 0. Memory: one block of logits beside inputs and outputs.

    Exactness: exact up to rounding. Oracle: ``alphatoken.oracle.gradients.token_losses``.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # as autocast does before each product
        narrow = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(narrow), weight.to(narrow)
        bias = None if bias is None else bias.to(narrow)
    inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
    with torch.autocast(device, enabled=False):
        if any(forward_ad.unpack_dual(x).tangent is not None for x in inputs):
            return _dual_losses(hidden, weight, bias, targets), None
        graph = torch.is_grad_enabled()
        with torch.no_grad():
            free = None if bias is None else bias.detach()
            predictions = _Predictions(
                hidden.detach(), weight.detach(), free, targets, logits, rows
            )
            lse, chosen, errors = _folded(predictions, with_errors=graph and hidden.requires_grad)
        losses = lse - chosen
        if graph and hidden.requires_grad:
            losses = _AtHidden.apply(hidden, losses, errors)  # type: ignore[no-untyped-call]
        # A node of its own, so that a backward that ends below the head never visits it.
        if graph and (weight.requires_grad or (bias is not None and bias.requires_grad)):
            losses = losses + _AtWeight.apply(weight, bias, predictions, lse)  # type: ignore[no-untyped-call]
        return losses, errors


class _OnlineSoftmax:
    """Log-sum-exp of n predictions, and logits of their targets, in one pass over the vocabulary.

    The maximum so far is subtracted before each exponential; where a later block has a larger
    one, the sums so far shrink by the factor between them.

    Attributes:
        total: (n,) ``sum_v exp(z_v - maximum)``, of the blocks so far.
        chosen: (n,) logit of the target, once its block has passed.
    """

    def __init__(self, predictions: _Predictions) -> None:
        self._predictions = predictions
        self._highest = predictions.hidden.new_full(
            (len(predictions.targets),), -torch.inf, dtype=predictions.dtype
        )
        self.total, self.chosen = (torch.zeros_like(self._highest) for _ in range(2))

    def blocks(self) -> Iterator[tuple[slice, tuple[Tensor, Tensor], Tensor, Tensor]]:
        """(columns, targets as of ``target_in``, shrink (n,), exponentials (n, v)) of each block.

        The block is in ``total`` and ``chosen`` by then. Whoever sums over the vocabulary as well
        multiplies the sum so far by ``shrink``, and adds what the exponentials weigh.
        """
        for columns in self._predictions.columns():
            z = self._predictions.block(columns)
            within, places = self._predictions.target_in(columns)
            self.chosen = torch.where(within, z.gather(-1, places), self.chosen[:, None])[:, 0]
            before, self._highest = self._highest, torch.maximum(self._highest, z.amax(-1))
            # Some models set logits of unused tokens to -inf; -inf - -inf would be NaN.
            reference = self._highest.masked_fill(self._highest == -torch.inf, 0.0)
            shrink = torch.exp(before - reference)
            z.sub_(reference.unsqueeze(-1)).exp_()
            self.total.mul_(shrink).add_(z.sum(-1))
            yield columns, (within, places), shrink, z

    @property
    def lse(self) -> Tensor:
        """(n,) ``log sum_v exp z_v``, after all blocks."""
        return self._highest + torch.log(self.total)


def _folded(
    predictions: _Predictions, *, with_errors: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    # log-sum-exp (n,), logit of the target (n,), and errors (n, d).
    parts = [_fold_rows(block, with_errors=with_errors) for _, block in predictions.in_rows()]
    if not parts:
        empty = predictions.hidden.new_zeros(0, dtype=predictions.dtype)
        return empty, empty, predictions.hidden.to(predictions.dtype)
    lse, chosen, errors = zip(*parts, strict=True)
    return torch.cat(lse), torch.cat(chosen), torch.cat(errors) if with_errors else None


def _fold_rows(
    predictions: _Predictions, *, with_errors: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    softmax = _OnlineSoftmax(predictions)
    errors = (
        predictions.hidden.new_zeros(predictions.hidden.shape, dtype=predictions.dtype)
        if with_errors
        else None
    )
    for columns, _, shrink, z in softmax.blocks():
        if errors is not None:
            _add_product(errors.mul_(shrink.unsqueeze(-1)), z, predictions.weight[columns])
    if errors is not None:
        errors.div_(softmax.total.unsqueeze(-1)).sub_(predictions.weight[predictions.targets])
    return softmax.lse, softmax.chosen, errors


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, accumulated in the dtype of ``total``."""
    # Rounding each block's product to 16 bits before the sum would bias what is trained with it.
    narrow = min(a.dtype, b.dtype, key=lambda d: d.itemsize) if total.is_cuda else total.dtype
    if narrow.itemsize < total.dtype.itemsize:
        torch.addmm(total, a.to(narrow), b.to(narrow), out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), out=total)


class _AtHidden(torch.autograd.Function):
    """The losses again, with the known errors as their derivative."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, losses: Tensor, errors: Tensor) -> Tensor:
        ctx.save_for_backward(errors)
        ctx.dtype = hidden.dtype
        return losses.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None, None]:
        (errors,) = ctx.saved_tensors
        return (weights.unsqueeze(-1) * errors).to(ctx.dtype), None, None


class _AtWeight(torch.autograd.Function):
    """Zeros (n,) whose derivative is that of the losses in W and b.

    d(sum c l)/dW = sum_p c_p (softmax(z_p) - onehot(y_p)) (x) h_p
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, predictions: _Predictions, lse: Tensor
    ) -> Tensor:
        # Saved by autograd, so that weights changed in place before the backward are refused.
        ctx.save_for_backward(
            predictions.hidden,
            weight,
            bias,
            predictions.targets,
            lse,
            predictions.logits,
            predictions.rows,
        )
        return torch.zeros_like(lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, targets, lse, logits, rows = ctx.saved_tensors
        predictions = _Predictions(hidden, weight.detach(), bias, targets, logits, rows)
        # What no loss weighs costs nothing; under selection that is most of a batch. An accelerator
        # would be waited for in the midst of the backward to learn which.
        if on_host(weights):
            used = weights.nonzero().squeeze(-1)
            predictions, weights, lse = predictions.chosen(used), weights[used], lse[used]
        of_weight = weight.new_zeros(weight.shape, dtype=predictions.dtype, requires_grad=False)
        of_bias = of_weight.new_zeros(len(weight))
        for block, part in predictions.in_rows():
            c = weights[block].to(predictions.dtype).unsqueeze(-1)
            for columns in part.columns():
                p = torch.exp(part.block(columns).sub_(lse[block].unsqueeze(-1))).mul_(c)
                within, places = part.target_in(columns)
                p.scatter_(-1, places, p.gather(-1, places) - torch.where(within, c, 0.0))
                _add_product(of_weight[columns], p.mT, part.hidden)
                of_bias[columns] += p.sum(0)
        whole = of_weight.to(weight.dtype) if ctx.needs_input_grad[0] else None
        return whole, of_bias.to(bias.dtype) if ctx.needs_input_grad[1] else None, None, None


def _dual_losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Losses with their tangents: ``dl = sum_v softmax(z)_v dz_v - dz[y]``, in one pass."""
    (h, dh), (w, dw) = forward_ad.unpack_dual(hidden), forward_ad.unpack_dual(weight)
    b, db = (None, None) if bias is None else forward_ad.unpack_dual(bias)
    tangents: list[Tensor] = []
    losses: list[Tensor] = []
    for block, predictions in _Predictions(h, w, b, targets).in_rows():
        part = (dh if dh is None else dh[block], dw, db)
        lse, chosen, slope = _fold_dual(predictions, part)
        losses.append(lse - chosen)
        tangents.append(slope)
    if not losses:
        return hidden.new_zeros(0, dtype=wide(hidden.dtype))
    dual: Tensor = forward_ad.make_dual(torch.cat(losses), torch.cat(tangents))
    return dual


_Tangents = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of the hidden states, of the weight and of the bias."""


def _logit_tangents(predictions: _Predictions, tangents: _Tangents, columns: slice) -> Tensor:
    """``dz = dh W^T + h dW^T + db`` in these columns, wide."""
    dh, dw, db = tangents
    dz = predictions.hidden.new_zeros(len(predictions.targets), columns.stop - columns.start)
    if dh is not None:
        dz = torch.addmm(dz, dh, predictions.weight[columns].mT)
    if dw is not None:
        dz = torch.addmm(dz, predictions.hidden, dw[columns].mT)
    if db is not None:
        dz = dz + db[columns]
    return dz.to(predictions.dtype)


def _fold_dual(predictions: _Predictions, tangents: _Tangents) -> tuple[Tensor, Tensor, Tensor]:
    """Fold as ``_fold_rows``, with the mean of ``dz`` under the softmax in place of the errors."""
    softmax = _OnlineSoftmax(predictions)
    mean, chosen_slope = (torch.zeros_like(softmax.total) for _ in range(2))
    for columns, (within, places), shrink, z in softmax.blocks():
        dz = _logit_tangents(predictions, tangents, columns)
        chosen_slope = torch.where(within, dz.gather(-1, places), chosen_slope[:, None])[:, 0]
        # A logit of -inf has probability 0, and a tangent that may be NaN.
        mean.mul_(shrink).add_(torch.where(z == 0, 0.0, z * dz).sum(-1))
    return softmax.lse, softmax.chosen, mean / softmax.total - chosen_slope


# --- the head of a model's own forward ------------------------------------------------------------


def is_plain_head(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """True if a module is a linear map whose product this file may form in its place.

    It is not where weights are quantised, adapted, computed or spread over processes, or where
    somebody watches its backward: a loss that does not pass through the module would not be seen
    there.
    """
    if type(module) is not nn.Linear or module._backward_hooks or module._backward_pre_hooks:
        return False
    return is_whole(module.weight) and (module.bias is None or is_whole(module.bias))


def is_whole(weight: Tensor) -> bool:
    """True if a weight is an ordinary tensor: not quantised, and not spread over processes."""
    # Types and not ``isinstance``: parts of sharded weights are tensors as well.
    return type(weight) in (Tensor, nn.Parameter) and not hasattr(weight, "ds_shape")


def output_head(adapter: DecoderAdapter) -> nn.Linear | None:
    """The linear map that ends the model, if it has one that ``is_plain_head``.

    An adapter names it by a method ``output_head()``, which it need not have.
    """
    find = getattr(adapter, "output_head", None)
    head = None if find is None else find()
    return head if is_plain_head(head) else None


@dataclass(frozen=True)
class _CachedLosses:
    positions: Tensor
    targets: Tensor
    hidden: Tensor  # (n, d), the input of the head
    logits: Tensor | None  # of all positions, where they were formed
    losses: Tensor
    errors: Tensor | None  # (n, d), below the head


@dataclass
class HeadUse:
    """One call of a model's head: its input, in the graph, and its weights.

    Losses asked for twice, by values and by the training step, are one tensor with one graph.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    _cached: list[_CachedLosses] = field(default_factory=list)

    def _cached_for(self, positions: Tensor, targets: Tensor) -> _CachedLosses | None:
        for cached in self._cached:
            if torch.equal(cached.positions, positions) and torch.equal(cached.targets, targets):
                return cached
        return None

    def losses(self, logits: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """Losses of ``vocabulary.chosen_losses``, of the ``logits`` that this call gave."""
        cached = self._cached_for(positions, targets)
        if cached is not None:
            return cached.losses
        hidden = self.hidden.flatten(0, 1)[positions]
        return self.take(hidden.to(logits.dtype), positions, targets, logits.detach().flatten(0, 1))

    def take(
        self, hidden: Tensor, positions: Tensor, targets: Tensor, logits: Tensor | None = None
    ) -> Tensor:
        """Losses of ``head_losses``, remembered for a later dual forward on the same tokens.

        Args:
            hidden: (n, d) what the head got at these positions, in the dtype of its product.
            positions: of the predictions, row times length plus index.
            targets: of the predictions.
            logits: those of all positions, (m, V), where they have been formed.
        """
        weight = self.weight.to(hidden.dtype)
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        rows = None if logits is None else positions
        losses, errors = head_losses(hidden, weight, bias, targets, logits=logits, rows=rows)
        self._cached.append(
            _CachedLosses(positions, targets, hidden.detach(), logits, losses, errors)
        )
        return losses

    @full_precision
    def dual_losses(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        positions: Tensor,
        targets: Tensor,
    ) -> Tensor | None:
        """The losses that were taken, with the tangents of a later dual forward.

            dl_p = <e_p, dh_p> + sum_v (softmax(z_p)_v - [v = y_p]) (dW h_p + db)_v

        Nothing here multiplies by the vocabulary but the second term, and that only where W or b
        has a tangent.

        Args:
            hidden: (n, d) input of the head at these positions in the dual forward.
            weight: of the head, there.
            bias: of the head, there.
            positions: of the predictions.
            targets: of the predictions.

        Returns:
            (n,) dual tensor; None where these losses were not taken with a graph, or the head gets
            other hidden states than it did in this call (dropout, changed weights): losses and
            errors of the call are then not those of the dual forward.

        Exactness: exact up to rounding. Oracle: ``alphatoken.oracle.gradients.label_values``.
        """
        cached = self._cached_for(positions, targets)
        if cached is None or cached.errors is None:
            return None
        h, dh = forward_ad.unpack_dual(hidden)
        dtype = cached.hidden.dtype
        if not _same_up_to_rounding(h, cached.hidden, dtype):
            return None
        slope = torch.zeros_like(cached.losses, requires_grad=False)
        if dh is not None:
            slope += (cached.errors * dh.to(cached.errors.dtype)).sum(-1)
        dw, db = (None if x is None else forward_ad.unpack_dual(x).tangent for x in (weight, bias))
        if dw is not None or db is not None:
            dw, db = (None if x is None else x.to(dtype) for x in (dw, db))
            own = None if self.bias is None else self.bias.detach().to(dtype)
            rows = None if cached.logits is None else positions
            predictions = _Predictions(
                cached.hidden, self.weight.detach().to(dtype), own, targets, cached.logits, rows
            )
            for block, part in predictions.in_rows():
                slope[block] += _fold_dual(part, (None, dw, db))[2]
        dual: Tensor = forward_ad.make_dual(cached.losses.detach(), slope)
        return dual


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Relative difference that two forwards of one model on the same tokens may have.

    The bits may differ, because one of them can have rounded otherwise (a fused kernel, autocast).
    What is to be noticed, such as dropout or a state that does not travel with the hidden states,
    changes hidden states and losses by far more.
    """
    return 5e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-3


def _same_up_to_rounding(again: Tensor, recorded: Tensor, dtype: torch.dtype) -> bool:
    if again.shape != recorded.shape:
        return False
    sum_dtype = wide(again.dtype, recorded.dtype)
    difference = (again.to(sum_dtype) - recorded.to(sum_dtype)).norm(dim=-1)
    size = recorded.to(sum_dtype).norm(dim=-1)
    return bool((difference <= rounding_tolerance(dtype) * size).all())


_USES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Logits or losses to (the head's call that gave them, the version they had then)."""


@contextmanager
def watch_head(adapter: DecoderAdapter) -> Iterator[None]:
    """Inside, losses of the logits that the model returns share one error of its head.

    Whoever takes losses of those very logits by ``chosen_losses``, within the context or after it,
    shares it: values and the loss that is trained on. Other losses of them are as ever.
    """
    head = output_head(adapter)
    if head is None:
        yield
        return

    def on_call(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if len(args) == 1 and isinstance(output, Tensor) and args[0].requires_grad:
            _USES[output] = HeadUse(args[0], head.weight, head.bias), output._version

    # First of all hooks: what others make of the output is another tensor, or another version.
    handle = head.register_forward_hook(on_call, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def register_losses(use: HeadUse, losses: Tensor) -> Tensor:
    """The ``losses``, or what follows from them alone, known as taken of this call of the head."""
    _USES[losses] = use, losses._version
    return losses


def watched_head(logits: Tensor) -> HeadUse | None:
    """The head's call that gave these very logits or losses, if losses may be taken of it."""
    use, version = _USES.get(logits, (None, 0))
    # Scaled or capped in place, they are the same tensor, and the head's no more.
    if use is None or logits._version != version or not torch.is_grad_enabled():
        return None
    # Somebody who wants gradients of the logits themselves needs a loss that passes through them.
    # The hooks of torch's own module trackers, as its counter of FLOPs has, only look.
    hooks = (logits._backward_hooks or {}).values()
    wanted = logits.retains_grad or any(h.__module__ != "torch.autograd.graph" for h in hooks)
    return None if wanted else use
