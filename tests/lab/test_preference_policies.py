"""Preference policies in the real trainer, and their losses against TRL's own."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import DPOTrainer

from alphatoken.errors import ConfigError, InputError, ModelError
from alphatoken.model.batch import label_mask
from alphatoken.train import AlphaDPOTrainer
from alphatoken.train.policy import PolicyBatch
from alphatoken.train.trainer_loss import MicroBatchPlan
from alphatoken_lab.methods.preference import PreferencePolicy
from alphatoken_lab.methods.sepo import SePO
from tests.integration.tiny_training import (
    furthest,
    made,
    model,
    options,
    preference_rows,
    tokenizer,
    weights,
)

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # read when CPOTrainer is imported

STEPS = {"max_steps": 3, "learning_rate": 1e-3}


class Uniform(PreferencePolicy):
    """Weight 1 on every token: the base losses themselves."""

    name = "uniform"
    losses = {"dpo": (0.1, 0.0), "simpo": (2.0, 0.5)}  # noqa: RUF012
    published_loss = "dpo"

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        return batch.mask.to(batch.log_probs.dtype)


def run(kind: type[Any], folder: Path, **more: Any) -> Any:
    """Three steps, if not told otherwise."""
    own = {"ref_model": model(), "train_dataset": preference_rows(24), **STEPS, **more}
    trainer = made(kind, folder, **own)
    trainer.train()
    return trainer


trained, plain = partial(run, AlphaDPOTrainer), partial(run, DPOTrainer)


def logged(trainer: Any, key: str = "loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


# --- uniform weights are TRL's losses -------------------------------------------------------------


def test_uniform_weights_train_as_trl_does(tmp_path: Path) -> None:
    """Values, gradients and so weights after three accumulated and clipped steps."""
    shared = {"gradient_accumulation_steps": 2}
    expected = plain(tmp_path / "trl", **shared)
    found = trained(tmp_path / "ours", policy=Uniform, **shared)
    assert logged(found) == pytest.approx(logged(expected), abs=1e-6)
    assert logged(found, "grad_norm") == pytest.approx(logged(expected, "grad_norm"), rel=1e-4)
    assert furthest(found, expected) < 1e-6
    assert logged(found, "rewards/margins") == pytest.approx(
        logged(expected, "rewards/margins"), abs=1e-6
    )


def test_uniform_weights_are_trls_simpo(tmp_path: Path) -> None:
    """Loss and every gradient of one batch, against CPOTrainer(loss_type="simpo")."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    ours = trained(
        tmp_path / "ours", policy=Uniform(loss="simpo", beta=1.7, gamma=0.4), max_steps=1
    )
    theirs = CPOTrainer(
        model=model(),
        train_dataset=preference_rows(24),
        processing_class=tokenizer(),
        args=CPOConfig(
            **options(tmp_path / "trl", max_length=64),
            loss_type="simpo",
            cpo_alpha=0.0,
            beta=1.7,
            simpo_gamma=0.4,
        ),
    )
    batch = next(iter(ours.get_train_dataloader()))
    theirs.model.load_state_dict(ours.model.state_dict())
    labels = ours.response_labels(batch)
    branches = {}
    for name, rows in (("chosen", slice(0, 4)), ("rejected", slice(4, 8))):
        branches |= {
            f"{name}_input_ids": batch["input_ids"][rows],
            f"{name}_attention_mask": batch["attention_mask"][rows],
            f"{name}_labels": labels[rows],
        }
    expected, noted = theirs.get_batch_loss_metrics(theirs.model, branches)
    expected.backward()
    ours.model.train()
    ours.model.zero_grad()
    ours._plan = MicroBatchPlan(0)
    found = ours.compute_loss(ours.model, dict(batch))
    found.backward()
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    gradients = dict(theirs.model.named_parameters())
    for name, parameter in ours.model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name].grad, atol=1e-6), name
    # Evaluation is by the same loss, and rewards are what it compares.
    ours.model.eval()
    with pytest.warns(FutureWarning, match="return_outputs"):
        found, outputs = ours.compute_loss(ours.model, dict(batch), return_outputs=True)
    with torch.no_grad():
        logits = ours.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    assert torch.allclose(outputs.logits, logits, atol=1e-5)
    for mode in ("train", "eval"):
        for name in ("chosen", "rejected", "margins", "accuracies"):
            (mine,) = ours._metrics[mode][f"rewards/{name}"]
            assert mine == pytest.approx(noted[f"rewards/{name}"], abs=1e-6), (mode, name)


