"""``python -m benchmarks.diagnoses.rounding``: does rounding to four bits turn the Fisher's sign?

The Fisher proxy takes the start for a minimum of the loss on what is to be retained. Weights that
were rounded lie beside their minimum, and any training repairs that first. So one start is compared
with the same start rounded (or, where it comes rounded, with the same start trained on text of
another kind), and from each a copy is fine-tuned on mathematics:

    spearman   of token values along the proxy with those along real retention rows, after
    moved      what the fine-tuning did to the loss on each set of these rows, nats a token

Needs $ALPHATOKEN_DATA and the models. Writes docs/rounding.json, case by case; cases that it holds
are not run again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from alphatoken.certificate.metrics import spearman
from alphatoken.data import EncodeOptions, Example, batches, encode_rows, read_rows
from alphatoken.data.rows import Fields, Row
from alphatoken.demo.models import SMOLLM2, models_folder
from alphatoken.fidelity.intervals import bootstrap
from alphatoken.fidelity.retention_scores import TunedModel, unit_fisher
from alphatoken.fidelity.subject import Subject, places_of
from alphatoken.fidelity.tuning import fine_tuned, usual_rate
from alphatoken.fidelity.valuing import values_along
from alphatoken.model.batch import read_batch
from alphatoken.model.protocol import find_adapter
from alphatoken.model.response_losses import response_losses
from alphatoken.support.progress import Tracker
from alphatoken.support.storage import write_json
from benchmarks.data import data_folder
from benchmarks.pages import load

BLOCK, STEPS = 32, {1: 15, 2: 7}
"""Weights that share a scale and an offset in GGUF's Q4_1, and steps between them: 4 and 3 bits."""

SMALL = "stories260K/transformers"

RETENTION = {
    "stories": ("tinystories/stories.jsonl", Fields(response="text")),
    "code": ("mbpp/train.jsonl", Fields("text", "code")),
    "instructions": ("dolly_hhrlhf/train.jsonl", Fields()),
    "sentences": ("hellaswag/validation.jsonl", Fields(response="query")),
}
SIZES = {
    "small": {"rows": 16, "train": 64, "length": 256, "steps": 40, "batch": 8, "samples": 48},
    "smollm2": {"rows": 4, "train": 16, "length": 96, "steps": 8, "batch": 4, "samples": 12},
}
"""Retention rows a set, training rows, tokens a row, AdamW steps, rows a step, Fisher samples."""

CASES: dict[str, tuple[str, int, int, int]] = {
    **{
        f"small, {said}, draw {draw}": ("small", draw, 0, bits)
        for draw in range(3)
        for said, bits in (
            ("as it is", 0),
            ("rounded to four bits", 1),
            ("rounded to three bits", 2),
        )
    },
    "smollm2, as it comes": ("smollm2", 0, 0, 0),
    "smollm2, trained before": ("smollm2", 0, 16, 0),
    "smollm2, trained before, rounded again": ("smollm2", 0, 16, 1),
}
"""Model, draw of rows, steps on dialogues before, and how coarsely it is rounded then (0: not)."""


def rounded(weight: Tensor, steps: int) -> Tensor:
    """The weight as blocks of 32 that each know ``steps + 1`` evenly spaced numbers."""
    blocks = weight.reshape(-1, BLOCK)
    low, high = blocks.aminmax(dim=1, keepdim=True)
    scale = (high - low).div(steps).clamp_min(torch.finfo(torch.float32).tiny)
    return ((blocks - low).div(scale).round() * scale + low).reshape(weight.shape)


@torch.no_grad()
def round_matrices(model: nn.Module, steps: int) -> None:
    """Round every matrix, as a Q4_1 file holds them; vectors (norms) stay."""
    for weight in model.parameters():
        if weight.dim() == 2 and weight.shape[1] % BLOCK == 0:
            weight.copy_(rounded(weight, steps))


def dialogues(limit: int) -> list[Row]:
    """Last answers of dialogues: of another kind than the rows tuned on and those retained."""
    file = data_folder() / "hh_rlhf/train.jsonl"
    return read_rows(file, fields=Fields(response="chosen"), limit=limit)


def mean_loss(model: nn.Module, rows: Sequence[Example]) -> float:
    """Nats a response token."""
    adapter, total, tokens = find_adapter(model), 0.0, 0
    for batch in map(read_batch, batches(rows, 8)):
        with torch.no_grad():
            total += float(response_losses(adapter, batch.inputs, batch.labels).sum())
        tokens += batch.response_tokens
    return total / tokens


