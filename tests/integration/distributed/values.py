"""Values of the plain scorer: validation rows shared over ranks, weights wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken import FisherDrift, PreferenceBatch, Scorer, ScorerConfig, fit_fisher
from alphatoken.train.distributed import Ranks, even_micro_batches, sharding_of
from tests.integration.distributed.parts import accelerator_for, prepared
from tests.integration.tiny_training import model as tiny_model

ROWS = 6
CASES: dict[str, tuple[ScorerConfig, str]] = {
    "alphatoken": (ScorerConfig(layers=2), "diagonal"),
    "direct": (ScorerConfig("direct", layers=[0, 2]), "kronecker"),
    "path": (ScorerConfig("path", layers=1), "none"),
    "paper_literal": (ScorerConfig("paper_literal", layers=2), "data"),
    "label over all": (ScorerConfig("label", parameters="all"), "data"),
}


def batch(seed: int, rows: int = 2) -> dict[str, Tensor]:
    """Rows of different lengths, prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    width = 10
    ids = torch.randint(4, 40, (rows, width), generator=generator)
    labels, attention = ids.clone(), torch.ones_like(ids)
    for row in range(rows):
        prompt, length = 2 + (seed + row) % 3, width - (seed + 2 * row) % 4
        labels[row, :prompt] = -100
        labels[row, length:] = -100
        attention[row, length:] = 0
    return {"input_ids": ids, "attention_mask": attention, "labels": labels}


def take(whole: dict[str, Tensor], rows: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: tensor[list(rows)] for name, tensor in whole.items()}


def drift(kind: str, model: nn.Module) -> FisherDrift | None:
    """Fitted on the reference, which the model then leaves."""
    if kind not in ("diagonal", "kronecker"):
        return None
    prompts = [[1, 5, 6], [1, 7]]
    return fit_fisher(
        model, prompts, layers="all", samples=4, structure=kind, max_new_tokens=4, progress=False
    )


def moved(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.02)


def preferences(rows: tuple[int, ...]) -> PreferenceBatch:
    chosen, rejected = (take(batch(seed, ROWS), rows) for seed in (21, 22))
    reference = torch.linspace(-9, -5, ROWS)
    return PreferenceBatch(
        chosen, rejected, reference[list(rows)], reference.flip(0)[list(rows)], beta=0.5
    )


def cases(ranks: Ranks) -> Iterator[tuple[str, list[Any], ScorerConfig, str]]:
    """Name, this rank's validation batches, configuration, retention."""
    rows = list(range(ROWS))
    for name, (config, kind) in CASES.items():
        own = even_micro_batches(rows, ranks.rank, ranks.world, 2)
        yield name, [take(batch(20, ROWS), r) for r in own], config, kind
    own = even_micro_batches(rows, ranks.rank, ranks.world, None)
    yield "pairs", [preferences(r) for r in own], ScorerConfig(layers=2), "none"
    walk = ScorerConfig("walk", walk_steps=2, walk_learning_rate=1e-3)
    yield "walk", [take(batch(20, ROWS), r) for r in own], walk, "none"


def values(name: str, folder: Path) -> dict[str, Any]:
    """Every component of every case, for this rank's share of four micro-batches."""
    accelerator = accelerator_for(name)
    model = tiny_model()
    drifts = {kind: drift(kind, model) for kind in ("diagonal", "kronecker")}
    moved(model)
    wrapped = prepared(accelerator, model)
    plain = accelerator.unwrap_model(wrapped)
    ranks, sharding = Ranks(accelerator), sharding_of(accelerator, wrapped)

    def reduce(role: str, sums: dict[str, Tensor], count: float) -> dict[str, Tensor]:
        sums, count = ranks.sum_gradients(sums, count, sharded=sharding is not None)
        return {n: total / count for n, total in sums.items()}

    found: dict[str, Any] = {}
    for case, validation, config, kind in cases(ranks):
        retention: Any = drifts.get(kind)
        if kind == "data":
            own = even_micro_batches(list(range(4)), ranks.rank, ranks.world, None)
            retention = [take(batch(30, 4), r) for r in own]
        scorer = Scorer(
            plain,
            validation,
            retention,
            replace(config, max_relative_drift=None),
            reduce=reduce,
            sharding=sharding,
        )
        scorer.pin("these weights")
        mine = range(ranks.rank, 4, ranks.world)
        scored = {i: scorer.score(batch(40 + i)) for i in mine}
        found[case] = {
            i: {"total": v.total, "adaptation": v.adaptation, "stability": v.stability}
            for i, v in scored.items()
        }
        found[case]["balance"] = next(iter(scored.values())).balance
        if name in ("ddp", "fsdp2", "single"):
            found[f"{case}, observed"] = {i: observed(scorer, wrapped, batch(40 + i)) for i in mine}
    return found


def observed(scorer: Scorer, wrapped: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of a forward through the wrapper, and the gradients of its own backward after it."""
    wrapped.zero_grad()
    with scorer.observe() as seen:
        logits = wrapped(**{k: v for k, v in inputs.items() if k != "labels"}).logits
        scored = seen.values(logits, inputs["labels"])
    logits.float().square().mean().backward()
    return {"total": scored.total}
