"""Each diagnostic on a small trained decoder and real rows: its shape, and what must come out."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alphatoken.diagnose import find
from alphatoken.diagnose.diagnosis import Diagnosis
from alphatoken.diagnose.subject import Subject
from alphatoken.support.resume import weights_digest
from tests.integration.subjects import RETENTION, examples, model, subject
from tests.places import nightly

pytestmark = [pytest.mark.slow, pytest.mark.pictures]

SUBJECTS: dict[str, partial[Subject]] = {
    "estimators": partial(subject, "near", oracle_tokens=12),
    "utility": partial(subject, "near", oracle_tokens=12, batch_size=3),
    "value-propagation": partial(
        subject, "near", train_rows=10, validation_rows=4, length=40, tokens=400, batch_size=5
    ),
    "fisher": partial(
        subject, "near", train_rows=10, validation_rows=2, length=48, tokens=300,
        fisher_samples=10, tuning_steps=4,
    ),
    "heatmap": partial(subject, "far", tokens=400),
    "coverage": partial(subject, "far", tokens=400),
    "drift": partial(subject, "far", tuning_steps=10, length=128),
    "sensitivity": partial(subject, "near", validation_rows=8, length=128),
    "stability": partial(subject, "near", validation_rows=16, length=128),
    "arithmetic": partial(subject, "near", validation_rows=8, length=128),
}  # fmt: skip
QUICK: dict[str, dict[str, Any]] = {
    "estimators": {"layers": (1, 3)},
    "utility": {"warmup": 6},
    "value-propagation": {"pairs": 600},
    "fisher": {"rows": 2, "max_new_tokens": 6},
    "heatmap": {"examples": 2},
    "coverage": {"draws": 40, "clusters": 6, "points": 200},
    "drift": {"probes": 8},
    "sensitivity": {
        "estimators": ("alphatoken", "path", "label"), "layers": (1, 3, 5), "windows": (0, 32),
        "weights": (0.0, 1.5, 15.0),
    },
    "stability": {"resamples": 200},
    "arithmetic": {"resamples": 200},
}  # fmt: skip


def diagnose(name: str, given: Subject, **options: Any) -> Diagnosis:
    module = find(name).load()
    found: Diagnosis = module.diagnose(given, module.Options(**QUICK[name] | options))
    return found


def given(name: str) -> Subject:
    """Retention rows of ordinary length for ``fisher``: short ones have no response."""
    kept = {one: examples(one, 180, 2) for one in RETENTION} if name == "fisher" else None
    return SUBJECTS[name](**({} if kept is None else {"retention": kept}))


@cache
def diagnosed(name: str) -> Diagnosis:
    one = given(name)
    before = weights_digest(one.model)
    found = diagnose(name, one)
    assert weights_digest(one.model) == before
    assert all(p.grad is None for p in one.model.parameters())
    return found


def records(name: str, table: str, *keys: str) -> dict[Any, dict[str, Any]]:
    """Rows of a table by the entries of these columns."""
    found = diagnosed(name).table(table).records()
    return {tuple(r[k] for k in keys) if len(keys) > 1 else r[keys[0]]: r for r in found}


ALONE = ("value-propagation", "heatmap", "coverage", "arithmetic")
"""Of which nothing more is tested here: on tiny models each has properties of its own."""


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=nightly if one in ALONE else ()) for one in SUBJECTS]
)
def test_a_diagnosis_is_an_answer_tables_with_intervals_and_figures(
    name: str, tmp_path: Path
) -> None:
    found = diagnosed(name)
    assert (found.name, found.question) == (name, find(name).question)
    assert "[" in found.conclusion
    tokens = "" if name == "drift" else "response tokens in"
    assert tokens in found.notes[0]
    for table in found.tables:
        estimates = [c for c in table.columns if f"{c}_low" in table.columns]
        for record, name in product(table.records(), estimates):
            value = record[name]
            if isinstance(value, float) and value == value:  # there, and defined
                low, high = (float(record[f"{name}_{end}"] or 0) for end in ("low", "high"))
                assert low - 1e-12 <= value <= high + 1e-12
    for figure in found.figures:
        assert figure.data.rows
        assert figure.svg.startswith("<svg")
    found.save(tmp_path)
    again = Diagnosis.load(tmp_path)
    assert (again.conclusion, again.figures[0].svg) == (found.conclusion, found.figures[0].svg)
    assert [t.key for t in again.tables] == [t.key for t in found.tables]


# --- estimators and utility ----------------------------------------------------------------------


def test_the_label_pass_is_exact_and_more_layers_bring_it_closer_to_the_whole() -> None:
    (said,) = (n for n in diagnosed("estimators").notes if n.startswith("The exact value was"))
    assert 0 < float(said.split("largest distance ")[1].split()[0]) < 1e-4
    layers = records("estimators", "layers", "estimator", "K")
    assert layers["label", 1]["spearman"] < layers["label", 3]["spearman"]
    assert 0 < layers["alphatoken", 3]["spearman"] < layers["label", 3]["spearman"]
    said = diagnosed("estimators").conclusion
    assert said.startswith("Your setting, alphatoken, K=3, W=32, ranks tokens at ")


def test_the_best_prediction_ranks_what_really_happens() -> None:
    one = diagnosed("utility").table("one-token").records()
    assert str(one[0]["prediction"]).startswith("exact, all parameters")
    assert float(one[0]["spearman"] or 0) > 0.9
    assert float(one[0]["slope"] or 0) == pytest.approx(1.0, abs=0.3)
    assert len(one) == 5
    said = " ".join(diagnosed("utility").notes)
    assert "float64 copy" in said
    assert "6 steps of size 0" in said


# --- what is left out, and what is forgotten -----------------------------------------------------


def test_every_proxy_meets_every_retention_set() -> None:
    found = records("fisher", "agreement", "retention", "proxy")
    proxies = {"diagonal", "kronecker", "diagonal, token labels", "none"}
    assert {proxy for _, proxy in found} == proxies
    assert {f"oracle {name}" for name in RETENTION} <= {target for target, _ in found}
    said = " ".join(diagnosed("fisher").notes)
    assert "fine-tuned on the training rows for 4 AdamW steps" in said
    assert "2 of topics, 2 of functions, 2 of summaries, 2 of names" in said


def test_its_own_text_is_forgotten() -> None:
    losses = records("drift", "drift-sets", "set")
    assert losses["topics"]["loss_before"] < 4  # read in training; a uniform guess has 6.2
    assert losses["functions"]["loss_change_high"] < 0  # what it is tuned on
    assert losses["topics"]["loss_change_low"] > 0


# --- settings and noise --------------------------------------------------------------------------


def test_the_run_agrees_with_itself_and_others_less() -> None:
    found = records("sensitivity", "settings", "setting", "value")
    own = [key for key, record in found.items() if record["default"]]
    assert own == [
        ("estimator", "alphatoken"), ("K", "3"), ("W", "32"), ("lambda", "1.5"),
    ]  # fmt: skip
    assert all(found[key]["overlap"] == 1 for key in own)
    assert found["estimator", "label"]["overlap"] < 0.97


def test_every_token_has_a_decision_and_padding_only_rounds() -> None:
    tokens = diagnosed("stability").figure("keep_probability").data.records()
    shares = np.array([float(record["keep share"] or 0) for record in tokens])
    assert shares.sum() == pytest.approx(np.ceil(len(tokens) / 2))  # every resample keeps half
    quarter = len(tokens) // 4
    assert shares[:quarter].mean() > 0.85 > 0.15 > shares[-quarter:].mean()
    decisions = records("stability", "decisions", "decision")
    assert sum(record["tokens"] for record in decisions.values()) == len(tokens)
    assert 0.02 < decisions["noise"]["share"] < 0.9
    assert not any("WARNING" in note for note in diagnosed("stability").notes)


@nightly
def test_with_a_reference_the_retention_term_is_in_the_values() -> None:
    moved = model()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in moved.parameters():
            weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=generator)
    small = subject(
        "near", validation_rows=4, length=96, model=moved, reference=model(), tokens=200
    )
    found = diagnose("stability", small, resamples=60)
    assert not any("is its own reference" in note for note in found.notes)
    assert any("Only 4 validation rows" in note for note in found.notes)
