"""Walk values from log-probabilities that any inference engine wrote; no model runs here.

    python examples/walk_from_logprobs.py before.parquet after.parquet --model MODEL --out values

The value of token i is log p_after(z_i | z_<i) - log p_before(z_i | z_<i). Both files have one row
for each example, in the same order, with lists ``input_ids``, ``labels`` (-100 where nothing is
valued) and ``logprobs`` (entry i of token i). Two engines write them as follows; we ran neither.

vLLM returns a mapping for each position but the first::

    rows = pyarrow.parquet.read_table("values/values", columns=["input_ids", "labels"]).to_pylist()
    llm = vllm.LLM("./model")  # then the same with the model after the walk
    options = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": row["input_ids"]} for row in rows], options)
    for row, output in zip(rows, outputs):
        pairs = zip(row["input_ids"], output.prompt_logprobs)
        row["logprobs"] = [None if at is None else at[token].logprob for token, at in pairs]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "before.parquet")

SGLang returns triples of log-probability, token and text::

    outputs = sglang.Engine(model_path="./model").generate(
        input_ids=[row["input_ids"] for row in rows],
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
    )
    for row, output in zip(rows, outputs):
        row["logprobs"] = [one[0] for one in output["meta_info"]["input_token_logprobs"]]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from alphatoken.data import token_texts
from alphatoken.score import ScoredExample, summarise, write_report, write_values
from alphatoken.score.values import responses
from alphatoken.select.masks import top_mask


def subtract(before: Path, after: Path, ratio: float) -> Iterator[ScoredExample]:
    """Examples with their values; of each row the share ``ratio`` of its best tokens is kept."""
    pairs = zip(*(pq.read_table(path).to_pylist() for path in (before, after)), strict=True)
    for row, (first, second) in enumerate(pairs):
        ids, labels = first["input_ids"], first["labels"]
        if (ids, labels) != (second["input_ids"], second["labels"]):
            raise ValueError(f"row {row}: the two files are not of the same tokens")
        response, place = responses(labels), f"row {row}"
        change = np.subtract(*(np.array(one["logprobs"], float) for one in (second, first)))
        if not np.isfinite(change[response]).all():
            raise ValueError(f"row {row}: a log-probability is missing, NaN or infinite")
        values, kept = np.where(response, change, 0.0), np.zeros(len(ids), bool)
        kept[response] = top_mask(values[response], ratio)
        columns = {"total": values, "adaptation": values}
        yield ScoredExample(first.get("row", row), place, [], ids, labels, kept, columns)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    for name in ("before", "after"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True, help="whose tokenizer made the tokens")
    parser.add_argument("--ratio", type=float, default=0.5)
    options = parser.parse_args(arguments)
    scored = list(subtract(options.before, options.after, options.ratio))
    options.out.mkdir(parents=True, exist_ok=True)
    write_values(options.out / "part-00000.parquet", scored)
    texts = partial(token_texts, AutoTokenizer.from_pretrained(options.model))
    write_report(options.out / "report.html", summarise(scored, texts=texts))


if __name__ == "__main__":
    main()
