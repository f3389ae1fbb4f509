"""A few short rows of a batch, on which a proof costs little.

A slice has at most ``ROWS`` rows of at most ``LENGTH`` neighbouring positions. Masks,
``position_ids`` and other inputs that have one entry a token, or one a pair of tokens, are cut as
the tokens are, and so are the bounds of a packed row's documents (``cu_seq_lens_q``). An input of
another shape is not understood: then whole rows are taken where it has one entry a row, and the
whole batch where it has not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from alphatoken.model.batch import IGNORE, LabelledBatch

ROWS = 2
"""Rows of a slice. Two, because some kernels read a single packed row in a way of its own."""

LENGTH = 32
"""Positions of each row of a slice."""


def real_tokens(batch: LabelledBatch) -> Bool[Tensor, "b t"]:
    """True at tokens that are no padding; all of them where no mask (b, t) marks any."""
    attention = batch.inputs.get("attention_mask")
    if isinstance(attention, Tensor) and attention.dim() == 2:
        return attention != 0
    return torch.ones_like(batch.labels, dtype=torch.bool)


def around_responses(batch: LabelledBatch) -> LabelledBatch:
    """Positions that end at a response token with as many tokens before it as there are.

    Of each row the response token is taken that can be reached from the most positions of its own
    document, and of the batch the rows in which they are the most, up to ``LENGTH``. If any token
    of the batch is predicted from a position that has another before it, so is one of the slice.
    """
    places = torch.arange(batch.labels.shape[1], device=batch.labels.device)
    # Where the document of each position begins: at 0, after padding, or behind another one.
    real, starts = real_tokens(batch), batch.document_starts
    first = real & ~F.pad(real[:, :-1], (1, 0), value=False)
    first = first if starts is None else first | starts
    begun = torch.where(first, places, 0).cummax(-1).values
    offsets = torch.where(batch.mask, places - begun, -1)
    most, last = offsets.max(-1)
    return _cut(batch, most.clamp(max=LENGTH), last + 1)


def around_documents(batch: LabelledBatch) -> LabelledBatch:
    """Positions around the start of a row's last document, of rows that have several."""
    starts = batch.document_starts
    assert starts is not None
    places = torch.arange(starts.shape[1], device=starts.device)
    last = torch.where(starts, places, 0).amax(-1)
    return _cut(batch, (last > 0).long(), last + LENGTH // 2)


def columns_of_row(batch: LabelledBatch, row: int, begin: int, stop: int) -> LabelledBatch | None:
    """Neighbouring positions of one row, of which the first has no label: nothing predicts it.

    Args:
        batch: labels (b, t).
        row: number of the row, in [0, b).
        begin: first position.
        stop: position after the last; at most t.

    Returns:
        A batch of labels (1, stop - begin) with copies of labels and mask; None where an input of
        the forward cannot be cut at positions.
    """
    count, length = batch.labels.shape
    rows = torch.tensor([row], device=batch.labels.device)
    columns = torch.arange(begin, stop, device=rows.device)[None]
    cut = {name: _of_tokens(x, rows, columns, count, length) for name, x in batch.inputs.items()}
    if any(value is _UNKNOWN for value in cut.values()):
        return None
    labels, mask = batch.labels[row : row + 1, begin:stop], batch.mask[row : row + 1, begin:stop]
    labels, mask = labels.clone(), mask.clone()
    labels[:, 0], mask[:, 0] = IGNORE, False
    return LabelledBatch(cut, labels, mask)


def _cut(batch: LabelledBatch, worth: Int[Tensor, " b"], stop: Int[Tensor, " b"]) -> LabelledBatch:
    """The rows of the greatest worth (the earlier of equals), up to ``stop`` (exclusive)."""
    count, length = batch.labels.shape
    if count <= ROWS and length <= LENGTH:
        return batch
    rows = worth.sort(descending=True, stable=True).indices[:ROWS].sort().values
    first = (stop[rows] - LENGTH).clamp(0, max(length - LENGTH, 0))
    columns = first[:, None] + torch.arange(min(length, LENGTH), device=first.device)
    cut = {name: _of_tokens(x, rows, columns, count, length) for name, x in batch.inputs.items()}
    if count == 1:
        cut |= _of_bounds(batch.inputs, int(first[0]), columns.shape[1])
        cut |= _from_the_start(cut.get("position_ids"))
    if any(value is _UNKNOWN for value in cut.values()):
        columns = torch.arange(length, device=first.device).expand(len(rows), -1)
        cut = {name: _of_rows(x, rows, count) for name, x in batch.inputs.items()}
    if any(value is _UNKNOWN for value in cut.values()):
        return batch
    labels, mask = batch.labels[rows[:, None], columns], batch.mask[rows[:, None], columns]
    # The first token of a row has no position before it that could predict it.
    labels[:, 0], mask[:, 0] = IGNORE, False
    return LabelledBatch(cut, labels, mask)


_UNKNOWN = object()
"""In place of an input that cannot be cut."""


def _of_tokens(value: Any, rows: Tensor, columns: Tensor, count: int, length: int) -> Any:
    """An input with one entry a token (b, t) or a pair of them (b, h, t, t); b may be 1."""
    if not isinstance(value, Tensor):
        return value if value is None or isinstance(value, (bool, int, float, str)) else _UNKNOWN
    if value.dim() not in (2, 4) or value.shape[0] not in (1, count):
        return _UNKNOWN
    rows, columns = rows.to(value.device), columns.to(value.device)
    value = value.expand(count, *value.shape[1:])
    if value.dim() == 2 and value.shape[1] == length:
        return value[rows[:, None], columns]
    if value.dim() == 4 and value.shape[2:] == (length, length):
        # The indexed dimensions come first, and the heads between them last.
        chosen = value[rows[:, None, None], :, columns[:, :, None], columns[:, None, :]]
        return chosen.permute(0, 3, 1, 2)
    return _UNKNOWN


def _of_bounds(inputs: Mapping[str, Any], first: int, length: int) -> dict[str, Any]:
    """Bounds of the documents of a single row, as kernels for packed rows take them."""
    cut: dict[str, Any] = {}
    for side in ("q", "k"):
        bounds = inputs.get(f"cu_seq_lens_{side}")
        if isinstance(bounds, Tensor):
            inside = [bound - first for bound in bounds.tolist() if first < bound < first + length]
            cut[f"cu_seq_lens_{side}"] = lengths = bounds.new_tensor([0, *inside, length])
            if f"max_length_{side}" in inputs:
                cut[f"max_length_{side}"] = int(lengths.diff().max())
    return cut


def _from_the_start(positions: Any) -> dict[str, Any]:
    """Positions whose first document, of which the beginning was cut off, starts as others do.

    Kernels that tell documents apart by positions leave out what lies before the first start.
    """
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return {}
    breaks = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0), value=False)
    of_first = breaks.long().cumsum(-1) == 0
    shifted = positions - positions[:, :1] + positions.amin(-1, keepdim=True)
    return {"position_ids": torch.where(of_first, shifted, positions)}


def _of_rows(value: Any, rows: Tensor, count: int) -> Any:
    """An input with one entry a row, or one for all rows."""
    if not isinstance(value, Tensor):
        return value if value is None or isinstance(value, (bool, int, float, str)) else _UNKNOWN
    if value.dim() >= 2 and value.shape[0] == 1:
        return value
    return value[rows.to(value.device)] if value.dim() and value.shape[0] == count else _UNKNOWN
