"""Validation rows in every step: against TRL on rows put in place by hand, and a plain loop."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import DataCollatorForSeq2Seq, Trainer
from trl import SFTTrainer

from alphatoken.cli.arguments import read_arguments
from alphatoken.cli.training_rows import check_rows
from alphatoken.errors import AlphaTokenError, ConfigError, InputError, UnsupportedError
from alphatoken.train import AlphaDPOTrainer, AlphaSFTConfig, AlphaSFTTrainer, AlphaTrainer
from alphatoken.train.policies import policy
from alphatoken.train.policies.validation_mix import ValidationMix
from alphatoken.train.policy import PolicySettings, PolicyStage
from alphatoken.train.step_rows import StepRows, keep_rows
from tests.integration import tiny_training as tiny
from tests.integration.policy_examples import Surprising

Row = Mapping[str, Any]

SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 3}
IN_ORDER = {"train_sampling_strategy": "sequential"}
TRAINED, HELD = 24, 8


# --- rows without a model ---------------------------------------------------------------------


def made_rows(lengths: Sequence[int], first: int = 0) -> list[Row]:
    """Rows of two prompt tokens and so many response tokens, each token of a row its number."""
    return [
        {"input_ids": [first + i] * (2 + n), "labels": [-100, -100] + [first + i] * n}
        for i, n in enumerate(lengths)
    ]


def prepared_policy(
    validation: Sequence[Row],
    training: Sequence[Row] = (),
    seed: int = 0,
    known: tuple[int | None, int | None] = (None, None),
    **options: Any,
) -> ValidationMix:
    """``known`` are training rows of a step, and steps of the run."""
    made = ValidationMix(PolicySettings(seed=seed), **options)
    rows = training or made_rows([1])
    stage = PolicyStage(None, rows, validation, row_batch=list, folder=Path())
    made.prepare(replace(stage, rows_of_step=known[0], steps=known[1]))
    return made


@st.composite
def draws(draw: st.DrawFn) -> tuple[int, int, int]:
    """(validation rows, rows of a step, seed)."""
    count = draw(st.integers(1, 12))
    return count, draw(st.integers(1, count)), draw(st.integers(0, 100))


@given(draws(), st.integers(0, 40))
@example((7, 3, 0), 2)
@example((4, 4, 1), 1)
def test_each_validation_row_comes_once_an_epoch(drawn: tuple[int, int, int], step: int) -> None:
    """No step has one twice; a step's rows depend on seed and step alone.

    Proves: validation rows are drawn without replacement (exact), against counts.
    """
    count, rows, seed = drawn
    of = made_rows([1] * count)
    made = prepared_policy(of, rows=rows, seed=seed)
    steps = [[row["input_ids"][0] for row in made.step_rows(i)] for i in range(2 * count)]
    assert all(len(set(own)) == len(own) == rows for own in steps)
    stream = list(chain.from_iterable(steps))
    for epoch in range(len(stream) // count):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == list(range(count))
    again = prepared_policy(of, rows=rows, seed=seed)
    assert again.step_rows(step) == made.step_rows(step)


def test_another_seed_is_another_order() -> None:
    """Proves: validation rows are drawn by the seed (exact), against orders of other seeds."""
    of = made_rows([1] * 12)
    orders = {
        tuple(row["input_ids"][0] for s in range(12) for row in made.step_rows(s))
        for made in (prepared_policy(of, seed=seed) for seed in range(3))
    }
    assert len(orders) == 3


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    st.integers(0, 20),
    st.integers(0, 5),
)
@example([5], [2], 0, 0)  # one row, which comes again
@example([1, 9], [4, 0, 3], 3, 1)
def test_the_control_has_as_many_response_tokens(
    validation: list[int], training: list[int], step: int, seed: int
) -> None:
    """In place of each validation row, training rows with as many; the last one is cut.

    Proves: the control of equal tokens (exact), against counts.
    """
    held, rows = made_rows(validation, 100), made_rows(training)
    options = {"rows": len(held), "seed": seed}
    mixed = prepared_policy(held, rows, **options).step_rows(step)
    made = prepared_policy(held, rows, draw_from="training", **options)
    control = list(made.step_rows(step))
    assert control == list(made.step_rows(step))
    left = iter(control)
    for row in mixed:
        wanted, count = sum(label != -100 for label in row["labels"]), 0
        while count < wanted:
            own = next(left)
            number = own["input_ids"][0]
            assert own["input_ids"] == list(rows[number]["input_ids"])[: len(own["input_ids"])]
            assert own["labels"] == list(rows[number]["labels"])[: len(own["input_ids"])]
            count += sum(label != -100 for label in own["labels"])
        assert count == wanted
    assert next(left, None) is None


def test_the_control_draws_documents_of_packed_rows() -> None:
    """One document, and not what stands before it in its row.

    Proves: the control of equal tokens (exact), against the documents of a row.
    """
    one, two = made_rows([3, 4])
    packed = {name: [*one[name], *two[name]] for name in one} | {"seq_lengths": [5, 6]}
    made = prepared_policy(made_rows([2], 100), [packed], draw_from="training")
    drawn = {tuple(row["input_ids"]) for s in range(20) for row in made.step_rows(s)}
    assert drawn == {(0,) * 4, (1,) * 4}
    assert all("seq_lengths" not in row for s in range(20) for row in made.step_rows(s))


@given(draws(), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9))
@example((5, 3, 0), 2, 1, 0)
@example((5, 2, 0), 2, 2, 1)
def test_micro_batches_and_processes_share_the_rows_of_a_step(
    drawn: tuple[int, int, int], accumulated: int, processes: int, step: int
) -> None:
    """Each row once, dealt out in the order (micro-batch, process), whatever their numbers.

    Proves: the rows of a step are the same over accumulation and processes (exact), against a deal
    by hand.
    """
    count, rows, seed = drawn
    made = prepared_policy(made_rows([1] * count), rows=rows, seed=seed)
    own = [[{"input_ids": [1000 + i], "labels": [1]}] for i in range(accumulated * processes)]
    hands: list[list[Any]] = [list(hand) for hand in own]
    for number, row in enumerate(made.step_rows(step)):
        hands[number % len(hands)].append(row)
    dealt: list[Any] = [None] * len(own)
    for rank in range(processes):
        accelerator = SimpleNamespace(
            process_index=rank, num_processes=processes, device="cpu", dispatch_batches=None
        )
        trainer = SimpleNamespace(
            accelerator=accelerator, data_collator=list, own_collator=None,
            state=SimpleNamespace(global_step=step),
        )  # fmt: skip
        loaded: Iterator[Any] = (keep_rows(hand) for hand in own[rank::processes])
        step_rows = StepRows(trainer, made)  # type: ignore[arg-type]
        dealt[rank::processes] = list(step_rows.joined(loaded, accumulated))
    assert dealt == hands


# --- runs ---------------------------------------------------------------------------------------


def rows_of(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows and validation rows, tokenised."""
    rows = tiny.prepared(folder / "rows", tiny.sft_rows(TRAINED + HELD))
    return rows[:TRAINED], rows[TRAINED:]


