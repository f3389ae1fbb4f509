"""docs/results.json, docs/results.md and its figures, from measured cells alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from alphatoken_lab.compare.page import rounded
from benchmarks.training.grid import CAUSES, NOISES, SENSITIVITY, TASKS, main_grid
from benchmarks.training.plots import TITLES, draw_differences, draw_policies
from benchmarks.training.tables import (
    Cells,
    by_variant,
    chosen,
    main_table,
    variant_table,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"
CONCLUSIONS = Path(__file__).with_name("conclusions.md")

FIRST = (
    "task", "noise", "policy", "estimator", "seed", "kept_tokens", "target_loss", "retention_loss"
)  # fmt: skip

INTRODUCTION = """# Results of training runs

Written by `python -m benchmarks.training report` from docs/results.json; do not edit by hand. Every
number below was measured: {count} training runs.

## What was run

A pre-trained decoder of 260,032 parameters (5 layers, d = 64, TinyStories text) was trained on real
rows with TRL's trainers and ours: AdamW, {steps} steps of {batch} rows (pairs), a linearly falling
learning rate ({rates}), no gradient checkpointing, one CPU thread. The trainers are
`AlphaSFTTrainer` and `AlphaDPOTrainer`; "standard" is `policy="all"`, which is TRL's own loss.

| task | trained on | validation pool | held out (target loss) | longest row |
|---|---|---|---|---|
{sizes}
Parts share no row; the mathematics rows are held out from the data's own test file. Fisher prompts
({samples} samples) are the prompts of rows too long to train on. Preferences start from a short
warm-up on general instructions and on the chosen replies of the training pairs; that model is also
the reference. Retention loss is measured on 64 held-out stories of the kind the model was
pre-trained on. Noise replaces 30 % of each training response's tokens by random ones, on both sides
of a pair; validation and held-out rows stay clean.

Unless a table says otherwise: rho = 0.5, lambda = 1.5 with the diagonal Fisher, K = 3, W = 32, and
a validation batch of {validation} rows (pairs), drawn from the pool at each step, without a running
mean. Policies other than "standard" train on equally many tokens.

**How to read.** `mean ± half` is a 95 % t-interval over the seeds (3 seeds: 4.3 standard errors, so
wide). Runs of one seed share rows, their order, noise and initial weights, so differences to random
selection are taken seed by seed; they are **bold** where their interval leaves 0 out. Lower losses
are better. For DPO the target loss is `-log sigma(s)` on held-out pairs. "Validation gap" is the
held-out loss minus the loss on the rows that the validation batches were drawn from. "Wrong among
kept" is the share of the training weight that fell on replaced tokens ({noise:.0%} for a random
choice).

"""


def write_report(measured: list[dict[str, Any]]) -> None:
    """Everything, from the work folder's cells."""
    known = {cell.name for cell in main_grid()}
    missing = sorted(known - {cell["name"] for cell in measured})
    if missing:
        print(f"the main grid lacks {len(missing)} cells: {', '.join(missing)}")
    _require_one_setting(measured)
    cells = [rounded(cell, FIRST) for cell in measured]
    for cell in cells:
        del cell["name"]
    (DOCS / "results.json").write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
    draw_policies(cells, DOCS / "results-policies.svg")
    _draw_causes(cells)
    (DOCS / "results.md").write_text(_text(cells), encoding="utf-8")


def _require_one_setting(measured: list[dict[str, Any]]) -> None:
    """Cells of a task are comparable only after equally many steps at one learning rate."""
    for task in TASKS:
        settings = {(c["steps"], c["learning_rate"]) for c in measured if c["task"] == task}
        if len(settings) > 1:
            raise SystemExit(f"cells of {task} were measured with {sorted(settings)}: drop the old")


def _text(cells: Cells) -> str:
    parts = [_introduction(cells)]
    if CONCLUSIONS.exists():
        parts.append(CONCLUSIONS.read_text(encoding="utf-8") + "\n")
    parts += [_main(cells), _causes(cells), _ratios(cells), _converged(cells)]
    parts += [_sensitivity(cells), _beta(cells)]
    return _without_empty("\n".join(part for part in parts if part))


def _without_empty(text: str) -> str:
    """Leave out tables without a row, then sections without a table, a picture or a sentence."""
    blocks = [
        b for b in text.split("\n\n") if not (b.startswith("|") and b.strip().count("\n") < 2)
    ]
    kept: list[str] = []
    for block in reversed(blocks):
        level = len(block) - len(block.lstrip("#"))
        below = len(kept[-1]) - len(kept[-1].lstrip("#")) if kept else 1
        if not (level > 1 and (not kept or 0 < below <= level)):
            kept.append(block)
    return "\n\n".join(reversed(kept)).rstrip() + "\n"


def _introduction(cells: Cells) -> str:
    from benchmarks.training.cell import FISHER_SAMPLES, OPTIONS, RATES, STEPS
    from benchmarks.training.plain import BATCH
    from benchmarks.training.tasks import SIZES

    sizes = "".join(
        f"| {TITLES[task]} (`{task}`) | {s.train} | {s.pool} | {s.held_out} | {s.length} |\n"
        for task, s in SIZES.items()
    )
    return INTRODUCTION.format(
        count=len(cells),
        steps=" / ".join(sorted({str(n) for n in STEPS.values()})),
        batch=BATCH,
        rates=", ".join(f"{RATES[task]:g} for {TITLES[task]}" for task in TASKS),
        sizes=sizes,
        samples=FISHER_SAMPLES,
        validation=OPTIONS["validation_batch_size"],
        noise=0.3,
    )


