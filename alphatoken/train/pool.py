"""Choice of the validation rows of each step, and of those that are only watched.

The paper keeps one validation batch for the whole run; rescored every step, a small one is
overfitted. A pool draws a new batch each step. Either way a held-out part can be set aside: no
step ever sees it, so the gap between the two grows as the batch is overfitted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from alphatoken.errors import ConfigError, counted


def _shuffled(rows: Sequence[int], *key: object) -> tuple[int, ...]:
    """A uniform permutation that depends on the key alone, on every platform."""
    order = list(rows)
    random.Random(" ".join(map(str, ("validation pool", *key)))).shuffle(order)
    return tuple(order)


def held_out_count(rows: int, share: float) -> int:
    """How many of so many rows a pool holds out, at least one; 0 for a share of 0."""
    return 0 if share == 0 else max(1, round(share * rows))


@dataclass(frozen=True)
class ValidationPool:
    """Rows of a validation set, step by step: a pure function of the settings and the step.

    "fixed" gives the same rows at every step. "pool" reads a stream of epochs, each a permutation
    of all drawn rows seeded by ``(seed, epoch)``: step s takes rows ``s B .. (s + 1) B - 1`` of
    the stream. Every row comes once an epoch, every batch is full, and none holds a row twice:
    where a batch crosses into the next epoch, that epoch begins with rows that the batch does not
    hold yet (marginally every row is as likely as any other).

    To resume, the step is enough. Two pools of equal settings are equal.

    Args:
        size: rows of the validation set; rows are numbers below it.
        batch_size: rows a step, over all ranks. "fixed" takes all rows where there are fewer.
        mode: "fixed" (the paper) or "pool".
        held_out_share: share of the rows that no step draws, rounded, at least one row; 0 for
            none.
        seed: of what is held out and of every order.

    Raises:
        ConfigError: nothing left to draw; in "pool" mode fewer rows left than one batch (a batch
            would hold a row twice).
    """

    size: int
    batch_size: int
    mode: str = field(default="fixed", kw_only=True)
    held_out_share: float = field(default=0.2, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    held_out: tuple[int, ...] = field(init=False, repr=False)
    drawn: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Set the held-out rows aside."""
        held_count = held_out_count(self.size, self.held_out_share)
        order = _shuffled(range(self.size), self.seed, "held out")
        drawn = order[held_count:]
        needed = self.batch_size if self.mode == "pool" else 1
        if len(drawn) < needed:
            raise ConfigError(
                "the validation set is too small",
                got=f"{counted(self.size, 'rows')}, {held_count} held out, "
                f"{len(drawn)} left to draw {needed} from",
                why="a batch would hold the same row twice, or none",
                remedy="give more rows, a smaller batch, or held_out_share=0",
            )
        object.__setattr__(self, "held_out", tuple(sorted(order[:held_count])))
        if self.mode == "fixed":
            drawn = drawn[: self.batch_size]
        object.__setattr__(self, "drawn", tuple(sorted(drawn)))

    def rows(self, step: int) -> tuple[int, ...]:
        """Rows of one step over all ranks; pure: asking in any order, or twice, changes nothing."""
        if self.mode == "fixed":
            return self.drawn
        first = step * self.batch_size
        epoch, offset = divmod(first, len(self.drawn))
        rows = _order(self, epoch)[offset : offset + self.batch_size]
        if len(rows) < self.batch_size:
            rows += _order(self, epoch + 1)[: self.batch_size - len(rows)]
        return rows

    def rows_from(self, step: int) -> tuple[int, ...]:
        """Every drawn row once, from the place of the epoch where this step begins; pure too.

        A walk takes many optimizer steps on validation rows at one step of the run, in this order.
        """
        if self.mode == "fixed":
            return self.drawn
        epoch, offset = divmod(step * self.batch_size, len(self.drawn))
        order = _order(self, epoch)
        return order[offset:] + order[:offset]

    @staticmethod
    def share_of(rows: Sequence[int], rank: int, world: int) -> tuple[int, ...]:
        """The part of ``rows`` that one of ``world`` processes works on: every ``world``-th row.

        Over the ranks each row comes exactly once; shares differ by one row at most.

        Raises:
            ConfigError: fewer rows than ranks (one would have nothing to add, and wait).
        """
        if len(rows) < world:
            raise ConfigError(
                "there are fewer validation rows than processes",
                got=f"{len(rows)} rows, {world} processes",
                why="a process without rows has no part in the validation gradient",
                remedy="give more validation rows; of those drawn, a larger validation_batch_size; "
                "of those held out, a larger held_out_share, or held_out_steps=0 to hold none out",
            )
        return tuple(rows[rank::world])


@lru_cache(maxsize=4)
def _order(pool: ValidationPool, epoch: int) -> tuple[int, ...]:
    """Order of one epoch, whose first rows are none of the batch that is still open."""
    size, count = pool.batch_size, len(pool.drawn)
    # The open batch depends on the epochs before, back to one that began with a batch. There are at
    # most ``batch_size`` epochs from one such to the next.
    stream: tuple[int, ...] = ()
    for number in range(epoch - epoch % (size // math.gcd(size, count)), epoch + 1):
        begun = number * count % size  # rows that the open batch holds already
        batch_rows = set(stream[-begun:]) if begun else set()
        order = _shuffled(pool.drawn, pool.seed, "epoch", number)
        head = [row for row in order if row not in batch_rows][: size - begun] if begun else []
        rest = set(order) - set(head)
        stream = (*head, *(row for row in order if row in rest))
    return stream
