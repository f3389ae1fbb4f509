"""Policies that decide before training: by hand, by brute force, by per-row autograd."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from alphatoken.errors import ConfigError, DataError, InputError, NumericalError
from alphatoken.model.batch import label_mask, token_losses
from alphatoken.select.masks import fill_tokens
from alphatoken.train.ledger import split_batch
from alphatoken.train.policy import PolicyBatch, PolicySettings, PolicyStage
from alphatoken_lab.methods.less import LESS, adam_update, project
from alphatoken_lab.methods.lora_warmup import AdamCheckpoint, LoraWarmup, adapted, warm_up
from alphatoken_lab.methods.static import keep_best, measure_losses, model_losses, static_pass
from alphatoken_lab.methods.stm import STM
from alphatoken_lab.methods.token_cleaning import TokenCleaning
from alphatoken_lab.methods.token_table import TableHeader, TokenTable
from alphatoken_lab.methods.xtf import (
    XTF,
    low_outliers,
    multi_otsu,
    received_attention,
    task_relevance,
)
from tests.integration.snapshot import Snapshot
from tests.lab import small
from tests.lab.small import right_padded
from tests.property.profiles import budget
from tests.property.tolerance import close

VOCABULARY = 24
Row = dict[str, Any]

# Prompts, two turns of responses, a response of one token, and rows of differing lengths.
MARKS = ("--xxx", "-x", "---xx-xx", "-xxxxxx", "--x---xxx-", "-xxxx")


def rows(marks: Sequence[str] = MARKS, seed: int = 0) -> list[Row]:
    """Rows with random tokens; an x is a response token."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for mark in marks:
        ids = torch.randint(3, VOCABULARY, (len(mark),), generator=generator).tolist()
        labels = [i if c == "x" else -100 for i, c in zip(ids, mark, strict=True)]
        found.append({"input_ids": ids, "labels": labels})
    return found


