"""Directions of retention, proxies and oracle alike, and the scores of tokens along them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.data import Example
from alphatoken.direction.drift import FisherDrift
from alphatoken.errors import CoverageError
from alphatoken.fidelity.per_row import values_along
from alphatoken.fidelity.subject import Subject
from alphatoken.scorer import Scorer

__all__ = [
    "DIAGONALS",
    "TunedModel",
    "fitting",
    "growing_fishers",
    "scores_along",
    "unit_fisher",
    "variants",
]

Numbers = NDArray[Any]
Direction = Mapping[str, Tensor]
_WORKSPACE = 2**28  # numbers of directions held at a time


def unit_fisher(reference: Mapping[str, Tensor]) -> FisherDrift:
    """F = 1: V is the drift W - W_ref itself. The control."""
    ones = {name: torch.ones_like(weight) for name, weight in reference.items()}
    kept = {name: weight.detach().clone() for name, weight in reference.items()}
    return FisherDrift(ones, kept, {"labels": "none"}, exact_names=True)


def growing_fishers(
    subject: Subject, labels: str, sizes: Sequence[int], **options: Any
) -> dict[int, FisherDrift]:
    """Diagonal Fishers on the first n samples, for each n; each sample is drawn once.

    F is a mean over samples, so that of more samples is the weighted mean of the pieces. The draws
    are independent of those of ``subject.fitted_fisher``.
    """
    usable = subject.fisher_rows
    sums: dict[str, Tensor] = {}
    found: dict[int, FisherDrift] = {}
    done = 0
    for size in sizes:
        rows = [usable[i % len(usable)] for i in range(done, size)]
        seed = subject.seed + 1_000_003 + done
        piece = subject.fit_fisher(rows, labels=labels, seed=seed, **options)
        for name, part in piece.fisher.items():
            add = part.double() * len(rows)
            sums[name] = sums[name] + add if name in sums else add
        done = size
        mean = {name: (total / done).to(piece.fisher[name]) for name, total in sums.items()}
        found[size] = FisherDrift(mean, piece.reference, piece.metadata, exact_names=True)
    return found


DIAGONALS = {"sequence": "diagonal", "token": "diagonal, token labels"}
"""Name of the diagonal Fisher by kind of labels, which are responses sampled freely, as the paper
does, or tokens sampled on the given text."""


def fitting(labels: str, max_new_tokens: int) -> dict[str, Any]:
    """Options of a fit with these labels."""
    free = {"max_new_tokens": max_new_tokens} if labels == "sequence" else {}
    return {"labels": labels, **free}


def variants(subject: Subject, max_new_tokens: int) -> tuple[dict[str, FisherDrift], list[str]]:
    """Diagonal and Kronecker Fisher, the diagonal one by token labels too; and what was left out.

    All are fitted on ``subject.fisher_rows``. A Fisher that was given takes the place of the one of
    its structure.
    """
    given, own = subject.fisher, fitting("sequence", max_new_tokens)

    def main(structure: str) -> FisherDrift:
        if given is not None and given.structure == structure:
            return given
        return subject.fitted_fisher(structure, **own)

    found = {"diagonal": main("diagonal")}
    notes = []
    try:
        found["kronecker"] = main("kronecker")
    except CoverageError as problem:
        notes.append(f"No Kronecker Fisher: {str(problem).splitlines()[0]}.")
    found[DIAGONALS["token"]] = subject.fitted_fisher("diagonal", labels="token")
    return found, notes


class TunedModel:
    """The model after fine-tuning, and scores of its tokens along any direction."""

    def __init__(self, subject: Subject, model: nn.Module, batches: Sequence[Any]) -> None:
        self.subject = subject
        self.config = replace(subject.config, objective="stability", preconditioner=None)
        self.scorer = Scorer(model, None, list(batches), self.config)
        self.scorer.warn = False

    def along(self, retention: Any) -> dict[str, Tensor]:
        """V of a Fisher or of retention batches, at this model, by the library's own way."""
        self.scorer.set_retention(retention)
        found = self.scorer.direction.stability
        assert found is not None
        return {name: part.detach().clone() for name, part in found.items()}


def scores_along(
    subject: Subject,
    scorer: Scorer,
    rows: Sequence[Example],
    directions: Mapping[str, Direction],
) -> tuple[dict[str, Numbers], Numbers]:
    """Value of every response token along each direction, flat; and the row of each token.

    One forward and backward a batch for all of them. Equal to the stability component of
    ``Scorer.score`` with that V. Exactness: as the scorer's estimator.
    """
    names = list(directions)
    sizes = [sum(part.numel() for part in directions[name].values()) for name in names]
    at_once = max(1, _WORKSPACE // max(1, *sizes)) if names else 1
    chunks = [names[start : start + at_once] for start in range(0, len(names), at_once)]
    batches = subject.batches(rows)
    scorer.score(batches[0])  # the library's proofs of coverage and isolation, on this model
    tracker = subject.tracker("Scores along retention directions", len(batches))
    blocks: list[Numbers] = []
    for number, batch in enumerate(batches):
        parts = [values_along(scorer, batch, [directions[n] for n in chunk]) for chunk in chunks]
        blocks.append(np.concatenate(parts, axis=1))
        tracker.report(number + 1)
    row = np.repeat(np.arange(len(rows)), [example.response_tokens for example in rows])
    return dict(zip(names, np.concatenate(blocks).T, strict=True)), row
