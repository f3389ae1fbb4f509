"""Who finds the dirt: marks on tokens, areas by hand, and a whole run on a small trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alphatoken.data import Example, Row, Turn
from benchmarks.selection import finding
from benchmarks.selection.finding import _areas, _replaced, _Row, excess, find_dirt, walk


def example(text: str, tokenizer: Any) -> Example:
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    row = Row(0, "here", (Turn("user", "q"), Turn("assistant", text)))
    return Example(row, [1, *ids], [-100, *ids])


def test_tokens_of_replaced_words_are_marked(library_decoder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(library_decoder)
    text = "return value of the value"
    one = example(text, tokenizer)
    marked = _replaced(one, {"replaced": [0, 1, 0, 0, 1]}, tokenizer)
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = {*range(7, 12), *range(20, 25)}
    expected = [bool(inside & set(range(a, b))) for a, b in spans["offset_mapping"]]
    assert marked.tolist() == [*expected, False]
    assert 0 < sum(expected) < len(expected)
    with pytest.raises(RuntimeError, match="another way"):
        _replaced(one, {"replaced": [0] * 5}, tokenizer_of(text))


def tokenizer_of(text: str) -> Any:
    """One that tokenises everything differently."""

    def call(_: str, **more: Any) -> dict[str, Any]:
        return {"input_ids": [9, 9], "offset_mapping": [(0, 1), (1, 2)]}

    return call


def test_areas_by_hand() -> None:
    low, high = np.asarray([1.0, 5.0]), np.asarray([2.0, 9.0])
    rows = [
        _Row(np.asarray([True, False]), {"found": low, "turned": -low, "blind": np.zeros(2)}),
        _Row(np.asarray([True, False]), {"found": high, "turned": -high, "blind": np.zeros(2)}),
    ]
    areas = _areas(rows)
    assert areas["planted"] == 0.5
    assert areas["found"]["auc"] == 1.0  # both planted tokens are lower than both real ones
    assert areas["turned"]["auc"] == 0.0
    assert areas["blind"] == {"auc": 0.5, "low": 0.5, "high": 0.5}


def test_the_excess_is_an_exact_value_to_first_order(
    library_decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Towards the ends of a walk it is -<g_t, Delta>, by autograd token for token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from alphatoken.data import batches
    from alphatoken.oracle import label_values

    model = AutoModelForCausalLM.from_pretrained(library_decoder).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(library_decoder)
    rows = [example("return value of the value", tokenizer), example("def f(x):", tokenizer)]
    held = [example("class A: pass", tokenizer), example("import os", tokenizer)]
    monkeypatch.setattr(finding, "WALK", (1, 3))
    monkeypatch.setattr(finding, "BATCH", 1)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    ends = walk(model, held)
    found = excess(model, ends, rows)
    for name, one in model.named_parameters():
        assert torch.equal(one, before[name])
    for steps, end in ends.items():
        walked = zip(before.items(), end, strict=True)
        step = {name: after - own for (name, own), after in walked}
        # AdamW's first step is as long as its rate in every parameter with a gradient.
        longest = max(float(one.abs().max()) for one in step.values())
        assert longest == pytest.approx(steps * finding.RATE, rel=0.1)
        for i, row in enumerate(rows):
            whole = next(batches([row], 1))
            values = label_values(model, lambda b: model(**b).logits, whole, step)
            expected = -values[0, whole["labels"][0] != -100].numpy()
            # Losses are float32: 1e-7 of 5, over 2 x SHORT.
            first = found[finding.FIRST.format(steps)][i]
            assert first == pytest.approx(expected, rel=1e-3, abs=3e-5)
            if steps == max(ends):
                whole_excess = found[finding.EXCESS.format(steps)][i]
                assert whole_excess == pytest.approx(expected, rel=0.05, abs=1e-3)


@pytest.mark.slow
def test_a_whole_run_finds_planted_words_by_loss(
    library_decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import random

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from alphatoken.data.stdlib import code_rows
    from benchmarks.selection.rows import exchanged, replaced

    rows = [{"prompt": row.prompt, "response": row.response[:120]} for row in code_rows(48)]
    generator = random.Random(0)
    words, marks = replaced(rows[:24], 0.3, generator)
    for row, mark in zip(words, marks, strict=True):  # by what no model expects anywhere
        old = row["response"].split()
        new = ["zqxj" if bad else w for w, bad in zip(old, mark["replaced"], strict=True)]
        row["response"] = " ".join(new)
    swapped, dirty = exchanged(rows[:24], 0.3, generator)
    files = {
        "validation": rows[24:],
        "noisy-words": words,
        "noisy-words-marks": marks,
        "noisy-responses": swapped,
        "noisy-responses-marks": [{"exchanged": int(bad)} for bad in dirty],
    }
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    monkeypatch.setattr(finding, "PARTS", 3)
    model = AutoModelForCausalLM.from_pretrained(library_decoder)
    tokenizer = AutoTokenizer.from_pretrained(library_decoder)
    said: list[str] = []
    found = find_dirt(model, tokenizer, tmp_path, said.append)
    assert set(found) == {"noisy-words", "noisy-responses"}
    assert found["noisy-words"]["loss"]["auc"] > 0.75
    for task in found.values():
        numbers = [one for one in task.values() if isinstance(one, dict)]
        assert len(numbers) == 3 + len(finding.WALK) + 2 * len(finding.SETTINGS) + 1
        assert all(0 <= one["low"] <= one["auc"] <= one["high"] <= 1 for one in numbers)
    assert len(said) == 1 + 2 * (3 + len(finding.SETTINGS))


def test_an_interval_of_areas_is_of_95_in_100() -> None:
    """Two rows found and two turned round: 1 in 16 draws holds one kind alone."""
    from benchmarks.selection.finding import _areas, _Row

    marked = np.asarray([True, False])
    made = [_Row(marked, {"n": np.asarray(x)}) for x in ([0.0, 1.0], [3.0, 2.0]) * 2]
    found = _areas(made)["n"]
    assert found == {"auc": 0.5, "low": 0.0, "high": 1.0}


def test_numbers_are_values_errors_and_lengths(library_decoder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from alphatoken import Scorer, ScorerConfig
    from alphatoken.data import batches
    from benchmarks.selection import finding
    from tests.benchmarks.test_selection_finding import example

    model = AutoModelForCausalLM.from_pretrained(library_decoder).eval()
    tokenizer = AutoTokenizer.from_pretrained(library_decoder)
    made = [example("return value of the value", tokenizer), example("def f(x):", tokenizer)]
    parts = [next(batches([example(x, tokenizer)], 1)) for x in ("class A: pass", "import os")]
    found = finding._numbers(model, made, parts, lambda _: None)
    name = "label, K = 3"
    options = finding.SETTINGS[name]
    scorer = Scorer(model, parts, config=ScorerConfig(standard_errors=True, **options))
    values = scorer.score(next(batches(made, 2)))
    for i, kept in enumerate(values.mask):
        value, error = values.total[i, kept], values.standard_error()[i, kept]
        assert found[name][i] == pytest.approx(value.numpy(), rel=1e-4, abs=1e-7)
        over = found[f"{name}, over its error"][i]
        assert over == pytest.approx((value / error).numpy(), rel=1e-2, abs=1e-3)
        first = next(iter(finding.SETTINGS))
        length = -found["length of the gradient, K = 3"][i]  # the planted is lower
        assert (length > 0).all()
        assert found[f"{first}, over its length"][i] * length == pytest.approx(found[first][i])
