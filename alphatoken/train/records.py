"""Records of a run: statistics for its logs, the ledger of values, value files and their page.

At the end they lie in ``output_dir/_alphatoken``, as ``alphatoken score`` writes them, with the
visits of each document.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from alphatoken.config import WALK
from alphatoken.errors import AlphaTokenWarning, warn_caller
from alphatoken.model.batch import IGNORE
from alphatoken.model.loading import model_name, text_tokenizer
from alphatoken.score.meaning import Meaning
from alphatoken.score.summary import summarise
from alphatoken.score.value_page import write_report
from alphatoken.score.values import ScoredExample, Visits, read_values, write_values
from alphatoken.support.devices import on_host
from alphatoken.support.storage import read_json
from alphatoken.support.token_texts import token_texts
from alphatoken.train.distributed import Ranks
from alphatoken.train.interface import TrainerInterface
from alphatoken.train.ledger import (
    BRANCHES,
    COMPONENTS,
    UNIT,
    DocumentValues,
    ValueLedger,
    row_documents,
)
from alphatoken.train.manifest import RESULTS, RUN
from alphatoken.train.python_rows import plain_rows, trained_parts
from alphatoken.train.trainer_loss import MicroBatch
from alphatoken.values import TokenValues, derivative_notes

_NUMBERS = "Numbers are the step size times the value, summed over the visits of a row."
_LEAD = (
    "Blue: by its steps on this token the run lowered the validation loss, to first order. Orange: "
    "it raised it."
)
_LEAD_OF_PAIRS = (
    "Blue: by its steps on this token the run lowered the loss of the validation pairs, to first "
    "order and up to a factor common to all tokens. Orange: it raised it."
)
_LEAD_OF_WALK = (
    "Blue: where the run trained on this token, a walk on the validation rows lowered the token's "
    "loss. Orange: it raised it."
)
_RUN_UNIT = "step size times value"
_SHOWN_OPTIONS = {
    "policy": "Policy", "estimator": "Estimator", "learning_rate": "Learning rate",
}  # fmt: skip
"""Options of a run that its page says in words."""

_RUN_COMPONENTS = {
    "total": "adaptation plus stability",
    "stability": "how much training on the token kept the model near what it was (times lambda)",
}
"""What components say on the page of a run, where it is not what they say of other values."""

REPORT = f"{RESULTS}/alphatoken-report.html"
VALUES = f"{RESULTS}/values"
"""The page, and the folder of value files, in a run's folder."""