def joined_lists(parts: Iterable[Sequence[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def left_padded(given: Sequence[Row]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in given) + 2
    batch = {
        "input_ids": torch.zeros(len(given), width, dtype=torch.long),
        "attention_mask": torch.zeros(len(given), width, dtype=torch.long),
        "labels": torch.full((len(given), width), -100),
    }
    for i, row in enumerate(given):
        n = len(row["input_ids"])
        batch["input_ids"][i, -n:] = torch.tensor(row["input_ids"])
        batch["attention_mask"][i, -n:] = 1
        batch["labels"][i, -n:] = torch.tensor(row["labels"])
    return batch


def model(seed: int = 0, *, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=20, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        attention_dropout=0.3, initializer_range=0.5, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def stage(folder: Path, given: Sequence[Row] | None = None, **changes: Any) -> PolicyStage:
    return small.stage(folder, rows() if given is None else given, **{"model": model(), **changes})


def table(sizes: Sequence[int] = (3, 1, 4), **columns: Any) -> TokenTable:
    """A table of documents with so many response tokens, and columns given by hand."""
    given = rows(["-" + "x" * n for n in sizes], seed=5)
    batch = right_padded(given)
    documents = split_batch(batch, label_mask(batch["labels"]))
    ends = np.cumsum([0, *sizes])
    parts = {
        name: [np.asarray(column)[a:b] for a, b in itertools.pairwise(ends)]
        for name, column in columns.items()
    }
    return TokenTable.of_documents(documents, parts, TableHeader("by hand"))


# --- tables ---------------------------------------------------------------------------------------


def ramp(given: Sequence[Row]) -> TokenTable:
    """Column ``n``: 1, 2, ... over the response tokens of the rows."""
    batch = right_padded(given)
    documents = split_batch(batch, label_mask(batch["labels"]))
    numbers = iter(range(1, 1000))
    column = [np.asarray([next(numbers) for _ in d.positions], np.float64) for d in documents]
    return TokenTable.of_documents(documents, {"n": column}, TableHeader("ramp"))


@pytest.mark.parametrize("pad", [right_padded, left_padded])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (4, 2), (5,), (3, 3, 0)])
def test_tokens_are_found_in_any_batch(pad: Any, order: tuple[int, ...]) -> None:
    given = rows()
    found = ramp(given)
    batch = pad([given[i] for i in order])
    mask = label_mask(batch["labels"])
    values = found.columns_of(batch, mask)["n"]
    assert values.dtype == torch.float64
    ends = np.cumsum([0, *(m.count("x") for m in MARKS)])
    for row, i in enumerate(order):
        assert values[row][mask[row]].tolist() == list(range(ends[i] + 1, ends[i + 1] + 1))
    assert not values[~mask].any()


def test_unknown_documents_and_columns_are_refused() -> None:
    given = rows()
    found = ramp(given[:3])
    batch = right_padded(given[2:4])
    with pytest.raises(DataError, match="row 1 of the batch, 6 response tokens.*3 documents"):
        found.columns_of(batch, label_mask(batch["labels"]))
    with pytest.raises(InputError, match="no column q"):
        found.columns_of(batch, label_mask(batch["labels"]), ["n", "q"])
    # the same ids with other response tokens are another document
    other = {**given[0], "labels": [-100, -100, -100, *given[0]["labels"][3:]]}
    batch = right_padded([other])
    with pytest.raises(DataError, match="not in the token table"):
        found.columns_of(batch, label_mask(batch["labels"]))


def test_merge_and_join() -> None:
    given = rows()
    whole, first, second = ramp(given), ramp(given[:4]), ramp(given[3:])
    merged = TokenTable.merge([first, second])
    assert len(merged) == len(whole) == len(given)
    assert np.array_equal(merged.keys, whole.keys)
    assert np.array_equal(merged.positions, whole.positions)
    # row 3 comes from the first table, whose numbers go on to it
    assert merged.columns["n"][: first.tokens].tolist() == list(range(1, first.tokens + 1))
    squares = replace(whole, columns={"m": whole.columns["n"] ** 2})
    joined = whole.join(squares)
    assert joined.columns["n"].tolist() == whole.columns["n"].tolist()
    assert joined.columns["m"].tolist() == squares.columns["m"].tolist()
    for other in (first, ramp(given[::-1])):
        with pytest.raises(DataError, match="same documents"):
            whole.join(other)
    with pytest.raises(InputError, match="same columns"):
        TokenTable.merge([whole, squares])


def test_files_come_back_bit_for_bit(tmp_path: Path) -> None:
    found = table(
        f32=np.linspace(0, 1, 8, dtype=np.float32), f64=np.linspace(0, 1, 8), keep=[True, False] * 4
    )
    found.save(tmp_path / "t")
    again = TokenTable.load(tmp_path / "t", found.header)
    assert again.header == found.header
    for name, column in found.columns.items():
        assert again.columns[name].dtype == column.dtype
        assert np.array_equal(again.columns[name], column)
    assert np.array_equal(again.keys, found.keys)


CHANGED = {
    "kind": {"kind": "another"},
    "model": {"model": "feed"},
    "data": {"data": "beef"},
    "tau": {"settings": {"tau": 3.0, "layers": (1, 2)}},
    "layers": {"settings": {"tau": 2.5, "layers": (1,)}},
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_file_made_for_something_else_is_refused_by_name(tmp_path: Path, what: str) -> None:
    header = TableHeader("kind", "abc", "def", {"tau": 2.5, "layers": (1, 2)})
    replace(table(n=[0.0] * 8), header=header).save(tmp_path / "t")
    assert TokenTable.load(tmp_path / "t", header).tokens == 8
    with pytest.raises(DataError, match=f"made for another {what}"):
        TokenTable.load(tmp_path / "t", replace(header, **CHANGED[what]))


# --- the best of all ------------------------------------------------------------------------------


@budget(1.0)
@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
    percent=st.integers(1, 100),
    rounding=st.sampled_from(["floor", "ceil"]),
)
def test_the_best_of_all_by_brute_force(
    sizes: list[int], seed: int, percent: int, rounding: str
) -> None:
    found = table(sizes)
    # few values, so that there are ties
    scores = np.random.default_rng(seed).integers(0, 4, sum(sizes)).astype(np.float64)
    expected = [False] * sum(sizes)
    exact = Fraction(percent, 100) * sum(sizes)
    count = math.floor(exact) if rounding == "floor" else math.ceil(exact)
    for i in sorted(range(sum(sizes)), key=lambda i: (-scores[i], i))[:count]:
        expected[i] = True
    if any(expected):
        assert keep_best(found, scores, percent / 100, rounding).tolist() == expected
    else:
        with pytest.raises(DataError, match="keeps no token"):
            keep_best(found, scores, percent / 100, rounding)


# --- the pass -------------------------------------------------------------------------------------


def by_hand(own: LlamaForCausalLM, given: Sequence[Row]) -> list[float]:
    """-log p of every response token, a row at a time."""
    own.eval()
    found: list[float] = []
    for row in given:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            log_probs = torch.log_softmax(own(input_ids=ids).logits[0].double(), -1)
        places = [i for i, label in enumerate(row["labels"]) if label != -100 and i > 0]
        found += [-float(log_probs[i - 1, row["input_ids"][i]]) for i in places]
    return found


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("pad", [right_padded, left_padded])
def test_losses_of_a_pass_are_those_of_each_row_alone(tmp_path: Path, size: int, pad: Any) -> None:
    at = stage(tmp_path, batch_size=size, row_batch=pad)
    found = model_losses(at, at.model, "base")
    expected = by_hand(model(), at.rows)
    close(torch.tensor(found.columns["base"]), torch.tensor(expected), 1.0, 2e-5, name="losses")


def test_shards_and_packing_change_nothing(tmp_path: Path) -> None:
    at = stage(tmp_path)
    whole = static_pass(at, at.model, ("loss",), measure_losses, "whole")
    parts = static_pass(at, at.model, ("loss",), measure_losses, "parts", rows_per_shard=1)
    packed = {
        "input_ids": joined_lists(r["input_ids"] for r in at.rows),
        "labels": joined_lists(r["labels"] for r in at.rows),
        "seq_lengths": [len(m) for m in MARKS],
    }
    unpacked = static_pass(
        replace(at, rows=[packed]), at.model, ("loss",), measure_losses, "packed"
    )
    for other in (parts, unpacked):
        assert np.array_equal(other.keys, whole.keys)
        assert np.array_equal(other.positions, whole.positions)
        close(torch.tensor(other.columns["loss"]), torch.tensor(whole.columns["loss"]), 1.0, 1e-5)
    assert unpacked.header.data == whole.header.data


def test_a_pass_is_made_once_for_each_model_and_data(tmp_path: Path) -> None:
    at = stage(tmp_path)
    first = model_losses(at, at.model, "a")
    content = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert len(content) == 1
    again = model_losses(at, at.model, "b")
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == content
    assert np.array_equal(again.columns["b"], first.columns["a"])
    model_losses(at, model(1), "a")
    model_losses(replace(at, rows=rows(seed=1)), at.model, "a")
    assert len(list(tmp_path.iterdir())) == 3
    # a file that was put in another's place is refused
    mine = tmp_path / next(iter(content))
    other = next(file for file in tmp_path.iterdir() if file != mine)
    mine.write_bytes(other.read_bytes())
    with pytest.raises(DataError, match="made for another (data|model)"):
        model_losses(at, at.model, "a")


def test_bad_passes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs training rows"):
        model_losses(stage(tmp_path, []), model(), "a")
    with pytest.raises(DataError, match="no training row has a response token"):
        model_losses(stage(tmp_path, rows(["---", "--"])), model(), "a")
    broken = model()
    broken.lm_head.weight.data[5] = math.nan
    with pytest.raises(NumericalError, match="column loss.*training row"):
        model_losses(stage(tmp_path), broken, "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="folder"):
        model_losses(stage(tmp_path / "file"), model(), "a")


# --- STM ------------------------------------------------------------------------------------------

P = [0.9, 0.41, 0.39, 0.05, 0.4001, 0.3999, 1.0, 0.6]


def test_stm_by_hand() -> None:
    """Proves: STM (exact), against numbers by hand."""
    found = table(loss=-np.log(P))
    policy = STM()
    assert policy.native_keep(found).tolist() == [p >= 0.4 for p in P]
    assert STM(threshold=1.5).native_keep(found).tolist() == [p >= 1 / 1.5 for p in P]
    # perplexity is a token's: the second document is one token of 0.05
    ppl = np.exp(-policy.static_scores(found))
    np.testing.assert_allclose(ppl, [1 / p for p in P], rtol=1e-12)


def test_stm_takes_easy_tokens_first() -> None:
    """Proves: STM (exact), against numbers by hand."""
    found = table(loss=-np.log(P))
    kept = keep_best(found, STM().static_scores(found), 0.5)
    assert sorted(np.asarray(P)[kept]) == sorted(sorted(P)[-4:])


@pytest.mark.parametrize("threshold", [1.0, 0.0, math.inf, math.nan])
def test_stm_refuses_thresholds_without_meaning(threshold: float) -> None:
    with pytest.raises(ConfigError, match="threshold"):
        STM(threshold=threshold)


# --- Token Cleaning -------------------------------------------------------------------------------


def test_token_cleaning_by_hand() -> None:
    """Proves: Token Cleaning (exact), against numbers by hand."""
    base = [3.0, 1.0, 2.0, 0.5, 4.0, 4.0, 1.0, 2.0]
    reference = [1.0, 1.0, 3.0, 0.1, 1.0, 3.5, 0.2, 1.9]
    found = table(base=base, reference=reference)
    policy = TokenCleaning()
    scores = policy.static_scores(found)
    np.testing.assert_allclose(scores, [2.0, 0.0, -1.0, 0.4, 3.0, 0.5, 0.8, 0.1], atol=1e-12)
    # floor(0.6 x 8) = 4: over the whole data set, most gained first
    assert np.flatnonzero(policy.native_keep(found)).tolist() == [0, 4, 5, 6]


def test_token_cleaning_needs_a_reference(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a reference model"):
        TokenCleaning().prepare(stage(tmp_path))
    with pytest.raises(ConfigError, match="cannot train a reference"):
        TokenCleaning(warmup_share=0.5).prepare(stage(tmp_path))
    assert TokenCleaning().lacks == "reference"
    assert TokenCleaning(warmup_share=0.5).lacks is None


# --- XTF ------------------------------------------------------------------------------------------


def test_otsu_by_hand() -> None:
    """Proves: XTF (exact), against numbers by hand."""
    values = np.asarray([0.0, 0.1, 0.05, 5.0, 5.2, 9.9, 10.0])
    thresholds = multi_otsu(values, 3)
    assert np.searchsorted(thresholds, values, side="right").tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert multi_otsu(np.ones(5), 2) is None
    with pytest.raises(InputError, match="2 classes"):
        multi_otsu(values, 1)


@pytest.mark.parametrize("pad", [right_padded, left_padded])
@pytest.mark.parametrize("heads", ["mean", "max"])
@pytest.mark.parametrize("queries", ["mean", "sum"])
@pytest.mark.parametrize("layers", ["all", 1])
def test_attention_received_against_the_eager_matrices(
    pad: Any, heads: str, queries: str, layers: Any
) -> None:
    """Proves: XTF (exact), against eager attention matrices."""
    own = model().double().eval()
    given = rows()
    batch = pad(given)
    labels = batch.pop("labels")
    with torch.no_grad():
        logits, received = received_attention(
            own, batch, layers=layers, heads=heads, queries=queries
        )
        losses = measure_losses(own, batch, labels)["loss"]
    close(token_losses(logits, labels), losses, 10.0, 1e-12, name="losses")
    real = batch["attention_mask"].bool()
    own.set_attn_implementation("eager")
    for i, row in enumerate(given):
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            matrices = own(input_ids=ids, output_attentions=True).attentions
        chosen = matrices if layers == "all" else matrices[-1:]
        length = ids.shape[1]
        expected = []
        for t in range(length):
            by_layer = []
            for matrix in chosen:
                column = matrix[0, :, t:, t]
                by_query = column.mean(0) if heads == "mean" else column.max(0).values
                by_layer.append(by_query.mean() if queries == "mean" else by_query.sum())
            expected.append(float(torch.stack(by_layer).mean()))
        close(received[i][real[i]], torch.tensor(expected), 1.0, 1e-6, name="attention")


def test_low_outliers_by_hand() -> None:
    # quartiles of 1 .. 5 are 2 and 4: below 2 - c 2
    found = table([5, 5], a=[1.0, 2, 3, 4, 5, 10, 10, 10, 10, 9])
    assert low_outliers(found, found.columns["a"], 1.0).tolist() == [False] * 9 + [True]
    assert low_outliers(found, found.columns["a"], 0.25).tolist() == [True, *[False] * 8, True]
    assert XTF(filters=["ri"]).iqr_factor == 1.0


def test_known_tokens_by_hand() -> None:
    """Proves: XTF (exact), against numbers by hand."""
    p = [0.94, 0.96, 0.95001, 0.9499, 0.2, 1.0, 0.5, 0.99999999]
    found = table(loss=-np.log(p))
    drops = XTF(filters=["kn"]).dropped(found)
    assert list(drops) == ["kn"]
    assert drops["kn"].tolist() == [x > 0.95 for x in p]


def test_task_relevance_by_hand() -> None:
    """Proves: XTF (exact), against numbers by hand."""
    embeddings = torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0], [100.0, 100.0]])
    tokens = np.asarray([0, 1, 1, 2])
    # V = (0 + 2 (3, 4) + (6, 8)) / 4 = (3, 4): distances 5, 0, 0, 5; token 3 is not in the data
    np.testing.assert_allclose(task_relevance(embeddings, tokens), [0, 1, 1, 0], atol=1e-12)
    # V = (0, 0): distances 0, 5, 5, 10
    centre = torch.zeros(2, dtype=torch.float64)
    found = task_relevance(embeddings, tokens, centre)
    np.testing.assert_allclose(found, [1, 0.5, 0.5, 0], atol=1e-12)
    centre = torch.tensor([4.0, 3.0], dtype=torch.float64)
    cosine = task_relevance(embeddings[1:], np.asarray([0, 1, 2]), centre, "cosine")
    # cosines 24/25, 24/25, 7/(5 sqrt 2): the third is nearest
    np.testing.assert_allclose(cosine, [0, 0, 1], atol=1e-6)
    assert task_relevance(embeddings, np.asarray([1, 1])).tolist() == [1, 1]


def test_the_second_lowest_class_is_dropped() -> None:
    """Proves: XTF (exact), against numbers by hand."""
    relevance = [0.0, 0.02, 0.01, 0.5, 0.52, 0.98, 1.0, 0.51]
    found = table(relevance=relevance)
    assert np.flatnonzero(XTF(filters=["tr"]).dropped(found)["tr"]).tolist() == [3, 4, 7]
    low = XTF(filters=["tr"], cluster=0)
    assert np.flatnonzero(low.dropped(found)["tr"]).tolist() == [0, 1, 2]
    # by document, the first one (0, .02, .01) and the one of a single token
    alone = XTF(filters=["tr"], otsu_scope="sequence").dropped(found)["tr"]
    assert np.flatnonzero(alone[:4]).tolist() == [2]


def test_xtf_joins_its_filters_and_reports_each(tmp_path: Path) -> None:
    at = stage(tmp_path)
    policy = XTF(known_below=0.5, iqr_factor=0.1)
    found = policy.prepare(at)
    drops = policy.dropped(found)
    assert found.columns["keep"].tolist() == (~(drops["ri"] | drops["kn"] | drops["tr"])).tolist()
    for name in ("ri", "kn", "tr"):
        assert 0 < policy.summary[f"dropped_{name}"] == drops[name].mean()
    assert policy.summary["restored"] == 0
    tokens = [label for row in at.rows for label in row["labels"][1:] if label != -100]
    assert found.columns["token"].tolist() == tokens
    expected = by_hand(model(), at.rows)
    assert drops["kn"].tolist() == [1 - math.exp(-x) < 0.5 for x in expected]


@pytest.mark.parametrize("ratio", [0.2, 0.9])
def test_xtf_comes_to_a_budget_by_chance(ratio: float) -> None:
    loss = -np.log([0.99] * 40 + [0.3] * 60)
    found = table([10] * 10, loss=loss)
    kept = np.arange(100) >= 40
    drawn = []
    for seed in range(3):
        policy = XTF(PolicySettings("budget", ratio, seed=seed), filters=["kn"])
        now = policy.best_tokens(found, ratio)
        assert now.sum() == 100 * ratio
        assert not (now & ~kept).any() if ratio < 0.6 else not (kept & ~now).any()
        again = XTF(PolicySettings("budget", ratio, seed=seed), filters=["kn"])
        assert np.array_equal(again.best_tokens(found, ratio), now)
        drawn.append(now.tobytes())
    assert len(set(drawn)) == 3


def test_xtf_restores_what_would_leave_too_little() -> None:
    found = table([50, 50], loss=-np.log([0.99] * 99 + [0.5]))
    policy = XTF(filters=["kn"], floor=0.1)
    keep = policy.native_keep(found)
    assert keep.sum() == 10
    assert keep[99]  # what the filter keeps stays
    assert policy.summary["restored"] == 9
    assert policy.summary["dropped_kn"] == 0.99
    assert XTF(filters=["kn"], floor=0.0).native_keep(found).sum() == 1


# --- LESS -----------------------------------------------------------------------------------------


def test_projections_are_one_linear_map() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(-9, 9, (3, 2100), generator=generator).float()
    y = project(x, 16, seed=7)
    assert torch.equal(y, project(x, 16, seed=7))
    assert torch.equal(project(x[1:2], 16, seed=7)[0], y[1])
    close(project(x[:1] + 2 * x[1:2], 16, seed=7), y[:1] + 2 * y[1:2], 1e3, 1e-6)
    assert not torch.equal(y, project(x, 16, seed=8))
    units = project(torch.eye(2100), 16, seed=7) * 4  # the matrix itself
    assert set(units.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(units.mean())) < 4 / math.sqrt(units.numel())
    for dimension in (None, 2100, 8192):
        assert torch.equal(project(x, dimension), x)


def test_adam_update_by_hand() -> None:
    """Proves: LESS (exact), against numbers by hand."""
    g, m, v = (torch.tensor([x], dtype=torch.float64) for x in (2.0, 0.5, 0.25))
    # m' = .45 + .2 = .65, v' = .24975 + .004 = .25375
    code = adam_update(g, m, v, 9)
    close(code, torch.tensor([0.65 / math.sqrt(0.25375 + 1e-8)]).double(), 1.0, 1e-6)
    paper = adam_update(g, m, v, 9, kind="paper")
    hat = (0.65 / (1 - 0.9**10)) / (math.sqrt(0.25375 / (1 - 0.999**10)) + 1e-8)
    close(paper, torch.tensor([hat]).double(), 1.0, 1e-6)


@budget(1.0)
@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    percent=st.integers(1, 100),
)
@example(tokens=[2, 2], percent=50)  # a budget that is met exactly
def test_filling_by_tokens(tokens: list[int], percent: int) -> None:
    """Proves: LESS (exact), against fractions."""
    order = np.arange(len(tokens))[::-1]
    found = fill_tokens(order, np.asarray(tokens), percent / 100).tolist()
    taken = sum(tokens[i] for i in found)
    exact = Fraction(percent, 100) * sum(tokens)
    assert found == order[: len(found)].tolist()
    assert taken >= exact
    assert not found or sum(tokens[i] for i in found[:-1]) < math.ceil(exact) or not exact


