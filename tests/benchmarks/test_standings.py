"""Standings: training is the oracle's run, yardsticks rank what they should, cells are kept."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from alphatoken.data import Example, Row
from alphatoken.oracle.gradients import batch_mask
from alphatoken.oracle.run import run_end, run_loss
from alphatoken.support.progress import Tracker
from alphatoken.support.storage import write_json
from alphatoken_lab.runner.running import run_here
from benchmarks.models import decoder
from benchmarks.pages import load
from benchmarks.standings import __main__ as standings
from benchmarks.standings import page
from benchmarks.standings.__main__ import Cells
from benchmarks.standings.facts import facts, places, shared_words, taught, with_question
from benchmarks.standings.page import DROPS, above, drop, lds, precision, subset, summary
from benchmarks.standings.runs import TASKS, Numbers, Scale, Setting, forward_of
from benchmarks.standings.values import VALUES

SCALE = Scale(
    rows=30, length=12, steps=5, size=6, rates={"mixed": 1e-2}, subsets=6, again=4, drops=2
)


def rows(count: int, seed: int) -> list[Example]:
    draw = np.random.default_rng(seed)
    found = []
    for number in range(count):
        ids = draw.integers(3, 40, 8 + number % 3).tolist()
        found.append(Example(Row(number, str(number), ()), ids, [-100] * 3 + ids[3:]))
    return found


def setting(steps: int = 15, size: int = 2) -> Setting:
    sizes: dict[str, Any] = {"intermediate_size": 24, "num_key_value_heads": 2}
    model = decoder(16, 4, vocabulary=40, heads=2, attn_implementation="eager", **sizes).eval()
    return Setting(
        *(model, rows(30, 1), rows(3, 2), rows(3, 3)),
        steps=steps,
        size=size,
        rate=1e-2,
        good=np.arange(30) < 12,
    )


def placed(own: Setting, rows: list[int], numbers: Numbers) -> Tensor:
    return own.placed(batch_mask(own.batch(rows)), rows, numbers)


def test_training_is_the_oracles_run() -> None:
    """The same J, with all tokens and with half of them; numbers of a batch come back."""
    own = setting()
    kept = subset(own, "tokens", 0)
    weights = [[placed(own, rows, kept)] for rows in own.order(3)]
    for given, weighted in ((None, None), (weights, kept)):
        end = run_end(own.model, forward_of(own.model), own.run(3), given)
        wanted = run_loss(own.model, forward_of(own.model), end, own.validations())
        assert own.train(weighted, 3)["validation"] == pytest.approx(wanted, abs=2e-5)
    numbers = np.arange(own.tokens, dtype=np.float64)
    pairs = [(rows, placed(own, rows, numbers)) for rows, _ in own.batches()]
    assert np.array_equal(own.to_numbers(pairs), numbers)


def test_the_runs_own_values_rank_short_runs_best() -> None:
    """Not at 1: under Adam a weight of 0 is no small change, however small the rate."""
    own = replace(setting(steps=8), rate=3e-4)
    kept = [subset(own, "tokens", i) for i in range(24)]
    losses = [own.train(weights, 0)["validation"] for weights in kept]
    found, low, high = lds(VALUES["run value"](own), kept, losses)
    assert found > 0.8
    assert low <= found <= high
    assert abs(lds(VALUES["random"](own), kept, losses)[0]) < 0.6
    run, chance = VALUES["run value"](own), VALUES["random"](own)
    assert above(run, [chance, -run], kept, losses)
    assert not above(run, [chance, run], kept, losses)


def test_every_value_is_a_number_a_token() -> None:
    own = setting(steps=8)
    for name, of in VALUES.items():
        found = of(own)
        assert found.shape == (own.tokens,), name
        assert np.isfinite(found).all(), name
        assert found.std() > 0, name


def test_a_drop_leaves_out_the_share_that_it_says() -> None:
    own, values = setting(), np.arange(float(setting().tokens))
    best, worst = (drop(own, values, 0.2, best=b) for b in (True, False))
    count = round(0.2 * own.tokens)
    assert (best == 0).sum() == (worst == 0).sum() == count
    assert values[best == 0].min() > values[best == 1].max()
    assert values[worst == 0].max() < values[worst == 1].min()
    halves = subset(own, "rows", 1)
    assert {float(halves[own.row_of == r].mean()) for r in range(30)} == {0.0, 1.0}


def test_cells_are_kept_and_say_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped and started again, no cell is run twice; the summary has every value."""
    few = {name: VALUES[name] for name in ("random", "loss", "entropy")}
    monkeypatch.setattr(standings, "VALUES", few)
    scale = replace(SCALE, without=frozenset({"entropy"}))
    cells = Cells(tmp_path / "small" / "mixed", setting(steps=5, size=6), scale)
    every = cells.all_cells()
    first = dict(list(every.items())[:7])  # two values and five runs
    run_here(first, Tracker("cells", len(first), False))
    runs: list[int] = []
    train = Setting.train

    def counted(own: Setting, weights: Any, seed: int) -> dict[str, float]:
        runs.append(seed)
        return train(own, weights, seed)

    monkeypatch.setattr(Setting, "train", counted)
    run_here(every, Tracker("cells", len(every), False))
    assert len(runs) == len(every) - 7
    docs = tmp_path / "docs"
    docs.mkdir()
    write_json(cells.folder / "summary.json", summary(cells))
    page.write_report(tmp_path, docs)
    cells.folder.rename(cells.folder.with_name("words"))
    page.write_report(tmp_path, docs)
    report = load(docs / "standings.json")
    assert list(report["runs"]["small"]) == ["mixed", "words"]  # what another day measured stays
    found = report["runs"]["small"]["mixed"]
    assert found["says"] == TASKS["mixed"][0]
    assert set(found["values"]) == {"random", "loss"}
    one = found["values"]["loss"]
    assert len(one["drops"]) == 2 * len(DROPS)
    assert len(found["ceiling"]["tokens"]) == 3
    assert found["good"] == 0.4
    cells = Cells(
        tmp_path / "small" / "words",
        setting(steps=5, size=6),
        replace(scale, again=0, units=("tokens",)),
    )
    assert set(summary(cells)["ceiling"].values()) == {None}
    assert (docs / "standings.svg").is_file()
    monkeypatch.setattr(page, "DOCS", docs)
    for words in (("lds", "small"), ("rows", "small"), ("drops", "small", "mixed")):
        lines = page.tables(*words).splitlines()
        assert sum("loss" in line for line in lines) == 1, words
        assert len({line.count("|") for line in lines}) == 1, words