class TrainMonitor:
    """Statistics between two logs: kept tokens, the validation gap, the time.

    They are read once a log, and go wherever the trainer's own logs go, under names that begin with
    ``alpha/``. What has gathered since the last log is part of a checkpoint.
    """

    def __init__(self) -> None:
        self._counts: Tensor | None = None  # (4,): response and kept tokens, sum w, sum w^2
        self._balance: dict[str, float] = {}
        self._look: dict[str, float] = {}
        self._derivatives: dict[str, float] = {}
        self._scoring = self._direction = 0.0
        # By optimizer step: response and kept tokens, on the device until a log is due.
        self._steps: dict[int, Tensor] = {}
        self._warned = False

    @torch.no_grad()
    def record(
        self, weights: Tensor, mask: Tensor, values: TokenValues | None, step: int | None = None
    ) -> None:
        """Add one micro-batch of this process.

        Args:
            weights: (b, t) training weight of each token.
            mask: (b, t) response tokens.
            values: their values, where the policy needs them.
            step: the optimizer step, which learns nothing without a weight; None where the loss is
                the policy's own.
        """
        wide = torch.float32 if mask.device.type == "mps" else torch.float64  # MPS has no float64
        kept = weights.detach() * mask
        columns = [
            mask.sum(),
            (kept != 0).sum(),
            kept.sum(dtype=wide),
            kept.to(wide).square().sum(),
        ]
        # Sums stay on the device until a log is due: reading one would wait for it.
        counts = torch.stack([count.to(mask.device, wide) for count in columns])
        self._counts = counts if self._counts is None else self._counts.to(counts) + counts
        if step is not None:
            before = self._steps.get(step)
            self._steps[step] = counts[:2] if before is None else before.to(counts) + counts[:2]
        if values is not None and values.balance:
            self._balance = values.balance
        if values is not None and (way := values.derivative) is not None:
            self._derivatives[way] = max(values.error, self._derivatives.get(way, 0.0))

    def scoring(self, seconds: float) -> None:
        """Add the seconds spent on values, the shared forward not included, or on weights."""
        self._scoring += seconds

    def direction(self, seconds: float) -> None:
        """Add the seconds spent on building the validation and retention gradients."""
        self._direction += seconds

    def gap(self, step: int, objectives: Mapping[str, float]) -> None:
        """A look at the validation objective: ``pool``, ``held_out`` and ``gap``."""
        if objectives:
            self._look = {"step": float(step), **objectives}

    @property
    def looked_at(self) -> int | None:
        """Step of the last look, or None."""
        return int(self._look["step"]) if self._look else None

    def logs(self) -> dict[str, float]:
        """Statistics since the last call, over all processes (each must call it); then empty.

        ``kept_share``: kept tokens over response tokens. ``weight_share``: summed weights over
        response tokens (the same for masks). ``effective_share``: effective sample size of the
        weights, ``(sum w)^2 / sum w^2``, over response tokens (the same for masks).
        """
        parts = gather_object([self.state_values()])
        self._warn_of_empty(parts)
        counts = torch.tensor([part["counts"] for part in parts], dtype=torch.float64).sum(0)
        response, kept, weight, square = counts.tolist()
        statistics = {"response_tokens": response}
        if response:
            statistics["kept_share"] = kept / response
            statistics["weight_share"] = weight / response
            if square:
                statistics["effective_share"] = weight**2 / square / response
        for name in ("scoring", "direction"):
            statistics[f"{name}_seconds"] = max(part[name] for part in parts)
        if self._balance:
            statistics["balance"] = median(self._balance.values())
        for name, value in self._look.items():
            if name != "step":
                statistics[f"validation_{name}"] = value
        self._counts = None
        self._scoring = self._direction = 0.0
        return {f"alpha/{name}": float(value) for name, value in statistics.items()}

    def end(self) -> None:
        """Look at the steps since the last log, over all processes (each calls it)."""
        self._warn_of_empty(gather_object([self.state_values()]))

    def _warn_of_empty(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Warn once of steps in which no process has a token with a weight; forget the steps."""
        sums: dict[int, list[float]] = {}
        for step, *counts in (entry for part in parts for entry in part["steps"]):
            before = sums.get(int(step), [0.0] * len(counts))
            sums[int(step)] = [a + b for a, b in zip(before, counts, strict=True)]
        self._steps = {}
        empty = [step for step, (response, kept) in sorted(sums.items()) if response and not kept]
        if empty and not self._warned:
            self._warned = True
            warn_caller(
                f"step {empty[0]} learned nothing: each of its {sums[empty[0]][0]:.0f} response "
                f"tokens has the weight 0, as in {len(empty)} of the {len(sums)} steps up to this "
                "log. Later ones are not warned of; alpha/kept_share counts them",
                AlphaTokenWarning,
            )

    def derivatives(self) -> dict[str, float]:
        """Ways of the run's label values -> largest error, over all processes (each calls it)."""
        errors: dict[str, float] = {}
        for part in gather_object([self._derivatives]):
            for way, error in part.items():
                errors[way] = max(error, errors.get(way, 0.0))
        return errors

    def state_values(self) -> dict[str, Any]:
        """Statistics gathered since the last log, as JSON values that restore bitwise."""
        return {
            "counts": [0.0] * 4 if self._counts is None else self._counts.tolist(),
            "steps": [[step, *counts.tolist()] for step, counts in self._steps.items()],
            "balance": self._balance,
            "look": self._look,
            "derivatives": self._derivatives,
            "scoring": self._scoring,
            "direction": self._direction,
        }

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_values` returned."""
        self._counts = torch.tensor(values["counts"], dtype=torch.float64)
        self._steps = {
            int(step): torch.tensor(counts, dtype=torch.float64)
            for step, *counts in values.get("steps", ())
        }
        self._balance, self._look = dict(values["balance"]), dict(values["look"])
        self._derivatives = dict(values["derivatives"])
        self._scoring, self._direction = float(values["scoring"]), float(values["direction"])


_UNWRITTEN = 64
"""Micro-batches on a device that wait for the ledger at most."""


class RunRecords:
    """Monitor and ledger of a run; each micro-batch is written down once, by its weigher.

    Args:
        trainer: whose run it is.

    Attributes:
        monitor: statistics between two logs.
        listener: is called with mask and weights of each micro-batch; None for nobody.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer = trainer
        self.monitor = TrainMonitor()
        self._ledger, self._unwritten = ValueLedger(), list[Callable[[], None]]()
        self.listener: Callable[[Tensor, Tensor], None] | None = None
        self._named: tuple[Sequence[str], Any] | None = None

    @property
    def ledger(self) -> ValueLedger:
        """Values of every training token, summed over its visits so far."""
        self._write_all()
        return self._ledger

    def _write_all(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        for write in unwritten:
            write()

    def name_rows(self, places: Sequence[str], rows: Any) -> None:
        """Say where a person finds each training row.

        Args:
            places: such as ``train.jsonl, line 7``.
            rows: the rows, one for each place, before they were prepared or packed.
        """
        self._named = places, rows

    def _places(self, prepared: Any) -> dict[bytes, str]:
        """Key of a document -> where a person finds the first row that holds it."""
        if self._named is None:
            return {}
        places, rows = self._named
        tokens = "input_ids" in rows.column_names
        if not tokens:  # TRL makes tokens of pairs, and keeps their order
            rows = prepared
        if rows is None or len(rows) != len(places):
            return {}
        how, named = self._trainer.export_arguments(), dict[bytes, str]()
        for place, row in zip(places, rows, strict=True):
            # Documents are of what is left of a row, which was named before it was cut.
            for part in trained_parts(row, self._trainer.args) if tokens else (row,):
                for key, _ in row_documents(part, **how):
                    named.setdefault(key, place)
        return named

    def micro_batch(
        self,
        batch: MicroBatch,
        values: TokenValues | None,
        weights: Tensor,
        factor: float | Tensor = 1.0,
        *,
        own_loss: bool = False,
    ) -> None:
        """Write down what one micro-batch is trained with.

        Args:
            batch: the micro-batch.
            values: of its tokens, where the policy needs them.
            weights: (b, t) of its tokens, before the loss is normalised.
            factor: on the weights in the loss; see ``divisor_factor``.
            own_loss: the policy's loss stands in place of the trainer's.
        """
        if self.listener is not None:
            self.listener(batch.mask, weights)
        step = self._trainer.state.global_step
        self.monitor.record(
            weights=weights, mask=batch.mask, values=values, step=None if own_loss else step
        )
        if values is None or not self._trainer.args.export_values:
            return
        rate = float(self._trainer.optimizer.param_groups[0]["lr"])
        self._unwritten.append(partial(self._write, batch, values, weights, factor, rate, step))
        # On a device each number that is read waits for the step, so several are read together.
        if on_host(batch.mask) or len(self._unwritten) >= _UNWRITTEN:
            self._write_all()

    def _write(
        self,
        batch: MicroBatch,
        values: TokenValues,
        weights: Tensor,
        factor: float | Tensor,
        rate: float,
        step: int,
    ) -> None:
        scale = rate * batch.step_unit * float(factor)
        inputs = {**batch.inputs, "labels": batch.labels}
        self._ledger.add(inputs, batch.mask, values, weights, scale=scale, step=step)

    def write_results(self) -> None:
        """Values and their page, into ``output_dir/_alphatoken``."""
        trainer = self._trainer
        args = trainer.args
        # Every process takes part in gathering, also those that write nothing.
        self.monitor.end()
        whole = self._all_ledgers() if args.export_values else None
        derivatives = self.monitor.derivatives() if args.export_values else {}
        if not args.should_save:
            return
        trainer.save_state()
        if whole is None or not len(whole):
            return
        folder, data = Path(str(args.output_dir)), trainer.train_dataset
        rows = plain_rows(data) if hasattr(data, "__len__") else None
        places = self._places(rows)
        row_counts = export_values(
            whole, folder / VALUES, rows, places=places, **trainer.export_arguments()
        )
        tokenizer = text_tokenizer(trainer.processing_class)
        # A plain trainer may have no tokenizer.
        texts = None if tokenizer is None else partial(token_texts, tokenizer)
        losses = (log["loss"] for log in reversed(trainer.state.log_history) if "loss" in log)
        last = next((f"{loss:.4g}" for loss in losses), "")
        facts = {
            "Model": Path(model_name(trainer.model)).name,
            "Training loss of the last log": last,
        }
        policy = trainer.token_policy
        if policy is not None and policy.reads_ratio:
            facts["Share of the tokens to keep"] = f"{policy.settings.keep_ratio:g}"
        shown = {name: text for name, text in facts.items() if text}
        notes = derivative_notes(derivatives)
        if not whole.documents.keys() <= places.keys():
            notes.append(
                "A row number counts the training rows from 0, without those that were left out or "
                "held out: it is no line of a file."
            )
        page = write_run_report(folder, texts, None if rows is None else row_counts, shown, notes)
        print(*notes, f"values and report, which quote training rows: {page.parent}", sep="\n")

    def _all_ledgers(self) -> ValueLedger | None:
        """The ledgers of all processes added up, on those that write; None on the others."""
        ranks, writes = Ranks(self._trainer.accelerator), bool(self._trainer.args.should_save)
        if ranks.world == 1:
            return self.ledger
        whole = ValueLedger()
        for rank in range(ranks.world):
            # One after the other, so that only processes that write hold them all.
            part = ranks.broadcast_object(self.ledger if rank == ranks.rank else None, rank)
            if writes:
                whole.merge(part)
        return whole if writes else None


def export_values(
    ledger: ValueLedger,
    folder: str | Path,
    rows: Iterable[Mapping[str, Any]] | None = None,
    *,
    places: Mapping[bytes, str] | None = None,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
) -> tuple[int, int]:
    """Write ``part-00000.parquet``, whole or not at all.

    One record a document, as ``alphatoken score`` writes them, with its visits. A token counts as
    kept if its mean weight is at least one half.

    Args:
        ledger: of the run.
        folder: is made if it does not exist.
        rows: rows of the training set as the trainer prepared it (see
            :func:`~alphatoken.train.ledger.row_documents`); read once. With it documents are
            ordered by row, and each names the rows that hold it.
        places: key of a document -> where a person finds it; others are called by row number.
        max_length: of preference pairs, as the trainer cut them.
        truncation_mode: TRL's.

    Returns:
        Rows of which a document was visited, and the other rows.

    Raises:
        DataError: the file could not be written; an old one is intact.
        InputError: rows without token ids.
    """
    folder = Path(folder)
    # Several rows may hold one document, and a packed row several documents.
    holders = defaultdict[bytes, list[int]](list)  # key of a document -> rows that hold it
    visited_rows = other_rows = 0
    for index, row in enumerate(rows or ()):
        keys = row_documents(row, max_length=max_length, truncation_mode=truncation_mode)
        documents = {key for key, _ in keys if key in ledger.documents}
        for key in documents:
            holders[key].append(index)
        visited_rows += bool(documents)
        other_rows += not documents
    folder.mkdir(parents=True, exist_ok=True)
    write_values(folder / "part-00000.parquet", _examples(ledger, holders, places or {}))
    return visited_rows, other_rows


def _examples(
    ledger: ValueLedger, holders: Mapping[bytes, list[int]], places: Mapping[bytes, str]
) -> Iterator[ScoredExample]:
    """Documents by their first row and branch, those in no row last, else as first visited."""

    def order(key: bytes) -> tuple[bool, int, int]:
        rows = holders.get(key, ())
        return not rows, rows[0] if rows else 0, ledger.documents[key].branch if rows else 0

    for number, key in enumerate(sorted(ledger.documents, key=order)):
        rows = holders.get(key, [])
        place = places.get(key) or (f"row {rows[0]}" if rows else f"document {key.hex()[:8]}")
        yield _example(number, place, ledger.documents[key], rows)


def _example(number: int, place: str, entry: DocumentValues, rows: list[int]) -> ScoredExample:
    def spread(column: Any, kind: Any = np.float64) -> Any:
        whole: Any = np.zeros(len(entry.ids), kind)
        whole[entry.positions] = column
        return whole

    branch = BRANCHES[entry.branch]
    visits = f"{entry.visits} visit{'s'[: entry.visits != 1]}"
    labels = np.full(len(entry.ids), IGNORE)
    labels[entry.positions] = entry.ids[entry.positions]
    share = entry.sums[:, -1] / entry.visits
    return ScoredExample(
        row=rows[0] if rows else number,
        place=f"{place}{f', {branch}' if branch else ''} ({visits})",
        tokens=[],
        ids=entry.ids.tolist(),
        labels=labels.tolist(),
        kept=spread(share >= 0.5, bool),
        values={name: spread(entry.sums[:, k]) for k, name in enumerate(COMPONENTS)},
        visits=Visits(entry.visits, entry.last_step, branch, rows, spread(share)),
    )


def write_run_report(
    folder: str | Path,
    texts: Callable[[Sequence[int]], list[str]] | None = None,
    rows: tuple[int, int] | None = None,
    facts: Mapping[str, object] | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Write the page of a run's values, whole or not at all, and return its path.

    It quotes training rows; ``push_to_hub`` does not upload it.

    Args:
        folder: the run's ``output_dir``, with the files of :func:`export_values` in ``VALUES``.
        texts: token ids -> the text of each; without it tokens are shown by their numbers.
        rows: training rows that were seen, and those that were not; None for a stream.
        facts: more of the run, in words, shown before its options.
        notes: sentences about the values.

    Raises:
        DataError: a value file cannot be read, or the page could not be written.
    """
    folder = Path(folder)
    options = (read_json(folder / RUN) or {}).get("options", {})
    summary = summarise(read_values(folder / VALUES), texts=texts or _numbers)
    about = dict(facts or {})
    if rows is not None:
        about["Rows"] = f"{rows[0]:,} of {sum(rows):,} training rows were seen"
    about |= {title: options[name] for name, title in _SHOWN_OPTIONS.items() if options.get(name)}
    return write_report(
        folder / REPORT,
        summary,
        title=f"Values of the run {folder.resolve().name}",
        meaning=_meaning_of(options),
        selection=summary.kept_tokens < summary.response_tokens,
        about=about,
        settings=options,
        notes=[f"Values are {UNIT}; stability counts with its lambda.", *notes],
    )


def _meaning_of(options: Mapping[str, Any]) -> Meaning:
    """What the colours of a run's page say, by its options."""
    lead = _LEAD_OF_PAIRS if "beta" in options else _LEAD  # DPO's strength
    if options.get("estimator") == WALK:
        lead = _LEAD_OF_WALK
    return Meaning(f"{lead} {_NUMBERS}", _RUN_UNIT, components=_RUN_COMPONENTS)


def _numbers(ids: Sequence[int]) -> list[str]:
    return [f" #{token}" for token in ids]
