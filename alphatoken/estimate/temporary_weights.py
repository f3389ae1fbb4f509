"""Weights that a model has for a while; its own are restored bitwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from alphatoken.direction.algebra import norms_by_kind
from alphatoken.model.sharding import Sharding, objects_in_use
from alphatoken.support.devices import on_host
from alphatoken.support.precision import wide

_ATTEMPTS = 8  # at restoring weights, each ended by a signal


class _TrainedEmbedding(TorchFunctionMode):
    """Inside, an embedding moves as its backward says, which is what trains.

    The backward gives the row at ``padding_idx`` nothing; ``row_before`` gives that row of a weight
    as it was, None where the weight does not move.
    """

    def __init__(self, row_before: Callable[[Tensor, int], Tensor | None]) -> None:
        super().__init__()
        self.row_before = row_before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        rows = func(*args, **(kwargs or {}))
        return self._rows(rows, *args, **(kwargs or {})) if func is F.embedding else rows

    def _rows(
        self, rows: Tensor, ids: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any,
        **__: Any,
    ) -> Tensor:  # fmt: skip
        row = None if padding_idx is None else self.row_before(weight, padding_idx)
        if row is None or padding_idx is None:
            return rows
        padding = (ids == padding_idx % len(weight)).unsqueeze(-1)
        return torch.where(padding, row.to(rows), rows)


def _own(weight: Tensor, moved: Mapping[int, Any]) -> Tensor | None:
    """The moved weight itself: PEFT's LoRA on an embedding looks rows up in a transposed view."""
    return weight if id(weight) in moved else weight._base


def _put(parameter: Tensor, memory: Tensor) -> None:
    # Through ``.data``, which counts as no write: graphs of an observed forward hold the weights,
    # and find them as they were.
    parameter.data = memory


