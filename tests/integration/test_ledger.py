"""The ledger against a dictionary, TRL's own batches, and the decrease that its values predict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import TrainerCallback
from trl import pack_dataset
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from alphatoken import TokenValues
from alphatoken.errors import InputError
from alphatoken.model.batch import label_mask
from alphatoken.score import ScoredExample, Visits, read_values
from alphatoken.train import records
from alphatoken.train.ledger import COMPONENTS, UNIT, ValueLedger, row_documents
from alphatoken.train.policies.builtin import TopRatioPolicy
from alphatoken.train.policy import Needs, PolicySettings, TokenPolicy
from alphatoken.train.records import REPORT, export_values
from tests.integration.tiny_training import dpo, model, sft, sft_rows
from tests.property.profiles import budget
from tests.unhooked import unhooked

Plain = unhooked("alphatoken.train.ledger").ValueLedger

MODES = ("right", "left", "ragged", "packed", "free")
LAMBDA = 2.0


# --- documents, their layouts, and a dictionary that knows them by content -----------------------


@dataclass(frozen=True)
class Doc:
    """Token ids, and which of them are labelled; a label on the first has no prediction."""

    ids: tuple[int, ...]
    response: tuple[bool, ...]

    @property
    def content(self) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """All up to the last response token."""
        end = max((i + 1 for i in self.places), default=0)
        return self.ids[:end], tuple(i in self.places for i in range(end))

    @property
    def places(self) -> list[int]:
        return [i for i, r in enumerate(self.response) if r and i]


@st.composite
def docs(draw: st.DrawFn, least: int = 1) -> list[Doc]:
    """Few token ids and short, so that two documents are often the same, or one begins another."""
    found = []
    for _ in range(draw(st.integers(least, 6))):
        length = draw(st.integers(1, 6))
        ids = draw(st.integers(0, 2**length - 1))
        marks = draw(st.integers(0, 2**length - 1))
        bits = range(length)
        found.append(
            Doc(tuple(ids >> i & 1 for i in bits), tuple(bool(marks >> i & 1) for i in bits))
        )
    return found


@dataclass(frozen=True)
class Laid:
    """A batch, its response mask, and where in it each document begins."""

    batch: dict[str, Tensor]
    mask: Tensor
    at: list[tuple[int, int]]


def lay(found: list[Doc], mode: str, seed: int = 0) -> Laid:
    """Documents as rows padded on a side or both, packed into two rows, or flat without padding.

    Padding and the labels of packed first tokens hold what must not matter.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[Doc]] = [[doc] for doc in found]
    if mode == "free":
        rows = [found]
    elif mode == "packed":
        rows = [part for part in (found[::2], found[1::2]) if part]
    longest = max(sum(len(doc.ids) for doc in row) for row in rows)
    width = longest + (2 if mode == "ragged" else 0)
    shape = (len(rows), width)
    ids = torch.randint(2, shape, generator=generator)
    labels = torch.full(shape, -100)
    real = torch.zeros(shape, dtype=torch.long)
    positions = torch.zeros(shape, dtype=torch.long)
    at: dict[int, tuple[int, int]] = {}
    for r, row in enumerate(rows):
        used = sum(len(doc.ids) for doc in row)
        shifts = {"left": width - used, "ragged": min(r % 3, width - used)}
        column = shifts.get(mode, 0)
        for doc in row:
            here = slice(column, column + len(doc.ids))
            ids[r, here] = torch.tensor(doc.ids)
            labels[r, here] = torch.where(torch.tensor(doc.response), ids[r, here], -100)
            real[r, here] = 1
            positions[r, here] = torch.arange(len(doc.ids))
            at[id(doc)] = (r, column)
            column += len(doc.ids)
    batch = {"input_ids": ids, "labels": labels}
    if mode in ("right", "left", "ragged"):
        batch["attention_mask"] = real
    else:
        batch["position_ids"] = positions  # 0 on the padding of a packed row, as TRL has it
    return Laid(batch, label_mask(labels), [at[id(doc)] for doc in found])


