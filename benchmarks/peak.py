"""One piece of work in a fresh process; prints its peak resident memory as JSON."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

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
    print(json.dumps({"mib": peak_mib()}))


def peak_mib() -> float:
    """Peak resident memory of this process alone.

    Linux keeps ru_maxrss across exec, so a large parent would hide what the child needs; VmHWM
    starts anew with the program.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes outside Linux


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
