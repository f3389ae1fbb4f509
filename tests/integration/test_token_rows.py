"""Rows that come tokenised: their labels are taken as they are, by one rule in every role."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq

from alphatoken.errors import InputError
from alphatoken.model.batch import read_batch
from alphatoken.train import AlphaSFTTrainer, AlphaTrainer
from alphatoken.train.python_rows import read_rows
from tests.integration import tiny_training as tiny
from tests.integration.test_given_rows import READ

Row = dict[str, Any]


def ids(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 30, (9 + i % 4,), generator=generator).tolist() for i in range(count)]


def second(row: list[int]) -> list[int]:
    """The second half is marked."""
    return [0] * (len(row) // 2) + [1] * (len(row) - len(row) // 2)


def middle(row: list[int]) -> list[int]:
    return [int(2 <= i < len(row) - 3) for i in range(len(row))]


def kept(row: list[int], *masks: list[int]) -> list[int]:
    """Labels where all masks are 1."""
    return [token if all(marks) else -100 for token, *marks in zip(row, *masks, strict=True)]


Make = Callable[[list[int]], Any]
FORMS: dict[str, tuple[Make, Make, bool | None]] = {
    "labels beside both masks": (
        lambda x: {"labels": kept(x, middle(x)), "completion_mask": second(x),
                   "assistant_masks": second(x)}, lambda x: kept(x, middle(x)), None),
    "labels, completions only": (
        lambda x: {"labels": kept(x, middle(x)), "completion_mask": second(x)},
        lambda x: kept(x, middle(x)), True),
    "both masks": (
        lambda x: {"assistant_masks": middle(x), "completion_mask": second(x)},
        lambda x: kept(x, middle(x)), None),
    "both masks, completions only": (
        lambda x: {"assistant_masks": middle(x), "completion_mask": second(x)},
        lambda x: kept(x, middle(x), second(x)), True),
    "a completion_mask": (lambda x: {"completion_mask": second(x)}, list, None),
    "a completion_mask, completions only": (
        lambda x: {"completion_mask": second(x)}, lambda x: kept(x, second(x)), True),
    "labels alone": (lambda x: {"labels": kept(x, second(x))}, lambda x: kept(x, second(x)), None),
}  # fmt: skip
"""Columns of a row beside its tokens; its labels by TRL's rule; ``completion_only_loss``."""


@pytest.mark.parametrize("form", FORMS)
def test_training_validation_and_fisher_rows_have_labels_by_one_rule(
    form: str, tmp_path: Path
) -> None:
    make, labels, only = FORMS[form]
    parts = {"train": ids(8), "validation": ids(6, 5), "retention": ids(6, 7)}
    rows = {
        f"{name}_dataset": Dataset.from_list([{"input_ids": x, **make(x)} for x in own])
        for name, own in parts.items()
    }
    options = {**rows, "retention": "data", "objective": "both", "completion_only_loss": only}
    trainer = tiny.sft(tmp_path, held_out_steps=0, **options)
    roles = (trainer.train_dataset, trainer.rows.validation, trainer.rows.retention)
    for role, own in zip(roles, parts.values(), strict=True):
        assert [list(row["labels"]) for row in role] == [labels(x) for x in own]
    # What stands before the first label is the prompt of a Fisher.
    prompts = trainer.fisher_prompts(trainer.tokenised(rows["train_dataset"], "Fisher"), 8)
    first = [next(i for i, label in enumerate(labels(x)) if label != -100) for x in ids(8)]
    assert prompts == [x[: max(n, 1)] for x, n in zip(ids(8), first, strict=True)]


@pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode:FutureWarning")
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_completions_of_other_rows_are_labelled_beside_labels_of_ones_own(
    mode: str, tmp_path: Path
) -> None:
    """Also where they are cut: TRL cuts labels and leaves the mask."""
    own = Dataset.from_list([{"input_ids": x, "labels": kept(x, second(x))} for x in ids(8)])
    texts = tiny.sums(6, seed=5)
    trainer = tiny.sft(tmp_path, train_dataset=own, validation_dataset=texts, max_length=26,
                       truncation_mode=mode, retention="none", held_out_steps=0)  # fmt: skip
    written = tiny.tokenizer()
    for row, text in zip(trainer.rows.validation, texts, strict=True):
        prompt = written(text["prompt"])["input_ids"]
        whole = prompt + written(f"{text['completion']}</s>")["input_ids"]
        labels = [-100] * len(prompt) + whole[len(prompt) :]
        cut = slice(26) if mode == "keep_start" else slice(-26, None)
        assert (row["input_ids"], row["labels"]) == (whole[cut], labels[cut])
    prompts = trainer.fisher_prompts(trainer.tokenised(Dataset.from_list(texts), "Fisher"), 6)
    if mode == "keep_start":
        assert [written.decode(one) for one in prompts] == [text["prompt"] for text in texts]


# --- what would be lost ---------------------------------------------------------------------------


