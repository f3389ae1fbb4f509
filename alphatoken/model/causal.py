"""Attention pairs of a kernel without a mask: causal, within documents and a window."""

from __future__ import annotations

import torch
from torch import Tensor

from alphatoken.model.protocol import AttentionCall

__all__ = ["CausalStructure"]


class CausalStructure:
    """The mask of a call without one, made block by block and never as a whole.

    Position k attends to t <= k of its own document, if both are tokens, and with a window w only
    to those fewer than w tokens back: the distance is counted in tokens, since kernels that take
    documents leave padding out before they count.
    """

    def __init__(self, call: AttentionCall) -> None:
        self.window, self.documents = call.window, call.documents
        self.device = call.query.device
        self._places: Tensor | None = None
        self._begins: list[int] | None = None

    @property
    def padding(self) -> Tensor | None:
        """(b, t) True at padding; None without documents."""
        return None if self.documents is None else self.documents < 0

    def block(self, rows: slice, columns: slice) -> Tensor:
        """True where a query of ``rows`` attends to a key of ``columns``: (b or 1, 1, 1, k, t)."""
        k = torch.arange(rows.start, rows.stop, device=self.device).unsqueeze(-1)
        t = torch.arange(columns.start, columns.stop, device=self.device)
        allowed = t <= k
        if self.documents is None:
            if self.window is not None:
                allowed &= k - t < self.window
            return allowed[None, None, None]
        own, other = self.documents[:, rows, None], self.documents[:, None, columns]
        allowed = allowed & (own == other) & (own >= 0)
        if self.window is not None:
            places = self._tokens_before()
            allowed &= places[:, rows, None] - places[:, None, columns] < self.window
        return allowed[:, None, None]

    def first_key(self, rows: slice) -> int:
        """No query of ``rows`` attends to a key before this one."""
        if self.documents is None:
            return 0 if self.window is None else max(0, rows.start - self.window + 1)
        if self._begins is None:
            self._begins = self._document_begins(self.documents)
        return min(self._begins[rows])

    def _tokens_before(self) -> Tensor:
        if self._places is None:
            assert self.documents is not None
            self._places = (self.documents >= 0).long().cumsum(-1)
        return self._places

    @staticmethod
    def _document_begins(documents: Tensor) -> list[int]:
        """Earliest begin, over the rows, of the document at each position."""
        places = torch.arange(documents.shape[1], device=documents.device)
        token = documents >= 0
        # Padding may lie inside a document, so a token is compared with the token before it.
        latest = torch.where(token, places, -1).cummax(-1).values
        before = torch.nn.functional.pad(latest[:, :-1], (1, 0), value=-1)
        other = documents.gather(1, before.clamp(min=0)) != documents
        begins = torch.where(token & (other | (before < 0)), places, 0).cummax(-1).values
        return [int(begin) for begin in begins.amin(0).tolist()]
