"""bergson's gradient dot products, in memory: no projection, no preconditioner, no normaliser.

Rows and tokens are scored by ``InMemoryCollector`` with a ``Scorer`` against the summed validation
gradient (``aggregation="sum"``, ``loss_reduction="sum"``), divided by the number of response tokens
afterwards. Its ``attribute_tokens`` rows are ``g_t (x) a_t``: the column sums of Psi (path). Its
``token_influence="output"`` is a forward-mode pass along the query: the label values, as ours.

As its own worker does, everything is frozen but the input embedding, so that the backward runs
through all layers; "output" takes eager attention. It accumulates in float32 whatever the model's
dtype, takes rows without padding, and pads on the right.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.peer import Batch, Peer, Run, Work, unpadded


@contextmanager
def quiet() -> Iterator[None]:
    """Without its progress bars and notices."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


class Bergson:
    """A model, its tracked modules and its folder, ready to collect."""

    def __init__(self, work: Work, *, tokens: bool, attention: str | None = None) -> None:
        from bergson import IndexConfig

        self.work = work
        places = work.places  # of trainable linears, so before anything is frozen
        self.model = work.own_model()
        if attention is not None:
            self.model.set_attn_implementation(attention)
        self.model.requires_grad_(False)
        self.model.get_input_embeddings().requires_grad_(True)
        prefix = f"{self.model.base_model_prefix}."
        self.places = [place.removeprefix(prefix) for place in places]
        path = f"{work.scratch}/run"
        self.rows = IndexConfig(run_path=path)
        self.tokens = IndexConfig(run_path=path, attribute_tokens=tokens)
        self.rows.partial_run_path.mkdir()

    def data(self, batch: Batch) -> Any:
        from datasets import Dataset

        ids, labels, _ = unpadded(batch)
        return Dataset.from_dict(
            {"input_ids": ids, "labels": labels, "length": [len(row) for row in ids]}
        )

    def collect(self, batch: Batch, config: Any, **how: Any) -> Any:
        """Its collector after one forward and backward over the batch."""
        from bergson import CollectorComputer, InMemoryCollector

        data = self.data(batch)
        collector = InMemoryCollector(
            model=self.model.base_model,
            cfg=config,
            data=data,
            target_modules=set(self.places),
            **how,
        )
        CollectorComputer(
            self.model, data, collector=collector, batches=[list(range(len(data)))], cfg=config
        ).run_with_collector_hooks("gradients")
        return collector

    def query(self) -> dict[str, Tensor]:
        """Summed validation gradient, place -> (1, d_out * d_in)."""
        from bergson import PreprocessConfig

        total: dict[str, Tensor] = {}
        for batch in self.work.validation:
            summed = PreprocessConfig(aggregation="sum")
            gradients = self.collect(batch, self.rows, preprocess_cfg=summed).gradients
            total = {
                p: total[p] + gradients[p] if total else gradients[p].clone() for p in self.places
            }
        return total

    def scorer(self, query: dict[str, Tensor], writer: Any, *, tokens: bool) -> Any:
        from bergson import Scorer

        device = torch.device("cpu")
        return Scorer(query, self.places, writer, device, torch.float32, attribute_tokens=tokens)


def by_row(work: Work) -> Run:
    """(b,): dot products of the rows' gradients with the query."""
    from bergson.score.score_writer import InMemorySequenceScoreWriter

    bergson = Bergson(work, tokens=False)

    def run() -> Tensor:
        with quiet(), torch.enable_grad():
            writer = InMemorySequenceScoreWriter(len(work.batch["input_ids"]), 1)
            scorer = bergson.scorer(bergson.query(), writer, tokens=False)
            scores: Tensor = bergson.collect(work.batch, bergson.rows, scorer=scorer).scores
        return scores[:, 0] / work.count

    return run


def by_position(work: Work) -> Run:
    """(b, t) by position of use: ``attribute_tokens`` with ``token_influence="gradient"``."""
    from bergson.score.score_writer import InMemoryTokenScoreWriter

    bergson = Bergson(work, tokens=True)
    _, _, starts = unpadded(work.batch)

    def run() -> Tensor:
        with quiet(), torch.enable_grad():
            writer = InMemoryTokenScoreWriter(bergson.data(work.batch), 1)
            scorer = bergson.scorer(bergson.query(), writer, tokens=True)
            scores = bergson.collect(work.batch, bergson.tokens, scorer=scorer).scores
        values = torch.zeros(work.batch["labels"].shape)
        for row, (start, row_scores) in enumerate(zip(starts, scores, strict=True)):
            values[row, start : start + len(row_scores)] = row_scores[:, 0]
        return values / work.count

    return run


def by_output(work: Work) -> Run:
    """(b, t) at the token index: ``token_influence="output"``."""
    from bergson import GradientCollector
    from bergson.data import pad_and_tensor
    from bergson.score.output_influence import output_token_influence, query_directions

    bergson = Bergson(work, tokens=True, attention="eager")
    ids, labels, starts = unpadded(work.batch)

    def run() -> Tensor:
        with quiet(), torch.enable_grad():
            query = {place: g.T for place, g in bergson.query().items()}
            targets = GradientCollector.discover_targets(
                bergson.model.base_model, set(bergson.places)
            )
            directions = query_directions(bergson.model, query, targets)
            x, y, _, _ = pad_and_tensor(ids, labels, sync_max_len=False)
            rates, _ = output_token_influence(bergson.model, x, y, directions, bergson.tokens)
        values = torch.zeros(work.batch["labels"].shape)
        for row, (start, tokens) in enumerate(zip(starts, ids, strict=True)):
            values[row, start + 1 : start + len(tokens)] = rates[row, : len(tokens) - 1, 0]
        return values / work.count

    return run


FLOAT32 = (1e-5, 1e-4)  # it sums in float32, for a float64 model too

PEERS = (
    Peer(
        "bergson",
        "one value a row: gradient dot product, no projection, no preconditioner",
        "sample",
        by_row,
        requires=("bergson", "datasets"),
        tolerance=FLOAT32,
    ),
    Peer(
        "bergson_gradient",
        'attribute_tokens with token_influence="gradient": path values',
        "path",
        by_position,
        requires=("bergson", "datasets"),
        tolerance=FLOAT32,
    ),
    Peer(
        "bergson_output",
        'attribute_tokens with token_influence="output": label values by forward mode',
        "label",
        by_output,
        requires=("bergson", "datasets"),
        tolerance=FLOAT32,
    ),
)
