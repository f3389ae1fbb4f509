"""``score`` and ``sft`` make the same tokens and labels of a row: one function makes both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from alphatoken.cli.arguments import read_arguments
from alphatoken.cli.training_rows import RowReader
from alphatoken.data import EncodeOptions, encode_rows, read_rows
from alphatoken.train import AlphaSFTConfig
from tests.integration.test_data import CHATML
from tests.rows import jsonl

SAID = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "\nb", "weight": 0},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "\n\na"},
]
ROWS = [
    {"prompt": "ab", "response": "\nba"},
    {"prompt": "a\n", "response": "\n"},
    {"system": "b", "instruction": "a", "input": "b\n", "output": "\nab"},
    {"question": "b", "answer": "\na"},
    {"prompt": SAID[:1], "completion": [{"role": "assistant", "content": "\nab"}]},
    {"messages": SAID},
    {"text": "ab\n\nba"},
]
MARKED = CHATML.replace("<|im_end|>\n", "<|im_end|>{{ '\\n' }}").replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}",
)


def merging_tokenizer(template: str | None) -> Any:
    """Bytes, and merges that reach over the border of prompt and response."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [("Ċ", "Ċ"), ("a", "b"), ("b", "Ċ"), ("bĊ", "ĊĊ"), ("ĊĊ", "a"), ("Ċ", "b")]
    words = ["</s>", "<|im_start|>", "<|im_end|>", *alphabet, *(x + y for x, y in pieces)]
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(words)}, pieces))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("turns", ["all", "last"])
@pytest.mark.parametrize("template", [None, CHATML, MARKED], ids=["plain", "chat", "generation"])
def test_score_and_sft_make_the_same_tokens_and_labels(
    tmp_path: Path, template: str | None, turns: str
) -> None:
    file = str(jsonl(tmp_path / "rows.jsonl", ROWS))
    tokenizer = merging_tokenizer(template)
    how = EncodeOptions(turns=turns, on_empty="skip")
    scored, report = encode_rows(read_rows(file), tokenizer, how)
    words = ["--train_file", file, "--turns", turns, "--use_cpu",
             "--bf16", "false", "--output_dir", str(tmp_path / "out")]  # fmt: skip
    reader = RowReader(read_arguments("sft", words, AlphaSFTConfig), tokenizer)
    trained = reader.dataset(reader.training_rows())
    assert [row["input_ids"] for row in trained] == [one.input_ids for one in scored]
    assert [row["labels"] for row in trained] == [one.labels for one in scored]
    assert report.skipped_empty == len(ROWS) - len(trained)
