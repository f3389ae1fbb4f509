"""Label values by finite differences: two forwards at moved weights, or one beside a known one.

    central     v_k ~ ( l_k(theta + h M) - l_k(theta - h M) ) / (2 h)
    one-sided   v_k ~ ( l_k(theta) - l_k(theta - h M) ) / h

Nothing but forwards of the model as it is: no rule for any kernel or layer is needed. The step h is
found on a few short rows, from differences at h and at 2 h, and the same two say how far the values
are off. The weights come back to the bit, also after an exception or an interrupt.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from alphatoken.errors import UnsupportedError
from alphatoken.model.batch import LabelledBatch, require_finite
from alphatoken.model.batch_slice import around_responses
from alphatoken.model.modes import evaluation_mode
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.response_losses import response_losses
from alphatoken.support.precision import wide

__all__ = ["FORMS", "TOLERANCE", "Differences", "Shift", "drowned"]

FORMS = ("central", "one_sided")

TOLERANCE = 2e-2
"""Estimated relative error beyond which differences are refused."""

CHECKED_EVERY = 32
"""Batches after which the step is looked at again."""

_DEVICES = ("cpu", "cuda", "mps", "xpu")


def drowned(model: nn.Module, parameters: Mapping[str, Tensor]) -> str | None:
    """Why a small shift of these weights would drown in rounding; None where it would not.

    The shift must be representable in the weights and in the products: float32 or wider in both.
    """
    narrow = [f"{n} in {p.dtype}" for n, p in parameters.items() if wide(p.dtype) != p.dtype]
    # Frozen weights round the products too: a 16-bit base under float32 factors.
    narrow += [
        f"{n} in {p.dtype}"
        for n, p in model.named_parameters()
        if p.is_floating_point() and wide(p.dtype) != p.dtype
    ]
    if narrow:
        return narrow[0].replace("torch.", "")
    kinds = {p.device.type for p in model.parameters()}
    cast = [kind for kind in _DEVICES if kind in kinds and torch.is_autocast_enabled(kind)]
    if cast:
        return f"autocast to {torch.get_autocast_dtype(cast[0])}".replace("torch.", "")
    if kinds & {"cuda"} and torch.backends.cuda.matmul.allow_tf32:
        return "TF32 products"
    if torch.get_float32_matmul_precision() != "highest":
        return f"products of {torch.get_float32_matmul_precision()!r} precision"
    return None


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold an interrupt back until the end: half of the weights may be the moved ones inside."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, Any]] = []
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting and callable(before):
            before(*waiting[0])


class _TrainedEmbedding(TorchFunctionMode):
    """Inside, an embedding moves as its backward says, which is what trains.

    The backward gives the row at ``padding_idx`` nothing, though a head tied to the same weight
    does, and under ``scale_grad_by_freq`` divides by how often the batch holds a token.
    """

    def __init__(self, before: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.before = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and id(args[1]) in self.before:
            return self._rows(*args, **kwargs)
        return func(*args, **kwargs)

    def _rows(
        self,
        ids: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        rows = F.embedding(ids, weight, padding_idx, max_norm, norm_type)
        if padding_idx is None and not scale_grad_by_freq:
            return rows
        still = F.embedding(ids, self.before[id(weight)])
        if scale_grad_by_freq:
            times = torch.bincount(ids.flatten())[ids].unsqueeze(-1).to(rows)
            rows = still + (rows - still) / times
        if padding_idx is not None:
            rows = torch.where((ids == padding_idx % len(weight)).unsqueeze(-1), still, rows)
        return rows


class Shift:
    """Moves parameters of a model along M, in place, and brings them back to the bit.

    Views of the weights, tied places and shards see the move, since no tensor is replaced; a tied
    weight moves once. Memory: one more copy of what moves, while ``open``.

    Args:
        model: whose parameters move.
        direction: parameter name -> M in the parameter's shape, or in that of this process's part.
    """

    def __init__(self, model: nn.Module, direction: Mapping[str, Tensor]) -> None:
        named = dict(model.named_parameters(remove_duplicate=False))
        once = {id(named[name]): (named[name], m) for name, m in direction.items()}
        self._moves = list(once.values())
        self._before: list[Tensor] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keep a copy of the weights inside, and copy it back at the end, whatever happened."""
        self._before = [parameter.detach().clone() for parameter, _ in self._moves]
        known = {id(p): b for (p, _), b in zip(self._moves, self._before, strict=True)}
        try:
            with _TrainedEmbedding(known):
                yield
        finally:
            with _uninterrupted():
                for (parameter, _), before in zip(self._moves, self._before, strict=True):
                    # Through ``.data``, which counts as no write: graphs of an observed forward
                    # hold the weights, and find them as they were.
                    parameter.data.copy_(before)
            self._before = []

    @torch.no_grad()
    def to(self, step: float) -> None:
        """Put the weights at ``theta + step M``."""
        for (parameter, m), before in zip(self._moves, self._before, strict=True):
            torch.add(before, m.to(parameter.dtype), alpha=step, out=parameter.data)

    def lengths(self) -> tuple[float, float]:
        """Norms of the weights that move, and of M."""
        parameters, directions = zip(*self._moves, strict=True)
        return _norm(parameters), _norm(directions)


