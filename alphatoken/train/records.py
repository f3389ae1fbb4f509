"""Records of a run: statistics for its logs, the ledger of values, and a page at the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from alphatoken.data.pieces import token_texts
from alphatoken.model.loading import model_name, text_tokenizer
from alphatoken.train.datasets import plain_rows
from alphatoken.train.distributed import Ranks
from alphatoken.train.interface import TrainerInterface
from alphatoken.train.ledger import ValueLedger
from alphatoken.train.micro_batch import MicroBatch, MicroBatchValues, undivided
from alphatoken.train.monitor import TrainMonitor
from alphatoken.train.results import VALUES, export_values, write_run_report
from alphatoken.values import derivative_notes

__all__ = ["RunRecords"]


class RunRecords:
    """Monitor and ledger of a run; each micro-batch is written down once, by whoever weighed it.

    Args:
        trainer: whose run it is.

    Attributes:
        monitor: statistics between two logs.
        ledger: values of every training token, summed over its visits.
        listener: is called with mask and weights of each micro-batch; None for nobody.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer = trainer
        self.monitor = TrainMonitor()
        self.ledger = ValueLedger()
        self.listener: Callable[[Tensor, Tensor], None] | None = None

    def micro_batch(
        self,
        batch: MicroBatch,
        scored: MicroBatchValues | None,
        weights: Tensor,
        seconds: float = 0.0,
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
        values = None if scored is None else scored.token_values
        inputs = batch.inputs
        self.monitor.record(
            weights=weights,
            mask=batch.mask,
            values=values,
            seconds=seconds if scored is None else scored.seconds,
        )
        if values is not None and self._trainer.args.export_values:
            self.ledger.add(
                {**inputs, "labels": batch.labels},
                batch.mask,
                values,
                weights,
                scale=float(self._trainer.optimizer.param_groups[0]["lr"])
                * batch.unit
                * undivided(batch, self._trainer.args.kept_normalization),
                step=self._trainer.state.global_step,
            )

    def write_results(self) -> None:
        """Values and their page, into ``output_dir/_alphatoken``."""
        trainer = self._trainer
        args = trainer.args
        whole = self._all_ledgers() if args.export_values else None
        derivatives = self.monitor.derivatives() if args.export_values else {}
        if not args.should_save:
            return
        trainer.save_state()
        if whole is None or not len(whole):
            return
        folder, data = Path(str(args.output_dir)), trainer.train_dataset
        rows = plain_rows(data) if hasattr(data, "__len__") else None
        row_counts = export_values(whole, folder / VALUES, rows, **trainer.export_arguments())
        tokenizer = text_tokenizer(trainer.processing_class)
        # A plain trainer may have no tokenizer.
        texts = None if tokenizer is None else partial(token_texts, tokenizer)
        losses = (log["loss"] for log in reversed(trainer.state.log_history) if "loss" in log)
        last = next((f"{loss:.4g}" for loss in losses), "")
        facts = {"model_name_or_path": model_name(trainer.model), "last_loss": last}
        shown = {name: text for name, text in facts.items() if text}
        notes = derivative_notes(derivatives)
        page = write_run_report(folder, texts, None if rows is None else row_counts, shown, notes)
        print(*notes, f"values and report, which quote training rows: {page.parent}", sep="\n")

    def _all_ledgers(self) -> ValueLedger | None:
        """The ledgers of all processes added up, on those that write; None on the others.

        The processes send their ledgers one after the other: only writing processes hold them all.
        """
        ranks, writes = Ranks(self._trainer.accelerator), bool(self._trainer.args.should_save)
        if ranks.world == 1:
            return self.ledger
        whole = ValueLedger()
        for rank in range(ranks.world):
            part = ranks.broadcast_object(self.ledger if rank == ranks.rank else None, rank)
            if writes:
                whole.merge(part)
        return whole if writes else None