class TemporaryWeights:
    """Moves parameters temporarily; leaving ``open`` restores them bitwise.

    A tied weight moves once. Under ``sharding`` every process moves its own part, and gathers
    nothing. A view that a module has made of a weight for good does not see the move. Memory: one
    more copy of what moves, while ``open``; it stays in ``memory``, where that is handed over, for
    the next one to take.
    """

    # The parameters are the same objects and have other memory meanwhile, which spares two copies
    # of all weights, a tenth of a short forward's time. Shards, which others hold views of, are
    # written in place.

    def __init__(
        self,
        model: nn.Module,
        names: Iterable[str],
        sharding: Sharding | None = None,
        memory: list[Tensor] | None = None,
    ) -> None:
        self._model, self._sharding, self._memory = model, sharding, memory
        self._regather()
        named = dict(model.named_parameters(remove_duplicate=False))
        once = {id(named[name]): name for name in names}
        self._parameters = {name: named[name] for name in once.values()}
        self._targets: list[Tensor] = []
        self._before: list[Tensor] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allow moves inside; the weights are restored at the end, also after an exception."""
        targets = self._own()
        self._before = targets if self._sharding is None else [part.clone() for part in targets]
        self._targets = [] if self._sharding is None else targets
        try:
            with self._inside():
                yield
        finally:
            # A signal's handler may raise anywhere in here: what it raises waits until all is back.
            raised: BaseException | None = None
            for _ in range(_ATTEMPTS):
                try:
                    self._back()
                    break
                except BaseException as error:
                    raised = raised or error
            self._targets, self._before = [], []
            if raised is not None:
                raise raised

    def _own(self) -> list[Tensor]:
        return [self._moving(name, self._part(name))[0] for name in self._parameters]

    def _back(self) -> None:
        if self._sharding is None:
            for parameter, before in zip(self._parameters.values(), self._before, strict=True):
                _put(parameter, before)
        else:
            torch._foreach_copy_(self._targets, self._before)
        self._moved()

    def _away(self) -> list[Tensor]:
        """Memory for the moved weights, which is the parameters' from then on."""
        if not self._targets:
            kept = [] if self._memory is None else self._memory
            fits = [(t.shape, t.dtype, t.device) for t in self._before]
            if [(t.shape, t.dtype, t.device) for t in kept] != fits:
                kept[:] = [torch.empty_like(before) for before in self._before]
            self._targets = list(kept)
            for parameter, target in zip(self._parameters.values(), self._targets, strict=True):
                _put(parameter, target)
        return self._targets

    def _inside(self) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.no_grad()
    def walking(self) -> dict[str, Tensor]:
        """Copies to step, in float32 at least, for ``place``; if they can, the memory it fills."""
        if self._sharding is not None:
            return {n: part.to(wide(part.dtype), copy=True) for n, part in self.parts().items()}
        targets = self._away()
        torch._foreach_copy_(targets, self._before)
        # Of 16 bits a copy that is wider.
        return {n: t.to(wide(t.dtype)) for n, t in zip(self._parameters, targets, strict=True)}

    @torch.no_grad()
    def place(self, weights: Mapping[str, Tensor]) -> None:
        """Move to these weights (or this process's parts, as in ``parts``), rounded."""
        parts = (self._moving(name, weights[name])[1] for name in self._parameters)
        pairs = zip(self._away(), parts, strict=True)
        others = [(target, part) for target, part in pairs if part is not target]
        if others:  # else they were stepped where they lie
            torch._foreach_copy_([target for target, _ in others], [part for _, part in others])
        self._moved()

    def parts(self) -> dict[str, Tensor]:
        """The weights that move, where they are now; under ``sharding`` this process's parts."""
        return {name: self._part(name) for name in self._parameters}

    def _part(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        if self._sharding is None:
            return parameter.detach()
        return self._sharding.local(name, parameter)

    def _moved(self) -> None:
        torch.clear_autocast_cache()  # it holds casts of the weights as they were
        self._regather()

    def _regather(self) -> None:
        if self._sharding is not None:
            self._sharding.regather()

    def _moving(self, name: str, part: Tensor) -> tuple[Tensor, Tensor]:
        parameter = self._parameters[name]
        if self._sharding is None:
            return parameter.data, part
        return self._sharding.local_shard_and_direction(name, parameter, part)

    def _norm(self, tensors: Mapping[str, Tensor]) -> float:
        if self._sharding is not None:
            return math.hypot(*self._sharding.norms(tensors).values())
        parts = [sizes.double() for _, sizes in norms_by_kind(tensors)]
        return float(torch.cat([part.to(parts[0].device) for part in parts]).norm())


class ShiftedWeights(TemporaryWeights):
    """Moves parameters along M, by parameter name; embeddings move as their backward says."""

    def __init__(
        self,
        model: nn.Module,
        direction: Mapping[str, Tensor],
        sharding: Sharding | None = None,
        memory: list[Tensor] | None = None,
    ) -> None:
        super().__init__(model, direction, sharding, memory)
        self._direction = {name: direction[name] for name in self._parameters}
        self._along: list[Tensor] = []

    def _own(self) -> list[Tensor]:
        pairs = [self._moving(name, m) for name, m in self._direction.items()]
        self._along = [m.to(target.dtype) for target, m in pairs]
        return [target for target, _ in pairs]

    def _inside(self) -> AbstractContextManager[None]:
        return self._embeddings()

    @torch.no_grad()
    def to(self, step: float) -> None:
        """Move to ``theta + step M``."""
        targets = self._away()
        if on_host(targets[0]):  # in one pass over memory
            for target, m, before in zip(targets, self._along, self._before, strict=True):
                torch.add(before, m, alpha=step, out=target)
        else:  # in few kernels
            torch._foreach_copy_(targets, self._before)
            torch._foreach_add_(targets, self._along, alpha=step)
        self._moved()

    def direction_norm(self) -> float:
        """Norm of M, over all processes."""
        return self._norm(self._direction)

    def parameter_norm(self) -> float:
        """Norm of the parameters that move, at their present values, over all processes."""
        return self._norm(self.parts())

    @contextmanager
    def _embeddings(self) -> Iterator[None]:
        if self._sharding is None:
            moved = zip(self._parameters.values(), self._before, strict=True)
            by_identity = {id(p): (p, before) for p, before in moved}

            def row_before(weight: Tensor, row: int) -> Tensor | None:
                moved_weight = by_identity.get(id(_own(weight, by_identity)))
                if moved_weight is None:
                    return None
                p, before = moved_weight
                if weight is not p:
                    at = weight.storage_offset() - p.storage_offset() + before.storage_offset()
                    before = before.as_strided(weight.shape, weight.stride(), at)
                return before[row]

            with _TrainedEmbedding(row_before):
                yield
            return
        kept = self._padding_rows(self._sharding)
        with objects_in_use(self._model, self._parameters) as in_use:

            def kept_row(weight: Tensor, row: int) -> Tensor | None:
                name, _ = in_use.get(id(_own(weight, in_use)), ("", None))
                return kept[name] if name else None

            with _TrainedEmbedding(kept_row):
                yield

    def _padding_rows(self, sharding: Sharding) -> dict[str, Tensor]:
        """Rows of embeddings that no backward reaches, from gathered weights."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        rows_by_name = {}
        for module in self._model.modules():
            # PEFT looks up its first factor, (rank, tokens), with the padding of what it adapts.
            table = getattr(module, "base_layer", module)
            padding, rows = (getattr(table, n, None) for n in ("padding_idx", "num_embeddings"))
            of_table = () if padding is None or rows is None else module.parameters()
            for name in (names[id(p)] for p in of_table if id(p) in names):
                full = sharding.full(name, self._parameters[name])
                if rows in full.shape:
                    rows_by_name[name] = (full if len(full) == rows else full.mT)[padding].clone()
        return rows_by_name
