"""Measures of a trained model: losses on held-out rows, lm-eval tasks, a judge.

Losses are means over all labelled tokens of a file together, in nats; scores are percentages. A
task has either a loss or a score as its target, and one of them for retention; the overall figure
is the mean of the two, as the paper's (there of scores).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from statistics import fmean
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
from alphatoken.errors import ConfigError, DataError, NumericalError
from alphatoken.model.batch import label_mask
from alphatoken.model.loading import Limits, limits_of
from alphatoken.model.modes import evaluation_mode
from alphatoken.model.protocol import find_adapter
from alphatoken.model.response_losses import response_losses
from alphatoken.support.progress import ProgressSink, Tracker
from alphatoken_lab.compare.measures import Measures, Score
from alphatoken_lab.compare.scores import Prepared, prepare, scores

__all__ = [
    "encode_file",
    "encode_files",
    "mean_response_loss",
    "measure",
    "preference_losses",
    "read_files",
    "require_template",
    "response_log_probs",
]

Rows = Mapping[str, list[Row] | list[Pair]]
"""Rows or pairs of each file as they were read, by what the file is for."""

PairExamples = tuple[list[Example], list[Example]]
"""Chosen and rejected, pair by pair."""

Encoded = Mapping[str, list[Example] | PairExamples]
"""The same as tokens."""

_log = logging.getLogger("alphatoken.data")


# --- rows ---------------------------------------------------------------------------------------


def _files(measures: Measures) -> dict[str, str]:
    """Files of rows whose losses are measured, by what they are for, in the order of measuring."""
    named = {n: getattr(measures, f"{n}_file") for n in ("retention", "choosing", "target")}
    return {name: path for name, path in named.items() if path is not None}


def read_files(measures: Measures, command: str, fields: Fields | None = None) -> Rows:
    """The rows of every file, without a tokenizer: before a model is loaded or trained.

    Args:
        measures: what is asked for.
        command: "sft" or "dpo": what target rows are.
        fields: names of columns, where they are not among the known ones.

    Raises:
        DataError: a file cannot be read, a row is none, or no row has a response.
    """
    found: dict[str, list[Row] | list[Pair]] = {}
    for name, path in _files(measures).items():
        if command == "dpo" and name != "retention":
            found[name] = read_pairs(path, fields=fields)
            continue
        found[name] = rows = read_rows(path, fields=fields)
        if not any(row.response.strip() for row in rows):
            raise DataError(
                f"{name}_file has no response to measure",
                got=path,
                remedy="rows of which one at least has a response",
            )
    return found


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
    files, found = _files(measures), dict[str, list[Example] | PairExamples]()
    for name, some in rows.items():
        found[name] = encode_file(files[name], some, tokenizer, how)
    return found


def encode_file(
    path: str, rows: Sequence[Row] | Sequence[Pair], tokenizer: Any, how: EncodeOptions
) -> list[Example] | PairExamples:
    """Rows of one file with their labels; of pairs both sides, or neither where one is empty.

    Raises:
        DataError: none is left; as of ``encode_rows``.
    """
    pairs = [pair for pair in rows if isinstance(pair, Pair)]
    given = [[row for row in rows if isinstance(row, Row)]]
    if pairs:
        how = replace(how, turns="last")
        given = [
            [Row(i, p.place, (*p.prompt, *getattr(p, side))) for i, p in enumerate(pairs)]
            for side in ("chosen", "rejected")
        ]
        for both in zip(*given, strict=True):
            require_one_form(both, tokenizer)
    encoded = [encode_rows(side, tokenizer, how) for side in given]
    sides = [{example.row.index: example for example in found} for found, _ in encoded]
    kept = [index for index in sides[0] if all(index in side for side in sides)]
    if not kept:
        what = "pair" if pairs else "row"
        raise DataError(
            f"no {what} has a response to measure",
            got=f"{path}, at most {how.max_length} tokens" if how.max_length else path,
            remedy=f"a {what} whose response is not empty and lies within the length (max_length)",
        )
    cut = sum(report.truncated_rows for _, report in encoded)
    said = {
        f"{len(rows) - len(kept)} of {len(rows)} have no response within the length and are not "
        "measured": len(rows) - len(kept),
        f"{cut} sequences are cut at the length": cut,
    }
    if any(said.values()):
        text = "; ".join(one for one, number in said.items() if number)
        _log.warning("%s: %s", Path(path).name, text)
    first, *second = ([side[index] for index in kept] for side in sides)
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


def mean_response_loss(
    model: nn.Module, examples: Sequence[Example], batch_size: int = 16
) -> float:
    """Mean of -log p over all labelled tokens of all rows together."""
    return _summary(_row_losses(model, examples, batch_size))["loss"]


def preference_losses(
    model: nn.Module,
    reference: nn.Module,
    pairs: PairExamples,
    *,
    beta: float = 0.1,
    batch_size: int = 16,
) -> dict[str, float]:
    """DPO's own figures on held-out pairs, no token masked.

    ``loss``: mean of -log sigma(s), s = beta (log-ratio of chosen - log-ratio of rejected);
    ``accuracy``: percentage of pairs with s > 0, ties counted half; ``margin``: mean of s.
    """
    return _summary(_pair_losses(model, reference, pairs, beta, batch_size))


Each = dict[str, list[float]]
"""Figures of each row, or of each pair: ``loss`` with ``tokens``, or ``margin``."""


def _row_losses(model: nn.Module, examples: Sequence[Example], batch_size: int) -> Each:
    sums, counts = response_log_probs(model, examples, batch_size)
    return {"loss": (-sums / counts).tolist(), "tokens": counts.tolist()}


def _pair_losses(
    model: nn.Module, reference: nn.Module, pairs: PairExamples, beta: float, batch_size: int
) -> Each:
    ratios = [
        response_log_probs(model, side, batch_size)[0]
        - response_log_probs(reference, side, batch_size)[0]
        for side in pairs
    ]
    return {"margin": (beta * (ratios[0] - ratios[1])).tolist()}


def _summary(each: Each) -> dict[str, float]:
    """Summary over all rows together."""
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


# --- everything that a cell is measured by ------------------------------------------------------


def measure(
    model: nn.Module,
    tokenizer: Any,
    measures: Measures,
    *,
    command: str,
    start: Callable[[], nn.Module],
    beta: float = 0.1,
    folder: Path | None = None,
    code_container: str | None = None,
    prepared: Prepared | None = None,
    encoded: Encoded | None = None,
    progress: bool | ProgressSink | None = False,
) -> dict[str, Any]:
    """All figures of one model.

    Args:
        model: to be measured.
        tokenizer: of the model.
        measures: what is asked for.
        command: "sft" or "dpo": what target rows are.
        start: loads the model before training, where something compares with it.
        beta: of DPO.
        folder: where answers that were generated are written.
        code_container: image in which generated code is executed, by lm-eval.
        prepared: what ``prepare`` read of the measures, where it was called before.
        encoded: of ``encode_files``, likewise.
        progress: as of :class:`alphatoken.support.progress.Tracker`; counts parts.

    Returns:
        ``target``, ``retention``, ``overall``, ``unit`` ("loss": lower is better, or "score":
        percent), each figure under ``details``, under ``settings`` what each score was measured
        with (shots, chat template, opponent, ...), and under ``rows`` the loss of each row (pair),
        in the file's order, with its tokens: what paired intervals are made of.
    """
    require_template(tokenizer, measures)
    ready = prepare(measures, code_container=code_container) if prepared is None else prepared
    before: Callable[[], nn.Module] = cache(start)
    batch_size = measures.batch_size
    if encoded is None:
        limits = Limits(None, None) if not _files(measures) else limits_of(model)
        encoded = encode_files(read_files(measures, command), measures, tokenizer, limits)
    parts = len(encoded) + len(ready.tasks) + len(ready.sets)
    finished = count(1)
    tracker = Tracker("measured", parts, progress)
    each: dict[str, Each] = {}
    for name, rows in encoded.items():
        if isinstance(rows, tuple):
            each[name] = _pair_losses(model, before(), rows, beta, batch_size)
        else:
            each[name] = _row_losses(model, rows, batch_size)
        tracker.report(next(finished))
    details = {
        f"{name}_{figure}": value
        for name, found in each.items()
        for figure, value in _summary(found).items()
    }
    by_group = scores(
        model, tokenizer, measures, ready, before,
        folder=folder, done=lambda: tracker.report(next(finished)),
    )  # fmt: skip
    settings = {}
    for group, found in by_group.items():
        for name, score in found.items():
            settings[f"{group}/{name}"] = dict(score.how)
            details[f"{group}/{name}"] = score.value
    return {
        **_headline(details, by_group), "details": details, "settings": settings, "rows": each
    }  # fmt: skip


def require_template(tokenizer: Any, measures: Measures) -> None:
    """Refuse ``task_chat`` where there is no template.

    Raises:
        ConfigError: likewise.
    """
    if measures.task_chat and getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "task_chat asks for a chat template, and the tokenizer has none",
            got=str(getattr(tokenizer, "name_or_path", "")),
            remedy="leave task_chat out, or chat_template.jinja in the model's folder",
        )


def _headline(
    details: Mapping[str, float], scores: Mapping[str, Mapping[str, Score]]
) -> dict[str, Any]:
    """Target, retention and their mean; the mean only where both are in one unit."""
    found: dict[str, Any] = {}
    units = {}
    for group in ("target", "retention"):
        by_score = [score.value for score in scores[group].values()]
        loss = details.get(f"{group}_loss")
        found[group] = fmean(by_score) if by_score else loss
        units[group] = "score" if by_score else "loss"
    same = found["retention"] is not None and units["target"] == units["retention"]
    found["overall"] = fmean([found["target"], found["retention"]]) if same else None
    return {**found, "unit": units["target"], "retention_unit": units["retention"]}
