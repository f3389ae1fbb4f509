"""Label values by finite differences: two forwards at moved weights, or one beside a known one.

    central     v_k ~ ( l_k(theta + h M) - l_k(theta - h M) ) / (2 h)
    one-sided   v_k ~ ( l_k(theta) - l_k(theta - h M) ) / h

Forwards alone: no rule for any kernel or layer is needed. The step h is searched for on a few short
rows, by differences at h and at 2 h, and the same two estimate how far the values are off. The
weights are restored bitwise, also after an exception or an interrupt.

The stated error of a batch has two parts. Rounding, ``u / h`` with u the rounding of a loss as it
was measured, is known for each batch. Truncation is measured on some of them, by the forwards at
2 h, and carried over to the others; a batch that is unlike those is measured itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from alphatoken.errors import UnsupportedError
from alphatoken.estimate.temporary_weights import ShiftedWeights
from alphatoken.model.batch import LabelledBatch, require_finite
from alphatoken.model.batch_slice import around_responses
from alphatoken.model.forward import evaluation_mode, response_losses
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.sharding import Sharding
from alphatoken.support.precision import DEVICES, wide

TOLERANCE = 2e-2
"""Estimated relative error beyond which differences are refused."""

_JUMP = 5 * TOLERANCE
"""Part of a token's value, or of the mean one, that its values at h and 2 h may differ by."""

CHECKED_EVERY = 32
"""Batches after which the error is looked at again; at first sooner: after 1, 2, 4, 8 and 16."""


def precision_obstacle(model: nn.Module, parameters: Mapping[str, Tensor]) -> str | None:
    """Reason why rounding would hide a small shift of these weights, or None.

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


_CHOOSING = frozenset(
    getattr(place, name)
    for place in (torch, Tensor)
    for name in ("topk", "argmax", "argmin", "sort", "argsort", "kthvalue")
)


class ChoiceWatch(TorchFunctionMode):
    """Sees whether a model chooses among its parts by its numbers, as a router of experts does.

    ``made`` is True after a call of ``topk`` and its like on numbers that the model computed.
    """

    # Where moved weights send a token elsewhere its loss jumps, and a jump divided by a short step
    # is no derivative.

    def __init__(self) -> None:
        super().__init__()
        self.made = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function, and look at what it chooses by."""
        kwargs = kwargs or {}
        if func in _CHOOSING:
            numbers = args[0] if args else kwargs.get("input")
            if isinstance(numbers, Tensor) and numbers.is_floating_point():
                self.made = True
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Step:
    """A step h for one direction, and the errors that it makes.

    Numbers of values are root mean squares over response tokens.

    Attributes:
        length: h.
        norm: of M when it was chosen.
        relative: estimated relative error on the rows on which it was chosen.
        rounding: what rounding of the losses adds to a value at this step.
        truncation: what values at h and at 2 h differ by, at most on the batches that were looked
            at since.
        sizes: of the values of these batches, the least and the most.
        every: batches between the last look and the next.
        left: batches until one is looked at.
        age: batches since the last look.
    """

    length: float
    norm: float
    relative: float
    rounding: float
    truncation: float = 0.0
    sizes: tuple[float, float] = (math.inf, 0.0)
    every: int = 0
    left: int = 0
    age: int = 0

    def is_due(self, size: float) -> bool:
        """Whether the truncation of a batch with values of this size is to be measured."""
        least, most = self.sizes
        return self.left <= 0 or not least / _UNLIKE <= size <= most * _UNLIKE

    def error(self, size: float, truncation: float | None = None) -> float:
        """Estimated relative error of a batch with values of this size, and this truncation.

        By default that of the batches that were looked at, as large, relative to the values, on any
        larger ones.
        """
        if size == 0.0:
            return 0.0
        cut, most = truncation, self.sizes[1]
        if cut is None:
            cut = self.truncation * (max(1.0, size / most) if most else 1.0)
        # Not less than on the few rows: other rows may be more curved, and few agree by chance.
        return max(self.relative, math.hypot(cut, self.rounding) / size)

    def looked(self, size: float, truncation: float) -> Step:
        """This step after a look at a batch; the next look comes after twice as many batches."""
        least, most = self.sizes
        every = min(2 * self.every or 1, CHECKED_EVERY) if self.left <= 0 else self.every
        return replace(
            self,
            truncation=max(self.truncation, truncation),
            sizes=(min(least, size), max(most, size)),
            every=every,
            left=every if self.left <= 0 else self.left,
            age=0,
        )


_UNLIKE = 3.0
"""Factor by which the values of a batch are smaller or larger than those that were looked at."""


