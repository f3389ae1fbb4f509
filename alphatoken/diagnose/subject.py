"""The subject of a diagnosis: a model, rows to value, validation rows, rows to retain.

``conclude`` makes the :class:`Diagnosis` of a subject; ``diagnosed_before`` keeps one to a time, by
rounds of growing size, of which the last one counts. The first round reads a sixteenth of what was
requested, but no less than means anything, and is always done; the second a quarter; the third all
of it. A further round begins if it should end before the deadline, by the time that the round
before it took and by how much more it reads. A round that was begun ends, unless memory is full;
then the one before it stands.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.config import WALK, ScorerConfig
from alphatoken.data import Example, batches, token_texts
from alphatoken.diagnose import SIZES, find
from alphatoken.diagnose.diagnosis import Diagnosis, Drawing, Table
from alphatoken.diagnose.figures import Figure, draw
from alphatoken.diagnose.statistics import FEWEST
from alphatoken.diagnose.stepping import fine_tuned, usual_rate
from alphatoken.direction.drift import FisherDrift
from alphatoken.direction.fisher import fit_fisher
from alphatoken.errors import ConfigError, DataError, InputError
from alphatoken.model.batch import IGNORE
from alphatoken.model.protocol import DecoderAdapter, find_adapter
from alphatoken.score.values import COMPONENTS
from alphatoken.scorer import Scorer
from alphatoken.support.progress import ProgressSink, Tracker

Batch = dict[str, Tensor]


def require_retention(sets: Sized) -> None:
    """Check that there are sets of held-out retention rows.

    Raises:
        DataError: there is none.
    """
    if not sets:
        raise DataError(
            "this diagnostic needs held-out retention rows",
            got="none",
            why="it compares the proxy with what is really forgotten",
            remedy="--retention_set FILE (repeat it for several sets)",
        )


def require_first_order(config: ScorerConfig) -> None:
    """Check that the values are derivatives at the model's weights.

    Raises:
        ConfigError: they are differences of losses along a walk.
    """
    if config.estimator == WALK:
        raise ConfigError(
            "this diagnostic is one of first-order values",
            got=f"estimator {WALK!r}",
            why="values along a walk are differences of losses, and have no layers, no optimizer's "
            "step and no retention side",
            remedy="--value exact (in Python ScorerConfig.exact())",
        )


def places_of(rows: Sequence[Example]) -> NDArray[np.int64]:
    """(n, 2): row and position of every response token, in that order; a first token never is."""
    places = [
        (number, place)
        for number, row in enumerate(rows)
        for place, label in enumerate(row.labels)
        if place and label != IGNORE
    ]
    return np.array(places, dtype=np.int64).reshape(-1, 2)


def gathered(
    batches: Sequence[Batch], tracker: Tracker, of: Callable[[Batch], Mapping[Any, Tensor]]
) -> dict[Any, NDArray[np.float64]]:
    """Tensors that ``of`` computes for each batch, joined by key along their first axis."""
    columns: dict[Any, list[NDArray[np.float64]]] = {}
    done = 0
    for batch in batches:
        for key, part in of(batch).items():
            columns.setdefault(key, []).append(part.detach().cpu().double().numpy())
        done += len(batch["labels"])
        tracker.report(done)
    return {key: np.concatenate(parts) for key, parts in columns.items()}


@dataclass(frozen=True, eq=False)
class Subject:
    """The model, rows and settings that diagnostics read; they change nothing of them.

    Attributes:
        model: the model whose tokens are valued, in evaluation mode.
        train: encoded rows whose response tokens are valued.
        validation: encoded rows that define the objective.
        retention: name of a set -> held-out rows of what must not be forgotten.
        prompts: encoded rows on which Fishers are fitted, neither valued nor tuned on; empty for
            the training rows.
        tokenizer: for texts; None where only ids are known.
        reference: the model before fine-tuning; None if ``model`` is that.
        beside: name -> loads another model that was fine-tuned from the reference, on this device;
            called when it is needed, one at a time.
        fisher: fitted at the reference; None to fit one when it is needed.
        config: what the user's run computes; diagnostics vary it.
        ratio: share of the tokens that the run keeps.
        batch_size: rows a batch.
        tokens: most response tokens that are valued; rows are drawn until it is reached.
        oracle_tokens: most tokens sent one by one through the slow oracle.
        fisher_samples: of a Fisher that is fitted here.
        tuning_steps: of the fine-tuning that stands in for a missing second model.
        tuning_rate: its learning rate (AdamW); None for one that suits the model's width.
        seed: of every draw.
        progress: as in ``Tracker``.
        names: what to call model and files in settings.
        words: options of a command that name model and rows, for the next command to run.
        folder: where a diagnostic keeps finished parts of its work; None keeps none.
    """

    model: nn.Module
    train: Sequence[Example]
    validation: Sequence[Example]
    retention: Mapping[str, Sequence[Example]] = field(default_factory=dict)
    prompts: Sequence[Example] = ()
    tokenizer: Any = None
    reference: nn.Module | None = None
    beside: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    fisher: FisherDrift | None = None
    config: ScorerConfig = field(default_factory=ScorerConfig)
    ratio: float = 0.5
    batch_size: int = 8
    tokens: int = SIZES["tokens"]
    oracle_tokens: int = SIZES["oracle_tokens"]
    fisher_samples: int = SIZES["fisher_samples"]
    tuning_steps: int = SIZES["tuning_steps"]
    tuning_rate: float | None = None
    seed: int = 0
    progress: bool | ProgressSink | None = False
    names: Mapping[str, str] = field(default_factory=dict)
    words: str = ""
    folder: Path | None = None
    _cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check sizes, and that there is something to value."""
        for name in ("batch_size", *SIZES):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", got=repr(getattr(self, name)))
        for what in ("train", "validation"):
            if not sum(example.response_tokens for example in getattr(self, what)):
                raise DataError(
                    f"the {what} rows have no response token",
                    got=f"{len(getattr(self, what))} rows",
                    remedy="look at the fields and at --max_length",
                )

    # --- rows -----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Device of the model's parameters."""
        return next(self.model.parameters()).device

    @property
    def adapter(self) -> DecoderAdapter:
        """Adapter of the model's structure."""
        return find_adapter(self.model)

    def sample(self) -> list[Example]:
        """Training rows drawn at random, until ``tokens`` response tokens; in their own order.

        There is always one: a row that alone has more is drawn if it comes first.
        """
        drawn: list[int] = []
        count = 0
        for place in np.random.default_rng(self.seed).permutation(len(self.train)):
            size = self.train[place].response_tokens
            if size and (not drawn or count + size <= self.tokens):
                drawn.append(int(place))
                count += size
        return [self.train[place] for place in sorted(drawn)]

    def resized(self, **sizes: Any) -> Subject:
        """The same subject with other sizes; what is fitted or fine-tuned is shared with it.

        Args:
            **sizes: fields, and ``objective_rows``: so many of the validation rows, drawn at
                random, in their own order.
        """
        rows = sizes.pop("objective_rows", len(self.validation))
        if rows < len(self.validation):
            order = np.random.default_rng(self.seed).permutation(len(self.validation))
            sizes["validation"] = [self.validation[place] for place in sorted(order[:rows])]
        if sizes.get("fisher_samples", self.fisher_samples) != self.fisher_samples:
            for name in [name for name in self._cache if name.startswith("fisher ")]:
                del self._cache[name]  # a Fisher and its reference are as large as what is scored
        subject = replace(self, **sizes)
        object.__setattr__(subject, "_cache", self._cache)
        return subject

    def batches(self, rows: Sequence[Example], size: int | None = None) -> list[Batch]:
        """Rows in padded batches on the model's device."""
        return [
            {name: tensor.to(self.device) for name, tensor in batch.items()}
            for batch in batches(rows, size or self.batch_size)
        ]

    def texts(self, example: Example) -> list[str]:
        """The text each token of a row adds; its number in brackets without a tokenizer."""
        if self.tokenizer is None:
            return [f"[{token}]" for token in example.input_ids]
        return token_texts(self.tokenizer, example.input_ids)

    def retention_rows(self, each: int = 8) -> dict[str, list[Example]]:
        """The first ``each`` rows of every retention set that have response tokens.

        Raises:
            DataError: no retention rows were given, or a set has none that can be used.
        """
        require_retention(self.retention)
        usable = {
            name: [row for row in rows if row.response_tokens][:each]
            for name, rows in self.retention.items()
        }
        empty = [name for name, rows in usable.items() if not rows]
        if empty:
            raise DataError("a retention set has no response token", got=", ".join(empty))
        return usable

    # --- values --------------------------------------------------------------------------------

    def score(
        self, scorer: Scorer, rows: Sequence[Example], label: str = ""
    ) -> dict[str, NDArray[Any]]:
        """Values of the response tokens of ``rows``, flat, in (row, position) order.

        Keys: ``total``, ``adaptation``, ``stability`` and, where the estimator splits them,
        ``adaptation_direct`` and so on; ``row`` and ``position`` say which token it is. Stability
        is before lambda; ``row`` and ``position`` are whole numbers, the rest float64.
        """
        tracker = self.tracker(label or f"Values, {scorer.config.estimator}", len(rows))

        def of(batch: Batch) -> dict[str, Tensor]:
            values = scorer.score(batch)
            parts = {key: getattr(values, key) for key in COMPONENTS}
            return {key: part[values.mask] for key, part in parts.items() if part is not None}

        row, position = places_of(rows).T
        return {"row": row, "position": position, **gathered(self.batches(rows), tracker, of)}

    # --- before and after -----------------------------------------------------------------------

    def before_and_after(self) -> tuple[nn.Module, nn.Module, str]:
        """Reference and fine-tuned model, and a sentence on where they come from.

        Without a reference the model itself is it, and a copy is fine-tuned for
        ``tuning_steps`` on the training rows; made once.
        """
        if self.reference is not None:
            origin = "Before: the reference given; after: the model given."
            return self.reference, self.model, origin
        key = f"after {self.tuning_steps}"
        if key not in self._cache:
            for other in [name for name in self._cache if name.startswith("after ")]:
                del self._cache[other]  # one copy of the model at a time
            self._cache[key] = fine_tuned(
                copy.deepcopy(self.model),
                list(self.batches(self.train)),
                steps=self.tuning_steps,
                rate=self.rate,
                seed=self.seed,
                tracker=self.tracker("Fine-tuning a copy", self.tuning_steps),
            )
        origin = (
            "No reference model was given, so the model is the reference, and a copy fine-tuned "
            f"on the training rows for {self.tuning_steps} AdamW steps at {self.rate:.2g} is the "
            "model after."
        )
        return self.model, self._cache[key], origin

    @property
    def rate(self) -> float:
        """Learning rate of the fine-tuning."""
        return usual_rate(self.model) if self.tuning_rate is None else self.tuning_rate

    def fitted_fisher(self, structure: str = "diagonal", **options: Any) -> FisherDrift:
        """The Fisher given (if its structure is asked for), or one fitted here at the reference.

        Fitted with ``labels="token"`` on ``fisher_rows`` by default, and kept for each setting.
        """
        if self.fisher is not None and self.fisher.structure == structure and not options:
            return self.fisher
        settings: dict[str, Any] = {"samples": self.fisher_samples, "structure": structure}
        settings |= options
        key = f"fisher {sorted(settings.items(), key=str)}"
        if key not in self._cache:
            settings = {
                "layers": self.config.layers,
                "parameters": self.config.parameters,
                "labels": "token",  # one forward a row, and no generation
                "seed": self.seed,
                "batch_size": self.batch_size,
                "progress": self.progress,
            } | settings
            # Drawing is nearly all of a fit, and the Fisher's structure has no part in it.
            if settings["labels"] == "sequence":
                of = ("samples", "seed", "max_new_tokens", "batch_size")
                drawn = f"responses {[settings.get(name) for name in of]}"
                settings["responses"] = self._cache.setdefault(drawn, {})
            (batch,) = self.batches(self.fisher_rows, len(self.fisher_rows))
            reference = self.model if self.reference is None else self.reference
            self._cache[key] = fit_fisher(reference, batch, **settings)
        fisher: FisherDrift = self._cache[key]
        return fisher

    @property
    def fisher_rows(self) -> list[Example]:
        """Rows that Fishers are fitted on: the held-out ones, or the training rows without them."""
        held_out = [row for row in self.prompts if row.response_tokens]
        return held_out or [row for row in self.train if row.response_tokens]

    def tracker(self, label: str, total: int) -> Tracker:
        """Progress of one piece of work."""
        return Tracker(label, total, self.progress)

    def settings(self) -> dict[str, Any]:
        """Settings on which every diagnosis depends, for its record."""
        return {
            **self.names,
            "training rows": len(self.train),
            "validation rows": len(self.validation),
            "Fisher prompts held out": len(self.prompts),
            **{f"retention rows, {name}": len(rows) for name, rows in self.retention.items()},
            "estimator": self.config.estimator,
            "layers": str(self.config.layers),
            "parameters": self.config.parameters,
            "window": self.config.window,
            "stability_weight": self.config.stability_weight,
            "ratio": self.ratio,
            "tokens": self.tokens,
            "seed": self.seed,
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
        }

    def require_tokens(self, rows: Sequence[Example], fewest: int, why: str) -> None:
        """Refuse rows with too few response tokens for a statistic.

        Raises:
            InputError: fewer than ``fewest``.
        """
        count = sum(row.response_tokens for row in rows)
        if count < fewest:
            raise InputError(
                f"at least {fewest} response tokens are needed",
                got=f"{count} in {len(rows)} rows",
                why=why,
                remedy="give more or longer rows, or a larger --tokens",
            )


