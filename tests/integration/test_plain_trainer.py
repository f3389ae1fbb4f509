"""What users of transformers' own Trainer have: collators, data sets, mixtures of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, Trainer

from alphatoken.errors import InputError, UnsupportedError
from alphatoken.train import AlphaTrainer
from alphatoken.train.policies.builtin import Standard
from alphatoken.train.policy import PolicySettings
from tests.integration import tiny_training as tiny
from tests.integration.tiny_training import padded


def ids(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Token ids without labels, of differing lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 14, (count,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(4, 30, (n,), generator=generator).tolist()} for n in lengths
    ]


def labelled(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [{**row, "labels": [-100, -100, *row["input_ids"][2:]]} for row in ids(count, seed)]


class OfTorch(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tensors, and no end of its own."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {k: torch.tensor(v) for k, v in self.rows[index % len(self.rows)].items()}


def transformed(rows: list[dict[str, Any]]) -> Dataset:
    """What is stored is the numbers of rows; their ids and labels are made when they are read."""
    names = list(rows[0])

    def read(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        return {name: [rows[i][name] for i in batch["prompt"]] for name in names}

    return Dataset.from_dict({"prompt": list(range(len(rows)))}).with_transform(read)


FORMS = {"torch": OfTorch, "transform": transformed}


def ours(folder: Path, rows: Any, validation: Any, collator: Any, **more: Any) -> AlphaTrainer:
    arguments = {"train_dataset": rows, "validation_dataset": validation, "data_collator": collator}
    own = {"max_steps": 2, "retention": "none", "remove_unused_columns": False, **more}
    return cast("AlphaTrainer", tiny.sft(folder, AlphaTrainer, **arguments, **own))


@pytest.fixture(scope="module")
def of_lists(tmp_path_factory: pytest.TempPathFactory) -> AlphaTrainer:
    """A run on lists of rows."""
    trainer = ours(tmp_path_factory.mktemp("lists"), labelled(16), labelled(8, 5), padded)
    trainer.train()
    return trainer


# Rows of a data set, as tensors, are read in test_tokenised_rows_of_tensors_in_the_trainer_of_trl.
@pytest.mark.parametrize("form", FORMS)
def test_rows_in_every_form_have_the_values_of_lists(
    tmp_path: Path, of_lists: AlphaTrainer, form: str
) -> None:
    made = FORMS[form]
    trainer = ours(tmp_path, made(labelled(16)), made(labelled(8, 5)), padded)
    trainer.train()
    assert list((tmp_path / "_alphatoken" / "values").glob("part-*.parquet"))
    assert tiny.furthest(of_lists, trainer) == 0
    assert of_lists.ledger.sums().tolist() == trainer.ledger.sums().tolist()


def test_tokenised_rows_of_tensors_in_the_trainer_of_trl(tmp_path: Path) -> None:
    skip = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    rows, validation = (
        Dataset.from_list(rows).with_format("torch") for rows in (labelled(16), labelled(8, 5))
    )
    own = {"train_dataset": rows, "validation_dataset": validation, "data_collator": padded}
    trainer = tiny.sft(tmp_path, retention="none", max_steps=2, **own, **skip)
    trainer.train()
    assert "alpha/kept_share" in trainer.state.log_history[0]


def test_the_collator_makes_the_labels(tmp_path: Path) -> None:
    """transformers' collator for language modelling, the usual one: ids are all that rows have.

    At ratio 1 our cross-entropy of the logits is the loss that the model computes itself.
    """
    collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    made = Dataset.from_list
    # In the first steps of Adam rounding decides the sign of a step; a larger epsilon does not.
    epsilon = {"adam_epsilon": 1e-4, "max_steps": 4}
    rows, validation = made(ids(16)), made(ids(8, 5))
    all_kept = ours(tmp_path / "all", rows, validation, collator, keep_ratio=1.0, **epsilon)
    same = {"remove_unused_columns": False, "data_collator": collator, **epsilon}
    plain = tiny.made(Trainer, tmp_path / "plain", train_dataset=rows, **same)
    all_kept.train()
    plain.train()
    assert tiny.losses(all_kept) == pytest.approx(tiny.losses(plain), rel=1e-5)
    assert tiny.furthest(all_kept, plain) < 1e-5
    half = ours(tmp_path / "half", made(ids(16)), made(ids(8, 5)), collator)
    half.train()
    assert 0.4 < half.state.log_history[0]["alpha/kept_share"] < 0.6
    batch = half.row_batch(half.rows.validation[:3])
    assert torch.equal(batch["labels"] == -100, batch["input_ids"] == 0)


def test_a_loss_with_a_part_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    start = tiny.model()
    forward = start.forward

    def with_more(**inputs: Any) -> Any:
        outputs = forward(**inputs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + 0.01 * outputs.logits.logsumexp(-1).square().mean()
        return outputs

    start.forward = with_more
    trainer = ours(tmp_path, labelled(16), None, padded, model=start, policy="random")
    with pytest.raises(UnsupportedError, match="not the cross-entropy of its labels"):
        trainer.train()


@pytest.mark.parametrize("policy", ["top", "all"])
def test_labels_that_a_collator_leaves_on_padding_are_refused(tmp_path: Path, policy: str) -> None:
    """In training and in validation, as by the scorer: transformers would train on padding."""

    def cloned(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = padded(rows)
        return batch | {"labels": batch["input_ids"].clone()}

    trainer = ours(tmp_path / "a", labelled(16), labelled(8, 5), cloned, policy=policy)
    with pytest.raises(InputError, match=r"a label of the \w+ batch lies on padding"):
        trainer.train()


# --- rows padded on the left: their first token is predicted from a pad token ---------------------

LENGTHS = (9, 4, 12, 2, 7, 10, 3, 8, 11, 5, 6, 12)


def texts() -> Dataset:
    """Plain text: every token is a label, the first one too."""
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(4, 40, (n,), generator=generator).tolist() for n in LENGTHS]
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])


def padded_on_the_left(folder: Path, **more: Any) -> Any:
    side = tiny.tokenizer()
    side.padding_side = "left"
    return tiny.sft(
        folder, AlphaTrainer, data_collator=DataCollatorForSeq2Seq(side, padding=True),
        train_dataset=texts(), processing_class=side,
        validation_dataset=texts().select(range(6)), **more,
    )  # fmt: skip


def gradients(
    folder: Path, pad: int, **more: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The first batch with another token in its padding, and what one step on it gives."""
    made = padded_on_the_left(folder, **more)
    made.create_optimizer_and_scheduler(10)
    made.state.max_steps = 10
    batch = dict(next(iter(made.get_train_dataloader())))
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, pad)
    count = (batch["labels"][:, 1:] != -100).sum()
    (carried,), _ = made.get_batch_samples(iter([dict(batch)]), 1, torch.device("cpu"))
    made.training_step(made.model, carried, count)
    result = {n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None}
    return batch, result


