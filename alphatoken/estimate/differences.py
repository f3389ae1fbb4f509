"""Label values by finite differences: two forwards at moved weights, or one beside a known one.

    central     v_k ~ ( l_k(theta + h M) - l_k(theta - h M) ) / (2 h)
    one-sided   v_k ~ ( l_k(theta) - l_k(theta - h M) ) / h

Nothing but forwards of the model as it is: no rule for any kernel or layer is needed. The step h is
found on a few short rows, from differences at h and at 2 h, and the same two say how far the values
are off. The weights come back to the bit, also after an exception or an interrupt.
"""

from __future__ import annotations

import math
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
from alphatoken.model.sharding import Sharding, objects_in_use
from alphatoken.support.precision import DEVICES, wide

__all__ = ["FORMS", "TOLERANCE", "Differences", "Shift", "drowned"]

FORMS = ("central", "one_sided")

TOLERANCE = 2e-2
"""Estimated relative error beyond which differences are refused."""

CHECKED_EVERY = 32
"""Batches after which the error is looked at again; at first sooner: after 1, 2, 4, 8 and 16."""

_ATTEMPTS = 8
"""At bringing weights back, each ended by a signal."""


def drowned(model: nn.Module, parameters: Mapping[str, Tensor]) -> str | None:
    """Why a small shift of these weights would drown in rounding; None where it would not.

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
class _Unmoved:
    """An embedding's weight before the move.

    Attributes:
        whole: all of it; None where no process has it.
        row: the one at ``padding_idx``; None without one.
    """

    whole: Tensor | None
    row: Tensor | None = None


class _TrainedEmbedding(TorchFunctionMode):
    """Inside, an embedding moves as its backward says, which is what trains.

    The backward gives the row at ``padding_idx`` nothing, though a head tied to the same weight
    does, and under ``scale_grad_by_freq`` divides by how often the batch holds a token.
    """

    def __init__(self, find: Callable[[int], _Unmoved | None]) -> None:
        super().__init__()
        self.find = find

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and self.find(id(args[1])) is not None:
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
        before = self.find(id(weight))
        assert before is not None
        if scale_grad_by_freq:
            if before.whole is None:
                raise UnsupportedError(
                    "an embedding with scale_grad_by_freq cannot be moved where it is sharded",
                    why="its rows before the move are needed, and no process has them",
                    remedy="scale_grad_by_freq=False, or parameters= without it",
                )
            still = F.embedding(ids, before.whole)
            times = torch.bincount(ids.flatten())[ids].unsqueeze(-1).to(rows)
            rows = still + (rows - still) / times
        if padding_idx is not None:
            row = before.row if before.whole is None else before.whole[padding_idx]
            assert row is not None
            padding = (ids == padding_idx % len(weight)).unsqueeze(-1)
            rows = torch.where(padding, row.to(rows), rows)
        return rows


class Shift:
    """Moves parameters of a model along M, in place, and brings them back to the bit.

    Views of the weights, tied places and shards see the move, since no tensor is replaced; a tied
    weight moves once. Memory: one more copy of what moves, while ``open``.

    Args:
        model: whose parameters move, outside a forward.
        direction: parameter name -> M in the parameter's shape; under ``sharding`` this process's
            part of it.
        sharding: of the weights. Every process moves its own part, and gathers nothing of M.
    """

    def __init__(
        self,
        model: nn.Module,
        direction: Mapping[str, Tensor],
        sharding: Sharding | None = None,
    ) -> None:
        self._model, self._sharding = model, sharding
        self._regather()
        named = dict(model.named_parameters(remove_duplicate=False))
        once = {id(named[name]): (name, m) for name, m in direction.items()}
        self._direction = dict(once.values())
        self._parameters = {name: named[name] for name in self._direction}
        self._moves: list[tuple[Tensor, Tensor]] = []
        self._before: list[Tensor] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keep a copy of the weights inside, and copy it back at the end, whatever happened."""
        # Through ``.data``, which counts as no write: graphs of an observed forward hold the
        # weights, and find them as they were.
        self._moves = [self._moving(name, m) for name, m in self._direction.items()]
        self._before = [target.clone() for target, _ in self._moves]
        try:
            with self._embeddings():
                yield
        finally:
            # A signal's handler may raise anywhere in here: what it raises waits until all is back.
            raised: BaseException | None = None
            for _ in range(_ATTEMPTS):
                try:
                    for (target, _m), before in zip(self._moves, self._before, strict=True):
                        target.copy_(before)
                    self._regather()
                    break
                except BaseException as error:
                    raised = raised or error
            self._moves, self._before = [], []
            if raised is not None:
                raise raised

    def _regather(self) -> None:
        if self._sharding is not None:
            self._sharding.regather()

    def _moving(self, name: str, m: Tensor) -> tuple[Tensor, Tensor]:
        parameter = self._parameters[name]
        if self._sharding is None:
            return parameter.data, m
        return self._sharding.moving(name, parameter, m)

    @contextmanager
    def _embeddings(self) -> Iterator[None]:
        if self._sharding is None:
            by_identity = {
                id(p): _Unmoved(before)
                for p, before in zip(self._parameters.values(), self._before, strict=True)
            }
            with _TrainedEmbedding(by_identity.get):
                yield
            return
        kept = self._padding_rows(self._sharding)
        with objects_in_use(self._model, self._parameters) as in_use:

            def find(identity: int) -> _Unmoved | None:
                name, _ = in_use.get(identity, ("", None))
                return _Unmoved(None, kept.get(name)) if name else None

            with _TrainedEmbedding(find):
                yield

    def _padding_rows(self, sharding: Sharding) -> dict[str, Tensor]:
        """Rows of embeddings that no backward reaches; gathered with the others, then kept."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        found = {}
        for module in self._model.modules():
            padding = getattr(module, "padding_idx", None)
            name = names.get(id(getattr(module, "weight", None)))
            if padding is not None and name is not None:
                found[name] = sharding.full(name, self._parameters[name])[padding].clone()
        return found

    @torch.no_grad()
    def to(self, step: float) -> None:
        """Put the weights at ``theta + step M``."""
        for (target, m), before in zip(self._moves, self._before, strict=True):
            torch.add(before, m.to(target.dtype), alpha=step, out=target)
        self._regather()

    def length(self) -> float:
        """Norm of M."""
        return self._norm(self._direction)

    def weights(self) -> float:
        """Norm of the weights that move, where they are now."""
        local = (lambda name, p: p) if self._sharding is None else self._sharding.local
        return self._norm({name: local(name, p) for name, p in self._parameters.items()})

    def _norm(self, tensors: Mapping[str, Tensor]) -> float:
        if self._sharding is not None:
            return math.hypot(*self._sharding.norms(tensors).values())
        every = [t.detach() for t in tensors.values()]
        parts = [torch.linalg.vector_norm(t, dtype=wide(t.dtype)).double() for t in every]
        return float(torch.stack([part.to(parts[0].device) for part in parts]).norm())


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
            form: "central" or "one_sided".
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
            UnsupportedError: no step gives a relative error of ``TOLERANCE``.

        Exactness: the error that is returned, within a factor of 3. Source: ours, of the
        definition of the derivative. Oracle: ``alphatoken.oracle.gradients.label_values``.
        """
        shift = Shift(self._adapter.model, direction, self._sharding)
        norm = shift.length()
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
                seen = asked.away(step.length) if asked.size(step.length) else 0.0
                every = min(2 * step.every or 1, CHECKED_EVERY)
                step = replace(step, seen=seen, every=every, left=every)
                if step.error > TOLERANCE:
                    raise _inexact(form, step.error)
            self._steps[form, side] = replace(step, left=step.left - 1)
        return values.masked_fill(~batch.mask, 0.0), step.error

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
        form: "central" or "one_sided".
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
        away, known, size = self._norms(values - twice, losses, values)
        error = math.hypot(away, torch.finfo(losses.dtype).eps * known / length)
        # All zeros say that the move drowned, unless no move shows; see ``best``.
        finite = math.isfinite(error) and math.isfinite(size)
        return error / size if finite and size > 0 else math.inf

    def size(self, length: float) -> float:
        """Norm of the values at this step."""
        (size,) = self._norms(self.values(length)[self._mask])
        return size

    def _norms(self, *tensors: Tensor) -> list[float]:
        """Of each over all processes, which therefore decide alike."""
        squares = [float(tensor.double().square().sum()) for tensor in tensors]
        return [total**0.5 for total in self._summed(squares)]

    def error(self, length: float) -> float:
        """Estimated relative error of the values at this step (norm over the tokens).

        What is seen at h alone may be small by chance, the more so as the least of many is
        chosen: half of what is seen at h / 2, and a quarter (one-sided: half) of that at 2 h, are
        what the one at h / 2 rounds and the one at 2 h truncates, brought to h.
        """
        order = 4 if self._form == "central" else 2
        return max(self.away(length), self.away(length / 2) / 2, self.away(2 * length) / order)

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


def _inexact(form: str, error: float) -> UnsupportedError:
    return UnsupportedError(
        f"label values by {form.replace('_', '-')} differences are not exact enough on this model",
        got=f"an estimated relative error of {error:.1e} at the best step",
        why=f"more than {TOLERANCE:.0e}: losses are rounded too coarsely, or a forward draws "
        "random numbers",
        remedy="derivative='forward_mode'",
    )
