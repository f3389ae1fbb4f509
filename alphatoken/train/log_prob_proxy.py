"""The log-probability proxy: token weights act on the update, never on the reported loss.

Stands in the model's place for one call of a trainer's ``compute_loss``. The trainer sees the token
log-probabilities as a leaf, so whatever loss it builds of them (cross-entropy, DFT, any of TRL's
preference losses) gives its own coefficients ``c_k = d loss / d lp_k``; the weighted update is then
the gradient of ``sum_k w_k c_k lp_k`` through the model's one graph.
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

from alphatoken.errors import NumericalError, UnsupportedError
from alphatoken.model.batch import IGNORE, label_mask, response_places, token_losses
from alphatoken.model.head import HeadUse, is_whole, register_losses, watched_head
from alphatoken.model.observed_forward import register_source
from alphatoken.support.devices import refuse
from alphatoken.support.precision import wide
from alphatoken.train.hooks import without_names


class LogProbProxy:
    """Callable in the place of ``model`` that keeps the token log-probabilities of its forward.

    With all weights 1 the surrogate's gradient is the loss's own, bit for bit, and its value always
    is. Exact for every loss that reads the model's output through ``log_probs`` (b, t - 1), TRL's
    layout, and through whatever carries no gradient to them (metrics, router losses apart).

    Attributes:
        log_probs: (b, t - 1), attached to the model's graph; None before the call.
        aux_loss: the routers' loss of a mixture of experts, where the model gave one.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.log_probs: Tensor | None = None
        self._leaf: Tensor | None = None
        self._logits: Tensor | None = None
        # The same log-probabilities after ``share_head``, and where the next token is not labelled.
        self._shared: Tensor | None = None
        self._unlabelled: Tensor | None = None
        self.aux_loss: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; its ``log_probs`` come back as a leaf."""
        outputs = self._model(*args, **kwargs)
        log_probs = getattr(outputs, "log_probs", None)
        if not isinstance(log_probs, Tensor):
            raise UnsupportedError(
                "the trainer asked the model for something else than token log-probabilities",
                got=f"{type(outputs).__qualname__} without log_probs",
                why="token weights act on them",
                remedy="switch off label smoothing, compute_loss_func, Liger and other options "
                "that build a loss of the logits",
            )
        self.aux_loss = getattr(outputs, "aux_loss", None)
        outputs.log_probs = self.enter(log_probs)
        return outputs

    def logits(self, inputs: dict[str, Any], labels: Tensor) -> Tensor:
        """Run the model without labels, and return the leaf of its token log-probabilities."""
        outputs = self._model(**inputs)
        self._logits, self.aux_loss = outputs.logits, getattr(outputs, "aux_loss", None)
        # Another name for the same logits: losses of it take no error of the head that is shared.
        plain = self._logits.view_as(self._logits)
        log_probs = -token_losses(plain, labels)[:, 1:]
        return self.enter(register_source(log_probs, self._logits))

    def enter(self, log_probs: Tensor) -> Tensor:
        """Keep ``log_probs``, attached to the model's graph, and return a leaf of their values."""
        self.log_probs = log_probs
        # The graph of the trainer's loss ends at the leaf, and not in the model.
        self._leaf = log_probs.detach().requires_grad_()
        return self._leaf

    def plain(self, **inputs: Any) -> Any:
        """The model's outputs, of a forward beside the one that is kept."""
        return self._model(**inputs)

    def share_head(self, labels: Tensor) -> None:
        """Let values and the update take one error of the head, in place of one each.

        The update then equals the one of ``log_probs`` up to rounding.
        """
        assert self.log_probs is not None
        self._unlabelled = labels[:, 1:] == IGNORE
        if self._logits is None:
            self._shared = shared_log_probs(self.log_probs, labels)
            if self._shared is not None:
                register_source(self._shared, self.log_probs)
        else:
            self._shared = -token_losses(self._logits, labels)[:, 1:]
            register_source(self._shared, self._logits)
            if (use := watched_head(self._logits)) is not None:
                register_losses(use, self._shared)

    @property
    def scores(self) -> Tensor:
        """The log-probabilities from which values are computed."""
        assert self.log_probs is not None
        return self.log_probs if self._shared is None else self._shared

    @torch.no_grad()
    def entropy(self, labels: Tensor, k: int) -> Tensor:
        """(b, t) entropy of the ``k`` likeliest next tokens among themselves; 0 without a label.

        Raises:
            UnsupportedError: the head's weights are spread over processes.
        """
        assert self.log_probs is not None
        if self._logits is None:
            entropy = head_entropy(self.log_probs, labels, k)
        else:
            labelled = labels[:, 1:] != IGNORE
            own = top_entropy(self._logits[:, :-1][labelled], k)
            entropy = own.new_zeros(labelled.shape).index_put((labelled,), own)
        if entropy is None:
            raise UnsupportedError(
                "the next token's entropy cannot be read from the training forward",
                got="an output head that is spread over processes, or none of TRL's",
                remedy="a layout in which each process has the weights (DDP, ZeRO-1 or 2)",
            )
        return by_token(entropy)

    def coefficients(self, loss: Tensor, leaf: Tensor | None = None) -> Tensor:
        """``c = d loss / d log_probs`` (b, t - 1), constant; 0 off the response.

        Args:
            loss: computed of the leaf that the forward gave.
            leaf: another one that it was computed of, whose shape the coefficients then have.
        """
        own = self._leaf if leaf is None else leaf
        assert own is not None
        gradient = None
        if leaf is None or loss.requires_grad:  # what a policy computes may be constant
            gradient = torch.autograd.grad(loss, own, retain_graph=True, allow_unused=True)[0]
        return torch.zeros_like(own) if gradient is None else gradient

    def surrogate(self, loss: Tensor, coefficients: Tensor, weights: Tensor) -> Tensor:
        """Value of ``loss``, gradient of ``sum w c lp`` (plus that of router losses).

        Args:
            loss: what the trainer computed of the leaf.
            coefficients: of it.
            weights: (b, t) at token indices, constant.
        """
        assert self.log_probs is not None
        by_prediction = weights[:, 1:]
        factor = (by_prediction.to(coefficients) * coefficients).detach()
        # With all weights 1 a step is TRL's bitwise, also where the head's error is shared.
        whole = self._unlabelled is None or self._shared is None
        if self._unlabelled is not None and self._shared is not None:
            whole = bool(((by_prediction == 1) | self._unlabelled).all())
        update = (factor * (self.log_probs if whole else self.scores)).sum()
        # A routers' loss has a graph of its own, which stays; the leaf's leads nowhere.
        base = loss if self.aux_loss is not None else loss.detach()
        return base + (update - update.detach()).to(base.dtype)


