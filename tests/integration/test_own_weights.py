"""``policy="weights"`` in trainers and commands. One step: tests/property/test_own_weights.py."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from safetensors.torch import load_file
from trl import DPOTrainer, SFTTrainer

from alphatoken.cli.arguments import read_arguments
from alphatoken.cli.training_rows import load_run_data
from alphatoken.errors import (
    AlphaTokenError,
    AlphaTokenWarning,
    ConfigError,
    DataError,
    InputError,
)
from alphatoken.train import AlphaDPOTrainer, AlphaSFTTrainer, AlphaTrainer
from alphatoken.train.policies.own_weights import OwnWeights
from tests.integration import tiny_training as tiny
from tests.integration.killed_run import Run, two_processes_are_one
from tests.integration.small_world import World
from tests.integration.tiny_training import furthest, losses, sums
from tests.property.test_own_weights import chat_tokenizer
from tests.rows import jsonl

SGD = {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1}
WEIGHTS = (0.0, 0.5, 1.0, 2.0, 0.25)

own_sft = partial(tiny.made, AlphaSFTTrainer, policy="weights")
own_dpo = partial(tiny.made, AlphaDPOTrainer, policy="weights", learning_rate=1e-3)


def run(trainer: Any) -> Any:
    trainer.train()
    return trainer


def weighed_tokens(count: int = 24, weights: Any = WEIGHTS) -> list[dict[str, Any]]:
    """Tokenised rows with a weight for each token."""
    rows = [dict(row) for row in tiny.tokenised(count)]
    for n, row in enumerate(rows):
        row["loss_weights"] = [weights[(n + i) % len(weights)] for i in range(len(row["labels"]))]
    return rows


def batches(trainer: Any) -> list[dict[str, Any]]:
    return list(trainer.get_train_dataloader())


# --- the run of TRL -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_accumulation_steps": 2},
        {"packing": True, "max_length": 96},
        pytest.param(
            {"packing": True, "packing_strategy": "wrapped", "max_length": 48},
            marks=pytest.mark.slow,
        ),
        pytest.param({"peft": True, "max_length": 20}, marks=pytest.mark.slow),
        pytest.param({"loss_type": "dft", "shuffle_dataset": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_weights_of_one_are_trls_run(tmp_path: Path, more: dict[str, Any]) -> None:
    """Losses and weights after the run have the same bits, in each layout of the rows."""
    plain = run(tiny.made(SFTTrainer, tmp_path / "trl", **more))
    rows = tiny.sft_rows().map(lambda row: {"weight": 1.0})
    own = run(own_sft(tmp_path / "own", train_dataset=rows, **more))
    assert losses(plain) == losses(own)
    assert furthest(plain, own) == 0


def test_weights_of_one_are_trls_run_on_pairs(tmp_path: Path) -> None:
    shared = {"ref_model": tiny.model(1), "gradient_accumulation_steps": 2}
    plain = run(tiny.made(DPOTrainer, tmp_path / "trl", learning_rate=1e-3, **shared))
    rows = tiny.preference_rows().map(lambda row: {"weight": 1.0, "rejected_weight": 1.0})
    own = run(own_dpo(tmp_path / "own", train_dataset=rows, **shared))
    assert losses(plain) == losses(own)
    assert furthest(plain, own) == 0


def chats(count: int = 16) -> list[dict[str, Any]]:
    """Two answers each, of which every other first one weighs 0."""
    rows = []
    for n, row in enumerate(sums(count)):
        first = {"role": "assistant", "content": row["completion"], "weight": float(n % 2)}
        asked = {"role": "user", "content": row["prompt"].strip()}
        last = {"role": "assistant", "content": f" {n} it is."}
        rows.append({"messages": [asked, first, {"role": "user", "content": "sure?"}, last]})
    return rows


def test_a_turn_of_weight_zero_is_one_without_labels(tmp_path: Path) -> None:
    """Divided by the weights, the run is TRL's with -100 at that turn; else by more tokens."""
    tokenizer = chat_tokenizer("marked")
    shared = {**SGD, "processing_class": tokenizer, "gradient_accumulation_steps": 2}
    own = own_sft(
        tmp_path / "own", train_dataset=chats(), assistant_only_loss=True,
        kept_normalization="kept", **shared,
    )  # fmt: skip
    rows, zeros = [], 0
    for row in own.train_dataset:
        pairs = list(zip(row["labels"], row["loss_weights"], strict=True))
        zeros += sum(label != -100 and weight == 0 for label, weight in pairs)
        labels = [label if weight else -100 for label, weight in pairs]
        rows.append({"input_ids": row["input_ids"], "labels": labels})
    assert zeros > 50
    plain = tiny.made(SFTTrainer, tmp_path / "trl", train_dataset=Dataset.from_list(rows), **shared)
    assert furthest(run(own), run(plain)) < 1e-6