def token_values(mask: Tensor, adaptation: Tensor, stability: Tensor) -> TokenValues:
    adaptation, stability = adaptation * mask, stability * mask
    return TokenValues(
        total=adaptation + LAMBDA * stability,
        mask=mask,
        adaptation=adaptation,
        stability=stability,
        adaptation_direct=None,
        adaptation_causal=None,
        stability_direct=None,
        stability_causal=None,
        unassigned=torch.zeros(len(mask)),
        estimator="label",
        stability_weight=LAMBDA,
    )


@dataclass(frozen=True)
class Visit:
    """Small integers, so that sums are exact in any order: (documents, 6) each."""

    adaptation: Tensor
    stability: Tensor
    weights: Tensor
    scale: float
    step: int


def visit(count: int, seed: int, step: int = 0) -> Visit:
    generator = torch.Generator().manual_seed(seed)
    a, s, w = (torch.randint(low, 9, (count, 6), generator=generator) for low in (-8, -8, 0))
    return Visit(a.float(), s.float(), w.float() / 4, 2.0 ** (seed % 5 - 2), step)


def add(ledger: ValueLedger, found: list[Doc], one: Visit, mode: str, rows: Iterable[int]) -> None:
    """One visit of the documents numbered ``rows``, in one batch."""
    numbers = list(rows)
    laid = lay([found[n] for n in numbers], mode, seed=one.step)
    spread = [torch.full(laid.mask.shape, 7.0) for _ in range(3)]
    for n, (row, column) in zip(numbers, laid.at, strict=True):
        length = len(found[n].ids)
        for target, source in zip(
            spread, (one.adaptation, one.stability, one.weights), strict=True
        ):
            target[row, column : column + length] = source[n, :length]
    values = token_values(laid.mask, spread[0], spread[1])
    ledger.add(laid.batch, laid.mask, values, spread[2], scale=one.scale, step=one.step)


Books = dict[Any, dict[int, list[float]]]


def by_hand(found: list[Doc], visits: list[Visit]) -> Books:
    """content -> position -> [token, total, adaptation, stability, kept, visits]."""
    books: Books = {}
    for one in visits:
        for n, doc in enumerate(found):
            for i in doc.places:
                entry = books.setdefault(doc.content, {}).setdefault(i, [doc.ids[i], 0, 0, 0, 0, 0])
                a, s = float(one.adaptation[n, i]), LAMBDA * float(one.stability[n, i])
                weight = float(one.weights[n, i])
                for k, x in enumerate(
                    (one.scale * (a + s), one.scale * a, one.scale * s, weight, 1)
                ):
                    entry[k + 1] += x
    return books


def keyed(books: Books) -> dict[str, dict[int, list[float]]]:
    """The same, by the key under which a data set's row would be found."""
    result = {}
    for (ids, response), entries in books.items():
        labels = [t if r else -100 for t, r in zip(ids, response, strict=True)]
        ((key, _),) = row_documents({"input_ids": list(ids), "labels": labels})
        result[key.hex()] = entries
    return result


def read(ledger: ValueLedger) -> dict[str, dict[int, list[float]]]:
    return {
        key.hex(): {
            place: [int(entry.ids[place]), *map(float, sums), entry.visits]
            for place, sums in zip(entry.positions.tolist(), entry.sums, strict=True)
        }
        for key, entry in ledger.documents.items()
    }


def parts(count: int, size: int) -> Iterator[range]:
    return (range(a, min(a + size, count)) for a in range(0, count, size))


def same_state(one: ValueLedger, two: ValueLedger) -> bool:
    a, b = one.state_tensors(), two.state_tensors()
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


FOUND = [
    Doc((0, 1, 1), (False, True, True)),
    Doc((1, 1, 0, 1), (False, True, False, True)),
    Doc((0, 0), (False, True)),
]


# --- what it adds up ------------------------------------------------------------------------------


