"""Values along a walk in trainers and diagnostics: what they are, when new, after a resume."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from alphatoken import ScorerConfig
from alphatoken.diagnose import find
from alphatoken.diagnose.valuing import with_estimator
from alphatoken.errors import AlphaTokenWarning, ConfigError
from alphatoken.estimate.observed import Observed
from alphatoken.oracle import run as oracle
from alphatoken.train.policies.trained_weights import copied
from tests.integration import subjects
from tests.integration import tiny_training as tiny

WALK = {
    "estimator": "walk",
    "layers": "3",
    "retention": "none",
    "walk_steps": 3,
    "validation_mode": "pool",
    "validation_micro_batch_size": 2,
    "held_out_steps": 0,
    "learning_rate": 1e-3,
    "max_steps": 6,
}


def forward_of(model: Any) -> Any:
    return lambda batch: model(**batch).logits


def _fresh(model: Any) -> Any:
    """The same weights in a model that no trainer has touched."""
    twin = copied(model).eval()
    for module in twin.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    return twin


class Valuations:
    """Every valuation of a run, with the weights and the validation rows of its moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: list[tuple[int, Any, list[Any], dict[str, Tensor], Tensor]] = []
        self.trainer: Any = None
        plain = Observed.values

        def values(observed: Observed, scores: Tensor, labels: Tensor, **more: Any) -> Any:
            result = plain(observed, scores, labels, **more)
            adapter = observed._estimator.adapter
            inputs = dict(observed._recorder.latest.inputs)  # type: ignore[union-attr]
            batch = {k: v for k, v in inputs.items() if k in ("input_ids", "attention_mask")}
            model = _fresh(adapter.model)
            rows = list(observed._estimator.inputs.validation)
            step = self.trainer.state.global_step
            self.all.append((step, model, rows, {**batch, "labels": labels}, result.total.clone()))
            return result

        monkeypatch.setattr(Observed, "values", values)


@pytest.mark.parametrize(
    ("kind", "refresh"),
    [("sft", 2), ("dpo", 2), pytest.param("lora", 0, marks=pytest.mark.slow)],
)
def test_values_of_a_run_are_losses_less_those_of_a_trained_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, refresh: int
) -> None:
    """The copy is trained where a walk is due, on the rows of that step, at the run's rate."""
    valuations, more = Valuations(monkeypatch), {**WALK, "walk_refresh": refresh, "max_steps": 4}
    if kind == "lora":
        more["peft_config"] = tiny.lora()
    if kind == "dpo":
        more["ref_model"] = tiny.model()
    make = tiny.dpo if kind == "dpo" else tiny.sft
    valuations.trainer = trainer = make(tmp_path, **more)
    trainer.train()
    assert [step for step, *_ in valuations.all] == [0, 1, 2, 3]
    adamw = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)
    for step, model, rows, batch, actual in valuations.all:
        if step == 0 or (refresh and step % refresh == 0):
            end = _walked(kind, model, rows, adamw)
        with torch.no_grad():
            expected = oracle.walk_values(model, end, forward_of, batch)
        if kind == "dpo":  # each row has a weight of its own, the coefficient of its pair
            rows_alike = torch.nn.functional.cosine_similarity(actual, expected, dim=-1).abs()
            assert float(rows_alike.min()) > 0.999
            continue
        assert float((actual - expected).norm()) < 2e-2 * float(expected.norm())


def _walked(kind: str, model: Any, rows: list[Any], adamw: Any) -> Any:
    if kind != "dpo":
        batches = [
            {**{k: row.inputs[k] for k in ("input_ids", "attention_mask")}, "labels": row.labels}
            for row in rows
        ]
        return oracle.walked(model, forward_of, batches, 3, adamw)
    from alphatoken.oracle import composite

    twin = copy.deepcopy(model).eval()
    parameters = {n: p for n, p in twin.named_parameters() if p.requires_grad}
    stepper = adamw(parameters.values())
    for step in range(3):
        pairs = rows[step % len(rows)]
        g = composite.objective_gradient(forward_of(twin), [pairs], parameters)
        for name, parameter in parameters.items():
            parameter.grad = g[name].to(parameter)
        stepper.step()
    return twin