def by_token(by_prediction: Tensor) -> Tensor:
    """(b, t - 1) in TRL's layout to (b, t) at token indices; index 0 is 0."""
    return F.pad(by_prediction, (1, 0))


def require_finite(loss: Tensor, step: int) -> None:
    """Stop a run before it destroys its weights.

    Raises:
        NumericalError: the loss of this step is not finite.
    """
    loss = loss.detach()

    def raise_it() -> None:
        raise NumericalError(
            f"the training loss is not finite at step {step}",
            got=str(float(loss)),
            why="one more step would destroy the weights; the last checkpoint is as it was",
            remedy="resume from it with a lower learning rate, gradient clipping or more "
            "precision; look at the rows of this step",
        )

    refuse(~torch.isfinite(loss), raise_it)


# --- TRL's fused head, read from the graph ------------------------------------------------------
#
# TRL's forward runs the trunk, and one function takes log-probabilities of its hidden states, tile
# by tile: one autograd node holds all that its losses need. Two things about that function's
# backward are dear where tokens are valued, since values and update each run it. It forms the tiles
# of logits and the error below the head anew each time, for every position; and the weight's
# gradient whenever the weight trains, asked for or not.


_WORKSPACE = 2**24  # logits of one block of predictions
_NODE = "ChunkedLogProbFunctionBackward"
"""Name of the node; hidden states, weight and bias are its first arguments."""
_PLAIN = {"logit_scale": 1.0, "inv_t": 1.0, "HAS_SOFTCAP": False}
"""Its settings where logits are the product of weight and hidden states, and nothing more."""


def _fused_head(log_probs: Tensor) -> Any:
    """The fused head's node, above the views and masks of its log-probabilities; or None."""
    node: Any = log_probs.grad_fn
    # TRL puts views and masks over the node.
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
            if _reads_as(log_probs, labels, model.logits(ids)[:, :-1]):
                return
        except (AttributeError, IndexError, KeyError) as problem:
            missing = f"{_NODE}: {problem}"
    raise without_names("TRL's fused head", ("trl", "torch"), (missing,), "'alphatoken[train]'")


