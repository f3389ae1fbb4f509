"""What a run writes down: statistics for its logs, the ledger of values, and a page at the end."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import TrainerCallback

from alphatoken.errors import warn_caller
from alphatoken.estimate.matrices import Formed
from alphatoken.report.page import missing_libraries
from alphatoken.train.datasets import plain_rows
from alphatoken.train.distributed import Ranks
from alphatoken.train.layouts import sharding_of
from alphatoken.train.ledger import ValueLedger
from alphatoken.train.ledger_unit import ledger_unit
from alphatoken.train.manifest import RESULTS
from alphatoken.train.masters import masters_of
from alphatoken.train.micro_batch import MicroBatch, Scored, undivided
from alphatoken.train.monitor import TrainMonitor, weight_drift
from alphatoken.train.report import write_run_report
from alphatoken.train.shards import sharded_drift

if TYPE_CHECKING:
    from alphatoken.train.mixin import AlphaTrainerMixin

__all__ = ["RunRecords"]


class RunRecords(TrainerCallback):
    """Monitor and ledger of a run; each micro-batch is written down once, by whoever weighed it.

    Args:
        trainer: whose run it is.

    Attributes:
        monitor: statistics between two logs; a callback of the trainer.
        ledger: values of every training token, summed over its visits.
        reference: scored weights before training, by name, which the drift is measured from.
        listener: is called with mask and weights of each micro-batch; None for nobody.
    """

    def __init__(self, trainer: AlphaTrainerMixin) -> None:
        self._trainer = trainer
        self.monitor = TrainMonitor(trainer, drift=self._drift)
        self.ledger = ValueLedger()
        self.reference: Mapping[str, Tensor] = {}
        self.listener: Callable[[Tensor, Tensor], None] | None = None
        # Visits of a step that a scaler may yet skip, and the scale before it.
        self._pending: list[Callable[[], None]] = []
        self._scale = 0.0

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Look at the scale of the loss, which falls where the step is skipped."""
        if self._pending:
            self._scale = self._trainer.accelerator.scaler.get_scale()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Write the step's visits down, unless its gradient overflowed and nothing moved.

        Accelerate does not see that of a fused optimizer, which skips by itself; the scale tells.
        """
        if not self._pending:
            return
        if self._trainer.accelerator.scaler.get_scale() >= self._scale:
            for add in self._pending:
                add()
        self._pending.clear()

    @property
    def keeps_values(self) -> bool:
        """Whether values go into the ledger, which adds up their components too."""
        return bool(self._trainer.args.export_values)

    def micro_batch(
        self, batch: MicroBatch, scored: Scored | None, weights: Tensor, seconds: float = 0.0
    ) -> None:
        """Write down what one micro-batch is trained with.

        Args:
            batch: the micro-batch.
            scored: its values, if it has any.
            weights: (b, t) of its tokens, before the loss is normalised.
            seconds: spent on the weights, where they do not come from values.
        """
        if self.listener is not None:
            self.listener(batch.mask, weights)
        values = None if scored is None else scored.values
        inputs = batch.inputs
        self.monitor.record(
            weights=weights,
            mask=batch.mask,
            values=values,
            seconds=seconds if scored is None else scored.seconds,
            tokens=inputs["attention_mask"].sum() if "attention_mask" in inputs else None,
        )
        if values is not None and self.keeps_values:
            add = partial(
                self.ledger.add,
                {**inputs, "labels": batch.labels},
                batch.mask,
                values,
                weights,
                scale=self._trainer._get_learning_rate()
                * batch.unit
                * undivided(batch, self._trainer.args.kept_normalization),
                step=self._trainer.state.global_step,
            )
            scaled = getattr(self._trainer.accelerator, "scaler", None) is not None
            # In a loop of the caller's own nobody says when a step is over.
            if scaled and getattr(self._trainer, "is_in_train", False):
                self._pending.append(add)
            else:
                add()

    def _drift(self) -> dict[str, float]:
        """How far the scored weights have moved."""
        trainer = self._trainer
        parameters = dict(trainer.model.named_parameters())
        here = {n: parameters[n] for n in self.reference if n in parameters}
        if not here:
            return {}
        sharding = sharding_of(trainer.accelerator, trainer.model)
        masters = masters_of(trainer.accelerator, trainer.model)
        reference, moved = self.reference, None
        if masters is not None:
            moved = masters.weight
            before, rounded = reference, masters.start
            reference = Formed(here, lambda name: rounded(name, before[name]))
        if sharding is not None:
            return sharded_drift(sharding, here, reference, moved)
        if moved is None:
            return weight_drift(here, reference)
        weights, of_optimizer = here, moved
        return weight_drift(Formed(here, lambda n: of_optimizer(n, weights[n])), reference)

    def write_results(self) -> None:
        """Values and a page about the run, into ``output_dir/_alphatoken``."""
        trainer = self._trainer
        whole = self._all_ledgers() if trainer.args.export_values else None
        if not trainer.args.should_save:
            return
        trainer.save_state()
        folder = Path(str(trainer.args.output_dir))
        if whole is not None and len(whole):
            data = trainer.train_dataset
            rows = plain_rows(data) if hasattr(data, "__len__") else None
            tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
            args = trainer.args
            unit = ledger_unit(trainer.optimizer, args.preconditioner, args.precondition_after)
            place = folder / RESULTS / "values"
            whole.export(place, rows, tokenizer=tokenizer, unit=unit, **trainer.export_arguments())
        missing = missing_libraries()
        if missing:
            warn_caller(f"no page about this run was written: it needs {' and '.join(missing)}")
            return
        write_run_report(folder, history=trainer.state.log_history)

    def _all_ledgers(self) -> ValueLedger | None:
        """The ledgers of all processes added up, on those that write; None on the others.

        Each process writes its own to a file, and those that write read one file at a time: what
        hundreds of millions of tokens are worth does not fit into a message to every process. Where
        the folder is not shared between machines, or one could not write, it is sent after all.
        """
        trainer = self._trainer
        ranks, writes = Ranks(trainer.accelerator), bool(trainer.args.should_save)
        if ranks.world == 1:
            return self.ledger
        folder = Path(str(trainer.args.output_dir)) / RESULTS
        # A name of this run's own: a killed run may have left files, which are no part of this one.
        run = ranks.broadcast_object(secrets.token_hex(4))
        files = [folder / f"ledger-{run}-rank{rank}.safetensors" for rank in range(ranks.world)]
        full = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.ledger.save(files[ranks.rank])
        except OSError:  # no room, or no right to write here: the others must not wait for nothing
            full = True
        apart = ranks.any(full)  # all have written now
        apart = ranks.any(apart or (writes and not all(file.is_file() for file in files)))
        parts = ranks.gather_objects(self.ledger.state_tensors(copy=False)) if apart else ()
        whole = ValueLedger()
        for rank in range(ranks.world if writes else 0):
            one = ValueLedger.load(files[rank]) if not apart else ValueLedger.of(parts[rank])
            whole.merge(one)
        several_write = bool(trainer.args.save_on_each_node)
        if several_write:
            ranks.wait()  # until the others have read
        # One writer: the others need not wait for it, since collectives lose their patience.
        for file in [files[ranks.rank]] if apart or several_write else files if writes else []:
            file.unlink(missing_ok=True)
        return whole if writes else None

    # --- the checkpoint's part --------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The ledger by column, and the statistics since the last log."""
        return self.ledger.state_tensors(copy=False), self.monitor.state_values()

    def load(self, ledger: dict[str, Tensor], monitor: Mapping[str, Any]) -> None:
        """Take back what ``state`` gave."""
        self.ledger.load_tensors(ledger)
        self.monitor.load_values(monitor)
