"""``score --rows tokens``: rows that plain TRL trains on, float weights that reach its loss."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from alphatoken import DataError, InputError
from alphatoken.data import WeightedCollator
from alphatoken.oracle.gradients import token_losses
from alphatoken.score import read_values
from tests.integration.small_world import World

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

PAGE = Path(__file__).parents[2] / "docs" / "own-weights.md"
OPTIONS = {
    "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "logging_steps": 1,
    "disable_tqdm": True, "dataloader_pin_memory": False, "max_steps": 2, "learning_rate": 0.0,
    "gradient_checkpointing": False,
}  # fmt: skip


def load(path: Path) -> Any:
    return datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=str(path.parent / "cache")
    )


def losses_of(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """Loss of each labelled token, by the oracle; 0 elsewhere."""
    ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        return token_losses(model(input_ids=ids).logits.double(), labels)[0]


def by_hand(model: Any, rows: list[dict[str, Any]]) -> float:
    """sum w l / n over the rows."""
    total = sum(float(losses_of(model, row) @ torch.tensor(row["loss_weights"]).double())
                for row in rows)  # fmt: skip
    return total / sum(sum(label != -100 for label in row["labels"][1:]) for row in rows)


@pytest.fixture(scope="module")
def scored(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of rows that keep four tenths of their tokens."""
    folder = tmp_path_factory.mktemp("scored")
    assert world.score(folder, "--keep_ratio", 0.4, "--rows", "tokens") == 0
    return folder / "rows.jsonl"


def page_code() -> dict[str, Any]:
    """The classes and functions that the page defines."""
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        if re.search(r"^class ", code, re.M):
            exec(compile(code, str(PAGE), "exec"), names)
    return names


def seen_batches(trainer: Any) -> list[dict[str, Any]]:
    """The rows of each step, in the order of the trainer's own loader."""
    return [dict(batch) for batch in trainer.get_train_dataloader()]


def logged(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_columns_are_the_values_masks(world: World, tmp_path: Path) -> None:
    few = ("--keep_ratio", 0.1, "--keep_scope", "dataset")
    assert world.score(tmp_path / "v", *few, "--rows", "tokens") == 0
    rows = {row["row"]: row for row in load(tmp_path / "v" / "rows.jsonl")}
    counts = json.loads((tmp_path / "v" / "summary.json").read_text())["rows"]["written"]
    kept = answered = 0
    for example in read_values(tmp_path / "v" / "values"):
        kept += int(example.kept.sum())
        answered += int(example.response.sum())
        if not example.kept.any():
            assert example.row not in rows
            continue
        row = rows[example.row]
        assert row["input_ids"] == list(example.ids)
        assert row["attention_mask"] == [1] * len(example.ids)
        expected = [i if k else -100 for i, k in zip(example.ids, example.kept, strict=True)]
        assert row["labels"] == expected
        assert row["loss_weights"] == [float(k) for k in example.kept]
    assert (counts["kept_tokens"], counts["response_tokens"]) == (kept, answered)
    assert counts["rows_left_out"] > 0
    assert counts["rows"] == len(rows) == 20 - counts["rows_left_out"]
    # Once more, over an earlier and longer one: the same bytes.
    path = tmp_path / "v" / "rows.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + b"of a longer one")
    assert world.score(tmp_path / "v", *few, "--rows", "tokens", "--resume") == 0
    assert path.read_bytes() == before
    assert json.loads((tmp_path / "v" / "summary.json").read_text())["rows"]["written"] == counts


def test_plain_trl_trains_on_the_mask(world: World, scored: Path, tmp_path: Path) -> None:
    model, tokenizer, *_ = world.loaded()
    rows = load(scored)
    args = trl.SFTConfig(str(tmp_path / "o"), per_device_train_batch_size=3, **OPTIONS)
    trainer = trl.SFTTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer)
    by_ids = {tuple(row["input_ids"]): row for row in rows}
    batches = seen_batches(trainer)[:2]
    expected = [
        by_hand(model, [
            by_ids[tuple(ids[: int(mask.sum())].tolist())]
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ])
        for batch in batches
    ]  # fmt: skip
    assert logged(trainer) == pytest.approx(expected, rel=1e-4)


def test_rows_of_another_tokenizer_are_refused(world: World, scored: Path, tmp_path: Path) -> None:
    """One with more tokens reads the same texts; one that has two of them exchanged does not."""
    from alphatoken.train import AlphaSFTConfig, AlphaSFTTrainer

    model, tokenizer, *_ = world.loaded()
    rows = load(scored)

    def trainer(processing_class: Any) -> Any:
        args = AlphaSFTConfig(str(tmp_path / "o"), policy="weights", **OPTIONS)
        return AlphaSFTTrainer(
            model, args=args, train_dataset=rows, processing_class=processing_class
        )

    longer = copy.deepcopy(tokenizer)
    longer.add_tokens(["<more>"])
    assert len(trainer(longer).train_dataset) == len(rows)
    words = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = words["model"]["vocab"]
    vocabulary["plus"], vocabulary["from"] = vocabulary["from"], vocabulary["plus"]
    other = copy.deepcopy(tokenizer)
    other._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(words))
    with pytest.raises(InputError, match="tokens of another tokenizer.*row 0"):
        trainer(other)


