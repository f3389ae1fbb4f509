"""CFT: critical tokens against one continuation at a time, and on a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alphatoken.errors import ConfigError, DataError, UnsupportedError
from alphatoken.train.policy import PolicyBatch, PolicySettings, PolicyStage
from alphatoken.train.sft import padded_batch
from alphatoken_lab.methods.cft import CFT, NUMBER, final_answer
from alphatoken_lab.methods.token_table import TokenTable
from tests.integration import tiny_training as tiny
from tests.lab.small import stage

Row = dict[str, Any]


def rows_of(texts: list[tuple[str, str]], tokenizer: Any) -> list[Row]:
    """Prompt and response of each row, tokenised apart."""
    found = []
    for prompt, response in texts:
        before, after = (
            tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, response)
        )
        found.append({"input_ids": before + after, "labels": [-100] * len(before) + after})
    return found


def one_at_a_time(
    row: Row, model: Any, tokenizer: Any, alternatives: int, most: int
) -> list[float]:
    """Share of wrong ends of each response token, by transformers' own greedy generation."""
    ends, limit = model.generation_config.eos_token_id, model.config.max_position_embeddings
    ends = ends if isinstance(ends, list) else [ends]
    ids, labels = row["input_ids"], row["labels"]
    start = next(i for i, label in enumerate(labels) if label != -100)

    def said(tokens: list[int]) -> str | None:
        return final_answer(tokenizer.decode(tokens, skip_special_tokens=True), NUMBER)

    target, shares = said(ids[start:]), []
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    for t in range(start, len(ids)):
        order = logits[t - 1].argsort(descending=True).tolist()
        others = [token for token in order if token != ids[t]][:alternatives]
        fails = 0
        for other in others:
            prefix = [*ids[:t], other]
            room = 0 if other in ends else min(most, limit - len(prefix))
            whole = prefix
            if room > 0:
                given = torch.tensor([prefix])
                whole = model.generate(
                    input_ids=given, attention_mask=torch.ones_like(given), do_sample=False,
                    max_new_tokens=room, pad_token_id=0, eos_token_id=ends,
                )[0].tolist()  # fmt: skip
            fails += said(whole[start:]) != target
        shares.append(fails / alternatives)
    return shares


TEXTS = [("12+30=", " it is 42."), ("5+5=", " it is 10. ok"), ("1+1=", " it is 2 or so.")]


def own_answer(model: Any, tokenizer: Any) -> tuple[str, str]:
    """What the model itself writes, with a number in it: each token is the likeliest there."""
    for prompt in (f"{i}+{j}=" for i in range(20) for j in range(20)):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        whole = model.generate(**given, do_sample=False, max_new_tokens=6, pad_token_id=0)[0]
        text = tokenizer.decode(whole[ids.shape[1] :], skip_special_tokens=True)
        if len(text) == 6 and final_answer(text, NUMBER) is not None:
            return prompt, text
    raise AssertionError("the model writes no number")


@pytest.mark.parametrize(("alternatives", "batch"), [(1, 1), (2, 7)])
def test_critical_tokens_are_those_of_one_continuation_at_a_time(
    tmp_path: Path, alternatives: int, batch: int
) -> None:
    """Proves: CFT (exact), against transformers' generation."""
    model, tokenizer = tiny.model().eval(), tiny.tokenizer()
    rows = rows_of([*TEXTS, own_answer(model, tokenizer)], tokenizer)
    policy = CFT(alternatives=alternatives, max_new_tokens=3, batch=batch)
    table = policy.measured(stage(tmp_path, rows, model, tokenizer=tokenizer))
    wanted = [one_at_a_time(row, model, tokenizer, alternatives, 3) for row in rows]
    np.testing.assert_array_equal(table.columns["wrong"], np.concatenate(wanted))
    assert {0.0, 1.0} <= set(table.columns["wrong"].tolist()), "one kind of token only"
    assert bool((table.columns["answered"] == 1).all())


@pytest.mark.parametrize("what", ["end token", "limit"])
def test_nothing_follows_an_end_token_or_the_models_limit(tmp_path: Path, what: str) -> None:
    """Some replacements of a batch are not continued or less far: the answer is what is there."""
    model, tokenizer = tiny.model().eval(), tiny.tokenizer()
    own = own_answer(model, tokenizer)
    rows = rows_of([*TEXTS, own] if what == "end token" else [own], tokenizer)
    free = [one_at_a_time(row, model, tokenizer, 3, 3) for row in rows]
    if what == "end token":  # one that the model often finds likely
        model.generation_config.eos_token_id = [2, tokenizer.convert_tokens_to_ids("s")]
    else:  # the row fills the model
        model.config.max_position_embeddings = len(rows[0]["input_ids"])
    wanted = [one_at_a_time(row, model, tokenizer, 3, 3) for row in rows]
    assert wanted != free, "all are continued"
    policy = CFT(alternatives=3, max_new_tokens=3, batch=7)
    table = policy.measured(stage(tmp_path, rows, model, tokenizer=tokenizer))
    np.testing.assert_allclose(table.columns["wrong"], np.concatenate(wanted), atol=1e-6)


