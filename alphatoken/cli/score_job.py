"""What values depend on: read and checked once, sealed in the output folder, opened by any process.

OUT/run.json                 settings; the same at a resumed run
OUT/job/job.json             where the rows are, which of them are held out
OUT/job/gradient.safetensors G
OUT/job/blocks/00000.json    what became of the rows of each finished part
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from alphatoken import FisherDrift, Scorer, ScorerConfig
from alphatoken.cli.folder import examples_digest, file_digest, read_manifest
from alphatoken.cli.reading import (
    encode_some,
    encoded_row,
    encoding,
    fields_of,
    on_device,
    read_held_out,
    read_model,
    read_tokenizer,
    scorer_config,
)
from alphatoken.cli.score import ScoreOptions
from alphatoken.data import (
    EncodeOptions,
    EncodeReport,
    Example,
    Row,
    batches,
    leak_keys,
)
from alphatoken.data.corpus import BadRow, Corpus, draw_rows
from alphatoken.data.source import RowSource, find_source, source_of
from alphatoken.errors import ConfigError, DataError
from alphatoken.support.progress import Tracker
from alphatoken.support.storage import weights_digest, write_json

__all__ = [
    "Job",
    "block_facts",
    "gradient_file",
    "open_job",
    "prepare_job",
    "score_config",
    "seal_job",
]

_FILES = 1024
"""Files that the rows are spread over where nothing else is asked for."""

_LEAST = 64
"""Rows of a file, at least, where nothing else is asked for."""


@dataclass(frozen=True)
class Job:
    """Everything that the values depend on, read and checked.

    Attributes:
        options: of the command.
        config: what to compute.
        model: on its device.
        tokenizer: of the model.
        fisher: of the stability term.
        corpus: the rows.
        validation: encoded validation rows; ``encoded`` says what happened to them.
        how: rows become tokens.
        counts: of rows by what becomes of them; empty in a process that only values.
        block: rows of a value file, those that are left out included.
        settings: what the values depend on, by name.
    """

    options: ScoreOptions
    config: ScorerConfig
    model: nn.Module
    tokenizer: Any
    fisher: FisherDrift | None
    corpus: Corpus
    validation: list[Example]
    encoded: EncodeReport
    how: EncodeOptions
    counts: dict[str, int]
    block: int
    settings: dict[str, Any]

    @property
    def folder(self) -> Path:
        """Of the results."""
        return Path(self.options.output_dir)

    @property
    def kind(self) -> str:
        """Format of the value files."""
        return str(self.options.format)

    @property
    def digest(self) -> str:
        """Of the settings."""
        text = json.dumps(self.settings, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def blocks(self) -> range:
        """Numbers of the value files."""
        return range(-(-self.corpus.source.rows // self.block))

    def part(self, number: int) -> Path:
        """The value file of a block."""
        return self.folder / "values" / f"part-{number:05d}.{self.kind}"

    def missing(self) -> list[int]:
        """Blocks without a value file."""
        return [number for number in self.blocks if not self.part(number).exists()]

    def scorer(self) -> Scorer:
        """A scorer of its own validation rows; it builds G when it is first used."""
        size = self.options.batch_size
        held = [on_device(batch, self.model) for batch in batches(self.validation, size)]
        scorer = Scorer(self.model, validation=held, retention=self.fisher, config=self.config)
        scorer.pin("job")  # nothing is trained, so the weights need not be read to see it
        return scorer


def gradient_file(folder: Path) -> Path:
    """G of a sealed job."""
    return folder / "job" / "gradient.safetensors"


def block_facts(folder: Path, number: int) -> Path:
    """What became of the rows of a block."""
    return folder / "job" / "blocks" / f"{number:05d}.json"


def prepare_job(options: ScoreOptions) -> Job:
    """Read everything, and see that it can be used; nothing is written.

    Raises:
        AlphaTokenError: wrong input, with what and where.
    """
    Tracker("Counting rows", 0, False)  # what the heartbeat says meanwhile
    source = find_source(options.train_file).limited(options.limit)
    tokenizer = read_tokenizer(options)
    fisher = _fisher(options)
    corpus = _corpus(options, source, fisher)
    held = _held_out(corpus, options)
    corpus = replace(
        corpus,
        drawn=frozenset(row.index for row in held if options.validation_file is None),
        held=frozenset(key for row in held for key in leak_keys(row)),
    )
    reading = Tracker("Reading rows", source.rows, not options.quiet)
    how = encoding(options)
    look = partial(_becomes, tokenizer, how)
    counts = corpus.survey(reading.report, look) | {"validation": len(held)}
    _say_left_out(counts, options)
    job = _job(options, score_config(options), tokenizer, fisher, corpus, held, how)
    return replace(job, counts=counts, settings=_settings(job))


def _becomes(tokenizer: Any, how: EncodeOptions, row: Row) -> str | BadRow:
    """What the row becomes as tokens, by name."""
    found, report = encoded_row(row, tokenizer, how)
    if isinstance(found, BadRow):
        return found
    if found is not None:
        return "train"
    return "too_long" if report.skipped_long else "without_response"


def _say_left_out(counts: Mapping[str, int], options: ScoreOptions) -> None:
    """How many rows will not be valued for what they are, before the model is loaded."""
    said = {
        "bad_rows": "cannot be read or written as tokens",
        "too_long": "are longer than allowed",
        "without_response": "have no response within the length",
    }
    for kind, what in said.items():
        if counts.get(kind) and not options.quiet:
            print(f"note: {counts[kind]} training rows {what}: left out", file=sys.stderr)


def _corpus(options: ScoreOptions, source: RowSource, fisher: FisherDrift | None) -> Corpus:
    """Of which nothing is held out yet."""
    return Corpus(
        source,
        fields_of(options),
        fisher=frozenset(() if fisher is None else fisher.metadata.get("row_keys", ())),
        on_leak=options.on_leak,
        leak_key=options.leak_key,
        on_bad_rows=options.on_bad_rows,
    )


def _held_out(corpus: Corpus, options: ScoreOptions) -> list[Row]:
    """Validation rows: of their own file, those drawn before, or drawn now."""
    if options.validation_file is not None:
        return read_held_out(options.validation_file, options)
    if corpus.drawn:
        places = sorted(corpus.drawn)
        rows = (corpus.row(found) for i in places for found in corpus.source.read(i, i + 1))
        return [row for row in rows if isinstance(row, Row)]
    return draw_rows(corpus, options.validation_rows or 0, options.seed)


def _fisher(options: ScoreOptions) -> FisherDrift | None:
    read = FisherDrift.open if options.offload else FisherDrift.load
    return None if options.fisher_file is None else read(options.fisher_file)


def _job(
    options: ScoreOptions,
    config: ScorerConfig,
    tokenizer: Any,
    fisher: FisherDrift | None,
    corpus: Corpus,
    held: list[Row],
    how: EncodeOptions,
) -> Job:
    validation, encoded = encode_some(held, tokenizer, how, "validation")
    model = read_model(options)
    block = options.shard_size or _block(corpus.source.rows)
    return Job(
        options, config, model, tokenizer, fisher, corpus, validation, encoded, how, {}, block, {}
    )


def _block(rows: int) -> int:
    """Rows a file: a multiple of 64, so that there are about a thousand files.

    >>> [_block(rows) for rows in (20, 100_000, 10_000_000)]
    [64, 128, 9792]
    """
    return max(_LEAST, -(-rows // _FILES // _LEAST) * _LEAST)


def _settings(job: Job) -> dict[str, Any]:
    """What the values depend on, by the name of its flag; a resumed run must have the same."""
    options, config = job.options, job.config
    valued = asdict(config)
    del valued["preconditioner"], valued["offload"]  # of no consequence for the values
    del valued["stability_units"]  # always "plain" here
    layers = valued.pop("layers")
    fisher = options.fisher_file
    return {
        "model_name_or_path": options.model_name_or_path,
        "adapter": options.adapter,
        "train_file": options.train_file,
        "validation_file": options.validation_file
        or f"{options.validation_rows} rows of the training file",
        "fisher_file": fisher or "none",
        "score_layers": layers if isinstance(layers, (int, str)) else list(layers),
        "value_parameters": valued.pop("parameters"),
        **valued,
        "keep_ratio": options.ratio,
        "keep_scope": options.scope,
        "per_device_train_batch_size": options.batch_size,
        "shard_size": job.block,
        "max_length": job.how.max_length,
        "dtype": str(next(job.model.parameters()).dtype).removeprefix("torch."),
        "format": job.kind,
        "components": options.components,
        "leak_key": options.leak_key,
        "seed": options.seed,
        "row_format": job.encoded.format,
        "rows_read": asdict(job.corpus.fields) | _how(job.how),
        "model_sha256": weights_digest(job.model),
        "fisher_sha256": "none" if fisher is None else file_digest(fisher),
        "train_sha256": job.corpus.source.sha256,
        "validation_sha256": examples_digest(job.validation),
    }


def _how(how: EncodeOptions) -> dict[str, Any]:
    """How rows become tokens, but for what no finished value depends on."""
    free = ("max_length", "on_empty", "on_bad_rows")
    return {k: v for k, v in asdict(how).items() if k not in free}


def seal_job(job: Job) -> None:
    """Write down what another process needs to value the same rows the same way."""
    document = {
        "settings": job.settings,
        "source": job.corpus.source.as_dict(),
        "drawn": sorted(job.corpus.drawn),
        "held": sorted(job.corpus.held),
        "counts": job.counts,
    }
    block_facts(job.folder, 0).parent.mkdir(parents=True, exist_ok=True)
    write_json(job.folder / "job" / "job.json", document, default=str)


def open_job(options: ScoreOptions) -> Job:
    """The job that was sealed in the output folder, in another process.

    Raises:
        DataError: there is none, or its files changed. ConfigError: it is another one.
    """
    path = Path(options.output_dir) / "job" / "job.json"
    document = read_manifest(path)
    source = source_of(document["source"])
    if not source.rows:
        raise DataError("the job has no rows", got=str(path))
    fisher = _fisher(options)
    drawn, shared = frozenset(document["drawn"]), frozenset(document["held"])
    corpus = replace(_corpus(options, source, fisher), drawn=drawn, held=shared)
    held = _held_out(corpus, options)
    tokenizer, how = read_tokenizer(options), encoding(options)
    job = _job(options, score_config(options), tokenizer, fisher, corpus, held, how)
    due, found = document["settings"], json.loads(json.dumps(_settings(job), default=str))
    differing = [key for key in due if due[key] != found.get(key)]
    if differing:
        raise ConfigError(
            "this process does not have what the job was made with",
            got=f"{differing[0]}: {found.get(differing[0])!r}, not {due[differing[0]]!r}",
            why="its values would not be those of the other processes",
            remedy="the same model, files and options on every machine",
        )
    return replace(job, settings=due)


def score_config(options: ScoreOptions) -> ScorerConfig:
    """What to compute.

    Raises:
        ConfigError: options without a meaning.
    """
    return scorer_config(
        options,
        head_reduction=options.head_reduction,
        causal_position=options.causal_position,
        parameters=options.parameters,
        offload="stream" if options.offload else "none",
    )
