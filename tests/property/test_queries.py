"""Values against several queries in one run, against the oracle's for each of them alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from alphatoken.data import collate
from alphatoken.oracle.gradients import label_values, validation_gradient
from alphatoken.score import read_values
from alphatoken.score.job import prepare_job
from alphatoken.score.options import ScoreOptions
from alphatoken.score.run import value_block
from tests.integration.small_world import make_model, make_tokenizer
from tests.property.tolerance import close
from tests.rows import jsonl

ROWS = [
    {"prompt": f"add : {n} and 3", "response": f"{n} plus 3 is {n + 3} ."} for n in range(4)
] + [{"prompt": "ends of : e a g c d", "response": "the first is e and the last is d ."}]
QUERIES = ["2 plus 3 is 5 .", json.dumps(ROWS[-1]), "the sorted list is 1 2 ."]

SINGLE = 1e-4
"""Of the largest value: the run is in float32, the oracle in float64."""


def _options(folder: Path) -> ScoreOptions:
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return ScoreOptions(
        model_name_or_path=str(folder / "model"),
        train_file=str(jsonl(folder / "train.jsonl", ROWS)),
        output_dir=str(folder / "out"),
        estimator="label",
        layers="2",
        query=QUERIES,
        per_device_train_batch_size=2,
        quiet=True,
    )


def test_each_query_has_the_values_that_it_has_alone() -> None:
    """``query_q`` is ``<grad l_k, grad J_q>``, J_q the mean token loss of query q; adaptation is
    their mean by the queries' tokens; a training row that repeats a query stays.

    Proves: each query has the values that it has alone (exact), against ``label_values``,
    ``validation_gradient``.
    """
    with tempfile.TemporaryDirectory() as name:
        job = prepare_job(_options(Path(name)))
        job.value_file(0).parent.mkdir(parents=True)
        scorer = job.scorer()
        value_block(job, scorer, 0)
        scored = list(read_values(job.value_file(0)))
        names = set(scorer.parameters)
        batches = [collate([example]) for example in job.corpus.examples()]
    assert [example.row for example in scored] == list(range(len(ROWS)))
    model = job.model.double()

    def forward(batch: Mapping[str, Tensor]) -> Tensor:
        arguments = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits: Tensor = model(**arguments).logits
        return logits

    parameters = {n: p for n, p in model.named_parameters() if n in names}
    counts = [query.response_tokens for query in job.validation]
    due = {}
    for number, query in enumerate(job.validation):
        gradient = validation_gradient(model, forward, collate([query]), parameters)
        due[f"query_{number + 1}"] = [
            label_values(model, forward, batch, gradient)[0] for batch in batches
        ]
    for index, example in enumerate(scored):
        own = {key: torch.from_numpy(example.values[key]).double() for key in due}
        size = max(float(values.abs().max()) for per in due.values() for values in per)
        scale = torch.full((len(example.ids),), size)
        for key, per_row in due.items():
            close(own[key], per_row[index], scale, SINGLE, name=f"{key}, row {index}")
        mean = sum(n * own[key] for n, key in zip(counts, due, strict=True)) / sum(counts)
        for key in ("adaptation", "total"):
            values = torch.from_numpy(example.values[key]).double()
            close(values, mean, scale, SINGLE, name=f"{key}, row {index}")