def _norm(tensors: Sequence[Tensor]) -> float:
    parts = [torch.linalg.vector_norm(t.detach(), dtype=wide(t.dtype)).double() for t in tensors]
    return float(torch.stack([part.to(parts[0].device) for part in parts]).norm())


@dataclass(frozen=True)
class Step:
    """A step h that was found for one direction.

    Attributes:
        length: h.
        norm: of M when it was found.
        found: estimated relative error on the rows on which it was found.
        seen: the same on the last batch that was looked at.
        left: batches until one is looked at.
    """

    length: float
    norm: float
    found: float
    seen: float = 0.0
    left: int = 0

    @property
    def error(self) -> float:
        """The larger of both: other rows may be more curved, and few may agree by chance."""
        return max(self.found, self.seen)


class Differences:
    """Label values of one model by differences, with the steps that were found.

    Args:
        adapter: of the model.
    """

    def __init__(self, adapter: DecoderAdapter) -> None:
        self._adapter = adapter
        self._steps: dict[tuple[str, int], Step] = {}

    def values(
        self,
        batch: LabelledBatch,
        direction: Mapping[str, Tensor],
        form: str,
        *,
        base: Float[Tensor, "b t"] | None = None,
        side: int = 0,
        shown: LabelledBatch | None = None,
        see: Callable[[Tensor], None] | None = None,
    ) -> tuple[Float[Tensor, "b t"], float]:
        """``<grad l_k, M>`` for every response token k, and the estimated relative error.

        Args:
            batch: the tokens to value; dropout is off.
            direction: parameter name -> M in the parameter's shape.
            form: "central" or "one_sided".
            base: for "one_sided", the losses (b, t) at the weights as they are; None to run them.
            side: which direction this is of those that are taken in turn; each has a step.
            shown: the step is found on a slice of it, so that values do not depend on which rows
                came first; None for ``batch``.
            see: gets token losses (b, t) near the weights as they are, and may refuse them.

        Returns:
            (b, t), index i for token i, 0 off the response, float32 or wider; and the error,
            relative to the norm of the values, as it was last looked at: on the batch for which the
            step was found, and on every 32nd from there on.

        Raises:
            UnsupportedError: no step gives a relative error of ``TOLERANCE``.

        Exactness: the error that is returned, within a factor of 3. Source: ours, of the
        definition of the derivative. Oracle: ``alphatoken.oracle.gradients.label_values``.
        """
        shift = Shift(self._adapter.model, direction)
        weights, norm = shift.lengths()
        if norm == 0.0:  # M = 0, as V is before the first step: every value is 0
            return torch.zeros(batch.labels.shape, device=batch.labels.device), 0.0
        if not math.isfinite(norm):
            raise UnsupportedError(
                "the direction is not finite", got=f"norm {norm}", remedy="look at the weights"
            )
        with torch.no_grad(), evaluation_mode(self._adapter.model), shift.open():
            step = self._steps.get((form, side))
            if step is None or not 0.5 < norm / step.norm < 2.0:
                few = self._quotients(around_responses(shown or batch), shift, form)
                length = few.best(weights, norm)
                step = Step(length, norm, few.error(length))
            if step.found > TOLERANCE:
                raise _inexact(form, step.found)
            asked = self._quotients(batch, shift, form, base)
            values = asked.values(step.length)
            ahead, behind = asked.sides(step.length)
            if see is not None:
                see(behind)
            require_finite(ahead, batch.mask, "batch")
            require_finite(behind, batch.mask, "batch")
            if step.left == 0:
                step = replace(step, seen=asked.away(step.length), left=CHECKED_EVERY)
                if step.error > TOLERANCE:
                    raise _inexact(form, step.error)
            self._steps[form, side] = replace(step, left=step.left - 1)
        return values.masked_fill(~batch.mask, 0.0), step.error

    def _quotients(
        self, batch: LabelledBatch, shift: Shift, form: str, base: Tensor | None = None
    ) -> _Quotients:
        def losses(step: float) -> Tensor:
            shift.to(step)
            return response_losses(self._adapter, batch.inputs, batch.labels)

        return _Quotients(losses, batch.mask, form, base)


