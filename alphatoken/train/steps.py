"""Optimizer steps of a run and training rows of one, counted before there is a loader.

    steps = ceil(epochs ceil(n / a)),  n the batches of an epoch on one process, a the micro-batches
    of a step; at least one step an epoch, and max_steps in its place where that is set

**Oracle**: the loaders that accelerate shares out and transformers counts
(``tests/property/test_steps.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

LEAST_STEPS = 20
"""Optimizer steps below which a run of a command is said to be short; no race looks before it."""


def steps_of(batches: int, accumulated: int, epochs: float) -> int:
    """Optimizer steps of so many epochs of so many batches, as transformers counts them."""
    return math.ceil(epochs * max(-(-batches // accumulated), 1))


@dataclass(frozen=True)
class Schedule:
    """What decides the number of steps of a run.

    Attributes:
        rows: training rows.
        batch: rows of a micro-batch on one process.
        accumulated: micro-batches of a step.
        epochs: passes over the rows.
        processes: that share the micro-batches out; 1 where they share each of them.
        drop_last: whether a batch that is not full is left out.
        max_steps: in place of the epochs; 0 for none.
    """

    rows: int
    batch: int
    accumulated: int = 1
    epochs: float = 1.0
    processes: int = 1
    drop_last: bool = False
    max_steps: int = 0

    @classmethod
    def of(cls, args: Any, rows: int, processes: int) -> Schedule:
        """Of a trainer's configuration."""
        shared = getattr(args.accelerator_config, "split_batches", False)
        return cls(
            rows,
            args.train_batch_size,
            args.gradient_accumulation_steps,
            args.num_train_epochs,
            1 if shared else processes,
            args.dataloader_drop_last,
            max(args.max_steps, 0),
        )

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.max_steps:
            return self.max_steps
        if self.drop_last:
            batches = self.rows // self.batch // self.processes
        else:
            batches = -(-self.rows // (self.batch * self.processes))
        return steps_of(batches, self.accumulated, self.epochs)

    @property
    def rows_of_step(self) -> int:
        """Training rows of a step, over all micro-batches and processes; the last may have fewer.

        >>> Schedule(45, 4, 4).rows_of_step, Schedule(10, 4, 4).rows_of_step
        (16, 10)
        """
        return min(self.batch * self.accumulated * self.processes, self.rows)

    def longer(self, wanted: int) -> Iterator[tuple[str, int]]:
        """Options with which the run has so many steps, as a shell has them; and the steps.

        Smaller steps first, then more epochs; the largest step and the fewest epochs that do.

        >>> list(Schedule(20, 4).longer(20))
        [('--per_device_train_batch_size 1', 20), ('--num_train_epochs 4', 20)]
        """
        if self.max_steps:
            yield f"--max_steps {wanted}", wanted
            return
        smaller = [
            *(replace(self, accumulated=n) for n in range(self.accumulated, 0, -1)),
            *(replace(self, accumulated=1, batch=n) for n in range(self.batch - 1, 0, -1)),
        ]
        if (one := next((one for one in smaller if one.steps >= wanted), None)) is not None:
            own = {
                "gradient_accumulation_steps": (one.accumulated, self.accumulated),
                "per_device_train_batch_size": (one.batch, self.batch),
            }
            changed = [f"--{name} {new}" for name, (new, old) in own.items() if new != old]
            yield " ".join(changed), one.steps
        epochs = -(-wanted // replace(self, epochs=1.0).steps)
        more = replace(self, epochs=float(epochs))
        yield f"--num_train_epochs {epochs}", more.steps

    def in_words(self, wanted: int, before: str = "") -> str:
        """The same for a message; what stands ``before`` the first makes a command of it.

        >>> Schedule(45, 4, max_steps=3).in_words(20)
        '--max_steps 20 (20 steps)'
        """
        offered = list(self.longer(wanted))
        if before:
            offered[0] = (f"`{before} {offered[0][0]}`", offered[0][1])
        return " or ".join(f"{words} ({steps} steps)" for words, steps in offered)