def conclude(
    name: str,
    subject: Subject,
    conclusion: str,
    tables: Iterable[Table],
    figures: Iterable[Figure | Drawing],
    *,
    valued: Sequence[Example] = (),
    notes: Iterable[str] = (),
    settings: Mapping[str, Any] | None = None,
    next_command: str = "",
    next_time: str = "",
    mark: str = "",
    lists: Mapping[str, Mapping[str, Any]] | None = None,
) -> Diagnosis:
    """The diagnosis ``name`` of ``subject``; tables without rows and their figures are left out.

    Args:
        name: of the diagnostic.
        subject: whose settings are part of the result.
        conclusion: a sentence.
        tables: every number.
        figures: declared over tables, or drawn already; drawn here.
        valued: the rows that were valued, which a note counts.
        notes: what else was sampled or left out, and warnings.
        settings: of the diagnostic, beside those of the subject.
        next_command: what to run next, or "".
        next_time: how long that takes here, or "".
        mark: "good", "doubtful" or "bad", where the answer is one of these.
        lists: title -> rows in colours.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    shown = [f for f in figures if isinstance(f, Drawing) or f.table.rows]
    return Diagnosis(
        name,
        find(name).question,
        conclusion,
        tuple(table for table in tables if table.rows),
        tuple(f if isinstance(f, Drawing) else draw(f) for f in shown),
        (*_about(subject, valued), *notes),
        {**subject.settings(), **(settings or {})},
        next_command,
        next_time,
        mark,
        lists or {},
    )


def _about(subject: Subject, rows: Sequence[Example]) -> Iterator[str]:
    """How much of the training rows was valued, and a caution where that is little."""
    if not rows:
        return
    tokens, every = (sum(row.response_tokens for row in x) for x in (rows, subject.train))
    yield (
        f"{tokens} of {every} response tokens in {len(rows)} of {len(subject.train)} training "
        "rows were valued."
    )
    if len(rows) < FEWEST:
        yield (
            f"Fewer than {FEWEST} rows ({len(rows)}): intervals draw single tokens, and are too "
            "narrow, because tokens of one row are not independent."
        )


# --- rounds ---------------------------------------------------------------------------------------

_SHARES = (1 / 16, 1 / 4, 1.0)
_LEAST = {"objective_rows": 8, "oracle_tokens": 16, "fisher_samples": 24}
Sizes = Mapping[str, tuple[int, int]]
"""Sizes that are smaller than requested, by name: (now, requested)."""


def cut(subject: Subject, fixed: frozenset[str], share: float) -> tuple[Subject, Sizes]:
    """The subject with a share of its sizes, and the sizes that became smaller.

    Args:
        subject: with the requested sizes.
        fixed: names of sizes that stay as they are.
        share: of each size, in (0, 1].
    """
    lengths = [row.response_tokens for row in subject.train if row.response_tokens]
    requested = {
        "tokens": min(subject.tokens, sum(lengths)),
        "objective_rows": len(subject.validation),
        "oracle_tokens": subject.oracle_tokens,
        "fisher_samples": subject.fisher_samples,
    }
    # The tokens of eight rows, so that intervals are over rows.
    least = {**_LEAST, "tokens": FEWEST * -(-sum(lengths) // len(lengths))}
    sizes = {}
    for name, whole in requested.items():
        some = min(whole, max(least[name], math.ceil(share * whole)))
        if name not in fixed and some < whole:
            sizes[name] = some, whole
    return subject.resized(**{name: some for name, (some, _) in sizes.items()}), sizes


def diagnosed_before(
    deadline: float | None,
    subject: Subject,
    fixed: frozenset[str],
    diagnose: Callable[[Subject], Diagnosis],
    *,
    budget: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> Diagnosis:
    """The largest diagnosis that should be there by the deadline; it says what it was made from.

    Args:
        deadline: by ``clock``; None for everything that was requested, in one round.
        subject: what is diagnosed.
        fixed: names of sizes that stay as they are.
        diagnose: one round.
        budget: the time until the deadline, as the user wrote it, for the note.
        clock: seconds since some moment.
    """
    if deadline is None:
        return diagnose(subject)
    diagnosis, rounds, seconds = None, 0, 0.0
    sizes: Sizes = {}
    for share in _SHARES:
        smaller, larger_sizes = cut(subject, fixed, share)
        begun = clock()
        if diagnosis is not None:
            # What is not in ``larger_sizes`` is as requested.
            factors = (
                larger_sizes.get(name, (whole,))[0] / some for name, (some, whole) in sizes.items()
            )
            growth = max(factors, default=1)
            if growth == 1:  # nothing more would be read
                continue
            if begun + growth * seconds > deadline:
                break
        try:
            diagnosis = diagnose(smaller)
        except (torch.OutOfMemoryError, MemoryError):
            if diagnosis is None:
                raise
            budget = f"{budget}: a larger round ran out of memory"
            break
        rounds, sizes, seconds = rounds + 1, larger_sizes, clock() - begun
    assert diagnosis is not None
    return _with_sizes(diagnosis, sizes, rounds, budget)


def _with_sizes(diagnosis: Diagnosis, sizes: Sizes, rounds: int, budget: str) -> Diagnosis:
    parts = ", ".join(
        f"{some} of {whole} {name.replace('_', ' ')}" for name, (some, whole) in sizes.items()
    )
    amount = parts or "everything that was asked for"
    settings = {"budget": budget, "rounds": rounds, "read": amount}
    in_rounds = f"in {rounds} round{'s' * (rounds > 1)}"
    notes = (f"Read {parts} {in_rounds} (stopped by the budget of {budget}).",) if parts else ()
    return replace(
        diagnosis,
        notes=(*notes, *diagnosis.notes),
        settings={**diagnosis.settings, **settings},
    )
