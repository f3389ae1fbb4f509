"""The ledger against a dictionary, TRL's own batches, and the decrease that its values predict."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoTokenizer
from trl import pack_dataset
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from alphatoken import Scorer, ScorerConfig, TokenValues
from alphatoken.data.encode import encode_row
from alphatoken.data.stdlib import code_rows
from alphatoken.errors import AlphaTokenError, ConfigError, DataError, InputError, NumericalError
from alphatoken.model.batch import label_mask
from alphatoken.train.documents import row_documents
from alphatoken.train.ledger import ValueLedger
from tests.property.decoder import DecoderConfig, ReferenceAdapter, ReferenceDecoder
from tests.property.profiles import budget
from tests.property.strategies import make_batch
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
    books: dict[str, dict[int, list[float]]] = defaultdict(dict)
    seen = ledger.accumulated()
    for n in range(len(ledger)):
        span = seen.span(n)
        for k in range(span.start, span.stop):
            books[seen.name(n)][int(seen.positions[k])] = [
                int(seen.tokens[k]), *map(float, seen.sums[k]), float(seen.kept[k]),
                int(seen.visits[n]),
            ]  # fmt: skip
    return dict(books)


def parts(count: int, size: int) -> Iterator[range]:
    return (range(a, min(a + size, count)) for a in range(0, count, size))


def same_state(one: ValueLedger, two: ValueLedger) -> bool:
    a, b = one.state_tensors(), two.state_tensors()
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


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
    assert ledger.tokens == sum(len(entries) for entries in by_hand(found, visits).values())


@budget(1.0)
@given(docs(2), st.integers(1, 4), st.sampled_from(MODES))
def test_ledgers_of_two_ranks_merge_into_one(found: list[Doc], count: int, mode: str) -> None:
    whole, ranks = ValueLedger(), (ValueLedger(), ValueLedger())
    for seed in range(count):
        one = visit(len(found), seed, step=seed)
        for n in range(len(found)):
            add(whole, found, one, mode, [n])
            add(ranks[n % 2], found, one, mode, [n])
    merged = ValueLedger()
    for ledger in ranks:
        merged.merge(ledger)
    assert read(merged) == read(whole)
    assert len(merged) == len(whole)


def test_merging_keeps_what_was_scored_last() -> None:
    found = [Doc((0, 1, 1), (False, True, True))]
    early, late = ValueLedger(), ValueLedger()
    add(early, found, visit(1, 1, step=3), "right", [0])
    add(late, found, visit(1, 2, step=5), "right", [0])
    want = late.accumulated()
    for first, second in ((early, late), (late, early)):
        merged = ValueLedger()
        merged.merge(first)
        merged.merge(second)
        kept = merged.accumulated()
        assert (kept.last.tolist(), kept.steps.tolist()) == (want.last.tolist(), [5])


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
    seen = ledger.accumulated()
    by_key = {
        (seen.keys[n].tobytes(), int(seen.branches[n])): seen.sums[seen.span(n), 0].tolist()
        for n in range(8)
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
    """Only what was scored last is in float32."""
    laid = lay([Doc((0, 1), (False, True))], "right")
    third = torch.full(laid.mask.shape, 1 / 3, dtype=torch.float64)
    ledger = ValueLedger()
    values = token_values(laid.mask, third, 0 * third)
    ledger.add(laid.batch, laid.mask, values, third, scale=1.0, step=0)
    assert ledger.accumulated().sums.tolist() == [[1 / 3, 1 / 3, 0.0]]
    assert ledger.accumulated().kept.tolist() == [1 / 3]


def test_an_empty_side_of_a_pair_leaves_the_other() -> None:
    laid = pair_batch([(Doc((0, 1), (False, True)), Doc((0,), (False,)))])
    ledger = ValueLedger()
    zeros = torch.zeros(laid.mask.shape)
    ledger.add(
        laid.batch, laid.mask, token_values(laid.mask, zeros, zeros), zeros, scale=1.0, step=0
    )
    row = {"prompt_ids": [0], "chosen_ids": [1], "rejected_ids": []}
    assert [ledger.accumulated().keys[0].tobytes()] == [next(row_documents(row))[0]]
    assert len(ledger) == 1


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


def test_thousands_of_documents_survive_a_file(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    ledger = ValueLedger()
    for step in range(300):
        ids = torch.randint(500, (10, 40), generator=generator)
        mask = torch.rand(10, 40, generator=generator) < 0.5
        mask[:, 0] = False
        values = token_values(mask, *torch.randn(2, 10, 40, generator=generator))
        ledger.add({"input_ids": ids}, mask, values, mask.float(), scale=1e-3 / 3, step=step)
    ledger.save(tmp_path / "ledger.safetensors")
    back = ValueLedger.load(tmp_path / "ledger.safetensors")
    assert len(back) == 3000
    assert same_state(ledger, back)
    data = (tmp_path / "ledger.safetensors").read_bytes()
    assert len(data) < 60 * ledger.tokens
    (tmp_path / "cut").write_bytes(data[:-100])
    with pytest.raises(DataError, match="cut"):
        ValueLedger.load(tmp_path / "cut")


def test_an_empty_ledger_is_a_ledger(tmp_path: Path) -> None:
    ValueLedger().save(tmp_path / "empty")
    back = ValueLedger.load(tmp_path / "empty")
    assert len(back) == back.tokens == 0
    assert json.loads(back.export(tmp_path / "out", []).with_name("summary.json").read_text())[
        "documents"
    ] == 0  # fmt: skip


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.__delitem__(name)


def _with(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.__setitem__(name, change(state[name]))


@pytest.mark.parametrize(
    "spoil",
    [
        _without("keys"),
        _without("format"),
        _with("format", lambda t: t + 1),
        _with("sums", lambda t: t[:-1]),
        _with("sums", lambda t: t.float()),
        _with("last", lambda t: t.double()),
        _with("starts", lambda t: t + 1),
        _with("sizes", lambda t: t.flip(0)),
        _with("keys", lambda t: t[:1].expand_as(t).clone()),
        lambda state: state.update(odd=torch.zeros(1)),
    ],
)
def test_a_spoilt_state_is_refused_and_changes_nothing(
    spoil: Callable[[dict[str, Tensor]], None],
) -> None:
    found = [Doc((0, 1, 1), (False, True, True)), Doc((1, 1), (False, True))]
    ledger = ValueLedger()
    add(ledger, found, visit(2, 0), "right", range(2))
    state = ledger.state_tensors()
    spoil(state)
    kept = copy.deepcopy(ledger)
    with pytest.raises(DataError, match="no state of a value ledger"):
        ledger.load_tensors(state)
    assert same_state(ledger, kept)


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


@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize("layout", ["padded", "free", "packed"])
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
    assert {key.tobytes() for key in ledger.accumulated().keys} == set().union(*keys)
    labels = sum(sum(t != -100 for t in row.get("labels", row["input_ids"])) for row in rows)
    assert ledger.tokens == labels - (layout != "packed")  # its first token has no prediction
    path = ledger.export(tmp_path, rows)
    holders = {r["document"]: r["rows"] for r in pq.read_table(path).to_pylist()}
    assert holders == {
        key.hex(): [n for n, other in enumerate(keys) if key in other] for key in set().union(*keys)
    }


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
    path = ledger.export(tmp_path / "values.jsonl", rows, **cut)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == ledger.tokens
    assert {len(r["rows"]) for r in records} == {1}
    order = [(r["rows"][0], r["branch"]) for r in records]
    assert order == sorted(order)
    assert set(order) == {(n, branch) for n in range(7) for branch in ("chosen", "rejected")}
    for record in records:
        row = rows[record["rows"][0]]
        ids = row["prompt_ids"] + row[f"{record['branch']}_ids"]
        shift = max(0, len(ids) - 18) if truncation == "keep_end" else 0
        assert record["token_id"] == ids[shift + record["position"]]


def test_real_rows_with_their_words(library_decoder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(library_decoder)
    rows = []
    for row in code_rows(30):
        ids, labels = encode_row(row, tokenizer)
        rows.append({"input_ids": list(ids), "labels": list(labels)})
    ledger = ValueLedger()
    collator = DataCollatorForLanguageModeling(pad_token_id=0)
    for a in (0, 10, 20):
        batch = collator(rows[a : a + 10])
        one_visit(ledger, batch, batch["labels"])
    path = ledger.export(tmp_path, rows, tokenizer=tokenizer)
    records = pq.read_table(path).to_pylist()
    assert len(records) == sum(sum(t != -100 for t in row["labels"]) for row in rows)
    for n, row in enumerate(rows):
        text = "".join(r["token"] for r in records if r["rows"] == [n])
        response = [t for t in row["labels"] if t != -100]
        assert text.strip() == tokenizer.decode(response).strip()


# --- in-run Shapley -------------------------------------------------------------------------------


def shapley_run(step_size: float) -> tuple[float, float]:
    """(what the ledger's values add up to, what the validation loss really fell by)."""
    config = DecoderConfig(layers=2, vocabulary=7)
    model = ReferenceDecoder(config, seed=1)
    adapter = ReferenceAdapter(model)
    validation = make_batch(("pprrr", "prrrr"), vocabulary=7, seed=2)
    batches = [
        make_batch(("pprrr.", "prprrr"), vocabulary=7, seed=3),
        make_batch(("pr|prrr",), vocabulary=7, seed=4),
    ]
    scorer = Scorer(
        model,
        validation,
        adapter=adapter,
        config=ScorerConfig(estimator="label", parameters="all", layers="all", uncovered="error"),
    )

    def losses(batch: dict[str, Tensor]) -> Tensor:
        logits = adapter.forward({k: v for k, v in batch.items() if k != "labels"})
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none"
        )

    def objective() -> float:
        with torch.no_grad():
            return float(losses(validation).sum() / label_mask(validation["labels"]).sum())

    ledger, before = ValueLedger(), objective()
    for step in range(6):  # three epochs of two batches
        batch, size = batches[step % 2], step_size * (1 + step % 3)
        values = scorer.score(batch)
        count = int(values.mask.sum())
        ledger.add(batch, values.mask, values, values.mask.double(), scale=size / count, step=step)
        gradients = torch.autograd.grad(losses(batch).sum() / count, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= size * gradient
    assert len(ledger) == 4
    assert ledger.accumulated().visits.tolist() == [3, 3, 3, 3]
    return float(ledger.accumulated().sums[:, 0].sum()), before - objective()


def test_accumulated_values_are_the_decrease_of_the_objective() -> None:
    """Appendix A: a sum over tokens and steps that is right to first order in the step size."""
    errors = []
    for step_size in (1e-4, 5e-5):
        predicted, real = shapley_run(step_size)
        assert predicted == pytest.approx(real, rel=0.05)
        errors.append(abs(predicted - real))
    assert errors[1] == pytest.approx(errors[0] / 4, rel=0.05)  # the second order is left out


# --- export ---------------------------------------------------------------------------------------

FOUND = [
    Doc((0, 1, 1), (False, True, True)),
    Doc((1, 1, 0, 1), (False, True, False, True)),
    Doc((0, 0), (False, True)),
]
ROWS = [
    {"input_ids": [1, 1, 0, 1], "labels": [-100, 1, -100, 1]},
    {"input_ids": [1, 0], "labels": [-100, 0]},
    {"input_ids": [0, 1, 1], "labels": [-100, 1, 1]},
    {"input_ids": [1, 1, 0, 1], "labels": [-100, 1, -100, 1]},
]


def filled() -> ValueLedger:
    ledger = ValueLedger()
    for seed in range(3):
        add(ledger, FOUND, visit(3, seed, step=seed), "right", range(3))
    return ledger


def test_records_are_the_books(tmp_path: Path) -> None:
    ledger = filled()
    path = ledger.export(tmp_path / "out", ROWS)
    lines = ledger.export(tmp_path / "lines.jsonl", ROWS)
    records = pq.read_table(path).to_pylist()
    assert path == tmp_path / "out" / "values.parquet"
    assert records == [json.loads(line) for line in lines.read_text().splitlines()]
    books = keyed(by_hand(FOUND, [visit(3, seed) for seed in range(3)]))
    assert len(records) == 5
    for r in records:
        token, total, adaptation, stability, kept, visits = books[r["document"]][r["position"]]
        assert (r["token_id"], r["visits"]) == (token, visits)
        assert (r["total"], r["adaptation"], r["stability"]) == (total, adaptation, stability)
        assert r["kept_share"] == kept / visits
        assert r["token"] is None
        assert r["branch"] is None
        assert r["last_step"] == 2
    # Ordered by the first row that holds them; the third document is in no row.
    assert [r["rows"] for r in records] == [[0, 3]] * 2 + [[2]] * 2 + [[]]
    plain = ledger.export(tmp_path / "plain", fmt="jsonl")
    assert [json.loads(line)["rows"] for line in plain.read_text().splitlines()] == [None] * 5


def test_the_summary_adds_up(tmp_path: Path) -> None:
    ledger = filled()
    path = ledger.export(tmp_path / "v.parquet", ROWS)
    summary = json.loads((tmp_path / "v.summary.json").read_text())
    records = pq.read_table(path).to_pylist()
    for name, value in summary["sums"].items():
        assert value == sum(r[name] for r in records)
    assert summary["negative_share"] == sum(r["total"] < 0 for r in records) / 5
    assert (summary["documents"], summary["tokens"], summary["visits_of_tokens"]) == (3, 5, 15)
    assert summary["visits_of_documents"] == 9
    assert summary["kept_share"] == pytest.approx(sum(r["kept_share"] for r in records) / 5)
    assert (summary["documents_in_no_row"], summary["rows_not_seen"]) == (1, 1)
    assert summary["rows_seen"] == len(ROWS) - 1
    totals: dict[str, float] = defaultdict(float)
    for r in records:
        totals[r["document"]] += r["total"]
    best = [(e["document"], e["total"]) for e in summary["best_documents"]]
    assert dict(best) == totals
    assert [t for _, t in best] == sorted(totals.values(), reverse=True)
    assert summary["worst_documents"] == summary["best_documents"][::-1]


def test_many_documents_are_written_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = filled()
    whole = {}
    for size in (1 << 16, 2):
        monkeypatch.setattr("alphatoken.train.value_export._CHUNK", size)
        for fmt in ("parquet", "jsonl"):
            path = ledger.export(tmp_path / f"{size}.{fmt}", ROWS)
            table = pq.read_table(path).to_pylist() if fmt == "parquet" else path.read_text()
            assert whole.setdefault(fmt, table) == table


@pytest.mark.parametrize("fmt", ["parquet", "jsonl"])
def test_an_export_that_fails_leaves_the_old_one(tmp_path: Path, fmt: str) -> None:
    class Broken:
        def decode(self, ids: list[int], **options: Any) -> str:
            raise RuntimeError("no such token")

    ledger = filled()
    path = ledger.export(tmp_path / f"v.{fmt}")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(RuntimeError, match="no such token"):
        ledger.export(path, tokenizer=Broken())
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "fmt"),
    [("v.csv", "csv"), ("v.parquet", "jsonl"), ("folder", "xml"), ("old.csv", None)],
)
def test_unknown_formats_are_refused(tmp_path: Path, name: str, fmt: str | None) -> None:
    (tmp_path / "old.csv").write_text("kept")
    with pytest.raises(ConfigError, match="unknown format"):
        filled().export(tmp_path / name, fmt=fmt)
    assert [p.name for p in tmp_path.iterdir()] == ["old.csv"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file"):
        filled().export(tmp_path / "file" / "below")


# --- bad input ------------------------------------------------------------------------------------

LAID = lay(FOUND, "right")
ONES = torch.ones(LAID.mask.shape)
VALUES = token_values(LAID.mask, ONES, ONES)
BATCH = LAID.batch


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"batch": {}}, InputError, "input_ids"),
        ({"batch": {"input_ids": BATCH["input_ids"].double()}}, InputError, "integer"),
        ({"batch": {"input_ids": BATCH["input_ids"][0]}}, InputError, "integer tensor"),
        ({"batch": {"input_ids": BATCH["input_ids"] - 5}}, InputError, "no token ids"),
        ({"batch": {"input_ids": BATCH["input_ids"] + 2**31}}, InputError, "no token ids"),
        ({"batch": BATCH | {"attention_mask": ONES[:1]}}, InputError, "attention_mask"),
        ({"batch": BATCH | {"attention_mask": 0 * ONES}}, InputError, "is padding"),
        ({"mask": LAID.mask.long()}, InputError, "boolean"),
        ({"mask": LAID.mask[:, 1:]}, InputError, "mask"),
        ({"mask": LAID.mask & (torch.arange(4) < 2)}, InputError, "other tokens"),
        ({"values": token_values(LAID.mask[:1], ONES[:1], ONES[:1])}, InputError, "shape"),
        ({"values": token_values(LAID.mask, ONES * torch.inf, ONES)}, NumericalError, "token 1"),
        (
            {"values": token_values(LAID.mask, ONES, ONES).total_alone()},
            InputError,
            "components=True",
        ),
        ({"weights": ONES[:1]}, InputError, "shape"),
        ({"weights": -ONES}, InputError, "weight"),
        ({"weights": ONES * torch.nan}, InputError, "weight"),
        ({"scale": float("nan")}, NumericalError, "scale"),
        ({"scale": float("inf")}, NumericalError, "scale"),
        ({"step": -1}, InputError, "step"),
        ({"step": 1.0}, InputError, "step"),
        ({"step": True}, InputError, "step"),
        ({"batch": BATCH | {"completion_mask": ONES}}, InputError, "pairs"),
    ],
)  # fmt: skip
def test_bad_visits_are_refused_and_change_nothing(
    change: dict[str, Any], error: type[AlphaTokenError], message: str
) -> None:
    ledger = Plain()
    good = {"batch": BATCH, "mask": LAID.mask, "values": VALUES, "weights": ONES}
    ledger.add(**good, scale=1.0, step=0)
    before = ledger.state_tensors()
    with pytest.raises(error, match=message):
        ledger.add(**{**good, "scale": 1.0, "step": 1, **change})
    assert all(torch.equal(t, before[n]) for n, t in ledger.state_tensors().items())


def test_packed_pairs_are_refused() -> None:
    laid = lay(FOUND + FOUND[:1], "packed")
    zeros = torch.zeros(laid.mask.shape)
    values = token_values(laid.mask, zeros, zeros)
    batch = laid.batch | {"completion_mask": laid.mask}
    with pytest.raises(InputError, match="one document a row"):
        ValueLedger().add(batch, laid.mask, values, zeros, scale=1.0, step=0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "no token ids"),
        ({"input_ids": [0.5, 1.0]}, "integers"),
        ({"input_ids": ["a"]}, "integers"),
        ({"input_ids": [1, 2], "labels": [1]}, "do not fit"),
        ({"input_ids": [1, 2], "seq_lengths": [1]}, "do not fit"),
        ({"prompt_ids": [1.5], "chosen_ids": [1], "rejected_ids": [2]}, "integers"),
    ],
)
def test_bad_rows_are_refused(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        filled().export(tmp_path / "out.jsonl", [ROWS[0], row])
    assert list(tmp_path.iterdir()) == []
