"""``python -m benchmarks.preconditioner``: how far each form of P is off, by steps taken.

A small decoder is trained with a real optimizer. After so many steps, the exact effect of each
token's weight on the next step is measured by central differences through the optimizer's own
``step``, in float64; its inner product with the validation gradient is the token's first-order
utility. Against it: P = 1, frozen, full, and full at the gradient of half of the batch (what a
micro-batch of two sees).

Writes the tables into docs/optimizers.md. With ALPHATOKEN_DATA set, also for the pre-trained
260 K decoder on grade-school mathematics; without it, only for a random one on made-up tasks.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from alphatoken.certificate.metrics import spearman
from alphatoken.data import Row, Turn, collate, encode_rows
from alphatoken.demo.model import make_model, make_tokenizer
from alphatoken.demo.world import draw_exchanges
from alphatoken.direction.optimizers import frozen_preconditioners, full_preconditioners

PAGE = Path(__file__).resolve().parent.parent / "docs" / "optimizers.md"
BEGIN, END = "<!-- errors: begin -->\n", "<!-- errors: end -->\n"
STEPS = (1, 2, 4, 8, 16, 31, 64, 128, 301)
ROWS, TOKENS, H = 8, 48, 1e-3
FORMS = ("P = 1", "frozen", "full", "full, half batch")

Batch = dict[str, Tensor]


@dataclass
class Run:
    """A training run: the model, an endless supply of batches, and held-out rows."""

    name: str
    model: nn.Module
    batches: Iterator[Batch]
    validation: Batch


def made_up() -> Run:
    """A random decoder of four layers on the demo's tasks, from scratch."""
    tokenizer, generator = make_tokenizer(), random.Random(0)

    def draw(count: int) -> Batch:
        rows = [
            Row(i, f"task {i}", (Turn("user", e.prompt), Turn("assistant", " ".join(e.response))))
            for i, e in enumerate(draw_exchanges(count, generator))
        ]
        return collate(encode_rows(rows, tokenizer)[0])

    def supply() -> Iterator[Batch]:
        while True:
            yield draw(ROWS)

    return Run("random decoder, made-up tasks", make_model(tokenizer), supply(), draw(ROWS))


