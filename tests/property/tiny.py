"""A decoder small enough for dense Hessians and for listing every response.

It shares nothing with the library: the oracles of retention, utility and preference are checked on
it from their definitions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.property import tolerance

SCORED = ("key.weight", "value.weight", "mlp.weight")


class TinyDecoder(nn.Module):
    """Embedding, one causal attention head, one tanh layer, head: float64, no positions.

    ``4 width^2 + 2 width vocabulary`` parameters, drawn from a standard normal by ``seed``.
    """

    def __init__(self, vocabulary: int, width: int, seed: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.mlp = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        length = x.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        if attention_mask is not None:
            allowed = allowed & (attention_mask[:, None, :] != 0)
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        weights = torch.softmax(scores.masked_fill(~allowed, -1e30), dim=-1)
        x = x + weights @ self.value(x)
        return self.head(self.dropout(x + torch.tanh(self.mlp(x))))


def tiny(seed: int, vocabulary: int = 3, width: int = 2):
    """Model, forward callable (which must never be shown the labels) and named parameters."""
    model = TinyDecoder(vocabulary, width, seed)

    def forward(batch):
        assert "labels" not in batch
        return model(batch["input_ids"], batch.get("attention_mask"))

    return model, forward, dict(model.named_parameters())


def labelled(rows: list[tuple[list[int], list[int]]], pad_left: bool) -> dict[str, Tensor]:
    """A batch of rows (prompt, response), padded with token 0 on one side."""
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids, mask, labels = [], [], []
    for prompt, response in rows:
        gap = longest - len(prompt) - len(response)
        full = prompt + response
        row = (full, [1] * len(full), [-100] * len(prompt) + response)
        for part, filler, out in zip(row, (0, 0, -100), (ids, mask, labels), strict=True):
            out.append([filler] * gap + part if pad_left else part + [filler] * gap)
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(mask),
        "labels": torch.tensor(labels),
    }


def draw_rows(
    seed: int, lengths: list[tuple[int, int]], vocabulary: int
) -> list[tuple[list[int], list[int]]]:
    """Rows of random tokens with the given (prompt, response) lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(vocabulary, (n,), generator=generator).tolist() for n in pair)
        for pair in lengths
    ]


def close(found: Tensor, wanted: Tensor, tol: float, scale: Tensor | float = 0.0, name="") -> None:
    """Equal up to ``tol`` times the larger of the largest entry and ``scale``, recorded.

    One scale for all entries: those of a Hessian or a gradient are sums over the same passes, in
    which small entries are the remains of large terms.
    """
    largest = max(float(wanted.detach().abs().max()), float(scale))
    tolerance.close(found, wanted, largest, tol, name=name)
