"""TRL's fused head, read from the graph: one autograd node that holds all that its losses need.

TRL's forward runs the trunk, and one function takes log-probabilities of its hidden states, tile
by tile. Two things about that function's backward are dear where tokens are valued, since values
and update each run it: it forms the tiles of logits and the error below the head anew each time,
for every position, and the weight's gradient whenever the weight trains, asked for or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alphatoken.model.batch import IGNORE
from alphatoken.model.head import HeadUse, is_whole, register_losses
from alphatoken.support.precision import wide
from alphatoken.train.hooks import without_names

__all__ = ["errors_only", "head_entropy", "require_fused_head", "shared_log_probs", "top_entropy"]

_WORKSPACE = 2**24  # logits of one block of predictions
_NODE = "ChunkedLogProbFunctionBackward"
"""Name of the node; hidden states, weight and bias are its first arguments."""
_PLAIN = {"logit_scale": 1.0, "inv_t": 1.0, "HAS_SOFTCAP": False}
"""Its settings where logits are the product of weight and hidden states, and nothing more."""


def _fused_head(log_probs: Tensor) -> Any:
    """The fused head's node, above the views and masks of its log-probabilities; or None."""
    node: Any = log_probs.grad_fn
    for _ in range(8):
        if node is None or type(node).__name__ == _NODE:
            return node
        above = [parent for parent, _ in node.next_functions if parent is not None]
        node = above[0] if len(above) == 1 else None
    return None


class _Smallest(nn.Module):
    """A head of four tokens on a trunk that only looks up, as TRL's function takes a model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, dtype=torch.float32)
        self.lm_head = nn.Linear(3, 4, bias=False, dtype=torch.float32)
        self.base_model = lambda ids, **_: SimpleNamespace(last_hidden_state=self.table(ids))
        text = SimpleNamespace(model_type="")
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def logits(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.table(ids))
        return logits

    forward = logits


@cache
def require_fused_head() -> None:
    """See once, on four tokens, that what is read here of TRL's head is what its forward made.

    Raises:
        UnsupportedError: a release of TRL or torch in which it is not.
    """
    from trl.trainer.utils import add_fused_lm_head

    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        model: Any = _Smallest()
        ids = torch.tensor([[0, 1, 2, 3]])
        add_fused_lm_head(model)
        labels = torch.tensor([[0, 1, IGNORE, 3]])
        log_probs = model(ids, labels=labels, fused_lm_head=True).log_probs
        missing = _NODE
        try:
            if _reads_as(log_probs, labels[:, 1:] != IGNORE, model.logits(ids)[:, :-1]):
                return
        except (AttributeError, IndexError, KeyError) as problem:
            missing = f"{_NODE}: {problem}"
    raise without_names("TRL's fused head", ("trl", "torch"), (missing,), "'alphatoken[train]'")


def _reads_as(log_probs: Tensor, label_mask: Tensor, logits: Tensor) -> bool:
    """Whether log-probabilities, entropy and errors of a fused head are those of its logits."""
    node = _fused_head(log_probs)
    shared = shared_log_probs(log_probs, label_mask)
    entropy = head_entropy(log_probs, label_mask, 4)
    if node is None or shared is None or entropy is None:
        return False
    with errors_only(log_probs):
        weight = torch.autograd.grad(
            log_probs.sum(), node.saved_tensors[1], retain_graph=True, allow_unused=True
        )
    alike = (shared, log_probs), (entropy, top_entropy(logits, 4) * label_mask)
    return weight[0] is None and all(torch.allclose(one, other) for one, other in alike)


def _predictions(log_probs: Tensor, label_mask: Tensor) -> tuple[Any, Tensor, Tensor] | None:
    """The head's node, rows of labelled predictions, their places in ``label_mask``; or None."""
    node = _fused_head(log_probs)
    if node is None or not is_whole(node.saved_tensors[1]):
        return None
    count, places = len(node.saved_tensors[3]), label_mask.flatten().nonzero().squeeze(-1)
    # TRL hands its kernel all positions, or on some devices those with a label, in their order.
    rows = places if count == label_mask.numel() else torch.arange(count).to(places)
    return (node, rows, places) if len(rows) == len(places) else None


