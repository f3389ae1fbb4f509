"""Records of one forward for valuing its tokens: ``Pass``, and weights on its losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alphatoken.errors import InputError
from alphatoken.estimate.estimators import TokenErrors
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.capture import Recorder
from alphatoken.model.head import HeadUse, rounding_tolerance

__all__ = ["Pass", "Weights", "foreign_scores"]


@dataclass(frozen=True)
class Weights:
    """Constant factors (b, t) on token losses: of the values, and of the optimizer's step."""

    token: Tensor | None
    step: Tensor | None

    @classmethod
    def read(cls, mask: Tensor, token: Tensor | None, step: Tensor | None) -> Weights:
        """Check both, and detach them: values take them as constants; off the response they are 0.

        Raises:
            InputError: another shape than the labels', or a NaN or Inf at a response token.
        """
        return cls(*(_read_weights(n, w, mask) for n, w in (("token", token), ("step", step))))

    def of_step(self, mask: Tensor) -> Tensor:
        """d(loss of the step) / d(token loss).

        Where it is not given, the step's loss is taken to be the mean over the response tokens.
        """
        if self.step is not None:
            return self.step
        if self.token is not None:
            raise InputError(
                "preconditioner='full' needs step_weights where token_weights are given",
                why="the gradient that the optimizer will see is part of M, and its scale is not "
                "known from the values' weights",
                remedy="step_weights = d(training loss) / d(token loss), all tokens kept, (b, t)",
            )
        # Float64, because 1 / n is then exact enough for whatever dtype the losses have.
        return mask.double() / mask.sum()


def _read_weights(kind: str, weights: Tensor | None, mask: Tensor) -> Tensor | None:
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
class Pass:
    """A forward whose response tokens are valued, whoever ran it.

    Attributes:
        batch: its labels and arguments, checked.
        weights: on its token losses.
        losses: its token losses (b, t), attached to its graph where errors are taken of them; None
            if no forward was needed, since label values along a fixed M run their own.
        recorder: what the scored linears saw; None if no forward was needed.
        kept_errors: the errors at all linears, kept so that more can be contracted with them
            later; None to contract each inside the backward that makes it, and let it go.
        head: the head's call that its losses were taken of; None where they were taken otherwise.
        products: dtypes that rounded its losses: the recorder's as the pass ran, since forwards of
            our own begin another one there, and that of the scores that were handed over.
    """

    batch: LabelledBatch
    weights: Weights
    losses: Tensor | None = None
    recorder: Recorder | None = None
    kept_errors: TokenErrors | None = None
    head: HeadUse | None = None
    products: frozenset[torch.dtype] = frozenset()

    @property
    def recorded(self) -> tuple[Recorder, Tensor]:
        """Recorder and losses, of a pass that has them."""
        assert self.recorder is not None
        assert self.losses is not None
        return self.recorder, self.losses

    def require_losses(self, again: Tensor, tolerance: float | None = None) -> None:
        """Refuse losses (b, t) of another forward on these tokens that are not those of this pass.

        Args:
            again: those losses.
            tolerance: what may explain a difference; by default rounding alone.

        Raises:
            InputError: they differ by more than that.
        """
        _, losses = self.recorded
        mask = self.batch.mask
        own, other = losses.detach()[mask].double(), again.detach()[mask].double()
        # Products of a pass may be narrow, whatever its losses are.
        dtypes = {again.dtype, *self.products}
        tolerance = tolerance or max(rounding_tolerance(dtype) for dtype in dtypes)
        if not float((own - other).norm()) <= tolerance * (float(other.norm()) + len(own) ** 0.5):
            raise foreign_scores(
                f"mean loss {float(own.mean()):.4g}, where the model on the observed arguments "
                f"has {float(other.mean()):.4g}"
            )

    def summed_loss(self) -> Tensor:
        """``sum_i w_i l_i`` with the weights of the values: what errors are taken of.

        Raises:
            InputError: no graph leads from it to a scored linear.
        """
        _, losses = self.recorded
        weights = self.weights.token
        # Values may be asked for under ``torch.no_grad``; the losses have their graph all the same.
        with torch.enable_grad():
            loss = (losses if weights is None else losses * weights.to(losses)).sum()
        return _attached(loss)

    def step_loss(self) -> Tensor:
        """``sum_i s_i l_i`` with the weights of the step: the loss that the optimizer will see.

        Raises:
            InputError: as ``summed_loss``.
        """
        _, losses = self.recorded
        with torch.enable_grad():
            loss = (losses * self.weights.of_step(self.batch.mask).to(losses)).sum()
        return _attached(loss)


def _attached(loss: Tensor) -> Tensor:
    """The loss itself; raises where it has no graph that errors could be taken through."""
    if not loss.requires_grad:
        raise foreign_scores("a detached tensor")
    return loss


def foreign_scores(got: str) -> InputError:
    """The error for scores that errors cannot be taken of."""
    return InputError(
        "the scores do not belong to the observed forward",
        got=got,
        why="values are of the tokens and the loss of that forward",
        remedy="pass the logits that the model returned inside the context, undetached and "
        "unchanged; a model that scales or caps them must do so in its own forward",
    )
