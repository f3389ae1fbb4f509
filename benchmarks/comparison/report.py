"""docs/comparison.md and docs/comparison.json from the grid's folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from alphatoken.support.storage import write_json
from alphatoken_lab.commands.compare import parse
from alphatoken_lab.commands.compare_grid import read_grid
from alphatoken_lab.compare.folder import GridFolder
from alphatoken_lab.compare.grid import Cell, Grid, all_cells
from alphatoken_lab.compare.page import READ, collect, draw, rounded, sections
from alphatoken_lab.compare.tables import Record, markdown
from benchmarks.comparison.rows import FISHER, LENGTH, MIXED, PAIRS, SIZES, STORIES, TARGET

DOCS = Path(__file__).parents[2] / "docs"
CONCLUSIONS = Path(__file__).with_name("conclusions.md")
_FIRST = (
    "task", "policy", "mode", "seed", "kept_tokens", "target", "retention", "overall", "time",
    "peak_memory", "status",
)  # fmt: skip

INTRODUCTION = """# Comparison of methods

Written by `python -m benchmarks.comparison report` from measured runs; do not edit by hand. The
numbers are in [comparison.json](comparison.json), cells without a result among them.

## What was run

```
export ALPHATOKEN_DATA=...        # the model and rows that docs/results.md was measured on
python -m benchmarks.comparison run        # {cells} cells; started again it goes on
python -m benchmarks.comparison report
```

`run` is `alphatoken-lab compare --config benchmarks/comparison/stories.yaml` on rows that it writes
first; [compare.md](compare.md) explains the command. A pre-trained decoder of 260,032 parameters
(5 layers, d = 64, TinyStories text) is trained on real rows, on one CPU thread a cell: AdamW,
{steps} steps of 8 rows (pairs), a linearly falling learning rate ({rates}; LoRA {lora:g}), rows of
at most {length} tokens. Methods of one seed see the same rows in the same order.

| task | trained on | validation | held out: target | held out: retention | start |
|---|---|---|---|---|---|
| `sft` | {train} mathematics rows | {validation} | {target} of its own test file | {stories} \
stories | the pre-trained model |
| `mixed` | {mixed} of these rows and {mixed} of Python | the same | the same | the same | \
the same |
| `dpo` | {pairs} pairs of dialogues | {pair_validation} | {pair_target} | {stories} stories | the \
model after {warm} steps on general instructions and on the chosen replies |

What methods need beside the rows, so that nobody reads more than the others: `alphatoken`, `label`
and their controls read the validation rows, and a Fisher of {samples} samples on {fisher} further
prompts; `rho-1` and `token-cleaning` score with the pre-trained model after {steps_all} steps on
the same validation rows; SePO's oracle is DPO of the warm model on the validation pairs. `lora`
trains adapters of rank 16 on all linears; `self-evolving` is Token Cleaning in five rounds of a
fifth of the rows and steps each; LESS keeps rows, so at a budget it takes as many steps on all
tokens of fewer rows, and `less-half` half of the steps; `wise-ft` is half way between the start and
`standard` (`dpo`). Mode "native" is the published rule, "budget" the same score at {ratio:.0%} of
the tokens. Learning rates, steps and the methods' own options were not tuned one by one: what a
method gains from that is not in these tables.

The target is a loss on held-out rows; for DPO it is `-log sigma(s)` on held-out pairs. Retention
is the loss on text of the kind that the model was pre-trained on. Overall is the mean of both, as
the paper's is of its scores. Lower is better.

## What a model of this size can say

* It can say that each method runs, at which budget, time and memory, and whether its direction is
  right: what a rule keeps, and whether it trades target for retention.
* It cannot say which method wins on a model that follows instructions. Its start knows nothing of
  the task (a target loss of 7 to 8), so almost every token teaches; rules made for models that
  have mastered most tokens (STM, XTF, TALR, ssToken) meet another regime here.
* Differences within the spread of three seeds are none. For three seeds a 95 % interval of the
  mean is 2.5 times the printed standard deviation on either side.
* Preferences at this size are close to noise (pair accuracy near one half, see
  [results.md](results.md)); the DPO tables show costs and retention, not who aligns better.
* Times are of a tiny model, where fixed costs weigh most; ratios will be others on a large one.

"""


def write_report(words: Sequence[str], path: Path) -> None:
    """The page, its data and figures."""
    options, more = parse(words)
    grid = read_grid(options, more)
    cells = all_cells(grid)
    found = collect(cells, GridFolder(path))
    write_json(DOCS / "comparison.json", [rounded(record, _FIRST) for record in found])
    text = [_introduction(options, grid, cells)]
    if CONCLUSIONS.exists():
        text.append(CONCLUSIONS.read_text(encoding="utf-8"))
    text += ["## Tables\n", READ]
    figures = draw(grid, found, DOCS, "comparison")
    text += sections(grid, found, grid.variants, figures)
    text += ["## Budgets\n", _budgets(found, grid.keep_ratio)]
    page = "\n".join(text).rstrip() + "\n"
    (DOCS / "comparison.md").write_text(page, encoding="utf-8")
    done = sum(record["status"] == "done" for record in found)
    print(f"{done} of {len(found)} cells: {DOCS / 'comparison.md'}")


def _introduction(options: argparse.Namespace, grid: Grid, cells: Sequence[Cell]) -> str:
    tasks = {task.name: task.options for task in grid.tasks}
    references = {one.name: one.options for one in grid.references}
    lora = next(method for method in grid.methods if method.name == "lora")
    return INTRODUCTION.format(
        cells=len(cells),
        steps=" or ".join(f"{o['max_steps']} ({name})" for name, o in tasks.items()),
        steps_all=references["curated"]["max_steps"],
        rates=", ".join(f"{o['learning_rate']:g} for {name}" for name, o in tasks.items()),
        lora=lora.options["learning_rate"],
        length=LENGTH,
        train=SIZES["train"],
        validation=SIZES["validation"],
        target=TARGET,
        stories=STORIES,
        fisher=f"{FISHER} ({PAIRS['fisher']} for dpo)",
        mixed=MIXED,
        pairs=PAIRS["train"],
        pair_validation=PAIRS["validation"],
        pair_target=PAIRS["target"],
        warm=references["warm"]["max_steps"],
        samples=tasks["sft"]["fisher_samples"],
        ratio=grid.keep_ratio,
    )


def _budgets(found: Sequence[Record], ratio: float) -> str:
    """Cells in budget mode whose tokens are not the budget: what equal budget leaves open."""
    rows = [
        [
            f"`{r['task']}/{r['policy']}`",
            str(r["seed"]),
            f"{r['kept_tokens'] / r['response_tokens']:.4f}",
        ]
        for r in found
        if r["status"] == "done"
        and r["mode"] == "budget"
        and abs(r["kept_tokens"] / r["response_tokens"] - ratio) > 0.01
    ]
    if not rows:
        return f"Every budget cell trained on {ratio:.0%} of the response tokens, to 1 %.\n"
    said = (
        f"Budget cells whose share is not {ratio:.0%} to 1 %: rules that rank over the data set "
        "keep their share of it, and the steps saw a part of it; rules that choose rows train on "
        "all tokens of those.\n"
    )
    return said + "\n" + markdown(["cell", "seed", "share"], rows)
