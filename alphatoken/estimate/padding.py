"""Look at the padding on the left of a row, which most models do not read, and GPT-2 counts.

With an attention mask alone, positions that are relative (rotary, ALiBi) or counted by the mask
are the same on either side. A model that counts absolute positions from the left edge, or carries
a state through padding, makes other losses of the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alphatoken.errors import AlphaTokenWarning, warn_caller
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.batch_slice import LENGTH, columns_of_row
from alphatoken.model.head import rounding_tolerance
from alphatoken.model.modes import evaluation_mode
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.response_losses import response_losses

__all__ = ["padded_on_the_left", "see_left_padding"]

_PADDING = 8
"""Columns of padding that are shown."""


def padded_on_the_left(batch: LabelledBatch) -> int | None:
    """A row with padding on its left and no ``position_ids``, of which a token has a value."""
    attention = batch.inputs.get("attention_mask")
    if not isinstance(attention, Tensor) or attention.shape != batch.labels.shape:
        return None
    if batch.inputs.get("position_ids") is not None:
        return None
    padded = (attention[:, 0] == 0).to(batch.mask.device) & batch.mask.any(-1)
    return int(padded.long().argmax()) if bool(padded.any()) else None


@torch.no_grad()
def see_left_padding(adapter: DecoderAdapter, batch: LabelledBatch, row: int) -> None:
    """Warn where the losses of a row are others than without its padding, by two short forwards.

    Args:
        adapter: of the model.
        batch: the batch.
        row: one with padding on its left.
    """
    first = int((batch.inputs["attention_mask"][row] != 0).long().argmax())
    response = int(batch.mask[row].long().argmax())
    stop = min(max(first + LENGTH, response + LENGTH // 2), batch.labels.shape[1])
    begin = max(0, first - _PADDING)
    beside, alone = (columns_of_row(batch, row, place, stop) for place in (begin, first))
    if beside is None or alone is None:
        return
    losses = []
    for piece in (beside, alone):
        with evaluation_mode(adapter.model):
            losses.append(response_losses(adapter, piece.inputs, piece.labels).double())
    read = alone.mask
    padded, own = losses[0][:, -read.shape[1] :][read], losses[1][read]
    tolerance = rounding_tolerance(next(adapter.model.parameters()).dtype)
    if not float((padded - own).norm()) > tolerance * (float(own.norm()) + len(own) ** 0.5):
        return
    warn_caller(
        f"{type(adapter.model).__name__} reads the padding on the left of a row: the mean loss of "
        f"row {row} is {float(padded.mean()):.4g} beside it, and {float(own.mean()):.4g} without "
        "(it counts positions from the left edge, or carries a state through padding). Values are "
        "of the batch as it is: pass position_ids that count tokens from 0, or pad on the right.",
        AlphaTokenWarning,
    )
