"""Label values by finite differences: two forwards at moved weights, or one beside a known one.

    central     v_k ~ ( l_k(theta + h M) - l_k(theta - h M) ) / (2 h)
    one-sided   v_k ~ ( l_k(theta) - l_k(theta - h M) ) / h
    curvature   <M, H_k M> ~ ( l_k(theta + h M) + l_k(theta - h M) - 2 l_k(theta) ) / h^2

Nothing but forwards of the model as it is: no rule for any kernel or layer is needed. The step h is
found on a few short rows, from differences at h and at 2 h, and the same two say how far the values
are off. The weights come back to the bit, also after an exception or an interrupt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from alphatoken.errors import UnsupportedError
from alphatoken.estimate.shift import Shift
from alphatoken.model.batch import LabelledBatch, require_finite
from alphatoken.model.batch_slice import around_responses
from alphatoken.model.modes import evaluation_mode
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.response_losses import response_losses
from alphatoken.model.sharding import Sharding
from alphatoken.support.precision import DEVICES, wide

__all__ = ["CURVATURE", "FORMS", "TOLERANCE", "Differences", "drowned"]

FORMS = ("central", "one_sided")

CURVATURE = "curvature"
"""The form of a second difference."""

TOLERANCE = 2e-2
"""Estimated relative error beyond which differences are refused."""

CURVATURE_TOLERANCE = 0.1
"""The same of second differences, whose rounding is divided by h^2: a length is read of them."""

CHECKED_EVERY = 32
"""Batches after which the error is looked at again; at first sooner: after 1, 2, 4, 8 and 16."""


def drowned(model: nn.Module, parameters: Mapping[str, Tensor]) -> str | None:
    """Reason why a small shift of these weights would drown in rounding, or None.

    The shift must be representable in the weights and in the products: float32 or wider in both.
    """
    # Frozen weights round the products too: a 16-bit base under float32 factors.
    narrow = [
        f"{n} in {p.dtype}"
        for n, p in model.named_parameters()
        if p.is_floating_point() and wide(p.dtype) != p.dtype
    ]
    if narrow:
        return narrow[0].replace("torch.", "")
    away = [n for n, p in parameters.items() if p.is_meta]
    if away:  # a device map brings it for its module's forward alone
        return f"{away[0]} not in memory between forwards"
    kinds = {p.device.type for p in model.parameters()}
    cast = [kind for kind in DEVICES if kind in kinds and torch.is_autocast_enabled(kind)]
    if cast:
        return f"autocast to {torch.get_autocast_dtype(cast[0])}".replace("torch.", "")
    if kinds & {"cuda"} and torch.backends.cuda.matmul.allow_tf32:
        return "TF32 products"
    if torch.get_float32_matmul_precision() != "highest":
        return f"products of {torch.get_float32_matmul_precision()!r} precision"
    return None


@dataclass(frozen=True)
class Step:
    """A step h that was found for one direction.

    Attributes:
        length: h.
        norm: of M when it was found.
        found: estimated relative error on the rows on which it was found.
        seen: the same on the last batch that was looked at.
        every: batches between the last look and the next.
        left: batches until one is looked at.
    """

    length: float
    norm: float
    found: float
    seen: float = 0.0
    every: int = 0
    left: int = 0

    @property
    def error(self) -> float:
        """The larger of both: other rows may be more curved, and few may agree by chance."""
        return max(self.found, self.seen)


class Differences:
    """Label values of one model by differences, with the steps that were found.

    Args:
        adapter: of the model.
        sharding: of the weights; then all processes take values together, and take one step.
    """

    def __init__(self, adapter: DecoderAdapter, sharding: Sharding | None = None) -> None:
        self._adapter, self._sharding = adapter, sharding
        self._steps: dict[tuple[str, int], Step] = {}
        self._lengths = WeakTensorKeyDictionary()

    def values(
        self,
        batch: LabelledBatch,
        direction: Mapping[str, Tensor],
        form: str,
        *,
        base: Float[Tensor, "b t"] | None = None,
        side: int = 0,
        shown: Callable[[], LabelledBatch | None] | None = None,
        see: Callable[[Tensor], None] | None = None,
    ) -> tuple[Float[Tensor, "b t"], float]:
        """``<grad l_k, M>`` for every response token k, and the estimated relative error.

        Args:
            batch: the tokens to value; dropout is off.
            direction: parameter name -> M in the parameter's shape.
            form: "central" or "one_sided"; or "curvature", for ``<M, H_k M>``.
            base: for "one_sided", the losses (b, t) at the weights as they are; None to run them.
            side: which direction this is of those that are taken in turn; each has a step.
            shown: gives the batch on a slice of which a step is found, so that values do not
                depend on which rows came first; None for ``batch``.
            see: gets token losses (b, t) near the weights as they are, and may refuse them.

        Returns:
            (b, t), index i for token i, 0 off the response, float32 or wider; and the error,
            relative to the norm of the values, as it was last looked at: on the batch for which the
            step was found, soon after it, and on every 32nd from there on.

        Raises:
            UnsupportedError: no step gives a relative error of ``TOLERANCE`` (of "curvature",
                ``CURVATURE_TOLERANCE``).

        Exactness: the error that is returned, within a factor of 3. Source: ours, of the
        definition of the derivative. Oracles: ``label_values`` and ``label_curvatures`` of
        ``alphatoken.oracle.gradients``.
        """
        shift = Shift(self._adapter.model, direction, self._sharding)
        norm = self._length(shift, direction)
        if norm == 0.0:  # M = 0, as V is before the first step: every value is 0
            return torch.zeros(batch.labels.shape, device=batch.labels.device), 0.0
        if not math.isfinite(norm):
            what, remedy = "the direction is not finite", "look at the weights"
            raise UnsupportedError(what, got=f"norm {norm}", remedy=remedy)
        with torch.no_grad(), evaluation_mode(self._adapter.model), shift.open():
            step = self._steps.get((form, side))
            if step is None or not 0.5 < norm / step.norm < 2.0:
                weights = shift.weights()
                few = around_responses((shown and shown()) or batch)
                step = self._find(few, shift, form, weights, norm)
                # M may reach none of the few rows, as an embedding of other tokens does.
                step = step or self._find(batch, shift, form, weights, norm)
            if step is None:
                return torch.zeros(batch.labels.shape, device=batch.labels.device), 0.0
            if step.found > _tolerance(form):
                raise _inexact(form, step.found)
            asked = self._quotients(batch, shift, form, base)
            values = asked.values(step.length)
            ahead, behind = asked.sides(step.length)
            if see is not None:
                see(behind)
            require_finite(ahead, batch.mask, "batch")
            require_finite(behind, batch.mask, "batch")
            if step.left == 0:
                seen = asked.away(step.length) if asked.size(step.length) else 0.0
                every = min(2 * step.every or 1, CHECKED_EVERY)
                step = replace(step, seen=seen, every=every, left=every)
                if step.error > _tolerance(form):
                    raise _inexact(form, step.error)
            self._steps[form, side] = replace(step, left=step.left - 1)
        return values.masked_fill(~batch.mask, 0.0), step.error

    def _length(self, shift: Shift, direction: Mapping[str, Tensor]) -> float:
        """Norm of M, which is read once and not for each batch."""
        first = next(iter(direction.values()))
        stamp = [(name, id(m), m._version) for name, m in direction.items()]
        known = self._lengths.get(first)
        if known is None or known[0] != stamp:
            known = self._lengths[first] = stamp, shift.length()
        return float(known[1])

    def _find(
        self, rows: LabelledBatch, shift: Shift, form: str, weights: float, norm: float
    ) -> Step | None:
        """The step by these rows; None where M does not reach their losses at all."""
        asked = self._quotients(rows, shift, form)
        length = asked.best(weights, norm)
        return None if length is None else Step(length, norm, asked.error(length))

    def _quotients(
        self, batch: LabelledBatch, shift: Shift, form: str, base: Tensor | None = None
    ) -> _Quotients:
        def losses(step: float) -> Tensor:
            shift.to(step)
            return response_losses(self._adapter, batch.inputs, batch.labels)

        summed = list if self._sharding is None else self._sharding.summed
        return _Quotients(losses, batch.mask, form, base, summed)


class _Quotients:
    """Differences of one batch's losses at several steps, each forward run once.

    Args:
        losses: from a step to the losses (b, t) there.
        mask: response tokens (b, t).
        form: as in ``Differences.values``.
        base: losses at step 0, where they are known.
        summed: sums of numbers over the processes that take values together.
    """

    def __init__(
        self,
        losses: Callable[[float], Tensor],
        mask: Tensor,
        form: str,
        base: Tensor | None,
        summed: Callable[[Sequence[float]], list[float]],
    ) -> None:
        self._losses, self._mask, self._form, self._summed = losses, mask, form, summed
        self._power = 2 if form == CURVATURE else 1  # of h, which roundings are divided by
        self._known: dict[float, Tensor] = {} if base is None else {0.0: base.detach()}

    def _at(self, step: float) -> Tensor:
        if step not in self._known:
            self._known[step] = self._losses(step)
        return self._known[step]

    def sides(self, length: float) -> tuple[Tensor, Tensor]:
        """Losses (b, t) whose difference is taken: ahead, or where the weights are; and behind."""
        ahead = self._at(0.0 if self._form == "one_sided" else length)
        return ahead, self._at(-length)

    def values(self, length: float) -> Tensor:
        """The quotient (b, t) at step ``length``."""
        ahead, behind = (side.to(wide(side.dtype)) for side in self.sides(length))
        if self._form == CURVATURE:
            here = self._at(0.0).to(ahead.dtype)
            return ((ahead - here) + (behind - here)) / length**2
        width = 2 * length if self._form == "central" else length
        return (ahead - behind) / width

    def away(self, length: float) -> float:
        """Richardson's: how far values at h are from those at 2 h, relative to their norm.

        Truncation makes those at 2 h off by four times (one-sided: twice) what those at h are off
        by, and rounding by half (curvature: a quarter). The roundings of the losses at their least
        are added, since on a few tokens both may agree by chance. Where h is too small or too large
        all of it is noise, or nothing follows M any more, and this is near 1.
        """
        values, twice = (self.values(h)[self._mask] for h in (length, 2 * length))
        losses = self._at(-length)[self._mask]
        away, known, size = self._norms(values - twice, losses, values)
        rounding = torch.finfo(losses.dtype).eps * known / length**self._power
        error = math.hypot(away, rounding)
        # All zeros say that the move drowned, unless no move shows; see ``best``.
        finite = math.isfinite(error) and math.isfinite(size)
        return error / size if finite and size > 0 else math.inf

    def size(self, length: float) -> float:
        """Norm of the values at this step."""
        (size,) = self._norms(self.values(length)[self._mask])
        return size

    def _norms(self, *tensors: Tensor) -> list[float]:
        """Norms of each over all processes, which therefore decide alike."""
        squares = [float(tensor.double().square().sum()) for tensor in tensors]
        return [total**0.5 for total in self._summed(squares)]

    def error(self, length: float) -> float:
        """Estimated relative error of the values at this step (norm over the tokens).

        What is seen at h alone may be small by chance, the more so as the least of many is
        chosen: half (curvature: a quarter) of what is seen at h / 2, and a quarter (one-sided:
        half) of that at 2 h, are what the one at h / 2 rounds and the one at 2 h truncates, brought
        to h.
        """
        truncated = self.away(2 * length) / (2 if self._form == "one_sided" else 4)
        return max(self.away(length), self.away(length / 2) / 2.0**self._power, truncated)

    def best(self, weights: float, norm: float) -> float | None:
        """The step of least error; the weights move by 1e-8 to 1e-2 of their norm.

        None where no such move changes any loss.

        Not by less in float64 either: models cast to float32 inside, where smaller moves drown,
        and what follows the rest of the model agrees with itself at any step.

        Args:
            weights: norm of what moves.
            norm: of M.
        """
        length, most = (part * (weights or 1.0) / norm for part in (1e-7, 1e-2))
        coarse = []
        while length < most:
            coarse.append(length)
            length *= 16
        if not any(self.size(length) for length in coarse):
            return None
        around = min(coarse, key=self.away)
        best = around
        for factor in (2.0, 0.5):
            while 1 / 16 < best / around < 16 and self.error(factor * best) < self.error(best):
                best *= factor
        return best


def _tolerance(form: str) -> float:
    return CURVATURE_TOLERANCE if form == CURVATURE else TOLERANCE


def _inexact(form: str, error: float) -> UnsupportedError:
    what = f"label values by {form.replace('_', '-')} differences are"
    return UnsupportedError(
        f"{'curvatures are' if form == CURVATURE else what} not exact enough on this model",
        got=f"an estimated relative error of {error:.1e} at the best step",
        why=f"more than {_tolerance(form):.0e}: losses are rounded too coarsely, or a forward "
        "draws random numbers",
        remedy="the model in float64, or curvature=False"
        if form == CURVATURE
        else "derivative='forward_mode'",
    )
