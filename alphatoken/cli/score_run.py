"""``alphatoken score``: read, value shard by shard, summarise, report."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from alphatoken import FisherDrift, Scorer, ScorerConfig, TokenValues, select_top
from alphatoken.cli.expecting import expect_scoring
from alphatoken.cli.folder import (
    collected_warnings,
    examples_digest,
    file_digest,
    read_manifest,
    refuse_foreign,
    same_settings,
)
from alphatoken.cli.notes import balance_by_layer, write_notes
from alphatoken.cli.reading import (
    encode_some,
    encoding,
    on_device,
    read_file,
    read_model,
    read_pools,
    read_tokenizer,
    scorer_config,
)
from alphatoken.cli.score import ScoreOptions
from alphatoken.data import (
    EncodeReport,
    Example,
    Pools,
    batches,
    token_texts,
)
from alphatoken.errors import ConfigError, DataError, ModelError
from alphatoken.fidelity.certificate import Certificate
from alphatoken.report import (
    COMPONENTS,
    ScoredExample,
    read_values,
    summarise,
    value_files,
    write_report,
    write_values,
)
from alphatoken.report.dataset import DatasetCounts, write_dataset
from alphatoken.report.page import missing_libraries
from alphatoken.select.masks import keep_count
from alphatoken.select.weights import token_weights
from alphatoken.support.progress import Tracker
from alphatoken.support.storage import weights_digest, write_json

__all__ = ["run"]


@dataclass(frozen=True)
class Job:
    """Everything that the values depend on, read and checked."""

    model: nn.Module
    tokenizer: Any
    fisher: FisherDrift | None
    pools: Pools
    train: list[Example]
    validation: list[Example]
    encoded: dict[str, EncodeReport]
    max_length: int | None


def run(options: ScoreOptions) -> None:
    """Value ``options.train_file`` and write everything to ``options.output_dir``.

    Raises:
        AlphaTokenError: wrong input, with what and where. KeyboardInterrupt: says how to go on.
    """
    start = time.monotonic()
    config = _config(options)
    keep_count(options.ratio, 1)  # its error now, not after the first batch
    _check_dataset(options)
    kind = _kind(options)
    job = _read(options)
    folder, settings = Path(options.output_dir), _settings(options, config, kind, job)
    _expect(folder, kind, config, job, options)
    _open(folder, settings, options)
    with collected_warnings() as warned:
        scorer = _scorer(job, config, options)
        _score(folder, kind, scorer, job, options)
        certificate = _certificate(scorer, job, options)
        balance = balance_by_layer(scorer)
    if options.scope == "dataset":
        _keep_over_all(folder, options.ratio)
    dataset = _dataset(folder, options)
    summary = summarise(
        _checked(folder, job),
        stability_weight=config.stability_weight,
        sample=options.report_rows,
        seed=options.seed,
    )
    notes = write_notes(job.pools, job.encoded, job.fisher, config, summary, warned)
    document = {
        "settings": settings,
        "pools": job.pools.counts,
        "encoded": {name: report.as_dict() for name, report in job.encoded.items()},
        "values": summary.as_dict(),
        "balance": balance,
        "certificate": None if certificate is None else str(certificate),
        "dataset": None if dataset is None else vars(dataset),
        "notes": notes,
        "seconds": round(time.monotonic() - start, 3),
    }
    write_json(folder / "summary.json", document, default=str)
    if options.report:
        shown = settings if certificate is None else settings | {"certificate": str(certificate)}
        title = f"Token values of {Path(options.train_file).name}"
        write_report(
            folder / "report.html",
            summary,
            title=title,
            settings=shown,
            notes=notes,
            balance=balance,
        )
    if certificate is not None:
        print(certificate)
    _say(options, folder, summary.response_tokens, summary.kept_tokens, notes)
    if certificate is not None and not certificate.passed:
        raise ModelError(
            "the values do not agree with the oracle",
            got="; ".join(str(check) for check in certificate.failures),
            why="what is wrong for the verified tokens is wrong for others too",
            remedy="do not use these values; report the certificate above, which is in "
            f"{folder / 'summary.json'} as well",
        )


def _kind(options: ScoreOptions) -> str:
    """The format of the value files; what is not installed is missed now, not after the work."""
    arrow = find_spec("pyarrow") is not None
    if (options.format == "parquet" or options.write_dataset) and not arrow:
        raise ConfigError("Parquet needs pyarrow", remedy="pip install pyarrow, or --format jsonl")
    if options.report and (missing := missing_libraries()):
        raise ConfigError(
            f"the HTML report needs {' and '.join(missing)}",
            remedy="pip install 'alphatoken[report]', or leave it out: --no_report",
        )
    return options.format or ("parquet" if arrow else "jsonl")


def _check_dataset(options: ScoreOptions) -> None:
    """See that the data set goes to a folder of its own, and that its options mean something."""
    if options.write_dataset is None:
        if options.weighting != "mask":
            raise ConfigError(
                "--weighting is of the data set that is written",
                got=f"--weighting {options.weighting}",
                remedy="--write_dataset FOLDER",
            )
        return
    folder, values = Path(options.write_dataset), Path(options.output_dir) / "values"
    if folder.resolve() in (values.resolve(), Path(options.output_dir).resolve()):
        raise ConfigError(
            "the data set needs a folder of its own",
            got=f"--write_dataset {folder}",
            why="the values of --output_dir lie there",
            remedy="another folder for --write_dataset",
        )
    foreign = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if foreign and not (folder / "dataset.json").is_file():
        raise ConfigError(
            "the data set's folder holds something else",
            got=str(folder),
            remedy="another folder for --write_dataset",
        )


def _config(options: ScoreOptions) -> ScorerConfig:
    return scorer_config(
        options,
        head_reduction=options.head_reduction,
        causal_position=options.causal_position,
        parameters=options.parameters,
        offload="stream" if options.offload else "none",
    )


def _read(options: ScoreOptions) -> Job:
    tokenizer = read_tokenizer(options)
    rows = read_file(options.train_file, options, limit=options.limit)
    read_fisher = FisherDrift.open if options.offload else FisherDrift.load
    fisher = None if options.fisher_file is None else read_fisher(options.fisher_file)
    pools = read_pools(rows, fisher, options)
    model = read_model(options)
    how = encoding(options, model)
    train, train_report = encode_some(pools.train, tokenizer, how, "training")
    validation, validation_report = encode_some(pools.validation, tokenizer, how, "validation")
    encoded = {"train": train_report, "validation": validation_report}
    return Job(model, tokenizer, fisher, pools, train, validation, encoded, how.max_length)


def _settings(options: ScoreOptions, config: ScorerConfig, kind: str, job: Job) -> dict[str, Any]:
    """What the values depend on, by name; a resumed run must have the same."""
    # There was a choice of contraction once; folders of that time, which say so, go on.
    valued = {"contraction": "projected", **asdict(config)}
    fisher = options.fisher_file
    del valued["preconditioner"], valued["offload"]  # of no consequence for the values
    del valued["stability_units"]  # always "plain" here, and unknown to folders of earlier versions
    return {
        "model": options.model_name_or_path,
        "train": options.train_file,
        "validation": options.validation_file
        or f"{options.validation_rows} rows of the training file",
        "fisher": options.fisher_file or "none",
        **valued,
        "layers": config.layers if isinstance(config.layers, (int, str)) else list(config.layers),
        "ratio": options.ratio,
        "scope": options.scope,
        "batch_size": options.batch_size,
        "shard_size": options.shard_size,
        "max_length": job.max_length,
        "dtype": str(next(job.model.parameters()).dtype).removeprefix("torch."),
        "format": kind,
        "seed": options.seed,
        "row_format": job.encoded["train"].format,
        "model_sha256": weights_digest(job.model),
        "fisher_sha256": "none" if fisher is None else file_digest(fisher),
        "train_sha256": examples_digest(job.train),
        "validation_sha256": examples_digest(job.validation),
    }


def _open(folder: Path, settings: dict[str, Any], options: ScoreOptions) -> None:
    """Make the folder ready: a new run, an earlier one to continue, or one to replace."""
    manifest = folder / "run.json"
    refuse_foreign(manifest, options, [folder / "values"])
    if options.overwrite_output and manifest.exists():
        manifest.unlink()
        shutil.rmtree(folder / "values", ignore_errors=True)
        for name in ("summary.json", "report.html"):
            (folder / name).unlink(missing_ok=True)
    if manifest.exists():
        same_settings(read_manifest(manifest)["settings"], settings)
    (folder / "values").mkdir(parents=True, exist_ok=True)
    for leftover in (folder / "values").glob(".part-*.tmp"):  # of a process that was killed
        leftover.unlink()
    if not manifest.exists():
        write_json(manifest, {"settings": settings}, default=str)


def _expect(folder: Path, kind: str, config: ScorerConfig, job: Job, options: ScoreOptions) -> None:
    """Say what the rows that no finished file holds will take; nothing is written before."""
    left = [
        example
        for number, start in enumerate(range(0, len(job.train), options.shard_size))
        if not (options.resume and _part(folder, number, kind).exists())
        for example in job.train[start : start + options.shard_size]
    ]
    if left:
        expect_scoring(
            job.model,
            config,
            left,
            job.validation,
            job.fisher,
            batch_size=options.batch_size,
            check=options.memory_check,
            quiet=options.quiet,
        )


def _part(folder: Path, number: int, kind: str) -> Path:
    return folder / "values" / f"part-{number:05d}.{kind}"


def _scorer(job: Job, config: ScorerConfig, options: ScoreOptions) -> Scorer:
    held = [on_device(batch, job.model) for batch in batches(job.validation, options.batch_size)]
    return Scorer(job.model, validation=held, retention=job.fisher, config=config)


def _score(folder: Path, kind: str, scorer: Scorer, job: Job, options: ScoreOptions) -> None:
    """Value what no finished file holds yet, file by file."""
    size, total = options.shard_size, len(job.train)
    tracker = Tracker("Scoring", total, not options.quiet)
    done = 0
    try:
        for number, start in enumerate(range(0, total, size)):
            shard = job.train[start : start + size]
            path = _part(folder, number, kind)
            if path.exists():
                done += len(shard)
                tracker.resume(done)
                continue
            scored = []
            for example in _scored(shard, scorer, job, options):
                scored.append(example)
                if len(scored) % options.batch_size == 0 and done + len(scored) < total:
                    tracker.report(done + len(scored))
            write_values(path, scored)
            done += len(shard)
        tracker.report(total)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{done} of {total} rows are finished and kept; the same command with --resume "
            "continues after them"
        ) from None
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "out of memory", got=str(error)[:200], remedy="a smaller --batch_size or --max_length"
        ) from None


def _scored(
    shard: Sequence[Example], scorer: Scorer, job: Job, options: ScoreOptions
) -> Iterator[ScoredExample]:
    size = options.batch_size
    scope = "batch" if options.scope == "dataset" else options.scope
    for number, batch in enumerate(batches(shard, size)):
        values = scorer.score(on_device(batch, job.model))
        kept = select_top(values.total, values.mask, options.ratio, scope=scope)
        for index, example in enumerate(shard[number * size : (number + 1) * size]):
            yield _one(example, index, values, kept, job.tokenizer)


def _one(
    example: Example, index: int, values: TokenValues, kept: torch.Tensor, tokenizer: Any
) -> ScoredExample:
    length = len(example.input_ids)
    columns = {c.key: getattr(values, c.key) for c in COMPONENTS}
    return ScoredExample(
        row=example.row.index,
        place=example.row.place,
        tokens=[piece.text for piece in token_texts(tokenizer, example.input_ids)],
        ids=example.input_ids,
        labels=example.labels,
        kept=kept[index, :length].cpu().numpy(),
        values={
            key: column[index, :length].double().cpu().numpy()
            for key, column in columns.items()
            if column is not None
        },
    )


def _keep_over_all(folder: Path, ratio: float) -> None:
    """Rank all tokens of all files together and write the files again, each whole or not."""
    from dataclasses import replace

    totals, masks = [], []
    for example in read_values(folder / "values"):
        totals.append(example.values["total"])
        masks.append(example.response)
    everything = torch.from_numpy(np.concatenate(totals))[None]
    kept = select_top(everything, torch.from_numpy(np.concatenate(masks))[None], ratio)[0].numpy()
    cursor = 0
    for path in value_files(folder / "values"):
        examples = []
        for example in read_values(path):
            length = len(example.ids)
            examples.append(replace(example, kept=kept[cursor : cursor + length]))
            cursor += length
        write_values(path, examples)


def _dataset(folder: Path, options: ScoreOptions) -> DatasetCounts | None:
    """The rows with their weights, for other trainers, where that is asked for."""
    if options.write_dataset is None:
        return None
    together = {"batch": options.batch_size, "sequence": 1, "dataset": None}[options.scope]
    counts = write_dataset(
        folder / "values",
        Path(options.write_dataset),
        partial(_weights, options),
        together=together,
    )
    if not options.quiet:
        print(
            f"{counts.rows} rows with {counts.trained_tokens} of {counts.response_tokens} response "
            f"tokens; {counts.rows_without_weight} rows without weight left out: "
            f"{options.write_dataset}",
            file=sys.stderr,
        )
    return counts


def _weights(options: ScoreOptions, examples: Sequence[ScoredExample]) -> list[Any]:
    """Of sequences that are ranked together: the mask that was stored, or soft weights."""
    if options.weighting == "mask":
        return [np.asarray(example.kept, np.float32) for example in examples]
    totals = [torch.from_numpy(example.values["total"]) for example in examples]
    masks = [torch.from_numpy(example.response) for example in examples]
    found = token_weights(
        pad_sequence(totals, batch_first=True),
        pad_sequence(masks, batch_first=True),
        options.ratio,
        weighting=options.weighting,
        generator=torch.Generator().manual_seed(hash((options.seed, examples[0].row)) % 2**63),
    )
    return [line[: len(one)].float().numpy() for line, one in zip(found, totals, strict=True)]


def _checked(folder: Path, job: Job) -> Iterator[ScoredExample]:
    """Read everything back, and see that it is what was to be valued, row by row."""
    expected = iter(job.train)
    for example in read_values(folder / "values"):
        due = next(expected, None)
        if due is None or (due.row.index, due.input_ids) != (example.row, list(example.ids)):
            raise DataError(
                "the value files do not hold the training rows",
                got=f"row {example.row} in {folder / 'values'}",
                remedy="score again with --overwrite_output",
            )
        yield example
    if next(expected, None) is not None:
        raise DataError("value files are missing", got=str(folder / "values"))


def _certificate(scorer: Scorer, job: Job, options: ScoreOptions) -> Certificate | None:
    if options.verify is None:
        return None
    batch = next(batches(job.train, min(options.batch_size, 2)))
    return scorer.verify(
        on_device(batch, job.model),
        tokens=options.verify,
        seed=options.seed,
        fisher_file=options.fisher_file,
        progress=not options.quiet,
    )


def _say(options: ScoreOptions, folder: Path, tokens: int, kept: int, notes: Sequence[str]) -> None:
    for note in () if options.quiet else notes:
        print(f"note: {note}", file=sys.stderr)
    report = "" if not options.report else f"; report: {folder / 'report.html'}"
    print(f"{tokens} response tokens valued, {kept} kept; values: {folder / 'values'}{report}")