@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_evaluation_is_by_the_loss_of_the_policy(loss: str, tmp_path: Path) -> None:
    """Of all tokens, whatever is trained on; with the reference where the loss has one.

    Proves: loss and rewards of evaluation (exact), against plain forwards and TRL's DPO.
    """
    rows = preference_rows(6, seed=3)
    more = {"eval_dataset": rows, "ref_model": model(1), "max_steps": 1}
    own = trained(tmp_path / "own", policy="confpo", policy_options={"loss": loss}, **more)
    found = own.evaluate()
    if loss == "dpo":
        like = plain(tmp_path / "trl", **more)
        like.model.load_state_dict(own.model.state_dict())
        wanted = like.evaluate()
        names = ["loss", *(f"rewards/{n}" for n in ("chosen", "margins", "accuracies"))]
        for name in names:
            assert found[f"eval_{name}"] == pytest.approx(wanted[f"eval_{name}"], abs=1e-5), name
        return
    margins = []
    for row in own.eval_dataset:
        means = []
        for side in ("chosen_ids", "rejected_ids"):
            ids, start = torch.tensor([row["prompt_ids"] + row[side]]), len(row["prompt_ids"])
            with torch.no_grad():
                log_probs = own.model(ids).logits[0, :-1].log_softmax(-1)
            picked = log_probs.gather(-1, ids[0, 1:, None])[start - 1 :]
            means.append(float(picked.mean()))
        margins.append(means[0] - means[1])
    # Batches of evaluation are of one size, or their mean is no mean of the pairs.
    of_pairs = [-math.log(1 / (1 + math.exp(1.6 - 1.5 * m))) for m in margins]
    assert found["eval_loss"] == pytest.approx(sum(of_pairs) / 6, abs=1e-5)
    assert found["eval_rewards/margins"] == pytest.approx(1.5 * sum(margins) / 6, abs=1e-5)
    accuracy = sum(m > 0 for m in margins) / 6
    assert found["eval_rewards/accuracies"] == pytest.approx(accuracy)


# --- each in three real steps ---------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "confpo": {"policy": "confpo"},
    "sepo on dpo": {
        "policy": SePO(oracle=model(seed=4), loss="dpo", k=0.5, skip_first=True),
    },
    "ti-dpo with its code's term": {
        "policy": "ti-dpo",
        "policy_options": {"tdpo_alpha": 0.5, "anchor_tokens": 4},
    },
}


@pytest.fixture(scope="module")
def by_dpo(tmp_path_factory: pytest.TempPathFactory) -> DPOTrainer:
    return plain(tmp_path_factory.mktemp("dpo"))


@pytest.mark.parametrize("name", RUNS)
def test_every_policy_trains(tmp_path: Path, by_dpo: DPOTrainer, name: str) -> None:
    """Finite, reproducible, and another result than DPO's."""
    first = trained(tmp_path / "first", **RUNS[name])
    again = trained(tmp_path / "again", **RUNS[name])
    losses = logged(first)
    assert len(losses) == 3
    assert all(math.isfinite(x) for x in losses)
    assert losses == logged(again)
    assert furthest(first, again) == 0
    assert all(bool(torch.isfinite(w).all()) for w in weights(first.model).values())
    assert furthest(first, by_dpo) > 1e-6
    before = weights(first.model)
    found = first.evaluate(preference_rows(4, seed=2))
    assert math.isfinite(found["eval_loss"])
    assert all(torch.equal(w, before[n]) for n, w in weights(first.model).items())


def batch_of(trainer: AlphaDPOTrainer) -> tuple[dict[str, Any], Tensor]:
    batch = next(iter(trainer.get_train_dataloader()))
    return batch, label_mask(trainer.response_labels(batch))


def test_sepo_scores_are_the_two_models_own(tmp_path: Path) -> None:
    """Columns against a plain forward; the reference is the trained model before training."""
    oracle, reference = model(seed=4), model()
    trainer = trained(tmp_path, policy=SePO(oracle=oracle))
    batch, mask = batch_of(trainer)
    found = trainer.weigher._columns.columns_of(batch, mask)
    for name, scorer in (("oracle_losses", oracle), ("reference_losses", reference)):
        with torch.no_grad():
            logits = scorer.eval()(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits
        each = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        wanted = torch.zeros(mask.shape)
        wanted[:, 1:] = -each
        assert torch.allclose(found[name], wanted * mask, atol=1e-4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"policy": "sepo", "policy_options": {"oracle": "/nowhere"}}, "no such model folder"),
        ({"policy": "confpo", "loss_type": ["ipo"]}, "loss_type does not change"),
        ({"policy": "confpo", "ld_alpha": 0.5}, "ld_alpha does not change"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, InputError, ModelError), match=message):
        trained(tmp_path, **more)