def test_the_same_text_has_the_weights_of_each_row(tmp_path: Path) -> None:
    """Rows are not looked up by their text; cut, packed and shuffled rows keep their own."""
    row = tiny.sft_rows(1)[0]
    rows = [{**row, "weight": float(n)} for n in range(12)]
    trainer = own_sft(
        tmp_path, train_dataset=rows, packing=True, max_length=60, shuffle_dataset=True
    )
    seen = []
    for batch in batches(trainer):
        labelled = batch["labels"][batch["labels"] != -100]
        laid = batch["alphatoken_row_weights"][batch["labels"] != -100]
        assert len(labelled) == len(laid)
        seen += laid.tolist()
    counts = {weight: seen.count(weight) for weight in set(seen)}
    assert set(counts) == {float(n) for n in range(12)}
    assert len(set(counts.values())) == 1


# --- values that were computed before -------------------------------------------------------------


def test_rows_of_score_train_as_the_policy_that_made_them(world: World, tmp_path: Path) -> None:
    """One step from the model that was scored, by `top` and by the weights that `score` wrote.

    All rows are one batch, so that both rank all tokens together.
    """
    from alphatoken.cli import main

    scored = tmp_path / "scored"
    ranks = ("--keep_ratio", 0.5, "--keep_scope", "dataset", "--estimator", "label")
    assert world.score(scored, *ranks, "--rows", "tokens") == 0
    kept = len((scored / "rows.jsonl").read_text().splitlines())
    words = [
        "sft", "--model_name_or_path", str(world / "moved"), "--policy", "weights",
        "--train_file", str(scored / "rows.jsonl"), "--validation_rows", "0",
        "--kept_normalization", "kept", "--output_dir", str(tmp_path / "own"), "--max_steps", "1",
        "--per_device_train_batch_size", str(kept), "--optim", "sgd", "--learning_rate", "1.0",
        "--max_grad_norm", "0", "--use_cpu", "true", "--bf16", "false", "--report_to", "none",
        "--lr_scheduler_type", "constant", "--max_length", "null",
    ]  # fmt: skip
    assert main(words) == 0
    own = load_file(tmp_path / "own" / "model.safetensors")
    model, _, train, validation = world.loaded()
    top = tiny.made(
        AlphaSFTTrainer, tmp_path / "top", model=model, policy="top",
        processing_class=world.loaded()[1], max_length=None, estimator="label", layers="3",
        train_dataset=[{"input_ids": e.input_ids, "labels": e.labels} for e in train],
        validation_dataset=[{"input_ids": e.input_ids, "labels": e.labels} for e in validation],
        validation_batch_size=len(validation), held_out_share=0.0,
        keep_ratio=0.5, kept_normalization="kept", max_steps=1, optim="sgd", learning_rate=1.0,
        max_grad_norm=0.0, per_device_train_batch_size=len(train),
    )  # fmt: skip
    before = tiny.weights(top.model)
    run(top)
    after = tiny.weights(top.model)
    moved = max(float((after[n] - before[n]).abs().max()) for n in before)
    assert moved > 1e-4
    for name, weight in own.items():
        assert float((after[name] - weight).abs().max()) < 1e-3 * moved, name