def test_a_number_of_the_prompt_is_no_answer(tmp_path: Path) -> None:
    """A response without one has none, whatever stands before it, in this turn or an earlier."""
    model, tokenizer = tiny.model(), tiny.tokenizer()
    answered, silent = rows_of([TEXTS[0], ("5+5=", " who knows")], tokenizer)
    both = {name: answered[name] + silent[name] for name in answered}
    found = CFT(max_new_tokens=2).measured(stage(tmp_path, [both], model, tokenizer=tokenizer))
    tokens = [sum(label != -100 for label in row["labels"]) for row in (answered, silent)]
    assert found.columns["answered"].tolist() == [1.0] * tokens[0] + [0.0] * tokens[1]


@pytest.mark.parametrize(
    "other", [{"alternatives": 1}, {"max_new_tokens": 2}, {"answer": r"\d"}, {"batch": 5}]
)
def test_a_pass_with_other_options_is_made_anew(tmp_path: Path, other: dict[str, Any]) -> None:
    """All but the size of its batches, which changes nothing."""
    model, tokenizer = tiny.model(), tiny.tokenizer()
    here = stage(tmp_path, rows_of(TEXTS[2:], tokenizer), model, tokenizer=tokenizer)
    for options in ({"max_new_tokens": 1}, {"max_new_tokens": 1, **other}):
        CFT(**options).measured(here)
    assert len(list(tmp_path.glob("cft-*.safetensors"))) == (1 if "batch" in other else 2)


def test_the_mask_is_kept_and_found_in_any_batch(tmp_path: Path) -> None:
    """Proves: CFT (exact), against numbers by hand."""
    model, tokenizer = tiny.model(), tiny.tokenizer()
    rows = rows_of([*TEXTS, ("say", " nothing at all")], tokenizer)
    policy = CFT(max_new_tokens=3)
    here = stage(tmp_path, rows, model, tokenizer=tokenizer)
    table = policy.prepare(here)
    assert model.training  # as it was
    keep, wrong = table.columns["keep"].astype(bool), table.columns["wrong"]
    np.testing.assert_array_equal(keep, wrong == 1)
    silent = len(" nothing at all")
    assert not keep[-silent:].any()  # without an answer no token is critical
    share = 1 - silent / table.tokens
    assert policy.summary["answered_share"] == pytest.approx(share)
    assert policy.summary["kept_share"] == pytest.approx(keep.mean())
    again = CFT(PolicySettings(mode="budget", keep_ratio=0.25), max_new_tokens=3)
    table = again.prepare(here)
    kept = table.columns["keep"].astype(bool)
    batch = padded_batch(rows, 0, "cpu")
    mask = batch["labels"] != -100
    columns = table.columns_of(batch, mask, again.needs.columns)
    of = PolicyBatch(batch, batch["labels"], mask, -mask.double(), [slice(0, 4)], columns)
    assert again.weights(of)[mask].tolist() == kept.tolist()
    assert kept.sum() == -(-table.tokens // 4)
    assert wrong[kept].min() >= wrong[~kept].max()
    files = list(tmp_path.glob("cft-*.safetensors"))
    assert len(files) == 1  # the second policy read it
    assert isinstance(TokenTable.load(files[0]), TokenTable)


@pytest.mark.parametrize(
    ("text", "pattern", "wanted"),
    [
        ("so 3 + 4 = 7", NUMBER, "7"),
        ("it costs 1,250.50 euros", NUMBER, "1250.5"),
        ("-3.0", NUMBER, "-3"),
        ("none", NUMBER, None),
        ("The answer is (B).", r"answer is \((\w)\)", "B"),
        ("answer: yes; answer: no", r"answer: (yes|no)", "no"),
    ],
)
def test_the_last_answer_counts(text: str, pattern: str, wanted: str | None) -> None:
    """Proves: CFT (exact), against numbers by hand."""
    assert final_answer(text, pattern) == wanted


def test_what_it_cannot_read_is_refused(tmp_path: Path) -> None:
    model, tokenizer = tiny.model(), tiny.tokenizer()
    rows = rows_of(TEXTS, tokenizer)
    with pytest.raises(ConfigError, match="no regular expression"):
        CFT(answer="(")
    with pytest.raises(ConfigError, match="no tokenizer"):
        CFT().prepare(stage(tmp_path, rows, model, tokenizer=None))
    silent = rows_of([("say", " nothing at all")], tokenizer)
    with pytest.raises(DataError, match="the rule of cft"):
        CFT(max_new_tokens=2).prepare(stage(tmp_path, silent, model, tokenizer=tokenizer))
    flat = {"input_ids": torch.ones(1, 4, dtype=torch.long), "position_ids": torch.arange(4)[None]}
    here = stage(tmp_path / "flat", rows, model, tokenizer=tokenizer)
    flat["labels"] = flat["input_ids"]
    packed = PolicyStage(**{**vars(here), "row_batch": lambda part: flat})
    with pytest.raises(UnsupportedError, match="padding_free"):
        CFT().prepare(packed)
