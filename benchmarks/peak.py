"""One piece of work in a fresh process; prints its peak resident memory as JSON."""

from __future__ import annotations

import json
import resource
import sys

import torch

from alphatoken import Scorer, ScorerConfig, masked_sft_loss
from benchmarks.models import decoder, random_batch


def main(what: str, length: int) -> None:
    """Run ``what`` ("import", "plain", or an estimator) at sequence length ``length``."""
    torch.set_num_threads(2)
    model = decoder(256, 4, vocabulary=512, length=length)
    batch = random_batch(1, length, 512)
    if what == "plain":
        mask = torch.ones_like(batch["labels"], dtype=torch.bool)
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        masked_sft_loss(logits, batch["labels"], mask).backward()
    elif what != "import":
        validation = random_batch(1, 256, 512, seed=1)
        Scorer(model, validation, None, ScorerConfig(estimator=what)).score(batch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"mib": peak / 1024}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
