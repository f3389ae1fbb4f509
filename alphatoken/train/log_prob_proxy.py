"""The log-probability proxy: token weights act on the update, never on the reported loss.

Stands in the model's place for one call of a trainer's ``compute_loss``. The trainer sees the token
log-probabilities as a leaf, so whatever loss it builds of them (cross-entropy, DFT, any of TRL's
preference losses) gives its own coefficients ``c_k = d loss / d lp_k``; the weighted update is then
the gradient of ``sum_k w_k c_k lp_k`` through the model's one graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alphatoken.errors import NumericalError, UnsupportedError
from alphatoken.model.batch import IGNORE, token_losses
from alphatoken.model.head import register_losses, watched_head
from alphatoken.model.observed_forward import register_source
from alphatoken.train.fused_head import head_entropy, shared_log_probs, top_entropy

__all__ = ["LogProbProxy", "by_token", "require_finite"]


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
        # The same log-probabilities after ``share_head``, and where the next token is labelled.
        self._shared: Tensor | None = None
        self._labelled: Tensor | None = None
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
        """Keep ``log_probs``, which hang on the model's graph, and return a leaf of their values.

        The trainer's loss is computed of the leaf: its graph ends there, and not in the model's.
        """
        self.log_probs = log_probs
        self._leaf = log_probs.detach().requires_grad_()
        return self._leaf

    def plain(self, **inputs: Any) -> Any:
        """The model's outputs, of a forward beside the one that is kept."""
        return self._model(**inputs)

    def share_head(self, labels: Tensor) -> None:
        """Let values and the update take one error of the head, in place of one each.

        The update then equals the one of ``log_probs`` up to rounding. Where all weights are 1 it
        is of ``log_probs`` all the same: such a step is TRL's bit for bit.
        """
        assert self.log_probs is not None
        self._labelled = labels[:, 1:] != IGNORE
        if self._logits is None:
            self._shared = shared_log_probs(self.log_probs, self._labelled)
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
        labelled = labels[:, 1:] != IGNORE
        if self._logits is None:
            entropy = head_entropy(self.log_probs, labelled, k)
        else:
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
        whole = self._shared is None or bool((by_prediction[self._labelled] == 1).all())
        update = (factor * (self.log_probs if whole else self.scores)).sum()
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
    if not bool(torch.isfinite(loss.detach())):
        raise NumericalError(
            f"the training loss is not finite at step {step}",
            got=str(float(loss.detach())),
            why="one more step would destroy the weights; the last checkpoint is as it was",
            remedy="resume from it with a lower learning rate, gradient clipping or more "
            "precision; look at the rows of this step",
        )
