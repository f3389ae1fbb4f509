"""Planted noise: response tokens replaced by random ones, at known places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from alphatoken.data import Example
from alphatoken.errors import ConfigError
from alphatoken.model.batch import IGNORE

__all__ = ["Planted", "plant"]


@dataclass(frozen=True)
class Planted:
    """Copies of rows with noise in them.

    Attributes:
        rows: input and label are replaced together, so what follows reads the noise too.
        marked: one entry a response token in (row, position) order, True where it was replaced.
    """

    rows: list[Example]
    marked: NDArray[np.bool_]


def plant(rows: Sequence[Example], share: float, alphabet: Sequence[int], seed: int) -> Planted:
    """Replace a share of the response tokens, drawn at random, by others of ``alphabet``.

    Args:
        rows: encoded rows; they are not changed.
        share: in (0, 1); at least one token is replaced.
        alphabet: token ids to draw from, uniformly; the token itself is never drawn.
        seed: of the draw.

    Raises:
        ConfigError: a share outside (0, 1), or an alphabet of fewer than two tokens.
    """
    known = np.unique(np.asarray(alphabet, dtype=np.int64))
    if not 0 < share < 1:
        raise ConfigError("the share of planted noise must lie in (0, 1)", got=repr(share))
    if len(known) < 2:
        raise ConfigError("noise needs at least two different tokens", got=str(len(known)))
    places = [
        (number, index)
        for number, row in enumerate(rows)
        for index in range(1, len(row.labels))
        if row.labels[index] != IGNORE
    ]
    generator = np.random.default_rng(seed)
    count = max(1, round(share * len(places)))
    marked = np.zeros(len(places), dtype=np.bool_)
    marked[generator.choice(len(places), size=count, replace=False)] = True
    inputs = [list(row.input_ids) for row in rows]
    labels = [list(row.labels) for row in rows]
    for place in np.flatnonzero(marked):
        number, index = places[place]
        others = known[known != labels[number][index]]
        inputs[number][index] = labels[number][index] = int(generator.choice(others))
    changed = [
        replace(row, input_ids=ids, labels=marks)
        for row, ids, marks in zip(rows, inputs, labels, strict=True)
    ]
    return Planted(changed, marked)
