"""Directions of retention, proxies and oracle alike, and the scores of tokens along them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.direction.drift import FisherDrift
from alphatoken.errors import CoverageError
from alphatoken.fidelity.subject import Subject
from alphatoken.scorer import Scorer

__all__ = [
    "TunedModel",
    "unit_fisher",
    "variants",
]


def unit_fisher(reference: Mapping[str, Tensor]) -> FisherDrift:
    """F = 1: V is the drift W - W_ref itself. The control."""
    ones = {name: torch.ones_like(weight) for name, weight in reference.items()}
    kept = {name: weight.detach().clone() for name, weight in reference.items()}
    return FisherDrift(ones, kept, {"labels": "none"})


def variants(subject: Subject, max_new_tokens: int) -> tuple[dict[str, FisherDrift], list[str]]:
    """Diagonal and Kronecker Fisher, the diagonal one by token labels too; and what was left out.

    All are fitted on ``subject.fisher_rows``. A Fisher that was given takes the place of the one of
    its structure.
    """
    given, own = subject.fisher, {"labels": "sequence", "max_new_tokens": max_new_tokens}

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
    found["diagonal, token labels"] = subject.fitted_fisher("diagonal", labels="token")
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