def test_good_rows_are_brought_up_by_their_mean() -> None:
    """Average precision: 1 where all good rows come first; by hand where one comes between."""
    own = setting()
    ends = np.where(own.good, 1.0, 0.0)
    assert precision(own, ends[own.row_of]) == 1.0
    ends[20] = 2.0  # a bad row before the 12 good ones
    wanted = np.mean([(k + 1) / (k + 2) for k in range(12)])
    assert precision(own, ends[own.row_of]) == pytest.approx(wanted)
    assert precision(replace(own, good=np.ones(30, bool)), ends[own.row_of]) is None


def test_entropy_is_that_of_the_prediction_of_the_token() -> None:
    own = setting()
    batch = own.batch([4])
    logits = own.model(input_ids=batch["input_ids"]).logits[0].double()
    p = logits.softmax(-1)
    spread = -(p * p.log()).sum(-1)[:-1][batch["labels"][0, 1:] != -100]
    found = VALUES["entropy"](own)[own.row_of == 4]
    assert np.allclose(found, spread.detach().numpy(), atol=1e-5)


def test_facts_are_two_hundred_and_each_is_asked_for_once() -> None:
    known = facts()
    assert len({f.sentence for f in known}) == len({f.question for f in known}) == 200
    assert all(f.answer in f.sentence and f.person in f.question for f in known)
    assert all(1 <= shared_words(known, i) <= 200 for i in range(0, 200, 40))
    assert facts(1) != known


def test_a_right_row_has_the_place_that_its_value_gives_it(
    library_decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of 200 where all are alike; the first where it alone has a value."""
    tokenizer = AutoTokenizer.from_pretrained(library_decoder)
    model = AutoModelForCausalLM.from_pretrained(library_decoder, dtype=torch.float32)
    known = facts()
    own = taught(model, tokenizer, known, rate=2e-3, steps=30)
    assert len(own.rows) == 200
    assert not torch.equal(*(next(m.parameters()) for m in (model, own.model)))
    one = with_question(own, tokenizer, known[7])
    chosen = {"alike": one.row_of * 0.0, "alone": (one.row_of == 7) * 1.0}
    monkeypatch.setattr(
        "benchmarks.standings.facts.VALUES", {n: lambda _, v=v: v for n, v in chosen.items()}
    )
    assert places(one, 7, list(chosen)) == {"alike": 200, "alone": 1}
    found = page.recalled({"7": {"alike": 200, "alone": 1}, "8": {"alike": 4, "alone": 2}})
    assert [found["values"]["alone"][k][0] for k in ("first", "in 5", "1 / place")] == [
        0.5,
        1,
        0.75,
    ]
    assert found["values"]["alike"]["in 5"] == [0.5, 0.0, 1.0]


def test_answers_are_kept_where_nothing_was_measured_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"taught": None, "with_question": None, "places": {"alike": 200}}
    model = SimpleNamespace(name="small", load=lambda: None, tokenizer=lambda: None)
    monkeypatch.setattr(standings, "MODELS", {"small": model})
    for name, answer in answers.items():
        monkeypatch.setattr(standings, name, lambda *_, answer=answer: answer)
    work = tmp_path / "new"
    standings.question(argparse.Namespace(work=work), "small")
    found = load(work / "small" / "facts.json")
    assert len(found) == standings.QUESTIONS["small"]
    assert {one["alike"] for one in found.values()} == {200}
    assert all(1 <= one["words in common"] <= 200 for one in found.values())