@dataclass(frozen=True)
class Rows:
    """What a case reads: rows tuned on, prompts of the Fisher, and what is to be retained."""

    train: list[Example]
    prompts: list[Example]
    retention: dict[str, list[Example]]
    neutral: list[Example]

    @classmethod
    def drawn(cls, key: str, draw: int, tokenizer: Any) -> Rows:
        """The draw of this number: no two draws share a row."""
        size, data = SIZES[key], data_folder()
        options = EncodeOptions(max_length=size["length"], on_empty="skip")

        def encoded(rows: list[Row], each: int, start: int = 0) -> list[Example]:
            return encode_rows(rows, tokenizer, options)[0][start : start + each]

        each, twice = size["rows"], 2 * size["train"]
        kept = {
            name: encoded(read_rows(data / file, fields=fields, limit=400), each, draw * each)
            for name, (file, fields) in RETENTION.items()
        }
        train = encoded(read_rows(data / "gsm8k/train.jsonl", limit=600), twice, draw * twice)
        return cls(train[::2], train[1::2], kept, encoded(dialogues(400), 96))

    @property
    def held(self) -> list[Example]:
        """All rows of what is to be retained."""
        return [row for rows in self.retention.values() for row in rows]


def measured(name: str) -> dict[str, Any]:
    """One case: what the fine-tuning moved, and how the proxies rank."""
    key, draw, before, coarse = CASES[name]
    size = SIZES[key]
    small = key == "small"
    folder = data_folder() / SMALL if small else models_folder() / SMOLLM2.name
    rows = Rows.drawn(key, draw, AutoTokenizer.from_pretrained(folder))
    start = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if before:
        start = tuned(start, list(batches(rows.neutral, size["batch"])), before, draw)
    exact = losses(start, rows)
    if coarse:
        round_matrices(start, STEPS[coarse])
    first = losses(start, rows)
    subject = Subject(
        start,
        rows.train,
        rows.prompts[:4],
        retention=rows.retention,
        prompts=rows.prompts,
        batch_size=size["batch"],
        tuning_steps=size["steps"],
        fisher_samples=size["samples"],
        seed=draw,
    )
    last = losses(subject.before_and_after()[1], rows)
    return {
        "name": name,
        "model": key,
        "draw": draw,
        "steps before": before,
        **size,
        "rate": round(subject.rate, 6),
        "tokens valued": sum(row.response_tokens for row in subject.sample()),
        "rounding cost": {n: round(first[n] - exact[n], 4) for n in first},
        "loss at the start": {n: round(loss, 4) for n, loss in first.items()},
        "moved": {n: round(last[n] - first[n], 4) for n in first},
        "spearman": ranks(subject, rows),
    }


def tuned(model: nn.Module, on: list[dict[str, Tensor]], steps: int, seed: int) -> nn.Module:
    """The model after AdamW on these batches, at the rate of the diagnostics."""
    tracker = Tracker("steps", steps, False)
    return fine_tuned(model, on, steps=steps, rate=usual_rate(model), seed=seed, tracker=tracker)


def losses(model: nn.Module, rows: Rows) -> dict[str, float]:
    """Of each set that is to be retained."""
    return {name: mean_loss(model, found) for name, found in rows.retention.items()}


def ranks(subject: Subject, rows: Rows) -> dict[str, list[float]]:
    """Rank correlation with real retention rows, of proxies and of what the start knew of them."""
    before, after, _ = subject.before_and_after()
    held = subject.batches(rows.held)
    model = TunedModel(subject, after, held)
    named = dict(before.named_parameters(remove_duplicate=False))
    whole, start = model.along(held), TunedModel(subject, before, held).along(held)
    directions = {
        "oracle": whole,
        "start": start,
        "change": {name: part - start[name] for name, part in whole.items()},
        "diagonal": model.along(subject.fitted_fisher("diagonal")),
        "drift": model.along(unit_fisher({n: named[n] for n in model.scorer.parameters})),
    }
    rows = subject.sample()
    columns = values_along(subject, model.scorer, rows, list(directions.values()))
    scores, row = dict(zip(directions, columns.T, strict=True)), places_of(rows)[:, 0]
    compared = {
        "diagonal": ("diagonal", "oracle"),
        "drift": ("drift", "oracle"),
        "diagonal, with the change alone": ("diagonal", "change"),
        "start": ("start", "oracle"),
    }
    estimate = partial(bootstrap, spearman, groups=row, draws=200)
    found = {name: estimate(scores[a], scores[b]) for name, (a, b) in compared.items()}
    return {
        name: [round(float(end), 4) for end in (one.value, one.low, one.high)]
        for name, one in found.items()
    }


def main(words: Sequence[str] | None = None) -> int:
    """Run the cases that are not there yet."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.diagnoses.rounding", description=__doc__
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("docs/rounding.json"))
    given = parser.parse_args(words)
    for name in given.cases:
        found = load(given.out) if given.out.is_file() else {}
        if name not in found:
            case = measured(name)
            write_json(given.out, {**found, name: case})
            print(name, case["rounding cost"], case["moved"], case["spearman"], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
