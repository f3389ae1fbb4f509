"""The work of ``alphatoken fisher``: fit the Fisher of the reference model and save it."""

from __future__ import annotations

import random
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from alphatoken import fit_fisher
from alphatoken.cli.fisher import FisherOptions
from alphatoken.data import EncodeOptions, Row, collate, leak_keys
from alphatoken.data.encode import about_encoding, prompt_example
from alphatoken.errors import DataError
from alphatoken.model.choice import read_layers
from alphatoken.score.job import encode_some
from alphatoken.support.resume import check_output_file, require_writable


def run(options: FisherOptions) -> None:
    """Fit on the prompts of ``data`` and write ``output_file``, whole or not at all.

    Raises:
        AlphaTokenError: wrong input, with what and where.
    """
    layers = read_layers(options.layers)
    inputs = (options.train_file, options.checkpoint)
    check_output_file(options.output_file, inputs, replace=options.overwrite_output)
    if options.checkpoint is not None:
        require_writable(Path(options.checkpoint).parent, "--checkpoint")
    tokenizer, how = options.tokenizer(), options.within(options.how, options.layers)
    prompt_only = options.labels == "sequence"  # the model writes the responses
    rows = options.read_rows(options.train_file, limit=options.train_limit, prompt_only=prompt_only)
    random.Random(options.seed).shuffle(rows)  # fewer samples than rows: any of them, not the first
    read_prompts = _sequences if options.labels == "token" else _prompts
    prompts, used, notes = read_prompts(rows, tokenizer, how)
    for note in () if options.quiet else notes:
        print(f"note: {note}", file=sys.stderr)
    model = options.model()
    fisher = fit_fisher(
        model,
        prompts,
        samples=options.samples,
        layers=layers,
        parameters=options.parameters,
        structure=options.structure,
        labels=options.labels,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        batch_size=options.per_device_train_batch_size,
        checkpoint=options.checkpoint,
        progress=not options.quiet,
    )
    used = used[: options.samples]
    # The file's metadata holds digests of the rows, by which alphatoken score keeps them out of the
    # training rows.
    keys = sorted({key for row in used for key in leak_keys(row)})
    fisher = replace(fisher, metadata={**fisher.metadata, "row_keys": keys})
    fisher.save(options.output_file)
    if options.checkpoint is not None:
        Path(options.checkpoint).unlink(missing_ok=True)  # not before its result is on disk
    print(f"Fisher of {options.samples} samples on {len(used)} prompts: {options.output_file}")
    words = ["--model_name_or_path", options.model_name_or_path]
    words += ["--fisher_file", options.output_file, "--retention", options.structure]
    print(f"next: alphatoken sft {shlex.join(words)} --train_file ROWS --validation_file TRUSTED")


Prompts = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
Read = tuple[Prompts, list[Row], list[str]]
"""Prompts for the fit, their rows, and the fate of the other rows."""


def _prompts(rows: Sequence[Row], tokenizer: Any, how: EncodeOptions) -> Read:
    """Prompts that leave room for at least one new token."""
    prompts, used, long = [], [], 0
    bad, counts = dict[int, DataError](), Counter[str]()
    for row in rows:
        try:
            prompt = prompt_example(row, tokenizer, how)
        except DataError as error:
            bad[row.index] = error
            continue
        counts.update(prompt.notes)
        if how.max_length is None or len(prompt.input_ids) < how.max_length:
            prompts.append(torch.tensor(prompt.input_ids))
            used.append(row)
        else:
            long += 1
    if bad and (how.on_bad_rows == "error" or not used):
        raise bad[min(bad)]  # the first of the file, whatever the order of drawing
    if not used:
        raise DataError(
            "no prompt leaves room for a response",
            got=f"{len(rows)} prompts, limit {how.max_length} tokens",
            remedy="give shorter prompts",
        )
    notes = [f"in {count} of {len(rows)} prompts {what}" for what, count in counts.items()]
    if long:
        notes.append(f"{long} prompts leave no room for a response")
    if bad:
        notes.append(f"{len(bad)} prompts cannot be written as tokens; the first: {bad[min(bad)]}")
    return prompts, used, notes


def _sequences(rows: Sequence[Row], tokenizer: Any, how: EncodeOptions) -> Read:
    # Whole sequences, whose response positions get resampled labels.
    examples, report = encode_some(rows, tokenizer, how, "Fisher")
    used = [example.row for example in examples]
    return collate(examples), used, about_encoding("Fisher", report)