LESS_ARGUMENTS: dict[str, Any] = {
    "dimension": None, "warmup_share": 0.5, "warmup_epochs": 2, "warmup_learning_rate": 1e-2,
    "warmup_batch_size": 2, "rank": 2, "alpha": 4.0, "dropout": 0.1,
    "target_modules": ["q_proj", "v_proj"],
}  # fmt: skip


def less_stage(folder: Path, **changes: Any) -> PolicyStage:
    validation = rows(["--xx", "-xxx", "-xx"], seed=8)
    for row, name in zip(validation, ("sums", "words", "sums"), strict=True):
        row["subtask"] = name
    return stage(folder, validation=validation, **changes)


def less_by_hand(
    at: PolicyStage, checkpoints: Sequence[AdamCheckpoint], settings: LoraWarmup, aggregate: str
) -> Tensor:
    """(rows, subtasks) by transformers' own loss and backward, one row at a time, in float64."""
    total = sum(c.rate for c in checkpoints)
    scores = torch.zeros(len(at.rows), 2, dtype=torch.float64)
    for checkpoint in checkpoints:
        with adapted(copy.deepcopy(at.model), settings) as lora:
            lora.eval()
            parameters = dict(lora.named_parameters())
            for name, value in checkpoint.weights.items():
                parameters[name].data = value.clone()
            names = sorted(checkpoint.weights)
            assert len(names) == len(get_peft_model_state_dict(lora)) == 8

            def gradient(row: Row, lora: Any = lora, names: Any = names) -> dict[str, Tensor]:
                lora.zero_grad()
                batch = right_padded([row])
                lora(**batch).loss.backward()
                own = dict(lora.named_parameters())
                return {n: own[n].grad.double().clone() for n in names}

            def joined(parts: dict[str, Tensor]) -> Tensor:
                return torch.cat([parts[n].flatten() for n in sorted(parts)])

            targets: dict[str, list[Tensor]] = {"sums": [], "words": []}
            for row in at.validation:
                targets[row["subtask"]].append(joined(gradient(row)))
            for z, row in enumerate(at.rows):
                g = gradient(row)
                update = {}
                for n in names:
                    m = 0.9 * checkpoint.first[n].double() + 0.1 * g[n]
                    v = 0.999 * checkpoint.second[n].double() + 0.001 * g[n] ** 2
                    update[n] = m / torch.sqrt(v + 1e-8)
                u = joined(update)
                u = u / u.norm()
                for s, group in enumerate(targets.values()):
                    if aggregate == "cosine_of_mean":
                        mean = torch.stack(group).mean(0)
                        value = u @ mean / mean.norm()
                    else:
                        value = torch.stack([u @ g / g.norm() for g in group]).mean()
                    scores[z, s] += checkpoint.rate / total * value
    return scores


