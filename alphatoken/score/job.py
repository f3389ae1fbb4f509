"""Inputs of the values: read and checked once, saved in the output folder, loaded anywhere.

What :func:`alphatoken.data.split_pools` does to a list is done row by row here (:class:`Corpus`):
what becomes of a row depends on itself and on the held-out keys, so that any process can start at
any row.

OUT/run.json                 settings; the same at a resumed run
OUT/job/job.json             where the rows are, which of them are held out
"""

from __future__ import annotations

import json
import random
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from alphatoken import FisherDrift, Scorer, ScorerConfig
from alphatoken.config import READ_BY, WALK
from alphatoken.data import (
    EncodeOptions,
    EncodeReport,
    Example,
    batches,
    encode_rows,
    leak_keys,
)
from alphatoken.data.encode import NO_RESPONSE, survey_of
from alphatoken.data.rows import UNLEARNED, Fields, Row, row_of
from alphatoken.data.source import RowSource, each_row, find_source, source_of
from alphatoken.data.split import check_draw, none_left, refuse_one_file, repeat_of, token_keys
from alphatoken.data.survey import Survey, add_place
from alphatoken.errors import ConfigError, DataError, counted
from alphatoken.model.protocol import find_adapter
from alphatoken.score.options import ScoreOptions
from alphatoken.score.queries import encode_queries, query_rows, read_as
from alphatoken.support.progress import Tracker
from alphatoken.support.resume import (
    changed_settings,
    content_digest,
    file_digest,
    read_run,
    refuse_changes,
    weights_digest,
)
from alphatoken.support.storage import write_json

OUTCOMES = (
    "drawn_validation",
    "removed_same_as_validation",
    "removed_same_as_fisher",
    "bad_rows",
    "train",
    "without_response",
)
"""Outcome of a row; only "train" is valued."""


MOST_TOKENS = 2**24
"""Tokens of a corpus that are kept between its survey and its valuing: 128 MiB."""


@dataclass
class CorpusSurvey:
    """Outcomes of the rows of a source, counted as they are read.

    Attributes:
        counts: of rows, by outcome: one of :data:`OUTCOMES`.
        encoded: sums up those that became tokens.
        removed: outcome -> places of the first few rows that repeat a held-out one.
        whole: rows that repeat all of a held-out one, not its prompt alone.
        bad: index, place and reason of each row that cannot be read or written as tokens.
        tokens: place, ids and labels of the rows that are valued, by index; None where they are
            more than ``MOST_TOKENS``: such rows are written as tokens again when they are valued.
    """

    counts: dict[str, int] = field(default_factory=Counter)
    encoded: EncodeReport = field(default_factory=EncodeReport)
    removed: dict[str, list[str]] = field(default_factory=dict)
    whole: int = 0
    bad: list[dict[str, Any]] = field(default_factory=list)
    tokens: dict[int, tuple[str, array[int], array[int]]] | None = field(default_factory=dict)

    def add_tokens(self, example: Example) -> None:
        """Keep the tokens of a row that is valued, as long as all of them are few enough."""
        if self.encoded.tokens > MOST_TOKENS:
            self.tokens = None
        if self.tokens is not None:
            ids, labels = (array("i", part) for part in (example.input_ids, example.labels))
            self.tokens[example.row.index] = (example.row.place, ids, labels)

    def examples(self, rows: range) -> Iterator[Example]:
        """Those of these rows that are valued, without their text; as ``Corpus.examples``."""
        assert self.tokens is not None
        for index in rows:
            if index in self.tokens:
                place, ids, labels = self.tokens[index]
                yield Example(Row(index, place, ()), ids.tolist(), labels.tolist())

    def remove(self, row: Row, pool: str, whole: bool) -> None:
        """Count a row that repeats one of the pool, and keep where it is."""
        outcome = f"removed_same_as_{pool}"
        self.counts[outcome] += 1
        self.whole += whole
        add_place(self.removed.setdefault(outcome, []), row.place)

    def add_bad(self, index: int, place: str, reason: str) -> None:
        """Count a bad row, and keep what is wrong with it."""
        self.counts["bad_rows"] += 1
        self.bad.append({"index": index, "place": place, "reason": reason})


