"""Runs of several processes: sums over them, and one threshold for all.

The order of the data. accelerate deals batches like cards: of each round of ``world`` batches,
rank r gets the r-th. So the batches of an optimizer step, in the order in which one process with
``world`` times as many accumulation steps would see them, are (micro-batch, rank). Whatever is
decided over all tokens of a step (ties, random draws) is decided in the order (micro-batch, rank,
row, position), and comes out as in one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alphatoken.errors import InputError

__all__ = ["Ranks", "even_micro_batches", "global_selection"]


class Ranks:
    """This process among those of a run.

    All methods are collective: every process calls them, in the same order. With one process they
    communicate nothing.

    Args:
        accelerator: accelerate's ``Accelerator``, or None for one process.

    Attributes:
        rank: number of this process.
        world: number of processes.
        device: of this process's tensors.
    """

    def __init__(self, accelerator: Any = None) -> None:
        self.rank: int = 0 if accelerator is None else accelerator.process_index
        self.world: int = 1 if accelerator is None else accelerator.num_processes
        self.device = torch.device("cpu") if accelerator is None else accelerator.device

    def sum_gradients(
        self, sums: dict[str, Tensor], count: float, *, sharded: bool = False
    ) -> tuple[dict[str, Tensor], float]:
        """Sums of gradients and of their counts over the processes, in place.

        The result is the same on every process, bit for bit.

        Args:
            sums: parameter name -> this process's sum; the same names everywhere.
            count: what the mean divides by, this process's part.
            sharded: the sums are parts of tensors that ``Sharding.reduce`` has summed already.

        Raises:
            InputError: the processes have different numbers of tensors.
        """
        if self.world == 1:
            return sums, count
        head = torch.tensor([count, len(sums)], dtype=torch.float64, device=self.device)
        dist.all_reduce(head)
        total, names = head.tolist()
        if names != self.world * len(sums):
            raise InputError(
                "the processes have different gradients to add up",
                got=f"{len(sums)} on rank {self.rank}, {int(names)} on {self.world} together",
            )
        if not sharded:
            for name in sorted(sums):
                sums[name] = sums[name].contiguous()
                dist.all_reduce(sums[name])
        return sums, total

    def gather_objects(self, item: Any) -> list[Any]:
        """One picklable object of each process, in the order of ranks, on every process."""
        if self.world == 1:
            return [item]
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, item)
        return gathered

    def broadcast_object(self, item: Any, source: int = 0) -> Any:
        """The object of one process, on every process."""
        if self.world == 1:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=source, device=self.device)
        return box[0]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of the first process."""
        for tensor in tensors if self.world > 1 else ():
            dist.broadcast(tensor, 0)

    def any(self, flag: bool) -> bool:
        """True if the flag is set on any process."""
        if self.world == 1:
            return flag
        raised = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(raised)
        return bool(raised)


Decide = Callable[[Tensor, Tensor], Tensor]
"""(values (1, n), mask (1, n), all True) -> weights (1, n)."""


def global_selection(
    ranks: Ranks, values: Sequence[Tensor], masks: Sequence[Tensor], decide: Decide
) -> list[Tensor]:
    """Token weights of one optimizer step, decided over all its micro-batches on all processes.

    Args:
        ranks: this process among the others.
        values: of each micro-batch of this process, (b, t).
        masks: response tokens, the same shapes.
        decide: the policy. It sees the response tokens of the whole step in one row, in the
            order (micro-batch, rank, row, position), which is the order in which one process
            would see them; so ties fall as there, and so do random draws, provided that it draws
            alike on every process (seed a generator with the step).

    Returns:
        Weights of this process's micro-batches, 0 off the masks, in the dtype of their values.
        Their sum over the step is what the policy gives one batch: ``ceil(rho n)`` for a mask.

    Raises:
        What ``decide`` raises, on every process.
    """
    chosen = [v.detach()[m].double().cpu() for v, m in zip(values, masks, strict=True)]
    of_ranks = ranks.gather_objects(chosen)
    pieces: list[Tensor] = [torch.empty(0, dtype=torch.float64)]
    places: dict[tuple[int, int], int] = {}
    start = 0
    for step in range(max(map(len, of_ranks))):
        for rank, own in enumerate(of_ranks):
            if step < len(own):  # the last round of an epoch may not reach every rank
                places[step, rank] = start
                pieces.append(own[step])
                start += len(own[step])
    row = torch.cat(pieces).to(ranks.device)
    everything = torch.ones_like(row, dtype=torch.bool)
    decided = decide(row[None], everything[None])[0] if len(row) else row
    weights = []
    for step, (value, mask) in enumerate(zip(values, masks, strict=True)):
        start = places[step, ranks.rank]
        weight = torch.zeros_like(value)
        weight[mask] = decided[start : start + len(chosen[step])].to(value)
        weights.append(weight)
    return weights


def even_micro_batches(
    rows: Sequence[int], rank: int, world: int, size: int | None
) -> list[tuple[int, ...]]:
    """This process's rows in micro-batches, equally many on every process.

    Sharded weights are gathered in every forward, so a process that ran one forward less would
    leave the others waiting. Every ``world``-th row is this process's; ``size`` is the most rows
    of one micro-batch, None for all at once. Where the rows cannot be dealt out evenly, some
    micro-batches have one row more.
    There are as many rows as processes at least; see ``ValidationPool.share_of``.
    """
    longest = -(-len(rows) // world)
    pieces = 1 if size is None else min(-(-longest // size), len(rows) // world)
    own = tuple(rows[rank::world])
    bounds = [len(own) * i // pieces for i in range(pieces + 1)]
    return [own[a:b] for a, b in itertools.pairwise(bounds)]