def test_no_update_of_chosen_tokens_depends_on_the_pad_token(tmp_path: Path) -> None:
    batch, one = gradients(tmp_path / "one", 0)
    _, two = gradients(tmp_path / "two", 17)
    hidden = batch["attention_mask"][:, :-1] == 0
    assert bool(((batch["labels"][:, 1:] != -100) & hidden).any()), "no such row was drawn"
    embedding = "model.embed_tokens.weight"
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-7, msg=name)
    assert not bool(one[embedding][0].any()), "the pad token itself was trained on"


ALL_KEPT: list[dict[str, Any]] = [
    {"policy": Standard(PolicySettings("budget")), "kept_normalization": "kept"},
    {"policy": "all"},
    {"policy": "random", "keep_ratio": 1.0},
    {"keep_ratio": 1.0, "keep_scope": "global", "kept_normalization": "kept"},
    {"keep_ratio": 1.0},
]


@pytest.mark.parametrize(
    ("side", "optim", "every"),
    [
        ("left", "sgd", ALL_KEPT[:2]),
        ("left", "adamw_torch", ALL_KEPT[-1:]),
        pytest.param("left", "adamw_torch", ALL_KEPT, marks=pytest.mark.slow),
        pytest.param("right", "sgd", ALL_KEPT, marks=pytest.mark.slow),
        pytest.param("right", "adamw_torch", ALL_KEPT, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_keeps_all_tokens_is_transformers_own(
    tmp_path: Path, side: str, optim: str, every: list[dict[str, Any]]
) -> None:
    """Also of the tokens that padding predicts, which have no value."""
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side, tokenizer.pad_token = side, "</s>"  # whose embedding is not 0
    shared = {
        "train_dataset": texts(), "processing_class": tokenizer, "remove_unused_columns": False,
        "data_collator": DataCollatorForSeq2Seq(tokenizer, padding=True), "optim": optim,
        "learning_rate": 0.1 if optim == "sgd" else 1e-2, "adam_epsilon": 1e-4,
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 3, "max_steps": 2,
        "max_grad_norm": 0.0,  # a gradient that is cut is the same whatever divides it
    }  # fmt: skip
    plain = tiny.made(Trainer, tmp_path / "plain", **shared)
    plain.train()
    for number, more in enumerate(every):
        kept = tiny.sft(
            tmp_path / str(number), AlphaTrainer, validation_dataset=texts().select(range(6)),
            retention="none", held_out_steps=0, **shared, **more,
        )  # fmt: skip
        kept.train()
        assert tiny.losses(kept) == pytest.approx(tiny.losses(plain), rel=1e-5)
        assert tiny.furthest(kept, plain) < 1e-6, more
    assert kept.state.log_history[0]["alpha/kept_share"] == 1


def test_the_kept_tokens_divide_the_loss_on_rows_padded_on_the_left(tmp_path: Path) -> None:
    """Not those of the loss that were left out because padding predicts them."""
    more = {"keep_ratio": 0.5, "policy": "random"}
    batch, of_all = gradients(tmp_path / "response", 0, **more)
    _, of_kept = gradients(tmp_path / "kept", 0, kept_normalization="kept", **more)
    counted = batch["labels"][:, 1:] != -100
    valued = int((counted & (batch["attention_mask"][:, :-1] != 0)).sum())
    assert valued < counted.sum()
    for name in of_all:
        scaled = of_all[name] * int(counted.sum()) / -(-valued // 2)
        torch.testing.assert_close(of_kept[name], scaled, rtol=1e-5, atol=1e-7, msg=name)