@pytest.mark.parametrize("aggregate", ["mean_of_cosines", "cosine_of_mean"])
def test_less_against_autograd_by_hand(tmp_path: Path, aggregate: str) -> None:
    """Proves: LESS (exact), against autograd, row by row."""
    at = less_stage(tmp_path)
    names = [row["subtask"] for row in at.validation]
    policy = LESS(PolicySettings(seed=3), aggregate=aggregate, subtasks=names, **LESS_ARGUMENTS)
    settings = replace(policy.warmup, seed=3)
    (tmp_path / "own").mkdir()
    with adapted(copy.deepcopy(at.model), settings) as lora:
        checkpoints = warm_up(at, lora, settings, tmp_path / "own", "test")
    assert [c.steps for c in checkpoints] == [2, 4]
    found = policy.influence(at)
    expected = less_by_hand(at, checkpoints, settings, aggregate)
    close(torch.tensor(found), expected, 1.0, 2e-5, name="influence")
    assert np.array_equal(policy.influence(at), found)  # from the file
    # the best row by its best subtask
    best = int(expected.max(1).values.argmax())
    policy.share = 0.2
    assert policy.choose_rows(at) == [best]


def test_less_budget_counts_tokens(tmp_path: Path) -> None:
    sizes = np.asarray([m.count("x") for m in MARKS])
    policy = LESS(PolicySettings("budget", 0.5), **LESS_ARGUMENTS)
    taken = sizes[policy.choose_rows(less_stage(tmp_path))].sum()
    assert policy.summary["kept_share"] == taken / sizes.sum()
    assert taken >= 0.5 * sizes.sum()
    inputs = right_padded(rows())
    mask = label_mask(inputs["labels"])
    batch = PolicyBatch(inputs, inputs["labels"], mask, torch.zeros(mask.shape), [slice(0, 6)])
    assert torch.equal(policy.weights(batch), mask.float())


