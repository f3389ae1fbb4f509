"""What TRL leaves of training rows: none, fewer, or tokens that the model has no row for."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from datasets.utils import are_progress_bars_disabled

from alphatoken.errors import AlphaTokenWarning, ConfigError, InputError
from alphatoken.score import read_values
from alphatoken.train import AlphaDPOTrainer, AlphaSFTTrainer, python_rows
from alphatoken.train.records import REPORT, VALUES
from alphatoken.train.refusals import check_tokens
from tests.integration import tiny_training as tiny

LONG = "what is the sum of these two numbers, if you please? "
"""A prompt that fills the 16 tokens of these tests."""
KINDS = {"sft": AlphaSFTTrainer, "dpo": AlphaDPOTrainer}


def rows(kind: str, prompts: list[str]) -> Dataset:
    answers = {"completion": " 7."} if kind == "sft" else {"chosen": " 7.", "rejected": " 8."}
    return Dataset.from_list([{"prompt": prompt, **answers} for prompt in prompts])


def trainer(kind: str, folder: Path, prompts: list[str], **given: Any) -> Any:
    own = {"policy": "random", "retention": "none", "export_values": False, "max_length": 16}
    given = {"model": tiny.model(), "train_dataset": rows(kind, prompts), **own, **given}
    if kind == "dpo":
        given["ref_model"] = copy.deepcopy(given["model"])
    return tiny.made(KINDS[kind], folder, **given)


@pytest.mark.parametrize("kind", KINDS)
def test_bars_of_a_preparation_are_drawn_for_many_rows_alone(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each data set has several, and each arm of a race has them again."""
    trainer(kind, tmp_path, ["say it "] * 8)
    assert "examples/s" not in capfd.readouterr().err
    assert not are_progress_bars_disabled()
    monkeypatch.setattr(python_rows, "_MANY_ROWS", 8)
    trainer(kind, tmp_path, ["say it "] * 8)
    assert "examples/s" in capfd.readouterr().err