class _Quotients:
    """Differences of one batch's losses at several steps, each forward run once.

    Args:
        losses: from a step to the losses (b, t) there.
        mask: response tokens (b, t).
        form: "central" or "one_sided".
        base: losses at step 0, where they are known.
    """

    def __init__(
        self, losses: Callable[[float], Tensor], mask: Tensor, form: str, base: Tensor | None
    ) -> None:
        self._losses, self._mask, self._form = losses, mask, form
        self._known: dict[float, Tensor] = {} if base is None else {0.0: base.detach()}

    def _at(self, step: float) -> Tensor:
        if step not in self._known:
            self._known[step] = self._losses(step)
        return self._known[step]

    def sides(self, length: float) -> tuple[Tensor, Tensor]:
        """Losses (b, t) whose difference is taken: ahead, or where the weights are; and behind."""
        ahead = self._at(length if self._form == "central" else 0.0)
        return ahead, self._at(-length)

    def values(self, length: float) -> Tensor:
        """The quotient (b, t) at step ``length``."""
        ahead, behind = self.sides(length)
        dtype = wide(ahead.dtype)
        width = 2 * length if self._form == "central" else length
        return (ahead.to(dtype) - behind.to(dtype)) / width

    def away(self, length: float) -> float:
        """Richardson's: how far values at h are from those at 2 h, relative to their norm.

        Truncation makes those at 2 h off by four times (central) or twice (one-sided) what those
        at h are off by, and rounding by half. The roundings of the losses at their least are added,
        since on a few tokens both may agree by chance. Where h is too small or too large all of it
        is noise, or nothing follows M any more, and this is near 1.
        """
        values, twice = (self.values(h)[self._mask] for h in (length, 2 * length))
        losses = self._at(-length)[self._mask]
        rounding = torch.finfo(losses.dtype).eps * float(losses.norm()) / length
        error = math.hypot(float((values - twice).norm()), rounding)
        size = float(values.norm())
        if not math.isfinite(error) or not math.isfinite(size):
            return math.inf
        return error / size if size > 0 else (0.0 if error == 0 else math.inf)

    def error(self, length: float) -> float:
        """Estimated relative error of the values at this step (norm over the tokens).

        What is seen at h alone may be small by chance, the more so as the least of many is
        chosen: half of what is seen at h / 2, and a quarter (one-sided: half) of that at 2 h, are
        what the one at h / 2 rounds and the one at 2 h truncates, brought to h.
        """
        order = 4 if self._form == "central" else 2
        return max(self.away(length), self.away(length / 2) / 2, self.away(2 * length) / order)

    def best(self, weights: float, norm: float) -> float:
        """The step of least error; the weights move by 1e-8 to 1e-2 of their norm.

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
        around = min(coarse, key=self.away)
        best = around
        for factor in (2.0, 0.5):
            while 1 / 16 < best / around < 16 and self.error(factor * best) < self.error(best):
                best *= factor
        return best


def _inexact(form: str, error: float) -> UnsupportedError:
    return UnsupportedError(
        f"label values by {form.replace('_', '-')} differences are not exact enough on this model",
        got=f"an estimated relative error of {error:.1e} at the best step",
        why=f"more than {TOLERANCE:.0e}: losses are rounded too coarsely, or a forward draws "
        "random numbers",
        remedy="derivative='forward_mode'",
    )