@pytest.mark.parametrize(
    ("steps", "mode", "due"), [(3, "pool", 6), (24, "pool", 12), (24, "fixed", 6)]
)
def test_a_walk_of_a_run_takes_every_row_that_its_steps_reach(
    tmp_path: Path, steps: int, mode: str, due: int
) -> None:
    """Two rows a step, of 12: each row once, not one draw of six again and again.

    Under "fixed" the rows are the one batch of the whole run, as for any other estimator.
    """
    more = {**WALK, "walk_steps": steps, "validation_mode": mode, "max_steps": 1}
    trainer = tiny.sft(tmp_path, **more)
    trainer.train()
    batches = trainer.valuation.scorer.estimator.inputs.validation
    rows = [
        tuple(ids[mask.bool()].tolist())
        for batch in batches
        for ids, mask in zip(batch.inputs["input_ids"], batch.inputs["attention_mask"], strict=True)
    ]
    given = {tuple(row["input_ids"]) for row in trainer.rows.validation}
    assert len(given) == 12
    assert {len(batch.labels) for batch in batches} == {2}
    assert len(rows) == len(set(rows)) == due
    assert set(rows) <= given


def test_few_trusted_rows_are_enough_for_a_walk(tmp_path: Path) -> None:
    """Its steps take micro-batches of them, so fewer than a validation batch are no error."""
    more = {**WALK, "walk_steps": 24, "validation_batch_size": 32, "held_out_steps": 1}
    trainer = tiny.sft(tmp_path, **{**more, "held_out_share": 0.25, "max_steps": 2})
    trainer.train()
    batches = trainer.valuation.scorer.estimator.inputs.validation
    assert sum(len(batch.labels) for batch in batches) == 9  # of 12, of which 3 are held out
    with pytest.raises(ConfigError, match="validation set is too small"):
        tiny.sft(tmp_path / "label", **{**more, "estimator": "label"})


@pytest.mark.parametrize(
    ("make", "steps", "rate", "said"),
    [
        (tiny.sft, 3, 1.0, "raised the mean loss"),
        (tiny.sft, 200, 0.01, "learned its rows by heart"),
        (tiny.dpo, 3, 1.0, "raised the mean loss"),
        (tiny.dpo, 60, 0.02, "learned its rows by heart"),
    ],
)
def test_a_walk_that_went_wrong_is_said_in_a_run(
    make: Any, steps: int, rate: float, said: str, tmp_path: Path
) -> None:
    """Its rows are those of a trainer there, not batches of a loader; the run goes on."""
    walk = {"walk_steps": steps, "walk_learning_rate": rate, "validation_mode": "fixed"}
    more = {**WALK, **walk, "max_steps": 1}
    trainer = make(tmp_path, **more, **({"ref_model": tiny.model()} if make is tiny.dpo else {}))
    with pytest.warns(AlphaTokenWarning, match=said):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("form", ["one_sided", pytest.param("central", marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_with_its_walk(tmp_path: Path, form: str) -> None:
    """The end of the walk is in the checkpoint: the same bits as a run that went through.

    The step after it is valued by that end, the one after by a new walk.
    """
    more = {**WALK, "walk_refresh": 3, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    more["walk_form"] = form
    whole = tiny.sft(tmp_path, **more)
    whole.train()
    saved = load_file(tmp_path / "checkpoint-2" / "alphatoken-rank0.safetensors")
    assert any(name.startswith("alpha/along/") for name in saved)
    again = tiny.sft(tmp_path, **more)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, weight in tiny.weights(whole.model).items():
        assert torch.equal(weight, tiny.weights(again.model)[name]), name


@pytest.mark.slow
def test_diagnostics_take_walk_values_beside_others() -> None:
    """Of any subject; what the others were told and a walk cannot use falls away."""
    module = find("sensitivity").load()
    options = module.Options(estimators=("label", "walk"), layers=(1,), windows=(4,))
    result = module.diagnose(subjects.subject(train_rows=4), options)
    assert any("walk" in str(table) for table in (*result.tables, *result.figures))


def test_settings_of_a_walk_and_of_others_do_not_mix() -> None:
    """From a walk to another estimator and back."""
    own = ScorerConfig.exact(derivative="central")
    walk = with_estimator(own, "walk")
    assert walk == ScorerConfig("walk")
    longer = ScorerConfig("walk", walk_steps=3, walk_learning_rate=1e-3)
    assert with_estimator(longer, "walk") == longer
    assert with_estimator(longer, "direct") == ScorerConfig("direct")