@dataclass(frozen=True)
class Corpus:
    """Rows of a source, less those that must not be valued, as tokens.

    Attributes:
        source: all rows.
        fields: which columns are read.
        tokenizer: of the model.
        how: rows become tokens, and which of them stop the run.
        drawn: rows that are validation rows themselves.
        validation: ``leak_keys`` and ``token_keys`` of the validation rows.
        fisher: those of the rows that the Fisher was fitted on.
        leak_key: rows repeat each other by their "prompt", or by the "conversation" only.
    """

    source: RowSource
    fields: Fields
    tokenizer: Any
    how: EncodeOptions = field(default_factory=EncodeOptions)
    drawn: frozenset[int] = frozenset()
    validation: frozenset[str] = frozenset()
    fisher: frozenset[str] = frozenset()
    leak_key: str = "prompt"

    def examples(self, start: int = 0, stop: int | None = None) -> Iterator[Example]:
        """The rows that are valued, as tokens.

        Raises:
            DataError: a row that is to stop the run, by ``how``.
        """
        rows = self._each(start, stop, self.source.survey(), CorpusSurvey())
        return (example for example in rows if example is not None)

    def _each(
        self, start: int, stop: int | None, survey: Survey, outcomes: CorpusSurvey
    ) -> Iterator[Example | None]:
        """Each row as tokens, or None where it is not valued.

        ``survey`` counts how rows were read, and those left out; ``outcomes`` what becomes of them.
        """
        make = partial(row_of, fields=self.fields, survey=survey)
        records = self.source.read(start, stop)
        for record, row in each_row(records, make, self.how.on_bad_rows):
            if isinstance(row, DataError):
                survey.leave_out(row.what, record.place)
                outcomes.add_bad(record.index, record.place, str(row))
                yield None
            else:
                yield self._example(row, survey, outcomes)

    def keys_of(self, rows: Sequence[Row]) -> frozenset[str]:
        """``leak_keys`` and ``token_keys`` of rows that are held out."""
        how = replace(self.how, on_empty="skip", on_bad_rows="skip")  # they are refused elsewhere
        examples, _ = encode_rows(rows, self.tokenizer, how, survey_of(rows))
        keys = {key for row in rows for key in leak_keys(row)}
        return frozenset(keys.union(*map(token_keys, examples)))

    def row(self, index: int) -> Row | DataError:
        """One row, also of those that are drawn, or what is wrong with it."""
        records = self.source.read(index, index + 1)
        ((_, row),) = each_row(records, partial(row_of, fields=self.fields), "skip")
        return row

    def _example(self, row: Row, survey: Survey, outcomes: CorpusSurvey) -> Example | None:
        pools = {"validation": self.validation, "fisher": self.fisher}
        if row.index in self.drawn:
            outcomes.counts["drawn_validation"] += 1
            return None
        if repeat := repeat_of(partial(leak_keys, row), self.leak_key, pools):
            outcomes.remove(row, *repeat)
            return None
        examples, report = encode_rows([row], self.tokenizer, self.how, survey)
        keys = partial(token_keys, examples[0]) if examples else None
        if keys and (repeat := repeat_of(keys, self.leak_key, pools)):
            outcomes.remove(row, *repeat)
            return None
        if report.skipped_bad:
            reason = report.first_skipped[0].removeprefix(f"{row.place}: ")
            outcomes.add_bad(row.index, row.place, reason)
            return None
        outcomes.encoded.add(report)
        outcomes.counts["train" if examples else "without_response"] += 1
        return examples[0] if examples else None

    def survey(self, report: Callable[[int], None] = lambda _: None) -> CorpusSurvey:
        """Go through all rows once, before any work; one line says what was read and left out.

        Args:
            report: is told how many rows were read, now and then.

        Raises:
            DataError: as of :meth:`examples`; or no row is left.
        """
        outcomes, survey = CorpusSurvey(), self.source.survey()
        for number, example in enumerate(self._each(0, None, survey, outcomes)):
            if example is not None:
                outcomes.add_tokens(example)
            if number % 256 == 0:
                report(number)
        report(self.source.rows)  # so that what was read has a line of its own
        survey.log()
        always = OUTCOMES[: OUTCOMES.index("train") + 1]
        shown = [name for name in OUTCOMES if outcomes.counts[name] or name in always]
        counts = {"rows": self.source.rows, **{name: outcomes.counts[name] for name in shown}}
        if not outcomes.counts["train"]:
            marked, cut = UNLEARNED in survey.left, NO_RESPONSE in survey.left
            raise none_left(counts, marked=marked, cut=cut, whole=outcomes.whole)
        return replace(outcomes, counts=counts)


