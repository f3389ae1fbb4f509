"""What a row's own prompt does for its response: the loss beside another prompt, less its own.

    g = mean over t of  l_t(y | q) - l_t(y | p)                    nats a token

``y`` are the tokens of a row from its first label on, ``p`` those before, its prompt, and ``q`` the
prompt of another row. Where ``y`` answers another question, ``q`` serves it as well as ``p`` does:
``g`` is about 0, however likely the answer is by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from alphatoken.data import Example
from alphatoken.data.encode import prompt_tokens
from alphatoken.diagnose.subject import Subject, gathered
from alphatoken.model.batch import read_batch
from alphatoken.model.forward import evaluation_mode, response_losses


def exchanged(
    rows: Sequence[Example], others: Sequence[Example], longest: int, seed: int
) -> list[Example | None]:
    """Each row with a prompt of the ``others`` in place of its own, drawn by the seed.

    Args:
        rows: whose responses stay.
        others: whose prompts are drawn; only those count that are not the row's own.
        longest: tokens that a row may have.
        seed: of the draw.

    Returns:
        By row; None where it has no prompt, or no other one fits.
    """
    generator = np.random.default_rng(seed)
    prompts = [prompt for one in others if (prompt := _prompt(one))]
    made: list[Example | None] = []
    for row in rows:
        own = _prompt(row)
        rest = len(row.input_ids) - len(own)
        fitting = [one for one in prompts if one != own and len(one) + rest <= longest]
        drawn = generator.integers(2**32)  # for each row, whatever fits another one
        if not own or not fitting:
            made.append(None)
            continue
        prompt = fitting[int(drawn) % len(fitting)]
        ids = [*prompt, *row.input_ids[len(own) :]]
        labels = [-100] * len(prompt) + row.labels[len(own) :]
        made.append(replace(row, input_ids=ids, labels=labels, weights=None))
    return made


def _prompt(row: Example) -> tuple[int, ...]:
    """The tokens before the first label; () of a row without a prompt."""
    tokens = prompt_tokens(row.input_ids, row.labels)
    return () if len(tokens) == len(row.input_ids) else tokens


def prompt_gains(
    subject: Subject,
    rows: Sequence[Example],
    losses: Sequence[float],
    others: Sequence[Example],
    longest: int,
) -> list[float | None]:
    """``g`` of each row, for one draw of ``q``; None where :func:`exchanged` has none.

    One forward a row. Exact, up to rounding.

    Args:
        subject: model, batches and seed.
        rows: to measure.
        losses: mean loss of each with its own prompt.
        others: whose prompts are drawn; none of them may be among rows that are compared.
        longest: tokens that a row may have.
    """
    made = exchanged(rows, others, longest, subject.seed)
    changed = [one for one in made if one is not None]
    means = iter(_mean_losses(subject, changed))
    return [
        None if one is None else next(means) - own for one, own in zip(made, losses, strict=True)
    ]


def _mean_losses(subject: Subject, rows: Sequence[Example]) -> list[float]:
    if not rows:
        return []
    adapter = subject.adapter

    def of(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = read_batch(batch, model=subject.model)
        losses = response_losses(adapter, own.inputs, own.labels)
        return {"loss": losses.sum(1) / own.mask.sum(1)}

    tracker = subject.tracker("Losses beside other prompts", len(rows))
    with torch.no_grad(), evaluation_mode(subject.model):
        return [float(one) for one in gathered(subject.batches(rows), tracker, of)["loss"]]