def ours(folder: Path, options: Mapping[str, Any], kind: Any = AlphaSFTTrainer, **more: Any) -> Any:
    """A run on ``TRAINED`` rows with ``HELD`` others, rows in their order."""
    rows = tiny.sft_rows(TRAINED + HELD)
    data = {
        "model": tiny.model(layers=2),
        "train_dataset": rows.select(range(TRAINED)),
        "validation_dataset": rows.select(range(TRAINED, TRAINED + HELD)),
    }
    more = {"policy": "validation-mix", "policy_options": dict(options), **more}
    return tiny.made(kind, folder, **{**data, **SGD, **IN_ORDER, **more})


def by_hand(
    folder: Path, trainer: Any, size: int, added: int, kind: Any = SFTTrainer, **more: Any
) -> Any:
    """The trainer below, on a data set that has the added rows after those of each micro-batch."""
    train, _ = rows_of(folder)
    accumulated = trainer.args.gradient_accumulation_steps
    rows = []
    for step in range(trainer.args.max_steps):
        drawn = trainer.token_policy.step_rows(step)
        for number in range(accumulated):
            place = (step * accumulated + number) * size
            rows += [*train[place : place + size], *drawn[number::accumulated]]
    own = {"model": tiny.model(layers=2), "train_dataset": Dataset.from_list(rows)}
    sizes = {"per_device_train_batch_size": size + added}
    return tiny.made(kind, folder, **{**own, **SGD, **IN_ORDER, **sizes, **more})


EQUAL: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "one row": ({"rows": 1}, 1, {}),
    "two rows, two micro-batches": ({"rows": 2}, 1, {"gradient_accumulation_steps": 2}),
    "flattened": ({"rows": 3}, 3, {"padding_free": True, "max_length": None}),
    "adapters": ({"rows": 1}, 1, {"peft": True}),
}
"""Options of the policy, added rows of a micro-batch, and options of both trainers."""