# --- layouts of processes, resuming ---------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path) -> None:
    """Divided by weights and tokens of the whole step, up to the rounding of a sum."""
    own = {"policy": "weights", "train_dataset": weighed_tokens(), "kept_normalization": "kept"}
    two_processes_are_one(tmp_path, {**SGD, **own})


def test_a_resumed_run_has_the_bits_of_one_that_went_on(tmp_path: Path) -> None:
    """Weights come back with the rows; other weights are other rows."""
    options = {"policy": "weights", "train_dataset": weighed_tokens(), "dropout": 0.1}
    each = Run("sft", tmp_path, options={**options, "gradient_accumulation_steps": 2})
    run(each.trainer())
    whole = load_file(each.out / "checkpoint-8" / "model.safetensors")
    each.trainer().train(resume_from_checkpoint=str(each.out / "checkpoint-3"))
    again = load_file(each.out / "checkpoint-8" / "model.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    other = Run("sft", tmp_path, options={**options, "train_dataset": weighed_tokens(24, (1.0,))})
    with pytest.raises(ConfigError, match="train_dataset"):
        other.trainer().train(resume_from_checkpoint=str(each.out / "checkpoint-3"))


# --- kinds of rows and trainers -------------------------------------------------------------------


def test_transformers_own_trainer_and_streams_read_them(tmp_path: Path) -> None:
    """The same rows through three trainers: tokens of a list, of a collator, of a stream."""
    from transformers import DataCollatorForSeq2Seq

    rows = weighed_tokens(16)
    shared = {**SGD, "max_steps": 2}
    listed = run(own_sft(tmp_path / "a", train_dataset=rows, **shared))
    streamed = IterableDataset.from_generator(lambda: iter(rows))
    stream = own_sft(tmp_path / "b", train_dataset=streamed, **shared)
    collator = DataCollatorForSeq2Seq(tiny.tokenizer())
    plain = tiny.made(
        AlphaTrainer, tmp_path / "c", policy="weights", train_dataset=rows,
        data_collator=collator, **shared,
    )  # fmt: skip
    assert furthest(listed, run(plain)) < 1e-6
    first = next(iter(stream.get_train_dataloader()))
    assert first["alphatoken_row_weights"].shape == first["labels"].shape
    run(stream)


def test_evaluation_is_of_all_tokens(tmp_path: Path) -> None:
    """Rows to evaluate on have no weights, also where they bring some."""
    rows = weighed_tokens(12)
    more = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": Dataset.from_list(rows)}
    with pytest.warns(AlphaTokenWarning, match="12 of 12 training rows repeat an evaluation row"):
        own = run(own_sft(tmp_path / "own", train_dataset=rows, max_steps=1, **more))
    plain = tiny.made(SFTTrainer, tmp_path / "trl", eval_dataset=tiny.tokenised(12))
    plain.model.load_state_dict(own.model.state_dict())
    expected = plain.evaluate()["eval_loss"]
    assert own.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


LLAMA_FACTORY = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "value": "be brief."}], "loss_weight": 0.0},
        {"role": "user", "content": [{"type": "text", "value": "1+1=?"}], "loss_weight": 0.0},
        {"role": "assistant", "content": [{"type": "text", "value": "3."}], "loss_weight": 0.5},
        {"role": "user", "content": [{"type": "text", "value": "sure?"}], "loss_weight": 0.0},
        {"role": "assistant", "content": [{"type": "text", "value": "2."}]},
    ]
}
MS_SWIFT = {
    "messages": [
        {"role": "user", "content": "1+1=?"},
        {"role": "assistant", "content": "3.", "loss": False},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "2.", "loss": True, "loss_scale": 2.0},
    ]
}


