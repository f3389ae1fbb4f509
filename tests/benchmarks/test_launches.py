"""Kernels and waits of a step: the counts that an accelerator would be given, held on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from alphatoken.direction import algebra
from alphatoken.estimate import temporary_weights
from alphatoken.estimate.label import Label
from alphatoken.model import forward, head
from alphatoken.score import job
from alphatoken.support import devices
from alphatoken.train import records, trainer_loss, valuation
from alphatoken.train.valuation import Valuation
from benchmarks.launches import STEPS, scored_corpus

DEPTH = 4
"""Layers, in place of SmolLM2's 30."""

COUNTS = {
    "trl": (745, 9),
    "all": (745, 9),
    "top": (1773, 14),
    "label": (1843, 16),
    "walk": (1100, 13),
    "observe": (1071, 9),
    "observe-label": (858, 11),
}
"""Kernels and waits by step. They are the same in each run; other releases of torch, transformers
and TRL may launch a few more or fewer."""
TOLERANCE = 0.03


def counted(name: str) -> tuple[int, int]:
    counts = STEPS[name][1](depth=DEPTH)
    return counts.kernels.total(), counts.waits.total()


@pytest.mark.parametrize("name", COUNTS)
def test_a_step_launches_what_it_did(name: str) -> None:
    kernels, waits = counted(name)
    assert abs(kernels / COUNTS[name][0] - 1) <= TOLERANCE, f"{kernels} kernels"
    assert waits == COUNTS[name][1]


def test_a_corpus_is_batched_by_length_and_tokenised_once(library_decoder: Path) -> None:
    counts = scored_corpus(library_decoder, count=40)
    # Batches in the order of the file take 1.22; both depend on the rows of this Python's library.
    assert counts.positions < 1.15
    assert counts.waits == 6
    # The four validation rows twice: with the training rows they are compared by their tokens.
    assert counts.tokenised == pytest.approx(48 / 44)


def test_rows_beyond_what_is_kept_are_tokenised_again(library_decoder: Path) -> None:
    """As in other processes: the survey of all rows and their valuing each tokenise them."""
    with mock.patch.object(job, "MOST_TOKENS", 100):
        counts = scored_corpus(library_decoder, count=24)
    assert 1.7 < counts.tokenised <= 2  # validation rows once


def one_by_one(tensors: Any, order: float = 2.0) -> Any:
    for name, tensor in tensors.items():
        yield [name], tensor.norm(order)[None]


def read_at_once(bad: Any, raise_error: Callable[[], None]) -> None:
    if bool(bad):
        raise_error()


def drawn_anew(self: Valuation, pool: Any, rows: Any, step: int) -> Any:
    return self._batches(rows, pool.rows(step))


MENDS: dict[str, tuple[str, list[tuple[Any, str, Any]]]] = {
    "validation rows in one pass": ("top", [(valuation, "tokens_beside_weights", lambda *_: 0)]),
    "validation rows read once": ("top", [(Valuation, "_checked", lambda self, batch: batch)]),
    "rows drawn once": ("top", [(Valuation, "_draw", drawn_anew)]),
    "refusals read together": ("top", [(devices, "is_deferred", lambda bad: False)]),
    "places of tokens known": ("top", [(trainer_loss, "remember_places", lambda *_: None)]),
    "blocks of logits by device": ("observe", [(head, "_WORKSPACE_OF_ACCELERATOR", 2**18)]),
    "ledger written at times": ("top", [(records, "_UNWRITTEN", 1)]),
    "norms of lists": ("label", [(algebra, "norms_by_kind", one_by_one)]),
    "moves of lists": ("observe-label", [(temporary_weights, "on_host", lambda _: True)]),
    "head shared where it is used": ("label", [(Label, "shares_head", True)]),
    "checkpointing left on": ("label", [(forward, "checkpoints", lambda _: False)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("mend", MENDS)
def test_a_mend_that_is_taken_back_is_noticed(mend: str) -> None:
    name, patches = MENDS[mend]
    with ExitStack() as stack:
        for place, attribute, value in patches:
            stack.enter_context(mock.patch.object(place, attribute, value))
        kernels, waits = counted(name)
    apart = abs(kernels / COUNTS[name][0] - 1) > TOLERANCE
    assert apart or waits > COUNTS[name][1], f"{kernels} kernels, {waits} waits"