@pytest.mark.parametrize("policy", [XTF(), LESS(**LESS_ARGUMENTS)], ids=["xtf", "less"])
def test_the_model_is_left_as_it_was(tmp_path: Path, policy: XTF | LESS) -> None:
    own = model().train()
    own.model.layers[0].eval()
    own.model.layers[1].mlp.requires_grad_(False)
    before, at = Snapshot(own), less_stage(tmp_path, model=own)
    policy.prepare(at) if isinstance(policy, XTF) else policy.choose_rows(at)
    before.check()


def test_less_resumes_to_the_same_bits(tmp_path: Path) -> None:
    settings = replace(LESS(**LESS_ARGUMENTS).warmup, epochs=3)
    at = less_stage(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    with adapted(at.model, settings) as lora:
        expected = warm_up(at, lora, settings, whole, "h")
    # as if it had been killed in the third epoch
    for epoch in range(2):
        name = f"epoch-{epoch}.safetensors"
        (parts / name).write_bytes((whole / name).read_bytes())
    with adapted(at.model, settings) as lora:
        found = warm_up(at, lora, settings, parts, "h")
    for kind in ("weights", "first", "second"):
        mine, theirs = getattr(found[2], kind), getattr(expected[2], kind)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[n], theirs[n]) for n in mine)
    assert (found[2].steps, found[2].rate) == (expected[2].steps, expected[2].rate)
    with adapted(at.model, settings) as lora, pytest.raises(DataError, match="another warm-up"):
        warm_up(at, lora, settings, parts, "another")