def the_run_is_trls_on_rows_in_place(folder: Path, case: str) -> None:
    """Same rows, same places, one collator: the same weights to the bit, and the same loss."""
    options, added, more = EQUAL[case]
    trainer = ours(folder / "ours", options, per_device_train_batch_size=2, **more)
    hand = by_hand(folder / "hand", trainer, 2, added, **more)
    for one in (trainer, hand):
        if "peft" in more:  # adapters are drawn; those of the second must be the first's
            for name, p in one.model.named_parameters():
                if p.requires_grad:
                    torch.nn.init.normal_(p, std=0.02, generator=torch.Generator().manual_seed(5))
                    assert "lora" in name
        one.train()
    assert tiny.furthest(trainer, hand) == 0
    assert tiny.losses(trainer) == tiny.losses(hand)
    alone = ours(folder / "alone", {}, policy="standard", policy_options=None, **more)
    alone.train()
    assert tiny.losses(trainer) != tiny.losses(alone)


@pytest.mark.parametrize(
    "case", ["one row", *(pytest.param(n, marks=pytest.mark.slow) for n in list(EQUAL)[1:])]
)
def test_a_run_is_trls_on_rows_put_in_place(tmp_path: Path, case: str) -> None:
    """Proves: validation rows in every step (exact), against TRL on the same rows."""
    the_run_is_trls_on_rows_in_place(tmp_path, case)


@pytest.mark.slow
def test_transformers_own_trainer_has_them_too(tmp_path: Path) -> None:
    """Proves: validation rows in every step (exact), against transformers on the same rows."""
    train, held = rows_of(tmp_path)
    collator = DataCollatorForSeq2Seq(tiny.tokenizer(), padding=True)
    more = {"data_collator": collator, "per_device_train_batch_size": 2}
    data = {"train_dataset": Dataset.from_list(train), "validation_dataset": held}
    trainer = ours(tmp_path / "ours", {"rows": 2}, AlphaTrainer, **more, **data)
    hand = by_hand(tmp_path / "hand", trainer, 2, 2, Trainer, data_collator=collator)
    for one in (trainer, hand):
        one.train()
    assert tiny.furthest(trainer, hand) < 1e-6


def summed_loss(model: Any, row: Row) -> tuple[Any, int]:
    """Sum of the losses of one row by itself, and its response tokens."""
    ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
    logits = model(input_ids=ids).logits[:, :-1].transpose(1, 2)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:], reduction="sum")
    return loss, int((labels[:, 1:] != -100).sum())


PLAIN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one row for two micro-batches": ({"rows": 1}, {"gradient_accumulation_steps": 2}),
    "three rows for two micro-batches": ({"rows": 3}, {"gradient_accumulation_steps": 2}),
    "packed": ({"rows": 2}, {"packing": True, "max_length": 64, "padding_free": True}),
    "the control": ({"rows": 2, "draw_from": "training"}, {"gradient_accumulation_steps": 2}),
}


def documents_of(row: Row) -> Iterator[Row]:
    start = 0
    for length in row.get("seq_lengths") or [len(row["input_ids"])]:
        yield {n: list(row[n])[start : start + length] for n in ("input_ids", "labels")}
        start += length


def a_step_is_the_plain_loops(folder: Path, case: str) -> None:
    """theta - rate * grad (sum of the losses of all rows / all their response tokens)."""
    options, more = PLAIN[case]
    trainer = ours(folder, options, per_device_train_batch_size=2, **more)
    model, train = tiny.model(layers=2), list(trainer.train_dataset)
    size = 2 * trainer.args.gradient_accumulation_steps
    for step in range(3):
        own = [train[i % len(train)] for i in range(step * size, (step + 1) * size)]
        every = [
            d for row in (*own, *trainer.token_policy.step_rows(step)) for d in documents_of(row)
        ]
        total: Any
        total, count = 0.0, 0
        for row in every:
            loss, tokens = summed_loss(model, row)
            total, count = total + loss, count + tokens
        model.zero_grad()
        (total / count).backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad
    trainer.train()
    assert tiny.furthest(trainer, SimpleNamespace(model=model)) < 2e-6


@pytest.mark.parametrize(
    "case", [next(iter(PLAIN)), *(pytest.param(n, marks=pytest.mark.slow) for n in list(PLAIN)[1:])]
)
def test_a_step_is_the_plain_loops(tmp_path: Path, case: str) -> None:
    """Where micro-batches have unequal numbers of rows, and where rows are packed.

    Proves: validation rows in every step (exact), against a plain loop row by row.
    """
    a_step_is_the_plain_loops(tmp_path, case)


