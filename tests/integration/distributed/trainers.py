"""Short runs of the trainers that keep what they decided: values, weights, parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from datasets import Dataset
from torch import Tensor
from transformers import DataCollatorForSeq2Seq

from alphatoken.errors import ConfigError
from alphatoken.score import read_values
from alphatoken.train import AlphaDPOTrainer, AlphaSFTTrainer, AlphaTrainer
from alphatoken.train.distributed import needs_own_forward, sharding_of
from alphatoken.train.records import VALUES
from tests.integration import policy_examples
from tests.integration.distributed.launch import CLIP, WORLD
from tests.integration.distributed.worker import device_options, forget_precision
from tests.integration.tiny_training import (
    hybrid,
    made,
    mixture,
    model,
    preference_rows,
    sft_rows,
    tokenizer,
    with_ours,
)

STEPS = 3
ACCUMULATION = 2


def arguments(layout: str, **more: Any) -> dict[str, Any]:
    """One process accumulates as many micro-batches as two processes together."""
    return {
        **with_ours(more),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATION * (WORLD if layout == "single" else 1),
        "max_steps": STEPS,
        "max_grad_norm": CLIP,
        # Rounding in a gradient near zero is not to decide the sign of a step.
        "adam_epsilon": 1e-4,
        "learning_rate": 3e-3,
        "train_dataset": sft_rows(64),
        "validation_dataset": sft_rows(10, seed=5),
        **device_options(layout),
        **more,
    }


def sft(layout: str, folder: Path, **more: Any) -> Any:
    return made(AlphaSFTTrainer, folder, **arguments(layout, **more))


def dpo(layout: str, folder: Path, **more: Any) -> Any:
    held = {"validation_dataset": preference_rows(10, seed=5), "ref_model": model()}
    given = {"train_dataset": preference_rows(64), **held, **more}
    return made(AlphaDPOTrainer, folder, **arguments(layout, **given))


def watched(trainer: Any) -> list[dict[str, Any]]:
    """Filled during training: what was decided for each micro-batch."""
    decided: list[dict[str, Any]] = []
    record = trainer.records.micro_batch

    def listen(batch: Any, values: Any, weights: Tensor, factor: Any, **named: Any) -> None:
        decided.append(
            {
                "step": trainer.state.global_step,
                "ids": batch.inputs["input_ids"],
                "mask": batch.mask,
                "values": None if values is None else values.total,
                "weights": weights,
            }
        )
        record(batch, values, weights, factor, **named)

    trainer.records.micro_batch = listen
    return decided


def parameters(trainer: Any) -> dict[str, Tensor]:
    """All parameters, whole."""
    plain = trainer.accelerator.unwrap_model(trainer.model)
    named = dict(plain.named_parameters())
    sharding = sharding_of(trainer.accelerator, trainer.model)
    if sharding is None:
        return {n: p.detach().clone() for n, p in named.items()}
    return {n: sharding.full(n, p) for n, p in named.items()}


def exported(trainer: Any) -> dict[tuple[Any, ...], Tensor]:
    """(branch, tokens) -> values of the run's file; none on processes that do not write it."""
    folder = Path(trainer.args.output_dir) / VALUES
    found = {}
    for one in read_values(folder) if trainer.args.should_save and folder.is_dir() else ():
        assert one.visits is not None
        found[one.visits.branch, tuple(one.ids)] = torch.tensor(one.values["total"])
    return found


def run(trainer: Any) -> dict[str, Any]:
    decided = watched(trainer)
    trainer.train()
    history = trainer.state.log_history
    return {
        "decided": decided,
        "parameters": parameters(trainer),
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "history": history,
        "own_forward": needs_own_forward(trainer.accelerator, trainer.args),
        "exported": exported(trainer),
    }


def half_empty() -> Any:
    """Tokenised rows; every second one has no response, as truncation may leave it."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for i in range(24):
        ids = torch.randint(4, 40, (12 + i % 5,), generator=generator).tolist()
        labels = [-100] * 4 + ids[4:] if i % 2 else [-100] * len(ids)
        rows.append({"input_ids": ids, "labels": labels})
    return Dataset.from_list(rows)


def plain(layout: str, folder: Path, **more: Any) -> Any:
    """transformers' own Trainer on tokenised rows, some of them without a response."""
    given = {"train_dataset": half_empty(), "validation_dataset": half_empty(), **more}
    collator = DataCollatorForSeq2Seq(tokenizer(), padding=True)
    given |= {"data_collator": collator, "per_device_train_batch_size": 1, "retention": "none"}
    return made(AlphaTrainer, folder, **arguments(layout, **given))


def policy(layout: str, folder: Path, **more: Any) -> Any:
    given = {"policy_cache": str(folder / "cache"), "dataset_num_proc": None, **more}
    return sft(layout, folder, validation_dataset=None, **given)


# --- jobs -----------------------------------------------------------------------------------------


def job(make: Any, **more: Any) -> Callable[[str, Path], dict[str, Any]]:
    """A run of one trainer; a model is made by the process that trains it."""

    def train(layout: str, folder: Path) -> dict[str, Any]:
        built = {"model": more["model"]()} if "model" in more else {}
        return run(make(layout, folder, **more | built))

    return train


