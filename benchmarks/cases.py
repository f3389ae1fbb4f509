"""The measurements. Each yields rows {name, ours, other, ratio, floor, ...}."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from alphatoken import Scorer, ScorerConfig, masked_sft_loss
from alphatoken.adapter import find_adapter
from alphatoken.batch import read_batch
from alphatoken.contraction import contract, contract_gram, outer_sum, plan_contraction
from alphatoken.forward_mode import label_values
from alphatoken.oracle import gradients as oracle
from benchmarks.measure import alternate
from benchmarks.models import decoder, random_batch

Row = dict[str, Any]


def oracle_against_label() -> Iterator[Row]:
    """All T label values in one dual forward, against one backward a token."""
    model = decoder(128, 4, vocabulary=512).eval()
    adapter = find_adapter(model)
    for length in (32, 64, 128):
        batch = random_batch(1, length, 512)
        scorer = Scorer(
            model, random_batch(2, 64, 512, seed=1), None, ScorerConfig(estimator="label")
        )
        direction = scorer.direction.total()
        checked = read_batch(batch)

        def fast(checked: Any = checked, direction: Any = direction, s: Scorer = scorer) -> Any:
            return label_values(adapter, checked, direction, first=s.scope.first)

        def slow(batch: Any = batch, direction: Any = direction) -> Any:
            return oracle.label_values(model, adapter.forward, batch, direction)

        error = float((fast().double() - slow()).abs().max() / slow().abs().max())
        tokens = checked.response_tokens
        yield {
            "name": "label_vs_per_token",
            "size": f"d=128, 4 layers, K=3, {tokens} response tokens of T={length}",
            **alternate(fast, slow, repeats=5),
            "floor": 1 / tokens,
            "note": f"largest difference {error:.1e} of the largest value; floor: one pass of T",
        }


def projected_against_gram() -> Iterator[Row]:
    """The two routes of one contraction over the number of validation tokens; G counted in."""
    width, tokens = 1024, 512
    generator = torch.Generator().manual_seed(0)
    delta, x = (torch.randn(1, tokens, width, generator=generator) for _ in range(2))
    for count in (256, 1024, 4096, 16384):
        delta_v, x_v = (torch.randn(count, width, generator=generator) for _ in range(2))
        plan = plan_contraction(tokens, count, width, width)
        m = outer_sum(delta_v[None], x_v[None])

        def projected(delta_v: Any = delta_v, x_v: Any = x_v) -> Any:
            return contract(delta, x, outer_sum(delta_v[None], x_v[None]))

        def built(m: Any = m) -> Any:
            return contract(delta, x, m)

        def gram(delta_v: Any = delta_v, x_v: Any = x_v) -> Any:
            return contract_gram(delta, x, delta_v, x_v)

        for name, ours, flops in (
            ("projected_vs_gram, G built anew", projected, plan.projected_flops),
            ("projected_vs_gram, G at hand", built, 2 * tokens * width * width),
        ):
            yield {
                "name": name,
                "size": f"d={width}, N={tokens}, N_v={count}",
                **alternate(ours, gram),
                "floor": flops / plan.gram_flops,
                "note": f"the plan picks {plan.route}; floor: FLOP ratio",
            }


def _flops(run: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def scoring_overhead() -> Iterator[Row]:
    """One training step with observed scoring against the plain step, validation side apart."""
    width, depth, rows, length = 384, 12, 1, 256
    model = decoder(width, depth).train()
    batch = random_batch(rows, length)
    mask = torch.ones_like(batch["labels"], dtype=torch.bool)

    def plain() -> None:
        model.zero_grad()
        masked_sft_loss(model(**_inputs(batch)).logits, batch["labels"], mask).backward()

    block = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2)
    head = model.lm_head.weight.numel()
    for layers in (1, 3, depth):
        for estimator in ("alphatoken", "path", "label"):
            config = ScorerConfig(estimator=estimator, layers=layers, contraction="projected")
            scorer = Scorer(model, random_batch(2, 128, seed=1), None, config)
            scorer.score(batch)  # builds G, which both timed sides leave out

            def scored(s: Scorer = scorer) -> None:
                model.zero_grad()
                with s.observe() as observed:
                    logits = model(**_inputs(batch)).logits
                    observed.values(logits, batch["labels"])
                masked_sft_loss(logits, batch["labels"], mask).backward()

            work = layers * block
            extra = 4 * work if estimator != "label" else 4 * work + 2 * head
            floor = 1 + extra / (6 * (depth * block + head))
            measured = _flops(scored) / _flops(plain)
            yield {
                "name": f"score_overhead_k{layers}",
                "size": f"{estimator}, d={width}, {depth} layers, {rows} x {length} tokens",
                **alternate(scored, plain, repeats=7),
                "floor": floor,
                "note": f"FLOPs counted: {measured:.2f}x; validation side left out",
            }


def _inputs(batch: Any) -> dict[str, Any]:
    return {"input_ids": batch["input_ids"], "use_cache": False}


def peak_memory() -> Iterator[Row]:
    """Peak resident memory of a fresh process: scoring against a plain training step, over T."""
    for length in (1024, 2048, 4096, 8192):
        base = _peak("import", length)
        plain = _peak("plain", length) - base
        for estimator in ("alphatoken", "label"):
            scored = _peak(estimator, length) - base
            yield {
                "name": "score_peak_memory",
                "size": f"{estimator}, d=256, 4 layers, K=3, T={length}",
                "ours": scored,
                "other": plain,
                "ratio": scored / plain,
                "floor": 1.0,
                "note": f"MiB above the bare process; {scored / length * 1024:.0f} KiB a token, "
                f"T x T floats for the 8 heads would add {length**2 * 4 * 8 / 2**20:.0f} MiB",
            }


def _peak(what: str, length: int) -> float:
    command = [sys.executable, "-m", "benchmarks.peak", what, str(length)]
    # A fixed threshold gives large blocks back to the system at once; glibc's moving one keeps some
    # of them or not, and the peak would differ by half between runs of the same work.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(json.loads(done.stdout.strip().splitlines()[-1])["mib"])


ALL = (oracle_against_label, projected_against_gram, scoring_overhead, peak_memory)