@pytest.mark.parametrize(
    ("row", "expected"),
    [(LLAMA_FACTORY, (0.5, 1.0)), (MS_SWIFT, (0.0, 2.0))],
    ids=["LLaMA-Factory", "ms-swift"],
)
@pytest.mark.parametrize("template", ["plain", "marked"])
def test_rows_of_other_trainers(
    tmp_path: Path, row: dict[str, Any], expected: tuple[float, float], template: str
) -> None:
    """A command and a trainer lay the same weights on the tokens of the answers."""
    tokenizer = chat_tokenizer(template)
    data = command_rows(tmp_path, [row] * 3, tokenizer)
    more = {"assistant_only_loss": True} if template == "marked" else {}
    kind = own_sft(tmp_path / "run", train_dataset=[row] * 3, processing_class=tokenizer, **more)
    for made in (data[0], kind.train_dataset[0]):
        labelled = {
            tokenizer.decode([token]): (label, weight)
            for token, label, weight in zip(
                made["input_ids"], made["labels"], made["loss_weights"], strict=True
            )
        }
        assert labelled["2"][1] == expected[1]
        label, weight = labelled["3"]
        assert label == -100 or weight == expected[0]
    assert data[0]["input_ids"][: len(data[0]["input_ids"])] == kind.train_dataset[0]["input_ids"]


def command_rows(
    folder: Path, rows: list[dict[str, Any]], tokenizer: Any, *more: str, command: str = "sft"
) -> Any:
    """Training rows of ``alphatoken sft --policy weights``, as its trainer gets them."""
    file = jsonl(folder / "rows.jsonl", rows)
    words = [
        "--model_name_or_path", "none", "--output_dir", str(folder / "out"), "--train_file",
        str(file), "--policy", "weights", "--validation_rows", "0", "--report_to", "none",
        "--use_cpu", "true", "--bf16", "false", *more,
    ]  # fmt: skip
    config = (AlphaDPOTrainer if command == "dpo" else AlphaSFTTrainer).CONFIG
    arguments = read_arguments(command, words, config)
    return load_run_data(arguments, tokenizer)[0]["train_dataset"]


def test_pairs_of_a_command(tmp_path: Path) -> None:
    """Weights of a pair, of its sides and of its messages reach the tokens."""
    texts = {"prompt": "1+1=?", "chosen": "2.", "rejected": "3."}
    rows = [{**texts, "weight": 0.5, "rejected_weight": 4.0}, {**texts, "chosen_weight": 0.25}]
    made = command_rows(tmp_path, rows, tiny.tokenizer(), command="dpo")
    trainer = own_dpo(tmp_path / "run", train_dataset=made, ref_model=tiny.model(1))
    first, second = trainer.train_dataset
    assert set(first["chosen_weights"]) == {0.5}
    assert set(first["rejected_weights"]) == {2.0}
    assert set(second["chosen_weights"]) == {0.25}
    assert set(second["rejected_weights"]) == {1.0}
    chat = [{"role": "assistant", "content": "2.", "weight": 3.0}]
    asked = [{"role": "user", "content": "1+1=?"}]
    rows = [
        {"prompt": asked, "chosen": chat, "rejected": [{**chat[0], "content": "3.", "weight": 0.5}]}
    ]
    tokenizer = chat_tokenizer("plain")
    made = command_rows(tmp_path, rows, tokenizer, command="dpo")
    for own in (made, rows):
        trainer = own_dpo(
            tmp_path / "run", train_dataset=own, ref_model=tiny.model(1), processing_class=tokenizer
        )
        (pair,) = trainer.train_dataset
        assert set(pair["chosen_weights"]) == {3.0}
        assert set(pair["rejected_weights"]) == {0.5}


PAGE = (Path(__file__).parents[2] / "docs/own-weights.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", re.findall(r"```json\n(.*?)```", PAGE, re.S))
def test_rows_of_the_page(tmp_path: Path, block: str) -> None:
    """A command reads each, and at least one of its tokens has another weight than 1."""
    rows = [json.loads(line) for line in block.lower().splitlines()]
    command = "dpo" if "chosen" in rows[0] else "sft"
    (row,) = command_rows(tmp_path, rows, chat_tokenizer("plain"), command=command)
    if command == "sft":
        pairs = zip(row["labels"], row["loss_weights"], strict=True)
        assert {weight for label, weight in pairs if label != -100} - {1.0}
    else:
        assert row["weight"] == 0.5
        assert [message["weight"] for message in row["rejected"]] == [2.0]


