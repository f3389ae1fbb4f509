"""Why a half by value buys what it buys: what it keeps of the planted words, as training goes on.

The runs of the grid's first seed on ``noisy-words`` again, with their values written down. Each
training row is seen once, so that the last step of a token is the step at which it was kept or
not. And on the start model: how far values against one half of the validation rows agree with
those against the other.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.stats import spearmanr

from alphatoken import Scorer, ScorerConfig
from alphatoken.data import Example, batches
from alphatoken.report import read_values
from alphatoken.support.storage import write_json
from alphatoken.train.report import VALUES
from alphatoken_lab.compare.folder import GridFolder
from alphatoken_lab.compare.grid import Grid, all_cells
from benchmarks.selection.finding import (
    BATCH,
    DRAWS,
    HELD,
    PARTS,
    SETTINGS,
    examples_of,
    replaced_tokens,
)

__all__ = ["METHODS", "QUARTERS", "agreement", "kept_shares", "main", "response"]

Tokens = tuple[int, ...]

METHODS = ("alphatoken", "label", "full-step", "full-step-all")
QUARTERS = 4
AGREEING = 40
"""Rows on which agreement is measured."""


def main(grid: Grid, folder: GridFolder, model: str, rows: Path, out: Path) -> None:
    """Run every method of ``METHODS`` once more and write ``out``; what it holds is not rerun."""
    from alphatoken.train.loading import load_with_tokenizer

    loaded, tokenizer = load_with_tokenizer(model)
    found: dict[str, Any] = {"kept": {}}
    if out.exists():
        found = json.loads(out.read_text(encoding="utf-8"))
    if "agreement" not in found:
        found["agreement"] = agreement(loaded.float().eval(), tokenizer, rows)
        write_json(out, found)
    del loaded
    every = examples_of(rows / "noisy-words.jsonl", tokenizer)
    marks = replaced_tokens(rows, every, tokenizer)
    planted = {response(one): mark for one, mark in zip(every, marks, strict=True)}
    for method in METHODS:
        if method not in found["kept"]:
            options = folder.resolved(_chosen(grid, folder, method))
            found["kept"][method] = kept_shares(run(options), planted)
            write_json(out, found)
            print(f"{method}: {found['kept'][method]}", flush=True)


def _chosen(grid: Grid, folder: GridFolder, method: str) -> Any:
    """The cell of the first seed, at the rate that was chosen."""
    of = [
        cell for cell in all_cells(grid)
        if (cell.task, cell.policy, cell.seed) == ("noisy-words", method, grid.seeds[0])
    ]  # fmt: skip
    best = of[0].name if len(of) == 1 else folder.best([cell.name for cell in of])
    return next(cell for cell in of if cell.name == best)


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """``alphatoken sft`` with these options; a record of each response token that it saw."""
    from alphatoken.cli.arguments import read_arguments
    from alphatoken.cli.training import build_trainer, trainer_of

    with tempfile.TemporaryDirectory() as place:
        own = {**options, "output_dir": place, "export_values": True, "disable_tqdm": True}
        recipe = Path(place) / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(own), encoding="utf-8")
        configuration, kind = trainer_of("sft")
        arguments = read_arguments("sft", ["--config", str(recipe)], configuration)
        trainer, _ = build_trainer(arguments, kind)
        trainer.train()
        examples = list(read_values(Path(place) / VALUES))
    records = []
    for one in examples:
        assert one.visits is not None
        told = {"rows": one.visits.rows, "last_step": one.visits.last_step}
        ids, shares = np.asarray(one.ids), one.visits.kept_share
        pairs = zip(ids[one.response].tolist(), shares[one.response].tolist(), strict=True)
        records += [{**told, "token_id": token, "kept_share": share} for token, share in pairs]
    return records


def response(example: Example) -> Tokens:
    """Its response's tokens, by which a row is known: a Fisher sets some rows aside, and what is
    left is numbered anew."""
    return tuple(label for label in example.labels if label != -100)


def kept_shares(
    records: Sequence[Mapping[str, Any]], planted: Mapping[Tokens, NDArray[np.bool_]]
) -> list[dict[str, float]]:
    """By quarter of the steps: the share of planted tokens that is kept, and of the others.

    Args:
        records: of each response token that was trained on or dropped, row by row in its order.
        planted: of each response, which of its tokens were.
    """
    kept: dict[int, list[bool]] = {}
    steps: dict[int, int] = {}
    tokens: dict[int, list[int]] = {}
    for one in records:
        (row,) = one["rows"]
        kept.setdefault(row, []).append(one["kept_share"] > 0)
        tokens.setdefault(row, []).append(one["token_id"])
        steps[row] = one["last_step"]
    unknown = [row for row, ids in tokens.items() if tuple(ids) not in planted]
    if unknown:
        raise RuntimeError(f"row {unknown[0]} was valued and is not in the file")
    last = max(steps.values()) + 1
    found = []
    for quarter in range(QUARTERS):
        of = [row for row, step in steps.items() if step * QUARTERS // last == quarter]
        marks = np.concatenate([planted[tuple(tokens[row])] for row in of])
        chosen = np.concatenate([kept[row] for row in of])
        found.append({"planted": float(chosen[marks].mean()), "real": float(chosen[~marks].mean())})
    return found


def agreement(
    model: Any, tokenizer: Any, rows: Path, say: Callable[[str], None] = print
) -> dict[str, dict[str, float]]:
    """Spearman's correlation of values against two halves of the validation rows, by setting.

    Over all response tokens of ``AGREEING`` rows together; the 95 % interval draws rows anew.
    """
    held = examples_of(rows / "validation.jsonl", tokenizer)[:HELD]
    parts = [next(batches(held[k::PARTS], HELD)) for k in range(PARTS)]
    examples = examples_of(rows / "noisy-words.jsonl", tokenizer)[:AGREEING]
    generator = np.random.default_rng(0)
    draws = [generator.integers(len(examples), size=len(examples)) for _ in range(DRAWS)]
    found = {}
    for name, options in SETTINGS.items():
        scorer = Scorer(model, parts, config=ScorerConfig(standard_errors=True, **options))
        scorer.warn = False
        halves: list[NDArray[np.float64]] = []
        for batch in batches(examples, BATCH):
            values = scorer.score(batch)
            assert values.parts is not None
            both = values.parts.unflatten(-1, (2, PARTS // 2)).sum(-1).double().cpu()
            halves += [line[kept].numpy() for line, kept in zip(both, values.mask, strict=True)]
        again = [_correlation([halves[i] for i in draw]) for draw in draws]
        low, high = np.quantile(again, [0.025, 0.975])
        found[name] = {"rho": _correlation(halves), "low": float(low), "high": float(high)}
        say(f"{name}: {found[name]}")
    return found


def _correlation(halves: Sequence[NDArray[np.float64]]) -> float:
    both = np.concatenate(halves)
    return float(spearmanr(both[:, 0], both[:, 1]).statistic)
