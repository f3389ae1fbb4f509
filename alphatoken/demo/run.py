"""The demo from beginning to end, and what it prints."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken.certificate.metrics import auc
from alphatoken.cli import main
from alphatoken.data import encode_rows, read_rows
from alphatoken.demo.model import fine_tune, make_model, make_tokenizer, pretrain
from alphatoken.demo.world import Exchange, draw_exchanges
from alphatoken.errors import AlphaTokenError
from alphatoken.report import ScoredExample, read_values
from alphatoken.support.storage import write_jsonl
from alphatoken.train.loading import no_progress_bar

__all__ = ["Result", "run_demo"]

SPOILED = 0.3
STABILITY_WEIGHT = 30.0
"""Lambda has no natural unit. Here 30 makes the two sides comparable soon after the start; the
default, 1.5, would leave all to adaptation, and the library would warn about it."""


@dataclass
class Result:
    """Measurements of the demo.

    ``area`` is the area under the ROC curve of "low value" as a sign of a spoiled token, by
    estimator: 1 finds all, 0.5 is chance.
    """

    area: dict[str, float] = field(default_factory=dict)
    report: Path = Path()
    seconds: float = 0.0


def run_demo(out: Path, *, scale: float = 1.0, seed: int = 0) -> Result:
    """Run everything and write to ``out``.

    Args:
        out: folder; an earlier demo in it is replaced.
        scale: factor on steps and rows; 1 takes about a minute on one core.
        seed: of all draws.

    Raises:
        AlphaTokenError: a command of the demo failed (its message was printed).
    """
    start, result = time.monotonic(), Result()
    for name in ("model", "model-now", "values", "values-label"):
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    print(f"writing to {out}/", flush=True)
    train = _write_world(out, scale, random.Random(seed))

    _step("1. a tiny decoder learns general text")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    loss = pretrain(model, tokenizer, steps=_scaled(400, scale), seed=seed)
    _save(model, tokenizer, out / "model")
    print(f"   loss {loss:.2f} after {time.monotonic() - start:.0f} s")

    _step("2. the Fisher of this model: what it would mind forgetting")
    _command(
        "fisher", "--model_name_or_path", out / "model",
        "--train_file", out / "fisher_prompts.jsonl",
        "--output_file", out / "fisher.safetensors", "--samples", _scaled(200, scale),
        "--response_column", "text", "--max_new_tokens", 48, "--quiet",
    )  # fmt: skip

    _step("3. a few steps of ordinary fine-tuning, so that the weights have moved")
    examples, _ = encode_rows(read_rows(out / "train.jsonl"), tokenizer)
    fine_tune(model, examples, steps=_scaled(15, scale), seed=seed)
    _save(model, tokenizer, out / "model-now")

    _step(f"4. the value of every response token ({SPOILED:.0%} of the words are spoiled)")
    for estimator, folder in (("alphatoken", "values"), ("label", "values-label")):
        _command(
            "score", "--model_name_or_path", out / "model-now", "--train_file", out / "train.jsonl",
            "--validation_file", out / "validation.jsonl",
            "--fisher_file", out / "fisher.safetensors",
            "--stability_weight", STABILITY_WEIGHT, "--estimator", estimator,
            "--output_dir", out / folder, "--per_device_train_batch_size", 16, "--quiet",
        )  # fmt: skip
        result.area[estimator] = _area(read_values(out / folder / "values"), train)
    result.report = out / "values" / "report.html"
    for estimator, area in result.area.items():
        print(f"   {estimator}: a low value finds the spoiled words with AUC {area:.2f}")

    result.seconds = time.monotonic() - start
    print(
        "   A check that the parts work: one seed, one toy world. On SmolLM2-135M-Instruct\n"
        "   (four-bit weights) a low value by the same estimator picked planted words\n"
        "   less often than a coin, and half of the tokens of clean rows\n"
        "   did worse than all of them: docs/should-i.md."
    )
    print(f"report: {result.report}   ({result.seconds:.0f} s in all)")
    return result


def _scaled(count: int, scale: float) -> int:
    return max(2, round(count * scale))


def _step(text: str) -> None:
    print(text, flush=True)


def _command(*arguments: object) -> None:
    """One command of the command line; its own message has been printed if it fails."""
    status = main([str(argument) for argument in arguments])
    if status:
        raise AlphaTokenError(f"alphatoken {arguments[0]} failed", got=f"exit status {status}")


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    with no_progress_bar():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _write_world(out: Path, scale: float, generator: random.Random) -> list[Exchange]:
    """The data files; returns the training exchanges, whose spoiled words are known."""
    validation = draw_exchanges(_scaled(96, scale), generator)
    train = draw_exchanges(_scaled(400, scale), generator, spoil=SPOILED, avoid=validation)
    for name, exchanges in (("validation", validation), ("train", train)):
        rows = [{"prompt": e.prompt, "response": " ".join(e.response)} for e in exchanges]
        write_jsonl(out / f"{name}.jsonl", rows)
    # Free-running text from the start token: what the model itself says is the Fisher's data.
    write_jsonl(out / "fisher_prompts.jsonl", [{"text": ""}])
    return train


def _area(scored: Iterable[ScoredExample], train: Sequence[Exchange]) -> float:
    """AUC of low value against "spoiled", over all words of all valued responses."""
    values: list[float] = []
    spoiled: list[bool] = []
    for example in scored:
        found = example.values["total"][example.response][:-1]  # the last is the end token
        exchange = train[example.row]
        assert len(found) == len(exchange.response)
        values += found.tolist()
        spoiled += exchange.spoiled
    return auc(-np.array(values), spoiled)