def _main(cells: Cells) -> str:
    text = "## Policies at equal budget\n\n![Target and retention loss](results-policies.svg)\n"
    for task in TASKS:
        for noise in NOISES:
            table = main_table(cells, task, noise)
            text += f"\n### {TITLES[task]}, {_noise(noise)}\n\n{table}"
    return text


def _noise(noise: float) -> str:
    return f"{noise:.0%} of the training rows' response tokens replaced" if noise else "clean rows"


def _math(cells: Cells, noise: float, **wanted: Any) -> list[dict[str, Any]]:
    return chosen(cells, task="sft_math", noise=noise, start="base", **wanted)


def _random(cells: Cells, noise: float) -> list[dict[str, Any]]:
    return _math(cells, noise, policy="random", variant="main")


def _cause_groups(cells: Cells, noise: float) -> list[tuple[str, Cells]]:
    part = _math(cells, noise, policy="top", estimator="label")
    plain = [("`label`, hard top half", chosen(part, variant="main"))]
    return plain + by_variant(part, CAUSES)


def _draw_causes(cells: Cells) -> None:
    panels = [
        (_noise(noise), _cause_groups(cells, noise), _random(cells, noise)) for noise in NOISES
    ]
    draw_differences(panels, "target_loss", DOCS / "results-causes.svg")


def _causes(cells: Cells) -> str:
    text = (
        "## Why a hard top half need not win: one cause at a time\n\n"
        "Mathematics rows, `label` values (exact for what a mask acts on), so that the estimator's "
        "own error plays no part; each line changes one thing.\n\n"
        "![Difference to random selection](results-causes.svg)\n"
    )
    for noise in NOISES:
        groups, base = _cause_groups(cells, noise), _random(cells, noise)
        groups = [("random half", base), *groups]
        text += f"\n### {_noise(noise).capitalize()}\n\n{variant_table(cells, groups, base)}"
    return text


def _ratios(cells: Cells) -> str:
    text = "## Ratio\n\nRandom selection of the same ratio is the base of each block.\n"
    for noise in NOISES:
        text += f"\n### {_noise(noise).capitalize()}\n"
        for ratio in (0.5, 0.7, 0.9):
            name = "main" if ratio == 0.5 else f"ratio {ratio}"
            part = _math(cells, noise, variant=name)
            base = chosen(part, policy="random")
            groups = [
                (f"{_who(p, e)}, rho = {ratio}", chosen(part, policy=p, estimator=e))
                for p, e in (("random", "none"), ("top", "alphatoken"), ("top", "label"))
            ]
            text += "\n" + variant_table(cells, groups, base)
    return text


def _who(policy: str, estimator: str) -> str:
    return {"random": "random", "all": "standard"}.get(policy, f"{policy} by `{estimator}`")


def _converged(cells: Cells) -> str:
    if not chosen(cells, variant="converged"):
        return ""
    text = (
        "## A start near convergence\n\nThe model was first trained for 900 plain steps on other "
        "mathematics rows; that model is the Fisher's reference.\n"
    )
    for noise in NOISES:
        part = chosen(cells, task="sft_math", noise=noise, variant="converged")
        groups = _policies(part)
        table = variant_table(cells, groups, chosen(part, policy="random"))
        text += f"\n### {_noise(noise).capitalize()}\n\n{table}"
    return text


def _policies(part: Cells) -> list[tuple[str, Cells]]:
    keys = (("all", "none"), ("random", "none"), ("top", "alphatoken"), ("top", "label"))
    return [(_who(*key), chosen(part, policy=key[0], estimator=key[1])) for key in keys]


def _sensitivity(cells: Cells) -> str:
    text = "## Sensitivity\n\nMathematics rows; each line changes one setting of the top half.\n"
    for noise in NOISES:
        base = _random(cells, noise)
        groups = [("random half", base)]
        for estimator in ("alphatoken", "label", "direct", "path"):
            part = _math(cells, noise, policy="top", estimator=estimator)
            names = {"main": "as in the main grid", **{name: name for name in SENSITIVITY}}
            groups += [
                (f"`{estimator}`, {said}", chosen(part, variant=name))
                for name, said in names.items()
            ]
        text += f"\n### {_noise(noise).capitalize()}\n\n{variant_table(cells, groups, base)}"
    return text


def _beta(cells: Cells) -> str:
    text = "## DPO: beta\n\nClean pairs. Margins carry beta, so compare within a block.\n"
    for beta, name in ((0.05, "beta 0.05"), (0.1, "main"), (0.3, "beta 0.3")):
        part = chosen(cells, task="dpo", noise=0.0, variant=name)
        table = variant_table(cells, _policies(part), chosen(part, policy="random"), "dpo")
        text += f"\n### beta = {beta}\n\n{table}"
    return text
