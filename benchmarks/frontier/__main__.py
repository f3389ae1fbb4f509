"""``python -m benchmarks.frontier``: how well tokens are ranked, at what price, on real models.

Rows of gsm8k (with and without chat template), tinystories, mbpp and the standard library are
valued by parts of the parameters on SmolLM2-135M-Instruct, Gemma 3 270M and a decoder of 260,032
parameters. What each setting of the scorer ranks at is then a sum of columns, and its price a
count of FLOPs. Needs the models (``make models``, $ALPHATOKEN_MODELS) and the data
($ALPHATOKEN_DATA). Every draw is written when it is done; started again, the command goes on.
Tables of docs/frontier.md are written by ``python -m benchmarks``.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from alphatoken.support.progress import Tracker
from alphatoken_lab.runner.running import run_here
from benchmarks.data import MODELS, Model
from benchmarks.frontier.differences import differences, records_of
from benchmarks.frontier.draws import draw_rows, formats_of
from benchmarks.frontier.measure import measure, trained
from benchmarks.frontier.page import draw, save
from benchmarks.frontier.tables import Draws, collect
from benchmarks.pages import exit_status, load


def run(work: Path, model: Model, draws: int, adam: int) -> None:
    """Measure what is not there yet: one draw of every format before the next, Adam's last."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer, loaded = model.tokenizer(), cache(model.load)

    @cache
    def after_adam() -> tuple[Any, Any]:
        return trained(loaded(), tokenizer)

    def write(name: str, number: int, along_adam: bool, path: Path) -> None:
        own, optimizer = after_adam() if along_adam else (loaded(), None)
        measure(own, *draw_rows(name, number, tokenizer), optimizer).save(path)
        gc.collect()

    place, formats = work / model.key, formats_of(tokenizer)
    cells = {
        place / f"{name}-{number}{'-adam' * along_adam}.npz": partial(
            write, name, number, along_adam
        )
        for count, along_adam in ((draws, False), (adam, True))
        for number in range(count)
        for name in formats
    }
    run_here(cells, Tracker(f"{model.name}, draws", len(cells), True))


def measure_differences(out: Path, model: Model, draws: int) -> None:
    """Figures of label values by differences, beside those that are there."""
    tokenizer, loaded = model.tokenizer(), model.load()
    names = [(name, number) for number in range(draws) for name in formats_of(tokenizer)]
    tracker = Tracker(f"{model.name}, differences", len(names), True)
    shares = []
    for place, (name, number) in enumerate(names, 1):
        shares.append(differences(loaded, *draw_rows(name, number, tokenizer)))
        tracker.report(place)
    labels = tuple(f"{name}-{number}" for name, number in names)
    measured = {"draws": list(labels), "records": records_of(Draws(labels, tuple(shares), loaded))}
    _write(out, model, {"name": model.name, "differences": measured})


def publish(work: Path, out: Path, model: Model) -> None:
    """Figures of this model's draws, and the picture of all models' figures."""
    from transformers import AutoConfig

    sizes = SimpleNamespace(config=AutoConfig.from_pretrained(model.folder()))
    figures = collect(model, work / model.key, sizes)
    if figures is None:
        return
    _write(out, model, figures)


def _write(out: Path, model: Model, figures: Mapping[str, Any]) -> None:
    kept = load(out / "frontier.json")
    kept[model.key] = kept.get(model.key, {}) | figures
    models = {key: kept[key] for key in MODELS if key in kept}
    save(models, out / "frontier.json")
    if ranked := {key: one for key, one in models.items() if "records" in one}:
        draw(ranked, out / "frontier" / "frontier.svg")


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and write figures and picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frontier", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--draws", type=int, default=3, choices=range(1, 4), help="of each format (default: 3)"
    )
    parser.add_argument(
        "--adam", type=int, default=1, choices=range(4), help="of them for Adam (default: 1)"
    )
    parser.add_argument("--work", type=Path, default=Path("build/frontier"))
    parser.add_argument("--out", type=Path, default=Path("docs"), help="of figures and picture")
    parser.add_argument(
        "--page", action="store_true", help="measure nothing: figures of the draws that are there"
    )
    parser.add_argument(
        "--differences",
        action="store_true",
        help="measure label values by differences, beside the figures that are there (minutes)",
    )
    options = parser.parse_args(words)
    return exit_status(partial(_run, options))


def _run(options: argparse.Namespace) -> None:
    for key in options.models:
        if options.differences:
            measure_differences(options.out, MODELS[key], options.draws)
            continue
        if not options.page:
            run(options.work, MODELS[key], options.draws, options.adam)
        publish(options.work, options.out, MODELS[key])


if __name__ == "__main__":
    sys.exit(main())