@dataclass(frozen=True)
class DirectionalDerivative:
    """Derivatives of the token losses of one batch along one side of M.

    Attributes:
        values: (b, t), 0 off the response.
        way: "forward_mode", "central" or "one_sided".
        error: estimated, relative to the norm of ``values``; 0 where it is rounding alone.
        age: batches since the truncation in ``error`` was measured; 0: on this one.
        doubt: why they are not exact enough; None if they are.
        negligible: the error is small beside the values of other batches, as of rows that M hardly
            reaches.
        losses: (b, t) at the weights as they are, of the forwards that were run; of central
            differences the mean of both sides, off by O(h^2). None where M is 0.
    """

    values: Float[Tensor, "b t"]
    way: str
    error: float = 0.0
    age: int = 0
    doubt: UnsupportedError | None = None
    negligible: bool = False
    losses: Float[Tensor, "b t"] | None = None


class Differences:
    """Label values of one model by differences, with a step for each side of M.

    Under ``sharding`` all processes compute values together, with one step.
    """

    def __init__(self, adapter: DecoderAdapter, sharding: Sharding | None = None) -> None:
        self._adapter, self._sharding = adapter, sharding
        self._steps: dict[tuple[str, int], Step] = {}
        self._chooses = False  # whether the model sends tokens to parts of it by their numbers
        self._lengths = WeakTensorKeyDictionary()
        self._memory: list[Tensor] = []  # of moved weights, where no training step needs it

    def state(self) -> dict[str, Any]:
        """The steps in use, as JSON holds them."""
        steps = [[form, side, asdict(step)] for (form, side), step in self._steps.items()]
        return {"steps": steps, "chooses": self._chooses}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        for form, side, numbers in state["steps"]:
            sizes = tuple(numbers["sizes"])
            self._steps[form, side] = Step(**{**numbers, "sizes": sizes})
        self._chooses = state["chooses"]

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
        keep_memory: bool = False,
    ) -> DirectionalDerivative:
        """``<grad l_k, M>`` for every response token k, and the estimated relative error.

        Args:
            batch: the tokens to value; dropout is off.
            direction: parameter name -> M in the parameter's shape.
            form: "central" or "one_sided".
            base: for "one_sided", the losses (b, t) at the weights as they are; None to run them.
            side: number of the direction among those of one valuation; each has a step.
            shown: gives the batch on a slice of which a step is chosen, so that values do not
                depend on which rows came first; None for ``batch``.
            see: gets what the losses (b, t) at the current weights should be, and may refuse them.
            keep_memory: keep the memory of the moved weights for the next call; filling fresh
                memory takes several times as long.

        Returns:
            Values (b, t), index i for token i, 0 off the response, float32 or wider; and the error
            of this batch, relative to the norm of its values. Truncation is measured soon after the
            step was chosen, on every 32nd batch from there on, on batches whose values have another
            size, and on all batches of a model that chooses among its parts (a router). With an
            error above ``TOLERANCE``, or a loss that jumps, there is a doubt.

        Raises:
            UnsupportedError: no step gives such an error on this model.

        Exactness: the error that is returned, within a factor of 3. Source: ours, of the
        definition of the derivative. Oracle: ``alphatoken.oracle.gradients.label_values``.
        """
        memory = self._memory if keep_memory else None
        shift = ShiftedWeights(self._adapter.model, direction, self._sharding, memory)
        norm = self._length(shift, direction)
        zeros = torch.zeros(batch.labels.shape, device=batch.labels.device)
        nothing = DirectionalDerivative(zeros, form)
        if norm == 0.0:  # M = 0, as V is before the first step: every value is 0
            return nothing
        if not math.isfinite(norm):
            what, remedy = "the direction is not finite", "look at the weights"
            raise UnsupportedError(what, got=f"norm {norm}", remedy=remedy)
        with torch.no_grad(), evaluation_mode(self._adapter.model), shift.open():
            step = self._step_for(batch, shift, form, side, norm, shown)
            if step is None:
                return nothing
            if step.relative > TOLERANCE:
                raise _inexact(form, step.relative, "model")
            return self._derivative(
                self._quotients(batch, shift, form, base), step, batch, side, see
            )

    def _step_for(
        self,
        batch: LabelledBatch,
        shift: ShiftedWeights,
        form: str,
        side: int,
        norm: float,
        shown: Callable[[], LabelledBatch | None] | None,
    ) -> Step | None:
        """The step in use, or a new one where M has another length; None where it moves no loss."""
        step = self._steps.get((form, side))
        if step is not None and 0.5 < norm / step.norm < 2.0:
            return step
        weights = shift.parameter_norm()
        few = around_responses((shown and shown()) or batch)
        # M may reach none of the few rows, as an embedding of other tokens does.
        return self._find(few, shift, form, weights, norm) or self._find(
            batch, shift, form, weights, norm
        )

    def _derivative(
        self,
        quotients: _Quotients,
        step: Step,
        batch: LabelledBatch,
        side: int,
        see: Callable[[Tensor], None] | None,
    ) -> DirectionalDerivative:
        """Values at a step and their stated error; the step is updated for the next batch."""
        form = quotients.form
        values = quotients.values(step.length)
        for losses in quotients.sides(step.length):
            require_finite(losses, batch.mask, "batch")
        size, truncation = quotients.size(step.length), None
        unsure = step.is_due(size) or step.error(size) > TOLERANCE or self._chooses
        if unsure and size > 0.0:
            truncation = quotients.spread(step.length)
            step = step.looked(size, truncation)
        self._steps[form, side] = replace(step, left=step.left - 1, age=step.age + 1)
        error = step.error(size, truncation)
        own = values.masked_fill(~batch.mask, 0.0)
        here = quotients.here(step.length)
        derivative = DirectionalDerivative(own, form, error, step.age, losses=here)
        jumps = self._chooses and quotients.jumps(step.length)
        if error > TOLERANCE or jumps:
            small = not jumps and error * size <= TOLERANCE * step.sizes[1]
            doubt = _inexact(form, error, "batch")
            return replace(derivative, doubt=doubt, negligible=small)
        if see is not None and here is not None:
            see(here)
        return derivative

    def _length(self, shift: ShiftedWeights, direction: Mapping[str, Tensor]) -> float:
        """Norm of M."""
        # Read once and not for each batch.
        first = next(iter(direction.values()))
        stamp = [(name, id(m), m._version) for name, m in direction.items()]
        cached = self._lengths.get(first)
        if cached is None or cached[0] != stamp:
            cached = self._lengths[first] = stamp, shift.direction_norm()
        return float(cached[1])

    def _find(
        self, rows: LabelledBatch, shift: ShiftedWeights, form: str, weights: float, norm: float
    ) -> Step | None:
        """The step by these rows; None where no move along M changes their losses."""
        quotients = self._quotients(rows, shift, form)
        with ChoiceWatch() as watch:
            quotients.at(0.0)
        self._chooses = self._chooses or watch.made
        length = quotients.best(weights, norm)
        if length is None:
            return None
        return Step(length, norm, quotients.error(length), quotients.rounding(length))

    def _quotients(
        self, batch: LabelledBatch, shift: ShiftedWeights, form: str, base: Tensor | None = None
    ) -> _Quotients:
        def losses(step: float) -> Tensor:
            shift.to(step)
            return response_losses(self._adapter, batch.inputs, batch.labels)

        summed = list if self._sharding is None else self._sharding.summed
        return _Quotients(losses, batch.mask, form, base, summed)


