"""``score`` and ``sft`` make the same tokens and labels of a row: one function makes both."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphatoken.cli.arguments import read_arguments
from alphatoken.cli.training_rows import RowReader
from alphatoken.data import EncodeOptions, encode_rows, read_rows
from alphatoken.train import AlphaSFTConfig
from tests.integration.test_data import CHATML, byte_tokenizer
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


MERGES = [("Ċ", "Ċ"), ("a", "b"), ("b", "Ċ"), ("bĊ", "ĊĊ"), ("ĊĊ", "a"), ("Ċ", "b")]
"""They reach over the border of prompt and response."""


@pytest.mark.parametrize("turns", ["all", "last"])
@pytest.mark.parametrize("template", [None, CHATML, MARKED], ids=["plain", "chat", "generation"])
def test_score_and_sft_make_the_same_tokens_and_labels(
    tmp_path: Path, template: str | None, turns: str
) -> None:
    file = str(jsonl(tmp_path / "rows.jsonl", ROWS))
    tokenizer = byte_tokenizer(template, merges=MERGES)
    how = EncodeOptions(turns=turns, on_empty="skip")
    scored, report = encode_rows(read_rows(file), tokenizer, how)
    words = ["--train_file", file, "--turns", turns, "--use_cpu",
             "--bf16", "false", "--output_dir", str(tmp_path / "out")]  # fmt: skip
    reader = RowReader(read_arguments("sft", words, AlphaSFTConfig), tokenizer)
    trained = reader.dataset(reader.training_rows())
    assert [row["input_ids"] for row in trained] == [one.input_ids for one in scored]
    assert [row["labels"] for row in trained] == [one.labels for one in scored]
    assert report.skipped_empty == len(ROWS) - len(trained)