def test_a_loss_over_shifted_log_probabilities_reads_the_weights(
    world: World, scored: Path
) -> None:
    """verl's: -sum(log p * weights, one to the left) / sum(weights) over flat rows; ours by row."""
    rows = page_code()["TokenRows"](str(scored))
    model, *_ = world.loaded()
    every_row = [rows[i] for i in range(len(rows))]
    flat = []
    for row in every_row:
        assert torch.equal(row["position_ids"], torch.arange(len(row["input_ids"])))
        logits = model(input_ids=row["input_ids"][None]).logits[0].detach()
        following = row["input_ids"].roll(-1)  # of the last token that of the first: weight 0
        flat.append(logits.log_softmax(-1).gather(-1, following[:, None])[:, 0])
    weights = torch.cat([row["loss_mask"] for row in every_row])
    loss = -(torch.cat(flat) * weights.roll(-1)).sum() / weights.sum()
    assert float(loss) == pytest.approx(by_hand(model, load(scored)), rel=1e-5)


@pytest.mark.parametrize(
    ("packed", "accumulation"),
    [(False, 2), pytest.param(True, 1, marks=pytest.mark.slow)],
)
def test_float_weights_reach_the_loss(
    world: World, scored: Path, tmp_path: Path, packed: bool, accumulation: int
) -> None:
    # Weights of one's own, in place of 0 and 1.
    rows = datasets.Dataset.from_list([
        {**row, "loss_weights": [w * (0.5 + i % 3) for i, w in enumerate(row["loss_weights"])]}
        for row in load(scored)
    ])  # fmt: skip
    lengths = [len(row["input_ids"]) for row in rows]
    limit = sorted(lengths)[len(lengths) // 2]  # half of the rows are cut
    cut = [
        {name: row[name][:limit] for name in ("input_ids", "labels", "loss_weights")}
        for row in rows
    ]
    model, tokenizer, *_ = world.loaded()
    data = datasets.Dataset.from_list(cut)
    if packed:
        data = trl.pack_dataset(data, seq_length=3 * limit)
    trainer = page_code()["weighted_trainer"](
        model, data, tokenizer, packed=packed, output_dir=str(tmp_path / "o"),
        per_device_train_batch_size=1 if packed else 2,
        gradient_accumulation_steps=accumulation, **OPTIONS,
    )  # fmt: skip
    by_ids = {tuple(row["input_ids"]): row for row in cut}
    batches = [
        [by_ids[ids] for ids in documents(batch)] for batch in seen_batches(trainer)
    ][: 2 * accumulation]  # fmt: skip
    steps = [
        [row for batch in batches[i : i + accumulation] for row in batch]
        for i in range(0, len(batches), accumulation)
    ]
    expected = [by_hand(model, step) for step in steps]
    assert len({w for row in cut for w in row["loss_weights"]}) > 3  # soft ones
    assert logged(trainer) == pytest.approx(expected, rel=1e-4)


def documents(batch: dict[str, Any]) -> list[tuple[int, ...]]:
    """Ids of each example of a batch, padded or joined."""
    if "position_ids" not in batch:
        pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
        return [tuple(ids[: int(mask.sum())].tolist()) for ids, mask in pairs]
    ids, starts = batch["input_ids"][0], (batch["position_ids"][0] == 0).nonzero().flatten()
    ends = [*starts[1:].tolist(), len(ids)]
    return [tuple(ids[a:b].tolist()) for a, b in zip(starts.tolist(), ends, strict=True)]


ROW = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "loss_weights": [0.0, 0.5, 2.0]}


def test_the_collator_pads_and_joins() -> None:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = [ROW, {"input_ids": [4, 5], "labels": [-100, 5], "loss_weights": [7.0, 3.0]}]
    padded = WeightedCollator(DataCollatorForLanguageModeling(0))(rows)
    assert padded["loss_weights"].tolist() == [[0.0, 0.5, 2.0], [0.0, 3.0, 0.0]]
    joined = WeightedCollator(DataCollatorForLanguageModeling(0, padding_free=True))(rows)
    assert joined["loss_weights"].tolist() == [[0.0, 0.5, 2.0, 0.0, 3.0]]
    assert ROW["loss_weights"] == [0.0, 0.5, 2.0]  # the row is left as it was


@pytest.mark.parametrize(
    "row",
    [{k: v for k, v in ROW.items() if k != "loss_weights"}, {**ROW, "loss_weights": [1.0]}],
)
def test_a_row_without_its_weights_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="weight for each"):
        WeightedCollator(lambda rows: {})([row])


@pytest.mark.parametrize("order", ["padded on the left", "rows turned round"])
def test_weights_never_fall_onto_other_tokens(order: str) -> None:
    rows = [ROW, {"input_ids": [4, 5], "labels": [-100, 5], "loss_weights": [7.0, 3.0]}]

    def inner(rows: list[dict[str, Any]]) -> dict[str, Any]:
        labels = [row["labels"] for row in rows]
        if order == "padded on the left":
            return {"labels": torch.tensor([[-100] * (3 - len(x)) + x for x in labels])}
        return {"labels": torch.tensor([x + [-100] * (3 - len(x)) for x in labels[::-1]])}

    with pytest.raises(DataError, match="padded on the right"):
        WeightedCollator(inner)(rows)
