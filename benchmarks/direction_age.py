"""How old may the validation gradient be? Values along one of some steps before, by rank.

    python -m benchmarks.direction_age

SmolLM2-135M-Instruct in float32 is trained by AdamW on functions of the Python standard library.
After 1, 2, 4 and 8 steps the default values of one batch are taken along G as it was before them
and as it is now; printed is Spearman's correlation over the batch's response tokens, as median and
least of the draws. ``direction_steps=n`` uses a G of up to n - 1 steps before.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from scipy.stats import spearmanr

from alphatoken import Scorer, masked_sft_loss
from alphatoken.support.storage import write_text
from benchmarks.data import MODELS
from benchmarks.real import batches

RESULT = Path(__file__).parents[1] / "docs" / "direction-age.json"
CONDITIONS = (
    "SmolLM2-135M-Instruct, float32, AdamW, batches of 4 x 160 tokens of functions of the Python "
    "standard library, 8 validation rows, K = 3, draws of the rows' order"
)
AGES = (1, 2, 4, 8)
ROWS, LENGTH, VALIDATION, BATCHES = 4, 160, 8, 4
"""Three batches are trained on in turn; the fourth is valued."""


def correlations(rate: float, seed: int) -> list[float]:
    """Spearman's correlation of values along an old and a fresh G, for each of ``AGES``."""
    real = MODELS["smollm2"]
    model, tokenizer = real.load().train(), real.tokenizer()
    count = ROWS * BATCHES
    rows, others = batches(tokenizer, count, LENGTH)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    parts = [{k: v[own] for k, v in rows.items()} for own in order.split(ROWS)]
    validation = {k: v[order[:VALIDATION]] for k, v in others.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    old, fresh = Scorer(model, validation), Scorer(model, validation)
    old.pin("start")
    old.score(parts[-1])
    ranks = []
    for step in range(1, max(AGES) + 1):
        part = parts[step % (BATCHES - 1)]
        logits = model(input_ids=part["input_ids"], use_cache=False).logits
        masked_sft_loss(logits, part["labels"], torch.ones_like(part["labels"])).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in AGES:
            values = [scorer.score(parts[-1]) for scorer in (old, fresh)]
            of_tokens = [v.total[v.mask].numpy() for v in values]
            ranks.append(float(spearmanr(*of_tokens).statistic))
    return ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="*", default=[2e-5, 5e-5, 1e-4])
    parser.add_argument("--draws", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    rates: dict[str, Any] = {}
    for rate in arguments.rates:
        draws = [correlations(rate, seed) for seed in range(arguments.draws)]
        steps_of = [*zip(*draws, strict=True)]
        rates[f"{rate:g}"] = {
            "median": [round(median(one), 4) for one in steps_of],
            "least": [round(min(one), 4) for one in steps_of],
            "draws": draws,
        }
        cells = (f"{median(one):.3f} ({min(one):.3f})" for one in zip(*draws, strict=True))
        steps = zip(AGES, cells, strict=True)
        print(f"rate {rate:g}:", *(f"{n} steps {cell}" for n, cell in steps), sep="  ", flush=True)
        result = {"conditions": CONDITIONS, "ages": AGES, "rates": rates}
        write_text(RESULT, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
