"""Limits of prompt and response apart, as TRL had them and the paper names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset

from alphatoken.cli import main
from alphatoken.cli.arguments import read_arguments
from alphatoken.cli.training_rows import load_run_data
from alphatoken.data.pairs import is_longer
from alphatoken.errors import AlphaTokenWarning, ConfigError, InputError
from alphatoken.train.dpo import AlphaDPOConfig, AlphaDPOTrainer
from alphatoken.train.python_rows import read_pairs
from tests.integration import tiny_training as tiny
from tests.integration.tiny_training import model, options, preference_rows, tokenizer
from tests.rows import jsonl

LIMITS: dict[str, Any] = {"max_prompt_length": 5, "max_response_length": 9}
DROPPED = "1 of 9 training rows left out: no response token within max_length=64"
PARTS = ("prompt_ids", "chosen_ids", "rejected_ids")


def trainer(folder: Path, rows: Any, **more: Any) -> Any:
    own = {"policy": "all", "export_values": False, "max_steps": 2, **more}
    return tiny.made(AlphaDPOTrainer, folder, ref_model=model(), train_dataset=rows, **own)


def test_a_prompt_keeps_its_end_and_a_response_its_start(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", preference_rows(8)).train_dataset
    cut = trainer(tmp_path / "cut", preference_rows(8), **LIMITS)
    for before, after in zip(whole, cut.train_dataset, strict=True):
        assert len(before["prompt_ids"]) > 5, "no prompt of these is long: nothing was cut"
        assert after["prompt_ids"] == before["prompt_ids"][-5:]
        for name in PARTS[1:]:
            assert after[name] == before[name][:9]
    assert any(len(row["rejected_ids"]) > 9 for row in whole)
    cut.train()
    assert cut.state.global_step == 2


def test_a_prompt_that_fills_the_length_is_cut_and_not_dropped(tmp_path: Path) -> None:
    """TRL drops it where its own limit, of both together, is the only one."""
    rows = [*preference_rows(8), {"prompt": "1" * 70, "chosen": " yes", "rejected": " no"}]
    with pytest.warns(AlphaTokenWarning, match=DROPPED):
        assert len(trainer(tmp_path / "one", Dataset.from_list(rows)).train_dataset) == 8
    both = trainer(tmp_path / "two", Dataset.from_list(rows), **LIMITS).train_dataset
    assert len(both) == 9
    assert len(both[8]["prompt_ids"]) == 5


def test_validation_rows_and_streams_are_cut_alike(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", preference_rows(8), **LIMITS)
    (row, *_) = made.tokenised(preference_rows(2, seed=5), "validation")
    assert len(row["prompt_ids"]) == 5
    stream = IterableDataset.from_generator(lambda: iter(preference_rows(4)))
    assert [len(row["prompt_ids"]) for row in made.tokenised(stream, "streamed")] == [5] * 4


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_of_nothing_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
        AlphaDPOConfig(**options(tmp_path, **{name: 0}))
    AlphaDPOConfig(**options(tmp_path, **{name: 1}))


def test_a_limit_above_max_length_leaves_max_length(tmp_path: Path) -> None:
    """A prompt of 70 tokens cut to 68 would still fill a length of 64."""
    rows = [*preference_rows(8), {"prompt": "1" * 70, "chosen": " yes", "rejected": " no"}]
    with pytest.warns(AlphaTokenWarning, match=DROPPED):
        made = trainer(tmp_path, Dataset.from_list(rows), max_prompt_length=68)
    assert len(made.train_dataset) == 8


def test_long_prompts_are_bad_rows_unless_they_are_to_be_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [*preference_rows(12), {"prompt": "1" * 90, "chosen": " yes", "rejected": " no"}]
    jsonl(file, rows)
    words = [
        "--train_file", str(file), "--use_cpu", "--bf16", "false", "--validation_rows", "2",
        "--output_dir", str(tmp_path / "out"), "--max_length", "80", "--max_prompt_length", "60",
    ]  # fmt: skip

    def left(*more: str) -> int:
        caplog.clear()
        arguments = read_arguments("dpo", [*words, *more], AlphaDPOConfig)
        return len(load_run_data(arguments, tokenizer())[0]["train_dataset"])

    assert left() == 10
    assert "longer than 60 tokens" in caplog.text
    assert left("--long_prompts", "cut") == 11
    assert "longer than" not in caplog.text


SAME = {"prompt": "12+3=?", "chosen": " it is fifteen", "rejected": " it is five"}
"""Equal within 5 tokens of a response, and within 12 tokens of the whole."""
CUTS: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 12},
    "max_response_length": {"max_response_length": 5},
    "both": {"max_length": 9, "max_prompt_length": 4},
}


@pytest.mark.parametrize("kind", CUTS)
def test_a_pair_that_is_equal_as_cut_is_left_out(kind: str, tmp_path: Path) -> None:
    """Its two gradients cancel, and a mask would make noise of them."""
    rows = [{**SAME, "rejected": " no"}, SAME, {**SAME, "prompt": "9", "chosen": " yes"}]
    limit = CUTS[kind]
    cause = f"equal within {', '.join(f'{n}={v}' for n, v in limit.items())}"
    with pytest.warns(AlphaTokenWarning, match=rf"1 of 3 training rows left out: .*{cause}.*row 1"):
        made = trainer(tmp_path, rows, **{"max_length": None, **limit})
    assert [row["prompt_ids"] for row in made.train_dataset] != []
    assert len(made.train_dataset) == 2
    with pytest.raises(InputError, match=cause):
        trainer(tmp_path, rows, **{"max_length": None, **limit}, on_empty="error")


def test_a_pair_of_messages_is_compared_as_the_template_writes_it(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    said = {role: [{"role": "assistant", "content": SAME[role]}] for role in ("chosen", "rejected")}
    asked = [{"role": "user", "content": SAME["prompt"]}]
    whole = {role: [*asked, *own] for role, own in said.items()}
    for number, row in enumerate([{"prompt": asked, **said}, whole]):
        # Written before the response: "u12+3=?</s>a", 9 tokens; the responses share 9 more.
        for limit, left in ((18, 0), (19, 1)):
            how = {"args": AlphaDPOConfig(**options(tmp_path, max_length=limit, on_empty="error"))}
            how["processing_class"] = words
            if left:
                assert len(read_pairs([row], "training", how)) == 1
            else:
                with pytest.raises(InputError, match="equal within max_length=18"):
                    read_pairs([row], f"training {number}", how)


def test_texts_of_the_same_tokens_are_equal(tmp_path: Path) -> None:
    args = AlphaDPOConfig(**options(tmp_path, on_empty="error"))
    row = {**SAME, "chosen": " \u00e4", "rejected": " \u00f6"}  # neither is in the vocabulary
    with pytest.raises(InputError, match="are the same tokens"):
        read_pairs([row], "training", {"args": args, "processing_class": tokenizer()})


def test_what_is_left_at_the_end_is_compared_where_ends_are_kept(tmp_path: Path) -> None:
    row = {"prompt": "1", "chosen": " yes it is so", "rejected": " no it is so"}
    for limit, left in ((9, 0), (11, 1)):
        args = AlphaDPOConfig(**options(tmp_path, max_length=limit, on_empty="error"))
        args.truncation_mode = "keep_end"
        how = {"args": args, "processing_class": tokenizer()}
        if left:
            assert len(read_pairs([row], "training", how)) == 1
        else:
            with pytest.raises(InputError, match="equal within max_length=9"):
                read_pairs([row], "training", how)


def test_the_command_line_leaves_pairs_out_that_are_equal_as_cut_and_counts_cut_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "pairs.jsonl"
    jsonl(file, [{**SAME, "rejected": " no"}, SAME, {**SAME, "prompt": "9", "chosen": "5"}])
    limits = ["--max_length", "64", "--max_response_length", "5"]
    words = ["--train_file", str(file), "--use_cpu", "--bf16", "false", "--validation_rows", "0"]
    words += ["--policy", "standard"]
    words += ["--output_dir", str(tmp_path / "out"), *limits]
    arguments = read_arguments("dpo", words, AlphaDPOConfig)
    data, notes = load_run_data(arguments, tokenizer())
    assert len(data["train_dataset"]) == 2
    assert "equal within max_length=64, max_response_length=5 (pairs.jsonl, line 2)" in caplog.text
    # 10 tokens of " it is fifteen" with its end, and 7 of " it is five".
    assert notes == [
        "2 of 2 training rows longer than max_length=64, max_response_length=5: 17 tokens cut."
    ]


def test_what_a_template_writes_before_a_short_prompt_counts() -> None:
    words = tokenizer()
    words.chat_template = "1" * 120 + "{{ messages[0]['content'] }}"
    prompt = [{"role": "user", "content": "2"}]
    assert is_longer(prompt, words, 120)
    assert not is_longer(prompt, words, 121)
    assert not is_longer("2" * 5, words, 5)


def test_a_limit_of_pairs_is_no_option_of_sft(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--config", "laptop-sft", "--max_prompt_length", "9"]) == 2
    assert "there is no such option" in capsys.readouterr().err