def draw_rows(corpus: Corpus, count: int, seed: int) -> list[Row]:
    """Draw so many rows of the corpus, without replacement, among those that can be read.

    The draw is that of ``split_pools`` where no row is bad.

    Raises:
        ConfigError: they cannot be drawn, or none would remain.
        DataError: a row that cannot be read, where such rows stop the run.
    """
    total = corpus.source.rows
    check_draw(count, total, "validation rows")
    draw = random.Random(seed)
    chosen, bad = set(draw.sample(range(total), count)), set[int]()
    rows: dict[int, Row] = {}
    while left := sorted(chosen - rows.keys()):
        for index in left:
            row = corpus.row(index)
            if isinstance(row, Row):
                rows[index] = row
                continue
            if corpus.how.on_bad_rows == "error":
                corpus.survey()  # stops at the first bad row of the file, not of the draw
            # A bad row is passed over: another one is drawn in its place.
            bad.add(index)
            check_draw(count, total - len(bad), "validation rows")
            chosen.remove(index)
            while len(chosen) < count:
                other = draw.randrange(total)
                if other not in bad:
                    chosen.add(other)
    return [rows[index] for index in sorted(rows)]


def encode_some(
    rows: Sequence[Row], tokenizer: Any, how: EncodeOptions, what: str
) -> tuple[list[Example], EncodeReport]:
    """Rows to examples, of which there must be some.

    Raises:
        DataError: none is left; the message says of ``what``.
    """
    survey = survey_of(rows)
    examples, report = encode_rows(rows, tokenizer, how, survey)
    if survey.notes or survey.left_turns:
        survey.log()
    if not examples:
        raise DataError(
            f"no {what} row is left",
            got="; ".join([counted(len(rows), "rows"), *survey.left_out()]),
            remedy="look at --response_column, --max_length, --on_empty and --on_bad_rows, or give "
            "other rows",
        )
    return examples, report


# --- a job ----------------------------------------------------------------------------------------


def examples_digest(examples: Iterable[Example]) -> str:
    """Digest of rows, ids and labels: of the data, the tokenizer and how it was used, in one."""
    return content_digest([one.row.index, one.input_ids, one.labels] for one in examples)