def shared_log_probs(log_probs: Tensor, label_mask: Tensor) -> Tensor | None:
    """The same log-probabilities; values and update share one error of the head.

    Args:
        log_probs: (b, t - 1), by TRL's fused head, attached to its graph.
        label_mask: (b, t - 1) True where the next token is labelled.

    Returns:
        (b, t - 1), 0 elsewhere; equal up to rounding, as its gradients are. None where the head is
        none of TRL's, or scales or caps its logits, or its weights are spread over processes.
    """
    predictions = _predictions(log_probs, label_mask)
    if predictions is None:
        return None
    node, rows, places = predictions
    if any(node.kernel_args.get(k) != v for k, v in _PLAIN.items()):
        return None
    hidden, weight, bias, targets, *_ = node.saved_tensors
    use = HeadUse(hidden, weight, bias)
    row, index = label_mask.nonzero(as_tuple=True)
    # Positions as in the forward, whose last one TRL drops.
    positions = row * (label_mask.shape[1] + 1) + index
    with torch.autocast(hidden.device.type, enabled=False):
        losses = use.take(hidden[rows].to(node.compute_dtype), positions, targets[rows])
    zeros = losses.new_zeros(label_mask.numel())
    return register_losses(use, zeros.index_put((places,), -losses).view(label_mask.shape))


def top_entropy(logits: Tensor, k: int) -> Tensor:
    """Entropy, in nats, of the ``k`` likeliest tokens among themselves: (..., V) to (...)."""
    likeliest = logits.topk(min(k, logits.shape[-1]), dim=-1).values
    log_p = likeliest.to(wide(likeliest.dtype)).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


@torch.no_grad()
def head_entropy(log_probs: Tensor, label_mask: Tensor, k: int) -> Tensor | None:
    """``top_entropy`` of the predictions that TRL's fused head made, of logits formed in blocks.

    Args:
        log_probs: (b, t - 1), by the fused head, attached to its graph.
        label_mask: (b, t - 1) True where the next token is labelled.
        k: of the likeliest tokens.

    Returns:
        (b, t - 1), 0 elsewhere. None where the head is none of TRL's, or spread over processes.
    """
    predictions = _predictions(log_probs, label_mask)
    if predictions is None:
        return None
    node, rows, places = predictions
    hidden, weight, bias, *_ = node.saved_tensors
    how, dtype = node.kernel_args, node.compute_dtype
    bias = None if bias is None else bias.to(dtype)
    entropies = []
    for block in rows.split(max(1, _WORKSPACE // weight.shape[0])):
        logits = F.linear(hidden[block].to(dtype), weight.to(dtype), bias)
        logits = logits.to(wide(dtype)) * how["logit_scale"]
        if how["HAS_SOFTCAP"]:
            logits = how["softcap"] * torch.tanh(logits / how["softcap"])
        entropies.append(top_entropy(logits * how["inv_t"], k))
    entropy = torch.zeros(label_mask.numel(), dtype=wide(dtype), device=hidden.device)
    values = torch.cat(entropies) if entropies else entropy[:0]
    return entropy.index_put((places,), values).view_as(label_mask)


@contextmanager
def errors_only(log_probs: Tensor | None) -> Iterator[bool]:
    """Inside, a backward from ``log_probs`` forms no gradient of the fused head's weight.

    TRL's backward forms ``(dlogits)^T h`` whenever the weight is trainable, a third of its FLOPs,
    also where only errors below it are asked for and the result is thrown away. Here it is told
    that the weight needs none. The error at the hidden states stays bitwise the same, with
    soft-capping, scale, bias and shards.

    Yields whether there was such a head; where there is none (another trainer's logits, a release
    of TRL or torch that does this differently) nothing changes.
    """
    head = None if log_probs is None else _fused_head(log_probs)
    if head is None:
        yield False
        return
    needed = head.needs_input_grad
    head.needs_input_grad = (needed[0], *(False for _ in needed[1:]))
    try:
        yield True
    finally:
        head.needs_input_grad = needed
