"""Rows of the benchmarks on real models: real text, every side counted, floors that are floors.

On the small decoder that is trained here; the real models take minutes, and only the command
measures them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import real
from benchmarks.data import Model
from benchmarks.floors import Shape
from benchmarks.measure import Run
from benchmarks.peak import head_at_responses
from benchmarks.targets import judged

QUICK = Run(torch.device("cpu"), quick=True)


@pytest.fixture
def small(library_decoder: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The small decoder in SmolLM2's place, on rows of the standard library."""
    monkeypatch.setenv("ALPHATOKEN_MODELS", str(library_decoder.parent))
    monkeypatch.delenv("ALPHATOKEN_DATA", raising=False)
    return Model("smollm2", "library decoder", library_decoder.name)


def test_every_side_is_measured_and_none_goes_below_its_floor(small: Model) -> None:
    found = [*real.rows_of(QUICK, small), *real.differences_of(QUICK, small)]
    names = {row["name"].removeprefix("smollm2_") for row in found}
    assert names == {
        "forward", "score_k3", "observe_k3", "validation", "first_use", "label_linears",
        "label_all", "label_central", "label_one_sided",
    }  # fmt: skip
    shape = Shape.of(small.load(), *real.QUICK[0])
    responses = int(found[0]["size"].split(", ")[-1].split()[0])
    # Of the head's products the logits alone are formed once more than in TRL's own step.
    logits = shape.with_responses(responses).head / found[0]["flops_other"]
    for row in found:
        counted = row["flops"] / row["flops_other"]
        assert row["floor"] <= counted * (1 + 1e-9), row["size"]
        assert row["ratio"] > 0
        assert row["pairs"] == 1
        assert "of the standard library, " in row["size"]
        # One error of the head, for values and training: no other product with the vocabulary.
        if row["name"].endswith("observe_k3") and row["size"].startswith("label"):
            assert counted <= 1.01 * (row["floor"] + logits)
    forward = next(row for row in found if row["name"].endswith("_forward"))
    assert forward["flops"] / forward["flops_other"] == pytest.approx(forward["floor"], rel=1e-12)
    observed = next(row for row in found if row["name"].endswith("observe_k3"))
    assert judged(observed)["target"] == pytest.approx(1.05 * observed["floor"])
    assert judged(next(r for r in found if r["name"].endswith("label_all")))["target"] == 1.1
    for name in ("label_central", "label_one_sided"):  # no look at the error among the timed
        row = next(row for row in found if row["name"].endswith(name))
        assert row["flops"] / row["flops_other"] <= 1.01 * (row["floor"] + logits), name


def test_the_head_at_responses_is_of_one_model_alone(library_decoder: Path) -> None:
    """Other trainers of the process keep TRL's own head."""
    from transformers import AutoModelForCausalLM
    from trl.trainer import utils

    before = utils._use_triton
    model = head_at_responses(AutoModelForCausalLM.from_pretrained(library_decoder))
    ids = torch.arange(4, 10)[None]
    labels = ids.where(torch.arange(6) > 2, -100)
    output = model(input_ids=ids, labels=labels, fused_lm_head=True)
    node = output.log_probs.grad_fn
    while type(node).__name__ != "ChunkedLogProbFunctionBackward":
        node = next(parent for parent, _ in node.next_functions if parent is not None)
    assert len(node.saved_tensors[3]) == 3
    assert utils._use_triton is before