def _reads_as(log_probs: Tensor, labels: Tensor, logits: Tensor) -> bool:
    """Whether log-probabilities, entropy and errors of a fused head are those of its logits."""
    node = _fused_head(log_probs)
    shared = shared_log_probs(log_probs, labels)
    entropy = head_entropy(log_probs, labels, 4)
    if node is None or shared is None or entropy is None:
        return False
    with errors_only(log_probs):
        weight = torch.autograd.grad(
            log_probs.sum(), node.saved_tensors[1], retain_graph=True, allow_unused=True
        )
    alike = (shared, log_probs), (entropy, top_entropy(logits, 4) * label_mask(labels)[:, 1:])
    return weight[0] is None and all(torch.allclose(one, other) for one, other in alike)


def _predictions(log_probs: Tensor, labels: Tensor) -> tuple[Any, Tensor, Tensor] | None:
    """The head's node, rows of labelled predictions, their places in ``log_probs``; or None."""
    node = _fused_head(log_probs)
    if node is None or not is_whole(node.saved_tensors[1]):
        return None
    # Token t of row b is flattened label b length + t, and log-probability b (length - 1) + t - 1.
    tokens = response_places(labels)
    places = tokens - tokens // labels.shape[1] - 1
    count = len(node.saved_tensors[3])
    # TRL hands its kernel all positions, or on some devices those with a label, in their order.
    rows = places if count == log_probs.numel() else torch.arange(count).to(places)
    return (node, rows, places) if len(rows) == len(places) else None


def shared_log_probs(log_probs: Tensor, labels: Tensor) -> Tensor | None:
    """The same log-probabilities; values and update share one error of the head.

    Args:
        log_probs: (b, t - 1), by TRL's fused head, attached to its graph.
        labels: (b, t) unshifted.

    Returns:
        (b, t - 1), 0 without a label; equal up to rounding, as its gradients are. None where the
        head is none of TRL's, or scales or caps its logits, or its weights are spread over
        processes.
    """
    predictions = _predictions(log_probs, labels)
    if predictions is None:
        return None
    node, rows, places = predictions
    if any(node.kernel_args.get(k) != v for k, v in _PLAIN.items()):
        return None
    hidden, weight, bias, targets, *_ = node.saved_tensors
    use = HeadUse(hidden, weight, bias)
    positions = response_places(labels) - 1  # as in the forward, whose last one TRL drops
    with torch.autocast(hidden.device.type, enabled=False):
        losses = use.take(hidden[rows].to(node.compute_dtype), positions, targets[rows])
    zeros = losses.new_zeros(log_probs.numel())
    return register_losses(use, zeros.index_put((places,), -losses).view(log_probs.shape))


def top_entropy(logits: Tensor, k: int) -> Tensor:
    """Entropy, in nats, of the ``k`` likeliest tokens among themselves: (..., V) to (...)."""
    likeliest = logits.topk(min(k, logits.shape[-1]), dim=-1).values
    log_p = likeliest.to(wide(likeliest.dtype)).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


@torch.no_grad()
def head_entropy(log_probs: Tensor, labels: Tensor, k: int) -> Tensor | None:
    """``top_entropy`` of the predictions that TRL's fused head made, of logits formed in blocks.

    Args:
        log_probs: (b, t - 1), by the fused head, attached to its graph.
        labels: (b, t) unshifted.
        k: of the likeliest tokens.

    Returns:
        (b, t - 1), 0 without a label. None where the head is none of TRL's, or is spread over
        processes.
    """
    predictions = _predictions(log_probs, labels)
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
    entropy = torch.zeros(log_probs.numel(), dtype=wide(dtype), device=hidden.device)
    values = torch.cat(entropies) if entropies else entropy[:0]
    return entropy.index_put((places,), values).view(log_probs.shape)


@contextmanager
def errors_only(log_probs: Tensor | None) -> Iterator[bool]:
    """Inside, a backward from ``log_probs`` forms no gradient of the fused head's weight.

    The error at the hidden states stays bitwise the same, with soft-capping, scale, bias and
    shards.

    Yields whether there was such a head; where there is none (another trainer's logits, a release
    of TRL or torch that does this differently) nothing changes.
    """
    head = None if log_probs is None else _fused_head(log_probs)
    if head is None:
        yield False
        return
    # TRL's backward forms ``(dlogits)^T h`` whenever the weight is trainable, a third of its FLOPs,
    # also where only errors below it are asked for and the result is thrown away.
    needed = head.needs_input_grad
    head.needs_input_grad = (needed[0], *(False for _ in needed[1:]))
    try:
        yield True
    finally:
        head.needs_input_grad = needed
