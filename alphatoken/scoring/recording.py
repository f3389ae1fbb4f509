"""One forward as values are computed from it, and constant weights on its token losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alphatoken.errors import InputError
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.capture import Recorder
from alphatoken.model.head import HeadUse, rounding_tolerance

__all__ = ["Recording", "foreign_scores", "read_weights"]


def read_weights(kind: str, weights: Tensor | None, mask: Tensor) -> Tensor | None:
    """Check weights (b, t) on token losses, and detach them: values take them as constants.

    Args:
        kind: "token" or "step", for messages.
        weights: (b, t), or None for 1.
        mask: (b, t) response tokens; elsewhere weights are 0.

    Raises:
        InputError: another shape than the labels', or a NaN or Inf at a response token.
    """
    if weights is None:
        return None
    if weights.shape != mask.shape:
        raise InputError(
            f"{kind}_weights must have one entry a token",
            got=f"{tuple(weights.shape)} for labels of {tuple(mask.shape)}",
            remedy="expand weights of rows, and pad (b, t - 1) at index 0",
        )
    # What stands where nothing is valued must not come in by 0 * NaN.
    weights = weights.detach().masked_fill(~mask.to(weights.device), 0)
    if not bool(torch.isfinite(weights).all()):
        raise InputError(
            f"{kind}_weights are not finite",
            got="NaN or Inf at a response token",
            why="one NaN spreads to every value through the sums",
            remedy="give each response token a finite weight; others are not read",
        )
    return weights


@dataclass(frozen=True)
class Recording:
    """One forward whose response tokens are valued, whoever ran it.

    Attributes:
        batch: its labels and arguments, checked.
        token_weights: (b, t) constant factors on the token losses that values are of; None for 1.
        step_weights: (b, t) derivative of the optimizer's loss by each token loss; None for that of
            the mean over the response tokens.
        losses: its token losses (b, t), attached to its graph where errors are computed from them;
            None if no forward was needed, since label values along a fixed M run their own.
        recorder: uses of the scored linears and of attention; None if no forward was needed.
        head: the head's call that its losses were computed from; None where they came otherwise.
        products: dtypes that rounded its losses: the recorder's as the forward ran, since forwards
            of our own begin another one there, and that of the scores that the caller passed.
    """

    batch: LabelledBatch
    token_weights: Tensor | None = None
    step_weights: Tensor | None = None
    losses: Tensor | None = None
    recorder: Recorder | None = None
    head: HeadUse | None = None
    products: frozenset[torch.dtype] = frozenset()

    @property
    def recorded(self) -> tuple[Recorder, Tensor]:
        """Recorder and losses, of a forward that was recorded."""
        assert self.recorder is not None
        assert self.losses is not None
        return self.recorder, self.losses

    def require_losses(self, again: Tensor, tolerance: float | None = None) -> None:
        """Refuse losses (b, t) of another forward on these tokens that are not those of this one.

        Args:
            again: those losses.
            tolerance: what may explain a difference; by default rounding alone.

        Raises:
            InputError: they differ by more than that.
        """
        _, losses = self.recorded
        mask = self.batch.mask
        own, other = losses.detach()[mask].double(), again.detach()[mask].double()
        # Products of a forward may be narrow, whatever its losses are.
        dtypes = {again.dtype, *self.products}
        tolerance = tolerance or max(rounding_tolerance(dtype) for dtype in dtypes)
        if not float((own - other).norm()) <= tolerance * (float(other.norm()) + len(own) ** 0.5):
            raise foreign_scores(
                f"mean loss {float(own.mean()):.4g}, where the model on the observed arguments "
                f"has {float(other.mean()):.4g}"
            )

    def summed_loss(self) -> Tensor:
        """``sum_i w_i l_i`` with ``token_weights``: the loss whose errors are contracted.

        Raises:
            InputError: no graph leads from it to a scored linear.
        """
        _, losses = self.recorded
        weights = self.token_weights
        # Values may be computed under ``torch.no_grad``; the losses have their graph all the same.
        with torch.enable_grad():
            loss = (losses if weights is None else losses * weights.to(losses)).sum()
        return _attached(loss)

    def step_loss(self) -> Tensor:
        """``sum_i s_i l_i`` with ``step_weights``: the loss that the optimizer will see.

        Raises:
            InputError: as ``summed_loss``; or ``token_weights`` without ``step_weights``.
        """
        _, losses = self.recorded
        weights, mask = self.step_weights, self.batch.mask
        if weights is None and self.token_weights is not None:
            raise InputError(
                "preconditioner='full' needs step_weights where token_weights are given",
                why="the gradient that the optimizer will see is part of M, and its scale is not "
                "known from the values' weights",
                remedy="step_weights = d(training loss) / d(token loss), all tokens kept, (b, t)",
            )
        if weights is None:
            # Float64, because 1 / n is then exact enough for whatever dtype the losses have.
            weights = mask.double() / mask.sum()
        with torch.enable_grad():
            loss = (losses * weights.to(losses)).sum()
        return _attached(loss)


def _attached(loss: Tensor) -> Tensor:
    """The loss itself; raises where no graph leads from it to the model."""
    if not loss.requires_grad:
        raise foreign_scores("a detached tensor")
    return loss


def foreign_scores(got: str) -> InputError:
    """The error for scores that do not belong to the observed forward."""
    return InputError(
        "the scores do not belong to the observed forward",
        got=got,
        why="values are of the tokens and the loss of that forward",
        remedy="pass the logits that the model returned inside the context, undetached and "
        "unchanged; a model that scales or caps them must do so in its own forward",
    )