# --- what is said, and refused --------------------------------------------------------------------


def test_rows_without_a_weight_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before any work, in Python and by a command; they count as 1."""
    rows = [{**row, **({"weight": 0.5} if n < 4 else {})} for n, row in enumerate(sums(6))]
    said = "in 2 of 6 rows there is no weight, which counts as 1"
    with caplog.at_level(logging.INFO, "alphatoken.data"):
        trainer = own_sft(tmp_path / "run", train_dataset=rows)
        assert said in caplog.text
        assert "completion, prompt, weight" in caplog.text
        caplog.clear()
        made = command_rows(tmp_path, rows, tiny.tokenizer())
        assert said in caplog.text
    for own in (trainer.train_dataset, made):
        assert sorted({w for row in own for w in row["loss_weights"][-4:]}) == [0.5, 1.0]


TEXT = {"prompt": "1+1=?", "completion": " 2."}
TOKENS = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
ASKED = {"role": "user", "content": "1+1=?"}


def said(**fields: Any) -> list[dict[str, Any]]:
    return [ASKED, {"role": "assistant", "content": "2.", **fields}]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": ({**TEXT, "weight": math.nan}, "no finite number.*row 1"),
    "infinity": ({**TEXT, "weight": math.inf}, "no finite number.*row 1"),
    "beyond float32": ({**TEXT, "weight": 1e39}, "no finite number.*row 1"),
    "a word": ({**TEXT, "weight": "high"}, "no finite number.*row 1.*'high'"),
    "a list": ({**TEXT, "weight": [1.0]}, "no finite number.*row 1"),
    "negative": ({**TEXT, "weight": -1.0}, "negative.*row 1.*allow_negative"),
    "two": ({**TEXT, "weight": 1.0, "sample_weight": 2.0}, "contradict.*row 1"),
    "of a message": ({"messages": said(weight=-2.0)}, "negative.*row 1"),
    "two of a message": ({"messages": said(weight=1.0, loss_scale=2.0)}, "contradict.*row 1"),
    "tokens and none": ({**TOKENS, "loss_weights": [1.0, 1.0]}, "2 entries|no weight for each"),
    "a NaN among tokens": ({**TOKENS, "loss_weights": [1.0, math.nan, 1.0]}, "no finite.*row 1"),
    "a negative token": ({**TOKENS, "loss_weights": [0.0, -1.0, 1.0]}, "negative.*row 1"),
    "empty": ({**TOKENS, "loss_weights": []}, "no weight for each|0 entries"),
    "a word for tokens": ({**TOKENS, "loss_weights": ["a", "b", "c"]}, "no finite.*row 0"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_what_is_no_weight_is_refused(tmp_path: Path, case: str) -> None:
    """With the number of the row, before a model is trained."""
    row, words = BAD[case]
    # Of the same kinds, or Arrow would refuse the rows itself.
    good: dict[str, Any] = {**TEXT, "weight": "1.0" if case == "a word" else 1.0}
    if case == "a list":
        good = {**TEXT, "weight": None, "sample_weight": 1.0}
    if "messages" in row:
        good = {"messages": said(weight=1.0)}
    if "input_ids" in row:
        good = {**TOKENS, "loss_weights": ["1"] * 3 if "word" in case else [1.0] * 3}
    tokenizer = chat_tokenizer("plain") if "messages" in row else tiny.tokenizer()
    with pytest.raises((DataError, InputError), match=f"(?s){words}"):
        own_sft(tmp_path, train_dataset=[good, row], processing_class=tokenizer)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: own_sft(d), "no training row has a weight"),
        (lambda d: own_dpo(d, ref_model=tiny.model(1)), "no training row has a weight"),
        (lambda d: own_sft(d, policy_options={"allow_negative": "yes"}), "true or false"),
        (lambda d: own_sft(d, policy_options={"negative": True}), "does not take"),
        (lambda d: own_sft(d, formatting_func=lambda row: "a"), "formatting_func"),
        (
            lambda d: tiny.made(
                AlphaSFTTrainer, d, policy="standard", train_dataset=[{**TEXT, "weight": 0.5}] * 4
            ),
            "policy='weights'",
        ),
    ],
)
def test_runs_that_are_refused(tmp_path: Path, make: Callable[[Path], Any], words: str) -> None:
    with pytest.raises(AlphaTokenError, match=words):
        make(tmp_path)


def _zeros(kind: str) -> tuple[Any, dict[str, Any]]:
    """A trainer's maker, and rows of which no learned token has a weight."""
    if kind == "pairs":
        rows = [{**row, "weight": 0.0} for row in tiny.preference_rows(6)]
        return own_dpo, {"train_dataset": rows, "ref_model": tiny.model(1)}
    if kind == "texts":
        return own_sft, {"train_dataset": [{**row, "weight": 0.0} for row in sums(6)]}
    rows = [dict(row) for row in tiny.tokenised(6)]
    for row in rows:  # all on the prompts, of which nothing is learned
        row["loss_weights"] = [float(label == -100) for label in row["labels"]]
    if kind == "packed":
        return own_sft, {"train_dataset": rows, "packing": True}
    maker = partial(tiny.made, AlphaTrainer, policy="weights", data_collator=tiny.padded)
    return (maker if kind == "transformers" else own_sft), {"train_dataset": rows}