def pretrained(folder: Path) -> Run:
    """The 260 K decoder on grade-school mathematics: answers are responses."""
    model = AutoModelForCausalLM.from_pretrained(folder / "stories260K/transformers")
    tokenizer = AutoTokenizer.from_pretrained(folder / "stories260K/transformers")
    lines = (folder / "gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()

    def rows() -> Iterator[tuple[Tensor, Tensor]]:
        for line in itertools.cycle(lines):
            row = json.loads(line)
            prompt = tokenizer(row["question"])["input_ids"]
            ids = tokenizer(row["question"] + "\n" + row["answer"])["input_ids"]
            if len(prompt) + 30 < len(ids) and len(prompt) < 110:
                both = torch.tensor((ids + [0] * 150)[:150])
                at = torch.arange(150)
                yield both, both.where((at >= len(prompt)) & (at < len(ids)), torch.tensor(-100))

    supply = rows()

    def draw() -> Batch:
        some = [next(supply) for _ in range(ROWS)]
        return {
            "input_ids": torch.stack([ids for ids, _ in some]),
            "labels": torch.stack([labels for _, labels in some]),
        }

    def batches() -> Iterator[Batch]:
        while True:
            yield draw()

    return Run("pre-trained 260 K decoder, GSM8K", model, batches(), draw())


# --- measuring -----------------------------------------------------------------------------------


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Loss of each response token, one after the other."""
    arguments = {k: v for k, v in batch.items() if k in ("input_ids", "attention_mask")}
    logits = model(**arguments).logits[:, :-1].double()
    labels = batch["labels"][:, 1:]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses[labels != -100]


def gradients(loss: Tensor, parameters: dict[str, Tensor], *, keep: bool = False) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(parameters.values()), retain_graph=keep))


def exact_effect(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, Tensor],
    summed: list[Tensor],
    token: list[Tensor],
) -> list[Tensor]:
    """``-(dtheta'/dw) / lr``, w the factor on the token's part of the summed gradient."""

    def moved(shift: float) -> list[Tensor]:
        held = optimizer.param_groups[0]["params"]
        copies, own = copy.deepcopy((held, optimizer))
        places = {id(p): i for i, p in enumerate(held)}
        chosen = [copies[places[id(p)]] for p in parameters.values()]
        for p, g, t in zip(chosen, summed, token, strict=True):
            p.grad = g + shift * t
        own.step()
        return [p.detach() for p in chosen]

    lr = float(optimizer.param_groups[0]["lr"])
    return [(b - a) / (2 * H * lr) for a, b in zip(moved(H), moved(-H), strict=True)]


def measure(run: Run, optimizer: torch.optim.Optimizer, batch: Batch) -> dict[str, list[float]]:
    """Relative error of ``P o g_k`` over all tokens, and Spearman of the values, by form."""
    model = run.model
    parameters = {
        n: p for n, p in model.named_parameters() if n.startswith("model.layers.") and p.ndim == 2
    }
    target = gradients(token_losses(model, run.validation).mean(), parameters)
    losses = token_losses(model, batch)
    summed = gradients(losses.mean(), parameters, keep=True)
    half = {k: v[: ROWS // 2] for k, v in batch.items()}
    of_half = gradients(token_losses(model, half).mean(), parameters)
    scales: dict[str, Any] = {
        "P = 1": {n: torch.ones_like(p) for n, p in parameters.items()},
        "frozen": frozen_preconditioners(optimizer, parameters),
    }
    for name, g in (("full", summed), ("full, half batch", of_half)):
        by_name = dict(zip(parameters, g, strict=True))
        scales[name] = full_preconditioners(optimizer, parameters, by_name)
    exact_values, values = [], {form: list[Tensor]() for form in FORMS}
    off, size = dict.fromkeys(FORMS, 0.0), 0.0
    for k in torch.linspace(0, len(losses) - 1, TOKENS).long().tolist():
        token = [g / len(losses) for g in gradients(losses[k], parameters, keep=True)]
        exact = exact_effect(optimizer, parameters, summed, token)
        exact_values.append(sum((e * g).sum() for e, g in zip(exact, target, strict=True)))
        size += sum(float(e.square().sum()) for e in exact)
        for form in FORMS:
            scaled = [p * g for p, g in zip(scales[form].values(), token, strict=True)]
            values[form].append(sum((s * g).sum() for s, g in zip(scaled, target, strict=True)))
            off[form] += sum(
                float((s - e).square().sum()) for s, e in zip(scaled, exact, strict=True)
            )
    truth = torch.stack(exact_values)
    return {
        form: [
            (off[form] / size) ** 0.5,
            float(
                spearman(torch.stack(values[form]), truth, torch.ones_like(truth, dtype=torch.bool))
            ),
        ]
        for form in FORMS
    }


def table(make: Callable[[], Run], lr: float, betas: tuple[float, float]) -> str:
    """One training run, measured on its way."""
    torch.manual_seed(0)
    run = make()
    run.model.double().eval()
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=lr, betas=betas, weight_decay=0.01)
    lines = [
        f"{run.name}: AdamW, lr {lr:g}, betas {betas}",
        "",
        "| steps taken | loss | "
        + " | ".join(["P = 1: rank", *(f"{form}: error | {form}: rank" for form in FORMS[1:])])
        + " |",
        "|" + "---|" * 9,
    ]
    for taken in range(max(STEPS) + 1):
        batch = next(run.batches)
        if taken in STEPS:
            loss = float(token_losses(run.model, run.validation).mean().detach())
            found = measure(run, optimizer, batch)
            cells = [f"{found[FORMS[0]][1]:.2f}"]
            cells += [f"{found[f][0]:.2g} | {found[f][1]:.2f}" for f in FORMS[1:]]
            lines.append(f"| {taken} | {loss:.2f} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
        optimizer.zero_grad()
        token_losses(run.model, batch).mean().backward()
        optimizer.step()
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the tables between the page's two marks."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tables = [table(made_up, 1e-3, (0.9, betas)) for betas in (0.999, 0.95)]
    if folder := os.environ.get("ALPHATOKEN_DATA"):
        tables.append(table(lambda: pretrained(Path(folder)), 3e-4, (0.9, 0.999)))
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(tables) + "\n" + END + after, "utf-8")


if __name__ == "__main__":
    main()