TEN = list(range(4, 14))
HALF = [0] * 5 + [1] * 5
LABELLED = {"input_ids": TEN, "labels": kept(TEN, HALF)}
LOST = {
    "loss_mask without labels": ({"input_ids": TEN, "loss_mask": HALF}, "'loss_mask' says"),
    "loss_mask": ({**LABELLED, "loss_mask": [0] * 6 + [1] * 4}, "'loss_mask' says something else"),
    "response_mask": ({**LABELLED, "response_mask": [1] * 10}, "'response_mask' says something"),
    "loss_weights": ({**LABELLED, "loss_weights": [w / 2 for w in HALF]}, "'loss_weights' says"),
    "token_weights": ({**LABELLED, "token_weights": [0.0] * 10}, "'token_weights' says something"),
    "positions that start again": ({**LABELLED, "position_ids": [0, 1, 2, 3, 4] * 2}, "from 0"),
    "positions that start later": ({**LABELLED, "position_ids": list(range(1, 11))}, "from 0"),
    "packed documents": ({**LABELLED, "seq_lengths": [5, 5]}, "'seq_lengths' packs 2 documents"),
    "a hole": ({**LABELLED, "attention_mask": [1, 1, 0, *[1] * 7]}, "0 before the last label"),
    "a hole behind the labels": (
        {**LABELLED, "labels": [*TEN[:5], *[-100] * 5], "attention_mask": [*[1] * 7, 0, 1, 1]},
        "'attention_mask' is 0",
    ),
    "padding on the left": ({**LABELLED, "attention_mask": [0] * 3 + [1] * 7}, "before the last"),
    "padding that is learned": ({"input_ids": TEN, "attention_mask": [1] * 8 + [0] * 2}, "before"),
    "longer labels": ({**LABELLED, "labels": [*kept(TEN, HALF), 2]}, "'labels' has 11 entries"),
    "an empty list of labels": ({**LABELLED, "labels": []}, "'labels' has 0 entries"),
    "a shorter mask": ({"input_ids": TEN, "assistant_masks": [1] * 9}, "'assistant_masks' has 9"),
}


SFT = SimpleNamespace(**READ, completion_only_loss=None, padding_free=False, packing=False)


@pytest.mark.parametrize("kind", LOST)
@pytest.mark.parametrize("name", ["training", "validation"])
def test_what_would_change_what_is_learned_is_refused(name: str, kind: str) -> None:
    row, said = LOST[kind]
    message = rf"{name} row would be learned otherwise than it says. Got: row 0: .*{said}"
    with pytest.raises(InputError, match=message):
        read_rows([row], name, {"args": SFT})
    # A collator of the caller's own may read what it likes.
    read_rows([row], name, {"args": SFT, "data_collator": list})


def test_packed_rows_are_served_where_the_collator_keeps_documents_apart() -> None:
    own = {"seq_lengths": [5, 5], "position_ids": [0, 1, 2, 3, 4] * 2}
    args = SimpleNamespace(**{**vars(SFT), "padding_free": True})
    read_rows([{**LABELLED, **own}], "training", {"args": args})
    with pytest.raises(InputError, match="'position_ids' do not count from 0"):
        read_rows(
            [{**LABELLED, **own, "position_ids": list(range(10))}], "training", {"args": args}
        )
    for name, packing in (("validation", False), ("training", True)):
        args.packing = packing
        with pytest.raises(InputError, match="packs 2 documents|do not count from 0"):
            read_rows([{**LABELLED, **own}], name, {"args": args})


