"""Trainers that a user subclasses or calls from a loop of their own, as transformers allows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from alphatoken import FisherDrift, UnsupportedError
from alphatoken.model.batch import IGNORE, label_mask
from alphatoken.train import AlphaSFTTrainer, AlphaTrainer
from alphatoken.train.weigher import StepGuard
from tests.integration import tiny_training as tiny
from tests.integration.tiny_training import model, sft_rows, weights


def first_half(labels: Tensor) -> Tensor:
    """Labels of the first half of the columns only."""
    labels = labels.clone()
    labels[:, labels.shape[1] // 2 :] = IGNORE
    return labels


def recorded_masks(trainer: Any) -> list[Tensor]:
    """Filled while the trainer runs: the response tokens of each recorded micro-batch."""
    masks: list[Tensor] = []
    record = trainer.monitor.record

    def listen(**kwargs: Any) -> None:
        masks.append(kwargs["mask"])
        record(**kwargs)

    trainer.monitor.record = listen
    return masks


def sft(kind: type[AlphaSFTTrainer], folder: Path, **more: Any) -> AlphaSFTTrainer:
    validation = {"validation_dataset": None} if more.get("policy") == "random" else {}
    made = tiny.sft(
        folder, kind, train_dataset=sft_rows(32), **{"max_steps": 2, **validation, **more}
    )
    return cast("AlphaSFTTrainer", made)


def test_weights_are_of_the_labels_that_compute_loss_is_given(tmp_path: Path) -> None:
    label_masks: list[Tensor] = []

    class HalfOfEachResponse(AlphaSFTTrainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            return {name: tensor.to(self.args.device) for name, tensor in inputs.items()}

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            assert all(isinstance(value, Tensor) for value in inputs.values())
            inputs = {**inputs, "labels": first_half(inputs["labels"])}
            label_masks.append(label_mask(inputs["labels"]))
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = sft(HalfOfEachResponse, tmp_path)
    masks = recorded_masks(trainer)
    trainer.train()
    assert len(masks) == len(label_masks) == 2
    assert all(torch.equal(mask, own) for mask, own in zip(masks, label_masks, strict=True))


@pytest.mark.parametrize("scope", ["batch", "global"])
def test_labels_may_be_made_when_inputs_are_prepared(tmp_path: Path, scope: str) -> None:
    """A batch has neither labels nor token ids until ``_prepare_inputs`` adds what is needed."""

    class Embedded(AlphaTrainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            inputs = super()._prepare_inputs(inputs)
            if "tokens" in inputs:
                tokens = inputs.pop("tokens")
                inputs["labels"] = tokens
                inputs["inputs_embeds"] = self.model.get_input_embeddings()(tokens).detach()
            return inputs

    def collate(rows: Any) -> dict[str, Tensor]:
        return {"tokens": torch.tensor([row["input_ids"] for row in rows])}

    rows = [{"input_ids": [4 + (i + j) % 26 for j in range(9)]} for i in range(16)]
    arguments = {"data_collator": collate, "train_dataset": rows, "remove_unused_columns": False}
    own = {"policy": "random", "keep_scope": scope, "export_values": False}
    trainer = tiny.made(Embedded, tmp_path, max_steps=2, **arguments, **own)
    masks = recorded_masks(trainer)
    trainer.train()
    assert [int(mask.sum()) for mask in masks] == [32, 32]


def test_one_trainer_that_trains_again_from_its_checkpoint(tmp_path: Path) -> None:
    """What the first call left in the trainer is not taken for the checkpoint's state."""
    more = {"preconditioner": "frozen", "precondition_after": 1, "export_values": False}
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer = sft(AlphaSFTTrainer, tmp_path, retention="none", **{**saving, **more, "max_steps": 4})
    trainer.train()
    first = weights(trainer.model)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    again = weights(trainer.model)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_run_that_starts_over_builds_its_direction_anew(tmp_path: Path) -> None:
    """``auto_find_batch_size`` goes back to step 0 when a step has run out of memory."""
    trainer = sft(AlphaSFTTrainer, tmp_path, retention="none", direction_steps=4)
    versions: list[Any] = []
    valuation = trainer.valuation
    pin = valuation.scorer.pin
    valuation.scorer.pin = lambda version: (versions.append(version), pin(version))
    for step in (0, 1, 2, 4, 0, 1):
        trainer.state.global_step = step
        valuation.begin()
    assert versions == [("step", 0), ("step", 4), ("step", 0)]


def test_a_batch_keeps_the_type_that_the_collator_gave_it(tmp_path: Path) -> None:
    """``BatchEncoding`` is no dict: what reads ``inputs.input_ids`` goes on working."""
    types: list[type] = []

    class Reading(AlphaSFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            types.append(type(inputs))
            assert inputs.input_ids.shape == inputs["labels"].shape
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = sft(Reading, tmp_path, policy="random")
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: BatchEncoding(collate(rows))
    trainer.train()
    assert types == [BatchEncoding, BatchEncoding]


def test_a_fisher_that_nothing_reads_is_part_of_the_run(tmp_path: Path) -> None:
    """A control is not resumed with another Fisher than it began with, as documented."""
    start = model()
    weights = {n: p.detach().clone() for n, p in start.named_parameters() if "q_proj" in n}
    fisher = FisherDrift({n: torch.ones_like(w) for n, w in weights.items()}, weights)
    rows = {"train_dataset": sft_rows(8), "validation_dataset": None}
    trainer = tiny.sft(tmp_path, model=start, fisher=fisher, policy="random", **rows)
    assert trainer.alpha_data()["fisher"] is not None


# --- a loss with its outputs, and a loss of one's own -------------------------------------------


@pytest.mark.parametrize("way", ["never asks", "evaluation mode"])
def test_a_step_that_no_weigher_has_seen_is_not_taken(tmp_path: Path, way: str) -> None:
    class Own(AlphaSFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if way == "evaluation mode":
                self.model.eval()
                return super().compute_loss(model, inputs, *args, **kwargs)
            return model(**inputs).loss

    trainer = sft(Own, tmp_path, policy="random")
    before = weights(trainer.model)
    with pytest.raises(UnsupportedError, match="not weighted by token"):
        trainer.train()
    after = weights(trainer.model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    if way == "never asks":
        plainly = sft(Own, tmp_path, policy="all", export_values=False, max_steps=1)
        plainly.train()  # as the remedy says


def test_each_micro_batch_of_each_step_must_be_weighed() -> None:
    step = SimpleNamespace(
        current_gradient_accumulation_steps=2, state=SimpleNamespace(global_step=3)
    )
    guard = StepGuard(step)

    def weigh() -> None:
        loss = torch.ones((), requires_grad=True) * 1.0
        guard.expect_gradient(loss)
        loss.backward()

    for _ in range(2):
        guard.on_step_begin()
        with pytest.raises(UnsupportedError, match="2 of 2 micro-batches of step 3"):
            guard.on_pre_optimizer_step()
        weigh()
        with pytest.raises(UnsupportedError, match="1 of 2 micro-batches of step 3"):
            guard.on_pre_optimizer_step()
        weigh()
        guard.on_pre_optimizer_step()


def test_a_batch_without_its_step_is_not_weighed(tmp_path: Path) -> None:
    trainer = sft(AlphaSFTTrainer, tmp_path, policy="random")
    batch = dict(next(iter(trainer.get_train_dataloader())))
    with pytest.raises(UnsupportedError, match="a batch without its step"):
        trainer.compute_loss(trainer.model.train(), batch)
