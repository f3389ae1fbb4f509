"""Losses on held-out rows and pairs: means over all labelled tokens of a file, in nats."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alphatoken.data import (
    EncodeOptions,
    Example,
    Fields,
    Pair,
    Row,
    batches,
    encode_rows,
    read_pairs,
    read_rows,
)
from alphatoken.data.markers import require_one_form
from alphatoken.errors import DataError, NumericalError
from alphatoken.model.batch import label_mask
from alphatoken.model.forward import evaluation_mode, response_losses
from alphatoken.model.loading import Limits
from alphatoken.model.protocol import find_adapter
from alphatoken_lab.measure.measures import Measures

Rows = Mapping[str, list[Row] | list[Pair]]
"""Rows or pairs of each file as they were read, by what the file is for."""

PairExamples = tuple[list[Example], list[Example]]
"""Chosen and rejected, pair by pair."""

Encoded = Mapping[str, list[Example] | PairExamples]
"""The same as tokens."""

_log = logging.getLogger("alphatoken.data")


# --- rows ---------------------------------------------------------------------------------------


def read_files(measures: Measures, command: str, fields: Fields | None = None) -> Rows:
    """The rows of every file, without a tokenizer: before a model is loaded or trained.

    Args:
        measures: what is asked for.
        command: "sft" or "dpo": what target rows are.
        fields: names of columns, where they are not among the known ones.

    Raises:
        DataError: a file cannot be read, a row is none, or no row has a response.
    """
    every: dict[str, list[Row] | list[Pair]] = {}
    for name, path in measures.files.items():
        if command == "dpo" and name != "retention":
            every[name] = read_pairs(path, fields=fields)
            continue
        every[name] = rows = read_rows(path, fields=fields)
        if not any(row.response.strip() for row in rows):
            raise DataError(
                f"{name}_file has no response to measure",
                got=path,
                remedy="rows of which one at least has a response",
            )
    return every


def encode_files(rows: Rows, measures: Measures, tokenizer: Any, limits: Limits) -> Encoded:
    """The rows of every file as tokens; says how many are not measured, or not to their end.

    The model need not be loaded.

    Raises:
        ConfigError: ``max_length`` is more than the model allows. DataError: a row cannot be
            written as tokens, or none has a response; the message names it.
    """
    how = EncodeOptions(
        max_length=limits.length(measures.max_length),
        on_empty="skip",
        chat_template=measures.chat,
        vocabulary=limits.tokens,
    )
    encoded = dict[str, list[Example] | PairExamples]()
    for name, some in rows.items():
        encoded[name] = encode_file(measures.files[name], some, tokenizer, how)
    return encoded


def encode_file(
    path: str, rows: Sequence[Row] | Sequence[Pair], tokenizer: Any, how: EncodeOptions
) -> list[Example] | PairExamples:
    """Rows of one file with their labels; of pairs both sides, or neither where one is empty.

    Raises:
        DataError: none is left; as of ``encode_rows``.
    """
    pairs = [pair for pair in rows if isinstance(pair, Pair)]
    sides = [[row for row in rows if isinstance(row, Row)]]
    if pairs:
        how = replace(how, turns="last")
        sides = [
            [Row(i, p.place, (*p.prompt, *getattr(p, side))) for i, p in enumerate(pairs)]
            for side in ("chosen", "rejected")
        ]
        for both in zip(*sides, strict=True):
            require_one_form(both, tokenizer)
    encoded = [encode_rows(side, tokenizer, how) for side in sides]
    by_row = [{example.row.index: example for example in examples} for examples, _ in encoded]
    kept = [index for index in by_row[0] if all(index in side for side in by_row)]
    if not kept:
        what = "pair" if pairs else "row"
        raise DataError(
            f"no {what} has a response to measure",
            got=f"{path}, at most {how.max_length} tokens" if how.max_length else path,
            remedy=f"a {what} whose response is not empty and lies within the length (max_length)",
        )
    cut = sum(report.truncated_rows for _, report in encoded)
    notes = {
        f"{len(rows) - len(kept)} of {len(rows)} have no response within the length and are not "
        "measured": len(rows) - len(kept),
        f"{cut} sequences are cut at the length": cut,
    }
    if any(notes.values()):
        text = "; ".join(note for note, number in notes.items() if number)
        _log.warning("%s: %s", Path(path).name, text)
    first, *second = ([side[index] for index in kept] for side in by_row)
    return (first, second[0]) if second else first


# --- losses -------------------------------------------------------------------------------------


def response_log_probs(
    model: nn.Module, examples: Sequence[Example], batch_size: int = 16
) -> tuple[Tensor, Tensor]:
    """Log-probability of each example's labelled tokens, summed, and their number.

    Both (n,), float64, on the CPU.

    Raises:
        NumericalError: a sum is not finite; names the row.
    """
    device, adapter = next(model.parameters()).device, find_adapter(model)
    # Rows of like lengths beside each other: little of a batch is padding.
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].input_ids))
    sums, counts = torch.zeros(len(examples)).double(), torch.zeros(len(examples)).double()
    with evaluation_mode(model), torch.no_grad():
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            (batch,) = batches([examples[i] for i in chosen], batch_size)
            labels = batch.pop("labels").to(device)
            inputs = {name: part.to(device) for name, part in batch.items()}
            losses = response_losses(adapter, inputs, labels)
            sums[chosen] = -losses.double().sum(1).cpu()
            counts[chosen] = label_mask(labels).sum(1).double().cpu()
    if not bool(torch.isfinite(sums).all()):
        row = examples[int((~torch.isfinite(sums)).nonzero()[0])].row
        raise NumericalError("a measured loss is not finite", got=row.place)
    return sums, counts


Each = dict[str, list[float]]
"""Figures of each row, or of each pair: ``loss`` with ``tokens``, or ``margin``."""


def row_losses(
    model: nn.Module,
    rows: list[Example] | PairExamples,
    batch_size: int,
    start: Callable[[], nn.Module] | None = None,
    beta: float = 0.1,
) -> Each:
    """Loss of each row with its tokens; of pairs DPO's margin against the model before training.

    The margin is s = beta (log-ratio of chosen - log-ratio of rejected), no token masked.

    Raises:
        NumericalError: a loss is not finite.
    """
    if not isinstance(rows, tuple):
        sums, counts = response_log_probs(model, rows, batch_size)
        return {"loss": (-sums / counts).tolist(), "tokens": counts.tolist()}
    assert start is not None, "pairs are measured against the model before training"
    chosen, rejected = (
        response_log_probs(model, side, batch_size)[0]
        - response_log_probs(start(), side, batch_size)[0]
        for side in rows
    )
    return {"margin": (beta * (chosen - rejected)).tolist()}


def summary(each: Each) -> dict[str, float]:
    """Mean of -log p over all labelled tokens of all rows together; of pairs DPO's figures.

    ``loss``: mean of -log sigma(s); ``accuracy``: percentage of pairs with s > 0, ties counted
    half; ``margin``: mean of s.
    """
    if "margin" not in each:
        loss, tokens = torch.tensor([each["loss"], each["tokens"]], dtype=torch.float64)
        return {"loss": float((loss * tokens).sum() / tokens.sum())}
    logit = torch.tensor(each["margin"], dtype=torch.float64)
    right = (logit > 0).double() + 0.5 * (logit == 0).double()
    return {
        "loss": float(-F.logsigmoid(logit).mean()),
        "accuracy": float(100 * right.mean()),
        "margin": float(logit.mean()),
    }