class _Quotients:
    """Differences of one batch's losses at several steps, each forward run once.

    ``losses`` gives the losses (b, t) at a step, ``base`` are those at step 0, if there are any;
    ``summed`` adds numbers over the processes that compute values together.
    """

    def __init__(
        self,
        losses: Callable[[float], Tensor],
        mask: Tensor,
        form: str,
        base: Tensor | None,
        summed: Callable[[Sequence[float]], list[float]],
    ) -> None:
        self._losses, self._mask, self.form, self._summed = losses, mask, form, summed
        self._based = base is not None
        self._cached: dict[float, Tensor] = {} if base is None else {0.0: base.detach()}
        self._rounding = 0.0  # of a loss, where it was measured

    def at(self, step: float) -> Tensor:
        """Losses (b, t) at a step."""
        if step not in self._cached:
            self._cached[step] = self._losses(step)
        return self._cached[step]

    def sides(self, length: float) -> tuple[Tensor, Tensor]:
        """Losses (b, t) that are subtracted: at +h (one-sided: at 0), and at -h."""
        loss_plus = self.at(0.0 if self.form == "one_sided" else length)
        return loss_plus, self.at(-length)

    def here(self, length: float) -> Tensor | None:
        """Losses (b, t) at the weights as they are, by forwards of our own that were run.

        None where these say nothing of ``base``.
        """
        if self.form != "one_sided":
            loss_plus, loss_minus = self.sides(length)
            return (loss_plus + loss_minus) / 2
        if not self._based:
            return self.at(0.0)
        farther = self._cached.get(-2 * length)
        return None if farther is None else 2 * self.at(-length) - farther

    def values(self, length: float) -> Tensor:
        """The quotient (b, t) at step ``length``."""
        loss_plus, loss_minus = (side.to(wide(side.dtype)) for side in self.sides(length))
        width = 2 * length if self.form == "central" else length
        return (loss_plus - loss_minus) / width

    def spread(self, length: float) -> float:
        """How far values at h are from those at 2 h (root mean square over tokens): Richardson's.

        Truncation makes those at 2 h off by four times (one-sided: twice) what those at h are off
        by, and rounding by half.
        """
        return self._mean(self.values(length) - self.values(2 * length))

    def size(self, length: float) -> float:
        """Root mean square of the values at this step."""
        return self._mean(self.values(length))

    def jumps(self, length: float) -> bool:
        """Whether a token's loss jumps between h and 2 h, where it has no derivative."""
        values, twice = (self.values(h)[self._mask].double() for h in (length, 2 * length))
        bar = _JUMP * torch.maximum(values.abs(), values.new_tensor(self.size(length)))
        return self._summed([float(((values - twice).abs() > bar).sum())])[0] > 0

    def rounding(self, length: float) -> float:
        """What rounding of the losses adds to values at this step (root mean square)."""
        # The rounding of a loss is what losses at the shortest moves differ by, for no move of the
        # weights that short changes them by as much; and at least that of their last digit.
        losses = self.at(-length)
        digit = torch.finfo(losses.dtype).eps * self._mean(losses)
        return max(self._rounding, digit) / length

    def relative_error(self, length: float) -> float:
        """``spread`` and the rounding of the last digit together, relative to the values."""
        # The rounding is added since on a few tokens values may agree by chance. Where h is too
        # small or too large all of it is noise, or nothing follows M any more, and this is near 1.
        size, losses = self.size(length), self.at(-length)
        digit = torch.finfo(losses.dtype).eps * self._mean(losses) / length
        error = math.hypot(self.spread(length), digit)
        # All zeros say that rounding hid the move, unless no move shows; see ``best``.
        finite = math.isfinite(error) and math.isfinite(size)
        return error / size if finite and size > 0 else math.inf

    def _mean(self, tensor: Tensor) -> float:
        """Root mean square over the response tokens of all processes, which decide alike."""
        numbers = tensor.double().masked_fill(~self._mask, 0.0).square().sum(), self._mask.sum()
        square, count = self._summed(torch.stack([number.double() for number in numbers]).tolist())
        return math.sqrt(square / count) if count else 0.0

    def error(self, length: float) -> float:
        """Estimated relative error of the values at this step."""
        # The difference at h alone may be small by chance, the more so as the least of many is
        # chosen: half of that at h / 2, and a quarter (one-sided: half) of that at 2 h, are what
        # the one at h / 2 rounds and the one at 2 h truncates, brought to h.
        truncated = self.relative_error(2 * length) / (2 if self.form == "one_sided" else 4)
        return max(self.relative_error(length), self.relative_error(length / 2) / 2, truncated)

    def best(self, weights: float, norm: float) -> float | None:
        """The step of least error; None where no move changes any loss.

        The weights, of norm ``weights``, move by 1e-8 to 1e-2 of it along M of norm ``norm``.
        """
        # Not by less in float64 either: models cast to float32 inside, where rounding hides smaller
        # moves, and what follows the rest of the model agrees with itself at any step.
        length, most = (part * (weights or 1.0) / norm for part in (1e-7, 1e-2))
        coarse = []
        while length < most:
            coarse.append(length)
            length *= 16
        if not any(self.size(length) for length in coarse):
            return None
        around = min(coarse, key=self.relative_error)
        best = around
        for factor in (2.0, 0.5):
            while 1 / 16 < best / around < 16 and self.error(factor * best) < self.error(best):
                best *= factor
        # Values at the shortest step and its double, and at the best one, which is nearly exact.
        shortest = coarse[0]
        self._rounding = self.spread(shortest) * shortest
        return best


def _inexact(form: str, error: float, where: str) -> UnsupportedError:
    values = f"label values by {form.replace('_', '-')} differences"
    return UnsupportedError(
        f"{values} are not exact enough on this {where}",
        got=f"an estimated relative error of {error:.1e} at the best step",
        why=f"more than {TOLERANCE:.0e}: losses are rounded too coarsely, a forward "
        "draws random numbers, or M hardly reaches the rows",
        remedy="derivative='forward_mode'",
    )
