"""What a trained model is measured by: losses on held-out rows, lm-eval tasks, code, a judge.

Losses are means over all labelled tokens of a file together, in nats; scores are percentages. A
task has either a loss or a score as its target, and one of them for retention; the overall figure
is the mean of the two, as the paper's (there of scores).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alphatoken.compare.grid import Measures
from alphatoken.data import (
    EncodeOptions,
    Example,
    Fields,
    Pair,
    Row,
    batches,
    encode_rows,
    pair_of,
    read_records,
    text_or_row,
)
from alphatoken.errors import DataError, NumericalError
from alphatoken.model.batch import label_mask
from alphatoken.model.capture import evaluation_mode
from alphatoken.model.protocol import find_adapter
from alphatoken.model.response_losses import response_losses

__all__ = [
    "mean_response_loss",
    "measure",
    "preference_losses",
    "read_examples",
    "read_pair_examples",
    "response_log_probs",
]

PairExamples = tuple[list[Example], list[Example]]
"""Chosen and rejected, pair by pair."""


# --- rows ---------------------------------------------------------------------------------------


def read_examples(
    path: str | Path, tokenizer: Any, max_length: int | None = None, *, chat: bool = True
) -> list[Example]:
    """Rows of a file with their labels; of plain text (``text``) every token is labelled.

    Raises:
        DataError: the file cannot be read, or no row has a response.
    """
    records = enumerate(read_records(path))
    rows = [text_or_row(record, i, place, Fields()) for i, (place, record) in records]
    options = EncodeOptions(max_length=max_length, on_empty="skip", chat_template=chat)
    examples, _ = encode_rows(rows, tokenizer, options)
    if not examples:
        raise DataError("no row has a response to measure", got=str(path))
    return examples


def read_pair_examples(
    path: str | Path, tokenizer: Any, max_length: int | None = None, *, chat: bool = True
) -> PairExamples:
    """Chosen and rejected rows of a file of preference pairs; both sides of a pair, or neither.

    Raises:
        DataError: the file cannot be read, or no pair fits.
    """
    pairs = [pair_of(record, i, place) for i, (place, record) in enumerate(read_records(path))]
    sides = [_side(pairs, name, tokenizer, max_length, chat) for name in ("chosen", "rejected")]
    both = sorted(sides[0].keys() & sides[1].keys())
    if not both:
        raise DataError("no pair has two responses to measure", got=str(path))
    return [sides[0][i] for i in both], [sides[1][i] for i in both]


def _side(
    pairs: Sequence[Pair], name: str, tokenizer: Any, max_length: int | None, chat: bool
) -> dict[int, Example]:
    rows = [Row(i, p.place, (*p.prompt, *getattr(p, name))) for i, p in enumerate(pairs)]
    options = EncodeOptions(
        max_length=max_length, on_empty="skip", chat_template=chat, turns="last"
    )
    found, _ = encode_rows(rows, tokenizer, options)
    return {example.row.index: example for example in found}


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
    allow_code: bool = False,
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
        allow_code: execute generated code, in a sandbox.

    Returns:
        ``target``, ``retention``, ``overall``, ``unit`` ("loss": lower is better, or "score":
        percent), each figure under ``details``, and under ``rows`` the loss of each row (pair),
        in the file's order, with its tokens: what paired intervals are made of.
    """
    batch_size = measures.batch_size
    each: dict[str, Each] = {}
    for name in ("retention", "choosing", "target"):
        path = getattr(measures, f"{name}_file")
        if path is None:
            continue
        reading = (path, tokenizer, measures.max_length)
        if command == "sft" or name == "retention":
            rows = read_examples(*reading, chat=measures.chat)
            each[name] = _row_losses(model, rows, batch_size)
        else:
            pairs = read_pair_examples(*reading, chat=measures.chat)
            each[name] = _pair_losses(model, start(), pairs, beta, batch_size)
    details = {
        f"{name}_{figure}": value
        for name, found in each.items()
        for figure, value in _summary(found).items()
    }
    scores = _scores(model, tokenizer, measures, start, folder, allow_code)
    details |= {
        f"{group}/{name}": v for group, found in scores.items() for name, v in found.items()
    }
    return {**_headline(details, scores), "details": details, "rows": each}


def _scores(
    model: nn.Module,
    tokenizer: Any,
    measures: Measures,
    start: Callable[[], nn.Module],
    folder: Path | None,
    allow_code: bool,
) -> dict[str, dict[str, float]]:
    """Percentages by group and name."""
    found: dict[str, dict[str, float]] = {"target": {}, "retention": {}}
    tasks = {"target": measures.target_tasks, "retention": measures.retention_tasks}
    if any(tasks.values()):
        from alphatoken.compare.harness import task_scores

        for group, names in tasks.items():
            if names:
                found[group] |= task_scores(
                    model, tokenizer, names,
                    include_path=measures.task_path,
                    limit=measures.task_limit,
                    batch_size=measures.batch_size,
                )  # fmt: skip
    if measures.code_file is not None:
        from alphatoken.compare.code_tasks import pass_at_1

        found[measures.code_of]["code"] = pass_at_1(
            model, tokenizer, measures.code_file,
            allow=allow_code,
            max_new_tokens=measures.max_new_tokens,
            limit=measures.task_limit,
            folder=folder,
        )  # fmt: skip
    if measures.questions_file is not None and measures.judge is not None:
        from alphatoken.compare.judge import make_judge, win_rate_against

        found["target"]["win_rate"] = win_rate_against(
            model, start(), tokenizer, measures.questions_file, make_judge(measures.judge),
            max_new_tokens=measures.max_new_tokens,
            limit=measures.task_limit,
            folder=folder,
        )  # fmt: skip
    return found


def _headline(
    details: Mapping[str, float], scores: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Target, retention and their mean; the mean only where both are in one unit."""
    found: dict[str, Any] = {}
    units = {}
    for group in ("target", "retention"):
        by_score = list(scores[group].values())
        loss = details.get(f"{group}_loss")
        found[group] = fmean(by_score) if by_score else loss
        units[group] = "score" if by_score else "loss"
    same = found["retention"] is not None and units["target"] == units["retention"]
    found["overall"] = fmean([found["target"], found["retention"]]) if same else None
    return {**found, "unit": units["target"], "retention_unit": units["retention"]}
