"""``python -m benchmarks.fidelity``: how well each estimator ranks tokens on a real small model.

Needs the data folder named by ALPHATOKEN_DATA (a pre-trained 260 K-parameter decoder and text).
Prints, per number of scored layers K, Spearman correlation with the label value over all
parameters (first-order utility of each token) and the overlap of the kept half, averaged over
disjoint draws; near text (the model's own kind) and far text (grade-school mathematics), target
and training rows always of one kind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from alphatoken import Scorer, ScorerConfig
from alphatoken.estimate.estimators import ESTIMATORS
from alphatoken.fidelity.metrics import spearman, top_overlap

LENGTH, ROWS, VALIDATION = 150, 6, 16


def rows_of(folder: Path, kind: str) -> list[str]:
    """Text rows: stories, or question and answer."""
    name, keys = {
        "near": ("tinystories/stories.jsonl", ("text",)),
        "far": ("gsm8k/train.jsonl", ("question", "answer")),
    }[kind]
    with open(folder / name, encoding="utf-8") as file:
        return ["\n".join(json.loads(line)[k] for k in keys) for line in file]


def batch_of(tokenizer: Any, texts: list[str], count: int) -> dict[str, torch.Tensor]:
    """The first ``count`` texts long enough, cut to one length; every token is a response token."""
    found = (tokenizer(text, truncation=True, max_length=LENGTH)["input_ids"] for text in texts)
    ids = torch.tensor([i for i in found if len(i) == LENGTH][:count])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def main() -> None:
    """Print one Markdown table a kind of text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=3)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = Path(os.environ["ALPHATOKEN_DATA"])
    model = AutoModelForCausalLM.from_pretrained(folder / "stories260K/transformers")
    tokenizer = AutoTokenizer.from_pretrained(folder / "stories260K/transformers")
    for kind in ("near", "far"):
        texts = rows_of(folder, kind)
        target = texts[120:]  # the same kind of text, held out
        print(f"\n{kind} text, mean of {arguments.draws} draws: Spearman (overlap of kept half)\n")
        print("| K | " + " | ".join(ESTIMATORS) + " |\n|---|" + "---|" * len(ESTIMATORS))
        for layers in (1, 3, 5):
            cells = []
            for estimator in ESTIMATORS:
                found = [
                    measure(
                        model,
                        tokenizer,
                        texts[20 * i :],
                        target[20 * i :],
                        estimator,
                        layers,
                    )
                    for i in range(arguments.draws)
                ]
                rank, overlap = (statistics.mean(c) for c in zip(*found, strict=True))
                cells.append(f"{rank:.2f} ({overlap:.2f})")
            print(f"| {layers} | " + " | ".join(cells) + " |")


def measure(
    model: Any, tokenizer: Any, texts: list[str], target: list[str], estimator: str, layers: int
) -> tuple[float, float]:
    """(Spearman, overlap) of one estimator against the label value over all parameters."""
    batch = batch_of(tokenizer, texts, ROWS)
    validation = batch_of(tokenizer, target, VALIDATION)
    truth_config = ScorerConfig(estimator="label", layers="all", parameters="all")
    truth = Scorer(model, validation, None, truth_config).score(batch)
    config = ScorerConfig(estimator=estimator, layers=layers)
    values = Scorer(model, validation, None, config).score(batch)
    return (
        spearman(values.total, truth.total, values.mask),
        top_overlap(values.total, truth.total, values.mask),
    )


if __name__ == "__main__":
    main()