def a_resumed_run_draws_the_same(folder: Path) -> None:
    """Weights to the bit, in the middle of an epoch of both kinds of rows."""
    more = {"max_steps": 4, "per_device_train_batch_size": 2, "train_sampling_strategy": "random"}
    whole = ours(folder / "whole", {"rows": 3}, **more)
    whole.train()
    more |= {"save_strategy": "steps", "save_steps": 2}
    ours(folder / "part", {"rows": 3}, **more).train()
    again = ours(folder / "part", {"rows": 3}, **more)
    again.train(str(folder / "part" / "checkpoint-2"))
    assert again.state.global_step == 4
    assert tiny.furthest(again, whole) == 0


def test_a_resumed_run_draws_the_same(tmp_path: Path) -> None:
    """Proves: validation rows in every step (exact), against a run that was not interrupted."""
    a_resumed_run_draws_the_same(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "name"), [("rows", "policy_options"), ("validation", "policy_arguments")]
)
def test_a_resumed_run_has_the_same_rows(tmp_path: Path, change: str, name: str) -> None:
    more = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    ours(tmp_path, {"rows": 2}, **more).train()
    if change == "validation":
        more |= {"validation_dataset": tiny.sft_rows(HELD, seed=9)}
    again = ours(tmp_path, {"rows": 2 if change == "validation" else 1}, **more)
    with pytest.raises(ConfigError, match=name):
        again.train(str(tmp_path / "checkpoint-1"))


def test_its_rows_are_part_of_what_it_is() -> None:
    """A resumed run compares the arguments of its policy.

    Proves: a resumed run draws from the same rows (exact), against rows that differ in a token.
    """
    one, again, other = (
        prepared_policy(rows).arguments()
        for rows in (made_rows([1, 2]), made_rows([1, 2]), made_rows([1, 2], 1))
    )
    assert one == again
    assert one != other


def test_one_row_is_added_beside_every_two() -> None:
    """Where no number is named, at most all validation rows; of packed rows, one a step.

    Proves: validation rows in every step (exact), against the share by hand.
    """
    for count, of_step, added in (
        (24, 8, 4), (24, 2, 1), (24, 1, 1), (24, 5, 2), (3, 16, 3), (24, None, 1),
    ):  # fmt: skip
        made = prepared_policy(made_rows([1] * count), known=(of_step, 10))
        assert [len(made.step_rows(step)) for step in range(3)] == [added] * 3
        assert made.summary["rows"] == added
        named = prepared_policy(made_rows([1] * count), rows=2, known=(of_step, 10))
        assert len(named.step_rows(0)) == 2


def test_what_is_drawn_is_said_and_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The share and the dose, as the run has them: two rows beside two micro-batches of two."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = ours(tmp_path, {"rows": 2}, max_steps=3, **sizes)
    said = capfd.readouterr().err
    assert (
        "2 of 8 validation rows beside the 4 training rows of each step; 3 steps, so that" in said
    )
    assert "6 of them come once, and the others never" in said
    summary = json.loads((tmp_path / "policy.json").read_text())["summary"]
    assert summary == {
        "rows": 2, "validation_rows": 8, "steps_of_an_epoch": 4,
        "training_rows_of_step": 4, "steps": 3, "added_rows": 6,
    }  # fmt: skip
    drawn = [row for s in range(3) for row in trainer.token_policy.step_rows(s)]
    assert len(drawn) == summary["added_rows"] == len({tuple(row["input_ids"]) for row in drawn})
    assert not trainer.args.needs_values


DOSES: dict[str, tuple[int, int, int | None, str]] = {
    "some of them": (24, 1, 3, "3 steps, so that 3 of them come once, and the others never"),
    "one step": (24, 1, 1, "1 step, so that 1 of them comes once, and the others never"),
    "each": (6, 2, 3, "3 steps, so that each comes once;"),
    "each twice": (6, 4, 3, "3 steps, so that each comes 2 times;"),
    "most of them twice": (4, 2, 3, "3 steps, so that each comes 1 or 2 times;"),
    "unknown": (6, 2, None, "beside the training rows of each step; each once in 3 steps;"),
}
"""Validation rows, rows of a step, steps of the run, and what is said of the dose."""