def on_device(batch: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The batch where the model is."""
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in batch.items()}


@dataclass(frozen=True)
class Job:
    """Everything that the values depend on, read and checked.

    Attributes:
        options: of the command.
        corpus: the rows to value.
        validation: encoded validation rows; ``encoded`` says what happened to them.
        fisher: of the stability term.
        model: on its device.
        survey: of the corpus; None in a process that only values.
        reference: the second model, whose losses are subtracted.
    """

    options: ScoreOptions
    corpus: Corpus
    validation: list[Example]
    encoded: EncodeReport
    fisher: FisherDrift | None
    model: nn.Module
    survey: CorpusSurvey | None = None
    reference: nn.Module | None = None

    @property
    def block_size(self) -> int:
        """Rows of a value file, those that are left out included."""
        return self.options.shard_size or _default_block_size(self.corpus.source.rows)

    @property
    def blocks(self) -> range:
        """Numbers of the value files."""
        return range(-(-self.corpus.source.rows // self.block_size))

    def value_file(self, number: int) -> Path:
        """The value file of a block."""
        return self.options.folder / "values" / f"part-{number:05d}.parquet"

    @property
    def trusted_file(self) -> Path:
        """The value file of the rows that a walk was taken on."""
        return self.options.folder / "trusted" / "part-00000.parquet"

    def missing(self) -> list[int]:
        """Blocks that are not finished."""
        return [number for number in self.blocks if not self.value_file(number).exists()]

    def block_rows(self, number: int) -> range:
        """The rows of a block."""
        rows = range(self.corpus.source.rows)
        return rows[number * self.block_size : (number + 1) * self.block_size]

    def examples(self, rows: range) -> Iterator[Example]:
        """Those of these rows that are valued; written as tokens once, where the survey kept them.

        Raises:
            DataError: as of :meth:`Corpus.examples`.
        """
        if self.survey is None or self.survey.tokens is None:
            yield from self.corpus.examples(rows.start, rows.stop)
            return
        yield from self.survey.examples(rows)

    def scorer(self) -> Scorer:
        """A scorer of its own validation rows; it builds G when it is first used.

        Of several queries each is a batch of its own, and values have a part of each.
        """
        options = self.options
        size = 1 if options.query else options.per_device_train_batch_size
        validation = [on_device(b, self.model) for b in batches(self.validation, size)]
        config = replace(options.scorer_config(), standard_errors=len(options.query) > 1)
        scorer = Scorer(
            self.model,
            validation or None,
            retention=self.fisher,
            config=config,
            reference=self.reference,
        )
        scorer.pin("job")  # nothing is trained, so the weights need not be read to see it
        return scorer

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings of the values, by the name of their flags; a resumed run must have the same."""
        options, how = self.options, asdict(self.corpus.how)
        drawn, fisher = options.validation_rows, options.fisher_file
        valued = _options_in_force(options.scorer_config())
        layers = valued.pop("layers")
        del how["on_empty"], how["on_bad_rows"]  # no finished value depends on them
        return {
            "model_name_or_path": options.model_name_or_path,
            "adapter": options.adapter,
            "train_file": options.train_file,
            "validation_file": options.validation_file
            or (f"{drawn} rows of the training file" if drawn else None),
            "query": options.query or None,
            "reference": options.reference,
            "reference_sha256": None if self.reference is None else weights_digest(self.reference),
            "fisher_file": fisher or "none",
            "layers": layers if isinstance(layers, (int, str)) else list(layers),
            "parameters": valued.pop("parameters"),
            **valued,
            "keep_ratio": options.ratio,
            "keep_scope": options.keep_scope,
            "per_device_train_batch_size": options.per_device_train_batch_size,
            "shard_size": self.block_size,
            "max_length": how.pop("max_length"),
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "leak_key": options.leak_key,
            "seed": options.seed,
            "row_format": self.encoded.format,
            "rows_read": asdict(self.corpus.fields) | how,
            "model_sha256": weights_digest(self.model),
            "fisher_sha256": "none" if fisher is None else file_digest(fisher),
            "train_sha256": self.corpus.source.sha256,
            "validation_sha256": examples_digest(self.validation),
        }


def _options_in_force(config: ScorerConfig) -> dict[str, Any]:
    """Options of the values that these values depend on, each as it is in force."""
    own = config.estimator
    read = {n: v for n, v in asdict(config).items() if own in READ_BY.get(n, [own])}
    for name in (
        "preconditioner",
        "precondition_after",
        "damping",
    ):  # of no consequence for the values
        read.pop(name, None)
    if config.estimator == WALK:  # all that trains walks
        read |= {"layers": "all", "parameters": "all"}
        read["walk_learning_rate"] = config.walk_rate
    return read


def prepare_job(options: ScoreOptions) -> Job:
    """Read everything, and see that it can be used; nothing is written.

    Raises:
        AlphaTokenError: wrong input, with what and where.
    """
    _check_walk(options)
    corpus, validation, fisher = prepare_rows(options)
    reading = Tracker("Reading rows", corpus.source.rows, not options.quiet)
    survey = corpus.survey(reading.report)
    survey.counts["validation"] = len(validation)
    if options.rows in ("mean", "sum"):
        _require_json(corpus.source)
    job = _job(options, corpus, validation, fisher, survey)
    for query in job.validation if options.query and not options.quiet else ():
        print(read_as(query), file=sys.stderr)
    return job


def _check_walk(options: ScoreOptions) -> None:
    """Refuse what has no meaning along a walk, and a second model that nothing else reads."""
    if options.estimator != "walk":
        if options.reference is not None:
            raise ConfigError(
                "--reference is read by --value walk alone",
                got=f"--estimator {options.estimator}",
                why="the others are inner products with a direction of the model itself",
                remedy="--value walk, or --validation_file in its place",
            )
        return
    if options.fisher_file is not None:
        raise ConfigError(
            "a walk has no stability side",
            got=f"--fisher_file {options.fisher_file}, --value walk",
            why="it is steps on the validation rows, and the Fisher would take no part",
            remedy="leave --fisher_file out, or --value paper",
        )
    if len(options.query) > 1:
        raise ConfigError(
            "a walk leads to one query",
            got=f"{len(options.query)} of --query, --value walk",
            why="its steps are on all of them together, and its values have no part of each",
            remedy="one --query, or --value paper",
        )


def _require_json(source: RowSource) -> None:
    """Check before the work that every record that can be read can be written as JSON."""
    for row in source.read():
        if isinstance(row.record, DataError):
            continue
        try:
            json.dumps(row.record)
        except TypeError as error:
            raise DataError(
                "a row cannot be written as JSON",
                got=f"{row.place}: {error}",
                remedy="turn dates, decimals and bytes into text first",
            ) from None


def prepare_rows(options: ScoreOptions) -> tuple[Corpus, list[Row], FisherDrift | None]:
    """Rows to value; validation rows, of their own file or drawn from them; Fisher of stability.

    Raises:
        AlphaTokenError: wrong input, with what and where.
    """
    refuse_one_file(options.train_file, {"--validation_file": options.validation_file})
    corpus, fisher = _corpus(options, find_source(options.train_file).limited(options.train_limit))
    if options.reference is not None:
        _check_vocabulary(options, options.reference)
    validation, drawn = _validation_rows(options), frozenset[int]()
    if not (options.reference or options.query or options.validation_file):
        validation = draw_rows(corpus, options.validation_rows or 0, options.seed)
        drawn = frozenset(row.index for row in validation)
    # Of a query the rows that say the same are the answer that is looked for.
    keys = frozenset[str]() if options.query else corpus.keys_of(validation)
    return replace(corpus, drawn=drawn, validation=keys), validation, fisher


def _corpus(options: ScoreOptions, source: Any) -> tuple[Corpus, FisherDrift | None]:
    tokenizer, file = options.tokenizer(), options.fisher_file
    fisher = None if file is None else FisherDrift.load(file)
    corpus = Corpus(
        source,
        options.fields,
        tokenizer,
        options.within(options.how, options.layers),
        fisher=frozenset(() if fisher is None else fisher.metadata.get("row_keys", ())),
        leak_key=options.leak_key,
    )
    return corpus, fisher


def _validation_rows(options: ScoreOptions) -> list[Row]:
    if options.validation_file is not None:
        # Held-out rows may have another form: a named column is read where a row has it.
        return options.read_rows(options.validation_file, optional=True)
    # None where they are drawn from the training rows, or a second model stands in their place.
    return query_rows(options.query, options.fields)


def _job(
    options: ScoreOptions,
    corpus: Corpus,
    rows: list[Row],
    fisher: FisherDrift | None,
    survey: CorpusSurvey | None = None,
) -> Job:
    if options.query:
        validation, encoded = encode_queries(rows, corpus.tokenizer, corpus.how)
    else:
        encode = encode_rows if options.reference else partial(encode_some, what="validation")
        validation, encoded = encode(rows, corpus.tokenizer, corpus.how)
    model, path = options.model(), options.reference
    if path is None:
        require_trained_layers(model)
    reference = None if path is None else options.other(path).model()
    return Job(options, corpus, validation, encoded, fisher, model, survey, reference)


def require_trained_layers(model: nn.Module) -> None:
    """Check that a matrix of the decoder's layers trains, as none does of quantised weights.

    Raises:
        ConfigError: none does; a walk would move embeddings and norms alone.
    """
    layers = find_adapter(model).layers()
    if not any(p.requires_grad and p.ndim > 1 for layer in layers for p in layer.parameters()):
        raise ConfigError(
            "no matrix of the model's layers trains",
            got=f"{type(model).__name__}, {len(layers)} layers",
            why="quantised weights take no step, and values would be over embeddings and norms "
            "alone",
            remedy="--adapter FOLDER of a LoRA adapter on it, or the model without quantisation",
        )


def _check_vocabulary(options: ScoreOptions, reference: str) -> None:
    own, other = (one.tokenizer().get_vocab() for one in (options, options.other(reference)))
    if own != other:
        differing = [t for t in {**own, **other} if own.get(t) != other.get(t)]
        raise ConfigError(
            "the reference model has another vocabulary",
            got=f"--reference {reference}: {len(differing)} tokens differ, such as "
            f"{differing[0]!r}",
            why="losses of different tokens would be subtracted",
            remedy="a checkpoint of the same model",
        )


def _default_block_size(rows: int) -> int:
    """Rows a file: a multiple of 64, so that there are about a thousand files.

    >>> [_default_block_size(rows) for rows in (20, 100_000, 10_000_000)]
    [64, 128, 9792]
    """
    return max(64, -(-rows // 1024 // 64) * 64)


def save_job(job: Job) -> None:
    """Write down what another process needs to value the same rows the same way."""
    document = {
        "settings": job.settings,
        "source": asdict(job.corpus.source),
        "drawn": sorted(job.corpus.drawn),
        "held": sorted(job.corpus.validation),
    }
    path = job.options.folder / "job" / "job.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, document, default=str)


def load_job(options: ScoreOptions) -> Job:
    """The job that was saved in the output folder, in another process.

    Raises:
        DataError: there is none, or its files changed. ConfigError: it is another one.
    """
    document = read_run(options.folder / "job" / "job.json")
    corpus, fisher = _corpus(options, source_of(document["source"]))
    drawn = document["drawn"]
    keys = frozenset(document["held"])
    corpus = replace(corpus, drawn=frozenset(drawn), validation=keys)
    rows = (corpus.row(index) for index in drawn)
    validation = _validation_rows(options) or [row for row in rows if isinstance(row, Row)]
    job = _job(options, corpus, validation, fisher)
    refuse_changes(
        changed_settings(document["settings"], job.settings),
        what="this process does not have what the job was made with",
        why="its values would not be those of the other processes",
        remedy="the same model, files and options on every machine",
    )
    return job
