"""The trainers against TRL's own and against gradients written by hand."""

from __future__ import annotations

import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import Trainer
from trl import DPOTrainer, SFTTrainer

from alphatoken.errors import ConfigError, NumericalError, UnsupportedError
from alphatoken.train.policies.builtin import DPO, Standard
from tests.flash_standin import NAME, standin
from tests.integration import tiny_training as tiny
from tests.integration.policy_examples import OwnDPO
from tests.integration.tiny_training import furthest, losses, model, sft_rows, weights
from tests.property.tolerance import allowed, close


def sft(folder: Path, *, alpha: bool = True, **more: Any) -> Any:
    more = {"train_dataset": sft_rows(96), **more}
    if not alpha:
        return tiny.made(SFTTrainer, folder, **more)
    return tiny.sft(folder, validation_dataset=sft_rows(24, seed=5), **more)


def dpo(folder: Path, *, alpha: bool = True, peft: bool = False, **more: Any) -> Any:
    more |= {"ref_model": None if peft else model(), "train_dataset": tiny.preference_rows(96)}
    return (tiny.dpo if alpha else partial(tiny.made, DPOTrainer))(folder, peft=peft, **more)


# --- ratio 1 --------------------------------------------------------------------------------------


def against_trl(make: Any, folder: Path, shared: dict[str, Any], **own: Any) -> tuple[Any, Any]:
    """TRL's own trainer and ours that keeps all tokens, after a run with the same options."""
    runs = []
    steps = {"gradient_accumulation_steps": 2, "max_steps": 3}
    # Made one after the other: each begins with the random state that its constructor sets.
    every = {} if "policy" in own else {"keep_ratio": 1.0}  # weights of 1 are a policy's own rule
    for name, more in (("trl", {"alpha": False}), ("alpha", {**every, **own})):
        arguments = {key: value() if callable(value) else value for key, value in shared.items()}
        runs.append(make(folder / name, **steps, **arguments, **more))
        runs[-1].train()
    return runs[0], runs[1]


HYBRID = {"model": tiny.hybrid}
OF_HYBRID = {"layers": "3", "uncovered": "skip"}


@pytest.mark.parametrize(
    ("shared", "own"),
    [
        ({}, {}),  # adapters: test_quantised.py
        ({}, {"scoring_forward": "own"}),
        # Longer than the model: positions begin anew.
        pytest.param({"packing": True, "max_length": 256}, {}, marks=pytest.mark.slow),
        pytest.param({"loss_type": "dft", "bf16": True}, {}, marks=pytest.mark.slow),
        pytest.param({"neftune_noise_alpha": 5.0}, {}, marks=pytest.mark.slow),
        # A policy with weights 1.
        pytest.param(
            {"peft": True, "gradient_checkpointing": True},
            {"policy": Standard()},
            marks=pytest.mark.slow,
        ),
        pytest.param(HYBRID, OF_HYBRID, marks=pytest.mark.slow),
    ],
    ids=",".join,
)
def test_ratio_one_equals_trl_bit_for_bit(
    tmp_path: Path, shared: dict[str, Any], own: dict[str, Any]
) -> None:
    """Steps with accumulation, clipping and checkpointing, every one of them scored."""
    plain, valued = against_trl(sft, tmp_path, shared, **own)
    assert losses(plain) == losses(valued)
    assert len(losses(plain)) == 3
    assert furthest(plain, valued) == 0
    for theirs, own_log in zip(plain.state.log_history, valued.state.log_history, strict=True):
        logged = {name for name in theirs if "runtime" not in name and "per_second" not in name}
        assert {name: own_log[name] for name in logged} == {name: theirs[name] for name in logged}


SMOOTH = {"label_smoothing": 0.1}


@pytest.mark.filterwarnings("ignore:validation pairs are measured by plain DPO")
@pytest.mark.parametrize(
    ("shared", "own"),
    [
        ({}, {}),
        pytest.param({"peft": True, "loss_type": ["ipo"], **SMOOTH}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3], **SMOOTH}, {},
            marks=pytest.mark.slow,
        ),
        # Weights of 1 on TRL's loss, and a loss of one's own with token-wise references.
        pytest.param({"peft": True}, {"policy": DPO()}, marks=pytest.mark.slow),
        pytest.param({}, {"policy": OwnDPO()}, marks=pytest.mark.slow),
    ],
    ids=lambda value: re.sub(r"<.*?(\w+) object at 0x\w+>", r"\1", str(value)),
)  # fmt: skip
def test_ratio_one_equals_trl_dpo(
    tmp_path: Path, shared: dict[str, Any], own: dict[str, Any]
) -> None:
    plain, valued = against_trl(dpo, tmp_path, {"learning_rate": 1e-3, **shared}, **own)
    assert losses(valued) == pytest.approx(losses(plain), rel=1e-6, abs=1e-6)
    assert furthest(plain, valued) < 1e-6