@pytest.mark.parametrize("case", DOSES)
def test_the_dose_is_that_of_the_run(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Proves: the dose that is said of validation rows (exact), against counts."""
    count, rows, steps, said = DOSES[case]
    of = made_rows([1] * count)
    of_step = None if steps is None else 2 * rows
    made = prepared_policy(of, rows=rows, known=(of_step, steps))
    assert said in capfd.readouterr().err
    drawn = Counter(row["input_ids"][0] for s in range(steps or 0) for row in made.step_rows(s))
    least, most = min(drawn[i] for i in range(count)), max(drawn.values(), default=0)
    numbers = [
        int(n) for n in re.findall(r"each comes (\d+)(?: or (\d+))? times", said) for n in n if n
    ]
    if numbers:
        assert (least, most) == (numbers[0], numbers[-1])
    elif steps:
        assert (least, most) == (int("each comes once" in said), 1)


class Columns:
    """A collator that refuses rows with other columns than the first one's."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        assert all(row.keys() == rows[0].keys() for row in rows)
        return tiny.padded(rows)


@pytest.mark.slow
def test_a_collator_of_ones_own_gets_rows_of_one_form(tmp_path: Path) -> None:
    ours(tmp_path, {"rows": 2}, data_collator=Columns(), max_steps=1).train()


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rows": 0}, "whole number from 1"),
        ({"rows": True}, "whole number from 1"),
        ({"rows": 1.5}, "whole number from 1"),
        ({"rows": "2"}, "whole number from 1"),
        ({"draw_from": "retention"}, "draw_from"),
        ({"share": 0.5}, "does not take"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        policy("validation-mix", **options)


def test_bad_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="rows=3, 2 validation rows"):
        prepared_policy(made_rows([1, 1]), rows=3)
    with pytest.raises(InputError, match="row 1"):
        prepared_policy(made_rows([1, 0]), draw_from="training")
    with pytest.raises(InputError, match="no training row has a response"):
        prepared_policy(made_rows([1]), made_rows([0]), draw_from="training")


class Loader(AlphaSFTTrainer):
    """Makes its own loader, as an override may."""

    def get_train_dataloader(self) -> Any:
        return Trainer.get_train_dataloader(self)


REFUSED: dict[str, tuple[dict[str, Any], type[AlphaTokenError], str]] = {
    "no validation rows": ({"validation_dataset": None}, ConfigError, "needs a validation dataset"),
    "a stream": (
        {"train_dataset": tiny.sft_rows(4).to_iterable_dataset()}, ConfigError, "streamed",
    ),
    "dispatched batches": (
        {"accelerator_config": {"dispatch_batches": True}}, ConfigError, "dispatch_batches",
    ),
    "pairs": ({"kind": AlphaDPOTrainer}, ConfigError, "supervised"),
    "a loader of one's own": ({"kind": Loader}, UnsupportedError, "collated already"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_runs_that_cannot_have_them_are_refused(tmp_path: Path, case: str) -> None:
    more, error, match = REFUSED[case]
    if case == "pairs":
        pairs = tiny.preference_rows(8)
        more = {**more, "train_dataset": pairs, "validation_dataset": pairs}
    with pytest.raises(error, match=match):
        ours(tmp_path, {"rows": 1}, **more).train()


def test_a_collator_that_does_not_pad_is_named(tmp_path: Path) -> None:
    """transformers' own default, with training rows of one length and longer added ones."""
    train = [{"input_ids": [5] * 6, "labels": [5] * 6}] * 8
    held = [{"input_ids": [6] * 9, "labels": [6] * 9}] * 4
    data = {"train_dataset": Dataset.from_list(train), "validation_dataset": held}
    trainer = ours(tmp_path, {"rows": 1}, AlphaTrainer, **data, processing_class=None)
    with pytest.raises(InputError, match="DataCollatorForSeq2Seq"):
        trainer.train()


def test_other_policies_add_no_rows(tmp_path: Path) -> None:
    assert list(Surprising().step_rows(0)) == []
    trainer = ours(tmp_path, {}, policy=Surprising, policy_options=None)
    assert trainer._step_rows is None


def test_the_command_asks_for_a_file(tmp_path: Path) -> None:
    """Rows drawn from the training rows are no cleaner than those."""
    tiny.saved(tmp_path, 4)
    argv = ["--model_name_or_path", tmp_path / "model", "--train_file", tmp_path / "rows.jsonl"]
    argv += ["--output_dir", tmp_path / "run", "--policy", "validation-mix"]
    arguments = read_arguments("sft", [*map(str, argv)], AlphaSFTConfig)
    with pytest.raises(ConfigError, match="in every step"):
        check_rows(arguments)