def test_less_reads_no_settings_of_lora_on_a_model_with_adapters(tmp_path: Path) -> None:
    """Its own adapters are trained, and settings of others would be left unread."""
    lora = get_peft_model(model(), LoraConfig(r=2, target_modules=["q_proj"]))
    at = less_stage(tmp_path, model=lora)
    own = {"rank": 4, "alpha": 4.0, "dropout": 0.0, "target_modules": ["q_proj"]}
    common = {name: value for name, value in LESS_ARGUMENTS.items() if name not in own}
    assert LESS(**common).choose_rows(at)
    for name, value in own.items():
        with pytest.raises(ConfigError, match=f"adapters of its own.*{name}=.*leave"):
            LESS(**common, **{name: value}).choose_rows(at)


def test_less_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    at = less_stage(tmp_path)
    with pytest.raises(ConfigError, match="validation rows"):
        LESS(**LESS_ARGUMENTS).choose_rows(replace(at, validation=()))
    with pytest.raises(ConfigError, match="one for each validation row"):
        LESS(subtasks=["a"], **LESS_ARGUMENTS).choose_rows(at)
    packed = [{**at.rows[0], "seq_lengths": [2, 3]}]
    with pytest.raises(ConfigError, match="packed rows"):
        LESS(**LESS_ARGUMENTS).choose_rows(replace(at, rows=packed))
    with pytest.raises(ConfigError, match="no module"):
        LESS(**LESS_ARGUMENTS | {"target_modules": ["c_attn"]}).choose_rows(at)
    assert not hasattr(at.model, "peft_config")
    silent = [{"input_ids": [3, 4], "labels": [-100, -100]}]
    with pytest.raises(DataError, match="validation row has no gradient"):
        LESS(**LESS_ARGUMENTS).choose_rows(replace(at, validation=silent))
    for name in ("adam", "aggregate"):
        with pytest.raises(ConfigError, match=name):
            LESS(**LESS_ARGUMENTS | {name: "no"})


def test_less_never_chooses_a_row_without_a_response(tmp_path: Path) -> None:
    at = less_stage(tmp_path)
    given = [{"input_ids": [3, 4, 5], "labels": [-100] * 3}, *at.rows]
    policy = LESS(share=1.0, **LESS_ARGUMENTS)
    assert policy.choose_rows(replace(at, rows=given)) == list(range(1, len(given)))