WHOLE_STEP: dict[str, Any] = {"keep_scope": "global"}
sft_global = job(sft, **WHOLE_STEP)
dpo_global = job(dpo, **WHOLE_STEP, learning_rate=1e-3)
lora_global = job(sft, **WHOLE_STEP, peft=True, policy="top")
# Gated delta nets and attention, all of them scored by the paper's values.
hybrid_global = job(
    sft, **WHOLE_STEP, model=hybrid, estimator="alphatoken", layers="3", uncovered="skip"
)
# Over all parameters, by differences: weights move where they lie.
label_global = job(sft, **WHOLE_STEP, estimator="label", parameters="all", policy="top")
# Values of the optimizer's steps, of its state: of the parts of weights that lie in parts.
frozen_global = job(sft, **WHOLE_STEP, preconditioner="frozen", precondition_after=1, policy="top")
# The same at each step's own gradient, in the forward of the training.
full_batch = job(
    sft, preconditioner="full", precondition_after=1, retention="none",
    validation_micro_batch_size=1,
)  # fmt: skip
# Over the matrices of experts, whose rows each process has of its own micro-batches.
experts_global = job(
    sft, **WHOLE_STEP, model=mixture, parameters="linears,experts", layers="2", uncovered="skip"
)
# The threshold of each micro-batch and rank; a pool.
sft_batch = job(
    sft, validation_mode="pool", validation_batch_size=4, validation_micro_batch_size=1,
    retention="none",
)  # fmt: skip
empty_global, empty_batch = job(plain, **WHOLE_STEP), job(plain)
# A static mask, divided by the kept tokens of the whole step; attention of the training forward and
# a column, ranked by sequence; chosen rows, which are the first process's choice.
kept = job(policy, policy=policy_examples.EvenIds)
attention = job(policy, policy="sstoken")
rows = job(policy, policy=policy_examples.FirstRows)
# Three validation rows a step over four micro-batches, of which one process has two.
mixed = job(sft, policy="validation-mix", policy_options={"rows": 3}, retention="none")


def resumed(layout: str, folder: Path) -> dict[str, Any]:
    """Four steps at once, and two and two: the same, with a direction that outlasts the save."""
    pool = {"validation_mode": "pool", "validation_batch_size": 4}
    return _resumed(sft, layout, folder, **pool, direction_steps=3)


def followed(layout: str, folder: Path) -> dict[str, Any]:
    """The same with a reference that follows the model at every step."""
    sync = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.6}
    return _resumed(dpo, layout, folder, **sync, learning_rate=1e-3, retention="none")


def _resumed(make: Any, layout: str, folder: Path, **more: Any) -> dict[str, Any]:
    more |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = run(make(layout, folder / "whole", **more))
    trainer = make(layout, folder / "whole", **more)
    decided = watched(trainer)
    trainer.train(str(folder / "whole" / "checkpoint-2"))
    again = parameters(trainer)
    return {
        "steps": [d["step"] for d in decided],
        "equal": all(torch.equal(again[n], p) for n, p in whole["parameters"].items()),
        "furthest": max(float((again[n] - p).abs().max()) for n, p in whole["parameters"].items()),
    }


def masters(layout: str, folder: Path) -> dict[str, Any]:
    """Runs in bfloat16 whose weights move by less than that shows, of several kinds."""
    kinds: dict[str, dict[str, Any]] = {
        "factors": {"retention": "kronecker"},
        "adapters": {"peft": True},
    }
    found = {}
    for name, more in kinds.items():
        forget_precision(layout)
        how = {"keep_scope": "global", "bf16": True, "learning_rate": 1e-6, **more}
        found[name] = run(sft(layout, folder / name, **how))
    forget_precision(layout)
    return found


def saved_model(folder: Path) -> str:
    """The model in a folder, which the first process writes."""
    state = PartialState()
    if state.is_main_process:
        model().save_pretrained(folder / "model")
    state.wait_for_everyone()
    return str(folder / "model")


def own_weights(layout: str, folder: Path) -> dict[str, Any]:
    """A model that each process has made at random for itself."""
    try:
        sft(layout, folder, model=model(seed=PartialState().process_index))
    except ConfigError as error:
        return {"refused": str(error)}
    return {"refused": ""}


def by_name(layout: str, folder: Path) -> dict[str, Any]:
    """The same run as ``sft_global``, with the model loaded by the trainer."""
    return run(sft(layout, folder, model=saved_model(folder), keep_scope="global"))


def sft_bf16(layout: str, folder: Path) -> dict[str, Any]:
    """Matrix products in bfloat16, masters and optimizer in float32."""
    forget_precision(layout)
    trainer = sft(layout, folder, keep_scope="global", bf16=True)
    assert trainer.accelerator.mixed_precision == "bf16"
    found = run(trainer)
    forget_precision(layout)
    slow = sft(layout, folder / "slow", keep_scope="global", bf16=True, learning_rate=1e-6)
    found["slow"] = run(slow)["history"]
    forget_precision(layout)
    plain = trainer.accelerator.unwrap_model(trainer.model)
    return {**found, "dtypes": sorted({str(p.dtype) for p in plain.parameters()})}