@budget(1.0)
@given(docs(), st.lists(st.tuples(st.sampled_from(MODES), st.integers(1, 6)), max_size=4))
@example(
    [Doc((0, 1, 1), (False, True, False)), Doc((0, 1, 0), (False, True, False))], [("free", 2)]
)
@example(
    [Doc((1, 1), (False, True)), Doc((1,), (False,)), Doc((1, 1), (False, True))], [("left", 3)]
)
def test_visits_add_up_however_they_are_batched(
    found: list[Doc], layouts: list[tuple[str, int]]
) -> None:
    """k visits are the sum of k visits; batch split, padding side and packing change nothing."""
    ledger = ValueLedger()
    visits = [visit(len(found), seed, step=seed) for seed in range(len(layouts))]
    for one, (mode, size) in zip(visits, layouts, strict=True):
        for rows in parts(len(found), size):
            add(ledger, found, one, mode, rows)
    assert read(ledger) == keyed(by_hand(found, visits))
    assert len(ledger.sums()) == sum(len(entries) for entries in by_hand(found, visits).values())


@budget(1.0)
@given(docs(2), st.integers(1, 4), st.sampled_from(MODES))
def test_ledgers_of_two_ranks_merge_into_one(found: list[Doc], count: int, mode: str) -> None:
    """A document goes from rank to rank: each may have been the last to train on it."""
    whole, ranks = ValueLedger(), (ValueLedger(), ValueLedger())
    for seed in range(count):
        one = visit(len(found), seed, step=seed)
        for n in range(len(found)):
            add(whole, found, one, mode, [n])
            add(ranks[(n + seed) % 2], found, one, mode, [n])
    for order in (ranks, ranks[::-1]):
        merged = ValueLedger()
        for ledger in order:
            merged.merge(ledger)
        assert read(merged) == read(whole)
        for key, entry in whole.documents.items():
            columns = vars(merged.documents[key])
            for name, value in vars(entry).items():
                assert np.array_equal(columns[name], value), name