@pytest.mark.slow
def test_adapters_on_the_projections_of_a_delta_net(tmp_path: Path) -> None:
    names = ["in_proj_qkv", "in_proj_b", "v_proj", "down_proj"]
    lora = LoraConfig(**tiny.LORA | {"task_type": "CAUSAL_LM", "target_modules": names})
    more = {"peft_config": lora, "layers": "3", "uncovered": "error"}
    ours = sft(tmp_path, model=tiny.hybrid(), **more)
    before = weights(ours.model)
    ours.train()
    moved = {n for n, w in weights(ours.model).items() if not torch.equal(w, before[n])}
    assert any("in_proj_qkv.lora_B" in name for name in moved)
    assert all("lora_" in name for name in moved)
    assert all(torch.isfinite(w).all() for w in weights(ours.model).values())


@pytest.mark.slow
def test_a_mixture_trains_on_values_over_its_experts(tmp_path: Path) -> None:
    """Experts are scored and move; the router, whose loss TRL adds, is named as left out."""
    more = {"parameters": "linears,experts", "uncovered": "skip", "max_steps": 5}
    trainer = sft(tmp_path, model=tiny.mixture(), **more)
    before = weights(trainer.model)
    trainer.train()
    coverage = trainer.valuation.scorer.coverage
    assert any(name.endswith("experts.down_proj") for name in coverage.linears)
    assert all("router" in reason for reason in coverage.skipped.values())
    assert coverage.skipped
    assert any(not torch.equal(before[n], w) for n, w in weights(trainer.model).items())
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_validation_rows_of_a_run_that_are_written_to_give_a_new_direction(tmp_path: Path) -> None:
    """Where nothing pins it to a step, the scorer of a run looks at their numbers."""
    trainer = sft(tmp_path, max_steps=2, retention="none")
    trainer.train()
    scorer = trainer.valuation.scorer
    scorer.pin(None)
    batch = trainer.row_batch(trainer.train_dataset.select(range(2)))
    before = scorer.score(batch).total
    assert torch.equal(scorer.score(batch).total, before)
    scorer.validation[0].inputs["input_ids"][:, 1] = 5
    assert not torch.equal(scorer.score(batch).total, before)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({}, "6 of 20 validation rows are valued against, the same at every step, 4 are only "
         "watched, and 10 play no part"),
        ({"held_out_steps": 0}, "the same at every step, and 14 play no part"),
        ({"validation_mode": "pool"}, ""),
        ({"validation_batch_size": 16}, ""),
        ({"policy": "random", "export_values": False}, ""),
    ],
    ids=str,
)  # fmt: skip
def test_validation_rows_that_no_step_looks_at_are_counted(
    tmp_path: Path, own: dict[str, Any], said: str
) -> None:
    """Of a fixed batch the others play no part, however many there are."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tiny.sft(
            tmp_path, train_dataset=sft_rows(20), validation_dataset=sft_rows(20, seed=5), **own
        )
    told = [str(one.message) for one in caught if "play no part" in str(one.message)]
    assert [said in one for one in told] == ([True] if said else [])


# --- bad input ------------------------------------------------------------------------------------


def test_prompt_learning_is_refused(tmp_path: Path) -> None:
    from peft import PromptTuningConfig

    learned = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises((ConfigError, UnsupportedError), match="prompt learning|PromptTuning"):
        sft(tmp_path, peft_config=learned)


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"estimator": "label", "part": "direct"}, "part"),
        ({"layers": "three"}, "layers"),
        ({"preconditioner": "fisher"}, "preconditioner"),
        ({"value_unit": "row"}, "value_unit"),
        ({"value_unit": "response", "policy": "random"}, "whole responses"),
        ({"value_unit": "response", "packing": True}, "Got: packing.*without packing"),
        (
            {"value_unit": "response", "padding_free": True},
            "Got: padding_free.*without .*padding_free",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_options_are_refused_before_work(
    tmp_path: Path, extra: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=name):
        sft(tmp_path, **extra)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    trainer = sft(tmp_path, policy="random")
    with torch.no_grad():
        trainer.model.lm_head.weight[5] = float("nan")
    with pytest.raises(NumericalError, match="step 0"):
        trainer.train()


@pytest.mark.filterwarnings("ignore:4 of 8 training rows left out")
def test_a_micro_batch_without_response_tokens_is_no_accident(tmp_path: Path) -> None:
    """Truncation may leave a batch without a single response token: it adds nothing, as in TRL."""
    long = sft_rows(4).map(lambda row: {"prompt": row["prompt"] * 20})
    from datasets import concatenate_datasets

    rows = concatenate_datasets([long, sft_rows(4)])
    trainer = sft(tmp_path, train_dataset=rows, retention="none", max_steps=4)
    trainer.train()
    assert len(losses(trainer)) == 4


def test_branches_of_a_pair_are_drawn_apart(tmp_path: Path) -> None:
    """A step that is ranked as a whole draws for chosen and rejected tokens of their own."""
    rows = [{**row, "rejected": row["chosen"][::-1]} for row in tiny.preference_rows(12)]
    trainer = tiny.dpo(
        tmp_path, ref_model=model(), train_dataset=tiny.dataset(rows), max_steps=1,
        policy="random", keep_scope="global", retention="none", held_out_steps=0,
    )  # fmt: skip
    drawn: list[Tensor] = []
    trainer.records.listener = lambda mask, weights: drawn.append(weights[mask].view(2, -1))
    trainer.train()
    (chosen, rejected) = drawn[0]
    assert chosen.sum() == rejected.sum() > 0
    assert not torch.equal(chosen, rejected)


# --- precision, padding, packing ------------------------------------------------------------------


def totals_of_first_step(trainer: Any) -> Tensor:
    """Values of the response tokens of the first batch, in (row, position) order."""
    totals: list[Tensor] = []
    weigh = trainer.token_policy.weights

    def watched(batch: Any) -> Tensor:
        totals.append(batch.values[batch.mask])
        weights: Tensor = weigh(batch)
        return weights

    trainer.token_policy.weights = watched
    trainer.train()
    return totals[0]


@pytest.mark.filterwarnings("ignore:label values replace flash attention")
@pytest.mark.parametrize(
    ("estimator", "layout"),
    [
        ("alphatoken", "packed"),
        pytest.param("label", "padding-free", marks=pytest.mark.slow),
    ],
)
def test_flash_kernels_train_as_others_do(tmp_path: Path, estimator: str, layout: str) -> None:
    """The same rows on sdpa and on a flash kernel: values, choices and weights after the run."""
    packed = layout == "packed"
    more: dict[str, Any] = {"estimator": estimator, "max_steps": 3, "padding_free": True}
    more |= {"packing": packed, "max_length": 64 if packed else None}
    on_sdpa, on_flash = (sft(tmp_path / name, **more) for name in ("sdpa", "flash"))
    with standin():
        on_flash.model.set_attn_implementation(NAME)
    values = [totals_of_first_step(trainer) for trainer in (on_sdpa, on_flash)]
    size = float(values[0].abs().max())
    assert float((values[0] - values[1]).abs().max()) < 1e-5 * size
    expected, actual = weights(on_sdpa.model), weights(on_flash.model)
    for name, weight in expected.items():
        close(actual[name], weight, weight.abs() + 0.01, 1e-3, name="weights after a run")


@pytest.mark.slow
def test_bf16_autocast(tmp_path: Path) -> None:
    """Values are those of float32 but for noise."""
    common = {"retention": "none"}
    exact = totals_of_first_step(sft(tmp_path / "fp32", **common))
    rough = totals_of_first_step(sft(tmp_path / "bf16", bf16=True, **common))
    assert rough.dtype == torch.float32
    tolerance = allowed("norm", torch.bfloat16)
    close((rough - exact).norm(), 0.0, exact.norm(), tolerance, name="bf16 values of a trainer")
    assert not torch.equal(rough, exact)


@pytest.mark.parametrize("preconditioner", [None, "full"])
def test_clipping_does_not_wait_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preconditioner: str | None
) -> None:
    """The factor is read where values are of a full step, and only there, and only then."""

    class Unread(Tensor):
        def __float__(self) -> float:
            raise AssertionError("the host waited for the device")

    trainer = sft(tmp_path, retention="none", max_grad_norm=0.5, preconditioner=preconditioner)
    norm = torch.tensor(2.0).as_subclass(Unread)
    monkeypatch.setattr(Trainer, "_clip_grad_norm", lambda *_: norm)
    assert trainer.valuation.clip_factor == 1.0
    assert trainer._clip_grad_norm(trainer.model) is norm
    if preconditioner == "full":
        with pytest.raises(AssertionError, match="waited"):
            trainer.valuation.clip_factor  # noqa: B018
        trainer.valuation.gradient_cut(torch.tensor(2.0))
        assert trainer.valuation.clip_factor == pytest.approx(0.25, rel=1e-5)
    assert trainer.alpha_state()[1]["values"]["norm"] == (2.0 if preconditioner == "full" else None)
