"""kronfluence's pairwise scores without curvature (strategy "identity"), by its own Analyzer.

It keeps each position's input and aggregated output error of the tracked linears, and contracts
them with the query gradient. Per token that is the column sum of Psi (path), summed over the row
the dot product of the row's gradient. The query is the *sum* of the validation losses, aggregated
over the query set; the sum is divided by the number of response tokens afterwards. With the mean
loss of each batch as measurement, batches with unequally many tokens would get unequal weights.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.peers.autograd import concatenated
from benchmarks.peers.peer import Batch, Peer, Run, Work, forward_losses


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of a batch as a map-style data set."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[index] for key, value in self.batch.items()}


@contextmanager
def its_warnings_off() -> Iterator[None]:
    """kronfluence 1.0.1 uses torch's old name of the gradient scaler, which warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def task_of(places: list[str]) -> Any:
    """Summed token losses on both sides; the scored linears are tracked."""
    from kronfluence.task import Task

    class SummedLoss(Task):
        def compute_train_loss(self, batch: Any, model: Any, sample: bool = False) -> Tensor:
            return forward_losses(model, batch).sum()

        def compute_measurement(self, batch: Any, model: Any) -> Tensor:
            return forward_losses(model, batch).sum()

        def get_influence_tracked_modules(self) -> list[str]:
            return places

    return SummedLoss()


def pairwise(work: Work, *, per_token: bool) -> Run:
    """Values by position (b, t), or by row (b,)."""
    with its_warnings_off():
        from kronfluence.analyzer import Analyzer, prepare_model
        from kronfluence.arguments import FactorArguments, ScoreArguments
    task = task_of(work.places)
    dtype = next(work.model.parameters()).dtype
    model = prepare_model(work.own_model(), task)
    train, query = Rows(dict(work.batch)), Rows(concatenated(list(work.validation)))
    analyzer = Analyzer(
        "peer",
        model,
        task,
        cpu=True,
        log_level=logging.ERROR,
        disable_tqdm=True,
        output_dir=str(work.scratch),
    )
    with its_warnings_off():
        analyzer.fit_all_factors(
            "plain",
            train,
            per_device_batch_size=len(train),
            factor_args=FactorArguments(strategy="identity"),
        )
    arguments = ScoreArguments(
        compute_per_token_scores=per_token,
        aggregate_query_gradients=True,
        per_sample_gradient_dtype=dtype,
        precondition_dtype=dtype,
        score_dtype=dtype,
    )

    def run() -> Tensor:
        with its_warnings_off(), torch.enable_grad():
            analyzer.compute_pairwise_scores(
                "scores",
                "plain",
                query,
                train,
                per_device_query_batch_size=len(work.validation[0]["input_ids"]),
                per_device_train_batch_size=len(train),
                score_args=arguments,
                overwrite_output_dir=True,
            )
        scores = analyzer.load_pairwise_scores("scores")
        assert scores is not None
        values: Tensor = scores["all_modules"][0]
        return values / work.count

    return run


PEERS = (
    Peer(
        "kronfluence",
        "one value a row: pairwise scores, strategy identity, queries aggregated",
        "sample",
        partial(pairwise, per_token=False),
        requires=("kronfluence",),
    ),
    Peer(
        "kronfluence_token",
        "compute_per_token_scores, strategy identity: path values",
        "path",
        partial(pairwise, per_token=True),
        requires=("kronfluence",),
    ),
)