@pytest.mark.parametrize("rank", [0, 1])
def test_ledgers_of_processes_add_up(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """What the second process sends is added to the first one's, which alone writes."""
    both, ledgers = ValueLedger(), (ValueLedger(), ValueLedger())
    for seed, ledger in enumerate(ledgers):
        add(ledger, FOUND[:2], visit(2, seed), "right", range(2))
        both.merge(ledger)

    def broadcast(item: Any, source: int) -> Any:
        return item if source == rank else ledgers[1 - rank]

    ranks = SimpleNamespace(world=2, rank=rank, broadcast_object=broadcast)
    monkeypatch.setattr(records, "Ranks", lambda accelerator: ranks)
    args = SimpleNamespace(should_save=rank == 0)
    run = records.RunRecords(SimpleNamespace(args=args, accelerator=None))  # type: ignore[arg-type]
    run._ledger = ledgers[rank]
    before = ValueLedger()
    before.load_tensors(run.ledger.state_tensors())
    whole = run._all_ledgers()
    assert same_state(run.ledger, before)
    assert (whole is None) == (rank == 1), "one process writes"
    assert whole is None or same_state(whole, both)


def pair_batch(pairs: list[tuple[Doc, Doc]]) -> Laid:
    laid = lay([replace(c) for c, _ in pairs] + [replace(r) for _, r in pairs], "right")
    laid.batch["completion_mask"] = laid.mask.long()
    return laid


def test_a_response_of_a_pair_is_known_by_both_responses_and_its_branch() -> None:
    """The same text is another token in another pair or branch: its coefficient differs."""
    a, b, c = (Doc((0, *ids), (False, True, True)) for ids in ((1, 1), (1, 0), (0, 1)))
    pairs = [(a, b), (a, c), (b, a), (a, a), (a, b)]
    laid = pair_batch(pairs)
    ledger = ValueLedger()
    ones = torch.ones(laid.mask.shape)
    number = torch.arange(1.0, 11.0)[:, None].expand(laid.mask.shape)
    values = token_values(laid.mask, number, 0 * number)
    ledger.add(laid.batch, laid.mask, values, ones, scale=1.0, step=0)
    assert len(ledger) == 8
    by_key = {
        (key, entry.branch): entry.sums[:, 0].tolist() for key, entry in ledger.documents.items()
    }
    for index, (chosen, rejected) in enumerate(pairs):
        row = {"prompt_ids": [0], "chosen_ids": chosen.ids[1:], "rejected_ids": rejected.ids[1:]}
        (first, one), (second, two) = row_documents(row)
        assert (one, two) == (1, 2)
        if index in (0, 4):  # one pair, twice in the batch
            assert by_key[first, 1] == [1.0 + 5.0] * 2
            assert by_key[second, 2] == [6.0 + 10.0] * 2
        else:
            assert by_key[first, 1] == [index + 1.0] * 2
            assert by_key[second, 2] == [index + 6.0] * 2
    alone = ValueLedger()
    unpaired = {k: v for k, v in laid.batch.items() if k != "completion_mask"}
    alone.add(unpaired, laid.mask, values, ones, scale=1.0, step=0)
    assert len(alone) == 3


def test_wide_values_are_added_wide() -> None:
    laid = lay([Doc((0, 1), (False, True))], "right")
    third = torch.full(laid.mask.shape, 1 / 3, dtype=torch.float64)
    ledger = ValueLedger()
    values = token_values(laid.mask, third, 0 * third)
    ledger.add(laid.batch, laid.mask, values, third, scale=1.0, step=0)
    assert ledger.sums().tolist() == [[1 / 3, 1 / 3, 0.0, 1 / 3]]


def test_an_empty_side_of_a_pair_leaves_the_other() -> None:
    laid = pair_batch([(Doc((0, 1), (False, True)), Doc((0,), (False,)))])
    ledger = ValueLedger()
    zeros = torch.zeros(laid.mask.shape)
    ledger.add(
        laid.batch, laid.mask, token_values(laid.mask, zeros, zeros), zeros, scale=1.0, step=0
    )
    row = {"prompt_ids": [0], "chosen_ids": [1], "rejected_ids": []}
    assert list(ledger.documents) == [next(row_documents(row))[0]]


# --- state ----------------------------------------------------------------------------------------


@budget(1.0)
@given(docs(), st.integers(0, 3))
def test_a_restored_ledger_goes_on_bit_for_bit(found: list[Doc], before: int) -> None:
    ledger, restored = ValueLedger(), ValueLedger()
    for seed in range(before):
        add(ledger, found, visit(len(found), seed, step=seed), "right", range(len(found)))
    state = ledger.state_tensors()
    add(ledger, found, visit(len(found), 9, step=9), "packed", range(len(found)))
    restored.load_tensors(state)  # the state is a copy: what came after is not in it
    add(restored, found, visit(len(found), 9, step=9), "packed", range(len(found)))
    assert same_state(ledger, restored)


def test_an_empty_ledger_is_a_ledger(tmp_path: Path) -> None:
    back = ValueLedger()
    back.load_tensors(ValueLedger().state_tensors())
    assert len(back) == len(back.sums()) == 0
    assert exported(back, tmp_path / "out", []) == []


# --- TRL's own batches ----------------------------------------------------------------------------


def text_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prepared SFT rows: a prompt and a response of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        prompt, length = torch.randint(1, 9, (2,), generator=generator).tolist()
        ids = torch.randint(3, 90, (prompt + length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return rows


def one_visit(ledger: ValueLedger, batch: dict[str, Any], labels: Tensor) -> None:
    mask = label_mask(labels)
    ones = mask.float()
    ledger.add(batch, mask, token_values(mask, ones, ones), ones, scale=1.0, step=0)


@pytest.mark.parametrize(("layout", "multiple"), [("padded", 8), ("free", None), ("packed", 8)])
def test_trl_sft_batches_are_found_in_the_data_set(
    layout: str, multiple: int | None, tmp_path: Path
) -> None:
    rows = [*text_rows(11), {"input_ids": [5, 6, 7]}]  # the last without labels: all are learned
    if layout == "packed":
        rows = list(pack_dataset(Dataset.from_list(text_rows(11)), seq_length=20, strategy="bfd"))
        assert any(len(row["seq_lengths"]) > 1 for row in rows)
    collator = DataCollatorForLanguageModeling(
        pad_token_id=0, padding_free=layout != "padded", pad_to_multiple_of=multiple
    )
    ledger = ValueLedger()
    for rows_ in (rows[:3], rows[3:]):
        batch = collator([dict(row) for row in rows_])
        one_visit(ledger, batch, batch["labels"])
    keys = [{key for key, _ in row_documents(row)} for row in rows]
    assert ledger.documents.keys() == set().union(*keys)
    labels = sum(sum(t != -100 for t in row.get("labels", row["input_ids"])) for row in rows)
    assert len(ledger.sums()) == labels - (layout != "packed")  # its first token has no prediction
    holders = {(*one.ids,): visits_of(one).rows for one in exported(ledger, tmp_path, rows)}
    assert holders == {
        (*ledger.documents[key].ids.tolist(),): [n for n, one in enumerate(keys) if key in one]
        for key in set().union(*keys)
    }


@pytest.mark.parametrize("packed", [False, True])
def test_a_document_has_the_place_of_its_row_in_the_file(packed: bool, tmp_path: Path) -> None:
    """Also in a packed row; of two equal rows that of the first; pairs by their order."""
    handed = Dataset.from_list([*text_rows(9), *text_rows(9)[2:4]])
    places = [f"train.jsonl, line {2 * n}" for n in range(11)]
    rows = list(pack_dataset(handed, seq_length=20, strategy="bfd")) if packed else list(handed)
    trainer: Any = SimpleNamespace(export_arguments=dict, args=None)
    run = records.RunRecords(trainer)
    assert run._places(rows) == {}, "in Python no row has a line"
    run.name_rows(places, handed)
    due = {}
    for place, row in list(zip(places, handed, strict=True))[::-1]:
        due |= {key: place for key, _ in row_documents(row)}
    assert run._places(rows) == due
    assert len(due) == 9
    ledger = ValueLedger()
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=packed)(rows)
    one_visit(ledger, batch, batch["labels"])
    named = exported(ledger, tmp_path, rows, places=run._places(rows))
    assert {one.place.removesuffix(" (1 visit)").removesuffix(" (2 visits)") for one in named} == {
        *due.values()
    }


def test_pairs_have_the_places_of_the_prepared_rows() -> None:
    pairs = [{"prompt_ids": [0], "chosen_ids": [1, n], "rejected_ids": [2, n]} for n in range(3)]
    run = records.RunRecords(SimpleNamespace(export_arguments=dict, args=None))  # type: ignore[arg-type]
    run.name_rows(["a", "b", "c"], Dataset.from_list([{"prompt": "x"}] * 3))
    assert [*run._places(pairs).values()] == ["a", "a", "b", "b", "c", "c"]
    assert run._places(pairs[:2]) == {}, "TRL left a pair out: no order tells which"


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
def test_trl_preference_batches_are_found_in_the_data_set(truncation: str, tmp_path: Path) -> None:
    rows = [
        {
            "prompt_ids": a["input_ids"],
            "chosen_ids": b["input_ids"],
            "rejected_ids": c["input_ids"],
        }
        for a, b, c in zip(text_rows(7, 1), text_rows(7, 2), text_rows(7, 3), strict=True)
    ]
    collator = DataCollatorForPreference(
        pad_token_id=0, max_length=18, truncation_mode=truncation, pad_to_multiple_of=8
    )
    ledger = ValueLedger()
    for part in (rows[:4], rows[4:]):
        batch = collator([dict(row) for row in part])
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
        one_visit(ledger, batch, labels)
    assert any(len(row["prompt_ids"]) + len(row["chosen_ids"]) > 18 for row in rows)
    cut = {"max_length": 18, "truncation_mode": truncation}
    found = exported(ledger, tmp_path, rows, **cut)
    assert sum(int(one.response.sum()) for one in found) == len(ledger.sums())
    assert {len(visits_of(one).rows) for one in found} == {1}
    order = [(one.row, visits_of(one).branch) for one in found]
    assert order == [(n, branch) for n in range(7) for branch in ("chosen", "rejected")]
    for one in found:
        row = rows[one.row]
        ids = row["prompt_ids"] + row[f"{visits_of(one).branch}_ids"]
        assert list(one.ids) == (ids[-18:] if truncation == "keep_end" else ids[:18])


# --- export ---------------------------------------------------------------------------------------

ROWS = [
    {"input_ids": [1, 1, 0, 1], "labels": [-100, 1, -100, 1]},
    {"input_ids": [1, 0], "labels": [-100, 0]},
    {"input_ids": [0, 1, 1], "labels": [-100, 1, 1]},
    {"input_ids": [1, 1, 0, 1], "labels": [-100, 1, -100, 1]},
]


def exported(ledger: ValueLedger, folder: Path, rows: Any, **cut: Any) -> list[ScoredExample]:
    export_values(ledger, folder, rows, **cut)
    return list(read_values(folder))


def visits_of(one: ScoredExample) -> Visits:
    assert one.visits is not None
    return one.visits


def filled() -> ValueLedger:
    ledger = ValueLedger()
    for seed in range(3):
        add(ledger, FOUND, visit(3, seed, step=seed), "right", range(3))
    return ledger


def test_records_are_the_books(tmp_path: Path) -> None:
    found = exported(filled(), tmp_path, ROWS)
    books = by_hand(FOUND, [visit(3, seed) for seed in range(3)])
    for one in found:
        seen, places = visits_of(one), one.response.nonzero()[0].tolist()
        book = books[tuple(one.ids), tuple(one.response.tolist())]
        assert list(book) == places
        assert (seen.count, seen.last_step, seen.branch) == (3, 2, None)
        for i, (token, total, adaptation, stability, kept, visits) in book.items():
            values = [one.values[name][i] for name in COMPONENTS]
            assert (one.labels[i], seen.count, values) == (
                token, visits, [total, adaptation, stability],
            )  # fmt: skip
            assert seen.kept_share[i] == kept / visits
            assert one.kept[i] == (kept / visits >= 0.5)
    # Ordered by the first row that holds them; the third document is in no row.
    assert [visits_of(one).rows for one in found] == [[0, 3], [2], []]
    assert [visits_of(one).rows for one in exported(filled(), tmp_path, None)] == [[]] * 3
    assert export_values(filled(), tmp_path, ROWS) == (len(ROWS) - 1, 1)


# --- the sum of a run beside the decrease of the loss: equal under plain SGD alone ----------------

BOUNDS = {"sgd": (1e-3, 0.99, 1.01), "adamw_torch": (1e-5, 5.0, 100.0)}
"""Optimizer -> learning rate, and bounds on decrease over sum."""


class _Sums(TrainerCallback):
    """The ledger's sum after each step."""

    def __init__(self) -> None:
        self.found = [0.0]
        self.trainer: Any = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.found.append(float(self.trainer.ledger.sums()[:, 0].sum()))


@pytest.mark.parametrize("optim", ["sgd", pytest.param("adamw_torch", marks=pytest.mark.slow)])
def test_the_sum_is_the_decrease_under_plain_sgd(tmp_path: Path, optim: str) -> None:
    """Nowhere is it called one: it depends on the optimizer, and the page shows it under any."""
    rate, low, high = BOUNDS[optim]
    listening = _Sums()
    trainer = sft(
        tmp_path, policy="all", estimator="label", layers="all", parameters="all",
        retention="none", validation_batch_size=8, held_out_steps=1, held_out_share=0.5,
        max_grad_norm=0.0, max_steps=4, optim=optim, learning_rate=rate,
        train_dataset=sft_rows(32), validation_dataset=sft_rows(16, seed=5), callbacks=[listening],
    )  # fmt: skip
    listening.trainer = trainer
    trainer.train()
    pool = [
        entry["alpha/validation_pool"] for entry in trainer.state.log_history if "loss" in entry
    ]
    decrease = pool[0] - trainer.valuation.objective_gap(len(pool))["pool"]
    assert low < decrease / listening.found[-1] < high
    page = (tmp_path / REPORT).read_text(encoding="utf-8")
    assert UNIT in page
    ((way, error),) = trainer.records.monitor.derivatives().items()
    assert way == "one_sided"
    assert f"taken by one-sided differences, error {error:.0e} (estimated" in page
    assert "decrease" not in UNIT


@pytest.mark.parametrize(
    ("pairs", "estimator", "due"),
    [
        (False, "alphatoken", "the run lowered the validation loss, to first order. Orange"),
        (False, "walk", "a walk on the validation rows lowered the token&#39;s loss"),
        (True, "alphatoken", "up to a factor common to all tokens"),
    ],
)
def test_the_page_of_a_run_says_what_its_values_are(
    tmp_path: Path, pairs: bool, estimator: str, due: str
) -> None:
    """A walk's are no change of the validation loss, and those of pairs no more than one."""
    more = {"estimator": estimator, "layers": "3", "retention": "none", "max_steps": 1}
    trainer = dpo(tmp_path, ref_model=model(), **more) if pairs else sft(tmp_path, **more)
    trainer.train()
    assert due in (tmp_path / REPORT).read_text(encoding="utf-8")


class _Half(TokenPolicy):
    """A rule of its own, which keeps every second token."""

    name = "half"
    needs = Needs(values=True)

    def native_weights(self, batch: Any) -> Tensor:
        return (batch.mask & (torch.arange(batch.mask.shape[1]) % 2 == 0)).float()


@pytest.mark.parametrize(
    ("policy", "share"),
    [
        ("top", "0.5"),
        ("all", None),
        (_Half(), None),
        (TopRatioPolicy(PolicySettings("budget", keep_ratio=0.25)), "0.25"),
    ],
    ids=["top", "all", "own rule", "own settings"],
)
def test_the_page_of_a_run_shows_the_share_that_its_policy_keeps(
    tmp_path: Path, policy: Any, share: str | None
) -> None:
    """And not an option that the policy does not read."""
    sft(tmp_path, policy=policy, max_steps=1, retention="none", keep_ratio=0.5).train()
    page = (tmp_path / REPORT).read_text(encoding="utf-8")
    assert ("Share of the tokens to keep" in page) == (share is not None)
    if share is not None:
        assert re.search(f"Share of the tokens to keep</t[hd]><td>{share}<", page)


def test_the_page_of_a_run_says_that_stability_counts_with_its_lambda(tmp_path: Path) -> None:
    trainer = sft(tmp_path, max_steps=1, retention="data", retention_dataset=sft_rows(12, seed=7))
    trainer.train()
    page = (tmp_path / REPORT).read_text(encoding="utf-8")
    assert "stability" in page
    assert "before lambda" not in page
    assert "lambda times" not in page


# --- bad input ------------------------------------------------------------------------------------

LAID = lay(FOUND, "right")
ONES = torch.ones(LAID.mask.shape)
VALUES = token_values(LAID.mask, ONES, ONES)
BATCH = LAID.batch


def test_a_label_on_padding_is_refused_and_changes_nothing() -> None:
    ledger = Plain()
    good = {"mask": LAID.mask, "values": VALUES, "weights": ONES, "scale": 1.0, "step": 0}
    ledger.add(BATCH, **good)
    before = ledger.state_tensors()
    with pytest.raises(InputError, match="is padding"):
        ledger.add(BATCH | {"attention_mask": 0 * ONES}, **good)
    assert all(torch.equal(t, before[n]) for n, t in ledger.state_tensors().items())
