"""What a trained model is measured by: losses on held-out rows, lm-eval tasks, a judge.

Losses are means over all labelled tokens of a file together, in nats; scores are percentages. A
task has either a loss or a score as its target, and one of them for retention; the overall figure
is the mean of the two, as the paper's (there of scores).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
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
    EncodeReport,
    Example,
    Fields,
    Pair,
    PairFields,
    Reading,
    Row,
    batches,
    encode_rows,
    pair_of,
    read_records,
    row_of,
)
from alphatoken.errors import ConfigError, DataError, NumericalError
from alphatoken.model.batch import label_mask
from alphatoken.model.modes import evaluation_mode
from alphatoken.model.protocol import find_adapter
from alphatoken.model.response_losses import response_losses
from alphatoken.support.progress import ProgressSink, Tracker
from alphatoken.train.loading import Limits, limits_of
from alphatoken_lab.compare.measures import Measures, Score
from alphatoken_lab.compare.scores import Prepared, prepare, scores

__all__ = [
    "check_rows",
    "encode_files",
    "mean_response_loss",
    "measure",
    "preference_losses",
    "read_examples",
    "read_pair_examples",
    "require_template",
    "response_log_probs",
]

PairExamples = tuple[list[Example], list[Example]]
"""Chosen and rejected, pair by pair."""

Encoded = Mapping[str, list[Example] | PairExamples]
"""Rows or pairs of each file, by what the file is for."""

_log = logging.getLogger("alphatoken.data")


# --- rows ---------------------------------------------------------------------------------------


def _files(measures: Measures) -> dict[str, str]:
    """Files of rows whose losses are measured, by what they are for, in the order of measuring."""
    named = {n: getattr(measures, f"{n}_file") for n in ("retention", "choosing", "target")}
    return {name: path for name, path in named.items() if path is not None}


def _has_pairs(name: str, command: str) -> bool:
    """Whether a file for this holds preference pairs, and not responses."""
    return command == "dpo" and name != "retention"


def check_rows(measures: Measures, command: str, fields: Fields | None = None) -> None:
    """Read every file of rows once, without a tokenizer: before a model is loaded or trained.

    Args:
        measures: what is asked for.
        command: "sft" or "dpo": what target rows are.
        fields: names of columns, where they are not among the known ones.

    Raises:
        DataError: a file cannot be read, a row is none, or no row has a response.
    """
    for name, path in _files(measures).items():
        answered, reading = False, Reading(Path(path).name)
        for i, (place, record) in enumerate(read_records(path)):
            if _has_pairs(name, command):
                pair_of(record, i, place, _of_pairs(fields), reading)
                answered = True
            else:
                row = row_of(record, i, place, fields, reading)
                answered = answered or bool(row.response.strip())
        reading.say()
        if not answered:
            raise DataError(
                f"{name}_file has no response to measure",
                got=path,
                remedy="rows of which one at least has a response",
            )


def _of_pairs(fields: Fields | None) -> PairFields | None:
    if fields is None:
        return None
    return PairFields(fields.prompt, unread=fields.unread, optional=fields.optional)


def encode_files(
    measures: Measures,
    command: str,
    tokenizer: Any,
    limits: Limits,
    fields: Fields | None = None,
) -> Encoded:
    """The rows of every file as tokens; says how many are not measured, or not to their end.

    The model need not be loaded.

    Raises:
        ConfigError: ``max_length`` is more than the model allows. DataError: a row cannot be
            written as tokens, or none has a response; the message names it.
    """
    length = limits.length(measures.max_length)
    found: dict[str, list[Example] | PairExamples] = {}
    for name, path in _files(measures).items():
        read = read_pair_examples if _has_pairs(name, command) else read_examples
        found[name] = read(
            path,
            tokenizer,
            length,
            chat=measures.chat,
            vocabulary=limits.tokens,
            fields=fields,
        )
    return found


def _say_left_out(path: str | Path, left: int, rows: int, reports: Sequence[EncodeReport]) -> None:
    cut = sum(report.truncated_rows for report in reports)
    said = {
        f"{left} of {rows} have no response within the length and are not measured": left,
        f"{cut} sequences are cut at the length": cut,
    }
    if any(said.values()):
        text = "; ".join(one for one, number in said.items() if number)
        _log.warning("%s: %s", Path(path).name, text)


def read_examples(
    path: str | Path,
    tokenizer: Any,
    max_length: int | None = None,
    *,
    chat: bool = True,
    vocabulary: int | None = None,
    fields: Fields | None = None,
) -> list[Example]:
    """Rows of a file with their labels; of plain text (``text``) every token is labelled.

    Raises:
        DataError: the file cannot be read, or no row has a response.
    """
    records = enumerate(read_records(path))
    rows = [row_of(record, i, place, fields) for i, (place, record) in records]
    options = EncodeOptions(
        max_length=max_length, on_empty="skip", chat_template=chat, vocabulary=vocabulary
    )
    examples, report = encode_rows(rows, tokenizer, options)
    if not examples:
        raise _nothing_left("row", path, max_length)
    _say_left_out(path, report.skipped_empty, len(rows), [report])
    return examples


def read_pair_examples(
    path: str | Path,
    tokenizer: Any,
    max_length: int | None = None,
    *,
    chat: bool = True,
    vocabulary: int | None = None,
    fields: Fields | None = None,
) -> PairExamples:
    """Chosen and rejected rows of a file of preference pairs; both sides of a pair, or neither.

    Raises:
        DataError: the file cannot be read, or no pair fits.
    """
    of = _of_pairs(fields)
    pairs = [pair_of(record, i, place, of) for i, (place, record) in enumerate(read_records(path))]
    how = EncodeOptions(
        max_length=max_length, on_empty="skip", chat_template=chat, turns="last",
        vocabulary=vocabulary,
    )  # fmt: skip
    encoded = [_side(pairs, name, tokenizer, how) for name in ("chosen", "rejected")]
    sides = [{example.row.index: example for example in found} for found, _ in encoded]
    both = sorted(sides[0].keys() & sides[1].keys())
    if not both:
        raise _nothing_left("pair", path, max_length)
    _say_left_out(path, len(pairs) - len(both), len(pairs), [report for _, report in encoded])
    return [sides[0][i] for i in both], [sides[1][i] for i in both]


def _side(
    pairs: Sequence[Pair], name: str, tokenizer: Any, options: EncodeOptions
) -> tuple[list[Example], EncodeReport]:
    rows = [Row(i, p.place, (*p.prompt, *getattr(p, name))) for i, p in enumerate(pairs)]
    return encode_rows(rows, tokenizer, options)


def _nothing_left(what: str, path: str | Path, limit: int | None) -> DataError:
    return DataError(
        f"no {what} has a response to measure",
        got=f"{path}, at most {limit} tokens" if limit else str(path),
        remedy=f"a {what} whose response is not empty and lies within the length (max_length)",
    )


# --- losses -------------------------------------------------------------------------------------


def response_log_probs(
    model: nn.Module, examples: Sequence[Example], batch_size: int = 16
) -> tuple[Tensor, Tensor]:
    """Of each example: log-probability of its labelled tokens, summed, and their number.

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
    """Over all rows together."""
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
        encoded = encode_files(measures, command, tokenizer, limits)
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
