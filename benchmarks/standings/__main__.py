"""``python -m benchmarks.standings``: how well each value predicts what training does.

Every run and every value is a cell of its own, kept when it is done: interrupted and started again,
the command goes on; a task that is done has a summary.json beside its cells. Needs the models and
the data as ``python -m benchmarks.frontier`` does.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from alphatoken.support.progress import Tracker
from alphatoken.support.storage import replacing, write_json
from alphatoken_lab.runner.running import run_here
from benchmarks.data import MODELS
from benchmarks.pages import DOCS, exit_status, load
from benchmarks.standings.facts import facts, places, shared_words, taught, with_question
from benchmarks.standings.page import DROPS, ENDS, drop, subset, summary, write_report
from benchmarks.standings.runs import TASKS, Numbers, Scale, Setting, setting_of
from benchmarks.standings.values import OF_THE_RUN, VALUES

SCALES = {
    "small": Scale(
        rows=256,
        length=128,
        steps=256,
        size=2,
        rates={"words": 1e-3, "mixed": 1e-3, "responses": 4e-3},
        letters=60,
    ),
    "smollm2": Scale(
        rows=80,
        length=80,
        steps=40,
        size=4,
        rates=dict.fromkeys(TASKS, 5e-5),
        letters=120,
        bf16=True,
        subsets=24,
        again=0,
        units=("tokens",),
        drops=0,
        without=frozenset(OF_THE_RUN),
    ),
}


EXAMS = {"small": (2e-3, 200), "smollm2": (5e-5, 100)}
"""Learning rate and steps with which a model is taught the facts."""

QUESTIONS = {"small": 30, "smollm2": 10}


class Cells:
    """The cells of one model and task, in a folder: values, and runs on weights of the tokens."""

    def __init__(self, folder: Path, setting: Setting, scale: Scale) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.setting, self.scale = folder, setting, scale
        self.names = [name for name in VALUES if name not in scale.without]

    def values(self, name: str) -> Numbers:
        """Values of this name, of their cell's file."""
        numbers = np.load(self._value_file(name), allow_pickle=False)
        return np.asarray(numbers, dtype=np.float64)

    def all_cells(self) -> dict[Path, Callable[[Path], None]]:
        """File of each cell and what writes it: values, then runs, some of which drop by values.

        Runs are of all tokens and of subsets, under two seeds, of random drops, and of drops by
        each value.
        """
        scale, setting = self.scale, self.setting
        cells: dict[Path, Callable[[Path], None]] = {
            self._value_file(name): partial(self._write_values, name) for name in self.names
        }

        def add(name: str, weights: Callable[[], Numbers | None], seed: int = 0) -> None:
            cells[self.folder / f"{name}.json"] = partial(self._train, weights, seed)

        for seed in (0, 1):
            add(f"all, seed {seed}", lambda: None, seed)
        for number in range(scale.subsets):
            for unit in scale.units:
                half = partial(subset, setting, unit, number)
                add(f"{unit} {number}", half)
                if number < scale.again:  # enough for the ceiling
                    add(f"{unit} {number}, seed 1", half, 1)
        for share in DROPS if scale.drops else ():
            for number in range(scale.drops):
                draw = np.random.default_rng([number, 3]).standard_normal(setting.tokens)
                add(f"random {number} {share}", partial(drop, setting, draw, share, best=True))
            for name in self.names:
                for end in ENDS:
                    add(f"{end} {share} {name}", partial(self._drop, name, share, end == "best"))
        return cells

    def _value_file(self, name: str) -> Path:
        return self.folder / f"value {name}.npy"

    def _write_values(self, name: str, path: Path) -> None:
        numbers = VALUES[name](self.setting)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, numbers)

    def _train(self, weights: Callable[[], Numbers | None], seed: int, path: Path) -> None:
        write_json(path, self.setting.train(weights(), seed))

    def _drop(self, name: str, share: float, best: bool) -> Numbers:
        return drop(self.setting, self.values(name), share, best=best)


def measure(options: argparse.Namespace, key: str, task: str) -> None:
    """All cells of a model and a task."""
    model = MODELS[key]
    setting = setting_of(task, model.load(), model.tokenizer(), SCALES[key])
    cells = Cells(options.work / key / task, setting, SCALES[key])
    every = cells.all_cells()
    run_here(every, Tracker(f"{model.name}, {task}", len(every), True))
    write_json(cells.folder / "summary.json", summary(cells))


def question(options: argparse.Namespace, key: str) -> None:
    """Which rows each value brings up for questions about planted facts."""
    tokenizer = MODELS[key].tokenizer()
    path, people = options.work / key / "facts.json", facts()
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = random.Random("questions").sample(range(len(people)), QUESTIONS[key])
    answers = load(path)
    own = taught(MODELS[key].load(), tokenizer, people, *EXAMS[key])
    names = [name for name in VALUES if name not in OF_THE_RUN]
    tracker = Tracker(f"{MODELS[key].name}, facts", len(numbers), True)
    for place, number in enumerate(numbers, 1):
        if str(number) not in answers:
            one = with_question(own, tokenizer, people[number])
            lexical = {"words in common": shared_words(people, number)}
            answers[str(number)] = {**lexical, **places(one, number, names)}
            write_json(path, answers)
        tracker.report(place)


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is not there yet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.standings", description=__doc__)
    tasks = [*TASKS, "facts"]
    parser.add_argument("--models", nargs="+", choices=list(SCALES), default=list(SCALES))
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks)
    parser.add_argument("--work", type=Path, default=Path("build/standings"))
    parser.add_argument("--docs", type=Path, default=DOCS, help="where figures and picture go")
    options = parser.parse_args(words)
    return exit_status(partial(_run, options))


def _run(options: argparse.Namespace) -> None:
    for key in options.models:
        for task in options.tasks:
            if task == "facts":
                question(options, key)
            else:
                measure(options, key, task)
            write_report(options.work, options.docs)


if __name__ == "__main__":
    sys.exit(main())
