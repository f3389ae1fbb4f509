"""One piece of work in a fresh process; prints its peak memory as JSON.

    python -m benchmarks.peak step --size '{...}'    training steps of a model of this size

Peak memory is resident memory, or on CUDA what the allocator handed out at most.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from trl.trainer import utils

from alphatoken import Scorer, ScorerConfig, masked_sft_loss
from alphatoken.train.log_prob_proxy import shared_log_probs
from benchmarks.models import Size, fisher

LAYERS = 3
STEPS = {
    "step_alphatoken": {"components": True, "retention": False},
    "step_fisher": {"components": False, "retention": True},
}
"""The ways in which a training step is valued."""


def plain_step(model: Any, batch: Any) -> None:
    """Forward and backward of all parameters, as a trainer runs them; no optimizer."""
    model.zero_grad()
    mask = torch.ones_like(batch["labels"], dtype=torch.bool)
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    masked_sft_loss(logits, batch["labels"], mask).backward()


def observed_step(scorer: Scorer, model: Any, batch: Any, *, components: bool) -> None:
    """The same step, its forward observed, and every response token valued."""
    model.zero_grad()
    mask = torch.ones_like(batch["labels"], dtype=torch.bool)
    with scorer.observe() as observed:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        observed.values(logits, batch["labels"], components=components)
    masked_sft_loss(logits, batch["labels"], mask).backward()


def head_at_responses(model: Any) -> Any:
    """The model with TRL's own head, at response tokens as TRL's trainer runs it on CUDA."""
    utils.add_fused_lm_head(model)
    forward = model.forward

    @wraps(forward)
    def at_responses(*args: Any, **kwargs: Any) -> Any:
        # Without Triton TRL scores every position, for devices that compile anew for each shape.
        with mock.patch.object(utils, "_use_triton", return_value=True):
            return forward(*args, **kwargs)

    model.forward = at_responses
    return model


def trl_step(
    model: Any, batch: Any, scorer: Scorer | None = None, *, components: bool = True
) -> None:
    """Forward and backward of all parameters by TRL's own head, observed and valued or not.

    Args:
        model: of ``head_at_responses``.
        batch: ids and labels, no padding.
        scorer: values every response token by the step's own forward; None for the step alone.
        components: as for ``Observed.values``.
    """
    model.zero_grad()
    labels = batch["labels"]
    with nullcontext() if scorer is None else scorer.observe() as observed:
        output = model(input_ids=batch["input_ids"], labels=labels, fused_lm_head=True)
        loss = output.loss
        if observed is not None:  # as our trainers do: one error of the head for both
            log_probs = shared_log_probs(output.log_probs, labels)
            observed.values(log_probs, labels, components=components)
            loss = -log_probs.sum() / (labels[:, 1:] != -100).sum()
    loss.backward()


def scorer_for(model: Any, size: Size, device: torch.device, *, retention: bool) -> Scorer:
    """The paper's estimator at K = 3, with both sides of M or adaptation alone."""
    layers = min(LAYERS, size.depth)
    drift = fisher(model, layers) if retention else None
    return Scorer(model, size.batch(device, seed=1), drift, ScorerConfig(layers=layers))


def work(what: str, size: Size, device: torch.device) -> None:
    """Run ``what``; of steps two, so that gradients, G and activations of both are met."""
    model = size.model(device)
    batch = size.batch(device)
    if what == "step":
        for _ in range(2):
            plain_step(model, batch)
        return
    chosen = STEPS[what]
    scorer = scorer_for(model, size, device, retention=chosen["retention"])
    for _ in range(2):
        model.zero_grad()
        scorer.refresh()  # the validation side belongs to the peak of a step
        observed_step(scorer, model, batch, components=chosen["components"])


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


def fresh_environment(**more: str) -> dict[str, str]:
    """The environment of a process whose peak is measured.

    A fixed threshold gives large blocks back to the system at once; glibc's moving one keeps some
    of them or not, and the peak would differ by half between runs of the same work.
    """
    return {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", **more}


def fresh_mib(module: str, *words: str, device: torch.device | None = None) -> float:
    """What a fresh process of a module prints that it held at most."""
    command = [sys.executable, "-m", module, *words]
    if device is not None:
        command += ["--device", str(device), "--threads", str(torch.get_num_threads())]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=fresh_environment()
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["mib"])


def print_peak(device: torch.device) -> None:
    """What this process held at most, for ``fresh_mib``."""
    on_gpu = device.type == "cuda"
    mib = torch.cuda.max_memory_allocated(device) / 2**20 if on_gpu else peak_mib()
    print(json.dumps({"mib": mib}))


def fresh_peak(what: str, size: Size, device: torch.device) -> float:
    """MiB of a fresh process that does ``what``."""
    words = (what, "--size", json.dumps(asdict(size)))
    return fresh_mib("benchmarks.peak", *words, device=device)


def main() -> None:
    """Do one thing and print the peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["import", "step", *STEPS])
    parser.add_argument(
        "--size", type=json.loads, required=True, help="fields of benchmarks.models.Size"
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.what != "import":
        work(options.what, Size(**options.size), options.device)
    print_peak(options.device)


if __name__ == "__main__":
    main()
