"""Rows that a policy adds to each optimizer step, put into the step's own micro-batches.

    step s on a micro-batches of each of W processes, and r rows of ``policy.step_rows(s)``
    row j of these  ->  micro-batch j mod a W,  counted as (micro-batch, process)

So the rows of a step are the same however it is accumulated or spread over processes. They are
collated together with the training rows by the trainer's own collator: what is padded, flattened or
counted comes of one call, and the step is that of a trainer whose data set has them in these
places.

A collator runs ahead of the steps, often in another process, where the number of the step is not
known. So the loader hands the training rows on as they are, and they are collated when a step takes
its micro-batches.

**Oracle**: TRL's trainer on rows that were put in place by hand, in
``tests/property/test_policies_validation_mix.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from alphatoken.errors import ConfigError, InputError, UnsupportedError
from alphatoken.train.distributed import Ranks
from alphatoken.train.interface import TrainerInterface
from alphatoken.train.policy import TokenPolicy

_ROWS = "alphatoken_rows"
"""Key under which a batch of the loader has its rows."""


@dataclass(frozen=True)
class UncollatedRows:
    """Rows of one micro-batch; no list, so that nothing looks for tensors in them."""

    rows: Sequence[Mapping[str, Any]]


def keep_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, UncollatedRows]:
    """The loader's collator: one that does nothing."""
    return {_ROWS: UncollatedRows(rows)}


class StepRows:
    """Adds the rows of a policy to the micro-batches of a trainer.

    Args:
        trainer: whose micro-batches they are.
        policy: has ``step_rows``.

    Raises:
        ConfigError: the first process reads the batches of all, and cuts them up as tensors; or the
            policy reads weights of rows.
    """

    def __init__(self, trainer: TrainerInterface, policy: TokenPolicy) -> None:
        if getattr(trainer.accelerator, "dispatch_batches", None):
            raise ConfigError(
                f"policy '{policy.name}' adds rows to batches that each process reads by itself",
                got="dispatch_batches=True",
                why="rows are added before they are collated, and batches are dispatched after it",
                remedy="accelerator_config={'dispatch_batches': False}",
            )
        if policy.needs.row_weights:
            raise ConfigError(
                f"policy '{policy.name}' reads weights of rows, and adds rows to its steps",
                got="Needs(row_weights=True) and step_rows",
                why="the added rows are collated without weights",
                remedy="one of the two",
            )
        self._trainer, self._policy = trainer, policy

    @contextmanager
    def uncollated(self) -> Iterator[None]:
        """A loader that is made inside hands its rows on as they are."""
        collator = self._trainer.data_collator
        self._trainer.data_collator = keep_rows
        try:
            yield
        finally:
            self._trainer.data_collator = collator

    def joined(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        """The next ``count`` micro-batches of this process, collated with the rows of their step.

        Raises:
            UnsupportedError: a batch that was collated already.
            InputError: the collator makes no batch of these rows.
        """
        ranks, step = Ranks(self._trainer.accelerator), int(self._trainer.state.global_step)
        rows = self._policy.step_rows(step)
        for number in range(count):
            try:
                batch = next(batches)
            except StopIteration:
                return
            own = rows[number * ranks.world + ranks.rank :: count * ranks.world]
            yield self._collated(batch, own)

    def _collated(self, batch: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
        if not isinstance(batch, Mapping) or not isinstance(batch.get(_ROWS), UncollatedRows):
            raise UnsupportedError(
                f"policy '{self._policy.name}' adds rows to micro-batches before they are collated",
                got="a batch that is collated already",
                why="an override of get_train_dataloader made a loader of its own",
                remedy="have it call super().get_train_dataloader(), or leave it out",
            )
        own = batch[_ROWS].rows
        every = [*own, *(self._in_form(row, own[0]) for row in rows)]
        try:
            return self._trainer.data_collator(every)
        except (ValueError, TypeError, KeyError, RuntimeError) as problem:
            lengths = [len(row["input_ids"]) for row in every if "input_ids" in row]
            raise InputError(
                "the collator makes no batch of training rows and added rows together",
                got=f"rows of {lengths} tokens: {problem}",
                why=f"policy '{self._policy.name}' adds rows to the micro-batches of each step",
                remedy="a data_collator that pads input_ids and labels, such as "
                "transformers.DataCollatorForSeq2Seq(tokenizer), and columns that both have",
            ) from problem

    def _in_form(self, row: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
        """A row with the columns that a collator reads off the first row of a batch."""
        length = len(row["input_ids"])
        made = {
            "attention_mask": [1] * length,
            "position_ids": list(range(length)),
            "seq_lengths": [length],
        }
        whole = {**{name: made[name] for name in made if name in like}, **row}
        if self._trainer.own_collator is None:
            return whole
        # One of the caller's may make something of every column; training rows have lost theirs.
        return {name: value for name, value in whole.items() if name in like}