SAME: dict[str, Row] = {
    "a mask that agrees": {"loss_mask": HALF},
    "weights that agree": {"loss_weights": [float(w) for w in HALF], "row": 7},
    "a first token that nothing predicts": {"loss_mask": [1, *HALF[1:]]},
    "one document": {"position_ids": list(range(10)), "seq_lengths": [10]},
    "masks beside labels": {"completion_mask": [1] * 10, "assistant_masks": HALF[::-1]},
    "another's column": {"special_tokens_mask": [0] * 10, "id": "a"},
    "a mask of ones": {"attention_mask": [1] * 10},
    "padding behind the labels": {
        "attention_mask": [1] * 8 + [0] * 2, "labels": [*kept(TEN, HALF)[:8], -100, -100],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SAME)
def test_what_says_no_more_than_the_labels_is_named(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("alphatoken.data").propagate = True
    with caplog.at_level("WARNING", logger="alphatoken.data"):
        read_rows([{**LABELLED, **SAME[kind]}], "training", {"args": SFT})
    named = ", ".join(sorted(SAME[kind].keys() - {"attention_mask", "labels"}))
    said = [f"training rows: input_ids, labels; not read: {named}"] if named else []
    assert caplog.messages == said


def test_labels_that_are_shifted_are_said_and_marks_of_a_row_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("alphatoken.data").propagate = True
    with caplog.at_level("WARNING", logger="alphatoken.data"):
        read_rows([LABELLED, {**LABELLED, "labels": [*TEN[1:], -100]}], "training", {"args": SFT})
    assert "in 1 of 2 rows a label is another token than the one at its place" in caplog.text
    for more in ({"weight": 0}, {"label": False}, {"weight": 0.5}):
        with pytest.raises(InputError, match="row 1: .*dataset.filter"):
            read_rows([LABELLED, {**LABELLED, **more}], "training", {"args": SFT})


# --- the plain trainer ----------------------------------------------------------------------------


def padded(rows: list[list[int]], width: int = 14) -> Dataset:
    """Rows of one length, padded on the left."""

    def row(own: list[int]) -> Row:
        pad = [0] * (width - len(own))
        return {
            "input_ids": pad + own,
            "labels": [-100] * len(pad) + kept(own, second(own)),
            "attention_mask": pad + [1] * len(own),
            "position_ids": pad + list(range(len(own))),
        }

    return Dataset.from_list(list(map(row, rows)))


def test_validation_rows_of_the_plain_trainer_keep_their_masks(tmp_path: Path) -> None:
    """As transformers' collator keeps those of training rows; they were dropped before."""
    validation = padded(ids(6, 5))
    trainer = tiny.made(
        AlphaTrainer, tmp_path, train_dataset=padded(ids(8)), validation_dataset=validation,
        processing_class=None, **{**tiny.ALPHA, "retention": "none", "held_out_steps": 0},
    )  # fmt: skip
    theirs = trainer.data_collator(validation.to_list())
    ours = trainer.row_batch(trainer.rows.validation)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    short = trainer.row_batch([{"input_ids": x, "labels": x, "position_ids": list(range(len(x)))}
                               for x in ids(2)])  # fmt: skip
    assert short["attention_mask"].tolist() == [[1] * 9 + [0], [1] * 10]
    assert short["position_ids"].tolist() == [[*range(9), 0], [*range(10)]]


def test_a_mask_of_the_loss_is_refused_by_the_plain_trainer(tmp_path: Path) -> None:
    rows = [{"input_ids": x, "labels": x, "loss_mask": second(x)} for x in ids(8)]
    with pytest.raises(InputError, match="training row would be learned .*'loss_mask' says somet"):
        tiny.made(AlphaTrainer, tmp_path, train_dataset=rows, policy="random", retention="none")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"input_ids": x} for x in ids(8)], "have no labels.*'labels': row.'input_ids'."),
        (
            [{"input_ids": x, "labels": x} for x in ids(8)],
            "several lengths.*DataCollatorForSeq2Seq",
        ),
    ],
)
def test_rows_that_make_no_batch_are_refused_by_the_plain_trainer(
    rows: list[Row], said: str, tmp_path: Path
) -> None:
    more = {"policy": "random", "retention": "none", "processing_class": None}
    with pytest.raises(InputError, match=said):
        tiny.made(AlphaTrainer, tmp_path, train_dataset=rows, **more)
    more["data_collator"] = DataCollatorForSeq2Seq(tiny.tokenizer())
    tiny.made(AlphaTrainer, tmp_path, train_dataset=rows, **more)


@pytest.mark.parametrize("kind", [AlphaTrainer, AlphaSFTTrainer])
def test_a_stream_of_tokens_is_trained_on_up_to_a_row_that_is_refused(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alphatoken.train.python_rows._FIRST_ROWS", 2)
    row = {**LABELLED, "loss_mask": HALF}
    rows = [row] * 8 + [{**row, "loss_mask": [1] * len(TEN)}]
    stream = Dataset.from_list(rows).to_iterable_dataset()
    more = {"policy": "random", "retention": "none", "per_device_train_batch_size": 1,
            "export_values": False, "processing_class": tiny.tokenizer()}  # fmt: skip
    tiny.made(kind, tmp_path / "a", train_dataset=stream, max_steps=2, **more).train()
    with pytest.raises(InputError, match="row 8: 'loss_mask' says something else"):
        tiny.made(kind, tmp_path / "b", train_dataset=stream, max_steps=20, **more).train()


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loss_mask", "weights", "response_mask", "completion_mask"])
def test_a_batch_whose_mask_contradicts_its_labels_is_refused(name: str) -> None:
    tokens, labels = torch.tensor([TEN]), torch.tensor([LABELLED["labels"]])
    batch = {"input_ids": tokens, "labels": labels}
    agrees = torch.tensor([[1, *HALF[1:]]])
    assert read_batch({**batch, name: agrees}).response_tokens == 5
    with pytest.raises(InputError, match=f"'{name}' of the batch says something else than its lab"):
        read_batch({**batch, name: agrees * 0.5})
    with pytest.raises(InputError, match=r"Got: 1 for a token, .*\(row 0, token 1\)"):
        read_batch({**batch, name: torch.ones_like(tokens)})
    assert read_batch({**batch, name: torch.tensor([HALF[1:]])}).response_tokens == 5
    assert read_batch({**batch, name: torch.ones(1)}).response_tokens == 5
    with pytest.raises(InputError, match=r"Got: 0.5 for a row, .*\(row 0\).*token_weights="):
        read_batch({**batch, name: torch.tensor([0.5])})