@pytest.mark.parametrize("kind", ["texts", "tokens", "packed", "pairs", "transformers"])
def test_rows_of_which_nothing_is_learned_are_refused(tmp_path: Path, kind: str) -> None:
    """Before any work; one token with a weight is enough."""
    make, more = _zeros(kind)
    with pytest.raises(InputError, match=r"every weight of the training rows is 0"):
        make(tmp_path, **more)
    rows = [dict(row) for row in more["train_dataset"]]
    if kind == "texts":
        rows[-1]["weight"] = 1e-3
    elif kind == "pairs":
        rows[-1] |= {"weight": 1.0, "chosen_weight": 0.0, "rejected_weight": 0.5}
        rows = [{"chosen_weight": 0.0, "rejected_weight": 0.0, **row} for row in rows]
    else:
        rows[-1]["loss_weights"][-1] = 1e-3
    make(tmp_path, **{**more, "train_dataset": rows})


def test_a_step_of_which_nothing_is_learned_is_warned_of(tmp_path: Path) -> None:
    """At the end of the run too, where no log was due before."""
    rows = [{**row, "weight": float(n < 4)} for n, row in enumerate(sums(8))]
    options = {"train_sampling_strategy": "sequential", "max_steps": 2, "logging_steps": 50}
    trainer = own_sft(tmp_path, train_dataset=rows, **options)
    with pytest.warns(AlphaTokenWarning, match="step 1 learned nothing.*1 of the 2 steps"):
        trainer.train()


def test_negative_weights_where_they_are_meant(tmp_path: Path) -> None:
    """The policy as an object; a step goes the other way."""
    rows = [{**row, "weight": -1.0} for row in sums(8)]
    shared = {**SGD, "max_steps": 1, "per_device_train_batch_size": 8}
    up = run(
        tiny.made(SFTTrainer, tmp_path / "up", train_dataset=Dataset.from_list(sums(8)), **shared)
    )
    policy = OwnWeights(allow_negative=True)
    down = run(own_sft(tmp_path / "down", policy=policy, train_dataset=rows, **shared))
    start = tiny.weights(tiny.model())
    for name, weight in tiny.weights(up.model).items():
        moved = weight - start[name]
        assert torch.allclose(tiny.weights(down.model)[name], start[name] - moved, atol=1e-6)
