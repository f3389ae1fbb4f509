"""Who finds the dirt: marks on tokens, areas by hand, and a whole run on a small trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alphatoken.data import Example, Row, Turn
from benchmarks.selection import finding
from benchmarks.selection.finding import _areas, excess, walk


def example(text: str, tokenizer: Any) -> Example:
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    row = Row(0, "here", (Turn("user", "q"), Turn("assistant", text)))
    return Example(row, [1, *ids], [-100, *ids])


def test_areas_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "DRAWS", 20)
    low, high = np.asarray([1.0, 5.0]), np.asarray([2.0, 9.0])
    rows = [
        (np.asarray([True, False]), {"found": low, "turned": -low, "blind": np.zeros(2)}),
        (np.asarray([True, False]), {"found": high, "turned": -high, "blind": np.zeros(2)}),
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
    from alphatoken.oracle.gradients import label_values

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