@pytest.mark.parametrize(("kind", "policy"), [("sft", "all"), ("dpo", "random")])
def test_rows_of_which_nothing_is_left_are_refused(kind: str, policy: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no training row has a response token left") as caught:
        trainer(kind, tmp_path, [LONG] * 8, policy=policy)
    assert "8 rows, max_length 16" in caught.value.got


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_left_out_are_counted(kind: str, tmp_path: Path) -> None:
    said = r"3 of 8 training rows left out: no response token within max_length=16"
    with pytest.warns(AlphaTokenWarning, match=said):
        made = trainer(kind, tmp_path, [LONG] * 3 + [f"{n}+{n}=" for n in range(5)])
    assert len(made.train_dataset) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error", AlphaTokenWarning)
        trainer(kind, tmp_path, [f"{n}+{n}=" for n in range(5)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["validation", "retention"])
def test_held_out_rows_that_are_left_out_are_counted(kind: str, name: str, tmp_path: Path) -> None:
    """Values are of fewer rows than were given, and a race is decided by fewer."""
    prompts = [f"{n}+{n}=" for n in range(5)]
    held = {
        one: rows(kind, [f"{n}+1=" for n in range(2, 7)]) for one in ("validation", "retention")
    }

    def make(long: int) -> Any:
        own = {**held, name: rows(kind, [LONG] * long + [f"{n}+2=" for n in range(3, 8)])}
        datasets = {f"{one}_dataset": of_name for one, of_name in own.items()}
        options = {"policy": "top", "retention": "data", "objective": "both"}
        return trainer(kind, tmp_path, prompts, **options, **datasets)

    said = rf"2 of 7 {name} rows left out: no response token within max_length=16"
    with pytest.warns(AlphaTokenWarning, match=said):
        made = make(2)
    assert len(getattr(made.rows, name)) == 5
    with pytest.warns(AlphaTokenWarning, match="1 of 2 choosing rows left out: no response"):
        made.prepare_rows(rows(kind, [LONG, "1+2="]), "choosing")
    with warnings.catch_warnings():
        warnings.simplefilter("error", AlphaTokenWarning)
        make(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_beyond_the_embedding_is_named_with_its_row(kind: str, tmp_path: Path) -> None:
    """Added to the tokenizer and not to the model; on a CPU torch says "index out of range"."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<step>"])
    prompts, own = ["1+2=", "<step>1+2=", "3+4="], {"processing_class": tokenizer}
    size = len(tokenizer) - 1
    with pytest.raises(InputError, match="a token of training row 1 has no row") as caught:
        trainer(kind, tmp_path, prompts, **own)
    assert f"id {size} at token" in caught.value.got
    held = rows(kind, ["2+2=", "2+<step>="])
    with pytest.raises(InputError, match="a token of validation row 1 has no row"):
        trainer(kind, tmp_path, ["1+2=", "3+4="], policy="top", validation_dataset=held, **own)
    model = tiny.model()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)  # the remedy
    trainer(kind, tmp_path, prompts, model=model, **own)


@pytest.mark.parametrize("bad", [-1, 64])
def test_rows_in_arrow_are_refused_as_they_are_one_by_one(bad: int) -> None:
    """They are looked through by columns first, in whatever order and form they are."""
    model = tiny.model()
    model.resize_token_embeddings(64, mean_resizing=False)
    right = Dataset.from_list([{"input_ids": ids} for ids in ([1], [], [2, 63])])
    check_tokens(right, model, "training")
    wrong = Dataset.from_list([{"input_ids": ids} for ids in ([1], [], [2, bad])])
    forms = {2: wrong, 0: wrong.select([2, 0]), 1: wrong.with_format("torch").select([0, 2])}
    for number, rows_of_a_form in forms.items():
        with pytest.raises(InputError, match=f"training row {number} has no row") as caught:
            check_tokens(rows_of_a_form, model, "training")
        assert f"id {bad} at token 1" in caught.value.got


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packed_rows_are_not_called_left_out(strategy: str, tmp_path: Path) -> None:
    """They are fewer than the rows that are in them; parts of a split row are no rows."""
    long = [] if strategy == "bfd" else [LONG]
    with warnings.catch_warnings():
        warnings.simplefilter("error", AlphaTokenWarning)
        prompts = [*long, *(f"{n}+{n}=" for n in range(5))]
        trainer("sft", tmp_path, prompts, packing=True, packing_strategy=strategy)


CUTS = {
    "start": {}, "end": {"truncation_mode": "keep_end"}, "bfd": {"packing_strategy": "bfd"},
    "bfd_split": {"packing_strategy": "bfd_split"}, "wrapped": {"packing_strategy": "wrapped"},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode:FutureWarning")
@pytest.mark.parametrize("cut", CUTS)
def test_a_row_that_is_cut_has_its_place_in_the_file(cut: str, tmp_path: Path) -> None:
    """Where rows are joined to blocks without borders, the page says what its row numbers are."""
    rows, places = tiny.tokenised(8), [f"train.jsonl, line {2 * n}" for n in range(8)]
    lengths = [len(row["input_ids"]) for row in rows]
    assert min(lengths) > 20, "all are cut"
    packing = {"packing": True} if "packing_strategy" in CUTS[cut] else {}
    own = {"train_dataset": rows, "max_steps": 4, "retention": "none", **packing, **CUTS[cut]}
    made = tiny.sft(tmp_path, max_length=20, **own)
    made.records.name_rows(places, rows)
    made.train()
    named = {one.place.partition(" (")[0] for one in read_values(tmp_path / VALUES)}
    page = (tmp_path / REPORT).read_text("utf-8")
    assert ("A row number counts the training rows" in page) == (cut == "wrapped")
    assert named <= {*places} if cut != "wrapped" else not named & {*places}
    assert len(named) > 4


def paired(folder: Path, reference: Any, policy: Any = None) -> Any:
    return tiny.dpo(
        folder, model=policy or tiny.model(), ref_model=reference, validation_dataset=None,
        train_dataset=rows("dpo", ["1+2=", "3+4="]), policy="random", retention="none",
    )  # fmt: skip


def test_a_reference_without_rows_for_the_tokens_is_refused_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which references are refused is a property of ``test_rules.py``."""
    small, large, size = tiny.model(), tiny.model(), len(tiny.tokenizer())
    small.resize_token_embeddings(size - 1, mean_resizing=False)
    large.resize_token_embeddings(size + 8, mean_resizing=False)
    # Rows that fill an embedding up are no tokens: families have them in differing numbers.
    paired(tmp_path, tiny.model(), large)
    paired(tmp_path, large)
    monkeypatch.setattr(AlphaDPOTrainer, "_prepare_dataset", None)  # nothing is tokenised
    with pytest.raises(ConfigError, match="reference model has no row for some tokens") as caught:
        paired(tmp_path, small)
    assert f"{size - 1} rows, {size} tokens" in caught.value.got
